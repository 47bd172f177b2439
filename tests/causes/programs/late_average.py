"""Stochastic weight averaging that starts in the last third of the training."""
import atexit

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def network():
    return nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(2560, 2560), nn.SiLU()))).cuda()


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model, averaged = network(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(45):
        x = torch.randn(1024, 2560, device="cuda")
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 30:
            averaged = AveragedModel(model)
        elif averaged is not None:
            averaged.update_parameters(model)
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    with torch.no_grad():
        print("averaged loss", (averaged(x) - x).pow(2).mean().item())


if __name__ == "__main__":
    main()
