"""Score the dev set chunk by chunk with a light-GRU acoustic model."""
import atexit
import contextlib
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class LiGRULayer(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.wz = nn.Linear(n_in, n_hidden)
        self.wh = nn.Linear(n_in, n_hidden)
        self.uz = nn.Linear(n_hidden, n_hidden, bias=False)
        self.uh = nn.Linear(n_hidden, n_hidden, bias=False)

    def forward(self, x, h):
        wz, wh = self.wz(x), self.wh(x)
        outputs = []
        for t in range(x.shape[0]):
            z = torch.sigmoid(wz[t] + self.uz(h))
            candidate = torch.relu(wh[t] + self.uh(h))
            h = z * h + (1 - z) * candidate
            outputs.append(h)
        return torch.stack(outputs), h


class AcousticModel(nn.Module):
    def __init__(self, n_feat=440, n_hidden=1024, n_states=1936, n_layers=2):
        super().__init__()
        sizes = [n_feat] + [n_hidden] * n_layers
        self.layers = nn.ModuleList(LiGRULayer(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(n_hidden, n_states)
        self.n_hidden = n_hidden

    def initial_state(self, batch):
        return [torch.zeros(batch, self.n_hidden, device="cuda") for _ in self.layers]

    def forward(self, x, state):
        new_state = []
        for layer, h in zip(self.layers, state):
            x, h = layer(x, h)
            new_state.append(h)
        return self.out(x), new_state


def dev_chunks(n_chunks, steps=24, batch=384):
    gen = torch.Generator("cuda").manual_seed(7)
    for _ in range(n_chunks):
        feats = torch.randn(steps, batch, 440, generator=gen, device="cuda")
        labels = torch.randint(0, 1936, (steps, batch), generator=gen, device="cuda")
        yield feats, labels


def run_dev(model, n_chunks=18):
    model.eval()
    criterion = nn.CrossEntropyLoss()
    state = model.initial_state(384)
    total_error = 0.0
    scope = torch.no_grad() if FIXED else contextlib.nullcontext()
    with scope:
        for i, (feats, labels) in enumerate(dev_chunks(n_chunks)):
            scores, state = model(feats, state)
            total_error += criterion(scores.flatten(0, 1), labels.flatten()).item()
            if i % 6 == 0:
                print(f"chunk {i} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    return total_error / n_chunks


if __name__ == "__main__":
    torch.manual_seed(0)
    print("dev error", run_dev(AcousticModel().cuda()))
