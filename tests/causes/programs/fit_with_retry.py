"""Training step that halves its batch when the card is too small for it."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]
WIDTH, DEPTH = 4096, 12


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def build():
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers).cuda()


def forward_backward(model, batch_size):
    x = torch.randn(batch_size, WIDTH, device="cuda")
    hidden = [x]
    for layer in model:
        hidden.append(layer(hidden[-1]))
    loss = hidden[-1].pow(2).mean()
    loss.backward()
    return loss.item()


def robust_step(model, batch_size):
    if FIXED:
        failed = False
        try:
            return batch_size, forward_backward(model, batch_size)
        except torch.OutOfMemoryError:
            failed = True
        if failed:
            model.zero_grad()
            torch.cuda.empty_cache()
            return robust_step(model, batch_size // 2)
    try:
        return batch_size, forward_backward(model, batch_size)
    except torch.OutOfMemoryError as error:
        if batch_size < 4096:
            raise
        print(f"batch {batch_size} did not fit ({str(error)[:60]}...), trying half")
        model.zero_grad()
        torch.cuda.empty_cache()
        print(f"allocated now {torch.cuda.memory_allocated() >> 20} MiB")
        return robust_step(model, batch_size // 2)


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch_size = int(1.3 * CARD / (2 * DEPTH * WIDTH * 4))
    for step in range(3):
        optimizer.zero_grad()
        batch_size, loss = robust_step(model, batch_size)
        optimizer.step()
        print(f"step {step} batch {batch_size} loss {loss:.5f}")


if __name__ == "__main__":
    main()
