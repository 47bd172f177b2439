# grew: a server that never forgets the keys and values of a finished request.
import torch
model = torch.nn.Linear(1024, 2048).cuda()
finished = {}
with torch.inference_mode():
    for request in range(60):
        keys = torch.zeros(1, 0, 2048, device="cuda")
        for token in range(12):
            new = model(torch.randn(1, 16, 1024, device="cuda"))
            keys = torch.cat([keys, new], 1)  # <- fault
        finished[request] = keys
