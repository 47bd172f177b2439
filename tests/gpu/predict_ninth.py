"""Half of them with convolutions, as those were what the largest batch was missed on; written after all rules, before anything was measured of them: the set `ninth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, labels
from predict_programs import GPU, train


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)


def causal(seq, dtype):
    return nn.Transformer.generate_square_subsequent_mask(seq, device=GPU, dtype=dtype)


class Writer(nn.Module):
    """PyTorch's own layers, each computed again in the backward pass if `again`."""

    def __init__(self, width, heads, layers, words, seq, again=False):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(seq, width))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 3 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(layers))
        self.again, self.words = again, words

    def forward(self, tokens):
        x = self.embed(tokens) + self.places
        mask = causal(tokens.shape[1], x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask)
        return x @ self.embed.weight.t()

    def loss(self, batch, seq):
        tokens = torch.randint(0, self.words, (batch, seq + 1), device=GPU)
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def essays(batch, seq=320):
    """A decoder of PyTorch's own layers, in single precision."""
    model = Writer(456, 6, 5, 10000, seq).to(GPU)
    train(lambda: model.loss(batch, seq), model.parameters())


def essays_again(batch, seq=448):
    """The same, larger, each layer computed again, in half precision."""
    model = Writer(536, 8, 7, 14000, seq, again=True).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            return model.loss(batch, seq)

    train(step, model.parameters())


def factors(batch, seq=320):
    """Weights of linear layers are changed by products of two small ones."""
    model = Writer(600, 6, 6, 10000, seq).to(GPU, HALF).requires_grad_(False)
    extra = nn.ParameterList()
    for layer in model.layers:
        for name in ("linear1", "linear2"):
            inner = getattr(layer, name)
            a, b = nn.Parameter(torch.randn(8, inner.in_features, device=GPU, dtype=HALF)), nn.Parameter(torch.zeros(inner.out_features, 8, device=GPU, dtype=HALF))
            extra.extend([a, b])
            inner.forward = lambda x, inner=inner, a=a, b=b: F.linear(x, inner.weight, inner.bias) + x @ a.t() @ b.t()
    train(lambda: model.loss(batch, seq), extra)


def block(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


class Narrow(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(a, b // 4, 1, bias=False), nn.BatchNorm2d(b // 4), nn.ReLU(), block(b // 4, b // 4, stride), nn.Conv2d(b // 4, b, 1, bias=False), nn.BatchNorm2d(b))
        self.short = nn.Conv2d(a, b, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


def flowers(batch, side=96):
    """A ResNet of three convolutions a block, in single precision."""
    model = nn.Sequential(block(3, 48, 2), Narrow(48, 128, 1), Narrow(128, 256, 2), Narrow(256, 256, 1), Narrow(256, 512, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 102)).to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 102)), model.parameters(), sgd)


def flowers_half(batch, side=128):
    """The same in half precision, with cudnn.benchmark."""
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(block(3, 48, 2), Narrow(48, 128, 1), Narrow(128, 256, 2), Narrow(256, 512, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 102)).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            return F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)).float(), labels(batch, 102))

    train(step, model.parameters(), sgd)


def cells(batch, side=128):
    """A U-Net made larger by transposed convolutions, in single precision."""
    widths = [24, 48, 96]
    down = nn.ModuleList(nn.Sequential(block(a, b), block(b, b)) for a, b in zip([1, *widths], widths))
    wider = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for b, a in zip(widths[::-1], widths[-2::-1]))
    up = nn.ModuleList(nn.Sequential(block(2 * a, a), block(a, a)) for a in widths[-2::-1])
    last = nn.Conv2d(widths[0], 3, 1)
    model = nn.ModuleList([down, wider, up, last]).to(GPU)

    def step():
        x, kept = torch.randn(batch, 1, side, side, device=GPU), []
        for part in down:
            x = part(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for larger, part in zip(wider, up):
            x = part(torch.cat([kept.pop(), larger(x)], 1))
        return F.cross_entropy(last(x), torch.randint(0, 3, (batch, side, side), device=GPU))

    train(step, model.parameters())


def phones(batch, side=128):
    """Convolutions of each channel alone, in half precision and channels last."""
    def part(a, b, stride):
        return nn.Sequential(nn.Conv2d(a, 4 * a, 1), nn.BatchNorm2d(4 * a), nn.SiLU(), nn.Conv2d(4 * a, 4 * a, 5, stride, 2, groups=4 * a), nn.BatchNorm2d(4 * a), nn.SiLU(), nn.Conv2d(4 * a, b, 1), nn.BatchNorm2d(b))

    model = nn.Sequential(block(3, 24, 2), part(24, 40, 2), part(40, 40, 1), part(40, 80, 2), part(80, 112, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 200)).to(GPU, memory_format=torch.channels_last)

    def step():
        with torch.autocast(GPU, HALF):
            x = torch.randn(batch, 3, side, side, device=GPU).contiguous(memory_format=torch.channels_last)
            return F.cross_entropy(model(x).float(), labels(batch, 200))

    train(step, model.parameters())


def sketches(batch, side=64):
    """Images are made small and large again, in half precision."""
    model = nn.Sequential(block(3, 40, 2), block(40, 80, 2), block(80, 160, 2), nn.Conv2d(160, 8, 1), nn.Conv2d(8, 160, 1), nn.Upsample(scale_factor=2), block(160, 80), nn.Upsample(scale_factor=2), block(80, 40), nn.Upsample(scale_factor=2), nn.Conv2d(40, 3, 3, 1, 1)).to(GPU)

    def step():
        image = torch.rand(batch, 3, side, side, device=GPU)
        with torch.autocast(GPU, HALF):
            return F.l1_loss(model(image).float(), image)

    train(step, model.parameters())


def prices(batch):
    """Linear layers with batch norms over rows of a table, and embeddings of some columns."""
    embeds = nn.ModuleList(nn.Embedding(n, 24) for n in (1000, 300, 5000, 80)).to(GPU)
    body = nn.Sequential(nn.Linear(4 * 24 + 60, 1100), nn.BatchNorm1d(1100), nn.GELU(), nn.Dropout(0.2), nn.Linear(1100, 700), nn.BatchNorm1d(700), nn.GELU(), nn.Linear(700, 1)).to(GPU)

    def step():
        columns = [embed(torch.randint(0, embed.num_embeddings, (batch,), device=GPU)) for embed in embeds]
        return body(torch.cat([*columns, torch.randn(batch, 60, device=GPU)], 1)).square().mean()

    train(step, [*embeds.parameters(), *body.parameters()])


def verses(batch, seq=200):
    """A GRU of two directions and three layers tags words."""
    model = nn.ModuleDict({"embed": nn.Embedding(7000, 160), "rnn": nn.GRU(160, 184, 3, batch_first=True, bidirectional=True, dropout=0.2), "out": nn.Linear(368, 45)}).to(GPU)

    def step():
        hidden, _ = model["rnn"](model["embed"](torch.randint(0, 7000, (batch, seq), device=GPU)))
        return F.cross_entropy(model["out"](hidden).flatten(0, 1), labels(batch * seq, 45))

    train(step, model.parameters())


PROGRAMS = [essays, essays_again, factors, flowers, flowers_half, cells, phones, sketches, prices, verses]
