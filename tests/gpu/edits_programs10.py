"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `story`, `choices` and `pairs` need transformers, `cells` and `kinds`
timm, `instances` and `likeness` torchvision; without them these raise ImportError.

The optimizer on the CPU is that of edits_programs8.py; the loops call `prepare` and `size` of edits_programs5.py.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "likeness": ["--set-to-none yes", "--adam for-loop", "--checkpoint every:2"],
    "chapters": ["--optimizer momentum", "--checkpoint layers:0..5", "--offload optimizer", "--precision autocast-bf16 --accumulate 2"],
    "stems": ["--set-to-none no", "--checkpoint all", "--precision autocast-bf16"],
    "cells": ["--optimizer adam", "--precision autocast-fp16", "--accumulate 4"],
    "ladder": ["--optimizer adamw", "--checkpoint every:2", "--accumulate 4 --set-to-none no"],
    "instances": ["--accumulate 2", "--freeze 0.5", "--optimizer adam --adam fused"],
    "pairs": ["--optimizer sgd", "--checkpoint all", "--precision bf16", "--offload activations"],
    "kinds": ["--optimizer adamw", "--checkpoint layers:2..7", "--set-to-none no"],
    "choices": ["--accumulate 4", "--optimizer adafactor", "--checkpoint all", "--freeze 0.5"],
    "story": ["--precision autocast-bf16", "--checkpoint every:2", "--adam fused", "--lora 8 --checkpoint all"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "likeness": 5, "chapters": 5, "stems": 5, "cells": 5, "ladder": 6, "instances": 6, "pairs": 5, "kinds": 7, "choices": 5, "story": 5,
}

import torch
from torch import nn
from torch.nn import functional as F

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


def pinned(x):
    """What a loader with pinned memory gives."""
    return x.pin_memory() if GPU == "cuda" else x


# People seen again by another camera: a ConvNeXt of torchvision, a few pictures of each person in a batch, the hardest triplets and names.


class Person(nn.Module):
    """A description of a person, and who of those in the data it is."""

    def __init__(self, body, n_people):
        super().__init__()
        self.body = body.features
        n = body.classifier[2].in_features
        self.neck, self.head = nn.BatchNorm1d(n), nn.Linear(n, n_people, bias=False)
        self.neck.bias.requires_grad_(False)
        nn.init.normal_(self.head.weight, std=0.001)

    def forward(self, x):
        x = self.body(x).mean((2, 3))
        known = self.neck(x)
        return (x, self.head(known)) if self.training else F.normalize(known.float(), dim=1)


def hardest(x, who):
    """The farthest picture of the same person should be closer than the closest one of another."""
    far = torch.cdist(x, x)
    same = who[:, None] == who[None]
    away = far.masked_fill(~same, 0.0).amax(1)
    near = far.masked_fill(same, 1e6).amin(1)
    return F.soft_margin_loss(near - away, torch.ones_like(near)), (near > away).float().mean()


def erased(x):
    """A part of some pictures is grey, another part of each."""
    n_batch, _, height, width = x.shape
    top, left = torch.rand(n_batch, 1, device=x.device) * 0.7 * height, torch.rand(n_batch, 1, device=x.device) * 0.7 * width
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    rows, columns = (rows >= top) & (rows < top + 0.3 * height), (columns >= left) & (columns < left + 0.3 * width)
    some = torch.rand(n_batch, 1, 1, device=x.device) < 0.5
    return x.masked_fill((rows[:, :, None] & columns[:, None] & some)[:, None], 0.0)


def likeness(edits):
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt, convnext_tiny
    edits.habits(set_to_none="no")
    n_people, n_each, n_seen, height, width = size(12, 3), size(4, 2), size(751, 9), size(256, 64), size(128, 32)
    if n_seen == 751:
        body = convnext_tiny(weights=None, stochastic_depth_prob=0.1)
    else:
        body = ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 2)])
    model = prepare(edits, Person(body, n_seen), named(body, "CNBlock"))
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=3.5e-4, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[40, 70], gamma=0.1)

    def people():
        who = torch.randperm(n_seen)[:n_people].repeat_interleave(n_each)
        images = pinned(torch.randint(256, (n_people * n_each, 3, height, width), dtype=torch.uint8))
        return images.to(GPU, non_blocking=True).to(edits.dtype).sub_(118).div_(58), pinned(who).to(GPU, non_blocking=True)

    def looked(n_batches):
        """Descriptions of people, from pictures and from mirrored ones."""
        found, names = [], []
        model.eval()
        with torch.no_grad(), edits.autocast():
            for _ in range(n_batches):
                images, who = people()
                found.append((model(images) + model(images.flip(3))).cpu())
                names.append(who.cpu())
        model.train()
        return torch.cat(found), torch.cat(names)

    for epoch in range(2):
        for step in range(3):
            for _ in range(edits.accumulate):
                images, who = people()
                images = erased(images)
                with edits.forward():
                    x, logits = model(images)
                    loss_name = F.cross_entropy(logits.float(), who, label_smoothing=0.1)
                    loss_far, right = hardest(x.float(), who)
                    loss = loss_name + loss_far
                edits.backward(loss)
            edits.step(opt)
            edits.zero_grad(opt)
            print(f"{epoch} {step} name {loss_name.item():.3f}, far {loss_far.item():.3f}, {right.item():.2f} right")
        schedule.step()
    asked, who = looked(1)
    gallery, names = looked(3)
    best = (asked @ gallery.T).argmax(1)
    print(f"{(names[best] == who).float().mean().item():.3f} found")


# Long books, a chapter at a time: what the layers knew of the words before is kept, and looked at again (Transformer-XL).


class Recall(nn.Module):
    """Attention to these words and to those that are kept; how far away they are counts."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.kv, self.r = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.out, self.drop = nn.Linear(width, width, bias=False), nn.Dropout(0.1)
        self.u, self.v = nn.Parameter(torch.zeros(n_heads, width // n_heads)), nn.Parameter(torch.zeros(n_heads, width // n_heads))

    @staticmethod
    def shifted(x):
        """What was by distance is by place."""
        n_batch, n_heads, n, n_all = x.shape
        x = F.pad(x, (1, 0)).view(n_batch, n_heads, n_all + 1, n)
        return x[:, :, 1:].reshape(n_batch, n_heads, n, n_all)

    def forward(self, x, kept, far, hidden):
        everything = torch.cat([kept, x], 1)
        q = self.q(x).unflatten(-1, (self.n_heads, -1))
        k, v = (it.unflatten(-1, (self.n_heads, -1)) for it in self.kv(everything).chunk(2, -1))
        r = self.r(far).unflatten(-1, (self.n_heads, -1))
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        distance = self.shifted(torch.einsum("bihd,jhd->bhij", q + self.v, r))
        scores = (content + distance) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(hidden, -1e4)
        seen = torch.einsum("bhij,bjhd->bihd", self.drop(scores.softmax(-1)), v)
        return self.out(seen.flatten(2))


class Chapter(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.recall, self.norm1, self.norm2, self.drop = Recall(width, n_heads), nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x, kept, far, hidden):
        x = self.norm1(x + self.drop(self.recall(x, kept, far, hidden)))
        return self.norm2(x + self.think(x))


class Seldom(nn.Module):
    """The loss of words, sorted by how often they are used: the seldom ones are in groups, and of smaller width."""

    def __init__(self, width, n_words, cutoffs):
        super().__init__()
        self.cutoffs, self.often = [*cutoffs, n_words], nn.Linear(width, cutoffs[0] + len(cutoffs))
        self.groups = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width // 2 ** (number + 1), bias=False), nn.Linear(width // 2 ** (number + 1), last - first))
            for number, (first, last) in enumerate(zip(self.cutoffs, self.cutoffs[1:]))
        )

    def forward(self, x, words):
        first, label, loss = self.cutoffs[0], words.clone(), 0.0
        for number, (layer, last) in enumerate(zip(self.groups, self.cutoffs[1:])):
            mine = (words >= first) & (words < last)
            label[mine] = self.cutoffs[0] + number
            rows = mine.nonzero().squeeze(1)
            if len(rows):
                loss = loss + F.cross_entropy(layer(x[rows]).float(), words[rows] - first, reduction="sum")
            first = last
        return (loss + F.cross_entropy(self.often(x).float(), label, reduction="sum")) / len(words)


class Book(nn.Module):
    def __init__(self, n_words, width, n_heads, n_layers, cutoffs):
        super().__init__()
        self.words, self.drop = nn.Embedding(n_words, width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Chapter(width, n_heads) for _ in range(n_layers))
        self.head = Seldom(width, n_words, cutoffs)

    def forward(self, words, kept, n_kept):
        """The state of each word, and what is kept for the next ones."""
        n, width = words.size(1), self.words.embedding_dim
        x = self.drop(self.words(words) * math.sqrt(width))
        if kept is None:
            kept = [x.new_zeros(len(x), 0, width) for _ in range(len(self.layers))]
        n_all = n + kept[0].size(1)
        rates = 10000 ** -(torch.arange(0, width, 2, device=x.device) / width)
        angles = torch.arange(n_all - 1, -1, -1, device=x.device)[:, None] * rates
        far = self.drop(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        hidden = torch.ones(n, n_all, dtype=torch.bool, device=x.device).triu(1 + n_all - n)
        after = []
        for layer, before in zip(self.layers, kept):
            with torch.no_grad():
                after.append(torch.cat([before, x], 1)[:, -n_kept:].detach())
            x = layer(x, before, far, hidden)
        return x, after


def chapters(edits):
    edits.habits()
    n_words, n_batch, n, n_kept = size(40000, 120), size(12, 2), size(192, 8), size(256, 12)
    model = Book(n_words, size(512, 32), size(8, 2), size(10, 6), size([4000, 16000], [20, 60]))
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=2.5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), 1000)
    n_steps = 5
    # Each row is another part of the book; there are few words that are used often.
    book = (torch.rand(n_batch, n_steps * edits.accumulate * n + 1) ** 4 * n_words).long().to(GPU)
    kept, place, total, n_told = None, 0, 0.0, 0
    for step in range(n_steps):
        for _ in range(edits.accumulate):
            words, after = book[:, place : place + n], book[:, place + 1 : place + n + 1]
            place += n
            with edits.forward():
                x, kept = model(words, kept, n_kept)
                loss = model.head(x.flatten(0, 1), after.flatten())
            edits.backward(loss)
            total, n_told = total + loss.item(), n_told + 1
        edits.step(opt, model.parameters(), clip=0.25)
        edits.zero_grad(opt)
        schedule.step()
        if step % 2 == 1:
            print(f"{step} perplexity {math.exp(min(total / n_told, 20)):.1f}")
            total, n_told = 0.0, 0


# A song taken apart into voice, drums, bass and the rest: convolutions over the wave, an LSTM where it is shortest (Demucs).


class Shorter(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv, self.mix = nn.Conv1d(n_in, n_out, 8, 4), nn.Conv1d(n_out, 2 * n_out, 1)

    def forward(self, x):
        return F.glu(self.mix(F.relu(self.conv(x))), 1)


class Longer(nn.Module):
    def __init__(self, n_in, n_out, is_last):
        super().__init__()
        self.mix, self.conv, self.is_last = nn.Conv1d(n_in, 2 * n_in, 3, padding=1), nn.ConvTranspose1d(n_in, n_out, 8, 4), is_last

    def forward(self, x, skip):
        x = x + skip[..., : x.size(-1)]
        x = self.conv(F.glu(self.mix(x), 1))
        return x if self.is_last else F.relu(x)


class Stems(nn.Module):
    def __init__(self, width, n_levels, n_stems):
        super().__init__()
        self.n_stems, self.n_levels = n_stems, n_levels
        self.shorter, self.longer, before = nn.ModuleList(), nn.ModuleList(), 2
        for level in range(n_levels):
            n_out = width * 2**level
            self.shorter.append(Shorter(before, n_out))
            self.longer.insert(0, Longer(n_out, before if level else 2 * n_stems, level == 0))
            before = n_out
        self.lstm, self.join = nn.LSTM(before, before, 2, bidirectional=True), nn.Linear(2 * before, before)

    def length(self, n):
        """The next length that all levels divide."""
        for _ in range(self.n_levels):
            n = max(1, math.ceil((n - 8) / 4) + 1)
        for _ in range(self.n_levels):
            n = (n - 1) * 4 + 8
        return n

    def forward(self, x):
        n = x.size(-1)
        mean, spread = x.mean((1, 2), keepdim=True), x.std((1, 2), keepdim=True) + 1e-5
        x = F.pad((x - mean) / spread, (0, self.length(n) - n))
        skips = []
        for layer in self.shorter:
            x = layer(x)
            skips.append(x)
        x = self.join(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for layer in self.longer:
            x = layer(x, skips.pop())
        return (x[..., :n] * spread + mean).unflatten(1, (self.n_stems, 2))


def stems(edits):
    edits.habits()
    n_batch, n, n_stems = size(16, 2), size(44100 * 3, 3000), 4
    model = Stems(size(64, 8), size(5, 3), n_stems)
    model = prepare(edits, model, [*model.shorter, *model.longer])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=3e-4, betas=(0.9, 0.999))
    mean = [it.detach().clone() for it in model.parameters()]
    model.train()
    for step in range(5):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            waves = pinned(torch.randn(n_batch, n_stems, 2, n) * 0.1).to(GPU, non_blocking=True)
            # Louder or not, turned around, left is right, and stems of other songs.
            loud = torch.rand(n_batch, n_stems, 1, 1, device=GPU) + 0.25
            sign = torch.randint(2, (n_batch, n_stems, 1, 1), device=GPU) * 2 - 1
            waves = waves * loud * sign
            waves = torch.where(torch.rand(n_batch, n_stems, 1, 1, device=GPU) < 0.5, waves.flip(2), waves)
            waves = torch.stack([waves[torch.randperm(n_batch, device=GPU), number] for number in range(n_stems)], 1)
            song = waves.sum(1)
            with edits.forward():
                heard = model(song)
                loss = F.l1_loss(heard, waves)
            edits.backward(loss)
        edits.step(opt)
        with torch.no_grad():
            torch._foreach_lerp_(mean, list(model.parameters()), 0.001)
            noise = (heard.float() - waves).square().sum((2, 3))
            clear = 10 * torch.log10(waves.square().sum((2, 3)) / noise.clamp(min=1e-8)).mean(0)
        print(f"{step} loss {loss.item():.4f}, " + " ".join(f"{it:.2f}" for it in clear.tolist()))


# Cells under a microscope: a ResNeSt of timm and a decoder say where cells are and how far it is to their edges; channels last.


def conv(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


class Cells(nn.Module):
    def __init__(self, name, widths):
        super().__init__()
        from timm import create_model
        self.encoder = create_model(name, features_only=True, in_chans=1)
        before, *others = reversed(self.encoder.feature_info.channels())
        self.ups = nn.ModuleList()
        for n_more, width in zip([*others, 0], widths):
            self.ups.append(nn.Sequential(conv(before + n_more, width), conv(width, width)))
            before = width
        self.inside, self.far = nn.Conv2d(before, 2, 1), nn.Conv2d(before, 1, 1)

    def forward(self, x):
        x, *others = reversed(self.encoder(x))
        for up, more in zip(self.ups, [*others, None]):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(x if more is None else torch.cat([x, more], 1))
        return self.inside(x), self.far(x)


def overlap(chances, truth):
    """One minus what both have, of what either has; by picture and class."""
    both = (chances * truth).sum((2, 3))
    return (1 - (2 * both + 1) / (chances.sum((2, 3)) + truth.sum((2, 3)) + 1)).mean()


def cells(edits):
    edits.habits()
    n_batch, n = size(12, 2), size(320, 64)
    model = Cells(size("resnest26d", "resnest14d"), size((256, 128, 64, 48, 32), (16, 16, 8, 8, 8)))
    model = prepare(edits, model, []).to(memory_format=torch.channels_last)
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=3e-5, nesterov=True)
    n_steps = 5
    schedule = torch.optim.lr_scheduler.PolynomialLR(rated(opt), total_iters=200, power=0.9)

    def pictures():
        """Pictures with what is inside and what is the edge of cells, and how far the edge is."""
        images = torch.rand(n_batch, 1, n, n)
        far = F.avg_pool2d(torch.randn(n_batch, 1, n, n), 9, 1, 4) * 9
        truth = torch.cat([far > 0.5, (far > 0.2) & (far < 0.5)], 1).float()
        return [pinned(it).to(GPU, non_blocking=True) for it in (images, truth, far.clamp(0, 2))]

    said = []
    for step in range(n_steps):
        for micro in range(edits.accumulate):
            images, truth, far = pictures()
            images = images.to(edits.dtype, memory_format=torch.channels_last)
            with edits.forward():
                inside, distance = model(images)
                inside, distance = inside.float(), distance.float()
                loss_inside = F.binary_cross_entropy_with_logits(inside, truth) + overlap(inside.sigmoid(), truth)
                loss_far = F.mse_loss(distance, far)
                loss = loss_inside + 0.5 * loss_far
            if micro == 0:
                edits.zero_grad(opt)
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=12.0)
        schedule.step()
        said.append(torch.stack([loss_inside.detach(), loss_far.detach()]))
    model.eval()
    with torch.inference_mode(), edits.autocast():
        images, truth, _ = pictures()
        images = images.to(edits.dtype, memory_format=torch.channels_last)
        # Each picture is also looked at from the other side.
        guess = (model(images)[0].sigmoid() + model(images.flip(3))[0].sigmoid().flip(3)) / 2
        both, either = ((guess > 0.5) & (truth > 0)).sum(), ((guess > 0.5) | (truth > 0)).sum()
    print("inside {:.3f}, far {:.3f}".format(*torch.stack(said).mean(0).tolist()) + f", {(both / either).item():.3f} overlap")


# Pictures out of nothing: what varies is drawn at many levels, from coarse to fine, and is close to what is seen there (a deep VAE).


class Narrow(nn.Module):
    """Convolutions that are narrower in the middle."""

    def __init__(self, n_in, middle, n_out, kernel):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(n_in, middle, 1), *(nn.Conv2d(middle, middle, kernel, padding=kernel // 2) for _ in range(2)), nn.Conv2d(middle, n_out, 1)]
        )

    def forward(self, x):
        for layer in self.convs:
            x = layer(F.gelu(x))
        return x


class Rising(nn.Module):
    def __init__(self, width, kernel, shrink):
        super().__init__()
        self.more, self.shrink = Narrow(width, width // 4, width, kernel), shrink

    def forward(self, x):
        x = x + self.more(x)
        return F.avg_pool2d(x, self.shrink) if self.shrink > 1 else x


class Falling(nn.Module):
    """Draws what varies at a level: from what is seen if that is given, else from what is expected."""

    def __init__(self, width, n_drawn, kernel):
        super().__init__()
        self.n_drawn, self.width = n_drawn, width
        self.seen, self.expected = Narrow(2 * width, width // 4, 2 * n_drawn, kernel), Narrow(width, width // 4, 2 * n_drawn + width, kernel)
        self.enter, self.after = nn.Conv2d(n_drawn, width, 1), Narrow(width, width // 4, width, kernel)

    def forward(self, x, seen=None):
        mean0, log0, more = self.expected(x).split([self.n_drawn, self.n_drawn, self.width], 1)
        mean1, log1 = self.seen(torch.cat([x, seen], 1)).chunk(2, 1) if seen is not None else (mean0, log0)
        drawn = mean1 + log1.exp() * torch.randn_like(mean1)
        apart = -0.5 + log0 - log1 + 0.5 * (log1.exp() ** 2 + (mean1 - mean0) ** 2) / log0.exp() ** 2
        x = x + more
        x = x + self.enter(drawn)
        return x + self.after(x), apart.sum((1, 2, 3))


class Ladder(nn.Module):
    def __init__(self, width, n_drawn, n, up, down):
        super().__init__()
        self.width, self.smallest = width, down[0][0]
        self.enter, self.exit = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 6, 1)
        self.rising = nn.ModuleList(
            Rising(width, 3 if side > 2 else 1, 2 if number == many - 1 and side > self.smallest else 1)
            for side, many in up for number in range(many)
        )
        self.sides = [side for side, many in down for _ in range(many)]
        self.falling = nn.ModuleList(Falling(width, n_drawn, 3 if side > 2 else 1) for side in self.sides)
        self.first = nn.Parameter(torch.zeros(1, width, self.smallest, self.smallest))

    def forward(self, images=None, n_batch=None):
        seen = {}
        if images is not None:
            n_batch, x = len(images), self.enter(images)
            for layer in self.rising:
                x = layer(x)
                seen[x.size(-1)] = x
        x, apart = self.first.expand(n_batch, -1, -1, -1), 0.0
        for side, layer in zip(self.sides, self.falling):
            if x.size(-1) < side:
                x = F.interpolate(x, scale_factor=side // x.size(-1))
            x, more = layer(x, seen.get(side))
            apart = apart + more
        return self.exit(x), apart


def ladder(edits):
    edits.habits()
    n_batch, n = size(16, 2), size(64, 16)
    up = size([(64, 4), (32, 4), (16, 3), (8, 2), (4, 2)], [(16, 2), (8, 1), (4, 1)])
    down = size([(4, 2), (8, 3), (16, 4), (32, 6), (64, 4)], [(4, 1), (8, 2), (16, 1)])
    model = Ladder(size(192, 16), size(16, 4), n, up, down)
    for it in model.falling:
        # At first each layer says little.
        nn.init.normal_(it.seen.convs[-1].weight, std=1e-3), nn.init.normal_(it.expected.convs[-1].weight, std=1e-3)
    mean = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: old * 0.999 + new * 0.001)
    model = prepare(edits, model, [*model.rising, *model.falling])
    mean.to(GPU)
    opt = optimizer(edits, model.parameters(), torch.optim.Adamax, lr=2e-4, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.LinearLR(rated(opt), start_factor=0.01, total_iters=100)
    n_skipped, images = 0, (torch.rand(size(512, 8), 3, n, n) * 255).byte()
    order = torch.randperm(len(images))
    for step in range(4):
        for micro in range(edits.accumulate):
            place = (step * edits.accumulate + micro) * n_batch % len(images)
            x = images[order[place : place + n_batch]].to(GPU).to(edits.dtype) / 127.5 - 1
            with edits.forward():
                said, apart = model(x)
                middle, scale = said.float().chunk(2, 1)
                # A logistic distribution says how likely each value was.
                scale = scale.clamp(min=-7)
                near = (x - middle) * torch.exp(-scale)
                wrong = (near + scale + 2 * F.softplus(-near)).sum((1, 2, 3))
                loss = (wrong + apart.float()).mean() / x[0].numel()
            edits.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 200.0)
        # A step that would go too far is not taken.
        if norm.item() < 1e6:
            edits.step(opt)
            mean.update_parameters(model)
        else:
            n_skipped += 1
        edits.zero_grad(opt)
        schedule.step()
        print(f"{step} loss {loss.item():.4f}, apart {apart.mean().item():.2f}, norm {norm.item():.2f}, {n_skipped} skipped")
    with torch.no_grad(), edits.autocast():
        drawn = mean.module(n_batch=size(16, 2))[0][:, :3].clamp(-1, 1)
    print(f"drawn {drawn.mean().item():.3f}")


# Things with their outlines: a Mask R-CNN of torchvision, pictures of different sizes, SGD with momentum, a warm-up in the first steps.


def instances(edits):
    from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    edits.habits()
    n_kinds, n_batch, shortest, longest = size(21, 4), size(5, 2), size(448, 64), size(640, 96)
    if n_kinds == 21:
        model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=n_kinds, min_size=shortest, max_size=longest)
    else:
        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
        few = dict(rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=20, box_batch_size_per_image=16)
        model = MaskRCNN(backbone, n_kinds, min_size=shortest, max_size=longest, **few)
    model = prepare(edits, model, [])
    trained = [it for it in model.parameters() if it.requires_grad]
    opt = optimizer(edits, trained, torch.optim.SGD, lr=0.005, momentum=0.9, weight_decay=0.0005)
    schedule = torch.optim.lr_scheduler.LinearLR(rated(opt), start_factor=0.001, total_iters=100)

    def picture():
        height, width = torch.randint(shortest, longest, (2,)).tolist()
        n_things = int(torch.randint(2, 9, ()))
        corner = torch.rand(n_things, 2) * torch.tensor([width, height]) * 0.6
        boxes = torch.cat([corner, corner + 8 + torch.rand(n_things, 2) * torch.tensor([width, height]) * 0.35], 1)
        # The outlines are ellipses.
        middle, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
        across = (torch.arange(width) - middle[:, :1]) / half[:, :1]
        along = (torch.arange(height) - middle[:, 1:]) / half[:, 1:]
        masks = (across[:, None].square() + along[:, :, None].square() < 1).byte()
        return torch.rand(3, height, width), {"boxes": boxes, "labels": torch.randint(1, n_kinds, (n_things,)), "masks": masks}

    smoothed = {}
    for step in range(5):
        for micro in range(edits.accumulate):
            images, targets = zip(*(picture() for _ in range(n_batch)))
            images = [it.to(GPU) for it in images]
            targets = [{name: it.to(GPU) for name, it in target.items()} for target in targets]
            with edits.forward():
                losses = model(images, targets)
                loss = sum(losses.values())
            if not math.isfinite(loss.item()):
                raise ValueError(f"the loss is {loss.item()}: {losses}")
            if micro == 0:
                edits.zero_grad(opt)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        for name, it in losses.items():
            smoothed[name] = 0.9 * smoothed.get(name, it.item()) + 0.1 * it.item()
    print(", ".join(f"{name[5:]} {value:.3f}" for name, value in smoothed.items()))


# Pictures and their texts: a SigLIP of transformers, for each pair on its own whether they belong together; all data is on the GPU.


def pairs(edits):
    from transformers import SiglipConfig, SiglipModel
    edits.habits()
    n_data, n_batch, n, n_words, longest = size(1024, 8), size(64, 4), size(192, 32), size(32000, 100), size(64, 8)
    usual = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8)
    small = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2)
    seeing = dict(image_size=n, patch_size=16, num_hidden_layers=size(8, 3), **size(usual, small))
    reading = dict(
        vocab_size=n_words, max_position_embeddings=longest, num_hidden_layers=size(6, 2), projection_size=size(512, 32),
        bos_token_id=2, eos_token_id=1, pad_token_id=1, **size(usual, small),
    )
    model = SiglipModel(SiglipConfig(text_config=reading, vision_config=seeing))
    nn.init.constant_(model.logit_scale, math.log(10)), nn.init.constant_(model.logit_bias, -10.0)
    model = prepare(edits, model, [*named(model.vision_model, "SiglipEncoderLayer"), *named(model.text_model, "SiglipEncoderLayer")])
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if it.ndim > 1 and "embedding" not in name], "weight_decay": 0.1},
        {"params": [it for name, it in trained if it.ndim < 2 or "embedding" in name], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=5e-4, betas=(0.9, 0.95), eps=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(rated(opt), T_0=500)
    images = torch.randint(256, (n_data, 3, n, n), dtype=torch.uint8, device=GPU)
    texts = torch.randint(3, n_words, (n_data, longest), device=GPU)
    texts[torch.arange(longest, device=GPU) >= torch.randint(longest // 3, longest, (n_data, 1), device=GPU)] = 1
    total = torch.zeros((), device=GPU)
    for step in range(4):
        for _ in range(edits.accumulate):
            chosen = torch.randint(n_data, (n_batch,), device=GPU)
            seen = (images[chosen].to(edits.dtype) / 127.5) - 1
            flip = torch.rand(n_batch, 1, 1, 1, device=GPU) < 0.5
            seen = torch.where(flip, seen.flip(3), seen)
            with edits.forward():
                logits = model(input_ids=texts[chosen], pixel_values=seen).logits_per_text.float()
                # One on the diagonal, else minus one.
                belongs = 2 * torch.eye(n_batch, device=GPU) - 1
                loss = -F.logsigmoid(belongs * logits).sum(1).mean()
            edits.backward(loss)
            total += loss.detach() / edits.accumulate
        edits.step(opt)
        edits.zero_grad(opt)
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
    right = (logits.argmax(1) == torch.arange(n_batch, device=GPU)).float().mean()
    print(f"loss {total.item() / 4:.3f}, {right.item():.3f} right")


# Kinds of things: an XCiT of timm, mixed pictures, LAMB, a mean of the weights which is also looked at, gradients cut by their value.


def kinds(edits):
    import numpy
    from timm import create_model
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import Lamb, param_groups_weight_decay
    from timm.scheduler import PolyLRScheduler
    from timm.utils import AverageMeter, ModelEmaV3, accuracy
    edits.habits()
    n_kinds, n_batch, n = size(1000, 7), size(48, 4), size(224, 32)
    small = dict(img_size=n, embed_dim=32, depth=8, num_heads=2)
    model = create_model("xcit_nano_12_p16_224" if n == 32 else "xcit_small_12_p16_224", num_classes=n_kinds, drop_path_rate=0.05, **size({}, small))
    mean = ModelEmaV3(model, decay=0.9998, use_warmup=True)
    model = prepare(edits, model, model.blocks)
    mean.to(GPU)
    opt = optimizer(edits, param_groups_weight_decay(model, 0.02), Lamb, lr=5e-3)
    schedule = PolyLRScheduler(rated(opt), t_initial=300, lr_min=1e-6, warmup_t=5, warmup_lr_init=1e-4, t_in_epochs=False)
    mixed, counted = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=n_kinds), SoftTargetCrossEntropy()
    losses = AverageMeter()
    # How pictures are mixed is drawn by NumPy.
    numpy.random.seed(0)

    def pictures(n_batch):
        images = pinned(torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8)).to(GPU, non_blocking=True)
        images = images.to(edits.dtype).sub_(124).div_(58)
        return images, torch.randint(n_kinds, (n_batch,)).to(GPU)

    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            images, labels = pictures(n_batch)
            images, labels = mixed(images, labels)
            with edits.forward():
                loss = counted(model(images), labels)
            edits.backward(loss)
            losses.update(loss.item(), n_batch)
        nn.utils.clip_grad_value_([it for it in model.parameters() if it.requires_grad], 0.5)
        edits.step(opt)
        mean.update(model, step=step)
        schedule.step_update(step + 1)
    for who, it in (("the model", model), ("its mean", mean.module)):
        it.eval()
        first = AverageMeter()
        with torch.no_grad(), edits.autocast():
            for _ in range(2):
                images, labels = pictures(2 * n_batch)
                first.update(accuracy(it(images), labels, topk=(1, 5))[0].item(), len(images))
        print(f"{who}: loss {losses.avg:.3f}, {first.avg:.2f} % right")


# Which of four endings is right: a RoFormer of transformers, a loader that pads, two batches for a step, the last layers learn faster.


class Questions(torch.utils.data.Dataset):
    def __init__(self, n, n_words, n_endings, longest):
        self.n, self.n_words, self.n_endings, self.longest = n, n_words, n_endings, longest

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        lengths = torch.randint(self.longest // 2, self.longest + 1, (self.n_endings,)).tolist()
        return [torch.randint(5, self.n_words, (it,)) for it in lengths], number % self.n_endings


def together(rows):
    """Questions with their endings, padded to the longest."""
    texts = [text for endings, _ in rows for text in endings]
    words = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    shape = len(rows), len(rows[0][0]), words.size(1)
    words = words.view(shape)
    parts = (torch.arange(shape[2]) >= shape[2] // 3).long().expand(shape).contiguous()
    return {"input_ids": words, "attention_mask": (words > 0).long(), "token_type_ids": parts}, torch.tensor([it for _, it in rows])


def choices(edits):
    from transformers import RoFormerConfig, RoFormerForMultipleChoice, get_polynomial_decay_schedule_with_warmup
    edits.habits(accumulate=2)
    n_words, n_batch, n_endings, longest = size(50000, 120), size(7, 2), 4, size(112, 12)
    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    usual = dict(hidden_size=768, num_hidden_layers=10, num_attention_heads=12, intermediate_size=3072)
    config = RoFormerConfig(vocab_size=n_words, max_position_embeddings=size(512, 64), pad_token_id=0, **size(usual, small))
    model = RoFormerForMultipleChoice(config)
    model = prepare(edits, model, named(model, "RoFormerLayer"))
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    late = (f"layer.{config.num_hidden_layers - 1}.", "classifier.")
    groups = [
        {"params": [it for name, it in trained if not any(part in name for part in late)], "lr": 2e-5},
        {"params": [it for name, it in trained if any(part in name for part in late)], "lr": 1e-4},
    ]
    opt = optimizer(edits, [group for group in groups if group["params"]], torch.optim.AdamW, lr=2e-5, eps=1e-6)
    schedule = get_polynomial_decay_schedule_with_warmup(rated(opt), 10, 1000, power=2.0)
    questions = Questions(3 * edits.accumulate * n_batch, n_words, n_endings, longest)
    loader = torch.utils.data.DataLoader(questions, n_batch, shuffle=True, collate_fn=together, pin_memory=GPU == "cuda", drop_last=True)
    model.train()
    n_right, total = 0, 0.0
    opt.zero_grad()
    for number, (texts, right) in enumerate(loader):
        texts, right = {name: it.to(GPU, non_blocking=True) for name, it in texts.items()}, right.to(GPU, non_blocking=True)
        with edits.forward():
            output = model(**texts, labels=right)
        edits.backward(output.loss)
        total += output.loss.item()
        n_right += (output.logits.argmax(1) == right).sum().item()
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, [it for _, it in trained], clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
    print(f"loss {total / len(loader):.4f}, {n_right} of {len(questions)} right")


# Stories: a GPT-NeoX of transformers, random pieces of one long text, the next ones on their way, a loss on other pieces between the steps.


def story(edits):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    edits.habits()
    n_words, n_batch, n = size(50304, 128), size(5, 2), size(512, 16)
    config = GPTNeoXConfig(
        vocab_size=n_words, hidden_size=size(640, 32), num_hidden_layers=size(10, 4), num_attention_heads=size(10, 2),
        intermediate_size=size(2560, 64), max_position_embeddings=n, use_cache=False,
    )
    model = GPTNeoXForCausalLM(config)
    model = prepare(edits, model, named(model, "GPTNeoXLayer"))
    # Matrices decay, biases and norms do not.
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [{"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.1}]
    if any(it.ndim < 2 for it in trained):
        groups.append({"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0})
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95))
    text = torch.randint(n_words, (size(200_000, 2000),), dtype=torch.int32).numpy()
    n_steps, rate = 5, 6e-4

    def pieces():
        starts = torch.randint(len(text) - n - 1, (n_batch,)).tolist()
        words = torch.stack([torch.from_numpy(text[it : it + n + 1].astype("int64")) for it in starts])
        return pinned(words).to(GPU, non_blocking=True)

    def told(words):
        logits = model(input_ids=words[:, :-1]).logits
        return F.cross_entropy(logits.view(-1, n_words), words[:, 1:].reshape(-1))

    @torch.no_grad()
    def others():
        model.eval()
        with edits.autocast():
            losses = [told(pieces()).item() for _ in range(2)]
        model.train()
        return sum(losses) / len(losses)

    words = pieces()
    for step in range(n_steps):
        # First up, then down along a cosine.
        for group in rated(opt).param_groups:
            group["lr"] = rate * ((step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * step / 100)))
        if step % 2 == 0:
            print(f"{step} other pieces {others():.4f}")
        for _ in range(edits.accumulate):
            with edits.forward():
                loss = told(words)
            # The next pieces are on their way while this one is learned.
            words = pieces()
            edits.backward(loss)
        edits.step(opt, trained, clip=1.0)
        edits.zero_grad(opt)
    print(f"loss {loss.item():.4f}")


PROGRAMS = {it.__name__: it for it in (likeness, chapters, stems, cells, ladder, instances, pairs, kinds, choices, story)}
