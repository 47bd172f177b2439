"""packages.py wheel|tarball FOLDER FAKE: records the fake device's demo with what was unpacked into FOLDER, and reads the trace. Runs under
emulation, started by packages.sh."""
import csv
import hashlib
import base64
import os
import platform
import subprocess
import sys

what, folder, fake = sys.argv[1:]
trace = f"{folder}/demo.gtr"
sys.path.insert(0, folder)
sys.dont_write_bytecode = True


def said(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": folder})
    assert result.returncode == 0, f"{command}: {result.returncode}: {result.stdout}"
    return result.stdout


def listed():
    """The files of the wheel are those of its RECORD."""
    [info] = [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    for path, digest, size in csv.reader(open(f"{folder}/{info}/RECORD")):
        data = open(f"{folder}/{path}", "rb").read()
        known = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert not digest or (digest, size) == (f"sha256={known}", str(len(data))), path


assert platform.machine() == "aarch64", platform.machine()
if what == "wheel":
    listed()
program = [sys.executable, "-m", "gputrace"] if what == "wheel" else [f"{folder}/bin/gputrace"]
version = said(*program, "--version").strip()
said(*program, "record", "-F", "-q", "--no-oom-report", "-o", trace, "--", fake, "demo")
report, checks = said(*program, "report", "--all", trace), said(*program, "doctor", trace)
assert report.count("\n") > 20 and "cuda:0" in report, report
assert "nothing was lost" in checks and "every total, range and block is consistent" in checks, checks
if what == "wheel":
    import gputrace

    assert gputrace.program_path().startswith(folder) and gputrace.library_path().startswith(folder)
    assert version == f"gputrace {gputrace.__version__}"
    rows = gputrace.load(trace, to="rows")
    assert str(gputrace.report(trace)).strip() and len(rows) > 20
else:
    pages = os.listdir(f"{folder}/share/man/man1")
    assert "gputrace.1" in pages and len(pages) > 10, pages
print(f"ok: {version} of the {what} for AArch64: recorded, reported and checked a demo by Python {platform.python_version()} (emulated)")
