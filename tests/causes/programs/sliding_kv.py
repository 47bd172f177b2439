"""Autoregressive decoding with a key/value cache that slides over the last 512 positions."""
import atexit

import torch
from torch import nn
from torch.nn import functional as F


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class SlidingCache:
    def __init__(self, depth, window):
        self.window = window
        self.layers = [None] * depth

    def extend(self, layer, k, v):
        if self.layers[layer] is not None:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        k, v = k[:, :, -self.window:].contiguous(), v[:, :, -self.window:].contiguous()
        self.layers[layer] = (k, v)
        return k, v


class Decoder(nn.Module):
    def __init__(self, depth=12, dim=1024, heads=16, vocab=4000):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.proj = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, cache):
        x = self.embed(tokens)
        b, t, d = x.shape
        for i, (qkv, proj) in enumerate(zip(self.qkv, self.proj)):
            q, k, v = qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            k, v = cache.extend(i, k, v)
            x = x + proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return self.head(x[:, -1:])


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    model = Decoder().to("cuda", torch.bfloat16).eval()
    cache = SlidingCache(12, window=512)
    tokens = torch.randint(0, 4000, (32, 32), device="cuda")
    for step in range(60):
        logits = model(tokens, cache)
        block = logits.argmax(-1).expand(-1, 16)
        tokens = (block + torch.arange(16, device="cuda")) % 4000
        if step % 6 == 0:
            print(f"block {step} cached {cache.layers[0][0].shape[2]} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
