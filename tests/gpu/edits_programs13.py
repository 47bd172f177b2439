"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `demand`, `follows`, `pupil`, `subtitles` and `novels` need transformers,
`wings` timm, `cars` torchvision; without them these raise ImportError.

The optimizer on the CPU is that of edits_programs8.py; the loops call `prepare` and `size` of edits_programs5.py.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "ratings": ["--optimizer sgd", "--adam for-loop", "--offload optimizer"],
    "drugs": ["--adam fused", "--set-to-none no", "--accumulate 2"],
    "demand": ["--optimizer adam", "--checkpoint all", "--accumulate 4"],
    "follows": ["--precision autocast-bf16", "--checkpoint all", "--lora 8"],
    "pupil": ["--optimizer momentum", "--checkpoint every:2", "--freeze 0.5"],
    "wings": ["--precision bf16", "--checkpoint all", "--set-to-none no", "--offload activations"],
    "cars": ["--optimizer adamw", "--freeze 0.5", "--accumulate 2"],
    "latents": ["--adam foreach", "--checkpoint layers:0..5", "--precision autocast-fp16", "--offload activations"],
    "subtitles": ["--optimizer adafactor", "--checkpoint every:2", "--set-to-none yes", "--precision autocast-bf16 --accumulate 2"],
    "novels": ["--adam for-loop", "--precision bf16", "--offload optimizer", "--lora 16 --checkpoint all"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "ratings": 5, "drugs": 5, "demand": 5, "follows": 5, "pupil": 5, "wings": 5, "cars": 5, "latents": 5, "subtitles": 5, "novels": 5,
}

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from edits_programs5 import GPU, prepare, size
from edits_programs8 import named, optimizer, rated


# What else people would like: a variational autoencoder of whole rows of ratings (Mult-VAE), Adam, the divergence counts more and more.


class Rows(nn.Module):
    def __init__(self, n_items, n_hidden, n_latent):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.encoder = nn.ModuleList([nn.Linear(n_items, n_hidden), nn.Linear(n_hidden, 2 * n_latent)])
        self.decoder = nn.ModuleList([nn.Linear(n_latent, n_hidden), nn.Linear(n_hidden, n_items)])
        for it in (*self.encoder, *self.decoder):
            nn.init.xavier_uniform_(it.weight)
            nn.init.trunc_normal_(it.bias, std=0.001)

    def forward(self, rows):
        x = self.drop(F.normalize(rows))
        mean, log_variance = self.encoder[1](torch.tanh(self.encoder[0](x))).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if self.training else mean
        return self.decoder[1](torch.tanh(self.decoder[0](z))), mean, log_variance


def ratings(edits):
    edits.habits()
    n_items, n_people, n_held, n_batch, n_liked = size(160000, 300), size(1600, 10), size(100, 2), size(500, 4), size(150, 10)
    model = prepare(edits, Rows(n_items, size(600, 16), size(200, 8)), [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3)
    liked = torch.randint(n_items, (n_people, n_liked))

    def rows(people):
        places = torch.stack([torch.arange(len(people)).repeat_interleave(n_liked), liked[people].flatten()])
        table = torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), (len(people), n_items))
        return table.to_dense().clamp_(max=1).to(GPU).to(edits.dtype)

    n_updates, anneal = 0, 0.0
    for epoch in range(size(2, 1)):
        model.train()
        order, total = torch.randperm(n_people - n_held), 0.0
        starts = range(0, len(order), n_batch)
        for number, start in enumerate(starts):
            x = rows(order[start : start + n_batch])
            if number % edits.accumulate == 0:
                edits.zero_grad(opt)
            with edits.forward():
                guess, mean, log_variance = model(x)
                likelihood = -(F.log_softmax(guess, 1) * x).sum(1).mean()
                divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
                loss = likelihood + anneal * divergence
            edits.backward(loss)
            if (number + 1) % edits.accumulate == 0:
                edits.step(opt)
                n_updates += 1
                anneal = min(0.2, n_updates / 20000)
            total += loss.item()
        model.eval()
        with torch.no_grad(), edits.autocast():
            x = rows(torch.arange(n_people - n_held, n_people))
            guess = model(x)[0].masked_fill(x > 0, -math.inf)
            best = guess.topk(size(100, 10)).indices
        print(f"{epoch} loss {total / len(starts):.2f}, {len(best.unique())} different items among the best")


# What molecules do: a graph network that adds up neighbours, and a node beside each molecule that sees all of it (GIN), many tasks,
# not all of them known of each molecule.


class Bonds(nn.Module):
    """Adds to each atom what its neighbours say; what they say depends on the bond."""

    def __init__(self, width, n_kinds):
        super().__init__()
        self.bonds = nn.ModuleList(nn.Embedding(it, width) for it in n_kinds)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x, ends, kinds):
        bond = sum(table(kinds[:, number]) for number, table in enumerate(self.bonds))
        said = F.relu(x[ends[0]] + bond)
        heard = torch.zeros_like(x).index_add_(0, ends[1], said.to(x.dtype))
        return self.mlp((1 + self.eps) * x + heard)


class Molecules(nn.Module):
    def __init__(self, width, n_layers, n_tasks, n_atoms, n_bonds):
        super().__init__()
        self.atoms = nn.ModuleList(nn.Embedding(it, width) for it in n_atoms)
        self.all = nn.Embedding(1, width)
        self.layers = nn.ModuleList(Bonds(width, n_bonds) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(n_layers))
        self.virtual = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
            for _ in range(n_layers - 1)
        )
        self.out = nn.Linear(width, n_tasks)
        nn.init.zeros_(self.all.weight)

    def forward(self, atoms, ends, kinds, of, n):
        x = sum(table(atoms[:, number]) for number, table in enumerate(self.atoms))
        whole = self.all(torch.zeros(n, dtype=torch.long, device=x.device))
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms)):
            x = x + whole[of]
            h = norm(layer(x, ends, kinds))
            last = number == len(self.layers) - 1
            h = F.dropout(h if last else F.relu(h), 0.5, self.training)
            if not last:
                summed = torch.zeros_like(whole).index_add_(0, of, x.to(whole.dtype))
                whole = whole + F.dropout(self.virtual[number](summed + whole), 0.5, self.training)
            x = h
        count = torch.bincount(of, minlength=n).clamp(min=1)[:, None]
        mean = torch.zeros(n, x.shape[1], device=x.device, dtype=x.dtype).index_add_(0, of, x) / count
        return self.out(mean)


N_ATOMS, N_BONDS = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)


class Drugs(Dataset):
    """Chains of atoms with some rings; few of the tasks are known."""

    def __init__(self, n, n_tasks, fewest, most):
        self.sizes, self.n_tasks = torch.randint(fewest, most + 1, (n,)).tolist(), n_tasks

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        n = self.sizes[number]
        atoms = torch.stack([torch.randint(it, (n,)) for it in N_ATOMS], 1)
        chain = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        ends = torch.cat([chain, torch.randint(n, (2, n // 8))], 1)
        kinds = torch.stack([torch.randint(it, (ends.shape[1],)) for it in N_BONDS], 1)
        truth = (torch.rand(self.n_tasks) < 0.1).float().masked_fill(torch.rand(self.n_tasks) < 0.4, math.nan)
        return atoms, torch.cat([ends, ends.flip(0)], 1), torch.cat([kinds, kinds]), truth


def one_graph(rows):
    """All molecules as one graph of several parts."""
    atoms, ends, kinds, truth = zip(*rows)
    sizes = torch.tensor([len(it) for it in atoms])
    first = sizes.cumsum(0) - sizes
    ends = torch.cat([it + start for it, start in zip(ends, first)], 1)
    return torch.cat(atoms), ends, torch.cat(kinds), torch.arange(len(sizes)).repeat_interleave(sizes), torch.stack(truth)


def drugs(edits):
    edits.habits()
    n_tasks, n_batch, n_steps, between = size(128, 6), size(2048, 4), size(4, 2), size((16, 48), (4, 9))
    model = Molecules(size(300, 16), size(5, 3), n_tasks, N_ATOMS, N_BONDS)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(rated(opt), step_size=30, gamma=0.5)
    train = DataLoader(Drugs(n_steps * edits.accumulate * n_batch, n_tasks, *between), n_batch, shuffle=True, collate_fn=one_graph)
    valid = DataLoader(Drugs(n_batch, n_tasks, *between), n_batch, collate_fn=one_graph)
    criterion = nn.BCEWithLogitsLoss()
    model.train()
    total = 0.0
    for number, batch in enumerate(train):
        atoms, ends, kinds, of, truth = (it.to(GPU) for it in batch)
        if number % edits.accumulate == 0:
            edits.zero_grad(opt)
        with edits.forward():
            guess = model(atoms, ends, kinds, of, len(truth))
            known = truth == truth
            loss = criterion(guess.float()[known], truth[known])
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt)
        total += loss.detach().cpu().item()
    schedule.step()
    model.eval()
    right, n_known = 0, 0
    for batch in valid:
        atoms, ends, kinds, of, truth = (it.to(GPU) for it in batch)
        with torch.no_grad(), edits.autocast():
            guess = model(atoms, ends, kinds, of, len(truth))
        known = truth == truth
        right, n_known = right + ((guess > 0) == (truth > 0.5))[known].sum().item(), n_known + known.sum().item()
    print(f"loss {total / len(train):.4f}, {right / n_known:.4f} right")


# How much power is used in the next day: a transformer for time series of transformers, its chances are Student's t, AdamW; the days
# after are drawn several times at the end.


class Meters(Dataset):
    """Windows of hours of many meters, with the time of the day and of the week; some hours were not measured."""

    def __init__(self, n, n_meters, n_past, n_future):
        self.n, self.n_past, self.n_future = n, n_past, n_future
        hours = torch.arange(4 * (n_past + n_future))
        self.times = torch.stack([hours % 24 / 23 - 0.5, hours // 24 % 7 / 6 - 0.5, torch.log10(2.0 + hours)], 1)
        wave = 2 + torch.sin(hours * (2 * math.pi / 24)) + 0.3 * torch.sin(hours * (2 * math.pi / 168))
        self.values = wave * (1 + torch.rand(n_meters, 1) * 50) + torch.randn(n_meters, len(hours))

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        meter = number % len(self.values)
        start = int(torch.randint(self.values.shape[1] - self.n_past - self.n_future, ()))
        values = self.values[meter, start : start + self.n_past + self.n_future]
        seen, times = (torch.rand(len(values)) > 0.02).float(), self.times[start : start + len(values)]
        n = self.n_past
        return {
            "static_categorical_features": torch.tensor([meter]), "past_values": values[:n] * seen[:n], "past_time_features": times[:n],
            "past_observed_mask": seen[:n], "future_values": values[n:], "future_time_features": times[n:], "future_observed_mask": seen[n:],
        }


def demand(edits):
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction
    edits.habits()
    n_meters, n_batch, n_steps = size(366, 8), size(270, 3), size(6, 2)
    n_future, n_context, lags = size(24, 4), size(168, 12), size([1, 2, 3, 23, 24, 25, 47, 48, 49, 167, 168, 169], [1, 2, 3, 7])
    usual = dict(d_model=128, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=512, decoder_ffn_dim=512)
    small = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = TimeSeriesTransformerConfig(
        prediction_length=n_future, context_length=n_context, lags_sequence=lags, num_time_features=3, num_static_categorical_features=1,
        cardinality=[n_meters], embedding_dimension=[size(16, 4)], encoder_attention_heads=size(4, 2), decoder_attention_heads=size(4, 2),
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_parallel_samples=size(50, 3), use_cache=False, **size(usual, small),
    )
    model = TimeSeriesTransformerForPrediction(config)
    blocks = named(model, "TimeSeriesTransformerEncoderLayer") + named(model, "TimeSeriesTransformerDecoderLayer")
    model = prepare(edits, model, blocks)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=1e-1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(rated(opt), max_lr=6e-4, total_steps=200, cycle_momentum=False)
    meters = Meters(n_steps * edits.accumulate * n_batch, n_meters, n_context + max(lags), n_future)
    loader = DataLoader(meters, n_batch, shuffle=True, drop_last=True)
    model.train()
    for number, batch in enumerate(loader):
        if number % edits.accumulate == 0:
            edits.zero_grad(opt)
        batch = {name: it.to(GPU) for name, it in batch.items()}
        with edits.forward():
            loss = model(**batch).loss
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=1.0)
            schedule.step()
            print(f"{number} loss {loss.item():.4f}")
    model.eval()
    few = {name: it[: size(8, 2)] for name, it in batch.items() if name not in ("future_values", "future_observed_mask")}
    with torch.no_grad(), edits.autocast():
        drawn = model.generate(**few).sequences
    error = (drawn.median(1).values - batch["future_values"][: len(drawn)]).abs().mean().item()
    print(f"error of the median {error:.3f}")


# Whether one sentence follows from another: an ALBERT of transformers, whose layers are all the same one, pairs filled up to the longest.


class Follows(nn.Module):
    def __init__(self, body, n_kinds=3):
        super().__init__()
        self.body = body
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(body.config.hidden_size, n_kinds)

    def forward(self, words, mask, which):
        return self.out(self.drop(self.body(input_ids=words, attention_mask=mask, token_type_ids=which).pooler_output))


class TwoSentences(Dataset):
    def __init__(self, n, n_words, shortest, longest):
        self.lengths = torch.randint(shortest, longest + 1, (n, 2)).tolist()
        self.n_words = n_words

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        first, second = self.lengths[number]
        words = torch.randint(5, self.n_words, (first + second,))
        words[0], words[first - 1], words[-1] = 2, 3, 3
        return words, (torch.arange(first + second) >= first).long(), number % 3


def pairs_padded(rows):
    words, which, labels = zip(*rows)
    words = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return words, (words != 0).long(), nn.utils.rnn.pad_sequence(which, batch_first=True), torch.tensor(labels)


def follows(edits):
    from transformers import AlbertConfig, AlbertModel, get_linear_schedule_with_warmup
    edits.habits()
    n_words, n_batch, n_steps, between = size(30000, 120), size(36, 2), size(6, 2), size((10, 64), (4, 10))
    usual = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    small = dict(embedding_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
    model = Follows(AlbertModel(AlbertConfig(vocab_size=n_words, **size(usual, small))))
    model = prepare(edits, model, named(model, "AlbertLayerGroup"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=3e-5, eps=1e-6, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(rated(opt), num_warmup_steps=100, num_training_steps=2000)
    data = TwoSentences(n_steps * edits.accumulate * n_batch, n_words, *between)
    train = DataLoader(data, n_batch, shuffle=True, collate_fn=pairs_padded, pin_memory=GPU == "cuda")
    valid = DataLoader(TwoSentences(2 * n_batch, n_words, *between), 2 * n_batch, collate_fn=pairs_padded)
    model.train()
    total = 0.0
    for number, batch in enumerate(train):
        *inputs, labels = (it.to(GPU, non_blocking=True) for it in batch)
        with edits.forward():
            loss = F.cross_entropy(model(*inputs), labels)
        total += loss.item()
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt)
            schedule.step()
            edits.zero_grad(opt)
    model.eval()
    right = []
    with torch.no_grad(), edits.autocast():
        for batch in valid:
            *inputs, labels = (it.to(GPU) for it in batch)
            right.append((model(*inputs).argmax(1) == labels).float().mean().item())
    print(f"loss {total / len(train):.4f}, {sum(right) / len(right):.3f} right")


# A small network learns what a large one says of texts: a MobileBERT and an ERNIE of transformers, soft labels, bfloat16 where it
# does no harm.


def pupil(edits):
    from transformers import ErnieConfig, ErnieForSequenceClassification, MobileBertConfig, MobileBertForSequenceClassification
    from transformers import get_cosine_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    n_words, n_kinds, n_batch, n, n_steps, heat, part = size(30522, 120), size(20, 4), size(60, 2), size(128, 12), size(5, 2), 2.0, 0.7
    large = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    small = dict(
        hidden_size=32, embedding_size=16, intra_bottleneck_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
    )
    teacher = ErnieForSequenceClassification(ErnieConfig(vocab_size=n_words, num_labels=n_kinds, **size({}, large)))
    teacher.to(GPU).eval().requires_grad_(False)
    model = MobileBertForSequenceClassification(MobileBertConfig(vocab_size=n_words, num_labels=n_kinds, **size({}, small)))
    model = prepare(edits, model, named(model, "MobileBertLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(rated(opt), 10, 1000)

    def texts():
        lengths = torch.randint(n // 4, n + 1, (n_batch, 1))
        mask = (torch.arange(n) < lengths).long()
        words = torch.randint(5, n_words, (n_batch, n)) * mask
        return {"input_ids": words.to(GPU), "attention_mask": mask.to(GPU)}, torch.randint(n_kinds, (n_batch,)).to(GPU)

    model.train()
    for step in range(n_steps):
        soft_total = hard_total = 0.0
        for _ in range(edits.accumulate):
            batch, labels = texts()
            with torch.no_grad(), edits.autocast():
                said = teacher(**batch).logits
            with edits.forward():
                logits = model(**batch).logits
                soft = F.kl_div(F.log_softmax(logits / heat, 1), F.log_softmax(said / heat, 1), reduction="batchmean", log_target=True)
                hard = F.cross_entropy(logits, labels)
                loss = part * heat**2 * soft + (1 - part) * hard
            edits.backward(loss)
            soft_total, hard_total = soft_total + soft.item(), hard_total + hard.item()
        edits.step(opt, model.parameters(), clip=1.0)
        edits.zero_grad(opt)
        schedule.step()
        print(f"{step} soft {soft_total / edits.accumulate:.4f}, hard {hard_total / edits.accumulate:.4f}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        batch, _ = texts()
        agree = (model(**batch).logits.argmax(1) == teacher(**batch).logits.argmax(1)).float().mean().item()
    print(f"they agree on {agree:.3f}")


# Kinds of birds: a DaViT of timm in half precision, channels last, parts of pictures are erased, groups without decay, accuracy at the end.


def wings(edits):
    from timm import create_model
    from timm.data.random_erasing import RandomErasing
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import param_groups_weight_decay
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, accuracy
    edits.habits(precision="autocast-fp16")
    n_kinds, n_batch, n, n_steps = size(200, 6), size(72, 2), size(224, 64), size(3, 1)
    small = dict(depths=(1, 1, 2, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4), window_size=2)
    model = create_model("davit_tiny", num_classes=n_kinds, drop_path_rate=0.1, **size({}, small))
    model = prepare(edits, model, [block for stage in model.stages for block in stage.blocks]).to(memory_format=torch.channels_last)
    opt = optimizer(edits, param_groups_weight_decay(model, 0.05), torch.optim.AdamW, lr=1e-3)
    schedule = CosineLRScheduler(rated(opt), t_initial=50, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-4)
    criterion, erase = LabelSmoothingCrossEntropy(0.1), RandomErasing(0.25, mode="pixel", device=GPU)
    mean = torch.tensor([0.485, 0.456, 0.406], device=GPU).view(1, 3, 1, 1) * 255
    spread = torch.tensor([0.229, 0.224, 0.225], device=GPU).view(1, 3, 1, 1) * 255

    def birds(training):
        images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
        images = images.float().sub_(mean).div_(spread).to(edits.dtype)
        images = erase(images) if training else images
        return images.contiguous(memory_format=torch.channels_last), torch.randint(n_kinds, (n_batch,)).to(GPU)

    for epoch in range(2):
        losses, first = AverageMeter(), AverageMeter()
        model.train()
        for step in range(n_steps):
            edits.zero_grad(opt)
            for _ in range(edits.accumulate):
                images, labels = birds(True)
                with edits.forward():
                    loss = criterion(model(images), labels)
                edits.backward(loss)
                losses.update(loss.item(), len(labels))
            edits.step(opt, model.parameters(), clip=5.0)
        schedule.step(epoch + 1)
        model.eval()
        with torch.no_grad(), edits.autocast():
            images, labels = birds(False)
            first.update(accuracy(model(images), labels)[0].item(), len(labels))
        print(f"{epoch} loss {losses.avg:.4f}, the first {first.avg:.2f} %")


# Cars and what else is on roads: a RetinaNet of torchvision, pictures of different sizes, SGD with momentum, a warm-up in the first epoch.


class Roads(Dataset):
    def __init__(self, n, n_kinds, part):
        self.n, self.n_kinds, self.part = n, n_kinds, part

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        height, width = [(720, 1280), (600, 800), (800, 600), (540, 960)][number % 4]
        height, width = height // self.part, width // self.part
        n = 1 + number * 7 % 12
        corner, extent = torch.rand(n, 2) * 0.6, torch.rand(n, 2) * 0.3 + 0.08
        boxes = torch.cat([corner, corner + extent], 1) * torch.tensor([width, height] * 2)
        image = torch.randint(256, (3, height, width), dtype=torch.uint8).float() / 255
        return image, {"boxes": boxes, "labels": torch.randint(1, self.n_kinds, (n,))}


def cars(edits):
    from torchvision.models.detection import RetinaNet, retinanet_resnet50_fpn_v2
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    edits.habits()
    n_kinds, n_batch, n_steps = 11, size(4, 2), size(5, 1)
    if size(True, False):
        model = retinanet_resnet50_fpn_v2(
            weights=None, weights_backbone=None, num_classes=n_kinds, min_size=(384, 416, 448, 480), max_size=800,
        )
    else:
        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d)
        model = RetinaNet(backbone, n_kinds, min_size=64, max_size=96, topk_candidates=50)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.SGD, lr=0.005, momentum=0.9, weight_decay=5e-4)
    warm = torch.optim.lr_scheduler.LinearLR(rated(opt), start_factor=0.001, total_iters=100)
    schedule = torch.optim.lr_scheduler.MultiStepLR(rated(opt), milestones=[16, 22], gamma=0.1)

    def apart(rows):
        return tuple(zip(*rows))

    train = DataLoader(Roads(n_steps * edits.accumulate * n_batch, n_kinds, size(1, 8)), n_batch, shuffle=True, collate_fn=apart)
    valid = DataLoader(Roads(2, n_kinds, size(1, 8)), 1, collate_fn=apart)
    model.train()
    for number, (images, targets) in enumerate(train):
        images = [it.to(GPU) for it in images]
        targets = [{name: it.to(GPU) for name, it in target.items()} for target in targets]
        with edits.forward():
            losses = model(images, targets)
            loss = sum(losses.values())
        if not math.isfinite(loss.item()):
            raise SystemExit(f"the loss is {loss.item()}")
        if number % edits.accumulate == 0:
            edits.zero_grad(opt)
        edits.backward(loss)
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt)
            warm.step()
        print(f"{number} " + ", ".join(f"{name} {it.item():.4f}" for name, it in losses.items()))
    schedule.step()
    model.eval()
    n_found = 0
    with torch.no_grad():
        for images, _ in valid:
            n_found += sum(len(it["boxes"]) for it in model([it.to(GPU) for it in images]))
    print(f"{n_found} found")


# Pictures from noise in a small space: a transformer whose first layers are joined to its last ones (U-ViT), everything is a token, a
# straight way from noise to pictures, a mean of the weights by PyTorch, TF32.


class Joined(nn.Module):
    """A layer of a transformer; later ones also see what an earlier one knew."""

    def __init__(self, width, n_heads, joined):
        super().__init__()
        self.n_heads = n_heads
        self.join = nn.Linear(2 * width, width) if joined else None
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, earlier=None):
        if self.join is not None:
            x = self.join(torch.cat([x, earlier], -1))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Latents(nn.Module):
    def __init__(self, side, n_channels, patch, width, depth, n_heads, n_kinds):
        super().__init__()
        self.side, self.patch, self.width = side, patch, width
        self.patches = nn.Conv2d(n_channels, width, patch, patch)
        self.kinds = nn.Embedding(n_kinds + 1, width)
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.places = nn.Parameter(torch.randn(1, 2 + (side // patch) ** 2, width) * 0.02)
        half = depth // 2
        self.first = nn.ModuleList(Joined(width, n_heads, False) for _ in range(half))
        self.middle = Joined(width, n_heads, False)
        self.last = nn.ModuleList(Joined(width, n_heads, True) for _ in range(half))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, patch**2 * n_channels)
        self.smooth = nn.Conv2d(n_channels, n_channels, 3, padding=1)

    def forward(self, x, time, kind):
        waves = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = 1000 * time[:, None] * waves
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([time[:, None], self.kinds(kind)[:, None], x], 1) + self.places
        known = []
        for block in self.first:
            x = block(x)
            known.append(x)
        x = self.middle(x)
        for block in self.last:
            x = block(x, known.pop())
        x = self.out(self.norm(x))[:, 2:]
        n = self.side // self.patch
        x = x.unflatten(1, (n, n)).unflatten(-1, (-1, self.patch, self.patch)).permute(0, 3, 1, 4, 2, 5)
        return self.smooth(x.flatten(4, 5).flatten(2, 3))


def latents(edits):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    edits.habits()
    side, n_kinds, n_batch, n_steps = size(32, 8), size(1000, 5), size(32, 2), size(6, 3)
    model = Latents(side, 4, 2, size(512, 16), size(13, 13), size(8, 2), n_kinds)
    # The mean is copied before anything is done to the layers.
    mean = AveragedModel(model.to(GPU), multi_avg_fn=get_ema_multi_avg_fn(0.9999), use_buffers=True)
    model = prepare(edits, model, [*model.first, model.middle, *model.last])
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=2e-4, betas=(0.99, 0.99), weight_decay=0.03, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min((step + 1) / 5000, 1))
    # What an encoder once said of each picture: means and spreads.
    stored = torch.randn(size(512, 8), 8, side, side)

    def drawn():
        which = torch.randint(len(stored), (n_batch,))
        middle, log_spread = stored[which].to(GPU).chunk(2, 1)
        x = (middle + torch.randn_like(middle) * torch.exp(0.5 * log_spread.clamp(-30, 20))) * 0.18215
        kind = torch.randint(n_kinds, (n_batch,), device=GPU)
        return x.to(edits.dtype), torch.where(torch.rand(n_batch, device=GPU) < 0.1, n_kinds, kind)

    model.train()
    for step in range(n_steps):
        total = 0.0
        for _ in range(edits.accumulate):
            x, kind = drawn()
            noise, time = torch.randn_like(x), torch.sigmoid(torch.randn(n_batch, device=GPU))
            part = time.view(-1, 1, 1, 1)
            with edits.forward():
                speed = model((1 - part) * x + part * noise, time, kind)
                loss = F.mse_loss(speed.float(), noise - x)
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt)
        edits.zero_grad(opt)
        schedule.step()
        mean.update_parameters(model)
        print(f"{step} loss {total:.4f}")
    mean.eval()
    with torch.no_grad(), edits.autocast():
        x, kind = torch.randn(size(8, 2), 4, side, side, device=GPU), torch.arange(size(8, 2), device=GPU) % n_kinds
        for time in torch.linspace(1, 0.25, 4).tolist():
            at = torch.full((len(x),), time, device=GPU)
            with_kind, without = mean(torch.cat([x, x]), torch.cat([at, at]), torch.cat([kind, torch.full_like(kind, n_kinds)])).chunk(2)
            x = x - 0.25 * (without + 1.5 * (with_kind - without)).float()
    print(f"spread of what was drawn {x.std().item():.3f}")


# Subtitles: the Speech2Text of transformers on clips padded to the longest, with masked bands and times. Adam, a warm-up and a slow decay of
# the rate, and gradients that are zeroed and kept.


class Said(Dataset):
    def __init__(self, n, n_words, frames, words):
        self.n_frames = torch.randint(*frames, (n,)).tolist()
        self.n_said = torch.randint(*words, (n,)).tolist()
        self.n_words = n_words

    def __len__(self):
        return len(self.n_frames)

    def __getitem__(self, number):
        sound = torch.randn(self.n_frames[number], 80)
        sound = (sound - sound.mean(0)) / (sound.std(0) + 1e-5)
        start = int(torch.randint(80 - 27, ()))
        sound[:, start : start + int(torch.randint(27, ()))] = 0
        start = int(torch.randint(len(sound) // 2, ()))
        sound[start : start + int(torch.randint(len(sound) // 4, ()))] = 0
        words = torch.randint(4, self.n_words, (self.n_said[number],))
        words[-1] = 2
        return sound, words


def said_together(rows):
    sounds, words = zip(*rows)
    lengths = torch.tensor([len(it) for it in sounds])
    sounds = nn.utils.rnn.pad_sequence(sounds, batch_first=True)
    mask = (torch.arange(sounds.shape[1]) < lengths[:, None]).long()
    return sounds, mask, nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=-100)


def subtitles(edits):
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration
    from transformers.models.speech_to_text.modeling_speech_to_text import shift_tokens_right
    # As it was before gradients were set to None.
    edits.habits(set_to_none="no")
    n_words, n_batch, n_steps = size(10000, 60), size(32, 2), size(6, 2)
    frames, words = size((500, 1400), (40, 90)), size((20, 70), (4, 9))
    small = dict(
        d_model=16, encoder_layers=4, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
        decoder_attention_heads=2, conv_channels=32, max_source_positions=200, max_target_positions=40,
    )
    config = Speech2TextConfig(vocab_size=n_words, use_cache=False, **size({}, small))
    model = Speech2TextForConditionalGeneration(config)
    model = prepare(edits, model, named(model, "Speech2TextEncoderLayer") + named(model, "Speech2TextDecoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min((step + 1) / 1000, (1000 / (step + 1)) ** 0.5))
    data = Said(n_steps * edits.accumulate * n_batch, n_words, frames, words)
    train = DataLoader(data, n_batch, shuffle=True, collate_fn=said_together, drop_last=True)
    valid = DataLoader(Said(n_batch, n_words, frames, words), n_batch, collate_fn=said_together)

    def loss_of(batch, smoothing):
        sounds, mask, labels = (it.to(GPU) for it in batch)
        before = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
        logits = model(input_features=sounds.to(edits.dtype), attention_mask=mask, decoder_input_ids=before).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    model.train()
    edits.zero_grad(opt)
    losses = []
    for number, batch in enumerate(train):
        with edits.forward():
            loss = loss_of(batch, 0.1)
        edits.backward(loss)
        losses.append(loss.item())
        if (number + 1) % edits.accumulate == 0:
            edits.step(opt, model.parameters(), clip=10.0)
            schedule.step()
            edits.zero_grad(opt)
    model.eval()
    with torch.no_grad(), edits.autocast():
        others = [loss_of(batch, 0.0).item() for batch in valid]
    print(f"loss {sum(losses) / len(losses):.4f}, on others {sum(others) / len(others):.4f}")


# Novels: a small Mistral of transformers with windows from the beginning, texts one after another in one stream, bfloat16 where it does
# no harm, fused AdamW.


def novels(edits):
    from transformers import MistralConfig, MistralForCausalLM
    edits.habits(precision="autocast-bf16")
    n_words, n_batch, n, n_steps = size(32000, 120), size(6, 2), size(512, 24), size(6, 2)
    usual = dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = MistralConfig(vocab_size=n_words, sliding_window=size(256, 8), max_position_embeddings=n, use_cache=False, **size(usual, small))
    model = MistralForCausalLM(config)
    model = prepare(edits, model, named(model, "MistralDecoderLayer"))
    decayed = [it for name, it in model.named_parameters() if it.dim() > 1 and "embed" not in name]
    others = [it for name, it in model.named_parameters() if it.dim() <= 1 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(rated(opt), 0.01, total_iters=50)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(rated(opt), T_max=1000, eta_min=6e-5)
    schedule = torch.optim.lr_scheduler.SequentialLR(rated(opt), [warm, cool], milestones=[50])

    def stream():
        """Pieces of one length; a text may go on in the next piece."""
        kept = torch.empty(0, dtype=torch.long)
        while True:
            while len(kept) < n_batch * n:
                text = torch.randint(3, n_words, (int(torch.randint(n // 4, 4 * n, ())),))
                kept = torch.cat([kept, text, torch.tensor([2])])
            yield kept[: n_batch * n].view(n_batch, n).to(GPU, non_blocking=True)
            kept = kept[n_batch * n :]

    pieces, n_seen = stream(), 0
    model.train()
    for step in range(n_steps):
        total = torch.zeros((), device=GPU)
        for _ in range(edits.accumulate):
            words = next(pieces)
            with edits.forward():
                loss = model(input_ids=words, labels=words).loss
            edits.backward(loss)
            total += loss.detach() / edits.accumulate
            n_seen += words.numel()
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        if step % 2 == 1:
            print(f"{step} loss {total.item():.4f} after {n_seen} words, rate {schedule.get_last_lr()[0]:.2e}")
    model.eval()
    with torch.no_grad(), edits.autocast():
        words = next(pieces)
        print(f"loss on others {model(input_ids=words, labels=words).loss.item():.4f}")


PROGRAMS = {it.__name__: it for it in (ratings, drugs, demand, follows, pupil, wings, cars, latents, subtitles, novels)}
