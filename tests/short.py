#!/usr/bin/env python3
"""short.py RELEASE [ROUNDS [CROWD [BEFORE]]]: what recording costs a program that lives two milliseconds (`make bench-short`).

RELEASE is the folder of `gputrace`, `libgputrace.so` and `fake-cuda`, whose device the programs use. A program in C and one in Python allocate
and free ten times. Each is run ROUNDS times in a row (40), then three times CROWD times at once (300): alone, with the library preloaded, and
under `gputrace record`. BEFORE is another such folder, of an older build: its rows are measured in turns with the others, so that both see
the same load. Nothing is asserted. Columns, in milliseconds but for the last two:

  wall       median time of the program itself, until it can be waited for
  all gone   median time until its recorder has ended, too
  processor  median of what the program and everything it started took, user and system
  crowd      median time until all of the crowd and their recorders have ended
  each       what one of the crowd took of a processor, with its recorder
  / row      the crowd's time, as a multiple of what as many take one after the other
  / alone    the crowd's processor time, as a multiple of that of the crowd alone

Recorders are nobody's children: this process asks for orphans (PR_SET_CHILD_SUBREAPER), so that it can wait for them and learn what they took.
Processors are measured in user and system time, which another load changes far less than it changes the walls.
"""
import ctypes, glob, os, resource, statistics, subprocess, sys, tempfile, time

PR_SET_CHILD_SUBREAPER = 36
WALL = 0x40000000  # __WALL of wait4(2): children of any kind
CROWDS = 3

C = r"""
#include <pthread.h>
typedef unsigned long long P;
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *); int cuMemAlloc_v2(P *, unsigned long); int cuMemFree_v2(P);
static void *context;
static void *work(void *unused) { P p; cuCtxSetCurrent(context); for (int i = 0; i < 10; i++) if (!cuMemAlloc_v2(&p, 1 << 20)) cuMemFree_v2(p); return unused; }
int main(void) { pthread_t t; cuInit(0); cuDevicePrimaryCtxRetain(&context, 0); pthread_create(&t, 0, work, 0); return pthread_join(t, 0); }
"""
PYTHON = """
import ctypes as c
d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); p = c.c_ulonglong()
d.cuInit(0); d.cuDevicePrimaryCtxRetain(c.byref(x), 0); d.cuCtxSetCurrent(x)
for i in range(10): d.cuMemAlloc_v2(c.byref(p), c.c_size_t(1 << 20)); d.cuMemFree_v2(p)
"""


def start(words, environment):
    process = os.fork()
    if process == 0:
        try:
            os.dup2(os.open("/dev/null", os.O_RDWR), 1)
            os.dup2(1, 2)
            os.execve(words[0], words, environment)
        finally:
            os._exit(127)
    return process


def wait_for_all():
    """When each process that we started, or that was left to us, could be waited for."""
    ended = {}
    while True:
        try:
            process, _, _ = os.wait4(-1, WALL)
        except ChildProcessError:
            return ended
        ended[process] = time.perf_counter()


def processor():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rows, rounds, crowd, traces):
    """For each row (words, environment): medians of the columns, and the traces of a crowd."""
    runs, crowds = [[] for _ in rows], [[] for _ in rows]
    for _ in range(rounds):
        for (words, environment), columns in zip(rows, runs):
            used, began = processor(), time.perf_counter()
            process = start(words, environment)
            ended = wait_for_all()
            columns.append((ended[process] - began, max(ended.values()) - began, processor() - used))
            clear(traces)
    for _ in range(CROWDS):
        for (words, environment), columns in zip(rows, crowds):
            used, began = processor(), time.perf_counter()
            for _ in range(crowd):
                start(words, environment)
            wait_for_all()
            wall, used = time.perf_counter() - began, (processor() - used) / max(crowd, 1)
            columns.append((wall, used, clear(traces) / 1000))
    return [[1000 * statistics.median(column) for column in [*zip(*one), *zip(*all_of_them)]] for one, all_of_them in zip(runs, crowds)]


def clear(folder):
    traces = glob.glob(os.path.join(folder, "*"))
    for trace in traces:
        os.unlink(trace)
    return len(traces)


def main():
    release = os.path.abspath(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    crowd = int(sys.argv[3]) if len(sys.argv) > 3 else 300
    file = lambda name: os.path.join(release, name)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    driver = subprocess.run([file("fake-cuda"), "--dir"], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as work:
        traces = os.path.join(work, "traces")
        os.mkdir(traces)
        program = os.path.join(work, "short")
        with open(program + ".c", "w") as source:
            source.write(C)
        subprocess.run(["cc", "-g", "-o", program, program + ".c", f"-L{driver}", "-l:libcuda.so.1", "-pthread"], check=True)
        alone = dict(os.environ, LD_LIBRARY_PATH=driver, GPUTRACE_OUTPUT=os.path.join(traces, "%p.gtr"))
        builds = [("", release)] + ([("before: ", os.path.abspath(sys.argv[4]))] if len(sys.argv) > 4 else [])
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}; {os.cpu_count()} processors; {rounds} in a row, {crowd} at once")
        print(f"{'':34}{'wall':>8}{'all gone':>10}{'processor':>11}{'crowd':>9}{'each':>8}{'traces':>8}{'/ row':>8}{'/ alone':>9}")
        for name, words in [("C", [program]), ("Python", [os.path.realpath(sys.executable), "-S", "-c", PYTHON])]:
            rows = [("alone", words, alone)]
            for build, folder in builds:
                rows.append((build + "preloaded", words, dict(alone, LD_PRELOAD=os.path.join(folder, "libgputrace.so"))))
                rows.append((build + "gputrace record", [os.path.join(folder, "gputrace"), "record", "--"] + words, alone))
            measured = measure([(words, environment) for _, words, environment in rows], rounds, crowd, traces)
            for (how, _, _), (wall, gone, used, all_of_them, each, n_traces) in zip(rows, measured):
                ratios = f"{all_of_them / (crowd * gone):8.1f}{each / measured[0][4]:9.1f}"
                print(f"{name + ', ' + how:34}{wall:8.1f}{gone:10.1f}{used:11.1f}{all_of_them:9.0f}{each:8.1f}{n_traces:8.0f}{ratios}")


if __name__ == "__main__":
    main()
