"""Low-latency encoder: record the forward pass once per input and replay it afterwards."""
import atexit
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Encoder(nn.Module):
    def __init__(self, dim=1024, depth=6, heads=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, batch_first=True)
                                    for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class GraphRunner:
    def __init__(self, model):
        self.model = model
        self.recorded = {}
        self.warmup = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle() if FIXED else None

    def record(self, length):
        static_in = torch.zeros(8, length, 1024, device="cuda", dtype=torch.bfloat16)
        self.warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.warmup):
            self.model(static_in)
        torch.cuda.current_stream().wait_stream(self.warmup)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            static_out = self.model(static_in)
        return graph, static_in, static_out

    def __call__(self, x):
        length = x.shape[1]
        if FIXED:
            padded = next(n for n in (1024, 768, 512, 256) if n >= length and n - length < 256)
            x = F.pad(x, (0, 0, 0, padded - length))
            length = padded
        if length not in self.recorded:
            self.recorded[length] = self.record(length)
        graph, static_in, static_out = self.recorded[length]
        static_in.copy_(x)
        graph.replay()
        return static_out.clone()


@torch.no_grad()
def main():
    torch.manual_seed(0)
    random.seed(0)
    runner = GraphRunner(Encoder().to("cuda", torch.bfloat16).train())
    if FIXED:
        for length in (1024, 768, 512, 256):
            runner(torch.randn(8, length, 1024, device="cuda", dtype=torch.bfloat16))
    for i in range(40):
        length = random.randint(200, 1024)
        runner(torch.randn(8, length, 1024, device="cuda", dtype=torch.bfloat16))
        if i % 8 == 0:
            print(f"request {i} length {length} recorded {len(runner.recorded)} reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
