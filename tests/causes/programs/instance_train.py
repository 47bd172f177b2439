"""Instance-segmentation style training from a config."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Config:
    IMS_PER_BATCH = 4 if FIXED else 8
    WIDTH = 64
    DEPTH = 10
    IMAGE_SIZE = int((0.16 * CARD / (64 * 4 * 10)) ** 0.5) // 32 * 32
    MAX_ITER = 3
    BASE_LR = 0.0025


class MaskNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        layers = [nn.Conv2d(3, cfg.WIDTH, 3, padding=1), nn.ReLU()]
        for _ in range(cfg.DEPTH - 1):
            layers += [nn.Conv2d(cfg.WIDTH, cfg.WIDTH, 3, padding=1), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.mask_head = nn.Conv2d(cfg.WIDTH, 1, 1)

    def forward(self, images):
        return self.mask_head(self.backbone(images))


def mapper(cfg, gen):
    images = torch.rand(cfg.IMS_PER_BATCH, 3, cfg.IMAGE_SIZE, cfg.IMAGE_SIZE, generator=gen, device="cuda")
    return images, (images.mean(1, keepdim=True) > 0.5).float()


class DefaultTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = MaskNet(cfg).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg.BASE_LR)
        self.gen = torch.Generator("cuda").manual_seed(0)

    def run_step(self, iteration):
        images, masks = mapper(self.cfg, self.gen)
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(images), masks)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        print(f"iter {iteration} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")

    def train(self):
        print(f"{self.cfg.IMS_PER_BATCH} images of {self.cfg.IMAGE_SIZE} pixels")
        for iteration in range(self.cfg.MAX_ITER):
            self.run_step(iteration)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = True
    DefaultTrainer(Config()).train()
