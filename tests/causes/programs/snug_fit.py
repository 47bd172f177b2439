"""A batch chosen so that the training step uses most of the card, and fits."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


CARD = torch.cuda.mem_get_info()[1]
WIDTH, DEPTH = 4096, 12


def network():
    return nn.Sequential(*(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))).cuda()


def rows_for(share):
    per_row = DEPTH * WIDTH * 4
    fixed = DEPTH * WIDTH * WIDTH * 4 * 4
    return int((share * CARD - fixed) / per_row)


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows = rows_for(0.66)
    for step in range(6):
        x = torch.randn(rows, WIDTH, device="cuda")
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} rows {rows} loss {loss.item():.5f} peak {torch.cuda.max_memory_allocated() / CARD:.2f} of the card")


if __name__ == "__main__":
    main()
