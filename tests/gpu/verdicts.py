#!/usr/bin/env python3
"""What `oom` and `tune` say of settings, held against the same program really run with each of them.

usage: [ONLY=WORD,...] [AT_ONCE=N] [SECONDS=N] [NO_FULL=1] [ONLY_FULL=1] verdicts.py GPUTRACE [OUT.json]

Each program is measured once, then recorded under limits at which it runs out of memory, or beside a neighbour that fills
the card; then it runs with every setting that `oom` has in its table, and with those that `tune` calls best. A program
passes where it makes more allocations than the recorded run had made at its error. One line for each that is wrong, and a
summary; exit status 0 only where none of those that were called exact is.
"""
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
# Words that promise that a run does what was said.
SURE = ("exact", "as far as recorded")


# The programs. Each takes what torch is, and makes the same requests in every run.
def holes(torch):
    """Every second block is freed, then larger ones are wanted."""
    kept = [torch.empty((5 + i % 7 * 3) * MIB, dtype=torch.uint8, device="cuda") for i in range(60)]
    for size in (9, 14, 21, 27):
        for i in range(0, 60, 2):
            kept[i] = None
        for i in range(0, 60, 2):
            kept[i] = torch.empty((size + i % 5) * MIB, dtype=torch.uint8, device="cuda")


def lengths(torch):
    """A transformer's blocks, with sequences of other lengths in each step."""
    model = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    order = random.Random(3)
    for _ in range(14):
        tokens = torch.zeros(8, order.randrange(64, 640), 256, device="cuda")
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def streams(torch):
    """Blocks of one stream that others still use."""
    side = [torch.cuda.Stream() for _ in range(3)]
    order = random.Random(5)
    kept = []
    for i in range(160):
        stream = side[i % 3]
        with torch.cuda.stream(stream):
            block = torch.empty(order.randrange(1, 30) * MIB, dtype=torch.uint8, device="cuda")
        kept.append(block)
        if len(kept) > 24:
            del kept[order.randrange(len(kept))]
    torch.cuda.synchronize()


def used_by_two(torch):
    """Blocks that are recorded on a second stream, and free only when that has passed them."""
    side = torch.cuda.Stream()
    for i in range(60):
        block = torch.zeros((8 + i % 9 * 4) * MIB, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        del block
        if i % 4 == 3:
            torch.cuda.synchronize()


def pools(torch):
    """Two pools of its own beside the default one."""
    mine = [torch.cuda.MemPool(), torch.cuda.MemPool()]
    kept = []
    for i in range(90):
        size = (3 + i * 7 % 23) * MIB
        if i % 3 < 2:
            with torch.cuda.use_mem_pool(mine[i % 3]):
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        else:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(kept) > 30:
            del kept[i * 5 % 30]
    kept.clear()


def graphs(torch, shared=False):
    """CUDA graphs, each with a private pool, or all with one; and eager work beside them."""
    pool = torch.cuda.graph_pool_handle() if shared else None
    layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    made = []
    with torch.no_grad():
        for i in range(6):
            x = torch.zeros(2048 + 1024 * i, 1024, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                layers(x)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                y = layers(x)
            made.append((graph, x, y))
            eager = [torch.empty((6 + 5 * k) * MIB, dtype=torch.uint8, device="cuda") for k in range(4)]
            del eager[::2]
            graph.replay()
    torch.cuda.synchronize()


def one_pool_of_graphs(torch):
    graphs(torch, shared=True)


def cache(torch):
    """A KV cache that grows by concatenation."""
    caches = [torch.zeros(4, 8, 256, 64, device="cuda") for _ in range(12)]
    for _ in range(20):
        for i, cached in enumerate(caches):
            caches[i] = torch.cat([cached, torch.zeros(4, 8, 64, 64, device="cuda")], dim=2)


def small(torch):
    """A hundred thousand small objects, every third of which stays."""
    kept = []
    for turn in range(8):
        block = [torch.empty(512 + i % 97 * 1024, dtype=torch.uint8, device="cuda") for i in range(4000)]
        kept.extend(block[::3])
        del block


def middle(torch):
    """Sizes between one and ten MiB: segments of 20 MiB."""
    order = random.Random(9)
    kept = []
    for i in range(500):
        kept.append(torch.empty(order.randrange(MIB + 1, 10 * MIB), dtype=torch.uint8, device="cuda"))
        if len(kept) > 90:
            del kept[order.randrange(len(kept))]


def emptied(torch):
    """Calls empty_cache between phases."""
    for phase in range(5):
        blocks = [torch.empty((11 + phase * 6 + i % 3) * MIB, dtype=torch.uint8, device="cuda") for i in range(25)]
        kept = blocks[:: 5 - phase % 3]
        del blocks
        torch.cuda.empty_cache()
        more = [torch.empty((30 + phase) * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
        del more, kept


def caught(torch):
    """Halves its batch after an error."""
    batch = 96
    kept = [torch.empty(7 * MIB, dtype=torch.uint8, device="cuda") for _ in range(40)]
    del kept[::2]
    for _ in range(12):
        try:
            block = torch.empty(batch * MIB, dtype=torch.uint8, device="cuda")
            del block
            batch += 24
        except torch.cuda.OutOfMemoryError:
            batch //= 2
    many = [torch.empty(26 * MIB, dtype=torch.uint8, device="cuda") for _ in range(30)]
    del many


def states(torch):
    """The optimiser's states come after the first step."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(1536, 1536) for _ in range(16)]).cuda()
    optimizer = torch.optim.Adam(layers.parameters(), foreach=True)
    for i in range(4):
        layers(torch.zeros(4096 + 512 * i, 1536, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def images(torch):
    """Batches of images of several sizes, through a pyramid."""
    order = random.Random(11)
    for _ in range(20):
        side = order.choice([192, 256, 320, 384, 512])
        x = torch.zeros(16, 16, side, side, device="cuda")
        levels = []
        for _ in range(4):
            x = torch.nn.functional.avg_pool2d(torch.relu(x), 2)
            levels.append(torch.cat([x, x], dim=1))
        del levels


PROGRAMS = [holes, lengths, streams, used_by_two, pools, graphs, one_pool_of_graphs, cache, small, middle, emptied, caught,
            states, images]
# Recorded with a setting that is not the default.
SETTINGS = {
    "holes": ["max_split_size_mb:32", "expandable_segments:True"],
    "lengths": ["garbage_collection_threshold:0.7", "roundup_power2_divisions:4"],
    "middle": ["expandable_segments:True"],
    "images": ["max_split_size_mb:64"],
}
# Beside a neighbour that leaves a part of what the program needs.
FULL = ["holes", "lengths", "streams", "middle", "states", "pools"]


def child(name):
    """Runs a program; a line of JSON says how far it came."""
    import torch

    limit = int(os.environ.get("LIMIT", 0))
    total = torch.cuda.get_device_properties(0).total_memory
    if limit:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    torch.manual_seed(0)
    told = {"end": "done"}
    try:
        next(program for program in PROGRAMS if program.__name__ == name)(torch)
    except torch.cuda.OutOfMemoryError as error:
        told = {"end": "OOM", "error": str(error)[:60]}
    except RuntimeError as error:  # Inside the capture of a graph others are raised.
        told = {"end": "OOM" if "out of memory" in str(error) else "error", "error": str(error)[:200]}
    stats = torch.cuda.memory_stats()
    told.update(n=stats["allocation.all.allocated"], ooms=stats["num_ooms"], reserved=stats["reserved_bytes.all.peak"],
                allocated=stats["allocated_bytes.all.peak"], free=torch.cuda.mem_get_info()[0])
    print(json.dumps(told), flush=True)
    os._exit(0)


NEIGHBOUR = """
import os, sys, torch
left = int(sys.argv[1])
torch.cuda.init()
held = []
while True:
    free = torch.cuda.mem_get_info()[0]
    if free - left < 2 << 20:
        break
    held.append(torch.cuda.caching_allocator_alloc(min(free - left, 16 << 30) >> 21 << 21))
print("full", flush=True)
sys.stdin.read()
"""


class Lab:
    def __init__(self, gputrace):
        self.gputrace, self.folder = gputrace, tempfile.mkdtemp(prefix="verdicts.")
        self.ends_at = time.monotonic() + float(os.environ.get("SECONDS", 540))

    def run(self, name, options="", limit=0, trace=None):
        """How the program ended."""
        if time.monotonic() > self.ends_at:
            return None
        env = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=options, LIMIT=str(limit))
        command = [sys.executable, os.path.abspath(__file__), "--run", name]
        if trace:
            command = [self.gputrace, "record", "-f", "-o", trace, "--no-oom-report", "--", *command]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            print(f"??? {name} {options} {limit}: {done.returncode} {done.stderr[-300:]}", flush=True)
            return None
        return json.loads(lines[-1])

    def ask(self, verb, trace, *options):
        command = [self.gputrace, verb, "--json", *options, trace]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        try:
            return json.loads(done.stdout)
        except ValueError:
            print(f"??? {verb} {trace}: {done.stderr[-300:]}", flush=True)
            return {}

    def case(self, name, recorded, limit, where):
        """One failing run, and what every setting really does with it."""
        trace = os.path.join(self.folder, f"{name}.{abs(hash((recorded, limit, where)))}.gtr")
        first = self.run(name, recorded, limit, trace)
        if not first or first["end"] != "OOM":
            return None
        told = {"program": name, "recorded": recorded, "limit": limit, "where": where, "failed": first, "settings": []}
        told["said"] = []
        for process in self.ask("oom", trace).get("processes", []):
            for section in process["sections"]:
                if section["name"] == "remedies":
                    told["said"] += section.get("warnings", []) + section.get("notes", [])[:2]
                    told["capacity"] = [section.get("capacity_bytes"), section.get("capacity_at_most_bytes")]
                    for row in section.get("settings", []):
                        told["settings"].append({"verb": "oom", "options": row["options"], "verdict": row["verdict"],
                                                 "sure": row["confidence"]})
        if limit:
            advice = self.ask("tune", trace, "--limit", str(limit), "--other", "0")
            if advice.get("best"):
                best = advice["best"]
                told["settings"].append({"verb": "tune", "options": best["options"],
                                         "verdict": "fits" if best["fits"] else "runs out", "sure": best["confidence"],
                                         "helps": advice["helps"], "recorded_fits": advice["recorded"]["fits"]})
        for row in told["settings"]:
            options = "" if row["options"] == "(none)" else row["options"]
            again = self.run(name, options, limit)
            if again:
                row["really"] = "fits" if again["end"] == "done" or again["n"] > first["n"] else "runs out"
                row["end"], row["n"] = again["end"], again["n"]
        if os.environ.get("KEEP"):
            told["trace"] = trace
        else:
            os.remove(trace)
        return told


def cases_of(lab, name):
    for recorded in ["", *SETTINGS.get(name, [])]:
        free = lab.run(name, recorded)
        if not free or free["end"] != "done":
            print(f"??? {name} {recorded}: {free}", flush=True)
            continue
        least, most = free["allocated"], free["reserved"]
        limits = {}
        # Between two multiples of a MiB: on one, the rounding of the fraction would decide.
        for part in (-1, 0.02, 0.2, 0.45, 0.8) if not recorded else (0.05, 0.4):
            bytes = least * 0.9 if part < 0 else least + part * (most - least)
            limits[int(bytes) // MIB * MIB + MIB // 2] = None
        # Where least and most are near, two parts are one limit.
        for limit in limits:
            yield recorded, limit


def judge(told):
    """Counts by verb, sureness, and whether it is right; a line for what is wrong."""
    counts = {}
    for row in told["settings"]:
        if "really" not in row:
            continue
        verdict = row["verdict"]
        right = "open" if verdict == "perhaps" else "right" if verdict == row["really"] else "WRONG"
        # The allocator passed this request, and a later one failed that the trace does not have: said, and true.
        key = (row["verb"], row["sure"], right)
        counts[key] = counts.get(key, 0) + 1
        if right == "WRONG":
            print(f"{'WRONG' if row['sure'] in SURE else 'wrong'} {told['program']} recorded {told['recorded'] or '(none)'} "
                  f"limit {told['limit']} {told['where']}: {row['verb']} says {row['options']} {verdict} ({row['sure']}), "
                  f"really {row['really']}; allocations {told['failed']['n']} then, {row['n']} now", flush=True)
    return counts


def main():
    lab = Lab(os.path.abspath(sys.argv[1]))
    only = [word for word in os.environ.get("ONLY", "").split(",") if word]
    names = [program.__name__ for program in PROGRAMS if not only or any(word in program.__name__ for word in only)]
    results = []
    at_once = int(os.environ.get("AT_ONCE", 14))
    with concurrent.futures.ThreadPoolExecutor(at_once) as workers:
        limited = [] if "ONLY_FULL" in os.environ else names
        measured = list(workers.map(lambda name: [(name, *case) for case in cases_of(lab, name)], limited))
        wanted = [case for cases in measured for case in cases]
        done = workers.map(lambda case: lab.case(case[0], case[1], case[2], "a limit"), wanted)
        results += [told for told in done if told]
    print(f"{len(results)} failing runs under a limit, {time.monotonic() - lab.ends_at:.0f} s", flush=True)
    for name in [] if "NO_FULL" in os.environ else FULL:
        if only and name not in names:
            continue
        free = lab.run(name)
        for part in (0.1, 0.5):
            if not free or time.monotonic() > lab.ends_at:
                continue
            least, most = free["allocated"], free["reserved"]
            spread = max(most - least, most // 8)
            # The context of the program itself takes its part; what was free beside it says how much.
            context = 480 * MIB
            left = context + most - spread + int(part * spread)
            neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(left)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
            neighbour.stdout.readline()
            told = lab.case(name, "", 0, f"a full card ({part})")
            neighbour.stdin.close()
            neighbour.wait()
            if told:
                results.append(told)
    counts = {}
    for told in results:
        for key, n in judge(told).items():
            counts[key] = counts.get(key, 0) + n
    print(f"{len(results)} failing runs of {len({told['program'] for told in results})} programs")
    for key, n in sorted(counts.items()):
        print(f"{key[0]:5} {key[1]:9} {key[2]:6} {n}")
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file, indent=1)
    return any(sure in SURE and right == "WRONG" for _, sure, right in counts)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--run":
        child(sys.argv[2])
    sys.exit(main())
