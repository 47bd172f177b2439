import numpy as np
import torch
import torch.nn as nn

torch.cuda.set_per_process_memory_fraction(5 * 1024 ** 3 / torch.cuda.get_device_properties(0).total_memory)


class ClickModel(nn.Module):
    def __init__(self, table_sizes, m_spa=64, dense_in=13):
        super().__init__()
        self.emb_l = nn.ModuleList(
            [nn.EmbeddingBag(n, m_spa, mode="sum", sparse=False) for n in table_sizes])
        self.bot = nn.Sequential(nn.Linear(dense_in, 128), nn.ReLU(), nn.Linear(128, m_spa), nn.ReLU())
        k = len(table_sizes) + 1
        self.top = nn.Sequential(nn.Linear(m_spa + k * (k - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("tri", torch.tril_indices(k, k, offset=-1))

    def interact(self, x, ly):
        T = torch.stack([x] + ly, dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        return torch.cat([x, Z[:, self.tri[0], self.tri[1]]], dim=1)

    def forward(self, dense, offsets, indices):
        ly = [E(i, o) for E, i, o in zip(self.emb_l, indices, offsets)]
        return self.top(self.interact(self.bot(dense), ly)).squeeze(1)


class SyntheticClicks:
    def __init__(self, table_sizes, batch=4096, lookups=4):
        self.sizes, self.batch, self.lookups = table_sizes, batch, lookups
        self.rng = np.random.default_rng(7)

    def __iter__(self):
        for _ in range(40):
            dense = torch.from_numpy(self.rng.random((self.batch, 13), dtype=np.float32))
            idx = [torch.from_numpy(self.rng.integers(0, n, self.batch * self.lookups)) for n in self.sizes]
            off = [torch.arange(0, self.batch * self.lookups, self.lookups) for _ in self.sizes]
            label = torch.from_numpy((self.rng.random(self.batch) < 0.2).astype(np.float32))
            yield dense, off, idx, label


def train():
    sizes = [2_500_000, 2_000_000, 1_500_000]
    with torch.device("cuda"):
        model = ClickModel(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()
    for j, (dense, off, idx, label) in enumerate(SyntheticClicks(sizes)):
        out = model(dense.cuda(), [o.cuda() for o in off], [i.cuda() for i in idx])
        loss = bce(out, label.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if j % 10 == 0:
            print(f"iter {j} loss {loss.item():.5f}")


train()
