"""What-ifs against the truth: records a workload once, asks gputrace what other allocator settings would have made of it,
then really runs under them and compares.

    python3 tests/whatif.py GPUTRACE LIBRARY OUTDIR [WORKLOAD ...]

GPUTRACE is the program, LIBRARY its libgputrace.so; traces and whatif.json go to OUTDIR. Needs PyTorch and nothing else, and
a GPU, or the fake one: LAUNCHER="target/debug/fake-cuda" before it. WORKLOADS names some of those below; all by default.
Exit status 1 if an answer that was called exact was not.
"""
import json, os, random, subprocess, sys, time

# What is asked. `limit` is a fraction of the way from the peak of allocated to the peak of reserved bytes.
SETTINGS = [
    ("", None),
    ("expandable_segments:True", None),
    ("max_split_size_mb:64", None),
    ("max_split_size_mb:200", None),
    ("roundup_power2_divisions:4", None),
    ("expandable_segments:True,roundup_power2_divisions:8", None),
    ("", 0.6),
    ("garbage_collection_threshold:0.7", 0.6),
    ("expandable_segments:True", 0.6),
]
COMPARED = [
    ("peak_reserved_bytes", "reserved_bytes.all.peak"),
    ("peak_allocated_bytes", "allocated_bytes.all.peak"),
    ("peak_requested_bytes", "requested_bytes.all.peak"),
    ("num_device_alloc", "num_device_alloc"),
    ("num_device_free", "num_device_free"),
    ("num_alloc_retries", "num_alloc_retries"),
    ("num_ooms", "num_ooms"),
]
SAME_REQUESTS = ["allocation.all.allocated", "requested_bytes.all.allocated"]


def gpt_growing(torch, scale):
    """Training with longer and longer sequences: no cached segment ever fits the next step."""
    nn = torch.nn
    width, heads, layers, vocabulary = 512 * scale, 8, 6, 16000

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, d))
            return x + self.mlp(self.norms[1](x))

    model = nn.Sequential(nn.Embedding(vocabulary, width), *[Block() for _ in range(layers)], nn.Linear(width, vocabulary)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(10):
        tokens = torch.zeros((4, 64 + 48 * step), dtype=torch.long, device="cuda")
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def evaluation_between(torch, scale):
    """Training at random batch sizes with evaluations and empty_cache in between."""
    nn = torch.nn
    layers = [nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 3072), nn.GELU(), nn.Linear(3072, 768)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for step in range(40):
        rows = random.choice([500, 900, 1300, 2100, 3300]) * scale
        model(torch.zeros(rows, 768, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 8 == 7:
            with torch.no_grad():
                kept.append(model(torch.zeros(rows * 3, 768, device="cuda"))[: rows // 2].clone())
        if step in (15, 31):
            torch.cuda.empty_cache()


def churn(torch, scale):
    """Tensors of all sizes, freed in random order, on two streams, some still in use on the other one when freed."""
    side, live = torch.cuda.Stream(), []
    for step in range(4000):
        if live and random.random() < 0.5:
            tensor = live.pop(random.randrange(len(live)))
            if random.random() < 0.1:
                tensor.record_stream(side)
                # When a stream is done is chance on a real GPU; here it always is when asked.
                torch.cuda.synchronize()
            del tensor
        else:
            size = int(2 ** random.uniform(6, 25)) * scale
            with torch.cuda.stream(side if random.random() < 0.15 else torch.cuda.current_stream()):
                live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(live) > 80:
            live.pop(0)
        if step in (1500, 3000):
            torch.cuda.empty_cache()


WORKLOADS = {"gpt_growing": gpt_growing, "evaluation_between": evaluation_between, "churn": churn}


def workload(name, limit):
    """In the process under test: runs it and prints what PyTorch counted."""
    import torch

    random.seed(name)
    torch.manual_seed(0)
    total = torch.cuda.mem_get_info()[1]
    if limit:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    died = False
    try:
        WORKLOADS[name](torch, int(os.environ.get("SCALE", "1")))
    except torch.cuda.OutOfMemoryError:
        died = True
    stats = torch.cuda.memory_stats()
    names = [real for _, real in COMPARED] + SAME_REQUESTS
    print(json.dumps({"died": died, "total": total, "torch": torch.__version__, **{n: stats.get(n, 0) for n in names}}))


def run(command, **environment):
    """The last line of its output as JSON. PYTORCH_* of whoever calls us must not leak in."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")}
    clean.update({key: value for key, value in environment.items() if value})
    done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, timeout=300)
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}")
    return json.loads(lines[-1])


def compare(row, predicted, real):
    """Marks what differs; how far off the peak is, as a fraction."""
    row["differs"] = [ours for ours, theirs in COMPARED if predicted[ours] != real[theirs]]
    row["predicted"] = {ours: predicted[ours] for ours, _ in COMPARED}
    row["real"] = {ours: real[theirs] for ours, theirs in COMPARED}
    row["confidence"], row["range"] = predicted["confidence"], predicted["peak_reserved_range"]
    peak = real["reserved_bytes.all.peak"]
    row["error"] = (predicted["peak_reserved_bytes"] - peak) / max(peak, 1)
    return row


def main(gputrace, library, out, names):
    gputrace, library, out = (os.path.abspath(path) for path in (gputrace, library, out))
    os.makedirs(out, exist_ok=True)
    launcher = os.environ.get("LAUNCHER", "").split()
    python = launcher + [sys.executable, os.path.abspath(__file__), "--run"]
    rows, started = [], time.time()
    print(f"{'workload':<20} {'setting':<52} {'predicted':>11} {'real':>11} {'off':>7} {'mallocs':>13} {'frees':>13} {'retries':>9}  sure      verdict")
    for name in names or list(WORKLOADS):
        trace = os.path.join(out, f"{name}.gtr")
        recording = {"LD_PRELOAD": library, "GPUTRACE_RECORDER": gputrace, "GPUTRACE_OUTPUT": trace, "GPUTRACE_FORCE": "1"}
        recorded = run([*python, name, "0"], **recording)
        allocated, reserved = recorded["allocated_bytes.all.peak"], recorded["reserved_bytes.all.peak"]
        for options, fraction in SETTINGS:
            limit = 0
            if fraction:
                wanted = int(allocated + fraction * (reserved - allocated))
                limit = int(wanted / recorded["total"] * recorded["total"])  # what PyTorch makes of the fraction
            question = ["replay", trace, "--json", "--policy", f"torch:{options}"] + (["--limit", str(limit), "--other", "0"] if limit else [])
            report = run([gputrace, *question])
            predicted = report["outcomes"][0]
            real = run([*python, name, str(limit)], PYTORCH_CUDA_ALLOC_CONF=options)
            row = {"workload": name, "options": options, "limit": limit, "torch": real["torch"], "self_check": predicted["self_check"]}
            compare(row, predicted, real)
            same = real["died"] or all(real[key] == recorded[key] for key in SAME_REQUESTS)
            # After an out-of-memory error the program goes another way: only the error itself is predicted.
            row["verdict"] = "other requests" if not same else "differs" if row["differs"] else "same"
            if real["died"] != bool(predicted["oom"]):
                row["verdict"] = "differs"
            rows.append(row)
            pair = lambda key: f"{row['predicted'][key]}/{row['real'][key]}"
            mib = lambda key: f"{row[key]['peak_reserved_bytes'] / 2**20:.1f}"
            label = options or "(none)"
            label += f" limit {limit >> 20}M" if limit else ""
            print(f"{name:<20} {label:<52} {mib('predicted'):>11} {mib('real'):>11} {100 * row['error']:>6.2f}% {pair('num_device_alloc'):>13} {pair('num_device_free'):>13} {pair('num_alloc_retries'):>9}  {row['confidence']:<9} {row['verdict']} {' '.join(row['differs'])}", flush=True)
    with open(os.path.join(out, "whatif.json"), "w") as file:
        json.dump({"schema": "gputrace.whatif-test/1", "rows": rows}, file, indent=1)
    compared = [row for row in rows if row["verdict"] != "other requests"]
    wrong = [row for row in compared if row["verdict"] == "differs" and row["confidence"] == "exact"]
    exact = sum(row["verdict"] == "same" for row in compared)
    checks = {(row["workload"], row["self_check"]["matching"], row["self_check"]["of"]) for row in rows}
    for name, matching, of in sorted(checks):
        print(f"self-check of {name}: {matching} of {of} addresses match")
    print(f"{exact} of {len(compared)} answers are the truth to the byte and the call, {len(wrong)} of those called exact are not; {time.time() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"] and len(sys.argv) == 4:
        workload(sys.argv[2], int(sys.argv[3]))
    elif len(sys.argv) >= 4 and not set(sys.argv[4:]) - set(WORKLOADS):
        sys.exit(main(*sys.argv[1:4], sys.argv[4:]))
    else:
        sys.exit(__doc__)
