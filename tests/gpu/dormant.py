#!/usr/bin/env python3
"""What a library that sleeps costs on a GPU: a training step, and calls of the driver.

usage: dormant.py FOLDER [TURNS]

FOLDER has `gputrace` and `libgputrace.so`. The same programs run in turn without the library and with it asleep (`GPUTRACE=dormant`), TURNS times
each (default 6). Of a training step: the median of each run, and their spread with and without; needs PyTorch. Of the driver's calls: the best of
each, in nanoseconds; needs nvcc. NOTE and SKIP lines; PASS says that no file, process or thread came with the library, and that the steps'
results are the same. Exit status 1 with a FAIL.
"""
import glob, importlib.util, os, shutil, statistics, subprocess, sys, tempfile

FOLDER = os.path.abspath(sys.argv[1])
TURNS = int(sys.argv[2]) if len(sys.argv) > 2 else 6
ASLEEP = {"LD_PRELOAD": os.path.join(FOLDER, "libgputrace.so"), "GPUTRACE": "dormant"}
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
WORK = tempfile.mkdtemp()
failed = 0

STEP = """
import os, statistics, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(12) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]).cuda()
optimizer = torch.optim.Adam(model.parameters())
times = []
for number in range(400):
    began = time.perf_counter()
    loss = model(torch.randn(64 + number % 7 * 32, 1024, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(1e6 * statistics.median(times[100:]), loss.item().hex(), len(os.listdir("/proc/self/task")), len(children))
"""
CALLS = r"""
#include <cuda.h>
#include <stdio.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
int main(void) {
    CUdevice device; CUcontext context; CUdeviceptr first, memory; CUevent event;
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) return 1;
    if (cuMemAlloc(&first, 4096) || cuEventCreate(&event, 0) || cuEventRecord(event, 0) || cuEventSynchronize(event)) return 2;
    double best[2] = {1e30, 1e30};
    for (int turn = 0; turn < 30; turn++) {
        double began = now();
        for (int n = 0; n < 200000; n++) cuEventQuery(event);
        double took = (now() - began) / 200000;
        if (took < best[0]) best[0] = took;
        began = now();
        for (int n = 0; n < 200; n++) { if (cuMemAlloc(&memory, 65536) || cuMemFree(memory)) return 3; }
        took = (now() - began) / 200;
        if (took < best[1]) best[1] = took;
    }
    printf("%.2f %.1f\n", best[0], best[1]);
    return 0;
}
"""


def say(verdict, text):
    global failed
    failed += verdict == "FAIL"
    print(verdict, text, flush=True)


def in_turn(command):
    """What the runs printed, without and with the library."""
    found = ([], [])
    for _ in range(TURNS):
        for which, extra in enumerate(({}, ASLEEP)):
            run = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, cwd=WORK)
            if run.returncode:
                return say("FAIL", f"{command[-1]}: {run.stderr[-300:]}")
            found[which].append(run.stdout.split())
    return found


def step():
    if importlib.util.find_spec("torch") is None:
        return say("SKIP", "a training step: no torch")
    found = in_turn([sys.executable, "-c", STEP])
    if not found:
        return
    same = {tuple(line[1:]) for lines in found for line in lines}
    left = glob.glob("/dev/shm/gputrace*") + glob.glob(f"{WORK}/*.gtr")
    say("PASS" if len(same) == 1 and not left else "FAIL", f"a training step: {2 * TURNS} runs end with the same loss, threads and children: {same}; files {left}")
    without, asleep = ([float(line[0]) for line in lines] for lines in found)
    say("NOTE", f"a training step: median of runs {statistics.median(without):.1f} µs ({min(without):.1f} to {max(without):.1f}), asleep {statistics.median(asleep):.1f} ({min(asleep):.1f} to {max(asleep):.1f})")


def calls():
    if not os.path.exists(NVCC):
        return say("SKIP", "calls of the driver: no nvcc")
    with open(f"{WORK}/calls.c", "w") as file:
        file.write(CALLS)
    subprocess.run([NVCC, "-O2", "-o", f"{WORK}/calls", f"{WORK}/calls.c", "-lcuda"], check=True)
    found = in_turn([f"{WORK}/calls"])
    if found:
        for at, name in enumerate(("cuEventQuery", "cuMemAlloc with its cuMemFree")):
            without, asleep = (min(float(line[at]) for line in lines) for lines in found)
            say("NOTE", f"{name}: best {without:.2f} ns, asleep {asleep:.2f} ns: {asleep - without:+.2f}")


calls()
step()
sys.exit(failed != 0)
