"""Selection model on parent/child antibody pairs."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

TRAIN_PAIRS = 60000
VALID_PAIRS = 15000
SITES = 250
AAS = 20
BATCH = 512

torch.cuda.set_per_process_memory_fraction(
    1.25 * 1024**3 / torch.cuda.get_device_properties(0).total_memory)


class PairDataset(Dataset):
    def __init__(self, n_pairs, device):
        g = torch.Generator().manual_seed(n_pairs)
        self.device = device
        self.parents = torch.randint(0, AAS, (n_pairs, SITES), generator=g).to(device)
        flips = torch.rand(n_pairs, SITES, generator=g) < 0.04
        shuffled = torch.randint(0, AAS, (n_pairs, SITES), generator=g)
        self.children = torch.where(flips, shuffled, self.parents.cpu()).to(device)
        self.masks = (torch.rand(n_pairs, SITES, generator=g) > 0.02).to(device)
        self.neutral = torch.empty(n_pairs, SITES, AAS).uniform_(1e-4, 1e-2, generator=g).log().to(device)
        self.branch_lengths = torch.full((n_pairs,), 0.04).to(device)

    def __len__(self):
        return len(self.parents)

    def __getitem__(self, i):
        return (self.parents[i], self.children[i], self.masks[i],
                self.neutral[i], self.branch_lengths[i])


class SelectionModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(AAS, dim)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True, dropout=0.0)
        self.out = nn.Linear(dim, AAS)

    def forward(self, parents):
        return self.out(self.encoder(self.embed(parents)))


def pair_loss(model, batch):
    parents, children, masks, neutral, lengths = batch
    logits = model(parents) + neutral + lengths.log().view(-1, 1, 1)
    stay = F.one_hot(parents, AAS).bool()
    logits = logits.masked_fill(stay, 0.0)
    loss = F.cross_entropy(logits.transpose(1, 2), children, reduction="none")
    return (loss * masks).sum() / masks.sum()


def main():
    device = torch.device("cuda")
    model = SelectionModel().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_set = PairDataset(TRAIN_PAIRS, device)
    valid_set = PairDataset(VALID_PAIRS, device)
    print("data ready", f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB")
    for i, batch in enumerate(DataLoader(train_set, batch_size=BATCH // 8, shuffle=True)):
        loss = pair_loss(model, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i == 30:
            break
    with torch.no_grad():
        held_out = pair_loss(model, next(iter(DataLoader(valid_set, batch_size=BATCH // 8))))
    print(f"train {loss.item():.4f} valid {held_out.item():.4f}")


if __name__ == "__main__":
    main()
