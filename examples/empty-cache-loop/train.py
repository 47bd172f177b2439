"""Somebody advised to call empty_cache(). So each step buys its memory from the driver anew."""
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())

for step in range(40):
    images = torch.randn(16384, 1024, device="cuda")
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()  # <- fault

stats = torch.cuda.memory_stats()
print(f"{stats['num_device_alloc']} segments bought, {stats['num_device_free']} given back")
