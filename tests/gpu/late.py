#!/usr/bin/env python3
"""`gputrace attach` of a PyTorch training loop that was started without the library: from attach on, what the trace has is what PyTorch counts.

usage: late.py FOLDER [ROUNDS]

FOLDER has `gputrace` and `libgputrace.so`. A small model trains, once alone and once attached to and detached from ROUNDS times (default 10), with
PyTorch's own segments and with expandable ones. In each round: blocks handed out are PyTorch's `allocation.all.allocated`, device memory
that was made is its `num_device_alloc` (segments) or mapped pieces (expandable); after detach no call is seen. All losses are those of the run
alone, to the bit. Prints how long attach and detach took, and the longest step. PASS, FAIL and NOTE lines; exit status 0 only without FAIL. One
GPU, PyTorch, less than 90 s.
"""
import json, os, re, statistics, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
GPUTRACE = os.path.join(FOLDER, "gputrace")
failed = []

PROGRAM = """
import json, sys, time
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step():
    began = time.perf_counter()
    loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss.item(), time.perf_counter() - began
step()
print("ready", flush=True)
for line in sys.stdin:
    before = torch.cuda.memory_stats()
    if line.startswith("empty"):
        torch.cuda.empty_cache()
    done = [step() for _ in range(5)]
    after = torch.cuda.memory_stats()
    delta = lambda name: after.get(name, 0) - before.get(name, 0)
    print(json.dumps({"losses": [it[0].hex() for it in done], "longest": max(it[1] for it in done),
        "blocks": delta("allocation.all.allocated"), "made": delta("num_device_alloc")}), flush=True)
"""


def check(is_so, what):
    print("PASS" if is_so else "FAIL", what, flush=True)
    if not is_so:
        failed.append(what)


def gputrace(*arguments):
    began = time.perf_counter()
    run = subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True, timeout=120)
    return run.returncode, run.stdout + run.stderr, time.perf_counter() - began


def count(trace):
    _, text, _ = gputrace("stats", "--json", trace)
    sections = {it["name"]: it for it in json.loads(text)["processes"][0]["sections"]}
    calls = {it["function"]: it["calls"] - it["failed"] for it in sections.get("calls", {}).get("functions", [])}
    # What PyTorch's allocator listed of before is told as if it were handed out when the library came.
    listed = re.search(r"torch.before=([0-9]+) blocks and ([0-9]+) segments", gputrace("doctor", trace)[1])
    check(listed is not None, f"PyTorch's list of before: {listed and listed[0]}")
    blocks, segments = map(int, listed.groups()) if listed else (0, 0)
    calls["cuMemAlloc_v2"] = calls.get("cuMemAlloc_v2", 0) - segments
    return sections["overview"]["blocks"] - blocks, calls


def train(settings, is_attached):
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline().strip() == "ready"
    pid, losses, attaches, detaches, longest = str(program.pid), [], [], [], []

    def ask(what):
        print(what, file=program.stdin, flush=True)
        answer = json.loads(program.stdout.readline())
        losses.extend(answer["losses"])
        longest.append(answer["longest"])
        return answer

    for round in range(ROUNDS):
        trace = os.path.join(tempfile.mkdtemp(), "late.gtr")
        if is_attached:
            status, said, took = gputrace("attach", "-o", trace, pid)
            attaches.append(took)
            if status != 0:
                check(False, f"attach, round {round}: {said}")
                break
        answer = ask("empty" if round % 2 else "train")
        if is_attached:
            status, said, took = gputrace("detach", pid)
            detaches.append(took)
            check(status == 0, f"detach, round {round}: {said.strip()}")
            blocks, calls = count(trace)
            made = calls.get("cuMemAlloc_v2", 0) if not settings else None
            check(blocks == answer["blocks"], f"{blocks} blocks, PyTorch {answer['blocks']}")
            if made is not None:
                check(made == answer["made"], f"{made} segments, PyTorch {answer['made']}")
            else:
                print("NOTE", {name: n for name, n in calls.items() if name.startswith("cuMem")})
        ask("train")
    program.stdin.close()
    check(program.wait(30) == 0, "the program ended as it does")
    if attaches:
        for name, times in (("attach", attaches), ("detach", detaches), ("longest of 5 steps", longest)):
            print("NOTE", f"{name}: median {statistics.median(times):.4f} s, most {max(times):.4f} s")
    else:
        print("NOTE", f"alone, longest of 5 steps: median {statistics.median(longest):.4f} s, most {max(longest):.4f} s")
    return losses


for settings in ("", "expandable_segments:True"):
    alone, attached = train(settings, False), train(settings, True)
    check(alone == attached and len(alone) == 10 * ROUNDS, f"{len(alone)} losses are the same, to the bit ({settings or 'segments'})")
sys.exit(1 if failed else 0)
