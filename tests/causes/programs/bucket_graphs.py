"""CUDA graphs for a fixed set of batch sizes, captured at start-up and replayed."""
import atexit
import random

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


SIZES = (64, 32, 16, 8, 4)


def network():
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(4096, 4096), nn.GELU()))).to("cuda", torch.bfloat16)


class Captured:
    def __init__(self, model, size, pool):
        self.static_in = torch.zeros(size * 64, 4096, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(self.static_in)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.static_out = model(self.static_in)

    def __call__(self, x):
        self.static_in[:len(x)].copy_(x)
        self.graph.replay()
        return self.static_out[:len(x)].clone()


@torch.no_grad()
def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    model = network()
    pool = torch.cuda.graph_pool_handle()
    captured = {size: Captured(model, size, pool) for size in SIZES}
    print(f"captured {len(captured)} graphs, reserved {torch.cuda.memory_reserved() >> 20} MiB")
    for i in range(60):
        wanted = rng.randrange(1, 65)
        size = min(s for s in SIZES if s >= wanted)
        out = captured[size](torch.randn(wanted * 64, 4096, device="cuda", dtype=torch.bfloat16))
        if i % 10 == 0:
            print(f"request {i} of {wanted} on {size}: {out.float().std().item():.4f} reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
