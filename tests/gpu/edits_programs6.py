"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `entities`, `retriever` and `enlarge` need transformers, `faces` and
`teacher` timm, `queries` torchvision; without them these raise ImportError.

The edits that `edits.py` does not know, `--optimizer adam8bit`, `--checkpoint selective` and `--freeze-up-to LAYER`, are those of
edits_programs5.py.
"""
import math
from collections import namedtuple

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "physics": ["--adam fused", "--accumulate 4", "--offload activations", "--optimizer sgd --set-to-none no"],
    "dreamer": ["--precision fp32", "--optimizer adam8bit", "--offload activations", "--precision autocast-bf16 --adam foreach"],
    "queries": ["--precision autocast-fp16", "--optimizer momentum", "--checkpoint layers:0..5", "--freeze-up-to backbone.layer3"],
    "energy": ["--set-to-none yes", "--optimizer sgd", "--precision autocast-bf16", "--checkpoint every:2 --adam for-loop"],
    "teacher": ["--checkpoint selective", "--adam foreach", "--accumulate 2", "--precision autocast-bf16"],
    "enlarge": ["--checkpoint every:2", "--precision bf16", "--set-to-none no", "--accumulate 4 --optimizer adam8bit"],
    "entities": [
        "--optimizer adafactor", "--lora 8", "--freeze-up-to deberta.encoder.layer.5",
        "--checkpoint layers:0..7 --precision autocast-bf16",
    ],
    "retriever": ["--checkpoint selective", "--adam for-loop", "--offload optimizer", "--lora 16 --checkpoint all"],
    "faces": ["--optimizer adam", "--freeze 0.5", "--offload optimizer", "--optimizer sgd --precision fp32"],
    "organs": ["--precision fp32", "--optimizer adamw", "--checkpoint all", "--precision autocast-bf16 --accumulate 2"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "physics": 2, "dreamer": 3, "queries": 4, "energy": 4, "teacher": 5, "enlarge": 6, "entities": 6, "retriever": 6, "faces": 7,
    "organs": 7,
}

import torch
from torch import nn
from torch.nn import functional as F

from edits_programs5 import GPU, optimizer, prepare, size


# A network that obeys physics: the flow of a liquid past a cylinder, derivatives of derivatives, two unknown numbers of the equations.


class Flow(nn.Module):
    def __init__(self, width, n_layers):
        super().__init__()
        widths = [3] + [width] * n_layers
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.out = nn.Linear(width, 2)
        for it in [*self.hidden, self.out]:
            nn.init.xavier_normal_(it.weight)
            nn.init.zeros_(it.bias)
        self.inertia, self.viscosity = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([0.05]))
        self.register_buffer("lower", torch.tensor([1.0, -2.0, 0.0]))
        self.register_buffer("upper", torch.tensor([8.0, 2.0, 20.0]))

    def forward(self, x, y, t):
        points = torch.cat([x, y, t], 1)
        h = 2 * (points - self.lower) / (self.upper - self.lower) - 1
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.out(h).split(1, 1)


def derivative(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def residuals(model, x, y, t):
    """The velocity is that of a stream function, so nothing is lost; the other two equations should be zero."""
    stream, pressure = model(x, y, t)
    u, v = derivative(stream, y), -derivative(stream, x)
    u_x, u_y, u_t = (derivative(u, it) for it in (x, y, t))
    v_x, v_y, v_t = (derivative(v, it) for it in (x, y, t))
    u_xx, u_yy, v_xx, v_yy = derivative(u_x, x), derivative(u_y, y), derivative(v_x, x), derivative(v_y, y)
    p_x, p_y = derivative(pressure, x), derivative(pressure, y)
    first = u_t + model.inertia * (u * u_x + v * u_y) + p_x - model.viscosity * (u_xx + u_yy)
    second = v_t + model.inertia * (u * v_x + v * v_y) + p_y - model.viscosity * (v_xx + v_yy)
    return u, v, first, second


def physics(edits):
    edits.habits()
    model = Flow(size(100, 8), size(8, 3))
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(edits.scheduled(opt), gamma=0.9995)
    # All that was measured lies on the GPU.
    n_all, n_batch = size(1_000_000, 200), size(5_000, 20)
    places = (torch.rand(n_all, 3) * torch.tensor([7.0, 4.0, 20.0]) + torch.tensor([1.0, -2.0, 0.0])).to(GPU)
    measured = torch.randn(n_all, 2).to(GPU)
    for step in range(5):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            chosen = torch.randint(n_all, (n_batch,), device=GPU)
            x, y, t = (it.clone().requires_grad_(True) for it in places[chosen].split(1, 1))
            with edits.forward():
                u, v, first, second = residuals(model, x, y, t)
                loss_data = F.mse_loss(torch.cat([u, v], 1), measured[chosen])
                loss = loss_data + first.square().mean() + second.square().mean()
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f} inertia {model.inertia.item():.3f} viscosity {model.viscosity.item():.4f}")


# A world model: pictures of a game become discrete states, an actor and a critic learn from what the model imagines; three optimizers.


def symlog(x):
    return x.sign() * x.abs().log1p()


def mlp(n_in, width, n_layers, n_out):
    layers = []
    for a in [n_in] + [width] * (n_layers - 1):
        layers += [nn.Linear(a, width, bias=False), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, n_out))


class WorldModel(nn.Module):
    def __init__(self, depth, width, n_deter, n_groups, n_kinds, n_actions):
        super().__init__()
        self.depth, self.n_deter, self.n_groups, self.n_kinds = depth, n_deter, n_groups, n_kinds
        widths = [3, depth, 2 * depth, 4 * depth, 8 * depth]
        encoder, decoder = [], []
        for a, b in zip(widths, widths[1:]):
            encoder += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.GroupNorm(1, b), nn.SiLU()]
        for a, b in zip(widths[:1:-1], widths[-2:0:-1]):
            decoder += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.GroupNorm(1, b), nn.SiLU()]
        self.encoder = nn.Sequential(*encoder, nn.Flatten())
        self.decoder = nn.Sequential(*decoder, nn.ConvTranspose2d(depth, 3, 4, 2, 1))
        n_stoch, n_seen = n_groups * n_kinds, 8 * depth * 16
        self.n_features = n_deter + n_stoch
        self.enter = nn.Sequential(nn.Linear(n_stoch + n_actions, width, bias=False), nn.LayerNorm(width), nn.SiLU())
        self.cell, self.norm = nn.Linear(width + n_deter, 3 * n_deter, bias=False), nn.LayerNorm(3 * n_deter)
        self.prior, self.posterior = mlp(n_deter, width, 1, n_stoch), mlp(n_deter + n_seen, width, 1, n_stoch)
        self.widen = nn.Linear(self.n_features, n_seen)
        self.reward, self.goes_on = mlp(self.n_features, width, 2, 1), mlp(self.n_features, width, 2, 1)

    def logits(self, x):
        x = x.float().unflatten(-1, (self.n_groups, self.n_kinds))
        # One percent of chance for all kinds.
        return (0.99 * x.softmax(-1) + 0.01 / self.n_kinds).log()

    def sample(self, logits):
        chances = logits.exp()
        drawn = torch.distributions.OneHotCategorical(logits=logits).sample()
        return (drawn + chances - chances.detach()).flatten(-2)

    def next(self, deter, stoch, action):
        x = self.enter(torch.cat([stoch, action], -1))
        reset, candidate, update = self.norm(self.cell(torch.cat([x, deter], -1))).chunk(3, -1)
        update = torch.sigmoid(update - 1)
        return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * deter

    def observe(self, images, actions, first):
        n_batch, n_time = images.shape[:2]
        seen = self.encoder(images.flatten(0, 1)).unflatten(0, (n_batch, n_time))
        deter = images.new_zeros(n_batch, self.n_deter)
        stoch = images.new_zeros(n_batch, self.n_groups * self.n_kinds)
        deters, stochs, priors, posteriors = [], [], [], []
        for time in range(n_time):
            keep = 1 - first[:, time, None]
            deter = self.next(deter * keep, stoch * keep, actions[:, time] * keep)
            priors.append(self.logits(self.prior(deter)))
            posteriors.append(self.logits(self.posterior(torch.cat([deter, seen[:, time]], -1))))
            stoch = self.sample(posteriors[-1])
            deters.append(deter)
            stochs.append(stoch)
        return [torch.stack(it, 1) for it in (deters, stochs, priors, posteriors)]

    def pictures(self, features):
        x = self.widen(features.flatten(0, 1)).view(-1, 8 * self.depth, 4, 4)
        return self.decoder(x).unflatten(0, features.shape[:2])


def divergence(p, q):
    return (p.exp() * (p - q)).sum((-1, -2)).clamp(min=1.0).mean()


def act(actor, features):
    mean, spread = actor(features).float().chunk(2, -1)
    return torch.distributions.Normal(torch.tanh(mean), 2 * torch.sigmoid(spread / 2) + 0.1)


def dreamer(edits):
    edits.habits(precision="autocast-fp16")
    n_actions, n_batch, n_time, horizon = 6, size(16, 2), size(64, 4), size(15, 3)
    world = WorldModel(size(32, 4), size(512, 16), size(512, 16), size(32, 4), size(32, 4), n_actions)
    world = prepare(edits, world, [])
    actor = mlp(world.n_features, size(512, 16), 2, 2 * n_actions).to(GPU, edits.dtype)
    critic = mlp(world.n_features, size(512, 16), 2, 1).to(GPU, edits.dtype)
    slow = mlp(world.n_features, size(512, 16), 2, 1).to(GPU, edits.dtype).requires_grad_(False)
    slow.load_state_dict(critic.state_dict())
    opt_world = optimizer(edits, world.parameters(), torch.optim.Adam, lr=1e-4, eps=1e-8, foreach=False)
    opt_actor = optimizer(edits, actor.parameters(), torch.optim.Adam, lr=3e-5, eps=1e-5, foreach=False)
    opt_critic = optimizer(edits, critic.parameters(), torch.optim.Adam, lr=3e-5, eps=1e-5, foreach=False)
    for step in range(4):
        images = torch.randint(256, (n_batch, n_time, 3, 64, 64), dtype=torch.uint8).to(GPU).to(edits.dtype) / 255 - 0.5
        actions = (torch.rand(n_batch, n_time, n_actions) * 2 - 1).to(GPU, edits.dtype)
        reward = torch.randn(n_batch, n_time).to(GPU, edits.dtype)
        first = (torch.rand(n_batch, n_time) < 0.02).to(GPU, edits.dtype)
        # The world.
        with edits.forward():
            deter, stoch, prior, posterior = world.observe(images, actions, first)
            features = torch.cat([deter, stoch], -1)
            loss_image = 10 * F.mse_loss(world.pictures(features).float(), images)
            loss_reward = (world.reward(features).float().squeeze(-1) - symlog(reward)).square().mean()
            loss_end = F.binary_cross_entropy_with_logits(world.goes_on(features).float().squeeze(-1), 1 - first)
            loss_state = 0.5 * divergence(posterior.detach(), prior) + 0.1 * divergence(posterior, prior.detach())
            loss = loss_image + loss_reward + loss_end + loss_state
        edits.zero_grad(opt_world)
        edits.backward(loss)
        edits.step(opt_world, world.parameters(), clip=1000.0)
        # The actor acts in the imagined world, which does not learn from it.
        world.requires_grad_(False)
        with edits.forward():
            deter, stoch = deter.detach().flatten(0, 1), stoch.detach().flatten(0, 1)
            imagined, entropies = [torch.cat([deter, stoch], -1)], []
            for _ in range(horizon):
                policy = act(actor, imagined[-1].detach())
                entropies.append(policy.entropy().sum(-1))
                deter = world.next(deter, stoch, policy.rsample())
                stoch = world.sample(world.logits(world.prior(deter)))
                imagined.append(torch.cat([deter, stoch], -1))
            imagined = torch.stack(imagined)
            rewards = world.reward(imagined).float().squeeze(-1)
            discounts = 0.997 * torch.sigmoid(world.goes_on(imagined).float().squeeze(-1))
            values = critic(imagined).float().squeeze(-1)
            result, results = values[-1], []
            for time in reversed(range(horizon)):
                result = rewards[time + 1] + discounts[time + 1] * (0.05 * values[time + 1] + 0.95 * result)
                results.insert(0, result)
            results = torch.stack(results)
            weights = torch.cat([torch.ones_like(discounts[:1]), discounts[:-2]]).cumprod(0).detach()
            loss_actor = -(weights * (results + 3e-4 * torch.stack(entropies))).mean()
        edits.zero_grad(opt_actor)
        edits.backward(loss_actor)
        edits.step(opt_actor, actor.parameters(), clip=100.0)
        world.requires_grad_(True)
        # The critic.
        with edits.forward():
            known = imagined[:-1].detach()
            value = critic(known).float().squeeze(-1)
            with torch.no_grad():
                before = slow(known).float().squeeze(-1)
            loss_critic = (weights * ((value - results.detach()).square() + (value - before).square())).mean()
        edits.zero_grad(opt_critic)
        edits.backward(loss_critic)
        edits.step(opt_critic, critic.parameters(), clip=100.0)
        with torch.no_grad():
            for mine, other in zip(slow.parameters(), critic.parameters()):
                mine.lerp_(other, 0.02)
    print(f"loss {loss.item():.1f}, actor {loss_actor.item():.3f}, critic {loss_critic.item():.3f}")


# A model of energies: samples are found by walking down the energy of pictures, and kept for the next walks.


class EnergyBlock(nn.Module):
    def __init__(self, n_in, n_out, halve):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.short = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()
        self.halve = halve

    def forward(self, x):
        y = self.conv2(F.silu(self.conv1(F.silu(x))))
        x = self.short(x) + y
        return F.avg_pool2d(x, 2) if self.halve else x


class Energy(nn.Module):
    def __init__(self, width, multiples):
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, padding=1)
        widths = [width] + [width * it for it in multiples]
        blocks = []
        for a, b in zip(widths, widths[1:]):
            blocks += [EnergyBlock(a, b, True), EnergyBlock(b, b, False)]
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(widths[-1], 1)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.out(F.silu(x).sum((2, 3))).squeeze(1)


def walked(edits, model, x, n_steps):
    """Langevin dynamics: `n_steps` down the energy, with noise."""
    model.eval()
    model.requires_grad_(False)
    for _ in range(n_steps):
        x = (x + 0.005 * torch.randn_like(x)).clamp_(-1, 1).requires_grad_(True)
        with edits.autocast():
            energy = model(x).float().sum()
        slope = torch.autograd.grad(energy, x)[0]
        x = (x.detach() - 10 * slope.clamp_(-0.03, 0.03)).clamp_(-1, 1)
    model.requires_grad_(True)
    model.train()
    return x


def energy(edits):
    edits.habits(set_to_none="no")
    model = Energy(size(96, 8), size((1, 2, 2, 4), (1, 2)))
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4, betas=(0.0, 0.999))
    n_batch, n, n_kept = size(64, 4), size(64, 16), size(8192, 32)
    kept = torch.rand(n_kept, 3, n, n) * 2 - 1
    for step in range(4):
        real = (torch.rand(n_batch, 3, n, n) * 2 - 1).to(GPU)
        real = real + 0.005 * torch.randn_like(real)
        places = torch.randint(n_kept, (n_batch,))
        start = kept[places]
        anew = torch.rand(n_batch) < 0.05
        start[anew] = torch.rand(int(anew.sum()), 3, n, n) * 2 - 1
        fake = walked(edits, model, start.to(GPU), size(20, 3))
        kept[places] = fake.cpu()
        edits.zero_grad(opt)
        with edits.forward():
            of_real, of_fake = model(torch.cat([real, fake])).float().chunk(2)
            loss = of_real.mean() - of_fake.mean() + 0.1 * (of_real.square() + of_fake.square()).mean()
        edits.backward(loss)
        edits.step(opt, model.parameters(), clip=0.1)
    print(f"loss {loss.item():.3f}, energy of samples {of_fake.mean().item():.3f}")


# Organs in scans: a U-Net in three dimensions with losses at several resolutions, half precision, SGD with much momentum.


class Volume(nn.Sequential):
    def __init__(self, n_in, n_out, stride=1):
        layers = []
        for a, b, by in ((n_in, n_out, stride), (n_out, n_out, 1)):
            layers += [nn.Conv3d(a, b, 3, stride=by, padding=1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01, inplace=True)]
        super().__init__(*layers)


class Unet3d(nn.Module):
    def __init__(self, widths, n_classes):
        super().__init__()
        self.down = nn.ModuleList([Volume(1, widths[0])] + [Volume(a, b, 2) for a, b in zip(widths, widths[1:])])
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.widen = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(Volume(2 * b, b) for _, b in pairs)
        self.heads = nn.ModuleList(nn.Conv3d(b, n_classes, 1) for _, b in pairs)

    def forward(self, x):
        skipped, outputs = [], []
        for stage in self.down:
            x = stage(x)
            skipped.append(x)
        skipped.pop()
        for widen, stage, head in zip(self.widen, self.up, self.heads):
            x = stage(torch.cat([widen(x), skipped.pop()], 1))
            outputs.append(head(x))
        return outputs[::-1]


def dice_and_entropy(logits, labels):
    entropy = F.cross_entropy(logits, labels[:, 0])
    chances = logits.softmax(1)
    with torch.no_grad():
        truth = torch.zeros_like(chances).scatter_(1, labels, 1)
    both, all_of_them = (chances * truth).sum((0, 2, 3, 4)), chances.sum((0, 2, 3, 4)) + truth.sum((0, 2, 3, 4))
    return entropy - ((2 * both + 1e-5) / (all_of_them + 1e-5)).mean()


def organs(edits):
    edits.habits(precision="autocast-fp16")
    n_classes, n_batch, n = size(4, 3), 2, size(128, 16)
    model = Unet3d(size((32, 64, 128, 256, 320), (4, 8, 8)), n_classes)
    model = prepare(edits, model, [*model.down, *model.up])
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
    weights = [1 / 2**it for it in range(len(model.heads))]
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            scans = torch.randn(n_batch, 1, n, n, n).to(GPU, non_blocking=True)
            labels = torch.randint(n_classes, (n_batch, 1, n, n, n)).to(GPU, non_blocking=True)
            targets = [labels[:, :, :: 2**it, :: 2**it, :: 2**it] for it in range(len(weights))]
            with edits.forward():
                outputs = model(scans)
                loss = sum(w * dice_and_entropy(out.float(), it) for w, out, it in zip(weights, outputs, targets)) / sum(weights)
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=12.0)
    print(f"loss {loss.item():.3f}")


# Names of people and places in text: DeBERTa of transformers, labels for tokens, a loader that pads to the longest text.


class Sentences(torch.utils.data.Dataset):
    def __init__(self, n, n_words, longest, n_labels):
        lengths = torch.randint(longest // 2, longest + 1, (n,)).tolist()
        self.tokens = [torch.randint(5, n_words, (it,)) for it in lengths]
        self.labels = [torch.randint(n_labels, (it,)) for it in lengths]
        for it in self.labels:
            # Only the first piece of a word has a label.
            it[torch.rand(len(it)) < 0.3] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return self.tokens[number], self.labels[number]


def padded(rows):
    tokens, labels = zip(*rows)
    pad = nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(it) for it in tokens], batch_first=True)
    return {"input_ids": pad(tokens, batch_first=True), "attention_mask": mask, "labels": pad(labels, batch_first=True, padding_value=-100)}


def entities(edits):
    from transformers import DebertaV2Config, DebertaV2ForTokenClassification, get_linear_schedule_with_warmup
    edits.habits()
    n_words = size(128100, 200)
    usual = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    small = dict(hidden_size=32, num_hidden_layers=8, num_attention_heads=2, intermediate_size=64)
    config = DebertaV2Config(
        vocab_size=n_words, num_labels=9, relative_attention=True, position_buckets=size(256, 8), norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], max_relative_positions=-1, position_biased_input=False, type_vocab_size=0,
        layer_norm_eps=1e-7, **size(usual, small),
    )
    model = DebertaV2ForTokenClassification(config)
    model = prepare(edits, model, model.deberta.encoder.layer)
    plain = ("bias", "LayerNorm.weight")
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [it for name, it in trained if name.endswith(plain)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, [it for it in groups if it["params"]], torch.optim.AdamW, lr=2e-5)
    schedule = get_linear_schedule_with_warmup(opt, 50, 1000)
    data = Sentences(size(40, 10), n_words, size(192, 24), 9)
    loader = torch.utils.data.DataLoader(data, batch_size=size(8, 2), shuffle=True, collate_fn=padded)
    total = 0.0
    for batch in loader:
        batch = {name: it.to(GPU) for name, it in batch.items()}
        with edits.forward():
            outputs = model(**batch)
        edits.backward(outputs.loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        total += outputs.loss.item()
    print(f"loss {total / len(loader):.3f}")


# Search: one ModernBERT of transformers for questions and texts; each question should find its text among all texts of the batch.


def mean_of(states, mask):
    mask = mask[:, :, None].to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def texts(n, n_words, shortest, longest):
    lengths = torch.randint(shortest, longest + 1, (n,))
    lengths[0] = longest
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": (torch.randint(5, n_words, (n, longest)) * mask).to(GPU), "attention_mask": mask.to(GPU)}


def retriever(edits):
    from transformers import ModernBertConfig, ModernBertModel, get_cosine_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    n_words = size(50368, 200)
    usual = dict(hidden_size=768, intermediate_size=1152, num_hidden_layers=22, num_attention_heads=12)
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2)
    special = dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)
    config = ModernBertConfig(vocab_size=n_words, local_attention=size(128, 8), attn_implementation="sdpa", **special, **size(usual, small))
    # Older versions would compile parts of the model.
    config.reference_compile = False
    model = ModernBertModel(config)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-5, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(edits.scheduled(opt), 10, 500)
    n_batch = size(16, 3)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            questions = texts(n_batch, n_words, size(8, 3), size(32, 6))
            # To each question, the text that answers it and one that nearly does.
            answers = texts(2 * n_batch, n_words, size(40, 5), size(144, 12))
            with edits.forward():
                q = mean_of(model(**questions).last_hidden_state, questions["attention_mask"])
                a = mean_of(model(**answers).last_hidden_state, answers["attention_mask"])
                scores = F.normalize(q.float(), dim=-1) @ F.normalize(a.float(), dim=-1).t() * 20
                loss = F.cross_entropy(scores.float(), torch.arange(n_batch, device=scores.device))
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
    print(f"loss {loss.item():.3f}")


# Pictures twice as large: Swin2SR of transformers, single precision, Adam, a validation on larger pictures.


class Enlarger(nn.Module):
    def __init__(self, config):
        super().__init__()
        from transformers import Swin2SRForImageSuperResolution
        self.net = Swin2SRForImageSuperResolution(config)

    def forward(self, images):
        return self.net(pixel_values=images).reconstruction


def enlarge(edits):
    from transformers import Swin2SRConfig
    edits.habits()
    usual = dict(embed_dim=60, depths=[6, 6, 6, 6], num_heads=[6, 6, 6, 6], window_size=8, image_size=64)
    small = dict(embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, image_size=16)
    config = Swin2SRConfig(mlp_ratio=2.0, upscale=2, upsampler="pixelshuffledirect", drop_path_rate=0.1, **size(usual, small))
    model = Enlarger(config)
    model = prepare(edits, model, [layer for stage in model.net.swin2sr.encoder.stages for layer in stage.layers])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=2e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.MultiStepLR(edits.scheduled(opt), milestones=[250, 400], gamma=0.5)
    n_batch, n = size(8, 2), size(64, 16)
    for step in range(4):
        for _ in range(edits.accumulate):
            large = torch.rand(n_batch, 3, 2 * n, 2 * n).to(GPU, edits.dtype)
            low = F.avg_pool2d(large, 2)
            with edits.forward():
                loss = F.l1_loss(model(low), large)
            edits.backward(loss)
        edits.step(opt)
        edits.zero_grad(opt)
        schedule.step()
        if step % 2 == 1:
            model.eval()
            with torch.no_grad(), edits.autocast():
                large = torch.rand(1, 3, 6 * n, 6 * n).to(GPU, edits.dtype)
                error = F.mse_loss(model(F.avg_pool2d(large, 2)).clamp(0, 1), large)
            model.train()
            print(f"{step} loss {loss.item():.4f}, {-10 * math.log10(error.item()):.2f} dB")


# Faces: a network of timm and a margin between the angles of many thousand people.


class Faces(nn.Module):
    def __init__(self, name, n_people, n_out, margin=0.5, scale=64.0):
        super().__init__()
        from timm import create_model
        self.margin, self.scale = margin, scale
        self.net = create_model(name, num_classes=n_out)
        self.norm = nn.BatchNorm1d(n_out, eps=2e-5)
        nn.init.constant_(self.norm.weight, 1.0)
        self.norm.weight.requires_grad_(False)
        self.people = nn.Parameter(torch.empty(n_people, n_out).normal_(0, 0.01))

    def forward(self, images, labels):
        found = F.normalize(self.norm(self.net(images)), dim=1)
        cosines = F.linear(found, F.normalize(self.people, dim=1)).float().clamp(-1 + 1e-6, 1 - 1e-6)
        rows = torch.arange(len(labels), device=labels.device)
        angles = torch.acos(cosines[rows, labels])
        logits = cosines.index_put((rows, labels), torch.cos((angles + self.margin).clamp(max=math.pi)))
        return F.cross_entropy(logits * self.scale, labels)


def faces(edits):
    edits.habits(precision="autocast-bf16")
    n_people, n_batch, n = size(200_000, 50), size(192, 4), size(112, 32)
    model = Faces(size("seresnet50", "resnet10t"), n_people, size(512, 16))
    model = prepare(edits, model, [])
    opt = optimizer(edits, [it for it in model.parameters() if it.requires_grad], torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(edits.scheduled(opt), total_iters=1000, power=2)
    for step in range(5):
        images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8)
        images = images.to(GPU, non_blocking=True).to(edits.dtype).div_(127.5).sub_(1)
        labels = torch.randint(n_people, (n_batch,)).to(GPU, non_blocking=True)
        with edits.forward():
            loss = model(images, labels)
        edits.backward(loss)
        edits.step(opt, model.parameters(), clip=5.0)
        edits.zero_grad(opt)
        schedule.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.3f}")


# Detection as a set: a ResNet of torchvision and a transformer whose queries are matched with objects, after each layer of the decoder.


class EncoderLayer(nn.Module):
    def __init__(self, width, n_heads, hidden):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, n_heads, dropout=0.1, batch_first=True)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x, place, padding):
        q = x + place
        x = self.norm1(x + self.drop(self.attention(q, q, x, key_padding_mask=padding, need_weights=False)[0]))
        return self.norm2(x + self.drop(self.second(self.drop(F.relu(self.first(x))))))


class DecoderLayer(nn.Module):
    def __init__(self, width, n_heads, hidden):
        super().__init__()
        self.own = nn.MultiheadAttention(width, n_heads, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(width, n_heads, dropout=0.1, batch_first=True)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norms, self.drop = nn.ModuleList(nn.LayerNorm(width) for _ in range(3)), nn.Dropout(0.1)

    def forward(self, x, memory, query, place, padding):
        q = x + query
        x = self.norms[0](x + self.drop(self.own(q, q, x, need_weights=False)[0]))
        seen = self.cross(x + query, memory + place, memory, key_padding_mask=padding, need_weights=False)[0]
        x = self.norms[1](x + self.drop(seen))
        return self.norms[2](x + self.drop(self.second(self.drop(F.relu(self.first(x))))))


class Detr(nn.Module):
    def __init__(self, n_classes, n_queries, width, n_heads, hidden, n_layers):
        super().__init__()
        from torchvision.models import resnet50
        from torchvision.models._utils import IntermediateLayerGetter
        from torchvision.ops import FrozenBatchNorm2d
        self.backbone = IntermediateLayerGetter(resnet50(weights=None, norm_layer=FrozenBatchNorm2d), {"layer4": "out"})
        for name, it in self.backbone.named_parameters():
            it.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
        for name, it in self.backbone.named_buffers():
            # The frozen norms are not trained: each block should add little, or its sums grow from block to block.
            if name.endswith("bn3.weight"):
                it.fill_(0.2)
        self.width, self.narrow = width, nn.Conv2d(2048, width, 1)
        self.encoder = nn.ModuleList(EncoderLayer(width, n_heads, hidden) for _ in range(n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, n_heads, hidden) for _ in range(n_layers))
        self.norm, self.queries = nn.LayerNorm(width), nn.Embedding(n_queries, 2 * width)
        self.kinds = nn.Linear(width, n_classes + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def places(self, padding):
        """Sines and cosines of the row and the column."""
        there = (~padding).float()
        parts, steps = [], torch.arange(self.width // 2, device=padding.device)
        scale = 10000 ** (2 * (steps // 2) / (self.width // 2))
        for dim in (1, 2):
            count = there.cumsum(dim)
            count = count / (count.max(dim, keepdim=True).values + 1e-6) * 2 * math.pi
            angle = count[..., None] / scale
            parts.append(torch.stack([angle[..., 0::2].sin(), angle[..., 1::2].cos()], -1).flatten(3))
        return torch.cat(parts, -1).flatten(1, 2)

    def forward(self, images, padding):
        x = self.narrow(self.backbone(images)["out"])
        padding = F.interpolate(padding[:, None].float(), size=x.shape[-2:])[:, 0].bool()
        place, padding = self.places(padding).to(x.dtype), padding.flatten(1)
        x = x.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x, place, padding)
        query, out = self.queries.weight.expand(len(x), -1, -1).chunk(2, -1)
        outputs = []
        for layer in self.decoder:
            out = layer(out, x, query, place, padding)
            outputs.append(self.norm(out))
        outputs = torch.stack(outputs)
        return self.kinds(outputs).float(), self.boxes(outputs).float().sigmoid()


def assigned(cost):
    """The Hungarian algorithm: the column of each row, of which there are not more than columns."""
    import numpy as np
    n, m = cost.shape
    u, v, match, way = np.zeros(n + 1), np.zeros(m + 1), np.zeros(m + 1, int), np.zeros(m + 1, int)
    for row in range(1, n + 1):
        match[0], column = row, 0
        lowest, used = np.full(m + 1, np.inf), np.zeros(m + 1, bool)
        while True:
            used[column] = True
            now = cost[match[column] - 1] - u[match[column]] - v[1:]
            better = ~used[1:] & (now < lowest[1:])
            lowest[1:][better], way[1:][better] = now[better], column
            after = 1 + int(np.where(used[1:], np.inf, lowest[1:]).argmin())
            delta = lowest[after]
            u[match[used]] += delta
            v[used] -= delta
            lowest[~used] -= delta
            column = after
            if match[column] == 0:
                break
        while column:
            match[column], column = match[way[column]], way[column]
    columns = np.flatnonzero(match[1:])
    return match[columns + 1] - 1, columns


@torch.no_grad()
def matched(logits, boxes, target):
    """Which query of one image is for which object."""
    from torchvision.ops import box_convert, generalized_box_iou
    corners, wanted = box_convert(boxes, "cxcywh", "xyxy"), box_convert(target["boxes"], "cxcywh", "xyxy")
    cost = 5 * torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["labels"]]
    cost = cost - 2 * generalized_box_iou(corners, wanted)
    rows, columns = assigned(torch.nan_to_num(cost, nan=1e3).t().double().cpu().numpy())
    return torch.as_tensor(columns, device=boxes.device), torch.as_tensor(rows, device=boxes.device)


def set_loss(logits, boxes, targets, weights):
    from torchvision.ops import box_convert, generalized_box_iou_loss
    pairs = [matched(a, b, target) for a, b, target in zip(logits, boxes, targets)]
    labels = torch.full(logits.shape[:2], logits.size(-1) - 1, device=logits.device)
    for number, (target, (query, which)) in enumerate(zip(targets, pairs)):
        labels[number, query] = target["labels"][which]
    found = torch.cat([it[query] for it, (query, _) in zip(boxes, pairs)])
    wanted = torch.cat([target["boxes"][which] for target, (_, which) in zip(targets, pairs)])
    overlap = generalized_box_iou_loss(box_convert(found, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"), reduction="sum")
    n = max(1, len(wanted))
    return F.cross_entropy(logits.transpose(1, 2), labels, weights) + 5 * F.l1_loss(found, wanted, reduction="sum") / n + 2 * overlap / n


def queries(edits):
    edits.habits()
    n_classes, n_batch, by = 91, size(4, 2), size(1, 8)
    model = Detr(n_classes, size(100, 12), size(256, 32), size(8, 2), size(2048, 64), 6)
    model = prepare(edits, model, [*model.encoder, *model.decoder])
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if not name.startswith("backbone")]},
        {"params": [it for name, it in trained if name.startswith("backbone")], "lr": 1e-5},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=1e-4, weight_decay=1e-4)
    weights = torch.ones(n_classes + 1, device=GPU)
    weights[-1] = 0.1
    shapes = [(512, 672), (608, 544), (480, 640), (576, 704)]
    for step in range(4):
        chosen = [shapes[(step + number) % 4] for number in range(n_batch)]
        height, width = max(it[0] for it in chosen) // by, max(it[1] for it in chosen) // by
        images, padding = torch.zeros(n_batch, 3, height, width), torch.ones(n_batch, height, width, dtype=torch.bool)
        targets = []
        for number, shape in enumerate(chosen):
            h, w = shape[0] // by, shape[1] // by
            images[number, :, :h, :w] = torch.randn(3, h, w)
            padding[number, :h, :w] = False
            n = 2 + 3 * ((step + number) % 3)
            boxes = torch.cat([torch.rand(n, 2) * 0.6 + 0.2, torch.rand(n, 2) * 0.3 + 0.05], 1)
            targets.append({"boxes": boxes.to(GPU), "labels": torch.randint(n_classes, (n,)).to(GPU)})
        images, padding = images.to(GPU, edits.dtype), padding.to(GPU)
        with edits.forward():
            logits, boxes = model(images, padding)
        loss = sum(set_loss(a, b, targets, weights) for a, b in zip(logits, boxes))
        edits.zero_grad(opt)
        edits.backward(loss)
        edits.step(opt, model.parameters(), clip=0.1)
    print(f"loss {loss.item():.3f}")


# A student and its own mean as the teacher: a ViT of timm sees large and small parts of pictures, half precision, fused AdamW.


class Head(nn.Module):
    def __init__(self, n_in, hidden, narrow, n_out):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(n_in, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, narrow))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(narrow, n_out, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class Pupil(nn.Module):
    def __init__(self, n_out, drop_path):
        super().__init__()
        from timm import create_model
        small = size({}, dict(embed_dim=32, depth=2, num_heads=2, patch_size=8, img_size=32))
        self.net = create_model("vit_small_patch16_224", num_classes=0, dynamic_img_size=True, drop_path_rate=drop_path, **small)
        self.head = Head(self.net.num_features, size(2048, 32), size(256, 16), n_out)

    def forward(self, crops):
        """Crops of the same size go through the network together."""
        large, small = crops[:2], crops[2:]
        found = [self.net(torch.cat(it)) for it in (large, small) if it]
        return self.head(torch.cat(found))


Rates = namedtuple("Rates", "lr decay mean")


def teacher(edits):
    edits.habits(precision="autocast-fp16")
    n_out, n_batch, n_large, n_small, n_crops = size(65536, 64), size(24, 2), size(224, 32), size(96, 16), size(8, 3)
    student, master = Pupil(n_out, 0.1), Pupil(n_out, 0.0)
    master.load_state_dict(student.state_dict())
    master.requires_grad_(False)
    student = prepare(edits, student, student.net.blocks)
    master.to(GPU)
    trained = [it for it in student.parameters() if it.requires_grad]
    groups = [{"params": [it for it in trained if it.ndim > 1]}, {"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0}]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=5e-4, weight_decay=0.04, fused=True)
    center = torch.zeros(1, n_out, device=GPU)
    for step in range(4):
        rates = Rates(5e-4 * (step + 1) / 100, 0.04 + 0.36 * step / 1000, 0.996 + 0.004 * step / 1000)
        for number, group in enumerate(opt.param_groups):
            group["lr"] = rates.lr
            if number == 0:
                group["weight_decay"] = rates.decay
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            crops = [torch.randn(n_batch, 3, n_large, n_large).to(GPU, non_blocking=True) for _ in range(2)]
            crops += [torch.randn(n_batch, 3, n_small, n_small).to(GPU, non_blocking=True) for _ in range(n_crops)]
            with edits.forward():
                with torch.no_grad():
                    told = master(crops[:2])
                guessed = student(crops)
                truth = F.softmax((told.float() - center) / 0.04, -1).chunk(2)
                guesses = F.log_softmax(guessed.float() / 0.1, -1).chunk(len(crops))
                losses = [-(t * g).sum(-1).mean() for i, t in enumerate(truth) for j, g in enumerate(guesses) if i != j]
                loss = sum(losses) / len(losses)
            with torch.no_grad():
                center = center * 0.9 + told.float().mean(0, keepdim=True) * 0.1
            edits.backward(loss)
        edits.step(opt, trained, clip=3.0)
        with torch.no_grad():
            for mine, other in zip(master.parameters(), student.parameters()):
                mine.mul_(rates.mean).add_(other.detach(), alpha=1 - rates.mean)
    print(f"loss {loss.item():.3f}")


PROGRAMS = {it.__name__: it for it in (physics, dreamer, queries, energy, teacher, enlarge, entities, retriever, faces, organs)}
