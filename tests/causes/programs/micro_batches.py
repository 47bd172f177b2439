"""Gradient accumulation over eight micro-batches per optimizer step."""
import atexit

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def network(dim=3072, depth=8):
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(dim, dim), nn.SiLU())), nn.Linear(dim, 100)).cuda()


def micro_batches(count, size, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        yield (torch.randn(size, 3072, generator=gen, device="cuda"),
               torch.randint(0, 100, (size,), generator=gen, device="cuda"))


def optimizer_step(model, optimizer, seed, accumulate=8):
    total = 0.0
    for x, y in micro_batches(accumulate, 512, seed):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(12):
        loss = optimizer_step(model, optimizer, step)
        print(f"step {step} loss {loss:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
