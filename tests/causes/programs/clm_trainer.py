"""Minimal causal-LM trainer with a per-step housekeeping hook."""
import atexit
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def build(vocab=8000, dim=1024, depth=8):
    layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, 0.0, batch_first=True, norm_first=True)
    return nn.ModuleDict({"embed": nn.Embedding(vocab, dim),
                          "body": nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
                          "head": nn.Linear(dim, vocab)}).cuda()


class Trainer:
    def __init__(self, model, steps):
        self.model, self.steps = model, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def compute_loss(self, tokens):
        hidden = self.model["body"](self.model["embed"](tokens[:, :-1]))
        return F.cross_entropy(self.model["head"](hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.compute_loss(tokens)
        del tokens
        self.housekeeping()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def housekeeping(self):
        if not FIXED:
            torch.cuda.empty_cache()

    def train(self):
        start = time.time()
        for step in range(self.steps):
            length = 257 + 32 * (step % 4)
            loss = self.training_step(torch.randint(0, 8000, (8, length), device="cuda"))
            self.housekeeping()
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.3f} reserved {torch.cuda.memory_reserved() >> 20} MiB")
        torch.cuda.synchronize()
        print(f"{self.steps / (time.time() - start):.2f} steps/s, device allocations "
              f"{torch.cuda.memory_stats().get('num_device_alloc')}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    Trainer(build(), 50).train()
