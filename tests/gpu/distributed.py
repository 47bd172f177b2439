"""distributed.py FOLDER [JOB...]: on a machine with two GPUs, eight faulty and four healthy jobs of torch.distributed, each recorded,
and what `gputrace ranks` says of them: kind, rank, line, and PyTorch's own name of the process group (FOLDER has gputrace and
libgputrace.so). A job that hangs is killed. Prints PASS or FAIL a line, and what was said; about two minutes.

    python3 tests/gpu/distributed.py build

`# own` marks the line of the rank that is at fault, `# others` the line of those that wait for it.
"""

import concurrent.futures
import glob
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.abspath(__file__)
RANKS = 2
# A job that has not ended by then hangs. Importing PyTorch takes most of what a job needs.
HANGS_AFTER_S = 30
# Jobs that run beside each other.
AT_ONCE = 4
JOBS = {}


def faulty(kinds, rank, group, hangs=True):
    """A job whose first finding has one of these kinds, blames this rank, and names this group."""

    def register(function):
        JOBS[function.__name__] = (function, {"kinds": kinds, "rank": rank, "group": group, "hangs": hangs})
        return function

    return register


def healthy(function):
    """A job of which nothing is to be said."""
    JOBS[function.__name__] = (function, None)
    return function


class Rank:
    """What a job's function gets."""

    def __init__(self):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank = torch, dist, int(os.environ["RANK"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        torch.manual_seed(0)
        dist.init_process_group("nccl", device_id=self.device)

    def ones(self, n, **options):
        return self.torch.ones(n, device=self.device, **options)

    def steps(self, n):
        x = self.ones(1 << 16)
        for _ in range(n):
            self.dist.all_reduce(x)
            x.div_(RANKS)
        self.torch.cuda.synchronize()

    def model(self):
        nn = self.torch.nn
        layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers).to(self.device)


def wait_for_ever():
    time.sleep(600)


# ---- Jobs with a fault.


@faulty(["missing_call"], 1, "default_pg")
def skips_the_average_of_the_loss(job):
    job.steps(3)
    loss = job.ones(1)
    if job.rank == 0:
        job.dist.all_reduce(loss)  # others
    job.dist.barrier()  # own
    job.torch.cuda.synchronize()


@faulty(["size_mismatch"], None, "default_pg")
def gathers_batches_of_different_sizes(job):
    job.steps(3)
    job.dist.all_reduce(job.ones(4096 if job.rank == 0 else 4000))  # own others
    job.torch.cuda.synchronize()
    wait_for_ever()


@faulty(["dtype_mismatch"], None, "default_pg")
def reduces_half_precision_on_one_rank(job):
    job.steps(3)
    dtype = job.torch.float32 if job.rank == 0 else job.torch.bfloat16
    job.dist.all_reduce(job.ones(4096, dtype=dtype))  # own others
    job.torch.cuda.synchronize()
    wait_for_ever()


@faulty(["op_mismatch"], None, "default_pg")
def evaluates_on_one_rank_only(job):
    job.steps(3)
    x = job.ones(4096)
    if job.rank == 1:
        job.dist.broadcast(x, src=0)  # own
    else:
        job.dist.all_reduce(x)  # others
    job.torch.cuda.synchronize()
    wait_for_ever()


@faulty(["rank_exited"], 1, "default_pg")
def leaves_by_os_exit(job):
    job.steps(3)
    if job.rank == 1:
        os._exit(1)
    job.dist.all_reduce(job.ones(4096))  # others
    job.torch.cuda.synchronize()


@faulty(["out_of_memory"], 1, "default_pg")
def runs_out_of_memory_on_one_rank(job):
    job.steps(3)
    kept = []
    if job.rank == 1:
        job.torch.cuda.set_per_process_memory_fraction(0.05)
    for _ in range(20):
        if job.rank == 1:
            kept.append(job.ones(1 << 28))  # own
        job.dist.all_reduce(job.ones(4096))  # others
        job.torch.cuda.synchronize()


@faulty(["swapped_communicators", "deadlock_cycle", "order_inversion", "wrong_communicator"], None, "tensor parallel")
def uses_two_groups_in_different_orders(job):
    job.steps(1)
    other = job.dist.new_group([0, 1], group_desc="tensor parallel")
    x, y = job.ones(1 << 20), job.ones(1 << 20)
    job.dist.all_reduce(y, group=other)
    job.torch.cuda.synchronize()
    if job.rank == 0:
        job.dist.all_reduce(x)  # others
        job.torch.cuda.synchronize()
        job.dist.all_reduce(y, group=other)
    else:
        job.dist.all_reduce(y, group=other)  # own
        job.torch.cuda.synchronize()
        job.dist.all_reduce(x)
    job.torch.cuda.synchronize()


@faulty(["straggler"], 1, "default_pg", hangs=False)
def comes_late_at_each_step(job):
    x = job.ones(1 << 16)
    for _ in range(40):
        if job.rank == 1:
            time.sleep(random.uniform(0.03, 0.07))
        job.dist.all_reduce(x)  # own others
        job.torch.cuda.synchronize()


# ---- Healthy jobs.


@healthy
def trains_with_ddp(job):
    model = job.torch.nn.parallel.DistributedDataParallel(job.model(), device_ids=[job.rank])
    optimizer = job.torch.optim.Adam(model.parameters())
    for _ in range(30):
        optimizer.zero_grad()
        model(job.torch.randn(64, 1024, device=job.device)).square().mean().backward()
        optimizer.step()
    job.torch.cuda.synchronize()


@healthy
def trains_with_fsdp(job):
    from torch.distributed.fsdp import fully_shard

    model = job.model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = job.torch.optim.AdamW(model.parameters())
    for _ in range(30):
        optimizer.zero_grad()
        model(job.torch.randn(64, 1024, device=job.device)).square().mean().backward()
        optimizer.step()
    job.torch.cuda.synchronize()


@healthy
def passes_activations_down_a_pipeline(job):
    group = job.dist.new_group([0, 1], group_desc="pipeline")
    for _ in range(30):
        x = job.ones(1 << 16)
        if job.rank == 0:
            job.dist.send(x, 1, group=group)
            job.dist.recv(x, 1, group=group)
        else:
            job.dist.recv(x, 0, group=group)
            job.dist.send(x, 0, group=group)
        job.dist.all_reduce(x)
    job.torch.cuda.synchronize()


@healthy
def starts_late_on_one_rank_and_is_uneven(job):
    if job.rank == 1:
        time.sleep(4)
    model = job.torch.nn.parallel.DistributedDataParallel(job.model(), device_ids=[job.rank])
    from torch.distributed.algorithms.join import Join

    with Join([model]):
        for _ in range(10 + 5 * job.rank):
            model(job.torch.randn(64, 1024, device=job.device)).square().mean().backward()
    job.torch.cuda.synchronize()


# ---- The test.


def marks(function):
    """The line numbers of its marks."""
    text, first = inspect.getsourcelines(function)
    lines = {"own": [], "others": []}
    for number, line in enumerate(text, first):
        for mark in lines:
            if "# " in line and mark in line.rsplit("# ", 1)[1].split():
                lines[mark].append(number)
    return lines


def record(folder, name, out):
    """Runs the job's ranks under the recorder, and kills what hangs; whether it did."""
    port = str(random.randint(20000, 40000))
    command = [f"{folder}/gputrace", "record", "-f", "-o", f"{out}/r%r.gtr", "--", sys.executable, HERE, "--rank", name]
    processes = []
    for rank in range(RANKS):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
        # The watchdog of PyTorch would end a job that hangs before we do.
        environment.update(MASTER_PORT=port, NCCL_NVLS_ENABLE="0", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
        with open(f"{out}/{rank}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
    ends = time.monotonic() + HANGS_AFTER_S
    while any(one.poll() is None for one in processes) and time.monotonic() < ends:
        time.sleep(0.1)
    hung = [one for one in processes if one.poll() is None]
    for one in hung:
        os.killpg(one.pid, signal.SIGKILL)
    for one in processes:
        one.wait()
    return bool(hung)


def said(folder, out):
    """The job of `gputrace ranks --json`."""
    command = [f"{folder}/gputrace", "ranks", "--json", *sorted(glob.glob(f"{out}/r*.gtr"))]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout)["jobs"][0]


def lines_of(finding):
    """All lines that a finding names."""
    places = [side.get("place") for side in (finding.get("own"), finding.get("others")) if side]
    return {place["line"] for place in places if place}


def judge(job, expected, lines):
    """What is wrong with what was said; nothing where all is well."""
    findings = job["findings"]
    if expected is None:
        return [f"a healthy job has {finding['kind']}: {finding['text']}" for finding in findings]
    if not findings:
        return ["nothing was found"]
    first, wrong = findings[0], []
    if first["kind"] not in expected["kinds"]:
        wrong.append(f"kind is {first['kind']}")
    if expected["rank"] is not None and first["ranks"] != [expected["rank"]]:
        wrong.append(f"ranks are {first['ranks']}")
    if expected["group"] not in (first["communicator"] or "") and expected["group"] not in first["text"]:
        wrong.append(f"the group is {first['communicator']}")
    marked = set(lines["own"] + lines["others"])
    if marked and not lines_of(first) & marked:
        wrong.append(f"lines are {sorted(lines_of(first))}, not {sorted(marked)}")
    return wrong


def run(folder, out, name):
    """Records the job and asks; what is wrong, and what to print of it."""
    function, expected = JOBS[name]
    here = f"{out}/{name}"
    os.makedirs(here, exist_ok=True)
    hung = record(folder, name, here)
    time.sleep(2)
    try:
        job = said(folder, here)
        wrong = judge(job, expected, marks(function))
    except (ValueError, LookupError) as error:
        job, wrong = {"findings": []}, [f"ranks said nothing that can be read: {error!r}"]
    if expected is None and hung:
        wrong.append("it did not end")
    lines = [f"{'FAIL' if wrong else 'PASS'}  {name:<40} {'hung, killed' if hung else 'ended'}"]
    for finding in job["findings"][:2]:
        lines.append(f"      {finding['kind']} {finding['ranks']} of {finding['communicator']}: {finding['text']}")
    lines += [f"      WRONG: {why}" for why in wrong]
    if wrong:
        lines += ["".join(open(f"{here}/{rank}.log").readlines()[-6:]) for rank in range(RANKS)]
    return bool(wrong), "\n".join(lines)


def main(folder, names):
    out = os.environ.get("OUT") or tempfile.mkdtemp(prefix="gputrace-distributed-")
    names, failures = names or list(JOBS), 0
    # Several at a time: a healthy job must be called so on a busy machine too.
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for failed, text in pool.map(lambda name: run(folder, out, name), names):
            failures += failed
            print(text, flush=True)
    print(f"{len(names) - failures} of {len(names)} as they should be")
    return failures != 0


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        this = Rank()
        JOBS[sys.argv[2]][0](this)
        this.dist.destroy_process_group()
    else:
        sys.exit(main(os.path.abspath(sys.argv[1]), sys.argv[2:]))
