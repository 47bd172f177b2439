"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `sounds`, `reading`, `masks` and `replaced` need transformers, `depth`
and `pose` timm, `quantize` torchvision; without them these raise ImportError.

The edits that `edits.py` does not know, `--optimizer adam8bit`, `--checkpoint selective` and `--freeze-up-to LAYER`, are those of
edits_programs5.py. An optimizer on the CPU may have groups of parameters and a scaler here.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "meta": ["--set-to-none yes", "--optimizer momentum", "--offload activations", "--precision autocast-bf16 --adam for-loop"],
    "quantize": ["--optimizer adamw", "--freeze 0.5", "--precision autocast-bf16", "--optimizer adam --adam fused"],
    "pose": ["--adam foreach", "--precision fp32", "--checkpoint all", "--precision bf16 --accumulate 2"],
    "rain": ["--optimizer sgd", "--checkpoint all", "--adam fused", "--precision autocast-fp16 --set-to-none no"],
    "sounds": [
        "--offload optimizer", "--checkpoint selective", "--freeze-up-to audio_spectrogram_transformer.layers.5",
        "--checkpoint layers:0..5 --optimizer adam8bit",
    ],
    "depth": ["--optimizer adafactor", "--precision autocast-fp16", "--checkpoint every:2", "--checkpoint all --offload optimizer"],
    "replaced": ["--precision bf16", "--optimizer adam8bit", "--checkpoint layers:12..23", "--lora 8 --accumulate 4"],
    "reading": ["--adam fused", "--lora 16", "--accumulate 1", "--freeze-up-to encoder --set-to-none no"],
    "folding": ["--checkpoint all", "--precision autocast-bf16", "--offload activations", "--checkpoint selective --adam for-loop"],
    "masks": ["--optimizer sgd", "--precision autocast-fp16", "--accumulate 4", "--offload activations --set-to-none no"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "meta": 4, "quantize": 7, "pose": 5, "rain": 4, "sounds": 5, "depth": 5, "replaced": 5, "reading": 6, "folding": 4, "masks": 5,
}

import sys

import torch
from torch import nn
from torch.nn import functional as F

import edits_programs5
from edits_programs5 import GPU, prepare, size

# plans.py imports edits.py, whose list of edits is then not that of the main module.
if "edits" in sys.modules:
    for edit, more in (("--optimizer", "adam8bit"), ("--checkpoint", "selective"), ("--freeze-up-to", None)):
        known = sys.modules["edits"].VALUES.setdefault(edit, None)
        if known and more not in known:
            known.append(more)


class Hosted:
    """An optimizer that lives on the CPU, for groups of parameters on the GPU."""

    def __init__(self, groups, make):
        self.param_groups = groups
        self.copied = [{**group, "params": [it.detach().cpu().clone().requires_grad_() for it in group["params"]]} for group in groups]
        self.inner = make(self.copied)

    def pairs(self):
        for group, copies in zip(self.param_groups, self.copied):
            yield from zip(group["params"], copies["params"])

    def step(self):
        for mine, copy in self.pairs():
            copy.grad = mine.grad.cpu() if mine.grad is not None else None
        self.inner.step()
        for mine, copy in self.pairs():
            mine.data.copy_(copy.data)

    def zero_grad(self, set_to_none=True):
        for mine, _ in self.pairs():
            if set_to_none:
                mine.grad = None
            elif mine.grad is not None:
                mine.grad.zero_()


def optimizer(edits, parameters, kind, **how):
    """The program's optimizer with what the edits change; groups without parameters are left out, as are frozen parameters."""
    groups = list(parameters)
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    groups = [{**group, "params": [it for it in group["params"] if it.requires_grad]} for group in groups]
    groups = [group for group in groups if group["params"]]
    if edits.edits.get("--offload") != "optimizer":
        return edits_programs5.optimizer(edits, groups, kind, **how)
    del edits.edits["--offload"]
    try:
        edits.note("on", "the CPU")
        return Hosted(groups, lambda copies: edits_programs5.optimizer(edits, copies, kind, **how))
    finally:
        edits.edits["--offload"] = "optimizer"


def rated(opt):
    """What has the learning rates."""
    return opt.inner if isinstance(opt, Hosted) else opt


class Mean:
    """A slowly moving mean of the parameters that are trained, beside them on the GPU."""

    def __init__(self, model, decay):
        self.decay = decay
        self.kept = {name: it.detach().clone() for name, it in model.named_parameters() if it.requires_grad}

    @torch.no_grad()
    def update(self, model):
        for name, it in model.named_parameters():
            if name in self.kept:
                self.kept[name].lerp_(it, 1 - self.decay)


# Sounds: a spectrogram transformer of transformers, mixed clips with several labels each, half precision, a faster head.


def sounds(edits):
    from transformers import ASTConfig, ASTForAudioClassification
    edits.habits(precision="autocast-fp16")
    n_labels, n_batch, n_time, n_mel = size(527, 12), size(10, 2), size(1024, 64), size(128, 32)
    small = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=64)
    config = ASTConfig(num_labels=n_labels, max_length=n_time, num_mel_bins=n_mel, hidden_dropout_prob=0.1, **size({}, small))
    model = ASTForAudioClassification(config)
    blocks = [it for it in model.modules() if type(it).__name__ == "ASTLayer"]
    model = prepare(edits, model, blocks)
    head = [it for name, it in model.named_parameters() if name.startswith("classifier")]
    body = [it for name, it in model.named_parameters() if not name.startswith("classifier")]
    groups = [{"params": body, "lr": 5e-5}, {"params": head, "lr": 5e-4}]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=5e-5, weight_decay=1e-4, betas=(0.95, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min(1.0, (step + 1) / 1000))
    mixing = torch.distributions.Beta(10.0, 10.0)
    for step in range(5):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            clips = torch.randn(n_batch, n_time, n_mel)
            labels = (torch.rand(n_batch, n_labels) < 0.005).float()
            # Each clip is mixed with another one of the batch.
            share, order = mixing.sample((n_batch,)), torch.randperm(n_batch)
            clips = clips * share[:, None, None] + clips[order] * (1 - share)[:, None, None]
            labels = labels * share[:, None] + labels[order] * (1 - share)[:, None]
            clips, labels = clips.to(GPU, edits.dtype), labels.to(GPU)
            # A band of frequencies and some time are hidden.
            low, begin = int(torch.randint(n_mel // 2, ())), int(torch.randint(n_time // 2, ()))
            clips[:, :, low : low + n_mel // 4] = 0
            clips[:, begin : begin + n_time // 6] = 0
            with edits.forward():
                logits = model(input_values=clips).logits
                loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f}")


# Handwriting: a ViT reads lines of text and a decoder writes them (transformers), bfloat16, two batches for a step, smoothed labels.


def reading(edits):
    from transformers import TrOCRConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig
    from transformers import get_cosine_schedule_with_warmup
    edits.habits(precision="autocast-bf16", accumulate=2)
    n_words, n_batch, longest, n = size(50265, 120), size(8, 2), size(64, 10), size(384, 32)
    seen = dict(image_size=n, **size({}, dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, patch_size=8)))
    written = dict(
        vocab_size=n_words, d_model=size(768, 32), decoder_layers=size(6, 2), decoder_attention_heads=size(12, 2), max_position_embeddings=512,
        decoder_ffn_dim=size(3072, 64), use_cache=False, activation_function="relu", scale_embedding=False, layernorm_embedding=True,
    )
    if not size(0, 1):
        seen["qkv_bias"] = False
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**seen), TrOCRConfig(**written))
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, 2
    model = VisionEncoderDecoderModel(config=config)
    blocks = [it for it in model.modules() if type(it).__name__ in ("ViTLayer", "TrOCRDecoderLayer")]
    model = prepare(edits, model, blocks)
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [{"params": [it for it in trained if it.ndim > 1]}, {"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0}]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=5e-5, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(rated(opt), 20, 2000)
    for step in range(3):
        total = 0.0
        for _ in range(edits.accumulate):
            images = torch.rand(n_batch, 3, n, n).sub_(0.5).div_(0.5).to(GPU, edits.dtype)
            labels = torch.randint(4, n_words, (n_batch, longest))
            labels[torch.arange(longest) >= torch.randint(longest // 3, longest + 1, (n_batch, 1))] = 1
            labels = labels.to(GPU)
            before = torch.cat([labels.new_full((n_batch, 1), 2), labels[:, :-1]], 1)
            with edits.forward():
                logits = model(pixel_values=images, decoder_input_ids=before).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=1, label_smoothing=0.1)
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt, trained, clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    print(f"loss {total:.3f}")


# Masks of what is inside boxes: SAM of transformers, of which only the decoder is trained; the images are encoded each time.


def overlap_and_focus(logits, truth):
    """One minus the overlap, and the entropy of pixels that are hard."""
    chances = logits.sigmoid()
    both = (chances * truth).sum((-1, -2))
    overlap = 1 - (2 * both + 1) / (chances.sum((-1, -2)) + truth.sum((-1, -2)) + 1)
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    right = chances * truth + (1 - chances) * (1 - truth)
    return overlap.mean() + 20 * (entropy * (1 - right).square()).mean()


def masks(edits):
    from transformers import SamConfig, SamModel
    edits.habits()
    n, n_batch, n_boxes = size(1024, 64), 2, size(6, 2)
    tiny = dict(
        vision_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=64, window_size=2, global_attn_indexes=[1],
                           mlp_dim=64, num_pos_feats=16, output_channels=32),
        prompt_encoder_config=dict(hidden_size=32, image_size=64, image_embedding_size=4),
        mask_decoder_config=dict(hidden_size=32, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=32),
    )
    model = SamModel(SamConfig(**size({}, tiny)))
    for name, it in model.named_parameters():
        if name.startswith(("vision_encoder", "prompt_encoder", "shared_image_embedding")):
            it.requires_grad_(False)
    model = prepare(edits, model, [it for it in model.modules() if type(it).__name__ == "SamTwoWayAttentionBlock"])
    opt = optimizer(edits, model.mask_decoder.parameters(), torch.optim.Adam, lr=1e-5, weight_decay=0)
    for step in range(3):
        total = 0.0
        for _ in range(edits.accumulate):
            images = torch.randn(n_batch, 3, n, n).to(GPU, edits.dtype)
            corners = torch.rand(n_batch, n_boxes, 2) * n * 0.6
            boxes = torch.cat([corners, corners + n * (0.05 + 0.3 * torch.rand(n_batch, n_boxes, 2))], -1).to(GPU, edits.dtype)
            truth = (torch.rand(n_batch, n_boxes, n // 4, n // 4) < 0.2).float().to(GPU)
            with edits.forward():
                out = model(pixel_values=images, input_boxes=boxes, multimask_output=False)
                guessed = out.pred_masks.squeeze(2).float()
                with torch.no_grad():
                    inside = guessed > 0
                    real = (inside & truth.bool()).sum((-1, -2)) / (inside | truth.bool()).sum((-1, -2)).clamp(min=1)
                loss = overlap_and_focus(guessed, truth) + F.mse_loss(out.iou_scores.squeeze(-1).float(), real.float())
            edits.backward(loss)
            total += loss.detach()
        edits.step(opt)
        edits.zero_grad(opt)
        print(f"{step} loss {total.item() / edits.accumulate:.3f}")


# Depth from one picture: a ConvNeXt of timm and a decoder, an error that ignores the scale and one of the slopes, a mean of the weights.


class Join(nn.Module):
    """Twice the size, together with what the encoder saw at that size."""

    def __init__(self, n_in, n_seen, n_out):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in + n_seen, n_out, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)

    def forward(self, x, seen):
        x = F.interpolate(x, size=seen.shape[-2:], mode="bilinear", align_corners=True)
        x = F.leaky_relu(self.norm1(self.conv1(torch.cat([x, seen], 1))))
        return F.leaky_relu(self.norm2(self.conv2(x)))


class Depth(nn.Module):
    def __init__(self, name, widths):
        super().__init__()
        from timm import create_model
        self.encoder = create_model(name, features_only=True, **size(dict(drop_path_rate=0.1), {}))
        seen = self.encoder.feature_info.channels()[::-1]
        self.narrow = nn.Conv2d(seen[0], widths[0], 1)
        self.joins = nn.ModuleList(Join(a, b, c) for a, b, c in zip(widths, seen[1:], widths[1:]))
        self.out = nn.Sequential(nn.Conv2d(widths[-1], widths[-1] // 2, 3, padding=1), nn.GELU(), nn.Conv2d(widths[-1] // 2, 1, 1))

    def forward(self, images):
        *others, x = self.encoder(images)
        x = self.narrow(x)
        for join, seen in zip(self.joins, others[::-1]):
            x = join(x, seen)
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.interpolate(self.out(x), scale_factor=2, mode="bilinear", align_corners=False)
        return 80 * torch.sigmoid(x.float())


def scale_free(guessed, truth, known):
    difference = torch.where(known, guessed.clamp(min=1e-3).log() - truth.log(), 0.0)
    n = known.sum().clamp(min=1)
    mean = difference.sum() / n
    loss = (difference.square().sum() / n - 0.85 * mean.square()).clamp(min=1e-8).sqrt()
    # How the difference changes from pixel to pixel, at four sizes.
    slopes = 0.0
    for by in (1, 2, 4, 8):
        d, there = difference[..., ::by, ::by], known[..., ::by, ::by]
        right = (d[..., 1:] - d[..., :-1]).abs() * (there[..., 1:] & there[..., :-1])
        down = (d[..., 1:, :] - d[..., :-1, :]).abs() * (there[..., 1:, :] & there[..., :-1, :])
        slopes = slopes + (right.sum() + down.sum()) / there.sum().clamp(min=1)
    return loss, 0.1 * slopes


def depth(edits):
    edits.habits()
    n_batch, height, width, n_steps = size(6, 2), size(352, 64), size(704, 64), 4
    model = Depth(size("convnext_tiny", "convnext_atto"), size((512, 256, 128, 96), (32, 16, 16, 8)))
    blocks = [it for it in model.modules() if type(it).__name__ == "ConvNeXtBlock"]
    model = prepare(edits, model, blocks)
    groups = [
        {"params": [it for name, it in model.named_parameters() if name.startswith("encoder")], "lr": 4e-5},
        {"params": [it for name, it in model.named_parameters() if not name.startswith("encoder")], "lr": 4e-4},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=4e-4, weight_decay=0.01)
    rates = [group["lr"] for group in rated(opt).param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(rated(opt), rates, total_steps=1000, pct_start=0.3, cycle_momentum=False)
    mean = Mean(model, 0.998)
    for step in range(n_steps):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            images = torch.rand(n_batch, 3, height, width).to(GPU, edits.dtype, non_blocking=True)
            truth = (torch.rand(n_batch, 1, height, width) * 79 + 1).to(GPU, non_blocking=True)
            known = torch.rand(n_batch, 1, height, width).to(GPU, non_blocking=True) < 0.3
            with edits.forward():
                guessed = model(images)
                loss, slopes = scale_free(guessed, truth, known)
            edits.backward(loss + slopes)
        edits.step(opt, model.parameters(), clip=0.5)
        schedule.step()
        mean.update(model)
        if step == n_steps - 1:
            with torch.no_grad():
                error = ((guessed - truth).abs() / truth)[known].mean()
            print(f"loss {loss.item():.3f} + {slopes.item():.3f}, relative error {error.item():.3f}")


# Where elbows and knees are: an HRNet of timm, maps of heat for each of them, half precision with a scaler, flipped tests.


class Pose(nn.Module):
    def __init__(self, name, n_joints):
        super().__init__()
        from timm import create_model
        self.net = create_model(name, features_only=True, feature_location="", out_indices=(1,))
        self.final = nn.LazyConv2d(n_joints, 1)

    def forward(self, images):
        return self.final(self.net(images)[0])


def heat(places, height, width, spread=2.0):
    """Maps with a bump at each place, in pixels of the map."""
    rows, columns = torch.arange(height, device=places.device), torch.arange(width, device=places.device)
    down = (rows - places[..., 1, None]).square()[..., :, None]
    right = (columns - places[..., 0, None]).square()[..., None, :]
    return torch.exp(-(down + right) / (2 * spread**2))


def pose(edits):
    edits.habits(precision="autocast-fp16")
    n_joints, n_batch, height, width = 17, size(40, 2), size(256, 64), size(192, 64)
    model = Pose(size("hrnet_w32", "hrnet_w18_small"), n_joints)
    model.eval()
    with torch.no_grad():
        # The last layer learns how many channels come in.
        model(torch.zeros(1, 3, 64, 64))
    model = prepare(edits, model, [it for it in model.modules() if type(it).__name__ == "HighResolutionModule"])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[170, 200], gamma=0.1)
    for step in range(4):
        for _ in range(edits.accumulate):
            images = torch.randn(n_batch, 3, height, width).to(GPU, edits.dtype, non_blocking=True)
            places = (torch.rand(n_batch, n_joints, 2) * torch.tensor([width / 4, height / 4])).to(GPU, non_blocking=True)
            seen = (torch.rand(n_batch, n_joints, 1, 1) < 0.8).float().to(GPU, non_blocking=True)
            truth = heat(places, height // 4, width // 4)
            with edits.forward():
                maps = model(images)
                loss = (seen * (maps.float() - truth).square()).mean()
            edits.backward(loss)
        edits.step(opt)
        edits.zero_grad(opt)
        schedule.step()
        if step == 1:
            # The test takes the mean of what is seen in the picture and in its mirror.
            model.eval()
            with torch.no_grad(), edits.autocast():
                images = torch.randn(2 * n_batch, 3, height, width).to(GPU, edits.dtype)
                maps = (model(images) + model(images.flip(3)).flip(3)) / 2
                best = maps.flatten(2).argmax(2)
                print(f"mean place {best.float().mean().item():.1f}")
            model.train()
    print(f"loss {loss.item():.4f}")


# Weights and activations of four bits: a RegNet of torchvision whose convolutions learn the size of a step, by functions of their own.


class Rounded(torch.autograd.Function):
    """Rounds to steps between two limits; the gradient goes straight through, and to the size of a step."""

    @staticmethod
    def forward(ctx, x, step, low, high, share):
        scaled = x / step
        ctx.save_for_backward(scaled, step)
        ctx.limits, ctx.share = (low, high), share
        return scaled.round().clamp_(low, high).mul_(step)

    @staticmethod
    def backward(ctx, grad):
        scaled, step = ctx.saved_tensors
        low, high = ctx.limits
        inside = (scaled >= low) & (scaled <= high)
        by_step = torch.where(inside, scaled.round() - scaled, scaled.clamp(low, high))
        grad_step = (grad * by_step).sum(dtype=torch.float32).mul(ctx.share).to(step.dtype).view(step.shape)
        return (grad * inside).to(grad.dtype), grad_step, None, None, None


class CoarseConv(nn.Conv2d):
    """A convolution with coarse weights of a coarse input."""

    def __init__(self, like, bits):
        super().__init__(
            like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding, like.dilation, like.groups, like.bias is not None,
        )
        self.load_state_dict(like.state_dict())
        self.high, self.high_in = 2 ** (bits - 1) - 1, 2**bits - 1
        self.step = nn.Parameter(2 * self.weight.detach().abs().mean() / math.sqrt(self.high))
        self.step_in = nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        n = x[0].numel()
        x = Rounded.apply(x, self.step_in.to(x.dtype), 0, self.high_in, 1 / math.sqrt(n * self.high_in))
        share = 1 / math.sqrt(self.weight.numel() * self.high)
        weight = Rounded.apply(self.weight, self.step, -self.high - 1, self.high, share)
        return self._conv_forward(x, weight, self.bias)


def coarse(net, bits):
    """All convolutions but the first are replaced."""
    names = [name for name, it in net.named_modules() if isinstance(it, nn.Conv2d)]
    for name in names[1:]:
        parent, _, child = name.rpartition(".")
        setattr(net.get_submodule(parent), child, CoarseConv(net.get_submodule(name), bits))
    return net


def quantize(edits):
    from torchvision import models
    edits.habits()
    n_labels, n_batch, n = size(1000, 10), size(40, 2), size(224, 32)
    net = size(models.regnet_y_1_6gf, models.regnet_y_400mf)(weights=None, num_classes=n_labels)
    net = coarse(net, 4)
    net = prepare(edits, net, [it for it in net.modules() if type(it).__name__ == "ResBottleneckBlock"])
    steps = [it for name, it in net.named_parameters() if name.endswith((".step", ".step_in"))]
    norms = [it for name, it in net.named_parameters() if it.ndim == 1]
    others = [it for it in net.parameters() if it.ndim > 1]
    groups = [
        {"params": others, "weight_decay": 1e-4}, {"params": norms, "weight_decay": 0.0}, {"params": steps, "weight_decay": 0.0, "lr": 1e-5},
    ]
    opt = optimizer(edits, groups, torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=2000)
    judged = nn.CrossEntropyLoss(label_smoothing=0.1).to(GPU)
    for step in range(5):
        for _ in range(edits.accumulate):
            images = torch.randn(n_batch, 3, n, n, pin_memory=GPU != "cpu").to(GPU, edits.dtype, non_blocking=True)
            labels = torch.randint(n_labels, (n_batch,)).to(GPU, non_blocking=True)
            with edits.forward():
                logits = net(images)
                loss = judged(logits, labels)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        edits.zero_grad(opt)
        right = (logits.detach().topk(min(5, n_labels)).indices == labels[:, None]).any(1).float().mean()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.3f}, {right.item():.3f} among the first five")


# Replaced words: a small ELECTRA of transformers replaces words of texts, a larger one finds which; they have the same embeddings.


class Electra(nn.Module):
    def __init__(self, n_words, longest):
        super().__init__()
        from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining
        common = dict(vocab_size=n_words, embedding_size=size(768, 32), max_position_embeddings=longest)
        usual = dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024, num_hidden_layers=12)
        small = dict(hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=12)
        self.generator = ElectraForMaskedLM(ElectraConfig(**common, **size(usual, small)))
        usual = dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=12)
        small = dict(hidden_size=32, num_attention_heads=2, intermediate_size=64, num_hidden_layers=12)
        self.discriminator = ElectraForPreTraining(ElectraConfig(**common, **size(usual, small)))
        for part in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            setattr(self.discriminator.electra.embeddings, part, getattr(self.generator.electra.embeddings, part))

    def forward(self, tokens, mask, chosen, hidden):
        logits = self.generator(input_ids=hidden, attention_mask=mask).logits[chosen]
        loss_words = F.cross_entropy(logits.float(), tokens[chosen])
        with torch.no_grad():
            # Gumbel noise: a sample of each distribution.
            noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp(1e-9, 1 - 1e-6)))
            given = tokens.clone()
            given[chosen] = (logits.float() + noise).argmax(-1).clamp(max=self.generator.config.vocab_size - 1)
            replaced = (given != tokens).float()
        found = self.discriminator(input_ids=given, attention_mask=mask).logits.float()
        each = F.binary_cross_entropy_with_logits(found, replaced, reduction="none")
        return loss_words, (each * mask).sum() / mask.sum()


def replaced(edits):
    from transformers import get_linear_schedule_with_warmup
    edits.habits()
    n_words, longest, n_batch = size(30522, 150), size(128, 16), size(24, 2)
    model = Electra(n_words, size(512, 16))
    model = prepare(edits, model, [it for it in model.modules() if type(it).__name__ == "ElectraLayer"])
    plain = ("bias", "LayerNorm.weight", "layer_norm.weight")
    groups = [
        {"params": [it for name, it in model.named_parameters() if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [it for name, it in model.named_parameters() if name.endswith(plain)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=2e-4, eps=1e-6)
    schedule = get_linear_schedule_with_warmup(rated(opt), 100, 10000)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            tokens = torch.randint(5, n_words, (n_batch, longest))
            mask = (torch.arange(longest) < torch.randint(longest // 2, longest + 1, (n_batch, 1))).long()
            # The same number of words in each text, so that all batches are alike.
            order = (torch.rand(n_batch, longest) + 10 * (1 - mask)).argsort(1)[:, : max(1, longest * 15 // 100)]
            chosen = torch.zeros(n_batch, longest, dtype=torch.bool).scatter_(1, order, True)
            hidden = tokens.masked_fill(chosen, 4)
            tokens, mask, chosen, hidden = (it.to(GPU, non_blocking=True) for it in (tokens, mask, chosen, hidden))
            with edits.forward():
                loss_words, loss_replaced = model(tokens, mask, chosen, hidden)
                loss = loss_words + 50 * loss_replaced
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
    print(f"loss {loss_words.item():.3f} and {loss_replaced.item():.3f}")


# Folding of proteins: what is known of each pair of residues goes around triangles; it is looked at again before it is learned.


class Triangle(nn.Module):
    """An edge learns from the two other edges of all triangles."""

    def __init__(self, width, hidden, leaving):
        super().__init__()
        self.leaving = leaving
        self.norm, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(hidden)
        self.left, self.right, self.out = nn.Linear(width, 2 * hidden), nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, width)

    def forward(self, z, mask):
        x = self.norm(z)
        a, b = (F.glu(side(x)) * mask for side in (self.left, self.right))
        how = "bikc,bjkc->bijc" if self.leaving else "bkic,bkjc->bijc"
        return self.out(self.norm_out(torch.einsum(how, a, b))) * torch.sigmoid(self.gate(x))


class EdgeAttention(nn.Module):
    """Edges of the same node look at each other; the third edge of the triangle says how much."""

    def __init__(self, width, n_heads, starting):
        super().__init__()
        self.n_heads, self.starting = n_heads, starting
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.bias, self.gate, self.out = nn.Linear(width, n_heads, bias=False), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z, mask):
        z = z if self.starting else z.transpose(1, 2)
        x = self.norm(z)
        q, k, v = (it.unflatten(-1, (self.n_heads, -1)).transpose(2, 3) for it in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        scores = scores + self.bias(x).permute(0, 3, 1, 2)[:, None]
        there = mask[:, 0, :, 0] > 0
        scores = scores.masked_fill(~there[:, None, None, None], -3e4)
        seen = (scores.softmax(-1).to(v.dtype) @ v).transpose(2, 3).flatten(3)
        out = self.out(seen * torch.sigmoid(self.gate(x)))
        return out if self.starting else out.transpose(1, 2)


class PairBlock(nn.Module):
    def __init__(self, width, hidden, n_heads):
        super().__init__()
        self.outgoing, self.incoming = Triangle(width, hidden, True), Triangle(width, hidden, False)
        self.rows, self.columns = EdgeAttention(width, n_heads, True), EdgeAttention(width, n_heads, False)
        self.change = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def dropped(self, x, dim):
        """The same rows or columns are dropped everywhere."""
        shape = [1 if number == dim else n for number, n in enumerate(x.shape)]
        return x * F.dropout(x.new_ones(shape), 0.25, self.training)

    def forward(self, z, mask):
        z = z + self.dropped(self.outgoing(z, mask), 1)
        z = z + self.dropped(self.incoming(z, mask), 1)
        z = z + self.dropped(self.rows(z, mask), 1)
        z = z + self.dropped(self.columns(z, mask), 2)
        return z + self.change(z)


class Folding(nn.Module):
    def __init__(self, width, hidden, n_heads, n_blocks, n_bins):
        super().__init__()
        self.first, self.second = nn.Embedding(21, width), nn.Embedding(21, width)
        self.apart = nn.Embedding(65, width)
        self.again = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(PairBlock(width, hidden, n_heads) for _ in range(n_blocks))
        self.bins = nn.Linear(width, n_bins)

    def forward(self, residues, mask, before):
        place = torch.arange(residues.size(1), device=residues.device)
        apart = (place[:, None] - place).clamp(-32, 32) + 32
        z = self.first(residues)[:, :, None] + self.second(residues)[:, None] + self.apart(apart)
        if before is not None:
            z = z + self.again(before)
        for block in self.blocks:
            z = block(z, mask)
        return z


def folding(edits):
    edits.habits()
    n_residues, n_bins = size(192, 12), size(64, 8)
    model = Folding(size(96, 16), size(96, 8), size(4, 2), size(4, 4), n_bins)
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(rated(opt), start_factor=0.01, total_iters=1000)
    mean = Mean(model, 0.999)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            n = n_residues - 16 * (step % 2) // size(1, 8)
            residues = torch.randint(21, (1, n_residues))
            there = (torch.arange(n_residues) < n).to(edits.dtype)[None]
            points = torch.randn(1, n_residues, 3).cumsum(1)
            target = (torch.cdist(points, points) * 2).long().clamp(max=n_bins - 1)
            residues, there, target = residues.to(GPU), there.to(GPU), target.to(GPU)
            mask = (there[:, :, None] * there[:, None])[..., None]
            # It is folded once or twice before, of which nothing is learned.
            before = None
            with torch.no_grad(), edits.autocast():
                for _ in range(1 + step % 2):
                    before = model(residues, mask, before)
            with edits.forward():
                z = model(residues, mask, before)
                # The distance is the same from both sides.
                logits = model.bins(z + z.transpose(1, 2)).float()
                each = F.cross_entropy(logits.permute(0, 3, 1, 2), target, reduction="none")
                loss = (each * mask[..., 0]).sum() / mask.sum()
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=0.1)
        schedule.step()
        mean.update(model)
    print(f"loss {loss.item():.3f}")


# Learning to learn from five pictures of a class: steps of the inner loop are differentiated; tasks add to gradients which are zeroed.


class Few(nn.Module):
    def __init__(self, width, n_layers, n, n_ways):
        super().__init__()
        layers, before = [], 3
        for _ in range(n_layers):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2)]
            before, n = width, n // 2
        self.net, self.head = nn.Sequential(*layers), nn.Linear(width * n * n, n_ways)

    def forward(self, x):
        return self.head(self.net(x).flatten(1))


def meta(edits):
    from torch.func import functional_call
    edits.habits(set_to_none="no")
    n_ways, n_shots, n_asked, n, n_tasks, n_inner = 5, size(5, 1), size(15, 2), size(84, 32), size(4, 2), size(5, 2)
    model = Few(size(96, 8), 4, n, n_ways)
    model = prepare(edits, model, [])
    # Each layer learns how fast it learns.
    rates = nn.ParameterList(nn.Parameter(torch.tensor(0.01)) for _ in model.parameters()).to(GPU, edits.dtype)
    learned = [*model.parameters(), *rates.parameters()]
    opt = optimizer(edits, learned, torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=500, eta_min=1e-5)
    of_each = torch.arange(n_ways)
    for step in range(4):
        edits.zero_grad(opt)
        total, right = 0.0, 0.0
        for _ in range(edits.accumulate * n_tasks):
            shown = torch.randn(n_ways * n_shots, 3, n, n).to(GPU, edits.dtype)
            asked = torch.randn(n_ways * n_asked, 3, n, n).to(GPU, edits.dtype)
            labels, truth = of_each.repeat(n_shots).to(GPU), of_each.repeat(n_asked).to(GPU)
            now = dict(model.named_parameters())
            with edits.forward():
                for _ in range(n_inner):
                    inner = F.cross_entropy(functional_call(model, now, (shown,)).float(), labels)
                    slopes = torch.autograd.grad(inner, list(now.values()), create_graph=True)
                    now = {name: it - rate * slope for (name, it), slope, rate in zip(now.items(), slopes, rates)}
                logits = functional_call(model, now, (asked,)).float()
                loss = F.cross_entropy(logits, truth) / n_tasks
            edits.backward(loss)
            total += loss.item()
            right += (logits.argmax(1) == truth).float().mean().item() / n_tasks
        edits.step(opt, learned, clip=10.0)
        schedule.step()
    print(f"loss {total:.3f}, {right:.3f} right")


# Rain of the next hour from radar: cells of convolutions with gates, one after another in time, and errors that weigh heavy rain more.


class Cell(nn.Module):
    """A recurrent cell with gates whose products are convolutions, and weights for each place of the memory."""

    def __init__(self, n_in, width, n):
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(n_in + width, 4 * width, 5, padding=2)
        self.norm = nn.GroupNorm(4, 4 * width)
        self.look = nn.Parameter(torch.zeros(3, width, n, n))

    def forward(self, x, h, c):
        i, f, g, o = self.norm(self.gates(torch.cat([x, h], 1))).chunk(4, 1)
        i, f = torch.sigmoid(i + self.look[0] * c), torch.sigmoid(f + 1 + self.look[1] * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + self.look[2] * c) * torch.tanh(c), c


class Rain(nn.Module):
    def __init__(self, widths, n, n_before, n_after):
        super().__init__()
        self.widths, self.n, self.n_before, self.n_after = widths, n, n_before, n_after
        self.enter = nn.Conv2d(1, 16, 4, 2, 1)
        befores = [16, *widths[:-1]]
        sizes = [n // 2 ** (level + 1) for level in range(len(widths))]
        self.past = nn.ModuleList(Cell(a, b, m) for a, b, m in zip(befores, widths, sizes))
        self.future = nn.ModuleList(Cell(b, b, m) for b, m in zip(widths, sizes))
        self.down = nn.ModuleList(nn.Conv2d(it, it, 4, 2, 1) for it in widths[:-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 4, 2, 1) for a, b in zip(widths, widths[1:]))
        self.leave = nn.Sequential(nn.ConvTranspose2d(widths[0], 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 1))

    def start(self, like):
        sizes = [self.n // 2 ** (level + 1) for level in range(len(self.widths))]
        return [tuple(like.new_zeros(len(like), width, m, m) for _ in range(2)) for width, m in zip(self.widths, sizes)]

    def forward(self, frames):
        states = self.start(frames)
        for time in range(self.n_before):
            x = F.leaky_relu(self.enter(frames[:, time]), 0.2)
            for level, cell in enumerate(self.past):
                states[level] = cell(x, *states[level])
                if level < len(self.down):
                    x = F.leaky_relu(self.down[level](states[level][0]), 0.2)
        guessed = []
        for _ in range(self.n_after):
            x = torch.zeros_like(states[-1][0])
            for level in reversed(range(len(self.future))):
                states[level] = self.future[level](x, *states[level])
                x = states[level][0]
                if level:
                    x = F.leaky_relu(self.up[level - 1](x), 0.2)
            guessed.append(self.leave(x))
        return torch.stack(guessed, 1)


def rain(edits):
    edits.habits()
    n_batch, n, n_before, n_after = size(8, 2), size(128, 16), size(8, 2), size(12, 3)
    model = Rain(size((64, 96, 96), (8, 8)), n, n_before, n_after)
    model = prepare(edits, model, [*model.past, *model.future])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4, betas=(0.5, 0.999))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(rated(opt), factor=0.5, patience=2)
    limits = torch.tensor([0.3, 0.5, 0.7, 0.85], device=GPU)
    weights = torch.tensor([1.0, 2.0, 5.0, 10.0, 30.0], device=GPU)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            frames = torch.rand(n_batch, n_before + n_after, 1, n, n).to(GPU)
            past, future = frames[:, :n_before].to(edits.dtype), frames[:, n_before:]
            with edits.forward():
                guessed = model(past).float()
                weight = weights[torch.bucketize(future.contiguous(), limits)]
                loss = (weight * (guessed - future).square()).mean() + (weight * (guessed - future).abs()).mean()
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=5.0)
        schedule.step(loss.item())
    with torch.no_grad():
        hits = ((guessed > 0.5) & (future > 0.5)).sum() / ((guessed > 0.5) | (future > 0.5)).sum().clamp(min=1)
    print(f"loss {loss.item():.3f}, {hits.item():.3f} of the rain was foreseen")


PROGRAMS = {it.__name__: it for it in (meta, quantize, pose, rain, sounds, depth, replaced, reading, folding, masks)}
