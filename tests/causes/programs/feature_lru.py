"""Feature cache on the GPU with a bound on its entries; rare items are computed anew."""
import atexit
import collections
import random

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class FeatureCache:
    def __init__(self, compute, max_entries):
        self.compute, self.max_entries = compute, max_entries
        self.entries = collections.OrderedDict()
        self.hits = self.misses = 0

    def get(self, key):
        if key in self.entries:
            self.hits += 1
            self.entries.move_to_end(key)
        else:
            self.misses += 1
            self.entries[key] = self.compute(key)
            if len(self.entries) > self.max_entries:
                self.entries.popitem(last=False)
        return self.entries[key]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU())

    @torch.no_grad()
    def features(self, key):
        gen = torch.Generator("cuda").manual_seed(key)
        return self.net(torch.rand(8, 3, 512, 512, generator=gen, device="cuda"))


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    cache = FeatureCache(Backbone().cuda().features, max_entries=30)
    head = nn.Linear(128, 1).cuda()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for step in range(240):
        key = min(int(rng.expovariate(0.05)), 400)
        loss = head(cache.get(key).mean((2, 3))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} entries {len(cache.entries)} hits {cache.hits} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
