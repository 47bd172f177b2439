"""Collect target-model features for a draft head, short documents first, then train on them."""
import torch
import torch.nn as nn

VOCAB = 8000
TAPS = 3072
FEATURE = 2048
SHORTEST = 3400
GROW = 215
DOCUMENTS = 32

torch.cuda.set_per_process_memory_fraction(
    2 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)
device = torch.device("cuda")
torch.manual_seed(0)


class TargetModel(nn.Module):
    """Stands for the frozen large model: three tapped hidden layers side by side."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Embedding(VOCAB, TAPS)
        self.reduce = nn.Linear(TAPS, FEATURE, bias=False)

    @torch.no_grad()
    def features(self, ids):
        hidden = self.taps(ids)
        return self.reduce(hidden)


class DraftHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURE, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x):
        return self.net(x)


def documents():
    for i in range(DOCUMENTS):
        yield torch.randint(0, VOCAB, (SHORTEST + i * GROW,))


def report(tag):
    print(f"{tag}: allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB, "
          f"reserved {torch.cuda.memory_reserved() / 2**20:.0f} MiB")


def collect(target):
    bank = []
    for i, ids in enumerate(documents()):
        bank.append(target.features(ids.to(device)))
        if i % 4 == 3:
            report(f"{i + 1} documents")
    return bank


def train(head, bank, opt, window=1024):
    total = 0.0
    for features in bank:
        start = int(torch.randint(0, max(1, len(features) - window), (1,)))
        chunk = features[start:start + window]
        out = head(chunk[:-1])
        loss = (out - head(chunk[1:]).detach()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(bank)


target = TargetModel().to(device).eval()
bank = collect(target)
head = DraftHead().to(device)
opt = torch.optim.AdamW(head.parameters(), lr=1e-4)
for epoch in range(3):
    print("epoch", epoch, "loss", train(head, bank, opt))
report("done")
