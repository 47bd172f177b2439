#!/usr/bin/env python3
"""Attaches to one process and detaches, ROUNDS times: afterwards it is as it was before the first.

usage: as_before.py FOLDER [ROUNDS]

FOLDER has `gputrace`, `libgputrace.so` and `fake-cuda` (or FAKE_CUDA names the folder of its libraries). Compares the size of the address
space, descriptors and threads: before the first round with after the last where the library slept (`GPUTRACE=dormant`), and after the
first with after the last where it came late. What the first leaves there is used again: the library, address space for what it notes of
blocks (1.2 GB, of which memory is only what was written), and the C library's arena of the thread that loaded it (64 MiB of address
space), which the program's next thread gets.
"""
import os, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.realpath(__file__))
FOLDER, ROUNDS = os.path.realpath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
FAKE = os.environ.get("FAKE_CUDA") or subprocess.run([f"{FOLDER}/fake-cuda", "--dir"], capture_output=True, text=True, check=True).stdout.strip()
# The program maps and unmaps 2 to 8 MiB all the time, and opens files for that: the least that is seen is what stays.
LOOKS, MOST_KIB = 400, 1024


def once(pid):
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return {
        "KiB": int(status["VmSize"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": sum(1 for _ in open(f"/proc/{pid}/maps")),
    }


def state(pid):
    looks = []
    for _ in range(LOOKS):
        looks.append(once(pid))
        time.sleep(0.001)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def ask(*words):
    said = subprocess.run([f"{FOLDER}/gputrace", *words, "--timeout", "600"], capture_output=True, text=True)
    assert said.returncode == 0, (words, said.stdout, said.stderr)


def rounds(mode, program):
    environment = dict(os.environ, LD_LIBRARY_PATH=FAKE)
    # One arena for all of the program's threads: when each gets one of its own is for the scheduler to decide.
    if mode == "asleep": environment.update(MALLOC_ARENA_MAX="1", LD_PRELOAD=f"{FOLDER}/libgputrace.so", GPUTRACE="dormant")
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout.readline() == "ready\n"
    pid = str(process.pid)
    before = state(pid)
    for number in range(1, ROUNDS + 1):
        ask("attach", "-o", f"{number}.gtr", pid)
        ask("detach", pid)
        # A trace that is being completed has its recorder.
        os.unlink(f"{number}.gtr")
        if number == 1: first = state(pid)
    last = state(pid)
    process.stdin.close()
    end = process.stdout.read().strip()
    assert process.wait() == 0, end
    print(f"{mode}: before {before}, after 1 round {first}, after {ROUNDS} {last}", flush=True)
    since = before if mode == "asleep" else first
    more = {name: last[name] - since[name] for name in last}
    is_as_before = more["KiB"] <= MOST_KIB and more["threads"] <= 0 and more["descriptors"] <= 0
    print("PASS" if is_as_before else "FAIL", f"{mode}, {ROUNDS} rounds: {more}", flush=True)
    return is_as_before


with tempfile.TemporaryDirectory() as work:
    os.chdir(work)
    subprocess.run(["cc", "-O1", "-pthread", "-o", "churn", f"{HERE}/churn.c", f"{FAKE}/libcuda.so.1"], check=True)
    sys.exit(not all([rounds(mode, "./churn") for mode in ("asleep", "late")]))
