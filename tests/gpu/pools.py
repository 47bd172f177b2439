#!/usr/bin/env python3
"""Holds what gputrace says of PyTorch's pools against PyTorch's own snapshots, on a machine with one GPU.

usage: pools.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps programs and traces (default: a temporary folder). Needs torch. Five programs:
a training with three graphs, torch.compile(mode="reduce-overhead"), MemPool, a serving loop with 20 captured sizes, a capture that
fails. Each notes at ten instants what torch.cuda.memory_snapshot() has in each pool (`segment_pool_id`): reserved, allocated and
active bytes. `gputrace stats --at` must say the same of each instant, to the byte, and the replay of the recorded settings must
give each request the address that it had. One line a check, PASS, FAIL or SKIP; exit status 0 only without FAIL. Some two minutes.
LAUNCHER runs the programs under something else (`LAUNCHER=target/release/fake-cuda`); ONLY=graphs,serving picks programs.
"""
import glob, json, os, re, shlex, subprocess, sys, tempfile, textwrap, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
FAKE = bool(LAUNCHER)
INSTANTS = 10
failed = 0

COMMON = """
import json, os, sys, time, torch
instants = []
def instant():
    if len(instants) == 10: return
    torch.cuda.synchronize()
    pools = {}
    for segment in torch.cuda.memory_snapshot():
        sums = pools.setdefault(str(tuple(segment["segment_pool_id"])), [0, 0, 0])
        for n, name in enumerate(("total_size", "allocated_size", "active_size")): sums[n] += segment[name]
    torch.cuda.nvtx.mark(f"instant {len(instants)}")
    instants.append((time.monotonic_ns(), pools))
def finish():
    while len(instants) < 10: instant()
    json.dump(instants, open(sys.argv[1], "w"))
"""

PROGRAMS = {
    # Forward and backward captured in turn; the second graph shares the first one's pool, the third has its own.
    "graphs": """
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
xs = [torch.randn(n, 1024, device="cuda") for n in (64, 256, 1024)]
instant()
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for x in xs:
        for _ in range(2): optimizer.zero_grad(set_to_none=True); model(x).square().mean().backward(); optimizer.step()
torch.cuda.current_stream().wait_stream(side); instant()
graphs, losses = [], []
for n, x in enumerate(xs):
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graphs[0].pool() if n == 1 else None):
        loss = model(x).square().mean(); loss.backward()
    graphs.append(graph); losses.append(loss); instant()
for step in range(4):
    for graph in graphs: graph.replay()
    extra = torch.randn(step + 1, 1 << 20, device="cuda"); instant()
del graphs[1], losses[1], graph, loss; torch.cuda.empty_cache(); instant()
graphs.clear(); losses.clear(); optimizer.zero_grad(set_to_none=True); torch.cuda.empty_cache(); instant()
""",
    "compile": """
if os.environ.get("FAKE_CUDA"): backend = dict(backend="cudagraphs")
else: backend = dict(mode="reduce-overhead")
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
run = torch.compile(model, **backend)
instant()
for step in range(8):
    torch.compiler.cudagraph_mark_step_begin()
    x = torch.randn(128 if step < 5 else 320, 512, device="cuda")
    if step % 2:
        with torch.no_grad(): y = run(x).clone()
    else:
        run(x).square().mean().backward(); model.zero_grad(set_to_none=True)
    instant()
torch.cuda.empty_cache()
""",
    "mempool": """
small = [torch.randn(n, 1000, device="cuda") for n in range(1, 40)]; del small[::3]; instant()
first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(first): a = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 3, 30, 7)]
instant()
with torch.cuda.use_mem_pool(second):
    b = [torch.empty(n << 18, dtype=torch.uint8, device="cuda") for n in (1, 3, 30, 7)]; del b[1]; instant()
    with torch.cuda.use_mem_pool(first): c = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    d = torch.empty(2 << 20, dtype=torch.uint8, device="cuda"); instant()
e = torch.empty(9 << 20, dtype=torch.uint8, device="cuda"); del a[2]; instant()
side = torch.cuda.Stream()
with torch.cuda.use_mem_pool(first), torch.cuda.stream(side): f = torch.empty(4 << 20, dtype=torch.uint8, device="cuda"); instant()
f.record_stream(torch.cuda.current_stream()); del f; torch.cuda.synchronize()
small.append(torch.empty(700, device="cuda")); instant()
del a, b, c, d; torch.cuda.empty_cache(); instant()
del first; instant()
del second, e; torch.cuda.empty_cache(); instant()
""",
    # As servers capture: the largest size first, one pool for all; then a loop that picks graphs.
    "serving": """
kind = torch.float if os.environ.get("FAKE_CUDA") else torch.half
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)]).cuda().to(kind).eval()
cache = torch.zeros(16, 1 << 20, device="cuda", dtype=kind); instant()
sizes = [1, 2, 4] + list(range(8, 137, 8)); assert len(sizes) == 20
inputs = torch.zeros(136, 1024, device="cuda", dtype=kind); outputs, graphs, pool = {}, {}, torch.cuda.graph_pool_handle()
with torch.inference_mode():
    for size in sizes[::-1]: layers(inputs[:size])
    torch.cuda.synchronize(); instant()
    for n, size in enumerate(sizes[::-1]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool): outputs[size] = layers(inputs[:size])
        graphs[size] = graph
        if n in (0, 4, 9, 14, 19): instant()
    for step in range(30):
        size = sizes[step * 7 % 20]; batch = torch.randn(size, 1024, device="cuda").to(kind)
        inputs[:size].copy_(batch); graphs[size].replay(); result = outputs[size].clone()
        if step in (9, 29): instant()
graphs.clear(); outputs.clear(); del graph; torch.cuda.empty_cache(); instant()
""",
    # A synchronisation in the middle of a capture is forbidden: the capture fails, and its pool is left.
    "failed": """
model = torch.nn.Linear(2048, 2048).cuda(); x = torch.randn(512, 2048, device="cuda"); model(x); torch.cuda.synchronize(); instant()
good = torch.cuda.CUDAGraph()
with torch.cuda.graph(good): y = model(x)
instant()
bad = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(bad):
        z = model(x).relu(); torch.cuda.current_stream().synchronize() if not os.environ.get("FAKE_CUDA") else 1 / 0
except Exception as error: print(type(error).__name__, str(error)[:80])
instant()
for n in range(4):
    # Random numbers are not to be had after that: the generator still waits for the end of the capture.
    w = [torch.zeros(n + 1, 1 << 18, device="cuda") for _ in range(3)]; instant()
z = None; instant()
del bad; instant()
try: torch.cuda.empty_cache()
except Exception as error: print(type(error).__name__, str(error)[:80])
instant()
""",
}


def say(verdict, what, detail=""):
    global failed
    failed += verdict == "FAIL"
    print(f"{verdict}  {what}{': ' if detail else ''}{detail}", flush=True)


def check(good, what, detail=""):
    say("PASS" if good else "FAIL", what, "" if good else detail)


def verb(*arguments):
    return subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True)


def record(name):
    program, noted = os.path.join(WORK, f"{name}.py"), os.path.join(WORK, f"{name}.json")
    with open(program, "w") as out: out.write(COMMON + textwrap.dedent(PROGRAMS[name]) + "finish()\n")
    for old in glob.glob(os.path.join(WORK, f"{name}.*.gtr")) + glob.glob(noted): os.remove(old)
    environment = dict(os.environ, **({"FAKE_CUDA": "1"} if FAKE else {}))
    run = subprocess.run([*LAUNCHER, GPUTRACE, "record", "-f", "-o", os.path.join(WORK, f"{name}.%p.gtr"), "--", sys.executable, program, noted],
                         env=environment, capture_output=True, text=True, timeout=300)
    traces = sorted(glob.glob(os.path.join(WORK, f"{name}.*.gtr")), key=os.path.getsize)
    if not os.path.exists(noted) or not traces:
        say("FAIL", f"{name} runs and leaves a trace", f"status {run.returncode}: {run.stderr[-700:]}")
        return None
    print(f"      {name}: {run.stdout.strip()[-200:]}")
    with open(noted) as file: return traces[-1], json.load(file)




def pools_at(trace, time_ns):
    """Reserved, allocated and active bytes by pool, and what the answer was where there is none."""
    run = verb("stats", "--json", "--at", str(time_ns), trace)
    try: answer = json.loads(run.stdout)
    except ValueError: return {}, run.stdout[-300:] + run.stderr[-300:]
    found = {}
    def look(node):
        if isinstance(node, dict):
            if {"pool", "reserved_bytes", "allocated_bytes", "active_bytes"} <= node.keys():
                found[node["pool"]] = [node["reserved_bytes"], node["allocated_bytes"], node["active_bytes"]]
            for child in node.values(): look(child)
        elif isinstance(node, list):
            for child in node: look(child)
    look(answer)
    return found, ""


def compared(name, trace, noted):
    start = json.loads(verb("summary", "--json", trace).stdout)["processes"][0]["start_ns"]
    wrong, n_pools = [], 0
    for n, (time_ns, theirs) in enumerate(noted):
        ours, why = pools_at(trace, time_ns - start)
        ours = {pool: sums for pool, sums in ours.items() if any(sums)}
        theirs = {pool: sums for pool, sums in theirs.items() if any(sums)}
        n_pools = max(n_pools, len(theirs))
        # Before the first private pool there is no table: then there is nothing to tell apart.
        if not ours and list(theirs) in ([], ["(0, 0)"]): continue
        if ours != theirs:
            wrong.append(f"instant {n}: PyTorch {theirs}, gputrace {ours or why}")
    check(not wrong, f"{name}: {len(noted)} instants, up to {n_pools} pools, reserved, allocated and active equal", f"{len(wrong)} differ; {' | '.join(wrong[:2])}")


def replayed(name, trace):
    text = verb("replay", trace).stdout
    matched = re.search(r"(\d+) of (\d+) addresses match", text)
    if not matched: return say("FAIL", f"{name}: the self-check", text[-400:])
    check(matched[1] == matched[2], f"{name}: {matched[0]}", re.search(r"self-check.*", text)[0] + " " + text[-300:])


def main():
    os.makedirs(WORK, exist_ok=True)
    for name in os.environ.get("ONLY", ",".join(PROGRAMS)).split(","):
        began = time.time()
        found = record(name)
        if found:
            trace, noted = found
            said = verb("doctor", trace).stdout
            check("torch.pools=seen" in said, f"{name}: pools are seen", "; ".join(re.findall(r"torch\.\w+=.*", said)))
            compared(name, trace, noted)
            replayed(name, trace)
        print(f"      {name}: {time.time() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


main()
