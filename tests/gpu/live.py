#!/usr/bin/env python3
"""`gputrace top` and `gputrace metrics` beside a training loop: what they show is what PyTorch says, and what they cost it.

usage: live.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`; WORK keeps the trace and what was said (default: a temporary folder). A small GPT trains, recorded.
1. At quiet instants, `top --once --json` has PyTorch's own `memory_allocated`, `memory_reserved` and peaks, to the byte; the driver's figure of the
   process explains itself; a process that is not recorded is shown. A picture of each is printed.
2. Rounds of steps alone and with `top --interval 0.5 --json` and `metrics` (scraped every half second) beside it, in turn: medians of each, and the
   median of the pairs' ratios. Both sides are recorded.
LAUNCHER=target/release/fake-cuda runs it without a GPU (numbers of the first part hold there too). PASS, FAIL and NOTE lines; exit status 0 only
without FAIL. One GPU, less than 60 s.
"""
import json, os, shlex, statistics, subprocess, sys, tempfile, threading, time, urllib.request

FOLDER = os.path.abspath(sys.argv[1])
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
GPUTRACE = os.path.join(FOLDER, "gputrace")
PAIRS, STEPS = (2, 20) if LAUNCHER else (8, 100)
failed = []

PROGRAM = """
import json, statistics, sys, time
import torch
from torch import nn

torch.manual_seed(0)
layer = lambda: nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(8000, 512), *[layer() for _ in range(6)], nn.Linear(512, 8000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []


def step():
    tokens = torch.randint(0, 8000, (8, 257), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def say(**what):
    print(json.dumps(what), flush=True)


for _ in range(5):
    step()
torch.cuda.synchronize()
say(ready=True)
for line in sys.stdin:
    verb, *rest = line.split()
    if verb == "steps":
        times = []
        for _ in range(int(rest[0])):
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        say(ms=[time * 1e3 for time in times])
    elif verb == "keep":
        kept.append(torch.empty(int(rest[0]), dtype=torch.uint8, device="cuda"))
        say(kept=len(kept))
    elif verb == "empty":
        kept.clear()
        torch.cuda.empty_cache()
        say(kept=0)
    elif verb == "figures":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        say(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved(),
            peak_allocated=torch.cuda.max_memory_allocated(), peak_reserved=torch.cuda.max_memory_reserved(), used=total - free)
    else:
        break
"""
STRANGER = "import sys, torch; kept = torch.empty(256 << 20, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); print('ready', flush=True); sys.stdin.read()"


def verdict(is_well, what):
    print("PASS" if is_well else "FAIL", what, flush=True)
    if not is_well:
        failed.append(what)


class Job:
    def __init__(self):
        os.makedirs(WORK, exist_ok=True)
        program = os.path.join(WORK, "train.py")
        with open(program, "w") as file:
            file.write(PROGRAM)
        command = [GPUTRACE, "record", "-q", "-f", "-o", os.path.join(WORK, "live.gtr"), "--", *LAUNCHER, sys.executable, program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hear()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        self.process.stdin.close()
        return self.process.wait()


def top(*arguments):
    return subprocess.run([GPUTRACE, "top", "--once", *arguments], capture_output=True, text=True, check=True).stdout


def ours(seen):
    return [it for process in seen["processes"] for it in process["devices"] if it["torch"]]


def is_equal(job, what):
    said = job.ask("figures")
    # The recorder writes once a second at least.
    for _ in range(20):
        time.sleep(0.25)
        seen = json.loads(top("--json", WORK))
        device = (ours(seen) or [None])[0]
        torch = device and device["torch"]
        found = torch and {name: torch[f"{name}_bytes"] for name in ["allocated", "reserved", "peak_allocated", "peak_reserved"]}
        if found and all(found[name] == said[name] for name in found):
            break
    verdict(bool(found) and all(found[name] == said[name] for name in found), f"{what}: top has {found}, PyTorch {said}")
    if device:
        print(f"NOTE {what}: driver {device['driver_bytes']}, charged {device['process_used_bytes']}, unaccounted {device['unaccounted_bytes']}, "
              f"owners {device['owners']}, cudaMemGetInfo used {said['used']}")
    return seen


def picture(what):
    text = top(WORK)
    print(f"--- top --once: {what}\n{text}---", flush=True)
    with open(os.path.join(WORK, "frames.txt"), "a") as file:
        file.write(f"--- {what}\n{text}\n")


class Watchers:
    """top and metrics, and who scrapes."""

    def __enter__(self):
        self.stop = threading.Event()
        self.seen, self.scraped = open(os.path.join(WORK, "top.jsonl"), "a"), 0
        self.top = subprocess.Popen([GPUTRACE, "top", "--interval", "0.5", "--json", WORK], stdout=self.seen)
        command = [GPUTRACE, "metrics", "--listen", "127.0.0.1:0", WORK]
        self.metrics = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.metrics.stdout.readline().strip()
        self.thread = threading.Thread(target=self.scrape)
        self.thread.start()
        return self

    def scrape(self):
        while not self.stop.wait(0.5):
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                self.body = answer.read().decode()
                self.scraped += 1

    def cpu(self):
        """Seconds of a processor that both took so far."""
        ticks = 0
        for process in [self.top, self.metrics]:
            with open(f"/proc/{process.pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        for process in [self.top, self.metrics]:
            process.kill()
            process.wait()


def costs(job):
    alone, beside, ratios, cpu, wall, scraped = [], [], [], 0.0, 0.0, 0
    for pair in range(PAIRS):
        def one(watched):
            nonlocal cpu, wall, scraped
            if not watched:
                return statistics.median(job.ask(f"steps {STEPS}")["ms"])
            with Watchers() as watchers:
                time.sleep(1.0)
                before, began = watchers.cpu(), time.time()
                median = statistics.median(job.ask(f"steps {STEPS}")["ms"])
                cpu, wall, scraped = cpu + watchers.cpu() - before, wall + time.time() - began, scraped + watchers.scraped
                return median
        # Neither is always the first.
        order = [False, True] if pair % 2 == 0 else [True, False]
        medians = {watched: one(watched) for watched in order}
        alone.append(medians[False])
        beside.append(medians[True])
        ratios.append(medians[True] / medians[False])
        print(f"NOTE pair {pair}: {medians[False]:.3f} ms alone, {medians[True]:.3f} ms beside top and metrics", flush=True)
    ratio, spread = statistics.median(ratios), statistics.median(abs(it - statistics.median(ratios)) for it in ratios)
    print(f"NOTE step: {statistics.median(alone):.3f} ms alone, {statistics.median(beside):.3f} ms beside; ratio {ratio:.4f}, spread {spread:.4f}; "
          f"top and metrics took {cpu:.2f} s of a processor in {wall:.1f} s; {scraped} scrapes")
    verdict(abs(ratio - 1) <= max(0.01, 3 * spread), f"step time beside top and metrics: ratio {ratio:.4f}, within 1 % or three times the spread of pairs")


def main():
    began = time.time()
    job = Job()
    print(f"NOTE started after {time.time() - began:.1f} s in {WORK}")
    is_equal(job, "after 5 steps")
    picture("after 5 steps")
    job.ask("keep 1000000000")
    is_equal(job, "with 1 GB more")
    job.ask("empty")
    is_equal(job, "after empty_cache")
    stranger = subprocess.Popen([*LAUNCHER, sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stranger.stdout.readline()
    seen = json.loads(top("--json", WORK))
    others = [other for card in seen["cards"] for other in card["unrecorded"] or []]
    large = [other for other in others if (other["used_bytes"] or 0) >= 256 << 20]
    if seen["driver_missing"] or not others:
        print(f"NOTE no process that is not recorded is listed: {seen['driver_missing']}, {seen['cards']}")
    else:
        verdict(len(large) >= 1, f"the process that is not recorded is shown: {others}")
        verdict(len(others) == 1, f"and no other: the recorded one is known among NVML's ({[process['pid_here'] for process in seen['processes']]})")
    picture("with a process that is not recorded")
    stranger.stdin.close()
    stranger.wait()
    costs(job)
    is_equal(job, "after all steps")
    picture("after all steps")
    verdict(job.end() == 0, "the program ended as it does")
    print(f"NOTE {time.time() - began:.1f} s in all")


main()
sys.exit(1 if failed else 0)
