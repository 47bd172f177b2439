"""Small programs of many kinds, in plain PyTorch, whose memory grows with what they are given; `predict.py` beside this file runs them.

usage: predict_programs.py NAME VARIABLE=VALUE[,VARIABLE=VALUE] [LIMIT]

LIMIT is what PyTorch may reserve, bytes. Prints one line of JSON: what PyTorch says it had reserved and allocated at most, and
whether it ran out.
"""
import json, os, sys, time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 3
GPU = "cuda"


class Block(nn.Module):
    """Attention and two linear layers; `groups` heads share keys and values."""

    def __init__(self, width, heads, groups=1, matrix=False):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.groups, self.matrix, self.size = heads, groups, matrix, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width // groups)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x, cache=None):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(x).view(batch, length, 2, self.heads // self.groups, self.size)
        k, v = kv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache(k, v)
        if self.matrix:
            weights = (q @ k.transpose(-1, -2)) / self.size**0.5
            x = weights.softmax(-1) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=self.groups > 1)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, cache=None):
        x = x + self.attend(self.first(x), cache)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, width=512, heads=8, layers=6, words=16384, again=False, **how):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, **how) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.again, self.words = again, words

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def train(step, parameters, optimizer=torch.optim.AdamW):
    parameters = [it for it in parameters if it.requires_grad]
    optimizer = optimizer(parameters, lr=1e-4)
    for _ in range(STEPS):
        step().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def words(model, batch, seq):
    return torch.randint(0, model.words, (batch, seq + 1), device=GPU)


def language(model, batch, seq, run=None):
    """One step's loss, in bfloat16 where autocast says so."""
    tokens = words(model, batch, seq)
    with torch.autocast(GPU, torch.bfloat16):
        logits = (model if run is None else run)(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt(batch, seq=512):
    model = Gpt().to(GPU)
    train(lambda: language(model, batch, seq), model.parameters())


def gpt_seq(batch, seq):
    gpt(batch, seq)


def gpt_matrix(batch, seq):
    model = Gpt(layers=3, matrix=True).to(GPU)
    train(lambda: language(model, batch, seq), model.parameters())


def gpt_checkpoint(batch, seq=512):
    model = Gpt(layers=10, again=True).to(GPU)
    train(lambda: language(model, batch, seq), model.parameters())


def gpt_fp32(batch, seq=256):
    model = Gpt(layers=4).to(GPU)

    def step():
        tokens = words(model, batch, seq)
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    train(step, model.parameters())


def gpt_accumulate(batch, seq=512):
    model = Gpt(layers=4).to(GPU)

    def step():
        for _ in range(3):
            (language(model, batch, seq) / 4).backward()
        return language(model, batch, seq) / 4

    train(step, model.parameters())


def gpt_compile(batch, seq=512):
    model = Gpt(layers=2, words=8192).to(GPU)
    run = torch.compile(model)
    train(lambda: language(model, batch, seq, run), model.parameters())


def llama(batch, seq=512):
    model = Gpt(width=768, heads=12, layers=6, groups=4).to(GPU, torch.bfloat16)

    def step():
        tokens = words(model, batch, seq)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, model.parameters())


def lora(batch, seq=512):
    model = Gpt(width=768, heads=12, layers=6).to(GPU, torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.a = nn.Linear(linear.in_features, 16, bias=False, device=GPU, dtype=torch.bfloat16)
            self.b = nn.Linear(16, linear.out_features, bias=False, device=GPU, dtype=torch.bfloat16)

        def forward(self, x):
            return self.linear(x) + self.b(self.a(F.dropout(x, 0.05)))

    for block in model.blocks:
        block.q, block.kv = Adapted(block.q), Adapted(block.kv)

    def step():
        tokens = words(model, batch, seq)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, model.parameters())


def vit(batch, side=224):
    width, patch = 384, 16
    model = nn.ModuleDict({
        "patch": nn.Conv2d(3, width, patch, patch),
        "blocks": nn.Sequential(*[Block(width, 6) for _ in range(6)]),
        "head": nn.Linear(width, 1000),
    }).to(GPU)
    places = nn.Parameter(torch.zeros((side // patch) ** 2, width, device=GPU))

    def step():
        images = torch.randn(batch, 3, side, side, device=GPU)
        labels = torch.randint(0, 1000, (batch,), device=GPU)
        x = model["patch"](images).flatten(2).transpose(1, 2) + places
        return F.cross_entropy(model["head"](model["blocks"](x).mean(1)), labels)

    train(step, [places, *model.parameters()])


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        middle = outside // 4
        self.body = nn.Sequential(
            nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(inplace=True),
            nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside))
        self.short = nn.Identity()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet(batch, side=192):
    layers, inside = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for number, outside, stride in ((2, 256, 1), (3, 512, 2), (3, 1024, 2), (2, 2048, 2)):
        for index in range(number):
            layers.append(Residual(inside, outside, stride if index == 0 else 1))
            inside = outside
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)).to(GPU)

    def step():
        images = torch.randn(batch, 3, side, side, device=GPU)
        return F.cross_entropy(model(images), torch.randint(0, 1000, (batch,), device=GPU))

    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    train(step, model.parameters(), sgd)


def resnet_benchmark(batch, side=192):
    torch.backends.cudnn.benchmark = True
    resnet(batch, side)


def double(inside, outside):
    conv = lambda a, b: [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU()]
    return nn.Sequential(*conv(inside, outside), *conv(outside, outside))


class Unet(nn.Module):
    """With attention over the coarsest level, where `attends`, and the time of a diffusion."""

    def __init__(self, colours, widths, attends=False):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, widths[-1]))
        sides = [colours, *widths]
        self.down = nn.ModuleList(double(a, b) for a, b in zip(sides, widths))
        self.attend = Block(widths[-1], 8) if attends else None
        above = list(zip(widths[::-1], widths[-2::-1]))
        self.up = nn.ModuleList(double(a + b, b) for a, b in above)
        self.last = nn.Conv2d(widths[0], colours, 1)

    def forward(self, x, when):
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        turns = when[:, None] * torch.exp(-torch.arange(32, device=x.device) / 4)
        x = kept.pop() + self.time(torch.cat([turns.sin(), turns.cos()], 1))[:, :, None, None]
        if self.attend is not None:
            batch, width, *sides = x.shape
            x = self.attend(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(batch, width, *sides)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)


def noise(model, batch, side):
    def step():
        images, when = torch.randn(batch, 4, side, side, device=GPU), torch.rand(batch, device=GPU)
        noise = torch.randn_like(images)
        return F.mse_loss(model(images + noise * when[:, None, None, None], when), noise)

    train(step, model.parameters())


def unet(batch, side):
    noise(Unet(4, [32, 64, 128, 256]).to(GPU), batch, side)


def diffusion(batch, side=64):
    model = Unet(4, [64, 128, 256], attends=True).to(GPU)
    with torch.autocast(GPU, torch.bfloat16):
        noise(model, batch, side)


def gnn(nodes):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(512, 256), nn.Linear(512, 64)]).to(GPU)

    def step():
        x = torch.randn(nodes, 128, device=GPU)
        edges = torch.randint(0, nodes, (2, 10 * nodes), device=GPU)
        for layer in layers:
            sums = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = F.relu(layer(torch.cat([x, sums], 1)))
        return x.square().mean()

    train(step, layers.parameters())


def moe(batch, seq=256):
    torch.manual_seed(0)
    width, experts = 512, 8
    embed = nn.Embedding(4096, width).to(GPU)
    router = nn.Linear(width, experts).to(GPU)
    mind = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)).to(GPU)

    def step():
        x = embed(torch.randint(0, 4096, (batch * seq,), device=GPU))
        weights, chosen = router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(mind):
            token, place = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return (x + y).square().mean()

    train(step, [*embed.parameters(), *router.parameters(), *mind.parameters()])


def lstm(batch, seq):
    model = nn.ModuleDict({"embed": nn.Embedding(8192, 256), "rnn": nn.LSTM(256, 512, 2, batch_first=True), "head": nn.Linear(512, 8192)}).to(GPU)

    def step():
        tokens = torch.randint(0, 8192, (batch, seq + 1), device=GPU)
        hidden, _ = model["rnn"](model["embed"](tokens[:, :-1]))
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters())


def rnn_loop(batch, seq):
    """A cell called once for each word."""
    model = nn.ModuleDict({"embed": nn.Embedding(4096, 256), "cell": nn.GRUCell(256, 512), "head": nn.Linear(512, 4096)}).to(GPU)

    def step():
        tokens = torch.randint(0, 4096, (batch, seq), device=GPU)
        state, states = torch.zeros(batch, 512, device=GPU), []
        for word in model["embed"](tokens).unbind(1):
            state = model["cell"](word, state)
            states.append(state)
        return F.cross_entropy(model["head"](torch.stack(states, 1)).flatten(0, 1), tokens.flatten())

    train(step, model.parameters())


def generate(batch, seq, make_cache):
    model = Gpt(width=1024, heads=16, layers=8).to(GPU, torch.bfloat16).eval()
    with torch.no_grad():
        for _ in range(2):
            caches = [make_cache(batch, seq + 16) for _ in model.blocks]
            tokens = words(model, batch, seq - 1)
            for _ in range(16):
                x = model.embed(tokens)
                for block, cache in zip(model.blocks, caches):
                    x = block(x, cache)
                tokens = model.head(model.norm(x[:, -1:])).argmax(-1)


def generate_static(batch, seq=512):
    def make(batch, longest):
        k, v = (torch.zeros(batch, 16, longest, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
        used = 0

        def cache(new_k, new_v):
            nonlocal used
            n = new_k.shape[2]
            k[:, :, used:used + n], v[:, :, used:used + n] = new_k, new_v
            used += n
            return k[:, :, :used], v[:, :, :used]

        return cache

    generate(batch, seq, make)


def generate_growing(batch, seq=512):
    def make(batch, longest):
        kept = None

        def cache(new_k, new_v):
            nonlocal kept
            kept = (new_k, new_v) if kept is None else tuple(torch.cat(pair, 2) for pair in zip(kept, (new_k, new_v)))
            return kept

        return cache

    generate(batch, seq, make)


def evaluate(batch, side=96):
    """Trains, and measures with a batch four times as large."""
    model = nn.Sequential(double(3, 64), nn.MaxPool2d(2), double(64, 128), nn.MaxPool2d(2), double(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)).to(GPU)

    def loss(n):
        return F.cross_entropy(model(torch.randn(n, 3, side, side, device=GPU)), torch.randint(0, 100, (n,), device=GPU))

    def step():
        with torch.no_grad():
            loss(4 * batch).item()
        return loss(batch)

    train(step, model.parameters())


def contrast(batch):
    """Every image against every other: a square of the batch."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 256)).to(GPU)

    def step():
        one, other = (F.normalize(model(torch.randn(batch, 2048, device=GPU))) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(batch, device=GPU))

    train(step, model.parameters())


def bert(batch, seq=256):
    """Dropout, a mask, half precision with scaled gradients, and clipping."""
    width = 384
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.1, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(8192, width), "body": nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), "head": nn.Linear(width, 8192)}).to(GPU)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.amp.GradScaler(GPU)
    for _ in range(STEPS):
        tokens = torch.randint(0, 8192, (batch, seq), device=GPU)
        mask = torch.zeros(batch, seq, dtype=torch.bool, device=GPU)
        with torch.autocast(GPU, torch.float16):
            loss = F.cross_entropy(model["head"](model["body"](model["embed"](tokens), src_key_padding_mask=mask)).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def translate(batch, seq=128):
    """An encoder and a decoder of half its length."""
    model = nn.ModuleDict({"embed": nn.Embedding(8192, 512), "body": nn.Transformer(512, 8, 4, 4, 2048, batch_first=True), "head": nn.Linear(512, 8192)}).to(GPU)

    def step():
        source, target = (torch.randint(0, 8192, (batch, n), device=GPU) for n in (seq, seq // 2))
        mask = nn.Transformer.generate_square_subsequent_mask(seq // 2, device=GPU)
        hidden = model["body"](model["embed"](source), model["embed"](target), tgt_mask=mask)
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), target.flatten(), label_smoothing=0.1)

    train(step, model.parameters())


def mixer(batch, side=128):
    class Mixer(nn.Module):
        def __init__(self, places, width):
            super().__init__()
            mlp = lambda n: nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))
            self.across, self.along = mlp(places), mlp(width)

        def forward(self, x):
            x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
            return x + self.along(x)

    model = nn.Sequential(nn.Conv2d(3, 256, 8, 8), nn.Flatten(2), *[Mixer(256, (side // 8) ** 2) for _ in range(6)]).to(GPU)
    train(lambda: model(torch.randn(batch, 3, side, side, device=GPU)).square().mean(), model.parameters())


def video(batch, frames=8):
    conv = lambda a, b: nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(inplace=True), nn.MaxPool3d((1, 2, 2)))
    model = nn.Sequential(conv(3, 32), conv(32, 64), conv(64, 128), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 100)).to(GPU)

    def step():
        return F.cross_entropy(model(torch.randn(batch, 3, frames, 64, 64, device=GPU)), torch.randint(0, 100, (batch,), device=GPU))

    train(step, model.parameters())


def audio(batch, seconds=1):
    layers, inside = [], 1
    for outside in (32, 64, 128, 256):
        layers += [nn.Conv1d(inside, outside, 9, 4, 4), nn.BatchNorm1d(outside), nn.LeakyReLU(0.1)]
        inside = outside
    model = nn.Sequential(*layers, nn.Conv1d(256, 64, 1)).to(GPU)
    back = nn.Sequential(nn.ConvTranspose1d(64, 32, 16, 16), nn.ReLU(), nn.ConvTranspose1d(32, 1, 16, 16)).to(GPU)

    def step():
        wave = torch.randn(batch, 1, 16384 * seconds, device=GPU)
        spectra = [torch.stft(it.squeeze(1), 1024, 256, window=torch.hann_window(1024, device=GPU), return_complex=True).abs() for it in (wave, back(model(wave)))]
        return F.l1_loss(*spectra)

    train(step, [*model.parameters(), *back.parameters()])


def gan(batch, side=64):
    make = nn.Sequential(nn.ConvTranspose2d(64, 256, side // 8), nn.BatchNorm2d(256), nn.ReLU(),
                         *[layer for a, b in ((256, 128), (128, 64), (64, 32)) for layer in (nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())],
                         nn.Conv2d(32, 3, 3, 1, 1), nn.Tanh()).to(GPU)
    judge = nn.Sequential(*[layer for a, b in ((3, 64), (64, 128), (128, 256)) for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))],
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1)).to(GPU)
    one, other = (torch.optim.Adam(it.parameters(), 2e-4) for it in (make, judge))
    for _ in range(STEPS):
        real, fake = torch.randn(batch, 3, side, side, device=GPU), make(torch.randn(batch, 64, 1, 1, device=GPU))
        other.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        other.step()
        one.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        one.step()


def recommend(batch):
    tables = nn.ModuleList(nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(8)).to(GPU)
    top = nn.Sequential(nn.Linear(36 + 64, 256), nn.ReLU(), nn.Linear(256, 1)).to(GPU)
    bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 64)).to(GPU)

    def step():
        dense = bottom(torch.randn(batch, 13, device=GPU))
        sparse = [table(torch.randint(0, 100_000, (batch * 10,), device=GPU), torch.arange(0, batch * 10, 10, device=GPU)) for table in tables]
        all = torch.stack([dense, *sparse], 1)
        pairs = torch.triu_indices(9, 9, 1, device=GPU)
        products = (all @ all.transpose(1, 2))[:, pairs[0], pairs[1]]
        return F.binary_cross_entropy_with_logits(top(torch.cat([dense, products], 1)).squeeze(1), torch.rand(batch, device=GPU))

    train(step, [*tables.parameters(), *top.parameters(), *bottom.parameters()])


def chunked(batch, seq=512):
    """A loss in parts, computed again in the backward pass, and an average of the weights."""
    model = Gpt(layers=4).to(GPU)
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def part(x, tokens):
        return F.cross_entropy(model.head(x).float(), tokens, reduction="sum")

    def step():
        tokens = words(model, batch, seq)
        with torch.autocast(GPU, torch.bfloat16):
            x = model.embed(tokens[:, :-1])
            for block in model.blocks:
                x = block(x)
            x, tokens = model.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
            loss = sum(checkpoint(part, *pair, use_reentrant=False) for pair in zip(x.chunk(8), tokens.chunk(8)))
        torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.01)
        return loss / (batch * seq)

    train(step, model.parameters())


def microbatches(batch, seq=256):
    """As many parts of two as the batch has: their gradients add up, their memory does not."""
    model = Gpt(layers=4).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        losses = []
        for _ in range(batch // 2):
            loss = language(model, 2, seq)
            loss.backward()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
        optimizer.step()
        optimizer.zero_grad()


def resnet_last(batch, side=160):
    """Channels last, in bfloat16."""
    layers, inside = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for number, outside, stride in ((2, 256, 1), (2, 512, 2), (2, 1024, 2)):
        for index in range(number):
            layers.append(Residual(inside, outside, stride if index == 0 else 1))
            inside = outside
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)).to(GPU, memory_format=torch.channels_last)

    def step():
        images = torch.randn(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)
        with torch.autocast(GPU, torch.bfloat16):
            return F.cross_entropy(model(images), torch.randint(0, 1000, (batch,), device=GPU))

    train(step, model.parameters())


def gpt_length(seq):
    gpt(8, seq)


def adafactor(batch, seq=512):
    model = Gpt(layers=6).to(GPU)
    train(lambda: language(model, batch, seq), model.parameters(), torch.optim.Adafactor)


def physics(points):
    """A network whose derivatives are part of the loss."""
    model = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), *[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())], nn.Linear(256, 1)).to(GPU)

    def step():
        at = torch.rand(points, 3, device=GPU, requires_grad=True)
        value = model(at)
        slope, = torch.autograd.grad(value.sum(), at, create_graph=True)
        bend, = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return (slope[:, 2] + value[:, 0] * slope[:, 0] - 0.01 * bend[:, 0]).square().mean()

    train(step, model.parameters())


def padded(batch):
    """Lengths that hang on the data: each batch is as long as its longest."""
    torch.manual_seed(batch)
    model = Gpt(layers=4).to(GPU)

    def step():
        lengths = torch.randint(64, 512, (batch,))
        return language(model, batch, int(lengths.max()))

    train(step, model.parameters())


def ddp(batch, seq=256):
    """Two ranks, one process each, started by this one; the first says what it used."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device(GPU, rank))
    model = Gpt(layers=4).to(GPU)
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    train(lambda: language(model, batch, seq, parallel), model.parameters())
    dist.destroy_process_group()


PROGRAMS = [gpt, gpt_seq, gpt_matrix, gpt_checkpoint, gpt_fp32, gpt_accumulate, gpt_compile, llama, lora, vit, resnet, resnet_benchmark,
            unet, diffusion, gnn, moe, lstm, rnn_loop, generate_static, generate_growing, evaluate, contrast, bert,
            translate, mixer, video, audio, gan, recommend, chunked, microbatches, resnet_last, gpt_length,
            adafactor, physics, padded, ddp]


def main():
    name, values = sys.argv[1], {key: int(value) for key, value in (pair.split("=") for pair in sys.argv[2].split(","))}
    total = torch.cuda.get_device_properties(0).total_memory
    if len(sys.argv) > 3:
        torch.cuda.set_per_process_memory_fraction(int(sys.argv[3]) / total)
    began, ran_out = time.time(), False
    import predict_eighth, predict_eleventh, predict_fifth, predict_fourth, predict_ninth, predict_seventh, predict_sixth, predict_tenth, predict_third, predict_thirteenth, predict_twelfth  # which know the blocks of this file

    try:
        more = (predict_third, predict_fourth, predict_fifth, predict_sixth, predict_seventh, predict_eighth, predict_ninth, predict_tenth, predict_eleventh, predict_twelfth, predict_thirteenth)
        next(it for it in sum((it.PROGRAMS for it in more), PROGRAMS) if it.__name__ == name)(**values)
    except torch.OutOfMemoryError:
        ran_out = True
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    print("TRUTH " + json.dumps({
        "program": name, "values": values, "ran_out": ran_out, "seconds": round(time.time() - began, 1),
        "reserved": stats["reserved_bytes.all.peak"], "allocated": stats["allocated_bytes.all.peak"],
        "retries": stats["num_alloc_retries"], "requests": stats["allocation.all.allocated"],
        "torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "memory": total}), flush=True)
    if ran_out and "RANK" in os.environ:
        os._exit(1)  # the other rank waits for this one, until the launcher ends it


if __name__ == "__main__":
    main()
