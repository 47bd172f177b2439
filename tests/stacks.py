#!/usr/bin/env python3
"""For how long `gputrace stacks` stops the threads of a program, and whether they run on when it is killed meanwhile.

usage: stacks.py GPUTRACE [THREADS] [DUMPS] [PY_SPY]      default: 32 threads, 100 dumps (`make bench-stacks`); needs python3, and cc for the second table

A program has THREADS threads: some compute without the interpreter's lock, some compete for it, some wait, and some watch the clock. It is
read DUMPS times. The first table is what gputrace says: how often a thread of a kind was read, how often it was stopped for that, and for how
long (at most: from when it was last seen to run until it was let go). The second is what the program saw: the longest time in which a
watching thread did not run, during each dump, and during as many times without one. PY_SPY, a program, is tried likewise (`py-spy dump`).
Then the reading is killed (SIGKILL) at random moments, and every thread must go on. Exit status 0 if all threads ran on. No time is asserted:
with more threads that run than processors, a thread loses its processor for milliseconds anyway, and so may the reader while a thread stands.
"""
import os, random, re, subprocess, sys, tempfile, time

# Gaps of a thread that does nothing but look at the clock. A page of the ring of gaps is read while it is written: each entry is one word.
WATCH = r"""
#include <stdint.h>
#include <time.h>
static uint64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
void watch(volatile uint64_t *gaps, long room)
{
    uint64_t last = now();
    for (long n = 0;;) {
        uint64_t time = now(), gap = time - last;
        if (gap > 5000 && n + 2 <= room) { gaps[n + 1] = time; gaps[n] = gap; n += 2; }
        last = time;
    }
}
"""
PROGRAM = r'''
import ctypes, hashlib, sys, threading, time
n, n_watch, library = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ROOM = 1 << 20
counts, data, end = [0] * n, bytes(1 << 20), threading.Event()
gaps = [(ctypes.c_uint64 * ROOM)() for _ in range(n_watch)]
def compute(at):
    while True:
        hashlib.sha256(data).digest()
        counts[at] += 1
def compete(at):
    while True:
        counts[at] += 1
def wait(at):
    while not end.wait(0.5): counts[at] += 1
def watch(at):
    ctypes.CDLL(library).watch(gaps[at], ctypes.c_long(ROOM))
for at in range(n_watch):
    threading.Thread(target=watch, args=(at,), daemon=True).start()
for at in range(n_watch, n):
    threading.Thread(target=(compute, compete, wait)[at % 3], args=(at,), daemon=True).start()
print("ready", flush=True)
while True:
    words = sys.stdin.readline().split()
    if words[0] == "counts":
        print(*counts[n_watch:], flush=True)
    else:
        began, ended = int(words[1]), int(words[2])
        longest = 0
        for known in gaps:
            for at in range(0, ROOM, 2):
                if not known[at]: break
                # It ended at known[at + 1], and some of it was in that time.
                if known[at + 1] > began and known[at + 1] - known[at] < ended: longest = max(longest, known[at])
        print(longest, flush=True)
'''


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def ask(program, *words):
    program.stdin.write(" ".join(map(str, words)) + "\n")
    program.stdin.flush()
    return [int(word) for word in program.stdout.readline().split()]


def all_go_on(program):
    before = ask(program, "counts")
    while any(now <= then for now, then in zip(ask(program, "counts"), before)):
        if program.poll() is not None: return False
        time.sleep(0.2)
    tasks = f"/proc/{program.pid}/task"
    return all("TracerPid:\t0\n" in open(f"{tasks}/{task}/status").read() for task in os.listdir(tasks))


def start(n_threads, n_watch, library):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(n_threads), str(n_watch), library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "ready\n"
    time.sleep(0.5)
    return program


def timed(command):
    """What it printed, and when it began and ended, in nanoseconds of the clock that the program has."""
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text, began, time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def own_view(name, times, program):
    """A row of what the program saw: times are pairs of begin and end."""
    longest = [ask(program, "gaps", began, ended)[0] / 1000 for began, ended in times]
    took = percentile([ended - began for began, ended in times], .5) / 1e6
    print(f"{name:18} {len(times):6} {took:9.1f} {percentile(longest, .5):8.0f} {percentile(longest, .99):8.0f} {max(longest):8.0f} {sum(gap > 1000 for gap in longest):10}")


def main():
    gputrace = os.path.abspath(sys.argv[1])
    n_threads, n_dumps = (int(word) for word in (sys.argv[2:4] + ["32", "100"][len(sys.argv[2:4]):]))
    py_spy = sys.argv[4] if len(sys.argv) > 4 else None
    with tempfile.TemporaryDirectory() as work:
        library = os.path.join(work, "watch.so")
        try:
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=WATCH, text=True, check=True)
            n_watch = max(1, min(4, os.cpu_count() // 4))
        except (OSError, subprocess.CalledProcessError):
            n_watch = 0
            print("without cc there are no threads that watch the clock")
        measure(gputrace, py_spy, start(n_threads, n_watch, library), n_threads, n_watch, n_dumps)


def measure(gputrace, py_spy, program, n_threads, n_watch, n_dumps):
    dump = [gputrace, "stacks", "--all", str(program.pid)]
    read, stopped, ends, times, others, alone = {}, {}, {}, [], [], []
    for _ in range(n_dumps):
        text, began, ended = timed(dump)
        times.append((began, ended))
        for thread in re.split(r"\n  thread ", text)[1:]:
            kind = next((name for name in ("compute", "compete", "wait", "watch") if f"\n    {name} (" in thread), "main")
            read[kind] = read.get(kind, 0) + 1
            ends[kind] = ends.get(kind, 0) + ("    ..." in thread or "no native frames" in thread)
            if found := re.search(r"stopped for (\d+) µs", thread.splitlines()[0]):
                stopped.setdefault(kind, []).append(int(found[1]))
        # In turn, so that all meet the same machine.
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        time.sleep((times[-1][1] - times[-1][0]) / 1e9)
        alone.append((began, time.clock_gettime_ns(time.CLOCK_MONOTONIC)))
        if py_spy:
            others.append(timed([py_spy, "dump", "--pid", str(program.pid)])[1:])
    took = percentile([ended - began for began, ended in times], .5) / 1e6
    load = open("/proc/loadavg").read().split()[0]
    print(f"{n_threads} threads, {n_dumps} dumps, {os.cpu_count()} processors, load {load}; a dump took {took:.0f} ms (median, with names)")
    print(f"{'threads that':18} {'read':>6} {'stopped':>9} {'p50 µs':>8} {'p99 µs':>8} {'max µs':>8} {'over 1 ms':>10} {'cut':>5}")
    every = [time for times in stopped.values() for time in times]
    for kind, stops in [*((kind, stopped.get(kind, [])) for kind in read), ("all", every)]:
        figures = [percentile(stops, .5), percentile(stops, .99), max(stops)] if stops else ["-"] * 3
        n = read.get(kind, sum(read.values()))
        print(f"{kind:18} {n:6} {len(stops):9} {figures[0]:>8} {figures[1]:>8} {figures[2]:>8} {sum(stop > 1000 for stop in stops):10} {ends.get(kind, sum(ends.values())):5}")
    if n_watch:
        print(f"\nLongest time in which one of {n_watch} threads that watch the clock did not run")
        print(f"{'during':18} {'times':>6} {'took ms':>9} {'p50 µs':>8} {'p99 µs':>8} {'max µs':>8} {'over 1 ms':>10}")
        own_view("nothing", alone, program)
        own_view("gputrace stacks", times, program)
        if py_spy:
            own_view("py-spy dump", others, program)
        print()
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
