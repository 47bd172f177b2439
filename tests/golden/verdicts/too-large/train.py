# out_of_memory: a batch that is too large by itself; no setting helps.
import torch
torch.cuda.set_per_process_memory_fraction(600 * 2**20 / torch.cuda.mem_get_info()[1])
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def step(batch):
    x = torch.randn(batch, 2048, device="cuda")
    for layer in model:
        x = layer(x)  # <- fault
    x.square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
for batch in (512, 1024, 2048, 16384):
    step(batch)
