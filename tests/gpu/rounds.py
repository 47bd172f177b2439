#!/usr/bin/env python3
"""Attaches to programs that run, and detaches, at random moments, hundreds of times: what they compute is what they compute alone.

usage: [ONLY=WORD,...] rounds.py FOLDER [ROUNDS [SECONDS]]

FOLDER has `gputrace` and `libgputrace.so`. Each program computes without an end, twice at the same time: one is attached to and detached from
ROUNDS times (default 100), or for SECONDS (default 300), the other is left alone. All were started without the library. Their numbers must be
the same as far as both came, to the bit; none may end, hang or say anything else; each attach and detach must succeed or refuse with a
reason, and leave a trace that can be read (each tenth is). Prints how long attach and detach took, and the longest turn of both. CuPy, JAX,
nvcc and a second GPU where they are there; of a job, all ranks are attached to at once. PASS, FAIL, SKIP and NOTE lines; exit status 0 only without
FAIL. One GPU, 16 processors or fewer programs at once.
"""
import collections, concurrent.futures, glob, importlib.util, json, os, random, re, shutil, socket, statistics, subprocess, sys, tempfile, threading, time

FOLDER = os.path.abspath(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 300
GPUTRACE = os.path.join(FOLDER, "gputrace")
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
WORK = tempfile.mkdtemp()
failed, said = [], threading.Lock()
table, stood_still = [], collections.defaultdict(list)

# Writes a number and its milliseconds in a line each turn, until the file `stop` appears.
TURNS = """
import os, sys, time
def turns(step):
    number = 0
    while not os.path.exists("stop"):
        began = time.perf_counter()
        value = step(number)
        print(value, round(1000 * (time.perf_counter() - began), 3), flush=True)
        number += 1
"""
TORCH = TURNS + """
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step(number):
    loss = model(torch.randn(64 + number % 7 * 32, 512, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if number % 50 == 49:
        torch.cuda.empty_cache()
    return loss.item().hex()
turns(step)
"""
LOADER = TURNS + """
import torch
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        made = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(256, generator=made)
if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=32, num_workers=1, pin_memory=True))
    side = torch.cuda.Stream()
    def step(number):
        x = next(batches).cuda(non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = model(x); x.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        return y.sum().item().hex()
    turns(step)
    os._exit(0)
"""
CUPY = TURNS + """
import cupy
total = cupy.zeros(1 << 16, dtype=cupy.int64)
def step(number):
    global total
    total = total + cupy.arange(1 << 16, dtype=cupy.int64) * number
    if number % 20 == 19:
        cupy.get_default_memory_pool().free_all_blocks()
    return int(total.sum())
turns(step)
"""
JAX = TURNS + """
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
import jax, jax.numpy as jnp
@jax.jit
def work(x, number):
    return x * 31 + number
x = jnp.arange(1 << 14, dtype=jnp.int32)
def step(number):
    global x
    x = work(x, number)
    return int(x.sum())
turns(step)
"""
THREADS = r"""
#include <cuda_runtime.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>
#include <unistd.h>
__global__ void add(unsigned *to, unsigned n) { for (unsigned i = threadIdx.x; i < 4096; i += blockDim.x) to[i] = to[i] * 31u + n + i; }
static unsigned long work(int thread, unsigned turn) {
    unsigned long sum = 0;
    cudaStream_t stream;
    if (cudaStreamCreate(&stream)) _exit(9);
    for (unsigned n = 0; n < 20; n++) {
        unsigned *memory = nullptr, out[4096];
        size_t bytes = sizeof out * (1 + n % 3);
        if (n % 2 ? cudaMallocAsync((void **)&memory, bytes, stream) : cudaMalloc((void **)&memory, bytes)) _exit(10);
        if (cudaMemsetAsync(memory, thread, bytes, stream)) _exit(11);
        add<<<1, 128, 0, stream>>>(memory, turn + n);
        if (cudaMemcpyAsync(out, memory, sizeof out, cudaMemcpyDeviceToHost, stream) || cudaStreamSynchronize(stream)) _exit(12);
        for (unsigned value : out) sum = sum * 1000003 + value;
        if (n % 2 ? cudaFreeAsync(memory, stream) : cudaFree(memory)) _exit(13);
    }
    if (cudaStreamDestroy(stream)) _exit(14);
    return sum;
}
int main() {
    for (unsigned turn = 0; access("stop", F_OK); turn++) {
        auto began = std::chrono::steady_clock::now();
        std::vector<unsigned long> sums(4);
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; i++) threads.emplace_back([&, i] { sums[i] = work(i, turn); });
        for (auto &thread : threads) thread.join();
        double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
        printf("%lx%lx%lx%lx %.3f\n", sums[0], sums[1], sums[2], sums[3], ms); fflush(stdout);
    }
}
"""
DDP = """
import os, sys, time
import torch, torch.distributed as dist
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).to(device), device_ids=[rank])
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(rank)
number = 0
while True:
    began = time.perf_counter()
    loss = model(torch.randn(64 + number % 7 * 32, 512, device=device)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if number % 50 == 49:
        torch.cuda.empty_cache()
    # All ranks end with the same turn.
    ends = torch.tensor([float(os.path.exists("stop"))], device=device)
    dist.all_reduce(ends)
    if ends.item():
        break
    print(loss.item().hex(), round(1000 * (time.perf_counter() - began), 3), flush=True)
    number += 1
dist.destroy_process_group()
"""
ASLEEP = {"LD_PRELOAD": os.path.join(FOLDER, "libgputrace.so"), "GPUTRACE": "dormant"}
PROGRAMS = {
    "DDP on two GPUs": ("two", DDP, {}),
    "DDP on two GPUs, asleep before": ("two", DDP, ASLEEP),
    "PyTorch": ("torch", TORCH, {}),
    "PyTorch, asleep before": ("torch", TORCH, ASLEEP),
    "PyTorch, expandable segments": ("torch", TORCH, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "PyTorch, a loader's child and a second stream": ("torch", LOADER, {}),
    "CuPy": ("cupy", CUPY, {}),
    "JAX": ("jax", JAX, {}),
    "C++ with threads that come and go, cudart inside": ("nvcc", THREADS, {}),
}


def say(verdict, text):
    with said:
        print(verdict, text, flush=True)
        if verdict == "FAIL":
            failed.append(text)


def gputrace(*arguments):
    began = time.perf_counter()
    try:
        run = subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True, timeout=60)
        return run.returncode, run.stdout + run.stderr, time.perf_counter() - began
    except subprocess.TimeoutExpired:
        return -1, "no answer in 60 s", 60.0


class Running:
    """A program that computes until it is stopped."""

    def __init__(self, folder, command, environment, ranks=1):
        os.makedirs(folder)
        self.folder, self.processes, self.outs = folder, [], []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
            job = {name: str(value) for name, value in job.items()}
            self.outs.append(f"{folder}/out.{rank}")
            with open(self.outs[-1], "w") as out, open(f"{folder}/err", "a") as err:
                self.processes.append(subprocess.Popen(command, cwd=folder, env={**os.environ, **environment, **job}, stdout=out, stderr=err))

    def lines(self, rank=0):
        with open(self.outs[rank]) as file:
            return [line.split() for line in file.read().split("\n")[:-1]]

    def runs(self):
        return all(process.poll() is None for process in self.processes)

    def stop(self):
        open(f"{self.folder}/stop", "w").close()
        ends = []
        for process in self.processes:
            try:
                ends.append(process.wait(60))
            except subprocess.TimeoutExpired:
                process.kill()
                ends.append("none in 60 s")
        return ends


def of_all(one, verb, *arguments):
    """Of each process at the same time; the first answer that is a refusal, else the slowest."""
    with concurrent.futures.ThreadPoolExecutor(len(one.processes)) as pool:
        asked = [pool.submit(gputrace, verb, *[it.replace("%r", str(rank)) for it in arguments], str(process.pid)) for rank, process in enumerate(one.processes)]
        answers = [it.result() for it in asked]
    return next((it for it in answers if it[0]), max(answers, key=lambda it: it[2]))


def rounds(name, one, until):
    """Attaches and detaches; times, reasons of refusals, and what was wrong."""
    chance, took, refused, wrong = random.Random(name), collections.defaultdict(list), collections.Counter(), []
    done = 0
    while done < ROUNDS and time.monotonic() < until and one.runs() and len(wrong) < 3:
        time.sleep(chance.random() * 0.08)
        trace = f"{one.folder}/{done}.0.gtr"
        code, text, seconds = of_all(one, "attach", "-o", f"{one.folder}/{done}.%r.gtr")
        if code:
            # The others of a job were attached to.
            if len(one.processes) > 1:
                of_all(one, "detach")
                for old in glob.glob(f"{one.folder}/{done}.*gtr*"):
                    os.remove(old)
            refused[text.strip().splitlines()[-1][:150] if text.strip() else f"status {code}"] += 1
            if sum(refused.values()) > 2 * ROUNDS:
                break
            continue
        took["attach"].append(seconds)
        stood_still[id(one)] += [int(micros) for micros in re.findall(r"at most (\d+) µs", text)]
        time.sleep(chance.random() * 0.15)
        code, text, seconds = of_all(one, "detach")
        took["detach"].append(seconds)
        if code:
            wrong.append(f"detach {done}: {text.strip()[-300:]}")
        if done % 10 == 0:
            deadline = time.monotonic() + 20
            while True:
                code, text, _ = gputrace("summary", "--json", trace)
                process = json.loads(text)["processes"][0] if code == 0 else {}
                if process.get("complete") or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            if not process.get("complete") or process["damage"] or process["lost_events"]:
                wrong.append(f"trace {done}: status {code}, {process.get('complete')}, {process.get('lost_events')}: {text[:200]}")
        for old in glob.glob(f"{one.folder}/{done}.*gtr*"):
            os.remove(old)
        done += 1
    return done, took, refused, wrong


def n_gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
    return listed.count("GPU ")


def ready(one):
    """Once it computes."""
    deadline = time.monotonic() + 120
    while len(one.lines()) < 20 and one.runs() and time.monotonic() < deadline:
        time.sleep(0.2)


def prepare(number, name):
    """How to start the program, its variables when it is left alone and when it is attached to, and its ranks; None, said, where it cannot be."""
    needs, text, environment = PROGRAMS[name]
    ranks = 2 if needs == "two" else 1
    if needs == "two" and n_gpus() < 2:
        return say("SKIP", f"{name}: one GPU")
    module = "torch" if needs == "two" else needs
    if (needs == "nvcc" and not os.path.exists(NVCC)) or (needs != "nvcc" and importlib.util.find_spec(module) is None):
        return say("SKIP", f"{name}: no {module}")
    source = f"{WORK}/{number}.{'cu' if needs == 'nvcc' else 'py'}"
    with open(source, "w") as file:
        file.write(text)
    command = [sys.executable, source]
    if needs == "nvcc":
        command = [f"{WORK}/{number}"]
        subprocess.run([NVCC, "-O1", "-cudart", "static", "-o", command[0], source, "-lpthread"], check=True)
    return command, {} if environment is ASLEEP else environment, environment, ranks


def work(number, name):
    prepared = prepare(number, name)
    if not prepared:
        return
    command, without, environment, ranks = prepared
    alone, one = (Running(f"{WORK}/{number}.{which}", command, variables, ranks) for which, variables in (("alone", without), ("one", environment)))
    for it in (one, alone):
        ready(it)
    n_before = len(one.lines())
    done, took, refused, wrong = rounds(name, one, time.monotonic() + SECONDS)
    n_during = len(one.lines()) - n_before
    time.sleep(0.5)
    ended = [it.stop() for it in (one, alone)]
    both, differ = 0, None
    for rank in reversed(range(ranks)):
        lines = [it.lines(rank) for it in (one, alone)]
        both = min(map(len, lines))
        differ = next((at for at in range(both) if lines[0][at][0] != lines[1][at][0]), None)
        if differ is not None:
            break
    errors = open(f"{one.folder}/err").read().strip()
    crashes, hangs = (sum(bool(status) and isinstance(status, kind) for it in ended for status in it) for kind in (int, str))
    if crashes or hangs:
        wrong.append(f"ended with {ended}: {errors[-400:]}")
    if differ is not None:
        wrong.append(f"turn {differ}: {lines[0][differ][0]}, alone {lines[1][differ][0]}")
    if len(lines[0]) < n_before + n_during or not done:
        wrong.append(f"{done} rounds, {len(lines[0])} turns")
    say("FAIL" if wrong else "PASS", f"{name}: {done} rounds during {n_during} turns, {both} compared: {'; '.join(wrong) or 'the same to the bit'}")
    row = [name, done, sum(refused.values()), int(differ is not None), crashes, hangs]
    still = sorted(stood_still.get(id(one), []))
    row += [f"{still[len(still) // 2]} µs", f"{still[int(0.99 * (len(still) - 1))]} µs"] if still else ["-", "-"]
    for what, times in took.items():
        times = sorted(times)
        say("NOTE", f"{name}: {what} median {1e3 * statistics.median(times):.0f} ms, 99 % {1e3 * times[int(0.99 * (len(times) - 1))]:.0f} ms")
    if both:
        turn = [sorted(float(line[1]) for line in it[20:]) for it in lines]
        at = lambda times, share: times[int(share * (len(times) - 1))]
        say("NOTE", f"{name}: a turn takes {at(turn[0], 0.5):.2f} ms, 99.9 % {at(turn[0], 0.999):.1f}, longest {turn[0][-1]:.1f}; "
                    f"alone {at(turn[1], 0.5):.2f}, {at(turn[1], 0.999):.1f}, {turn[1][-1]:.1f}")
        row += [f"{at(it, share):.1f} ms" for share in (0.99, 0.999) for it in turn]
    table.append(row)
    for reason, n in refused.most_common(4):
        say("NOTE", f"{name}: refused {n} times: {reason}")


def print_table():
    """Where threads were borrowed, how long one stood still; and turns of the one and of the copy that was left alone."""
    head = ["program", "rounds", "refused", "changed", "crashes", "hangs", "still", "99 %", "turn 99 %", "alone", "99.9 %", "alone"]
    rows = [head] + [[str(it) for it in row] + [""] * (len(head) - len(row)) for row in table]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))), flush=True)


def main(at_once=99):
    only = [word for word in os.environ.get("ONLY", "").split(",") if word]
    names = [name for name in PROGRAMS if not only or any(word.lower() in name.lower() for word in only)]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for it in [pool.submit(work, number, name) for number, name in enumerate(names)]:
            it.result()
    print_table()
    print(f"{len(names)} programs, {len(failed)} failed")
    sys.exit(bool(failed) or not names)


if __name__ == "__main__":
    main()
