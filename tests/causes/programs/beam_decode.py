"""Beam search: the state of the beams is reordered at each step, hypotheses finish at different times."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class StepModel(nn.Module):
    def __init__(self, vocab=12000, dim=1024):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(nn.GRUCell(dim, dim) for _ in range(4))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, state):
        x, new_state = self.embed(tokens), []
        for cell, h in zip(self.cells, state):
            x = cell(x, h)
            new_state.append(x)
        return self.head(x).log_softmax(-1), new_state


class Beams:
    def __init__(self, sources, width, dim=1024):
        self.sources, self.width = sources, width
        self.tokens = torch.zeros(sources * width, 1, dtype=torch.long, device="cuda")
        self.scores = torch.full((sources, width), -1e9, device="cuda")
        self.scores[:, 0] = 0
        self.state = [torch.zeros(sources * width, dim, device="cuda") for _ in range(4)]

    def advance(self, log_probs, state):
        vocab = log_probs.shape[-1]
        total = (self.scores.view(-1, 1) + log_probs).view(self.sources, -1)
        self.scores, flat = total.topk(self.width, dim=-1)
        origin = (flat // vocab + torch.arange(self.sources, device="cuda")[:, None] * self.width).view(-1)
        self.tokens = torch.cat([self.tokens[origin], (flat % vocab).view(-1, 1)], 1)
        self.state = [h[origin] for h in state]


@torch.inference_mode()
def search(model, sources, width, max_len):
    beams = Beams(sources, width)
    for _ in range(max_len):
        log_probs, state = model(beams.tokens[:, -1], beams.state)
        beams.advance(log_probs, state)
    return beams.tokens.view(sources, width, -1)[:, 0].cpu()


def main():
    torch.manual_seed(0)
    model = StepModel().cuda().eval()
    for group in range(6):
        best = search(model, sources=256 + 64 * (group % 3), width=8, max_len=30 + 10 * (group % 2))
        print(f"group {group} {tuple(best.shape)} allocated {torch.cuda.memory_allocated() >> 20} MiB "
              f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
