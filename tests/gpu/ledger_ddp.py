#!/usr/bin/env python3
"""Holds the ledger against the driver in a job of two ranks on two GPUs.

usage: ledger_ddp.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. A small job with DistributedDataParallel says by NVTX marks where it asked the driver for
its free memory; between any two of them the growth of what the process is charged must be explained to 2 %: by what was handed out,
by contexts, code and the like (estimates), and not by `unaccounted`. Prints what each rank held at each mark. PASS and FAIL lines;
about one minute.
"""
import glob, json, os, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
MIB = 1 << 20
PARTS = ("tracked", "rounding", "context", "code", "graph", "pool", "peer", "unaccounted")
failed = 0

JOB = """
import os, time, torch, torch.distributed as dist, torch.nn as nn
rank = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(rank); torch.zeros(1, device="cuda")
def mark(name):
    torch.cuda.synchronize(); time.sleep(0.6)
    # The time of the mark is that of this call's range: the trace has both.
    # One write: two ranks share the terminal.
    facts = "MARK", rank, name, time.clock_gettime_ns(time.CLOCK_MONOTONIC), *torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
    os.write(1, (" ".join(map(str, facts)) + "\\n").encode())
    time.sleep(0.6)
mark("start")
dist.init_process_group("nccl", device_id=torch.device("cuda", rank)); x = torch.ones(1 << 20, device="cuda"); mark("init")
dist.all_reduce(x); mark("all_reduce")
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(12)]).cuda(); ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
for step in range(8):
    torch.cuda.nvtx.range_push(f"step {step}")
    ddp(torch.randn(512, 4096, device="cuda")).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    torch.cuda.nvtx.range_pop()
mark("train")
y = [torch.empty_like(x) for _ in range(2)]; dist.all_gather(y, x); dist.reduce_scatter(torch.empty_like(x), y); dist.barrier(); mark("gather")
if rank == 0: dist.send(x, 1)
else: dist.recv(x, 0)
mark("send")
group = dist.new_group([0, 1]); dist.all_reduce(x, group=group); mark("group")
dist.destroy_process_group()
"""


def check(good, what, detail=""):
    global failed
    failed += not good
    print(f"{'PASS' if good else 'FAIL'}  {what}{': ' if detail else ''}{detail}", flush=True)


def main():
    os.makedirs(WORK, exist_ok=True)
    for old in glob.glob(f"{WORK}/rank*.gtr"): os.remove(old)
    script = os.path.join(WORK, "ddp_marks.py")
    open(script, "w").write(JOB)
    command = [GPUTRACE, "record", "-f", "-o", f"{WORK}/rank%l.%p.gtr", "--", sys.executable, "-m", "torch.distributed.run",
               "--nproc-per-node", "2", "--master-port", "29655", script]
    began = time.time()
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    print(f"      {time.time() - began:.0f} s, status {run.returncode}", run.stderr[-300:] if run.returncode else "")
    marks = {0: [], 1: []}
    for line in run.stdout.splitlines():
        if line.startswith("MARK"):
            _, rank, name, at, free, total, reserved = line.split()
            marks[int(rank)].append((name, int(at), int(total) - int(free), int(reserved)))
    for rank, seen in marks.items():
        traces = sorted(glob.glob(f"{WORK}/rank{rank}.*.gtr"), key=os.path.getsize)
        if not seen or not traces:
            check(False, f"rank {rank}: marks and a trace", f"{len(seen)} marks, {len(traces)} traces: {run.stderr[-500:]}"); continue
        process = json.loads(subprocess.run([GPUTRACE, "summary", "--json", traces[-1]], capture_output=True, text=True).stdout)["processes"][0]
        device = next(d for d in process["devices"] if d["device"] == rank)
        # Times of samples count from the start of the trace; the first mark and `start_ns` of the process are of one clock.
        start = process.get("start_ns")
        samples = [s for s in device["samples"] if s["process_used_bytes"]]
        if start is None or not samples:
            check(False, f"rank {rank}: samples with times", f"start {start}, {len(samples)} samples"); continue
        at = lambda time: max((s for s in samples if s["time_ns"] + start <= time), key=lambda s: s["time_ns"], default=samples[0])
        rows = [(name, at(time), used, reserved) for name, time, used, reserved in seen]
        print(f"rank {rank}  {'mark':12}{'charged':>9}" + "".join(f"{part:>12}" for part in PARTS) + "   device used, torch reserved (MiB)")
        for name, s, used, reserved in rows:
            print(f"        {name:12}{s['process_used_bytes'] / MIB:9.1f}" + "".join(f"{s[part + '_bytes'] / MIB:12.1f}" for part in PARTS)
                  + f"   {used / MIB:.1f} {reserved / MIB:.1f}")
        first, last = rows[0][1], rows[-1][1]
        growth = last["process_used_bytes"] - first["process_used_bytes"]
        rest = last["unaccounted_bytes"] - first["unaccounted_bytes"]
        check(abs(rest) <= 0.02 * growth, f"rank {rank}: growth from start to end explained within 2 %", f"{rest / MIB:.1f} of {growth / MIB:.1f} MiB unexplained")
        for (before, a, *_), (after, b, *_) in zip(rows, rows[1:]):
            grew, rest = b["process_used_bytes"] - a["process_used_bytes"], b["unaccounted_bytes"] - a["unaccounted_bytes"]
            print(f"        {before} -> {after}: grew {grew / MIB:.1f} MiB, unexplained {rest / MIB:.1f} MiB")
        driver = rows[-1][2] - rows[0][2]
        check(abs(driver - growth) <= max(0.02 * growth, 4 * MIB), f"rank {rank}: the program's own mem_get_info grew as much", f"{driver / MIB:.1f} and {growth / MIB:.1f} MiB")
        print(f"        owners {[(o['owner'], round(o['bytes_at_peak'] / MIB, 1)) for o in device['owners']]}")
        print(f"        code {[(c['owner'], round(c['bytes'] / MIB, 1)) for c in device['code']]}, lost {process['lost_events']}")
        nccl = next((o["peak_bytes"] for o in device["owners"] if o["owner"] == "NCCL"), 0)
        print(f"        NCCL's own peak {nccl / MIB:.1f} MiB")
        print(subprocess.run([GPUTRACE, "stats", traces[-1]], capture_output=True, text=True).stdout.split("The driver's own figures")[-1].split("\nPhases")[0][:6000])
    print(f"{failed} failed; traces in {WORK}")
    sys.exit(1 if failed else 0)


main()
