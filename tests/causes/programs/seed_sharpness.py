"""Compare the sharpness of freshly initialised networks over many seeds."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def build(seed, width=2048, depth=4):
    torch.manual_seed(seed)
    layers = [nn.Linear(512, width), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    layers.append(nn.Linear(width, 10))
    return nn.Sequential(*layers).cuda()


def gradients(model, x, y):
    loss = F.cross_entropy(model(x), y)
    if FIXED:
        return torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward(create_graph=True)
    return [p.grad for p in model.parameters()]


def sharpness(model, x, y):
    grads = gradients(model, x, y)
    flat = torch.cat([g.reshape(-1) for g in grads])
    return flat.norm().item()


def main():
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2048, 512, generator=gen, device="cuda")
    y = torch.randint(0, 10, (2048,), generator=gen, device="cuda")
    results = {}
    for seed in range(18):
        model = build(seed)
        results[seed] = sharpness(model, x, y)
        del model
        if seed % 4 == 0:
            print(f"seed {seed} sharpness {results[seed]:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    best = min(results, key=results.get)
    print("flattest seed", best, results[best])


if __name__ == "__main__":
    main()
