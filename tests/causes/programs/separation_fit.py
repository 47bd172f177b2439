"""Speech separation: alternate training stages with a long-utterance validation stage."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Separator(nn.Module):
    def __init__(self, dim=2048, depth=18):
        super().__init__()
        self.encoder = nn.Conv1d(1, dim, 16, stride=8)
        layer = lambda: nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.blocks = nn.ModuleList(layer() for _ in range(depth))
        self.decoder = nn.ConvTranspose1d(dim, 2, 16, stride=8)

    def forward(self, mix):
        h = self.encoder(mix).transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)
        return self.decoder(h.transpose(1, 2))


class Brain:
    def __init__(self):
        self.model = Separator().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def fit_batch(self, mix, sources):
        loss = (self.model(mix) - sources).abs().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=FIXED)
        return loss.item()

    @torch.no_grad()
    def evaluate_batch(self, mix, sources):
        return (self.model(mix) - sources).abs().mean().item()


def utterances(count, batch, seconds, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        sources = torch.randn(batch, 2, int(8000 * seconds) // 8 * 8, generator=gen, device="cuda") * 0.1
        yield sources.sum(1, keepdim=True), sources


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    brain = Brain()
    for epoch in range(2):
        brain.model.train()
        train = [brain.fit_batch(m, s) for m, s in utterances(6, 1, 0.5, epoch)]
        print(f"epoch {epoch} train {sum(train) / 6:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
        brain.model.eval()
        valid = [brain.evaluate_batch(m, s) for m, s in utterances(3, 4, 8, 99)]
        print(f"epoch {epoch} valid {sum(valid) / 3:.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
