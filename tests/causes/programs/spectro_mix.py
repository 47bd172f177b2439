"""PyTorch computes frame embeddings, CuPy clusters them; both on one card."""
import atexit
import sys

import cupy
import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def torch_backed(size):
    """CuPy allocation served from PyTorch's memory."""
    block = torch.empty(max(size, 512), dtype=torch.uint8, device="cuda")
    memory = cupy.cuda.UnownedMemory(block.data_ptr(), block.nbytes, block)
    return cupy.cuda.MemoryPointer(memory, 0)


def embedder():
    return nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()


@torch.no_grad()
def embed(net, n_frames):
    frames = torch.randn(n_frames, 128, device="cuda")
    return net(frames)[: n_frames // 64].clone()


def cluster(points, n_centres, iterations):
    x = cupy.from_dlpack(points)
    centres = x[:n_centres].copy()
    for _ in range(iterations):
        distance = (x * x).sum(1)[:, None] - 2 * x @ centres.T + (centres * centres).sum(1)[None]
        label = distance.argmin(1)
        del distance
        for c in range(4):
            centres[c] = x[label == c].mean(0)
    return centres


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if FIXED:
        cupy.cuda.set_allocator(torch_backed)
    net = embedder()
    n_frames = int(0.82 * CARD / (2 * 1024 * 4 + 128 * 4))
    points = embed(net, n_frames)
    print(f"embedded {n_frames} frames: allocated {torch.cuda.memory_allocated() >> 20} MiB "
          f"reserved {torch.cuda.memory_reserved() >> 20} MiB")
    n_centres = int(0.15 * CARD / (len(points) * 4))
    centres = cluster(points, n_centres, 3)
    print("centre spread", float(centres.std()))


if __name__ == "__main__":
    main()
