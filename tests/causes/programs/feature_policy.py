"""Policy over sparse game features: each feature id has its own embedding row."""
import atexit
import sys

import torch
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
MAX_FEATURE_ID = 1_500_000


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class PolicyNet(nn.Module):
    def __init__(self, rows, dim=256, actions=128):
        super().__init__()
        self.features = nn.EmbeddingBag(rows, dim, mode="mean")
        self.trunk = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.policy = nn.Linear(512, actions)

    def forward(self, ids):
        return self.policy(self.trunk(self.features(ids)))


class GameLog:
    """States seen in self-play; only a few thousand distinct feature ids ever occur."""

    def __init__(self, distinct=6000, seed=0):
        self.gen = torch.Generator("cuda").manual_seed(seed)
        self.ids = torch.randint(0, MAX_FEATURE_ID, (distinct,), generator=self.gen, device="cuda")

    def sample(self, batch, per_state=64):
        pick = torch.randint(0, len(self.ids), (batch, per_state), generator=self.gen, device="cuda")
        return self.ids[pick], torch.randint(0, 128, (batch,), generator=self.gen, device="cuda")


class Vocabulary:
    def __init__(self, log):
        self.rows = log.ids.unique()

    def __call__(self, ids):
        return torch.searchsorted(self.rows, ids)


def main():
    torch.manual_seed(0)
    log = GameLog()
    if FIXED:
        lookup = Vocabulary(log)
        model = PolicyNet(len(lookup.rows)).cuda()
    else:
        lookup = lambda ids: ids
        model = PolicyNet(MAX_FEATURE_ID).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(30):
        ids, action = log.sample(1024)
        loss = F.cross_entropy(model(lookup(ids)), action)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
