"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `ctc` and `segment` need transformers, `detect` torchvision, `classify`
timm; without them these raise ImportError.

Three edits that `edits.py` does not know are added here: `--optimizer adam8bit`, `--checkpoint selective` and `--freeze-up-to LAYER`,
where LAYER is a module's name and the last whose parameters are frozen.
"""
import functools, math, os, sys

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "lstm": [
        "--optimizer momentum", "--optimizer adamw", "--precision autocast-fp16", "--checkpoint all", "--offload activations",
        "--accumulate 2 --set-to-none no",
    ],
    "tabular": [
        "--set-to-none yes", "--optimizer sgd", "--precision bf16", "--checkpoint selective", "--accumulate 4",
        "--adam fused --checkpoint every:2",
    ],
    "recommend": [
        "--optimizer sgd", "--optimizer adafactor", "--set-to-none yes", "--precision bf16", "--offload optimizer",
        "--optimizer adam --adam for-loop",
    ],
    "fno": [
        "--adam for-loop", "--optimizer momentum", "--checkpoint layers:0..1", "--offload activations", "--offload optimizer",
        "--checkpoint all --set-to-none no",
    ],
    "ctc": [
        "--precision fp32", "--checkpoint layers:6..11", "--lora 16", "--freeze-up-to wav2vec2.encoder.layers.5", "--optimizer adam8bit",
        "--precision autocast-bf16 --checkpoint all",
    ],
    "detect": [
        "--optimizer adamw", "--precision autocast-bf16", "--checkpoint all", "--freeze 0.5", "--accumulate 2",
        "--optimizer sgd --checkpoint every:2",
    ],
    "classify": [
        "--optimizer adam", "--precision fp32", "--precision autocast-bf16", "--checkpoint every:2", "--freeze 0.5",
        "--optimizer sgd --checkpoint all",
    ],
    "vqgan": [
        "--adam fused", "--optimizer adam8bit", "--precision autocast-bf16", "--checkpoint all", "--set-to-none no",
        "--optimizer momentum --precision bf16",
    ],
    "segment": [
        "--adam foreach", "--precision autocast-fp16", "--checkpoint selective", "--lora 8", "--accumulate 2",
        "--optimizer adafactor --checkpoint every:2",
    ],
    "graph": [
        "--precision autocast-bf16", "--precision bf16", "--checkpoint all", "--optimizer adafactor", "--set-to-none no",
        "--optimizer adamw --checkpoint layers:0..0",
    ],
}
# These need two GPUs.
LAYOUTS = {
    "tabular": ["--layout ddp:2", "--layout fsdp:2"],
    "detect": ["--layout ddp:2"],
    "recommend": ["--layout zero1:2"],
}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "lstm": 4, "tabular": 6, "recommend": 6, "fno": 7, "ctc": 8, "detect": 9, "classify": 10, "vqgan": 10, "segment": 11, "graph": 14,
}

import torch
from torch import nn
from torch.nn import functional as F

TINY = bool(os.environ.get("EDITS_TINY"))
GPU = "cpu" if os.environ.get("EDITS_CPU") else "cuda"


def admit():
    """Lets `edits.py` accept the edits that only this file knows."""
    values = getattr(sys.modules["__main__"], "VALUES", {})
    values["--freeze-up-to"] = None
    for name, more in (("--optimizer", "adam8bit"), ("--checkpoint", "selective")):
        if name in values and more not in values[name]:
            values[name].append(more)


admit()


def size(usual, tiny):
    return tiny if TINY else usual


# Edits that edits.py does not have.


class Adam8bit(torch.optim.Optimizer):
    """Adam with two states of eight bits: one scale for each 256 values, as bitsandbytes stores them. Small tensors keep 32 bits."""

    BLOCK, PIECE, SMALL = 256, 1 << 18, 4096

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.codes = {}

    def code(self, signed, device):
        """The 256 values that eight bits stand for, denser near zero, and the limits between them."""
        if (signed, device) not in self.codes:
            if signed:
                half = torch.logspace(-6, 0, 127, device=device)
                values = torch.cat([-half.flip(0), torch.zeros(2, device=device), half])
            else:
                values = torch.cat([torch.zeros(1, device=device), torch.logspace(-7, 0, 255, device=device)])
            self.codes[signed, device] = values, (values[1:] + values[:-1]) / 2
        return self.codes[signed, device]

    def full(self, state, name, first, last, code):
        blocks = slice(first // self.BLOCK, -(-last // self.BLOCK))
        scale = state[f"{name}_scale"][blocks].repeat_interleave(self.BLOCK)[: last - first]
        return code[0][state[name][first:last].int()].mul_(scale)

    def keep(self, state, name, first, last, code, value):
        blocks = slice(first // self.BLOCK, -(-last // self.BLOCK))
        padded = F.pad(value, (0, -len(value) % self.BLOCK)).view(-1, self.BLOCK)
        scale = padded.abs().amax(1)
        state[f"{name}_scale"][blocks] = scale
        padded = padded / scale.clamp(min=1e-30)[:, None]
        state[name][first:last] = torch.bucketize(padded.view(-1)[: last - first], code[1], out_int32=True).to(torch.uint8)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for it in group["params"]:
                if it.grad is not None:
                    self.update(it, group, *group["betas"])

    def update(self, it, group, beta1, beta2):
        state, small = self.state[it], it.numel() < self.SMALL
        if not state:
            state["step"] = 0
            for name in ("m", "v"):
                state[name] = torch.zeros(it.numel(), dtype=torch.float32 if small else torch.uint8, device=it.device)
                if not small:
                    # A scale of zero: whatever the bytes say, the value is zero.
                    state[f"{name}_scale"] = torch.zeros(-(-it.numel() // self.BLOCK), device=it.device)
        state["step"] += 1
        rate = group["lr"] / (1 - beta1 ** state["step"])
        correction = math.sqrt(1 - beta2 ** state["step"])
        signed, unsigned = self.code(True, it.device), self.code(False, it.device)
        values, grads = it.view(-1), it.grad.reshape(-1)
        for first in range(0, it.numel(), self.PIECE):
            last = min(first + self.PIECE, it.numel())
            grad = grads[first:last].float()
            if small:
                m, v = state["m"][first:last], state["v"][first:last]
            else:
                m, v = self.full(state, "m", first, last, signed), self.full(state, "v", first, last, unsigned)
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if group["weight_decay"]:
                values[first:last].mul_(1 - group["lr"] * group["weight_decay"])
            values[first:last].sub_((m / (v.sqrt().div_(correction).add_(group["eps"]))).mul_(rate))
            if not small:
                self.keep(state, "m", first, last, signed, m)
                self.keep(state, "v", first, last, unsigned, v)


def optimizer(edits, parameters, kind, **how):
    """As `edits.optimizer`, which does not have Adam with states of eight bits."""
    if edits.edits.get("--optimizer") != "adam8bit":
        return edits.optimizer(parameters, kind, **how)
    edits.note("by", "Adam8bit")
    parameters = list(parameters)
    if not isinstance(parameters[0], dict):
        parameters = [it for it in parameters if it.requires_grad]
    return Adam8bit(parameters, **{name: value for name, value in how.items() if name in ("lr", "betas", "eps", "weight_decay")})


def matrix_products():
    """The operations whose results selective checkpointing keeps; all others are computed again."""
    names = """mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"""
    return {getattr(torch.ops.aten, name).default for name in names.split() if hasattr(torch.ops.aten, name)}


def select(blocks):
    """Computes the blocks again in the backward pass, except for their matrix products."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
    kept = matrix_products()

    def policy(_, op, *values, **named):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def with_checkpoint(forward):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return lambda *values, **named: checkpoint(forward, *values, use_reentrant=False, context_fn=contexts, **named)

    for block in blocks:
        block.forward = with_checkpoint(block.forward)


def prepare(edits, model, blocks):
    """As `edits.prepare`, which has neither selective checkpointing nor freezing up to a layer."""
    last, blocks = edits.edits.get("--freeze-up-to"), list(blocks)
    if last:
        # All parameters before those of the layer, in the order of the model, and the layer's own.
        names = [name for name, _ in model.named_parameters()]
        end = max(number for number, name in enumerate(names) if name.startswith(last + "."))
        for name, it in list(model.named_parameters())[: end + 1]:
            it.requires_grad_(False)
        edits.note("frozen", f"{end + 1} of {len(names)} tensors")
    if edits.edits.get("--checkpoint") != "selective":
        return edits.prepare(model, blocks)
    del edits.edits["--checkpoint"]
    edits.note("again", f"selectively {len(blocks)} of {len(blocks)}")
    select(blocks)
    return edits.prepare(model, blocks)


# A language model of LSTM layers: truncated back-propagation, tied weights, regularized activations.


class LockedDropout(nn.Module):
    """The same elements are dropped at all times."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * mask.expand_as(x)


class LanguageModel(nn.Module):
    def __init__(self, n_words, n_in, n_hidden, n_layers):
        super().__init__()
        self.encoder = nn.Embedding(n_words, n_in)
        widths = [n_in] + [n_hidden] * (n_layers - 1) + [n_in]
        self.rnns = nn.ModuleList(nn.LSTM(a, b) for a, b in zip(widths, widths[1:]))
        self.decoder = nn.Linear(n_in, n_words)
        self.decoder.weight = self.encoder.weight
        self.drop_in, self.drop_between, self.drop_out = LockedDropout(0.65), LockedDropout(0.3), LockedDropout(0.4)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens, hidden):
        x, after = self.drop_in(self.encoder(tokens)), []
        for number, rnn in enumerate(self.rnns):
            x, state = rnn(x, hidden[number])
            after.append(state)
            if number < len(self.rnns) - 1:
                x = self.drop_between(x)
        dropped = self.drop_out(x)
        return self.decoder(dropped.view(-1, dropped.size(2))), after, x, dropped

    def start(self, n):
        weight = self.encoder.weight
        return [tuple(weight.new_zeros(1, n, it.hidden_size) for _ in range(2)) for it in self.rnns]


def detached(hidden):
    return [tuple(it.detach() for it in pair) for pair in hidden]


def lstm(edits):
    edits.habits()
    if GPU == "cpu":
        # oneDNN has no LSTM in half precision.
        torch.backends.mkldnn.set_flags(_enabled=False)
    n_words, n_batch, n_time = size(33278, 500), size(80, 4), size(70, 9)
    model = LanguageModel(n_words, size(400, 16), size(1150, 32), 3)
    model = prepare(edits, model, model.rnns)
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=1.0, weight_decay=1.2e-6)
    # The whole text lies on the GPU, one column for each sequence of the batch.
    text = torch.randint(n_words, (n_time * 4 * edits.accumulate + 1, n_batch)).to(GPU)
    hidden, total = model.start(n_batch), 0.0
    place = 0
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            tokens, targets = text[place : place + n_time], text[place + 1 : place + 1 + n_time].reshape(-1)
            place += n_time
            hidden = detached(hidden)
            with edits.forward():
                output, hidden, raw, dropped = model(tokens, hidden)
                loss = F.cross_entropy(output, targets)
                loss = loss + 2 * dropped.float().pow(2).mean() + (raw[1:] - raw[:-1]).float().pow(2).mean()
            if edits.precision == "autocast-fp16":
                hidden = [tuple(it.float() for it in pair) for pair in hidden]
            edits.backward(loss)
            total += loss.detach()
        edits.step(opt, model.parameters(), clip=0.25)
    print(f"loss {total.item() / 4:.2f}")


# Recognition of speech: wav2vec 2.0 with a frozen feature encoder, CTC, half precision, two batches for a step.


def ctc(edits):
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, get_linear_schedule_with_warmup, set_seed
    # The spans that are masked are drawn by numpy.
    set_seed(0)
    edits.habits(precision="autocast-fp16", accumulate=2)
    small = dict(
        hidden_size=32, num_hidden_layers=12, num_attention_heads=2, intermediate_size=64, conv_dim=(16,) * 7, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    config = Wav2Vec2Config(
        vocab_size=32, ctc_loss_reduction="mean", pad_token_id=0, layerdrop=0.0, mask_time_prob=0.05, ctc_zero_infinity=True,
        attention_dropout=0.1, **size({}, small),
    )
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    model = prepare(edits, model, model.wav2vec2.encoder.layers)
    decayed = [it for it in model.parameters() if it.requires_grad and it.ndim > 1]
    others = [it for it in model.parameters() if it.requires_grad and it.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.005}, {"params": others, "weight_decay": 0.0}]
    opt = optimizer(edits, [it for it in groups if it["params"]], torch.optim.AdamW, lr=1e-4)
    schedule = get_linear_schedule_with_warmup(opt, 500, 10000)
    n_batch = size(8, 2)
    for step in range(4):
        for micro in range(edits.accumulate):
            # Batches are of similar lengths; the shorter ones are padded.
            longest = size(192000, 6400) - 16000 * ((2 * step + micro) % 3) // size(1, 16)
            lengths = torch.linspace(longest * 0.9, longest, n_batch).long()
            mask = (torch.arange(longest) < lengths[:, None]).long()
            sound = torch.randn(n_batch, longest) * mask
            labels = torch.randint(1, 32, (n_batch, size(150, 6)))
            labels[0, -size(30, 2):] = -100
            batch = {"input_values": sound.to(GPU, edits.dtype), "attention_mask": mask.to(GPU), "labels": labels.to(GPU)}
            with edits.forward():
                outputs = model(**batch)
            edits.backward(outputs.loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    print(f"loss {outputs.loss.item():.2f}")


# A recommender: embedding tables of categories, products of all pairs, Adagrad.


class Recommender(nn.Module):
    def __init__(self, rows, n_dense, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        for n, table in zip(rows, self.tables):
            nn.init.uniform_(table.weight, -math.sqrt(1 / n), math.sqrt(1 / n))
        self.bottom = self.mlp([n_dense, 512, 256, width])
        n_pairs = (len(rows) + 1) * len(rows) // 2
        self.top = self.mlp([n_pairs + width, 1024, 1024, 512, 256, 1])[:-1]
        one = torch.tril_indices(len(rows) + 1, len(rows) + 1, offset=-1)
        self.register_buffer("pairs", one, persistent=False)

    @staticmethod
    def mlp(widths):
        return nn.Sequential(*(it for a, b in zip(widths, widths[1:]) for it in (nn.Linear(a, b), nn.ReLU())))

    def forward(self, dense, bags, offsets):
        x = self.bottom(dense)
        looked_up = [table(bag, offset) for table, bag, offset in zip(self.tables, bags, offsets)]
        all_of_them = torch.stack([x, *looked_up], 1)
        products = torch.bmm(all_of_them, all_of_them.transpose(1, 2))
        flat = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, flat], 1)).squeeze(1)


def recommend(edits):
    edits.habits(set_to_none="no")
    criteo = [
        1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547,
        18, 15, 286181, 105, 142572,
    ]
    rows = [min(it, size(750_000, 300)) for it in criteo]
    with torch.device(GPU):
        model = Recommender(rows, 13, size(64, 8))
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adagrad, lr=0.01)
    n_batch = size(16384, 16)
    for step in range(3):
        dense = torch.rand(n_batch, 13).log1p().to(GPU, edits.dtype)
        # One category for each sample and table, except for the third table: a user's last ten.
        n_each = [10 if number == 2 else 1 for number in range(len(rows))]
        bags = [torch.randint(n, (n_batch * k,)).to(GPU) for n, k in zip(rows, n_each)]
        offsets = [torch.arange(0, n_batch * k, k).to(GPU) for k in n_each]
        clicked = (torch.rand(n_batch) < 0.25).to(GPU, edits.dtype)
        with edits.forward():
            loss = F.binary_cross_entropy_with_logits(model(dense, bags, offsets), clicked)
        edits.zero_grad(opt)
        edits.backward(loss)
        edits.step(opt)
    print(f"loss {loss.item():.3f}")


# A transformer for tables: a token for each feature, ReGLU, gradients that are zeroed and kept.


class TableBlock(nn.Module):
    def __init__(self, width, n_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, n_heads, dropout=0.0, batch_first=True)
        self.first, self.second = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        a, b = self.first(self.norm2(x)).chunk(2, -1)
        return x + self.second(self.drop(a * F.relu(b)))


class TableTransformer(nn.Module):
    def __init__(self, n_numbers, cardinalities, width, n_blocks):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_numbers, width) * 0.02), nn.Parameter(torch.zeros(n_numbers, width))
        self.embedding = nn.Embedding(sum(cardinalities), width)
        self.register_buffer("offsets", torch.tensor([0, *cardinalities[:-1]]).cumsum(0))
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(TableBlock(width, 8, width * 4 // 3) for _ in range(n_blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers, categories):
        tokens = numbers[:, :, None] * self.weight + self.bias
        x = torch.cat([self.cls.expand(len(numbers), -1, -1), tokens, self.embedding(categories + self.offsets)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0]).squeeze(1)


def tabular(edits):
    torch.set_float32_matmul_precision("high")
    edits.habits(set_to_none="no")
    cardinalities = size([7, 16, 9, 42, 1200, 300, 5, 60000, 12, 24], [3, 4, 5])
    model = TableTransformer(size(41, 5), cardinalities, size(192, 16), size(4, 2))
    blocks = list(model.blocks)
    model = prepare(edits, model, blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=1e-5)
    n_batch = size(2048, 8)
    losses = []
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            numbers = torch.randn(n_batch, size(41, 5)).to(GPU, edits.dtype)
            categories = torch.stack([torch.randint(n, (n_batch,)) for n in cardinalities], 1).to(GPU)
            target = torch.randint(2, (n_batch,)).to(GPU, edits.dtype)
            with edits.forward():
                logits = model(numbers, categories)
                loss = F.binary_cross_entropy_with_logits(logits, target)
            edits.backward(loss)
            losses.append(loss.detach())
        edits.step(opt)
    print(f"loss {torch.stack(losses).mean().item():.3f}")


# Detection of objects: FCOS of torchvision, images of different sizes, SGD with momentum, a warm-up.


def detect(edits):
    from torchvision.models.detection import fcos_resnet50_fpn
    edits.habits()
    small = size({}, dict(min_size=64, max_size=96))
    model = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, **small)
    body = model.backbone.body
    blocks = [it for stage in (body.layer1, body.layer2, body.layer3, body.layer4) for it in stage]
    model = prepare(edits, model, blocks)
    opt = optimizer(edits, [it for it in model.parameters() if it.requires_grad], torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(edits.scheduled(opt), start_factor=0.001, total_iters=1000)
    shapes = [(480, 640), (427, 640), (640, 480), (500, 375)]
    for step in range(4):
        for micro in range(edits.accumulate):
            images, targets = [], []
            for number in range(size(4, 2)):
                height, width = shapes[(step + micro + number // 3) % 4]
                images.append(torch.rand(3, height // size(1, 8), width // size(1, 8)))
                n = 3 + 5 * number
                corner, extent = torch.rand(n, 2) * 0.5, torch.rand(n, 2) * 0.4 + 0.05
                scale = torch.tensor([width, height] * 2) / size(1, 8)
                targets.append({"boxes": torch.cat([corner, corner + extent], 1) * scale, "labels": torch.randint(1, 91, (n,))})
            images = [it.to(GPU) for it in images]
            targets = [{key: value.to(GPU) for key, value in it.items()} for it in targets]
            with edits.forward():
                losses = model(images, targets)
                loss = sum(losses.values())
            edits.backward(loss)
        edits.step(opt)
        edits.zero_grad(opt)
        warm_up.step()
    print(f"loss {loss.item():.3f}")


# An operator of fields: Fourier layers with complex weights, Adam, a relative error.


class FourierLayer(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        scale = 1 / (width * width)
        self.low = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.rand(width, width, modes, modes, dtype=torch.cfloat))
        self.mlp = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))
        self.skip = nn.Conv2d(width, width, 1)

    def forward(self, x):
        n, m = x.size(0), self.modes
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros(n, x.size(1), x.size(2), x.size(3) // 2 + 1, dtype=torch.cfloat, device=x.device)
        kept[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        kept[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        y = torch.fft.irfft2(kept, s=x.shape[-2:])
        return F.gelu(self.mlp(y) + self.skip(x))


class FourierOperator(nn.Module):
    def __init__(self, width, modes, n_layers):
        super().__init__()
        self.lift = nn.Linear(12, width)
        self.layers = nn.ModuleList(FourierLayer(width, modes) for _ in range(n_layers))
        self.project = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, 1, 1))

    def forward(self, x):
        n, height, width, _ = x.shape
        rows = torch.linspace(0, 1, height, device=x.device).view(1, height, 1, 1).expand(n, -1, width, 1)
        columns = torch.linspace(0, 1, width, device=x.device).view(1, 1, width, 1).expand(n, height, -1, 1)
        x = self.lift(torch.cat([x, rows, columns], -1)).permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.project(x)


def fno(edits):
    edits.habits()
    model = FourierOperator(size(64, 8), size(32, 3), 4)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(opt), T_max=100)
    n_batch, n = size(12, 2), size(256, 16)
    # The data are small enough for the GPU.
    fields = torch.randn(2 * n_batch, n, n, 10).to(GPU)
    answers = torch.randn(2 * n_batch, 1, n, n).to(GPU)
    for step in range(4):
        chosen = torch.randperm(2 * n_batch, device=GPU)[:n_batch]
        x, y = fields[chosen], answers[chosen]
        edits.zero_grad(opt)
        with edits.forward():
            out = model(x)
            difference = (out - y).flatten(1).norm(dim=1)
            loss = (difference / y.flatten(1).norm(dim=1)).mean()
        edits.backward(loss)
        edits.step(opt)
        schedule.step()
    print(f"loss {loss.item():.3f}")


# Classification of images: EfficientNet of timm, channels last, RMSprop, half precision, mixed images.


def classify(edits):
    from timm import create_model
    edits.habits(precision="autocast-fp16")
    model = create_model(size("efficientnet_b3", "efficientnet_b0"), num_classes=size(1000, 10), drop_rate=0.3, drop_path_rate=0.2)
    model = model.to(memory_format=torch.channels_last)
    model = prepare(edits, model, [block for stage in model.blocks for block in stage])
    opt = optimizer(edits, model.parameters(), torch.optim.RMSprop, lr=0.016, alpha=0.9, eps=0.001, momentum=0.9, weight_decay=1e-5)
    n_batch, n = size(64, 4), size(288, 64)
    for step in range(4):
        images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
        labels = F.one_hot(torch.randint(size(1000, 10), (n_batch,)), size(1000, 10)).float().to(GPU, non_blocking=True)
        images = images.to(edits.dtype).sub_(124.0).div_(58.0).contiguous(memory_format=torch.channels_last)
        part = 0.7 - 0.1 * step
        images = images.mul_(part).add_(images.flip(0).mul_(1 - part))
        labels = labels * part + labels.flip(0) * (1 - part)
        with edits.forward():
            output = model(images)
            loss = F.cross_entropy(output, labels, label_smoothing=0.1)
        edits.zero_grad(opt)
        edits.backward(loss)
        edits.step(opt)
    print(f"loss {loss.item():.3f}")


# An autoencoder with a codebook and a discriminator: two optimizers, an adaptive weight from gradients.


class ResidualBlock(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, n_in), nn.GroupNorm(8, n_out)
        self.conv1, self.conv2 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.short = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x):
        y = self.norm1(x)
        y = self.conv1(y * torch.sigmoid(y))
        y = self.norm2(y)
        y = self.conv2(y * torch.sigmoid(y))
        return self.short(x) + y


class PixelAttention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, n), nn.Conv2d(n, 3 * n, 1), nn.Conv2d(n, n, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        weights = torch.softmax(torch.bmm(q.transpose(1, 2), k) * q.size(1) ** -0.5, -1)
        return x + self.out(torch.bmm(v, weights.transpose(1, 2)).view_as(x))


class Autoencoder(nn.Module):
    def __init__(self, width, multiples, n_code, n_codes):
        super().__init__()
        widths = [width * it for it in multiples]
        down, up = [nn.Conv2d(3, width, 3, padding=1)], [nn.Conv2d(n_code, widths[-1], 3, padding=1)]
        before = width
        for number, it in enumerate(widths):
            down += [ResidualBlock(before, it), ResidualBlock(it, it)]
            before = it
            if number < len(widths) - 1:
                down.append(nn.Conv2d(it, it, 3, stride=2, padding=1))
        down += [PixelAttention(before), ResidualBlock(before, before), nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, n_code, 1)]
        up += [ResidualBlock(before, before), PixelAttention(before)]
        for number, it in enumerate(reversed(widths)):
            up += [ResidualBlock(before, it), ResidualBlock(it, it)]
            before = it
            if number < len(widths) - 1:
                up += [nn.Upsample(scale_factor=2.0), nn.Conv2d(it, it, 3, padding=1)]
        up += [nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, 3, 3, padding=1)]
        self.encoder, self.decoder, self.codebook = nn.Sequential(*down), nn.Sequential(*up), nn.Embedding(n_codes, n_code)
        nn.init.uniform_(self.codebook.weight, -1 / n_codes, 1 / n_codes)

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat, codes = z.reshape(-1, z.size(-1)), self.codebook.weight
        distances = flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()
        found = self.codebook(distances.argmin(1)).view_as(z)
        commitment = F.mse_loss(found.detach(), z) * 0.25 + F.mse_loss(found, z.detach())
        straight = z + (found - z).detach()
        return self.decoder(straight.permute(0, 3, 1, 2).contiguous()), commitment


def discriminator(width):
    layers, widths = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)], [width, 2 * width, 4 * width]
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True)]
    a = widths[-1]
    layers += [nn.Conv2d(a, 2 * a, 4, 1, 1, bias=False), nn.BatchNorm2d(2 * a), nn.LeakyReLU(0.2, True), nn.Conv2d(2 * a, 1, 4, 1, 1)]
    return nn.Sequential(*layers)


class Perception(nn.Module):
    """The convolutions of a VGG with 16 layers, frozen: how different two images look."""

    def __init__(self, width):
        super().__init__()
        stages, before = [], 3
        for n, multiple in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
            layers = [nn.MaxPool2d(2)] if stages else []
            for _ in range(n):
                layers += [nn.Conv2d(before, width * multiple, 3, padding=1), nn.ReLU(inplace=True)]
                before = width * multiple
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.requires_grad_(False)

    def forward(self, x, y):
        total = 0
        for stage in self.stages:
            x, y = stage(x), stage(y)
            total = total + (F.normalize(x, dim=1) - F.normalize(y, dim=1)).pow(2).sum(1).mean()
        return total


def vqgan(edits):
    edits.habits()
    model = Autoencoder(size(128, 16), size((1, 1, 2, 2, 4), (1, 2)), size(256, 16), size(1024, 32))
    model = prepare(edits, model, [it for it in model.modules() if isinstance(it, ResidualBlock)])
    judge = discriminator(size(64, 8)).to(GPU, edits.dtype).train()
    perception = Perception(size(64, 4)).to(GPU, edits.dtype).eval()
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=4.5e-6, betas=(0.5, 0.9))
    opt_judge = optimizer(edits, judge.parameters(), torch.optim.Adam, lr=4.5e-6, betas=(0.5, 0.9))
    last = model.decoder[-1].weight
    n_batch, n = size(4, 2), size(256, 32)
    for step in range(4):
        x = (torch.rand(n_batch, 3, n, n) * 2 - 1).to(GPU, edits.dtype)
        # The autoencoder.
        with edits.forward():
            again, commitment = model(x)
            reconstruction = (x - again).abs().mean() + perception(x, again)
            fooled = -judge(again).mean()
        by_reconstruction = torch.autograd.grad(reconstruction, last, retain_graph=True)[0]
        by_judge = torch.autograd.grad(fooled, last, retain_graph=True)[0]
        weight = (by_reconstruction.norm() / (by_judge.norm() + 1e-4)).clamp(0, 1e4).detach() * 0.8
        loss = reconstruction + weight * fooled + commitment
        edits.zero_grad(opt)
        edits.backward(loss)
        edits.step(opt)
        # The discriminator.
        with edits.forward():
            real, fake = judge(x.detach()), judge(again.detach())
            loss_judge = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
        edits.zero_grad(opt_judge)
        edits.backward(loss_judge)
        edits.step(opt_judge)
    print(f"loss {loss.item():.3f} and {loss_judge.item():.3f}")


# Segmentation: SegFormer of transformers, groups of parameters, fused AdamW; the loss is at the full resolution.


class Segmenter(nn.Module):
    def __init__(self, config):
        super().__init__()
        from transformers import SegformerForSemanticSegmentation
        self.net = SegformerForSemanticSegmentation(config)

    def forward(self, images, labels):
        return self.net(pixel_values=images, labels=labels)


def segment(edits):
    from transformers import SegformerConfig
    edits.habits()
    usual = dict(depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768)
    small = dict(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 40, 64], decoder_hidden_size=16)
    config = SegformerConfig(num_labels=size(150, 5), semantic_loss_ignore_index=255, **size(usual, small))
    model = Segmenter(config)
    encoder = model.net.segformer.encoder
    blocks = [block for stage in encoder.block for block in stage] if hasattr(encoder, "block") else list(encoder.layers)
    model = prepare(edits, model, blocks)
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if "decode_head" in name], "lr": 6e-4},
        {"params": [it for name, it in trained if "decode_head" not in name and it.ndim > 1]},
        {"params": [it for name, it in trained if "decode_head" not in name and it.ndim < 2], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, [it for it in groups if it["params"]], torch.optim.AdamW, lr=6e-5, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=1000, power=1.0)
    n_batch, n = size(6, 2), size(512, 64)
    for step in range(4):
        for _ in range(edits.accumulate):
            images = torch.randn(n_batch, 3, n, n).to(GPU, edits.dtype, non_blocking=True)
            labels = torch.randint(size(150, 5), (n_batch, n, n))
            labels[:, :4] = 255
            labels = labels.to(GPU, non_blocking=True)
            with edits.forward():
                outputs = model(images, labels)
            edits.backward(outputs.loss)
        edits.step(opt)
        schedule.step()
        edits.zero_grad(opt)
        with torch.no_grad():
            # The accuracy of the training batch, as scripts print it.
            predicted = F.interpolate(outputs.logits.detach(), size=(n, n), mode="bilinear", align_corners=False).argmax(1)
            right = (predicted == labels).float().mean().item()
    print(f"loss {outputs.loss.item():.3f}, {right:.3f} right")


# A graph network with attention, written by hand, on a whole graph of papers; it is evaluated after each step.


class GraphAttention(nn.Module):
    def __init__(self, n_in, n_out, n_heads):
        super().__init__()
        self.n_heads, self.n_out = n_heads, n_out
        self.linear, self.residual = nn.Linear(n_in, n_heads * n_out, bias=False), nn.Linear(n_in, n_heads * n_out)
        self.source, self.target = nn.Parameter(torch.empty(1, n_heads, n_out)), nn.Parameter(torch.empty(1, n_heads, n_out))
        nn.init.xavier_uniform_(self.source)
        nn.init.xavier_uniform_(self.target)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, source, target):
        n, h = len(x), self.linear(x).view(-1, self.n_heads, self.n_out)
        score = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        # A softmax over the edges that come into a node.
        index = target[:, None].expand_as(score)
        highest = score.new_full((n, self.n_heads), -math.inf).scatter_reduce(0, index, score.detach(), "amax")
        share = (score - highest[target]).exp()
        total = share.new_zeros(n, self.n_heads).index_add(0, target, share)
        share = self.drop(share / (total[target] + 1e-16))
        messages = h[source] * share[:, :, None]
        out = messages.new_zeros(n, self.n_heads, self.n_out).index_add(0, target, messages)
        return out.flatten(1) + self.residual(x)


class GraphNetwork(nn.Module):
    def __init__(self, n_in, n_hidden, n_heads, n_classes, n_layers):
        super().__init__()
        widths = [n_in] + [n_hidden * n_heads] * n_layers
        self.layers = nn.ModuleList(GraphAttention(it, n_hidden, n_heads) for it in widths[:-1])
        self.norms = nn.ModuleList(nn.BatchNorm1d(it) for it in widths[1:])
        self.head = nn.Linear(widths[-1], n_classes)

    def forward(self, x, source, target):
        x = F.dropout(x, 0.1, self.training)
        for layer, norm in zip(self.layers, self.norms):
            x = F.dropout(F.relu(norm(layer(x, source, target))), 0.5, self.training)
        return self.head(x)


def graph(edits):
    edits.habits()
    n_nodes, n_edges, n_classes = size(169343, 60), size(1166243, 200), 40
    pairs = torch.randint(n_nodes, (2, n_edges))
    loops = torch.arange(n_nodes).expand(2, -1)
    source, target = torch.cat([pairs, pairs.flip(0), loops], 1).to(GPU)
    x = torch.randn(n_nodes, 128).to(GPU, edits.dtype)
    labels = torch.randint(n_classes, (n_nodes,)).to(GPU)
    order = torch.randperm(n_nodes).to(GPU)
    train, valid = order[: n_nodes * 54 // 100], order[n_nodes * 54 // 100 :]
    model = GraphNetwork(128, size(48, 4), 3, n_classes, 3)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=0.002)
    for epoch in range(4):
        model.train()
        edits.zero_grad(opt)
        with edits.forward():
            out = model(x, source, target)
            loss = F.cross_entropy(out[train], labels[train])
        edits.backward(loss)
        edits.step(opt)
        model.eval()
        with torch.no_grad(), edits.autocast():
            right = (model(x, source, target).argmax(1)[valid] == labels[valid]).float().mean().item()
    print(f"loss {loss.item():.3f}, {right:.3f} right")


PROGRAMS = {it.__name__: it for it in (lstm, ctc, recommend, tabular, detect, fno, classify, vqgan, segment, graph)}
