"""Programs that were written after the rules for sums of any width, and before anything was measured of them: the set `sixth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, Decoder, Layer, labels, next_word
from predict_programs import GPU, STEPS, double, train
from predict_third import conv


def odd_patches(batch, side=132):
    """A transformer for images whose width is no power of two, in single precision."""
    width, patch = 360, 12
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "layers": nn.ModuleList(Layer(width, 6, 1000) for _ in range(5)), "head": nn.Linear(width, 77)}).to(GPU)

    def step():
        x = model["patch"](torch.randn(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
        for layer in model["layers"]:
            x = layer(x)
        return F.cross_entropy(model["head"](x.mean(1)), labels(batch, 77))

    train(step, model.parameters())


def classify(batch, seq=200):
    """Texts of one length to a few classes, with dropout, in half precision."""
    width = 328
    model = nn.ModuleDict({"embed": nn.Embedding(9000, width), "layers": nn.ModuleList(Layer(width, 4, 900, 0.1) for _ in range(6)), "head": nn.Linear(width, 5)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            x = model["embed"](torch.randint(0, 9000, (batch, seq), device=GPU))
            for layer in model["layers"]:
                x = layer(x)
            return F.cross_entropy(model["head"](x[:, 0]).float(), labels(batch, 5))

    train(step, model.parameters(), torch.optim.NAdam)


def recomputed(batch, seq=640):
    """All layers are computed again, two at a time, as checkpoints once did."""
    model = Decoder(456, 6, 1200, 6, 7000).to(GPU)

    def step():
        tokens = torch.randint(0, 7000, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            x = model.embed(tokens[:, :-1])
            for one, other in zip(model.layers[::2], model.layers[1::2]):
                x = checkpoint(lambda x, one=one, other=other: other(one(x, None, True), None, True), x, use_reentrant=True)
            logits = model.norm(x) @ model.embed.weight.t()
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, model.parameters())


def compiled_odd(batch, seq=256):
    """The whole is compiled, of a width that is no power of two."""
    model = Decoder(264, 4, 700, 3, 5000).to(GPU)
    run = torch.compile(model)
    train(lambda: next_word(run, batch, seq), model.parameters())


def plain_convolutions(batch, side=80):
    """Convolutions with biases and no norms, and large linear layers."""
    widths = [3, 40, 72, 136, 200]
    layers = [it for a, b in zip(widths, widths[1:]) for it in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(200 * (side // 16) ** 2, 1500), nn.ReLU(), nn.Dropout(), nn.Linear(1500, 50)).to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 50)), model.parameters(), torch.optim.Adam)


def latents(batch, side=40):
    """Noise is taken away by a U-Net in half precision."""
    widths = [48, 96, 144]
    down = nn.ModuleList(double(a, b) for a, b in zip([4, *widths], widths))
    up = nn.ModuleList(double(a + b, b) for a, b in zip(widths[::-1], widths[-2::-1]))
    model = nn.ModuleDict({"down": down, "up": up, "last": nn.Conv2d(widths[0], 4, 1)}).to(GPU)

    def step():
        noise, kept = torch.randn(batch, 4, side, side, device=GPU), []
        with torch.autocast(GPU, HALF):
            x = noise + torch.randn_like(noise)
            for block in model["down"]:
                x = block(F.avg_pool2d(x, 2) if kept else x)
                kept.append(x)
            x = kept.pop()
            for block in model["up"]:
                x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
            return F.mse_loss(model["last"](x).float(), noise)

    train(step, model.parameters())


def means(batch, nodes=1200):
    """Means over the neighbours in graphs of one size."""
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(2 * a, b) for a, b in ((80, 184), (184, 184), (184, 24))).to(GPU)

    def step():
        n = batch * nodes
        x, (source, to) = torch.randn(n, 80, device=GPU), torch.randint(0, n, (2, 12 * n), device=GPU)
        number = torch.zeros(n, 1, device=GPU).index_add(0, to, torch.ones(len(to), 1, device=GPU)).clamp(min=1)
        for index, layer in enumerate(layers):
            x = layer(torch.cat([x, torch.zeros_like(x).index_add(0, to, x[source]) / number], 1))
            x = F.relu(x) if index < 2 else x
        return F.cross_entropy(x, labels(n, 24))

    train(step, layers.parameters())


def tags(batch, seq=120):
    """A tag for each word, by an LSTM of both directions."""
    model = nn.ModuleDict({"embed": nn.Embedding(6000, 200), "rnn": nn.LSTM(200, 184, 2, batch_first=True, bidirectional=True, dropout=0.2), "head": nn.Linear(368, 44)}).to(GPU)

    def step():
        hidden, _ = model["rnn"](model["embed"](torch.randint(0, 6000, (batch, seq), device=GPU)))
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), torch.randint(0, 44, (batch * seq,), device=GPU))

    train(step, model.parameters())


def captions(batch, side=128, seq=40):
    """A convolutional network that sees, and a transformer that says what."""
    see = nn.Sequential(conv(3, 48, 3, 2), conv(48, 96, 3, 2), conv(96, 192, 3, 2), conv(192, 344, 3, 2)).to(GPU)
    model = Decoder(344, 4, 920, 4, 6000).to(GPU)

    def step():
        tokens = torch.randint(0, 6000, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            seen = see(torch.randn(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
            x = torch.cat([seen, model.embed(tokens[:, :-1]).to(seen.dtype)], 1)
            for layer in model.layers:
                x = layer(x, None, True)
            logits = model.norm(x)[:, -seq:] @ model.embed.weight.t()
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, [*see.parameters(), *model.parameters()])


def low_rank(batch, seq=320):
    """Low rank beside frozen weights in single precision, gradients over two parts."""
    model = Decoder(520, 8, 1400, 5, 11000).to(GPU).requires_grad_(False)
    pairs = nn.ModuleList(nn.Sequential(nn.Linear(520, 8, bias=False), nn.Linear(8, 520, bias=False)) for _ in model.layers).to(GPU)
    optimizer = torch.optim.AdamW(pairs.parameters(), 1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            tokens = torch.randint(0, 11000, (batch, seq + 1), device=GPU)
            x = model.embed(tokens[:, :-1])
            for layer, pair in zip(model.layers, pairs):
                x = layer(x, None, True) + pair(x)
            F.cross_entropy((model.norm(x) @ model.embed.weight.t()).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = [odd_patches, classify, recomputed, compiled_odd, plain_convolutions, latents, means, tags, captions, low_rank]
