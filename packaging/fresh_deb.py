#!/usr/bin/env python3
"""fresh_deb.py DEB --driver DIR --demo PROGRAM [--root DIR]: installs the Debian package in a fresh Debian by dpkg, records as its page
says, from any folder, and removes it without leaving a file behind. Status 77: there is no such root here, and why.

The root is made by mmdebstrap, once, and entered through namespaces of its own.
"""
import argparse
import glob
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Beside the Debian of a release: names of packages that a program of Python needs.
PACKAGES = "python3,man-db"
# The one that this system uses.
MIRROR = "apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Created-By: Packages' | grep -v security | head -n 1"
ENTER = """
mount --rbind /dev "$1/dev" && { mount -t proc proc "$1/proc" || mount --rbind /proc "$1/proc"; } || exit 77
exec chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 LD_LIBRARY_PATH=/opt/driver FAKE_CUDA_MEMORY=2GiB bash -euc "$2"
"""
TRAIN = """
import ctypes
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(3 << 20)) == 0
"""
# Each prints its name when it has held.
SCRIPT = """
list() { find / -xdev -not -path '/proc/*' -not -path '/dev/*' -not -path '/var/lib/dpkg/*' -not -path '/var/cache/*' -not -path '/var/log/*' \
  -not -path '/tmp/*' -not -name 'ld.so.cache*' 2>/dev/null | sort; }
dpkg -P gputrace >/dev/null 2>&1 || true
list >/tmp/before
dpkg -i /tmp/gputrace.deb >/tmp/dpkg.log 2>&1 || { cat /tmp/dpkg.log; exit 1; }
dpkg-query -W -f '${Status}\\n' gputrace | grep -qx 'install ok installed'; echo installed
ldconfig -p | grep -q "libgputrace.so .*=> /lib/$(uname -m)-linux-gnu/libgputrace.so"; echo 'in the cache of the loader'
mkdir -p /tmp/a/job /tmp/b && cd /tmp/a/job
LD_PRELOAD=libgputrace.so GPUTRACE_OUTPUT=/tmp/typed.gtr python3 /tmp/train.py
gputrace report /tmp/typed.gtr | grep -q '3.00 MiB'; echo 'recorded as typed'
# Neither is found by PATH.
cd / && LD_PRELOAD=libgputrace.so GPUTRACE_OUTPUT=/tmp/alone.gtr PATH=/nowhere /usr/bin/python3 /tmp/train.py
test -s /tmp/alone.gtr; echo 'recorded with another PATH'
cd /tmp/b && gputrace record -q --no-oom-report -o demo.gtr -- /tmp/demo >/tmp/demo.log
gputrace report demo.gtr | grep -q '^Verdict: out of memory'; echo 'recorded by the program'
test "$(gputrace library)" = "/usr/lib/$(uname -m)-linux-gnu/libgputrace.so"; echo 'the program knows the library'
man -w gputrace-report | grep -q /usr/share/man/man1/gputrace-report.1.gz; echo 'has manual pages'
grep -q 'License: Apache-2.0' /usr/share/doc/gputrace/copyright; grep -q '^serde ' /usr/share/doc/gputrace/THIRD-PARTY.txt; echo 'has its licences'
for file in bash-completion/completions/gputrace zsh/vendor-completions/_gputrace fish/vendor_completions.d/gputrace.fish; do test -s /usr/share/$file; done
echo 'has completions'
dpkg -r gputrace >/tmp/dpkg.log 2>&1 || { cat /tmp/dpkg.log; exit 1; }
list >/tmp/after; diff /tmp/before /tmp/after; echo 'removed without a trace'
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("deb")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--demo", required=True)
    parser.add_argument("--root", default=f"{ROOT}/target/deb-root")
    arguments = parser.parse_args()
    described(arguments.deb)
    made(arguments.root)
    tried(arguments)


def described(deb):
    """What it says of itself, and where its files lie."""
    fields = said("dpkg-deb", "--field", deb)
    for field in ("Package: gputrace", "Architecture: amd64", "Section: devel", "Maintainer: ", "Depends: libc6"):
        assert field in fields, f"{field} is missing:\n{fields}"
    files = {line.split()[5]: line.split()[:2] for line in said("dpkg-deb", "--contents", deb).splitlines()}
    assert files["./usr/bin/gputrace"] == ["-rwxr-xr-x", "0/0"], files
    assert files["./usr/lib/x86_64-linux-gnu/libgputrace.so"] == ["-rw-r--r--", "0/0"], files
    assert not [path for path in files if "python" in path.lower() and not path.endswith(".md")], "the Python package is the wheel's"
    assert "activate-noawait ldconfig" in said("dpkg-deb", "--info", deb, "triggers")
    print(f"{os.path.basename(deb)}: {len(files)} files and folders")


def made(root):
    """A Debian of the mirror that this system uses."""
    if os.path.exists(f"{root}/ready"):
        return
    for tool in ("mmdebstrap", "unshare"):
        shutil.which(tool) or skip(f"no {tool} (apt-get install mmdebstrap util-linux)")
    mirror = os.environ.get("DEBIAN_MIRROR") or said("sh", "-c", MIRROR).strip()
    mirror or skip("no mirror of Debian is set up here; DEBIAN_MIRROR=URL names one")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "--aptopt=APT::Install-Recommends \"false\"",
               # They would be left out, and with them the manual pages of any package.
               "--dpkgopt=path-include=/usr/share/man/*", "stable", f"{root}/system", mirror]
    with open(f"{root}/log", "w") as log:
        if subprocess.run(command, stdout=log, stderr=log).returncode != 0:
            skip(f"no Debian from {mirror}: {root}/log")
    open(f"{root}/ready", "w").close()


def tried(arguments):
    system = os.path.abspath(f"{arguments.root}/system")
    shutil.rmtree(f"{system}/opt/driver", ignore_errors=True)
    os.makedirs(f"{system}/opt/driver")
    for library in glob.glob(f"{arguments.driver}/*.so*"):
        shutil.copy(library, f"{system}/opt/driver")
    for name in os.listdir(f"{system}/tmp"):
        path = f"{system}/tmp/{name}"
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    shutil.copy(arguments.deb, f"{system}/tmp/gputrace.deb")
    shutil.copy(arguments.demo, f"{system}/tmp/demo")
    with open(f"{system}/tmp/train.py", "w") as file:
        file.write(TRAIN)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "bash", "-c", ENTER, "enter", system, SCRIPT]
    result = subprocess.run(enter, capture_output=True, text=True, errors="replace")
    print(result.stdout, end="")
    if not result.stdout and result.returncode in (1, 77):
        skip(f"no namespaces of its own here: {result.stderr}")
    assert result.returncode == 0, f"status {result.returncode}:\n{result.stderr}"


def skip(why):
    print(f"SKIPPED: the Debian package in a fresh root: {why}")
    sys.exit(77)


def said(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


main()
