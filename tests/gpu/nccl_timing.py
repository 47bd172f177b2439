"""nccl_timing.py FOLDER: on a machine with two GPUs, `gputrace record --nccl-timing` with PyTorch (FOLDER has gputrace and
libgputrace.so). Durations against torch.cuda.Event pairs of the program itself, a rank whose GPU comes late, CUDA graphs, a hang that
is killed, and what a call costs more. Prints PASS or FAIL a line; about three minutes.

    python3 tests/gpu/nccl_timing.py build
"""

import glob
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.abspath(__file__)
RANKS = 2
# Elements of float32: 4 KiB to 256 MiB. Odd, so that no call of PyTorch's own has as many.
SIZES = [1025, 65537, 1048577, 16777217, 67108865]
REPEATS = 60
LATE_STEPS, LATE_EVERY = 300, 10
HANG_AT = 25
OVERHEAD_CALLS = 5000
failures = 0


def check(name, good, detail):
    global failures
    failures += not good
    print(f"{'PASS' if good else 'FAIL'}  {name:<58} {detail}", flush=True)


# ---- The program: one rank.


def sleep_cycles(torch, ms):
    """What torch.cuda._sleep wants for so long, measured."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    return int(20_000_000 * ms / start.elapsed_time(end))


def program(mode, out):
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    x = torch.ones(1024, device=device)
    for _ in range(5):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    result = {"torch": torch.__version__, "nccl": torch.cuda.nccl.version()}
    if mode == "compare":
        pause = sleep_cycles(torch, 2)
        result["durations"] = {}
        for size in SIZES:
            x = torch.ones(size, device=device)
            pairs = []
            dist.all_reduce(x[: size - 1])
            for _ in range(REPEATS):
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                # The host is ahead of the GPU, so that its own time is not between the events.
                torch.cuda._sleep(pause)
                pair[0].record()
                dist.all_reduce(x)
                pair[1].record()
                torch.cuda.synchronize()
                pairs.append(pair)
            result["durations"][size] = [a.elapsed_time(b) * 1e6 for a, b in pairs]
    elif mode == "late":
        pause = sleep_cycles(torch, 20)
        x = torch.ones(1 << 20, device=device)
        for step in range(LATE_STEPS):
            if rank == 1 and step % LATE_EVERY == LATE_EVERY - 1:
                torch.cuda._sleep(pause)
            dist.all_reduce(x)
            x.div_(RANKS)
        torch.cuda.synchronize()
        result["sum"] = x.sum().item()
    elif mode == "graph":
        x = torch.ones(4096, device=device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                dist.all_reduce(x)
        stream.synchronize()
        x.fill_(1)
        graph = torch.cuda.CUDAGraph()
        # The default mode: a question of any other thread that is not allowed would end the capture.
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(4):
                dist.all_reduce(x)
                x.div_(RANKS)
                time.sleep(0.05)
        for _ in range(10):
            graph.replay()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        result["sum"] = x.sum().item()
        # NCCL's communicators wait at their end for the graphs that use them.
        graph.reset()
    elif mode == "hang":
        x = torch.ones(4096, device=device)
        for step in range(50):
            if rank == 1 and step == HANG_AT:
                break
            dist.all_reduce(x)
            time.sleep(0.02)
        time.sleep(600)
    elif mode == "overhead":
        x = torch.ones(1024, device=device)
        costs = []
        for _ in range(5):
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(OVERHEAD_CALLS // 5):
                dist.all_reduce(x)
            enqueued = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            costs.append(((enqueued - began) * 5e9 / OVERHEAD_CALLS, (done - began) * 5e9 / OVERHEAD_CALLS))
        result["host_ns"], result["all_ns"] = (statistics.median(cost) for cost in zip(*costs))
    torch.cuda.synchronize()
    with open(f"{out}/{mode}.{rank}.json", "w") as file:
        json.dump(result, file)
    dist.destroy_process_group()


# ---- The test.


def job(mode, out, command, kill_after=None):
    """Runs two ranks; their results."""
    os.makedirs(out, exist_ok=True)
    port = str(random.randint(20000, 40000))
    processes = []
    for rank in range(RANKS):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
        environment.update(MASTER_PORT=port, NCCL_NVLS_ENABLE="0")
        log = open(f"{out}/{mode}.{rank}.log", "w")
        processes.append(subprocess.Popen([*command, sys.executable, HERE, "--rank", mode, out], env=environment, stdout=log, stderr=log))
    ends = time.monotonic() + (kill_after or 240)
    while any(one.poll() is None for one in processes) and time.monotonic() < ends:
        time.sleep(0.1)
    for one in processes:
        if one.poll() is None:
            one.send_signal(signal.SIGKILL)
    codes = [one.wait() for one in processes]
    if not kill_after:
        check(f"{mode}: both ranks end well", codes == [0] * RANKS, str(codes))
        if codes != [0] * RANKS:
            for rank in range(RANKS):
                print("".join(open(f"{out}/{mode}.{rank}.log").readlines()[-15:]))
            return []
        return [json.load(open(f"{out}/{mode}.{rank}.json")) for rank in range(RANKS)]
    time.sleep(3)
    return codes


def recorded(gputrace, out, *options):
    return [gputrace, "record", "-f", *options, "-o", f"{out}/r%r.gtr", "--"]


def traces(out):
    return sorted(glob.glob(f"{out}/r*.gtr"))


def gpu_times(gputrace, trace):
    """Nanoseconds on the GPU of each all-reduce that has them, by elements, in the order of the calls; and how calls were timed."""
    text = subprocess.run([gputrace, "export", "--format", "nccl", "-o", "-", trace], check=True, capture_output=True, text=True).stdout
    calls, times, groups, fates = {}, {}, {}, {}
    for record in map(json.loads, text.splitlines()):
        if record["record"] == "call":
            calls[record["call"]] = record
            if record["group"]:
                groups.setdefault(record["group"], []).append(record)
            if "gpu" in record:
                fates[record["gpu"]] = fates.get(record["gpu"], 0) + 1
        elif record["record"] == "gpu":
            call = calls[record["call"]]
            of = groups[call["group"]] if call["op"] == "group_end" else [call]
            of = [one for one in of if one["comm"] == record["comm"] and one["stream"] == record["stream"] and one["op"] == "all_reduce"]
            for one in of:
                times.setdefault(one["count"], []).append((one["call"], record["gpu_duration_ns"]))
    return {count: [time for _, time in sorted(of)] for count, of in times.items()}, fates


def ranks_json(gputrace, out):
    done = subprocess.run([gputrace, "ranks", "--json", *traces(out)], capture_output=True, text=True)
    return json.loads(done.stdout)["jobs"][0]


def micro(ns):
    return f"{ns / 1000:.1f} us"


def compare(gputrace, out):
    results = job("compare", out, recorded(gputrace, out, "--nccl-timing"))
    if not results:
        return
    print(f"  PyTorch {results[0]['torch']}, NCCL {results[0]['nccl']}")
    for rank, (result, trace) in enumerate(zip(results, traces(out))):
        times, fates = gpu_times(gputrace, trace)
        print(f"  rank {rank}: {fates}")
        for size in SIZES:
            theirs, ours = result["durations"][str(size)], times.get(size, [])
            if len(ours) != len(theirs):
                check(f"rank {rank}, {size} elements: every call is timed", False, f"{len(ours)} of {len(theirs)}")
                continue
            gaps = [a - b for a, b in zip(theirs, ours)]
            detail = f"PyTorch's {micro(statistics.median(theirs))}, ours {micro(statistics.median(ours))}, "
            detail += f"difference {micro(min(gaps))} to {micro(max(gaps))}, median {micro(statistics.median(gaps))}"
            # PyTorch's pair stands around ours: longer by what it enqueues between, and by the events.
            good = min(gaps) > 0 and max(gaps) < 3 * statistics.median(gaps) and statistics.median(gaps) < 40_000
            check(f"rank {rank}, {size} elements: as the program's own events", good, detail)


def late(gputrace, out):
    if not job("late", out, recorded(gputrace, out, "--nccl-timing")):
        return
    found = ranks_json(gputrace, out)
    stragglers = [one for one in found["findings"] if one["kind"] == "straggler"]
    for one in stragglers:
        print("  ", one["text"])
    check("late: rank 1 and nobody else is the straggler", [one["ranks"] for one in stragglers] == [[1]], f"{len(stragglers)} findings")
    check("late: it is found on the GPU", any("on the GPU" in one["text"] for one in stragglers), "")
    waits = found.get("gpu", {}).get("waits", [])
    print("   worst:", [(one["last_rank"], one["sequence"], round(one["waited_ns"] / 1e6, 2)) for one in waits])
    slept = [one for one in waits if one["waited_ns"] > 10e6]
    check("late: its sleeps of 20 ms are seen", len(slept) >= 15 and all(one["last_rank"] == 1 for one in slept), f"{len(slept)} shown")
    rows = {row["rank"]: row for row in found["gpu"]["arrivals"] if row["collectives"] >= LATE_STEPS}
    cost = rows[1]["cost_ns"] / 1e6
    wanted = 20 * LATE_STEPS / LATE_EVERY
    check("late: what it costs the other", 0.9 * wanted < cost < 1.2 * wanted, f"{cost:.0f} ms, asked for {wanted:.0f} ms")
    hosts = [(row["rank"], row["last"], row["mean_late_ns"]) for row in found["arrivals"]]
    print("   by the hosts' clocks:", hosts)
    subprocess.run([gputrace, "ranks", *traces(out)], stdout=open(f"{out}/ranks.txt", "w"))


def graph(gputrace, out):
    bare = job("graph", f"{out}/bare", [])
    results = job("graph", out, recorded(gputrace, out, "--nccl-timing"))
    if not results or not bare:
        return
    check("graph: the same sums as without gputrace", [one["sum"] for one in bare] == [one["sum"] for one in results], str(results[0]["sum"]))
    for trace in traces(out):
        _, fates = gpu_times(gputrace, trace)
        check("graph: what is captured is not timed, the rest is", fates.get("capture", 0) >= 4 and fates.get("enqueued", 0) >= 9, str(fates))
    ranks = ranks_json(gputrace, out)["gpu"]["ranks"]
    check("graph: every timed launch was seen to end", all(one["unfinished"] == 0 for one in ranks), str(ranks))


def hang(gputrace, out):
    job("hang", out, recorded(gputrace, out, "--nccl-timing"), kill_after=45)
    found = ranks_json(gputrace, out)
    ranks = {one["rank"]: one for one in found.get("gpu", {}).get("ranks", [])}
    first = ranks.get(0, {}).get("first_unfinished") or {}
    # Five all-reduces come before the loop.
    check("hang: the collective that never ended is named", first.get("sequence") == HANG_AT + 5, str(first))
    check("hang: rank 1 has none", ranks.get(1, {}).get("unfinished") == 0, str(ranks.get(1)))
    missing = [(one["kind"], one["ranks"], one["sequence"]) for one in found["findings"][:2]]
    print("   findings:", missing)


def overhead(gputrace, out):
    cases = {"bare": [], "record": recorded(gputrace, f"{out}/record"), "timing": recorded(gputrace, f"{out}/timing", "--nccl-timing")}
    costs = {}
    for _ in range(2):
        for name, command in cases.items():
            results = job("overhead", f"{out}/{name}", command)
            if not results:
                return
            kept = costs.setdefault(name, [])
            kept.append((results[0]["host_ns"], results[0]["all_ns"]))
    best = {name: tuple(min(column) for column in zip(*kept)) for name, kept in costs.items()}
    for name, (host, whole) in best.items():
        print(f"   {name:<8} host {micro(host)} a call, until the GPU is done {micro(whole)} a call")
    more = best["timing"][0] - best["record"][0]
    check("overhead: the host's time for a timed call", more < 15_000, f"{micro(more)} more than recorded without, {micro(best['timing'][0] - best['bare'][0])} more than bare")
    whole = best["timing"][1] - best["record"][1]
    check("overhead: until the GPU is done", whole < 15_000, f"{micro(whole)} more than recorded without")
    _, fates = gpu_times(gputrace, traces(f"{out}/timing")[0])
    print("   ", fates)


def main():
    folder = os.path.abspath(sys.argv[1])
    gputrace = os.path.join(folder, "gputrace")
    out = os.environ.get("OUT") or tempfile.mkdtemp()
    wanted = sys.argv[2:] or ["compare", "late", "graph", "hang", "overhead"]
    for name in wanted:
        print(f"== {name}", flush=True)
        try:
            globals()[name](gputrace, os.path.join(out, name))
        except Exception as error:  # the other parts are worth their time
            check(f"{name}: no error in the test itself", False, repr(error))
    print("all passed" if failures == 0 else f"{failures} failed")
    return failures != 0


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        program(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
