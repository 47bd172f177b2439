#!/usr/bin/env python3
"""Attaches to programs that run on the fake device, and detaches, at random moments: what they compute is what they compute alone.

usage: [ONLY=WORD,...] rounds.py FOLDER [ROUNDS [SECONDS]]

As tests/gpu/rounds.py, which this uses, with programs that need no GPU, each of them late and with a library that slept: a CUDA runtime
inside, 11 to 13 (target/wheels: tests/fetch-wheels.sh), threads that come and go, an NCCL job of four processes, PyTorch's own allocator of a release
(target/oracle: tests/oracle/build.sh), with and without expandable segments, and Pythons: python3, python3.9 to python3.15 as far as PATH has them, and
those of GPUTRACE_TEST_PYTHONS. FOLDER has `gputrace`, `libgputrace.so` and `fake-cuda` (or FAKE_CUDA names the folder of its libraries). A table at the end has a row for each. JOBS=2: so many at once.
"""
import glob, importlib.util, os, re, shutil, subprocess, sys

HERE = os.path.dirname(os.path.realpath(__file__))
TARGET = os.path.join(HERE, "..", "..", "target")
specification = importlib.util.spec_from_file_location("rounds", os.path.join(HERE, "..", "gpu", "rounds.py"))
rounds = importlib.util.module_from_spec(specification)
specification.loader.exec_module(rounds)

FAKE = os.environ.get("FAKE_CUDA") or subprocess.run([os.path.join(rounds.FOLDER, "fake-cuda"), "--dir"], capture_output=True, text=True, check=True).stdout.strip()
PYTHON = """
import ctypes, os, sys, time
library = ctypes.CDLL(sys.argv[1])
library.turn.restype = ctypes.c_ulong
number = 0
while not os.path.exists("stop"):
    began = time.perf_counter()
    value = library.turn(number)
    # As a loader of data does: objects that come and go, and a short wait.
    held = [str(n) for n in range(2000)]
    time.sleep(0.0005)
    print(format(value, "x"), round(1000 * (time.perf_counter() - began), 3), flush=True)
    number += 1
"""


def compiled(name, *options):
    """tests/attach/turns.c."""
    path = os.path.join(rounds.WORK, name)
    if not os.path.exists(path):
        subprocess.run(["cc", "-O1", "-w", "-pthread", "-o", path, f"{HERE}/turns.c", *options], check=True)
    return path


def driver(threads):
    return lambda: ([compiled(f"driver{threads}", f"-DTHREADS={threads}", f"{FAKE}/libcuda.so.1")], {}, 1)


def runtime(major, threads):
    def found():
        inside = glob.glob(f"{TARGET}/wheels/cudart-{major}/**/libcudart_static.a", recursive=True)
        if not inside: return "no such runtime in target/wheels"
        return [compiled(f"runtime{major}", "-DRUNTIME", f"-DTHREADS={threads}", inside[0], "-ldl", "-lrt", "-lm")], {}, 1
    return found


def job():
    program = compiled("job", "-DNCCL", f"{FAKE}/libcuda.so.1", f"{FAKE}/libnccl.so.2")
    # Each call waits inside for the other ranks: somebody is always in one.
    return [program], {"FAKE_NCCL_BLOCKING": "1", "FAKE_NCCL_INIT": "4MiB", "FAKE_NCCL_FIRST": "2MiB"}, 4


def torch(version, settings):
    def found():
        if not os.path.exists(f"{TARGET}/oracle/torch-{version}"): return "no such release in target/oracle"
        sys.argv[1:] = [f"{TARGET}/oracle", f"{TARGET}/wheels", rounds.FOLDER]
        one = importlib.util.spec_from_file_location("living", f"{HERE}/living.py")
        living = importlib.util.module_from_spec(one)
        one.loader.exec_module(living)
        work = os.path.join(rounds.WORK, version)
        os.makedirs(work, exist_ok=True)
        program, environment = living.build(version, work)
        kept = {"LD_LIBRARY_PATH": environment["LD_LIBRARY_PATH"] + os.pathsep + FAKE, "TURNS": "300", "THREADS": "3"}
        return [program], {**kept, **settings}, 1
    return found


def python(path):
    def found():
        library = compiled("libturns.so", "-DLIBRARY", "-shared", "-fPIC", f"{FAKE}/libcuda.so.1")
        return [path, "-c", PYTHON, library], {}, 1
    return found


def pythons():
    """By version."""
    names = ["python3", *(f"python3.{minor}" for minor in range(9, 16))]
    pyenv = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3")))
    listed = [shutil.which(name) for name in names] + pyenv + os.environ.get("GPUTRACE_TEST_PYTHONS", "").split(":")
    found = {}
    for path in filter(None, listed):
        ask = "import sys; print(*sys.version_info[:2])"
        version = subprocess.run([path, "-c", ask], capture_output=True, text=True).stdout.split()
        # A name that stands for nothing here (pyenv's) answers nothing.
        if version and (3, 9) <= tuple(map(int, version)): found.setdefault(tuple(map(int, version)), path)
    return found


PROGRAMS = {
    "PyTorch's allocator 2.11": torch("2.11.0", {}),
    "PyTorch's allocator 2.11, expandable segments": torch("2.11.0", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "CUDA runtime 11 inside": runtime(11, 1),
    "CUDA runtime 12 inside": runtime(12, 1),
    "CUDA runtime 13 inside, threads come and go": runtime(13, 4),
    "driver, threads come and go": driver(4),
    "NCCL job of four": job,
    **{f"Python {major}.{minor}": python(path) for (major, minor), path in sorted(pythons().items())},
}
rounds.PROGRAMS = {f"{name}, {mode}": None for name in PROGRAMS for mode in ("late", "asleep")}


def prepare(number, name):
    name, mode = name.rsplit(", ", 1)
    found = PROGRAMS[name]()
    if isinstance(found, str): return rounds.say("SKIP", f"{name}, {mode}: {found}")
    command, variables, ranks = found
    alone = {"LD_LIBRARY_PATH": FAKE, **variables}
    # Each job its own, of the two that run side by side.
    one = {**alone, **(rounds.ASLEEP if mode == "asleep" else {})}
    named = lambda which: {"FAKE_NCCL_JOB": f"{os.getpid()}.{number}.{which}"} if ranks > 1 else {}
    return command, {**alone, **named("alone")}, {**one, **named("one")}, ranks


rounds.prepare = prepare
rounds.main(int(os.environ.get("JOBS", 1)))
