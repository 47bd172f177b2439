#!/usr/bin/env python3
"""Holds the ledger against the driver on a machine with one GPU.

usage: ledger.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps programs and traces (default: a temporary folder). Needs torch; jax, cupy,
nvcc and compute-sanitizer where they are there. One line a check, PASS, FAIL or SKIP; exit status 0 only without FAIL. About five
minutes.
"""
import glob, json, os, shutil, subprocess, sys, tempfile, textwrap, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
MIB = 1 << 20
failed = 0

TORCH = """
import torch
torch.manual_seed(1)
d = 2048
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True), 8).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    torch.cuda.nvtx.range_push(f"step {step}")
    x = torch.randn(8, 256 + 64 * (step % 4), d, device="cuda", dtype=torch.bfloat16)
    torch.cuda.nvtx.range_push("forward")
    loss = model(x).float().square().mean()
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_push("backward")
    loss.backward()
    torch.cuda.nvtx.range_pop()
    optimizer.step(); optimizer.zero_grad()
    torch.cuda.nvtx.range_pop()
torch.cuda.synchronize()
import time; time.sleep(1.5)
"""

JAX = """
import os
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp, time
@jax.jit
def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2))(w)
    return w - 0.01 * grad, loss
w = jax.random.normal(jax.random.PRNGKey(0), (8192, 8192)); x = jax.random.normal(jax.random.PRNGKey(1), (16384, 8192))
for n in range(10): w, loss = step(w, x)
loss.block_until_ready(); time.sleep(1.5)
"""

CUPY = """
import cupy, time
a = cupy.random.rand(16384, 16384, dtype=cupy.float32); total = cupy.zeros_like(a)
for n in range(8): total += cupy.sin(a * n) @ a[:, ::-1]
print(float(total.sum())); time.sleep(1.5)
"""

PLAIN = """
#include <cuda_runtime.h>
#include <cstdio>
#include <unistd.h>
__global__ void fill(float *p, size_t n, float v) { for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) p[i] = v; }
int main() {
    float *large[6], *small[4000]; void *pool[16];
    for (int i = 0; i < 6; i++) { cudaMalloc(&large[i], (512ull << 20) + i * 12345); fill<<<256, 256>>>(large[i], 128 << 20, i); }
    for (int i = 0; i < 4000; i++) cudaMalloc(&small[i], 700 + 37 * (i % 100));
    for (int i = 0; i < 4000; i += 2) cudaFree(small[i]);
    cudaFree(large[2]);
    for (int i = 0; i < 16; i++) cudaMallocAsync(&pool[i], 20 << 20, 0);
    cudaDeviceSynchronize(); usleep(800000);
    for (int i = 0; i < 16; i++) cudaFreeAsync(pool[i], 0);
    cudaDeviceSynchronize(); usleep(1500000);
    printf("%s\\n", cudaGetErrorString(cudaGetLastError()));
}
"""

LEAK = """
#include <cuda_runtime.h>
int main() { for (int i = 0; i < 100; i++) { void *p; cudaMalloc(&p, 65536); } return cudaDeviceSynchronize(); }
"""

# What vLLM's cumem does: physical memory comes and goes, the addresses stay.
SLEEP = """
import ctypes as C
cuda = C.CDLL("libcuda.so.1")
def ok(result, what):
    if result: raise SystemExit(f"{what}: {result}")
class Prop(C.Structure): _fields_ = [("type", C.c_int), ("handles", C.c_int), ("ltype", C.c_int), ("lid", C.c_int), ("win32", C.c_void_p), ("flags", C.c_ubyte * 8)]
class Access(C.Structure): _fields_ = [("ltype", C.c_int), ("lid", C.c_int), ("flags", C.c_int)]
prop, access = Prop(1, 0, 1, 0, None), Access(1, 0, 3)
ok(cuda.cuInit(0), "init"); context = C.c_void_p()
ok(cuda.cuDevicePrimaryCtxRetain(C.byref(context), 0), "retain"); ok(cuda.cuCtxSetCurrent(context), "current")
size, n = 256 << 20, 12
address = C.c_uint64(); u64 = C.c_uint64; zero = u64(0)
ok(cuda.cuMemAddressReserve(C.byref(address), C.c_size_t(size * n), C.c_size_t(0), zero, zero), "reserve")
handles = {}
def wake(i):
    handle = u64(); ok(cuda.cuMemCreate(C.byref(handle), C.c_size_t(size), C.byref(prop), zero), "create")
    at = u64(address.value + i * size)
    ok(cuda.cuMemMap(at, C.c_size_t(size), C.c_size_t(0), handle, zero), "map")
    ok(cuda.cuMemSetAccess(at, C.c_size_t(size), C.byref(access), C.c_size_t(1)), "access"); handles[i] = handle
def sleep(i):
    ok(cuda.cuMemUnmap(u64(address.value + i * size), C.c_size_t(size)), "unmap"); ok(cuda.cuMemRelease(handles.pop(i)), "release")
for round in range(4):
    for i in range(n): wake(i)
    for i in range(n)[:: 1 if round % 2 else -1]: sleep(i)
for i in range(4): wake(i)
# Retained by address, as NCCL frees: retain, release, unmap, release.
handle = u64(); ok(cuda.cuMemRetainAllocationHandle(C.byref(handle), C.c_void_p(address.value)), "retain")
print("retained the same value:", handle.value == handles[0].value)
ok(cuda.cuMemRelease(handle), "release"); sleep(0)
import time; time.sleep(1.2)
"""

EXPANDABLE = """
import torch
kept = []
for n in range(60):
    x = torch.empty((n % 9 + 1) * 30 << 20, dtype=torch.uint8, device="cuda")
    if n % 3 == 0: kept.append(x)
    if n % 10 == 9: del kept[:2]; torch.cuda.empty_cache()
side = torch.cuda.Stream()
with torch.cuda.stream(side): y = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
y.record_stream(torch.cuda.current_stream()); del y; torch.cuda.synchronize(); torch.cuda.empty_cache()
"""

GRAPHS = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
x = torch.randn(512, 2048, device="cuda")
for _ in range(3): model(x).sum().backward()
model.zero_grad(set_to_none=True); graphs, pool = [], None
for n in range(3):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool): loss = model(x).square().mean()
    pool = pool or graph.pool(); graphs.append((graph, loss))
for _ in range(5):
    for graph, _ in graphs: graph.replay()
other = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(other): z = [torch.empty(32 << 20, device="cuda") for _ in range(4)]
del z, graphs, graph, loss; torch.cuda.synchronize(); torch.cuda.empty_cache()
"""

GRAPH_NODES = """
#include <cuda_runtime.h>
#include <cstdio>
#include <unistd.h>
#define OK(call) do { cudaError_t e = call; if (e) { printf("%s: %s\\n", #call, cudaGetErrorString(e)); return 1; } } while (0)
int main() {
    cudaStream_t stream; cudaGraph_t graph; cudaGraphExec_t exec; void *p, *q;
    OK(cudaStreamCreate(&stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    OK(cudaMallocAsync(&p, 1ull << 30, stream)); OK(cudaMemsetAsync(p, 1, 1ull << 30, stream)); OK(cudaFreeAsync(p, stream));
    OK(cudaMallocAsync(&q, 256ull << 20, stream)); OK(cudaMemsetAsync(q, 1, 256ull << 20, stream));
    OK(cudaStreamEndCapture(stream, &graph)); OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, stream)); OK(cudaStreamSynchronize(stream)); usleep(700000);
    unsigned long long used, reserved;
    OK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &used));
    OK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrReservedMemCurrent, &reserved));
    printf("graphs: used %llu, reserved %llu\\n", used, reserved);
    OK(cudaFreeAsync(q, stream)); OK(cudaStreamSynchronize(stream)); OK(cudaGraphExecDestroy(exec)); OK(cudaGraphDestroy(graph));
    OK(cudaDeviceGraphMemTrim(0)); usleep(700000);
}
"""


def say(verdict, what, detail=""):
    global failed
    failed += verdict == "FAIL"
    print(f"{verdict}  {what}{': ' if detail else ''}{detail}", flush=True)


def check(good, what, detail=""):
    say("PASS" if good else "FAIL", what, detail)


def write(name, text):
    path = os.path.join(WORK, name)
    with open(path, "w") as out: out.write(textwrap.dedent(text))
    return path


def has(module):
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


def nvcc(name, text):
    source, target = write(name + ".cu", text), os.path.join(WORK, name)
    built = subprocess.run(["nvcc", "-O1", "-o", target, source], capture_output=True, text=True)
    if built.returncode: say("SKIP", f"{name}.cu", built.stderr[-300:])
    return target if built.returncode == 0 else None


def record(name, command, **environment):
    trace = os.path.join(WORK, f"{name}.%p.gtr")
    for old in glob.glob(os.path.join(WORK, f"{name}.*.gtr")): os.remove(old)
    began = time.time()
    run = subprocess.run([GPUTRACE, "record", "-f", "-o", trace, "--"] + command, env=dict(os.environ, **environment),
                         capture_output=True, text=True, timeout=200)
    if run.returncode: say("FAIL", f"{name} runs", f"status {run.returncode}: {run.stderr[-400:]}"); return None
    traces = sorted(glob.glob(os.path.join(WORK, f"{name}.*.gtr")), key=os.path.getsize)
    if not traces: say("FAIL", f"{name} leaves a trace", run.stderr[-400:]); return None
    print(f"      {name}: {time.time() - began:.0f} s, {os.path.getsize(traces[-1])} bytes; {run.stdout.strip()[-100:]}")
    return traces[-1]


def verb(*arguments):
    run = subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True)
    return run.stdout


def summary(trace):
    return json.loads(verb("summary", "--json", trace))["processes"][0]


PARTS = ("tracked", "rounding", "context", "code", "graph", "pool", "peer", "unaccounted")


def samples(name, trace):
    """(a) Every sample adds up, and little of the peak is unaccounted."""
    process = summary(trace)
    check(process["lost_events"] == 0, f"{name}: no event lost", str(process["lost_events"]))
    device = next((device for device in process["devices"] if device["samples"]), None)
    known = [s for s in (device or {}).get("samples", []) if s["process_used_bytes"]]
    if not known: return say("FAIL", f"{name}: NVML charges the process", "no sample with the process's bytes")
    wrong = [s for s in known if s["process_used_bytes"] != sum(s[f"{part}_bytes"] for part in PARTS)]
    check(not wrong, f"{name}: owners + context + ... + unaccounted = used at each of {len(known)} samples", str(wrong[:1]))
    peak = max(known, key=lambda s: s["process_used_bytes"])
    beyond = peak["process_used_bytes"] - peak["context_bytes"]
    share = abs(peak["unaccounted_bytes"]) / max(beyond, 1)
    shown = " ".join(f"{part} {peak[f'{part}_bytes'] / MIB:.1f}" for part in PARTS)
    check(share < 0.02, f"{name}: unaccounted at the peak < 2 %", f"{share:.3%} of {beyond / MIB:.0f} MiB ({shown}; MiB)")
    worst = max(known, key=lambda s: abs(s["unaccounted_bytes"]))
    print(f"      {name}: largest unaccounted of all samples {worst['unaccounted_bytes'] / MIB:.1f} MiB of "
          f"{worst['process_used_bytes'] / MIB:.0f}; trend {device['unaccounted']}")
    print(f"      {name}: code {[(c['owner'], round(c['bytes'] / MIB, 1)) for c in device['code']]}")
    print(f"      {name}: owners {[(o['owner'], round(o['bytes_at_peak'] / MIB, 1)) for o in device['owners'][:6]]}")


def audited(name, trace):
    """(c) The naive checker finds nothing."""
    text = verb("doctor", trace)
    good = "every total, range and block is consistent" in text
    check(good, f"{name}: the auditor finds nothing", "" if good else text[-700:])
    problems = [line for line in text.splitlines() if " times: " in line]
    check(not problems, f"{name}: no findings", "; ".join(problems))


def leaks():
    """(d) compute-sanitizer and the report agree."""
    program = nvcc("leak", LEAK)
    if not program: return
    trace = record("leak", [program])
    if not trace: return
    report = json.loads(verb("leaks", "--json", trace))
    live = summary(trace)["devices"][0]
    rows = json.dumps(report)
    check(live["driver"]["live_bytes"] == 6553600 and live["driver"]["allocs"] == 100,
          "leak: 100 allocations of 6,553,600 bytes live", f"{live['driver']}")
    check("6553600" in rows, "leak: the listing has 6,553,600 bytes", "" if "6553600" in rows else rows[:600])
    tool = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
    if not tool: return say("SKIP", "leak: compute-sanitizer", "not installed")
    run = subprocess.run([tool, "--tool", "memcheck", "--leak-check", "full", program], capture_output=True, text=True, timeout=120)
    line = next((line for line in run.stdout.splitlines() if "LEAK SUMMARY" in line), run.stdout[-300:] + run.stderr[-300:])
    check("6553600 bytes leaked in 100 allocations" in line.replace(",", ""), "leak: compute-sanitizer says the same", line.strip())


def ranges(trace):
    """(e) NVTX ranges are phases, and steps."""
    text = verb("report", "--all", trace)
    for wanted in ("step > forward", "step > backward", "NVTX ranges 'step'"):
        check(wanted in text, f"torch: `{wanted}` in the report", "" if wanted in text else text[-500:])


def main():
    os.makedirs(WORK, exist_ok=True)
    began, python = time.time(), sys.executable
    print(subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip())
    torch = record("torch", [python, write("torch_loop.py", TORCH)])
    if torch:
        samples("torch", torch); audited("torch", torch); ranges(torch)
    if nvcc_there := shutil.which("nvcc"):
        plain = nvcc("plain", PLAIN)
        trace = plain and record("plain", [plain])
        if trace: samples("plain", trace); audited("plain", trace)
        leaks()
        nodes = nvcc("graph_nodes", GRAPH_NODES)
        trace = nodes and record("graph_nodes", [nodes])
        if trace: samples("graph_nodes", trace); audited("graph_nodes", trace)
    else: say("SKIP", "plain.cu, leak.cu, graph_nodes.cu", "no nvcc")
    for name, text, module in (("jax", JAX, "jax"), ("cupy", CUPY, "cupy")):
        if not has(module): say("SKIP", name, f"no {module}"); continue
        trace = record(name, [python, write(f"{name}_loop.py", text)])
        if trace: samples(name, trace); audited(name, trace)
    trace = record("sleep", [python, write("sleep.py", SLEEP)])
    if trace: samples("sleep", trace); audited("sleep", trace)
    trace = record("expandable", [python, write("expandable.py", EXPANDABLE)], PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    if trace: audited("expandable", trace)
    trace = record("graphs", [python, write("graphs.py", GRAPHS)])
    if trace: audited("graphs", trace)
    probe = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
    for name, command in (("alone", [python, probe]), ("recorded", [GPUTRACE, "record", "-f", "-o", f"{WORK}/probe.gtr", "--", python, probe])):
        run = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in run.stdout.splitlines() if line.startswith(("PASS", "FAIL", "SKIP"))]
        if not lines: say("FAIL", f"probe {name}", run.stderr[-300:])
        for line in lines: say(line[:4], f"probe {name}", line[4:].strip())
    print(f"{time.time() - began:.0f} s, {failed} failed; traces in {WORK}")
    sys.exit(1 if failed else 0)


main()
