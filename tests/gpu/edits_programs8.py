"""Ten more training programs of other kinds, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of a few steps with its own habits:
libraries, optimizer, precision, order of calls, what it keeps. `answers`, `reward`, `reason` and `control` need transformers, `species`
timm, `lungs`, `streets` and `boxes` torchvision; without them these raise ImportError.

The edits that `edits.py` does not know, `--optimizer adam8bit`, `--checkpoint selective` and `--freeze-up-to LAYER`, are those of
edits_programs5.py. An optimizer on the CPU may have groups of parameters and a scaler here.
"""
import math

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "forces": ["--accumulate 4", "--adam for-loop", "--optimizer momentum", "--offload optimizer --set-to-none no"],
    "basket": ["--optimizer sgd", "--adam fused", "--checkpoint every:2", "--precision autocast-bf16 --accumulate 2"],
    "reward": ["--lora 16", "--optimizer adam8bit", "--checkpoint all", "--precision bf16 --offload optimizer"],
    "control": ["--precision autocast-fp16", "--checkpoint selective", "--offload activations", "--checkpoint all --adam for-loop"],
    "species": ["--adam foreach", "--precision autocast-bf16", "--freeze-up-to blocks.7", "--checkpoint layers:0..5 --offload optimizer"],
    "lungs": ["--precision autocast-fp16", "--optimizer sgd", "--freeze 0.5", "--offload activations"],
    "boxes": ["--precision fp32", "--optimizer adamw", "--accumulate 4", "--checkpoint all --set-to-none no"],
    "reason": ["--precision bf16", "--checkpoint all", "--adam fused", "--offload activations --set-to-none no"],
    "answers": ["--optimizer adafactor", "--freeze 0.5", "--precision bf16", "--lora 8 --precision autocast-bf16"],
    "streets": ["--precision autocast-bf16", "--optimizer adam", "--checkpoint every:2", "--checkpoint all --accumulate 2"],
}
# None of these is asked about two GPUs.
LAYOUTS = {}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "forces": 4, "basket": 4, "reward": 6, "control": 5, "species": 4, "lungs": 6, "boxes": 5, "reason": 7, "answers": 7, "streets": 6,
}

import copy, sys

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


def named(model, kind):
    """The layers of a model whose class has this name."""
    return [it for it in model.modules() if type(it).__name__ == kind]


# Forces between atoms: scalars and vectors of each atom, messages of its neighbours; forces are the slope of the energy, and are learned.


class Message(nn.Module):
    """What an atom hears from its neighbours."""

    def __init__(self, width, n_waves):
        super().__init__()
        self.say = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.far = nn.Linear(n_waves, 3 * width)

    def forward(self, s, v, to, by, toward, waves, near):
        said = self.say(s)[by] * (self.far(waves) * near)
        plain, turn, point = said.chunk(3, -1)
        arrows = v[by] * turn[:, None] + toward[:, :, None] * point[:, None]
        s = s + torch.zeros_like(s).index_add(0, to, plain)
        return s, v + torch.zeros_like(v).index_add(0, to, arrows)


class Update(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, 2 * width, bias=False)
        self.think = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, s, v):
        a, b = self.mix(v).chunk(2, -1)
        length = (b.square().sum(1) + 1e-8).sqrt()
        plain, inner, scale = self.think(torch.cat([s, length], -1)).chunk(3, -1)
        return s + plain + inner * (a * b).sum(1), v + scale[:, None] * a


class Layer(nn.Module):
    def __init__(self, width, n_waves):
        super().__init__()
        self.message, self.update = Message(width, n_waves), Update(width)

    def forward(self, s, v, *edges):
        return self.update(*self.message(s, v, *edges))


class Atoms(nn.Module):
    def __init__(self, width, n_layers, n_waves, reach):
        super().__init__()
        self.width, self.reach = width, reach
        self.kinds = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Layer(width, n_waves) for _ in range(n_layers))
        self.out = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1))
        self.register_buffer("count", torch.arange(1, n_waves + 1).float())

    def forward(self, kinds, places, to, by, of, n_molecules):
        apart = places[by] - places[to]
        far = apart.norm(dim=1, keepdim=True).clamp(min=1e-3)
        near = 0.5 * (torch.cos(math.pi * far / self.reach) + 1) * (far < self.reach)
        waves = torch.sin(self.count * math.pi * far / self.reach) / far
        s = self.kinds(kinds)
        v = s.new_zeros(len(s), 3, self.width)
        for layer in self.layers:
            s, v = layer(s, v, to, by, apart / far, waves, near)
        energy = self.out(s).squeeze(1)
        return torch.zeros(n_molecules, device=s.device, dtype=energy.dtype).index_add(0, of, energy)


def molecules(n_molecules, n_atoms, n_near):
    """Kinds and places of atoms, and who is near whom: each atom has the same number of neighbours."""
    places = torch.rand(n_molecules, n_atoms, 3) * 6
    near = torch.cdist(places, places).topk(n_near + 1, largest=False).indices[..., 1:]
    first = torch.arange(n_molecules)[:, None, None] * n_atoms
    by = (near + first).flatten()
    to = torch.arange(n_molecules * n_atoms).repeat_interleave(n_near)
    of = torch.arange(n_molecules).repeat_interleave(n_atoms)
    return torch.randint(1, 10, (n_molecules * n_atoms,)), places.flatten(0, 1), to, by, of


def forces(edits):
    edits.habits()
    n_molecules, n_atoms, n_near = size(36, 2), size(48, 8), size(24, 4)
    model = Atoms(size(128, 16), size(4, 2), 20, 5.0)
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=5e-4, weight_decay=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(rated(opt), factor=0.8, patience=20)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            kinds, places, to, by, of = (it.to(GPU) for it in molecules(n_molecules, n_atoms, n_near))
            energy, force = torch.randn(n_molecules).to(GPU), torch.randn(len(places), 3).to(GPU)
            places.requires_grad_(True)
            with edits.forward():
                guessed = model(kinds, places, to, by, of, n_molecules)
                pull = -torch.autograd.grad(guessed.sum(), places, create_graph=True)[0]
                loss_energy = F.l1_loss(guessed / n_atoms, energy)
                loss_force = (pull - force).norm(dim=1).mean()
                loss = loss_energy + 50 * loss_force
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=10.0)
        mean.update_parameters(model)
        schedule.step(loss.detach())
    print(f"energy {loss_energy.item():.3f}, force {loss_force.item():.3f}")


# What is bought next: a transformer over what was bought before, some things that were not bought in its loss, the same embeddings.


class Basket(nn.Module):
    def __init__(self, n_items, longest, width, n_heads, n_layers):
        super().__init__()
        self.items = nn.Embedding(n_items + 1, width, padding_idx=0)
        self.places = nn.Embedding(longest, width)
        self.drop = nn.Dropout(0.2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, n_heads, 4 * width, dropout=0.2, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.items.weight, std=0.02)
        self.register_buffer("later", torch.ones(longest, longest, dtype=torch.bool).triu(1))

    def forward(self, bought):
        n = bought.size(1)
        x = self.drop(self.items(bought) * math.sqrt(self.items.embedding_dim) + self.places.weight[:n])
        for layer in self.layers:
            x = layer(x, src_mask=self.later[:n, :n], is_causal=True)
        return self.norm(x)


def basket(edits):
    edits.habits()
    n_items, n_batch, longest, n_wrong = size(200_000, 200), size(96, 4), size(200, 12), size(1024, 16)
    # The fast path of PyTorch's layers for evaluation does not know of adapters.
    torch.backends.mha.set_fastpath_enabled(False)
    model = Basket(n_items, longest, size(256, 16), size(4, 2), size(6, 4))
    model = prepare(edits, model, model.layers)
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.ExponentialLR(rated(opt), 0.999)

    def baskets():
        bought = torch.randint(1, n_items + 1, (n_batch, longest + 1))
        bought[torch.arange(longest + 1) < torch.randint(longest // 2, (n_batch, 1))] = 0
        return bought.to(GPU)

    for step in range(4):
        total = 0.0
        for _ in range(edits.accumulate):
            bought = baskets()
            before, after = bought[:, :-1], bought[:, 1:]
            with edits.forward():
                x = model(before)
                right = (x * model.items(after)).sum(-1, keepdim=True)
                # The same things were not bought by anybody.
                wrong = x @ model.items(torch.randint(1, n_items + 1, (n_wrong,), device=GPU)).T
                logits = torch.cat([right, wrong], -1).float()
                there = (after > 0).float()
                loss = (F.cross_entropy(logits.flatten(0, 1), after.new_zeros(after.numel()), reduction="none") * there.flatten()).sum()
                loss = loss / there.sum()
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(opt)
        edits.zero_grad(opt)
        schedule.step()
        if step == 2:
            model.eval()
            with torch.no_grad(), edits.autocast():
                bought = baskets()
                scores = model(bought[:, :-1])[:, -1] @ model.items.weight.T
                found = (scores.topk(10).indices == bought[:, -1:]).any(1).float().mean()
                print(f"{found.item():.4f} found")
            model.train()
    print(f"loss {total:.3f}")


# Which of two answers is better: a Qwen3 of transformers with one number at the end, pairs in the same batch, bfloat16.


def reward(edits):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification, get_cosine_with_min_lr_schedule_with_warmup
    edits.habits(precision="autocast-bf16")
    n_words, n_pairs, longest = size(65536, 120), size(6, 2), size(512, 16)
    config = Qwen3Config(
        vocab_size=n_words, hidden_size=size(768, 32), intermediate_size=size(2304, 64), num_hidden_layers=size(12, 2), head_dim=size(64, 8),
        num_attention_heads=size(12, 4), num_key_value_heads=size(4, 2), num_labels=1, pad_token_id=0, use_cache=False,
    )
    model = Qwen3ForSequenceClassification(config)
    model = prepare(edits, model, named(model, "Qwen3DecoderLayer"))
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=9e-6, betas=(0.9, 0.95), weight_decay=0.001)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(rated(opt), 10, 500, min_lr_rate=0.1)
    for step in range(4):
        right = 0.0
        for _ in range(edits.accumulate):
            # The better answers come first; all are padded to the same length.
            tokens = torch.randint(1, n_words, (2 * n_pairs, longest))
            mask = (torch.arange(longest) < torch.randint(longest // 2, longest + 1, (2 * n_pairs, 1))).long()
            tokens, mask = (tokens * mask).to(GPU), mask.to(GPU)
            margin = torch.rand(n_pairs).to(GPU)
            with edits.forward():
                scores = model(input_ids=tokens, attention_mask=mask).logits.squeeze(-1).float()
                better, worse = scores.chunk(2)
                loss = -F.logsigmoid(better - worse - margin).mean() + 0.01 * (better + worse).square().mean()
            edits.backward(loss)
            right += (better > worse).float().mean().item() / edits.accumulate
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
        print(f"{step} loss {loss.item():.4f}, {right:.2f} right")


# Reasoning that is rewarded: a SmolLM3 of transformers writes several answers to each question, and learns from those above the mean.


def log_chances(model, tokens, mask, n, heat):
    """Of the last `n` tokens of each text."""
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=n + 1).logits[:, :-1]
    return (logits.float() / heat).log_softmax(-1).gather(2, tokens[:, -n:, None]).squeeze(2)


def reason(edits):
    from transformers import SmolLM3Config, SmolLM3ForCausalLM
    edits.habits()
    n_words, n_asked, n_tries, longest, n_new = size(49152, 120), size(4, 2), size(8, 2), size(128, 8), size(48, 4)
    config = SmolLM3Config(
        vocab_size=n_words, hidden_size=size(576, 32), intermediate_size=size(1536, 64), num_hidden_layers=size(14, 4), pad_token_id=0,
        num_attention_heads=size(9, 4), num_key_value_heads=size(3, 2), tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )
    model = SmolLM3ForCausalLM(config)
    # What it must not go too far away from.
    fixed = copy.deepcopy(model).requires_grad_(False).eval()
    model = prepare(edits, model, named(model, "SmolLM3DecoderLayer"))
    fixed.to(GPU, edits.dtype)
    opt = optimizer(edits, model.parameters(), torch.optim.AdamW, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min(1.0, (step + 1) / 20))
    heat, low, high, beta = 0.9, 0.2, 0.28, 0.04

    def tried():
        """Questions with answers, their old chances, and how much better than the others each is."""
        asked = torch.randint(3, n_words, (n_asked, longest))
        there = (torch.arange(longest) >= torch.randint(longest // 2, (n_asked, 1))).long()
        asked, there = (it.repeat_interleave(n_tries, 0).to(GPU) for it in (asked * there, there))
        model.eval()
        with torch.no_grad(), edits.autocast():
            tokens = model.generate(
                input_ids=asked, attention_mask=there, do_sample=True, temperature=heat, top_p=0.95, max_new_tokens=n_new, min_new_tokens=n_new,
            )
            mask = torch.cat([there, there.new_ones(len(there), tokens.size(1) - longest)], 1)
            old = log_chances(model, tokens, mask, n_new, heat)
            kept = log_chances(fixed, tokens, mask, n_new, heat)
        model.train()
        answers = tokens[:, longest:].tolist()
        earned = torch.tensor([len(set(it)) / n_new - 0.1 * (it[-1] % 2) for it in answers]).view(n_asked, n_tries)
        better = (earned - earned.mean(1, keepdim=True)) / (earned.std(1, keepdim=True) + 1e-4)
        return tokens, mask, old, kept, better.view(-1, 1).to(GPU)

    for step in range(3):
        batches = [tried() for _ in range(edits.accumulate)]
        for _ in range(2):
            for tokens, mask, old, kept, better in batches:
                with edits.forward():
                    now = log_chances(model, tokens, mask, n_new, heat)
                    ratio = (now - old).exp()
                    gain = torch.minimum(ratio * better, ratio.clamp(1 - low, 1 + high) * better)
                    away = (kept - now).exp() - (kept - now) - 1
                    loss = (beta * away - gain).mean()
                edits.backward(loss)
            edits.step(opt, model.parameters(), clip=0.2)
            schedule.step()
            edits.zero_grad(opt)
        print(f"{step} loss {loss.item():.4f}, away {away.mean().item():.5f}")


# Where the answer is: an XLM-RoBERTa of transformers with its large vocabulary finds the first and last word of answers in texts.


def answers(edits):
    from transformers import XLMRobertaConfig, XLMRobertaForQuestionAnswering, get_linear_schedule_with_warmup
    edits.habits()
    n_words, n_batch, longest = size(250002, 150), size(8, 2), size(256, 24)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = XLMRobertaConfig(vocab_size=n_words, max_position_embeddings=514, type_vocab_size=1, **size({}, small))
    model = XLMRobertaForQuestionAnswering(config)
    model = prepare(edits, model, named(model, "XLMRobertaLayer"))
    free = ("bias", "LayerNorm.weight")
    trained = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if not name.endswith(free)], "weight_decay": 0.01},
        {"params": [it for name, it in trained if name.endswith(free)], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=3e-5)
    schedule = get_linear_schedule_with_warmup(rated(opt), 10, 1000)

    def texts(n):
        tokens = torch.randint(5, n_words, (n, longest))
        mask = (torch.arange(longest) < torch.randint(longest // 2, longest + 1, (n, 1))).long()
        first = torch.randint(longest // 3, (n,))
        # Every third text has no answer.
        last = first + torch.randint(1, 5, (n,))
        first[::3], last[::3] = 0, 0
        return {"input_ids": tokens * mask + (1 - mask), "attention_mask": mask}, {"start_positions": first, "end_positions": last}

    for step in range(4):
        for _ in range(edits.accumulate):
            batch, truth = texts(n_batch)
            batch = {name: it.to(GPU) for name, it in {**batch, **truth}.items()}
            with edits.forward():
                loss = model(**batch).loss
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    model.eval()
    found = []
    with torch.no_grad(), edits.autocast():
        for _ in range(2):
            batch, truth = texts(2 * n_batch)
            out = model(**{name: it.to(GPU) for name, it in batch.items()})
            found.append((out.start_logits.float().cpu().argmax(1) == truth["start_positions"]).float().mean())
    print(f"loss {loss.item():.3f}, {torch.stack(found).mean().item():.3f} found")


# Species of plants, a few of which are seen often: an EVA-02 of timm, lower rates in earlier layers, a fused AdamW, a mean of the weights.


class Mean:
    """A slowly moving mean of the parameters that are trained, beside them on the GPU; it moves faster at first."""

    def __init__(self, model, decay):
        self.decay, self.n = decay, 0
        self.kept = {name: it.detach().clone() for name, it in model.named_parameters() if it.requires_grad}

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        decay = min(self.decay, (1 + self.n) / (10 + self.n))
        now = dict(model.named_parameters())
        torch._foreach_lerp_(list(self.kept.values()), [now[name].detach() for name in self.kept], 1 - decay)


def species(edits):
    from timm import create_model
    from timm.optim import param_groups_layer_decay
    from timm.scheduler import CosineLRScheduler
    edits.habits()
    n_kinds, n_batch, n = size(5089, 20), size(14, 2), size(336, 56)
    name = size("eva02_small_patch14_336", "eva02_tiny_patch14_224")
    model = create_model(name, num_classes=n_kinds, drop_path_rate=0.1, img_size=n)
    model = prepare(edits, model, model.blocks)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75, no_weight_decay_list=model.no_weight_decay())
    opt = optimizer(edits, groups, torch.optim.AdamW, lr=2e-4, betas=(0.9, 0.999), fused=True)
    schedule = CosineLRScheduler(rated(opt), t_initial=2000, warmup_t=50, warmup_lr_init=1e-6, t_in_epochs=False)
    mean = Mean(model, 0.9998)
    # How often each is seen; what is seen seldom needs a larger margin.
    often = torch.arange(1, n_kinds + 1).float() ** -1.2
    prior = (often / often.sum()).log().to(GPU)
    shift, spread = torch.tensor([0.481, 0.458, 0.408], device=GPU), torch.tensor([0.269, 0.261, 0.276], device=GPU)
    for step in range(4):
        for _ in range(edits.accumulate):
            images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
            labels = torch.multinomial(often, n_batch).to(GPU, non_blocking=True)
            images = images.float().div_(255).sub_(shift[:, None, None]).div_(spread[:, None, None]).to(edits.dtype)
            with edits.forward():
                logits = model(images).float()
                loss = F.cross_entropy(logits + prior, labels, label_smoothing=0.1)
            edits.backward(loss)
        edits.step(opt, model.parameters(), clip=1.0)
        edits.zero_grad(opt)
        schedule.step_update(step + 1)
        mean.update(model)
    print(f"loss {loss.item():.3f}, {(logits.argmax(1) == labels).sum().item()} right")


# What is seen in X-rays of lungs: a DenseNet of torchvision, several findings each of which may be unknown, a validation between.


def lungs(edits):
    from torchvision.models import DenseNet, densenet121
    edits.habits()
    n_found, n_batch, n = 14, size(26, 2), size(256, 64)
    model = densenet121(weights=None, drop_rate=0.1) if size(1, 0) else DenseNet(8, (2, 2, 2, 2), 16, drop_rate=0.1)
    model.classifier = nn.Linear(model.classifier.in_features, n_found)
    model = prepare(edits, model, [])
    opt = optimizer(edits, model.parameters(), torch.optim.Adam, lr=1e-4, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.StepLR(rated(opt), step_size=1, gamma=0.9)
    rare = (1 + 20 * torch.rand(n_found)).to(GPU)

    def loader(n_batches, n_batch):
        for _ in range(n_batches):
            # The same grey picture in all three channels.
            images = torch.randn(n_batch, 1, n, n).expand(-1, 3, -1, -1)
            yield images, (torch.rand(n_batch, n_found) < 0.1).float(), torch.rand(n_batch, n_found) < 0.8

    for epoch in range(2):
        model.train()
        total = 0.0
        for number, (images, truth, known) in enumerate(loader(2 * edits.accumulate, n_batch)):
            images, truth, known = images.to(GPU, edits.dtype), truth.to(GPU), known.to(GPU)
            if number % edits.accumulate == 0:
                edits.zero_grad(opt)
            with edits.forward():
                logits = model(images)
                each = F.binary_cross_entropy_with_logits(logits.float(), truth, pos_weight=rare, reduction="none")
                loss = (each * known).sum() / known.sum()
            edits.backward(loss)
            if number % edits.accumulate == edits.accumulate - 1:
                edits.step(opt)
            total += loss.item()
        schedule.step()
        model.eval()
        said, true = [], []
        with torch.no_grad():
            for images, truth, _ in loader(2, 2 * n_batch):
                with edits.autocast():
                    said.append(model(images.to(GPU, edits.dtype)).float().sigmoid().cpu())
                true.append(truth)
        said, true = torch.cat(said), torch.cat(true)
        # How often what is there is thought more likely than what is not.
        order = (said[:, None] > said[None]).float()
        pairs = true[:, None] * (1 - true[None])
        print(f"{epoch} loss {total:.3f}, area {((order * pairs).sum() / pairs.sum()).item():.3f}")


# Streets: a DeepLab of torchvision with dilated convolutions, a second loss in the middle, SGD with a rate that falls each step.


def streets(edits):
    from torchvision.models.segmentation import deeplabv3_resnet50
    edits.habits()
    n_kinds, n_batch, n = 19, size(6, 2), size(385, 65)
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=n_kinds, aux_loss=True)
    model = prepare(edits, model, named(model, "Bottleneck"))
    groups = [
        {"params": list(model.backbone.parameters()), "lr": 0.01},
        {"params": list(model.classifier.parameters()), "lr": 0.1},
        {"params": list(model.aux_classifier.parameters()), "lr": 0.1},
    ]
    opt = optimizer(edits, groups, torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(rated(opt), total_iters=1000, power=0.9)
    confused = torch.zeros(n_kinds, n_kinds, dtype=torch.long, device=GPU)
    for step in range(4):
        edits.zero_grad(opt)
        for _ in range(edits.accumulate):
            images = torch.randn(n_batch, 3, n, n).to(GPU, edits.dtype)
            truth = torch.randint(n_kinds, (n_batch, n, n))
            truth[torch.rand(n_batch, n, n) < 0.1] = 255
            truth = truth.to(GPU)
            with edits.forward():
                out = model(images)
                loss = F.cross_entropy(out["out"], truth, ignore_index=255)
                loss = loss + 0.5 * F.cross_entropy(out["aux"], truth, ignore_index=255)
            edits.backward(loss)
        edits.step(opt)
        schedule.step()
        with torch.no_grad():
            both = truth * n_kinds + out["out"].argmax(1)
            confused += torch.bincount(both[truth < 255], minlength=n_kinds**2).view(n_kinds, n_kinds)
    overlap = confused.diag() / (confused.sum(0) + confused.sum(1) - confused.diag()).clamp(min=1)
    print(f"loss {loss.item():.3f}, overlap {overlap.mean().item():.3f}")


# Boxes without anchors: a network of split convolutions, distances to the sides as distributions, half precision, two batches for a step.


class Conv(nn.Module):
    def __init__(self, n_in, n_out, k=1, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, k, stride, k // 2, bias=False)
        self.norm, self.act = nn.BatchNorm2d(n_out, eps=1e-3, momentum=0.03), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Thin(nn.Module):
    def __init__(self, width, add):
        super().__init__()
        self.one, self.two, self.add = Conv(width, width, 3), Conv(width, width, 3), add

    def forward(self, x):
        return x + self.two(self.one(x)) if self.add else self.two(self.one(x))


class Split(nn.Module):
    """Half of the channels go through some convolutions; what comes out of each is kept."""

    def __init__(self, n_in, n_out, n, add=True):
        super().__init__()
        self.enter, self.leave = Conv(n_in, n_out), Conv((2 + n) * n_out // 2, n_out)
        self.thin = nn.ModuleList(Thin(n_out // 2, add) for _ in range(n))

    def forward(self, x):
        parts = list(self.enter(x).chunk(2, 1))
        for thin in self.thin:
            parts.append(thin(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Pooled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter, self.leave = Conv(width, width // 2), Conv(2 * width, width)

    def forward(self, x):
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.leave(torch.cat(parts, 1))


class Boxes(nn.Module):
    STRIDES, BINS = (8, 16, 32), 16

    def __init__(self, w, n, n_kinds):
        super().__init__()
        self.n_kinds = n_kinds
        self.stem = nn.Sequential(Conv(3, w, 3, 2), Conv(w, 2 * w, 3, 2), Split(2 * w, 2 * w, n))
        self.third = nn.Sequential(Conv(2 * w, 4 * w, 3, 2), Split(4 * w, 4 * w, 2 * n))
        self.fourth = nn.Sequential(Conv(4 * w, 8 * w, 3, 2), Split(8 * w, 8 * w, 2 * n))
        self.fifth = nn.Sequential(Conv(8 * w, 16 * w, 3, 2), Split(16 * w, 16 * w, n), Pooled(16 * w))
        self.up4, self.up3 = Split(24 * w, 8 * w, n, False), Split(12 * w, 4 * w, n, False)
        self.to4, self.to5 = Conv(4 * w, 4 * w, 3, 2), Conv(8 * w, 8 * w, 3, 2)
        self.down4, self.down5 = Split(12 * w, 8 * w, n, False), Split(24 * w, 16 * w, n, False)

        def head(before, width, n_out):
            return nn.Sequential(Conv(before, width, 3), Conv(width, width, 3), nn.Conv2d(width, n_out, 1))

        widths = (4 * w, 8 * w, 16 * w)
        self.sides = nn.ModuleList(head(it, max(16, w), 4 * self.BINS) for it in widths)
        self.kinds = nn.ModuleList(head(it, 4 * w, n_kinds) for it in widths)
        for it in self.kinds:
            nn.init.constant_(it[-1].bias, -6.0)

    def forward(self, images):
        x3 = self.third(self.stem(images))
        x4 = self.fourth(x3)
        x5 = self.fifth(x4)
        y4 = self.up4(torch.cat([F.interpolate(x5, scale_factor=2), x4], 1))
        z3 = self.up3(torch.cat([F.interpolate(y4, scale_factor=2), x3], 1))
        z4 = self.down4(torch.cat([self.to4(z3), y4], 1))
        z5 = self.down5(torch.cat([self.to5(z4), x5], 1))
        levels = (z3, z4, z5)
        sides = torch.cat([head(it).flatten(2) for head, it in zip(self.sides, levels)], 2)
        kinds = torch.cat([head(it).flatten(2) for head, it in zip(self.kinds, levels)], 2)
        return sides.transpose(1, 2), kinds.transpose(1, 2)


def centers(n, device):
    """The middle of each cell of all levels, and its size."""
    points, strides = [], []
    for stride in Boxes.STRIDES:
        at = (torch.arange(n // stride, device=device) + 0.5) * stride
        points.append(torch.stack(torch.meshgrid(at, at, indexing="xy"), -1).view(-1, 2))
        strides.append(torch.full((len(points[-1]), 1), float(stride), device=device))
    return torch.cat(points), torch.cat(strides)


def overlaps(a, b):
    """Of all boxes of a picture with all others: (B, M, 4) and (B, A, 4) give (B, M, A)."""
    a, b = a[:, :, None], b[:, None]
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area_a, area_b = (a[..., 2:] - a[..., :2]).prod(-1), (b[..., 2:] - b[..., :2]).prod(-1)
    return inner / (area_a + area_b - inner).clamp(min=1e-6)


@torch.no_grad()
def assigned(chances, guessed, points, boxes, kinds, n_best=10):
    """For each cell the object that it should find, and how well it already does; zero if none."""
    inside = torch.cat([points - boxes[:, :, None, :2], boxes[:, :, None, 2:] - points], -1).amin(-1) > 0
    how = overlaps(boxes, guessed).nan_to_num(0)
    of_kind = chances.transpose(1, 2).gather(1, kinds[:, :, None].expand(-1, -1, chances.size(1))).nan_to_num(0)
    fit = of_kind.sqrt() * how.pow(6) * inside
    # Cells inside the object come first, even if their boxes are far off.
    best = (fit + 1e-9 * inside).topk(n_best, dim=-1).indices
    mine = torch.zeros_like(fit).scatter_(-1, best, 1.0) * inside
    # A cell that several objects want goes to the one that it covers best.
    winner = (how + 1e-6).mul(mine).argmax(1, keepdim=True)
    mine = torch.zeros_like(mine).scatter_(1, winner, 1.0) * mine
    fit = fit * mine
    norm = fit / fit.amax(-1, keepdim=True).clamp(min=1e-9) * (how * mine).amax(-1, keepdim=True)
    return winner.squeeze(1), mine.sum(1) > 0, norm.amax(1)


def boxes(edits):
    from torchvision.ops import complete_box_iou_loss
    edits.habits(precision="autocast-fp16", accumulate=2)
    n_kinds, n_batch, n, n_objects = size(80, 5), size(16, 2), size(640, 128), size(12, 3)
    model = Boxes(size(32, 8), 1, n_kinds)
    model = prepare(edits, model, named(model, "Split"))
    norms = {id(it) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d) for it in layer.parameters()}
    groups = [
        {"params": [it for it in model.parameters() if it.ndim > 1], "weight_decay": 5e-4},
        {"params": [it for it in model.parameters() if id(it) in norms], "weight_decay": 0.0},
        {"params": [it for it in model.parameters() if it.ndim == 1 and id(it) not in norms], "weight_decay": 0.0},
    ]
    opt = optimizer(edits, groups, torch.optim.SGD, lr=0.01, momentum=0.937, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(rated(opt), lambda step: min(1.0, (step + 1) / 100))
    # The mean of the weights, and of what the norms have seen.
    mean = {name: it.detach().clone() for name, it in model.state_dict().items()}
    points, strides = centers(n, GPU)
    bins = torch.arange(Boxes.BINS, device=GPU, dtype=torch.float32)
    for step in range(4):
        said = torch.zeros(3, device=GPU)
        for _ in range(edits.accumulate):
            images = torch.randint(256, (n_batch, 3, n, n), dtype=torch.uint8).to(GPU, non_blocking=True)
            corner = torch.rand(n_batch, n_objects, 2) * n * 0.6
            truth = torch.cat([corner, corner + n * (0.1 + 0.28 * torch.rand(n_batch, n_objects, 2))], -1).to(GPU, non_blocking=True)
            kinds = torch.randint(n_kinds, (n_batch, n_objects)).to(GPU, non_blocking=True)
            with edits.forward():
                sides, logits = model(images.to(edits.dtype) / 255)
                sides, logits = sides.float().unflatten(-1, (4, Boxes.BINS)), logits.float()
                far = sides.softmax(-1) @ bins * strides
                guessed = torch.cat([points - far[..., :2], points + far[..., 2:]], -1)
                which, found, quality = assigned(logits.detach().sigmoid(), guessed.detach(), points, truth, kinds)
                wanted = quality[..., None] * F.one_hot(kinds.gather(1, which), n_kinds) * found[..., None]
                total = wanted.sum().clamp(min=1)
                loss_kind = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum") / total
                target = truth.gather(1, which[..., None].expand(-1, -1, 4))[found]
                weight = wanted.sum(-1)[found]
                loss_box = (complete_box_iou_loss(guessed[found], target) * weight).sum() / total
                # The two bins beside the true distance share its chance.
                middle, stride = points.expand(n_batch, -1, -1)[found], strides.expand(n_batch, -1, -1)[found]
                true = (torch.cat([middle - target[:, :2], target[:, 2:] - middle], -1) / stride).clamp(0, Boxes.BINS - 1.01)
                below = true.long()
                near = (below + 1 - true).flatten()
                chosen = sides[found].flatten(0, 1)
                loss_side = F.cross_entropy(chosen, below.flatten(), reduction="none") * near
                loss_side = loss_side + F.cross_entropy(chosen, below.flatten() + 1, reduction="none") * (1 - near)
                loss_side = (loss_side.view(-1, 4).mean(1) * weight).sum() / total
                loss = 7.5 * loss_box + 0.5 * loss_kind + 1.5 * loss_side
            edits.backward(loss)
            said += torch.stack([loss_box, loss_kind, loss_side]).detach()
        edits.step(opt, model.parameters(), clip=10.0)
        edits.zero_grad(opt)
        schedule.step()
        decay = 0.9999 * (1 - math.exp(-(step + 1) / 2000))
        for name, it in model.state_dict().items():
            if it.dtype.is_floating_point:
                mean[name].mul_(decay).add_(it, alpha=1 - decay)
        print(f"{step} box {said[0].item():.3f}, kind {said[1].item():.3f}, side {said[2].item():.3f}")


# Pictures that follow a sketch: a frozen network removes noise, a copy of its first half sees the sketch and learns; texts, frozen too.


def waves(times, width):
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Look(nn.Module):
    """Attention to the places of the picture, or to the words."""

    def __init__(self, width, n_seen, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width, bias=False), nn.Linear(n_seen, width, bias=False), nn.Linear(n_seen, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x, words=None):
        y = self.norm(x)
        seen = y if words is None else words
        q, k, v = (it.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for it in (self.q(y), self.k(seen), self.v(seen)))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Convolutions that know the time, then attention, except where the picture is large."""

    def __init__(self, n_in, n_out, n_time, n_text, looks):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, n_in), nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(16, n_out), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.time = nn.Linear(n_time, n_out)
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()
        self.looks = looks
        if looks:
            heads = max(1, n_out // 64)
            self.around, self.words = Look(n_out, n_out, heads), Look(n_out, n_text, heads)
            self.norm3, self.up, self.down = nn.LayerNorm(n_out), nn.Linear(n_out, 8 * n_out), nn.Linear(4 * n_out, n_out)

    def forward(self, x, time, words):
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        x = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        if not self.looks:
            return x
        y = x.flatten(2).transpose(1, 2)
        y = self.words(self.around(y), words)
        a, gate = self.up(self.norm3(y)).chunk(2, -1)
        y = y + self.down(a * F.gelu(gate))
        return y.transpose(1, 2).view_as(x)


class Half(nn.Module):
    """The first half of the network, up to where the picture is smallest."""

    def __init__(self, widths, n_text):
        super().__init__()
        n_time = 4 * widths[0]
        self.width = widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], n_time), nn.SiLU(), nn.Linear(n_time, n_time))
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.blocks, self.downs, self.sizes, before = nn.ModuleList(), nn.ModuleList(), [widths[0]], widths[0]
        for level, width in enumerate(widths):
            for _ in range(2):
                self.blocks.append(Block(before, width, n_time, n_text, level > 0))
                before = width
                self.sizes.append(width)
            if level < len(widths) - 1:
                self.downs.append(nn.Conv2d(width, width, 3, 2, 1))
                self.sizes.append(width)
        self.middle = Block(before, before, n_time, n_text, True)

    def forward(self, x, times, words, hint=None):
        time = self.time(waves(times, self.width).to(x.dtype))
        x = self.enter(x)
        if hint is not None:
            x = x + hint
        kept = [x]
        for number, block in enumerate(self.blocks):
            x = block(x, time, words)
            kept.append(x)
            if number % 2 and number // 2 < len(self.downs):
                x = self.downs[number // 2](x)
                kept.append(x)
        return self.middle(x, time, words), kept, time


class Denoiser(nn.Module):
    def __init__(self, widths, n_text):
        super().__init__()
        self.first = Half(widths, n_text)
        n_time, before, sizes = 4 * widths[0], widths[-1], list(self.first.sizes)
        self.blocks, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.blocks.append(Block(before + sizes.pop(), width, n_time, n_text, level > 0))
                before = width
            if level:
                self.ups.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.out = nn.GroupNorm(16, before), nn.Conv2d(before, 4, 3, padding=1)

    def forward(self, x, times, words, more_middle, more):
        x, kept, time = self.first(x, times, words)
        x = x + more_middle
        for number, block in enumerate(self.blocks):
            x = block(torch.cat([x, kept.pop() + more.pop()], 1), time, words)
            if number % 3 == 2 and number // 3 < len(self.ups):
                x = self.ups[number // 3](F.interpolate(x, scale_factor=2.0))
        return self.out(F.silu(self.norm(x)))


def nothing(layer):
    """A layer that says nothing at first."""
    for it in layer.parameters():
        nn.init.zeros_(it)
    return layer


class Sketched(nn.Module):
    """The copy that learns."""

    def __init__(self, widths, n_text):
        super().__init__()
        self.copy = Half(widths, n_text)
        layers, before = [], 3
        for width in (16, 32, 96):
            layers += [nn.Conv2d(before, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU()]
            before = width
        self.hint = nn.Sequential(*layers, nothing(nn.Conv2d(before, widths[0], 3, padding=1)))
        self.tell = nn.ModuleList(nothing(nn.Conv2d(it, it, 1)) for it in self.copy.sizes)
        self.tell_middle = nothing(nn.Conv2d(widths[-1], widths[-1], 1))

    def forward(self, x, times, words, sketch):
        middle, kept, _ = self.copy(x, times, words, self.hint(sketch))
        return self.tell_middle(middle), [tell(it) for tell, it in zip(self.tell, kept)]


class Painter(nn.Module):
    """Everything: what makes pictures small and texts known, what removes noise, and what learns."""

    def __init__(self, widths, text):
        super().__init__()
        from transformers import CLIPTextConfig, CLIPTextModel
        self.text = CLIPTextModel(CLIPTextConfig(**text))
        w = size(48, 8)
        self.small = nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1), nn.SiLU(), nn.Conv2d(w, w, 3, 2, 1), nn.SiLU(), nn.Conv2d(w, 2 * w, 3, 2, 1), nn.GroupNorm(8, 2 * w),
            nn.SiLU(), nn.Conv2d(2 * w, 4 * w, 3, 2, 1), nn.GroupNorm(8, 4 * w), nn.SiLU(), nn.Conv2d(4 * w, 8, 3, padding=1),
        )
        self.denoiser = Denoiser(widths, text["hidden_size"])
        self.control = Sketched(widths, text["hidden_size"])
        self.control.copy.load_state_dict(self.denoiser.first.state_dict())
        self.requires_grad_(False)
        self.control.requires_grad_(True)


def control(edits):
    edits.habits()
    n_batch, n, n_words, widths = size(6, 2), size(512, 64), size(77, 8), size((160, 320, 512), (16, 32, 32))
    tiny = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    text = size(dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, vocab_size=49408), tiny)
    model = Painter(widths, {**text, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    trained, first = model.control.copy, model.denoiser.first
    blocks = [*trained.blocks, trained.middle, *first.blocks, first.middle, *model.denoiser.blocks]
    model = prepare(edits, model, blocks)
    model.text.eval(), model.small.eval()
    opt = optimizer(edits, model.control.parameters(), torch.optim.AdamW, lr=1e-5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(rated(opt), factor=0.1, total_iters=500)
    clear = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000).square(), 0).to(GPU)
    for step in range(4):
        for _ in range(edits.accumulate):
            images, sketch = torch.rand(n_batch, 3, n, n) * 2 - 1, (torch.rand(n_batch, 1, n, n) < 0.1).float().expand(-1, 3, -1, -1)
            # Half of the texts are forgotten.
            tokens = torch.randint(3, text["vocab_size"], (n_batch, n_words)) * (torch.rand(n_batch, 1) < 0.5)
            tokens[:, -1] = 2
            images, sketch, tokens = images.to(GPU, edits.dtype), sketch.to(GPU, edits.dtype), tokens.to(GPU)
            with torch.no_grad(), edits.autocast():
                mean, spread = model.small(images).float().chunk(2, 1)
                x = (mean + (0.5 * spread.clamp(-30, 20)).exp() * torch.randn_like(mean)) * 0.18
                words = model.text(input_ids=tokens).last_hidden_state
            noise, times = torch.randn_like(x), torch.randint(1000, (n_batch,), device=GPU)
            kept = clear[times][:, None, None, None]
            noisy = (kept.sqrt() * x + (1 - kept).sqrt() * noise).to(edits.dtype)
            with edits.forward():
                more_middle, more = model.control(noisy, times, words, sketch)
                guessed = model.denoiser(noisy, times, words, more_middle, more).float()
                # What is easy counts less.
                ratio = (kept / (1 - kept)).flatten()
                weight = ratio.clamp(max=5) / ratio
                loss = ((guessed - noise).square().mean((1, 2, 3)) * weight).mean()
            edits.backward(loss)
        edits.step(opt, model.control.parameters(), clip=1.0)
        schedule.step()
        edits.zero_grad(opt)
    print(f"loss {loss.item():.4f}")


PROGRAMS = {it.__name__: it for it in (forces, basket, reward, control, species, lungs, boxes, reason, answers, streets)}
