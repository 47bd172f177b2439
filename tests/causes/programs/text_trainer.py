"""Train a text classifier and return the weights of the best epoch."""
import atexit
import copy
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class BagClassifier(nn.Module):
    def __init__(self, vocab=60000, dim=1024, classes=4):
        super().__init__()
        self.words = nn.EmbeddingBag(vocab, dim)
        self.body = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(dim, dim), nn.ReLU())))
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.out(self.body(self.words(ids)))


def batches(n, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    for _ in range(n):
        ids = torch.randint(0, 60000, (128, 40), generator=gen, device="cuda")
        yield ids, ids[:, 0] % 4


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.snapshots = []

    def train_epoch(self, epoch):
        for ids, labels in batches(10, epoch):
            loss = F.cross_entropy(self.model(ids), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        losses = [F.cross_entropy(self.model(i), y) for i, y in batches(4, 1000)]
        return torch.stack(losses).mean().item()

    def remember(self, epoch, score):
        if FIXED:
            path = os.path.join(tempfile.gettempdir(), f"best_{os.getpid()}.pt")
            if not self.snapshots or score <= min(s for s, _, _ in self.snapshots):
                torch.save(self.model.state_dict(), path)
            self.snapshots.append((score, epoch, path))
        else:
            self.snapshots.append((score, epoch, copy.deepcopy(self.model.state_dict())))

    def load_best(self):
        _, epoch, best = min(self.snapshots, key=lambda s: s[0])
        weights = torch.load(best, map_location="cpu") if FIXED else best
        self.model.load_state_dict(weights)
        if FIXED:
            os.remove(best)
        return epoch


def main():
    torch.manual_seed(0)
    trainer = Trainer(BagClassifier().cuda())
    for epoch in range(14):
        trainer.train_epoch(epoch)
        score = trainer.evaluate()
        trainer.remember(epoch, score)
        print(f"epoch {epoch} eval {score:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    print("best epoch", trainer.load_best())


if __name__ == "__main__":
    main()
