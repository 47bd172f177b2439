"""Self-attention with one pairwise bias matrix per example."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class GraphAttention(nn.Module):
    def __init__(self, dim=512, heads=16):
        super().__init__()
        self.heads = heads
        self.mha = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, nodes, bias):
        """bias: (batch, nodes, nodes), the same for all heads."""
        if FIXED:
            return self.attend(nodes, bias)
        mask = bias.unsqueeze(1).repeat(1, self.heads, 1, 1).flatten(0, 1)
        return self.mha(nodes, nodes, nodes, attn_mask=mask, need_weights=False)[0]

    def attend(self, nodes, bias):
        b, n, d = nodes.shape
        q, k, v = F.linear(nodes, self.mha.in_proj_weight, self.mha.in_proj_bias).view(
            b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(1).expand(b, self.heads, n, n))
        return self.mha.out_proj(out.transpose(1, 2).reshape(b, n, d))


def distance_bias(batch, nodes):
    position = torch.rand(batch, nodes, 3, device="cuda")
    return -torch.cdist(position, position).to(torch.bfloat16)


@torch.no_grad()
def run(layer, batch, nodes):
    x = torch.randn(batch, nodes, 512, device="cuda", dtype=torch.bfloat16)
    bias = distance_bias(batch, nodes)
    print(f"batch {batch} bias {bias.nbytes >> 20} MiB")
    return layer(x, bias).float().std().item()


def main():
    torch.manual_seed(0)
    layer = GraphAttention().to("cuda", torch.bfloat16)
    nodes = 4096
    for batch in (4, 8, int(1.1 * CARD / (16 * nodes * nodes * 2))):
        print(f"std {run(layer, batch, nodes):.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
