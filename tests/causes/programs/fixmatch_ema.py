"""Semi-supervised training with an averaged model used for evaluation."""
import atexit
import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def wide_net(dim=3072, depth=14, classes=100):
    layers = [nn.Flatten(), nn.Linear(3 * 32 * 32, dim)]
    for _ in range(depth):
        layers += [nn.GELU(), nn.Linear(dim, dim)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(dim, classes))


class Averager:
    def __init__(self, model, decay=0.99):
        self.decay = decay
        self.device = "cpu" if FIXED else "cuda"
        self.shadow = copy.deepcopy(model).to(self.device).eval().requires_grad_(False)
        self.backup = None

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p.to(self.device), alpha=1 - self.decay)

    def apply_shadow(self, model):
        self.backup = {k: v.clone().to(self.device) for k, v in model.state_dict().items()}
        model.load_state_dict(self.shadow.state_dict())

    def restore(self, model):
        model.load_state_dict(self.backup)


def fixmatch_loss(model, labelled, targets, weak, strong):
    with torch.no_grad():
        prob, pseudo = model(weak).softmax(-1).max(-1)
    unlabelled = (F.cross_entropy(model(strong), pseudo, reduction="none") * (prob > 0.5)).mean()
    return F.cross_entropy(model(labelled), targets) + unlabelled


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = wide_net().cuda()
    ema = Averager(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(12):
        images = torch.rand(64, 3, 32, 32, device="cuda")
        weak = torch.rand(192, 3, 32, 32, device="cuda")
        loss = fixmatch_loss(model, images, torch.randint(0, 100, (64,), device="cuda"), weak, 1 - weak)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            ema.update(model)
            ema.apply_shadow(model)
            with torch.no_grad():
                score = model(images).softmax(-1).max().item()
            ema.restore(model)
            print(f"step {step} loss {loss.item():.3f} score {score:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
