"""Data-parallel training script, launched here as a single rank."""
import atexit
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class WideEncoder(nn.Module):
    def __init__(self, vocab=8000, dim=2048, depth=14):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(),
                                                  nn.Linear(2 * dim, dim)) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def wrap(model):
    model = model.cuda()
    if FIXED:
        return DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    return DistributedDataParallel(model, device_ids=[0])


def train(model, optimizer, steps):
    for step in range(steps):
        tokens = torch.randint(0, 8000, (2, 65), device="cuda")
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = wrap(WideEncoder())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"weights {weights >> 20} MiB, after wrapping {torch.cuda.memory_allocated() >> 20} MiB")
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 16)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
