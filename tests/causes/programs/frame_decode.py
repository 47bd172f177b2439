"""Decode the latents of a generated clip into frames."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class PatchExpand(nn.Module):
    """Doubles height and width: every position predicts the four below it."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.n_out = n_out
        self.proj = nn.Linear(n_in, 4 * n_out)

    def forward(self, x):
        f, h, w, _ = x.shape
        x = self.proj(x).view(f, h, w, 2, 2, self.n_out)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(f, 2 * h, 2 * w, self.n_out)
        return nn.functional.silu(x)


class FrameDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(16, 128)
        self.up = nn.Sequential(PatchExpand(128, 128), PatchExpand(128, 128), PatchExpand(128, 128))
        self.proj_out = nn.Linear(128, 3)
        self.use_slicing = False

    def decode_frames(self, z):
        return self.proj_out(self.up(self.proj_in(z)))

    def decode(self, z):
        if self.use_slicing:
            return torch.cat([self.decode_frames(part) for part in z.split(4)])
        return self.decode_frames(z)


class Pipeline:
    def __init__(self):
        self.vae = FrameDecoder().to("cuda", torch.bfloat16).eval()

    def sample(self, frames, height, width, steps=4):
        z = torch.randn(frames, height // 8, width // 8, 16, device="cuda", dtype=torch.bfloat16)
        for _ in range(steps):
            z = z - 0.1 * torch.tanh(z)
        return z

    @torch.no_grad()
    def __call__(self, frames, height=704, width=1280):
        latents = self.sample(frames, height, width)
        print(f"{frames} frames sampled, allocated {torch.cuda.memory_allocated() >> 20} MiB")
        return self.vae.decode(latents).clamp(-1, 1)


def main():
    torch.manual_seed(0)
    pipe = Pipeline()
    pipe.vae.use_slicing = FIXED
    clip = pipe(frames=9)
    print(f"preview {tuple(clip.shape)} peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    frames = int(0.55 * CARD / (128 * 704 * 1280 * 2))
    clip = pipe(frames=frames)
    print(f"clip {tuple(clip.shape)} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
