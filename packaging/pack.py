#!/usr/bin/env python3
"""pack.py wheel|tarball --program FILE --library FILE --out DIR: what users install, the same bytes for the same files.

Both have the program and libgputrace.so without debug information, which goes to DIR/debug, and the licences of all that is in
them. Neither is made of files that need a C library newer than 2.17, or that are larger than a package may be.
"""
import argparse
import base64
import csv
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEWEST_GLIBC = (2, 17)
MOST_BYTES = 12 << 20
# What is put into time stamps: seconds since 1970 (reproducible-builds.org/docs/source-date-epoch).
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))
LICENCES = ["LICENSE-APACHE", "LICENSE-MIT"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["wheel", "tarball"])
    for name in ["program", "library", "out"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--any-glibc", action="store_true", help="for a trial on this machine alone")
    parser.add_argument("--arch", choices=["x86_64", "aarch64"], default="x86_64", help="the processor that the files are for")
    parser.add_argument("--inside", default="", help="the command that runs programs of another processor, and has its objcopy")
    arguments = parser.parse_args()
    inside = shlex.split(arguments.inside)
    objcopy = [*inside, f"{arguments.arch}-linux-gnu-objcopy"] if inside else ["objcopy"]
    os.makedirs(arguments.out, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        binaries = {}
        for name, path in [("gputrace", arguments.program), ("libgputrace.so", arguments.library)]:
            if not arguments.any_glibc:
                check_glibc(path)
            binaries[name] = stripped(objcopy, path, name, scratch, os.path.join(arguments.out, "debug"))
        if arguments.what == "wheel":
            made = wheel(arguments.arch, binaries)
        else:
            made = tarball(arguments.arch, binaries, manual([*inside, os.path.abspath(arguments.program)], scratch))
    name, data = made
    if len(data) > MOST_BYTES:
        sys.exit(f"pack.py: {name} has {len(data)} bytes, and may have {MOST_BYTES}")
    path = os.path.join(arguments.out, name)
    with open(path, "wb") as file:
        file.write(data)
    print(f"{path}: {len(data) / 2**20:.2f} MiB, {hashlib.sha256(data).hexdigest()}")


def stripped(objcopy, path, name, scratch, debug):
    """The file's bytes without debug information, which is kept in a file of its own that debuggers find by name."""
    os.makedirs(debug, exist_ok=True)
    symbols, bare = os.path.join(debug, name + ".debug"), os.path.join(scratch, name)
    run(*objcopy, "--only-keep-debug", path, symbols)
    os.chmod(symbols, 0o644)
    run(*objcopy, "--strip-all", f"--add-gnu-debuglink={symbols}", path, bare)
    return read(bare)


def check_glibc(path):
    """Refuses what needs newer symbols of the C library than all systems have that the wheel's tag names."""
    needed = run("readelf", "--version-info", "--wide", path)
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([0-9.]+)", needed)]
    newest = max(versions, default=(0,))
    if newest > NEWEST_GLIBC:
        sys.exit(f"pack.py: {path} needs GLIBC_{'.'.join(map(str, newest))}; packages are for 2.17")


def version():
    found = re.search(r'(?m)^version = "(.*)"$', read(f"{ROOT}/Cargo.toml").decode())[1]
    package = re.search(r'__version__ = "(.*)"', read(f"{ROOT}/python/src/gputrace/__init__.py").decode())[1]
    if found != package:
        sys.exit(f"pack.py: Cargo.toml says {found}, and the Python package {package}")
    return found


def wheel(arch, binaries):
    """(name, bytes): https://packaging.python.org/en/latest/specifications/binary-distribution-format/"""
    name, tag = f"gputrace-{version()}", f"py3-none-manylinux_2_17_{arch}"
    info = f"{name}.dist-info"
    files = {}
    source = f"{ROOT}/python/src"
    for file in sorted(os.listdir(f"{source}/gputrace")):
        if file.endswith(".py") or file == "py.typed":
            files[f"gputrace/{file}"] = read(f"{source}/gputrace/{file}")
    for file, data in binaries.items():
        files[f"gputrace/bin/{file}"] = data
    for file in LICENCES:
        files[f"{info}/licenses/{file}"] = read(f"{ROOT}/{file}")
    files[f"{info}/licenses/THIRD-PARTY.txt"] = third_party(arch)
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: pack.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = (
        b"[console_scripts]\ngputrace = gputrace.__main__:main\n\n[pytest11]\ngputrace = gputrace.pytest_plugin\n"
    )
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = record.getvalue().encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, moment())
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100755 if path.startswith("gputrace/bin/") else 0o100644) << 16
            archive.writestr(entry, data)
    return f"{name}-{tag}.whl", packed.getvalue()


def metadata():
    return f"""Metadata-Version: 2.1
Name: gputrace
Version: {version()}
Summary: Where your GPU memory went, why it ran out, and what would have made it fit
License: MIT OR Apache-2.0
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Framework :: Pytest
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.8
Provides-Extra: arrow
Requires-Dist: pyarrow; extra == "arrow"
Provides-Extra: dask
Requires-Dist: distributed>=2023.1; extra == "dask"
Provides-Extra: pandas
Requires-Dist: pandas; extra == "pandas"
Provides-Extra: ray
Requires-Dist: ray>=2.9; extra == "ray"
Description-Content-Type: text/markdown

{read(f"{ROOT}/python/README.md").decode()}"""


def tarball(arch, binaries, pages):
    """(name, bytes): to be unpacked into /usr/local, or anywhere."""
    name = f"gputrace-{version()}-{arch}-linux"
    files = {"bin/gputrace": binaries["gputrace"], "lib/libgputrace.so": binaries["libgputrace.so"], **pages}
    shared = "share/doc/gputrace"
    for file in ["README.md", "CHANGELOG.md", "SECURITY.md", "schemas/FORMAT.md", *LICENCES]:
        files[f"{shared}/{os.path.basename(file)}"] = read(f"{ROOT}/{file}")
    for file in os.listdir(f"{ROOT}/docs"):
        if file.endswith(".md"):
            files[f"{shared}/docs/{file}"] = read(f"{ROOT}/docs/{file}")
    files[f"{shared}/skills/gputrace/SKILL.md"] = read(f"{ROOT}/skills/gputrace/SKILL.md")
    files[f"{shared}/THIRD-PARTY.txt"] = third_party(arch)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime = len(data), EPOCH
            entry.mode = 0o755 if path.startswith(("bin/", "lib/")) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return f"{name}.tar.gz", gzip.compress(packed.getvalue(), 9, mtime=0)


def manual(program, scratch):
    """Manual pages and completions, where systems look for them below a prefix."""
    run(*program, "manual", scratch)
    places = {
        "gputrace.bash": "share/bash-completion/completions/gputrace",
        "_gputrace": "share/zsh/site-functions/_gputrace",
        "gputrace.fish": "share/fish/vendor_completions.d/gputrace.fish",
    }
    files = {to: read(f"{scratch}/completions/{file}") for file, to in places.items()}
    for page in sorted(os.listdir(f"{scratch}/man1")):
        files[f"share/man/man1/{page}"] = read(f"{scratch}/man1/{page}")
    return files


def third_party(arch):
    """The licences of all crates that are in the binaries."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", "gputrace/objects,gputrace/mcp", "--filter-platform", f"{arch}-unknown-linux-gnu"]
    packages = json.loads(run(*command, cwd=ROOT))
    by_id = {package["id"]: package for package in packages["packages"]}
    nodes = {node["id"]: node for node in packages["resolve"]["nodes"]}
    waiting = [package["id"] for package in by_id.values() if package["name"] in ("gputrace", "gputrace-shim")]
    found = set()
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        is_in_it = [edge for edge in nodes[one]["deps"] if any(kind["kind"] is None for kind in edge["dep_kinds"])]
        waiting += [edge["pkg"] for edge in is_in_it]
    others = sorted((by_id[one] for one in found if by_id[one]["source"]), key=lambda p: (p["name"], p["version"]))
    text = ["gputrace has these in it, unchanged, each under its own licence."]
    for package in others:
        text.append(f"\n{'=' * 80}\n{package['name']} {package['version']}: {package['license']}\n{package['repository'] or ''}\n")
        folder = os.path.dirname(package["manifest_path"])
        for file in sorted(os.listdir(folder)):
            if re.match(r"(?i)(licen[cs]e|copying|notice|unlicense)", file) and os.path.isfile(f"{folder}/{file}"):
                text.append(read(f"{folder}/{file}").decode(errors="replace"))
    return "\n".join(text).encode()


def moment():
    return time.gmtime(EPOCH)[:6]


def run(*command, cwd=None):
    if shutil.which(command[0]) is None:
        sys.exit(f"pack.py: {command[0]} is not here (tests/setup.sh installs it)")
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=cwd)
    if result.returncode != 0:
        sys.exit(f"pack.py: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def read(path):
    with open(path, "rb") as file:
        return file.read()


main()
