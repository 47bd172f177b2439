"""One-stage detector trained at several scales; the scale is drawn anew every few batches."""
import atexit
import random
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Detector(nn.Module):
    def __init__(self, width=64, boxes=5):
        super().__init__()
        layers, n_in = [], 3
        for _ in range(8):
            layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.LeakyReLU(0.1)]
            n_in = width
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, boxes * 5, 1, stride=32)

    def forward(self, images):
        return self.head(self.trunk(images))


class ScaleSchedule:
    def __init__(self, every=4):
        self.rng = random.Random(3)
        self.every, self.seen, self.size = every, 0, 320

    def next_size(self):
        if self.seen and self.seen % self.every == 0:
            self.size = (384, 416, 480, 608)[min(self.seen // self.every, 4) - 1]
        self.seen += 1
        return self.size


def train(model, batch, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = ScaleSchedule()
    gen = torch.Generator("cuda").manual_seed(0)
    for step in range(steps):
        size = schedule.next_size()
        images = torch.rand(batch, 3, size, size, generator=gen, device="cuda")
        loss = model(images).sigmoid().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} size {size} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    batch = int(0.5 * CARD / (16 * 64 * 416 * 416 * 4))
    if FIXED:
        batch = max(1, batch // 16)
    train(Detector().cuda(), batch, steps=24)


if __name__ == "__main__":
    main()
