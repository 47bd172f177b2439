#!/usr/bin/env python3
"""Records frameworks with the recipes of docs/RECIPES.md, and holds each trace against what the framework says of itself.

usage: [ONLY=WORD,...] recipes.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`; WORK keeps programs and traces (default: a temporary folder). Each recipe is one small program
that knows nothing of gputrace and ends by printing what its framework counted: PyTorch's `memory_stats`, XLA's `memory_stats`, CuPy's
`total_bytes`. The trace must say the same, to the byte. A framework that is not installed is a SKIP; none of them comes with PyTorch:
accelerate, transformers, lightning, torch_geometric, deepspeed (its wheel is pure Python; with it hjson, pydantic and what pydantic needs), jax,
flax, optax, cupy, ipykernel and nbclient, ray (its wheel without `ray/jars`, and click, jsonschema, msgpack, protobuf, PyYAML). LAUNCHER=target/release/fake-cuda runs it without a GPU, where no kernel runs: what is counted is right there too.
PASS, FAIL and SKIP lines; exit status 0 only without FAIL. One GPU, less than three minutes.
"""
import glob, importlib.util, json, os, shlex, subprocess, sys, tempfile, textwrap, time
from concurrent.futures import ThreadPoolExecutor

FOLDER = os.path.abspath(sys.argv[1])
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
GPUTRACE = os.path.join(FOLDER, "gputrace")
# PyTorch's own names, and ours.
TORCH = {
    "allocation.all.allocated": "allocations",
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "requested_bytes.all.peak": "peak_requested_bytes",
    "num_device_alloc": "device_allocs",
    "num_ooms": "ooms",
}  # fmt: skip

# What the programs import: it says what was counted, and remembers peaks that a framework resets.
TOLD = """
import json, os, sys
resets = []

def say(**what):
    print("TOLD", json.dumps({"pid": os.getpid(), **what}), flush=True)

def torch_stats():
    import torch
    torch.cuda.synchronize()
    stats = dict(torch.cuda.memory_stats())
    for name in stats:
        if name.endswith(".peak"):
            stats[name] = max([stats[name]] + [earlier.get(name, 0) for earlier in resets])
    say(torch={name: stats[name] for name in NAMES})

def watch_resets():
    import torch
    reset = torch.cuda.memory.reset_peak_memory_stats
    def remembering(*arguments, **options):
        resets.append(dict(torch.cuda.memory_stats()))
        return reset(*arguments, **options)
    torch.cuda.memory.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats = remembering
"""

# On the fake device no thread but those that set a device can pin memory, and cuBLAS has no
# kernels for half precision.
TOLD_OF_THIS_RUN = f"NAMES, REAL = {sorted(TORCH)}, {not LAUNCHER}\n{TOLD}"

MODEL = """
import told, torch; told.watch_resets()
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self, width=1024, depth=4):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
        self.layers, self.head = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.nn.Linear(width, 1)
    def forward(self, x):
        return self.head(self.layers(x)).square().mean()
class Batches(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, index): return torch.randn(64 + 64 * (index // 8), 1024)
"""

PLAIN = """
from model import *
if __name__ == "__main__":
    model = Model().cuda(); optimizer = torch.optim.AdamW(model.parameters())
    for x in torch.utils.data.DataLoader(Batches(), batch_size=8, num_workers=2, pin_memory=told.REAL):
        model(x.cuda(non_blocking=True)).backward(); optimizer.step(); optimizer.zero_grad()
    told.torch_stats()
"""

TORCHRUN = """
from model import *
import os, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); dist.init_process_group("nccl")
model = Model().cuda(); optimizer = torch.optim.AdamW(model.parameters())
for x in torch.utils.data.DataLoader(Batches(), batch_size=8):
    model(x.cuda()).backward()
    for parameter in model.parameters(): dist.all_reduce(parameter.grad)
    optimizer.step(); optimizer.zero_grad()
told.torch_stats(); dist.destroy_process_group()
"""

SPAWN = """
from model import *
def work(rank):
    model = Model().cuda(rank); optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in torch.utils.data.DataLoader(Batches(), batch_size=8):
        model(x.cuda(rank)).backward(); optimizer.step(); optimizer.zero_grad()
    told.torch_stats()
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
"""

ACCELERATE = """
from model import *
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16" if told.REAL else "no", gradient_accumulation_steps=2)
model = Model(); loader = torch.utils.data.DataLoader(Batches(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for x in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x)); optimizer.step(); optimizer.zero_grad()
told.torch_stats()
"""

TRAINER = """
import told, torch; told.watch_resets()
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        tokens = torch.arange(index, index + 256) % 1000
        return {"input_ids": tokens, "labels": tokens}
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=256, n_embd=512, n_layer=4, n_head=8))
arguments = TrainingArguments(output_dir="trainer", max_steps=6, per_device_train_batch_size=4, bf16=told.REAL, report_to="none",
                              save_strategy="no", logging_strategy="no", disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=Texts()).train()
told.torch_stats()
"""

LIGHTNING = """
from model import *
import lightning
class Module(lightning.LightningModule):
    def __init__(self): super().__init__(); self.model = Model()
    def training_step(self, batch, index): return self.model(batch)
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
trainer = lightning.Trainer(accelerator="gpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=8))
told.torch_stats()
"""

GEOMETRIC = """
import told, torch; told.watch_resets()
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
nodes, width = 20000, 128
graph = Data(x=torch.randn(nodes, width), edge_index=torch.stack([torch.arange(10 * nodes) % nodes, torch.arange(10 * nodes) * 7 % nodes])).to("cuda")
one, two = GCNConv(width, 256).cuda(), GATConv(256, 16, heads=4).cuda()
optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
for _ in range(5):
    two(one(graph.x, graph.edge_index).relu(), graph.edge_index).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
told.torch_stats()
"""

DEEPSPEED = """
from model import *
import deepspeed
half = torch.bfloat16 if told.REAL else torch.float32
model = Model().to(half); config = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": told.REAL}, "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
for x in torch.utils.data.DataLoader(Batches(), batch_size=8):
    engine.backward(engine(x.to(engine.device, half))); engine.step()
told.torch_stats(); torch.distributed.destroy_process_group()
"""

# A worker of Ray's says what it counted by what it returns: its output comes when Ray gets to it.
RAY = """
import contextlib, io, json, os, sys
import ray

@ray.remote(num_gpus=1)
class Worker:
    def train(self):
        from model import Batches, Model, told, torch
        model = Model().cuda(); optimizer = torch.optim.AdamW(model.parameters())
        for x in torch.utils.data.DataLoader(Batches(), batch_size=8):
            model(x.cuda()).backward(); optimizer.step(); optimizer.zero_grad()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            told.torch_stats()
        return said.getvalue()

# Given here, or to all that Ray starts.
given = {name: os.environ[f"WORKERS_{name}"] for name in ["LD_PRELOAD", "GPUTRACE_OUTPUT"] if f"WORKERS_{name}" in os.environ}
environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), **given}
ray.init(num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
print(ray.get(Worker.remote().train.remote()), flush=True)
ray.shutdown()
"""

# The kernel has the library by its own specification, the program that asks it has not.
JUPYTER = """
import json, os, sys
import nbformat
from nbclient import NotebookClient

specification = os.path.join(os.environ["JUPYTER_PATH"], "kernels", "recorded")
os.makedirs(specification, exist_ok=True)
with open(os.path.join(specification, "kernel.json"), "w") as file:
    json.dump({"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "recorded", "language": "python",
               "env": {name: os.environ[f"WORKERS_{name}"] for name in ["LD_PRELOAD", "GPUTRACE_OUTPUT"]}}, file)
cells = [
    "from model import *\\nmodel = Model().cuda(); optimizer = torch.optim.AdamW(model.parameters())",
    "def step(x):\\n    model(x.cuda()).backward(); optimizer.step(); optimizer.zero_grad()",
    "for x in torch.utils.data.DataLoader(Batches(), batch_size=8):\\n    step(x)",
    "told.torch_stats()",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, kernel_name="recorded", timeout=120).execute()
print("".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs), flush=True)
"""

FLAX = """
import told, jax, jax.numpy as jnp, optax, flax.linen as nn
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4): x = nn.relu(nn.Dense(2048)(x))
        return nn.Dense(1)(x)
model, x = Model(), jax.random.normal(jax.random.PRNGKey(0), (4096, 1024))
parameters = model.init(jax.random.PRNGKey(1), x); optimizer = optax.adam(1e-3); state = optimizer.init(parameters)
@jax.jit
def step(parameters, state):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(parameters)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(parameters, updates), state, loss
for _ in range(6): parameters, state, loss = step(parameters, state)
loss.block_until_ready()
told.say(jax=jax.local_devices()[0].memory_stats())
"""

CUPY = """
import told, cupy
a = cupy.arange(1 << 24, dtype=cupy.float32).reshape(4096, 4096); total = cupy.zeros_like(a)
for n in range(8): total += cupy.sin(a * n)[:, : 4096 - n * 16].sum()
cupy.cuda.Device().synchronize(); pool = cupy.get_default_memory_pool()
told.say(cupy={"total": pool.total_bytes(), "used": pool.used_bytes()})
"""


def script(name, module):
    """What a package installs for the command line: beside Python, or where PYTHONPATH points; else its module."""
    folders = [os.path.dirname(sys.executable)] + [os.path.join(path, "bin") for path in sys.path]
    found = [os.path.join(folder, name) for folder in folders if os.path.exists(os.path.join(folder, name))]
    return [sys.executable, *(found[:1] or ["-m", module])]


def python(program): return [sys.executable, program]


# Name, modules, program, the command behind `gputrace record -o ... --`, environment, what to compare. Without a command, the two
# variables of the recipe are given to the program in place of `record`.
RECIPES = [
    ("DataLoader workers", "torch", PLAIN, python, {}, "torch"),
    ("torchrun", "torch", TORCHRUN, lambda it: script("torchrun", "torch.distributed.run") + ["--nproc-per-node", "1", it], {}, "torch"),
    ("torch.multiprocessing.spawn", "torch", SPAWN, python, {}, "torch"),
    ("accelerate launch", "torch accelerate", ACCELERATE,
     lambda it: script("accelerate", "accelerate.commands.accelerate_cli") + ["launch", it], {}, "torch"),
    ("transformers Trainer", "torch transformers accelerate", TRAINER, python, {}, "torch"),
    ("Lightning", "torch lightning", LIGHTNING, python, {}, "torch"),
    ("torch_geometric", "torch torch_geometric", GEOMETRIC, python, {}, "torch"),
    ("DeepSpeed", "torch deepspeed", DEEPSPEED,
     lambda it: script("deepspeed", "deepspeed.launcher.runner") + ["--num_gpus", "1", "--master_port", "29517", it], {"DS_SKIP_CUDA_CHECK": "1"}, "torch"),
    ("Ray, recorded whole", "torch ray", RAY, python, {"RAY_USAGE_STATS_ENABLED": "0"}, "torch"),
    ("Ray, its workers alone", "torch ray", RAY, None, {"RAY_USAGE_STATS_ENABLED": "0"}, "torch"),
    ("Jupyter", "torch ipykernel nbclient", JUPYTER, None, {"JUPYTER_PATH": "jupyter"}, "torch"),
    ("CuPy", "cupy", CUPY, python, {}, "cupy"),
    ("flax, memory as it is needed", "jax flax optax", FLAX, python, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "jax"),
    ("flax, as it comes", "jax flax optax", FLAX, python, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, "jax"),
]  # fmt: skip


def slug(name): return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def record(recipe):
    name, _, program, command, environment, _ = recipe
    folder = os.path.join(WORK, slug(name))
    os.makedirs(folder, exist_ok=True)
    for file, text in [("told.py", TOLD_OF_THIS_RUN), ("model.py", MODEL), ("train.py", program)]:
        with open(os.path.join(folder, file), "w") as out: out.write(textwrap.dedent(text))
    for old in glob.glob(os.path.join(folder, "*.gtr")): os.remove(old)
    began = time.time()
    output = os.path.join(folder, "%p.gtr")
    if command:
        line = [GPUTRACE, "record", "-o", output, "--", *command("train.py")]
    else:
        line = python("train.py")
        environment = {**environment, "WORKERS_LD_PRELOAD": os.path.join(FOLDER, "libgputrace.so"), "WORKERS_GPUTRACE_OUTPUT": output}
    try:
        run = subprocess.run([*LAUNCHER, *line], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=150)
        status, out, error = run.returncode, run.stdout, run.stderr
    except subprocess.TimeoutExpired as ended:
        status, out, error = "none after 150 s", str(ended.stdout or ""), str(ended.stderr or "")
    with open(os.path.join(folder, "said"), "w") as file: file.write(out + error)
    told = [json.loads(line.split("TOLD ", 1)[1]) for line in out.splitlines() if "TOLD {" in line]
    return name, recipe[-1], folder, status, told, error, time.time() - began


def summary(folder):
    traces = sorted(glob.glob(os.path.join(folder, "*.gtr")))
    if not traces: return []
    asked = subprocess.run([GPUTRACE, "summary", "--json", *traces], capture_output=True, text=True)
    return json.loads(asked.stdout or '{"processes": []}')["processes"]


def differences(kind, told, process):
    """What the framework says and the trace does not."""
    device = process["devices"][0]
    owners = {row["owner"]: row for row in device["owners"]}
    if kind == "torch":
        pairs = [(name, told["torch"][name], device["torch"][ours]) for name, ours in TORCH.items()]
    elif kind == "cupy":
        pairs = [("total_bytes", told["cupy"]["total"], owners.get("CuPy", {}).get("peak_bytes"))]
    else:
        pairs = [("pool_bytes", told["jax"]["peak_pool_bytes"], owners.get("JAX/XLA", {}).get("peak_bytes"))]
    return [f"{name} {theirs:,}, in the trace {ours}" for name, theirs, ours in pairs if theirs != ours], pairs


def judge(result):
    name, kind, folder, status, told, error, seconds = result
    processes = summary(folder)
    if status != 0 or not told:
        return "FAIL", f"{name}: ended with {status}: {error[-600:]}"
    mine = [process for process in processes if process["pid"] == told[0]["pid"]]
    if not mine:
        return "FAIL", f"{name}: process {told[0]['pid']} has no trace among {[it['pid'] for it in processes]}: {error[-300:]}"
    process = mine[0]
    others = [it["pid"] for it in processes if it is not process]
    try:
        wrong, pairs = differences(kind, told[0], process)
    except (KeyError, IndexError) as missing:
        owners = [(row["owner"], row["peak_bytes"]) for device in process["devices"] for row in device["owners"]]
        return "FAIL", f"{name}: no {missing} in the trace, which has {owners}; told {told[0]}"
    if process["lost_events"] or not process["complete"] or process["damage"]:
        wrong.append(f"lost {process['lost_events']}, complete {process['complete']}, {process['damage']}")
    if others:
        wrong.append(f"a second trace: of {others}")
    owners = ", ".join(f"{row['owner']} {row['peak_bytes']:,}" for row in process["devices"][0]["owners"])
    if wrong:
        return "FAIL", f"{name}: {'; '.join(wrong)} (owners: {owners}; told {told[0]})"
    same = ", ".join(f"{name} {theirs:,}" for name, theirs, _ in pairs)
    return "PASS", f"{name}, {seconds:.0f} s: {same}"


def main():
    wanted = [word.lower() for word in os.environ.get("ONLY", "").split(",") if word]
    recipes = [it for it in RECIPES if not wanted or any(word in it[0].lower() for word in wanted)]
    lacking = lambda it: [module for module in it[1].split() if importlib.util.find_spec(module) is None]
    verdicts = [("SKIP", f"{it[0]}: {', '.join(lacking(it))} not installed") for it in recipes if lacking(it)]
    for verdict in verdicts: print(*verdict, sep="  ", flush=True)
    ready = [it for it in recipes if not lacking(it)]
    # What takes most of the card by itself comes last, alone.
    together, alone = [it for it in ready if it[-1] != "jax"], [it for it in ready if it[-1] == "jax"]
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(record, together):
            verdicts.append(judge(result)); print(*verdicts[-1], sep="  ", flush=True)
    for recipe in alone:
        verdicts.append(judge(record(recipe))); print(*verdicts[-1], sep="  ", flush=True)
    kinds = [verdict for verdict, _ in verdicts]
    print(f"{kinds.count('PASS')} passed, {kinds.count('FAIL')} failed, {kinds.count('SKIP')} skipped; kept in {WORK}")
    sys.exit("FAIL" in kinds or not any(kind == "PASS" for kind in kinds))


main()
