import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(1.2 * 1024 ** 3 / torch.cuda.get_device_properties(0).total_memory)


class ProteinBlock(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, d, 7, padding=3, groups=d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x):
        y = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.silu(self.up(y)))


class ProteinLM(nn.Module):
    def __init__(self, d=2048, ff=8192, layers=11, vocab=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([ProteinBlock(d, ff) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens):
        x = self.embed(tokens)
        for b in self.blocks:
            x = b(x)
        return self.norm(x)


REGISTRY = {"plm_370m": dict(d=2048, ff=8192, layers=11)}


class ModelHub:
    def __init__(self, device="cuda", dtype=torch.bfloat16):
        self.device, self.dtype = torch.device(device), dtype

    def from_pretrained(self, name):
        torch.manual_seed(0)
        model = ProteinLM(**REGISTRY[name])
        n = sum(p.numel() for p in model.parameters())
        print(f"{name}: {n / 1e6:.0f}M parameters, {n * 2 / 2 ** 30:.2f} GiB as {self.dtype}")
        return self._prepare(model)

    def _prepare(self, model):
        model = model.to(self.device)
        model = model.to(self.dtype)
        return model.eval()


ALPHABET = "LAGVSERTIDPKQNFYMHWC"


def tokenize(seqs):
    ids = torch.zeros(len(seqs), max(map(len, seqs)), dtype=torch.long)
    for i, s in enumerate(seqs):
        ids[i, :len(s)] = torch.tensor([ALPHABET.index(c) + 1 for c in s])
    return ids


@torch.inference_mode()
def embed(model, seqs):
    return model(tokenize(seqs).to(next(model.parameters()).device)).mean(1).float().cpu()


if __name__ == "__main__":
    plm = ModelHub().from_pretrained("plm_370m")
    out = embed(plm, ["MKTAYIAKQRQISFVKSHFSRQ" * 4, "GSHMASMTGGQQMGRGSEF" * 3])
    print(out.shape, torch.cuda.max_memory_allocated() >> 20, "MiB")
