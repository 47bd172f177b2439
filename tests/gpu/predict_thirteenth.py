"""One program of each kind that users ask of, once more: other models, sizes, precisions and optimizers than in all before; written without a look at the rules, before anything was predicted of them: the set `thirteenth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, labels
from predict_programs import GPU, STEPS, train
from predict_twelfth import FIRST_SCALE, BasicBlock, Bottleneck, DropPath, Expert, Llama, adapted, dice, fit, heads, initial, residual_net, rotary, rotate, stages, twice


class EagerBlock(nn.Module):
    """GPT-2's block with its attention written out; the weights of words are kept."""

    def __init__(self, width, size, seq):
        super().__init__()
        self.size, self.first, self.second = size, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("past", torch.ones(seq, seq, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2)) / self.size ** 0.5
        weights = torch.where(self.past, weights, torch.finfo(weights.dtype).min)
        weights = F.dropout(F.softmax(weights, dim=-1).to(v.dtype), 0.1)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)), approximate="tanh")), 0.1)


def minutes(batch, seq=320):
    """GPT-2 with the attention written out, in float16 with scaled gradients, which add up over two parts of a step."""
    width, n_words = 640, 20000
    model = nn.ModuleDict({"words": nn.Embedding(n_words, width), "places": nn.Embedding(seq, width), "blocks": nn.ModuleList(EagerBlock(width, 64, seq) for _ in range(8)),
                           "norm": nn.LayerNorm(width), "head": nn.Linear(width, n_words, bias=False)}).to(GPU)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01), torch.amp.GradScaler(GPU, init_scale=FIRST_SCALE)

    def loss():
        tokens = torch.randint(0, n_words, (batch, seq), device=GPU)
        with torch.autocast(GPU, torch.float16):
            x = F.dropout(model["words"](tokens) + model["places"](torch.arange(seq, device=GPU)), 0.1)
            for block in model["blocks"]:
                x = block(x)
            logits = model["head"](model["norm"](x))
            return F.cross_entropy(logits[:, :-1].contiguous().view(-1, n_words), tokens[:, 1:].contiguous().view(-1))

    for _ in range(STEPS):
        for _ in range(2):
            scaler.scale(loss() / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


class Sandwich(nn.Module):
    """A norm before and after attention, and before and after a gated part; two heads share keys and values."""

    def __init__(self, width, size, hidden):
        super().__init__()
        self.size, self.norms = size, nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(4))
        self.q, self.kv, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, turns):
        y = self.norms[0](x)
        q, k, v = (heads(it, self.size) for it in (self.q(y), *self.kv(y).chunk(2, -1)))
        y = F.scaled_dot_product_attention(rotate(q, *turns), rotate(k, *turns), v, is_causal=True, enable_gqa=True)
        x = x + self.norms[1](self.out(y.transpose(1, 2).flatten(2)))
        y = self.norms[2](x)
        return x + self.norms[3](self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y)))


def sagas(batch, seq=640):
    """A decoder with norms on both sides of each part; pairs of its twelve layers are computed again, in bfloat16 by autocast."""
    width, n_words = 768, 24000
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(Sandwich(width, 64, 2048) for _ in range(12)), "norm": nn.RMSNorm(width, eps=1e-6)})
    nn.init.normal_(model["embed"].weight, std=0.02)
    model.to(GPU)
    turns = rotary(64, seq, HALF)

    def pair(x, index):
        for layer in model["layers"][index:index + 2]:
            x = layer(x, turns)
        return x

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens[:, :-1]) * width ** 0.5
            for index in range(0, 12, 2):
                x = checkpoint(pair, x, index, use_reentrant=False)
            logits = F.linear(model["norm"](x), model["embed"].weight)
            return F.cross_entropy(logits.float().view(-1, n_words), tokens[:, 1:].reshape(-1))

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), eps=1e-10, fused=True), clip=1.0)


class BertLayer(nn.Module):
    """Norms come after what is added."""

    def __init__(self, width, size):
        super().__init__()
        self.size, self.first, self.second = size, nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        q, k, v = (heads(it(x), self.size) for it in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.first(x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1))
        return self.second(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


class Bert(nn.Module):
    def __init__(self, width, layers, n_words, seq):
        super().__init__()
        self.words, self.places, self.kinds, self.norm = nn.Embedding(n_words, width), nn.Embedding(seq, width), nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, 64) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12), nn.Linear(width, n_words))
        self.head[3].weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens, kinds, there):
        x = self.words(tokens) + self.places.weight + self.kinds(kinds)
        x, mask = F.dropout(self.norm(x), 0.1), there[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def poems(batch, seq=192):
    """A compiled BERT of four layers finds hidden words; texts are filled up to one length, and the loss is not compiled."""
    n_words = 30522
    model = Bert(384, 4, n_words, seq).to(GPU)
    run = torch.compile(model)

    def step():
        tokens, kinds = torch.randint(5, n_words, (batch, seq), device=GPU), torch.zeros(batch, seq, dtype=torch.long, device=GPU)
        there = torch.arange(seq, device=GPU) < torch.randint(seq // 2, seq + 1, (batch, 1), device=GPU)
        hidden = (torch.rand(batch, seq, device=GPU) < 0.15) & there
        with torch.autocast(GPU, HALF):
            logits = run(tokens.masked_fill(hidden, 4), kinds, there)
            return F.cross_entropy(logits.view(-1, n_words), tokens.masked_fill(~hidden, -100).view(-1))

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, eps=1e-6, weight_decay=0.01))


def clerks(batch, seq=224):
    """All linear layers of a frozen Llama in float16 are adapted, with rank 32; gradients are scaled."""
    model = adapted(Llama(768, 64, 12, 2048, 10, 28000, seq, torch.float16).to(GPU, torch.float16), ("q", "k", "v", "o", "gate", "up", "down"), 32, 64, dropout=0.1)
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=2e-4, weight_decay=0.0)

    def step():
        tokens = torch.randint(0, 28000, (batch, seq), device=GPU)
        return model.loss(tokens, tokens)

    fit(step, model, optimizer, clip=0.3, half=True)


class ScaledBlock(nn.Module):
    """A block for images, each of whose branches has weights of its own length."""

    def __init__(self, width, size, rate):
        super().__init__()
        self.size, self.first, self.second, self.drop = size, nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6), DropPath(rate)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.one, self.other = (nn.Parameter(1e-4 * torch.ones(width)) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.one * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.other * self.mlp(self.second(x)))


def mosaics(batch, side=112):
    """ViT-B/16 in bfloat16 by autocast: branches of learnt length, the mean of all patches, several labels for an image, a mean of the weights."""
    width, classes = 768, 80
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, 16, 16), "blocks": nn.ModuleList(ScaledBlock(width, 64, 0.2) for _ in range(12)),
                           "norm": nn.LayerNorm(width, eps=1e-6), "head": nn.Linear(width, classes)})
    model.register_parameter("places", nn.Parameter(torch.randn(1, (side // 16) ** 2, width) * 0.02))
    model.to(GPU)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9998))

    def step():
        images, truth = torch.randn(batch, 3, side, side, device=GPU), (torch.rand(batch, classes, device=GPU) < 0.05).float()
        with torch.autocast(GPU, HALF):
            x = model["patch"](images).flatten(2).transpose(1, 2) + model.places
            for block in model["blocks"]:
                x = block(x)
            made = model["head"](model["norm"](x.mean(1)))
        return F.binary_cross_entropy_with_logits(made.float(), truth)

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05), clip=1.0, after=lambda: mean.update_parameters(model))


class EncodedUnet(nn.Module):
    """ResNet-18 sees, and its stages are made larger again beside what they saw."""

    def __init__(self, classes, widths=(256, 128, 64, 32, 16)):
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(stages(BasicBlock, (2, 2, 2, 2))[0])
        beside = (256, 128, 64, 64, 0)
        self.up = nn.ModuleList(twice(a + b, c) for a, b, c in zip((512, *widths), beside, widths))
        self.out = nn.Conv2d(widths[-1], classes, 3, padding=1)

    def forward(self, x):
        x = self.start(x)
        kept = [x]
        for index, stage in enumerate(self.stages):
            x = stage(x if index else F.max_pool2d(x, 3, 2, 1))
            kept.append(x)
        kept.pop()
        for part in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = part(torch.cat([x, kept.pop()], 1) if kept else x)
        return self.out(x)


def roofs(batch, side=160):
    """What is a roof: a U-Net whose first half is ResNet-18, in single precision; two losses of one class."""
    model = initial(EncodedUnet(1)).to(GPU)

    def step():
        truth = (torch.rand(batch, 1, side, side, device=GPU) < 0.3).float()
        made = model(torch.randn(batch, 3, side, side, device=GPU))
        return 0.5 * F.binary_cross_entropy_with_logits(made, truth) + 0.5 * dice(made.sigmoid(), truth)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.Adam(parameters, lr, amsgrad=True))


def tiles(batch, side=160):
    """ResNet-34 without cudnn.benchmark: channels last, float16 with scaled gradients."""
    model = residual_net(BasicBlock, (3, 4, 6, 3), 365)
    for part in model.modules():
        if isinstance(part, BasicBlock):
            nn.init.zeros_(part.bn2.weight)
    model.to(GPU, memory_format=torch.channels_last)

    def step():
        images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, device=GPU).to(memory_format=torch.channels_last)
        return F.cross_entropy(model(images.float().div_(127.5).sub_(1)), labels(batch, 365))

    fit(step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), half=True)


def pooled_shorter(a, b, stride):
    pool = [nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)] if stride > 1 else []
    return nn.Sequential(*pool, nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b))


def mushrooms(batch, side=160):
    """ResNet-50-D with cudnn.benchmark, in single precision: three convolutions first, shortcuts that take means, AdamW and two labels in one image."""
    torch.backends.cudnn.benchmark = True
    parts, width = stages(Bottleneck, (3, 4, 6, 3), pooled_shorter)
    start = []
    for a, b, stride in ((3, 32, 2), (32, 32, 1), (32, 64, 1)):
        start += [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    model = initial(nn.Sequential(*start, nn.MaxPool2d(3, 2, 1), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 1604))).to(GPU)

    def step():
        images, truth = torch.randn(batch, 3, side, side, device=GPU), labels(batch, 1604)
        order = torch.randperm(batch, device=GPU)
        images[:, :, 20:100, 40:120] = images[order, :, 20:100, 40:120]
        made = model(images)
        return 0.75 * F.cross_entropy(made, truth) + 0.25 * F.cross_entropy(made, truth[order])

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.02))


class DitBlock(nn.Module):
    """The time and the class shift, scale and gate both parts."""

    def __init__(self, width, size):
        super().__init__()
        self.size, self.first, self.second = size, nn.LayerNorm(width, elementwise_affine=False, eps=1e-6), nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.about = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.about[1].weight)
        nn.init.zeros_(self.about[1].bias)

    def forward(self, x, about):
        shift, scale, gate, shift2, scale2, gate2 = self.about(about)[:, None].chunk(6, -1)
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x) * (1 + scale) + shift).chunk(3, -1))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.second(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    """Patches of two by two of latents with four channels."""

    def __init__(self, width, size, layers, side, classes=1000):
        super().__init__()
        self.side, self.classes = side // 2, classes
        self.patch, self.kinds = nn.Conv2d(4, width, 2, 2), nn.Embedding(classes + 1, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks, self.norm = nn.ModuleList(DitBlock(width, size) for _ in range(layers)), nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.about, self.out = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width)), nn.Linear(width, 16)
        self.register_buffer("places", torch.randn(1, self.side ** 2, width) * 0.02)

    def forward(self, x, when, kind):
        angle = 1000 * when[:, None] * torch.exp(torch.arange(128, device=x.device) * (-9.21 / 128))
        left_out = torch.rand(kind.shape, device=x.device) < 0.1
        about = self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.kinds(torch.where(left_out, self.classes, kind))
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, about)
        shift, scale = self.about(about)[:, None].chunk(2, -1)
        x = self.out(self.norm(x) * (1 + scale) + shift)
        x = x.view(-1, self.side, self.side, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, 2 * self.side, 2 * self.side)


def murals(batch, side=32):
    """DiT-S/2 learns the way from noise to latents, in bfloat16 by autocast; a mean of the weights follows."""
    model = Dit(384, 64, 12, side).to(GPU)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))

    def step():
        latents, when = torch.randn(batch, 4, side, side, device=GPU) * 0.18215, torch.randn(batch, device=GPU).sigmoid()
        noise, at = torch.randn_like(latents), when[:, None, None, None]
        with torch.autocast(GPU, HALF):
            made = model(at * latents + (1 - at) * noise, when, labels(batch, 1000))
        return F.mse_loss(made.float(), latents - noise)

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True), after=lambda: mean.update_parameters(model))


class AttendNeighbours(nn.Module):
    """Each node looks at so many drawn neighbours, with weights of several heads."""

    def __init__(self, inside, size, n_heads):
        super().__init__()
        self.shape = n_heads, size
        self.own, self.theirs = nn.Linear(inside, n_heads * size), nn.Linear(inside, n_heads * size)
        self.weigh, self.short = nn.Parameter(torch.randn(n_heads, size) * 0.1), nn.Linear(inside, n_heads * size)

    def forward(self, x, near):
        theirs = self.theirs(near).unflatten(-1, self.shape)
        both = F.leaky_relu(self.own(x).unflatten(-1, self.shape)[..., None, :, :] + theirs, 0.2)
        weights = F.dropout((both * self.weigh).sum(-1).softmax(-2), 0.3)
        return self.short(x) + (weights[..., None] * theirs).sum(-3).flatten(-2)


def transit(batch, nodes=160_000):
    """Which of 47 kinds a node is: it looks at ten drawn neighbours, which look at eight; everything of the graph lies on the GPU."""
    one, other = AttendNeighbours(100, 64, 4).to(GPU), AttendNeighbours(256, 47, 2).to(GPU)
    norm = nn.LayerNorm(256).to(GPU)
    about, near, kinds = torch.randn(nodes, 100, device=GPU), torch.randint(0, nodes, (nodes, 24), device=GPU), labels(nodes, 47)

    def drawn(which, n):
        places = torch.randint(0, 24, (*which.shape, n), device=GPU)
        return near[which[..., None], places]

    def step():
        which = torch.randint(0, nodes, (batch,), device=GPU)
        first = drawn(which, 10)
        second = drawn(first, 8)
        x, y, z = about[which], about[first], about[second]
        x, y = (F.dropout(F.elu(norm(it)), 0.5) for it in (one(x, y), one(y, z)))
        return F.cross_entropy(other(x, y).unflatten(-1, (2, 47)).mean(-2), kinds[which])

    train(step, [*one.parameters(), *other.parameters(), *norm.parameters()], lambda parameters, lr: torch.optim.Adam(parameters, lr, weight_decay=5e-4))


class SharedExperts(nn.Module):
    """One expert reads all words, and three of twelve what is sorted to them."""

    def __init__(self, width, hidden, n_experts=12, n_chosen=3):
        super().__init__()
        self.n_chosen, self.router, self.shared = n_chosen, nn.Linear(width, n_experts, bias=False), Expert(width, 2 * hidden)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(n_experts))

    def forward(self, x):
        y = x.flatten(0, 1)
        weights, chosen = self.router(y).float().sigmoid().topk(self.n_chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        token = order // self.n_chosen
        made = torch.cat([expert(part) for expert, part in zip(self.experts, y[token].split(counts))])
        made = made * weights.flatten()[order, None]
        return self.shared(x) + torch.zeros_like(y, dtype=made.dtype).index_add(0, token, made).view_as(x)


class GuildLayer(nn.Module):
    def __init__(self, width, size, hidden):
        super().__init__()
        self.size, self.first, self.second = size, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False), SharedExperts(width, hidden)

    def forward(self, x, turns):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, *turns), rotate(k, *turns), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def guilds(batch, seq=288):
    """A decoder of many small experts beside one for all words; weights in bfloat16, words sorted by expert."""
    width, n_words = 448, 12000
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(GuildLayer(width, 64, 512) for _ in range(7)), "norm": nn.RMSNorm(width), "head": nn.Linear(width, n_words, bias=False)}).to(GPU, HALF)
    turns = rotary(64, seq, HALF)

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        x = model["embed"](tokens[:, :-1])
        for layer in model["layers"]:
            x = layer(x, turns).to(HALF)
        return F.cross_entropy(model["head"](model["norm"](x)).float().flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1))


def voices(batch, frames=400, spoken=48):
    """Letters are heard: two convolutions, four GRUs of both directions and CTC, in float16 with scaled gradients."""
    conv = nn.Sequential(nn.Conv2d(1, 32, (11, 41), (2, 2), (5, 20), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20, inplace=True),
                         nn.Conv2d(32, 32, (11, 21), (1, 2), (5, 10), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20, inplace=True))
    model = nn.ModuleDict({"conv": conv, "rnn": nn.GRU(32 * 20, 320, 4, batch_first=True, bidirectional=True, dropout=0.1), "norm": nn.LayerNorm(640), "out": nn.Linear(640, 29)}).to(GPU)

    def step():
        seen = model["conv"](torch.randn(batch, 1, frames, 80, device=GPU))
        hidden, _ = model["rnn"](seen.transpose(1, 2).flatten(2))
        chances = model["out"](model["norm"](hidden)).float().log_softmax(-1).transpose(0, 1)
        heard = torch.full((batch,), frames // 2, dtype=torch.long)
        said = torch.randint(spoken // 2, spoken + 1, (batch,))
        return F.ctc_loss(chances, torch.randint(1, 29, (batch, spoken), device=GPU), heard, said, zero_infinity=True)

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2), clip=5.0, half=True)


class CachedLayer(nn.Module):
    """A layer that writes keys and values to places of its own tensors, and sees all of them through a mask."""

    def __init__(self, width, size, hidden, batch, longest, dtype):
        super().__init__()
        self.size, self.first, self.second = size, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, width // size, longest, size, dtype=dtype), persistent=False)

    def forward(self, x, turns, at, mask):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        self.keys[:, :, at], self.values[:, :, at] = rotate(k, *turns), v
        y = F.scaled_dot_product_attention(rotate(q, *turns), self.keys, self.values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def draft_static(batch, n=192, more=64):
    """A model in bfloat16 draws from the best 200 words; each layer has tensors for all keys and values, and logits are made of the whole question."""
    width, n_words, longest = 1280, 32000, n + more
    embed, norm, head = nn.Embedding(n_words, width).to(GPU, HALF), nn.RMSNorm(width).to(GPU, HALF), nn.Linear(width, n_words, bias=False).to(GPU, HALF)
    layers = nn.ModuleList(CachedLayer(width, 80, 3456, batch, longest, HALF) for _ in range(8)).to(GPU, HALF)
    past, turns = torch.ones(longest, longest, dtype=torch.bool, device=GPU).tril(), rotary(80, longest, HALF)

    def logits(tokens, at):
        x, mask = embed(tokens), past[None, None, at]
        for layer in layers:
            x = layer(x, [it[at] for it in turns], at, mask)
        return head(norm(x))

    def draw(logits):
        best, _ = logits.topk(200)
        chances = logits.masked_fill(logits < best[:, -1:], float("-inf")).softmax(-1)
        return (chances / torch.empty_like(chances).exponential_(1)).argmax(-1, keepdim=True)

    with torch.inference_mode():
        said = torch.zeros(batch, longest, dtype=torch.long, device=GPU)
        said[:, :n] = torch.randint(0, n_words, (batch, n), device=GPU)
        at = torch.arange(n, device=GPU)
        word = draw(logits(said[:, :n], at)[:, -1].float() / 0.8)
        for place in range(n, longest - 1):
            said[:, place:place + 1] = word
            word = draw(logits(word, torch.tensor([place], device=GPU))[:, -1].float() / 0.8)


class Gpt2Layer(nn.Module):
    """Gives back the keys and values that it saw."""

    def __init__(self, width, size):
        super().__init__()
        self.size, self.first, self.second = size, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, seen):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        if seen is not None:
            k, v = torch.cat([seen[0], k], 2), torch.cat([seen[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=seen is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh")), (k, v)


def draft_growing(batch, n=200, more=72):
    """GPT-2 small in single precision draws from its best fifty words; all layers' keys and values are given back longer each time."""
    width, n_words = 768, 50257
    words, places = nn.Embedding(n_words, width).to(GPU), nn.Embedding(1024, width).to(GPU)
    layers, norm = nn.ModuleList(Gpt2Layer(width, 64) for _ in range(12)).to(GPU), nn.LayerNorm(width).to(GPU)

    def run(tokens, at, kept):
        x, now = words(tokens) + places(torch.arange(at, at + tokens.shape[1], device=GPU)), []
        for layer, seen in zip(layers, kept):
            x, both = layer(x, seen)
            now.append(both)
        return F.linear(norm(x)[:, -1], words.weight), now

    with torch.inference_mode():
        said = torch.randint(0, n_words, (batch, n), device=GPU)
        logits, kept = run(said, 0, [None] * len(layers))
        for index in range(more):
            best, which = logits.topk(50)
            word = which.gather(1, torch.multinomial(best.softmax(-1), 1))
            said = torch.cat([said, word], 1)
            logits, kept = run(word, n + index, kept)


PROGRAMS = [poems, minutes, sagas, clerks, mosaics, roofs, murals, tiles, mushrooms, transit, guilds, voices, draft_static, draft_growing]
