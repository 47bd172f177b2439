"""Generate short continuations for long prompts with a bfloat16 decoder."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class DecoderLayer(nn.Module):
    def __init__(self, dim=1024, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.silu(self.up(x)))


class CausalLM(nn.Module):
    def __init__(self, vocab=128256, dim=1024, depth=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(depth))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)
        if not FIXED:
            logits = logits.float()
        return logits


@torch.inference_mode()
def generate(model, tokens, n_new):
    for _ in range(n_new):
        logits = model(tokens)
        next_logits = logits[:, -1, :].clone().float()
        del logits
        tokens = torch.cat([tokens, next_logits.argmax(-1, keepdim=True)], 1)
    return tokens


def main():
    torch.manual_seed(0)
    model = CausalLM().to("cuda", torch.bfloat16).eval()
    print(f"weights {torch.cuda.memory_allocated() >> 20} MiB")
    for prompt_length in (512, 1024, 1800, 2400):
        tokens = torch.randint(0, 128256, (4, prompt_length), device="cuda")
        generate(model, tokens, 3)
        print(f"prompt {prompt_length} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
