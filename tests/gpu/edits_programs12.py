"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `proteins`, `code`, `films`, `reviews`, `headlines` and `emotions` need
transformers, `textures` timm, `rubbish` and `scans` torchvision; without them these raise ImportError.

The optimizer on the CPU is that of edits_programs8.py; the loops call `prepare` and `size` of edits_programs5.py.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "sharper": ["--adam fused", "--checkpoint all", "--accumulate 4"],
    "textures": ["--optimizer momentum", "--checkpoint every:2", "--set-to-none no"],
    "rubbish": ["--optimizer adamw", "--set-to-none no", "--precision autocast-bf16"],
    "scans": ["--optimizer sgd", "--accumulate 2", "--freeze 0.5"],
    "emotions": ["--optimizer adafactor", "--checkpoint every:2", "--set-to-none yes", "--freeze 0.5"],
    "headlines": ["--optimizer adafactor", "--accumulate 2", "--offload optimizer"],
    "reviews": ["--adam fused", "--checkpoint all", "--lora 8"],
    "proteins": ["--adam for-loop", "--checkpoint all", "--accumulate 4", "--precision bf16"],
    "code": ["--adam foreach", "--checkpoint all", "--checkpoint every:2", "--precision autocast-bf16"],
    "films": ["--optimizer momentum", "--checkpoint every:2", "--offload activations", "--precision autocast-bf16"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "sharper": 4, "textures": 5, "rubbish": 5, "scans": 5, "emotions": 5, "headlines": 5, "reviews": 6, "proteins": 6, "code": 5, "films": 5,
}

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


# Sharper pictures: residual blocks without norms at the small resolution, pixels are shuffled at the end (EDSR), Adam, an absolute error.


class Block(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1))
        self.scale = scale

    def forward(self, x):
        return x + self.body(x) * self.scale


class Larger(nn.Module):
    def __init__(self, width, n_blocks, factor=2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width, 0.1) for _ in range(n_blocks)))
        self.last = nn.Conv2d(width, width, 3, padding=1)
        self.tail = nn.Sequential(
            nn.Conv2d(width, width * factor**2, 3, padding=1), nn.PixelShuffle(factor), nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x):
        x = self.head(x - 0.45)
        x = x + self.last(self.blocks(x))
        return self.tail(x) + 0.45


class Patches(Dataset):
    """Small parts of large pictures, turned at random, and the same at half the size."""

    def __init__(self, n, side, n_pictures):
        self.n, self.side = n, side
        self.pictures = torch.randint(256, (n_pictures, 3, 4 * side, 4 * side), dtype=torch.uint8)

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        top, left = torch.randint(3 * self.side, (2,)).tolist()
        large = self.pictures[number % len(self.pictures), :, top : top + self.side, left : left + self.side].float() / 255
        if torch.rand(()) < 0.5:
            large = large.flip(-1)
        return F.avg_pool2d(large, 2), large


def sharper(edits):
    edits.habits()
    n_batch, side, n_steps = size(96, 2), size(96, 16), 6
    model = Larger(size(64, 8), size(32, 4))
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4, betas=(0.9, 0.999), eps=1e-8)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[200, 400], gamma=0.5)
    patches = Patches(n_steps * edits.accumulate * n_batch, side, 8)
    loader = iter(DataLoader(patches, n_batch, shuffle=True, drop_last=True))
    criterion = nn.L1Loss()
    model.train()
    for step in range(n_steps):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            small, large = (it.to(GPU).to(edits.dtype) for it in next(loader))
            with edits.forward():
                loss = criterion(model(small), large)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        print(f"{step} error {loss.item():.4f}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        guess = model(small[:4]).float().clamp(0, 1)
    print(f"PSNR {-10 * math.log10(F.mse_loss(guess, large[:4].float()).item()):.2f} dB")


# Textures: a DeiT III of timm, AdamW, a mean of the weights kept by timm, bfloat16 where it does no harm.


def textures(edits):
    from timm import create_model
    from timm.loss import BinaryCrossEntropy
    from timm.optim import param_groups_weight_decay
    from timm.utils import ModelEmaV3, accuracy
    edits.habits(precision="autocast-bf16")
    n_kinds, n_batch, n = size(47, 6), size(96, 4), size(224, 32)
    small = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2)
    model = create_model("deit3_small_patch16_224", num_classes=n_kinds, drop_path_rate=0.05, **size({}, small))
    # The mean is copied before anything is done to the layers.
    mean = ModelEmaV3(model.to(GPU), decay=0.9999)
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, param_groups_weight_decay(model, 0.05), torch.optim.AdamW, lr=5e-4)
    warm = torch.optim.lr_scheduler.LinearLR(rated(opt), 0.01, total_iters=5)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=100, eta_min=1e-6)
    schedule = torch.optim.lr_scheduler.SequentialLR(rated(opt), [warm, cool], milestones=[5])
    criterion = BinaryCrossEntropy(smoothing=0.1)

    def pictures():
        images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU)
        return images.to(edits.dtype).div_(255).sub_(0.5).div_(0.25), torch.randint(n_kinds, (n_batch,)).to(GPU)

    for epoch in range(2):
        model.train()
        for step in range(3):
            total = 0.0
            for _ in range(edits.accumulate):
                images, labels = pictures()
                with edits.forward():
                    loss = criterion(model(images), labels)
                edits.backward(loss)
                total += loss.item() / edits.accumulate
            edits.step(opt, model.parameters(), clip=1.0)
            edits.zero_grad(opt)
            mean.update(model)
            schedule.step()
        mean.eval()
        with torch.no_grad(), edits.autocast():
            images, labels = pictures()
            first, fifth = accuracy(mean(images), labels, topk=(1, 5))
        print(f"{epoch} loss {total:.4f}, the first {first.item():.1f} %, the first five {fifth.item():.1f} %")


# Rubbish: an EfficientNetV2 of torchvision, SGD with momentum, smoothed labels, the whole set goes around twice.


def rubbish(edits):
    from torchvision.models import efficientnet_v2_s
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
    from torchvision.transforms import v2
    edits.habits()
    n_kinds, n_batch, n, n_data = size(12, 4), size(32, 4), size(224, 32), size(96, 8)
    if n == 224:
        model = efficientnet_v2_s(weights=None)
    else:
        model = EfficientNet([FusedMBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2)], dropout=0.2, last_channel=32)
    model.classifier[1] = nn.Linear(model.classifier[1].in_features, n_kinds)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=2e-5)
    schedule = torch.optim.lr_scheduler.StepLR(rated(opt), step_size=30, gamma=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    changed = v2.Compose([
        v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    images = torch.randint(256, (n_data, 3, n, n), dtype=torch.uint8)
    data = TensorDataset(images, torch.randint(n_kinds, (n_data,)))
    loader = DataLoader(data, n_batch, shuffle=True, pin_memory=GPU == "cuda", drop_last=True)
    for epoch in range(2):
        model.train()
        n_right, n_seen, total = 0, 0, 0.0
        for number, (images, labels) in enumerate(loader):
            images = changed(images).to(GPU, non_blocking=True).to(edits.dtype)
            labels = labels.to(GPU, non_blocking=True)
            with edits.forward():
                logits = model(images)
                loss = criterion(logits, labels)
            if number % edits.accumulate == 0:
                edits.zero_grad(opt)
            edits.backward(loss)
            if (number + 1) % edits.accumulate == 0:
                edits.step(opt)
            total += loss.item() * len(labels)
            n_right, n_seen = n_right + (logits.argmax(1) == labels).sum().item(), n_seen + len(labels)
        schedule.step()
        print(f"{epoch} loss {total / n_seen:.4f}, {n_right / n_seen:.3f} right")


# What is where in scans of eyes: an FCN of torchvision with a second loss in the middle, Adam, a rate that falls if it gets no better.


def scans(edits):
    from torchvision.models.segmentation import fcn_resnet50
    edits.habits()
    n_kinds, n_batch, n, n_steps = 5, size(16, 2), size(256, 48), size(3, 2)
    model = fcn_resnet50(weights=None, weights_backbone=None, num_classes=n_kinds, aux_loss=True)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(rated(opt), mode="max", factor=0.5, patience=3)
    weights = torch.tensor([0.2, 1.0, 1.0, 2.0, 2.0], device=GPU)

    def eyes():
        images = torch.randn(n_batch, 3, n, n)
        truth = F.interpolate(torch.randint(n_kinds, (n_batch, 1, n // 16, n // 16)).float(), (n, n))[:, 0].long()
        return images.to(GPU).to(edits.dtype), truth.to(GPU)

    for epoch in range(size(2, 1)):
        model.train()
        total = 0.0
        for step in range(n_steps):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                images, truth = eyes()
                with edits.forward():
                    output = model(images)
                    loss = F.cross_entropy(output["out"], truth, weights) + 0.4 * F.cross_entropy(output["aux"], truth, weights)
                edits.backward(loss)
                total += loss.item()
            edits.step(opt)
        model.eval()
        with torch.no_grad(), edits.autocast():
            images, truth = eyes()
            guess = model(images)["out"].argmax(1)
        both = torch.stack([((guess == it) & (truth == it)).sum() for it in range(n_kinds)])
        any_of = torch.stack([((guess == it) | (truth == it)).sum() for it in range(n_kinds)])
        overlap = (both / any_of.clamp(min=1)).mean().item()
        schedule.step(overlap)
        print(f"{epoch} loss {total / n_steps / edits.accumulate:.4f}, overlap {overlap:.4f}")


# How people feel who speak: a data2vec of transformers hears clips of one length, its convolutions are not trained.


class Feeling(nn.Module):
    def __init__(self, body, n_kinds):
        super().__init__()
        self.body = body
        self.dense, self.drop, self.out = nn.Linear(body.config.hidden_size, 256), nn.Dropout(0.1), nn.Linear(256, n_kinds)

    def forward(self, wave):
        x = self.body(wave).last_hidden_state.mean(1)
        return self.out(self.drop(torch.tanh(self.dense(x))))


class Clips(Dataset):
    def __init__(self, n, n_kinds, longest):
        self.n, self.n_kinds, self.longest = n, n_kinds, longest

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        wave = torch.randn(self.longest) * 0.1
        return (wave - wave.mean()) / (wave.std() + 1e-7), number % self.n_kinds


def emotions(edits):
    import numpy
    from transformers import Data2VecAudioConfig, Data2VecAudioModel, get_linear_schedule_with_warmup
    # As it was before gradients were set to None.
    edits.habits(set_to_none="no")
    # Which times are hidden is drawn by NumPy.
    numpy.random.seed(0)
    n_kinds, n_batch, longest, n_steps = 7, size(20, 2), size(16000 * 3, 6000), 5
    small = dict(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, conv_dim=(16,) * 7, num_conv_pos_embedding_groups=2,
    )
    body = Data2VecAudioModel(Data2VecAudioConfig(layerdrop=0.0, mask_time_length=size(10, 2), **size({}, small)))
    body.freeze_feature_encoder()
    model = prepare(edits, Feeling(body, n_kinds), named(body, "Data2VecAudioEncoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=3e-5, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(rated(opt), num_warmup_steps=10, num_training_steps=500)
    loader = DataLoader(Clips(n_steps * edits.accumulate * n_batch, n_kinds, longest), n_batch, shuffle=True, drop_last=True)
    model.train()
    losses = []
    for number, (wave, labels) in enumerate(loader):
        wave, labels = wave.to(GPU).to(edits.dtype), labels.to(GPU)
        with edits.forward():
            loss = F.cross_entropy(model(wave).float(), labels)
        edits.backward(loss)
        losses.append(loss.item())
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
    print(f"loss {sum(losses) / len(losses):.4f}")


# Headlines of news: a Pegasus of transformers, texts and headlines are cut or filled up to one length, bfloat16 where it does no harm.


def headlines(edits):
    from transformers import PegasusConfig, PegasusForConditionalGeneration, get_linear_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    n_words, n_batch, longest, shortest, n_steps = size(50000, 120), size(32, 2), size(384, 20), size(48, 6), 5
    usual = dict(d_model=512, encoder_layers=8, decoder_layers=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    small = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
    config = PegasusConfig(
        vocab_size=n_words, encoder_attention_heads=size(8, 2), decoder_attention_heads=size(8, 2), max_position_embeddings=size(512, 32),
        use_cache=False, **size(usual, small),
    )
    model = PegasusForConditionalGeneration(config)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-5, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(rated(opt), 20, 1000)

    def filled(longest, first):
        words = torch.randint(first, n_words, (n_batch, longest))
        words[torch.arange(longest) >= torch.randint(longest // 2, longest + 1, (n_batch, 1))] = config.pad_token_id
        return words

    def news():
        text, title = filled(longest, 5), filled(shortest, 5)
        labels = title.masked_fill(title == config.pad_token_id, -100)
        batch = {"input_ids": text, "attention_mask": (text != config.pad_token_id).long(), "labels": labels}
        return {name: it.to(GPU) for name, it in batch.items()}

    model.train()
    for step in range(n_steps):
        total = 0.0
        for _ in range(edits.accumulate):
            with edits.forward():
                loss = model(**news()).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        print(f"{step} loss {total:.4f}")


# What people think of what they bought: an MPNet of transformers, the texts of a batch are filled up to the longest of them.


class Stars(nn.Module):
    def __init__(self, body, n_stars=5):
        super().__init__()
        width = body.config.hidden_size
        self.body = body
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, n_stars))

    def forward(self, words, mask):
        x = self.body(input_ids=words, attention_mask=mask).last_hidden_state
        mask = mask[..., None].to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1))


class Reviews(Dataset):
    def __init__(self, n, n_words, shortest, longest):
        lengths = torch.randint(shortest, longest + 1, (n,)).tolist()
        self.texts = [torch.randint(5, n_words, (it,)) for it in lengths]
        self.stars = torch.randint(5, (n,)).tolist()

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        return self.texts[number], self.stars[number]


def padded(rows):
    words = nn.utils.rnn.pad_sequence([words for words, _ in rows], batch_first=True, padding_value=1)
    return words, (words != 1).long(), torch.tensor([stars for _, stars in rows])


def reviews(edits):
    from transformers import MPNetConfig, MPNetModel, get_linear_schedule_with_warmup
    edits.habits()
    n_words, n_batch, n_steps = size(30527, 120), size(32, 2), 6
    small = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)
    body = MPNetModel(MPNetConfig(vocab_size=n_words, **size({}, small)), add_pooling_layer=False)
    model = prepare(edits, Stars(body), named(body, "MPNetLayer"))
    none = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [it for name, it in model.named_parameters() if not name.endswith(none)], "weight_decay": 0.01},
        {"params": [it for name, it in model.named_parameters() if name.endswith(none)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=2e-5, eps=1e-8)
    schedule = get_linear_schedule_with_warmup(rated(opt), num_warmup_steps=50, num_training_steps=1000)
    data = Reviews(n_steps * edits.accumulate * n_batch, n_words, size(20, 4), size(128, 20))
    loader = DataLoader(data, n_batch, shuffle=True, collate_fn=padded, drop_last=True)
    model.train()
    total, n_right, n_seen = 0.0, 0, 0
    for number, batch in enumerate(loader):
        words, mask, stars = (it.to(GPU) for it in batch)
        if number % edits.accumulate == 0:
            edits.zero_grad(opt)
        with edits.forward():
            logits = model(words, mask)
            loss = F.cross_entropy(logits, stars)
        edits.backward(loss)
        total += loss.item()
        n_right, n_seen = n_right + (logits.argmax(1) == stars).sum().item(), n_seen + len(stars)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
    print(f"loss {total / len(loader):.4f}, {n_right / n_seen:.3f} right")


# The language of proteins: an ESM-2 of transformers tells amino acids that are hidden, pieces of one length.


class Chains(Dataset):
    """Pieces of proteins; 15 of 100 amino acids are to be told, most of them are hidden."""

    def __init__(self, n, longest, n_letters=33, hidden=32):
        self.n, self.longest, self.n_letters, self.hidden = n, longest, n_letters, hidden

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        letters = torch.randint(4, 24, (self.longest,))
        # They begin with a mark, and end with another.
        letters[0], letters[-1] = 0, 2
        chance = torch.rand(self.longest)
        chance[0], chance[-1] = 1.0, 1.0
        labels = letters.masked_fill(chance >= 0.15, -100)
        seen = letters.masked_fill(chance < 0.12, self.hidden)
        seen = torch.where((chance >= 0.12) & (chance < 0.135), torch.randint(4, 24, (self.longest,)), seen)
        return {"input_ids": seen, "attention_mask": torch.ones_like(seen), "labels": labels}


def proteins(edits):
    from transformers import EsmConfig, EsmForMaskedLM
    edits.habits()
    n_batch, longest, n_steps = size(16, 2), size(512, 24), 5
    usual = dict(hidden_size=480, num_hidden_layers=12, num_attention_heads=20, intermediate_size=1920)
    small = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
    config = EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False, **size(usual, small),
    )
    model = EsmForMaskedLM(config)
    model = prepare(edits, model, named(model, "EsmLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=4e-4, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min((step + 1) / 2000, 1.0))
    loader = iter(DataLoader(Chains(n_steps * edits.accumulate * n_batch, longest), n_batch, pin_memory=GPU == "cuda"))
    model.train()
    for step in range(n_steps):
        edits.zero_grad(opt)
        total = torch.zeros((), device=GPU)
        for _ in range(edits.accumulate):
            batch = {name: it.to(GPU, non_blocking=True) for name, it in next(loader).items()}
            with edits.forward():
                loss = model(**batch).loss
            edits.backward(loss)
            total += loss.detach() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        print(f"{step} loss {total.item():.4f}, perplexity {math.exp(min(total.item(), 20)):.1f}")


# Code: a StarCoder2 of transformers from the beginning, random pieces of one long text, AdamW in one kernel, a loss on other pieces.


def code(edits):
    from transformers import Starcoder2Config, Starcoder2ForCausalLM
    edits.habits()
    n_words, n_batch, n, n_steps = size(49152, 120), size(4, 2), size(512, 24), 6
    usual = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=2)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = Starcoder2Config(
        vocab_size=n_words, max_position_embeddings=n, bos_token_id=0, eos_token_id=0, use_cache=False, **size(usual, small),
    )
    model = Starcoder2ForCausalLM(config)
    model = prepare(edits, model, named(model, "Starcoder2DecoderLayer"))
    trained = [it for it in model.parameters() if it.requires_grad]
    groups = [
        {"params": [it for it in trained if it.dim() >= 2], "weight_decay": 0.1},
        {"params": [it for it in trained if it.dim() < 2], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), fused=True)
    text = torch.randint(1, n_words, (size(200000, 2000),))

    def rate(step, n_warm=100, n_all=2000, least=0.1):
        if step < n_warm:
            return (step + 1) / n_warm
        part = min((step - n_warm) / (n_all - n_warm), 1.0)
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * part))

    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), rate)

    def pieces():
        words = torch.stack([text[it : it + n] for it in torch.randint(len(text) - n, (n_batch,)).tolist()])
        return words.pin_memory().to(GPU, non_blocking=True) if GPU == "cuda" else words

    for step in range(n_steps):
        if step % 3 == 0:
            model.eval()
            with torch.no_grad(), edits.autocast():
                words = pieces()
                print(f"{step} loss on others {model(input_ids=words, labels=words).loss.item():.4f}")
            model.train()
        for _ in range(edits.accumulate):
            words = pieces()
            with edits.forward():
                loss = model(input_ids=words, labels=words).loss
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    print(f"loss {loss.item():.4f}, rate {schedule.get_last_lr()[0]:.2e}")


# What people do in films: a VideoMAE of transformers looks at cubes of sixteen pictures, AdamW, a rate that rises and falls.


def films(edits):
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification, get_cosine_schedule_with_warmup
    edits.habits()
    n_kinds, n_batch, n_pictures, n, n_steps = size(101, 5), size(8, 2), size(16, 4), size(224, 32), 4
    usual = dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
    small = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
    config = VideoMAEConfig(image_size=n, num_frames=n_pictures, num_labels=n_kinds, **size(usual, small))
    model = VideoMAEForVideoClassification(config)
    model = prepare(edits, model, named(model, "VideoMAELayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-5, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(rated(opt), num_warmup_steps=10, num_training_steps=200)

    def watched():
        film = torch.randint(256, (n_batch, n_pictures, 3, n, n), dtype=torch.uint8)
        film = (film.to(GPU).to(edits.dtype) / 255 - 0.45) / 0.225
        return {"pixel_values": film, "labels": torch.randint(n_kinds, (n_batch,)).to(GPU)}

    for epoch in range(2):
        model.train()
        total = 0.0
        for step in range(n_steps // 2):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                batch = watched()
                with edits.forward():
                    loss = model(**batch).loss
                edits.backward(loss)
                total += loss.item()
            edits.step(opt, model.parameters(), clip=5.0)
            schedule.step()
        model.eval()
        with torch.no_grad(), edits.autocast():
            batch = watched()
            right = (model(pixel_values=batch["pixel_values"]).logits.argmax(1) == batch["labels"]).float().mean().item()
        print(f"{epoch} loss {total * 2 / n_steps / edits.accumulate:.4f}, {right:.3f} right")


PROGRAMS = {it.__name__: it for it in (sharper, textures, rubbish, scans, emotions, headlines, reviews, proteins, code, films)}
