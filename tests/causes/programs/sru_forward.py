"""A gated unit written as a custom autograd function, scored on held-out sequences."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        g = torch.sigmoid(gate)
        out = g * torch.tanh(x)
        if FIXED:
            ctx.save_for_backward(g, out)
        else:
            ctx.g, ctx.out = g, out
        return out

    @staticmethod
    def backward(ctx, grad):
        g, out = ctx.saved_tensors if FIXED else (ctx.g, ctx.out)
        t = out / g
        return grad * g * (1 - t * t), grad * t * g * (1 - g)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.value, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + GatedUnit.apply(self.value(x), self.gate(x))


class Scorer(nn.Module):
    def __init__(self, dim=1024, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1)).squeeze(-1)


def train_step(model, optimizer, x, y):
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def rank_candidates(model, candidates):
    scores = model(candidates)
    return scores.argmax().item()


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Scorer().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(16):
        x = torch.randn(64, 128, 1024, device="cuda")
        loss = train_step(model, optimizer, x, x.mean((1, 2)))
        best = rank_candidates(model, torch.randn(96, 128, 1024, device="cuda"))
        if step % 4 == 0:
            print(f"step {step} loss {loss:.4f} best {best} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
