"""Programs of the kinds that users ask of, written after the rules for addresses that go on, and before anything was measured of them: the set `eighth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from predict_fifth import HALF, Decoder, Layer, labels, next_word
from predict_programs import GPU, STEPS, train
from predict_seventh import Net, basic_network
from predict_third import conv


def story(batch, seq=384):
    """A decoder with dropout in half precision, gradients over two parts that are clipped."""
    model = Decoder(432, 6, 1160, 7, 13000, dropout=0.1).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for _ in range(STEPS):
        for _ in range(2):
            (next_word(model, batch, seq) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def story_again(batch, seq=512):
    """All layers of a decoder are computed again, in single precision."""
    model = Decoder(400, 5, 1080, 6, 9000, again=1).to(GPU)

    def step():
        tokens = torch.randint(0, 9000, (batch, seq + 1), device=GPU)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters())


def compiled_story(batch, seq=288):
    """A decoder is compiled as a whole."""
    model = Decoder(320, 5, 860, 4, 7000).to(GPU)
    run = torch.compile(model)
    train(lambda: next_word(run, batch, seq), model.parameters())


def projections(batch, seq=384):
    """Low rank beside the projections of attention, the rest frozen in half precision."""
    model = Decoder(640, 10, 1720, 6, 12000).to(GPU, HALF).requires_grad_(False)

    class Beside(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.down, self.up = inner, nn.Linear(inner.in_features, 12, bias=False), nn.Linear(12, inner.out_features, bias=False)

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    for layer in model.layers:
        layer.qkv, layer.out = Beside(layer.qkv).to(GPU, HALF), Beside(layer.out).to(GPU, HALF)

    def step():
        tokens = torch.randint(0, 12000, (batch, seq + 1), device=GPU)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, [it for it in model.parameters() if it.requires_grad])


def leaves(batch, side=112):
    """A transformer for images of 64 patches, in half precision."""
    width, patch = 376, 14
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "layers": nn.ModuleList(Layer(width, 8, 1000, 0.1) for _ in range(6)), "head": nn.Linear(width, 120)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            x = model["patch"](torch.randn(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
            for layer in model["layers"]:
                x = layer(x)
            return F.cross_entropy(model["head"](x.mean(1)).float(), labels(batch, 120))

    train(step, model.parameters())


def roads(batch, side=96):
    """A U-Net with batch norms, made larger by interpolation, in half precision."""
    widths = [32, 64, 112]
    down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip([3, *widths], widths))
    up = nn.ModuleList(nn.Sequential(conv(a + b, b), conv(b, b)) for a, b in zip(widths[::-1], widths[-2::-1]))
    model = nn.ModuleDict({"down": down, "up": up, "last": nn.Conv2d(widths[0], 2, 1)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            x, kept = torch.randn(batch, 3, side, side, device=GPU), []
            for block in model["down"]:
                x = block(F.max_pool2d(x, 2) if kept else x)
                kept.append(x)
            x = kept.pop()
            for block in model["up"]:
                x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), kept.pop()], 1))
            return F.cross_entropy(model["last"](x).float(), torch.randint(0, 2, (batch, side, side), device=GPU))

    train(step, model.parameters())


def birds(batch, side=112):
    """A ResNet of 18 layers, half as wide, in half precision and channels last."""
    model = basic_network(48).to(GPU, memory_format=torch.channels_last)

    def step():
        with torch.autocast(GPU, HALF):
            return F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)).float(), labels(batch, 1000))

    train(step, model.parameters())


def birds_benchmark(batch, side=96):
    """The same in single precision, with cudnn.benchmark."""
    torch.backends.cudnn.benchmark = True
    model = basic_network(32).to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 1000)), model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))


def faces(batch, side=48):
    """Noise is taken away from small images by a U-Net, in single precision."""
    model = Net(3, [32, 64, 128], 3).to(GPU)

    def step():
        image, added = torch.randn(batch, 3, side, side, device=GPU), torch.randn(batch, 3, side, side, device=GPU)
        return F.mse_loss(model(image + added), added)

    train(step, model.parameters())


def citations(batch, nodes=700):
    """What neighbours say is averaged, with norms between the layers, over graphs of one size."""
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.ModuleDict({"own": nn.Linear(a, b), "near": nn.Linear(a, b, bias=False), "norm": nn.LayerNorm(b)}) for a, b in ((64, 200), (200, 200), (200, 200))).to(GPU)
    head = nn.Linear(200, 17).to(GPU)

    def step():
        n = batch * nodes
        x, (source, to) = torch.randn(n, 64, device=GPU), torch.randint(0, n, (2, 8 * n), device=GPU)
        number = torch.zeros(n, 1, device=GPU).index_add(0, to, torch.ones(len(to), 1, device=GPU)).clamp(min=1)
        for layer in layers:
            near = torch.zeros_like(x).index_add(0, to, x[source]) / number
            x = F.relu(layer["norm"](layer["own"](x) + layer["near"](near)))
        return F.cross_entropy(head(x), labels(n, 17))

    train(step, [*layers.parameters(), *head.parameters()])


def seats(batch, seq=192):
    """Each of four experts takes the same number of tokens, those that want it most."""
    width = 288
    model = nn.ModuleDict({"embed": nn.Embedding(6000, width), "layers": nn.ModuleList(Layer(width, 4, 700) for _ in range(3)), "gates": nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(3)),
                           "experts": nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(width, 1000), nn.GELU(), nn.Linear(1000, width)) for _ in range(4)) for _ in range(3))}).to(GPU)

    def step():
        tokens = torch.randint(0, 6000, (batch, seq + 1), device=GPU)
        x = model["embed"](tokens[:, :-1])
        for layer, gate, experts in zip(model["layers"], model["gates"], model["experts"]):
            x = layer(x, None, True)
            flat = x.flatten(0, 1)
            weights, which = gate(flat).softmax(1).topk(len(flat) // 4, 0)
            out = flat
            for index, expert in enumerate(experts):
                out = out.index_add(0, which[:, index], expert(flat[which[:, index]]) * weights[:, index, None])
            x = out.view_as(x)
        return F.cross_entropy((x @ model["embed"].weight.t()).flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters())


def songs(batch, seq):
    """An LSTM of two layers foretells the next of many notes; two variables."""
    model = nn.ModuleDict({"embed": nn.Embedding(3000, 224), "rnn": nn.LSTM(224, 224, 2, batch_first=True, dropout=0.1)}).to(GPU)

    def step():
        tokens = torch.randint(0, 3000, (batch, seq + 1), device=GPU)
        hidden, _ = model["rnn"](model["embed"](tokens[:, :-1]))
        return F.cross_entropy((hidden @ model["embed"].weight.t()).flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters())


@torch.no_grad()
def say(batch, seq, is_static):
    """Half of the text is given, the rest is chosen by chance among the likeliest; four heads share keys and values."""
    width, heads, groups, size, n = 576, 8, 2, 72, seq // 2
    model = nn.ModuleDict({"embed": nn.Embedding(11000, width), "layers": nn.ModuleList(
        nn.ModuleDict({"norm": nn.LayerNorm(width), "q": nn.Linear(width, heads * size), "kv": nn.Linear(width, 2 * groups * size), "out": nn.Linear(heads * size, width), "up": nn.Linear(width, 1500), "down": nn.Linear(1500, width)})
        for _ in range(5))}).to(GPU, HALF)
    caches = [torch.zeros(2, batch, groups, seq, size, device=GPU, dtype=HALF) if is_static else None for _ in model["layers"]]

    def run(tokens, at):
        x = model["embed"](tokens)
        for index, layer in enumerate(model["layers"]):
            y = layer["norm"](x)
            q = layer["q"](y).unflatten(-1, (heads, size)).transpose(1, 2)
            now = layer["kv"](y).unflatten(-1, (2, groups, size)).permute(2, 0, 3, 1, 4)
            if is_static:
                caches[index][:, :, :, at : at + now.shape[3]] = now
                k, v = caches[index][:, :, :, : at + now.shape[3]]
            else:
                caches[index] = now if at == 0 else torch.cat([caches[index], now], 3)
                k, v = caches[index]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=at == 0, enable_gqa=True)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](x)))
        values, words = (x[:, -1] @ model["embed"].weight.t()).float().topk(50)
        return words.gather(1, torch.multinomial(values.softmax(1), 1))

    tokens = run(torch.randint(0, 11000, (batch, n), device=GPU), 0)
    for at in range(n, seq):
        tokens = run(tokens, at)


def say_static(batch, seq=160):
    say(batch, seq, True)


def say_growing(batch, seq=160):
    say(batch, seq, False)


PROGRAMS = [story, story_again, compiled_story, projections, leaves, roads, birds, birds_benchmark, faces, citations, seats, songs, say_static, say_growing]
