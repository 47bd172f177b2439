#!/usr/bin/env python3
"""A training loop in greenlets, alone and recorded: the same result, and each allocation under the line that made it.

usage: coroutines.py FOLDER

FOLDER has `gputrace` and `libgputrace.so`. One GPU, PyTorch and greenlet; half a minute. PASS and FAIL lines; exit status 0 only without FAIL.
A greenlet has a stack of its own, which the library meets for the first time in the middle of an allocation.
"""
import json, os, subprocess, sys, tempfile

FOLDER = os.path.abspath(sys.argv[1])
PROGRAM = r'''
import greenlet, torch
kept = []
def feed(n):
    for k in range(20):
        kept.append(torch.empty((n + 1) << 20, dtype=torch.uint8, device="cuda"))  # kept
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        hub.switch(n)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
hub = greenlet.getcurrent()
turns = [0] * 200
flock = [greenlet.greenlet(feed) for _ in range(200)]
for _ in range(20):
    for n, one in enumerate(flock):
        turns[one.switch(n % 8)] += 1
print(turns[:8], f"{float(sum(p.grad.double().abs().sum() for p in model.parameters())):.6e}", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
'''
LINE = 1 + PROGRAM.strip().splitlines().index(next(line for line in PROGRAM.strip().splitlines() if line.endswith("# kept")))
KEPT = sum(20 * ((n % 8 + 1) << 20) for n in range(200))
failed = []


def say(is_good, text):
    print("PASS" if is_good else "FAIL", text, flush=True)
    if not is_good: failed.append(text)


with tempfile.TemporaryDirectory() as work:
    program, trace = os.path.join(work, "train.py"), os.path.join(work, "trace.gtr")
    open(program, "w").write(PROGRAM.strip() + "\n")
    alone = subprocess.run([sys.executable, program], capture_output=True, text=True)
    recorded = subprocess.run([f"{FOLDER}/gputrace", "record", "-q", "-o", trace, "--", sys.executable, program], capture_output=True, text=True)
    say(alone.returncode == 0 == recorded.returncode and alone.stdout == recorded.stdout, f"the same: {recorded.stdout.strip()} {recorded.stderr[-300:]}")
    said = json.loads(subprocess.run([f"{FOLDER}/gputrace", "report", "--all", "--json", trace], capture_output=True, text=True).stdout)
    shown = json.dumps(said)
    tree = subprocess.run([f"{FOLDER}/gputrace", "stats", trace], capture_output=True, text=True).stdout
    print("\n".join(tree.splitlines()[:30]))
    say(f"train.py:{LINE}" in shown, f"the line that keeps {KEPT >> 20} MiB is named: train.py:{LINE}")
    checked = subprocess.run([f"{FOLDER}/gputrace", "doctor", trace], capture_output=True, text=True)
    say(checked.returncode == 0, f"doctor: {(checked.stdout.strip().splitlines() or [checked.stderr])[-1]}")
sys.exit(bool(failed))
