#!/usr/bin/env python3
"""Attaches to programs that run already, and holds what the trace says from then on against a trace of the same run that began with it.

usage: attach.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps programs and traces (default: a temporary folder). Needs a GPU; PyTorch, JAX and
CuPy as far as they are there. Each program works, waits until somebody has attached, works on (ten instants at which it asks its own
allocator), waits until somebody has detached, and works on. Checked: it prints the same as alone; the events between two marks
are those of the same program under `gputrace record`, and so are the running totals after each of them; PyTorch's reserved and
allocated bytes at the instants, to the byte; `report`, `leaks`, `oom`, `tune` answer. MODES=asleep,late: a library that sleeps
(`GPUTRACE=dormant`), and none at all. `ddp2` is a job of two ranks, of which each is looked at; it needs two GPUs. One line a check, PASS, FAIL, SKIP
or INFO; exit status 0 only without FAIL. Some three minutes. ONLY=torch,jax picks programs. LAUNCHER runs them under something else.
"""
import importlib.util, json, os, shlex, shutil, signal, socket, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
MODES = os.environ.get("MODES", "asleep,late").split(",")
# Bytes of the two blocks between which traces are compared; no other request of a program has these sizes.
BEGIN, END = 12_345_344, 23_456_768
PATIENCE = 120
failed = 0

COMMON = """
import json, os, sys, time
folder = sys.argv[1]
def path(name): return os.path.join(folder, name)
def meet(said, awaited, idle):
    open(path(said), "w").close()
    while not os.path.exists(path(awaited)): idle(); time.sleep(0.002)
instants = []
def finish(result):
    json.dump({"instants": instants, "result": result}, open(path("noted.json"), "w"))
"""
TORCH = """
import torch
torch.manual_seed(0)
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
torch.cuda.set_device(device)
def mark(size): torch.empty(size, dtype=torch.uint8, device=device)
def idle(): torch.empty(1000, device=device); torch.cuda.synchronize()
def instant():
    # What PyTorch gives back to the driver is in its own counters, and so in the trace, with its next block.
    torch.empty(1, device=device); torch.cuda.synchronize()
    instants.append((time.monotonic_ns(), torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
    torch.cuda.synchronize()
def work(steps, noting):
    for n in range(steps):
        x = torch.randn(64 + 32 * (n % 7), 1024, device=device)
        optimizer.zero_grad(set_to_none=True); loss = model(x).square().mean(); loss.backward(); optimizer.step()
        if n % 3 == 1: kept.append(torch.empty((n + 1) << 20, dtype=torch.uint8, device=device))
        if n % 5 == 4: kept.clear(); torch.cuda.empty_cache()
        if noting and n % 3 == 0 and len(instants) < 10: instant()
    return float(loss)
model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]).to(device)
kept = []
"""
TORCH_RUN = """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
results = [work(12, False)]
meet("ready", "go", idle); mark(%d); results.append(work(31, True)); mark(%d); meet("done", "out", idle); results.append(work(5, False))
finish(results)
""" % (BEGIN, END)

# Processes of a program, and GPUs that it needs.
RANKS = {"ddp2": 2}
# Name, what must be installed, further variables, program.
PROGRAMS = {
    "driver": ("ctypes", {}, COMMON + """
import ctypes as c
cuda = c.CDLL("libcuda.so.1")
def ok(result):
    if result: sys.exit(f"CUDA {result}")
def take(size):
    address = c.c_ulonglong(); ok(cuda.cuMemAlloc_v2(c.byref(address), c.c_size_t(size)))
    return address
def give(address): ok(cuda.cuMemFree_v2(address))
context = c.c_void_p()
ok(cuda.cuInit(0)); ok(cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0)); ok(cuda.cuCtxSetCurrent(context))
def mark(size): give(take(size))
def idle(): give(take(4096))
def work(steps):
    for n in range(steps):
        kept.append(take((n + 1) << 16)); give(take(1 << 20))
        if n %% 5 == 4: give(kept.pop(0))
kept = []
work(20); meet("ready", "go", idle); mark(%d); work(40); mark(%d); meet("done", "out", idle); work(5)
finish(len(kept))
""" % (BEGIN, END)),
    "torch": ("torch", {}, COMMON + TORCH + TORCH_RUN),
    "expandable": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, COMMON + TORCH + TORCH_RUN),
    "ddp": ("torch", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733", "RANK": "0", "WORLD_SIZE": "1"}, COMMON + TORCH + """
import torch.distributed as dist
dist.init_process_group("nccl", device_id=device)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
""" + TORCH_RUN),
    "ddp2": ("torch", {"NCCL_NVLS_ENABLE": "0"}, COMMON + TORCH + """
import torch.distributed as dist
dist.init_process_group("nccl", device_id=device)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
""" + TORCH_RUN),
    "jax": ("jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, COMMON + """
import jax, jax.numpy as jnp, numpy as np
@jax.jit
def step(w, x): return w + 0.01 * jnp.tanh(x @ w).T @ x
def idle(): jax.device_put(np.zeros(1000, np.float32)).block_until_ready()
def work(steps):
    global w
    for n in range(steps):
        w = step(w, jax.device_put(np.full((256, 1024), 0.001 * n, np.float32))); w.block_until_ready()
        if n % 4 == 1: kept.append(jax.device_put(np.zeros((n + 1) << 24, np.uint8))); kept[-1].block_until_ready()
w, kept, times = jnp.eye(1024), [], []
work(6); meet("ready", "go", idle); times.append(time.monotonic_ns()); work(30); times.append(time.monotonic_ns()); meet("done", "out", idle); work(3)
finish({"results": float(w.sum()), "times": times})
"""),
    "cupy": ("cupy", {}, COMMON + """
import cupy
def mark(size): cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(size))
def idle(): mark(4096)
def work(steps):
    total = 0.0
    for n in range(steps):
        a = cupy.ones((n %% 5 + 1, 1 << 20), dtype=cupy.float32); total += float((a * 2).sum())
        if n %% 3 == 1: kept.append(cupy.zeros((n + 1) << 18))
        if n %% 7 == 6: kept.clear(); cupy.get_default_memory_pool().free_all_blocks()
    return total
class Hook(cupy.cuda.MemoryHook):
    def alloc_postprocess(self, device_id, mem_size, mem_ptr): taken.append(mem_size)
kept, taken = [], []
results = [work(8)]
meet("ready", "go", idle); mark(%d)
with Hook(): results.append(work(30))
mark(%d); meet("done", "out", idle); results.append(work(3))
finish({"results": results, "taken": taken})
""" % (BEGIN, END)),
}


def say(verdict, what, detail=""):
    global failed
    failed += verdict == "FAIL"
    print(f"{verdict}  {what}{': ' if detail else ''}{detail}", flush=True)


def check(good, what, detail=""):
    say("PASS" if good else "FAIL", what, "" if good else detail)


def verb(*arguments):
    return subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True, timeout=PATIENCE)


def wait_for(path, program):
    end = time.time() + PATIENCE
    while not os.path.exists(path):
        if program.poll() is not None or time.time() > end: return False
        time.sleep(0.002)
    return True


def run(name, mode):
    """The folders of one run, one of each rank, or None; `mode` is how it is recorded: alone, record, asleep or late."""
    _, variables, text = PROGRAMS[name]
    n_ranks = RANKS.get(name, 1)
    whole = tempfile.mkdtemp(prefix=f"{name}.{mode}.", dir=WORK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    try:
        for rank in range(n_ranks):
            folder = os.path.join(whole, str(rank))
            os.makedirs(folder)
            program_file = os.path.join(folder, "program.py")
            with open(program_file, "w") as out: out.write(text)
            environment = dict(os.environ, **variables)
            if n_ranks > 1: environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            if mode == "asleep": environment.update(LD_PRELOAD=os.path.join(FOLDER, "libgputrace.so"), GPUTRACE="dormant")
            record = [GPUTRACE, "record", "-o", os.path.join(folder, "trace.gtr"), "--"] if mode == "record" else []
            with open(os.path.join(folder, "said"), "w") as said:
                program = subprocess.Popen([*LAUNCHER, *record, sys.executable, program_file, folder], env=environment, stdout=said, stderr=said)
            ranks.append((folder, program))
        return watched(name, mode, ranks)
    finally:
        for _, program in ranks:
            if program.poll() is None: program.send_signal(signal.SIGKILL)


def all_reach(name, mode, ranks, file, what):
    for folder, program in ranks:
        if not wait_for(os.path.join(folder, file), program):
            with open(os.path.join(folder, "said")) as said: say("FAIL", f"{name}, {mode}: {what}", said.read()[-400:])
            return False
    return True


def watched(name, mode, ranks):
    if not all_reach(name, mode, ranks, "ready", "gets ready"): return None
    if mode in ("asleep", "late"):
        # All ranks at once.
        began = time.time()
        asked = [subprocess.Popen([GPUTRACE, "attach", "-o", os.path.join(folder, "trace.gtr"), str(program.pid)],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for folder, program in ranks]
        for (folder, _), attach in zip(ranks, asked):
            answer = attach.communicate(timeout=PATIENCE)[0]
            took = time.time() - began
            if attach.returncode:
                say("FAIL", f"{name}, {mode}: attach", answer[-600:])
            else:
                say("INFO", f"{name}, {mode}: attached in {took * 1000:.0f} ms", answer.strip()[-300:])
    for folder, _ in ranks: open(os.path.join(folder, "go"), "w").close()
    if not all_reach(name, mode, ranks, "done", "works on"): return None
    for _, program in ranks if mode in ("asleep", "late") else []:
        answer = verb("detach", str(program.pid))
        check(answer.returncode == 0, f"{name}, {mode}: detach", (answer.stdout + answer.stderr)[-400:])
    for folder, _ in ranks: open(os.path.join(folder, "out"), "w").close()
    for folder, program in ranks:
        program.wait(PATIENCE)
        with open(os.path.join(folder, "said")) as said: check(program.returncode == 0, f"{name}, {mode}: ends with 0", f"{program.returncode}: {said.read()[-400:]}")
    return [folder for folder, _ in ranks]


def events(trace):
    """All events as dictionaries, and those between the two marks."""
    lines = [json.loads(line) for line in verb("export", "--format", "jsonl", trace).stdout.splitlines()]
    first = [n for n, line in enumerate(lines) if BEGIN in (line.get("bytes"), line.get("requested_bytes"))]
    last = [n for n, line in enumerate(lines) if END in (line.get("bytes"), line.get("requested_bytes"))]
    return lines, lines[first[0]:last[0] + 1] if first and last else None


def taken_between(folder):
    """What the driver gave out between the two times that the program noted."""
    trace = os.path.join(folder, "trace.gtr")
    with open(os.path.join(folder, "noted.json")) as file: first, last = json.load(file)["result"]["times"]
    start = json.loads(verb("summary", "--json", trace).stdout)["processes"][0]["start_ns"]
    lines = [line for line in events(trace)[0] if first <= line["time_ns"] + start <= last]
    return [(line["kind"], line["bytes"], line["owner"]) for line in lines if line["action"] == "alloc"]


def since_the_mark(part):
    """Without what gives back memory from before: a library that came late has not seen it."""
    known = set()
    for line in part:
        address = (line.get("kind"), line.get("addr"))
        if line["action"] == "alloc" and line.get("addr"): known.add(address)
        if line["action"] == "alloc" or address in known: yield line


def essence(line, totals):
    names = ["action", "kind", "device", "bytes", "requested_bytes"]
    if totals: names += ["device_bytes", "torch_allocated_bytes", "torch_reserved_bytes"]
    return tuple(line.get(name) for name in names)


def instants_equal(name, mode, trace, lines, noted):
    start = json.loads(verb("summary", "--json", trace).stdout)["processes"][0]["start_ns"]
    wrong = []
    for time_ns, reserved, allocated in noted:
        before = [line for line in lines if line["time_ns"] + start <= time_ns and "torch_reserved_bytes" in line]
        ours = (before[-1]["torch_reserved_bytes"], before[-1]["torch_allocated_bytes"]) if before else None
        if ours != (reserved, allocated): wrong.append(f"PyTorch {reserved}, {allocated}, gputrace {ours}")
    check(len(noted) == 10 and not wrong, f"{name}, {mode}: reserved and allocated bytes at {len(noted)} instants equal PyTorch's", " | ".join(wrong[:3]))


def books_equal(name, mode, trace, lines, noted):
    """What the events alone come to, from the first of the trace on: those that stand for what was there before, and those since."""
    start = json.loads(verb("summary", "--json", trace).stdout)["processes"][0]["start_ns"]
    held, wrong, at = {}, [], 0
    lines = [line for line in lines if line["kind"] == "block" and line["action"] in ("alloc", "free")]
    for time_ns, _, allocated in noted:
        while at < len(lines) and lines[at]["time_ns"] + start <= time_ns:
            if lines[at]["action"] == "alloc": held[lines[at]["addr"]] = lines[at]["bytes"]
            else: held.pop(lines[at]["addr"], None)
            at += 1
        if sum(held.values()) != allocated: wrong.append(f"PyTorch {allocated}, the sum of the events {sum(held.values())}")
    check(not wrong, f"{name}, {mode}: at {len(noted)} instants what was there before and the changes since come to PyTorch's allocated bytes", " | ".join(wrong[:3]))


def compared(job, rank, mode, folder, control, alone):
    name = job if RANKS.get(job, 1) == 1 else f"{job} rank {rank}"
    trace = os.path.join(folder, "trace.gtr")
    if not os.path.exists(trace): return say("FAIL", f"{name}, {mode}: a trace")
    with open(os.path.join(folder, "noted.json")) as file: noted = json.load(file)
    results = [it["results"] if isinstance(it, dict) else it for it in (noted["result"], alone["result"])]
    check(results[0] == results[1], f"{name}, {mode}: the same results as alone", f"{results}")
    lines, ours = events(trace)
    _, theirs = events(os.path.join(control, "trace.gtr"))
    if job == "jax":
        a, b = taken_between(folder), taken_between(control)
        check(a == b and a, f"{name}, {mode}: {len(a)} allocations ({sum(it[1] for it in a) >> 20} MiB) are those of the run under record", f"{a} {b}")
    elif not ours or not theirs:
        return say("FAIL", f"{name}, {mode}: both marks are in the traces", f"{bool(ours)} {bool(theirs)}; {len(lines)} events")
    elif job == "cupy":
        a, b = [line["bytes"] for line in ours[1:-1] if line["action"] == "alloc" and line["kind"] == "linear"], noted["result"]["taken"]
        check(a == b and a, f"{name}, {mode}: {len(a)} allocations are those that CuPy's hook saw", f"{len(b)}: {a[:8]} {b[:8]}")
    else:
        for totals in (False, True) if mode == "asleep" and not job.startswith("ddp") else (False,):
            parts = (ours, theirs) if mode == "asleep" else (since_the_mark(ours), since_the_mark(theirs))
            # When NCCL's stream is done decides which free block serves the next request: what was asked for does not hang on it.
            if job.startswith("ddp"): parts = [[{"requested_bytes": line["requested_bytes"]} for line in part if line["action"] == "alloc" and "requested_bytes" in line] for part in parts]
            a, b = ([essence(line, totals) for line in part] for part in parts)
            unlike = next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            what = "requests" if job.startswith("ddp") else "events and running totals" if totals else "events"
            check(a == b, f"{name}, {mode}: {len(a)} {what} are those of the run under record", f"{len(b)} there; from {unlike}: {a[unlike:unlike + 2]} {b[unlike:unlike + 2]}")
    if noted["instants"] and job != "jax":
        instants_equal(name, mode, trace, lines, noted["instants"])
        books_equal(name, mode, trace, lines, noted["instants"])
        known = [line.strip() for line in verb("doctor", trace).stdout.splitlines() if ".before=" in line]
        say("INFO", f"{name}, {mode}: {'; '.join(known)}")
    for question in ("report", "leaks", "oom", "tune"):
        answer = verb(question, trace)
        check(answer.returncode in (0, 2) and answer.stdout + answer.stderr, f"{name}, {mode}: {question} answers ({answer.returncode})", answer.stderr[-300:])
    report = verb("report", trace).stdout
    say("INFO", f"{name}, {mode}: report begins", " / ".join(report.splitlines()[:7]))
    check("attach" in report, f"{name}, {mode}: report says since when it knows", report[:600])


def n_gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
    return listed.count("GPU ")


def main():
    os.makedirs(WORK, exist_ok=True)
    for name in os.environ.get("ONLY", ",".join(PROGRAMS)).split(","):
        if importlib.util.find_spec(PROGRAMS[name][0]) is None:
            say("SKIP", name, f"no {PROGRAMS[name][0]}")
            continue
        if name in RANKS and n_gpus() < RANKS[name]:
            say("SKIP", name, "one GPU")
            continue
        alone, control = run(name, "alone"), run(name, "record")
        if not alone or not control: continue
        noted = []
        for folder in alone:
            with open(os.path.join(folder, "noted.json")) as file: noted.append(json.load(file))
        for mode in MODES:
            if mode == "late" and name == "driver":
                say("SKIP", "driver, late", "ctypes has the driver's addresses on its heap, which nobody changes")
                continue
            for rank, folder in enumerate(run(name, mode) or []): compared(name, rank, mode, folder, control[rank], noted[rank])
    sys.exit(1 if failed else 0)


main()
