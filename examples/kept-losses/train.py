"""Trains a little classifier and remembers the loss of every sample, to draw a histogram at the end."""
import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
loss_of_each = torch.nn.CrossEntropyLoss(reduction="none")
losses = []

for step in range(60):
    images = torch.randn(65536, 256, device="cuda")
    labels = torch.zeros(65536, dtype=torch.long, device="cuda")
    losses.append(loss_of_each(model(images), labels))  # <- fault
    losses[-1].mean().backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated after {len(losses)} steps")
