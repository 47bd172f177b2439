"""Roll a weather surrogate forward in mixed precision and score each lead time."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class ProcessorBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.lin_self = nn.Linear(dim, dim)
        self.lin_value = nn.Linear(dim, dim)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.projection(torch.tanh(self.lin_self(h)) * self.lin_value(h))


class Surrogate(nn.Module):
    def __init__(self, fields=96, dim=4096, depth=18):
        super().__init__()
        self.encoder = nn.Linear(fields, dim)
        self.processor = nn.ModuleList(ProcessorBlock(dim) for _ in range(depth))
        self.decoder = nn.Linear(dim, fields)

    def forward(self, state):
        h = self.encoder(state)
        for block in self.processor:
            h = block(h)
        return state + 0.1 * self.decoder(h)


@torch.no_grad()
def rollout(model, state, lead_times):
    rmse = []
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=not FIXED):
        for lead in range(lead_times):
            state = model(state)
            rmse.append(state.float().pow(2).mean().sqrt().item())
            print(f"lead {lead} rms {rmse[-1]:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    return rmse


def main():
    torch.manual_seed(0)
    model = Surrogate().cuda().eval()
    grid = torch.randn(2048, 96, device="cuda")
    print(f"model {torch.cuda.memory_allocated() >> 20} MiB")
    for start in range(3):
        rollout(model, grid + start, 4)


if __name__ == "__main__":
    main()
