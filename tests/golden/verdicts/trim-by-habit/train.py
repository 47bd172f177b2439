# churned: the cache is emptied after each evaluation.
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def evaluate():
    with torch.no_grad():
        model(torch.randn(2048, 2048, device="cuda"))
    torch.cuda.empty_cache()  # <- fault
for epoch in range(20):
    for step in range(4):
        model(torch.randn(2048, 2048, device="cuda")).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    evaluate()
