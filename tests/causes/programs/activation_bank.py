"""Record one activation vector per image for a nearest-neighbour lookup."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class PatchEncoder(nn.Module):
    def __init__(self, dim=768, depth=4, patch=16):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 12, 2 * dim, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(images), -1, -1), tokens], 1)
        return self.body(tokens)


class ActivationBank:
    def __init__(self):
        self.entries = []

    def add(self, tokens, names):
        summary = tokens[:, 0]
        if FIXED:
            summary = summary.clone()
        for name, vector in zip(names, summary):
            self.entries.append((name, vector))

    def query(self, vector, k=3):
        bank = torch.stack([v for _, v in self.entries])
        best = (bank @ vector).topk(k).indices.tolist()
        return [self.entries[i][0] for i in best]

    def nbytes(self):
        return sum(v.numel() * v.element_size() for _, v in self.entries)


@torch.no_grad()
def index_images(model, bank, n_batches):
    gen = torch.Generator("cuda").manual_seed(0)
    for i in range(n_batches):
        images = torch.rand(64, 3, 384, 384, generator=gen, device="cuda")
        bank.add(model(images), [f"img_{i}_{j}" for j in range(64)])
        if i % 8 == 0:
            print(f"batch {i} entries {len(bank.entries)} bank {bank.nbytes() >> 20} MiB "
                  f"allocated {torch.cuda.memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = PatchEncoder().cuda().eval()
    bank = ActivationBank()
    index_images(model, bank, 40)
    print("nearest", bank.query(bank.entries[0][1]))


if __name__ == "__main__":
    main()
