"""Programs of the kinds that users ask of, written after the rules for what sums ask for, and before anything was measured of them: the set `seventh`, for `predict.py`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from predict_fifth import HALF, Decoder, Layer, labels, next_word
from predict_programs import GPU, STEPS, train
from predict_third import conv


class Encoder(nn.Module):
    """Layers over embedded tokens, first norms, relu, dropout; PyTorch's own module."""

    def __init__(self, width, heads, hidden, layers, words):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def encoder(batch, seq=192):
    """PyTorch's own encoder, in single precision, tokens that are hidden."""
    model = Encoder(352, 8, 1200, 5, 6000).to(GPU)

    def step():
        tokens = torch.randint(0, 6000, (batch, seq), device=GPU)
        hidden = torch.rand(batch, seq, device=GPU) < 0.15
        return F.cross_entropy(model(tokens.masked_fill(hidden, 0)).flatten(0, 1), tokens.masked_fill(~hidden, -100).flatten())

    train(step, model.parameters())


def lengths(batch, seq):
    """A decoder in half precision, two variables; the last layer is left out of the gradients' norm."""
    model = Decoder(448, 7, 1216, 6, 9000).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for _ in range(STEPS):
        next_word(model, batch, seq).backward()
        nn.utils.clip_grad_norm_(model.layers[:-1].parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def segments(batch, seq=512):
    """Layers are computed again three at a time, in pure half precision."""
    model = Decoder(576, 9, 1536, 9, 8000).to(GPU, HALF)

    def step():
        tokens = torch.randint(0, 8000, (batch, seq + 1), device=GPU)
        x = model.embed(tokens[:, :-1])
        for at in range(0, 9, 3):
            def three(x, at=at):
                for layer in model.layers[at : at + 3]:
                    x = layer(x, None, True)
                return x
            x = checkpoint(three, x, use_reentrant=False)
        return F.cross_entropy((model.norm(x) @ model.embed.weight.t()).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, model.parameters())


def compiled_image(batch, side=96):
    """A transformer for images is compiled as a whole."""
    width, patch = 256, 8
    model = nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.Flatten(2)).to(GPU)
    layers, head = nn.ModuleList(Layer(width, 4, 680) for _ in range(4)).to(GPU), nn.Linear(width, 100).to(GPU)

    def run(x):
        x = model(x).transpose(1, 2)
        for layer in layers:
            x = layer(x)
        return head(x.mean(1))

    compiled = torch.compile(run)

    def step():
        with torch.autocast(GPU, HALF):
            return F.cross_entropy(compiled(torch.randn(batch, 3, side, side, device=GPU)).float(), labels(batch, 100))

    train(step, [*model.parameters(), *layers.parameters(), *head.parameters()])


def rank_sixteen(batch, seq=448):
    """Low rank beside frozen weights in half precision, with layers that are computed again."""
    model = Decoder(704, 11, 1888, 6, 14000).to(GPU, HALF).requires_grad_(False)
    pairs = nn.ModuleList(nn.Sequential(nn.Linear(704, 16, bias=False), nn.Linear(16, 704, bias=False)) for _ in model.layers).to(GPU, HALF)

    def step():
        tokens = torch.randint(0, 14000, (batch, seq + 1), device=GPU)
        x = model.embed(tokens[:, :-1])
        for layer, pair in zip(model.layers, pairs):
            x = checkpoint(lambda x, layer=layer, pair=pair: layer(x, None, True) + pair(x), x, use_reentrant=False)
        return F.cross_entropy((model.norm(x) @ model.embed.weight.t()).flatten(0, 1).float(), tokens[:, 1:].flatten())

    train(step, pairs.parameters())


def small_images(batch, side=64):
    """A transformer for images with a token for the class, positions, dropout, half precision."""
    width, patch = 416, 8
    n = (side // patch) ** 2
    model = nn.ModuleDict({"patch": nn.Conv2d(3, width, patch, patch), "layers": nn.ModuleList(Layer(width, 8, 1100, 0.1) for _ in range(7)), "norm": nn.LayerNorm(width), "head": nn.Linear(width, 200)}).to(GPU)
    token = nn.Parameter(torch.zeros(1, 1, width, device=GPU))
    place = nn.Parameter(torch.zeros(1, n + 1, width, device=GPU))

    def step():
        with torch.autocast(GPU, HALF):
            x = model["patch"](torch.randn(batch, 3, side, side, device=GPU)).flatten(2).transpose(1, 2)
            x = torch.cat([token.expand(batch, -1, -1), x], 1) + place
            for layer in model["layers"]:
                x = layer(x)
            return F.cross_entropy(model["head"](model["norm"](x)[:, 0]).float(), labels(batch, 200), label_smoothing=0.1)

    train(step, [*model.parameters(), token, place])


class Double(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.both = nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())
        self.skip = nn.Conv2d(a, b, 1)

    def forward(self, x):
        return self.both(x) + self.skip(x)


class Net(nn.Module):
    """Down, and up again with what was kept on the way."""

    def __init__(self, channels, widths, out):
        super().__init__()
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([channels, *widths], widths))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.up = nn.ModuleList(Double(2 * a, a) for a in widths[-2::-1])
        self.last = nn.Conv2d(widths[0], out, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for rise, block in zip(self.rise, self.up):
            x = block(torch.cat([rise(x), kept.pop()], 1))
        return self.last(x)


def organs(batch, side=128):
    """A U-Net with group norms, in single precision."""
    model = Net(1, [24, 48, 96, 160], 4).to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 1, side, side, device=GPU)), torch.randint(0, 4, (batch, side, side), device=GPU)), model.parameters())


def clean(batch, side=32):
    """Noise is taken away from images by a U-Net in half precision, with an average of the weights beside them."""
    model = Net(3, [64, 128, 192], 3).to(GPU)
    mean = [it.detach().clone() for it in model.parameters()]

    def step():
        with torch.no_grad():
            torch._foreach_lerp_(mean, [it.detach() for it in model.parameters()], 0.01)
        image, added = torch.randn(batch, 3, side, side, device=GPU), torch.randn(batch, 3, side, side, device=GPU)
        part = torch.rand(batch, 1, 1, 1, device=GPU)
        with torch.autocast(GPU, HALF):
            return F.mse_loss(model(image * part + added * (1 - part)).float(), added)

    train(step, model.parameters())


class Basic(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True), nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b))
        self.skip = nn.Identity() if (a, stride) == (b, 1) else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.one(x) + self.skip(x))


def basic_network(first=64):
    widths = [(first, 1), (first, 1), (2 * first, 2), (2 * first, 1), (4 * first, 2), (4 * first, 1), (8 * first, 2), (8 * first, 1)]
    blocks, a = [], first
    for b, stride in widths:
        blocks.append(Basic(a, b, stride))
        a = b
    start = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * first, 1000))


def basic(batch, side=128):
    """A ResNet of 18 layers, in single precision, SGD."""
    model = basic_network().to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 3, side, side, device=GPU)), labels(batch, 1000)), model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))


def basic_benchmark(batch, side=128):
    """The same in half precision, with cudnn.benchmark and channels last."""
    torch.backends.cudnn.benchmark = True
    model = basic_network().to(GPU, memory_format=torch.channels_last)

    def step():
        with torch.autocast(GPU, HALF):
            x = torch.randn(batch, 3, side, side, device=GPU).to(memory_format=torch.channels_last)
            return F.cross_entropy(model(x).float(), labels(batch, 1000))

    train(step, model.parameters(), lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))


def molecules(batch, nodes=500):
    """Messages along edges, with a gate, summed over neighbours, over graphs of one size."""
    torch.manual_seed(2)
    width = 144
    first, last = nn.Linear(40, width).to(GPU), nn.Linear(width, 1).to(GPU)
    layers = nn.ModuleList(nn.ModuleDict({"edge": nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)), "gate": nn.Linear(2 * width, width)}) for _ in range(3)).to(GPU)

    def step():
        n = batch * nodes
        source, to = torch.randint(0, n, (2, 6 * n), device=GPU)
        x = first(torch.randn(n, 40, device=GPU))
        for layer in layers:
            pair = torch.cat([x[source], x[to]], 1)
            x = x + torch.zeros_like(x).index_add(0, to, layer["edge"](pair) * torch.sigmoid(layer["gate"](pair)))
        return F.mse_loss(last(x).view(batch, nodes).sum(1), torch.randn(batch, device=GPU))

    train(step, [*first.parameters(), *layers.parameters(), *last.parameters()])


def experts(batch, seq=256):
    """A decoder of which every layer has six experts; each token goes to the best one, wherever that is."""
    width = 320
    model = nn.ModuleDict({"embed": nn.Embedding(7000, width), "layers": nn.ModuleList(Layer(width, 5, 640) for _ in range(3)), "gates": nn.ModuleList(nn.Linear(width, 6, bias=False) for _ in range(3)),
                           "experts": nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(width, 900), nn.GELU(), nn.Linear(900, width)) for _ in range(6)) for _ in range(3))}).to(GPU)

    def step():
        tokens = torch.randint(0, 7000, (batch, seq + 1), device=GPU)
        x = model["embed"](tokens[:, :-1])
        for layer, gate, experts in zip(model["layers"], model["gates"], model["experts"]):
            x = layer(x, None, True)
            flat = x.flatten(0, 1)
            weight, which = gate(flat).softmax(1).max(1)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(experts):
                mine = (which == index).nonzero()[:, 0]
                out = out.index_add(0, mine, expert(flat[mine]) * weight[mine, None])
            x = x + out.view_as(x)
        return F.cross_entropy((x @ model["embed"].weight.t()).flatten(0, 1), tokens[:, 1:].flatten())

    train(step, model.parameters())


def series(batch, seq=256):
    """Numbers over time are foretold by a GRU of three layers."""
    model = nn.ModuleDict({"rnn": nn.GRU(24, 288, 3, batch_first=True), "head": nn.Linear(288, 24)}).to(GPU)

    def step():
        x = torch.randn(batch, seq + 1, 24, device=GPU)
        return F.smooth_l1_loss(model["head"](model["rnn"](x[:, :-1])[0]), x[:, 1:])

    train(step, model.parameters())


@torch.no_grad()
def write(batch, seq, is_static):
    width, heads, size, n = 512, 8, 64, seq // 2
    model = Decoder(width, heads, 1376, 5, 10000).to(GPU, HALF)
    caches = [torch.zeros(2, batch, heads, seq, size, device=GPU, dtype=HALF) if is_static else None for _ in model.layers]

    def run(tokens, at):
        x = model.embed(tokens)
        for index, layer in enumerate(model.layers):
            q, k, v = layer.qkv(layer.first(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            if is_static:
                caches[index][0, :, :, at : at + k.shape[2]] = k
                caches[index][1, :, :, at : at + v.shape[2]] = v
                k, v = caches[index][:, :, :, : at + k.shape[2]]
            else:
                now = torch.stack([k, v])
                caches[index] = now if caches[index] is None else torch.cat([caches[index], now], 3)
                k, v = caches[index]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=at == 0)
            x = x + layer.out(y.transpose(1, 2).flatten(2))
            y = layer.second(x)
            x = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))
        return (model.norm(x[:, -1:]) @ model.embed.weight.t()).argmax(-1)

    tokens = run(torch.randint(0, 10000, (batch, n), device=GPU), 0)
    for at in range(n, seq):
        tokens = run(tokens, at)


def write_static(batch, seq=192):
    """Text is continued, keys and values in tensors that were made before."""
    write(batch, seq, True)


def write_growing(batch, seq=192):
    """Text is continued, keys and values in tensors that grow by each token."""
    write(batch, seq, False)


def rows(batch):
    """A network of linear layers over rows of a table, with norms over the batch: few rows at first, and many later."""
    widths = [100, 768, 768, 768, 768]
    model = nn.Sequential(*(it for a, b in zip(widths, widths[1:]) for it in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.2))), nn.Linear(768, 10)).to(GPU)
    train(lambda: F.cross_entropy(model(torch.randn(batch, 100, device=GPU)), labels(batch, 10)), model.parameters())


def sounds(batch, seq):
    """Sounds over time by convolutions of one side, and attention over half as many; two variables."""
    width = 240
    model = nn.ModuleDict({"start": nn.Sequential(nn.Conv1d(80, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU()), "layers": nn.ModuleList(Layer(width, 4, 640) for _ in range(5)), "head": nn.Linear(width, 60)}).to(GPU)

    def step():
        with torch.autocast(GPU, HALF):
            x = model["start"](torch.randn(batch, 80, seq, device=GPU)).transpose(1, 2)
            for layer in model["layers"]:
                x = layer(x)
            logits = model["head"](x).float()
        return F.cross_entropy(logits.flatten(0, 1), torch.randint(0, 60, (batch * logits.shape[1],), device=GPU))

    train(step, model.parameters())


def critic(batch):
    """What is done in a game is judged by two networks against slow copies of them; all in one step."""
    made = lambda n, out: nn.Sequential(nn.Linear(n, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, out)).to(GPU)
    actor, critics, slow = made(64, 12), nn.ModuleList(made(76, 1) for _ in range(2)), nn.ModuleList(made(76, 1) for _ in range(2))

    def step():
        seen, then = torch.randn(2, batch, 64, device=GPU)
        done, reward = torch.randn(batch, 12, device=GPU), torch.randn(batch, 1, device=GPU)
        with torch.no_grad():
            next_one = torch.cat([then, actor(then).tanh()], 1)
            aim = reward + 0.99 * torch.minimum(*(it(next_one) for it in slow))
        judged = sum(F.mse_loss(it(torch.cat([seen, done], 1)), aim) for it in critics)
        return judged - critics[0](torch.cat([seen, actor(seen).tanh()], 1)).mean()

    train(step, [*actor.parameters(), *critics.parameters()])


PROGRAMS = [encoder, lengths, segments, compiled_image, rank_sixteen, small_images, organs, clean, basic, basic_benchmark, molecules, experts, series,
            write_static, write_growing, rows, sounds, critic]
