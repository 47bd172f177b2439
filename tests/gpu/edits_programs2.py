"""Ten more training programs, as people write them, for `edits.py` beside this file.

Each takes the edits that are really applied to it. Without edits it is an ordinary training loop of six steps with its own
habits: libraries, optimizer, precision, order of calls, what it keeps. A program may need transformers, timm or torchvision; it
raises ImportError without them.
"""
import os

# What is asked about each program, the cheapest program first. `edits.py` reads these four without running this file.
CASES = {
    "dlrm": [
        "--optimizer sgd", "--optimizer adam --adam fused", "--precision autocast-bf16", "--accumulate 4", "--freeze 0.5",
        "--optimizer adamw --set-to-none no",
    ],
    "distilbert": [
        "--adam fused", "--precision autocast-bf16", "--checkpoint all", "--freeze 0.5", "--lora 8", "--accumulate 4",
        "--optimizer momentum --precision fp32",
    ],
    "actor": [
        "--optimizer adam", "--checkpoint every:2", "--set-to-none no", "--precision bf16", "--freeze 0.5", "--offload optimizer",
    ],
    "qwen": [
        "--adam foreach", "--checkpoint every:2", "--checkpoint layers:0..7", "--optimizer adafactor", "--lora 8 --checkpoint all",
        "--set-to-none no",
    ],
    "gan": [
        "--adam fused", "--precision autocast-fp16", "--optimizer sgd", "--checkpoint all", "--set-to-none yes", "--offload optimizer",
    ],
    "gnn": [
        "--adam for-loop", "--precision autocast-bf16", "--checkpoint all", "--optimizer momentum", "--accumulate 2",
        "--offload activations",
    ],
    "whisper": [
        "--adam for-loop", "--checkpoint all", "--precision fp32", "--freeze 0.5", "--optimizer sgd --set-to-none no",
        "--offload optimizer",
    ],
    "bart": [
        "--optimizer adafactor", "--precision bf16", "--lora 16", "--accumulate 2", "--checkpoint every:2 --adam fused",
        "--offload optimizer",
    ],
    "swin": [
        "--checkpoint every:2", "--accumulate 4", "--precision autocast-fp16", "--freeze 0.5 --adam fused", "--optimizer momentum",
        "--offload activations",
    ],
    "detector": [
        "--precision autocast-fp16", "--optimizer adamw", "--freeze 0.5", "--checkpoint all", "--set-to-none no",
        "--optimizer adam --adam for-loop",
    ],
}
# These need two GPUs.
LAYOUTS = {
    "dlrm": ["--layout zero1:2"],
    "distilbert": ["--layout ddp:2"],
    "qwen": ["--layout fsdp:2"],
    "whisper": ["--layout fsdp:2"],
    "bart": ["--layout zero1:2"],
    "detector": ["--layout ddp:2"],
}
# GiB of the GPU that a run is expected to reserve without edits.
GIB = {
    "dlrm": 10, "distilbert": 14, "actor": 8, "qwen": 17, "gan": 9, "gnn": 11, "whisper": 14, "bart": 9, "swin": 9, "detector": 16,
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


def forever(loader):
    """The batches of a loader, one epoch after another."""
    while True:
        yield from loader


# --- a recommender -------------------------------------------------------------------------------------------------------------


def layers(*widths):
    """Linear layers with ReLU between them and after the last."""
    parts = []
    for n_in, n_out in zip(widths, widths[1:]):
        parts += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*parts)


class Recommender(nn.Module):
    """DLRM: numbers go through a small network, categories through tables; the products of all pairs are judged by another."""

    def __init__(self, n_numbers, rows, width, hidden):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = layers(n_numbers, hidden, hidden // 2, width)
        n_pairs = len(rows) * (len(rows) + 1) // 2
        self.top = layers(width + n_pairs, 2 * hidden, 2 * hidden, hidden, hidden // 2)
        self.last = nn.Linear(hidden // 2, 1)
        self.register_buffer("pairs", torch.tril_indices(len(rows) + 1, len(rows) + 1, -1), persistent=False)

    def forward(self, numbers, categories):
        dense = self.bottom(numbers)
        looked_up = [table(of_table) for table, of_table in zip(self.tables, categories.unbind(1))]
        all_vectors = torch.stack([dense.to(looked_up[0].dtype), *looked_up], dim=1)
        products = torch.bmm(all_vectors, all_vectors.transpose(1, 2))
        products = products[:, self.pairs[0], self.pairs[1]]
        return self.last(self.top(torch.cat([dense, products], dim=1))).squeeze(1)


def dlrm(edits):
    """A recommender with 26 tables and dense gradients, in single precision with Adagrad; the model is made on the GPU."""
    edits.habits()
    batch, n_numbers, per_bag = size((16384, 13, 3), (8, 5, 2))
    width, hidden = size((64, 512), (8, 16))
    big, small = size((1_200_000, 40_000), (60, 20))
    rows = [big] * size(6, 2) + [small] * size(16, 2) + [10, 100, 1000, 4]
    torch.manual_seed(17)
    with torch.device(GPU):
        model = Recommender(n_numbers, rows, width, hidden)
    run = edits.prepare(model, [])
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adagrad, lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(edits.scheduled(optimizer), 0.1, 1.0, 100)
    criterion = nn.BCEWithLogitsLoss()
    total = torch.zeros((), device=GPU)
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            numbers = torch.rand(batch, n_numbers).log1p()
            categories = torch.stack([torch.randint(0, n, (batch, per_bag)) for n in rows], dim=1)
            clicked = (torch.rand(batch) < 0.2).float()
            numbers = numbers.to(GPU, edits.dtype, non_blocking=True)
            categories, clicked = categories.to(GPU, non_blocking=True), clicked.to(GPU, non_blocking=True)
            with edits.forward():
                loss = criterion(run(numbers, categories), clicked)
            edits.backward(loss)
            total += loss.detach()
        edits.step(optimizer)
        schedule.step()
        edits.zero_grad(optimizer)
        if step % 3 == 2:
            print(step, total.item() / (3 * edits.accumulate))
            total.zero_()


# --- a masked language model ---------------------------------------------------------------------------------------------------


def distilbert(edits):
    """DistilBERT learns masked words: float16 by autocast with a scaled loss, AdamW with two groups, clipped gradients, a loader."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM, get_linear_schedule_with_warmup

    edits.habits(precision="autocast-fp16")
    config = DistilBertConfig(
        vocab_size=size(30522, 300), dim=size(768, 32), n_layers=size(6, 2), n_heads=size(12, 2), hidden_dim=size(3072, 64),
    )
    batch, seq, mask_token = size((64, 256, 103), (2, 16, 3))
    corpus = torch.utils.data.TensorDataset(torch.randint(5, config.vocab_size, (16 * batch, seq)))

    def masked(samples):
        tokens = torch.stack([it for it, in samples])
        labels = tokens.clone()
        chosen = torch.rand(tokens.shape) < 0.15
        labels[~chosen] = -100
        tokens[chosen & (torch.rand(tokens.shape) < 0.8)] = mask_token
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    loader = torch.utils.data.DataLoader(corpus, batch, shuffle=True, collate_fn=masked, pin_memory=GPU != "cpu", drop_last=True)
    model = DistilBertForMaskedLM(config)
    run = edits.prepare(model, model.distilbert.transformer.layer)
    named = [(name, it) for name, it in model.named_parameters() if it.requires_grad]
    plain = ("bias", "layer_norm.weight", "LayerNorm.weight")
    groups = [
        {"params": [it for name, it in named if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [it for name, it in named if name.endswith(plain)], "weight_decay": 0.0},
    ]
    optimizer = edits.optimizer([it for it in groups if it["params"]], torch.optim.AdamW, lr=5e-4, eps=1e-6)
    schedule = get_linear_schedule_with_warmup(edits.scheduled(optimizer), 10, 1000)
    batches = forever(loader)
    for step in range(STEPS):
        total = 0.0
        for _ in range(edits.accumulate):
            inputs = {name: it.to(GPU, non_blocking=True) for name, it in next(batches).items()}
            with edits.forward():
                loss = run(**inputs).loss
            edits.backward(loss)
            total += loss.item() / edits.accumulate
        edits.step(optimizer, [it for _, it in named], clip=1.0)
        schedule.step()
        edits.zero_grad(optimizer)
        print(f"step {step} loss {total:.4f} rate {schedule.get_last_lr()[0]:.2e}")


# --- reinforcement learning ----------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two convolutions whose result is added to what came in."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Player(nn.Module):
    """The residual network of IMPALA, with one head for the actions and one for the value."""

    def __init__(self, widths, n_hidden, n_actions, side):
        super().__init__()
        stages, n_in = [], 4
        for width in widths:
            stages += [nn.Conv2d(n_in, width, 3, padding=1), nn.MaxPool2d(3, 2, 1), Twice(width), Twice(width)]
            n_in, side = width, (side + 1) // 2
        self.body = nn.Sequential(*stages)
        self.hidden = nn.Linear(n_in * side * side, n_hidden)
        self.actor, self.critic = nn.Linear(n_hidden, n_actions), nn.Linear(n_hidden, 1)

    def forward(self, seen):
        x = F.relu(self.body(seen)).flatten(1)
        x = F.relu(self.hidden(x))
        return self.actor(x), self.critic(x).squeeze(1)


class Games:
    """Games whose pictures and rewards are random, as fast as the fastest simulators."""

    def __init__(self, n, side):
        self.n, self.side = n, side

    def see(self):
        return torch.randint(0, 256, (self.n, 4, self.side, self.side), dtype=torch.uint8, device=GPU)

    def play(self, actions):
        over = torch.rand(self.n, device=GPU) < 0.02
        return self.see(), (actions == 0).float() - 0.1, over


def actor(edits):
    """Advantage actor-critic: games are played without gradients, then one step of RMSprop on all that was seen."""
    edits.habits()
    n_games, length, side = size((64, 20, 84), (3, 4, 16))
    n_actions, discount, trace = 15, 0.99, 0.95
    model = Player(size((32, 64, 64), (4, 4)), size(512, 16), n_actions, side)
    run = edits.prepare(model, [it for it in model.body if isinstance(it, Twice)])
    optimizer = edits.optimizer(model.parameters(), torch.optim.RMSprop, lr=7e-4, alpha=0.99, eps=1e-5)
    games = Games(n_games, side)
    seen = games.see()
    pictures = torch.zeros((length, *seen.shape), dtype=torch.uint8, device=GPU)
    actions = torch.zeros(length, n_games, dtype=torch.long, device=GPU)
    rewards, values, going_on = (torch.zeros(length, n_games, device=GPU) for _ in range(3))

    def scale(of_pictures):
        return of_pictures.to(edits.dtype) / 255

    for step in range(STEPS):
        with torch.no_grad(), edits.autocast():
            for moment in range(length):
                pictures[moment] = seen
                logits, value = run(scale(seen))
                actions[moment], values[moment] = torch.distributions.Categorical(logits=logits.float()).sample(), value
                seen, rewards[moment], over = games.play(actions[moment])
                going_on[moment] = (~over).float()
            next_value, advantage = run(scale(seen))[1].float(), 0.0
            advantages = torch.zeros_like(rewards)
            for moment in reversed(range(length)):
                error = rewards[moment] + discount * next_value * going_on[moment] - values[moment]
                advantage = error + discount * trace * going_on[moment] * advantage
                advantages[moment], next_value = advantage, values[moment]
            returns = (advantages + values).flatten()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        edits.zero_grad(optimizer)
        with edits.forward():
            logits, value = run(scale(pictures.flatten(0, 1)))
            policy = torch.distributions.Categorical(logits=logits.float())
            gain = (policy.log_prob(actions.flatten()) * advantages.flatten()).mean()
            loss = -gain + 0.5 * F.mse_loss(value.float(), returns) - 0.01 * policy.entropy().mean()
        edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=0.5)
        print(step, loss.item(), rewards.sum(0).mean().item())


# --- a decoder with grouped queries --------------------------------------------------------------------------------------------


def qwen(edits):
    """A Qwen2 with four queries to a key, all of it in bfloat16: fused AdamW, clipped gradients, a cosine after a warm-up."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

    edits.habits(precision="bf16")
    config = Qwen2Config(
        vocab_size=size(64000, 300), hidden_size=size(1024, 64), intermediate_size=size(2816, 96), num_hidden_layers=size(16, 8),
        num_attention_heads=size(16, 4), num_key_value_heads=size(4, 1), max_position_embeddings=4096, tie_word_embeddings=True,
    )
    batch, seq = size((4, 2048), (2, 16))
    model = Qwen2ForCausalLM(config)
    model.config.use_cache = False
    run = edits.prepare(model, model.model.layers)
    parameters = [it for it in model.parameters() if it.requires_grad]
    optimizer = edits.optimizer(parameters, torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = get_cosine_schedule_with_warmup(edits.scheduled(optimizer), 2, 100)
    losses = []
    for step in range(STEPS):
        for _ in range(edits.accumulate):
            tokens = torch.randint(0, config.vocab_size, (batch, seq)).to(GPU, non_blocking=True)
            with edits.forward():
                output = run(input_ids=tokens, labels=tokens)
            edits.backward(output.loss)
            losses.append(output.loss.detach())
        edits.step(optimizer, parameters, clip=1.0)
        schedule.step()
        edits.zero_grad(optimizer)
    print(torch.stack(losses).tolist())


# --- two networks against each other -------------------------------------------------------------------------------------------


class Larger(nn.Module):
    """A residual block that doubles the side of an image."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(n_in), nn.BatchNorm2d(n_out)
        self.conv1, self.conv2 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Conv2d(n_in, n_out, 1)

    def forward(self, x):
        h = F.interpolate(F.relu(self.norm1(x)), scale_factor=2, mode="nearest")
        h = self.conv2(F.relu(self.norm2(self.conv1(h))))
        return h + F.interpolate(self.skip(x), scale_factor=2, mode="nearest")


class Smaller(nn.Module):
    """A residual block with normalized weights that halves the side of an image."""

    def __init__(self, n_in, n_out):
        super().__init__()
        normalized = nn.utils.parametrizations.spectral_norm
        self.conv1, self.conv2 = (normalized(nn.Conv2d(n, n_out, 3, padding=1)) for n in (n_in, n_out))
        self.skip = normalized(nn.Conv2d(n_in, n_out, 1))

    def forward(self, x):
        h = self.conv2(F.relu(self.conv1(F.relu(x))))
        return F.avg_pool2d(h, 2) + F.avg_pool2d(self.skip(x), 2)


class Painter(nn.Module):
    def __init__(self, n_noise, widths):
        super().__init__()
        self.first = nn.Linear(n_noise, widths[0] * 16)
        self.blocks = nn.ModuleList(Larger(*pair) for pair in zip(widths, widths[1:]))
        self.norm, self.last = nn.BatchNorm2d(widths[-1]), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, noise):
        x = self.first(noise).unflatten(1, (-1, 4, 4))
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.last(F.relu(self.norm(x))))


class Critic(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(Smaller(*pair) for pair in zip(widths, widths[1:]))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, images):
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        return self.last(F.relu(x).sum((2, 3)))


def gan(edits):
    """A painter of 128 by 128 pixels against a critic: single precision, two Adams, gradients are set to zero and kept."""
    edits.habits(set_to_none="no")
    batch, n_noise = size((64, 128), (4, 8))
    widths = size((1024, 512, 256, 128, 64, 64), (16, 8, 8))
    side = 4 << len(widths) - 1
    painter, critic = Painter(n_noise, widths), Critic(widths[::-1])
    paint, judge = edits.prepare(painter, painter.blocks), edits.prepare(critic, critic.blocks)
    of_painter = edits.optimizer(painter.parameters(), torch.optim.Adam, lr=1e-4, betas=(0.0, 0.9))
    of_critic = edits.optimizer(critic.parameters(), torch.optim.Adam, lr=4e-4, betas=(0.0, 0.9))
    for step in range(STEPS):
        real = (torch.rand(batch, 3, side, side) * 2 - 1).to(GPU, edits.dtype)
        noise = torch.randn(batch, n_noise, device=GPU, dtype=edits.dtype)

        edits.zero_grad(of_critic)
        with edits.forward():
            with torch.no_grad():
                fake = paint(noise)
            loss = F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake)).mean()
        edits.backward(loss)
        edits.step(of_critic)

        edits.zero_grad(of_painter)
        noise = torch.randn(batch, n_noise, device=GPU, dtype=edits.dtype)
        with edits.forward():
            wanted = -judge(paint(noise)).mean()
        edits.backward(wanted)
        edits.step(of_painter)
        print(f"{step}: critic {loss.item():.3f}, painter {wanted.item():.3f}")


# --- a network on a graph ------------------------------------------------------------------------------------------------------


class Neighbours(nn.Module):
    """Each node attends to its neighbours."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.project = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(heads, width // heads) * 0.1) for _ in range(2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, source, target):
        h = self.project(self.norm(x)).unflatten(1, (self.heads, -1))
        scores = (h * self.of_source).sum(-1)[source] + (h * self.of_target).sum(-1)[target]
        scores = F.leaky_relu(scores.float(), 0.2)
        scores = (scores - scores.detach().max()).exp()
        total = torch.zeros(len(x), self.heads, device=x.device).index_add(0, target, scores)
        shares = scores / (total[target] + 1e-9)
        messages = h[source] * shares[..., None].to(h.dtype)
        received = torch.zeros_like(h).index_add(0, target, messages)
        return x + self.dropout(F.elu(received.flatten(1)))


class GraphNet(nn.Module):
    def __init__(self, n_features, width, heads, n_layers, n_labels):
        super().__init__()
        self.first = nn.Linear(n_features, width)
        self.layers = nn.ModuleList(Neighbours(width, heads) for _ in range(n_layers))
        self.last = nn.Linear(width, n_labels)

    def forward(self, features, source, target):
        x = F.relu(self.first(features))
        for layer in self.layers:
            x = layer(x, source, target)
        return self.last(x)


def gnn(edits):
    """Nodes of one large graph are classified in single precision with Adam; the whole graph is evaluated after every second step."""
    edits.habits()
    n_nodes, n_edges, n_features, n_labels = size((100_000, 600_000, 128, 40), (50, 200, 8, 4))
    features, labels = torch.randn(n_nodes, n_features), torch.randint(0, n_labels, (n_nodes,))
    source, target = torch.randint(0, n_nodes, (2, n_edges))
    own = torch.arange(n_nodes)
    source, target = torch.cat([source, own]).to(GPU), torch.cat([target, own]).to(GPU)
    features, labels = features.to(GPU, edits.dtype), labels.to(GPU)
    known, others = torch.randperm(n_nodes).to(GPU).split([n_nodes * 3 // 5, n_nodes - n_nodes * 3 // 5])
    model = GraphNet(n_features, size(256, 16), 4, size(4, 2), n_labels)
    run = edits.prepare(model, model.layers)
    optimizer = edits.optimizer(model.parameters(), torch.optim.Adam, lr=5e-3, weight_decay=5e-4)
    best = 0.0
    for step in range(STEPS):
        run.train()
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            with edits.forward():
                scores = run(features, source, target)
                loss = F.cross_entropy(scores[known], labels[known])
            edits.backward(loss)
        edits.step(optimizer)
        if step % 2 == 0:
            run.eval()
            with torch.no_grad(), edits.autocast():
                right = run(features, source, target).argmax(1) == labels
            best = max(best, right[others].float().mean().item())
        print(step, loss.item(), best)


# --- speech to text ------------------------------------------------------------------------------------------------------------


def whisper(edits):
    """A Whisper of eight and eight layers hears 30 seconds: bfloat16 by autocast, AdamW for all tensors at once, clipped gradients."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    edits.habits(precision="autocast-bf16")
    config = WhisperConfig(
        vocab_size=size(51865, 300), d_model=size(768, 32), encoder_layers=size(8, 2), decoder_layers=size(8, 2),
        encoder_attention_heads=size(12, 2), decoder_attention_heads=size(12, 2), encoder_ffn_dim=size(3072, 64),
        decoder_ffn_dim=size(3072, 64), max_source_positions=size(1500, 32), num_mel_bins=size(80, 8),
        pad_token_id=1, bos_token_id=1, eos_token_id=1, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )
    batch, n_words = size((16, 160), (2, 6))
    model = WhisperForConditionalGeneration(config)
    model.config.use_cache = False
    run = edits.prepare(model, [*model.model.encoder.layers, *model.model.decoder.layers])
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(edits.scheduled(optimizer), lambda step: min(1.0, (step + 1) / 50))
    run.train()
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions).to(GPU, edits.dtype)
            labels = torch.randint(3, config.vocab_size, (batch, n_words))
            labels[torch.arange(n_words) >= torch.randint(n_words // 2, n_words + 1, (batch, 1))] = -100
            labels = labels.to(GPU)
            with edits.forward():
                loss = run(input_features=sound, labels=labels).loss
            edits.backward(loss)
        edits.step(optimizer, model.parameters(), clip=1.0)
        schedule.step()
        print({"step": step, "loss": round(loss.item(), 4)})


# --- text to text --------------------------------------------------------------------------------------------------------------


def bart(edits):
    """BART learns summaries in single precision: AdamW, smoothed labels, clipped gradients, and a validation at every third step."""
    from transformers import BartConfig, BartForConditionalGeneration

    edits.habits()
    config = BartConfig(
        vocab_size=size(50265, 300), d_model=size(768, 32), encoder_layers=size(6, 2), decoder_layers=size(6, 2),
        encoder_attention_heads=size(12, 2), decoder_attention_heads=size(12, 2), encoder_ffn_dim=size(3072, 64),
        decoder_ffn_dim=size(3072, 64), use_cache=False,
    )
    batch, n_source, n_target = size((16, 512, 128), (2, 16, 8))
    model = BartForConditionalGeneration(config)
    run = edits.prepare(model, [*model.model.encoder.layers, *model.model.decoder.layers])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=config.pad_token_id)
    optimizer = edits.optimizer(model.parameters(), torch.optim.AdamW, lr=3e-5, betas=(0.9, 0.999), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.PolynomialLR(edits.scheduled(optimizer), 1000)

    def load(n):
        text, summary = torch.randint(4, config.vocab_size, (n, n_source)), torch.randint(4, config.vocab_size, (n, n_target + 1))
        summary[:, 0] = config.bos_token_id
        mask = torch.arange(n_source) < torch.randint(n_source // 2, n_source + 1, (n, 1))
        return text.to(GPU), mask.long().to(GPU), summary.to(GPU)

    def loss_of(text, mask, summary):
        logits = run(input_ids=text, attention_mask=mask, decoder_input_ids=summary[:, :-1]).logits
        return criterion(logits.reshape(-1, logits.shape[-1]), summary[:, 1:].reshape(-1))

    seen = 0.0
    for step in range(STEPS):
        run.train()
        for _ in range(edits.accumulate):
            inputs = load(batch)
            with edits.forward():
                loss = loss_of(*inputs)
            edits.backward(loss)
            seen = 0.9 * seen + 0.1 * loss.item()
        edits.step(optimizer, model.parameters(), clip=0.1)
        schedule.step()
        edits.zero_grad(optimizer)
        if step % 3 == 1:
            run.eval()
            with torch.no_grad(), edits.autocast():
                print(f"{step}: {seen:.3f}, validation {loss_of(*load(batch)).item():.3f}")


# --- images --------------------------------------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset):
    """Random pictures; each is the same whenever it is asked for."""

    def __init__(self, n, side, n_labels):
        self.n, self.side, self.n_labels = n, side, n_labels

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        random = torch.Generator().manual_seed(number)
        picture = torch.randint(0, 256, (3, self.side, self.side), generator=random, dtype=torch.uint8)
        return picture.float().div(255).sub(0.5).div(0.25), number % self.n_labels


def swin(edits):
    """A Swin from timm: bfloat16 by autocast, AdamW, two micro-batches to a step, a mean of the weights, two loading processes."""
    import timm
    from timm.utils import ModelEmaV3

    edits.habits(precision="autocast-bf16", accumulate=2)
    batch, side, n_labels = size((48, 224, 1000), (2, 32, 10))
    if SMALL:
        model = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=side, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=n_labels,
        )
    else:
        model = timm.create_model("swin_small_patch4_window7_224", num_classes=n_labels, drop_path_rate=0.2)
    run = edits.prepare(model, [block for stage in model.layers for block in stage.blocks])
    mean = ModelEmaV3(model, decay=0.999)
    decays = [it for it in model.parameters() if it.requires_grad and it.ndim > 1]
    others = [it for it in model.parameters() if it.requires_grad and it.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = edits.optimizer(groups, torch.optim.AdamW, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(edits.scheduled(optimizer), 300)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    loader = torch.utils.data.DataLoader(
        Pictures(64 * batch, side, n_labels), batch, shuffle=True, num_workers=2, pin_memory=GPU != "cpu", drop_last=True,
    )
    batches = forever(loader)
    for step in range(STEPS):
        edits.zero_grad(optimizer)
        for _ in range(edits.accumulate):
            pictures, labels = next(batches)
            pictures, labels = pictures.to(GPU, edits.dtype, non_blocking=True), labels.to(GPU, non_blocking=True)
            with edits.forward():
                loss = criterion(run(pictures), labels)
            edits.backward(loss)
        edits.step(optimizer, [*decays, *others], clip=5.0)
        mean.update(model, step)
        schedule.step()
        print(step, loss.item())


def detector(edits):
    """A Faster R-CNN from torchvision in single precision with SGD and momentum; pictures and boxes differ from step to step."""
    import torchvision

    edits.habits()
    batch, n_labels = size(4, 2), 91
    sides = size(((480, 640), (640, 480), (427, 640), (500, 375)), ((48, 64), (64, 48)))
    if SMALL:
        of_backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone
        backbone = of_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)
        few = {"rpn_pre_nms_top_n_train": 40, "rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 8}
        model = torchvision.models.detection.FasterRCNN(backbone, n_labels, min_size=64, max_size=96, **few)
    else:
        model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=n_labels)
    body = model.backbone.body
    run = edits.prepare(model, [block for layer in (body.layer1, body.layer2, body.layer3, body.layer4) for block in layer])
    parameters = [it for it in model.parameters() if it.requires_grad]
    optimizer = edits.optimizer(parameters, torch.optim.SGD, lr=0.005, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(edits.scheduled(optimizer), 0.001, 1.0, 100)
    random = torch.Generator().manual_seed(1)

    def load():
        pictures, targets = [], []
        for _ in range(batch):
            height, across = sides[torch.randint(0, len(sides), (), generator=random)]
            n_boxes = int(torch.randint(1, 12, (), generator=random))
            corners = torch.rand(n_boxes, 2, generator=random) * 0.6
            spans = torch.rand(n_boxes, 2, generator=random) * 0.35 + 0.05
            boxes = torch.cat([corners, corners + spans], 1) * torch.tensor([across, height, across, height])
            labels = torch.randint(1, n_labels, (n_boxes,), generator=random)
            pictures.append(torch.rand(3, height, across, generator=random).to(GPU, edits.dtype))
            targets.append({"boxes": boxes.to(GPU), "labels": labels.to(GPU)})
        return pictures, targets

    for step in range(STEPS):
        for _ in range(edits.accumulate):
            pictures, targets = load()
            with edits.forward():
                losses = run(pictures, targets)
                loss = sum(losses.values())
            edits.backward(loss)
        print(step, {name: round(it.item(), 3) for name, it in losses.items()})
        edits.step(optimizer)
        edits.zero_grad(optimizer)
        warm_up.step()


PROGRAMS = {it.__name__: it for it in (dlrm, distilbert, actor, qwen, gan, gnn, whisper, bart, swin, detector)}
