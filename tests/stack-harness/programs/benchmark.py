"""What a capture costs, in nanoseconds: in a hot loop, from a deep stack, and in the steps of a PyTorch training loop.

Usage: LD_PRELOAD=libstack_harness.so python3 benchmark.py        (build with --release)
"""
import ctypes, os, time

harness = ctypes.CDLL(None)
harness.harness_repeat.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
harness.harness_mode.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
harness.harness_times.restype = ctypes.c_double
MODES = {1: "native", 2: "Python", 3: "both"}


def repeat(want, n=100_000):
    start = time.perf_counter()
    harness.harness_repeat(want, n)
    return (time.perf_counter() - start) / n * 1e9


def deep(n, measure):
    return deep(n - 1, measure) if n else measure()


def best(want):
    return min(repeat(want) for _ in range(5))


for depth in 1, 20, 100, 300:
    for want, name in MODES.items():
        print(f"{depth:4} Python frames deep, the same stack again: {name:7} {deep(depth, lambda: best(want)):7.0f} ns")

try:
    import torch, torch.nn as nn
except ImportError:
    raise SystemExit("skipped: no PyTorch in this interpreter")
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(d, d), nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


model = nn.Sequential(*[Block(64) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
batch = torch.randn(16, 64)


def step():
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()


def silently(call):
    keep, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try: return call()
    finally: os.dup2(keep, 2); os.close(keep); os.close(null)


for _ in range(10): step()
for want, name in MODES.items():
    medians = []
    for _ in range(15):
        harness.harness_mode(2, want, 1)
        for _ in range(10): step()
        harness.harness_mode(0, want, 1)
        medians.append(silently(harness.harness_times))
    harness.harness_mode(2, want, 1)
    for _ in range(40): step()
    harness.harness_mode(0, want, 1)
    print(f"training step, every posix_memalign, {name}: median of the best of 15 runs {min(medians):.0f} ns; one run:", flush=True)
    harness.harness_times()
