#!/usr/bin/env python3
"""JAX's buffers on one GPU: what gputrace says a line holds against jax.live_arrays() at ten instants, temporaries against
memory_analysis(), growth, an out-of-memory error, other allocators, and what it costs.

usage: jax_buffers.py FOLDER [PYTHON]   the folder of gputrace and libgputrace.so; PYTHON has JAX with CUDA
Takes about 75 seconds. Says PASS or FAIL for each question, and FAIL at the end if there was any; figures of cost are said.
What it says also goes to $OUT/jax.txt, if OUT is set."""
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

GPUTRACE = os.path.join(os.path.abspath(sys.argv[1]), "gputrace")
PYTHON = sys.argv[2] if len(sys.argv) > 2 else sys.executable
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
failures = 0

TRAIN = """
import functools, gc, json, sys, time
import numpy as np
import jax, jax.numpy as jnp
WIDTH, DEPTH = 1024, 6
def init():
    key = jax.random.key_data(jax.random.key(0))
    return {"w": [jnp.full((WIDTH, WIDTH), 0.01 * i) for i in range(DEPTH)],  # line: init
            "step": jnp.zeros((), jnp.int32)}  # line: counter
def loss(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return (x ** 2).mean()
@functools.partial(jax.jit, donate_argnums=0)
def step(params, x):
    value, grads = jax.value_and_grad(loss, allow_int=True)(params, x)
    new = {"w": [w - 0.1 * g for w, g in zip(params["w"], grads["w"])], "step": params["step"] + 1}
    return new, value
state, history, copies = init(), [], []
def size(arrays):
    return sum(a.on_device_size_in_bytes() for a in jax.tree.leaves(arrays))
def instant(data):
    jax.block_until_ready((state, history, copies, data))
    gc.collect()
    t = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    known = {"data": data, "step": (state if made else []), "keep": history, "copy": copies}
    if not made:
        known["init"], known["counter"] = state["w"], state["step"]
    arrays = jax.live_arrays()
    stats = jax.local_devices()[0].memory_stats() or {}
    print(json.dumps({"instant": t, "all": size(arrays), "n": len(arrays), "in_use": stats.get("bytes_in_use"),
                      "lines": {name: size(what) for name, what in known.items()}}), flush=True)
made = False
rng = np.random.default_rng(0)
for i in range(1, 91):
    data = jax.device_put(rng.standard_normal((512, WIDTH), dtype=np.float32))  # line: data
    if i == 1:
        instant(data)
    state, value = step(state, data)  # line: step
    made = True
    history.append(data[:64] * 2)  # line: keep
    if i % 20 == 0:
        copies.append(jax.device_put(state["w"][0], may_alias=False) + 1)  # line: copy
    del value
    if i % 10 == 0:
        instant(data)
temps = step.lower(state, data).compile().memory_analysis()
print(json.dumps({"temporary": temps.temp_size_in_bytes, "arguments": temps.argument_size_in_bytes,
                  "outputs": temps.output_size_in_bytes, "aliased": temps.alias_size_in_bytes}), flush=True)
"""

# Behind the first, where wanted.
LARGE = """
@jax.jit
def large(x):
    y = jnp.sin(x)[:, None] * jnp.cos(x)[None, :]
    return (jnp.sort(y, axis=0) @ jnp.sort(y, axis=1)).sum()
x = jnp.arange(4096, dtype=jnp.float32)
jax.block_until_ready(large(x))
stats = large.lower(x).compile().memory_analysis()
print(json.dumps({"large": stats.temp_size_in_bytes}), flush=True)
"""

OOM = """
import json, jax, jax.numpy as jnp
def ballast():
    return [jnp.full((256 << 20,), i, jnp.uint8) for i in range(4)]  # line: ballast
kept = jax.block_until_ready(ballast())
total = jax.local_devices()[0].memory_stats()
total = total["bytes_limit"] if total and total.get("bytes_limit") else 200 << 30
try:
    jax.block_until_ready(jnp.ones((2 * total,), jnp.uint8))  # line: fails
    print(json.dumps({"oom": False}), flush=True)
except Exception as error:
    print(json.dumps({"oom": True, "said": str(error)[:300]}), flush=True)
jax.block_until_ready(kept[0] + 1)
"""

STEPS = """
import functools, json, time, jax, jax.numpy as jnp
@functools.partial(jax.jit, donate_argnums=0)
def step(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return (y ** 2).mean()
    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params))]
params = [jnp.full((512, 512), 0.01) for _ in range(24)]
x = jnp.ones((256, 512))
for _ in range(50):
    params = step(params, x)
jax.block_until_ready(params)
times = []
for _ in range(12):
    begin = time.perf_counter()
    for _ in range(100):
        params = step(params, x)
    jax.block_until_ready(params)
    times.append((time.perf_counter() - begin) / 100)
print(json.dumps({"step_us": 1e6 * sorted(times)[len(times) // 2]}), flush=True)
"""


def say(*what):
    print(*what, flush=True)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "jax.txt"), "a") as file:
            print(*what, file=file)


def check(what, good, text=""):
    global failures
    failures += not good
    say(f"{'PASS' if good else 'FAIL'} {what}{': ' if text else ''}{text}")


def run(folder, name, program, traced=True, **variables):
    """What the program printed, its file, and its trace."""
    # No name that a module of Python's has.
    path, trace = os.path.join(folder, f"prog_{name}.py"), os.path.join(folder, name + ".gtr")
    with open(path, "w") as file:
        file.write(program)
    command = LAUNCHER + [PYTHON, path]
    if traced:
        command = [GPUTRACE, "record", "-o", trace, "--"] + command
    environment = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.2", TF_CPP_MIN_LOG_LEVEL="2", **variables)
    # Autotuning takes minutes, and measures what is not asked here.
    environment.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    except subprocess.TimeoutExpired:
        check(f"{name} ends in 60 s", False)
        return [], path, trace
    say(f"     {name}: {time.monotonic() - begin:.1f} s")
    if done.returncode:
        check(f"{name} runs", False, f"exit {done.returncode}; " + " | ".join(done.stderr.splitlines()[-3:]))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], path, trace


def ask(verb, trace, *arguments):
    command = [GPUTRACE, verb, "--json", *arguments, trace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    try:
        return json.loads(done.stdout)
    except ValueError:
        check(" ".join(command), False, done.stderr[-1000:])
        return {}


def numbers(path):
    with open(path) as file:
        lines = list(file)
    return {line.split("# line: ")[1].strip(): at for at, line in enumerate(lines, 1) if "# line: " in line}


def tree(trace, at):
    return ask("tree", trace, "--at", str(at), "--min-bytes", "1", "--group-by", "category")


def by_line(answer, path):
    """Bytes of JAX's buffers by the innermost line of the program: not what cuBLAS or cuDNN hold from the same line."""
    nodes = answer.get("nodes", [])
    own = [node["bytes"] for node in nodes]
    top = []
    for node in nodes:
        top.append(node["name"] if node["parent"] is None else top[node["parent"]])
    is_its = [os.path.basename(node["file"]) == os.path.basename(path) and of == "JAX buffers" for node, of in zip(nodes, top)]
    for at, node in enumerate(nodes):
        parent = node["parent"]
        while parent is not None and not is_its[parent]:
            parent = nodes[parent]["parent"]
        if is_its[at] and parent is not None:
            own[parent] -= node["bytes"]
    sums = {}
    for node, bytes_, its in zip(nodes, own, is_its):
        if its:
            sums[node["line"]] = sums.get(node["line"], 0) + bytes_
    return sums


def start_of(trace):
    return find(ask("summary", trace), "start_ns")


def find(value, key):
    """The first value of this key anywhere in JSON."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    for part in value if isinstance(value, list) else []:
        found = find(part, key)
        if found is not None:
            return found
    return None


def rows(value, table):
    """The rows of the table of this name, anywhere in JSON."""
    found = find(value, table)
    return found if isinstance(found, list) else (found or {}).get("rows", [])


def instants(name, said, path, trace):
    """The sums at each instant; how many there were."""
    if not os.path.exists(trace):
        check(f"{name}: there is a trace", False)
        return 0
    start, lines = start_of(trace), numbers(path)
    seen = [it for it in said if "instant" in it]
    for number, it in enumerate(seen, 1):
        sums = by_line(tree(trace, it["instant"] - start), path)
        total = sum(sums.values())
        check(f"{name}, instant {number}: all buffers", total == it["all"],
              f"gputrace {total}, jax.live_arrays() {it['all']} ({it['n']} arrays), in use {it['in_use']}")
        for line, expected in it["lines"].items():
            got = sums.get(lines[line], 0)
            check(f"{name}, instant {number}: line {line}", got == expected, f"gputrace {got}, JAX {expected}")
    if os.environ.get("OUT"):
        shutil.copy(trace, os.environ["OUT"])
    return len(seen)


def training(folder):
    said, path, trace = run(folder, "train", TRAIN + LARGE)
    check("train: ten instants", instants("train", said, path, trace) == 10)
    truth = {key: value for it in said if "instant" not in it for key, value in it.items()}
    report = ask("report", trace, "--all")
    found = rows(report, "executables")
    keys = ("temporary", "argument", "output", "aliased")
    got = [[row.get(key + "_bytes") for key in keys] for row in found if "step" in str(row.get("executable"))]
    wanted = [truth.get(key) for key in ("temporary", "arguments", "outputs", "aliased")]
    check("train: figures of the step are those of memory_analysis()", wanted in got, f"gputrace {got}, JAX {wanted}")
    got = [row.get("temporary_bytes") for row in found if "large" in str(row.get("executable"))]
    check("train: temporaries of large()", truth.get("large") in got, f"gputrace {got}, JAX {truth.get('large')}")
    growth = rows(ask("leaks", trace), "growth")
    line = f"prog_train.py:{numbers(path)['keep']})"
    check("train: leaks names the line that grows", any(line in json.dumps(row) for row in growth), json.dumps(growth)[:600])
    say(subprocess.run([GPUTRACE, "report", trace], capture_output=True, text=True).stdout)


def out_of_memory(folder):
    for name, variables in (("oom", {}), ("oom_platform", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})):
        said, path, trace = run(folder, name, OOM, **variables)
        check(f"{name}: JAX ran out", bool(said) and said[-1]["oom"], json.dumps(said)[:300])
        answer = subprocess.run([GPUTRACE, "oom", trace], capture_output=True, text=True).stdout
        say(answer)
        lines = numbers(path)
        check(f"{name}: says that JAX could not get it", "JAX could not get" in answer)
        check(f"{name}: names the line that asked", f"prog_{name}.py:{lines['fails']}" in answer)
        check(f"{name}: names the line that holds memory", f"prog_{name}.py:{lines['ballast']}" in answer)


def allocators(folder):
    short = TRAIN.replace("range(1, 91)", "range(1, 31)")
    for name, variables in (
        ("growing", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        ("platform", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
        ("cuda_async", {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}),
    ):
        said, path, trace = run(folder, name, short, **variables)
        instants(name, said, path, trace)


def cost(folder):
    times = {True: [], False: []}
    for number in range(4):
        traced = number % 2 == 1
        said, _, _ = run(folder, f"steps{number}", STEPS, traced=traced)
        if said:
            times[traced].append(said[-1]["step_us"])
    with_, without = (statistics.median(times[traced] or [0]) for traced in (True, False))
    share = 100 * (with_ / without - 1) if without else 0
    say(f"COST a step takes {without:.1f} us without and {with_:.1f} us with gputrace ({share:+.2f} %); all: {times}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        training(folder)
        out_of_memory(folder)
        allocators(folder)
        cost(folder)
    say("FAIL" if failures else "PASS", f"{failures} failures")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
