#!/usr/bin/env python3
"""Compares `gputrace whatif` with the truth: training programs are recorded once, edited, and really run with each edit.

usage: edits.py judge GPUTRACE LIBRARY OUTDIR [PROGRAM...]   predicts, runs, and prints a table; all programs if none is named
       edits.py run PROGRAM EDITS OUT.json                   runs one program with EDITS, a string such as "--optimizer sgd"
       edits.py check [PROGRAM[="EDITS"]...]                 runs programs with all their edits, and says what was done; all if none is named
       edits.py list                                         the programs and their edits

GPUTRACE is the command, LIBRARY is `libgputrace.so`. EDITS are spelled as for `gputrace whatif`. `run` writes what PyTorch says it
had allocated and reserved at most. `judge` asks for all predictions of a program before it runs any edit. It writes to OUTDIR, as
results arrive: table.txt, rows.jsonl, answers.jsonl (the JSON of `whatif`) and, at the end, traces.N.tar. It needs one GPU of
80 GB; with two GPUs it also runs layouts. Cheap programs come first, and as many run at a time as fit into the memory of the GPUs.
Variables: EDITS_PROGRAMS, the file of the programs beside this one, without .py (edits_programs; edits_programs2 to edits_programs14
have ten others each); JOBS, how many programs run at a time at most (4 for each GPU); EDITS_SECONDS, after which no run starts (200:
then all has ended after 240); EDITS_LIMIT, seconds for one run; EDITS_WHEELS, a folder of wheels for libraries that are missing
(.gpu/wheels); EDITS_CPU, no GPU, all figures are zero; EDITS_TINY, small models. With the last two, `check` needs no GPU and seconds.
"""
import ast, concurrent.futures, contextlib, glob, importlib, importlib.util, io, json, math, os, signal, subprocess, sys, tarfile, tempfile, threading, time, traceback, zipfile

HERE = os.path.abspath(__file__)
# The module of the programs.
PROGRAMS = os.environ.get("EDITS_PROGRAMS", "edits_programs")
# The exit status of `run` if a library is missing.
SKIPPED = 77
MIB = 1 << 20
# What the programs need besides PyTorch.
LIBRARIES = ("transformers", "tokenizers", "huggingface_hub", "safetensors", "timm", "torchvision")

# What is asked about each program. LAYOUTS need two GPUs.
CASES = {
    "gpt2": [
        "--precision autocast-bf16", "--checkpoint all", "--optimizer sgd",
        "--accumulate 4", "--adam for-loop", "--lora 8 --checkpoint every:2",
    ],
    "llama": [
        "--adam foreach", "--checkpoint every:2", "--precision bf16",
        "--lora 8", "--offload optimizer", "--optimizer adafactor --checkpoint all",
    ],
    "bert": [
        "--precision fp32", "--precision autocast-bf16",
        "--optimizer momentum", "--offload activations", "--accumulate 4 --set-to-none no",
    ],
    "t5": ["--optimizer adamw", "--precision bf16", "--checkpoint all", "--freeze 0.5", "--accumulate 4", "--optimizer adam --adam fused"],
    "vit": ["--accumulate 4", "--optimizer sgd", "--offload activations", "--freeze 0.5", "--lora 8", "--checkpoint all --adam fused"],
    "resnet": [
        "--precision autocast-fp16", "--optimizer adam", "--freeze 0.5",
        "--checkpoint all", "--set-to-none no", "--precision bf16 --optimizer sgd",
    ],
    "unet": [
        "--adam fused", "--precision fp32", "--offload optimizer",
        "--checkpoint every:2", "--accumulate 4", "--optimizer momentum --set-to-none no",
    ],
    "moe": [
        "--precision fp32", "--adam for-loop", "--checkpoint all",
        "--lora 8", "--offload activations", "--freeze 0.5 --offload optimizer",
    ],
    "speech": [
        "--set-to-none yes", "--optimizer adafactor", "--precision autocast-fp16",
        "--adam fused", "--offload optimizer", "--checkpoint all",
    ],
    "towers": [
        "--precision autocast-fp16", "--optimizer momentum", "--checkpoint all",
        "--freeze 0.5", "--set-to-none no", "--offload activations --adam fused",
    ],
}
LAYOUTS = {
    "gpt2": ["--layout ddp:2", "--layout fsdp:2"],
    "llama": ["--layout fsdp:2", "--layout zero1:2", "--layout fsdp:2 --checkpoint all"],
    "resnet": ["--layout ddp:2"],
    "moe": ["--layout zero1:2", "--layout fsdp:2"],
}
# GiB that a run of a program is expected to reserve, and the seconds after which a run is stopped.
GIB, LIMIT = {}, 120


def constants():
    """CASES, LAYOUTS, GIB and LIMIT of the file of the programs, where it has them: it is not run, since it needs PyTorch."""
    with open(os.path.join(os.path.dirname(HERE), PROGRAMS + ".py")) as file:
        for it in ast.parse(file.read()).body:
            if isinstance(it, ast.Assign) and getattr(it.targets[0], "id", "") in ("CASES", "LAYOUTS", "GIB", "LIMIT"):
                globals()[it.targets[0].id] = ast.literal_eval(it.value)


constants()
LIMIT = float(os.environ.get("EDITS_LIMIT", LIMIT))
# GiB of a GPU of 80 GB that programs may take together; each also needs a context.
ROOM = 68
VALUES = {
    "--optimizer": ["sgd", "momentum", "adam", "adamw", "adafactor"],
    "--adam": ["foreach", "for-loop", "fused"],
    "--set-to-none": ["yes", "no"],
    "--accumulate": None,
    "--checkpoint": ["all", "every:2"],
    "--offload": ["activations", "optimizer"],
    "--precision": ["autocast-bf16", "autocast-fp16", "bf16", "fp32"],
    "--freeze": None,
    "--lora": None,
    "--layout": ["ddp:2", "zero1:2", "fsdp:2"],
}


def parsed(text):
    """The edits of a string, as {"--optimizer": "sgd"}."""
    words = text.split()
    edits = dict(zip(words[::2], words[1::2]))
    for name, value in edits.items():
        chosen = name == "--checkpoint" and value.startswith("layers:")
        if name not in VALUES or VALUES[name] and value not in VALUES[name] and not chosen:
            sys.exit(f"edits.py: {name} {value} is not an edit; use one of {VALUES.get(name) or list(VALUES)}")
    if len(words) != 2 * len(edits):
        sys.exit(f"edits.py: {text!r} is not a list of different edits with one value each")
    return edits


class Edits:
    """Applies edits to a program, as a user of PyTorch would write them into it."""

    def __init__(self, text):
        import torch
        self.torch, self.gpu = torch, importlib.import_module(PROGRAMS).GPU
        self.small = self.gpu == "cpu"
        # What was done, to be looked at by a person.
        self.done = {}
        self.edits = parsed(text)
        self.scaler = None
        self.layout = self.edits.get("--layout", "").split(":")[0]
        if self.layout:
            import torch.distributed as dist
            rank = int(os.environ["LOCAL_RANK"])
            if self.small:
                dist.init_process_group("gloo")
            else:
                torch.cuda.set_device(rank)
                dist.init_process_group("nccl", device_id=torch.device("cuda", rank))

    def habits(self, precision="fp32", accumulate=1, set_to_none="yes"):
        """What the program does if it is not edited."""
        torch = self.torch
        self.precision = self.edits.get("--precision", precision)
        self.accumulate = int(self.edits.get("--accumulate", accumulate))
        self.note("in", f"{self.precision} x {self.accumulate}, set to none {self.edits.get('--set-to-none', set_to_none)}")
        self.set_to_none = self.edits.get("--set-to-none", set_to_none) == "yes"
        # The type of floating-point inputs, such as images.
        self.dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        if self.precision == "autocast-fp16":
            # The default scale overflows at first with random weights, and then no step is taken.
            self.scaler = torch.amp.GradScaler(self.gpu, init_scale=1024.0)

    def prepare(self, model, blocks):
        """Moves the model to the GPU; returns what the loop calls. `blocks` are repeated layers, in the order in which they run."""
        torch = self.torch
        blocks = list(blocks)
        if "--lora" in self.edits:
            adapt(torch, model, int(self.edits["--lora"]))
        if "--freeze" in self.edits:
            parameters = list(model.parameters())
            for it in parameters[: int(len(parameters) * float(self.edits["--freeze"]))]:
                it.requires_grad_(False)
        model.train()
        model.to(self.gpu, self.dtype) if self.precision == "bf16" else model.to(self.gpu)
        sizes = [(it.numel(), it.requires_grad) for it in model.parameters()]
        self.note("trains", f"{sum(n for n, trained in sizes if trained) / 1e6:.3f} of {sum(n for n, _ in sizes) / 1e6:.3f} M")
        self.note("types", "+".join(sorted({str(it.dtype)[6:] for it in model.parameters()})))
        if "--checkpoint" in self.edits:
            assert blocks, "this program has no layers to compute again"
            self.recompute(model, blocks, chosen(self.edits["--checkpoint"], len(blocks)))
        if self.layout in ("ddp", "zero1"):
            # `device_ids` is for GPUs only.
            devices = {} if self.small else {"device_ids": [torch.cuda.current_device()]}
            return torch.nn.parallel.DistributedDataParallel(model, **devices)
        if self.layout == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh(self.gpu, (2,))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def recompute(self, model, blocks, again):
        """The blocks with the numbers `again` are computed again in the backward pass."""
        from torch.utils.checkpoint import checkpoint
        self.note("again", f"{len(again)} of {len(blocks)}")
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for number, block in enumerate(blocks):
                assert block.gradient_checkpointing, f"{type(block).__name__} is not computed again"
                block.gradient_checkpointing = number in again
            return

        def with_checkpoint(forward):
            return lambda *values, **named: checkpoint(forward, *values, use_reentrant=False, **named)

        for number in again:
            blocks[number].forward = with_checkpoint(blocks[number].forward)

    def note(self, name, text):
        self.done[name] = f"{self.done[name]} and {text}" if name in self.done else text

    def said(self):
        """What was done, in one line."""
        return ", ".join(f"{name} {text}" for name, text in self.done.items())

    def optimizer(self, parameters, kind, **how):
        """The program's optimizer, or that of the edit with the same learning rate."""
        torch, optim = self.torch, self.torch.optim
        if "--optimizer" in self.edits:
            name = self.edits["--optimizer"]
            kinds = {"sgd": optim.SGD, "momentum": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "adafactor": optim.Adafactor}
            kind, how = kinds[name], {"lr": how["lr"], **({"momentum": 0.9} if name == "momentum" else {})}
        if "--adam" in self.edits:
            assert kind in (optim.Adam, optim.AdamW), "--adam needs Adam or AdamW"
            how = {name: value for name, value in how.items() if name not in ("foreach", "fused")}
            how.update({"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}[self.edits["--adam"]])
        self.note("by", kind.__name__ + "".join(f" {name}={how[name]}" for name in ("momentum", "foreach", "fused") if name in how))
        parameters = list(parameters)
        if not isinstance(parameters[0], dict):
            parameters = [it for it in parameters if it.requires_grad]
        if self.edits.get("--offload") == "optimizer":
            assert self.scaler is None, "the optimizer on the CPU is not written for a scaler"
            return OnCpu(torch, parameters, lambda copies: kind(copies, **how))
        if self.layout == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer
            return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **how)
        return kind(parameters, **how)

    def scheduled(self, optimizer):
        """What a schedule of the learning rate works on."""
        return optimizer.inner if isinstance(optimizer, OnCpu) else optimizer

    def autocast(self):
        kind = {"autocast-bf16": self.torch.bfloat16, "autocast-fp16": self.torch.float16}.get(self.precision)
        return self.torch.autocast(self.gpu, kind) if kind else contextlib.nullcontext()

    def forward(self):
        """The context of a forward pass and its loss."""
        if self.edits.get("--offload") != "activations":
            return self.autocast()
        context = contextlib.ExitStack()
        context.enter_context(self.torch.autograd.graph.save_on_cpu(pin_memory=not self.small))
        context.enter_context(self.autocast())
        return context

    def backward(self, loss):
        if self.accumulate > 1:
            loss = loss / self.accumulate
        if self.scaler:
            loss = self.scaler.scale(loss)
        loss.backward()

    def step(self, optimizer, parameters=None, clip=None):
        """A step of the optimizer; the gradients of `parameters` are clipped before."""
        if self.scaler and clip:
            self.scaler.unscale_(optimizer)
        if clip:
            self.torch.nn.utils.clip_grad_norm_(parameters, clip)
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def zero_grad(self, optimizer):
        optimizer.zero_grad(set_to_none=self.set_to_none)

    def peaks(self):
        """Of all ranks, the most that PyTorch had allocated and reserved."""
        torch, ranks = self.torch, [{"allocated": 0, "reserved": 0}]
        if not self.small:
            torch.cuda.synchronize()
            ranks = [{"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}]
        if self.layout:
            import torch.distributed as dist
            mine, ranks = ranks[0], [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
        return {**{key: max(rank[key] for rank in ranks) for key in ranks[0]}, "ranks": ranks}


def chosen(text, n_blocks):
    """The numbers of the blocks that `--checkpoint` names; layers:0..5 are six."""
    if text.startswith("layers:"):
        first, last = map(int, text[7:].split(".."))
        assert 0 <= first <= last < n_blocks, f"{text}: there are {n_blocks} layers"
        return range(first, last + 1)
    return range(0, n_blocks, 1 if text == "all" else 2)


class OnCpu:
    """An optimizer whose state and update are on the CPU."""

    def __init__(self, torch, parameters, make):
        self.torch, self.parameters = torch, parameters
        self.copies = [it.detach().to("cpu", copy=True) for it in parameters]
        self.inner = make(self.copies)

    def step(self):
        for it, copy in zip(self.parameters, self.copies):
            copy.grad = None if it.grad is None else it.grad.to("cpu")
        self.inner.step()
        with self.torch.no_grad():
            for it, copy in zip(self.parameters, self.copies):
                it.copy_(copy)

    def zero_grad(self, set_to_none=True):
        for it in self.parameters:
            if set_to_none:
                it.grad = None
            elif it.grad is not None:
                it.grad.zero_()


def adapt(torch, model, rank):
    """Puts an adapter beside every linear layer except the last, and freezes all other parameters."""
    nn = torch.nn

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            n_out, n_in = inner.weight.shape if isinstance(inner, nn.Linear) else inner.weight.shape[::-1]
            self.inner, self.down, self.up = inner, nn.Linear(n_in, rank, bias=False), nn.Linear(rank, n_out, bias=False)
            nn.init.zeros_(self.up.weight)

        # Some models of transformers look at the weight of their layers.
        @property
        def weight(self):
            return self.inner.weight

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    model.requires_grad_(False)
    linear = [(name, it) for name, it in model.named_modules() if type(it) is nn.Linear or type(it).__name__ == "Conv1D"]
    for name, it in linear[:-1]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapter(it))


def missing_libraries():
    """Makes libraries importable that are not installed, from a folder of wheels if there is one."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    folder = os.environ.get("EDITS_WHEELS", os.path.join(root, ".gpu", "wheels"))
    into = os.path.join(tempfile.gettempdir(), f"edits-wheels-{os.getuid()}")
    for wheel in sorted(glob.glob(os.path.join(folder, "*.whl"))):
        library = os.path.basename(wheel).split("-")[0]
        if library not in LIBRARIES or importlib.util.find_spec(library):
            continue
        unpacked = os.path.join(into, library)
        if not os.path.exists(unpacked):
            # Several processes may get here at once: each unpacks its own copy, and the first renames it.
            os.makedirs(into, exist_ok=True)
            mine = tempfile.mkdtemp(dir=into)
            with zipfile.ZipFile(wheel) as file:
                file.extractall(mine)
            with contextlib.suppress(OSError):
                os.rename(mine, unpacked)
        sys.path.append(unpacked)


def run(program, text, out):
    sys.path.insert(0, os.path.dirname(HERE))
    missing_libraries()
    try:
        import torch
        programs = importlib.import_module(PROGRAMS)
        torch.manual_seed(0)
        edits, began = Edits(text), time.time()
        programs.PROGRAMS[program](edits)
    except ImportError as error:
        print(f"SKIP {program}: {error}", file=sys.stderr, flush=True)
        sys.exit(SKIPPED)
    peaks = {**edits.peaks(), "seconds": round(time.time() - began, 2), "did": edits.said()}
    if int(os.environ.get("RANK", 0)) == 0:
        print("edits: " + edits.said(), file=sys.stderr, flush=True)
        with open(out, "w") as file:
            json.dump(peaks, file)
    if edits.layout:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def command_of(program, edits, out):
    launcher = []
    if "--layout" in edits:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", edits.split("--layout ")[1].split()[0].split(":")[1]]
    return [sys.executable, *launcher, HERE, "run", program, edits, out]


class Turns:
    """Says when a run may start, and on which GPUs: in order, as far as the memory of the GPUs and the number of jobs allow."""

    def __init__(self, n_gpus, n_jobs):
        self.room, self.n_free = [ROOM] * max(1, n_gpus), max(n_jobs, n_gpus)
        self.waiting, self.changed = [], threading.Condition()

    def fits(self, need, needs_all):
        """The GPUs for a run; none if it has to wait."""
        if self.n_free < (len(self.room) if needs_all else 1):
            return []
        gpus = sorted(range(len(self.room)), key=lambda gpu: -self.room[gpu])
        gpus = gpus if needs_all else gpus[:1]
        return gpus if all(self.room[gpu] >= need for gpu in gpus) else []

    def first(self):
        """Who may start next. What needs much room waits for at most 15 seconds behind what needs little."""
        for it in sorted(self.waiting):
            if self.fits(it[2], it[3]):
                return it
            if time.time() > it[4] + 15:
                return None

    @contextlib.contextmanager
    def turn(self, order, need, needs_all):
        # Whole numbers, so that nothing is lost when they are given back.
        need = min(math.ceil(need), ROOM)
        mine = (order, id(threading.current_thread()), need, needs_all, time.time())
        with self.changed:
            self.waiting.append(mine)
            while self.first() != mine:
                self.changed.wait()
            gpus = self.fits(need, needs_all)
            self.waiting.remove(mine)
            self.change(gpus, -need)
        try:
            yield gpus
        finally:
            with self.changed:
                self.change(gpus, need)

    def change(self, gpus, by):
        for gpu in gpus:
            self.room[gpu] += by
        self.n_free += len(gpus) if by > 0 else -len(gpus)
        self.changed.notify_all()


class Judge:
    def __init__(self, gputrace, library, folder):
        self.gputrace, self.library, self.folder = os.path.abspath(gputrace), os.path.abspath(library), os.path.abspath(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.work = tempfile.mkdtemp(prefix="edits-")
        self.n_gpus = n_gpus()
        self.began = time.time()
        self.end = self.began + float(os.environ.get("EDITS_SECONDS", 200))
        self.lock, self.turns = threading.Lock(), Turns(self.n_gpus, int(os.environ.get("JOBS", 4 * max(1, self.n_gpus))))
        self.predicting = concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
        self.rows = []
        for name in ("table.txt", "rows.jsonl", "answers.jsonl"):
            open(os.path.join(self.folder, name), "w").close()

    def append(self, name, line):
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(line + "\n")

    def write(self, row):
        """One row to all outputs, at once."""
        with self.lock:
            self.rows.append(row)
            self.append("rows.jsonl", json.dumps(row))
            self.append("table.txt", line_of(row))
            print(f"{time.time() - self.began:4.0f} s  {line_of(row)}", flush=True)

    def execute(self, command, order, need, needs_all):
        """Runs a program when it is its turn; returns its exit status and the end of its errors."""
        with self.turns.turn(order, need, needs_all) as gpus:
            if time.time() > self.end:
                return None, "not run: EDITS_SECONDS are over"
            # Settings of the caller's shell would change what the allocator does.
            settings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
            environment = {name: value for name, value in os.environ.items() if name not in settings}
            environment.update(GPUTRACE_LIBRARY=self.library, OMP_NUM_THREADS="4", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
            if self.n_gpus > 1 and not needs_all:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.n_gpus)))).split(",")
                environment["CUDA_VISIBLE_DEVICES"] = visible[gpus[0]]
            limit = min(LIMIT, self.end + 40 - time.time())
            # A session of its own: a run that is stopped takes its own processes along, which would keep memory of the GPU.
            ran = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            try:
                said, errors = ran.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                # torchrun ends its processes, which have sessions of their own, if it is asked first.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ran.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        ran.wait(4)
                    os.killpg(ran.pid, signal.SIGKILL)
                ran.wait()
                return None, f"stopped after {limit:.0f} s"
            return ran.returncode, (errors + said if ran.returncode else errors)[-4000:]

    def truth(self, program, edits, need, before=()):
        """What the program says of itself, or an error."""
        out = os.path.join(self.work, f"{program}{edits.replace('-', '').replace(' ', '.').replace(':', '')}.{len(before)}.json")
        place = [*CASES[program], *LAYOUTS.get(program, [])].index(edits) if edits else -1
        # All programs are recorded first: who waits for predictions leaves the GPU to others.
        order = (bool(edits), list(CASES).index(program), place)
        status, errors = self.execute([*before, *command_of(program, edits, out)], order, need, "--layout" in edits)
        if "SKIP " in errors and not os.path.exists(out):
            return {"skip": errors[errors.find("SKIP "):].splitlines()[0]}
        if not os.path.exists(out):
            return {"failed": reason(errors) if status is None else f"status {status}: {reason(errors)}"}
        with open(out) as file:
            # The status shows a program that failed after it had written its figures.
            return {**json.load(file), **({"status": status} if status else {})}

    def predict(self, program, edits, trace):
        """The answer of `whatif` as fields of a row."""
        command = [self.gputrace, "whatif", "--json", *edits.split(), trace]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=min(120, max(5, self.end - time.time())))
            answer = json.loads(ran.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            errors = "it took too long" if isinstance(error, subprocess.TimeoutExpired) else ran.stderr
            return {"refused": reason(errors)}
        with self.lock:
            self.append("answers.jsonl", json.dumps({"program": program, "edits": edits, "answer": answer}))
        outcomes = answer.get("outcomes") or [it for of in answer.get("traces", []) for it in of.get("outcomes", [])]
        edited = [it for it in outcomes if it.get("edits")] or outcomes
        if not edited:
            return {"refused": "; ".join(map(str, answer.get("refused") or [])) or f"no outcomes among the keys {sorted(answer)}"}
        outcome = edited[-1]
        row = {"confidence": str(outcome.get("confidence")), "doubt": outcome.get("doubt"), "recorded": outcome.get("recorded")}
        for kind in ("allocated", "reserved"):
            value = outcome.get(f"peak_{kind}_bytes")
            if value is None:
                row["missing"] = f"no peak_{kind}_bytes among the keys {sorted(outcome)}"
                continue
            row[kind], row[f"{kind}_range"] = value, outcome.get(f"peak_{kind}_range") or [value, value]
            if f"peak_{kind}_range" not in outcome:
                row["missing"] = f"no peak_{kind}_range among the keys {sorted(outcome)}"
        return row

    def program(self, program):
        """Records the program, predicts all edits, and only then runs them."""
        trace = os.path.join(self.folder, f"{program}.gtr")
        need = 1.3 * GIB.get(program, 16)
        recorded = self.truth(program, "", need, [self.gputrace, "record", "-F", "-o", trace, "--"])
        if "allocated" not in recorded or not os.path.exists(trace):
            failed = recorded if "allocated" not in recorded else {"failed": "no trace was written"}
            return self.write({"program": program, "edits": "", "kind": "recorded", "truth": failed})
        asked = CASES[program] + (LAYOUTS.get(program, []) if self.n_gpus > 1 else [])
        predicted = dict(zip(asked, self.predicting.map(lambda edits: self.predict(program, edits, trace), asked)))
        replayed = next((it["recorded"] for it in predicted.values() if it.get("recorded")), None)
        self.write({"program": program, "edits": "", "kind": "recorded", "truth": recorded, "replayed": replayed})
        # An edit may need more.
        need = 1.5 * recorded["reserved"] / (1 << 30) + 2 if recorded["reserved"] else need
        threads = [threading.Thread(target=self.edit, args=(program, edits, predicted[edits], need)) for edits in asked]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

    def edit(self, program, edits, predicted, need):
        row = {"program": program, "edits": edits, "kind": "edit", "predicted": predicted}
        try:
            row["truth"] = self.truth(program, edits, need)
            for kind in ("allocated", "reserved"):
                true = row["truth"].get(kind)
                if true is not None and kind in predicted:
                    low, high = predicted[f"{kind}_range"]
                    row[f"{kind}_error"] = predicted[kind] / true - 1 if true else 0.0
                    row[f"{kind}_inside"] = low <= true <= high
        except Exception as error:
            row["truth"] = {"failed": f"{type(error).__name__}: {error}"}
        self.write(row)

    def pack(self):
        """All traces into few files, so that predictions can be made again without a GPU."""
        size, number, tar = 0, 0, None
        for path in sorted(glob.glob(os.path.join(self.folder, "*.gtr"))):
            if tar is None or size + os.path.getsize(path) > 15 * MIB:
                if tar: tar.close()
                number, size = number + 1, 0
                tar = tarfile.open(os.path.join(self.folder, f"traces.{number}.tar"), "w")
            size += os.path.getsize(path)
            tar.add(path, os.path.basename(path))
            os.remove(path)
        if tar: tar.close()

    def summary(self):
        """By confidence: how many, the worst errors, how many are outside the range."""
        judged = [row for row in self.rows if row["kind"] == "edit" and "reserved_error" in row and "allocated_error" in row]
        levels = ["certain", "range", "guess"]
        levels += sorted({row["predicted"]["confidence"] for row in judged} - set(levels))
        lines = ["", f"{len(judged)} edits judged in {time.time() - self.began:.0f} s"]
        for level in levels:
            rows = [row for row in judged if row["predicted"]["confidence"] == level]
            if not rows:
                lines.append(f"{level:8} 0")
                continue
            parts = []
            for kind in ("allocated", "reserved"):
                worst = max(rows, key=lambda row: abs(row[f"{kind}_error"]))
                n_outside = sum(not row[f"{kind}_inside"] for row in rows)
                error = f"{worst[f'{kind}_error'] * 100:+.2f} % ({worst['program']} {worst['edits']})"
                parts.append(f"{kind}: worst {error}, {n_outside} outside the range")
            n_outside = sum(not (row["allocated_inside"] and row["reserved_inside"]) for row in rows)
            lines.append(f"{level:8} {len(rows)}, {n_outside} outside in either; " + "; ".join(parts))
        others = [row for row in self.rows if row not in judged and row["kind"] == "edit"]
        others += [row for row in self.rows if row["kind"] == "recorded" and "allocated" not in row["truth"]]
        for row in others:
            why = [row["truth"].get(key) for key in ("skip", "failed")] + [row.get("predicted", {}).get(key) for key in ("refused", "missing")]
            lines.append(f"not judged: {row['program']} {row['edits'] or '(recorded)'}: {'; '.join(it for it in why if it)}")
        for line in lines:
            self.append("table.txt", line)
        print("\n".join(lines), flush=True)


def reason(errors):
    """The most telling line of what a program wrote to its standard error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or line.startswith("error")]
    return (said or lines or ["no output"])[-1][:400]


def line_of(row):
    """A row of the table."""
    truth, predicted = row["truth"], row.get("predicted", {})
    head = f"{row['program']:12} {row['edits'] or '(recorded)':42}"
    if row["kind"] == "recorded" and "allocated" in truth:
        replayed = row["replayed"] or {}
        own = [replayed.get(f"peak_{kind}_bytes") for kind in ("allocated", "reserved")]
        says = "" if None in own else f"  the trace says {own[0] / MIB:.2f} and {own[1] / MIB:.2f}"
        return f"{head} allocated {truth['allocated'] / MIB:.2f} MiB, reserved {truth['reserved'] / MIB:.2f}{says}"
    parts = [predicted.get("confidence", "")] if predicted.get("confidence") else []
    for kind in ("allocated", "reserved") if row["kind"] == "edit" else ():
        if kind in predicted:
            low, high = predicted[f"{kind}_range"]
            part = f"{kind} {predicted[kind] / MIB:.2f} MiB [{low / MIB:.2f}, {high / MIB:.2f}]"
        else:
            part = f"{kind} not predicted"
        if kind in truth:
            part += f" true {truth[kind] / MIB:.2f}"
        if f"{kind}_error" in row:
            part += f" {row[f'{kind}_error'] * 100:+.2f} % {'inside' if row[f'{kind}_inside'] else 'OUTSIDE'}"
        parts.append(part)
    if "refused" in predicted: parts.append(f"refused: {predicted['refused']}")
    if "missing" in predicted: parts.append(predicted["missing"])
    if predicted.get("doubt"): parts.append(f"doubt: {predicted['doubt']}")
    if "skip" in truth: parts.append(truth["skip"])
    if "failed" in truth: parts.append(f"FAILED {truth['failed']}")
    if "status" in truth: parts.append(f"ended with status {truth['status']}")
    return f"{head} " + "  ".join(parts)


def n_gpus():
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in said.splitlines())


def judge(gputrace, library, folder, *programs):
    unknown = [name for name in programs if name not in CASES]
    if unknown:
        sys.exit(f"edits.py: {', '.join(unknown)} is not a program; use some of {', '.join(CASES)}")
    it = Judge(gputrace, library, folder)

    def one(program):
        try:
            it.program(program)
        except Exception:
            failed = {"failed": traceback.format_exc().strip().splitlines()[-1]}
            it.write({"program": program, "edits": "", "kind": "recorded", "truth": failed})

    threads = [threading.Thread(target=one, args=(program,)) for program in programs or CASES]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    it.pack()
    it.summary()


def show():
    for program, asked in CASES.items():
        print(f"{program}: " + ", ".join(asked + LAYOUTS.get(program, [])))


def tried(program, text):
    """Runs a program with edits in this process, unless it takes two, and says what was done."""
    if "--layout" in text:
        out = os.path.join(tempfile.mkdtemp(prefix="edits-"), "out.json")
        ran = subprocess.run(command_of(program, text, out), capture_output=True, text=True, timeout=120)
        assert os.path.exists(out) and ran.returncode == 0, ran.stderr[-2500:]
        with open(out) as file:
            return json.load(file)["did"]
    import torch
    programs = importlib.import_module(PROGRAMS)
    torch.manual_seed(0)
    if programs.GPU != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    edits, said = Edits(text), io.StringIO()
    with contextlib.redirect_stdout(said):
        programs.PROGRAMS[program](edits)
    lines = said.getvalue().strip().splitlines() or [""]
    return f"{edits.said()}; {edits.peaks()['allocated'] / (1 << 30):.2f} GiB | {lines[-1][:60]}"


def check(*names):
    """Runs programs with their edits one after another, and says of each what was done and how long it took."""
    jobs = []
    for name in names or CASES:
        name, _, only = name.partition("=")
        if name not in CASES:
            sys.exit(f"edits.py: {name} is not a program; use some of {', '.join(CASES)}")
        jobs += [(name, it) for it in ([only] if only else ["", *CASES[name], *LAYOUTS.get(name, [])])]
    sys.path.insert(0, os.path.dirname(HERE))
    missing_libraries()
    n_failed = 0
    for name, text in jobs:
        began, result = time.time(), "ok    "
        try:
            did = tried(name, text)
        except Exception:
            n_failed, result, did = n_failed + 1, "FAILED", traceback.format_exc()[-2500:]
        print(f"{result} {time.time() - began:5.1f} s {name:12} {text or '(as it is)':38} {did}", flush=True)
    print(f"{len(jobs) - n_failed} passed, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


VERBS = {"run": (run, 3, 3), "judge": (judge, 3, 99), "check": (check, 0, 99), "list": (show, 0, 0)}

if __name__ == "__main__":
    verb, fewest, most = VERBS.get((sys.argv[1:] or [""])[0], (None, 0, 0))
    if verb is None or not fewest <= len(sys.argv) - 2 <= most:
        sys.exit(__doc__)
    verb(*sys.argv[2:])
