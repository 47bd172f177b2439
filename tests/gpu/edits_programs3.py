"""Ten more training programs, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of six steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. A program may need transformers, timm or torchvision; it raises
ImportError without them.
"""
import math, os

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "seq2seq": [
        "--set-to-none yes", "--optimizer sgd", "--adam fused", "--precision autocast-fp16", "--freeze 0.5", "--offload optimizer",
        "--optimizer momentum --accumulate 2",
    ],
    "points": [
        "--optimizer adam --adam for-loop", "--precision autocast-bf16", "--checkpoint all", "--accumulate 4", "--freeze 0.5",
        "--optimizer adafactor",
    ],
    "hubert": [
        "--precision autocast-bf16", "--freeze 0.5", "--lora 8", "--checkpoint layers:0..5", "--accumulate 4",
        "--optimizer sgd --set-to-none no",
    ],
    "efficientnet": [
        "--optimizer adamw --adam fused", "--precision bf16", "--checkpoint every:2", "--freeze 0.5", "--accumulate 4",
        "--offload activations",
    ],
    "flow": [
        "--optimizer adam", "--checkpoint layers:0..7", "--precision autocast-bf16", "--offload activations", "--set-to-none no",
        "--freeze 0.5 --optimizer adamw",
    ],
    "dit": [
        "--adam fused", "--precision fp32", "--checkpoint every:2", "--set-to-none no", "--lora 16",
        "--accumulate 2 --checkpoint all", "--optimizer adafactor",
    ],
    "segformer": [
        "--precision autocast-bf16", "--optimizer momentum", "--freeze 0.5", "--checkpoint all", "--adam for-loop",
        "--accumulate 2 --precision bf16",
    ],
    "gemma": [
        "--optimizer sgd", "--lora 8", "--checkpoint layers:2..7", "--precision autocast-bf16", "--offload optimizer",
        "--set-to-none no", "--optimizer adafactor --checkpoint all",
    ],
    "mamba": [
        "--adam foreach", "--precision autocast-bf16", "--precision bf16", "--checkpoint all", "--offload activations",
        "--freeze 0.5 --optimizer momentum",
    ],
    "simclr": [
        "--optimizer adamw", "--precision autocast-bf16", "--checkpoint all", "--accumulate 2", "--set-to-none no",
        "--optimizer sgd --offload activations",
    ],
}
# These need two GPUs.
LAYOUTS = {
    "dit": ["--layout fsdp:2", "--layout ddp:2"],
    "gemma": ["--layout zero1:2", "--layout fsdp:2 --checkpoint all"],
    "simclr": ["--layout ddp:2"],
}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "seq2seq": 5, "points": 7, "hubert": 8, "efficientnet": 6, "flow": 5, "dit": 9, "segformer": 6, "gemma": 10, "mamba": 9, "simclr": 5,
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


# --- recurrent translation -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Additive attention: one score for each word of the source, from a small network."""

    def __init__(self, hidden):
        super().__init__()
        self.query, self.score = nn.Linear(hidden, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, state, keys, read, mask):
        scores = self.score(torch.tanh(self.query(state)[:, None] + keys)).squeeze(2)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(1)
        return torch.bmm(weights[:, None].to(read.dtype), read).squeeze(1)


class Translator(nn.Module):
    """A bidirectional GRU reads; a GRU cell writes word by word and looks at what was read."""

    def __init__(self, words, width, hidden):
        super().__init__()
        self.source, self.target = nn.Embedding(words, width, padding_idx=0), nn.Embedding(words, width, padding_idx=0)
        self.encoder = nn.GRU(width, hidden // 2, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.bridge, self.keys = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.attention, self.cell = Attention(hidden), nn.GRUCell(width + hidden, hidden)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(2 * hidden, words)

    def forward(self, text, lengths, wanted):
        packed = nn.utils.rnn.pack_padded_sequence(self.dropout(self.source(text)), lengths, batch_first=True)
        read, last = self.encoder(packed)
        read, _ = nn.utils.rnn.pad_packed_sequence(read, batch_first=True, total_length=text.shape[1])
        keys, mask = self.keys(read), text != 0
        state = torch.tanh(self.bridge(torch.cat([last[-2], last[-1]], 1)))
        written, logits = self.dropout(self.target(wanted)), []
        for place in range(wanted.shape[1]):
            seen = self.attention(state, keys, read, mask)
            state = self.cell(torch.cat([written[:, place].to(seen.dtype), seen], 1), state)
            logits.append(self.head(self.dropout(torch.cat([state, seen.to(state.dtype)], 1))))
        return torch.stack(logits, 1)


def seq2seq(edits):
    """A GRU with attention translates: single precision, Adam, clipped gradients that are set to zero; sentences are sorted by length."""
    edits.habits(set_to_none="no")
    words, batch, longest = size((24000, 160, 50), (200, 4, 8))
    model = Translator(words, size(384, 16), size(640, 16))
    run = edits.prepare(model, [])
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(edits.scheduled(optimizer), 0.99)
    criterion = nn.CrossEntropyLoss(ignore_index=0)

    def sentences():
        lengths = torch.randint(longest // 2, longest + 1, (batch,)).sort(descending=True).values
        tokens = torch.randint(1, words, (batch, longest))
        tokens[torch.arange(longest) >= lengths[:, None]] = 0
        return tokens[:, : int(lengths[0])], lengths

    for step in range(STEPS):
        edits.zero_grad(optimizer)
        total = 0.0
        for _ in range(edits.accumulate):
            (text, lengths), (wanted, _) = sentences(), sentences()
            text, wanted = text.to(GPU), wanted.to(GPU)
            with edits.forward():
                logits = run(text, lengths, wanted[:, :-1])
                loss = criterion(logits.flatten(0, 1).float(), wanted[:, 1:].flatten())
            edits.backward(loss)
            total += loss.item()
        edits.step(optimizer, model.parameters(), clip=1.0)
        schedule.step()
        print(f"{step}: {total / edits.accumulate:.3f}, perplexity {math.exp(min(20, loss.item())):.0f}")


# --- points in space -----------------------------------------------------------------------------------------------------------


def neighbours(x, k):
    """The numbers of the `k` nearest points of each point."""
    products = x.transpose(1, 2) @ x
    squares = (x * x).sum(1, keepdim=True)
    return (2 * products - squares - squares.transpose(1, 2)).topk(k, dim=-1).indices


class EdgeConv(nn.Module):
    """Each point looks at its nearest neighbours, which are found again in each layer."""

    def __init__(self, n_in, n_out, k):
        super().__init__()
        self.k = k
        self.conv = nn.Sequential(nn.Conv2d(2 * n_in, n_out, 1, bias=False), nn.BatchNorm2d(n_out), nn.LeakyReLU(0.2))

    def forward(self, x):
        batch, width, n = x.shape
        with torch.no_grad():
            nearest = neighbours(x, self.k) + torch.arange(batch, device=x.device)[:, None, None] * n
        flat = x.transpose(1, 2).reshape(batch * n, width)
        others = flat[nearest.flatten()].view(batch, n, self.k, width)
        own = flat.view(batch, n, 1, width).expand(-1, -1, self.k, -1)
        edges = torch.cat([others - own, own], 3).permute(0, 3, 1, 2).contiguous()
        return self.conv(edges).max(-1).values


class PointNet(nn.Module):
    """DGCNN: what all layers found goes together into one vector for the whole cloud."""

    def __init__(self, widths, k, together, n_labels):
        super().__init__()
        self.layers = nn.ModuleList(EdgeConv(*pair, k) for pair in zip((3, *widths), widths))
        self.fuse = nn.Sequential(nn.Conv1d(sum(widths), together, 1, bias=False), nn.BatchNorm1d(together), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(2 * together, together // 2, bias=False), nn.BatchNorm1d(together // 2), nn.LeakyReLU(0.2), nn.Dropout(0.5),
            nn.Linear(together // 2, n_labels),
        )

    def forward(self, points):
        x, found = points, []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        x = self.fuse(torch.cat(found, 1))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))


def points(edits):
    """A DGCNN classifies clouds of points in single precision with SGD and momentum; one test follows each third step."""
    edits.habits()
    batch, n, k, n_labels = size((32, 1024, 20, 40), (4, 32, 4, 5))
    model = PointNet(size((64, 64, 128, 256), (8, 8, 16)), k, size(1024, 16), n_labels)
    run = edits.prepare(model, model.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 250, eta_min=1e-3)

    def load():
        clouds, labels = torch.randn(batch, n, 3), torch.randint(0, n_labels, (batch,))
        clouds = clouds / clouds.norm(dim=2).amax(1)[:, None, None]
        clouds = clouds * (torch.rand(batch, 1, 3) * 0.8 + 0.7) + torch.rand(batch, 1, 3) * 0.4 - 0.2
        return clouds.to(GPU, edits.dtype).transpose(1, 2), labels.to(GPU)

    for step in range(STEPS):
        run.train()
        n_right = 0
        for _ in range(edits.accumulate):
            clouds, labels = load()
            with edits.forward():
                logits = run(clouds)
                loss = F.cross_entropy(logits, labels, label_smoothing=0.2)
            edits.backward(loss)
            n_right += (logits.argmax(1) == labels).sum().item()
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        schedule.step()
        if step % 3 == 2:
            run.eval()
            clouds, labels = load()
            with torch.no_grad(), edits.autocast():
                right = (run(clouds).argmax(1) == labels).float().mean().item()
            print(f"step {step}, loss {loss.item():.3f}, right {n_right / batch / edits.accumulate:.3f}, in the test {right:.3f}")


# --- speech, from the waveform -------------------------------------------------------------------------------------------------


def hubert(edits):
    """HuBERT learns to write what it hears: float16 by autocast, AdamW, clipped gradients; its convolutions are frozen."""
    from transformers import HubertConfig, HubertForCTC

    edits.habits(precision="autocast-fp16")
    config = HubertConfig(
        hidden_size=size(768, 32), num_hidden_layers=size(12, 6), num_attention_heads=size(12, 2), intermediate_size=size(3072, 64),
        conv_dim=size((512,) * 7, (16, 16)), conv_kernel=size((10, 3, 3, 3, 3, 2, 2), (10, 3)),
        conv_stride=size((5, 2, 2, 2, 2, 2, 2), (5, 2)), num_conv_pos_embeddings=size(128, 8),
        num_conv_pos_embedding_groups=size(16, 4), vocab_size=32, layerdrop=0.0, mask_time_length=size(10, 2),
        ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )
    batch, n_samples, n_signs = size((12, 192_000, 120), (2, 600, 6))
    model = HubertForCTC(config)
    model.freeze_feature_encoder()
    run = edits.prepare(model, model.hubert.encoder.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.98), weight_decay=0.005)
    schedule = torch.optim.lr_scheduler.LambdaLR(edits.scheduled(optimizer), lambda step: min(1.0, (step + 1) / 500))
    for step in range(STEPS):
        total = 0.0
        for _ in range(edits.accumulate):
            # A batch is as long as its longest recording, which has all samples here.
            lengths = torch.randint(n_samples // 2, n_samples + 1, (batch, 1))
            lengths[0] = n_samples
            mask = torch.arange(n_samples) < lengths
            sound = torch.randn(batch, n_samples) * mask
            signs = torch.randint(3, config.vocab_size, (batch, n_signs))
            signs[torch.arange(n_signs) >= torch.randint(n_signs // 2, n_signs + 1, (batch, 1))] = -100
            inputs = {"input_values": sound.to(GPU, edits.dtype), "attention_mask": mask.long().to(GPU), "labels": signs.to(GPU)}
            with edits.forward():
                loss = run(**inputs).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(optimizer, [it for it in model.parameters() if it.requires_grad], clip=1.0)
        schedule.step()
        edits.zero_grad(optimizer)
        print({"loss": round(total, 3), "learning_rate": schedule.get_last_lr()[0]})


# --- images --------------------------------------------------------------------------------------------------------------------


def efficientnet(edits):
    """An EfficientNet from timm with channels last: bfloat16 by autocast, RMSprop with momentum, two micro-batches to a step."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy

    edits.habits(precision="autocast-bf16", accumulate=2)
    batch, side, n_labels = size((64, 240, 1000), (2, 32, 10))
    if SMALL:
        model = timm.create_model("efficientnet_lite0", num_classes=n_labels, drop_path_rate=0.1)
    else:
        model = timm.create_model("efficientnet_b1", num_classes=n_labels, drop_rate=0.2, drop_path_rate=0.2)
    model = model.to(memory_format=torch.channels_last)
    run = edits.prepare(model, [block for stage in model.blocks for block in stage])
    named = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for _, it in named if it.ndim > 1], "weight_decay": 1e-5},
        {"params": [it for _, it in named if it.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = edits.optimizer(groups, torch.optim.RMSprop, lr=0.016, alpha=0.9, momentum=0.9, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(edits.scheduled(optimizer), 2, gamma=0.97)
    criterion = LabelSmoothingCrossEntropy(0.1).to(GPU)
    middle, spread = (torch.tensor(it, device=GPU).view(1, 3, 1, 1) for it in ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)))
    for step in range(STEPS):
        total = 0.0
        for _ in range(edits.accumulate):
            # Pictures travel as bytes and are made into numbers on the GPU.
            pictures = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8).to(GPU, non_blocking=True)
            labels = torch.randint(0, n_labels, (batch,)).to(GPU, non_blocking=True)
            pictures = pictures.float().sub_(middle).div_(spread).to(edits.dtype, memory_format=torch.channels_last)
            with edits.forward():
                loss = criterion(run(pictures), labels)
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        schedule.step()
        print(f"Train: {step} loss {total:.3f} lr {schedule.get_last_lr()[0]:.4f}")


class Step(nn.Module):
    """A step of Glow: scale each channel, mix the channels, and change one half by what a network says of the other."""

    def __init__(self, width, hidden):
        super().__init__()
        self.bias, self.log_scale = (nn.Parameter(torch.zeros(1, width, 1, 1)) for _ in range(2))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(width, width)).Q.contiguous())
        self.net = nn.Sequential(
            nn.Conv2d(width // 2, hidden, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(hidden, hidden, 1), nn.ReLU(inplace=True),
            nn.Conv2d(hidden, width, 3, padding=1),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)
        self.began = False

    def forward(self, x):
        if not self.began:
            with torch.no_grad():
                mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
                self.bias.copy_(-mean)
                self.log_scale.copy_(-(deviation + 1e-6).log())
            self.began = True
        n_pixels = x.shape[2] * x.shape[3]
        x = (x + self.bias) * self.log_scale.exp()
        x = F.conv2d(x, self.mix[:, :, None, None])
        half, other = x.chunk(2, 1)
        shift, scale = self.net(half).chunk(2, 1)
        log_scale = F.logsigmoid(scale.float() + 2)
        other = (other + shift) * log_scale.exp()
        gained = n_pixels * (self.log_scale.sum() + torch.linalg.slogdet(self.mix).logabsdet) + log_scale.sum((1, 2, 3))
        return torch.cat([half, other.to(half.dtype)], 1), gained


class Glow(nn.Module):
    """Images become noise, and nothing is lost: each level halves the sides and gives away one half of the channels."""

    def __init__(self, n_levels, n_steps, hidden):
        super().__init__()
        self.levels, width = nn.ModuleList(), 3
        for _ in range(n_levels):
            self.levels.append(nn.ModuleList(Step(4 * width, hidden) for _ in range(n_steps)))
            width *= 2

    def forward(self, x):
        gained, noise = torch.zeros(len(x), device=x.device), []
        for number, level in enumerate(self.levels):
            x = F.pixel_unshuffle(x, 2)
            for step in level:
                x, more = step(x)
                gained = gained + more
            if number + 1 < len(self.levels):
                x, out = x.chunk(2, 1)
                noise.append(out)
        noise.append(x)
        flat = torch.cat([it.flatten(1).float() for it in noise], 1)
        return gained - 0.5 * (flat.square() + math.log(2 * math.pi)).sum(1)


def flow(edits):
    """A normalizing flow learns images of 64 by 64 pixels in single precision with Adamax; each gradient's norm is clipped."""
    edits.habits()
    batch, side = size((128, 64), (4, 16))
    model = Glow(size(3, 2), size(8, 4), size(320, 8))
    run = edits.prepare(model, [step for level in model.levels for step in level])
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adamax, lr=5e-4, weight_decay=5e-5)
    warm_up = torch.optim.lr_scheduler.LambdaLR(edits.scheduled(optimizer), lambda step: min(1.0, (step + 1) / 1000))
    n_values = 3 * side * side
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8).to(GPU)
            images = (images.float() + torch.rand(images.shape, device=GPU)) / 256 - 0.5
            with edits.forward():
                likelihood = run(images.to(edits.dtype)) - n_values * math.log(256)
                loss = -likelihood.mean() / (n_values * math.log(2))
            edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=50.0)
        warm_up.step()
        print(step, f"{loss.item():.3f} bits")


def turned(t, shift, scale):
    return t * (1 + scale[:, None]) + shift[:, None]


class DiffusionLayer(nn.Module):
    """A transformer layer whose norms are steered by the time and the label."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.steer = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.steer[1].weight)
        nn.init.zeros_(self.steer[1].bias)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.steer(condition).chunk(6, 1)
        batch, n, width = x.shape
        q, k, v = self.qkv(turned(self.norm1(x), shift1, scale1)).view(batch, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, n, width)
        x = x + gate1[:, None] * self.out(y)
        return x + gate2[:, None] * self.mlp(turned(self.norm2(x), shift2, scale2))


class DiffusionTransformer(nn.Module):
    def __init__(self, side, patch, n_in, width, depth, heads, n_labels):
        super().__init__()
        self.patch, self.side, self.width = patch, side // patch, width
        self.first = nn.Conv2d(n_in, width, patch, patch)
        self.places = nn.Parameter(torch.randn(1, self.side**2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(n_labels + 1, width)
        self.layers = nn.ModuleList(DiffusionLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.steer, self.last = nn.Linear(width, 2 * width), nn.Linear(width, patch * patch * n_in)

    def forward(self, x, time, labels):
        angles = time[:, None] * 1000 * torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)) + self.labels(labels)
        x = self.first(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x, condition)
        x = self.last(turned(self.norm(x), *self.steer(F.silu(condition)).chunk(2, 1)))
        return F.fold(x.transpose(1, 2), self.side * self.patch, self.patch, stride=self.patch)


def dit(edits):
    """A diffusion transformer learns a velocity in the latent space: bfloat16 by autocast, AdamW, and a mean of the weights is kept."""
    edits.habits(precision="autocast-bf16")
    batch, side, n_in, n_labels = size((48, 32, 4, 1000), (4, 8, 4, 10))
    model = DiffusionTransformer(side, 2, n_in, size(768, 32), size(12, 4), size(12, 2), n_labels)
    run = edits.prepare(model, model.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.0)
    mean = [it.detach().clone() for it in model.parameters()]
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            latents = torch.randn(batch, n_in, side, side).to(GPU)
            labels = torch.randint(0, n_labels, (batch,)).to(GPU)
            # One label in ten is left out, for guidance.
            labels = torch.where(torch.rand(batch, device=GPU) < 0.1, n_labels, labels)
            noise, time = torch.randn_like(latents), torch.randn(batch, device=GPU).sigmoid()
            share = time[:, None, None, None]
            mixed = (1 - share) * latents + share * noise
            with edits.forward():
                velocity = run(mixed.to(edits.dtype), time, labels)
                loss = F.mse_loss(velocity.float(), noise - latents)
            edits.backward(loss)
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        with torch.no_grad():
            for of_mean, it in zip(mean, model.parameters()):
                of_mean.mul_(0.9999).add_(it, alpha=0.0001)
        print(f"(step={step:07d}) Train Loss: {loss.item():.4f}")


def segformer(edits):
    """A SegFormer from transformers paints each pixel in single precision: AdamW, the head learns faster, each epoch has a loader."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    edits.habits()
    batch, side, n_labels = size((6, 512, 100), (2, 64, 5))
    config = SegformerConfig(
        hidden_sizes=size([64, 128, 320, 512], [8, 16, 24, 32]), depths=[2, 2, 2, 2], decoder_hidden_size=size(256, 16), num_labels=n_labels,
    )
    model = SegformerForSemanticSegmentation(config)
    run = edits.prepare(model, [it for it in model.modules() if type(it).__name__ == "SegformerLayer"])
    named = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in named if not name.startswith("decode_head")], "lr": 6e-5},
        {"params": [it for name, it in named if name.startswith("decode_head")], "lr": 6e-4},
    ]
    optimizer = edits.optimizer([it for it in groups if it["params"]], torch.optim.AdamW, lr=6e-5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.PolynomialLR(edits.scheduled(optimizer), 160, power=1.0)
    pictures = torch.rand(2 * batch, 3, side, side)
    regions = torch.randint(0, n_labels + 1, (2 * batch, side // 8, side // 8)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    regions[regions == n_labels] = 255
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(pictures, regions), batch, shuffle=True, pin_memory=GPU != "cpu", drop_last=True,
    )
    batches, step = iter(()), 0
    while step < STEPS:
        for _ in range(edits.accumulate):
            picture, region = next(batches, (None, None))
            if picture is None:
                batches = iter(loader)
                picture, region = next(batches)
            picture, region = picture.to(GPU, edits.dtype, non_blocking=True), region.to(GPU, non_blocking=True)
            with edits.forward():
                output = run(pixel_values=picture, labels=region)
            edits.backward(output.loss)
        edits.step(optimizer)
        schedule.step()
        edits.zero_grad(optimizer)
        with torch.no_grad():
            painted = F.interpolate(output.logits, region.shape[-2:], mode="bilinear").argmax(1)
            right = (painted == region)[region != 255].float().mean().item()
        step += 1
        print(f"step {step}: loss {output.loss.item():.3f}, right {right:.4f}")


# --- text ----------------------------------------------------------------------------------------------------------------------


def gemma(edits):
    """A Gemma 2 with capped logits and windows, all of it in bfloat16: AdamW for all tensors at once, and clipped gradients."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, get_cosine_schedule_with_warmup

    edits.habits(precision="bf16")
    config = Gemma2Config(
        vocab_size=size(96000, 300), hidden_size=size(768, 32), intermediate_size=size(3072, 64), num_hidden_layers=size(10, 8),
        num_attention_heads=size(8, 4), num_key_value_heads=size(4, 2), head_dim=size(96, 8), query_pre_attn_scalar=size(96, 8),
        sliding_window=size(256, 8), max_position_embeddings=2048, use_cache=False, attn_implementation="eager",
    )
    batch, seq = size((4, 768), (2, 16))
    model = Gemma2ForCausalLM(config)
    run = edits.prepare(model, model.model.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    schedule = get_cosine_schedule_with_warmup(edits.scheduled(optimizer), 2, 100)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        total = torch.zeros((), device=GPU)
        for _ in range(edits.accumulate):
            tokens = torch.randint(3, config.vocab_size, (batch, seq)).to(GPU)
            with edits.forward():
                loss = run(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
            edits.backward(loss)
            total += loss.detach() / edits.accumulate
        edits.step(optimizer, model.parameters(), clip=1.0)
        schedule.step()
        print(step, total.item(), schedule.get_last_lr())


def sums(x):
    """Of all pairs of places, the sum between them; below the diagonal only."""
    n = x.shape[-1]
    x = x[..., None].expand(*x.shape, n)
    below = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
    x = x.masked_fill(~below, 0).cumsum(-2)
    return x.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=x.device).tril(), float("-inf"))


def scan(x, decay, b, c, chunk):
    """The state-space model of Mamba 2: products inside chunks, and states that go from chunk to chunk."""
    x, decay, b, c = (it.unflatten(1, (-1, chunk)) for it in (x, decay, b, c))
    decay = decay.permute(0, 3, 1, 2)
    summed = decay.cumsum(-1)
    inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, sums(decay).exp().to(x.dtype), x)
    to_end = (summed[..., -1:] - summed).exp().to(x.dtype)
    states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, to_end, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = sums(F.pad(summed[..., -1], (1, 0))).exp().to(x.dtype)
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    across = torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, summed.exp().to(x.dtype))
    return (inside + across).flatten(1, 2)


class MambaLayer(nn.Module):
    def __init__(self, width, head, n_states, chunk):
        super().__init__()
        self.inner, self.head, self.n_states, self.chunk = 2 * width, head, n_states, chunk
        self.n_heads = self.inner // head
        mixed = self.inner + 2 * n_states
        self.norm, self.into = nn.RMSNorm(width), nn.Linear(width, self.inner + mixed + self.n_heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.dt_bias, self.skip = nn.Parameter(torch.randn(self.n_heads) - 4), nn.Parameter(torch.ones(self.n_heads))
        self.log_a = nn.Parameter(torch.arange(1, self.n_heads + 1).float().log())
        self.gate_norm, self.out = nn.RMSNorm(self.inner), nn.Linear(self.inner, width, bias=False)

    def forward(self, u):
        length = u.shape[1]
        gate, mixed, dt = self.into(self.norm(u)).split([self.inner, self.inner + 2 * self.n_states, self.n_heads], -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        x, b, c = mixed.split([self.inner, self.n_states, self.n_states], -1)
        x = x.unflatten(-1, (self.n_heads, self.head))
        dt = F.softplus(dt.float() + self.dt_bias.float())
        y = scan(x * dt[..., None].to(x.dtype), -self.log_a.float().exp() * dt, b, c, self.chunk)
        y = (y + x * self.skip[:, None].to(x.dtype)).flatten(2)
        return u + self.out(self.gate_norm(y * F.silu(gate)))


class MambaLM(nn.Module):
    def __init__(self, words, width, depth, head, n_states, chunk):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(MambaLayer(width, head, n_states, chunk) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mamba(edits):
    """A Mamba 2 in plain PyTorch and single precision: fused AdamW, clipped gradients, weights and norms in two groups."""
    edits.habits()
    words, batch, seq = size((16000, 6, 1024), (200, 2, 32))
    model = MambaLM(words, size(640, 16), size(10, 2), size(64, 8), size(64, 4), size(64, 8))
    run = edits.prepare(model, model.layers)
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": 0.1},
        {"params": [it for it in trained if it.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = edits.optimizer(groups, torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), fused=True)
    for step in range(STEPS):
        for group in edits.scheduled(optimizer).param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 10)
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, words, (batch, seq + 1)).to(GPU, non_blocking=True)
            inputs, wanted = tokens[:, :-1], tokens[:, 1:]
            with edits.forward():
                logits = run(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
            edits.backward(loss)
        edits.step(optimizer, trained, clip=1.0)
        edits.zero_grad(optimizer)
        print(f"iter {step}: loss {loss.item():.4f}")


# --- images without labels -----------------------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """A network whose last layer is a small one that makes vectors to compare."""

    def __init__(self, body, width, together):
        super().__init__()
        self.body = body
        self.project = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, together))

    def forward(self, views):
        return F.normalize(self.project(self.body(views)), dim=1)


def simclr(edits):
    """A RegNet from torchvision learns that two views are of one picture: single precision, SGD with Nesterov's momentum."""
    import torchvision

    edits.habits()
    batch, side, temperature = size((96, 144, 0.2), (4, 32, 0.2))
    if SMALL:
        of_blocks = torchvision.models.regnet.BlockParams.from_init_params(depth=5, w_0=8, w_a=8.0, w_m=2.0, group_width=8)
        body = torchvision.models.regnet.RegNet(of_blocks)
    else:
        body = torchvision.models.regnet_y_800mf()
    width, body.fc = body.fc.in_features, nn.Identity()
    model = Contrast(body, width, size(128, 16))
    run = edits.prepare(model, [block for stage in body.trunk_output for block in stage])
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = edits.optimizer(trained, torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 1000)
    partner = torch.arange(2 * batch, device=GPU).roll(batch)
    oneself = torch.eye(2 * batch, dtype=torch.bool, device=GPU)

    def view(pictures):
        """Cut out, turned, brighter or darker, without colours at times."""
        top, left = (int(it) for it in torch.randint(0, side // 8, (2,)))
        cut = pictures[:, :, top : top + side, left : left + side].float() / 255
        cut = torch.where(torch.rand(batch, 1, 1, 1, device=GPU) < 0.5, cut.flip(3), cut)
        cut = torch.where(torch.rand(batch, 1, 1, 1, device=GPU) < 0.2, cut.mean(1, keepdim=True).expand_as(cut), cut)
        return (cut * (0.6 + 0.8 * torch.rand(batch, 1, 1, 1, device=GPU))).clamp_(0, 1)

    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            pictures = torch.randint(0, 256, (batch, 3, side + side // 8, side + side // 8), dtype=torch.uint8)
            pictures = pictures.to(GPU, non_blocking=True)
            views = torch.cat([view(pictures), view(pictures)]).to(edits.dtype)
            with edits.forward():
                vectors = run(views)
                alike = (vectors @ vectors.t()).float().masked_fill(oneself, float("-inf")) / temperature
                loss = F.cross_entropy(alike, partner)
            edits.backward(loss)
        edits.step(optimizer)
        schedule.step()
        print(step, loss.item(), (alike.argmax(1) == partner).float().mean().item())


PROGRAMS = {it.__name__: it for it in (seq2seq, points, hubert, efficientnet, flow, dit, segformer, gemma, mamba, simclr)}
