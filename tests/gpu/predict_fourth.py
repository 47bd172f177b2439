"""Programs that are yet other: the set `fourth`, for `predict.py`. `predict_programs.py` runs them."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_programs import GPU, STEPS, Block, Gpt, language, train, words
from predict_third import conv


class Windowed(nn.Module):
    """Attention within windows of an image, with a bias for each distance."""

    def __init__(self, width, heads, window, shift):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x):
        batch, side, _, width = x.shape
        n = side // self.window
        y = torch.roll(self.first(x), (-self.shift, -self.shift), (1, 2))
        y = y.reshape(batch, n, self.window, n, self.window, width).transpose(2, 3).reshape(-1, self.window**2, width)
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2) / q.shape[-1]**0.5 + self.bias).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).flatten(2)).reshape(batch, n, n, self.window, self.window, width).transpose(2, 3)
        x = x + torch.roll(y.reshape(batch, side, side, width), (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.second(x))


def windows(batch, side=128):
    """Windows that move by half, on two levels."""
    body = nn.Sequential(*[Windowed(96, 3, 8, 4 * (index % 2)) for index in range(2)])
    deeper = nn.Sequential(*[Windowed(192, 6, 8, 4 * (index % 2)) for index in range(4)])
    model = nn.ModuleDict({"patch": nn.Conv2d(3, 96, 4, 4), "body": body, "merge": nn.Linear(4 * 96, 192), "deeper": deeper, "head": nn.Linear(192, 1000)}).to(GPU)

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            x = model["body"](model["patch"](torch.randn(batch, 3, side, side, device=GPU)).permute(0, 2, 3, 1))
            size = x.shape[1] // 2
            x = model["merge"](x.reshape(batch, size, 2, size, 2, 96).transpose(2, 3).flatten(3))
            return F.cross_entropy(model["head"](model["deeper"](x).mean((1, 2))).float(), torch.randint(0, 1000, (batch,), device=GPU))

    train(step, model.parameters())


def vae(batch, side=64):
    """An image through a narrow place and back, with group norms."""
    norm = lambda width: nn.GroupNorm(8, width)
    encode = nn.Sequential(conv(3, 64, norm=norm), conv(64, 128, 3, 2, norm=norm), conv(128, 256, 3, 2, norm=norm), nn.Conv2d(256, 16, 1))
    up = lambda inside, outside: nn.Sequential(nn.Upsample(scale_factor=2), conv(inside, outside, norm=norm))
    decode = nn.Sequential(conv(8, 256, norm=norm), up(256, 128), up(128, 64), nn.Conv2d(64, 3, 3, padding=1))
    model = nn.ModuleDict({"encode": encode, "decode": decode}).to(GPU)

    def step():
        image = torch.rand(batch, 3, side, side, device=GPU)
        mean, spread = model["encode"](image).chunk(2, 1)
        again = model["decode"](mean + torch.randn_like(mean) * (0.5 * spread).exp())
        return F.mse_loss(again, image) - 1e-3 * (1 + spread - mean.square() - spread.exp()).mean()

    train(step, model.parameters())


def rays(batch, samples=64):
    """Colours along rays: a network of few layers for very many places."""
    def layers(inside, outside):
        return nn.Sequential(nn.Linear(inside, 256), nn.ReLU(), *[it for _ in range(4) for it in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, outside))
    coarse, fine = layers(39, 4).to(GPU), layers(39, 4).to(GPU)
    powers = 2.0 ** torch.arange(6, device=GPU)

    def colours(network, places):
        waves = (places[..., None] * powers).flatten(-2)
        found = network(torch.cat([places, waves.sin(), waves.cos()], -1))
        alpha = 1 - torch.exp(-F.relu(found[..., 3]) * 0.05)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * left)[..., None] * found[..., :3].sigmoid()).sum(1), (alpha * left).detach()

    def step():
        start, along, truth = (torch.rand(batch, 3, device=GPU) for _ in range(3))
        far = torch.linspace(0, 4, samples, device=GPU).expand(batch, samples)
        first, weights = colours(coarse, start[:, None] + along[:, None] * far[..., None])
        more = torch.gather(far, 1, torch.multinomial(weights + 1e-5, samples, replacement=True))
        both = torch.cat([far, more], 1).sort(1).values
        second, _ = colours(fine, start[:, None] + along[:, None] * both[..., None])
        return F.mse_loss(first, truth) + F.mse_loss(second, truth)

    train(step, [*coarse.parameters(), *fine.parameters()])


def policy(batch, length=64):
    """Games that are kept, and learnt from in four parts, twice."""
    body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
    model = nn.ModuleDict({"body": body, "act": nn.Linear(512, 18), "worth": nn.Linear(512, 1)}).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), 2.5e-4)
    seen = torch.zeros(length, batch, 4, 84, 84, dtype=torch.uint8, device=GPU)
    for _ in range(STEPS):
        acts, worths = [], []
        for moment in range(length):
            with torch.no_grad():
                hidden = model["body"](seen[moment].float() / 255)
                acts.append(torch.distributions.Categorical(logits=model["act"](hidden)).sample())
                worths.append(model["worth"](hidden)[:, 0])
        acts, worths = torch.stack(acts).flatten(), torch.stack(worths).flatten()
        for _ in range(2):
            for part in torch.randperm(length * batch, device=GPU).chunk(4):
                hidden = model["body"](seen.flatten(0, 1)[part].float() / 255)
                chances = torch.distributions.Categorical(logits=model["act"](hidden))
                loss = F.mse_loss(model["worth"](hidden)[:, 0], worths[part] + 1) - chances.log_prob(acts[part]).mean() - 0.01 * chances.entropy().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def triplets(batch, seq=64):
    """All distances of a batch, and the hardest of them."""
    model = Gpt(width=384, heads=6, layers=4, words=8192).to(GPU)

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            x = model.embed(words(model, batch, seq))
            for block in model.blocks:
                x = block(x)
        x = F.normalize(model.norm(x).mean(1).float(), dim=-1)
        kinds = torch.arange(batch, device=GPU) // 4
        far, same = torch.cdist(x, x), kinds[:, None] == kinds
        return F.relu((far * same).amax(1) - (far + 10.0 * same).amin(1) + 0.2).mean()

    train(step, [it for name, it in model.named_parameters() if not name.startswith("head")])


def points(batch, n_points=512):
    """Each point of a cloud looks at its nearest."""
    class Edges(nn.Module):
        def __init__(self, inside, outside, n_near=16):
            super().__init__()
            self.n_near, self.layer = n_near, nn.Sequential(nn.Conv2d(2 * inside, outside, 1, bias=False), nn.BatchNorm2d(outside), nn.LeakyReLU(0.2))

        def forward(self, x):
            near = torch.cdist(x, x).topk(self.n_near, largest=False).indices
            of = torch.gather(x[:, None].expand(-1, x.shape[1], -1, -1), 2, near[..., None].expand(-1, -1, -1, x.shape[-1]))
            both = torch.cat([of - x[:, :, None], x[:, :, None].expand_as(of)], -1)
            return self.layer(both.permute(0, 3, 1, 2)).amax(-1).transpose(1, 2)

    edges = nn.ModuleList([Edges(3, 64), Edges(64, 64), Edges(64, 128)]).to(GPU)
    head = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.3), nn.Linear(512, 40)).to(GPU)

    def step():
        x, found = torch.randn(batch, n_points, 3, device=GPU), []
        for edge in edges:
            x = edge(x)
            found.append(x)
        return F.cross_entropy(head(torch.cat(found, -1).amax(1)), torch.randint(0, 40, (batch,), device=GPU))

    train(step, [*edges.parameters(), *head.parameters()])


def masked(batch, side=160):
    """A quarter of an image's patches is seen, and all are drawn."""
    patches = (side // 16) ** 2
    encode, decode = (nn.ModuleList(Block(width, width // 64) for _ in range(n)) for width, n in ((512, 6), (256, 2)))
    model = nn.ModuleDict({"patch": nn.Linear(768, 512), "encode": encode, "narrow": nn.Linear(512, 256), "decode": decode, "draw": nn.Linear(256, 768)}).to(GPU)
    place, blank = (nn.Parameter(torch.zeros(1, n, width, device=GPU)) for n, width in ((patches, 512), (1, 256)))

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            image = torch.rand(batch, patches, 768, device=GPU)
            order = torch.rand(batch, patches, device=GPU).argsort(1)
            pick = lambda x, which: torch.gather(x, 1, which[..., None].expand(-1, -1, x.shape[-1]))
            x = pick(model["patch"](image) + place, order[:, :patches // 4])
            for block in model["encode"]:
                x = block(x)
            x = model["narrow"](x)
            x = pick(torch.cat([x, blank.to(x.dtype).expand(batch, patches - x.shape[1], -1)], 1), order.argsort(1))
            for block in model["decode"]:
                x = block(x)
            return (model["draw"](x).float() - image).square().mean()

    train(step, [*model.parameters(), place, blank])


def muon(batch, seq=384):
    """Steps that are made orthogonal, and half of the layers computed again."""
    model = Gpt(width=640, heads=10, layers=6, words=12288).to(GPU)
    matrices = [it for it in model.blocks.parameters() if it.ndim == 2]
    others = torch.optim.AdamW([it for it in model.parameters() if all(it is not matrix for matrix in matrices)], 1e-4)
    momenta = [torch.zeros_like(it) for it in matrices]

    def forward(tokens):
        x = model.embed(tokens)
        for index, block in enumerate(model.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
        return model.head(model.norm(x))

    for _ in range(STEPS):
        language(model, batch, seq, forward).backward()
        with torch.no_grad():
            for matrix, momentum in zip(matrices, momenta):
                momentum.mul_(0.95).add_(matrix.grad)
                x = momentum.bfloat16()
                x = (x.T if x.shape[0] > x.shape[1] else x) / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                matrix.add_((x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype), alpha=-0.02)
                matrix.grad = None
        others.step()
        others.zero_grad()


def averaged(batch, seq=256):
    """A second model follows the first, which a third part of the steps asks how good it is."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = Gpt(layers=5, words=24576).to(GPU)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.NAdam(model.parameters(), 1e-4)
    for step in range(STEPS):
        language(model, batch, seq).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
        if step % 3 == 1:
            with torch.no_grad():
                language(model, 2 * batch, seq, mean.module)


def at_once(batch, seq=512):
    """Each gradient is used as soon as it is there, and dropped."""
    model = Gpt(width=768, heads=12, layers=5, words=16384).to(GPU, torch.bfloat16)
    optimizers = {it: torch.optim.Adam([it], 1e-4, foreach=False) for it in model.parameters()}

    def use(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(use)
    for _ in range(STEPS):
        tokens = words(model, batch, seq)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def serve(batch, seq=384):
    """Long texts are read in parts, then some words are written, and the cache is dropped."""
    model = Gpt(width=768, heads=12, layers=6, words=32000, groups=4).to(GPU, torch.bfloat16).eval()
    with torch.no_grad():
        for _ in range(2):
            caches = [[None, None] for _ in model.blocks]

            def keep(cache):
                def grown(k, v):
                    cache[:] = [new if old is None else torch.cat([old, new], 2) for old, new in zip(cache, (k, v))]
                    return cache
                return grown

            parts = list(words(model, batch, seq - 1).split(seq // 3, 1))
            for index in range(len(parts) + 8):
                x = model.embed(parts[index] if index < len(parts) else token)
                for block, cache in zip(model.blocks, caches):
                    x = block(x, keep(cache))
                chances = model.head(model.norm(x[:, -1])).float().div(0.8).softmax(-1)
                best, which = chances.topk(50)
                token = torch.gather(which, 1, torch.multinomial(best, 1))


def segment(batch, side=128):
    """Every pixel gets a name, from holes of several widths in what is looked at."""
    stem = nn.Sequential(conv(3, 64, 3, 2), conv(64, 128, 3, 2), conv(128, 128))
    wide = nn.ModuleList(nn.Conv2d(128, 64, 3, padding=rate, dilation=rate) for rate in (1, 6, 12))
    model = nn.ModuleDict({"stem": stem, "wide": wide, "mix": conv(256, 128, 1), "head": nn.Conv2d(128, 21, 1), "pool": nn.Conv2d(128, 64, 1)}).to(GPU).to(memory_format=torch.channels_last)

    def step():
        image = torch.randn(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)
        with torch.autocast(GPU, torch.bfloat16):
            x = model["stem"](image)
            whole = model["pool"](x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
            x = model["head"](model["mix"](torch.cat([*(layer(x) for layer in model["wide"]), whole], 1)))
        x = F.interpolate(x.float(), (side, side), mode="bilinear")
        return F.cross_entropy(x, torch.randint(0, 21, (batch, side, side), device=GPU), ignore_index=20)

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))


def wave(batch, length=8192):
    """Sound, sample by sample, with gaps that double."""
    deep = nn.ModuleList(nn.Conv1d(64, 128, 2, dilation=2**index) for index in range(8))
    side = nn.ModuleList(nn.Conv1d(64, 128, 1) for _ in range(8))
    model = nn.ModuleDict({"in": nn.Embedding(256, 64), "deep": deep, "side": side, "out": nn.Sequential(nn.ReLU(), nn.Conv1d(64, 256, 1))}).to(GPU)

    def step():
        sound = torch.randint(0, 256, (batch, length), device=GPU)
        x, total = model["in"](sound).transpose(1, 2), 0
        for index, (layer, out) in enumerate(zip(model["deep"], model["side"])):
            one, other = layer(F.pad(x, (2**index, 0))).chunk(2, 1)
            more, skip = out(one.tanh() * other.sigmoid()).chunk(2, 1)
            x, total = x + more, total + skip
        return F.cross_entropy(model["out"](total)[..., :-1], sound[:, 1:])

    train(step, model.parameters())


def gru(batch, seq=96):
    """Reads with cuDNN's cells, and writes one word after the other, looking back."""
    width, n_words = 256, 10000
    model = nn.ModuleDict({"in": nn.Embedding(n_words, width), "read": nn.GRU(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1),
                           "cell": nn.GRUCell(3 * width, width), "ask": nn.Linear(width, 2 * width), "out": nn.Linear(width, n_words)}).to(GPU)

    def step():
        read, _ = model["read"](model["in"](torch.randint(0, n_words, (batch, seq), device=GPU)))
        write = torch.randint(0, n_words, (batch, 25), device=GPU)
        state, losses = torch.zeros(batch, width, device=GPU), []
        for index in range(24):
            look = torch.bmm(read, model["ask"](state)[..., None])[..., 0].softmax(-1)
            seen = torch.bmm(look[:, None], read)[:, 0]
            state = model["cell"](torch.cat([model["in"](write[:, index]), seen], -1), state)
            losses.append(F.cross_entropy(model["out"](state), write[:, index + 1]))
        return torch.stack(losses).mean()

    train(step, model.parameters())


def meta(batch, n_inner=2):
    """A step of learning is learnt from: gradients of gradients."""
    from torch.func import functional_call

    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 20)).to(GPU)
    data = lambda: (torch.randn(batch, 3, 32, 32, device=GPU), torch.randint(0, 20, (batch,), device=GPU))

    def step():
        weights = dict(model.named_parameters())
        for _ in range(n_inner):
            images, kinds = data()
            loss = F.cross_entropy(functional_call(model, weights, (images,)), kinds)
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: it - 0.01 * grad for (name, it), grad in zip(weights.items(), found)}
        images, kinds = data()
        return F.cross_entropy(functional_call(model, weights, (images,)), kinds)

    train(step, model.parameters())


def prefer(batch, seq=256):
    """What is liked beside what is not, by a model and by what it was."""
    model, before = (Gpt(layers=5, words=20000).to(GPU) for _ in range(2))
    before.requires_grad_(False)

    def chance(which, tokens):
        with torch.autocast(GPU, torch.bfloat16):
            logits = which(tokens[:, :-1])
        return torch.gather(logits.float().log_softmax(-1), 2, tokens[:, 1:, None])[..., 0].sum(-1)

    def step():
        tokens = torch.cat([words(model, batch, seq), words(model, batch, seq)])
        with torch.no_grad():
            was = chance(before, tokens)
        more = (chance(model, tokens) - was).view(2, batch)
        return -F.logsigmoid(0.1 * (more[0] - more[1])).mean()

    train(step, model.parameters())


def fourier(batch, side=64):
    """A field's waves are weighed, and become a field again."""
    class Waves(nn.Module):
        def __init__(self, width=32, modes=12):
            super().__init__()
            self.modes, self.point = modes, nn.Conv2d(width, width, 1)
            self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)

        def forward(self, x):
            waves, n = torch.fft.rfft2(x), self.modes
            out, weight = torch.zeros_like(waves), torch.view_as_complex(self.weight)
            out[:, :, :n, :n] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :n, :n], weight[0])
            out[:, :, -n:, :n] = torch.einsum("bixy,ioxy->boxy", waves[:, :, -n:, :n], weight[1])
            return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.point(x))

    model = nn.Sequential(nn.Conv2d(3, 32, 1), *[Waves() for _ in range(4)], nn.Conv2d(32, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1)).to(GPU)
    train(lambda: F.mse_loss(model(torch.randn(batch, 3, side, side, device=GPU)), torch.randn(batch, 1, side, side, device=GPU)), model.parameters())


PROGRAMS = [windows, vae, rays, policy, triplets, points, masked, muon, averaged, at_once, serve, segment, wave, gru, meta, prefer, fourier]
