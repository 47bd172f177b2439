"""Ten more training programs, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of six steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. A program may need transformers, timm or torchvision; it raises
ImportError without them.
"""
import copy, math, os

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "forecast": [
        "--optimizer adamw", "--adam fused", "--precision autocast-bf16", "--accumulate 4", "--offload optimizer",
        "--optimizer sgd --set-to-none no",
    ],
    "distill": [
        "--optimizer momentum", "--precision fp32", "--checkpoint layers:0..5", "--freeze 0.5", "--accumulate 4",
        "--optimizer adamw --adam foreach",
    ],
    "policy": [
        "--adam for-loop", "--precision autocast-fp16", "--checkpoint all", "--freeze 0.5", "--set-to-none no",
        "--optimizer momentum --offload activations",
    ],
    "dpo": [
        "--optimizer adamw", "--precision bf16", "--checkpoint every:2", "--lora 8", "--accumulate 2", "--lora 16 --checkpoint all",
    ],
    "video": [
        "--optimizer adam", "--precision fp32", "--checkpoint layers:0..3", "--freeze 0.5", "--accumulate 2",
        "--optimizer adamw --set-to-none no",
    ],
    "nerf": [
        "--optimizer adam", "--precision autocast-fp16", "--checkpoint every:2", "--set-to-none yes", "--offload activations",
        "--accumulate 2 --checkpoint all",
    ],
    "codec": [
        "--adam fused", "--optimizer adafactor", "--precision autocast-bf16", "--set-to-none no", "--offload optimizer",
        "--optimizer sgd --precision autocast-bf16",
    ],
    "raft": [
        "--optimizer adafactor", "--precision autocast-bf16", "--checkpoint all", "--freeze 0.5", "--offload activations",
        "--accumulate 2 --set-to-none no",
    ],
    "llava": [
        "--adam for-loop", "--precision autocast-bf16", "--checkpoint all", "--lora 8", "--offload optimizer",
        "--adam fused --checkpoint every:2",
    ],
    "mae": [
        "--adam foreach", "--optimizer adafactor", "--precision bf16", "--checkpoint layers:0..11", "--offload activations",
        "--optimizer sgd --freeze 0.5",
    ],
}
# These need two GPUs.
LAYOUTS = {
    "video": ["--layout ddp:2"],
    "llava": ["--layout zero1:2", "--layout fsdp:2"],
    "mae": ["--layout ddp:2", "--layout fsdp:2 --checkpoint all"],
}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "forecast": 5, "distill": 5, "policy": 5, "dpo": 6, "video": 6, "nerf": 7, "codec": 7, "raft": 6, "llava": 8, "mae": 9,
}
# Seconds after which a run on the GPU is stopped.
LIMIT = 45

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 6
SMALL = bool(os.environ.get("EDITS_TINY"))
GPU = "cpu" if os.environ.get("EDITS_CPU") else "cuda"


def size(full, small):
    return small if SMALL else full


# --- time series ---------------------------------------------------------------------------------------------------------------


def forecast(edits):
    """A PatchTST says how 21 series go on, in single precision: Adam, one cycle of the learning rate, a validation at every second step."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    edits.habits()
    batch, past, future, n_series = size((96, 512, 96, 21), (4, 32, 8, 3))
    config = PatchTSTConfig(
        num_input_channels=n_series, context_length=past, prediction_length=future, patch_length=size(16, 8), patch_stride=8,
        d_model=size(128, 16), num_attention_heads=size(16, 2), num_hidden_layers=3, ffn_dim=size(256, 32), dropout=0.2,
        attention_dropout=0.0, ff_dropout=0.2, head_dropout=0.2, scaling="std", loss="mse",
    )
    model = PatchTSTForPrediction(config)
    run = edits.prepare(model, [])
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(edits.scheduled(optimizer), 1e-4, total_steps=100, pct_start=0.3, cycle_momentum=False)
    # Windows are cut out of one long recording.
    recording = torch.randn(8 * (past + future), n_series).cumsum(0)

    def windows():
        starts = torch.randint(0, len(recording) - past - future, (batch, 1))
        cut = recording[starts + torch.arange(past + future)].to(GPU, edits.dtype)
        return {"past_values": cut[:, :past], "future_values": cut[:, past:]}

    for step in range(STEPS):
        run.train()
        losses = []
        for _ in range(edits.accumulate):
            with edits.forward():
                loss = run(**windows()).loss
            edits.backward(loss)
            losses.append(loss.item())
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        schedule.step()
        if step % 2:
            run.eval()
            with torch.no_grad(), edits.autocast():
                errors = [run(**windows()).loss for _ in range(2)]
            print(f"{step}: {sum(losses) / len(losses):.3f}, validation {torch.stack(errors).mean().item():.3f}")


# --- scenes --------------------------------------------------------------------------------------------------------------------


def waves(x, n):
    """The coordinates, and the sines and cosines of their multiples."""
    angles = (x[..., None] * 2.0 ** torch.arange(n, device=x.device)).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


class Dense(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x):
        return F.relu(self.linear(x))


class Field(nn.Module):
    """The colour and density of each point, seen from one direction."""

    def __init__(self, width, depth, n_place, n_direction):
        super().__init__()
        self.n_place, self.n_direction, self.again = n_place, n_direction, depth // 2 + 1
        place, direction = 3 + 6 * n_place, 3 + 6 * n_direction
        n_in = [place, *[width] * (depth - 1)]
        n_in[self.again] += place
        self.layers = nn.ModuleList(Dense(n, width) for n in n_in)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = nn.Sequential(Dense(width + direction, width // 2), nn.Linear(width // 2, 3))

    def forward(self, points, directions):
        x = place = waves(points, self.n_place)
        for number, layer in enumerate(self.layers):
            x = layer(torch.cat([place, x], -1) if number == self.again else x)
        seen = waves(directions, self.n_direction)[:, None].expand(-1, points.shape[1], -1)
        colour = self.colour(torch.cat([self.feature(x), seen], -1))
        return torch.sigmoid(colour.float()), self.density(x).squeeze(-1).float()


class Scene(nn.Module):
    """A coarse field says where to look, and a fine one looks there."""

    def __init__(self, width, depth, n_coarse, n_fine, n_place, n_direction):
        super().__init__()
        self.coarse, self.fine = (Field(width, depth, n_place, n_direction) for _ in range(2))
        self.n_coarse, self.n_fine = n_coarse, n_fine

    def look(self, field, origins, directions, depths):
        points = origins[:, None] + directions[:, None] * depths[..., None]
        colour, density = field(points, F.normalize(directions, dim=-1))
        if self.training:
            density = density + torch.randn_like(density)
        gaps = torch.cat([depths.diff(dim=1), torch.full_like(depths[:, :1], 1e10)], 1)
        opacity = 1 - torch.exp(-F.relu(density) * gaps * directions.norm(dim=-1, keepdim=True))
        light = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], 1), 1)[:, :-1]
        weights = opacity * light
        # The background is white.
        return (weights[..., None] * colour).sum(1) + 1 - weights.sum(1, keepdim=True), weights

    @torch.no_grad()
    def where(self, depths, weights):
        """More depths, where the weights are large."""
        middles = (depths[:, 1:] + depths[:, :-1]) / 2
        share = weights[:, 1:-1] + 1e-5
        sums = F.pad((share / share.sum(1, keepdim=True)).cumsum(1), (1, 0))
        wanted = torch.rand(len(depths), self.n_fine, device=depths.device)
        above = torch.searchsorted(sums, wanted, right=True).clamp(1, sums.shape[1] - 1)
        low, high = sums.gather(1, above - 1), sums.gather(1, above)
        start, end = middles.gather(1, above - 1), middles.gather(1, above)
        found = start + (wanted - low) / (high - low).clamp(min=1e-5) * (end - start)
        return torch.cat([depths, found], 1).sort(1).values

    def forward(self, origins, directions):
        depths = torch.linspace(2, 6, self.n_coarse, device=origins.device).expand(len(origins), -1)
        if self.training:
            depths = depths + torch.rand_like(depths) * 4 / self.n_coarse
        first, weights = self.look(self.coarse, origins, directions, depths)
        return first, self.look(self.fine, origins, directions, self.where(depths, weights))[0]


def nerf(edits):
    """A radiance field learns a scene from rays on the GPU: single precision, RAdam, gradients are set to zero; at times it paints."""
    edits.habits(set_to_none="no")
    n_rays, side, n_pictures = size((2048, 160, 20), (32, 8, 3))
    model = Scene(size(256, 16), size(8, 4), size(64, 8), size(128, 8), size(10, 4), size(4, 2))
    run = edits.prepare(model, [*model.coarse.layers, *model.fine.layers])
    optimizer = edits.optimizer(model.parameters(), torch.optim.RAdam, lr=5e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(edits.scheduled(optimizer), 0.1 ** (1 / 250))
    across, down = torch.meshgrid(torch.linspace(-0.4, 0.4, side), torch.linspace(-0.4, 0.4, side), indexing="xy")
    ahead = torch.stack([across, -down, -torch.ones_like(across)], -1)
    turns = torch.linalg.qr(torch.randn(n_pictures, 3, 3)).Q
    directions = torch.einsum("hwc,nkc->nhwk", ahead, turns).reshape(-1, 3)
    origins = (4 * turns[:, :, 2]).repeat_interleave(side * side, 0)
    rays = torch.cat([origins, directions, torch.rand(len(origins), 3)], 1).to(GPU)
    rays = rays[torch.randperm(len(rays), device=GPU)]
    place = 0
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            origin, direction, wanted = rays[place : place + n_rays].split(3, 1)
            place = (place + n_rays) % (len(rays) - n_rays)
            with edits.forward():
                first, second = run(origin, direction)
                of_fine = F.mse_loss(second, wanted)
                loss = of_fine + F.mse_loss(first, wanted)
            edits.backward(loss)
        edits.step(optimizer)
        schedule.step()
        print(f"{step}: {loss.item():.4f}, {-10 * math.log10(of_fine.item()):.2f} dB")
        if step % 3 == 2:
            run.eval()
            with torch.no_grad(), edits.autocast():
                strips = [run(*it[:, :6].split(3, 1))[1].cpu() for it in rays[: side * side].split(n_rays)]
            run.train()
            print("painted", tuple(torch.cat(strips).view(side, side, 3).shape))


# --- preferences ---------------------------------------------------------------------------------------------------------------


def dpo(edits):
    """An OPT learns which of two answers people prefer: bfloat16 by autocast, RMSprop, beside a copy that is never trained."""
    from transformers import OPTConfig, OPTForCausalLM

    edits.habits(precision="autocast-bf16")
    config = OPTConfig(
        vocab_size=size(50272, 300), hidden_size=size(768, 32), word_embed_proj_dim=size(768, 32), num_hidden_layers=size(12, 2),
        num_attention_heads=size(12, 2), ffn_dim=size(3072, 64), dropout=0.0, max_position_embeddings=2048, use_cache=False,
    )
    pairs, seq, n_asked, beta = size((4, 320, 96, 0.1), (2, 16, 6, 0.1))
    model = OPTForCausalLM(config)
    reference = copy.deepcopy(model).requires_grad_(False).eval().to(GPU, edits.dtype)
    run = edits.prepare(model, model.model.decoder.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.RMSprop, lr=5e-7)
    schedule = torch.optim.lr_scheduler.LambdaLR(edits.scheduled(optimizer), lambda step: min(1.0, (step + 1) / 150))

    def load():
        """Answers that are preferred, then the others, each after its question; shorter ones are padded."""
        asked = torch.randint(4, config.vocab_size, (pairs, n_asked))
        answers = torch.randint(4, config.vocab_size, (2 * pairs, seq - n_asked))
        tokens = torch.cat([asked.repeat(2, 1), answers], 1)
        mask = torch.arange(seq) < torch.randint(seq * 2 // 3, seq + 1, (2 * pairs, 1))
        labels = tokens.masked_fill(~mask, -100)
        labels[:, :n_asked] = -100
        tokens[~mask] = config.pad_token_id
        return tokens.to(GPU), mask.long().to(GPU), labels.to(GPU)

    def likelihood(of, tokens, mask, labels):
        """The sum of the logarithms of an answer's probabilities."""
        logits, wanted = of(input_ids=tokens, attention_mask=mask).logits[:, :-1].float(), labels[:, 1:]
        counted = wanted != -100
        each = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None]).squeeze(2)
        return (each * counted).sum(1)

    for step in range(STEPS):
        margin = 0.0
        for _ in range(edits.accumulate):
            inputs = load()
            with torch.no_grad(), edits.autocast():
                before = likelihood(reference, *inputs)
            with edits.forward():
                better, worse = (likelihood(run, *inputs) - before).chunk(2)
                loss = -F.logsigmoid(beta * (better - worse)).mean()
            edits.backward(loss)
            margin += beta * (better - worse).detach().mean().item() / edits.accumulate
        edits.step(optimizer, model.parameters(), clip=10.0)
        schedule.step()
        edits.zero_grad(optimizer)
        print({"step": step, "loss": round(loss.item(), 4), "margin": round(margin, 4)})


# --- a small network learns from a large one -----------------------------------------------------------------------------------


def distill(edits):
    """A MobileNetV3 from timm learns what a ResNet says: channels last, bfloat16 by autocast, timm's Lamb, mixed pictures."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import Lamb

    edits.habits(precision="autocast-bf16")
    batch, side, n_labels, temperature = size((256, 192, 1000, 2.0), (2, 32, 10, 2.0))
    teacher = timm.create_model(size("resnet50d", "resnet10t"), num_classes=n_labels)
    teacher = teacher.eval().requires_grad_(False).to(GPU, edits.dtype, memory_format=torch.channels_last)
    model = timm.create_model(size("mobilenetv3_large_100", "mobilenetv3_small_050"), num_classes=n_labels, drop_rate=0.2)
    model = model.to(memory_format=torch.channels_last)
    run = edits.prepare(model, [block for stage in model.blocks for block in stage])
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.ndim <= 1], "weight_decay": 0.0},
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.02},
    ]
    optimizer = edits.optimizer(groups, Lamb, lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 600, eta_min=1e-6)
    mix, criterion = Mixup(mixup_alpha=0.1, cutmix_alpha=1.0, num_classes=n_labels), SoftTargetCrossEntropy()
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            pictures = torch.randn(batch, 3, side, side).to(GPU, non_blocking=True).to(memory_format=torch.channels_last)
            labels = torch.randint(0, n_labels, (batch,)).to(GPU, non_blocking=True)
            pictures, wanted = mix(pictures, labels)
            pictures = pictures.to(edits.dtype)
            with edits.forward():
                with torch.no_grad():
                    said = teacher(pictures)
                logits = run(pictures)
                softer = [F.log_softmax(it.float() / temperature, 1) for it in (logits, said)]
                near = F.kl_div(*softer, reduction="batchmean", log_target=True)
                loss = 0.1 * criterion(logits.float(), wanted) + 0.9 * temperature**2 * near
            edits.backward(loss)
        edits.step(optimizer)
        schedule.step()
        agree = (logits.argmax(1) == said.argmax(1)).float().mean()
        print(f"step {step} loss {loss.item():.3f} agree {agree.item():.3f}")


# --- robots --------------------------------------------------------------------------------------------------------------------


class Steered(nn.Module):
    """Two convolutions along time; what is seen scales and shifts the channels between them."""

    def __init__(self, n_in, n_out, n_seen, kernel=5, groups=8):
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(n_in, n_out, kernel, padding=kernel // 2), nn.GroupNorm(groups, n_out), nn.Mish())
        self.second = nn.Sequential(nn.Conv1d(n_out, n_out, kernel, padding=kernel // 2), nn.GroupNorm(groups, n_out), nn.Mish())
        self.steer = nn.Sequential(nn.Mish(), nn.Linear(n_seen, 2 * n_out))
        self.skip = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x, seen):
        scale, shift = self.steer(seen)[..., None].chunk(2, 1)
        return self.second(scale * self.first(x) + shift) + self.skip(x)


class TimeUNet(nn.Module):
    """Finds the noise in a sequence of actions."""

    def __init__(self, n_actions, widths, n_seen, n_time):
        super().__init__()
        self.n_time = n_time
        self.time = nn.Sequential(nn.Linear(n_time, 4 * n_time), nn.Mish(), nn.Linear(4 * n_time, n_time))
        n_seen, pairs = n_seen + n_time, list(zip((n_actions, *widths), widths))
        self.down = nn.ModuleList(nn.ModuleList([Steered(a, b, n_seen), Steered(b, b, n_seen)]) for a, b in pairs)
        self.shorter = nn.ModuleList(nn.Conv1d(it, it, 3, 2, 1) for it in widths[:-1])
        self.middle = nn.ModuleList(Steered(widths[-1], widths[-1], n_seen) for _ in range(2))
        self.up = nn.ModuleList(nn.ModuleList([Steered(2 * b, a, n_seen), Steered(a, a, n_seen)]) for a, b in pairs[:0:-1])
        self.longer = nn.ModuleList(nn.ConvTranspose1d(a, a, 4, 2, 1) for a, _ in pairs[:0:-1])
        self.last = nn.Sequential(
            nn.Conv1d(widths[0], widths[0], 5, padding=2), nn.GroupNorm(8, widths[0]), nn.Mish(), nn.Conv1d(widths[0], n_actions, 1),
        )

    def blocks(self):
        """The blocks in the order in which they run."""
        return [it for level in self.down for it in level] + list(self.middle) + [it for level in self.up for it in level]

    def forward(self, actions, time, seen):
        angles = time[:, None] * torch.exp(-math.log(10000) * torch.arange(self.n_time // 2, device=time.device) / (self.n_time // 2))
        seen = torch.cat([self.time(torch.cat([angles.sin(), angles.cos()], 1)), seen], 1)
        x, kept = actions.transpose(1, 2), []
        for number, level in enumerate(self.down):
            for block in level:
                x = block(x, seen)
            kept.append(x)
            x = self.shorter[number](x) if number < len(self.shorter) else x
        for block in self.middle:
            x = block(x, seen)
        for level, longer in zip(self.up, self.longer):
            x = torch.cat([x, kept.pop()], 1)
            for block in level:
                x = block(x, seen)
            x = longer(x)
        return self.last(x).transpose(1, 2)


class Policy(nn.Module):
    """Each camera has its own network; what they see and the robot's state steer the actions."""

    def __init__(self, cameras, n_features, n_state, n_moments, n_actions, widths, n_time):
        super().__init__()
        self.cameras = nn.ModuleList(cameras)
        self.net = TimeUNet(n_actions, widths, n_moments * (len(cameras) * n_features + n_state), n_time)

    def see(self, pictures, state):
        seen = [camera(it.flatten(0, 1)).unflatten(0, state.shape[:2]) for camera, it in zip(self.cameras, pictures.unbind(2))]
        return torch.cat([*seen, state], 2).flatten(1)

    def forward(self, actions, time, pictures, state):
        return self.net(actions, time, self.see(pictures, state))


def policy(edits):
    """A diffusion policy learns a robot's actions from two cameras and its state: single precision, AdamW, a mean of the weights acts."""
    import torchvision
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    edits.habits()
    batch, n_moments, side, n_state, n_actions, length, n_levels = size((128, 2, 96, 9, 10, 16, 100), (2, 2, 32, 3, 2, 8, 10))

    def camera():
        def norm(n):
            return nn.GroupNorm(max(1, n // 16), n)

        if SMALL:
            block = torchvision.models.resnet.BasicBlock
            net = torchvision.models.ResNet(block, [1, 1, 1, 1], norm_layer=norm)
        else:
            net = torchvision.models.resnet18(norm_layer=norm)
        net.fc = nn.Identity()
        return net

    model = Policy([camera(), camera()], 512, n_state, n_moments, n_actions, size((256, 512, 1024), (8, 16)), size(128, 8))
    mean = AveragedModel(model, device=GPU, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    mean.eval().requires_grad_(False)
    seeing = [block for it in model.cameras for layer in (it.layer1, it.layer2, it.layer3, it.layer4) for block in layer]
    run = edits.prepare(model, [*seeing, *model.net.blocks()])
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(edits.scheduled(optimizer), lambda step: min(1.0, (step + 1) / 500))
    kept = (torch.linspace(0, 1, n_levels + 1) * math.pi / 2).cos().square().clamp(1e-3, 0.999)[1:].to(GPU)

    def load():
        pictures = torch.randint(0, 256, (batch, n_moments, 2, 3, side, side), dtype=torch.uint8)
        state, actions = torch.randn(batch, n_moments, n_state), torch.rand(batch, length, n_actions) * 2 - 1
        return pictures.to(GPU, non_blocking=True).float() / 127.5 - 1, state.to(GPU), actions.to(GPU)

    def act(pictures, state):
        """Actions out of noise, in eight steps."""
        of_mean = mean.module
        actions, seen = torch.randn(batch, length, n_actions, device=GPU), of_mean.see(pictures, state)
        levels = torch.linspace(n_levels - 1, 0, 8).long().tolist()
        for level, following in zip(levels, [*levels[1:], None]):
            noise = of_mean.net(actions, torch.full((batch,), float(level), device=GPU), seen).float()
            clean = ((actions - (1 - kept[level]).sqrt() * noise) / kept[level].sqrt()).clamp(-1, 1)
            actions = clean if following is None else kept[following].sqrt() * clean + (1 - kept[following]).sqrt() * noise
        return actions

    for step in range(STEPS):
        for _ in range(edits.accumulate):
            pictures, state, actions = load()
            noise, level = torch.randn_like(actions), torch.randint(0, n_levels, (batch,), device=GPU)
            share = kept[level][:, None, None]
            noisy = share.sqrt() * actions + (1 - share).sqrt() * noise
            with edits.forward():
                loss = F.mse_loss(run(noisy, level.float(), pictures, state).float(), noise)
            edits.backward(loss)
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        schedule.step()
        mean.update_parameters(model)
        if step % 3 == 0:
            with torch.no_grad(), edits.autocast():
                error = F.mse_loss(act(pictures, state), actions)
            print(step, loss.item(), error.item())


# --- sound ---------------------------------------------------------------------------------------------------------------------


def normed(layer):
    """A layer whose weight is a direction and a length."""
    return nn.utils.parametrizations.weight_norm(layer)


class Snake(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, width, 1))

    def forward(self, x):
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


class Dilated(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.net = nn.Sequential(
            Snake(width), normed(nn.Conv1d(width, width, 7, dilation=dilation, padding=3 * dilation)), Snake(width),
            normed(nn.Conv1d(width, width, 1)),
        )

    def forward(self, x):
        return x + self.net(x)


def shorten(width, stride):
    down = normed(nn.Conv1d(width, 2 * width, 2 * stride, stride, stride // 2))
    return nn.Sequential(*[Dilated(width, it) for it in (1, 3, 9)], Snake(width), down)


def lengthen(width, stride):
    up = normed(nn.ConvTranspose1d(width, width // 2, 2 * stride, stride, stride // 2))
    return nn.Sequential(Snake(width), up, *[Dilated(width // 2, it) for it in (1, 3, 9)])


class Quantizer(nn.Module):
    """Takes the nearest vector of a book, in few dimensions."""

    def __init__(self, width, n_words, n_dimensions):
        super().__init__()
        self.into, self.out = normed(nn.Conv1d(width, n_dimensions, 1)), normed(nn.Conv1d(n_dimensions, width, 1))
        self.book = nn.Embedding(n_words, n_dimensions)

    def forward(self, x):
        z = self.into(x)
        flat = F.normalize(z.transpose(1, 2).flatten(0, 1).float())
        words = (flat @ F.normalize(self.book.weight).t()).argmax(1).view(len(x), -1)
        chosen = self.book(words).transpose(1, 2)
        losses = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return self.out(z + (chosen - z).detach()), losses


class Codec(nn.Module):
    """Sound becomes few words and sound again; each book corrects what the books before it left."""

    def __init__(self, width, strides, latent, n_books, n_words, n_dimensions):
        super().__init__()
        widths = [width << it for it in range(len(strides) + 1)]
        self.encoder = nn.Sequential(
            normed(nn.Conv1d(1, width, 7, padding=3)), *[shorten(*it) for it in zip(widths, strides)], Snake(widths[-1]),
            normed(nn.Conv1d(widths[-1], latent, 3, padding=1)),
        )
        self.books = nn.ModuleList(Quantizer(latent, n_words, n_dimensions) for _ in range(n_books))
        self.decoder = nn.Sequential(
            normed(nn.Conv1d(latent, widths[-1], 7, padding=3)), *[lengthen(*it) for it in zip(widths[:0:-1], strides[::-1])],
            Snake(width), normed(nn.Conv1d(width, 1, 7, padding=3)), nn.Tanh(),
        )

    def forward(self, sound):
        rest = self.encoder(sound)
        total, losses = 0.0, 0.0
        for book in self.books:
            part, loss = book(rest)
            total, rest, losses = total + part, rest - part, losses + loss
        return self.decoder(total), losses


class Listener(nn.Module):
    """Looks at every second, third, fifth ... sample as at a picture."""

    def __init__(self, period, widths):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList(normed(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in zip((1, *widths), widths))
        self.last = normed(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, sound):
        x = F.pad(sound, (0, -sound.shape[-1] % self.period), "reflect").unflatten(2, (-1, self.period))
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.last(x), features


class Listeners(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.each = nn.ModuleList(Listener(period, widths) for period in (2, 3, 5, 7, 11))

    def forward(self, sound):
        return [it(sound) for it in self.each]


def codec(edits):
    """A sound codec against listeners: single precision, two AdamWs, normed weights, losses on spectra, features and books."""
    edits.habits()
    batch, n_samples = size((12, 16384), (2, 512))
    windows = [torch.hann_window(it, device=GPU) for it in size((2048, 1024, 512, 256), (128, 64))]
    writer = Codec(size(32, 4), size((2, 4, 4, 8), (2, 4)), size(256, 8), size(8, 2), size(1024, 16), size(8, 4))
    listeners = Listeners(size((32, 128, 512, 1024), (8, 16)))
    write, listen = edits.prepare(writer, []), edits.prepare(listeners, [])
    of_writer = edits.optimizer(writer.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.8, 0.99))
    of_listeners = edits.optimizer(listeners.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.8, 0.99))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(edits.scheduled(it), 0.999996) for it in (of_writer, of_listeners)]

    def spectrum(sound, window):
        turned = torch.stft(sound.squeeze(1).float(), len(window), len(window) // 4, window=window, return_complex=True)
        return turned.abs().clamp(min=1e-5).log10()

    for step in range(STEPS):
        sound = (torch.rand(batch, 1, n_samples) * 2 - 1).to(GPU)
        with edits.forward():
            written, of_books = write(sound)

        edits.zero_grad(of_listeners)
        with edits.forward():
            pairs = zip(listen(sound), listen(written.detach()))
            heard = sum((1 - real).square().mean() + fake.square().mean() for (real, _), (fake, _) in pairs)
        edits.backward(heard)
        edits.step(of_listeners, listeners.parameters(), clip=10.0)

        edits.zero_grad(of_writer)
        with edits.forward():
            fooled, alike = 0.0, 0.0
            with torch.no_grad():
                of_real = listen(sound)
            for (_, real), (fake, features) in zip(of_real, listen(written)):
                fooled = fooled + (1 - fake).square().mean()
                alike = alike + sum(F.l1_loss(it, wanted) for it, wanted in zip(features, real))
            spectra = sum(F.l1_loss(spectrum(written, it), spectrum(sound, it)) for it in windows)
            loss = 15 * spectra + fooled + 2 * alike + of_books
        edits.backward(loss)
        edits.step(of_writer, writer.parameters(), clip=1000.0)
        for schedule in schedules: schedule.step()
        print(f"{step}: {loss.item():.3f}, spectra {spectra.item():.3f}, books {of_books.item():.3f}, listeners {heard.item():.3f}")


# --- motion --------------------------------------------------------------------------------------------------------------------


def raft(edits):
    """RAFT from torchvision learns how pixels move: single precision, AdamW, clipped gradients, frozen batch norms, all guesses count."""
    from torchvision.models.optical_flow import raft_large, raft_small

    edits.habits()
    batch, height, width, n_guesses = size((4, 368, 496, 12), (1, 128, 128, 2))
    model = raft_small() if SMALL else raft_large()
    encoders = (model.feature_encoder, model.context_encoder)
    run = edits.prepare(model, [block for it in encoders for layer in (it.layer1, it.layer2, it.layer3) for block in layer])
    for it in model.modules():
        if isinstance(it, nn.BatchNorm2d):
            it.eval()
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=1e-5, eps=1e-8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        edits.scheduled(optimizer), 1e-4, total_steps=1000, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear",
    )
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            first, second = (torch.rand(2, batch, 3, height, width) * 2 - 1).to(GPU, non_blocking=True)
            moved = F.interpolate(torch.randn(batch, 2, 8, 8) * 10, (height, width), mode="bicubic").to(GPU, non_blocking=True)
            known = (torch.rand(batch, height, width) < 0.9).to(GPU, non_blocking=True)
            with edits.forward():
                guesses = run(first, second, num_flow_updates=n_guesses)
                counted = known & (moved.square().sum(1).sqrt() < 400)
                loss = 0.0
                for number, guess in enumerate(guesses):
                    wrong = (guess.float() - moved).abs().sum(1)
                    loss = loss + 0.8 ** (n_guesses - 1 - number) * wrong[counted].mean()
            edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=1.0)
        schedule.step()
        off = (guesses[-1].detach().float() - moved).square().sum(1).sqrt()[counted].mean()
        print(f"step {step}: loss {loss.item():.3f}, off by {off.item():.2f} pixels")


# --- text about pictures -------------------------------------------------------------------------------------------------------


def llava(edits):
    """LLaVA from transformers is tuned on talks about pictures: all of it in bfloat16, AdamW, a frozen vision tower, answers count."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, get_cosine_schedule_with_warmup

    edits.habits(precision="bf16")
    batch, side, patch, n_words, n_asked = size((12, 224, 14, 320, 64), (2, 16, 4, 10, 4))
    n_patches, words = (side // patch) ** 2, size(32000, 300)
    seeing = CLIPVisionConfig(
        hidden_size=size(768, 32), intermediate_size=size(3072, 64), num_hidden_layers=size(8, 3), num_attention_heads=size(12, 2),
        image_size=side, patch_size=patch,
    )
    reading = LlamaConfig(
        vocab_size=words + 64, hidden_size=size(1024, 32), intermediate_size=size(2816, 64), num_hidden_layers=size(8, 2),
        num_attention_heads=size(16, 4), num_key_value_heads=size(8, 2), max_position_embeddings=2048, use_cache=False,
    )
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=seeing, text_config=reading, image_token_index=words, image_seq_length=n_patches))
    for name, it in model.named_parameters():
        if "vision_tower" in name:
            it.requires_grad_(False)
    run = edits.prepare(model, [it for it in model.modules() if type(it).__name__ == "LlamaDecoderLayer"])
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = edits.optimizer(trained, torch.optim.AdamW, lr=2e-5, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(edits.scheduled(optimizer), 3, 100)

    def load():
        """A picture's places, a question and an answer; each answer ends somewhere else."""
        tokens = torch.randint(3, words, (batch, n_patches + n_words))
        tokens[:, :n_patches] = words
        mask = torch.arange(n_patches + n_words) < torch.randint(n_patches + n_words // 2, n_patches + n_words + 1, (batch, 1))
        labels = tokens.masked_fill(~mask, -100)
        labels[:, : n_patches + n_asked] = -100
        pictures = torch.randn(batch, 3, side, side)
        inputs = {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels, "pixel_values": pictures.to(edits.dtype)}
        return {name: it.to(GPU, non_blocking=True) for name, it in inputs.items()}

    for step in range(STEPS):
        total = 0.0
        for _ in range(edits.accumulate):
            with edits.forward():
                loss = run(**load()).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(optimizer, trained, clip=1.0)
        schedule.step()
        edits.zero_grad(optimizer)
        print({"loss": round(total, 4), "learning_rate": schedule.get_last_lr()[0], "step": step})


# --- films ---------------------------------------------------------------------------------------------------------------------


def video(edits):
    """An R(2+1)D from torchvision tells actions apart: float16 by autocast, SGD and momentum, a new head, tests of several clips."""
    import torchvision

    edits.habits(precision="autocast-fp16")
    batch, n_frames, side, n_labels, n_clips = size((20, 16, 112, 101, 3), (2, 2, 16, 5, 2))
    if SMALL:
        parts = torchvision.models.video.resnet
        model = parts.VideoResNet(parts.BasicBlock, [parts.Conv3DSimple] * 4, [1, 1, 1, 1], parts.BasicStem)
    else:
        model = torchvision.models.video.r2plus1d_18()
    model.fc = nn.Linear(model.fc.in_features, n_labels)
    run = edits.prepare(model, [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer])
    body = [it for name, it in model.named_parameters() if it.requires_grad and not name.startswith("fc")]
    groups = [{"params": body}, {"params": list(model.fc.parameters()), "lr": 0.01}]
    optimizer = edits.optimizer(groups, torch.optim.SGD, lr=0.001, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(edits.scheduled(optimizer), [4, 8], gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    middle, spread = (torch.tensor(it, device=GPU).view(1, 3, 1, 1, 1) for it in ((0.432, 0.395, 0.376), (0.228, 0.221, 0.217)))

    def films(n):
        """Films as they are decoded: frames of bytes, channels last."""
        frames = torch.randint(0, 256, (n, n_frames, side, side, 3), dtype=torch.uint8).to(GPU, non_blocking=True)
        return ((frames.permute(0, 4, 1, 2, 3).float() / 255 - middle) / spread).to(edits.dtype)

    for step in range(STEPS):
        run.train()
        n_right = 0
        for _ in range(edits.accumulate):
            clips, labels = films(batch), torch.randint(0, n_labels, (batch,)).to(GPU)
            with edits.forward():
                logits = run(clips)
                loss = criterion(logits, labels)
            edits.backward(loss)
            n_right += (logits.argmax(1) == labels).sum().item()
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        schedule.step()
        if step % 3 == 2:
            run.eval()
            with torch.inference_mode(), edits.autocast():
                chances = run(films(batch // 2 * n_clips)).float().softmax(1).view(-1, n_clips, n_labels).mean(1)
            right, sure = n_right / batch / edits.accumulate, chances.amax(1).mean().item()
            print(f"{step}: loss {loss.item():.3f}, right {right:.3f}, sure {sure:.3f}")


# --- pictures with holes -------------------------------------------------------------------------------------------------------


def mae(edits):
    """A masked autoencoder from transformers fills in pictures: bfloat16 by autocast, fused AdamW, small vectors do not decay."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    edits.habits(precision="autocast-bf16")
    batch, side = size((128, 224), (2, 32))
    config = ViTMAEConfig(
        image_size=side, patch_size=size(16, 8), hidden_size=size(768, 32), num_hidden_layers=12, num_attention_heads=size(12, 2),
        intermediate_size=size(3072, 64), decoder_hidden_size=size(512, 16), decoder_num_hidden_layers=size(8, 2),
        decoder_num_attention_heads=size(16, 2), decoder_intermediate_size=size(2048, 32), mask_ratio=0.75, norm_pix_loss=True,
    )
    model = ViTMAEForPreTraining(config)
    run = edits.prepare(model, [it for it in model.modules() if type(it).__name__ == "ViTMAELayer"])
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.05},
        {"params": [it for it in trained if it.ndim <= 1], "weight_decay": 0.0},
    ]
    base = 1.5e-4 * batch / 256
    optimizer = edits.optimizer(groups, torch.optim.AdamW, lr=base, betas=(0.9, 0.95), fused=True)
    middle, spread = (torch.tensor(it, device=GPU).view(1, 3, 1, 1) for it in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for step in range(STEPS):
        for group in edits.scheduled(optimizer).param_groups:
            group["lr"] = base * min(1.0, (step + 1) / 40)
        total = 0.0
        for _ in range(edits.accumulate):
            pictures = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8).to(GPU, non_blocking=True)
            pictures = torch.where(torch.rand(batch, 1, 1, 1, device=GPU) < 0.5, pictures, pictures.flip(3))
            pictures = (pictures.float() / 255).sub_(middle).div_(spread).to(edits.dtype)
            with edits.forward():
                loss = run(pixel_values=pictures).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        print(f"[{step}] loss: {total:.4f} lr: {edits.scheduled(optimizer).param_groups[0]['lr']:.6f}")


PROGRAMS = {it.__name__: it for it in (forecast, nerf, dpo, distill, policy, codec, raft, llava, video, mae)}
