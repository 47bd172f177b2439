"""Trains a little language model on all GPUs with DataParallel. Needs two GPUs."""
import torch

model = torch.nn.Sequential(torch.nn.Embedding(8192, 128), torch.nn.Linear(128, 8192)).cuda()
model = torch.nn.DataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
criterion = torch.nn.CrossEntropyLoss()

for step in range(10):
    tokens = torch.zeros(16, 256, dtype=torch.long, device="cuda")
    loss = criterion(model(tokens).flatten(0, 1), tokens.flatten())  # <- fault
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

peaks = [torch.cuda.max_memory_allocated(device) / 2**20 for device in range(torch.cuda.device_count())]
print("peaks:", ", ".join(f"{peak:.0f} MiB on cuda:{device}" for device, peak in enumerate(peaks)))
