"""Each batch knows its view and each view its batch: nothing is freed before Python's cyclic collector comes by."""
import torch


class View:
    def __init__(self, batch, pixels):
        self.batch, self.pixels = batch, pixels


class Batch:
    def __init__(self):
        self.view = View(self, torch.randn(1024, 1024, device="cuda"))  # <- fault


model = torch.nn.Linear(1024, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(400):
    batch = Batch()
    model(batch.view.pixels).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB, for batches of 4 MiB")
