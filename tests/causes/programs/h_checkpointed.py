import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096, device="cuda"), nn.GELU(), nn.Linear(4096, 1024, device="cuda")) for _ in range(12)).cuda()
opt = torch.optim.AdamW(blocks.parameters())
for step in range(20):
    x = torch.randn(8192, 1024, device="cuda")
    for block in blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    loss = x.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
