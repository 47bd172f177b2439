#!/usr/bin/env python3
"""Jobs of two ranks that hang, or are slow and healthy, asked with `gputrace ranks` while they run and again after `kill -9`.

usage: hang_live.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps the traces, a folder a job, for reproduce.py (default: a temporary folder). Two GPUs,
PyTorch, NCCL; about four minutes, all jobs at once. PASS and FAIL lines; exit status 0 only without FAIL. Asserts which rank is named,
and where its thread stood.
"""
import contextlib, json, os, signal, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
PROGRAM = r'''
import os, queue, subprocess, sys, threading, time
import torch, torch.distributed as dist
kind = sys.argv[1]
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
gradients, statistics = torch.ones(1 << 20, device="cuda"), torch.ones(64, device="cuda")

def slow_save():
    end = time.time() + 12
    with open(f"/tmp/save.{os.getpid()}", "wb") as file:
        while time.time() < end:
            file.write(bytes(1 << 20)); file.flush(); time.sleep(0.05)
    os.unlink(file.name)

def spin_for_ever():
    while True: pass

def hold_a_lock_twice():
    lock = threading.Lock()
    lock.acquire(); lock.acquire()

def compile_it():
    # A compiler is processes that use a processor.
    code = "import time; end = time.time() + 20\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", code], env={})

def at_fault(step):
    if rank != 1: return
    if kind == "sleeps" and step == 40: time.sleep(1000)
    if kind == "queue" and step == 40: queue.Queue().get()
    if kind == "oom" and step == 40:
        try: torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError: return "skip"
    if kind == "spins" and step == 40: spin_for_ever()
    if kind == "lock" and step == 40: hold_a_lock_twice()
    if kind == "item" and step == 40: time.sleep(1000)
    if kind == "exits" and step == 40: os._exit(3)
    if kind == "branch" and step == 40: dist.broadcast(gradients, 1)
    if kind == "saves" and step % 40 == 39: slow_save()
    if kind == "evaluates" and step % 40 == 39:
        end = time.time() + 12
        while time.time() < end: (statistics @ statistics).item()
    if kind == "compiles" and step == 60: compile_it()

step = 0
while True:
    what = at_fault(step)
    if what != "skip": dist.all_reduce(gradients)
    if kind != "ahead" or (rank, step) != (1, 40): dist.all_reduce(statistics)
    else: time.sleep(1000)
    if step % 4 == 3 or (kind == "item" and step > 38): statistics.mean().item()
    step += 1
    time.sleep(0.02)
'''
# Kind: the rank that is named, and what is in its stack (a function of C's has no frame there); None of a healthy job.
JOBS = {
    "sleeps": (1, "at_fault"), "queue": (1, "Queue.get"), "oom": (1, "ran out of memory"), "ahead": (1, "<module>"),
    "spins": (1, "spin_for_ever"), "lock": (1, "hold_a_lock_twice"), "item": (1, "at_fault"), "exits": (1, "ended"),
    "branch": (1, "broadcast"),
    "saves": None, "evaluates": None, "compiles": None,
}
# A rank that keeps a processor busy is reported as hung only after ten times HANG_AFTER.
HANG_AFTER, LASTS = 9, 170
failed = []


def say(is_good, text):
    print("PASS" if is_good else "FAIL", text, flush=True)
    if not is_good: failed.append(text)


def ranks(folder):
    said = subprocess.run([GPUTRACE, "ranks", "--json", folder], capture_output=True, text=True)
    try: return json.loads(said.stdout)["jobs"][0]
    except (ValueError, KeyError, IndexError): return {"verdict": f"none: {said.stderr[-300:]}", "findings": []}


def text(folder):
    return subprocess.run([GPUTRACE, "ranks", folder], capture_output=True, text=True).stdout


with contextlib.nullcontext(os.path.abspath(sys.argv[2])) if len(sys.argv) > 2 else tempfile.TemporaryDirectory() as work:
    os.makedirs(work, exist_ok=True)
    program = os.path.join(work, "train.py")
    open(program, "w").write(PROGRAM)
    started = {}
    for number, kind in enumerate(JOBS):
        folder = os.path.join(work, kind)
        os.makedirs(folder)
        common = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29600 + number), TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
        command = [GPUTRACE, "record", "-q", "--hang-after", str(HANG_AFTER), "-o", f"{folder}/%p.gtr", "--", sys.executable, program, kind]
        log = open(f"{folder}/log", "w")
        started[kind] = [subprocess.Popen(command, env=dict(common, RANK=str(r), LOCAL_RANK=str(r)), stdout=log, stderr=log, start_new_session=True) for r in range(2)]
    began, wrong = time.time(), set()
    while time.time() - began < LASTS:
        time.sleep(5)
        for kind, expected in JOBS.items():
            if expected is None and ranks(os.path.join(work, kind))["verdict"] in ("hangs", "inconsistent"): wrong.add(kind)
    for kind, expected in JOBS.items():
        folder = os.path.join(work, kind)
        alive = kind == "exits" or all(process.poll() is None for process in started[kind])
        said, shown = ranks(folder), text(folder)
        if expected is None:
            say(alive and kind not in wrong, f"{kind}: healthy, never called a hang ({said['verdict']})")
        else:
            rank, stack = expected
            say(alive and said["verdict"] in ("hangs", "inconsistent") and f"rank {rank}" in shown, f"{kind}, while it hangs: {said['verdict']}")
            print("\n".join(shown.splitlines()[:14]))
    pids = [str(process.pid) for process in started["sleeps"]]
    stacks = subprocess.run([GPUTRACE, "stacks", os.path.join(work, "sleeps")], capture_output=True, text=True).stdout
    say("at_fault" in stacks, "stacks of a job that hangs name the line")
    say("libcuda" in stacks or "libtorch" in stacks, "stacks have native frames")
    print("\n".join(stacks.splitlines()[:30]))
    for processes in started.values():
        for process in processes:
            try: os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError: pass
            process.wait()
    time.sleep(3)
    for kind, expected in JOBS.items():
        if expected is None: continue
        shown = text(os.path.join(work, kind))
        say(f"rank {expected[0]}" in shown and expected[1] in shown, f"{kind}, after kill -9")
        print("\n".join(shown.splitlines()[:16]))
sys.exit(bool(failed))
