#!/usr/bin/env python3
"""For how long `gputrace stacks` stops the threads of a program, and whether they run on when it is killed meanwhile.

usage: stacks.py GPUTRACE [THREADS] [DUMPS]      default: 32 threads, 50 dumps

A program has THREADS threads: a third of them compute without the interpreter's lock, a third compete for it, a third wait. It is
read DUMPS times. The table has one row per kind: how often a thread was read, how often it was stopped for that, and for how long (at
most: from when it was last seen to run until it was let go). Then the reading is killed (SIGKILL) at random moments, and every thread must go on. Last,
the program's own calls are looked at: none may have ended because it was read. Exit status 0 if all threads ran on. No time is
asserted: on a machine with more threads that run than processors, the reader itself may lose its processor while a thread stands.
"""
import os, random, re, subprocess, sys, time

PROGRAM = r'''
import hashlib, select, sys, threading, time
n = int(sys.argv[1])
counts, data, end = [0] * n, bytes(1 << 20), threading.Event()
def compute(at):
    while True:
        hashlib.sha256(data).digest()
        counts[at] += 1
def compete(at):
    while True:
        counts[at] += 1
def wait(at):
    while not end.wait(0.5): counts[at] += 1
for at in range(n):
    threading.Thread(target=(compute, compete, wait)[at % 3], args=(at,), daemon=True).start()
print("ready", flush=True)
while True:
    sys.stdin.readline()
    print(*counts, flush=True)
'''


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def counts(program):
    program.stdin.write("\n")
    program.stdin.flush()
    return [int(word) for word in program.stdout.readline().split()]


def all_go_on(program):
    before = counts(program)
    while any(now <= then for now, then in zip(counts(program), before)):
        if program.poll() is not None: return False
        time.sleep(0.2)
    tasks = f"/proc/{program.pid}/task"
    return all("TracerPid:\t0\n" in open(f"{tasks}/{task}/status").read() for task in os.listdir(tasks))


def main():
    gputrace = os.path.abspath(sys.argv[1])
    n_threads, n_dumps = (int(word) for word in (sys.argv[2:] + ["32", "50"][len(sys.argv) - 2:])[:2])
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(n_threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "ready\n"
    read, stopped, ends, took = {}, {}, {}, []
    for _ in range(n_dumps):
        began = time.monotonic()
        text = subprocess.run([gputrace, "stacks", "--all", str(program.pid)], capture_output=True, text=True, check=True).stdout
        took.append(time.monotonic() - began)
        for thread in re.split(r"\n  thread ", text)[1:]:
            kind = next((name for name in ("compute", "compete", "wait") if f"\n    {name} (" in thread), "main")
            read[kind] = read.get(kind, 0) + 1
            ends[kind] = ends.get(kind, 0) + ("    ..." in thread or "no native frames" in thread)
            if found := re.search(r"stopped for (\d+) µs", thread.splitlines()[0]):
                stopped.setdefault(kind, []).append(int(found[1]))
    print(f"{n_threads} threads, {n_dumps} dumps, {os.cpu_count()} processors; a dump took {percentile(took, .5) * 1000:.0f} ms (median, with names)")
    print(f"{'threads that':14} {'read':>6} {'stopped':>8} {'p50 µs':>8} {'p99 µs':>8} {'max µs':>8} {'over 1 ms':>10} {'cut':>5}")
    every = [time for times in stopped.values() for time in times]
    for kind, times in [*((kind, stopped.get(kind, [])) for kind in read), ("all", every)]:
        figures = [percentile(times, .5), percentile(times, .99), max(times)] if times else ["-"] * 3
        n = read.get(kind, sum(read.values()))
        print(f"{kind:14} {n:6} {len(times):8} {figures[0]:>8} {figures[1]:>8} {figures[2]:>8} {sum(time > 1000 for time in times):10} {ends.get(kind, sum(ends.values())):5}")
    good = all_go_on(program)
    print("PASS" if good else "FAIL", "every thread goes on after the dumps, and none is traced")
    for _ in range(200):
        reader = subprocess.Popen([gputrace, "stacks", str(program.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.random() * 0.04)
        reader.kill()
        reader.wait()
    killed = all_go_on(program)
    print("PASS" if killed else "FAIL", "every thread goes on after 200 readers were killed at random moments")
    program.kill()
    sys.exit(not (good and killed))


main()
