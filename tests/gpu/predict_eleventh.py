"""One program of each kind that users ask of, other than all before in data, widths, losses or optimizers; written without a look at the rules, before anything was predicted of them: the set `eleventh`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, labels
from predict_programs import GPU, train


def heads_of(x, size):
    """Places of heads before places of words."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


class Lion(torch.optim.Optimizer):
    """Steps of one length each, towards the sign of what a mean of the gradients and the last of them say."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)
                mean = self.state[parameter]["mean"]
                parameter.mul_(1 - 0.1 * group["lr"]).sub_(mean.lerp(parameter.grad, 0.1).sign_(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 0.01)


class Parallel(nn.Module):
    """Attention and linear layers read the same norm, and both are added at once."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.size, self.hidden, self.norm = width // heads, hidden, nn.LayerNorm(width, bias=False)
        self.start, self.out, self.down = nn.Linear(width, 3 * width + hidden, bias=False), nn.Linear(width, width, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        *qkv, up = self.start(self.norm(x)).split([*[x.shape[-1]] * 3, self.hidden], -1)
        seen = F.scaled_dot_product_attention(*(heads_of(it, self.size) for it in qkv), is_causal=True)
        return x + self.out(joined(seen)) + self.down(F.gelu(up))


def chronicle(batch, seq=288):
    """A decoder whose layers do both parts side by side; the table of words is used at both ends, logits are kept within 30."""
    width, n_words = 432, 9000
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(Parallel(width, 6, 1584) for _ in range(5)), "norm": nn.LayerNorm(width, bias=False)}).to(GPU)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens[:, :-1])
            for layer in model["layers"]:
                x = layer(x)
            logits = 30 * torch.tanh(F.linear(model["norm"](x), model["embed"].weight) / 30)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters(), Lion)


class Across(nn.Module):
    """A layer of an encoder, or of a decoder that looks at the encoder's words as well."""

    def __init__(self, width, size, hidden, is_decoder):
        super().__init__()
        self.size, self.is_decoder = size, is_decoder
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if is_decoder else 2))
        self.looks = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(width, width, bias=False), "kv": nn.Linear(width, 2 * width, bias=False), "out": nn.Linear(width, width, bias=False)})
                                   for _ in range(2 if is_decoder else 1))
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, read=None):
        for index, look in enumerate(self.looks):
            y = self.norms[index](x)
            k, v = look["kv"](read if index else y).chunk(2, -1)
            q, k, v = (heads_of(it, self.size) for it in (look["q"](y), k, v))
            x = x + F.dropout(look["out"](joined(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_decoder and index == 0))), 0.1)
        gate, up = self.up(self.norms[-1](x)).chunk(2, -1)
        return x + F.dropout(self.down(F.gelu(gate, approximate="tanh") * up), 0.1)


def ballads(batch, seq=320, write=144):
    """What is missing of a text is written; every block of both sides is computed again, in half precision."""
    width, n_words = 576, 10400
    sides = nn.ModuleList(nn.ModuleList(Across(width, 64, 1504, is_decoder) for _ in range(n)) for n, is_decoder in ((6, False), (5, True)))
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "sides": sides, "norms": nn.ModuleList(nn.RMSNorm(width) for _ in range(2)), "head": nn.Linear(width, n_words, bias=False)}).to(GPU)

    def step():
        text, missing = (torch.randint(0, n_words, (batch, n), device=GPU) for n in (seq, write + 1))
        with torch.autocast(GPU, HALF):
            read, said = model["embed"](text), model["embed"](missing[:, :-1])
            for block in model["sides"][0]:
                read = checkpoint(block, read, use_reentrant=False)
            read = model["norms"][0](read)
            for block in model["sides"][1]:
                said = checkpoint(block, said, read, use_reentrant=False)
            chances = model["head"](model["norms"][1](said)).log_softmax(-1)
        return F.nll_loss(chances.flatten(0, 1), missing[:, 1:].flatten())

    train(step, model.parameters(), lambda parameters, lr: torch.optim.Adam(parameters, lr, betas=(0.9, 0.98), eps=1e-9))


class Ahead(nn.Module):
    """A decoder of three layers that says the next word and the one after that."""

    def __init__(self, width, size, hidden, words, seq):
        super().__init__()
        self.embed, self.places, self.size, self.norm = nn.Embedding(words, width), nn.Embedding(seq, width), size, nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.ModuleDict({"first": nn.LayerNorm(width), "q": nn.Linear(width, width), "k": nn.Linear(width, width), "v": nn.Linear(width, width), "out": nn.Linear(width, width),
                                                   "second": nn.LayerNorm(width), "gate": nn.Linear(width, hidden), "up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight
        for layer in self.layers:
            y = layer["first"](x)
            x = x + layer["out"](joined(F.scaled_dot_product_attention(*(heads_of(layer[it](y), self.size) for it in "qkv"), is_causal=True)))
            y = layer["second"](x)
            x = x + layer["down"](layer["gate"](y).sigmoid() * layer["up"](y))
        x = self.norm(x)
        return [head(x) for head in self.heads]


def diary(batch, seq=240):
    """A small decoder is compiled, and says two words at a time."""
    n_words = 5200
    model = Ahead(392, 56, 1080, n_words, seq).to(GPU)
    run = torch.compile(model)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 2), device=GPU)
        with torch.autocast(GPU, HALF):
            said = run(tokens[:, :-2])
            one, other = (F.cross_entropy(it.flatten(0, 1), tokens[:, 1 + index:seq + 1 + index].flatten()) for index, it in enumerate(said))
        return one + 0.3 * other

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1))


class Grouped(nn.Module):
    """A layer where several heads share keys and values."""

    def __init__(self, width, size, groups, hidden):
        super().__init__()
        self.size, self.first, self.second = size, nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(a, b, bias=False) for a, b in ((width, width), (width, groups * size), (width, groups * size), (width, width)))
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, look):
        y = self.first(x)
        x = x + self.out(joined(look(*(heads_of(it(y), self.size) for it in (self.q, self.k, self.v)))))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Turned(nn.Module):
    """A frozen linear layer with a product of two small ones beside it; how long each row of both is gets learnt on its own."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner, self.rank, dtype = inner, rank, inner.weight.dtype
        self.a = nn.Parameter(torch.randn(rank, inner.in_features, device=GPU, dtype=dtype) * 0.02)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank, device=GPU, dtype=dtype))
        self.long = nn.Parameter(inner.weight.detach().norm(dim=1))

    def forward(self, x):
        with torch.no_grad():
            norm = (self.inner.weight + 2 * self.b @ self.a).norm(dim=1)
        return (self.inner(x) + 2 * F.linear(F.linear(x, self.a), self.b)) * (self.long / norm)


def judges(batch, seq=320):
    """Which of two answers is better is learnt beside a frozen transformer of grouped heads; what goes up learns faster than what goes down."""
    width, n_words = 640, 11200
    layers, embed = nn.ModuleList(Grouped(width, 64, 2, 1664) for _ in range(8)).to(GPU, HALF).requires_grad_(False), nn.Embedding(n_words, width).to(GPU, HALF).requires_grad_(False)
    norm, head = nn.RMSNorm(width).to(GPU, HALF), nn.Linear(width, 1).to(GPU)
    for layer in layers:
        for name in ("q", "k", "v", "up"):
            setattr(layer, name, Turned(getattr(layer, name), 12))

    def look(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def step():
        x = embed(torch.randint(0, n_words, (2 * batch, seq), device=GPU))
        for layer in layers:
            x = layer(x, look)
        liked, other = head(norm(x[:, -1]).float()).squeeze(1).chunk(2)
        return F.softplus(other - liked).mean()

    def faster(parameters, lr):
        up = {id(it.b) for it in layers.modules() if isinstance(it, Turned)}
        return torch.optim.AdamW([{"params": [it for it in parameters if (id(it) in up) == is_up], "lr": 16 * lr if is_up else lr} for is_up in (False, True)])

    train(step, [*layers.parameters(), *norm.parameters(), *head.parameters()], faster)


class Registers(nn.Module):
    """A layer of a transformer for images, with norms of queries and keys."""

    def __init__(self, width, size, hidden):
        super().__init__()
        self.size, self.first, self.second, self.norms = size, nn.LayerNorm(width), nn.LayerNorm(width), nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.out, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        q, k, v = (heads_of(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(joined(F.scaled_dot_product_attention(self.norms[0](q), self.norms[1](k), v)))
        return x + self.down(F.gelu(self.up(self.second(x))))


def plates(batch, side=126):
    """Images of 81 patches and four tokens that stand for nothing; twelve numbers of each, and how sure they are, in single precision."""
    width, patch, extra = 416, 14, 4
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "layers": nn.ModuleList(Registers(width, 52, 1600) for _ in range(7)), "norm": nn.LayerNorm(width), "out": nn.Linear(width, 24)}).to(GPU)
    places, registers = (nn.Parameter(torch.randn(1, n, width, device=GPU) * 0.02) for n in ((side // patch) ** 2, extra))

    def step():
        x = model["patch"](torch.rand(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2) + places
        x = torch.cat([registers.expand(batch, -1, -1), x], 1)
        for layer in model["layers"]:
            x = layer(x)
        mean, spread = model["out"](model["norm"](x[:, extra:].mean(1))).chunk(2, 1)
        return F.gaussian_nll_loss(mean, torch.randn(batch, 12, device=GPU), F.softplus(spread))

    def decays(parameters, lr):
        return torch.optim.AdamW([{"params": [it for it in parameters if (it.dim() > 1) == is_matrix], "weight_decay": 0.3 if is_matrix else 0.0} for is_matrix in (False, True)], lr)

    train(step, [places, registers, *model.parameters()], decays)


def grouped(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(7, b), nn.ReLU(inplace=True))


def fields(batch, side=112):
    """What grows where, from six colours of a satellite: a U-Net with norms of groups, made larger between the pixels, in single precision."""
    widths = [28, 56, 112, 168]
    steps = list(zip(widths[:0:-1], widths[-2::-1]))
    model = nn.ModuleDict({"down": nn.ModuleList(nn.Sequential(grouped(a, b), grouped(b, b)) for a, b in zip([6, *widths], widths)), "less": nn.ModuleList(nn.Conv2d(b, a, 1) for b, a in steps),
                           "up": nn.ModuleList(nn.Sequential(grouped(2 * a, a), grouped(a, a)) for _, a in steps), "last": nn.Conv2d(widths[0], 9, 1)}).to(GPU)

    def step():
        x, kept = torch.randn(batch, 6, side, side, device=GPU), []
        for part in model["down"]:
            x = part(F.avg_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for less, part in zip(model["less"], model["up"]):
            x = F.interpolate(less(x), scale_factor=2, mode="bilinear", align_corners=False)
            x = part(torch.cat([kept.pop(), x], 1))
        lost = F.cross_entropy(model["last"](x), torch.randint(0, 9, (batch, side, side), device=GPU), reduction="none")
        return ((1 - (-lost).exp()).square() * lost).mean()

    train(step, model.parameters(), lambda parameters, lr: torch.optim.RMSprop(parameters, lr, centered=True))


class Painted(nn.Module):
    """Two convolutions that know the time; then attention to the image itself and to a text, where `sees`."""

    def __init__(self, a, b, size, text, sees):
        super().__init__()
        self.norms, self.when = nn.ModuleList(nn.GroupNorm(12, it) for it in (a, b)), nn.Linear(192, b)
        self.convs, self.skip = nn.ModuleList(nn.Conv2d(it, b, 3, padding=1) for it in (a, b)), nn.Identity() if a == b else nn.Conv2d(a, b, 1)
        self.size, self.looks = size, nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(b), "q": nn.Linear(b, b, bias=False), "kv": nn.Linear(it, 2 * b, bias=False), "out": nn.Linear(b, b)})
                                                    for it in ((b, text) if sees else ()))

    def forward(self, x, when, text):
        y = self.convs[0](F.silu(self.norms[0](x))) + self.when(when)[:, :, None, None]
        x = self.skip(x) + self.convs[1](F.silu(self.norms[1](y)))
        if len(self.looks) == 0:
            return x
        flat = x.flatten(2).transpose(1, 2)
        for index, look in enumerate(self.looks):
            y = look["norm"](flat)
            q, k, v = (heads_of(it, self.size) for it in (look["q"](y), *look["kv"](text if index else y).chunk(2, -1)))
            flat = flat + look["out"](joined(F.scaled_dot_product_attention(q, k, v)))
        return flat.transpose(1, 2).unflatten(2, x.shape[2:])


class Paint(nn.Module):
    """Three levels, of which the two lower ones have attention."""

    def __init__(self, widths, text=128, size=24):
        super().__init__()
        self.time, self.text = nn.Sequential(nn.Linear(48, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU()), nn.Embedding(3000, text)
        self.start, self.end = nn.Conv2d(4, widths[0], 3, padding=1), nn.Sequential(nn.GroupNorm(12, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1))
        self.down = nn.ModuleList(Painted(a, b, size, text, b > widths[0]) for a, b in zip([widths[0], *widths], widths))
        self.less, self.middle = nn.ModuleList(nn.Conv2d(a, a, 3, 2, 1) for a in widths[:-1]), Painted(widths[-1], widths[-1], size, text, True)
        self.more = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for b, a in zip(widths[:0:-1], widths[-2::-1]))
        self.up = nn.ModuleList(Painted(2 * a, a, size, text, a > widths[0]) for a in widths[-2::-1])

    def forward(self, x, when, words):
        angle = 1000 * when[:, None] * torch.exp(-torch.arange(24, device=x.device) * 0.4)
        when, text = self.time(torch.cat([angle.cos(), angle.sin()], 1)), self.text(words)
        x, kept = self.start(x), []
        for index, part in enumerate(self.down):
            x = part(self.less[index - 1](x) if index else x, when, text)
            kept.append(x)
        x = self.middle(kept.pop(), when, text)
        for more, part in zip(self.more, self.up):
            x = part(torch.cat([more(F.interpolate(x, scale_factor=2)), kept.pop()], 1), when, text)
        return self.end(x)


def posters(batch, side=56):
    """Noise is taken away by what a text says, with attention on two levels, in float16; images of little noise count more."""
    model = Paint([48, 96, 192]).to(GPU)

    def step():
        image, noise, when = torch.randn(batch, 4, side, side, device=GPU), torch.randn(batch, 4, side, side, device=GPU), torch.rand(batch, device=GPU)
        kept = torch.cos(when * 1.55).square()[:, None, None, None]
        with torch.autocast(GPU, torch.float16):
            made = model(kept.sqrt() * image + (1 - kept).sqrt() * noise, when, torch.randint(0, 3000, (batch, 20), device=GPU))
        wrong = F.mse_loss(made.float(), noise, reduction="none").mean((1, 2, 3))
        clear = (kept / (1 - kept + 1e-4)).flatten()
        return (wrong * clear.clamp(max=5) / (clear + 1e-4)).mean()

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, eps=1e-6))


class Thirty(nn.Module):
    """Two convolutions and a shortcut, as in a ResNet of 34 layers."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.one, self.first, self.other, self.second = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b else nn.Identity()

    def forward(self, x):
        y = self.second(self.other(F.relu(self.first(self.one(x)), inplace=True)))
        return F.relu(y + self.short(x), inplace=True)


def stages(first, block, counts):
    """What comes after the first convolution; the first block of each stage but one makes the image smaller."""
    a, blocks = first, []
    for index, (b, count) in enumerate(counts):
        for place in range(count):
            blocks.append(block(a, b, 2 if index and place == 0 else 1))
            a = b
    return nn.Sequential(nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def passports(batch, side=112):
    """Whose face it is: a ResNet of 34 layers, and an angle that has to be smaller by a margin; in single precision."""
    body = stages(64, Thirty, ((64, 3), (128, 4), (256, 6), (512, 3))).to(GPU)
    people = nn.Parameter(torch.randn(7000, 512, device=GPU))

    def step():
        truth = labels(batch, 7000)
        near = F.linear(F.normalize(body(torch.rand(batch, 3, side, side, device=GPU))), F.normalize(people)).clamp(-0.999, 0.999)
        margin = F.one_hot(truth, 7000) * 0.4
        return F.cross_entropy(48 * torch.cos(near.acos() + margin), truth)

    train(step, [*body.parameters(), people], lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4))


class Narrow(nn.Module):
    """Three convolutions, the middle one narrow; how much of each channel goes on is learnt from the mean of all."""

    def __init__(self, a, b, stride):
        super().__init__()
        middle, parts = b // 4, []
        for inside, outside, side, step in ((a, middle, 1, 1), (middle, middle, 3, stride), (middle, b, 1, 1)):
            parts += [nn.Conv2d(inside, outside, side, step, side // 2, bias=False), nn.BatchNorm2d(outside), nn.Hardswish(inplace=True)]
        self.body, self.gate = nn.Sequential(*parts[:-1]), nn.Sequential(nn.Linear(b, b // 12), nn.ReLU(inplace=True), nn.Linear(b // 12, b), nn.Hardsigmoid())
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b else nn.Identity()

    def forward(self, x):
        y = self.body(x)
        return F.hardswish(self.short(x) + y * self.gate(y.mean((2, 3)))[:, :, None, None])


def fruits(batch, side=144):
    """What is in the image and where: a ResNet of narrow blocks with cudnn.benchmark, in half precision."""
    torch.backends.cudnn.benchmark = True
    body = stages(48, Narrow, ((192, 2), (384, 2), (576, 3), (768, 2)))
    model = nn.ModuleDict({"body": body, "kind": nn.Linear(768, 260), "box": nn.Linear(768, 4)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            seen = model["body"](torch.randn(batch, 3, side, side, device=GPU))
            kind, box = model["kind"](seen), model["box"](seen)
        return F.cross_entropy(kind.float(), labels(batch, 260)) + 4 * F.smooth_l1_loss(box.float().sigmoid(), torch.rand(batch, 4, device=GPU), beta=0.1)

    train(step, model.parameters(), torch.optim.NAdam)


def friends(batch, nodes=260, edges=1500):
    """Who may know whom: attention over edges that have features, graphs of one size; edges that are there against as many that are not."""
    heads, size = 6, 28
    width = heads * size
    layers = nn.ModuleList(nn.ModuleDict({"sends": nn.Linear(width, width), "takes": nn.Linear(width, width), "edge": nn.Linear(7, width, bias=False), "weigh": nn.Linear(size, 1, bias=False),
                                          "norm": nn.LayerNorm(width)}) for _ in range(3))
    model = nn.ModuleDict({"start": nn.Linear(30, width), "layers": layers, "pair": nn.Linear(width, width, bias=False)}).to(GPU)
    first = torch.arange(batch, device=GPU)[:, None] * nodes

    def step():
        source, to, other = ((torch.randint(0, nodes, (batch, edges), device=GPU) + first).flatten() for _ in range(3))
        x, about = F.elu(model["start"](torch.randn(batch * nodes, 30, device=GPU))), torch.randn(batch * edges, 7, device=GPU)
        for layer in model["layers"]:
            sent = layer["sends"](x)[source]
            weight = layer["weigh"](F.leaky_relu(sent + layer["takes"](x)[to] + layer["edge"](about), 0.2).unflatten(1, (heads, size))).squeeze(2)
            most = torch.full((batch * nodes, heads), float("-inf"), device=GPU).scatter_reduce(0, to[:, None].expand_as(weight), weight.detach(), "amax")
            weight = (weight - most[to]).exp()
            sums = torch.zeros(batch * nodes, heads, device=GPU).index_add(0, to, weight)
            came = torch.zeros(batch * nodes, width, device=GPU).index_add(0, to, (sent.unflatten(1, (heads, size)) * (weight / sums[to])[..., None]).flatten(1))
            x = layer["norm"](x + F.elu(came))
        ends = model["pair"](x)[source]
        near, far = ((ends * x[it]).sum(1) for it in (to, other))
        return F.softplus(-near).mean() + F.softplus(far).mean()

    train(step, model.parameters(), lambda parameters, lr: torch.optim.Adam(parameters, lr, weight_decay=1e-5))


def genomes(batch, seq=192):
    """Letters that are hidden are found again; in each text every expert has places for an equal share of words, and who comes too late is passed by."""
    width, n_experts, hidden, n_words, n_hidden = 336, 6, 1008, 4100, 29
    room = seq // n_experts
    layers = nn.ModuleList(nn.ModuleDict({"first": nn.LayerNorm(width), "second": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                                          "route": nn.Linear(width, n_experts, bias=False)}) for _ in range(4))
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": layers, "norm": nn.LayerNorm(width), "head": nn.Linear(width, n_words)}).to(GPU)
    up, down = (nn.ParameterList(nn.Parameter(torch.randn(n_experts, *shape, device=GPU) * 0.03) for _ in layers) for shape in ((width, hidden), (hidden, width)))
    places = nn.Parameter(torch.zeros(seq, width, device=GPU))

    def ask(x, route, up, down):
        chances = route(x).float().softmax(-1)
        chosen = F.one_hot(chances.argmax(-1), n_experts)
        place = (chosen.cumsum(1) - 1).masked_fill(chosen == 0, -1)
        sends = (place[..., None] == torch.arange(room, device=GPU)).to(HALF)
        given = torch.einsum("bsec,bsw->ebcw", sends, x).flatten(1, 2)
        made = torch.bmm(F.relu(torch.bmm(given, up)), down).unflatten(1, (-1, room))
        spread = (chances.mean((0, 1)) * chosen.float().mean((0, 1))).sum() * n_experts
        return torch.einsum("bsec,ebcw->bsw", sends * chances[..., None], made), spread

    def step():
        tokens, extra = torch.randint(0, n_words, (batch, seq), device=GPU), 0
        hides = torch.rand(batch, seq, device=GPU).topk(n_hidden, 1).indices
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens.scatter(1, hides, 0)) + places
            for index, layer in enumerate(model["layers"]):
                q, k, v = (heads_of(it, 56) for it in layer["qkv"](layer["first"](x)).chunk(3, -1))
                x = x + layer["out"](joined(F.scaled_dot_product_attention(q, k, v)))
                made, spread = ask(layer["second"](x), layer["route"], up[index], down[index])
                x, extra = x + made, extra + spread
            x = model["norm"](x).gather(1, hides[..., None].expand(-1, -1, width))
            return F.cross_entropy(model["head"](x).flatten(0, 1), tokens.gather(1, hides).flatten()) + 0.01 * extra

    train(step, [*model.parameters(), *up, *down, places], lambda parameters, lr: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.98), weight_decay=0.01))


def meters(batch, seq=220):
    """What four meters will show, as nine bounds each, by an LSTM of two layers whose states are made narrower; the mean of the weights is kept."""
    rnn = nn.LSTM(24, 520, 2, batch_first=True, dropout=0.2, proj_size=144)
    model = nn.ModuleDict({"rnn": rnn, "out": nn.Sequential(nn.Linear(144, 96), nn.SiLU(), nn.Linear(96, 36))}).to(GPU)
    bounds = torch.linspace(0.1, 0.9, 9, device=GPU)

    def step():
        hidden, _ = model["rnn"](torch.randn(batch, seq, 24, device=GPU))
        wrong = torch.randn(batch, seq, 4, 1, device=GPU) - model["out"](hidden).unflatten(-1, (4, 9))
        return torch.maximum(bounds * wrong, (bounds - 1) * wrong).mean()

    train(step, model.parameters(), torch.optim.ASGD)


def chat_static(batch, seq=640, n=512):
    """One tensor keeps the keys and values of all layers; heads of a group are taken as rows of one product; a word of at least a tenth of the best's chance is drawn."""
    width, size, groups, n_words = 576, 64, 3, 18000
    layers, embed = nn.ModuleList(Grouped(width, size, groups, 1536) for _ in range(7)).to(GPU, HALF), nn.Embedding(n_words, width).to(GPU, HALF)
    head, kept = nn.Linear(width, n_words, bias=False).to(GPU, HALF), torch.zeros(len(layers), 2, batch, groups, seq, size, device=GPU, dtype=HALF)

    def run(tokens, at):
        to = at + tokens.shape[1]

        def look(both):
            def seen(q, k, v):
                both[0][:, :, at:to], both[1][:, :, at:to] = k, v
                if at == 0:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                k, v = both[:, :, :, :to]
                weights = q.unflatten(1, (groups, -1)).flatten(2, 3) @ k.transpose(-1, -2) * size ** -0.5
                return (weights.float().softmax(-1).to(HALF) @ v).unflatten(2, (-1, 1)).flatten(1, 2)
            return seen

        x = embed(tokens)
        for layer, both in zip(layers, kept):
            x = layer(x, look(both))
        chances = head(x[:, -1]).float().softmax(-1)
        return torch.multinomial(chances.masked_fill(chances < 0.1 * chances.amax(-1, keepdim=True), 0.0), 1)

    with torch.no_grad():
        tokens = run(torch.randint(0, n_words, (batch, n), device=GPU), 0)
        for at in range(n, seq - 1):
            tokens = run(tokens, at)


def chat_growing(batch, seq=336, n=256):
    """Each text is written with and without what was asked, in float16, and the difference counts; keys and values of three groups grow by each word."""
    width, size, n_words, dtype = 720, 80, 16000, torch.float16
    layers, embed = nn.ModuleList(Grouped(width, size, 3, 1900) for _ in range(5)).to(GPU, dtype), nn.Embedding(n_words, width).to(GPU, dtype)
    kept, said = [None] * len(layers), torch.randint(0, n_words, (batch, n), device=GPU)

    def run(tokens):
        def look(index):
            def seen(q, k, v):
                is_first = kept[index] is None
                kept[index] = torch.stack([k, v]) if is_first else torch.cat([kept[index], torch.stack([k, v])], 3)
                return F.scaled_dot_product_attention(q, *kept[index], is_causal=is_first, enable_gqa=True)
            return seen

        x = embed(tokens)
        for index, layer in enumerate(layers):
            x = layer(x, look(index))
        asked, free = F.linear(x[:, -1], embed.weight).float().chunk(2)
        logits = free + 1.5 * (asked - free)
        logits = logits.scatter(1, said, logits.gather(1, said) / 1.2)
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1, keepdim=True)

    with torch.no_grad():
        word = run(torch.cat([said, torch.randint(0, n_words, (batch, n), device=GPU)]))
        for _ in range(n, seq):
            said = torch.cat([said, word], 1)
            word = run(word.repeat(2, 1))


PROGRAMS = [diary, chronicle, ballads, judges, plates, fields, posters, passports, fruits, friends, genomes, meters, chat_static, chat_growing]
