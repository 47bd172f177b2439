"""Learning-rate range test: raise the rate exponentially, then restore the weights and train."""
import atexit
import copy

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def network():
    return nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(2048, 2048), nn.GELU())), nn.Linear(2048, 10)).cuda()


def batch(step):
    gen = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(2048, 2048, generator=gen, device="cuda")
    return x, x[:, :10].argmax(1)


def train_step(model, optimizer, step):
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class RangeTest:
    def __init__(self, model):
        self.model = model
        self.initial = copy.deepcopy(model.state_dict())
        self.history = []

    def run(self, low=1e-6, high=1.0, steps=25):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=low)
        for step in range(steps):
            rate = low * (high / low) ** (step / (steps - 1))
            for group in optimizer.param_groups:
                group["lr"] = rate
            self.history.append((rate, train_step(self.model, optimizer, step)))
            if self.history[-1][1] > 4 * min(l for _, l in self.history):
                break
        self.model.load_state_dict(self.initial)
        return min(self.history, key=lambda h: h[1])[0] / 10


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = network()
    rate = RangeTest(model).run()
    print(f"suggested rate {rate:.2e}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(20):
        loss = train_step(model, optimizer, 100 + step)
    print(f"loss {loss:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
