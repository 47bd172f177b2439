"""A few steps of real PyTorch; prints what PyTorch itself says of its memory, as JSON. Its results are not looked at."""
import json

import torch

embedding = torch.nn.Embedding(1000, 256, device="cuda")
optimizer = torch.optim.AdamW(embedding.parameters())
for step in range(4):
    tokens = torch.zeros(64 * (step + 1), 128, dtype=torch.long, device="cuda")
    embedding(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
try:
    torch.empty(1 << 40, device="cuda")
except torch.cuda.OutOfMemoryError:
    pass
stats = torch.cuda.memory_stats()
print(json.dumps({
    "version": torch.__version__,
    "num_device_alloc": stats["num_device_alloc"],
    "num_device_free": stats["num_device_free"],
    "num_ooms": stats["num_ooms"],
    "reserved_bytes": stats["reserved_bytes.all.current"],
}))
