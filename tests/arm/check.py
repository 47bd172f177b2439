#!/usr/bin/env python3
"""Runs what was built for AArch64 under emulation, and compares it with x86-64. Started by run.sh.

    tests/arm/check.py FOLDER RELEASE [PART...]

FOLDER is the one of `setup.sh`; RELEASE has the programs of this machine. The parts are those of `PARTS`, all unless some are named.
Exits with 1 if anything differs.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER, RELEASE = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
HERE = Path(__file__).resolve().parent
TARGET = FOLDER / "target/aarch64-unknown-linux-gnu"
ARM = TARGET / "release"
WORK = FOLDER / "target/check"

# Test programs (`tests/programs`): processes, threads, signals, ways to end, and each way to reach the driver. `address_rules` is not
# there: which address comes next depends on mappings that the emulator does not show.
PROGRAMS = [
    "driver_dlsym", "driver_families", "execs", "forks", "graphs", "ipc", "killed", "killed_at_once", "leak",
    "nccl_ring", "odd_calls", "proc_address", "quick_exit", "runtime_families", "threads", "torch_blocks",
]

# Seconds that an emulated recorder may take to make its file.
PATIENCE = 60

failures = []
n_checks = 0


def run(command, timeout=300, **options):
    """Here."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, **options)


def inside(*command, how="run", timeout=600):
    """Under emulation."""
    return run([HERE / "inside.sh", FOLDER, how, *command], timeout=timeout)


def check(what, is_right, detail=""):
    global n_checks
    n_checks += 1
    print(f"{'ok    ' if is_right else 'FAILED'} {what}", flush=True)
    if not is_right:
        failures.append(what)
        print(detail[-3000:], flush=True)


def normal(report):
    """A report without what no two runs share: addresses, times, numbers of processes, folders, and the widths of columns."""
    report = re.sub(r"0x[0-9a-f]+", "ADDRESS", report)
    report = re.sub(r"\b[0-9.]+ (ns|µs|ms|s|min)\b", "TIME", report)
    report = re.sub(r"\(pid \d+\): .*", "(pid)", report)
    report = re.sub(r"[^ (]*/(?=[^/ ]+)", "", report)
    report = re.sub(r"demo-\d.gtr", "TRACE", report)
    # The emulator is the process's program, as far as the kernel knows: the program itself is named as a library is.
    report = re.sub(r"\bdemo(-\d)?\b(?!\.)", "application", report)
    lines = [re.sub(r" +", " ", line).strip() for line in report.splitlines()]
    # Samples of NVML are taken by the clock.
    by_clock = re.compile(r"events \d|The driver's own figures|.*what the driver charged|\d+ notes? of the recording|next ")
    return [line for line in lines if not by_clock.match(line)]


def library(folder, name):
    found = sorted(folder.glob(f"build/gputrace-fake-cuda-*/out/{name}"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent


def record(gputrace, runs, trace, command, *options):
    trace.unlink(missing_ok=True)
    record = [gputrace, "record", "-F", "-q", "--no-oom-report", "-o", trace, *options, "--", *command]
    return runs(*record)


def demo():
    """The built-in demo: its report has the same rows on both."""
    here = lambda *command: [str(word) for word in command]
    emulated = lambda *command: [str(word) for word in (HERE / "inside.sh", FOLDER, "run", *command)]
    reports = []
    for prefix, programs in [(here, RELEASE), (emulated, ARM)]:
        number = len(reports)
        program, trace = WORK / f"demo-{number}", WORK / f"demo-{number}.gtr"
        sources = [HERE.parent / "programs/demo.c", HERE / "waits.c"]
        built = run(prefix("cc", "-O1", "-g", "-Dmain=demo", "-o", program, *sources, "-ldl"))
        check("the demo is built", built.returncode == 0, built.stderr)
        trace.unlink(missing_ok=True)
        options = ["record", "-F", "-q", "--no-oom-report", "-o", trace]
        command = ["env", "FAKE_CUDA_MEMORY=2GiB", programs / "gputrace", *options, "--", programs / "fake-cuda", program]
        process = subprocess.Popen(prefix(*command), stdin=subprocess.PIPE)
        # The recorder has found the process once it writes what it knows of it.
        while process.poll() is None and not (trace.exists() and trace.stat().st_size > 8):
            time.sleep(0.05)
        process.stdin.close()
        check(f"the demo ends well ({programs.parent.name})", process.wait(300) == 0)
        report = run(prefix(programs / "gputrace", "report", "--all", trace))
        reports.append(normal(report.stdout))
        # A trace is read on either.
        other = run([RELEASE / "gputrace", "report", "--all", trace])
        check("the trace says the same on x86-64", normal(other.stdout) == reports[-1], other.stdout + other.stderr)
    x86, arm = reports
    difference = [f"- {line}" for line in x86 if line not in arm] + [f"+ {line}" for line in arm if line not in x86]
    check("the demo's report is that of x86-64", not difference and len(x86) > 20, "\n".join(difference))


def links(route, cuda):
    """What a program of this route is linked with; None where that is not there."""
    if route == "cudart":
        runtime = FOLDER / "wheels/nvidia/cuda_runtime/lib/libcudart.so.12"
        return f"{runtime} -Wl,-rpath,{runtime.parent}" if runtime.exists() else None
    return {
        "none": "",
        "cuda": f"{cuda}/libcuda.so.1",
        "nccl": f"{cuda}/libnccl.so.2 {cuda}/libcuda.so.1",
        "torch": f"{cuda}/torch/libc10_cuda.so {cuda}/torch/libc10.so -Wl,-rpath-link,{cuda} -Wl,-rpath,{cuda}/torch",
    }[route]


def programs():
    """Test programs end as they do alone, and nothing of them is lost."""
    cuda = library(ARM, "libcuda.so.1")
    fake = ARM / "fake-cuda"
    for name in PROGRAMS:
        source, program = HERE.parent / f"programs/{name}.c", WORK / name
        route = re.search(r"//# Link: (\w+)", source.read_text())[1]
        link = links(route, cuda)
        if link is None:
            print(f"SKIPPED {name}: no CUDA runtime for AArch64 (pip could not fetch nvidia-cuda-runtime-cu12)")
            continue
        built = inside("sh", "-c", f"cc -std=gnu11 -O1 -g -fno-builtin-malloc -pthread -o {program} {source} {link} -ldl")
        if built.returncode:
            check(f"{name} is built", False, built.stderr)
            continue
        settings = re.findall(r"//# Env: (\S+)", source.read_text())
        alone = inside("env", *settings, fake, program)
        folder = WORK / f"{name}.traces"
        run(["rm", "-rf", folder])
        folder.mkdir()
        # Not what is recorded: `env` is of this machine's processor.
        with_settings = lambda *command: inside("env", *settings, *command)
        recorded = record(ARM / "gputrace", with_settings, folder / "t.gtr", [fake, program])
        same = (recorded.returncode, recorded.stdout) == (alone.returncode, alone.stdout)
        check(f"{name} ends as alone ({alone.returncode})", same, f"{alone}\n{recorded}")
        time.sleep(1)  # Recorders of children end a little later than the program.
        traces = sorted(folder.glob("*.gtr"))
        for trace in traces:
            doctor = run([RELEASE / "gputrace", "doctor", trace])
            whole = "nothing was lost" in doctor.stdout and "every total, range and block is consistent" in doctor.stdout
            check(f"{name}: {trace.name} is whole", whole, doctor.stdout + doctor.stderr)
        check(f"{name} has traces", bool(traces), recorded.stderr)


def pythons():
    """CPython's frames are those that it says itself."""
    found = sorted((FOLDER / "debian/opt/pythons").glob("*/bin/python3.*[0-9]"))
    if not found:
        print("SKIPPED Python: pythons.sh unpacked none")
    for interpreter in found:
        python(interpreter.parent.parent.name, interpreter.name)


def python(suite, name):
    home = f"/opt/pythons/{suite}"
    trace = WORK / f"{suite}-{name}.gtr"
    trace.unlink(missing_ok=True)
    options = ["record", "-F", "-q", "--no-oom-report", "-o", trace]
    program = [f"{home}/bin/{name}", HERE / "stacks.py"]
    command = ["env", f"PYTHONHOME={home}", ARM / "gputrace", *options, "--", ARM / "fake-cuda", *program]
    command = [str(word) for word in (HERE / "inside.sh", FOLDER, "run", *command)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said = json.loads(process.stdout.readline() or "{}")
    process.stdin.close()
    check(f"{name} of {suite} ends well", process.wait(300) == 0 and len(said) > 20)
    # The program may end before its recorder, which is emulated too, has written to the file. From then on commands wait for it.
    began = time.monotonic()
    while not (trace.exists() and trace.stat().st_size > 8) and time.monotonic() < began + PATIENCE:
        time.sleep(0.05)
    # Bytes that are held by each stack at the peak: the end, as nothing is given back.
    folded = run([RELEASE / "gputrace", "export", "--format", "folded", trace])
    found = {}
    for line in folded.stdout.splitlines():
        stack, held = line.rsplit(" ", 1)
        frames = re.findall(r"([^;]+?) \((?:stacks|threading)\.py:(\d+)\)", stack)
        found[tuple((name.split(".")[-1], int(at)) for name, at in frames)] = int(held)
    expected = {}
    for size, frames in said.items():
        stack = tuple((name.split(".")[-1], at) for _, at, name in reversed(frames))
        expected[stack] = expected.get(stack, 0) + int(size)
    differing = set(found.items()) ^ set(expected.items())
    check(f"{name} of {suite}: each of {len(expected)} stacks is the interpreter's own", not differing, f"{folded.stderr}{differing}")


def tests():
    """The ring's own tests, and stacks against libgcc's unwinder, through code with and without signed return addresses."""
    plain, protected = "/opt/arm/bin:/usr/bin:/bin", "/opt/arm/protected:/usr/bin:/bin"
    # Two of the tests take many minutes here: one loads and unloads libraries meanwhile, the other is all of them once more.
    slow = ["--skip", "captures_go_on", "--skip", "without_dl_find_object"]
    cases = [
        ("gputrace-ring", ["--lib"], [(plain, None)]),
        ("gputrace-stack-harness", ["--test", "native"], [(plain, "libstack_harness.so"), (protected, "libstack_harness.so")]),
    ]
    for package, target, ways in cases:
        built = inside("cargo", "test", "--offline", "--no-run", "-p", package, *target, how="build", timeout=3600)
        found = re.search(r"Executable .*\((.*)\)", built.stderr)
        if not found:
            check(f"the tests of {package} are built", False, built.stderr)
            continue
        program = Path(found[1])
        for path, preload in ways:
            # On AArch64 the loader has no room for thread-local memory of such an alignment in a library that comes late.
            environment = [f"PATH={path}", *([f"LD_PRELOAD={program.parent / preload}"] if preload else [])]
            result = inside("env", *environment, program, "--test-threads", "2", *slow, timeout=1200)
            check(f"the tests of {package} pass ({path.split(':')[0]})", result.returncode == 0, result.stdout + result.stderr)
            print("      " + next((line for line in result.stdout.splitlines() if line.startswith("test result")), ""))


PARTS = {"demo": demo, "programs": programs, "pythons": pythons, "tests": tests}


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[3:] or PARTS:
        before = n_checks
        PARTS[name]()
        print(f"{name}: {n_checks - before} checks, {len(failures)} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
