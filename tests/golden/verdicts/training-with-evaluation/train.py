# nothing_wrong: optimiser states appear in the first step, evaluation comes each third.
import torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer, history = torch.optim.AdamW(model.parameters()), []
for step in range(45):
    loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    history.append(loss.item())
    if step % 3 == 2:
        with torch.inference_mode():
            model(torch.randn(1024, 1024, device="cuda"))
