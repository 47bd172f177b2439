"""Training that logs scalars and per-class counts over the whole run, as Python numbers and small tensors."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class RunLog:
    def __init__(self, classes):
        self.scalars = []
        self.counts = torch.zeros(classes, device="cuda")
        self.last_confusion = None

    def record(self, loss, logits, labels):
        self.scalars.append(loss.item())
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self.last_confusion = logits.detach().softmax(-1)


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 5000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = RunLog(5000)
    for step in range(60):
        x = torch.randn(8192, 1024, device="cuda")
        labels = torch.randint(0, 5000, (8192,), device="cuda")
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.record(loss, logits, labels)
        if step % 12 == 0:
            print(f"step {step} loss {log.scalars[-1]:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
