"""Runs the programs of answers.sh under gputrace, and compares what gputrace says with what the programs know themselves."""
import json
import os
import shlex
import subprocess
import sys
import threading
import time

GPUTRACE, FOLDER, PYTHON = sys.argv[1:4]
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))

OOM = """
import time, torch
def layer(n):
    return torch.empty(n, dtype=torch.uint8, device="cuda")
kept = [layer((i % 5 + 1) << 24) for i in range(20)]
for i in range(0, 20, 2):
    kept[i] = None
for i in range(100000):
    kept[i % 20 // 2 * 2] = layer(1000 + i)
free, total = torch.cuda.mem_get_info()
for attempt in range(5):
    try:
        layer(2 * total)
    except torch.cuda.OutOfMemoryError:
        print("OOM", time.monotonic(), flush=True)
    time.sleep(2 if attempt == 0 else 0.3)
print("went on", flush=True)
"""

CYCLES = """
import gc, json, torch
gc.disable()
class Node:
    pass
def cycle():
    node = Node()
    node.itself = node
    node.tensor = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
def plain():
    return torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
for _ in range(25):
    cycle()
    plain()
gc.collect()
for _ in range(5):
    cycle()
gc.enable()
gc.collect()
torch.cuda.synchronize()
print(json.dumps({"bytes": 30 << 22, "peak": 25 << 22}))
"""

ROLES = """
import json, torch, torch.nn as nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return x + self.mlp(self.after(x))
class GPT(nn.Module):
    def __init__(self, words, width, depth):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
model = GPT(4000, 256, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def bytes_of(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors if t.is_cuda)
for step in range(6):
    tokens = torch.randint(0, 4000, (8, 128)).cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).view(-1, 4000), tokens.view(-1)).backward()
    optimizer.step()
torch.cuda.synchronize()
state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
print(json.dumps({
    "parameters": bytes_of(model.parameters()),
    "gradients": bytes_of(p.grad for p in model.parameters()),
    "optimizer state": bytes_of(state),
}))
"""

failed = 0


def check(name, is_right, what):
    global failed
    failed += not is_right
    print(f"{'PASS' if is_right else 'FAIL'}  {name:58} {what}", flush=True)


def record(name, program, *options):
    """Output of the program, its standard error with times, and its trace."""
    script, trace = f"{FOLDER}/{name}.py", f"{FOLDER}/{name}.gtr"
    with open(script, "w") as file:
        file.write(program)
    command = [*LAUNCHER, GPUTRACE, "record", "-f", "-o", trace, *options, "--", PYTHON, script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors = []
    reader = threading.Thread(target=lambda: errors.extend((time.monotonic(), line.rstrip()) for line in process.stderr))
    reader.start()
    output = process.stdout.read()
    process.wait(timeout=150)
    reader.join()
    if process.returncode != 0:
        print("\n".join(line for _, line in errors))
    return output, errors, trace


def report(trace, verb="report"):
    text = subprocess.run([GPUTRACE, verb, "--json", trace], capture_output=True, text=True, check=True).stdout
    return json.loads(text)


def section(told, name):
    """The section of this name of the only process."""
    found = [part for part in told["processes"][0]["sections"] if part["name"] == name]
    return found[0] if found else {}


output, errors, trace = record("oom", OOM)
ooms = [float(line.split()[1]) for line in output.splitlines() if line.startswith("OOM")]
said = [at for at, line in errors if "OUT OF MEMORY" in line]
check("the program goes on after five errors", output.strip().endswith("went on"), f"{len(ooms)} errors")
check("the answer is there within a second", bool(said) and said[0] - ooms[0] < 1, f"{said[0] - ooms[0]:.3f} s" if said else "none")
check("three errors are answered in full", len(said) == 3, str(len(said)))
remedy = [at for at, line in errors if "What would have made it fit" in line]
check("what would have made it fit follows", bool(remedy), f"{remedy[0] - ooms[0]:.3f} s" if remedy else "none")
lines = [line for _, line in errors]
check("the call site is named", any("oom.py:4" in line for line in lines), next((it for it in lines if "oom.py:4" in it), "none"))
told = section(report(trace, "oom"), "processes")
listed = told.get("processes", [])
check("other processes are listed, or it is said why not", bool(told), json.dumps(listed)[:100] if listed else "none is listed, and that is said")
quiet = record("quiet", OOM, "--no-oom-report")[1]
check("--no-oom-report says nothing", not any("OUT OF MEMORY" in line for _, line in quiet), "")

output, _, trace = record("cycles", CYCLES)
truth = json.loads(output.splitlines()[-1])
cycles = section(report(trace), "reference_cycles")
for name, key in (("bytes", "bytes"), ("peak", "peak_bytes")):
    check(f"reference cycles: {name}", cycles.get(key) == truth[name], f"{cycles.get(key)} of {truth[name]}")
sites = cycles.get("call_sites", [{}])
check("reference cycles: call site and type", "cycles.py:9" in str(sites[0].get("call_site")), f"{sites[0].get('collected')}")
plain = record("plain", CYCLES, "--stacks", "python")[2]
cycles = section(report(plain), "reference_cycles")
check("reference cycles with Python stacks only", cycles.get("bytes") == truth["bytes"], f"{cycles.get('bytes')}")

for kind in ("all", "python"):
    output, _, trace = record(f"roles_{kind}", ROLES, "--stacks", kind)
    truth = json.loads(output.splitlines()[-1])
    roles = {row["role"]: row for row in section(report(trace), "roles").get("roles", [])}
    for role, size in truth.items():
        found = roles.get(role, {}).get("peak_requested_bytes")
        check(f"{role}, {kind} stacks", found == size, f"{found} of {size}")

print("all passed" if not failed else f"{failed} failed")
sys.exit(bool(failed))
