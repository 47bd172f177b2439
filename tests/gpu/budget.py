#!/usr/bin/env python3
"""Holds `gputrace budget` against the driver and against servers that start or do not, on a machine with one GPU.

usage: budget.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps programs and traces (default: a temporary folder). Needs torch; transformers
for the second server. Servers: a decoder with grouped-query attention in plain torch (static KV cache, CUDA graphs of 12 batch sizes in
one pool, sleep and wake), and transformers' LlamaForCausalLM with a static cache. Checks: rows sum to the driver's figure, and what
is free on the card is what the program read itself at the same instant (0.5 % of what the process used); the largest cache that is
predicted starts, and one 64 MiB larger does not (under set_per_process_memory_fraction, and beside a process that holds the
card); `--between sleep,wake` names the line that keeps. One line a check, PASS, FAIL or SKIP; exit status 0 only without FAIL. Some
two minutes. LAUNCHER runs the programs under something else (`LAUNCHER=target/release/fake-cuda`); ONLY=own,transformers picks.
"""
import glob, json, os, re, shlex, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
FAKE = bool(LAUNCHER)
MIB = 1 << 20
NEAR = 64 * MIB
failed = 0

COMMON = """
import gc, json, os, sys, time, torch
SIZE, NOTES = int(sys.argv[1]), sys.argv[2]
FAKE, LIMIT = bool(os.environ.get("FAKE_CUDA")), int(os.environ.get("LIMIT", 0))
kind, card = torch.float if FAKE else torch.half, torch.cuda.get_device_properties(0).total_memory
if LIMIT: torch.cuda.set_per_process_memory_fraction(LIMIT / card)
notes = {"card": card}
def instant(name):
    # The driver's figures are sampled now and then: an instant that lasts is in a sample.
    torch.cuda.synchronize()
    if not os.environ.get("QUICK"): time.sleep(1.2)
    torch.cuda.nvtx.mark(name); free, total = torch.cuda.mem_get_info()
    notes[name] = {"free": free, "total": total, "reserved": torch.cuda.memory_reserved()}
    if not os.environ.get("QUICK"): time.sleep(0.3)
    json.dump(notes, open(NOTES, "w"))
"""

PROGRAMS = {}
PROGRAMS["own"] = """
LAYERS, D, HEADS, KV, HEAD, FF, VOCAB, BATCH, WINDOW = 8, 2048, 16, 4, 128, 5632, 32000, 16, 256
linear = lambda a, b: torch.nn.Linear(a, b, bias=False, device="cuda", dtype=kind)
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = linear(D, HEADS * HEAD), linear(D, KV * HEAD), linear(D, KV * HEAD), linear(HEADS * HEAD, D)
        self.up, self.gate, self.down = linear(D, FF), linear(D, FF), linear(FF, D)
    def forward(self, x, cache, at):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, HEAD).transpose(1, 2)
        k, v = (m(x).view(b, t, KV, HEAD).transpose(1, 2) for m in (self.k, self.v))
        if cache is not None:
            cache[0][:b, :, at:at + t].copy_(k); cache[1][:b, :, at:at + t].copy_(v)
            k, v = cache[0][:b, :, :WINDOW], cache[1][:b, :, :WINDOW]
        k, v = (m.repeat_interleave(HEADS // KV, 1) for m in (k, v))
        x = x + self.o(torch.softmax(q @ k.transpose(-1, -2) / HEAD ** 0.5, -1).matmul(v).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
class Server(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, D, device="cuda", dtype=kind), linear(D, VOCAB)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.cache, self.graphs, self.remembered = [None] * LAYERS, {}, []
    def forward(self, tokens, at=0):
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, self.cache): x = layer(x, cache, at)
        return self.head(x[:, -1])
    def make_kv_cache(self):
        self.cache = [[torch.zeros(BATCH, KV, SIZE, HEAD, device="cuda", dtype=kind) for _ in range(2)] for _ in range(LAYERS)]
    def capture(self):
        pool, self.tokens = torch.cuda.graph_pool_handle(), torch.zeros(BATCH, 1, device="cuda", dtype=torch.long)
        for size in (16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1):
            self(self.tokens[:size], 8); torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool): logits = self(self.tokens[:size], 8)
            self.graphs[size] = graph, logits
    def remember(self, logits):
        self.remembered.append(logits.float().repeat(24, 1))
    def serve(self, n):
        for turn in range(n):
            size = (16, 5, 1, 12, 8)[turn % 5]
            prompt = torch.zeros(size, 64 + 16 * (turn % 4), device="cuda", dtype=torch.long)
            logits = self(prompt)
            if turn % 4 == 3: self.remember(logits)
            for step in range(8):
                self.graphs[size][0].replay(); choice = self.graphs[size][1].argmax(-1)
with torch.inference_mode():
    server = Server(); server(torch.zeros(BATCH, 192, device="cuda", dtype=torch.long))
    server.make_kv_cache(); server.capture(); instant("served")
    server.serve(12); instant("busy")
    server.serve(4); instant("sleep")
    saved = [p.data.to("cpu") for p in server.parameters()]
    for p in server.parameters(): p.data = torch.empty(0, device="cuda", dtype=kind)
    server.cache = [None] * LAYERS; gc.collect(); torch.cuda.empty_cache(); instant("asleep")
    instant("wake")
    for p, data in zip(server.parameters(), saved): p.data = data.to("cuda")
    server.make_kv_cache(); server(torch.zeros(BATCH, 192, device="cuda", dtype=torch.long)); instant("awake")
print("served", torch.cuda.max_memory_reserved())
"""
PROGRAMS["transformers"] = """
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
                     vocab_size=32000, max_position_embeddings=1 << 20)
B = 8
with torch.inference_mode():
    torch.set_default_dtype(kind)
    with torch.device("cuda"): model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float)
    prompt = torch.zeros(B, 64, device="cuda", dtype=torch.long)
    model(prompt, use_cache=False, logits_to_keep=1); torch.cuda.synchronize()
    try: cache = StaticCache(config=config, max_cache_len=SIZE)
    except TypeError: cache = StaticCache(config=config, max_batch_size=B, max_cache_len=SIZE, device="cuda", dtype=kind)
    def step(tokens, at): return model(tokens, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1).logits
    step(prompt, torch.arange(64, device="cuda"))
    token, at = torch.zeros(B, 1, device="cuda", dtype=torch.long), torch.full((1,), 64, device="cuda", dtype=torch.long)
    for _ in range(3): step(token, at)
    torch.cuda.synchronize()
    graph, logits = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph): logits = step(token, at)
    except Exception as error:
        print("no graph:", type(error).__name__, str(error)[:200]); graph = None
    instant("served")
    for turn in range(10):
        step(prompt[:, :32 + 8 * (turn % 4)], torch.arange(32 + 8 * (turn % 4), device="cuda"))
        for _ in range(8): graph.replay() if graph else step(token, at); at += 1
    instant("busy")
    for turn in range(10): step(prompt, torch.arange(64, device="cuda")); step(token, at)
    instant("sleep"); instant("wake")
print("served", torch.cuda.max_memory_reserved())
"""
FILLER = """
import sys, torch
want = int(sys.argv[1]); torch.zeros(1, device="cuda"); free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(free - want, 1), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True); sys.stdin.read()
"""


def say(verdict, what, detail=""):
    global failed
    failed += verdict == "FAIL"
    print(f"{verdict}  {what}{': ' if detail else ''}{detail}", flush=True)


def check(good, what, detail=""):
    say("PASS" if good else "FAIL", what, detail if not good else "")


def mib(n): return f"{n / MIB:.1f} MiB"


def program(name):
    # Not `transformers.py`, which would hide the package.
    path = os.path.join(WORK, f"{name}_server.py")
    with open(path, "w") as out: out.write(COMMON + PROGRAMS[name] if name in PROGRAMS else FILLER)
    return path


def environment(**more):
    return dict(os.environ, **({"FAKE_CUDA": "1"} if FAKE else {}), **{key: str(value) for key, value in more.items()})


def starts(name, size, **more):
    """Whether a server with a cache of that length comes to its end."""
    run = subprocess.run([*LAUNCHER, sys.executable, program(name), str(size), os.path.join(WORK, "tried.json")],
                         env=environment(QUICK=1, **more), capture_output=True, text=True, timeout=120)
    if run.returncode and "out of memory" not in run.stderr.lower() and "alloc" not in run.stderr.lower():
        say("FAIL", f"{name} with a cache of {size} ends in an error of memory or not at all", run.stderr[-500:])
    return run.returncode == 0 and "served" in run.stdout


def record(name, size):
    notes = os.path.join(WORK, f"{name}.json")
    for old in glob.glob(os.path.join(WORK, f"{name}.*.gtr")) + glob.glob(notes): os.remove(old)
    run = subprocess.run([*LAUNCHER, GPUTRACE, "record", "-f", "-o", os.path.join(WORK, f"{name}.%p.gtr"), "--", sys.executable, program(name),
                          str(size), notes], env=environment(), capture_output=True, text=True, timeout=300)
    traces = sorted(glob.glob(os.path.join(WORK, f"{name}.*.gtr")), key=os.path.getsize)
    if not os.path.exists(notes) or not traces or "served" not in run.stdout:
        why = "SKIP" if "No module named 'transformers'" in run.stderr else "FAIL"
        say(why, f"{name} runs and leaves a trace", f"status {run.returncode}: {run.stdout[-200:]} {run.stderr[-700:]}")
        return None
    print(f"      {name}: {run.stdout.strip()[-300:]}")
    with open(notes) as file: return traces[-1], json.load(file)


def budget(trace, *arguments):
    run = subprocess.run([GPUTRACE, "budget", "--json", *arguments, trace], capture_output=True, text=True)
    try: return json.loads(run.stdout)["devices"][0]
    except (ValueError, LookupError): return say("FAIL", f"budget {' '.join(arguments)}", run.stdout[-300:] + run.stderr[-300:])


def sums(name, trace, notes):
    for first, second in (("served", "busy"), ("sleep", "wake")):
        found = budget(trace, "--between", f"{first},{second}")
        if not found: return
        columns = found["columns"] + [found["between"]["before"], found["between"]["after"]]
        wrong = [it["name"] for it in columns if sum(it["rows"].values()) != it["total_bytes"]]
        check(not wrong, f"{name}: rows sum to the driver's figure in {len(columns)} columns", f"{wrong}")
        for column in columns[-2:]:
            theirs, ours, total = notes[column["name"]]["free"], column["free_bytes"], column["total_bytes"]
            if column["figure"] == "handed_out":
                say("SKIP", f"{name}, {column['name']}: no figure of the driver's in the trace")
                continue
            off = abs(theirs - ours)
            check(off <= 0.005 * total, f"{name}, {column['name']}: {mib(total)} ({column['figure']}), free on the card within {off / total:.2%} of what the "
                  f"program read; unaccounted {mib(column['rows'].get('unaccounted', 0))}", f"{mib(theirs)} against {mib(ours)}")


def bisected(name, what, predicted, per_token, unit, **more):
    """The largest length that starts, near the predicted one: a length 64 MiB below must start, one 64 MiB above must not."""
    near = max(1, NEAR // per_token)
    low, high = max(unit, predicted - near), predicted + near
    if not starts(name, low, **more):
        return say("FAIL", f"{name}, {what}: 64 MiB below what was predicted starts", f"{low} tokens do not")
    if starts(name, high, **more):
        return say("FAIL", f"{name}, {what}: 64 MiB above what was predicted does not start", f"{high} tokens do")
    for _ in range(int(os.environ.get("BISECTIONS", 3))):
        middle = (low + high) // 2
        low, high = (middle, high) if starts(name, middle, **more) else (low, middle)
    say("PASS", f"{name}, {what}: the largest cache is within 64 MiB: predicted {predicted * per_token >> 20} MiB, starts with {low * per_token >> 20} MiB, "
        f"not with {high * per_token >> 20} MiB")


def largest(name, trace, size, tokens_of):
    whole = budget(trace)
    cache = whole["settings"].get("cache_bytes") if whole else None
    if not cache: return say("FAIL", f"{name}: the cache is recognised", json.dumps(whole and whole["settings"])[:500])
    per_token = cache // size
    print(f"      {name}: cache {mib(cache)} in {whole['settings']['cache_blocks']} blocks; on this card {whole['settings']['largest_cache_bytes']} would fit")
    limit = 4 << 30
    # A fraction is of PyTorch's own memory: nobody else's counts.
    found = budget(trace, "--limit", str(limit), "--other", "0")
    predicted = found["settings"]["largest_cache_bytes"]
    if predicted: bisected(name, "under a fraction", predicted // per_token, per_token, 1, LIMIT=limit)
    else: say("FAIL", f"{name}: a prediction under a fraction", json.dumps(found["settings"])[:500])
    filler = None if FAKE else subprocess.Popen([sys.executable, program("filler"), str(6 << 30)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if not filler: return
    try:
        free = int(filler.stdout.readline())
        predicted = budget(trace, "--limit", str(free))["settings"]["largest_cache_bytes"]
        bisected(name, f"beside a process that leaves {mib(free)}", predicted // per_token, per_token, 1)
    finally:
        filler.stdin.close(); filler.wait()


def slept(name, trace):
    found = budget(trace, "--between", "sleep,wake")
    if not found: return
    kept, keepers = found["between"]["kept"], found["between"]["keepers"]
    lines = [it for it in keepers if "remember" in it["call_site"]]
    check(kept["weights"] == 0 and kept["kv_cache"] == 0, f"{name}: weights and cache were given back", json.dumps(kept))
    check(bool(lines) and lines[0]["kept_bytes"] >= 4 * 24 * 4 * 32000, f"{name}: sleep,wake names the line that keeps", json.dumps(keepers[:3]))
    for it in keepers[:3]: print(f"      keeps {it['row']} {mib(it['kept_bytes'])}, beside {mib(it['pinned_bytes'])} free: {it['call_site']}")


def main():
    os.makedirs(WORK, exist_ok=True)
    for name in os.environ.get("ONLY", "own,transformers").split(","):
        began = time.time()
        size = 2048
        found = record(name, size)
        if found:
            trace, notes = found
            print(subprocess.run([GPUTRACE, "budget", trace], capture_output=True, text=True).stdout)
            sums(name, trace, notes)
            if name == "own": slept(name, trace)
            largest(name, trace, size, None)
        print(f"      {name}: {time.time() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


main()
