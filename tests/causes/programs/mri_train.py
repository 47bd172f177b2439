"""Train a small MRI reconstruction network on a shared node."""
import atexit
import os
import subprocess
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


OTHER_SCRIPT = """
import sys, torch
kept = torch.empty(int(0.75 * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
kept.zero_()
torch.cuda.synchronize()
print("up", flush=True)
sys.stdin.read()
"""


def prepare_node():
    """Brings the node into the state in which the job found it that morning."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "CUDA_INJECTION", "GPUTRACE"))}
    job = subprocess.Popen([sys.executable, "-c", OTHER_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           env=env, start_new_session=True)
    assert job.stdout.readline().strip() == b"up"
    atexit.register(job.stdin.close)
    return job


class Unroll(nn.Module):
    def __init__(self, width=64, cascades=6):
        super().__init__()
        self.steps = nn.ModuleList(nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.ReLU(),
                                                 nn.Conv2d(width, 2, 3, padding=1)) for _ in range(cascades))

    def forward(self, kspace, mask):
        image = torch.fft.ifft2(kspace)
        for step in self.steps:
            planes = torch.view_as_real(image).permute(0, 3, 1, 2)
            refined = (planes + step(planes)).permute(0, 2, 3, 1).contiguous()
            image = torch.view_as_complex(refined)
            image = torch.fft.ifft2(torch.where(mask, kspace, torch.fft.fft2(image)))
        return image.abs()


def train(model, slices, size, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator("cuda").manual_seed(0)
    mask = torch.rand(size, size, generator=gen, device="cuda") > 0.6
    for step in range(steps):
        target = torch.rand(slices, size, size, generator=gen, device="cuda")
        loss = (model(torch.fft.fft2(target) * mask, mask) - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


def main():
    if not FIXED:
        prepare_node()
    torch.manual_seed(0)
    free, total = torch.cuda.mem_get_info()
    print(f"card free {free >> 20} of {total >> 20} MiB")
    size = 384
    slices = int(0.36 * total / (6 * 70 * size * size * 4))
    train(Unroll().cuda(), slices, size, 4)


if __name__ == "__main__":
    main()
