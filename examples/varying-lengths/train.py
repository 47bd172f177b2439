"""Trains on longer and longer sequences: no segment in PyTorch's cache ever fits the next step."""
import torch

model = torch.nn.Sequential(
    torch.nn.Embedding(4096, 256), torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 4096)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

for step in range(20):
    tokens = torch.zeros(8, 128 + 40 * step, dtype=torch.long, device="cuda")
    loss = criterion(model(tokens).flatten(0, 1), tokens.flatten())  # <- fault
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(f"peak {allocated / 2**20:.0f} MiB allocated, {reserved / 2**20:.0f} MiB reserved")
