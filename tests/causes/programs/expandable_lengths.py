"""Training on utterances of random length with expandable segments."""
import atexit
import os
import random

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Recogniser(nn.Module):
    def __init__(self, dim=512, depth=6):
        super().__init__()
        self.front = nn.Conv1d(80, dim, 3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 500)

    def forward(self, mel):
        return self.head(self.body(self.front(mel).transpose(1, 2)))


def step(model, optimizer, batch, frames, gen):
    mel = torch.randn(batch, 80, frames, generator=gen, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(mel)
    loss = out.float().log_softmax(-1).amax(-1).mean().neg()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    gen = torch.Generator("cuda").manual_seed(0)
    model = Recogniser().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for i in range(50):
        frames = rng.randrange(200, 2000)
        loss = step(model, optimizer, 16, frames, gen)
        if i % 10 == 0:
            print(f"step {i} frames {frames} loss {loss:.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB "
                  f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
