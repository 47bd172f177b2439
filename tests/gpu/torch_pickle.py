#!/usr/bin/env python3
"""Holds `gputrace export --format torch-pickle` against PyTorch's own snapshot of the same process, on a machine with a GPU.

usage: torch_pickle.py GPUTRACE SCRIPT OUTDIR [WORKLOAD[:OPTIONS]...]

GPUTRACE is the program, or the folder with it and libgputrace.so. SCRIPT is a program called as `SCRIPT WORKLOAD OUTDIR default`
that turns on torch.cuda.memory._record_memory_history before it allocates and writes OUTDIR/WORKLOAD.default.pickle.gz with
torch.cuda.memory._snapshot() at its end. OPTIONS is `default` or `expandable`. What must be equal, entry by entry and in order: action, address,
size and stream of everything that happened to each device; and address, size, stream and blocks of each segment at the end.
Exit status 0 only if everything is.
"""
import gzip, os, pickle, subprocess, sys, time

OPTIONS = {"default": "", "expandable": "expandable_segments:True"}
WORKLOADS = ["gpt_grow:default", "streams:default", "empty_cache:expandable"]
# What PyTorch writes of itself, not of memory.
NOT_MEMORY = ("snapshot", "user_defined")


def main():
    gputrace, script, out = sys.argv[1:4]
    if os.path.isdir(gputrace):
        gputrace = os.path.join(gputrace, "gputrace")
    wrong = 0
    for workload in sys.argv[4:] or WORKLOADS:
        name, _, tag = workload.partition(":")
        begin = time.time()
        problem, told = compare(gputrace, script, out, name, tag or "default")
        wrong += problem is not None
        print(f"{'FAIL' if problem else 'PASS'}  {workload:24} {told}  {time.time() - begin:.0f} s"
              + (f"\n      {problem}" if problem else ""), flush=True)
    sys.exit(1 if wrong else 0)


def compare(gputrace, script, out, name, tag):
    out = f"{out}/{tag}"
    os.makedirs(out, exist_ok=True)
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=OPTIONS[tag])
    if not OPTIONS[tag]:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    trace, exported = f"{out}/{name}.gtr", f"{out}/{name}.exported.pickle"
    command = [gputrace, "record", "-f", "-o", trace, "--", sys.executable, script, name, out, "default"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        return f"exit {run.returncode}: {run.stderr[-800:]}", ""
    run = subprocess.run([gputrace, "export", "-F", "-f", "torch-pickle", "-o", exported, trace], capture_output=True, text=True)
    if run.returncode:
        return f"export: exit {run.returncode}: {run.stderr[-800:]}", ""
    with gzip.open(f"{out}/{name}.default.pickle.gz") as file:
        theirs = pickle.load(file)
    with open(exported, "rb") as file:
        ours = pickle.load(file)
    told = f"{sum(map(len, map(entries, theirs['device_traces'])))} entries, {len(theirs['segments'])} segments"
    return entries_differ(theirs, ours) or segments_differ(theirs, ours), told


def entries(device):
    return [entry for entry in device if entry["action"] not in NOT_MEMORY]


def entries_differ(theirs, ours):
    for device, (there, here) in enumerate(zip(theirs["device_traces"], ours["device_traces"])):
        there, here = ([of(entry) for entry in entries(trace)] for trace in (there, here))
        for n, (a, b) in enumerate(zip(there, here)):
            if a != b:
                near = lambda side: " ".join(str(it) for it in side[max(0, n - 2):n + 3])
                return f"device {device}, entry {n}: PyTorch {a}, gputrace {b}\n      PyTorch: {near(there)}\n      gputrace: {near(here)}"
        if len(there) != len(here):
            longer = there if len(there) > len(here) else here
            return f"device {device}: PyTorch has {len(there)} entries, gputrace {len(here)}; the next is {longer[min(len(there), len(here))]}"
    n_empty = lambda snapshot: len([device for device in snapshot["device_traces"] if entries(device)])
    if n_empty(theirs) != n_empty(ours):
        return f"PyTorch has {n_empty(theirs)} devices with entries, gputrace {n_empty(ours)}"


def of(entry):
    where = entry.get("device_free") if entry["action"] == "oom" else hex(entry["addr"])
    return entry["action"], where, entry["size"], entry["stream"]


def segments_differ(theirs, ours):
    there, here = ({segment["address"]: shape(segment) for segment in snapshot["segments"]} for snapshot in (theirs, ours))
    for address in sorted(set(there) | set(here)):
        a, b = there.get(address), here.get(address)
        if a != b:
            return f"segment {hex(address)}: PyTorch {a}, gputrace {b}"


def shape(segment):
    blocks = [(block["address"], block["size"], block["state"], block["requested_size"] if block["state"] != "inactive" else 0)
              for block in segment["blocks"]]
    return segment["device"], segment["total_size"], segment["stream"], segment["segment_type"], segment["is_expandable"], joined(blocks)


def joined(blocks):
    """Neighbours that are free count as one: how PyTorch keeps them apart is its own affair."""
    result = []
    for block in blocks:
        if result and result[-1][2] == block[2] == "inactive":
            result[-1] = (result[-1][0], result[-1][1] + block[1], "inactive", 0)
        else:
            result.append(block)
    return result


main()
