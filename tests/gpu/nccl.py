"""nccl.py FOLDER PROGRAM...: two ranks of each PROGRAM under `gputrace record` (FOLDER has gputrace and libgputrace.so), held against
NCCL's own log: each collective's count per communicator, bytes of device memory, communicator hashes; then what a call costs more.

    python3 tests/gpu/nccl.py build ddp.py fsdp.py
"""

import collections
import ctypes
import glob
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

# NCCL's names of what it was asked for (src/collectives.cc, v2.28.3), by ours.
NAMES = {
    "all_reduce": "AllReduce", "broadcast": "Broadcast", "reduce": "Reduce", "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter", "all_to_all": "AlltoAll", "gather": "Gather", "scatter": "Scatter",
    "send": "Send", "recv": "Recv",
}  # fmt: skip
COLLECTIVE = re.compile(r"(\w+): opCount \w+ sendbuff .* comm (0x[0-9a-f]+) \[nranks")
COMPLETE = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .*commId (0x[0-9a-f]+) - Init COMPLETE")
# "Cuda Host Alloc" is memory of the host; "Imported" is the peer's.
DEVICE = re.compile(r"(?:Cuda Alloc Size (\d+) pointer|Allocated shareable buffer \S+ size (\d+))")
GRANULARITY = 2 << 20
failures = 0


def check(name, good, detail):
    global failures
    failures += not good
    print(f"{'PASS' if good else 'FAIL'}  {name:<52} {detail}", flush=True)


def in_log(path):
    """What NCCL says it was asked for, took, and made."""
    counts, hashes, raw, rounded = collections.Counter(), {}, 0, 0
    with open(path, errors="replace") as log:
        for line in log:
            if match := COLLECTIVE.search(line):
                counts[match[2], match[1]] += 1
            elif match := COMPLETE.search(line):
                hashes[match[1]] = (int(match[4], 16), int(match[2]), int(match[3]))
            elif match := DEVICE.search(line):
                size = int(match[1] or match[2])
                raw += size
                rounded += -(-size // GRANULARITY) * GRANULARITY
    return counts, hashes, raw, rounded


def in_trace(gputrace, path):
    """The same in a trace."""
    text = subprocess.run([gputrace, "export", "--format", "nccl", "-o", "-", path], check=True, capture_output=True, text=True).stdout
    comms, counts, memory, pid, calls, hanging = {}, collections.Counter(), [], None, 0, 0
    for record in map(json.loads, text.splitlines()):
        kind = record["record"]
        if kind == "process":
            pid = record["pid"]
        elif kind == "communicator":
            comms[record["comm"]] = record
        elif kind == "memory":
            memory.append(record)
        elif kind == "call":
            calls += 1
            hanging += record["result"] is None
            if record["op"] in NAMES and record["result"] in (0, 7):
                counts[comms[record["comm"]]["handle"], NAMES[record["op"]]] += 1
    return pid, comms, counts, memory, calls, hanging


def mib(n):
    return f"{n / 2**20:.1f} MiB"


def compare(gputrace, trace, out):
    pid, comms, counts, memory, calls, hanging = in_trace(gputrace, trace)
    logs = glob.glob(f"{out}/nccl.{pid}.log")
    if not logs:
        return
    logged, hashes, raw, rounded = in_log(logs[0])
    who = f"pid {pid}"
    check(f"{who}: calls of each kind on each communicator", counts == logged, f"{sum(logged.values())} in NCCL's log, {sum(counts.values())} in the trace, {calls} calls of all kinds")
    for key in sorted(set(counts) | set(logged)):
        print(f"      {key[0]} {key[1]:<14} log {logged[key]:>6}  trace {counts[key]:>6}{'' if logged[key] == counts[key] else '   <--'}")
    check(f"{who}: every call returned", hanging == 0, f"{hanging} open")
    ours = {c["handle"]: (int(c["comm_hash"] or "0", 16), c["rank"], c["n_ranks"]) for c in comms.values() if c["parent"] == 0}
    version = max((c["version"] for c in comms.values()), default=0)
    known = {handle: value for handle, value in hashes.items() if handle in ours}
    if version >= 22602 or not version:
        check(f"{who}: commHash, rank and size as NCCL has them", known and all(ours[h] == v for h, v in known.items()), f"{len(known)} communicators, NCCL {version}")
    device = [m for m in memory if m["action"] == "alloc" and m["device"] >= 0 and m["owner"] == "NCCL"]
    gross = sum(m["bytes"] for m in device)
    difference = abs(gross - rounded) / max(rounded, 1)
    check(f"{who}: NCCL's device bytes, gross", difference <= 0.02, f"log {mib(rounded)} in units of 2 MiB ({mib(raw)} asked for), trace {mib(gross)}, {difference:.2%} apart")
    shares = collections.Counter()
    for m in device:
        shares[m["comm"]] += m["bytes"]
    for comm, share in sorted(shares.items()):
        about = comms.get(comm)
        what = "no communicator" if about is None else f"{about['handle']} {about['origin']} \"{about['name']}\" rank {about['rank']} of {about['n_ranks']}"
        print(f"      communicator {comm}: {mib(share):>12}  {what}")
    on_threads = sum(m["bytes"] for m in device if m["on_nccl_thread"])
    check(f"{who}: all of it is some communicator's", gross > 0 and shares[0] <= gross * 0.01, f"{mib(gross - shares[0])} of {mib(gross)}; {mib(on_threads)} of it on NCCL's own threads")
    caused = sum(m["bytes"] for m in device if m["call"])
    check(f"{who}: all of it is caused by a call", caused >= gross * 0.99, f"{mib(caused)} of {mib(gross)}")


def run(gputrace, program, out):
    environment = dict(os.environ, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ALLOC,COLL", NCCL_DEBUG_FILE=f"{out}/nccl.%p.log")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    command = [gputrace, "record", "-f", "-o", f"{out}/%p.gtr", "--", sys.executable]
    launcher = os.environ.get("GPUTRACE_TEST_LAUNCHER", "-m torch.distributed.run --nproc-per-node 2").split()
    done = subprocess.run([*command, *launcher, program], env=environment)
    check(f"{os.path.basename(program)} runs", done.returncode == 0, f"exit status {done.returncode}")
    time.sleep(2)
    for trace in sorted(glob.glob(f"{out}/*.gtr")):
        compare(gputrace, trace, out)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def loop():
    """Nanoseconds of an all-reduce of one element on a communicator of one rank: nothing is launched."""
    import importlib.util

    try:
        package = importlib.util.find_spec("nvidia.nccl")
        libraries = glob.glob(os.path.join(list(package.submodule_search_locations)[0], "lib", "libnccl.so.2"))
    except ImportError:
        libraries = []
    try:
        import torch

        torch.cuda.init()
        stream, buffer = torch.cuda.current_stream().cuda_stream, torch.zeros(1, device="cuda").data_ptr()
    except ImportError:
        import fake_nccl

        fake_nccl._context(0)
        stream, buffer = 0, 4096
    nccl = ctypes.CDLL(libraries[0] if libraries else "libnccl.so.2")
    unique, comm = UniqueId(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0) == 0
    address, count, queue = ctypes.c_void_p(buffer), ctypes.c_size_t(1), ctypes.c_void_p(stream)
    all_reduce, times = nccl.ncclAllReduce, []
    for _ in range(40):
        begin = time.perf_counter_ns()
        for _ in range(2000):
            all_reduce(address, address, count, 7, 0, comm, queue)
        times.append((time.perf_counter_ns() - begin) / 2000)
    print(statistics.median(times))


def overhead(gputrace, out):
    alone, recorded = [], []
    command = [sys.executable, os.path.abspath(__file__), "--loop"]
    for _ in range(3):
        for into, before in ((alone, []), (recorded, [gputrace, "record", "-f", "-o", f"{out}/%p.gtr", "--"])):
            text = subprocess.run([*before, *command], capture_output=True, text=True, check=True).stdout
            into.append(float(text.split()[-1]))
    more = statistics.median(recorded) - statistics.median(alone)
    check("a call costs less than 1 us more", more < 1000, f"{more:.0f} ns: alone {[round(t) for t in alone]}, recorded {[round(t) for t in recorded]} ns")


def main():
    if sys.argv[1:] == ["--loop"]:
        return loop()
    gputrace = os.path.join(os.path.abspath(sys.argv[1]), "gputrace")
    for program in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as out:
            print(f"-- {program}")
            run(gputrace, program, out)
    with tempfile.TemporaryDirectory() as out:
        overhead(gputrace, out)
    return 1 if failures else 0


sys.exit(main())
