"""Train a video diffusion transformer with two-stream and one-stream blocks."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def mlp(dim):
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class DoubleBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.video_mlp, self.text_mlp = mlp(dim), mlp(dim)

    def forward(self, video, text):
        text = text + self.text_mlp(text)
        return video + self.video_mlp(video) + text.mean(1, keepdim=True), text


class SingleBlock(nn.Module):
    def __init__(self, dim, heads=16):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), mlp(dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class VideoTransformer(nn.Module):
    def __init__(self, dim=1024, n_double=6, n_single=14):
        super().__init__()
        self.double_blocks = nn.ModuleList(DoubleBlock(dim) for _ in range(n_double))
        self.single_blocks = nn.ModuleList(SingleBlock(dim) for _ in range(n_single))
        self.out = nn.Linear(dim, dim)
        self.gradient_checkpointing = True

    def run(self, block, *args):
        return checkpoint(block, *args, use_reentrant=False) if self.gradient_checkpointing else block(*args)

    def forward(self, video, text):
        for block in self.double_blocks:
            video, text = self.run(block, video, text)
        x = torch.cat([video, text], 1)
        for block in self.single_blocks:
            if FIXED:
                x = self.run(block, x)
            else:
                x = block(x)
        return self.out(x[:, :video.shape[1]])


def main():
    torch.manual_seed(0)
    model = VideoTransformer().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(8):
        video = torch.randn(1, 16384, 1024, device="cuda", dtype=torch.bfloat16)
        text = torch.randn(1, 256, 1024, device="cuda", dtype=torch.bfloat16)
        loss = (model(video, text) - video).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
