"""Plain Adam training: gradients and optimizer state come into being in the first step."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(3072, 3072), nn.Tanh()))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    losses = []
    for step in range(40):
        x = torch.randn(1024, 3072, device="cuda")
        loss = (model(x) - 0.5 * x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step < 3 or step % 10 == 0:
            print(f"step {step} loss {losses[-1]:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
