"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `instruct`, `forms`, `masked`, `returns` and `spoken` need transformers,
`leaves` and `mixer` timm, `tags` torchvision; without them these raise ImportError.

The optimizer on the CPU is that of edits_programs8.py; the loops call `prepare` and `size` of edits_programs5.py.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "noises": ["--adam fused", "--checkpoint every:2", "--set-to-none no"],
    "leaves": ["--optimizer adamw", "--accumulate 4", "--precision autocast-bf16"],
    "returns": ["--optimizer momentum", "--checkpoint all", "--set-to-none yes"],
    "mixer": ["--adam foreach", "--accumulate 2", "--checkpoint every:2"],
    "board": ["--optimizer adamw", "--checkpoint all", "--accumulate 4"],
    "tags": ["--optimizer sgd", "--set-to-none no", "--freeze 0.5"],
    "instruct": ["--adam fused", "--checkpoint all", "--lora 16", "--offload optimizer"],
    "spoken": ["--optimizer adafactor", "--checkpoint all", "--precision bf16", "--offload activations"],
    "forms": ["--optimizer sgd", "--checkpoint all", "--precision autocast-bf16", "--freeze 0.5"],
    "masked": ["--adam for-loop", "--accumulate 8", "--checkpoint every:2", "--precision bf16"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "noises": 4, "leaves": 6, "returns": 5, "mixer": 5, "board": 4, "tags": 6, "instruct": 5, "spoken": 7, "forms": 5, "masked": 5,
}

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


def split(model, decay, **more):
    """Groups of parameters: matrices decay, biases and norms do not."""
    trained = [it for it in model.parameters() if it.requires_grad]
    return [
        {"params": [it for it in trained if it.ndim > 1], "weight_decay": decay, **more},
        {"params": [it for it in trained if it.ndim < 2], "weight_decay": 0.0, **more},
    ]


# Questions with their answers: an OLMo 2 of transformers, only the words of answers are learned, bfloat16 where it does no harm.


class Talks(Dataset):
    """Talks of one length, the end is filled up; what was asked has no labels."""

    def __init__(self, n, n_words, longest):
        self.n, self.n_words, self.longest = n, n_words, longest

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        asked, said = (int(torch.randint(self.longest // 5, self.longest // 2, ())) for _ in range(2))
        words = torch.zeros(self.longest, dtype=torch.long)
        words[: asked + said] = torch.randint(3, self.n_words, (asked + said,))
        labels = words.clone()
        labels[:asked], labels[asked + said :] = -100, -100
        return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def instruct(edits):
    from transformers import Olmo2Config, Olmo2ForCausalLM, get_cosine_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    n_words, n_batch, longest, n_steps = size(50304, 128), size(4, 2), size(512, 20), 5
    usual = dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=10, num_attention_heads=12, num_key_value_heads=4)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = Olmo2Config(
        vocab_size=n_words, max_position_embeddings=longest, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **size(usual, small),
    )
    model = Olmo2ForCausalLM(config)
    model = prepare(edits, model, named(model, "Olmo2DecoderLayer"))
    opt = optimizer(edits, split(model, 0.1), torch.optim.AdamW, lr=2e-5, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(rated(opt), num_warmup_steps=2, num_training_steps=100)
    talks = Talks(n_steps * edits.accumulate * n_batch, n_words, longest)
    loader = DataLoader(talks, n_batch, shuffle=True, pin_memory=GPU == "cuda", drop_last=True)
    model.train()
    total = 0.0
    for number, batch in enumerate(loader):
        batch = {name: it.to(GPU, non_blocking=True) for name, it in batch.items()}
        with edits.forward():
            loss = model(**batch).loss
        edits.backward(loss)
        total += loss.item()
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
            print(f"{number} loss {total / (number + 1):.4f}, rate {schedule.get_last_lr()[0]:.2e}")


# Sick leaves: a RegNet of timm, SGD with momentum, a mean of the weights, which is looked at in the end.


def leaves(edits):
    from timm import create_model
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    edits.habits()
    n_kinds, n_batch, n = size(38, 5), size(80, 4), size(224, 32)
    model = create_model(size("regnety_016", "regnety_002"), num_classes=n_kinds, drop_rate=0.2)
    model = prepare(edits, model, [])
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-5, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=30)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def pictures():
        images = torch.rand(n_batch, 3, n, n).sub_(0.45).div_(0.22)
        return images.to(GPU).to(edits.dtype), torch.randint(n_kinds, (n_batch,)).to(GPU)

    for epoch in range(2):
        model.train()
        n_seen, n_right, total = 0, 0, 0.0
        for step in range(3):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                images, labels = pictures()
                with edits.forward():
                    logits = model(images)
                    loss = criterion(logits, labels)
                edits.backward(loss)
                total += loss.item() * len(images)
                n_right += (logits.argmax(1) == labels).sum().item()
                n_seen += len(images)
            edits.step(opt)
            mean.update_parameters(model)
        schedule.step()
        mean.eval()
        with torch.no_grad(), edits.autocast():
            images, labels = pictures()
            accuracy = (mean(images).argmax(1) == labels).float().mean().item()
        print(f"{epoch} loss {total / n_seen:.3f}, {n_right / n_seen:.3f} right, by the mean {accuracy:.3f}")


# Kinds of pictures without attention: an MLP-Mixer of timm, mixed pictures, AdamW in one kernel, bfloat16 where it does no harm.


def mixer(edits):
    import numpy
    from timm import create_model
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.models.mlp_mixer import MlpMixer
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter
    edits.habits(precision="autocast-bf16")
    n_kinds, n_batch, n = size(1000, 7), size(64, 4), size(224, 32)
    if n == 224:
        model = create_model("mixer_b16_224", num_classes=n_kinds, drop_path_rate=0.1)
    else:
        model = MlpMixer(n_kinds, n, num_blocks=4, embed_dim=32, patch_size=8, drop_path_rate=0.1)
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, split(model, 0.05), torch.optim.AdamW, lr=1e-3, fused=True)
    schedule = CosineLRScheduler(rated(opt), t_initial=300, warmup_t=5, warmup_lr_init=1e-6)
    mixed = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=n_kinds)
    counted, losses = SoftTargetCrossEntropy(), AverageMeter()
    # How pictures are mixed is drawn by NumPy.
    numpy.random.seed(0)
    for epoch in range(2):
        model.train()
        for step in range(3):
            for micro in range(edits.accumulate):
                images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
                labels = torch.randint(n_kinds, (n_batch,)).to(GPU, non_blocking=True)
                images = images.to(edits.dtype).sub_(127).div_(127)
                images, labels = mixed(images, labels)
                with edits.forward():
                    loss = counted(model(images), labels)
                if micro == 0:
                    edits.zero_grad(opt)
                edits.backward(loss)
                losses.update(loss.item(), n_batch)
            edits.step(opt, model.parameters(), clip=1.0)
        schedule.step(epoch + 1)
        print(f"{epoch} loss {losses.avg:.4f}")


# What is in a picture, of which there are many things: a wide ResNet of torchvision, Adam, one cycle; the last batch is a smaller one.


def tags(edits):
    from torchvision.models import ResNet, wide_resnet50_2
    from torchvision.models.resnet import BasicBlock
    edits.habits()
    n_tags, n_batch, n, n_data = size(80, 6), size(40, 4), size(224, 32), size(140, 10)
    if n_tags == 80:
        model = wide_resnet50_2(weights=None)
    else:
        model = ResNet(BasicBlock, [1, 1, 1, 1])
    model.fc = nn.Linear(model.fc.in_features, n_tags)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4)
    n_epochs, images = 2, (torch.rand(n_data, 3, n, n) * 255).byte()
    data = TensorDataset(images, (torch.rand(n_data, n_tags) < 0.05).float())
    loader = DataLoader(data, n_batch, shuffle=True, pin_memory=GPU == "cuda")
    others = DataLoader(data, n_batch, pin_memory=GPU == "cuda")
    # The cycle is longer than this: training goes on.
    schedule = torch.optim.lr_scheduler.OneCycleLR(rated(opt), max_lr=3e-4, total_steps=200, cycle_momentum=False)
    criterion = nn.BCEWithLogitsLoss()

    def shown(images):
        return images.to(GPU, non_blocking=True).to(edits.dtype) / 127.5 - 1

    for epoch in range(n_epochs):
        model.train()
        edits.zero_grad(opt)
        for number, (images, truth) in enumerate(loader):
            images, truth = shown(images), truth.to(GPU, non_blocking=True)
            with edits.forward():
                loss = criterion(model(images).float(), truth)
            edits.backward(loss)
            if (number + 1) % edits.accumulate == 0 or number + 1 == len(loader):
                edits.step(opt)
                edits.zero_grad(opt)
                schedule.step()
        model.eval()
        chances = []
        with torch.no_grad(), edits.autocast():
            for images, truth in others:
                chances.append(model(shown(images)).float().sigmoid().cpu())
        guess, truth = torch.cat(chances) > 0.5, data.tensors[1] > 0
        both = (guess & truth).sum()
        print(f"{epoch} loss {loss.item():.4f}, F1 {(2 * both / (guess.sum() + truth.sum()).clamp(min=1)).item():.3f}")


# Forms: words, where they are and how the page looks say which field a word belongs to; a LayoutLMv3 of transformers, pages of one length.


class Fields(nn.Module):
    def __init__(self, body, n_kinds):
        super().__init__()
        self.body, self.drop = body, nn.Dropout(0.1)
        self.classifier = nn.Linear(body.config.hidden_size, n_kinds)

    def forward(self, input_ids, bbox, attention_mask, pixel_values, labels=None):
        x = self.body(input_ids=input_ids, bbox=bbox, attention_mask=attention_mask, pixel_values=pixel_values).last_hidden_state
        logits = self.classifier(self.drop(x[:, : input_ids.size(1)]))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss, logits


class Pages(Dataset):
    def __init__(self, n, n_words, n_kinds, longest, side):
        self.n, self.n_words, self.n_kinds, self.longest, self.side = n, n_words, n_kinds, longest, side

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        n = int(torch.randint(self.longest // 2, self.longest + 1, ()))
        words, labels = torch.ones(self.longest, dtype=torch.long), torch.full((self.longest,), -100)
        words[:n], labels[:n] = torch.randint(3, self.n_words, (n,)), torch.randint(self.n_kinds, (n,))
        place = torch.zeros(self.longest, 4, dtype=torch.long)
        place[:n, :2] = torch.randint(900, (n, 2))
        place[:n, 2:] = place[:n, :2] + torch.randint(5, 100, (n, 2))
        image = torch.rand(3, self.side, self.side) * 2 - 1
        return {"input_ids": words, "bbox": place, "attention_mask": (words != 1).long(), "pixel_values": image, "labels": labels}


def forms(edits):
    from transformers import LayoutLMv3Config, LayoutLMv3Model, get_linear_schedule_with_warmup
    edits.habits()
    n_words, n_kinds, n_batch, longest, side, n_steps = size(50265, 120), 7, size(4, 2), size(256, 16), size(224, 32), 5
    small = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, coordinate_size=6, shape_size=4,
        max_position_embeddings=40,
    )
    usual = dict(max_position_embeddings=514)
    body = LayoutLMv3Model(LayoutLMv3Config(vocab_size=n_words, input_size=side, **size(usual, small)))
    model = prepare(edits, Fields(body, n_kinds), named(body, "LayoutLMv3Layer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-5)
    schedule = get_linear_schedule_with_warmup(rated(opt), num_warmup_steps=10, num_training_steps=1000)
    pages = Pages(n_steps * edits.accumulate * n_batch, n_words, n_kinds, longest, side)
    loader = iter(DataLoader(pages, n_batch, shuffle=True, drop_last=True))
    for step in range(n_steps):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            batch = {name: it.to(GPU) for name, it in next(loader).items()}
            batch["pixel_values"] = batch["pixel_values"].to(edits.dtype)
            with edits.forward():
                loss, logits = model(**batch)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        known = batch["labels"] >= 0
        right = (logits.argmax(-1)[known] == batch["labels"][known]).float().mean()
        print(f"{step} loss {loss.item():.4f}, {right.item():.3f} right")
    model.eval()
    with torch.no_grad(), edits.autocast():
        _, logits = model(**batch)
    print(f"{(logits.argmax(-1)[known] == batch['labels'][known]).float().mean().item():.3f} right after all")


# Words that are hidden: a RoBERTa of transformers learns a language, blocks of one length, two batches for a step.


def hidden(words, n_words, mask=4):
    """Fifteen of a hundred words are to be told: most are hidden, some are others, some stay."""
    labels = words.clone()
    told = torch.rand(words.shape) < 0.15
    labels[~told] = -100
    what = torch.rand(words.shape)
    words = torch.where(told & (what < 0.8), mask, words)
    words = torch.where(told & (what > 0.9), torch.randint(5, n_words, words.shape), words)
    return words, labels


def masked(edits):
    from transformers import RobertaConfig, RobertaForMaskedLM, get_linear_schedule_with_warmup
    edits.habits(accumulate=2)
    n_words, n_batch, n, n_steps = size(50265, 120), size(16, 2), size(128, 24), 4
    small = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=n_words, max_position_embeddings=size(514, 32), type_vocab_size=1, **size({}, small)))
    model = prepare(edits, model, named(model, "RobertaLayer"))
    none = ("bias", "LayerNorm.weight", "layer_norm.weight")
    groups = [
        {"params": [it for name, it in model.named_parameters() if not name.endswith(none)], "weight_decay": 0.01},
        {"params": [it for name, it in model.named_parameters() if name.endswith(none)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.98), eps=1e-6)
    schedule = get_linear_schedule_with_warmup(rated(opt), 100, 10000)
    text = torch.randint(5, n_words, (n_steps * edits.accumulate * n_batch, n))
    loader = DataLoader(TensorDataset(text), n_batch, shuffle=True, collate_fn=lambda rows: hidden(torch.stack([it for it, in rows]), n_words))
    model.train()
    total = torch.zeros((), device=GPU)
    for number, (words, labels) in enumerate(loader):
        words, labels = words.to(GPU), labels.to(GPU)
        with edits.forward():
            output = model(input_ids=words, attention_mask=torch.ones_like(words), labels=labels)
            loss = output.loss
        edits.backward(loss)
        total += loss.detach()
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            edits.zero_grad(opt)
    print(f"loss {total.item() / len(loader):.4f}")


# Robots that learn from what others did: what comes next follows from what is to be reached (a Decision Transformer of transformers).


class Follower(nn.Module):
    def __init__(self, config):
        super().__init__()
        from transformers import DecisionTransformerModel
        self.net = DecisionTransformerModel(config)

    def forward(self, states, actions, reached, times, mask):
        output = self.net(
            states=states, actions=actions, rewards=None, returns_to_go=reached, timesteps=times, attention_mask=mask, return_dict=True,
        )
        return output.action_preds


class Runs(Dataset):
    """Pieces of what robots did; short ones are filled up at their beginning."""

    def __init__(self, n, n_seen, n_moved, n_times, longest):
        self.n, self.n_seen, self.n_moved, self.n_times, self.longest = n, n_seen, n_moved, n_times, longest

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        first = int(torch.randint(-self.longest // 2, self.n_times - self.longest, ()))
        times = torch.arange(first, first + self.longest)
        mask = (times >= 0).long()
        rewards = torch.rand(self.longest, 1) * mask[:, None]
        reached = rewards.flip(0).cumsum(0).flip(0) / 100
        return torch.randn(self.longest, self.n_seen), torch.rand(self.longest, self.n_moved) * 2 - 1, reached, times.clamp(min=0), mask


def returns(edits):
    from transformers import DecisionTransformerConfig
    # As it was before gradients were set to None.
    edits.habits(set_to_none="no")
    n_seen, n_moved, n_times, longest, n_batch, n_steps = size(17, 5), size(6, 2), size(1000, 30), size(30, 5), size(160, 4), 6
    usual, small = dict(hidden_size=512, n_layer=8, n_head=8), dict(hidden_size=32, n_layer=3, n_head=2)
    config = DecisionTransformerConfig(
        state_dim=n_seen, act_dim=n_moved, max_ep_len=n_times, n_positions=3 * longest, use_cache=False, **size(usual, small),
    )
    model = Follower(config)
    model = prepare(edits, model, named(model, "DecisionTransformerGPT2Block"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min((step + 1) / 1000, 1))
    runs = Runs(n_steps * edits.accumulate * n_batch, n_seen, n_moved, n_times, longest)
    loader = iter(DataLoader(runs, n_batch, shuffle=True))
    losses = []
    for step in range(n_steps):
        model.train()
        for micro in range(edits.accumulate):
            states, actions, reached, times, mask = (it.to(GPU) for it in next(loader))
            with edits.forward():
                guess = model(states, actions.clone(), reached, times, mask)
                known = mask.reshape(-1) > 0
                loss = ((guess.reshape(-1, n_moved)[known] - actions.reshape(-1, n_moved)[known]) ** 2).mean()
            if micro == 0:
                edits.zero_grad(opt)
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=0.25)
        schedule.step()
        losses.append(loss.detach().cpu().item())
    print(f"loss {sum(losses) / len(losses):.4f}")


# A board game: a tower of residual blocks says which moves a search would make and who wins, from games that were played against itself.


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        more = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(more)))


class Board(nn.Module):
    def __init__(self, n_planes, side, width, n_blocks):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(n_planes, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(Tower(width) for _ in range(n_blocks)))
        self.moves = nn.Sequential(
            nn.Conv2d(width, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * side**2, side**2 + 1),
        )
        self.wins = nn.Sequential(
            nn.Conv2d(width, 1, 1, bias=False), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(),
            nn.Linear(side**2, 256), nn.ReLU(), nn.Linear(256, 1), nn.Tanh(),
        )

    def forward(self, x):
        x = self.blocks(self.enter(x))
        return self.moves(x), self.wins(x).squeeze(1)


class Played:
    """The last places of games, with what a search thought of the moves and who won."""

    def __init__(self, n, n_planes, side):
        self.planes = torch.rand(n, n_planes, side, side) < 0.3
        self.moves, self.won = (torch.randn(n, side**2 + 1) * 2).softmax(1), torch.randint(0, 2, (n,)).float() * 2 - 1

    def drawn(self, n):
        chosen = torch.randint(len(self.won), (n,))
        return [it[chosen].to(GPU) for it in (self.planes, self.moves, self.won)]


def board(edits):
    edits.habits()
    n_planes, side, n_batch = 17, size(19, 5), size(320, 4)
    model = Board(n_planes, side, size(192, 8), size(10, 4))
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[100, 300, 500], gamma=0.1)
    played = Played(size(2048, 32), n_planes, side)
    for step in range(6):
        model.train()
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            planes, moves, won = played.drawn(n_batch)
            planes = planes.to(edits.dtype)
            with edits.forward():
                logits, value = model(planes)
                loss_moves = -(moves * F.log_softmax(logits.float(), 1)).sum(1).mean()
                loss_won = F.mse_loss(value.float(), won)
                loss = loss_moves + loss_won
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        if step % 3 == 2:
            print(f"{step} moves {loss_moves.item():.4f}, who wins {loss_won.item():.4f}")
            # How it does in the games of today.
            model.eval()
            with torch.no_grad(), edits.autocast():
                planes, moves, won = played.drawn(n_batch)
                logits, value = model(planes.to(edits.dtype))
            same, right = (logits.argmax(1) == moves.argmax(1)).float().mean(), (value.sign() == won).float().mean()
            print(f"{step} {same.item():.3f} of the moves, {right.item():.3f} of the winners")


# What was said: conformers of transformers (Wav2Vec2-BERT) hear filter banks of one length, bfloat16 where it does no harm, CTC.


def spoken(edits):
    import numpy
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC, get_constant_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    # Which times are hidden is drawn by NumPy.
    numpy.random.seed(0)
    n_letters, n_batch, n, longest = size(40, 12), size(10, 2), size(400, 60), size(60, 6)
    usual = dict(hidden_size=640, num_hidden_layers=10, num_attention_heads=10, intermediate_size=2560)
    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, feature_projection_input_dim=16)
    config = Wav2Vec2BertConfig(
        vocab_size=n_letters, layerdrop=0.0, ctc_loss_reduction="mean", ctc_zero_infinity=True, mask_time_prob=0.05,
        hidden_dropout=0.1, attention_dropout=0.1, **size(usual, small),
    )
    model = Wav2Vec2BertForCTC(config)
    model = prepare(edits, model, named(model, "Wav2Vec2BertEncoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-5, weight_decay=0.005)
    schedule = get_constant_schedule_with_warmup(rated(opt), 50)

    def sounds():
        heard = torch.randn(n_batch, n, config.feature_projection_input_dim).to(GPU).to(edits.dtype)
        letters = torch.randint(1, n_letters, (n_batch, longest))
        letters[torch.arange(longest) >= torch.randint(longest // 2, longest + 1, (n_batch, 1))] = -100
        return {"input_features": heard, "attention_mask": torch.ones(n_batch, n, dtype=torch.long, device=GPU), "labels": letters.to(GPU)}

    total = 0.0
    for step in range(5):
        for _ in range(edits.accumulate):
            batch = sounds()
            with edits.forward():
                loss = model(**batch).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        print(f"{step} loss {total / (step + 1):.3f}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        guess = model(**sounds()).logits.argmax(-1)
    print(f"{(guess > 0).float().mean().item():.3f} of the times have a letter")


# Two people who speak at once: dilated convolutions over a short wave say which part of the sound is whose (Conv-TasNet).


class Apart(nn.Module):
    def __init__(self, width, inner, dilation):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner, eps=1e-8))
        self.depth = nn.Sequential(
            nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner), nn.PReLU(), nn.GroupNorm(1, inner, eps=1e-8),
        )
        self.stay, self.skip = nn.Conv1d(inner, width, 1), nn.Conv1d(inner, width, 1)

    def forward(self, x):
        inside = self.depth(self.enter(x))
        return x + self.stay(inside), self.skip(inside)


class Speakers(nn.Module):
    def __init__(self, n_filters, kernel, width, inner, n_dilated, n_repeats, n_people=2):
        super().__init__()
        self.n_people, self.n_filters = n_people, n_filters
        self.encoder = nn.Conv1d(1, n_filters, kernel, kernel // 2, bias=False)
        self.enter = nn.Sequential(nn.GroupNorm(1, n_filters, eps=1e-8), nn.Conv1d(n_filters, width, 1))
        self.blocks = nn.ModuleList(Apart(width, inner, 2**number) for _ in range(n_repeats) for number in range(n_dilated))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(width, n_people * n_filters, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(n_filters, 1, kernel, kernel // 2, bias=False)

    def forward(self, wave):
        heard = F.relu(self.encoder(wave[:, None]))
        x, total = self.enter(heard), 0.0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        parts = self.mask(total).unflatten(1, (self.n_people, self.n_filters)) * heard[:, None]
        return self.decoder(parts.flatten(0, 1)).view(len(wave), self.n_people, -1)


def clearness(guess, truth):
    """How much clearer the voice is than all else, in decibels, whatever its loudness."""
    guess, truth = guess - guess.mean(-1, keepdim=True), truth - truth.mean(-1, keepdim=True)
    voice = (guess * truth).sum(-1, keepdim=True) / (truth.square().sum(-1, keepdim=True) + 1e-8) * truth
    return 10 * torch.log10(voice.square().sum(-1) / ((guess - voice).square().sum(-1) + 1e-8) + 1e-8)


def best(guess, truth):
    """It does not matter which of both is called the first."""
    straight, crossed = clearness(guess, truth).mean(1), clearness(guess, truth.flip(1)).mean(1)
    return -torch.maximum(straight, crossed).mean()


def noises(edits):
    edits.habits()
    n_batch, n = size(6, 2), size(8000 * 2, 400)
    model = Speakers(size(512, 16), 16, size(128, 8), size(512, 16), size(8, 2), size(3, 2))
    model = prepare(edits, model, model.blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(rated(opt), factor=0.5, patience=2)

    def voices():
        voices = torch.randn(n_batch, 2, n).to(GPU).to(edits.dtype)
        return voices.sum(1), voices

    for epoch in range(2):
        model.train()
        total = 0.0
        for step in range(4):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                mixed, truth = voices()
                with edits.forward():
                    loss = best(model(mixed).float(), truth.float())
                edits.backward(loss)
                total += loss.item()
            edits.step(opt, model.parameters(), clip=5.0)
        model.eval()
        with torch.no_grad(), edits.autocast():
            losses = []
            for _ in range(2):
                mixed, truth = voices()
                losses.append(best(model(mixed).float(), truth.float()).item())
        schedule.step(sum(losses) / len(losses))
        print(f"{epoch} loss {total / 4 / edits.accumulate:.3f}, others {sum(losses) / len(losses):.3f}")


PROGRAMS = {it.__name__: it for it in (noises, leaves, returns, mixer, board, tags, instruct, spoken, forms, masked)}
