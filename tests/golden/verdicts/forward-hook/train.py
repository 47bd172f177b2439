# grew: a hook that was meant to look at one batch keeps all of them.
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 10)
    def forward(self, x):
        hidden = self.first(x)  # <- fault
        return self.second(hidden.relu())
model, seen = Model().cuda(), []
model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(50):
    loss = model(torch.randn(256, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
