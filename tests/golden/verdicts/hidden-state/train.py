# grew: the hidden state goes from step to step with the graph that made it.
import torch
cell, head = torch.nn.GRUCell(512, 1024).cuda(), torch.nn.Linear(1024, 1).cuda()
hidden, losses = torch.zeros(64, 1024, device="cuda"), 0.0
for step in range(60):
    hidden = cell(torch.randn(64, 512, device="cuda"), hidden)  # <- fault
    losses += head(hidden).mean().item()
