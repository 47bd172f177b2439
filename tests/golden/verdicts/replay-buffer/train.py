# nothing_wrong: a buffer that fills up, and then stays as it is.
import collections, torch
buffer, model = collections.deque(maxlen=20), torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(120):
    buffer.append(torch.randn(256, 1024, device="cuda"))
    model(buffer[step % len(buffer)]).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
