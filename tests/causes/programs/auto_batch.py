"""Pick the largest micro-batch for this card, then train with it."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def build(width=8192, tokens=256):
    depth = int(0.08 * CARD / (width * width * 4))
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers).cuda()


def batch_of(size, width=8192, tokens=256):
    return torch.randn(size, tokens, width, device="cuda")


def forward_backward(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def probe(model, size):
    """Peak bytes of one training step at this micro-batch size."""
    torch.cuda.empty_cache()
    shadow = None
    if FIXED:
        shadow = torch.optim.AdamW(model.parameters(), lr=0.0)
        forward_backward(model, batch_of(1))
        shadow.step()
        model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    forward_backward(model, batch_of(size))
    peak = torch.cuda.max_memory_allocated()
    model.zero_grad()
    del shadow
    return peak


def resolve_micro_batch(model, target=0.88, small=32, large=64):
    low, high = probe(model, small), probe(model, large)
    per_sample = (high - low) / (large - small)
    best = int((target * CARD - low) / per_sample) + small
    print(f"per sample {per_sample / 2**20:.0f} MiB, micro-batch {best}")
    torch.cuda.empty_cache()
    return best


def train(model, micro_batch, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = forward_backward(model, batch_of(micro_batch))
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build()
    train(model, resolve_micro_batch(model), 4)


if __name__ == "__main__":
    main()
