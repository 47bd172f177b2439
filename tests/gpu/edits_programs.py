"""Ten training programs, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of four steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. A program may need transformers, timm or torchvision; it raises
ImportError without them.
"""
import copy, os

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 4
# Small models on the CPU, to check the programs where there is no GPU.
SMALL = bool(os.environ.get("EDITS_CPU"))
GPU = "cpu" if SMALL else "cuda"


def size(full, small):
    return small if SMALL else full


def gpt2(edits):
    """GPT-2 from transformers in single precision, with AdamW and a warm-up of the learning rate."""
    from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

    edits.habits()
    config = GPT2Config(n_layer=size(12, 2), n_embd=size(768, 32), n_head=size(12, 2), vocab_size=size(50257, 300))
    batch, seq = size((4, 512), (2, 16))
    model = GPT2LMHeadModel(config)
    run = edits.prepare(model, model.transformer.h)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=5e-5)
    schedule = get_linear_schedule_with_warmup(edits.scheduled(optimizer), 2, 100)
    model.train()
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, config.vocab_size, (batch, seq)).to(GPU)
            with edits.forward():
                loss = run(input_ids=tokens, labels=tokens).loss
            edits.backward(loss)
        edits.step(optimizer)
        schedule.step()
        edits.zero_grad(optimizer)
        print(step, loss.item())


def llama(edits):
    """A Llama of 178 million parameters from transformers: bfloat16 by autocast, fused AdamW, clipped gradients, a cosine schedule."""
    from transformers import LlamaConfig, LlamaForCausalLM

    edits.habits(precision="autocast-bf16")
    config = LlamaConfig(
        hidden_size=size(1024, 64), intermediate_size=size(2816, 96), num_hidden_layers=size(10, 2), num_attention_heads=size(16, 4),
        num_key_value_heads=size(4, 2), vocab_size=size(32000, 300), max_position_embeddings=2048,
    )
    batch, seq = size((4, 1024), (2, 16))
    model = LlamaForCausalLM(config)
    run = edits.prepare(model, model.model.layers)
    parameters = [it for it in model.parameters() if it.requires_grad]
    optimizer = edits.optimizer(parameters, torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 100)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        total = 0.0
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, config.vocab_size, (batch, seq), device=GPU)
            with edits.forward():
                output = run(input_ids=tokens, labels=tokens, use_cache=False)
            edits.backward(output.loss)
            total += output.loss.item()
        edits.step(optimizer, parameters, clip=1.0)
        schedule.step()
        print(step, total)


def bert(edits):
    """A BERT classifier is fine-tuned in float16: embeddings and the first half of the layers are frozen, biases do not decay."""
    from transformers import BertConfig, BertForSequenceClassification

    edits.habits(precision="autocast-fp16")
    config = BertConfig(
        num_labels=3, num_hidden_layers=size(12, 2), hidden_size=size(768, 32), num_attention_heads=size(12, 2),
        intermediate_size=size(3072, 64), vocab_size=size(30522, 300),
    )
    batch, seq = size((32, 256), (2, 16))
    model = BertForSequenceClassification(config)
    layers = model.bert.encoder.layer
    model.bert.embeddings.requires_grad_(False)
    for layer in layers[: len(layers) // 2]:
        layer.requires_grad_(False)
    run = edits.prepare(model, layers)
    named = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    plain = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [it for name, it in named if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [it for name, it in named if name.endswith(plain)], "weight_decay": 0.0},
    ]
    optimizer = edits.optimizer(groups, torch.optim.AdamW, lr=2e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(edits.scheduled(optimizer), 0.1, 1.0, 10)
    model.train()
    n_right = 0
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, config.vocab_size, (batch, seq))
            mask = (torch.arange(seq) < torch.randint(seq // 2, seq + 1, (batch, 1))).long()
            labels = torch.randint(0, 3, (batch,))
            tokens, mask, labels = tokens.to(GPU), mask.to(GPU), labels.to(GPU)
            with edits.forward():
                output = run(input_ids=tokens, attention_mask=mask, labels=labels)
            edits.backward(output.loss)
            n_right += (output.logits.argmax(-1) == labels).sum().item()
        edits.step(optimizer, [it for _, it in named], clip=1.0)
        schedule.step()
        edits.zero_grad(optimizer)
    print(n_right)


def t5(edits):
    """T5 small from transformers in single precision with Adafactor."""
    from transformers import T5Config, T5ForConditionalGeneration

    edits.habits()
    config = T5Config(
        decoder_start_token_id=0, vocab_size=size(32128, 300), d_model=size(512, 32), d_ff=size(2048, 64), num_layers=size(6, 2),
        d_kv=size(64, 16), num_heads=size(8, 2),
    )
    batch, source, target = size((16, 256, 96), (2, 16, 8))
    model = T5ForConditionalGeneration(config)
    run = edits.prepare(model, [*model.encoder.block, *model.decoder.block])
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adafactor, lr=1e-3)
    model.train()
    losses = []
    for _ in range(STEPS):
        for _ in range(edits.accumulate):
            inputs = torch.randint(0, config.vocab_size, (batch, source), device=GPU)
            labels = torch.randint(0, config.vocab_size, (batch, target), device=GPU)
            with edits.forward():
                loss = run(input_ids=inputs, labels=labels).loss
            edits.backward(loss)
            losses.append(loss.detach())
        edits.step(optimizer)
        edits.zero_grad(optimizer)
    print(torch.stack(losses).mean().item())


def vit(edits):
    """A ViT from timm: bfloat16 by autocast, AdamW, smoothed labels, two micro-batches to a step."""
    import timm

    edits.habits(precision="autocast-bf16", accumulate=2)
    batch, n_labels = size(32, 2), 100
    if SMALL:
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=n_labels)
    else:
        model = timm.create_model("vit_base_patch16_224", num_classes=n_labels)
    side = size(224, 32)
    run = edits.prepare(model, model.blocks)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 100)
    for step in range(STEPS):
        total = 0.0
        for _ in range(edits.accumulate):
            images = torch.randn(batch, 3, side, side).to(GPU, edits.dtype)
            labels = torch.randint(0, n_labels, (batch,)).to(GPU)
            with edits.forward():
                logits = run(images)
                loss = criterion(logits, labels)
            edits.backward(loss)
            total += loss.item()
        edits.step(optimizer, model.parameters(), clip=1.0)
        edits.zero_grad(optimizer)
        schedule.step()
        print(step, total)


def resnet(edits):
    """ResNet-50 from torchvision in single precision with SGD and momentum; every second step is followed by a validation."""
    import torchvision

    edits.habits()
    batch, side = size((64, 224), (2, 64))
    model = torchvision.models.resnet50() if not SMALL else torchvision.models.resnet50(num_classes=10, width_per_group=8)
    n_labels = model.fc.out_features
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    run = edits.prepare(model, blocks)
    criterion = nn.CrossEntropyLoss().to(GPU)
    optimizer = edits.optimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(edits.scheduled(optimizer), 30)

    def load():
        images, labels = torch.randn(batch, 3, side, side), torch.randint(0, n_labels, (batch,))
        return images.to(GPU, edits.dtype, non_blocking=True), labels.to(GPU, non_blocking=True)

    for step in range(STEPS):
        run.train()
        for _ in range(edits.accumulate):
            images, labels = load()
            with edits.forward():
                output = run(images)
                loss = criterion(output, labels)
            edits.backward(loss)
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        if step % 2:
            run.eval()
            with torch.no_grad():
                images, labels = load()
                with edits.autocast():
                    output = run(images)
                print(step, (output.argmax(1) == labels).float().mean().item())
    schedule.step()


class Residual(nn.Module):
    """Two convolutions, between which the time is added."""

    def __init__(self, n_in, n_out, n_time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, n_in), nn.Conv2d(n_in, n_out, 3, padding=1)
        self.time = nn.Linear(n_time, n_out)
        self.norm2, self.conv2 = nn.GroupNorm(8, n_out), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class ImageAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, height, across = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, height * across).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(batch, width, height, across))


class UNet(nn.Module):
    def __init__(self, widths, n_time=256):
        super().__init__()
        self.n_time, last = n_time, widths[-1]
        self.embed = nn.Sequential(nn.Linear(n_time // 2, n_time), nn.SiLU(), nn.Linear(n_time, n_time))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        n_in = widths[0]
        for width in widths:
            self.down.append(nn.ModuleList([Residual(n_in, width, n_time), Residual(width, width, n_time)]))
            self.smaller.append(nn.Conv2d(width, width, 3, 2, 1))
            n_in = width
        self.middle1, self.attention, self.middle2 = Residual(last, last, n_time), ImageAttention(last), Residual(last, last, n_time)
        self.up = nn.ModuleList()
        for width in widths[::-1]:
            self.up.append(nn.ModuleList([Residual(n_in + width, width, n_time), Residual(width, width, n_time)]))
            n_in = width
        self.norm, self.out = nn.GroupNorm(8, n_in), nn.Conv2d(n_in, 3, 3, padding=1)

    def residuals(self):
        return [it for it in self.modules() if isinstance(it, Residual)]

    def forward(self, x, time):
        steps = torch.arange(self.n_time // 4, device=x.device, dtype=torch.float32)
        angles = time[:, None].float() * torch.exp(-steps / len(steps) * 9.2)
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        x, kept = self.first(x), []
        for (one, two), smaller in zip(self.down, self.smaller):
            x = two(one(x, time), time)
            kept.append(x)
            x = smaller(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for one, two in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], 1)
            x = two(one(x, time), time)
        return self.out(F.silu(self.norm(x)))


def unet(edits):
    """A diffusion step of a U-Net: bfloat16 by autocast, AdamW one tensor at a time, and a mean of the weights is kept."""
    edits.habits(precision="autocast-bf16")
    batch, side = size((32, 64), (2, 16))
    model = UNet(size((96, 192, 288, 384), (8, 16)))
    run = edits.prepare(model, model.residuals())
    mean = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=2e-4, foreach=False)
    betas = torch.linspace(1e-4, 0.02, 1000, device=GPU)
    kept = torch.cumprod(1 - betas, 0)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            clean = torch.rand(batch, 3, side, side, device=GPU) * 2 - 1
            noise = torch.randn_like(clean)
            time = torch.randint(0, 1000, (batch,), device=GPU)
            share = kept[time][:, None, None, None]
            noisy = (share.sqrt() * clean + (1 - share).sqrt() * noise).to(edits.dtype)
            with edits.forward():
                loss = F.mse_loss(run(noisy, time).float(), noise)
            edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=1.0)
        with torch.no_grad():
            for of_mean, it in zip(mean.parameters(), model.parameters()):
                of_mean.mul_(0.999).add_(it, alpha=0.001)
        print(step, loss.item())


class Experts(nn.Module):
    """Each token goes to the two experts that its router prefers."""

    def __init__(self, width, hidden, n_experts, n_chosen=2):
        super().__init__()
        self.n_chosen, self.router = n_chosen, nn.Linear(width, n_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(n_experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        shares = self.router(flat).float().softmax(-1)
        weights, chosen = shares.topk(self.n_chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        used = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return out.view_as(x), len(self.experts) * (used * shares.mean(0)).sum()


class ExpertLayer(nn.Module):
    def __init__(self, width, heads, hidden, n_experts):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.experts = Experts(width, hidden, n_experts)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


class MixtureOfExperts(nn.Module):
    def __init__(self, words, width, heads, hidden, layers, n_experts, length):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(ExpertLayer(width, heads, hidden, n_experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        total = 0.0
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(self.norm(x)), total


def moe(edits):
    """A decoder with experts, all of it in bfloat16, with fused Adam. How many tokens an expert gets depends on the data."""
    edits.habits(precision="bf16")
    batch, seq, words = size((12, 512, 16000), (2, 16, 300))
    model = MixtureOfExperts(words, size(512, 32), size(8, 2), size(1536, 64), size(6, 2), size(8, 4), seq)
    run = edits.prepare(model, model.layers)
    optimizer = edits.optimizer([it for it in model.parameters() if it.requires_grad], torch.optim.Adam, lr=3e-4, fused=True)
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, words, (batch, seq + 1), device=GPU)
            with edits.forward():
                logits, balance = run(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) + 0.01 * balance
            edits.backward(loss)
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        print(step, loss.item())


class Recurrent(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.lstm = nn.LSTM(n_in, hidden, batch_first=True, bidirectional=True)
        self.norm, self.dropout = nn.LayerNorm(2 * hidden), nn.Dropout(0.2)

    def forward(self, x):
        return self.dropout(self.norm(self.lstm(x)[0]))


class Recognizer(nn.Module):
    """Convolutions that make a spectrogram four times as short, LSTMs, and one score for each sign."""

    def __init__(self, n_bands, hidden, layers, n_signs):
        super().__init__()
        parts = [[nn.Conv2d(n_in, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()] for n_in in (1, 32)]
        self.shorten = nn.Sequential(*parts[0], *parts[1])
        widths = [32 * (n_bands // 4)] + [2 * hidden] * (layers - 1)
        self.layers = nn.ModuleList(Recurrent(width, hidden) for width in widths)
        self.head = nn.Linear(2 * hidden, n_signs)

    def forward(self, sound):
        x = self.shorten(sound[:, None])
        x = x.permute(0, 3, 1, 2).flatten(2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().log_softmax(-1)


def speech(edits):
    """Speech is recognized by LSTMs with CTC in single precision: Adam, clipped gradients that are set to zero and kept."""
    edits.habits(set_to_none="no")
    batch, n_bands, n_frames, n_signs, n_spoken = size((64, 80, 1200, 1000, 60), (2, 16, 64, 20, 4))
    model = Recognizer(n_bands, size(512, 16), size(4, 2), n_signs)
    run = edits.prepare(model, model.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    criterion = nn.CTCLoss(zero_infinity=True)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            sound = torch.randn(batch, n_bands, n_frames).to(GPU, edits.dtype)
            spoken = torch.randint(1, n_signs, (batch, n_spoken)).to(GPU)
            lengths = torch.full((batch,), n_frames // 4), torch.randint(n_spoken // 2, n_spoken + 1, (batch,))
            with edits.forward():
                scores = run(sound)
                loss = criterion(scores.transpose(0, 1), spoken, *lengths)
            edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=5.0)
        print(step, loss.item())


class Towers(nn.Module):
    """Images and captions go to vectors of one space."""

    def __init__(self, images, n_features, words, width, layers, length, together):
        super().__init__()
        self.images, self.project = images, nn.Linear(n_features, together, bias=False)
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) * 0.01)
        layer = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, together, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images, captions):
        seen = F.normalize(self.project(self.images(images)), dim=-1)
        read = self.text(self.words(captions) + self.places)
        read = F.normalize(self.last(read.mean(1)), dim=-1)
        return self.scale.exp() * seen @ read.t()


def towers(edits):
    """A ConvNeXt from timm and a PyTorch transformer learn which image and caption belong together: bfloat16 by autocast, AdamW."""
    import timm

    edits.habits(precision="autocast-bf16")
    batch, side, words, length = size((64, 160, 20000, 48), (4, 32, 300, 8))
    if SMALL:
        images = timm.create_model("convnext_atto", num_classes=0, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))
    else:
        images = timm.create_model("convnext_tiny", num_classes=0)
    model = Towers(images, images.num_features, words, size(512, 32), size(6, 2), length, size(256, 16))
    blocks = [block for stage in images.stages for block in stage.blocks] + list(model.text.layers)
    run = edits.prepare(model, blocks)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=5e-4, betas=(0.9, 0.98), weight_decay=0.2)
    pairs = torch.arange(batch, device=GPU)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            seen = torch.randn(batch, 3, side, side, device=GPU, dtype=edits.dtype)
            captions = torch.randint(0, words, (batch, length), device=GPU)
            with edits.forward():
                logits = run(seen, captions)
                loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2
            edits.backward(loss)
        edits.step(optimizer)
        with torch.no_grad():
            model.scale.clamp_(0, 4.6)
        print(step, loss.item())


PROGRAMS = {it.__name__: it for it in (gpt2, llama, bert, t5, vit, resnet, unet, moe, speech, towers)}
