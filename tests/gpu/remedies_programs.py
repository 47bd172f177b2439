"""The programs of remedies.py. Each has one fault with memory; the remedied program stands in the same text.

A line that begins with `-` is only in the program, one that begins with `+` only in the remedied one. `causes` are the names that the
verdict may give to the planted fault, the first the best. `remedy` are variables of the remedied run; for PyTorch's allocator those that
the verdict exports are taken instead. `measure` is the figure that a promise is of where its words leave that open: what PyTorch
allocated or reserved; `outside` if the memory is not PyTorch's. `fails`: the program runs out of memory, under a limit of its own.
`real`: what it needs is not on the fake device.
"""

PROGRAMS = {}


def program(name, *causes, source, **more):
    PROGRAMS[name] = {"causes": causes, "source": source, **more}


program("ema_copy", "a second copy of the weights", source='''
import copy, torch, told
from torch import nn

model = nn.Sequential(*[nn.Linear(3072, 3072) for _ in range(10)]).cuda()
-average = copy.deepcopy(model)
+average = copy.deepcopy(model).cpu()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(12):
    x = torch.randn(256, 3072, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast.to(slow.device), 0.01)
''')

program("checkpoint_on_gpu", "checkpoint loaded onto the GPU and kept", source='''
import torch, told
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(2560, 2560 + 32 * (n % 2)) if n % 2 == 0 else nn.Linear(2560, 2560) for n in range(16)]).cuda()

def resume(path):
    model = build()
-    saved = torch.load(path)
+    saved = torch.load(path, map_location="cpu")
    model.load_state_dict(saved["model"])
    return model, saved

torch.save({"model": build().state_dict(), "epoch": 3}, "last.pt")
model, saved = resume("last.pt")
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for epoch in range(saved["epoch"], saved["epoch"] + 8):
    loss = model(torch.randn(128, 2560, device="cuda")).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
''')

program("foreach_adamw", "`foreach` temporaries", source='''
import torch, told
from torch import nn

blocks = [nn.Sequential(nn.Linear(2048, 6144), nn.ReLU(), nn.Linear(6144, 2048)) for _ in range(6)]
model = nn.Sequential(*blocks).cuda()
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
+optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
for step in range(10):
    x = torch.randn(64, 2048, device="cuda")
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
''')

program("naive_attention", "attention scores fully materialized", source='''
import math, torch, told
from torch import nn
from torch.nn import functional as F

class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
-        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
-        y = scores.softmax(-1) @ v
+        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

layers = nn.ModuleList(SelfAttention(512, 8) for _ in range(3)).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(4, 2048, 512, device="cuda")
    for layer in layers:
        x = x + layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("retained_state", "graphs kept after their backward passes", source='''
import torch, told
from torch import nn

cell, head = nn.GRU(512, 1024, num_layers=2, batch_first=True).cuda(), nn.Linear(1024, 512).cuda()
parameters = [*cell.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1e-3)
for sequence in range(4):
    state = torch.zeros(2, 32, 1024, device="cuda")
    for chunk in range(10):
        x = torch.randn(32, 128, 512, device="cuda")
        y, state = cell(x, state)
        loss = (head(y) - x).square().mean()
-        loss.backward(retain_graph=True)
+        loss.backward(); state = state.detach()
    del y, loss, state
    optimizer.step()
    optimizer.zero_grad()
''')

program("evaluation_total", "activations of a loop kept by its graph", source='''
import torch, told
from torch import nn

model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(1024, 1024), nn.GELU())], nn.Linear(1024, 10)).cuda()
optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()

+@torch.no_grad()
def evaluate():
    model.eval()
    total = 0.0
    for _ in range(16):
        x, y = torch.randn(4096, 1024, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
        total = total + criterion(model(x), y)
    return total.item() / 16

for epoch in range(4):
    model.train()
    for _ in range(6):
        x, y = torch.randn(512, 1024, device="cuda"), torch.zeros(512, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    evaluate()
''')

program("inference_with_graph", "activations kept for a backward pass that never comes", source='''
import torch, told
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(14))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

encoder = Encoder().cuda().eval()

+@torch.inference_mode()
def embed(batch):
    return encoder(batch).mean(dim=1).detach().cpu()

vectors = []
for request in range(12):
    vectors.append(embed(torch.randn(16, 512, 2048, device="cuda")))
''')

program("one_backward", "one graph for a whole loop", source='''
import torch, told
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
-    total = 0
    for micro in range(8):
        images = torch.randn(4, 3, 256, 256, device="cuda")
        loss = (model(images) - images).square().mean() / 8
-        total = total + loss
-    total.backward()
+        loss.backward()
    optimizer.step()
''')

program("zeroed_gradients", "gradients held while nothing is trained", source='''
import torch, told
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(10)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@torch.no_grad()
def validate():
    worst = 0.0
    for _ in range(6):
        worst = max(worst, model(torch.randn(40960, 4096, device="cuda")).mean().item())
    return worst

for epoch in range(3):
    for step in range(5):
        loss = model(torch.randn(64, 4096, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
-        optimizer.zero_grad(set_to_none=False)
+        optimizer.zero_grad(set_to_none=True)
    validate()
''')

program("ddp_buckets", "DDP's buckets beside the gradients", real=True, source='''
import torch, told
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method="file://" + __import__("tempfile").mktemp(), rank=0, world_size=1)
layers = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)]).cuda()
-model = DistributedDataParallel(layers)
+model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    loss = model(torch.randn(64, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
''')

program("predictions_on_gpu", "outputs collected on the GPU until the loop ends", source='''
import torch, told
from torch import nn

net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8192)).cuda().eval()

@torch.no_grad()
def predict(batches):
    found = []
    for _ in range(batches):
        x = torch.randn(2048, 512, device="cuda")
-        found.append(net(x).softmax(dim=-1))
+        found.append(net(x).softmax(dim=-1).cpu())
    return sum(float(part[0, 0]) for part in found)

for split in range(3):
    predict(24)
''')

program("predictions_joined", "outputs collected on the GPU until the loop ends", source='''
import torch, told
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(5000, 256), nn.Linear(256, 2000)

    def forward(self, ids):
        return self.tags(self.words(ids))

@torch.inference_mode()
def run(tagger, n):
    outputs = []
    for _ in range(n):
        ids = torch.zeros(64, 128, dtype=torch.long, device="cuda")
        logits = tagger(ids)
-        outputs.append(logits)
+        outputs.append(logits.cpu())
    return torch.cat(outputs)[:, -1].cpu()

tagger = Tagger().cuda()
for document in range(3):
    run(tagger, 16)
''')

program("autocast_cache", "autocast's cache of converted weights", real=True, source='''
import torch, told
from torch import nn

decoder = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(20)]).cuda().eval()

@torch.no_grad()
def generate(tokens):
    x = torch.randn(8, 4096, device="cuda")
-    with torch.autocast("cuda", dtype=torch.bfloat16):
+    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(tokens):
            x = torch.tanh(decoder(x))
    return x.float().sum().item()

for prompt in range(6):
    generate(10)
''')

program("half_checkpointed", "activation checkpointing of only part of the model", source='''
import torch, told
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

blocks = nn.ModuleList(Block(512) for _ in range(12)).cuda()
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(16, 1024, 512, device="cuda")
    for index, block in enumerate(blocks):
-        if index < 4:
+        if index < 12:
            x = checkpoint(block, x, use_reentrant=False)
        else:
            x = block(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("dataset_on_gpu", "data kept on the GPU", source='''
import torch, told
from torch import nn

-shards = [torch.zeros(8192, 4096, device="cuda") for _ in range(14)]
+shards = [torch.zeros(8192, 4096) for _ in range(14)]
model = nn.Sequential(nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 4096)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for shard in shards:
        for rows in range(0, 8192, 2048):
            batch = shard[rows : rows + 2048].to("cuda")
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
''')

program("all_similarities", "one temporary that dominates the peak", "temporaries of one function", source='''
import torch, told

table = torch.randn(24000, 256, device="cuda")

def neighbours(table):
-    return (table @ table.T).argmax(dim=1)
+    return torch.cat([(part @ table.T).argmax(dim=1) for part in table.chunk(12)])

for _ in range(8):
    nearest = neighbours(table)
''')

program("contrast", "temporaries of one function", source='''
import torch, told

def contrast(images):
    centred = images - images.mean(dim=(2, 3), keepdim=True)
    spread = (centred * centred).mean(dim=(2, 3), keepdim=True).sqrt()
    scaled = centred / (spread + 1e-6)
    return scaled.clamp(-3, 3).abs().amax(dim=(1, 2, 3))

images = torch.randn(64, 3, 1024, 1024, device="cuda")
for _ in range(5):
-    strongest = contrast(images)
+    strongest = torch.cat([contrast(part) for part in images.chunk(16)])
''')

program("stream_per_copy", "a new side stream each time", measure="reserved", source='''
import torch, told

weights = torch.randn(4096, 4096, device="cuda")
+side = torch.cuda.Stream()
for batch in range(14):
-    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = torch.randn(8192, 4096, device="cuda")
        total = x.abs().sum().item()
    del x
    weights.mul_(0.99)
''')

program("side_stream_cache", "a side stream's idle cache", measure="reserved", source='''
import torch, told
from torch import nn

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    raw = torch.zeros(192, 1024, 1024, device="cuda")
    scale = float((raw - raw.mean()).std())
    del raw
side.synchronize()
+torch.cuda.empty_cache()
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(40):
    loss = model(torch.randn(4096, 2048, device="cuda")).square().mean() * (1.0 + 0.0 * (scale == scale))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

GRAPHS = '''
import torch, told
from torch import nn

net = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1024)).cuda().eval()
graphs = {}
+pool = torch.cuda.graph_pool_handle()

@torch.no_grad()
def graph_of(rows):
    if rows not in graphs:
        still = torch.zeros(rows, 1024, device="cuda")
        net(still[:64])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
-        with torch.cuda.graph(graph):
+        with torch.cuda.graph(graph, pool=pool):
            result = net(still)
        graphs[rows] = graph, still, result
    return graphs[rows]

shapes = SHAPES
+for rows in sorted(shapes, reverse=True):
+    graph_of(rows)
for request in range(64):
    graph, still, result = graph_of(shapes[request % len(shapes)])
    graph.replay()
torch.cuda.synchronize()
'''
GRAPH_CAUSE = "a CUDA graph and a private pool for each input shape"
program("graph_per_batch", GRAPH_CAUSE, measure="reserved", source=GRAPHS.replace("SHAPES", "[2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840]"))
program("graph_per_size", GRAPH_CAUSE, measure="reserved", source=GRAPHS.replace("SHAPES", "[512, 1024, 2048, 4096, 8192]"))

program("workspace_per_stream", "one cuBLAS workspace per stream", env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, source='''
import torch, told
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
+one = torch.cuda.Stream()

@torch.no_grad()
def answer(question):
-    stream = torch.cuda.Stream()
+    stream = one
    with torch.cuda.stream(stream):
        reply = model(question)
    stream.synchronize()
    return reply.cpu()

for _ in range(120):
    answer(torch.randn(32, 1024, device="cuda"))
''')

program("varying_lengths", "external fragmentation", "external fragmentation, with room on the card", measure="reserved",
        remedy={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, source='''
import random, torch, told
from torch import nn

random.seed(7)
words, body, head = nn.Embedding(4000, 512), nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]), nn.Linear(512, 4000)
model = nn.Sequential(words, body, head).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(80):
    length = random.randint(40, 400) + 4 * step
    tokens = torch.zeros(24, length, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("user_split_size", "the allocator's own setting", "the allocator's own setting, with room on the card", "external fragmentation", "external fragmentation, with room on the card", measure="reserved",
        env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:24"}, remedy={"PYTORCH_CUDA_ALLOC_CONF": ""}, source='''
import random, torch, told
from torch import nn

random.seed(3)
net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 3, 1)).cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(60):
    height, width = random.randint(280, 760), random.randint(280, 760)
    images = torch.randn(4, 3, height, width, device="cuda")
    loss = (net(images) - images).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
''')

program("user_threshold", "the allocator's own setting", "external fragmentation", "external fragmentation, with room on the card", measure="reserved",
        env={"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.95"}, remedy={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, source='''
import random, torch, told

random.seed(11)
held = []
for step in range(300):
    rows = random.randint(1000, 9000) + 10 * step
    held.append(torch.empty(rows, 2048, device="cuda"))
    scratch = torch.empty(rows // 2, 4096 + 64 * (step % 7), device="cuda")
    held[-1][: scratch.shape[0]].add_(scratch[:, :2048])
    del scratch
    if len(held) > 12:
        held.pop(random.randrange(len(held)))
''')

program("carved_segments", "external fragmentation", "a limit that the program set", fails=True, measure="reserved",
        remedy={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, source='''
import torch, told

told.limit(2.3)
summaries = []
for document in range(5):
    page = torch.zeros(128, 1024, 1024, device="cuda")
    large = float(page[0, 0, 0])
    del page
    # They fill most of the segment that the page left, and the next page does not fit into the rest.
    summaries.append([torch.full((50, 1024, 1024), large, device="cuda") for _ in range(2 if document < 4 else 0)])
''')

program("calibration_buffer", "left idle after its work", source='''
import torch, told
from torch import nn

class Tuner:
    def __init__(self):
        self.model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]).cuda()
        self.samples = None

    def calibrate(self):
        self.samples = torch.zeros(64, 2048, 2048, device="cuda")
        with torch.no_grad():
            for sample in self.samples:
                self.model(sample)
+        self.samples = None

    def train(self):
        optimizer = torch.optim.Adam(self.model.parameters())
        for step in range(60):
            loss = self.model(torch.randn(2048, 2048, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

tuner = Tuner()
tuner.calibrate()
tuner.train()
''')

program("cupy_pool", "another library's idle pool", libraries=["cupy"], outside=True, source='''
import cupy, torch, told
from torch import nn

def statistics():
    parts = [cupy.empty((128, 1024, 1024), dtype=cupy.float32) for _ in range(3)]
    return sum(part.size for part in parts)

n = statistics()
+cupy.get_default_memory_pool().free_all_blocks()
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(60):
    loss = model(torch.randn(2048, 2048, device="cuda")).square().mean() / n
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("retry_in_except", "tensors kept by a caught exception", fails=True, source='''
import torch, told

told.limit(1.9)

def attempt(rows):
    table = torch.zeros(rows, 1024, 1024, device="cuda")
    doubled = torch.zeros(rows, 1024, 1024, device="cuda")
    return float(table[0, 0, 0] + doubled[0, 0, 0])

try:
    attempt(256)
except torch.cuda.OutOfMemoryError:
-    attempt(192)
+    pass
+else:
+    raise SystemExit("the first attempt fits")
+attempt(192)
''')

program("previous_output", "the previous result is held while the next is made", fails=True, source='''
import torch, told
from torch import nn

told.limit(2.2)
layer = nn.Linear(1024, 32768).cuda()
x = torch.randn(10240, 1024, device="cuda")
with torch.no_grad():
    for batch in range(3):
        logits = layer(x)
        best = logits.argmax(dim=-1).cpu()
+        del logits
''')

program("dense_table", "the dense gradient and state of an embedding", source='''
import torch, told
from torch import nn

-rows = 400_000
+rows = 200_000
model = nn.Sequential(nn.Embedding(rows, 256), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    items = torch.randint(0, 200_000, (2048,), device="cuda")
    loss = model(items).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("float_logits", "a large result upcast to float32 (logits)", real=True, source='''
import torch, told
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64000, 512), nn.Linear(512, 64000, bias=False)

    def forward(self, tokens):
        logits = self.head(self.words(tokens))
-        return logits.float()
+        return logits[:, -1:].float()

model = Model().cuda().bfloat16().eval()
with torch.no_grad():
    for request in range(6):
        tokens = torch.zeros(8, 768, dtype=torch.long, device="cuda")
        chosen = model(tokens)[:, -1].argmax(dim=-1).cpu()
''')

program("adam_state", "the optimizer's state, created at its first step", fails=True, source='''
import torch, told
from torch import nn

told.limit(3.0)
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(16)]).cuda()
-optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
+optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    loss = model(torch.randn(32, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("kv_blocks", "preallocated memory (KV cache, pool)", fails=True, source='''
import torch, told
from torch import nn

told.limit(3.0)
-SHARE = 0.8
+SHARE = 0.4

def reserve(layers, bytes_in_all):
    each = int(bytes_in_all * SHARE / layers / 4096 / 4)
    return [torch.empty(each, 4096, device="cuda") for _ in range(layers)]

model = nn.Linear(4096, 16384).cuda()
with torch.no_grad():
    model(torch.zeros(8, 4096, device="cuda"))
cache = reserve(24, 3 << 30)
with torch.no_grad():
    for request in range(3):
        prompt = torch.zeros(6144, 4096, device="cuda")
        model(prompt).amax().item()
''')

program("failed_capture", "no graph can use it", real=True, measure="reserved", source='''
import torch, told
from torch import nn

net = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096)).cuda().eval()
x = torch.randn(8192, 4096, device="cuda")
graph = torch.cuda.CUDAGraph()

@torch.no_grad()
def speed_up():
    net(x[:64])
    try:
        with torch.cuda.graph(graph):
            y = net(x)
            y.abs().max().item()
    except RuntimeError as error:
        print("no graph:", str(error).splitlines()[0])

-speed_up()
with torch.no_grad():
    for _ in range(20):
        net(torch.randn(4096, 4096, device="cuda")).sum().item()
''')

program("double_model", "a model in float64", source='''
import torch, told
from torch import nn

-model = nn.Sequential(nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 1)).cuda().double()
+model = nn.Sequential(nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 1)).cuda().float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kind = next(model.parameters()).dtype
for step in range(6):
    x = torch.zeros(16384, 256, device="cuda", dtype=kind)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
''')

program("emptied_each_step", "`empty_cache` in the loop", measure="reserved", source='''
import torch, told
from torch import nn

model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(15):
    loss = model(torch.randn(8192, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
-    torch.cuda.empty_cache()
''')

# Of what grows, the verdict states how much, and promises nothing.

program("losses_in_list", "outputs or losses kept with their graph", source='''
import torch, told
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
history = []
for step in range(40):
    x = torch.randn(2048, 512, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
-    history.append(model(x).mean())
+    history.append(model(x).mean().item())
''')

program("running_total", "outputs or losses kept with their graph", source='''
import torch, told
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).cuda()
total = 0
for batch in range(50):
    x = torch.randn(2048, 1024, device="cuda")
    loss = model(x).square().mean()
-    total = total + loss
+    total = total + loss.item()
''')

program("hook_history", "tensors kept by a hook of a module", source='''
import torch, told
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()).cuda()
maps = []

def remember(module, inputs, output):
    smooth = output.detach() * 0.5
-    maps.append(smooth)
+    maps.append(smooth.cpu())

model[2].register_forward_hook(remember)
with torch.no_grad():
    for image in range(40):
        model(torch.randn(4, 3, 256, 256, device="cuda"))
''')

program("masks_by_length", "a cache keyed by shape", source='''
import torch, told
from torch import nn

masks = {}

def mask_of(length):
+    if len(masks) > 1:
+        masks.clear()
    if length not in masks:
        masks[length] = torch.ones(length, length, device="cuda").tril()
    return masks[length]

layer = nn.Linear(64, 64).cuda()
with torch.no_grad():
    for step in range(60):
        length = 1024 + 37 * step
        x = torch.zeros(1, length, 64, device="cuda")
        (mask_of(length) @ layer(x)).sum().item()
''')

program("adapters_kept", "models loaded repeatedly, with the old ones kept", source='''
import torch, told
from torch import nn

base = nn.Linear(4096, 4096).cuda()
adapters = {}

def load(name):
+    adapters.clear()
    adapters[name] = nn.ModuleList([nn.Linear(4096, 512, bias=False), nn.Linear(512, 4096, bias=False)]).to("cuda")
    return adapters[name]

with torch.no_grad():
    for tenant in range(30):
        down, up = load(f"tenant {tenant}")
        for request in range(3):
            x = torch.randn(256, 4096, device="cuda")
            (base(x) + up(down(x))).sum().item()
''')

program("lbfgs_history", "history kept by an optimizer", source='''
import torch, told

point = torch.zeros(4 << 20, device="cuda", requires_grad=True)
target = torch.randn(4 << 20, device="cuda")
scale = torch.rand(4 << 20, device="cuda") + 0.1
-optimizer = torch.optim.LBFGS([point], lr=0.1, max_iter=1, history_size=100)
+optimizer = torch.optim.LBFGS([point], lr=0.1, max_iter=1, history_size=4)

def closure():
    optimizer.zero_grad()
    loss = (scale * (point - target) ** 4).sum()
    loss.backward()
    return loss

for step in range(40):
    optimizer.step(closure)
''', real=True)

program("cached_keys", "a cache concatenated at each step (`torch.cat`)", "a tensor that grows by `torch.cat`", source='''
import torch, told
from torch import nn

project = nn.Linear(512, 2 * 4096).cuda()
-cache = torch.empty(16, 0, 8192, device="cuda")
+cache = torch.empty(16, 400, 8192, device="cuda")
with torch.no_grad():
    for position in range(400):
        new = project(torch.randn(16, 1, 512, device="cuda"))
-        cache = torch.cat([cache, new], dim=1)
+        cache[:, position : position + 1] = new
''')

program("node_cycles", "reference cycles", source='''
import gc, torch, told, weakref

gc.set_threshold(400, 10, 10)

class Node:
    def __init__(self, parent):
        self.parent, self.children = parent, []
        self.state = torch.empty(8 << 20, device="cuda")

def search():
    root = Node(None)
    for _ in range(3):
-        root.children.append(Node(root))
+        root.children.append(Node(weakref.proxy(root)))
    return [len(root.children) for _ in range(50)]

kept = []
for step in range(60):
    kept.append([[] for _ in search()])
''')

program("first_tokens", "outputs of one layer kept", source='''
import torch, told
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

encoder, tokens = Encoder().cuda(), []
with torch.no_grad():
    for document in range(60):
        y = encoder(torch.randn(32, 512, 256, device="cuda"))
-        tokens.append(y[:, 0])
+        tokens.append(y[:, 0].clone())
''')
