"""Train a detection-transformer style encoder on feature-map tokens."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class EncoderLayer(nn.Module):
    def __init__(self, dim=256, heads=8):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, src, pos):
        q = k = src + pos
        if FIXED:
            attended, _ = self.self_attn(q, k, value=src, need_weights=False)
        else:
            attended, _ = self.self_attn(q, k, value=src)
        src = self.norm1(src + attended)
        return self.norm2(src + self.linear2(torch.relu(self.linear1(src))))


class Encoder(nn.Module):
    def __init__(self, depth=4, dim=256, side=40):
        super().__init__()
        self.backbone = nn.Conv2d(3, dim, 16, stride=16)
        self.pos = nn.Parameter(torch.randn(side * side, dim) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(depth))
        self.box_head = nn.Linear(dim, 4)

    def forward(self, images):
        tokens = self.backbone(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens, self.pos)
        return self.box_head(tokens).sigmoid()


def train(model, steps, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gen = torch.Generator("cuda").manual_seed(0)
    for step in range(steps):
        images = torch.rand(batch, 3, 640, 640, generator=gen, device="cuda")
        target = torch.rand(batch, 1600, 4, generator=gen, device="cuda")
        loss = (model(images) - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    train(Encoder().cuda(), steps=16, batch=8)


if __name__ == "__main__":
    main()
