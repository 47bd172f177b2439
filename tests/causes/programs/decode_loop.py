"""Greedy decoding with cached keys and values."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Attention(nn.Module):
    def __init__(self, dim=2048, heads=16):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, past, position):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if FIXED:
            past[0][:, :, position:position + t] = k
            past[1][:, :, position:position + t] = v
            k, v = past[0][:, :, :position + t], past[1][:, :, :position + t]
        else:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
            past = (k, v)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        return x + self.proj(a.transpose(1, 2).reshape(b, t, d)), past


class Decoder(nn.Module):
    def __init__(self, depth=16, dim=2048, vocab=8000):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Attention(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, past, position):
        x = self.embed(tokens)
        present = []
        for layer, layer_past in zip(self.layers, past):
            x, layer_past = layer(x, layer_past, position)
            present.append(layer_past)
        return self.head(x[:, -1:]), tuple(present)

    def blank_past(self, batch, length):
        shape = (batch, 16, length, 128)
        return tuple((torch.empty(shape, device="cuda", dtype=torch.bfloat16),
                      torch.empty(shape, device="cuda", dtype=torch.bfloat16)) for _ in self.layers)


@torch.inference_mode()
def generate(model, prompt, new_tokens):
    batch, length = prompt.shape
    past = model.blank_past(batch, length + new_tokens if FIXED else 0)
    tokens, position, out = prompt, 0, []
    for step in range(new_tokens):
        logits, past = model(tokens, past, position)
        position += tokens.shape[1]
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        out.append(tokens)
        if step % 10 == 0:
            print(f"token {step} allocated {torch.cuda.memory_allocated() >> 20} MiB "
                  f"peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    return torch.cat(out, 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder = Decoder().to("cuda", torch.bfloat16).eval()
    generate(decoder, torch.randint(0, 8000, (16, 1200), device="cuda"), 40)
