#!/usr/bin/env python3
"""Attaches to programs that run, and detaches, at random moments, hundreds of times: what they compute is what they compute alone.

usage: [ONLY=WORD,...] rounds.py FOLDER [ROUNDS [SECONDS]]

FOLDER has `gputrace` and `libgputrace.so`. Each program computes without an end, twice at the same time: one is attached to and detached from
ROUNDS times (default 100), or for SECONDS (default 300), the other is left alone. All were started without the library. Their numbers must be
the same as far as both came, to the bit; none may end, hang or say anything else; each attach and detach must succeed or refuse with a
reason, and leave a trace that can be read (each tenth is). Prints how long attach and detach took, and the longest turn of both. CuPy, JAX
and nvcc where they are there. PASS, FAIL, SKIP and NOTE lines; exit status 0 only without FAIL. One GPU, 16 processors or fewer programs at once.
"""
import collections, glob, importlib.util, json, os, random, shutil, statistics, subprocess, sys, tempfile, threading, time

FOLDER = os.path.abspath(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 300
GPUTRACE = os.path.join(FOLDER, "gputrace")
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
WORK = tempfile.mkdtemp()
failed, said = [], threading.Lock()

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
PROGRAMS = {
    "PyTorch": ("torch", TORCH, {}),
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

    def __init__(self, folder, command, environment):
        os.makedirs(folder)
        self.folder = folder
        self.out, self.err = open(f"{folder}/out", "w"), open(f"{folder}/err", "w")
        self.process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=self.out, stderr=self.err)

    def lines(self):
        with open(f"{self.folder}/out") as file:
            return [line.split() for line in file.read().split("\n")[:-1]]

    def stop(self):
        open(f"{self.folder}/stop", "w").close()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "none in 60 s"


def rounds(name, one, until):
    """Attaches and detaches; times, reasons of refusals, and what was wrong."""
    chance, took, refused, wrong = random.Random(name), collections.defaultdict(list), collections.Counter(), []
    done = 0
    while done < ROUNDS and time.monotonic() < until and one.process.poll() is None and len(wrong) < 3:
        time.sleep(chance.random() * 0.08)
        trace = f"{one.folder}/{done}.gtr"
        code, text, seconds = gputrace("attach", "-o", trace, str(one.process.pid))
        if code:
            refused[text.strip().splitlines()[-1][:150] if text.strip() else f"status {code}"] += 1
            if sum(refused.values()) > 2 * ROUNDS:
                break
            continue
        took["attach"].append(seconds)
        time.sleep(chance.random() * 0.15)
        code, text, seconds = gputrace("detach", str(one.process.pid))
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
        for old in glob.glob(f"{one.folder}/{done}.gtr*"):
            os.remove(old)
        done += 1
    return done, took, refused, wrong


def ready(one):
    """Once it computes."""
    deadline = time.monotonic() + 120
    while len(one.lines()) < 20 and one.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)


def work(number, name):
    needs, text, environment = PROGRAMS[name]
    if (needs == "nvcc" and not os.path.exists(NVCC)) or (needs != "nvcc" and importlib.util.find_spec(needs) is None):
        return say("SKIP", f"{name}: no {needs}")
    source = f"{WORK}/{number}.{'cu' if needs == 'nvcc' else 'py'}"
    with open(source, "w") as file:
        file.write(text)
    command = [sys.executable, source]
    if needs == "nvcc":
        command = [f"{WORK}/{number}"]
        subprocess.run([NVCC, "-O1", "-cudart", "static", "-o", command[0], source, "-lpthread"], check=True)
    alone, one = (Running(f"{WORK}/{number}.{which}", command, environment) for which in ("alone", "one"))
    ready(one)
    n_before = len(one.lines())
    done, took, refused, wrong = rounds(name, one, time.monotonic() + SECONDS)
    n_during = len(one.lines()) - n_before
    time.sleep(0.5)
    ended = [it.stop() for it in (one, alone)]
    lines = [it.lines() for it in (one, alone)]
    both = min(map(len, lines))
    differ = next((at for at in range(both) if lines[0][at][0] != lines[1][at][0]), None)
    errors = open(f"{one.folder}/err").read().strip()
    if ended != [0, 0]:
        wrong.append(f"ended with {ended}: {errors[-400:]}")
    if differ is not None:
        wrong.append(f"turn {differ}: {lines[0][differ][0]}, alone {lines[1][differ][0]}")
    if len(lines[0]) < n_before + n_during or not done:
        wrong.append(f"{done} rounds, {len(lines[0])} turns")
    say("FAIL" if wrong else "PASS", f"{name}: {done} rounds during {n_during} turns, {both} compared: {'; '.join(wrong) or 'the same to the bit'}")
    for what, times in took.items():
        times = sorted(times)
        say("NOTE", f"{name}: {what} median {1e3 * statistics.median(times):.0f} ms, 99 % {1e3 * times[int(0.99 * (len(times) - 1))]:.0f} ms")
    if both:
        turn = [sorted(float(line[1]) for line in it[20:]) for it in lines]
        at = lambda times, share: times[int(share * (len(times) - 1))]
        say("NOTE", f"{name}: a turn takes {at(turn[0], 0.5):.2f} ms, 99.9 % {at(turn[0], 0.999):.1f}, longest {turn[0][-1]:.1f}; "
                    f"alone {at(turn[1], 0.5):.2f}, {at(turn[1], 0.999):.1f}, {turn[1][-1]:.1f}")
    for reason, n in refused.most_common(4):
        say("NOTE", f"{name}: refused {n} times: {reason}")


def main():
    only = [word for word in os.environ.get("ONLY", "").split(",") if word]
    names = [name for name in PROGRAMS if not only or any(word.lower() in name.lower() for word in only)]
    threads = [threading.Thread(target=work, args=(number, name)) for number, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(names)} programs, {len(failed)} failed")
    sys.exit(bool(failed) or not names)


main()
