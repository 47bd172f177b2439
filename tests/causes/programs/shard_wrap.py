"""Flatten a model into contiguous parameter buffers, then train it."""
import atexit
import contextlib
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def build(depth=40, dim=2048):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(dim, dim), nn.GELU()]
    return nn.Sequential(*layers).cuda()


class FlatWrapper(nn.Module):
    """Holds all parameters of a module as views of one flat buffer."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        params = list(module.parameters())
        full = torch.cat([p.detach().reshape(-1).double() for p in params])
        scaled = full * (full.abs() < 1.0)
        self.flat = scaled.float()
        offset = 0
        for p in params:
            p.data = self.flat[offset:offset + p.numel()].view_as(p)
            offset += p.numel()

    def forward(self, x):
        return self.module(x)


@contextlib.contextmanager
def setup_scope():
    if FIXED:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def train(model, steps):
    optimizer = torch.optim.SGD(model.module.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(4096, 2048, device="cuda")
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB "
          f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with setup_scope():
        model = FlatWrapper(build())
    print(f"wrapped: allocated {torch.cuda.memory_allocated() >> 20} MiB reserved {torch.cuda.memory_reserved() >> 20} MiB")
    train(model, 12)


if __name__ == "__main__":
    main()
