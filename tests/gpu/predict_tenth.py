"""One program of each kind that users ask of, of other widths, losses and optimizers than all before; written without a look at the rules, before anything was predicted of them: the set `tenth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, labels
from predict_programs import GPU, STEPS, train


class Seeing(nn.Module):
    """A decoder's layer that makes the whole matrix of attention's weights, hides what comes later, and drops some."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, hides):
        y = self.first(x)
        q, k, v = (it(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hides, float("-inf"))
        weights = F.dropout(weights.softmax(-1, dtype=torch.float32).to(v.dtype), 0.05)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.second(x))).square())


def letters(batch, seq=336):
    """A decoder with a matrix of what is hidden, squares of relu, in half precision."""
    width, n_words = 368, 8500
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(Seeing(width, 4, 1300) for _ in range(5)), "norm": nn.LayerNorm(width), "head": nn.Linear(width, n_words)}).to(GPU)
    places = nn.Parameter(torch.zeros(seq, width, device=GPU))
    hides = torch.ones(seq, seq, dtype=torch.bool, device=GPU).triu(1)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens[:, :-1]) + places
            for layer in model["layers"]:
                x = layer(x, hides)
            return F.cross_entropy(model["head"](model["norm"](x)).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)

    train(step, [*model.parameters(), places], torch.optim.Adamax)


class After(nn.Module):
    """A layer whose norms come after what they are of."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = self.first(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x), approximate="tanh")))


def letters_again(batch, seq=400):
    """Every second block of a decoder is computed again, in single precision; large logits cost something as well."""
    width, n_words = 480, 3600
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(After(width, 8, 1500) for _ in range(9)), "head": nn.Linear(width, n_words)}).to(GPU)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        x = model["embed"](tokens[:, :-1])
        for index, layer in enumerate(model["layers"]):
            x = checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x)
        logits = model["head"](x).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten()) + 1e-4 * logits.logsumexp(1).square().mean()

    train(step, model.parameters(), torch.optim.RAdam)


class Reader(nn.Module):
    """An encoder that says of each word whether an answer begins or ends there."""

    def __init__(self, width, heads, hidden, layers, words, seq):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(seq, width))
        self.layers = nn.ModuleList(nn.ModuleDict({"first": nn.RMSNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                                                   "second": nn.RMSNorm(width), "up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}) for _ in range(layers))
        self.heads, self.ends = heads, nn.Linear(width, 2)

    def forward(self, tokens):
        x = F.dropout(self.embed(tokens) + self.places, 0.1)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["first"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.dropout(layer["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), 0.1)
            x = x + F.dropout(layer["down"](F.gelu(layer["up"](layer["second"](x)))), 0.1)
        return self.ends(x)


def forms(batch, seq=224):
    """An encoder with dropout is compiled, and looks for where answers begin and end."""
    model = Reader(312, 6, 1000, 5, 6500, seq).to(GPU)
    run = torch.compile(model)

    def step():
        with torch.autocast(GPU, HALF):
            begins, ends = run(torch.randint(0, 6500, (batch, seq), device=GPU)).float().unbind(-1)
        return (F.cross_entropy(begins, labels(batch, seq)) + F.cross_entropy(ends, labels(batch, seq))) / 2

    train(step, model.parameters(), torch.optim.Adam)


class Llama(nn.Module):
    """A layer of rotated queries and keys, of which `groups` are kept for all heads, and a gated part."""

    def __init__(self, width, heads, groups, hidden):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin, cache=None, **how):
        def split(linear):
            return linear(y).unflatten(-1, (-1, self.size)).transpose(1, 2)

        def turn(it):
            one, other = it.chunk(2, -1)
            return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

        y = self.first(x)
        q, k, v = turn(split(self.q)), turn(split(self.k)), split(self.v)
        if cache is not None:
            k, v = cache(k, v)
        k, v = (it.repeat_interleave(self.heads // self.groups, 1) if self.groups < self.heads else it for it in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turns(seq, size, dtype):
    angle = torch.arange(seq, device=GPU)[:, None] * 10000.0 ** (-torch.arange(0, size, 2, device=GPU) / size)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def lessons(batch, seq=416):
    """Low rank with dropout beside queries, values and what goes down in a frozen Llama; only answers, the second half, count."""
    width, n_words, rank, size = 672, 12500, 20, 56
    layers = nn.ModuleList(Llama(width, 12, 4, 1792) for _ in range(7)).to(GPU, HALF).requires_grad_(False)
    embed, norm, head = nn.Embedding(n_words, width), nn.RMSNorm(width), nn.Linear(width, n_words, bias=False)
    for it in (embed, norm, head):
        it.to(GPU, HALF).requires_grad_(False)

    class Beside(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.a, self.b = inner, nn.Linear(inner.in_features, rank, bias=False), nn.Linear(rank, inner.out_features, bias=False)

        def forward(self, x):
            return self.inner(x) + self.b(self.a(F.dropout(x, 0.1))) * (32 / rank)

    for layer in layers:
        for name in ("q", "v", "down"):
            setattr(layer, name, Beside(getattr(layer, name)).to(GPU, HALF))
    cos, sin = turns(seq, size, HALF)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        x, truth = embed(tokens[:, :-1]), tokens[:, 1:].clone()
        truth[:, : seq // 2] = -100
        for layer in layers:
            x = layer(x, cos, sin, is_causal=True)
        return F.cross_entropy(head(norm(x)).float().flatten(0, 1), truth.flatten())

    train(step, layers.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, amsgrad=True))


def stamps(batch, side=120):
    """Images of 144 patches and a token of the class, of odd width, in half precision with a scaled loss; several labels of each."""
    width, heads, patch = 345, 5, 10
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "norm": nn.LayerNorm(width), "head": nn.Linear(width, 90), "layers": nn.ModuleList(
        nn.ModuleDict({"first": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "second": nn.LayerNorm(width), "up": nn.Linear(width, 1035), "down": nn.Linear(1035, width)})
        for _ in range(6))}).to(GPU)
    token, places = (nn.Parameter(torch.zeros(1, n, width, device=GPU)) for n in (1, (side // patch) ** 2 + 1))
    scales = nn.ParameterList(nn.Parameter(torch.full((width,), 0.1, device=GPU)) for _ in range(12))
    optimizer = torch.optim.RMSprop([*model.parameters(), token, places, *scales], 1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler(GPU)
    for _ in range(STEPS):
        with torch.autocast(GPU, torch.float16):
            x = model["patch"](torch.rand(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
            x = torch.cat([token.expand(batch, -1, -1), x], 1) + places
            for index, layer in enumerate(model["layers"]):
                q, k, v = layer["qkv"](layer["first"](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
                x = x + scales[2 * index] * layer["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
                x = x + scales[2 * index + 1] * layer["down"](F.gelu(layer["up"](layer["second"](x))))
            logits = model["head"](model["norm"](x[:, 0]))
            loss = F.binary_cross_entropy_with_logits(logits, torch.randint(0, 2, (batch, 90), device=GPU).to(logits.dtype))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def norms(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))


def rivers(batch, side=144):
    """A U-Net with batch norms, made smaller by strides and larger by transposed convolutions, in single precision."""
    widths = [20, 40, 80, 160]
    model = nn.ModuleDict({
        "down": nn.ModuleList(nn.Sequential(norms(a, b, 1 if a == 5 else 2), norms(b, b)) for a, b in zip([5, *widths], widths)),
        "wider": nn.ModuleList(nn.ConvTranspose2d(b, a, 3, 2, 1, 1) for b, a in zip(widths[::-1], widths[-2::-1])),
        "up": nn.ModuleList(nn.Sequential(norms(2 * a, a), norms(a, a)) for a in widths[-2::-1]),
        "last": nn.Conv2d(widths[0], 1, 1)}).to(GPU)

    def step():
        x, kept = torch.randn(batch, 5, side, side, device=GPU), []
        for part in model["down"]:
            x = part(x)
            kept.append(x)
        kept.pop()
        for wider, part in zip(model["wider"], model["up"]):
            x = part(torch.cat([wider(x), kept.pop()], 1))
        x, truth = model["last"](x), torch.randint(0, 2, (batch, 1, side, side), device=GPU).float()
        chance = x.sigmoid()
        found, missed, false = (it.sum((1, 2, 3)) for it in (chance * truth, (1 - chance) * truth, chance * (1 - truth)))
        return F.binary_cross_entropy_with_logits(x, truth) + 1 - (found / (found + 0.7 * missed + 0.3 * false)).mean()

    train(step, model.parameters(), torch.optim.Adagrad)


class Timed(nn.Module):
    """Two convolutions with norms of groups; what time it is scales and shifts what is between."""

    def __init__(self, a, b):
        super().__init__()
        self.start, self.middle, self.when = nn.GroupNorm(10, a), nn.GroupNorm(10, b), nn.Linear(160, 2 * b)
        self.one, self.other = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.skip = nn.Identity() if a == b else nn.Conv2d(a, b, 1)

    def forward(self, x, when):
        scale, shift = self.when(when)[:, :, None, None].chunk(2, 1)
        y = self.middle(self.one(F.silu(self.start(x)))) * (1 + scale) + shift
        return self.skip(x) + self.other(F.silu(y))


class Dune(nn.Module):
    def __init__(self, widths, heads=4, kinds=12):
        super().__init__()
        self.time, self.kind = nn.Sequential(nn.Linear(40, 160), nn.SiLU(), nn.Linear(160, 160)), nn.Embedding(kinds, 160)
        self.start, self.end = nn.Conv2d(3, widths[0], 3, padding=1), nn.Sequential(nn.GroupNorm(10, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))
        self.down = nn.ModuleList(Timed(a, b) for a, b in zip([widths[0], *widths], widths))
        self.less = nn.ModuleList(nn.Conv2d(a, a, 3, 2, 1) for a in widths[:-1])
        self.middle, self.norm, self.heads = nn.ModuleList(Timed(widths[-1], widths[-1]) for _ in range(2)), nn.GroupNorm(10, widths[-1]), heads
        self.qkv, self.out = nn.Conv2d(widths[-1], 3 * widths[-1], 1), nn.Conv2d(widths[-1], widths[-1], 1)
        self.more = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for b, a in zip(widths[::-1], widths[-2::-1]))
        self.up = nn.ModuleList(Timed(2 * a, a) for a in widths[-2::-1])

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(x.shape))

    def forward(self, x, when, kind):
        angle = 100 * when[:, None] * torch.exp(-torch.arange(20, device=x.device) / 3)
        when = F.silu(self.time(torch.cat([angle.sin(), angle.cos()], 1)) + self.kind(kind))
        x, kept = self.start(x), []
        for index, part in enumerate(self.down):
            x = part(self.less[index - 1](x) if index else x, when)
            kept.append(x)
        kept.pop()
        x = self.middle[1](self.attend(self.middle[0](x, when)), when)
        for more, part in zip(self.more, self.up):
            x = part(torch.cat([more(F.interpolate(x, scale_factor=2)), kept.pop()], 1), when)
        return self.end(x)


def dunes(batch, side=64):
    """Noise of images of several kinds is taken away by a U-Net with attention on its lowest level, in half precision."""
    model = Dune([40, 80, 160]).to(GPU)

    def step():
        image, noise, when = torch.randn(batch, 3, side, side, device=GPU), torch.randn(batch, 3, side, side, device=GPU), torch.rand(batch, device=GPU)
        much, little = ((when * 1.57).sin()[:, None, None, None], (when * 1.57).cos()[:, None, None, None])
        with torch.autocast(GPU, HALF):
            made = model(little * image + much * noise, when, labels(batch, 12))
        return F.huber_loss(made.float(), little * noise - much * image, delta=0.5)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.Adam(parameters, lr, betas=(0.9, 0.99)))


class Before(nn.Module):
    """Norms before three convolutions, and a mean of four places where a shortcut has to be made smaller."""

    def __init__(self, a, b, stride):
        super().__init__()
        parts, middle = [], b // 4
        for inside, outside, side, step in ((a, middle, 1, 1), (middle, middle, 3, stride), (middle, b, 1, 1)):
            parts += [nn.BatchNorm2d(inside), nn.ReLU(), nn.Conv2d(inside, outside, side, step, side // 2, bias=False)]
        self.body, self.short = nn.Sequential(*parts), nn.Identity()
        if a != b:
            self.short = nn.Sequential(nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity(), nn.Conv2d(a, b, 1, bias=False))

    def forward(self, x):
        return self.short(x) + self.body(x)


def bees(batch, side=120):
    """A ResNet whose blocks begin with norms, three convolutions each, in single precision."""
    blocks, a = [], 36
    for b, stride in ((144, 1), (144, 1), (288, 2), (288, 1), (432, 2), (432, 1)):
        blocks.append(Before(a, b, stride))
        a = b
    model = nn.Sequential(nn.Conv2d(3, 36, 5, 2, 2), *blocks, nn.BatchNorm2d(a), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, 88)).to(GPU)

    def step():
        return F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 88), label_smoothing=0.05)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, weight_decay=1e-4))


class Two(nn.Module):
    """Two convolutions and, where the width changes, a third beside them."""

    def __init__(self, a, b):
        super().__init__()
        stride = 1 if a == b else 2
        self.one, self.other = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _ in range(2))
        self.short = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride)

    def forward(self, x):
        y = self.norms[1](self.other(F.silu(self.norms[0](self.one(x)))))
        return F.silu(y + self.short(x))


def wasps(batch, side=104):
    """A ResNet of two convolutions a block in half precision, with cudnn.benchmark; images are mixed, and so are their labels."""
    torch.backends.cudnn.benchmark = True
    widths = [56, 56, 56, 112, 112, 112, 224, 224, 224]
    model = nn.Sequential(nn.Conv2d(3, 56, 3, 2, 1, bias=False), nn.BatchNorm2d(56), nn.SiLU(), *(Two(a, b) for a, b in zip([56, *widths], widths)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(224, 150)).to(GPU)

    def step():
        image, truth, part = torch.randn(batch, 3, side, side, device=GPU), F.one_hot(labels(batch, 150), 150).float(), torch.rand(batch, device=GPU)
        order = torch.randperm(batch, device=GPU)
        image = torch.lerp(image[order], image, part[:, None, None, None])
        with torch.autocast(GPU, HALF):
            made = model(image)
        return F.kl_div(made.float().log_softmax(1), torch.lerp(truth[order], truth, part[:, None]), reduction="batchmean")

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.95, weight_decay=1e-4))


def traffic(batch, nodes=420, edges=1900):
    """Edges between places have a state as well, which changes with theirs; graphs of one size, of so many nodes and edges each."""
    width = 120

    def both(n):
        return nn.Sequential(nn.Linear(n, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))

    model = nn.ModuleDict({"node": both(11), "edge": both(4), "edges": nn.ModuleList(both(3 * width) for _ in range(4)), "nodes": nn.ModuleList(both(2 * width) for _ in range(4)), "out": nn.Linear(width, 2)}).to(GPU)
    first = torch.arange(batch, device=GPU)[:, None] * nodes

    def step():
        source, to = ((torch.randint(0, nodes, (batch, edges), device=GPU) + first).flatten() for _ in range(2))
        x, e = model["node"](torch.randn(batch * nodes, 11, device=GPU)), model["edge"](torch.randn(batch * edges, 4, device=GPU))
        for change, gather in zip(model["edges"], model["nodes"]):
            e = e + change(torch.cat([e, x[source], x[to]], 1))
            came = torch.zeros_like(x).scatter_add(0, to[:, None].expand_as(e), e)
            x = x + gather(torch.cat([x, came], 1))
        return F.l1_loss(model["out"](x), torch.randn(batch * nodes, 2, device=GPU))

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.05))


def desks(batch, seq=256):
    """Every second layer has eight experts of which each takes an equal share, in the order of what tokens want; in half precision."""
    width, n_experts, hidden, n_words = 264, 8, 720, 5600
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(After(width, 6, 800) for _ in range(6)), "gates": nn.ModuleList(nn.Linear(width, n_experts, bias=False) for _ in range(3))}).to(GPU)
    gate, up, down = (nn.ParameterList(nn.Parameter(torch.randn(n_experts, *shape, device=GPU) * 0.03) for _ in range(3)) for shape in ((width, hidden), (width, hidden), (hidden, width)))

    def share(x, index):
        flat = x.flatten(0, 1)
        chances = model["gates"][index](flat).float().softmax(1)
        weight, wants = chances.max(1)
        order = wants.argsort(stable=True)
        given = flat[order].view(n_experts, -1, width)
        made = (F.silu(given @ gate[index]) * (given @ up[index])) @ down[index]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=GPU))
        spread = n_experts * (chances.mean(0) * F.one_hot(wants, n_experts).float().mean(0)).sum()
        return x + (made.flatten(0, 1)[back] * weight[:, None]).view_as(x), spread

    def step():
        tokens, extra = torch.randint(0, n_words, (batch, seq + 1), device=GPU), 0
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens[:, :-1])
            for index, layer in enumerate(model["layers"]):
                x = layer(x)
                if index % 2:
                    x, spread = share(x, index // 2)
                    extra = extra + spread
            logits = x @ model["embed"].weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * extra

    train(step, [*model.parameters(), *gate, *up, *down], lambda parameters, lr: torch.optim.Adam(parameters, lr, amsgrad=True))


def gestures(batch, seq=260):
    """What sensors say over time, time first, through a GRU of two layers; some moments weigh more than others."""
    model = nn.ModuleDict({"start": nn.Linear(48, 136), "rnn": nn.GRU(136, 376, 2, dropout=0.15), "weigh": nn.Linear(376, 1), "out": nn.Linear(376, 30)}).to(GPU)

    def step():
        hidden, _ = model["rnn"](model["start"](torch.randn(seq, batch, 48, device=GPU)).relu())
        seen = (model["weigh"](hidden).softmax(0) * hidden).sum(0)
        return F.multi_margin_loss(model["out"](seen), labels(batch, 30))

    train(step, model.parameters(), torch.optim.RMSprop)


def reply_static(batch, seq=448, n=352):
    """Keys and values have their place from the start, all of which is looked at through a mask; the likeliest word is taken."""
    width, heads, groups, size, n_words, dtype = 640, 8, 4, 80, 14500, torch.float16
    layers, embed = nn.ModuleList(Llama(width, heads, groups, 1700) for _ in range(8)).to(GPU, dtype), nn.Embedding(n_words, width).to(GPU, dtype)
    kept = [torch.zeros(2, batch, groups, seq, size, device=GPU, dtype=dtype) for _ in layers]
    cos, sin = turns(seq, size, dtype)
    sees = torch.ones(seq, seq, dtype=torch.bool, device=GPU).tril()

    def run(tokens, at):
        def cache(both):
            def keep(k, v):
                both[0].index_copy_(2, at, k)
                both[1].index_copy_(2, at, v)
                return both.unbind(0)
            return keep

        x = embed(tokens)
        for layer, both in zip(layers, kept):
            x = layer(x, cos[at], sin[at], cache(both), attn_mask=sees[at][None, None])
        return (x[:, -1:] @ embed.weight.t()).argmax(-1)

    with torch.no_grad():
        tokens = run(torch.randint(0, n_words, (batch, n), device=GPU), torch.arange(n, device=GPU))
        for at in range(n, seq):
            tokens = run(tokens, torch.tensor([at], device=GPU))


def reply_growing(batch, seq=304, n=224):
    """Keys and values grow by each word; all words of what is asked are weighed, and a word is drawn from the likeliest that make nine tenths."""
    width, heads, size, n_words = 528, 6, 88, 9000
    layers, embed = nn.ModuleList(Llama(width, heads, heads, 1408) for _ in range(6)).to(GPU, HALF), nn.Embedding(n_words, width).to(GPU, HALF)
    head, kept = nn.Linear(width, n_words, bias=False).to(GPU, HALF), [None] * len(layers)
    cos, sin = turns(seq, size, HALF)

    def run(tokens, at):
        def cache(index):
            def keep(k, v):
                kept[index] = (k, v) if kept[index] is None else tuple(torch.cat(it, 2) for it in zip(kept[index], (k, v)))
                return kept[index]
            return keep

        x, to = embed(tokens), at + tokens.shape[1]
        for index, layer in enumerate(layers):
            x = layer(x, cos[at:to], sin[at:to], cache(index), is_causal=at == 0)
        chances, words = (head(x)[:, -1].float() / 0.8).softmax(-1).sort(-1, descending=True)
        chances = chances.masked_fill(chances.cumsum(-1) - chances > 0.9, 0.0)
        return words.gather(1, torch.multinomial(chances, 1))

    with torch.no_grad():
        tokens = run(torch.randint(0, n_words, (batch, n), device=GPU), 0)
        for at in range(n, seq):
            tokens = run(tokens, at)


PROGRAMS = [letters, letters_again, forms, lessons, stamps, rivers, dunes, bees, wasps, traffic, desks, gestures, reply_static, reply_growing]
