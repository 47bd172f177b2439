"""One program of each kind that users ask of, as they write it today with the sizes of well-known models; written without a look at the rules, before anything was predicted of them: the set `twelfth`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, labels
from predict_programs import GPU, STEPS, train


# Lower than PyTorch's own 65536, with which gradients can overflow at first: a step left out has no state of the optimizer, and three steps are all there are.
FIRST_SCALE = 1024.0


def fit(step, model, optimizer, clip=None, half=False, after=None):
    """Steps as most write them: gradients are scaled for float16, clipped, and something follows each step."""
    scaler = torch.amp.GradScaler(GPU, init_scale=FIRST_SCALE, enabled=half)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(GPU, torch.float16, enabled=half):
            loss = step()
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if after is not None:
            after()
        loss.item()


def heads(x, size):
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def rotary(size, longest, dtype=torch.float32, base=10000.0):
    angle = torch.outer(torch.arange(longest).float(), base ** (-torch.arange(0, size, 2) / size))
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(GPU, dtype), angle.sin().to(GPU, dtype)


def rotate(x, cos, sin):
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


class GptBlock(nn.Module):
    def __init__(self, width, size, dropout):
        super().__init__()
        self.size, self.dropout = size, dropout
        self.first, self.second = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.mlp(self.second(x))


def novels(batch, seq=256):
    """A GPT-2 of eight layers with dropout; one table for words at both ends, fused AdamW in two groups, clipping."""
    width, n_words = 768, 32000
    model = nn.ModuleDict({"words": nn.Embedding(n_words, width), "places": nn.Embedding(seq, width), "drop": nn.Dropout(0.1),
                           "blocks": nn.Sequential(*[GptBlock(width, 64, 0.1) for _ in range(8)]), "norm": nn.LayerNorm(width, bias=False), "head": nn.Linear(width, n_words, bias=False)}).to(GPU)
    model["head"].weight = model["words"].weight
    nn.init.normal_(model["words"].weight, std=0.02)
    groups = [{"params": [it for it in model.parameters() if (it.dim() >= 2) == decays], "weight_decay": 0.1 if decays else 0.0} for decays in (True, False)]

    def step():
        tokens = torch.randint(0, n_words, (batch, seq + 1), device=GPU)
        x, y = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(GPU, HALF):
            x = model["drop"](model["words"](x) + model["places"](torch.arange(seq, device=GPU)))
            logits = model["head"](model["norm"](model["blocks"](x)))
            return F.cross_entropy(logits.view(-1, n_words), y.reshape(-1), ignore_index=-1)

    fit(step, model, torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True), clip=1.0)


class LlamaNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


class LlamaLayer(nn.Module):
    """Several heads share keys and values; a cache may keep them, and says what of it is seen."""

    def __init__(self, width, size, n_shared, hidden, bias=False):
        super().__init__()
        self.size, self.times = size, width // size // n_shared
        self.q, self.k, self.v = (nn.Linear(width, n * size, bias=bias) for n in (width // size, n_shared, n_shared))
        self.o, self.gate, self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.first, self.second = LlamaNorm(width), LlamaNorm(width)

    def forward(self, x, turns, cache=None):
        y, mask = self.first(x), None
        q, k, v = (heads(it(y), self.size) for it in (self.q, self.k, self.v))
        q, k = rotate(q, *turns), rotate(k, *turns)
        if cache is not None:
            k, v, mask = cache(k, v)
        if mask is not None:
            k, v = (it[:, :, None].expand(-1, -1, self.times, -1, -1).flatten(1, 2) for it in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, enable_gqa=mask is None)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width, size, n_shared, hidden, layers, n_words, longest, dtype=HALF, again=False, **how):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(n_words, width), LlamaNorm(width), nn.Linear(width, n_words, bias=False)
        self.layers = nn.ModuleList(LlamaLayer(width, size, n_shared, hidden, **how) for _ in range(layers))
        self.turns, self.again, self.n_words = rotary(size, longest, dtype), again, n_words

    def forward(self, tokens, at=0, caches=None, only_last=False):
        turns = [it[at:at + tokens.shape[1]] for it in self.turns]
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, turns, use_reentrant=False) if self.again else layer(x, turns, caches and caches[index])
        return self.head(self.norm(x[:, -1:] if only_last else x))

    def loss(self, tokens, truth):
        """Of the next word, in single precision, where `truth` is not -100."""
        logits = self(tokens).float()
        truth = F.pad(truth, (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(logits.view(-1, self.n_words), truth.view(-1))


def recipes(batch, seq=512):
    """A small Llama trained in bfloat16 throughout; each of twelve layers is computed again in the backward pass."""
    model = Llama(1024, 64, 4, 2816, 12, 32000, seq, again=True).to(GPU, HALF)

    def step():
        tokens = torch.randint(0, 32000, (batch, seq), device=GPU)
        return model.loss(tokens, tokens)

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1), clip=1.0)


class SquaredBlock(nn.Module):
    """Norms without weights, also of queries and keys; the square of what is positive."""

    def __init__(self, width, size):
        super().__init__()
        self.width, self.size = width, size
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cos, sin):
        y = F.rms_norm(x, (self.width,))
        q, k, v = (heads(it(y), self.size) for it in (self.q, self.k, self.v))
        q, k = (rotate(F.rms_norm(it, (self.size,)), cos, sin) for it in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (self.width,)))).square())


class SquaredGpt(nn.Module):
    def __init__(self, width, size, layers, n_words, seq):
        super().__init__()
        self.embed, self.head = nn.Embedding(n_words, width), nn.Linear(width, n_words, bias=False)
        self.blocks = nn.ModuleList(SquaredBlock(width, size) for _ in range(layers))
        cos, sin = rotary(size, seq, HALF)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, truth):
        x = F.rms_norm(self.embed(tokens), (self.embed.embedding_dim,))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(F.rms_norm(x, (x.shape[-1],)))
        return F.cross_entropy(logits.float().flatten(0, 1), truth.flatten())


def lyrics(batch, seq=256):
    """A GPT of four layers whose loss is compiled with it."""
    model = SquaredGpt(512, 128, 4, 12288, seq).to(GPU)
    run = torch.compile(model)

    def step():
        tokens = torch.randint(0, 12288, (batch, seq + 1), device=GPU)
        with torch.autocast(GPU, HALF):
            return run(tokens[:, :-1], tokens[:, 1:])

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.0))


class Lora(nn.Module):
    """Two small layers in single precision beside a frozen one."""

    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base, self.dropout, self.scale = base, nn.Dropout(dropout), alpha / rank
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False, device=GPU), nn.Linear(rank, base.out_features, bias=False, device=GPU)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        y = self.base(x)
        return (y + self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * self.scale).to(y.dtype)


def adapted(model, names, rank, alpha, dropout=0.05):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in names:
            setattr(layer, name, Lora(getattr(layer, name), rank, alpha, dropout))
    return model


def tutors(batch, seq=256):
    """Queries and values of a frozen Llama in bfloat16 are adapted, with rank 16; the loss leaves the question out."""
    model = adapted(Llama(1024, 64, 4, 2816, 10, 32000, seq).to(GPU, HALF), "qv", 16, 32)

    def step():
        tokens = torch.randint(0, 32000, (batch, seq), device=GPU)
        truth = tokens.clone()
        truth[:, :seq // 3] = -100
        with torch.autocast(GPU, HALF):
            return model.loss(tokens, truth)

    train(step, model.parameters())


class DropPath(nn.Module):
    """Leaves a branch out for some of the images."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class VitBlock(nn.Module):
    def __init__(self, width, size, rate):
        super().__init__()
        self.size, self.first, self.second = size, nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), DropPath(rate) if rate else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.second(x)))


def shells(batch, side=160):
    """ViT-S/16 from the start, in single precision with TF32: a class token, paths left out, images and labels mixed."""
    torch.set_float32_matmul_precision("high")
    width, classes = 384, 1000
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, 16, 16), "blocks": nn.Sequential(*[VitBlock(width, 64, 0.1 * index / 11) for index in range(12)]),
                           "norm": nn.LayerNorm(width, eps=1e-6), "head": nn.Linear(width, classes)})
    model.register_parameter("first", nn.Parameter(torch.zeros(1, 1, width)))
    model.register_parameter("places", nn.Parameter(torch.randn(1, (side // 16) ** 2 + 1, width) * 0.02))
    model.to(GPU)

    def step():
        images, truth = torch.randn(batch, 3, side, side, device=GPU), F.one_hot(labels(batch, classes), classes).float()
        images, truth = (0.7 * it + 0.3 * it.flip(0) for it in (images, truth))
        x = model["patch"](images).flatten(2).transpose(1, 2)
        x = torch.cat([model.first.expand(batch, -1, -1), x], 1) + model.places
        return F.cross_entropy(model["head"](model["norm"](model["blocks"](x))[:, 0]), truth)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.05))


def twice(a, b):
    parts = []
    for inside in (a, b):
        parts += [nn.Conv2d(inside, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class SegmentationUnet(nn.Module):
    def __init__(self, colours, classes, widths=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.down = nn.ModuleList(twice(a, b) for a, b in zip((colours, *widths), widths))
        self.larger = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.up = nn.ModuleList(twice(2 * a, a) for a in widths[-2::-1])
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        kept = []
        for index, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for larger, part in zip(self.larger, self.up):
            x = part(torch.cat([kept.pop(), larger(x)], 1))
        return self.out(x)


def dice(chances, truth):
    """How little both cover each other; of each class, over all images."""
    both = (chances * truth).sum((0, 2, 3))
    return 1 - ((2 * both + 1e-6) / (chances.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1e-6)).mean()


def glaciers(batch, side=128):
    """The U-Net of five levels: channels last, float16 with scaled gradients, RMSprop with momentum."""
    model = SegmentationUnet(3, 5).to(GPU, memory_format=torch.channels_last)

    def step():
        images = torch.rand(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)
        truth = torch.randint(0, 5, (batch, side, side), device=GPU)
        made = model(images)
        return F.cross_entropy(made, truth) + dice(made.float().softmax(1), F.one_hot(truth, 5).permute(0, 3, 1, 2).float())

    fit(step, model, torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True), clip=1.0, half=True)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, as in a ResNet of 18 or 34 layers."""
    times = 1

    def __init__(self, a, width, stride, short=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.short = nn.ReLU(inplace=True), short

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, as in a ResNet of 50 layers."""
    times = 4

    def __init__(self, a, width, stride, short=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.short = nn.ReLU(inplace=True), short

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


def shorter(a, b, stride):
    return nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))


def stages(block, counts, short=shorter):
    """The four stages of a ResNet; the first block of each but one halves the sides."""
    a, made = 64, []
    for index, count in enumerate(counts):
        width, blocks = 64 << index, []
        for place in range(count):
            stride = 2 if index and place == 0 else 1
            b = width * block.times
            blocks.append(block(a, width, stride, short(a, b, stride) if stride > 1 or a != b else None))
            a = b
        made.append(nn.Sequential(*blocks))
    return made, a


def initial(model):
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model


def residual_net(block, counts, classes):
    parts, width = stages(block, counts)
    start = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    return initial(nn.Sequential(*start, *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)))


def coins(batch, side=128):
    """ResNet-50 in single precision, with SGD and smoothed labels."""
    model = residual_net(Bottleneck, (3, 4, 6, 3), 1000).to(GPU)

    def step():
        return F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 1000), label_smoothing=0.1)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4, nesterov=True))


def orchids(batch, side=176):
    """ResNet-18 with cudnn.benchmark: channels last, in bfloat16, with SGD."""
    torch.backends.cudnn.benchmark = True
    model = residual_net(BasicBlock, (2, 2, 2, 2), 102).to(GPU, memory_format=torch.channels_last)

    def step():
        images = torch.randn(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)
        with torch.autocast(GPU, HALF):
            return F.cross_entropy(model(images), labels(batch, 102))

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4))


class TimedBlock(nn.Module):
    def __init__(self, a, b, times, attends):
        super().__init__()
        self.norm1, self.conv1, self.time = nn.GroupNorm(32, a), nn.Conv2d(a, b, 3, padding=1), nn.Linear(times, b)
        self.norm2, self.drop, self.conv2 = nn.GroupNorm(32, b), nn.Dropout(0.1), nn.Conv2d(b, b, 3, padding=1)
        self.short = nn.Identity() if a == b else nn.Conv2d(a, b, 1)
        self.looks = nn.ModuleDict({"norm": nn.GroupNorm(32, b), "qkv": nn.Conv2d(b, 3 * b, 1), "out": nn.Conv2d(b, b, 1)}) if attends else None

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        x = self.short(x) + self.conv2(self.drop(F.silu(self.norm2(y))))
        if self.looks is None:
            return x
        q, k, v = self.looks["qkv"](self.looks["norm"](x)).flatten(2).chunk(3, 1)
        weights = torch.einsum("bci,bcj->bij", q * q.shape[1] ** -0.5, k).softmax(-1)
        return x + self.looks["out"](torch.einsum("bij,bcj->bci", weights, v).view_as(x))


class DenoisingUnet(nn.Module):
    """As first written for images of 32 by 32: two blocks at each level, attention at 16 by 16."""

    def __init__(self, width=128, times=(1, 2, 2, 2), n_blocks=2, attends_at=(1,)):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.start, a, kept = nn.Conv2d(3, width, 3, padding=1), width, [width]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, factor in enumerate(times):
            for _ in range(n_blocks):
                self.down.append(TimedBlock(a, factor * width, 4 * width, level in attends_at))
                a = factor * width
                kept.append(a)
            if level + 1 < len(times):
                self.down.append(nn.Conv2d(a, a, 3, 2, 1))
                kept.append(a)
        self.middle = nn.ModuleList([TimedBlock(a, a, 4 * width, True), TimedBlock(a, a, 4 * width, False)])
        for level, factor in reversed(list(enumerate(times))):
            for _ in range(n_blocks + 1):
                self.up.append(TimedBlock(a + kept.pop(), factor * width, 4 * width, level in attends_at))
                a = factor * width
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, a, 3, padding=1)))
        self.end = nn.Sequential(nn.GroupNorm(32, a), nn.SiLU(), nn.Conv2d(a, 3, 3, padding=1))

    def forward(self, x, when):
        angle = when.float()[:, None] * torch.exp(torch.arange(self.width // 2, device=x.device) * (-9.21 / (self.width // 2 - 1)))
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        x = self.start(x)
        kept = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, TimedBlock) else part(x)
            kept.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat([x, kept.pop()], 1), time) if isinstance(part, TimedBlock) else part(x)
        return self.end(x)


def clouds(batch, side=32):
    """DDPM in single precision: the noise of one of a thousand times is learnt; a mean of the weights follows."""
    model = DenoisingUnet().to(GPU)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    left = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=GPU), 0)

    def step():
        images, when = torch.rand(batch, 3, side, side, device=GPU) * 2 - 1, torch.randint(0, 1000, (batch,), device=GPU)
        noise, kept = torch.randn_like(images), left[when][:, None, None, None]
        return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, when), noise)

    fit(step, model, torch.optim.Adam(model.parameters(), lr=2e-4), clip=1.0, after=lambda: mean.update_parameters(model))


def summed(tables, numbers):
    return sum(table(number) for table, number in zip(tables, numbers.unbind(1)))


def enzymes(batch):
    """GIN with edges on molecules of 24 to 52 atoms, five layers of the usual 300; of 128 questions, half have an answer."""
    width, atom, bond = 300, (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)
    layer = lambda: nn.ModuleDict({"bonds": nn.ModuleList(nn.Embedding(n, width) for n in bond), "norm": nn.BatchNorm1d(width),
                                   "mlp": nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width))})
    model = nn.ModuleDict({"atoms": nn.ModuleList(nn.Embedding(n, width) for n in atom), "layers": nn.ModuleList(layer() for _ in range(5)), "out": nn.Linear(width, 128)}).to(GPU)
    sizes = 24 + torch.arange(batch) * 20 % 32
    first, n_nodes = sizes.cumsum(0) - sizes, int(sizes.sum())
    which = torch.arange(batch).repeat_interleave(sizes)
    at = torch.arange(batch).repeat_interleave(sizes + 2)

    def draw(sizes, n):
        return torch.stack([torch.randint(0, size, (n,)) for size in sizes], 1)

    def step():
        one, other = (first[at] + (torch.rand(len(at)) * sizes[at]).long() for _ in range(2))
        source, to = torch.cat([one, other]).to(GPU), torch.cat([other, one]).to(GPU)
        nodes, edges, owner = draw(atom, n_nodes).to(GPU), draw(bond, 2 * len(at)).to(GPU), which.to(GPU)
        x = summed(model["atoms"], nodes)
        for index, layer in enumerate(model["layers"]):
            sent = F.relu(x[source] + summed(layer["bonds"], edges))
            y = layer["norm"](layer["mlp"](x + torch.zeros_like(x).index_add_(0, to, sent)))
            x = x + F.dropout(F.relu(y) if index < 4 else y, 0.5)
        pooled = torch.zeros(batch, width, device=GPU).index_add_(0, owner, x) / sizes.to(GPU)[:, None]
        answers = torch.randint(0, 2, (batch, 128), device=GPU).float()
        known = torch.rand(batch, 128, device=GPU) < 0.5
        return F.binary_cross_entropy_with_logits(model["out"](pooled)[known], answers[known])

    train(step, model.parameters(), torch.optim.Adam)


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtralLayer(nn.Module):
    """Two of eight experts read each word, one expert after the other."""

    def __init__(self, width, size, hidden, n_experts=8):
        super().__init__()
        self.size, self.first, self.second = size, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out, self.router = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False), nn.Linear(width, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(n_experts))

    def forward(self, x, turns):
        q, k, v = (heads(it, self.size) for it in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, *turns), rotate(k, *turns), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x).flatten(0, 1)
        routed = self.router(y)
        weights, chosen = routed.float().softmax(-1).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(y.dtype)
        mask, made = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0), torch.zeros_like(y)
        for index, expert in enumerate(self.experts):
            place, token = torch.where(mask[index])
            made.index_add_(0, token, (expert(y[token]) * weights[token, place, None]).to(y.dtype))
        return x + made.view_as(x), routed


def balance(routed, n_experts=8):
    """Experts should be asked as often as one another."""
    chances = torch.cat(routed).float().softmax(-1)
    asked = F.one_hot(chances.topk(2).indices, n_experts).float().mean(0)
    return n_experts * (asked * chances.mean(0)).sum()


def markets(batch, seq=256):
    """A small Mixtral, in bfloat16 by autocast; words go to two of eight experts, and none is left out."""
    width, n_words = 512, 16000
    model = nn.ModuleDict({"embed": nn.Embedding(n_words, width), "layers": nn.ModuleList(MixtralLayer(width, 64, 1024) for _ in range(6)), "norm": nn.RMSNorm(width), "head": nn.Linear(width, n_words, bias=False)}).to(GPU)
    turns = rotary(64, seq, HALF)

    def step():
        tokens, routed = torch.randint(0, n_words, (batch, seq + 1), device=GPU), []
        with torch.autocast(GPU, HALF):
            x = model["embed"](tokens[:, :-1])
            for layer in model["layers"]:
                x, said = layer(x, turns)
                routed.append(said)
            logits = model["head"](model["norm"](x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.02 * balance(routed)

    fit(step, model, torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1), clip=1.0)


def tides(batch, seq=336, ahead=96, n_series=21):
    """The next four days of 21 series are said from two weeks by an LSTM of three layers, each series by its own mean and spread."""
    model = nn.ModuleDict({"start": nn.Linear(n_series, 128), "rnn": nn.LSTM(128, 384, 3, batch_first=True, dropout=0.2), "norm": nn.LayerNorm(384), "out": nn.Linear(384, ahead * n_series)}).to(GPU)

    def step():
        past, truth = torch.randn(batch, seq, n_series, device=GPU), torch.randn(batch, ahead, n_series, device=GPU)
        mean, spread = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
        hidden, _ = model["rnn"](F.relu(model["start"]((past - mean) / spread)))
        said = model["out"](model["norm"](hidden[:, -1])).view(batch, ahead, n_series)
        return F.huber_loss(said * spread + mean, truth)

    fit(step, model, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6), clip=0.5)


def advise_static(batch, n=256, more=64):
    """A Llama answers the likeliest words: keys and values lie in tensors as long as the longest answer, and a mask hides what is not yet there."""
    longest = n + more
    model = Llama(1024, 64, 4, 2816, 12, 32000, longest).to(GPU, HALF).eval()
    kept = [[torch.zeros(batch, 4, longest, 64, device=GPU, dtype=HALF) for _ in range(2)] for _ in model.layers]

    def caches(at):
        mask = (torch.arange(longest, device=GPU) <= at[:, None])[None, None].expand(batch, -1, -1, -1)

        def cache(index):
            def keep(k, v):
                for whole, new in zip(kept[index], (k, v)):
                    whole.index_copy_(2, at, new)
                return *kept[index], mask
            return keep

        return [cache(index) for index in range(len(kept))]

    with torch.no_grad():
        said = [torch.randint(0, 32000, (batch, n), device=GPU)]
        for index in range(more):
            place = n + index - 1 if index else 0
            at = torch.arange(place, place + said[-1].shape[1], device=GPU)
            said.append(model(said[-1], place, caches(at), only_last=True)[:, -1].float().argmax(-1, keepdim=True))
        torch.cat(said, 1)


def advise_growing(batch, n=384, more=40):
    """A Qwen-like model in float16 draws from the words that make up nine tenths; keys and values grow by each word."""
    model = Llama(896, 64, 2, 2432, 10, 50000, n + more, torch.float16, bias=True).to(GPU, torch.float16).eval()
    kept = [None] * len(model.layers)

    def cache(index):
        def keep(k, v):
            kept[index] = (k, v) if kept[index] is None else tuple(torch.cat(pair, 2) for pair in zip(kept[index], (k, v)))
            return *kept[index], None
        return keep

    caches = [cache(index) for index in range(len(kept))]
    with torch.no_grad():
        said = torch.randint(0, 50000, (batch, n), device=GPU)
        for index in range(more):
            new = said[:, -1:] if index else said
            logits = model(new, said.shape[1] - new.shape[1], caches, only_last=True)[:, -1].float() / 0.8
            high, order = logits.sort(descending=True)
            chances = high.softmax(-1)
            high = high.masked_fill(chances.cumsum(-1) - chances > 0.9, float("-inf"))
            drawn = torch.multinomial(high.softmax(-1), 1)
            said = torch.cat([said, order.gather(1, drawn)], 1)


PROGRAMS = [lyrics, novels, recipes, tutors, shells, glaciers, clouds, coins, orchids, enzymes, markets, tides, advise_static, advise_growing]
