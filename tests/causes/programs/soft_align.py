"""Soft dynamic time warping loss between two batches of sequences."""
import atexit
import sys

import torch

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def euclidean(x, y):
    """Squared distance between every frame of x and every frame of y."""
    if FIXED:
        x_norm = x.pow(2).sum(-1).unsqueeze(-1)
        y_norm = y.pow(2).sum(-1).unsqueeze(-2)
        return (x_norm + y_norm - 2.0 * torch.bmm(x, y.mT)).clamp_min(0.0)
    n, m, d = x.size(1), y.size(1), x.size(2)
    x = x.unsqueeze(2).expand(-1, n, m, d)
    y = y.unsqueeze(1).expand(-1, n, m, d)
    return torch.pow(x - y, 2).sum(3)


def soft_min(a, b, c, gamma):
    return -gamma * torch.logsumexp(torch.stack([a, b, c]) / -gamma, 0)


def banded_cost(distance, gamma=1.0, band=24):
    """A few anti-diagonals of the recursion are enough for a training signal."""
    total = distance[:, 0, 0]
    for k in range(1, band):
        diag = distance.diagonal(offset=k, dim1=1, dim2=2).mean(1)
        low = distance.diagonal(offset=-k, dim1=1, dim2=2).mean(1)
        mid = distance.diagonal(dim1=1, dim2=2).mean(1)
        total = total + soft_min(diag, low, mid, gamma)
    return total


def step(encoder, optimizer, a, b):
    distance = euclidean(encoder(a), encoder(b))
    loss = banded_cost(distance).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    encoder = torch.nn.Linear(40, 64).cuda()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-4)
    full = int(0.6 * CARD / (512 * 512 * 64 * 4))
    for batch in (full // 16, full // 8, full // 4, full):
        a = torch.randn(batch, 512, 40, device="cuda")
        b = torch.randn(batch, 512, 40, device="cuda")
        print(f"batch {batch} loss {step(encoder, optimizer, a, b):.3f} "
              f"peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
