"""Turn token weights of a passage encoder into lexical (term-weight) vectors."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]
VOCAB = 250002


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class PassageEncoder(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.sparse_linear = nn.Linear(dim, 1)

    def hidden(self, ids):
        return self.mix(self.embed(ids))

    def dense_embedding(self, hidden):
        return nn.functional.normalize(hidden[:, 0], dim=-1)

    def sparse_embedding(self, hidden, ids):
        token_weights = torch.relu(self.sparse_linear(hidden)).squeeze(-1)
        if FIXED:
            lexical = torch.zeros(ids.size(0), VOCAB, device=ids.device)
            return lexical.scatter_reduce(1, ids, token_weights, reduce="amax")
        expanded = torch.zeros(ids.size(0), ids.size(1), VOCAB, device=ids.device)
        expanded.scatter_(2, ids.unsqueeze(-1), token_weights.unsqueeze(-1))
        return expanded.max(dim=1).values


@torch.no_grad()
def encode(model, passages):
    hidden = model.hidden(passages)
    dense = model.dense_embedding(hidden)
    print(f"dense {tuple(dense.shape)} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    lexical = model.sparse_embedding(hidden, passages)
    return dense, lexical


def main():
    torch.manual_seed(0)
    model = PassageEncoder().cuda().eval()
    length = 2048
    for batch in (4, 8, int(1.25 * CARD / (length * VOCAB * 4))):
        passages = torch.randint(0, VOCAB, (batch, length), device="cuda")
        dense, lexical = encode(model, passages)
        print(f"batch {batch} terms {(lexical > 0).sum(1).float().mean().item():.0f} "
              f"peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
