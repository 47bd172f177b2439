"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `sight` and `translate` need transformers, `views` timm, `video` and
`flow` torchvision; without them these raise ImportError.

The edits that `edits.py` does not know are those of edits_programs5.py; the optimizer on the CPU is that of edits_programs8.py.
"""
import copy, math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "play": ["--optimizer sgd", "--adam fused", "--set-to-none no", "--precision autocast-bf16 --accumulate 4"],
    "points": ["--set-to-none yes", "--optimizer adamw", "--checkpoint every:2", "--precision autocast-fp16 --accumulate 4"],
    "scene": ["--accumulate 4", "--adam for-loop", "--precision autocast-fp16", "--offload activations"],
    "voice": ["--precision autocast-bf16", "--optimizer momentum", "--offload optimizer", "--checkpoint all --adam fused"],
    "translate": ["--optimizer adamw", "--precision bf16", "--freeze 0.5", "--lora 8 --checkpoint all"],
    "sight": ["--lora 16", "--adam foreach", "--checkpoint selective", "--offload optimizer --set-to-none no"],
    "folds": ["--checkpoint all", "--precision fp32", "--optimizer adafactor", "--checkpoint layers:0..2 --offload activations"],
    "views": ["--optimizer adam", "--precision bf16", "--checkpoint every:2", "--precision fp32 --checkpoint all"],
    "video": ["--checkpoint all", "--precision fp32", "--freeze-up-to blocks.2", "--optimizer adam8bit --set-to-none no"],
    "flow": ["--accumulate 4", "--precision autocast-bf16", "--offload activations", "--optimizer momentum"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "play": 5, "points": 5, "scene": 5, "voice": 6, "translate": 6, "sight": 7, "folds": 5, "views": 5, "video": 6, "flow": 7,
}

import torch
from torch import nn
from torch.nn import functional as F

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


def pinned(x):
    """What a loader with pinned memory gives."""
    return x.pin_memory() if GPU == "cuda" else x


# A game is learned by playing: many games at once on the GPU, what was seen is kept as bytes, several passes over it (PPO).


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv0 = nn.Conv2d(width, width, 3, padding=1)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        y = self.conv0(F.relu(x))
        return x + self.conv1(F.relu(y))


class Stage(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.res0, self.res1 = Residual(n_out), Residual(n_out)

    def forward(self, x):
        x = F.max_pool2d(self.conv(x), 3, 2, 1)
        return self.res1(self.res0(x))


def orthogonal(layer, gain=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Player(nn.Module):
    def __init__(self, widths, n, n_actions, hidden):
        super().__init__()
        stages, before = [], 4
        for width in widths:
            stages.append(Stage(before, width))
            before, n = width, (n + 1) // 2
        self.seen = nn.Sequential(*stages, nn.ReLU(), nn.Flatten(), orthogonal(nn.Linear(before * n * n, hidden)), nn.ReLU())
        self.actor, self.critic = orthogonal(nn.Linear(hidden, n_actions), 0.01), orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, frames, action=None):
        hidden = self.seen(frames / 255.0)
        chances = torch.distributions.Categorical(logits=self.actor(hidden).float())
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(hidden).float().squeeze(-1)


class Games:
    """Many games of the same kind: the last four frames of each, points, and whether it has just begun again."""

    def __init__(self, n_games, n):
        self.frames = torch.zeros(n_games, 4, n, n, dtype=torch.uint8, device=GPU)

    def step(self, action):
        n_games, _, n, _ = self.frames.shape
        new = torch.randint(256, (n_games, 1, n, n), dtype=torch.uint8, device=GPU)
        done = torch.rand(n_games, device=GPU) < 0.01
        self.frames = torch.cat([self.frames[:, 1:], new], 1) * ~done[:, None, None, None]
        return self.frames, (action == new[:, 0, 0, 0] % 3).float(), done.float()


def play(edits):
    edits.habits()
    n_games, n_time, n, n_parts = size(128, 4), size(64, 8), size(84, 16), 4
    discount, trace, clip, rate = 0.99, 0.95, 0.1, 2.5e-4
    agent = Player(size((16, 32, 32), (4, 8)), n, 15, size(256, 16))
    agent = prepare(edits, agent, [])
    opt = optimizer(edits, agent.parameters(), torch.optim.Adam, lr=rate, eps=1e-5)
    games = Games(n_games, n)
    frames, began = games.frames, torch.zeros(n_games, device=GPU)
    kept = torch.zeros(n_time, n_games, 4, n, n, dtype=torch.uint8, device=GPU)
    actions = torch.zeros(n_time, n_games, dtype=torch.long, device=GPU)
    chances, rewards, begins, values = (torch.zeros(n_time, n_games, device=GPU) for _ in range(4))
    n_updates = 2
    for update in range(n_updates):
        # The rate falls.
        for group in rated(opt).param_groups:
            group["lr"] = rate * (1 - update / 100)
        for t in range(n_time):
            kept[t], begins[t] = frames, began
            with torch.no_grad(), edits.autocast():
                action, chance, _, value = agent(frames)
            actions[t], chances[t], values[t] = action, chance, value
            frames, rewards[t], began = games.step(action)
        # How much better than expected it went.
        with torch.no_grad():
            with edits.autocast():
                after = agent(frames)[3]
            better, last = torch.zeros_like(rewards), 0.0
            for t in reversed(range(n_time)):
                alive = 1 - (began if t == n_time - 1 else begins[t + 1])
                then = after if t == n_time - 1 else values[t + 1]
                surprise = rewards[t] + discount * then * alive - values[t]
                better[t] = last = surprise + discount * trace * alive * last
            wanted = better + values
        all_frames = kept.flatten(0, 1)
        all_actions, all_chances, all_better, all_wanted, all_values = (
            it.flatten() for it in (actions, chances, better, wanted, values)
        )
        for epoch in range(2):
            order = torch.randperm(n_time * n_games, device=GPU)
            for number, part in enumerate(order.chunk(n_parts)):
                with edits.forward():
                    _, chance, entropy, value = agent(all_frames[part], all_actions[part])
                    log_ratio = chance - all_chances[part]
                    ratio = log_ratio.exp()
                    gain = all_better[part]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    loss_policy = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip)).mean()
                    near = all_values[part] + (value - all_values[part]).clamp(-clip, clip)
                    loss_value = 0.5 * torch.max((value - all_wanted[part]) ** 2, (near - all_wanted[part]) ** 2).mean()
                    loss = loss_policy + 0.5 * loss_value - 0.01 * entropy.mean()
                edits.backward(loss)
                if (number + 1) % edits.accumulate == 0:
                    edits.step(opt, agent.parameters(), clip=0.5)
                    edits.zero_grad(opt)
        with torch.no_grad():
            away = ((ratio - 1) - log_ratio).mean()
        print(f"{update} policy {loss_policy.item():.4f}, value {loss_value.item():.4f}, away {away.item():.5f}")


# The parts of things given as points: each point looks at those nearest to it, which change from layer to layer (DGCNN).


class Edges(nn.Module):
    """Convolutions over the pairs of a point and one near it; of these the largest is kept."""

    def __init__(self, n_in, widths, k):
        super().__init__()
        self.k = k
        layers, before = [], 2 * n_in
        for width in widths:
            layers += [nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.2, inplace=True)]
            before = width
        self.convs = nn.Sequential(*layers)

    def forward(self, x):
        n_batch, n_in, n = x.shape
        x = x.transpose(1, 2).contiguous()
        with torch.no_grad():
            near = torch.cdist(x.float(), x.float()).topk(self.k, largest=False).indices
            near = near + torch.arange(n_batch, device=x.device)[:, None, None] * n
        there = x.view(-1, n_in)[near.flatten()].view(n_batch, n, self.k, n_in)
        here = x[:, :, None].expand(-1, -1, self.k, -1)
        pairs = torch.cat([there - here, here], -1).permute(0, 3, 1, 2).contiguous()
        return self.convs(pairs).amax(-1)


class Parts(nn.Module):
    def __init__(self, width, n_wide, k, n_things, n_parts):
        super().__init__()
        self.edges = nn.ModuleList([Edges(3, (width, width), k), Edges(width, (width, width), k), Edges(width, (width,), k)])
        self.wide, self.thing = self.conv(3 * width, n_wide), self.conv(n_things, width)
        self.head = nn.Sequential(
            self.conv(n_wide + 4 * width, 4 * width), nn.Dropout(0.5), self.conv(4 * width, 4 * width), nn.Dropout(0.5),
            self.conv(4 * width, 2 * width), nn.Conv1d(2 * width, n_parts, 1, bias=False),
        )

    @staticmethod
    def conv(n_in, n_out):
        return nn.Sequential(nn.Conv1d(n_in, n_out, 1, bias=False), nn.BatchNorm1d(n_out), nn.LeakyReLU(0.2, inplace=True))

    def forward(self, x, thing):
        n, found = x.size(2), []
        for edges in self.edges:
            x = edges(x)
            found.append(x)
        whole = self.wide(torch.cat(found, 1)).amax(2, keepdim=True)
        whole = torch.cat([whole, self.thing(thing[:, :, None])], 1).expand(-1, -1, n)
        return self.head(torch.cat([whole, *found], 1))


def points(edits):
    edits.habits(set_to_none="no")
    n_clouds, n_batch, n, n_things, n_parts = size(192, 12), size(16, 4), size(2048, 64), 16, 50
    model = Parts(size(64, 8), size(1024, 32), size(20, 4), n_things, n_parts)
    model = prepare(edits, model, model.edges)
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), 200, eta_min=1e-3)
    # All clouds lie on the GPU.
    clouds = torch.randn(n_clouds, n, 3).to(GPU)
    things = torch.randint(n_things, (n_clouds,)).to(GPU)
    truth = torch.randint(n_parts, (n_clouds, n)).to(GPU)

    def batches(n_batches):
        for chosen in torch.randperm(n_clouds, device=GPU).split(n_batch)[:n_batches]:
            x = clouds[chosen]
            # Larger or smaller, and somewhere else.
            x = x * (2 / 3 + torch.rand(len(x), 1, 3, device=GPU) * 5 / 6) + torch.rand(len(x), 1, 3, device=GPU) * 0.4 - 0.2
            yield x.transpose(1, 2), F.one_hot(things[chosen], n_things).float(), truth[chosen]

    for epoch in range(2):
        model.train()
        total = 0.0
        for _ in range(2):
            edits.zero_grad(opt)
            for x, thing, parts in batches(edits.accumulate):
                with edits.forward():
                    logits = model(x, thing)
                    loss = F.cross_entropy(logits.float(), parts, label_smoothing=0.2)
                edits.backward(loss)
                total += loss.item() / edits.accumulate
            edits.step(opt)
        schedule.step()
        model.eval()
        right = []
        with torch.no_grad(), edits.autocast():
            for x, thing, parts in batches(2):
                right.append((model(x, thing).argmax(1) == parts).float().mean())
        print(f"{epoch} loss {total / 2:.3f}, {torch.stack(right).mean().item():.3f} right")


# A scene from photographs: what each place of a ray looks like, seldom and often sampled by two networks (NeRF).


def wavy(x, n):
    """Sines and cosines of coordinates, beside the coordinates."""
    angles = (x[..., None, :] * (2.0 ** torch.arange(n, device=x.device))[:, None]).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


class Field(nn.Module):
    def __init__(self, width, n_deep, n_place, n_look):
        super().__init__()
        self.n_place, self.n_look, self.again = n_place, n_look, n_deep // 2
        place, look = 3 + 6 * n_place, 3 + 6 * n_look
        self.layers = nn.ModuleList(
            nn.Linear(place if number == 0 else width + place if number == self.again else width, width) for number in range(n_deep)
        )
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.look, self.color = nn.Linear(width + look, width // 2), nn.Linear(width // 2, 3)

    def forward(self, places, looks):
        place = x = wavy(places, self.n_place)
        for number, layer in enumerate(self.layers):
            if number == self.again:
                x = torch.cat([place, x], -1)
            x = F.relu(layer(x))
        density = self.density(x)
        look = wavy(looks, self.n_look)[:, None].expand(-1, places.size(1), -1)
        x = F.relu(self.look(torch.cat([self.feature(x), look], -1)))
        return self.color(x).float(), density.float().squeeze(-1)


def shown(color, density, far, ray):
    """What is seen along rays before white, and how much each place says."""
    gaps = torch.cat([far[:, 1:] - far[:, :-1], torch.full_like(far[:, :1], 1e3)], 1) * ray.norm(dim=1, keepdim=True)
    alpha = 1 - torch.exp(-F.relu(density) * gaps)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    weights = alpha * through
    seen = (weights[..., None] * color.sigmoid()).sum(1)
    return seen + (1 - weights.sum(1, keepdim=True)), weights


@torch.no_grad()
def closer(far, weights, n):
    """More places where the first ones say much."""
    middle = (far[:, 1:] + far[:, :-1]) / 2
    weights = weights[:, 1:-1] + 1e-5
    share = torch.cumsum(weights / weights.sum(1, keepdim=True), 1)
    share = torch.cat([torch.zeros_like(share[:, :1]), share], 1)
    u = torch.rand(len(far), n, device=far.device)
    above = torch.searchsorted(share, u, right=True).clamp(max=share.size(1) - 1)
    below = (above - 1).clamp(min=0)
    share0, share1 = share.gather(1, below), share.gather(1, above)
    place0, place1 = middle.gather(1, below), middle.gather(1, above)
    part = (u - share0) / (share1 - share0).clamp(min=1e-5)
    return torch.cat([far, place0 + part * (place1 - place0)], 1).sort(1).values


class Scene(nn.Module):
    def __init__(self, width, n_deep, n_coarse, n_fine):
        super().__init__()
        self.n_coarse, self.n_fine = n_coarse, n_fine
        self.coarse, self.fine = Field(width, n_deep, 10, 4), Field(width, n_deep, 10, 4)

    def forward(self, start, ray):
        look = F.normalize(ray, dim=1)
        edges = torch.linspace(2.0, 6.0, self.n_coarse + 1, device=ray.device)
        far = edges[:-1] + torch.rand(len(ray), self.n_coarse, device=ray.device) * (edges[1:] - edges[:-1])
        first, weights = shown(*self.coarse(start[:, None] + ray[:, None] * far[..., None], look), far, ray)
        far = closer(far, weights.detach(), self.n_fine)
        second, _ = shown(*self.fine(start[:, None] + ray[:, None] * far[..., None], look), far, ray)
        return first, second


def scene(edits):
    edits.habits()
    n_photos, n, n_rays = size(100, 4), size(400, 16), size(1280, 32)
    model = Scene(size(256, 16), size(8, 4), size(64, 8), size(128, 8))
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=5e-4)
    # All photographs and where they were taken from.
    photos = torch.rand(n_photos, n, n, 3).to(GPU)
    turns = torch.linalg.qr(torch.randn(n_photos, 3, 3))[0].to(GPU)
    starts = turns[:, :, 2] * 4

    def rays(chosen):
        photo, y, x = chosen // (n * n), chosen // n % n, chosen % n
        ray = torch.stack([(x - n / 2) / (1.4 * n), -(y - n / 2) / (1.4 * n), -torch.ones_like(x)], -1)
        return starts[photo], (turns[photo] @ ray[..., None]).squeeze(-1)

    for step in range(5):
        for _ in range(edits.accumulate):
            chosen = torch.randint(n_photos * n * n, (n_rays,), device=GPU)
            start, ray = rays(chosen)
            target = photos.view(-1, 3)[chosen]
            with edits.forward():
                first, second = model(start, ray)
                loss_fine = F.mse_loss(second, target)
                loss = loss_fine + F.mse_loss(first, target)
            edits.backward(loss)
        edits.step(opt)
        edits.zero_grad(opt)
        for group in rated(opt).param_groups:
            group["lr"] = 5e-4 * 0.1 ** ((step + 1) / 250_000)
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f}, {-10 * math.log10(loss_fine.item()):.2f} dB")
    # A photograph that it makes itself, piece by piece.
    model.eval()
    with torch.no_grad(), edits.autocast():
        pieces = [model(*rays(piece))[1].cpu() for piece in torch.arange(n * n // 4, device=GPU).split(1024)]
    print(f"photo {torch.cat(pieces).mean().item():.3f}")


# A voice from what is heard of it: transposed convolutions against judges of periods and of scales, two optimizers (HiFi-GAN).


def normed(layer):
    nn.init.normal_(layer.weight, 0.0, 0.01)
    return nn.utils.parametrizations.weight_norm(layer)


class Dilated(nn.Module):
    def __init__(self, width, k):
        super().__init__()
        self.wide = nn.ModuleList(normed(nn.Conv1d(width, width, k, padding=(k - 1) * d // 2, dilation=d)) for d in (1, 3, 5))
        self.plain = nn.ModuleList(normed(nn.Conv1d(width, width, k, padding=k // 2)) for _ in range(3))

    def forward(self, x):
        for wide, plain in zip(self.wide, self.plain):
            y = wide(F.leaky_relu(x, 0.1))
            x = x + plain(F.leaky_relu(y, 0.1))
        return x


class Voice(nn.Module):
    def __init__(self, n_heard, width, rates, kernels=(3, 7, 11)):
        super().__init__()
        self.n_kernels = len(kernels)
        self.enter = nn.utils.parametrizations.weight_norm(nn.Conv1d(n_heard, width, 7, padding=3))
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            self.ups.append(normed(nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, rate // 2)))
            width //= 2
            self.blocks.extend(Dilated(width, k) for k in kernels)
        self.leave = normed(nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, x):
        x = self.enter(x)
        for number, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in self.blocks[number * self.n_kernels : (number + 1) * self.n_kernels]) / self.n_kernels
        return torch.tanh(self.leave(F.leaky_relu(x)))


class PeriodJudge(nn.Module):
    """The sound as rows of a period."""

    def __init__(self, period, widths):
        super().__init__()
        self.period, layers, before = period, [], 1
        for number, width in enumerate(widths):
            stride = 3 if number < len(widths) - 1 else 1
            layers.append(nn.utils.parametrizations.weight_norm(nn.Conv2d(before, width, (5, 1), (stride, 1), (2, 0))))
            before = width
        self.layers = nn.ModuleList(layers)
        self.leave = nn.utils.parametrizations.weight_norm(nn.Conv2d(before, 1, (3, 1), padding=(1, 0)))

    def forward(self, x):
        x = F.pad(x, (0, -x.size(2) % self.period), "reflect") if x.size(2) % self.period else x
        x, seen = x.view(len(x), 1, -1, self.period), []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            seen.append(x)
        x = self.leave(x)
        return x.flatten(1), [*seen, x]


class ScaleJudge(nn.Module):
    def __init__(self, w):
        super().__init__()
        shapes = [(1, w, 15, 1, 1), (w, w, 41, 2, 4), (w, 2 * w, 41, 2, 8), (2 * w, 4 * w, 41, 4, 8), (4 * w, 8 * w, 41, 4, 8), (8 * w, 8 * w, 5, 1, 1)]
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, k, stride, k // 2, groups=groups)) for a, b, k, stride, groups in shapes
        )
        self.leave = nn.utils.parametrizations.weight_norm(nn.Conv1d(8 * w, 1, 3, padding=1))

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            seen.append(x)
        x = self.leave(x)
        return x.flatten(1), [*seen, x]


class Judges(nn.Module):
    def __init__(self, periods, widths, width):
        super().__init__()
        self.periods = nn.ModuleList(PeriodJudge(it, widths) for it in periods)
        self.scales = nn.ModuleList(ScaleJudge(width) for _ in range(3))

    def forward(self, x):
        said = [judge(x) for judge in self.periods]
        for number, judge in enumerate(self.scales):
            x = F.avg_pool1d(x, 4, 2, 2) if number else x
            said.append(judge(x))
        return [it[0] for it in said], [it[1] for it in said]


class Heard(nn.Module):
    """The logarithm of how loud each pitch is."""

    def __init__(self, n_fft, hop, n_heard, rate=22050):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        top = 2595 * math.log10(1 + rate / 2 / 700)
        corners = 700 * (10 ** (torch.linspace(0, top, n_heard + 2) / 2595) - 1)
        pitch = torch.linspace(0, rate / 2, n_fft // 2 + 1)
        rise = (pitch - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
        fall = (corners[2:, None] - pitch) / (corners[2:] - corners[1:-1])[:, None]
        self.register_buffer("filters", torch.minimum(rise, fall).clamp(min=0))
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, x):
        x = F.pad(x.float(), ((self.n_fft - self.hop) // 2,) * 2, "reflect").squeeze(1)
        waves = torch.view_as_real(torch.stft(x, self.n_fft, self.hop, window=self.window, center=False, return_complex=True))
        return (self.filters @ (waves.square().sum(-1) + 1e-9).sqrt()).clamp(min=1e-5).log()


def voice(edits):
    edits.habits()
    n_batch, rates, n_heard = size(16, 2), size((8, 8, 2, 2), (4, 4)), size(80, 8)
    hop = math.prod(rates)
    model = Voice(n_heard, size(256, 16), rates)
    model = prepare(edits, model, model.blocks)
    judges = Judges(size((2, 3, 5, 7, 11), (2, 3)), size((32, 128, 512, 1024, 1024), (4, 8)), size(128, 8)).to(GPU).train()
    heard = Heard(4 * hop, hop, n_heard).to(GPU)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=2e-4, betas=(0.8, 0.99))
    opt_judges = optimizer(edits, judges.parameters(), torch.optim.AdamW, lr=2e-4, betas=(0.8, 0.99))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(rated(it), gamma=0.999) for it in (opt, opt_judges)]
    for epoch in range(2):
        for _ in range(2):
            sound = pinned(torch.rand(n_batch, 1, 32 * hop) * 2 - 1).to(GPU, non_blocking=True)
            x = heard(sound)
            with edits.forward():
                made = model(x)
            # The judges.
            edits.zero_grad(opt_judges)
            with edits.forward():
                real, _ = judges(sound)
                fake, _ = judges(made.detach())
                loss_judges = sum(((1 - r) ** 2).mean() + (f**2).mean() for r, f in zip(real, fake))
            edits.backward(loss_judges)
            edits.step(opt_judges)
            # The voice.
            edits.zero_grad(opt)
            with edits.forward():
                loss_heard = F.l1_loss(x, heard(made)) * 45
                _, seen_real = judges(sound)
                fake, seen_fake = judges(made)
                loss_seen = 2 * sum((r - f).abs().mean() for a, b in zip(seen_real, seen_fake) for r, f in zip(a, b))
                loss = sum(((1 - it) ** 2).mean() for it in fake) + loss_seen + loss_heard
            edits.backward(loss)
            edits.step(opt)
        for it in schedules:
            it.step()
        print(f"{epoch} voice {loss.item():.3f}, heard {loss_heard.item() / 45:.3f}, judges {loss_judges.item():.3f}")


# Translation: a Marian of transformers, batches of as many words as fit, a smoothed loss, Adafactor; some sentences are translated.


def smoothed(logits, labels, part=0.1):
    """As the trainer of transformers does it: the other words get a part of the chance."""
    chances = -F.log_softmax(logits, dim=-1)
    mask = labels.eq(-100)[..., None]
    right = chances.gather(-1, labels.clamp(min=0)[..., None]).masked_fill(mask, 0.0)
    others = chances.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(mask, 0.0)
    n = mask.numel() - mask.long().sum()
    return (1 - part) * right.sum() / n + part * others.sum() / (n * logits.size(-1))


def translate(edits):
    from transformers import MarianConfig, MarianMTModel, get_inverse_sqrt_schedule
    edits.habits()
    n_words, pad = size(58101, 120), size(58100, 119)
    small = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
    usual = dict(d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    heads = size(8, 4)
    config = MarianConfig(
        vocab_size=n_words, pad_token_id=pad, eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=pad, activation_function="swish",
        scale_embedding=True, max_position_embeddings=512, encoder_attention_heads=heads, decoder_attention_heads=heads,
        tie_word_embeddings=True, **size(usual, small),
    )
    model = MarianMTModel(config)
    model = prepare(edits, model, named(model, "MarianEncoderLayer") + named(model, "MarianDecoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.Adafactor, lr=1e-3)
    schedule = get_inverse_sqrt_schedule(rated(opt), num_warmup_steps=20)
    # Sentences of similar lengths come together: many short ones or few long ones.
    shapes = size([(64, 48), (30, 100), (96, 32), (50, 60)], [(4, 8), (2, 14), (6, 6), (3, 9)])

    def sentences(n, longest):
        words = torch.randint(1, pad, (n, longest))
        lengths = torch.randint(longest * 3 // 4, longest + 1, (n, 1))
        lengths[0] = longest
        words[torch.arange(longest) == lengths - 1] = 0
        return words, torch.arange(longest) < lengths

    model.train()
    for step in range(5):
        said = 0.0
        for micro in range(edits.accumulate):
            n, longest = shapes[(step + micro) % len(shapes)]
            words, mask = sentences(n, longest)
            labels, there = sentences(n, longest + longest // 8)
            labels = labels.masked_fill(~there, -100)
            before = torch.cat([torch.full((n, 1), pad), labels[:, :-1]], 1)
            before = before.masked_fill(before == -100, pad)
            words, mask = pinned(words.masked_fill(~mask, pad)), pinned(mask.long())
            words, mask, labels, before = (it.to(GPU, non_blocking=True) for it in (words, mask, labels, before))
            with edits.forward():
                logits = model(input_ids=words, attention_mask=mask, decoder_input_ids=before, use_cache=False).logits
                loss = smoothed(logits, labels)
            del logits
            edits.backward(loss)
            said += loss.item() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    model.eval()
    words, mask = sentences(size(16, 2), size(40, 6))
    with torch.no_grad(), edits.autocast():
        new = model.generate(
            input_ids=words.masked_fill(~mask, pad).to(GPU), attention_mask=mask.long().to(GPU), max_new_tokens=size(24, 3), num_beams=1,
            do_sample=False,
        )
    print(f"loss {said:.3f}, {new.ne(pad).sum().item()} words")


# Talk about pictures: a Llava of transformers, the part that sees is frozen, only what is answered counts, two batches for a step.


def sight(edits):
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config
    from transformers import get_cosine_schedule_with_warmup
    edits.habits(precision="autocast-bf16", accumulate=2)
    n_words, n_batch, longest, n, patch = size(65536, 150), size(6, 2), size(192, 12), size(224, 28), 14
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    seeing = CLIPVisionConfig(
        image_size=n, patch_size=patch,
        **size(dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8), small),
    )
    talking = Qwen2Config(
        vocab_size=n_words, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
        **size(dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=12), small),
    )
    picture = n_words - 1
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=seeing, text_config=talking, image_token_index=picture))
    tower = next(it for name, it in model.named_modules() if name.endswith("vision_tower"))
    tower.requires_grad_(False)
    model = prepare(edits, model, named(model, "Qwen2DecoderLayer"))
    tower.eval()
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.01},
        {"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=2e-5, fused=True)
    schedule = get_cosine_schedule_with_warmup(rated(opt), 10, 1000)
    n_seen = (n // patch) ** 2
    for step in range(4):
        said = torch.zeros((), device=GPU)
        for _ in range(edits.accumulate):
            words = torch.randint(1, n_words - 1, (n_batch, longest))
            asked = torch.arange(longest) < torch.randint(longest // 4, longest // 2, (n_batch, 1))
            there = torch.arange(longest) < torch.randint(longest * 2 // 3, longest + 1, (n_batch, 1))
            seen = torch.full((n_batch, n_seen), picture)
            # The picture comes first; neither it nor what is asked counts.
            tokens = torch.cat([seen, words.masked_fill(~there, 0)], 1)
            labels = torch.cat([torch.full_like(seen, -100), words.masked_fill(asked | ~there, -100)], 1)
            mask = torch.cat([torch.ones_like(seen), there.long()], 1)
            images = torch.randn(n_batch, 3, n, n)
            batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
            batch = {name: pinned(it).to(GPU, non_blocking=True) for name, it in batch.items()}
            with edits.forward():
                loss = model(**batch, pixel_values=images.to(GPU, edits.dtype)).loss
            edits.backward(loss)
            said += loss.detach() / edits.accumulate
        edits.step(opt, trained, clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        print(f"{step} loss {said.item():.3f}, rate {schedule.get_last_lr()[0]:.2e}")


# How a protein folds: what each pair of residues knows of each other, by way of every third one; what came out goes in again.


class Multiply(nn.Module):
    """A pair learns from the edges of both to a third; outgoing or incoming."""

    def __init__(self, width, how):
        super().__init__()
        self.how = how
        self.norm, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a, self.b, self.gate_a, self.gate_b = (nn.Linear(width, width) for _ in range(4))
        self.out, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z):
        z = self.norm(z)
        a, b = self.gate_a(z).sigmoid() * self.a(z), self.gate_b(z).sigmoid() * self.b(z)
        x = torch.einsum(self.how, a, b) / math.sqrt(z.size(1))
        return self.gate(z).sigmoid() * self.out(self.norm_out(x))


class Attend(nn.Module):
    """Attention among the pairs that begin with the same residue; the third edge says how much."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm, self.bias = nn.LayerNorm(width), nn.Linear(width, n_heads, bias=False)
        self.qkv, self.gate, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z):
        z = self.norm(z)
        q, k, v = self.qkv(z).unflatten(-1, (3, self.n_heads, -1)).permute(3, 0, 1, 4, 2, 5)
        weights = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + self.bias(z).permute(0, 3, 1, 2)[:, None]
        x = (weights.softmax(-1) @ v).transpose(2, 3).flatten(-2)
        return self.out(self.gate(z).sigmoid() * x)


class Residues(nn.Module):
    def __init__(self, width, n_pair, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm, self.norm_pair, self.bias = nn.LayerNorm(width), nn.LayerNorm(n_pair), nn.Linear(n_pair, n_heads, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, s, z):
        q, k, v = self.qkv(self.norm(s)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + self.bias(self.norm_pair(z)).permute(0, 3, 1, 2)
        return self.out((weights.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def transition(width, n=4):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, n * width), nn.ReLU(), nn.Linear(n * width, width))


class Fold(nn.Module):
    def __init__(self, width, n_pair):
        super().__init__()
        self.single, self.think = Residues(width, n_pair, 8), transition(width)
        self.left, self.right = nn.Linear(width, n_pair), nn.Linear(width, n_pair)
        self.outgoing, self.incoming = Multiply(n_pair, "bikc,bjkc->bijc"), Multiply(n_pair, "bkic,bkjc->bijc")
        self.starting, self.ending, self.pair = Attend(n_pair, 4), Attend(n_pair, 4), transition(n_pair)

    def dropped(self, x, dim):
        """The same is forgotten along a dimension."""
        shape = list(x.shape)
        shape[dim] = 1
        return x * F.dropout(x.new_ones(shape), 0.25, self.training)

    def forward(self, s, z):
        s = s + self.single(s, z)
        s = s + self.think(s)
        z = z + self.left(s)[:, :, None] * self.right(s)[:, None]
        z = z + self.dropped(self.outgoing(z), 1)
        z = z + self.dropped(self.incoming(z), 1)
        z = z + self.dropped(self.starting(z), 1)
        z = z + self.dropped(self.ending(z.transpose(1, 2)).transpose(1, 2), 2)
        return s, z + self.pair(z)


class Folds(nn.Module):
    def __init__(self, width, n_pair, n_layers, n_bins):
        super().__init__()
        self.kinds, self.profile = nn.Embedding(22, width), nn.Linear(44, width)
        self.left, self.right, self.apart = nn.Embedding(22, n_pair), nn.Embedding(22, n_pair), nn.Embedding(65, n_pair)
        self.again_s, self.again_z = nn.LayerNorm(width), nn.LayerNorm(n_pair)
        self.layers = nn.ModuleList(Fold(width, n_pair) for _ in range(n_layers))
        self.bins, self.words = nn.Linear(n_pair, n_bins), nn.Linear(width, 22)

    def forward(self, kinds, profile, places, before=None):
        apart = (places[:, :, None] - places[:, None]).clamp(-32, 32) + 32
        s = self.kinds(kinds) + self.profile(profile)
        z = self.left(kinds)[:, :, None] + self.right(kinds)[:, None] + self.apart(apart)
        if before is not None:
            s, z = s + self.again_s(before[0]), z + self.again_z(before[1])
        for layer in self.layers:
            s, z = layer(s, z)
        return s, z

    def heads(self, s, z):
        far = self.bins(z)
        return far + far.transpose(1, 2), self.words(s)


def folds(edits):
    edits.habits(precision="autocast-bf16")
    n, n_bins = size(224, 12), size(64, 8)
    model = Folds(size(256, 16), size(64, 8), size(6, 4), n_bins)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min(1.0, (step + 1) / 1000))
    mean = {name: it.detach().clone() for name, it in model.named_parameters()}
    edges = torch.linspace(2.0, 22.0, n_bins - 1, device=GPU)
    for step in range(4):
        for _ in range(edits.accumulate):
            kinds, profile = torch.randint(20, (1, n)), torch.rand(1, n, 44)
            hidden = torch.rand(1, n) < 0.15
            places = torch.arange(n)[None] + torch.randint(200, (1, 1))
            atoms = torch.randn(1, n, 3).cumsum(1) * 2
            kinds, profile, hidden, places, atoms = (it.to(GPU) for it in (kinds, profile, hidden, places, atoms))
            shown_kinds, before = kinds.masked_fill(hidden, 21), None
            # Some rounds are not learned from.
            with torch.no_grad(), edits.autocast():
                for _ in range(step % 3):
                    before = model(shown_kinds, profile, places, before)
            with edits.forward():
                far, words = model.heads(*model(shown_kinds, profile, places, before))
                true = torch.bucketize(torch.cdist(atoms, atoms), edges)
                loss_far = F.cross_entropy(far.float().flatten(0, 2), true.flatten())
                loss_words = (F.cross_entropy(words.float().transpose(1, 2), kinds, reduction="none") * hidden).sum() / (hidden.sum() + 1)
                loss = 0.3 * loss_far + 2 * loss_words
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=0.1)
        schedule.step()
        edits.zero_grad(opt)
        with torch.no_grad():
            for name, it in model.named_parameters():
                mean[name].sub_((mean[name] - it) * 0.001)
        print(f"{step} far {loss_far.item():.3f}, words {loss_words.item():.3f}")


# Two views of a picture are alike, those of others are not: a RegNet of timm, a slow copy of it, a queue of what it saw (MoCo).


class Viewer(nn.Module):
    def __init__(self, name, width):
        super().__init__()
        from timm import create_model
        self.body = create_model(name, num_classes=0)
        n = self.body.num_features
        self.head = nn.Sequential(nn.Linear(n, n), nn.ReLU(inplace=True), nn.Linear(n, width))

    def forward(self, x):
        return F.normalize(self.head(self.body(x)).float(), dim=1)


@torch.no_grad()
def view(images, n):
    """Another part of each picture, perhaps mirrored, darker, or without color; on the GPU."""
    n_batch = len(images)
    zoom = 0.3 + 0.7 * torch.rand(n_batch, device=GPU)
    flip = torch.where(torch.rand(n_batch, device=GPU) < 0.5, -1.0, 1.0)
    moved = (torch.rand(n_batch, 2, device=GPU) * 2 - 1) * (1 - zoom)[:, None]
    turn = torch.zeros(n_batch, 2, 3, device=GPU)
    turn[:, 0, 0], turn[:, 1, 1], turn[:, :, 2] = zoom * flip, zoom, moved
    x = F.grid_sample(images.float() / 255, F.affine_grid(turn, [n_batch, 3, n, n], align_corners=False), align_corners=False)
    x = x * (0.6 + 0.8 * torch.rand(n_batch, 3, 1, 1, device=GPU))
    grey = torch.rand(n_batch, 1, 1, 1, device=GPU) < 0.2
    return (torch.where(grey, x.mean(1, keepdim=True), x) - 0.45) / 0.225


def views(edits):
    edits.habits(precision="autocast-fp16")
    n_batch, n, width, n_queue, heat, slow = size(128, 4), size(224, 64), size(128, 16), size(65536, 32), 0.2, 0.999
    model = Viewer(size("regnety_008", "regnety_002"), width)
    keys = copy.deepcopy(model).requires_grad_(False)
    model = prepare(edits, model, named(model, "Bottleneck"))
    keys.to(GPU, edits.dtype).train()
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[120, 160], gamma=0.1)
    queue, place = F.normalize(torch.randn(width, n_queue), dim=0).to(GPU), 0
    for step in range(4):
        images = torch.randint(256, (n_batch, 3, size(256, 72), size(256, 72)), dtype=torch.uint8)
        images = pinned(images).to(GPU, non_blocking=True)
        one, two = view(images, n).to(edits.dtype), view(images, n).to(edits.dtype)
        with torch.no_grad():
            for mine, key in zip(model.parameters(), keys.parameters()):
                key.mul_(slow).add_(mine, alpha=1 - slow)
            # The copy must not see which pictures were together.
            order = torch.randperm(n_batch, device=GPU)
            with edits.autocast():
                k = keys(two[order])[order.argsort()]
        with edits.forward():
            q = model(one)
            alike = torch.einsum("nc,nc->n", q, k)[:, None]
            others = torch.einsum("nc,ck->nk", q, queue.clone())
            logits = torch.cat([alike, others], 1) / heat
            loss = F.cross_entropy(logits, torch.zeros(n_batch, dtype=torch.long, device=GPU))
        edits.zero_grad(opt)
        edits.backward(loss)
        edits.step(opt)
        schedule.step()
        queue[:, place : place + n_batch] = k.T
        place = (place + n_batch) % n_queue
        with torch.no_grad():
            best = (logits.argmax(1) == 0).float().mean()
        print(f"{step} loss {loss.item():.3f}, {best.item():.3f} found")


# What happens in films: an MViT of torchvision, mixed films with soft labels, a rate that rises and falls.


def video(edits):
    from torchvision.models.video import mvit_v2_s
    from torchvision.models.video.mvit import MSBlockConfig, MViT
    edits.habits(precision="autocast-bf16")
    n_kinds, n_batch, n_frames, n = size(174, 7), size(5, 2), size(16, 4), size(224, 32)
    if n_kinds == 174:
        model = mvit_v2_s(weights=None, num_classes=n_kinds, dropout=0.5, stochastic_depth_prob=0.2)
    else:
        shapes = [(1, 16, 16, [], [1, 4, 4]), (2, 16, 32, [1, 2, 2], [1, 2, 2]), (2, 32, 32, [], [1, 2, 2]), (2, 32, 32, [], [1, 2, 2])]
        blocks = [MSBlockConfig(heads, a, b, [3, 3, 3], [3, 3, 3], q or [1, 1, 1], kv) for heads, a, b, q, kv in shapes]
        model = MViT(
            spatial_size=(n, n), temporal_size=n_frames, block_setting=blocks, residual_pool=True, residual_with_cls_embed=False,
            rel_pos_embed=True, proj_after_attn=True, num_classes=n_kinds, stochastic_depth_prob=0.2,
        )
    model = prepare(edits, model, model.blocks)
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.05},
        {"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=1.6e-4)
    rise = torch.optim.lr_scheduler.LinearLR(rated(opt), start_factor=0.01, total_iters=3)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=100)
    schedule = torch.optim.lr_scheduler.SequentialLR(rated(opt), [rise, fall], milestones=[3])
    rate = torch.distributions.Beta(0.8, 0.8)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            films = pinned(torch.randint(256, (n_batch, n_frames, n, n, 3), dtype=torch.uint8)).to(GPU, non_blocking=True)
            labels = F.one_hot(torch.randint(n_kinds, (n_batch,)), n_kinds).float().to(GPU, non_blocking=True)
            films = films.permute(0, 4, 1, 2, 3).to(edits.dtype).div_(255).sub_(0.45).div_(0.225)
            part = rate.sample().item()
            films, labels = films * part + films.flip(0) * (1 - part), labels * part + labels.flip(0) * (1 - part)
            with edits.forward():
                logits = model(films)
                loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            edits.backward(loss)
        edits.step(opt, trained, clip=1.0)
        schedule.step()
        right = (logits.detach().argmax(1) == labels.argmax(1)).float().mean()
        print(f"{step} loss {loss.item():.3f}, {right.item():.2f} right")


# Where everything moves: a RAFT of torchvision looks at two pictures and corrects itself again and again; every guess counts.


def flow(edits):
    from torchvision.models.optical_flow import raft_large, raft_small
    edits.habits()
    n_batch, height, width, n_rounds = size(3, 2), size(368, 128), size(496, 128), size(12, 3)
    model = size(raft_large, raft_small)(weights=None)
    model = prepare(edits, model, [])
    # What the norms have seen stays as it is.
    for it in model.modules():
        if isinstance(it, nn.BatchNorm2d):
            it.eval()
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=4e-4, weight_decay=1e-4, eps=1e-8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        rated(opt), max_lr=4e-4, total_steps=1100, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear"
    )
    total = {}
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            first = torch.randint(256, (n_batch, 3, height, width)).float()
            second = (first.roll(3, -1) + 5 * torch.randn_like(first)).clamp(0, 255)
            moved, valid = torch.randn(n_batch, 2, height, width) * 8, torch.rand(n_batch, height, width) < 0.9
            first, second, moved, valid = (pinned(it).to(GPU, non_blocking=True) for it in (first, second, moved, valid))
            first, second = first / 127.5 - 1, second / 127.5 - 1
            with edits.forward():
                guesses = model(first, second, num_flow_updates=n_rounds)
                counted = valid & (moved.norm(dim=1) < 400)
                loss = 0.0
                for number, guess in enumerate(guesses):
                    off = (guess - moved).abs()
                    loss = loss + 0.8 ** (n_rounds - number - 1) * (counted[:, None] * off).mean()
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        with torch.no_grad():
            far = (guesses[-1].float() - moved).norm(dim=1)[counted]
            now = {"far": far.mean().item(), "under 1": (far < 1).float().mean().item(), "under 5": (far < 5).float().mean().item()}
        total = {name: total.get(name, 0.0) + value for name, value in now.items()}
    print(", ".join(f"{name} {value / 4:.3f}" for name, value in total.items()))


PROGRAMS = {it.__name__: it for it in (play, points, scene, voice, translate, sight, folds, views, video, flow)}
