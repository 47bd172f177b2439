# kept: an object with a method of its own among its attributes waits for the collector.
import torch
class Augment:
    def __init__(self, batch):
        self.noise = torch.randn_like(batch)  # <- fault
        self.apply = self.add
    def add(self, batch):
        return batch + self.noise
model = torch.nn.Linear(1024, 1024).cuda()
for step in range(300):
    batch = torch.randn(512, 1024, device="cuda")
    with torch.no_grad():
        model(Augment(batch).apply(batch))
