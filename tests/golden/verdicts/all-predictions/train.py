# grew: an evaluation gathers each logit on the GPU.
import torch
model = torch.nn.Linear(512, 32000, bias=False).cuda()
predictions = []
with torch.no_grad():
    for batch in range(50):
        x = torch.randn(32, 512, device="cuda")
        predictions.append(model(x))  # <- fault
