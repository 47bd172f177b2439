"""Progressive resizing of the training images."""
import atexit

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def convnet(width=48):
    layers, n_in = [], 3
    for stride in (2, 1, 2, 1, 2):
        layers += [nn.Conv2d(n_in, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        n_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).cuda()


def epoch(model, optimizer, size, batches, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    for _ in range(batches):
        images = torch.rand(64, 3, size, size, generator=gen, device="cuda")
        labels = torch.randint(0, 10, (64,), generator=gen, device="cuda")
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for number, size in enumerate((96, 128, 160, 192, 256, 320, 320)):
        loss = epoch(model, optimizer, size, 6, number)
        print(f"epoch {number} size {size} loss {loss:.3f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
