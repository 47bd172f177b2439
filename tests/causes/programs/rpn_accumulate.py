"""Region-proposal training that sums several sub-batches per optimizer step."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Config:
    iter_size = 48
    images_per_sub_batch = max(1, round(CARD / 20e9))
    min_size, max_size = 1024, 1344


class ProposalNet(nn.Module):
    def __init__(self, width=64, anchors=9):
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()]
        for _ in range(5):
            layers += [nn.Conv2d(width, width, 3, 1, 1), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.objectness = nn.Conv2d(width, anchors, 1, stride=8)

    def forward(self, images, labels):
        scores = self.objectness(self.body(images))
        return F.binary_cross_entropy_with_logits(scores, labels)


def sub_batch(cfg, gen):
    images = torch.rand(cfg.images_per_sub_batch, 3, cfg.min_size, cfg.max_size, generator=gen, device="cuda")
    labels = torch.rand(cfg.images_per_sub_batch, 9, cfg.min_size // 16, cfg.max_size // 16, generator=gen, device="cuda")
    return images, (labels > 0.9).float()


def train_iteration(cfg, model, optimizer, gen):
    optimizer.zero_grad()
    total = 0
    for inner in range(cfg.iter_size):
        loss = model(*sub_batch(cfg, gen)) / cfg.iter_size
        if FIXED:
            loss.backward()
            loss = loss.detach()
        total = total + loss
        if inner % 8 == 0:
            print(f"sub-batch {inner} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    if not FIXED:
        total.backward()
    optimizer.step()
    return total.item()


def main():
    torch.manual_seed(0)
    cfg = Config()
    model = ProposalNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gen = torch.Generator("cuda").manual_seed(0)
    for iteration in range(1):
        print("loss", train_iteration(cfg, model, optimizer, gen))


if __name__ == "__main__":
    main()
