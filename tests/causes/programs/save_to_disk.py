"""Checkpoints every few steps: weights and optimizer state go to the CPU and then to disk, the last two are kept."""
import atexit
import os
import shutil
import tempfile

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def to_cpu(tree):
    if torch.is_tensor(tree):
        return tree.to("cpu", copy=True)
    if isinstance(tree, dict):
        return {k: to_cpu(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(to_cpu(v) for v in tree)
    return tree


class Saver:
    def __init__(self, folder, keep=2):
        self.folder, self.keep, self.paths = folder, keep, []

    def save(self, step, model, optimizer):
        path = os.path.join(self.folder, f"step_{step}.pt")
        torch.save(to_cpu({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}), path)
        self.paths.append(path)
        while len(self.paths) > self.keep:
            os.remove(self.paths.pop(0))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.ReLU()))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = tempfile.mkdtemp(prefix="ckpt_")
    saver = Saver(folder)
    try:
        for step in range(24):
            x = torch.randn(2048, 2048, device="cuda")
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 5:
                saver.save(step, model, optimizer)
                print(f"step {step} loss {loss.item():.4f} saved, allocated {torch.cuda.memory_allocated() >> 20} MiB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
