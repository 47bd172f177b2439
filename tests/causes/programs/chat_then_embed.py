"""Answer one long prompt, then use the same model to embed a corpus."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class StaticCache:
    def __init__(self, depth, batch, max_len, heads, head_dim):
        shape = (depth, 2, batch, heads, max_len, head_dim)
        self.data = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        self.max_len = max_len

    def update(self, layer, k, v, start):
        end = start + k.shape[2]
        self.data[layer, 0, :, :, start:end] = k
        self.data[layer, 1, :, :, start:end] = v
        return self.data[layer, 0, :, :, :end], self.data[layer, 1, :, :, :end]


class Model(nn.Module):
    def __init__(self, depth=16, dim=1024, heads=8, vocab=4000):
        super().__init__()
        self.depth, self.heads, self.dim = depth, heads, dim
        self.embed = nn.Embedding(vocab, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.proj = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)
        self._cache = None

    def forward(self, tokens, cache=None, start=0):
        x = self.embed(tokens)
        b, t, d = x.shape
        for i in range(self.depth):
            q, k, v = self.qkv[i](x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if cache is not None:
                k, v = cache.update(i, k, v, start)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
            x = x + self.proj[i](a.transpose(1, 2).reshape(b, t, d))
        return x

    def get_cache(self, batch, max_len):
        if self._cache is None or self._cache.max_len < max_len:
            self._cache = StaticCache(self.depth, batch, max_len, self.heads, self.dim // self.heads)
        return self._cache

    def generate(self, prompt, n_new):
        cache = self.get_cache(prompt.shape[0], prompt.shape[1] + n_new)
        if FIXED:
            self._cache = None
        tokens, start = prompt, 0
        for _ in range(n_new):
            hidden = self(tokens, cache, start)
            start += tokens.shape[1]
            tokens = self.head(hidden[:, -1:]).argmax(-1)
        return tokens


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16).eval()
    print(f"model {torch.cuda.memory_allocated() >> 20} MiB")
    model.generate(torch.randint(0, 4000, (10, 8192), device="cuda"), 20)
    print(f"after the answer {torch.cuda.memory_allocated() >> 20} MiB")
    vectors = []
    for i in range(20):
        vectors.append(model(torch.randint(0, 4000, (8, 512), device="cuda")).mean(1).cpu())
    print(f"embedded {sum(map(len, vectors))}, allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
