# grew: each evaluation keeps another copy of the model on the GPU.
import copy, torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer, best = torch.optim.AdamW(model.parameters()), []
for epoch in range(30):
    for step in range(3):
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    best.append(copy.deepcopy(model.state_dict()))  # <- fault
