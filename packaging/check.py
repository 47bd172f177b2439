#!/usr/bin/env python3
"""check.py WHEEL --driver DIR --demo PROGRAM [PYTHON...]: what somebody does first with the wheel, in a fresh environment of each Python.

DIR has a libcuda.so.1 (the fake one will do), PROGRAM is one that uses it.
"""
import argparse
import glob
import os
import subprocess
import sys
import tempfile

MARKED = """
import ctypes, gputrace
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
with gputrace.range("step 3"):
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(3 << 20)) == 0
"""
LOADED = """
import gputrace, sys
rows = gputrace.load(sys.argv[1], to="rows")
assert [row["bytes"] for row in rows if row["action"] == "alloc"] == [3 << 20], rows
assert repr(gputrace.report(sys.argv[1])).startswith(sys.argv[1]), gputrace.report(sys.argv[1])
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--demo", nargs="+", required=True)
    parser.add_argument("--python", action="append")
    arguments = parser.parse_args()
    arguments.wheel, arguments.driver = map(os.path.abspath, (arguments.wheel, arguments.driver))
    for python in arguments.python or [sys.executable]:
        with tempfile.TemporaryDirectory(prefix="gputrace-check-") as folder:
            check(arguments, python, folder)
            said = run([python, "--version"], folder, {}).stdout.strip()
        print(f"{os.path.basename(arguments.wheel)}: {said}: installed, recorded, read")


def check(arguments, python, folder):
    inherited = ("GPUTRACE", "PYTHON", "PYTEST", "LD_PRELOAD", "NVTX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    environment["LD_LIBRARY_PATH"] = arguments.driver
    venv = f"{folder}/venv"
    run([python, "-m", "venv", venv], folder, environment)
    environment["PATH"] = f"{venv}/bin:{environment['PATH']}"
    pip = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    run([*pip, arguments.wheel], folder, environment)
    recorded = run(["gputrace", "record", "-o", "demo.gtr", "--", *arguments.demo], folder, environment)
    assert recorded.stderr.splitlines()[-1].endswith("next: gputrace report demo.gtr"), recorded.stderr
    report = run(["python", "-m", "gputrace", "report", "demo.gtr"], folder, environment).stdout
    assert "Memory by owner" in report, report
    run(["gputrace", "record", "-q", "-o", "marked.gtr", "--", "python", "-c", MARKED], folder, environment)
    run(["python", "-c", LOADED, "marked.gtr"], folder, environment)
    # Releases have the server for agents, which ends where nobody speaks to it; an ordinary build names those that have it.
    served = subprocess.run(["gputrace", "mcp"], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert served.returncode == 0 or "make build FEATURES=mcp" in served.stderr, served
    # By hand, the library beside its recorder.
    library = run(["python", "-c", "import gputrace; print(gputrace.library_path())"], folder, environment).stdout.strip()
    by_hand = dict(environment, LD_PRELOAD=library, GPUTRACE_OUTPUT="by-hand.gtr")
    run(arguments.demo, folder, by_hand)
    assert glob.glob(f"{folder}/by-hand.gtr"), "LD_PRELOAD made no trace"
    # Without an environment of its own.
    run([*pip, "--target", f"{folder}/target", arguments.wheel], folder, environment)
    elsewhere = dict(environment, PYTHONPATH=f"{folder}/target")
    said = run(["python", "-m", "gputrace", "--version"], folder, elsewhere).stdout
    assert said.startswith("gputrace "), said


def run(command, folder, environment):
    result = subprocess.run(
        command, cwd=folder, env=environment or None, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace"
    )
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    return result


main()
