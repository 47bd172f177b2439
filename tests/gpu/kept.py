#!/usr/bin/env python3
"""What a recording that is left on costs: a GPT training step, and a tensor made and dropped, with and without heartbeat, `--keep` and stacks armed.

usage: [WAYS=WORD,...] kept.py FOLDER [TURNS]

FOLDER has `gputrace` and `libgputrace.so`, and may have `quiet/gputrace`, a build without heartbeats (`EVERY` of recorder/src/heartbeat.rs made a
thousand hours), which then records too. Needs PyTorch. TURNS (5) processes of each way take turns, each of some 12 seconds, long enough for a
heartbeat. Nothing is asserted of times: after each turn it prints the median of the runs' medians, and their range. Exit status 1 if a run failed
or its trace cannot be read. WAYS names the ways by words of them.
"""
import glob, json, os, statistics, subprocess, sys, tempfile

FOLDER = os.path.abspath(sys.argv[1])
TURNS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
ONLY = [word for word in os.environ.get("WAYS", "").split(",") if word]
QUIET = os.path.join(FOLDER, "quiet", "gputrace")
# Of a job of several ranks, as only those have stacks written when they are silent.
JOB = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
WAYS = {
    "alone": None,
    "recorded, no heartbeat": (QUIET, ["--hang-after", "0"]),
    "recorded": ("gputrace", ["--hang-after", "0"]),
    "stacks armed, 60 s": ("gputrace", []),
    "--keep 4s --max-size 64M, stacks armed": ("gputrace", ["--keep", "4s", "--max-size", "64M"]),
}
PROGRAM = """
import statistics, sys, time, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.all, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.all(self.before(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.wide(self.between(x))
model = nn.Sequential(nn.Embedding(8000, 512), *[Block(512, 8) for _ in range(8)], nn.LayerNorm(512), nn.Linear(512, 8000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    tokens = torch.randint(0, 8000, (4, 129), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
def pairs(n=20_000):
    began = time.perf_counter()
    for _ in range(n):
        torch.empty(1000, device="cuda", dtype=torch.uint8)
    return (time.perf_counter() - began) / n * 1e9
for _ in range(20):
    step()
steps, hot, began = [], [], time.monotonic()
while time.monotonic() - began < 11:
    for _ in range(60):
        at = time.perf_counter()
        step()
        steps.append(time.perf_counter() - at)
    hot.append(pairs())
print(1e6 * statistics.median(steps), 1e6 * sorted(steps)[len(steps) * 99 // 100], statistics.median(hot))
"""


def main():
    runs, failed = {way: [] for way in WAYS}, False
    with tempfile.TemporaryDirectory() as work:
        program = os.path.join(work, "program.py")
        with open(program, "w") as file:
            file.write(PROGRAM)
        for _ in range(TURNS):
            for way, how in WAYS.items():
                if ONLY and not any(word in way for word in ONLY):
                    continue
                command, environment = [sys.executable, program], {**os.environ, **JOB}
                if how:
                    gputrace = os.path.join(FOLDER, how[0])
                    if not os.path.exists(gputrace):
                        continue
                    command = [gputrace, "record", "-o", os.path.join(work, "%p.gtr"), *how[1], "--", *command]
                    environment["GPUTRACE_LIBRARY"] = os.path.join(FOLDER, "libgputrace.so")
                run = subprocess.run(command, env=environment, capture_output=True, text=True)
                if run.returncode:
                    print("FAIL", way, run.returncode, run.stderr[-300:], flush=True)
                    failed = True
                    continue
                runs[way].append([float(word) for word in run.stdout.split()])
                traces = glob.glob(os.path.join(work, "*.gtr"))
                if how:
                    summary = subprocess.run([os.path.join(FOLDER, "gputrace"), "summary", "--json", *traces], capture_output=True, text=True)
                    if summary.returncode or not json.loads(summary.stdout):
                        print("FAIL", way, summary.stderr[-300:], flush=True)
                        failed = True
                for file in glob.glob(os.path.join(work, "*.gtr*")):
                    os.unlink(file)
            table(runs)
    sys.exit(failed)


def table(runs):
    print(f"{'':42}{'step, µs':>32}{'its 99th percentile':>30}{'a pair, ns':>28}")
    for way, found in runs.items():
        if found:
            cells = [f"{statistics.median(column):.0f} ({min(column):.0f} to {max(column):.0f})" for column in zip(*found)]
            print(f"{way:42}{cells[0]:>32}{cells[1]:>30}{cells[2]:>28}", flush=True)


if __name__ == "__main__":
    main()
