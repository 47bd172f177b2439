#!/usr/bin/env python3
"""Holds what gputrace says of memory that has an owner elsewhere against who owns it, on a machine with one GPU.

usage: owners.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`. WORK keeps programs and traces (default: a temporary folder). Checks: memory of the host and
of its NUMA nodes (cuMemCreate, pools) is not counted on the device, and the driver says so too; a tensor that PyTorch shares with
another process is counted once, and both ends are known; what identifies a file descriptor of shared memory (only printed);
CuPy's pool; NVSHMEM's symmetric heap by PyTorch; RMM's pool; ncclCommMemStats against what is charged to the communicator. What is
not installed is a SKIP. One line a check, PASS, FAIL, SKIP or INFO; exit status 0 only without FAIL. Some 80 seconds; each program may take 60.
LAUNCHER runs the programs under something else (`LAUNCHER=target/release/fake-cuda`); ONLY=host,ipc picks programs; NCCL=libnccl.so.2 takes that one.
"""
import glob, json, os, shlex, subprocess, sys, tempfile, textwrap

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
ONLY = [name for name in os.environ.get("ONLY", "").split(",") if name]
failed = 0

DRIVER = """
import ctypes as c, os, sys
cuda = c.CDLL("libcuda.so.1")
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Properties(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("win32", c.c_void_p), ("flags", c.c_ubyte * 32)]
class Pool(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("win32", c.c_void_p), ("most", c.c_size_t),
                ("usage", c.c_ushort), ("reserved", c.c_ubyte * 54)]
def ok(result, what=""):
    if result: print("RESULT", what, result, flush=True); sys.exit(7)
def start():
    context = c.c_void_p()
    ok(cuda.cuInit(0), "cuInit"); ok(cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0)); ok(cuda.cuCtxSetCurrent(context))
def free():
    free, total = c.c_size_t(), c.c_size_t()
    ok(cuda.cuMemGetInfo_v2(c.byref(free), c.byref(total)))
    return free.value
M = 1 << 20
"""

PROGRAMS = {
    # 64 MiB of a NUMA node, 32 MiB of a pool of the host, 16 MiB of the device, and a pool of the device: 8 MiB.
    "host": DRIVER + """
start(); before = free()
handle, base = c.c_ulonglong(), c.c_ulonglong()
got = {}
result = cuda.cuMemCreate(c.byref(handle), c.c_size_t(64 * M), c.byref(Properties(1, 0, Location(3, 0))), c.c_ulonglong(0))
print("INFO cuMemCreate HOST_NUMA", result, flush=True)
got["numa"] = 0 if result else 64 * M
pool, address = c.c_void_p(), c.c_ulonglong()
result = cuda.cuMemPoolCreate(c.byref(pool), c.byref(Pool(1, 0, Location(3, 0))))
print("INFO cuMemPoolCreate HOST_NUMA", result, flush=True)
got["pool"] = 0
if not result:
    result = cuda.cuMemAllocFromPoolAsync(c.byref(address), c.c_size_t(32 * M), pool, None)
    print("INFO cuMemAllocFromPoolAsync", result, flush=True)
    got["pool"] = 0 if result else 32 * M
    cuda.cuCtxSynchronize()
middle = free()
ok(cuda.cuMemAlloc_v2(c.byref(address), c.c_size_t(16 * M)), "cuMemAlloc")
ok(cuda.cuMemPoolCreate(c.byref(pool), c.byref(Pool(1, 0, Location(1, 0)))), "cuMemPoolCreate")
ok(cuda.cuMemAllocFromPoolAsync(c.byref(address), c.c_size_t(8 * M), pool, None))
cuda.cuCtxSynchronize()
import json
json.dump({"host": got["numa"] + got["pool"], "device": 24 * M, "host_took_of_device": before - middle, "device_took": middle - free()},
          open(sys.argv[1], "w"))
""",
    # What two processes see of one descriptor.
    "descriptor": DRIVER + """
start()
handle = c.c_ulonglong()
ok(cuda.cuMemCreate(c.byref(handle), c.c_size_t(2 * M), c.byref(Properties(1, 1, Location(1, 0))), c.c_ulonglong(0)))
for n in range(2):
    fd = c.c_int(-1)
    ok(cuda.cuMemExportToShareableHandle(c.byref(fd), handle, 1, c.c_ulonglong(0)))
    stat = os.fstat(fd.value)
    print("INFO descriptor", os.readlink(f"/proc/self/fd/{fd.value}"), "dev", stat.st_dev, "inode", stat.st_ino, "rdev", stat.st_rdev,
          open(f"/proc/self/fdinfo/{fd.value}").read().split(), flush=True)
import json
json.dump({}, open(sys.argv[1], "w"))
""",
    "ipc": """
import json, os, sys, torch, torch.multiprocessing as mp
def child(queue, done):
    x = queue.get(); y = queue.get()
    done.put((float(x.sum()), float(y[0])))
    del x, y
def share():
    x = torch.ones(16 << 20, device="cuda"); y = torch.full((1 << 20,), 2.0, device="cuda")
    torch.cuda.synchronize()
    context = mp.get_context("spawn"); queue, done = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, done)); process.start()
    queue.put(x); queue.put(y)
    sums = done.get(); process.join()
    json.dump({"sums": sums, "bytes": sum(s["total_size"] for s in torch.cuda.memory_snapshot())}, open(sys.argv[1], "w"))
if __name__ == "__main__": share()
""",
    # The same from an expandable segment, whose pages go by file descriptor.
    "expandable": """
import json, os, sys
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch, torch.multiprocessing as mp
def child(queue, done):
    x = queue.get(); done.put(float(x.sum()))
    del x
def share():
    x = torch.ones(16 << 20, device="cuda")
    torch.cuda.synchronize()
    context = mp.get_context("spawn"); queue, done = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, done)); process.start()
    queue.put(x); total = done.get(); process.join()
    json.dump({"sum": total, "bytes": sum(s["total_size"] for s in torch.cuda.memory_snapshot())}, open(sys.argv[1], "w"))
if __name__ == "__main__": share()
""",
    "cupy": """
import json, sys, cupy
def load(): return cupy.ones((1 << 20,), dtype=cupy.float32)
def step(): return cupy.ones((3 << 20,), dtype=cupy.float32)
kept = [load() for _ in range(8)] + [step() for _ in range(4)]
cupy.cuda.Device().synchronize()
pool = cupy.get_default_memory_pool()
json.dump({"total": pool.total_bytes(), "used": pool.used_bytes()}, open(sys.argv[1], "w"))
""",
    "rmm": """
import json, sys, rmm
pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=64 << 20)
rmm.mr.set_current_device_resource(pool)
kept = [rmm.DeviceBuffer(size=4 << 20) for _ in range(4)]
json.dump({"pool": pool.pool_size() if hasattr(pool, "pool_size") else 64 << 20}, open(sys.argv[1], "w"))
""",
    "nvshmem": """
import json, os, sys, torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(256 << 20))
if not symmetric.is_nvshmem_available(): print("SKIP no NVSHMEM in this PyTorch", flush=True); sys.exit(77)
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
symmetric.set_backend("NVSHMEM")
a = symmetric.empty(8 << 20, dtype=torch.uint8, device="cuda:0"); b = symmetric.empty(3 << 20, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
json.dump({"asked": 11 << 20}, open(sys.argv[1], "w"))
os._exit(0)
""",
    "memstats": """
import ctypes as c, json, os, sys
# Another NCCL than PyTorch's takes its place by being there first.
if os.environ.get("NCCL"): nccl = c.CDLL(os.environ["NCCL"], mode=c.RTLD_GLOBAL)
import torch
n = torch.cuda.device_count()
if not os.environ.get("NCCL"):
    for line in open("/proc/self/maps"):
        if "libnccl.so" in line: nccl = c.CDLL(line.split()[-1])
version = c.c_int(); nccl.ncclGetVersion(c.byref(version))
print("INFO NCCL", version.value, "GPUs", n, flush=True)
if not hasattr(nccl, "ncclCommMemStats"): print("SKIP this NCCL has no ncclCommMemStats", flush=True); sys.exit(77)
tensors = [torch.ones(4 << 20, device=f"cuda:{i}") for i in range(n)]
stats = []
def ask(comms):
    for comm in comms:
        values = {}
        for number, name in ((0, "suspendable"), (2, "persistent"), (3, "total")):
            value = c.c_uint64()
            values[name] = value.value if nccl.ncclCommMemStats(c.c_void_p(comm), number, c.byref(value)) == 0 else None
        stats.append(values)
def reduce(comms):
    nccl.ncclGroupStart()
    for i, comm in enumerate(comms):
        at = c.c_void_p(tensors[i].data_ptr())
        assert nccl.ncclAllReduce(at, at, c.c_size_t(4 << 20), 7, 0, c.c_void_p(comm), c.c_void_p(torch.cuda.current_stream(i).cuda_stream)) == 0
    assert nccl.ncclGroupEnd() == 0
    for i in range(n): torch.cuda.synchronize(i)
kept = []
for _ in range(2):
    comms = (c.c_void_p * n)()
    assert nccl.ncclCommInitAll(comms, n, None) == 0
    reduce(list(comms))
    kept += list(comms)
ask(kept)
json.dump(stats, open(sys.argv[1], "w"))
os._exit(0)
""",
}


def say(verdict, name, detail):
    global failed
    failed += verdict == "FAIL"
    print(f"{verdict:<5} {name:<52} {detail}", flush=True)


def check(name, good, detail):
    say("PASS" if good else "FAIL", name, detail)


def ask(verb, *traces):
    output = subprocess.run([GPUTRACE, verb, "--json", *traces], capture_output=True, text=True)
    try:
        return json.loads(output.stdout)
    except json.JSONDecodeError:
        say("FAIL", f"{verb} of {traces}", (output.stdout + output.stderr)[-400:])
        return {}


def run(name):
    """Runs one program; what it noted, and its traces, or None."""
    folder = os.path.join(WORK, name)
    os.makedirs(folder, exist_ok=True)
    program, noted = os.path.join(folder, f"run_{name}.py"), os.path.join(folder, "noted.json")
    open(program, "w").write(textwrap.dedent(PROGRAMS[name]))
    for old in [noted, *glob.glob(os.path.join(folder, "*.gtr"))]:
        if os.path.exists(old):
            os.remove(old)
    command = [*LAUNCHER, GPUTRACE, "record", "-f", "-q", "-o", os.path.join(folder, "%p.gtr"), "--", sys.executable, program, noted]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        say("SKIP", name, "the program took more than 60 s")
        return None
    for line in output.stdout.splitlines():
        if line.startswith(("INFO", "SKIP")):
            say(line[:4], name, line[5:])
    if not os.path.exists(noted):
        last = (output.stderr.strip().splitlines() or ["no output"])[-1]
        missing = "ModuleNotFoundError" in output.stderr or output.returncode == 77
        say("SKIP" if missing else "INFO", name, f"ended with {output.returncode}: {last[:200]}")
        return None
    return json.load(open(noted)), sorted(glob.glob(os.path.join(folder, "*.gtr")))


def section(report, name):
    for process in report.get("processes", []):
        for found in process.get("sections", []):
            if found.get("name") == name:
                return found
    return {}


def total(rows, column, **wanted):
    return sum(row.get(column) or 0 for row in rows if all(str(value) in str(row.get(key)) for key, value in wanted.items()))


def host(noted, traces):
    process = ask("summary", traces[0])["processes"][0]
    device, of_host = process["devices"][0]["driver"]["peak_bytes"], process["host"]
    check("the host's memory is not counted on the device", device == noted["device"], f"{device} of {noted['device']}")
    check("it is the host's", noted["host"] in of_host.values(), f"{of_host} of {noted['host']}")
    check("the driver took none of the device for it", noted["host_took_of_device"] < 4 << 20, noted["host_took_of_device"])


def ipc(noted, traces):
    said = ask("ranks", os.path.dirname(traces[0]))
    shared = said.get("shared", [])
    by_handle = [row for row in shared if row.get("known") == "by_handle"]
    bytes_ = sum(row.get("bytes") or 0 for row in by_handle)
    check("both ends of a shared tensor are known", len(by_handle) >= 1 and bytes_ == noted["bytes"], f"{bytes_} of {noted['bytes']}: {shared}")
    print(subprocess.run([GPUTRACE, "ranks", os.path.dirname(traces[0])], capture_output=True, text=True).stdout[-1500:], flush=True)


def expandable(noted, traces):
    shared = ask("ranks", os.path.dirname(traces[0])).get("shared", [])
    likely = [row for row in shared if row.get("known") == "only_one"]
    bytes_ = sum(row.get("bytes") or 0 for row in likely)
    good = len(likely) == 1 and (64 << 20) <= bytes_ <= noted["bytes"]
    check("pages of an expandable segment are likely its maker's", good, f"{bytes_} of {noted['bytes']}: {shared}")


def cupy(noted, traces):
    report = ask("report", "--all", traces[0])
    rows = section(report, "call_sites").get("call_sites", [])
    ours = total(rows, "bytes", owner="CuPy")
    check("CuPy's pool by line is what CuPy says it has", ours == noted["total"], f"{ours} of {noted['total']}: {rows[:4]}")


def rmm(noted, traces):
    rows = section(ask("report", "--all", traces[0]), "call_sites").get("call_sites", [])
    check("RMM's pool is RMM's", total(rows, "bytes", owner="RMM") >= noted["pool"], rows[:4])


def nvshmem(noted, traces):
    found = section(ask("report", "--all", traces[0]), "heaps")
    rows = found.get("heap_sites", [])
    check("blocks of the symmetric heap by line", total(rows, "live_bytes") >= noted["asked"], f"asked {noted['asked']}: {found}")


def memstats(noted, traces):
    rows = section(ask("report", "--all", traces[0]), "communicators").get("communicators", [])
    print("INFO  ncclCommMemStats", noted, "ours", json.dumps(rows)[:1500], flush=True)
    ours, theirs = sorted(row["live_bytes"] for row in rows), sorted(one["total"] or 0 for one in noted)
    check("bytes of each communicator are those of NCCL", ours == theirs, f"{ours} of {theirs}")


for name in PROGRAMS:
    if ONLY and name not in ONLY:
        continue
    done = run(name)
    if done and done[1]:
        if name in globals():
            try:
                globals()[name](*done)
            except Exception as error:
                say("FAIL", name, repr(error))
    elif done:
        say("FAIL", name, "no trace")
sys.exit(failed > 0)
