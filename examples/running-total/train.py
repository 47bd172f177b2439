"""Trains with smoothed labels and reports the plain loss, summed over the epoch."""
import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 100)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
smoothed = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
plain = torch.nn.CrossEntropyLoss()
total_loss = 0

for step in range(60):
    images = torch.randn(8192, 256, device="cuda")
    labels = torch.zeros(8192, dtype=torch.long, device="cuda")
    logits = model(images)
    smoothed(logits, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    total_loss += plain(logits, labels)  # <- fault

print(f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated after an epoch")
