"""Programs of the kinds that a user asks of, written before anything was measured of them: the set `fifth`, for `predict.py`. `predict_programs.py` runs them."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_programs import GPU, STEPS, Residual, train
from predict_third import conv

HALF = torch.bfloat16


def labels(batch, number):
    return torch.randint(0, number, (batch,), device=GPU)


class Layer(nn.Module):
    """Attention and a gated part; `mask` is added to the weights, `again` leaves the activations to the backward pass."""

    def __init__(self, width, heads, hidden, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask=None, causal=False):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        y = self.second(x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.dropout, self.training)


class Decoder(nn.Module):
    def __init__(self, width, heads, hidden, layers, words, dropout=0.0, again=None):
        super().__init__()
        self.embed, self.words, self.again = nn.Embedding(words, width), words, again
        self.layers = nn.ModuleList(Layer(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if self.again and index % self.again == 0:
                x = checkpoint(layer, x, mask, mask is None, use_reentrant=False)
            else:
                x = layer(x, mask, mask is None)
        return self.norm(x) @ self.embed.weight.t()


def next_word(model, batch, seq, mask=None):
    tokens = torch.randint(0, model.words, (batch, seq + 1), device=GPU)
    with torch.autocast(GPU, HALF):
        return F.cross_entropy(model(tokens[:, :-1], mask).flatten(0, 1).float(), tokens[:, 1:].flatten())


def biased(batch, seq):
    """A bias by distance on attention's weights, dropout, gradients that are clipped."""
    model = Decoder(640, 10, 1600, 5, 12000, dropout=0.1).to(GPU)
    far = torch.arange(seq, device=GPU)
    slopes = 2.0 ** -torch.arange(1, 11, device=GPU)
    mask = (-(far[:, None] - far).abs() * slopes[:, None, None]).masked_fill(far > far[:, None], float("-inf")).to(HALF)[None]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for _ in range(STEPS):
        next_word(model, batch, seq, mask).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def every_second(batch, seq=768):
    """Every second layer is computed again; plain SGD with momentum."""
    model = Decoder(512, 8, 1408, 8, 10000, again=2).to(GPU)
    train(lambda: next_word(model, batch, seq), model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))


def compiled_layers(batch, seq=320):
    """Each layer is compiled on its own."""
    model = Decoder(384, 6, 1024, 3, 8000).to(GPU)
    for layer in model.layers:
        layer.compile()
    train(lambda: next_word(model, batch, seq), model.parameters())


def adapters(batch, seq=448):
    """Low rank beside frozen halves, which are computed again."""
    model = Decoder(896, 14, 2432, 6, 16000, again=1).to(GPU, HALF).requires_grad_(False)

    class Beside(nn.Module):
        def __init__(self, linear, rank=32):
            super().__init__()
            self.linear = linear
            self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=GPU) * 0.01)
            self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=GPU))

        def forward(self, x):
            return self.linear(x) + ((x.float() @ self.a.t()) @ self.b.t()).to(x.dtype)

    for layer in model.layers:
        layer.qkv, layer.down = Beside(layer.qkv), Beside(layer.down)
    model.embed.weight.requires_grad_(True)

    def step():
        tokens = torch.randint(0, model.words, (batch, seq + 1), device=GPU)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, model.parameters())


def patches(batch, side=96):
    """Small patches and a token of the class, in half precision, with labels that are mixed."""
    width, patch = 320, 8
    n = (side // patch) ** 2 + 1
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "layers": nn.ModuleList(Layer(width, 5, 864, 0.1) for _ in range(8)),
                           "norm": nn.LayerNorm(width), "head": nn.Linear(width, 200)}).to(GPU)
    first, places = (nn.Parameter(torch.zeros(1, it, width, device=GPU)) for it in (1, n))

    def step():
        images, truth = torch.rand(batch, 3, side, side, device=GPU), F.one_hot(labels(batch, 200), 200).float()
        images, truth = 0.7 * images + 0.3 * images.flip(0), 0.7 * truth + 0.3 * truth.flip(0)
        with torch.autocast(GPU, HALF):
            x = model["patch"](images).flatten(2).transpose(1, 2)
            x = torch.cat([first.expand(batch, -1, -1), x], 1) + places
            for layer in model["layers"]:
                x = layer(x)
            return F.cross_entropy(model["head"](model["norm"](x[:, 0])).float(), truth)

    train(step, [first, places, *model.parameters()])


def medical(batch, side=160):
    """A U-Net with batch norms and transposed convolutions that finds two classes in grey images."""
    def twice(inside, outside):
        return nn.Sequential(conv(inside, outside, act=nn.ReLU), conv(outside, outside, act=nn.ReLU))

    widths = [24, 48, 96, 192]
    down = nn.ModuleList(twice(a, b) for a, b in zip([1, *widths], widths))
    up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:]))
    join = nn.ModuleList(twice(2 * a, a) for a in widths[:-1])
    model = nn.ModuleDict({"down": down, "up": up, "join": join, "last": nn.Conv2d(widths[0], 2, 1)}).to(GPU)

    def step():
        x, kept = torch.randn(batch, 1, side, side, device=GPU), []
        for block in model["down"]:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for index in reversed(range(len(widths) - 1)):
            x = model["join"][index](torch.cat([model["up"][index](x), kept[index]], 1))
        chances = model["last"](x).softmax(1)
        truth = torch.randint(0, 2, (batch, 1, side, side), device=GPU)
        common = chances.gather(1, truth).sum((1, 2, 3))
        return 1 - (2 * common / (chances.sum((1, 2, 3)) + side * side)).mean()

    train(step, model.parameters(), torch.optim.Adam)


def bottlenecks(batch, side=128):
    """A deep ResNet with channels last and momentum."""
    layers, inside = [conv(3, 64, 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1)], 64
    for number, outside, stride in ((3, 256, 1), (4, 512, 2), (5, 1024, 2)):
        for index in range(number):
            layers.append(Residual(inside, outside, stride if index == 0 else 1))
            inside = outside
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 365)).to(GPU, memory_format=torch.channels_last)

    def step():
        images = torch.randn(batch, 3, side, side, device=GPU).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(images), labels(batch, 365))

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True))


def groups_benchmark(batch, side=112):
    """Convolutions in groups, algorithms that are measured, half precision with a scaled loss."""
    torch.backends.cudnn.benchmark = True
    layers, inside = [conv(3, 32, 3, 2)], 32
    for outside, stride in ((128, 1), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers += [conv(inside, outside, 1), conv(outside, outside, 3, stride, groups=16), conv(outside, outside, 1)]
        inside = outside
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 100)).to(GPU)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), torch.amp.GradScaler(GPU)
    for _ in range(STEPS):
        with torch.autocast(GPU, torch.float16):
            loss = F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 100))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def denoise(batch, side=32):
    """A transformer that takes noise away, a mean of its weights, and eight steps of drawing with that."""
    width, patch = 448, 2
    def make():
        return nn.ModuleDict({"in": nn.Conv2d(4, width, patch, patch), "when": nn.Linear(64, width), "layers": nn.ModuleList(Layer(width, 7, 1216) for _ in range(6)),
                              "shift": nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(6)), "out": nn.Linear(width, 4 * patch * patch)}).to(GPU)
    model, mean = make(), make().requires_grad_(False)

    def away(model, x, when):
        angle = when[:, None] * torch.exp(-torch.arange(32, device=GPU) / 5)
        when = F.silu(model["when"](torch.cat([angle.sin(), angle.cos()], 1)))
        y = model["in"](x).flatten(2).transpose(1, 2)
        for layer, shift in zip(model["layers"], model["shift"]):
            scale, more = shift(when)[:, None].chunk(2, -1)
            y = layer(y * (1 + scale) + more)
        n = side // patch
        return model["out"](y).view(batch, n, n, 4, patch, patch).permute(0, 3, 1, 4, 2, 5).reshape(batch, 4, side, side)

    def step():
        image, noise, when = torch.randn(batch, 4, side, side, device=GPU), torch.randn(batch, 4, side, side, device=GPU), torch.rand(batch, device=GPU)
        part = when[:, None, None, None]
        with torch.autocast(GPU, HALF):
            return F.mse_loss(away(model, (1 - part) * image + part * noise, when).float(), noise - image)

    train(step, model.parameters())
    with torch.no_grad(), torch.autocast(GPU, HALF):
        for one, other in zip(mean.parameters(), model.parameters()):
            one.lerp_(other, 0.01)
        x = torch.randn(batch, 4, side, side, device=GPU)
        for moment in range(8):
            x = x - away(mean, x, torch.full((batch,), 1 - moment / 8, device=GPU)).float() / 8


def attention_graph(batch, nodes=1500):
    """Attention over edges of graphs of one size, by scattering."""
    torch.manual_seed(5)
    heads, size = 4, 48
    project = nn.ModuleList(nn.Linear(inside, heads * size) for inside in (96, heads * size, heads * size))
    weigh = nn.ModuleList(nn.Linear(size, 1) for _ in range(6))
    model = nn.ModuleDict({"project": project, "weigh": weigh, "head": nn.Linear(heads * size, 12)}).to(GPU)

    def step():
        n = batch * nodes
        x, (source, to) = torch.randn(n, 96, device=GPU), torch.randint(0, n, (2, 8 * n), device=GPU)
        for index, layer in enumerate(model["project"]):
            h = layer(x).view(n, heads, size)
            a, b = (model["weigh"][2 * index + it](h)[..., 0] for it in (0, 1))
            weight = F.leaky_relu(a[source] + b[to], 0.2).exp()
            sums = torch.zeros(n, heads, device=GPU).index_add(0, to, weight)
            weight = weight / sums[to]
            x = F.elu(torch.zeros_like(h).index_add(0, to, h[source] * weight[..., None])).flatten(1)
        return F.cross_entropy(model["head"](x), labels(n, 12))

    train(step, model.parameters())


def capacity(batch, seq=192):
    """One expert for each word, and no more words than an expert has room for."""
    torch.manual_seed(3)
    width, n_experts = 384, 12
    model = nn.ModuleDict({"embed": nn.Embedding(6000, width), "route": nn.Linear(width, n_experts), "head": nn.Linear(width, 6000)}).to(GPU)
    up, down = nn.Parameter(torch.randn(n_experts, width, 1536, device=GPU) * 0.02), nn.Parameter(torch.randn(n_experts, 1536, width, device=GPU) * 0.02)

    def step():
        tokens = torch.randint(0, 6000, (batch * seq,), device=GPU)
        x = model["embed"](tokens)
        weight, expert = model["route"](x).softmax(-1).max(-1)
        room = int(1.25 * len(tokens) / n_experts)
        place = F.one_hot(expert, n_experts).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
        where = torch.where(place < room, expert * room + place, n_experts * room)
        given = torch.zeros(n_experts * room + 1, width, device=GPU).index_copy(0, where, x)[:-1].view(n_experts, room, width)
        made = F.gelu(given @ up) @ down
        made = torch.cat([made.flatten(0, 1), torch.zeros(1, width, device=GPU)])[where] * weight[:, None]
        return F.cross_entropy(model["head"](x + made), tokens)

    train(step, [up, down, *model.parameters()])


def spell(batch, seq=48):
    """A recurrent encoder of both directions, and cells in a loop that attend to it."""
    width = 320
    model = nn.ModuleDict({"embed": nn.Embedding(900, width), "read": nn.GRU(width, width // 2, 2, batch_first=True, bidirectional=True, dropout=0.1),
                           "cell": nn.LSTMCell(2 * width, width), "head": nn.Linear(2 * width, 900)}).to(GPU)

    def step():
        read, _ = model["read"](model["embed"](torch.randint(0, 900, (batch, 2 * seq), device=GPU)))
        write = torch.randint(0, 900, (batch, seq), device=GPU)
        state, seen, said = (torch.zeros(batch, width, device=GPU),) * 2, torch.zeros(batch, width, device=GPU), []
        for word in model["embed"](write).unbind(1):
            state = model["cell"](torch.cat([word, seen], 1), state)
            seen = torch.einsum("bt,btw->bw", torch.einsum("bw,btw->bt", state[0], read).softmax(1), read)
            said.append(model["head"](torch.cat([state[0], seen], 1)))
        return F.cross_entropy(torch.stack(said, 1).flatten(0, 1), write.flatten())

    train(step, model.parameters())


def answers(batch, seq, keep):
    """Words one by one, each seeing what `keep` has kept of keys and values."""
    width, heads, groups, layers = 768, 12, 3, 6
    size = width // heads
    torch.manual_seed(2)
    parts = [nn.ModuleDict({"norm": nn.LayerNorm(width), "q": nn.Linear(width, width), "kv": nn.Linear(width, 2 * groups * size), "out": nn.Linear(width, width),
                            "up": nn.Linear(width, 2048), "down": nn.Linear(2048, width)}) for _ in range(layers)]
    model, embed = nn.ModuleList(parts).to(GPU, HALF), nn.Embedding(20000, width).to(GPU, HALF)
    caches = [keep(batch, groups, size) for _ in range(layers)]

    def run(tokens):
        x = embed(tokens)
        for part, cache in zip(model, caches):
            y = part["norm"](x)
            q = part["q"](y).unflatten(-1, (heads, size)).transpose(1, 2)
            k, v = cache(*part["kv"](y).unflatten(-1, (2, groups, size)).permute(2, 0, 3, 1, 4))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
            x = x + part["out"](y.transpose(1, 2).flatten(2))
            x = x + part["down"](F.gelu(part["up"](x)))
        return (x[:, -1] @ embed.weight.t()).argmax(-1, keepdim=True)

    with torch.no_grad():
        word = run(torch.randint(0, 20000, (batch, seq), device=GPU))
        for _ in range(40):
            word = run(word)


def answers_static(batch, seq=600):
    def keep(batch, groups, size):
        both, n = torch.zeros(2, batch, groups, seq + 40, size, device=GPU, dtype=HALF), 0

        def cache(k, v):
            nonlocal n
            both[0, :, :, n:n + k.shape[2]], both[1, :, :, n:n + k.shape[2]] = k, v
            n += k.shape[2]
            return both[0, :, :, :n], both[1, :, :, :n]

        return cache

    answers(batch, seq, keep)


def answers_growing(batch, seq=400):
    def keep(batch, groups, size):
        kept = None

        def cache(k, v):
            nonlocal kept
            kept = (k, v) if kept is None else tuple(torch.cat(it, 2) for it in zip(kept, (k, v)))
            return kept

        return cache

    answers(batch, seq, keep)


def sharpen(batch, side=48):
    """Images four times as large, judged by a frozen network as well, in half precision."""
    body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *[conv(64, 64) for _ in range(8)])
    up = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(64, 3, 9, padding=4))
    model = nn.Sequential(body, up).to(GPU)
    judge = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1)).to(GPU).requires_grad_(False)

    def step():
        truth = torch.rand(batch, 3, 4 * side, 4 * side, device=GPU)
        with torch.autocast(GPU, HALF):
            made = model(F.avg_pool2d(truth, 4))
            return F.l1_loss(made.float(), truth) + F.mse_loss(judge(made).float(), judge(truth).float())

    train(step, model.parameters(), torch.optim.Adam)


def pairs(batch, side=64, seq=32):
    """Images and texts against each other: what is compared grows with the square of the batch."""
    see = nn.Sequential(conv(3, 32, 3, 2), conv(32, 64, 3, 2), conv(64, 128, 3, 2), conv(128, 256, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 256)).to(GPU)
    read = nn.ModuleDict({"embed": nn.Embedding(5000, 256), "layers": nn.ModuleList(Layer(256, 4, 640) for _ in range(3)), "out": nn.Linear(256, 256)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            images = F.normalize(see(torch.randn(batch, 3, side, side, device=GPU)), dim=1)
            x = read["embed"](torch.randint(0, 5000, (batch, seq), device=GPU))
            for layer in read["layers"]:
                x = layer(x)
            alike = 14.0 * images @ F.normalize(read["out"](x.mean(1)), dim=1).t()
        truth = torch.arange(batch, device=GPU)
        return (F.cross_entropy(alike.float(), truth) + F.cross_entropy(alike.float().t(), truth)) / 2

    train(step, [*see.parameters(), *read.parameters()])


PROGRAMS = [biased, every_second, compiled_layers, adapters, patches, medical, bottlenecks, groups_benchmark, denoise, attention_graph, capacity, spell,
            answers_static, answers_growing, sharpen, pairs]
