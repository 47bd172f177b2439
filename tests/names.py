#!/usr/bin/env python3
"""names.py [--cuda FOLDER] [--nccl FOLDER]: which functions of the newest CUDA and NCCL this library does not know yet.

Of the newest wheels of nvidia-cuda-runtime and nvidia-nccl-cu13 it fetches the headers alone (wheel.py), or takes those in FOLDERs. A
function of the driver that is not in tests/fake-cuda/driver/exports.def is new. One that gives memory out, takes it back or shares
it by its name, and one of NCCL's, must be a row of shim/src/hooks/{cuda_driver,nccl}.rs, or one of the names with a reason at their top.
A line for each that is neither. Exit status 0 where there is none, 1 where there are some, 3 where nothing could be looked at; what
could not be fetched is said and does not count.
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WHEELS = {"cuda": ("nvidia-cuda-runtime", "*/cuda*.h"), "nccl": ("nvidia-nccl-cu13", "*/nccl.h")}
# What gives memory, or code and contexts that take some.
MEMORY = re.compile(
    r"cu(Mem(Alloc|Free|Create|Release|Map|Unmap|Host|Import|Export|Address|Retain|Pool|Prefetch|Advise|Discard)|Ipc(Get|Open|Close)Mem|"
    r"(Mipmapped)?Array(3D)?(Create|Destroy)|Graph(AddMem(Alloc|Free)|AddNode)|External|ImportExternal|Multicast|(Green)?Ctx(Create|Destroy)|"
    r"DevicePrimaryCtx|(Module|Library)(Load|Unload))"
)
# Answers, and settings that move nothing: named by what they do.
QUERY = re.compile(r"cu\w*(Get(?!MemHandle|DevicePointer|MappedBuffer)\w*|Set(Flags|Access)\w*|Granularity\w*|State|Flags)$")


def read(path):
    return open(os.path.join(ROOT, path)).read()


def headers(which, folder):
    """The texts of its headers, and where they are from."""
    if folder is None:
        folder = tempfile.mkdtemp()
        spec, wanted = WHEELS[which]
        fetched = subprocess.run([sys.executable, os.path.join(ROOT, "tests/wheel.py"), spec, folder, wanted], capture_output=True, text=True)
        if fetched.returncode:
            why = (fetched.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"SKIPPED: {spec}: {why}")
            return None
    name = WHEELS[which][1].rsplit("/", 1)[1]
    texts = [open(path, errors="replace").read() for path in sorted(glob.glob(os.path.join(folder, "**", name), recursive=True))]
    if not texts:
        print(f"SKIPPED: {folder} has no {name}")
        return None
    return "\n".join(texts)


def is_like(name, patterns):
    return any(name.startswith(it[:-1]) if it.endswith("*") else name == it for it in patterns)


def cuda(text):
    """What of the driver is new, and what is about memory and has neither row nor reason."""
    table = read("shim/src/hooks/cuda_driver.rs")
    rows = set(re.findall(r"^    fn (cu\w+)\(", table, re.M))
    bases = {re.sub(r"(_v\d+)?(_pt[ds][sz])?$", "", row) for row in rows}
    reasons = re.findall(r"`(cu\w+\*?)`", "".join(line for line in table.splitlines(True) if line.startswith("//!")))
    known = set(re.findall(r"^X\(\w+, (\w+), (\d+),", read("tests/fake-cuda/driver/exports.def"), re.M))
    found = set(re.findall(r"\bPFN_(cu\w+?)_v(\d+)(?:_pt[ds][sz])?\)", text))
    release = max((int(version) for _, version in found), default=0)
    print(f"CUDA {release // 1000}.{release % 1000 // 10}: {len(found)} functions, {len(rows)} rows")
    wrong = [f"{base} of CUDA {int(v) // 1000}.{int(v) % 1000 // 10} is newer than exports.def" for base, v in found - known]
    about_memory = {base for base, _ in found if MEMORY.match(base) and not QUERY.match(base)}
    wrong += [f"{base} is about memory, and neither a row nor excused" for base in about_memory - bases if not is_like(base, reasons)]
    return wrong


def nccl(text):
    """What of NCCL is neither a row nor excused."""
    table = read("shim/src/hooks/nccl.rs")
    rows = set(re.findall(r"^    fn (nccl\w+) /", table, re.M))
    reasons = re.findall(r"^//! \| `(\w+\*?)` \|", table, re.M)
    release = ".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text)[:3])
    found = {name for name in re.findall(r"^\s*(?:ncclResult_t|const char\s?\*)\s+(nccl\w+)\s*\(", text, re.M)}
    print(f"NCCL {release}: {len(found)} functions, {len(rows)} rows")
    return [f"{name} is neither a row nor excused" for name in found - rows if not is_like(name, reasons)]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for which in WHEELS:
        arguments.add_argument(f"--{which}", metavar="FOLDER")
    given = vars(arguments.parse_args())
    wrong, looked = [], False
    for which, check in (("cuda", cuda), ("nccl", nccl)):
        text = headers(which, given[which])
        if text is not None:
            looked = True
            wrong += sorted(check(text))
    print("\n".join(wrong) if wrong else "nothing new" if looked else "nothing could be looked at")
    sys.exit(1 if wrong else 0 if looked else 3)


main()
