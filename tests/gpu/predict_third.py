"""Programs of other domains for `predict.py`: the set `third`. `predict_programs.py` runs them."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_programs import GPU, STEPS, Block, Gpt, language, train, words


def conv(inside, outside, side=3, stride=1, groups=1, norm=nn.BatchNorm2d, act=nn.SiLU):
    layer = nn.Conv2d(inside, outside, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(outside), act())


def speech(batch, frames=1024):
    """A spectrum through two convolutions and an encoder, aligned with its text by CTC."""
    width = 256
    front = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
    layer = nn.TransformerEncoderLayer(width, 4, 1024, 0.1, batch_first=True, norm_first=True)
    model = nn.ModuleDict({"front": front, "in": nn.Linear(width * 20, width), "body": nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), "head": nn.Linear(width, 1000)}).to(GPU)
    warm = torch.optim.AdamW(model.parameters(), 1e-4)
    rate = torch.optim.lr_scheduler.LambdaLR(warm, lambda step: min(1.0, step / 10))
    for _ in range(STEPS):
        x = model["front"](torch.randn(batch, 1, frames, 80, device=GPU))
        x = model["in"](x.transpose(1, 2).flatten(2))
        chances = model["head"](model["body"](x)).log_softmax(-1).transpose(0, 1)
        texts = torch.randint(1, 1000, (batch, 40), device=GPU)
        lengths = [torch.full((batch,), n, dtype=torch.long, device=GPU) for n in (x.shape[1], 40)]
        F.ctc_loss(chances, texts, *lengths, zero_infinity=True).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        warm.step()
        rate.step()
        warm.zero_grad()


def detect(batch, side=256):
    """Boxes on three levels; how many are kept of each image hangs on what is in it."""
    torch.manual_seed(7)
    stem = nn.Sequential(conv(3, 32, 3, 2), conv(32, 64, 3, 2), conv(64, 128, 3, 2))
    levels = nn.ModuleList([conv(128, 128), conv(128, 256, 3, 2), conv(256, 256, 3, 2)])
    heads = nn.ModuleList(nn.Conv2d(n, 3 * 5, 1) for n in (128, 256, 256))
    model = nn.ModuleDict({"stem": stem, "levels": levels, "heads": heads}).to(GPU)

    def overlap(one, other):
        low, high = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        area = lambda box: (box[:, 2:] - box[:, :2]).prod(-1)
        return common / (area(one)[:, None] + area(other)[None] - common + 1e-6)

    def step():
        x, found = model["stem"](torch.randn(batch, 3, side, side, device=GPU)), []
        for level, head in zip(model["levels"], model["heads"]):
            x = level(x)
            found.append(head(x).flatten(2).reshape(batch, 5, -1))
        found = torch.cat(found, 2).transpose(1, 2)
        scores, middle = found[..., 0], found[..., 1:3]
        boxes = torch.cat([middle - found[..., 3:].exp(), middle + found[..., 3:].exp()], -1)
        losses = [F.binary_cross_entropy_with_logits(scores, torch.rand_like(scores))]
        for image in range(batch):
            kept = boxes[image][scores[image] > scores[image].mean()]
            wanted = torch.rand(12, 4, device=GPU).sort(-1).values
            best, which = overlap(kept, wanted).max(0)
            losses.append(F.l1_loss(kept[which], wanted) - best.mean())
        return torch.stack(losses).sum()

    train(step, model.parameters())


def codebook(batch, side=96):
    """Places of an image, each replaced by the nearest of many words."""
    width, n_words = 64, 2048
    encode = nn.Sequential(conv(3, 64, 4, 2), conv(64, 128, 4, 2), conv(128, 128), nn.Conv2d(128, width, 1))
    decode = nn.Sequential(conv(width, 128), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1))
    model = nn.ModuleDict({"encode": encode, "decode": decode, "words": nn.Embedding(n_words, width)}).to(GPU)

    def step():
        image = torch.randn(batch, 3, side, side, device=GPU)
        hidden = model["encode"](image)
        flat = hidden.permute(0, 2, 3, 1).flatten(0, 2)
        far = flat.square().sum(1, keepdim=True) - 2 * flat @ model["words"].weight.T + model["words"].weight.square().sum(1)
        words = model["words"](far.argmin(1)).view(batch, *hidden.shape[2:], width).permute(0, 3, 1, 2)
        through = hidden + (words - hidden).detach()
        again = model["decode"](through)[..., :side, :side]
        return F.mse_loss(again, image) + F.mse_loss(words, hidden.detach()) + 0.25 * F.mse_loss(hidden, words.detach())

    train(step, model.parameters())


class Rms(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Gated(nn.Module):
    """A Llama's layer, with low-rank adapters on four of its matrices."""

    def __init__(self, width, heads, rank=8):
        super().__init__()
        self.heads, self.first, self.second = heads, Rms(width), Rms(width)
        shapes = {"q": (width, width), "k": (width, width // 4), "v": (width, width // 4), "o": (width, width), "gate": (width, 3 * width), "up": (width, 3 * width), "down": (3 * width, width)}
        self.frozen = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.low = nn.ModuleDict({name: nn.Sequential(nn.Linear(shapes[name][0], rank, bias=False), nn.Linear(rank, shapes[name][1], bias=False)) for name in ("q", "k", "v", "o")})

    def linear(self, name, x):
        return self.frozen[name](x) + (self.low[name](x) if name in self.low else 0)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y = self.first(x)
        split = lambda name: self.linear(name, y).view(batch, length, -1, width // self.heads).transpose(1, 2)
        turn = lambda it: it * cos + torch.cat([-it.chunk(2, -1)[1], it.chunk(2, -1)[0]], -1) * sin
        attended = F.scaled_dot_product_attention(turn(split("q")), turn(split("k")), split("v"), is_causal=True, enable_gqa=True)
        x = x + self.linear("o", attended.transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.linear("down", F.silu(self.linear("gate", y)) * self.linear("up", y))


def tuned(batch, seq=512):
    """Adapters on a frozen Llama that computes its layers again."""
    width, heads = 768, 12
    layers = nn.ModuleList(Gated(width, heads) for _ in range(6)).to(GPU, torch.bfloat16)
    embed, head = nn.Embedding(16384, width).to(GPU, torch.bfloat16), nn.Linear(width, 16384, bias=False).to(GPU, torch.bfloat16)
    for parameter in [*embed.parameters(), *head.parameters()]:
        parameter.requires_grad_(False)
    angle = torch.arange(seq, device=GPU)[:, None] * torch.exp(-torch.arange(32, device=GPU) / 4)
    cos, sin = (torch.cat([it, it], -1).to(torch.bfloat16) for it in (angle.cos(), angle.sin()))

    def step():
        tokens = torch.randint(0, 16384, (batch, seq + 1), device=GPU)
        x = embed(tokens[:, :-1]).requires_grad_()
        for layer in layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        return F.cross_entropy(head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, layers.parameters())


def towers(batch, side=128, seq=64):
    """Pictures and texts, each with its own tower, every one against every other."""
    see = nn.ModuleDict({"patch": nn.Conv2d(3, 384, 16, 16), "body": nn.Sequential(*[Block(384, 6) for _ in range(6)]), "out": nn.Linear(384, 256)}).to(GPU)
    read = nn.ModuleDict({"embed": nn.Embedding(16384, 256), "body": nn.Sequential(*[Block(256, 4) for _ in range(4)]), "out": nn.Linear(256, 256)}).to(GPU)
    warmth = nn.Parameter(torch.tensor(2.6, device=GPU))

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            x = see["patch"](torch.randn(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
            seen = see["out"](see["body"](x).mean(1))
            known = read["out"](read["body"](read["embed"](torch.randint(0, 16384, (batch, seq), device=GPU)))[:, -1])
        seen, known = F.normalize(seen.float(), dim=-1), F.normalize(known.float(), dim=-1)
        alike, own = seen @ known.T * warmth.exp(), torch.arange(batch, device=GPU)
        return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2

    train(step, [warmth, *see.parameters(), *read.parameters()])


def scan(batch, seq=512):
    """A state that decays by what it reads, for all words at once: chunks of 32, then one chunk after the other."""
    width, states, chunk = 256, 8, 32
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(width), "in": nn.Linear(width, 2 * width), "mix": nn.Conv1d(width, width, 4, padding=3, groups=width),
                                          "select": nn.Linear(width, 2 * states + width), "out": nn.Linear(width, width)}) for _ in range(3)).to(GPU)
    embed, head = nn.Embedding(4096, width).to(GPU), nn.Linear(width, 4096).to(GPU)

    def layer(it, x):
        value, gate = it["in"](it["norm"](x)).chunk(2, -1)
        value = F.silu(it["mix"](value.transpose(1, 2))[..., :seq].transpose(1, 2))
        read, write, pace = it["select"](value).split([states, states, width], -1)
        decay = -F.softplus(pace)[..., None] * torch.arange(1, states + 1, device=GPU) / states
        new = (value * F.softplus(pace))[..., None] * write[:, :, None]
        decay, new = (it.unflatten(1, (seq // chunk, chunk)) for it in (decay, new))
        sums = decay.cumsum(2)
        state, found = torch.zeros(batch, width, states, device=GPU), []
        inside = sums.exp() * (new * (-sums).clamp(max=30).exp()).cumsum(2)
        for number in range(seq // chunk):
            found.append(inside[:, number] + sums[:, number].exp() * state[:, None])
            state = found[-1][:, -1]
        y = torch.einsum("btws,bts->btw", torch.cat(found, 1), read)
        return x + it["out"](y * F.silu(gate))

    def step():
        tokens = torch.randint(0, 4096, (batch, seq), device=GPU)
        x = embed(tokens)
        for it in layers:
            x = layer(it, x)
        return F.cross_entropy(head(x).flatten(0, 1), tokens.flatten())

    train(step, [*layers.parameters(), *embed.parameters(), *head.parameters()])


def clips(batch, frames=8, side=64):
    """Space and time by turns, with residual connections, in half precision."""
    class Apart(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            make = lambda a, b, side, stride: nn.Conv3d(a, b, side, stride, tuple(it // 2 for it in side), bias=False)
            self.space, self.time = make(inside, outside, (1, 3, 3), (1, stride, stride)), make(outside, outside, (3, 1, 1), 1)
            self.one, self.other = nn.BatchNorm3d(outside), nn.BatchNorm3d(outside)
            self.short = make(inside, outside, (1, 1, 1), (1, stride, stride))

        def forward(self, x):
            y = self.other(self.time(F.relu(self.one(self.space(x)))))
            return F.relu(y + self.short(x))

    model = nn.Sequential(Apart(3, 48, 2), Apart(48, 96, 2), Apart(96, 192, 2), Apart(192, 384, 2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(384, 400)).to(GPU)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True), torch.amp.GradScaler(GPU)
    for _ in range(STEPS):
        with torch.autocast(GPU, torch.float16):
            loss = F.cross_entropy(model(torch.randn(batch, 3, frames, side, side, device=GPU)), torch.randint(0, 400, (batch,), device=GPU))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def graphs(batch, nodes=96):
    """Attention among all nodes of each graph, shifted by what connects them."""
    width, heads = 192, 8
    layer = lambda: nn.ModuleDict({"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "edge": nn.Linear(32, heads), "out": nn.Linear(width, width), "mlp": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))})
    layers, kinds, atoms = nn.ModuleList(layer() for _ in range(5)).to(GPU), nn.Embedding(16, 32).to(GPU), nn.Embedding(100, width).to(GPU)

    def step():
        x = atoms(torch.randint(0, 100, (batch, nodes), device=GPU))
        edges = kinds(torch.randint(0, 16, (batch, nodes, nodes), device=GPU))
        for it in layers:
            q, k, v = it["qkv"](it["norm"](x)).view(batch, nodes, 3, heads, -1).permute(2, 0, 3, 1, 4)
            weights = q @ k.transpose(-1, -2) / math.sqrt(width // heads) + it["edge"](edges).permute(0, 3, 1, 2)
            x = x + it["out"]((F.dropout(weights.softmax(-1), 0.1) @ v).transpose(1, 2).flatten(2))
            x = x + it["mlp"](x)
        return F.l1_loss(x.mean(1).sum(-1), torch.randn(batch, device=GPU))

    train(step, [*layers.parameters(), *kinds.parameters(), *atoms.parameters()])


def attend(batch, seq=40):
    """A recurrent encoder, and a decoder that looks at all of it for each word it writes."""
    width = 384
    model = nn.ModuleDict({"embed": nn.Embedding(12000, width), "read": nn.GRU(width, width // 2, 2, batch_first=True, bidirectional=True),
                           "cell": nn.LSTMCell(2 * width, width), "key": nn.Linear(width, width), "head": nn.Linear(2 * width, 12000)}).to(GPU)

    def step():
        source, target = (torch.randint(0, 12000, (batch, n), device=GPU) for n in (seq, seq // 2))
        memory, _ = model["read"](model["embed"](source))
        keys, written = model["key"](memory), []
        state, seen = [torch.zeros(batch, width, device=GPU) for _ in range(2)], memory.mean(1)
        for word in model["embed"](target).unbind(1):
            state = model["cell"](torch.cat([word, seen], -1), tuple(state))
            weights = (keys @ state[0][:, :, None]).squeeze(-1).softmax(-1)
            seen = (weights[:, None] @ memory).squeeze(1)
            written.append(torch.cat([state[0], seen], -1))
        return F.cross_entropy(model["head"](torch.stack(written, 1)).flatten(0, 1), target.flatten(), label_smoothing=0.1)

    train(step, model.parameters())


def sparse(batch):
    """Tables of which each step touches some rows, and gradients of those alone."""
    torch.manual_seed(3)
    tables = nn.ModuleList(nn.EmbeddingBag(rows, 64, mode="mean", sparse=True) for rows in (200_000, 50_000, 10_000, 1_000)).to(GPU)
    dense = nn.Sequential(nn.Linear(13 + 4 * 64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)).to(GPU)
    one, other = torch.optim.SparseAdam(list(tables.parameters()), 1e-3), torch.optim.Adagrad(dense.parameters(), 1e-2)
    for _ in range(STEPS):
        bags = [table(torch.randint(0, table.num_embeddings, (batch, 5), device=GPU)) for table in tables]
        out = dense(torch.cat([torch.randn(batch, 13, device=GPU), *bags], 1)).squeeze(1)
        F.binary_cross_entropy_with_logits(out, torch.rand(batch, device=GPU)).backward()
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()


def rollout(batch, steps=32):
    """So many games at a time, all kept, and learnt from in four parts."""
    body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 49, 512), nn.ReLU()).to(GPU)
    act, judge = nn.Linear(512, 6).to(GPU), nn.Linear(512, 1).to(GPU)
    parameters = [*body.parameters(), *act.parameters(), *judge.parameters()]
    optimizer = torch.optim.Adam(parameters, 2.5e-4)
    seen = torch.zeros(steps, batch, 4, 84, 84, dtype=torch.uint8, device=GPU)
    for _ in range(2):
        acts, chances, values = [], [], []
        with torch.no_grad():
            for number in range(steps):
                seen[number] = torch.randint(0, 256, seen.shape[1:], device=GPU, dtype=torch.uint8)
                x = body(seen[number].float() / 255)
                choice = torch.distributions.Categorical(logits=act(x))
                acts.append(choice.sample())
                chances.append(choice.log_prob(acts[-1]))
                values.append(judge(x).squeeze(1))
        acts, chances, values = (torch.stack(it).flatten() for it in (acts, chances, values))
        gains = torch.randn_like(values)
        for part in torch.randperm(steps * batch, device=GPU).chunk(4):
            x = body(seen.flatten(0, 1)[part].float() / 255)
            choice = torch.distributions.Categorical(logits=act(x))
            ratio = (choice.log_prob(acts[part]) - chances[part]).exp()
            policy = torch.minimum(ratio * gains[part], ratio.clamp(0.8, 1.2) * gains[part]).mean()
            loss = F.mse_loss(judge(x).squeeze(1), values[part] + gains[part]) - policy - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def distil(batch, seq=256):
    """A small network learns from a large one that only looks."""
    large, small = Gpt(width=1024, heads=16, layers=6, words=8192).to(GPU, torch.bfloat16).eval(), Gpt(width=384, heads=6, layers=4, words=8192).to(GPU)

    def step():
        tokens = words(small, batch, seq)
        with torch.no_grad():
            wanted = (large(tokens[:, :-1]).float() / 2).softmax(-1)
        with torch.autocast(GPU, torch.bfloat16):
            said = small(tokens[:, :-1])
        alike = F.kl_div((said.float() / 2).log_softmax(-1), wanted, reduction="sum") / (batch * seq)
        return alike + F.cross_entropy(said.flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, small.parameters())


def vit_compile(batch, side=160):
    patch, body, head = nn.Conv2d(3, 384, 16, 16), nn.Sequential(*[Block(384, 6) for _ in range(3)]), nn.Linear(384, 1000)
    model = nn.ModuleDict({"patch": patch, "body": body, "head": head}).to(GPU)

    @torch.compile
    def run(images):
        return model["head"](model["body"](model["patch"](images).flatten(2).transpose(1, 2)).mean(1))

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            return F.cross_entropy(run(torch.randn(batch, 3, side, side, device=GPU)).float(), torch.randint(0, 1000, (batch,), device=GPU))

    train(step, model.parameters())


def mobile(batch, side=160):
    """Depthwise convolutions and squeezed channels, with half precision and scaled gradients."""
    class Inverted(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            middle = 4 * inside
            self.up, self.deep = conv(inside, middle, 1), conv(middle, middle, 3, stride, middle)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(middle, inside // 4, 1), nn.SiLU(), nn.Conv2d(inside // 4, middle, 1), nn.Sigmoid())
            self.down, self.is_same = conv(middle, outside, 1, act=nn.Identity), stride == 1 and inside == outside

        def forward(self, x):
            y = self.deep(self.up(x))
            y = self.down(y * self.squeeze(y))
            return x + y if self.is_same else y

    sizes = [(32, 32, 1), (32, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1)]
    model = nn.Sequential(conv(3, 32, 3, 2), *[Inverted(*it) for it in sizes], conv(192, 768, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(768, 1000)).to(GPU)
    optimizer, scaler = torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9), torch.amp.GradScaler(GPU)
    for _ in range(STEPS):
        with torch.autocast(GPU, torch.float16):
            loss = F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), torch.randint(0, 1000, (batch,), device=GPU))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def fused(batch, seq=384):
    """One kernel for the whole optimizer, and a norm of all gradients."""
    model = Gpt(layers=5, words=50304, width=384, heads=6).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for _ in range(STEPS):
        language(model, batch, seq).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def one_by_one(batch, seq=384):
    """The optimizer goes through the parameters, and remembers the largest of what it remembers."""
    model = Gpt(layers=5, words=8192).to(GPU)
    train(lambda: language(model, batch, seq), model.parameters(), lambda parameters, lr: torch.optim.Adam(parameters, lr, foreach=False, amsgrad=True))


def beams(batch, seq=256, n_beams=4):
    """Writes with several alternatives, whose caches change places with every word."""
    model = Gpt(width=768, heads=12, layers=6, words=8192).to(GPU, torch.bfloat16).eval()
    with torch.no_grad():
        caches = [[None, None] for _ in model.blocks]

        def keep(cache):
            def grown(k, v):
                cache[:] = [new if old is None else torch.cat([old, new], 2) for old, new in zip(cache, (k, v))]
                return cache
            return grown

        tokens = words(model, batch, seq - 1).repeat_interleave(n_beams, 0)
        scores = torch.zeros(batch, n_beams, device=GPU)
        for _ in range(12):
            x = model.embed(tokens)
            for block, cache in zip(model.blocks, caches):
                x = block(x, keep(cache))
            chances = model.head(model.norm(x[:, -1])).float().log_softmax(-1).view(batch, n_beams, -1)
            scores, best = (scores[..., None] + chances).flatten(1).topk(n_beams, 1)
            origin = (best // model.words + torch.arange(batch, device=GPU)[:, None] * n_beams).flatten()
            tokens = (best % model.words).view(-1, 1)
            for cache in caches:
                cache[:] = [it.index_select(0, origin) for it in cache]


def dense(batch, side):
    """Sixteen times as many pixels, from layers that each see all before them."""
    class Dense(nn.Module):
        def __init__(self, width, more=32):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(width + index * more, more if index < 4 else width, 3, padding=1) for index in range(5))

        def forward(self, x):
            found = [x]
            for index, layer in enumerate(self.layers):
                y = layer(torch.cat(found, 1))
                found.append(F.leaky_relu(y, 0.2) if index < 4 else y)
            return x + 0.2 * found[-1]

    width = 48
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *[Dense(width) for _ in range(4)], nn.Conv2d(width, 3 * 16, 3, padding=1), nn.PixelShuffle(4)).to(GPU)
    train(lambda: F.l1_loss(model(torch.rand(batch, 3, side, side, device=GPU)), torch.rand(batch, 3, 4 * side, 4 * side, device=GPU)), model.parameters())


def packed(batch):
    """Texts of any length one after the other: no step has as many words as another."""
    torch.manual_seed(11)
    embed, head = nn.Embedding(8192, 384).to(GPU), nn.Linear(384, 8192).to(GPU)
    blocks = nn.ModuleList(Block(384, 6) for _ in range(4)).to(GPU)

    def step():
        tokens = torch.randint(0, 8192, (int(torch.randint(32, 256, (batch,)).sum()),), device=GPU)
        x = embed(tokens)
        for block in blocks:
            windows = F.pad(block.first(x), (0, 0, 0, -len(x) % 256)).view(-1, 256, 384)
            x = x + block.attend(windows).flatten(0, 1)[:len(x)]
            x = x + block.down(F.gelu(block.up(block.second(x))))
        return F.cross_entropy(head(x), tokens)

    train(step, [*embed.parameters(), *head.parameters(), *blocks.parameters()])


PROGRAMS = [speech, detect, codebook, tuned, towers, scan, clips, graphs, attend, sparse, rollout, distil, vit_compile, mobile, fused,
            one_by_one, beams, dense, packed]
