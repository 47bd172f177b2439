# nothing_wrong: keys and values grow with each token, and go with the request.
import torch
model = torch.nn.Linear(1024, 2048).cuda()
with torch.inference_mode():
    for request in range(40):
        keys = torch.zeros(1, 0, 2048, device="cuda")
        for token in range(16):
            keys = torch.cat([keys, model(torch.randn(1, 8, 1024, device="cuda"))], 1)
