# nothing_wrong: sequences of varying length, with the setting that is made for them.
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for length in torch.randint(200, 6000, (60,)).tolist():
    model(torch.randn(length, 1024, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
