"""Build a family of residual networks and report their size and feature statistics."""
import atexit
import sys
import weakref

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.body(x)


class ProbedNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Linear(256, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.stats = {}
        owner = weakref.proxy(self) if FIXED else self

        def note_scale(module, inputs, output):
            owner.stats["scale"] = output.std().item()

        self.blocks.register_forward_hook(note_scale)

    def forward(self, x):
        return self.blocks(self.stem(x))


def describe(width, depth, x):
    net = ProbedNet(width, depth).to("cuda")
    with torch.no_grad():
        net(x)
    params = sum(p.numel() for p in net.parameters())
    return params, net.stats["scale"]


def main():
    torch.manual_seed(0)
    x = torch.randn(128, 256, device="cuda")
    for trial in range(24):
        width, depth = 1536 + 64 * (trial % 4), 8 + trial % 3
        params, scale = describe(width, depth, x)
        print(f"width {width} depth {depth} params {params / 1e6:.1f}M scale {scale:.3f} "
              f"allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
