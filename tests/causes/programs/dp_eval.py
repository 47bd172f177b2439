"""Per-sample gradient training with a periodic accuracy check."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class GradSampler:
    """Computes per-sample gradient norms of the Linear layers of a model."""

    def __init__(self, model):
        self.model = model
        self.norms = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.activations = []
                module.register_forward_hook(self.capture_activation)
                module.register_full_backward_hook(self.capture_backprop)

    def capture_activation(self, module, inputs, output):
        if not module.training:
            return
        module.activations.append(inputs[0].detach())

    def capture_backprop(self, module, grad_in, grad_out):
        acts = module.activations.pop()
        per_sample = acts.pow(2).sum(1) * grad_out[0].pow(2).sum(1)
        self.norms.append(per_sample.sqrt().max().item())


def batch(size, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(size, 2048, generator=gen, device="cuda"),
            torch.randint(0, 10, (size,), generator=gen, device="cuda"))


def accuracy(model, seed, n_batches=6):
    if FIXED:
        model.eval()
    hits = 0
    with torch.no_grad():
        for i in range(n_batches):
            x, y = batch(4096, seed * 100 + i)
            hits += (model(x).argmax(1) == y).sum().item()
    model.train()
    return hits / (4096 * n_batches)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    sampler = GradSampler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(40):
        x, y = batch(512, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step} acc {accuracy(model, step):.3f} max norm {max(sampler.norms[-3:]):.3f} "
                  f"allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
