"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `reader`, `captions`, `papers` and `chats` need transformers, `orchids`
and `land` timm, `moles` and `signs` torchvision; without them these raise ImportError.

The optimizer on the CPU is that of edits_programs8.py; the loops call `prepare` and `size` of edits_programs5.py.
"""
import itertools, math, random

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "traffic": ["--adam for-loop", "--checkpoint all", "--optimizer adafactor --set-to-none no"],
    "horses": ["--adam fused", "--checkpoint all", "--set-to-none yes"],
    "moles": ["--optimizer momentum", "--precision autocast-fp16", "--freeze 0.5"],
    "signs": ["--optimizer adam", "--accumulate 2", "--optimizer adamw --set-to-none no"],
    "orchids": ["--optimizer sgd", "--checkpoint every:2", "--offload activations", "--optimizer adam --adam fused"],
    "land": ["--precision autocast-bf16", "--offload activations", "--optimizer adamw --adam for-loop"],
    "reader": ["--checkpoint layers:0..11", "--offload optimizer", "--accumulate 4 --precision autocast-bf16"],
    "captions": ["--precision bf16", "--freeze 0.5", "--adam foreach", "--optimizer momentum --checkpoint every:2"],
    "papers": ["--lora 8", "--precision bf16", "--precision autocast-fp16", "--optimizer sgd --checkpoint layers:6..11"],
    "chats": ["--adam foreach", "--optimizer adafactor", "--offload optimizer", "--lora 16 --checkpoint all"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "traffic": 5, "horses": 5, "moles": 5, "signs": 5, "orchids": 5, "land": 5, "reader": 5, "captions": 5, "papers": 5, "chats": 5,
}

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


# How fast cars go in the next hour, at all sensors of a city: convolutions in time with gates, graphs of the roads and one that is
# learned (Graph WaveNet), Adam, the error of what was measured.


class Hops(nn.Module):
    """What each sensor hears from those that are one and two steps away."""

    def __init__(self, width, n_graphs, order=2):
        super().__init__()
        self.order = order
        self.mix = nn.Conv2d(width * (n_graphs * order + 1), width, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, graphs):
        heard = [x]
        for graph in graphs:
            y = x
            for _ in range(self.order):
                y = torch.einsum("ncvt,vw->ncwt", y, graph).contiguous()
                heard.append(y)
        return self.drop(self.mix(torch.cat(heard, 1)))


class Gated(nn.Module):
    def __init__(self, width, n_skip, n_graphs, dilation):
        super().__init__()
        self.filter = nn.Conv2d(width, width, (1, 2), dilation=(1, dilation))
        self.gate = nn.Conv2d(width, width, (1, 2), dilation=(1, dilation))
        self.skip = nn.Conv2d(width, n_skip, 1)
        self.hops = Hops(width, n_graphs)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x, graphs):
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        skip = self.skip(y)
        y = self.hops(y, graphs) + x[..., -y.shape[3] :]
        return self.norm(y), skip


class Roads(nn.Module):
    def __init__(self, roads, n_in, n_out, width, n_skip, n_end, n_blocks):
        super().__init__()
        for number, road in enumerate(roads):
            self.register_buffer(f"road{number}", road)
        self.n_roads = len(roads)
        self.source, self.target = nn.Parameter(torch.randn(len(roads[0]), 10)), nn.Parameter(torch.randn(10, len(roads[0])))
        self.start = nn.Conv2d(n_in, width, 1)
        self.layers = nn.ModuleList(Gated(width, n_skip, len(roads) + 1, dilation) for _ in range(n_blocks) for dilation in (1, 2))
        self.end1, self.end2 = nn.Conv2d(n_skip, n_end, 1), nn.Conv2d(n_end, n_out, 1)
        self.n_seen = 1 + 3 * n_blocks

    def forward(self, x):
        x = self.start(F.pad(x, (max(0, self.n_seen - x.shape[3]), 0)))
        learned = F.softmax(F.relu(self.source @ self.target), 1)
        graphs = [getattr(self, f"road{number}") for number in range(self.n_roads)] + [learned.to(x.dtype)]
        total = 0
        for layer in self.layers:
            x, skip = layer(x, graphs)
            total = skip if isinstance(total, int) else skip + total[..., -skip.shape[3] :]
        return self.end2(F.relu(self.end1(F.relu(total))))


def measured_error(guess, truth):
    """The absolute error where something was measured; a speed of zero is none."""
    known = (truth != 0).float()
    known = known / known.mean()
    return torch.nan_to_num((guess - truth).abs() * known).mean()


def traffic(edits):
    edits.habits()
    n_sensors, n_hours, n_batch, n_steps = size(207, 12), size(3000, 200), size(192, 4), size(6, 2)
    near = torch.exp(-torch.rand(n_sensors, n_sensors) * 6) * (torch.rand(n_sensors, n_sensors) < 0.1) + torch.eye(n_sensors)
    roads = [it / it.sum(1, keepdim=True) for it in (near, near.T)]
    model = Roads(roads, 2, 12, size(32, 8), size(256, 16), size(512, 32), 4)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, weight_decay=1e-4)
    day = torch.arange(n_hours) % 288 / 288
    speeds = 55 + 10 * torch.sin(2 * math.pi * day)[:, None] + torch.randn(n_hours, n_sensors) * 5
    speeds[torch.rand(n_hours, n_sensors) < 0.05] = 0
    mean, spread = speeds[speeds > 0].mean(), speeds[speeds > 0].std()
    series = torch.stack([(speeds - mean) / spread, day[:, None].expand(-1, n_sensors)], 2)

    def windows(starts):
        x = torch.stack([series[it : it + 12] for it in starts]).permute(0, 3, 2, 1)
        y = torch.stack([speeds[it + 12 : it + 24] for it in starts])
        return x.to(GPU, edits.dtype), y.to(GPU)

    starts = torch.randperm(n_hours - 24).tolist()
    model.train()
    for step in range(n_steps):
        edits.zero_grad(opt)
        total = 0.0
        for _ in range(edits.accumulate):
            x, y = windows([starts.pop() for _ in range(n_batch)])
            with edits.forward():
                guess = model(x).squeeze(-1)
                loss = measured_error(guess.float() * spread + mean, y)
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt, model.parameters(), clip=5.0)
        if step % 2 == 0:
            print(f"{step} error {total:.4f}")
    model.eval()
    errors = []
    with torch.no_grad(), edits.autocast():
        for _ in range(2):
            x, y = windows([starts.pop() for _ in range(n_batch)])
            guess = model(x).squeeze(-1).float() * spread + mean
            errors.append([measured_error(guess[:, it], y[:, it]).item() for it in (2, 5, 11)])
    print("errors after a quarter, a half and an hour: " + ", ".join(f"{sum(it) / len(it):.3f}" for it in zip(*errors)))


# Horses become zebras and zebras horses: two networks that paint and two that judge, what goes there and back should be the same
# (CycleGAN), two Adams for four networks, older paintings are judged too; gradients are set to zero and kept.


class Painted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width), nn.ReLU(True),
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width),
        )

    def forward(self, x):
        return x + self.layers(x)


def painter(width, n_blocks):
    layers = [nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(True)]
    for n in (width, 2 * width):
        layers += [nn.Conv2d(n, 2 * n, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * n), nn.ReLU(True)]
    layers += [Painted(4 * width) for _ in range(n_blocks)]
    for n in (4 * width, 2 * width):
        layers += [nn.ConvTranspose2d(n, n // 2, 3, stride=2, padding=1, output_padding=1), nn.InstanceNorm2d(n // 2), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


def judge(width):
    layers = [nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2, True)]
    for n, stride in ((width, 2), (2 * width, 2), (4 * width, 1)):
        layers += [nn.Conv2d(n, 2 * n, 4, stride=stride, padding=1), nn.InstanceNorm2d(2 * n), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, padding=1))


def from_normal(layer):
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0.0, 0.02)
        nn.init.zeros_(layer.bias)


class Older:
    """Some paintings are kept for later, and older ones are given in their place."""

    def __init__(self, n):
        self.n, self.kept = n, []

    def __call__(self, images):
        given = []
        for image in images.detach():
            if len(self.kept) < self.n:
                self.kept.append(image.clone())
                given.append(image)
            elif random.random() > 0.5:
                place = random.randrange(self.n)
                given.append(self.kept[place])
                self.kept[place] = image.clone()
            else:
                given.append(image)
        return torch.stack(given)


def horses(edits):
    random.seed(0)
    edits.habits(set_to_none="no")
    side, width, n_blocks, n_batch, n_steps = size(256, 32), size(64, 8), size(9, 3), size(2, 1), size(4, 2)
    both = nn.ModuleList([painter(width, n_blocks), painter(width, n_blocks)]).apply(from_normal)
    both = prepare(edits, both, named(both, "Painted"))
    to_zebra, to_horse = both
    judges = nn.ModuleList([judge(width), judge(width)]).apply(from_normal).to(GPU)
    zebra_like, horse_like = judges
    opt = optimizer(edits, itertools.chain(to_zebra.parameters(), to_horse.parameters()), torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
    opt_judges = optimizer(edits, judges.parameters(), torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
    schedules = [torch.optim.lr_scheduler.LambdaLR(rated(it), lambda n: 1.0 - max(0, n - 100) / 101) for it in (opt, opt_judges)]
    old_zebras, old_horses = Older(size(50, 3)), Older(size(50, 3))
    same, like = nn.L1Loss(), nn.MSELoss()

    def liked(guess, real):
        return like(guess, torch.full_like(guess, 1.0 if real else 0.0))

    for epoch in range(2):
        for _ in range(n_steps // 2):
            horse, zebra = ((torch.rand(n_batch, 3, side, side) * 2 - 1).to(GPU) for _ in range(2))
            # The painters; the judges only look.
            judges.requires_grad_(False)
            edits.zero_grad(opt)
            with edits.forward():
                fake_zebra = to_zebra(horse)
                horse_again = to_horse(fake_zebra)
                fake_horse = to_horse(zebra)
                zebra_again = to_zebra(fake_horse)
                unchanged = 5.0 * (same(to_zebra(zebra), zebra) + same(to_horse(horse), horse))
                fooled = liked(zebra_like(fake_zebra), True) + liked(horse_like(fake_horse), True)
                back = 10.0 * (same(horse_again, horse) + same(zebra_again, zebra))
                loss = unchanged + fooled + back
            edits.backward(loss)
            edits.step(opt)
            # The judges.
            judges.requires_grad_(True)
            edits.zero_grad(opt_judges)
            seen_losses = []
            for look, real, fake in ((zebra_like, zebra, old_zebras(fake_zebra)), (horse_like, horse, old_horses(fake_horse))):
                with edits.forward():
                    seen = 0.5 * (liked(look(real), True) + liked(look(fake), False))
                edits.backward(seen)
                seen_losses.append(seen.item())
            edits.step(opt_judges)
            print(f"{epoch} fooled {fooled.item():.3f}, back {back.item():.3f}, judges {sum(seen_losses):.3f}")
        for it in schedules:
            it.step()


# Moles that are dangerous and others: an Inception of torchvision with a second loss in the middle, seldom kinds are shown more often,
# RMSprop, a loader that turns and flips pictures.


class Moles(Dataset):
    def __init__(self, n, chances, side, change=None):
        self.images = torch.randint(256, (min(n, size(256, 8)), 3, side, side), dtype=torch.uint8)
        self.labels = torch.multinomial(chances, n, replacement=True)
        self.change = change

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        image = self.images[number % len(self.images)]
        return self.change(image) if self.change else image, self.labels[number]


def moles(edits):
    from torch.utils.data import WeightedRandomSampler
    from torchvision.models import inception_v3
    from torchvision.transforms import v2
    edits.habits()
    chances = torch.tensor([0.67, 0.11, 0.11, 0.05, 0.03, 0.015, 0.015])
    n_batch, n_steps, side = size(44, 2), size(4, 1), size(299, 75)
    model = inception_v3(weights=None, num_classes=len(chances), aux_logits=True, init_weights=False)
    if size(False, True):
        # That of torchvision needs larger pictures.
        model.AuxLogits = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, len(chances)))
    blocks = [it for name, it in model.named_children() if name.startswith("Mixed")]
    model = prepare(edits, model, blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.RMSprop, lr=1e-3, alpha=0.9, momentum=0.9, eps=1.0, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(rated(opt), gamma=0.94)
    normal = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    change = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.ColorJitter(0.1, 0.1), *normal])
    data = Moles(4 * n_batch * n_steps * edits.accumulate, chances, side, change)
    counts = torch.bincount(data.labels, minlength=len(chances)).clamp(min=1)
    sampler = WeightedRandomSampler((1.0 / counts)[data.labels], n_batch * n_steps * edits.accumulate)
    train = DataLoader(data, n_batch, sampler=sampler, drop_last=True, pin_memory=GPU == "cuda")
    valid = DataLoader(Moles(n_batch, chances, side, v2.Compose(normal)), n_batch)
    criterion = nn.CrossEntropyLoss()
    model.train()
    total = right = n_seen = 0
    for number, (images, labels) in enumerate(train):
        images, labels = images.to(GPU, non_blocking=True), labels.to(GPU, non_blocking=True)
        if number % edits.accumulate == 0:
            edits.zero_grad(opt)
        with edits.forward():
            outputs, middle = model(images)
            loss = criterion(outputs, labels) + 0.4 * criterion(middle, labels)
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt)
        total += loss.item() * len(images)
        right += (outputs.argmax(1) == labels).sum().item()
        n_seen += len(images)
    schedule.step()
    print(f"loss {total / n_seen:.4f}, {right / n_seen:.3f} right")
    model.eval()
    table = torch.zeros(len(chances), len(chances), dtype=torch.long)
    with torch.no_grad(), edits.autocast():
        for images, labels in valid:
            guessed = model(images.to(GPU)).argmax(1).cpu()
            table.view(-1).index_add_(0, labels * len(chances) + guessed, torch.ones_like(labels))
    recall = table.diag() / table.sum(1).clamp(min=1)
    print(f"recall {recall.mean().item():.3f}")


# Signs beside the road: an SSD of torchvision with its many boxes at six sizes, biases learn twice as fast, SGD with momentum.


class Signs(Dataset):
    def __init__(self, n, n_kinds, part):
        self.n, self.n_kinds, self.part = n, n_kinds, part

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        height, width = ((480, 640), (600, 800), (512, 512))[number % 3]
        height, width = height // self.part, width // self.part
        n = 1 + number * 5 % 6
        corner, extent = torch.rand(n, 2) * 0.7, torch.rand(n, 2) * 0.2 + 0.05
        boxes = torch.cat([corner, corner + extent], 1) * torch.tensor([width, height] * 2)
        return torch.rand(3, height, width), {"boxes": boxes, "labels": torch.randint(1, self.n_kinds, (n,))}


def signs(edits):
    from torchvision.models.detection import ssd300_vgg16, ssdlite320_mobilenet_v3_large
    edits.habits()
    n_kinds, n_batch, n_steps = size(44, 5), size(26, 2), size(4, 1)
    model = size(ssd300_vgg16, ssdlite320_mobilenet_v3_large)(weights=None, weights_backbone=None, num_classes=n_kinds)
    model = prepare(edits, model, [])
    biases = [it for name, it in model.named_parameters() if name.endswith(".bias")]
    others = [it for name, it in model.named_parameters() if not name.endswith(".bias")]
    groups = [{"params": biases, "lr": 2e-3}, {"params": others}]
    opt = optimizer(edits, groups, torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[80, 100], gamma=0.1)

    def listed(rows):
        images, targets = zip(*rows)
        return list(images), list(targets)

    data = Signs(n_steps * edits.accumulate * n_batch, n_kinds, size(1, 4))
    train = DataLoader(data, n_batch, shuffle=True, collate_fn=listed, drop_last=True, num_workers=size(4, 0))
    model.train()
    sums = {}
    for number, (images, targets) in enumerate(train):
        images = [it.to(GPU) for it in images]
        targets = [{name: it.to(GPU) for name, it in target.items()} for target in targets]
        with edits.forward():
            losses = model(images, targets)
            loss = losses["bbox_regression"] + losses["classification"]
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt)
            edits.zero_grad(opt)
        for name, it in losses.items():
            sums[name] = sums.get(name, 0.0) + it.item() / len(train)
    schedule.step()
    print(", ".join(f"{name} {it:.4f}" for name, it in sums.items()))
    model.eval()
    with torch.no_grad():
        images, _ = listed([data[number] for number in range(size(4, 1))])
        found = model([it.to(GPU) for it in images])
    print(f"{sum((it['scores'] > 0.5).sum().item() for it in found)} found")


# Orchids: an NFNet of timm without norms, each layer's gradients are clipped by the size of its weights, Nesterov's momentum, a mean of
# the weights by timm, channels last, bfloat16 where it does no harm.


def orchids(edits):
    from timm import create_model
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, ModelEmaV3, accuracy, adaptive_clip_grad
    random.seed(0)
    edits.habits(precision="autocast-bf16")
    n_kinds, n_batch, n, n_steps = size(156, 6), size(88, 2), size(224, 32), size(3, 1)
    model = create_model(size("eca_nfnet_l0", "nf_resnet26"), num_classes=n_kinds, drop_rate=0.2, drop_path_rate=0.1)
    model.to(GPU, memory_format=torch.channels_last)
    # The mean is copied before anything is done to the layers.
    mean = ModelEmaV3(model, decay=0.9998, use_warmup=True)
    model = prepare(edits, model, named(model, "NormFreeBlock"))
    biases = [it for it in model.parameters() if it.ndim <= 1]
    weights = [it for it in model.parameters() if it.ndim > 1]
    groups = [{"params": weights, "weight_decay": 2e-5}, {"params": biases, "weight_decay": 0.0}]
    opt = optimizer(edits, groups, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    schedule = CosineLRScheduler(rated(opt), t_initial=90, warmup_t=5, warmup_lr_init=1e-3, t_in_epochs=True)
    criterion = LabelSmoothingCrossEntropy(0.1).to(GPU)
    head = {id(it) for it in model.head.parameters()}
    clipped = [it for it in model.parameters() if id(it) not in head]
    middle = torch.tensor([0.485, 0.456, 0.406], device=GPU).view(1, 3, 1, 1) * 255
    spread = torch.tensor([0.229, 0.224, 0.225], device=GPU).view(1, 3, 1, 1) * 255
    n_updates = 0

    def pictures():
        images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
        images = images.float().sub_(middle).div_(spread)
        return images.contiguous(memory_format=torch.channels_last), torch.randint(n_kinds, (n_batch,)).to(GPU)

    for epoch in range(2):
        losses = AverageMeter()
        model.train()
        for _ in range(n_steps):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                images, labels = pictures()
                images = images.flip(3) if random.random() < 0.5 else images
                with edits.forward():
                    loss = criterion(model(images), labels)
                edits.backward(loss)
                losses.update(loss.item(), n_batch)
            adaptive_clip_grad(clipped, clip_factor=0.01)
            edits.step(opt)
            n_updates += 1
            mean.update(model, step=n_updates)
        schedule.step(epoch + 1)
        model.eval()
        with torch.no_grad(), edits.autocast():
            images, labels = pictures()
            first, of_mean = (accuracy(it(images), labels)[0].item() for it in (model, mean.module))
        print(f"{epoch} loss {losses.avg:.4f}, the first {first:.2f} %, that of the mean {of_mean:.2f} %")


# What land is used for, seen from the air: a PVT of timm whose four levels are added up (FPN), entropy and overlap, half precision, Adam
# with a rate that falls to zero.


class Land(nn.Module):
    def __init__(self, name, n_kinds, width):
        super().__init__()
        from timm import create_model
        self.encoder = create_model(name, features_only=True, drop_path_rate=0.1)
        widths = self.encoder.feature_info.channels()
        self.sides = nn.ModuleList(nn.Conv2d(it, width, 1) for it in widths)
        self.smooth = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width // 2, 3, padding=1), nn.GroupNorm(8, width // 2), nn.ReLU(inplace=True)) for _ in widths
        )
        self.drop, self.out = nn.Dropout2d(0.2), nn.Conv2d(width // 2, n_kinds, 1)

    def forward(self, x):
        levels = [side(it) for side, it in zip(self.sides, self.encoder(x))]
        for number in range(len(levels) - 1, 0, -1):
            levels[number - 1] = levels[number - 1] + F.interpolate(levels[number], scale_factor=2.0, mode="nearest")
        shape = levels[0].shape[2:]
        levels = [smooth(it) for smooth, it in zip(self.smooth, levels)]
        total = sum(F.interpolate(it, size=shape, mode="bilinear", align_corners=False) for it in levels)
        return F.interpolate(self.out(self.drop(total)), size=x.shape[2:], mode="bilinear", align_corners=False)


def not_overlapping(logits, truth, nothing):
    """One minus the overlap of each kind, where something is known."""
    known = (truth != nothing).unsqueeze(1)
    chances = logits.float().softmax(1) * known
    wanted = F.one_hot(truth.masked_fill(truth == nothing, 0), logits.shape[1]).permute(0, 3, 1, 2) * known
    both = (chances * wanted).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / (chances.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1)).mean()


def land(edits):
    edits.habits(precision="autocast-fp16")
    n_kinds, nothing, n_batch, n, n_steps = 7, 255, size(8, 2), size(512, 64), size(5, 2)
    model = Land(size("pvt_v2_b2", "pvt_v2_b0"), n_kinds, size(256, 32))
    model = prepare(edits, model, named(model.encoder, "Block"))
    groups = [{"params": list(model.encoder.parameters())}, {"params": [*model.sides.parameters(), *model.smooth.parameters()]}]
    groups.append({"params": list(model.out.parameters()), "weight_decay": 0.0})
    opt = optimizer(edits, groups, torch.optim.Adam, lr=1e-4, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(rated(opt), total_iters=1000, power=0.9)
    entropy = nn.CrossEntropyLoss(ignore_index=nothing)

    def crops():
        images = torch.rand(n_batch, 3, n, n).to(GPU, non_blocking=True)
        truth = torch.randint(n_kinds, (n_batch, n // 16, n // 16)).repeat_interleave(16, 1).repeat_interleave(16, 2)
        truth[torch.rand(truth.shape) < 0.02] = nothing
        return (images - 0.45) / 0.25, truth.to(GPU, non_blocking=True)

    def seen():
        model.eval()
        table = torch.zeros(n_kinds * n_kinds, device=GPU)
        with torch.no_grad():
            images, truth = crops()
            with edits.autocast():
                guessed = model(images).argmax(1)
            known = truth != nothing
            table += torch.bincount(truth[known] * n_kinds + guessed[known], minlength=n_kinds * n_kinds)
        table = table.view(n_kinds, n_kinds)
        model.train()
        return (table.diag() / (table.sum(0) + table.sum(1) - table.diag()).clamp(min=1)).mean().item()

    model.train()
    for step in range(n_steps):
        total = 0.0
        for _ in range(edits.accumulate):
            images, truth = crops()
            with edits.forward():
                logits = model(images)
                loss = entropy(logits, truth) + not_overlapping(logits, truth, nothing)
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt)
        schedule.step()
        edits.zero_grad(opt)
        if step % 2 == 1:
            print(f"{step} loss {total:.4f}, overlap {seen():.4f}")


# Books that are read aloud by many people: a SpeechT5 of transformers makes spectra of letters, attention is led along the diagonal,
# what is longer is filled up, AdamW, a rate that rises and falls.


class Read(Dataset):
    def __init__(self, n, n_letters, letters, n_bands, n_voice):
        self.n_said = torch.randint(*letters, (n,)).tolist()
        self.n_letters, self.n_bands = n_letters, n_bands
        self.voices = F.normalize(torch.randn(8, n_voice))

    def __len__(self):
        return len(self.n_said)

    def __getitem__(self, number):
        n = self.n_said[number]
        words = torch.randint(4, self.n_letters, (n,))
        words[-1] = 2
        return words, torch.randn(int(n * (4 + 2 * random.random())) // 2 * 2, self.n_bands) - 2, self.voices[number % 8]


def read_together(rows):
    words, sounds, voices = zip(*rows)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(it) for it in words], batch_first=True)
    return {
        "input_ids": nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=1), "attention_mask": mask,
        "labels": nn.utils.rnn.pad_sequence(sounds, batch_first=True, padding_value=-100.0), "speaker_embeddings": torch.stack(voices),
    }


def reader(edits):
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech, get_cosine_schedule_with_warmup
    random.seed(0)
    edits.habits()
    n_letters, n_batch, n_steps, letters = size(81, 30), size(7, 2), size(5, 2), size((40, 110), (5, 12))
    small = dict(
        hidden_size=16, encoder_layers=8, decoder_layers=4, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
        decoder_attention_heads=2, num_mel_bins=8, speech_decoder_prenet_units=16, speech_decoder_postnet_units=16, speaker_embedding_dim=8,
    )
    config = SpeechT5Config(vocab_size=n_letters, encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False, **size({}, small))
    model = SpeechT5ForTextToSpeech(config)
    model = prepare(edits, model, named(model, "SpeechT5EncoderLayer") + named(model, "SpeechT5DecoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(rated(opt), num_warmup_steps=50, num_training_steps=2000)
    how = dict(n_letters=n_letters, letters=letters, n_bands=config.num_mel_bins, n_voice=config.speaker_embedding_dim)
    train = DataLoader(Read(n_steps * edits.accumulate * n_batch, **how), n_batch, shuffle=True, collate_fn=read_together)
    valid = DataLoader(Read(n_batch, **how), n_batch, collate_fn=read_together)
    model.train()
    opt.zero_grad()
    total = 0.0
    for number, batch in enumerate(train):
        batch = {name: it.to(GPU) for name, it in batch.items()}
        with edits.forward():
            loss = model(**batch).loss
        edits.backward(loss)
        total += loss.item()
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
    print(f"loss {total / len(train):.4f}, rate {schedule.get_last_lr()[0]:.2e}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        for batch in valid:
            loss = model(**{name: it.to(GPU) for name, it in batch.items()}).loss
    print(f"loss on others {loss.item():.4f}")


# What to write below pictures: a BLIP of transformers, fused AdamW without decay of vectors, bfloat16 where it does no harm; some
# pictures get their texts at the end.


def captions(edits):
    from transformers import BlipConfig, BlipForConditionalGeneration
    edits.habits(precision="autocast-bf16")
    n_words, n_batch, side, n_steps, longest = size(30524, 120), size(16, 2), size(224, 32), size(5, 2), size(30, 8)
    usual = (dict(num_hidden_layers=10), dict())
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    of_text, of_image = size(usual, (dict(small, encoder_hidden_size=32), dict(small, patch_size=8)))
    config = BlipConfig(
        text_config=dict(
            vocab_size=n_words, bos_token_id=n_words - 2, sep_token_id=3, eos_token_id=3, pad_token_id=0, use_cache=False,
            label_smoothing=0.1, **of_text,
        ),
        vision_config=dict(image_size=side, initializer_range=0.02, **of_image),
    )
    model = BlipForConditionalGeneration(config)
    model = prepare(edits, model, named(model, "BlipEncoderLayer") + named(model, "BlipTextLayer"))
    plain = ("bias", "norm.weight", "Norm.weight", "norm1.weight", "norm2.weight", "_embedding")
    groups = [
        {"params": [it for name, it in model.named_parameters() if not name.endswith(plain)], "weight_decay": 0.05},
        {"params": [it for name, it in model.named_parameters() if name.endswith(plain)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=1e-5, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=5000, eta_min=1e-7)
    middle = torch.tensor([0.4815, 0.4578, 0.4082], device=GPU).view(1, 3, 1, 1)
    spread = torch.tensor([0.2686, 0.2613, 0.2758], device=GPU).view(1, 3, 1, 1)

    def looked_at(n):
        images = torch.randint(256, (n, 3, side, side), dtype=torch.uint8).to(GPU, non_blocking=True)
        return ((images / 255 - middle) / spread).to(edits.dtype)

    def written():
        lengths = torch.randint(longest // 3, longest + 1, (n_batch,))
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        words = torch.randint(4, n_words - 2, mask.shape)
        words[:, 0] = n_words - 2
        words.scatter_(1, lengths[:, None] - 1, 3)
        words = words * mask
        return {"input_ids": words.to(GPU), "attention_mask": mask.to(GPU), "labels": words.masked_fill(mask == 0, -100).to(GPU)}

    model.train()
    for step in range(n_steps):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            images, texts = looked_at(n_batch), written()
            with edits.forward():
                loss = model(pixel_values=images, **texts).loss
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        texts = model.generate(pixel_values=looked_at(size(4, 2)), max_new_tokens=size(12, 3))
    print(f"texts of {texts.shape[1]} words")


# Subjects of papers, each of which may have several: a Longformer of transformers sees long texts through windows, the first word sees
# all of it, two batches for a step, AdamW.


class Papers(Dataset):
    def __init__(self, n, n_words, n_subjects, shortest, longest):
        self.lengths = torch.randint(shortest, longest + 1, (n,)).tolist()
        self.n_words, self.n_subjects = n_words, n_subjects

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        words = torch.randint(4, self.n_words, (self.lengths[number],))
        words[0], words[-1] = 0, 2
        return words, (torch.rand(self.n_subjects) < 0.1).float()


def papers_padded(rows):
    words, subjects = zip(*rows)
    words = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=1)
    return words, (words != 1).long(), torch.stack(subjects)


def papers(edits):
    from transformers import LongformerConfig, LongformerForSequenceClassification, get_linear_schedule_with_warmup
    edits.habits(accumulate=2)
    n_words, n_subjects, n_batch, n_steps, between = size(50265, 120), size(38, 5), size(2, 2), size(4, 2), size((400, 768), (10, 32))
    usual = dict(attention_window=256, max_position_embeddings=1026)
    small = dict(
        hidden_size=32, num_hidden_layers=12, num_attention_heads=2, intermediate_size=64, attention_window=8, max_position_embeddings=40,
    )
    config = LongformerConfig(vocab_size=n_words, type_vocab_size=1, num_labels=n_subjects, **size(usual, small))
    model = LongformerForSequenceClassification(config)
    model = prepare(edits, model, named(model, "LongformerLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=3e-5, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(rated(opt), num_warmup_steps=100, num_training_steps=3000)
    data = Papers(n_steps * edits.accumulate * n_batch, n_words, n_subjects, *between)
    train = DataLoader(data, n_batch, shuffle=True, collate_fn=papers_padded)
    valid = DataLoader(Papers(2 * n_batch, n_words, n_subjects, *between), n_batch, collate_fn=papers_padded)

    def guessed(words, mask):
        everywhere = torch.zeros_like(words)
        everywhere[:, 0] = 1
        return model(input_ids=words, attention_mask=mask, global_attention_mask=everywhere).logits.float()

    model.train()
    running = 0.0
    for number, batch in enumerate(train, 1):
        words, mask, subjects = (it.to(GPU) for it in batch)
        with edits.forward():
            loss = F.binary_cross_entropy_with_logits(guessed(words, mask), subjects)
        edits.backward(loss)
        running += loss.item()
        if number % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
            print(f"{number} loss {running / number:.4f}")
    model.eval()
    hits = n_found = n_true = 0
    with torch.no_grad(), edits.autocast():
        for batch in valid:
            words, mask, subjects = (it.to(GPU) for it in batch)
            found = guessed(words, mask).sigmoid() > 0.5
            hits += (found & (subjects > 0)).sum().item()
            n_found, n_true = n_found + found.sum().item(), n_true + subjects.sum().item()
    print(f"F1 {2 * hits / max(1, n_found + n_true):.4f}")


# Talks with a machine: a small Phi-3 of transformers, all of it in bfloat16, talks are packed into one long row and do not see each
# other, only what the machine says is learned, fused AdamW.


def chats(edits):
    from transformers import Phi3Config, Phi3ForCausalLM, get_cosine_schedule_with_warmup
    edits.habits(precision="bf16")
    n_words, n, n_steps = size(32064, 120), size(2048, 48), size(6, 2)
    usual = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    config = Phi3Config(
        vocab_size=n_words, max_position_embeddings=n, original_max_position_embeddings=n, use_cache=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, **size(usual, small),
    )
    model = Phi3ForCausalLM(config)
    model = prepare(edits, model, named(model, "Phi3DecoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=2e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = get_cosine_schedule_with_warmup(rated(opt), num_warmup_steps=10, num_training_steps=500)

    def packed():
        """As many talks as fit into one row; each has its own places."""
        words, places, labels, left = [], [], [], n
        while left > 0:
            length = min(left, int(torch.randint(n // 16, n // 3, ())))
            left = 0 if left - length < 8 else left - length
            length = length if left else n - sum(len(it) for it in words)
            talk, asked = torch.randint(3, n_words, (length,)), max(1, length // 3)
            said = talk.clone()
            said[:asked] = -100
            words.append(talk)
            places.append(torch.arange(length))
            labels.append(said)
        rows = {"input_ids": words, "position_ids": places, "labels": labels}
        return {name: torch.cat(it)[None].to(GPU) for name, it in rows.items()}

    model.train()
    for step in range(n_steps):
        total = torch.zeros((), device=GPU)
        for _ in range(edits.accumulate):
            with edits.forward():
                loss = model(**packed()).loss
            edits.backward(loss)
            total += loss.detach() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        if step % 3 == 0:
            print(f"{step} loss {total.item():.4f}, rate {schedule.get_last_lr()[0]:.2e}")
    model.eval()
    with torch.no_grad():
        print(f"loss on others {model(**packed()).loss.item():.4f}")


PROGRAMS = {it.__name__: it for it in (traffic, horses, moles, signs, orchids, land, reader, captions, papers, chats)}
