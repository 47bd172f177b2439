"""Inference server: requests of varying batch and length, returning to its level in between."""
import atexit
import random

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Encoder(nn.Module):
    def __init__(self, dim=1024, depth=8):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x):
        return self.body(x).mean(1)


class Server:
    def __init__(self):
        self.model = Encoder().to("cuda", torch.bfloat16).eval()
        self.statistics = {"requests": 0, "tokens": 0}

    @torch.inference_mode()
    def handle(self, batch, length):
        x = torch.randn(batch, length, 1024, device="cuda", dtype=torch.bfloat16)
        vector = self.model(x).float().cpu()
        self.statistics["requests"] += 1
        self.statistics["tokens"] += batch * length
        return vector


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    server = Server()
    for i in range(60):
        burst = 3 if 20 <= i < 30 else 1
        server.handle(rng.choice([1, 2, 4, 8]) * burst, rng.randrange(64, 1500))
        if i % 6 == 0:
            print(f"{server.statistics} allocated {torch.cuda.memory_allocated() >> 20} MiB "
                  f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
