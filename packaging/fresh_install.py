#!/usr/bin/env python3
"""fresh_install.py WHEEL --driver DIR --demo PROGRAM [--root DIR] [--python PREFIX]: the commands of docs/INSTALL.md, typed one after the
other in a fresh Debian without Rust or a compiler, with Python 3.14 and with that of PREFIX (bin/python3). What they say must be what
the page shows, but for times and sizes; UPDATE_EXPECT=1 writes the page instead. Status 77: there is no such root here, and why.

The root is made by fresh_root.sh, and entered through namespaces of its own: nothing outside of it is there but the processor.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = f"{ROOT}/docs/INSTALL.md"
BLOCK = re.compile(r"(?s)```console\n(.*?)```")
# Before the output of each command.
MARK = "\x01"
ENTER = """
mount --rbind /dev "$1/dev" && { mount -t proc proc "$1/proc" || mount --rbind /proc "$1/proc"; } || exit 77
exec chroot "$1" /usr/bin/env -i PATH=/usr/bin HOME=/root LANG=C.UTF-8 COLUMNS=100 LD_LIBRARY_PATH=/opt/driver FAKE_CUDA_MEMORY=2GiB bash -c "$2"
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--demo", required=True)
    parser.add_argument("--root", default=f"{ROOT}/target/fresh-root")
    parser.add_argument("--python", help="folder of another Python, with bin/python3")
    arguments = parser.parse_args()
    made = subprocess.run([f"{ROOT}/packaging/fresh_root.sh", arguments.root, *([arguments.python] if arguments.python else [])])
    if made.returncode != 0:
        sys.exit(77 if made.returncode == 77 else 1)
    pythons = ["python3.14", *([f"{arguments.python}/bin/python3"] if arguments.python else [])]
    wrong = 0
    for python in pythons:
        system = prepare(arguments)
        page = open(PAGE).read()
        commands = [line[2:] for block in BLOCK.findall(page) for line in block.splitlines() if line.startswith("$ ")]
        said = typed(system, commands, python)
        blocks = iter(zip(commands, said))
        shown = BLOCK.sub(lambda block: written(block[1], blocks), page)
        if os.environ.get("UPDATE_EXPECT") and python == pythons[0]:
            with open(PAGE, "w") as file:
                file.write(shown)
        elif normal(shown) != normal(page):
            wrong += 1
            print(f"{python}: the page is not what was said:")
            subprocess.run(["diff", "-u", PAGE, "-"], input=shown, text=True)
        print(f"{python}: {len(commands)} commands of {os.path.relpath(PAGE, ROOT)} were typed in a fresh root")
    sys.exit(1 if wrong else 0)


def prepare(arguments):
    """The root with nothing in its folders but what a user has: the wheel, a driver and a program."""
    system = os.path.abspath(f"{arguments.root}/system")
    for folder in ["job", "opt/driver"]:
        shutil.rmtree(f"{system}/{folder}", ignore_errors=True)
        os.makedirs(f"{system}/{folder}")
    shutil.copy(arguments.wheel, f"{system}/job")
    # Where its sources lay is nobody's concern.
    subprocess.run(["objcopy", "--strip-debug", arguments.demo, f"{system}/job/demo"], check=True)
    for library in glob.glob(f"{arguments.driver}/*.so*"):
        shutil.copy(library, f"{system}/opt/driver")
    return system


def typed(system, commands, python):
    """What each command said, in one shell."""
    lines = [f"printf '{MARK}'; {command.replace('python3.14', python)}" for command in commands]
    script = "cd /job; exec 2>&1; " + "\n".join(lines)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "bash", "-c", ENTER, "enter", system, script]
    result = subprocess.run(enter, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    said = result.stdout.split(MARK)[1:]
    if len(said) != len(commands):
        print(f"fresh_install.py: no namespaces of its own here: {result.stderr}", file=sys.stderr)
        sys.exit(77 if result.returncode in (1, 77) and not said else 1)
    return said


def written(block, said):
    """A block of the page with what was said."""
    commands = [line for line in block.splitlines() if line.startswith("$ ")]
    return "```console\n" + "".join(f"{command}\n{next(said)[1]}" for command in commands) + "```"


def normal(page):
    """Without what differs from run to run: times, sizes of files, numbers of processes, and the room that they take; and whether NVML
    was asked before the program ended, which took a few milliseconds: its section is named or not, and a note more or less is taken."""
    page = re.sub(r"\d+(\.\d+)? (ns|µs|ms|s)\b", "TIME", page)
    page = re.sub(r"\d+(\.\d+)? KiB, (\d+ events)", r"SIZE, \2", page)
    page = re.sub(r"pid \d+", "pid N", page)
    page = page.replace(" The driver's own figures (sampled from NVML);", "")
    page = re.sub(r"\d+ notes? of the recording", "NOTES of the recording", page)
    page = re.sub(r"demo\+0x[0-9a-f]+", "demo+N", page)
    return re.sub(r" +", " ", page)


main()
