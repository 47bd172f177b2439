"""A training loop that never ends; the number of finished steps goes to the file named first."""
import sys, torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
step = 0
while True:
    model(torch.randn(64 + step % 32, 1024, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    torch.cuda.synchronize(); step += 1
    with open(sys.argv[1], "w") as out: out.write(str(step))
