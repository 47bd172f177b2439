"""Feeds a model from two pinned staging buffers; partial last batches use a slice of them."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Staging:
    def __init__(self, rows, dim):
        self.slots = [torch.empty(rows, dim, pin_memory=True) for _ in range(2)]
        self.events = [None, None]

    def upload(self, index, batch):
        slot = index % 2
        if self.events[slot] is not None:
            self.events[slot].synchronize()
        staged = self.slots[slot][:len(batch)]
        staged.copy_(batch)
        on_device = staged.to("cuda", non_blocking=True)
        self.events[slot] = torch.cuda.current_stream().record_event()
        return on_device


def corpus(rows, dim, chunk):
    gen = torch.Generator().manual_seed(0)
    for start in range(0, rows, chunk):
        yield torch.randn(min(chunk, rows - start), dim, generator=gen)


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 256)).cuda()
    staging = Staging(8192, 1024)
    centroid = torch.zeros(256, device="cuda")
    with torch.no_grad():
        for i, batch in enumerate(corpus(8192 * 20 + 3000, 1024, 8192)):
            centroid += model(staging.upload(i, batch)).sum(0)
            if i % 5 == 0:
                print(f"chunk {i} rows {len(batch)} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    print("norm", centroid.norm().item())


if __name__ == "__main__":
    main()
