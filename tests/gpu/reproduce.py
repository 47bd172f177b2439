#!/usr/bin/env python3
"""Runs the programs of `gputrace reproduce` on a real GPU, and counts those that come to the same.

    tests/gpu/reproduce.py GPUTRACE [FOLDER...]

GPUTRACE is the program `gputrace`. FOLDERs hold traces and snapshots; without one ten failing programs are run here, each with PyTorch's own
history of its memory (or with `GPUTRACE record`, where libgputrace.so lies beside it). Takes PyTorch for CUDA and one GPU, three minutes and
at most 20 GiB of its memory. With two GPUs and a FOLDER that holds folders of traces (one for each job, as `hang_live.py` leaves them),
their collectives are run, four jobs at a time. Exit status 1 where fewer than 8 of 10 are reproduced; jobs whose ranks agree have no program
and do not count.
"""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Each ends with an out-of-memory error. All have a limit, so that they need no whole card.
START = """
import torch
torch.cuda.set_per_process_memory_fraction({gib} * (1 << 30) / torch.cuda.get_device_properties(0).total_memory)
MIB = 1 << 20
def empty(mib, stream=None):
    with torch.cuda.stream(stream):
        return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")
"""
FAILING = {
    "too-large": "keep = [empty(300) for _ in range(3)]; empty(9000)",
    "leak": "keep = []\nwhile True: keep.append(empty(100))",
    "holes": "keep = []\nfor n in range(40):\n    passing = empty(70 + n); keep.append(empty(24)); del passing\nempty(1500)",
    "growing": "keep = []\nold = None\nfor n in range(64, 100000, 40):\n    new = empty(n); keep.append(empty(8)); old = new; del new",
    "streams": ("s = [torch.cuda.Stream() for _ in range(4)]\nfor one in s:\n    for n in (300, 400):\n        t = empty(n, one); del t\n"
                "keep = [empty(200, one) for one in s]\nempty(2500)"),
    "cached-elsewhere": "s = torch.cuda.Stream()\nkeep = [empty(100, s) for _ in range(25)]\ndel keep[::2]\nempty(2000)",
    "pool": ("pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool):\n    t = [empty(500) for _ in range(4)]\ndel t\n"
             "keep = [empty(400) for _ in range(3)]\nempty(1500)"),
    "graph": ("x = torch.ones(64 * MIB, device='cuda')\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = x * 2 + x * 3\n"
              "keep = []\nwhile True: keep.append(empty(150))"),
    "training": ("m = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(12)]).cuda()\no = torch.optim.AdamW(m.parameters())\n"
                 "for n in range(1, 1000):\n    m(torch.randn(4096 * n, 2048, device='cuda')).sum().backward(); o.step(); o.zero_grad()"),
    "expandable": "keep = []\nfor n in range(40):\n    passing = empty(70 + n); keep.append(empty(24)); del passing\nempty(3500)",
}
SETTINGS = {"expandable": "expandable_segments:True", "growing": "max_split_size_mb:128"}
HISTORY = """
torch.cuda.memory._record_memory_history(max_entries=1000000, stacks="python", context="all")
try:
    exec(compile(open(__file__ + ".body").read(), "job.py", "exec"))
except torch.cuda.OutOfMemoryError as error:
    print(error)
    torch.cuda.memory._dump_snapshot(r"{to}")
"""


def failing(gputrace, folder):
    """Traces of the programs above."""
    library = pathlib.Path(gputrace).with_name("libgputrace.so")
    for name, body in FAILING.items():
        script = folder / f"{name}.py"
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS.get(name, "")}
        start = START.format(gib=4)
        if library.exists():
            script.write_text(start + body)
            subprocess.run([gputrace, "record", "-o", str(folder / f"{name}.gtr"), "--", sys.executable, str(script)], env=environment,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            script.write_text(start + HISTORY.format(to=folder / f"{name}.pickle"))
            pathlib.Path(f"{script}.body").write_text(body)
            subprocess.run([sys.executable, str(script)], env=environment, stdout=subprocess.DEVNULL)
    return folder


def traces(folder):
    endings = (".gtr", ".pickle", ".pickle.gz", ".pkl", ".pkl.gz")
    return sorted(path for path in folder.iterdir() if path.name.endswith(endings))


def last(text):
    return (text.strip().splitlines() or [""])[-1]


def one(gputrace, trace, program, more):
    """Whether its program comes to the same, and a row."""
    written = subprocess.run([gputrace, "reproduce", "-F", "--json", *more, "-o", str(program), str(trace)], capture_output=True, text=True)
    if written.returncode != 0:
        return None, f"{trace.name:32} no program: {last(written.stderr)}"
    said = json.loads(written.stdout)
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    row = (f"{trace.name:32} {said['kind']:8} {said['n_requests_before']:>7} -> {said['n_requests']:>5} requests {said['n_lines']:>4} lines  "
           f"{['reproduced', 'NOT REPRODUCED', 'cannot be tried'][min(run.returncode, 2)]}: {last(run.stdout) or last(run.stderr)}")
    return run.returncode == 0, row


def job(gputrace, folder, program):
    written = subprocess.run([gputrace, "reproduce", "-F", "--json", "-o", str(program), str(folder)], capture_output=True, text=True)
    if written.returncode != 0:
        return None, f"{folder.name:32} no program: {last(written.stderr)}"
    n_ranks = json.loads(written.stdout)["n_ranks"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), str(program)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "REPRO_SECONDS": "30"}, timeout=300)
    return "reproduced:" in run.stdout.split("not ")[0], f"{folder.name:32} collectives of {n_ranks} ranks: {run.stdout.strip()}"


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    gputrace = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        folders = [pathlib.Path(folder) for folder in sys.argv[2:]]
        if not folders:
            folders = [failing(gputrace, scratch)]
        results = []
        for folder in folders:
            for trace in traces(folder):
                for more in ([], ["--exact"], ["--whole"]):
                    result, row = one(gputrace, trace, scratch / "repro.py", more)
                    print(row, *more, flush=True)
                    if not more:
                        results.append(result)
            jobs = sorted(path for path in folder.iterdir() if path.is_dir() and len(traces(path)) > 1)
            with concurrent.futures.ThreadPoolExecutor(4) as four:
                for result, row in four.map(lambda inner: job(gputrace, inner, scratch / f"job-{inner.name}.py"), jobs):
                    print(row, flush=True)
                    if result is not None:
                        results.append(result)
        n_same = results.count(True)
        print(f"{n_same} of {len(results)} reproduced, {results.count(None)} without a program")
        sys.exit(0 if n_same * 10 >= 8 * len(results) and results else 1)


main()
