#!/usr/bin/env python3
"""Compares `gputrace whatif --plan` with the truth: the first plan that fits is really run within the limit, and so is the one before it.

usage: plans.py judge GPUTRACE LIBRARY OUTDIR PROGRAM...     records, asks, runs, and prints a table
       plans.py run PROGRAM EDITS BYTES OUT.json             runs one program with EDITS, PyTorch limited to BYTES

The programs are those of edits.py. The limit is chosen from what the plans need: between one of them and all cheaper ones. What other
owners took as recorded (contexts, code, libraries) is subtracted from it, and the rest is what PyTorch may reserve
(`torch.cuda.set_per_process_memory_fraction`). It needs one GPU of 80 GB. JOBS: how many programs run at a time (2).
"""
import json, os, subprocess, sys, threading

HERE = os.path.abspath(__file__)
sys.path.insert(0, os.path.dirname(HERE))
import edits

MIB = 1 << 20


def run(program, text, limit, out):
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, int(limit) / total))
    try:
        edits.run(program, text, out)
    except torch.OutOfMemoryError as error:
        with open(out, "w") as file:
            json.dump({"oom": str(error).split(". ")[0]}, file)


def asked(gputrace, trace, limit):
    command = [gputrace, "whatif", "--plan", "--limit", str(limit), "--json", trace]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer["outcomes"], answer["plan"]


def text_of(outcome):
    return " ".join(outcome["edits"])


def limit_of(outcomes, number):
    """Between what one of the plans needs and what all cheaper ones do; which one changes with the number of the program."""
    steps, least = [], outcomes[0]["needed_bytes"]
    for it in outcomes[1:]:
        if it["needed_bytes"] < least * 0.95:
            steps.append((it["needed_bytes"], least))
        least = min(least, it["needed_bytes"])
    if not steps:
        return None
    low, high = steps[number % len(steps)]
    return (low + high) // 2


def others_of(outcome):
    return sum(it["bytes"] for it in outcome["shares"]["others"])


def really(program, outcome, limit, folder, name, visible):
    out = os.path.join(folder, f"{program}.{name}.json")
    environment = dict(os.environ, **visible, PYTORCH_CUDA_ALLOC_CONF=outcome["options"], OMP_NUM_THREADS="4", HF_HUB_OFFLINE="1")
    ran = subprocess.run([sys.executable, HERE, "run", program, text_of(outcome), str(limit), out], env=environment, capture_output=True, text=True)
    if not os.path.exists(out):
        return {"failed": edits.reason(ran.stderr)}
    with open(out) as file:
        return json.load(file)


def said(outcome, truth):
    what = text_of(outcome) or "as recorded"
    what += f", {outcome['options']}" if outcome["options"] else ""
    # Without workspaces of convolutions, PyTorch takes another algorithm.
    is_likely = outcome["fits"] or outcome.get("workspaces_missing")
    fits = "yes" if outcome["fits_at_worst"] else "likely" if is_likely else "no"
    really = truth.get("failed") or ("out of memory" if "oom" in truth else f"fits, {truth['reserved'] / MIB:.0f} MiB reserved")
    return f"{what}: needs {outcome['needed_bytes'] / MIB:.0f} MiB, fits {fits}; really: {really}"


def one(number, program, gputrace, library, folder, turn, rows):
    trace = os.path.join(folder, f"{program}.gtr")
    visible = {"CUDA_VISIBLE_DEVICES": str(number % max(1, edits.n_gpus()))}
    with turn:
        command = [gputrace, "record", "-F", "-o", trace, "--", sys.executable, edits.HERE, "run", program, "", trace + ".json"]
        environment = dict(os.environ, **visible, GPUTRACE_LIBRARY=library, OMP_NUM_THREADS="4", HF_HUB_OFFLINE="1")
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            rows.append((program, None, f"{program}: {edits.reason(ran.stderr)}"))
            return
        outcomes, _ = asked(gputrace, trace, 80 << 30)
        room = limit_of(outcomes, number)
        if room is None:
            rows.append((program, None, f"{program}: no plan saves 5 %"))
            return
        limit = room + others_of(outcomes[0])
        outcomes, first = asked(gputrace, trace, limit)
        if first is None:
            rows.append((program, None, f"{program}: no plan fits {limit / MIB:.0f} MiB"))
            return
        lines, good = [f"{program}: limit {limit / MIB:.0f} MiB, {room / MIB:.0f} of them for PyTorch"], True
        for index in range(first, max(-1, first - 3), -1):
            it = outcomes[index]
            truth = really(program, it, limit - others_of(it), folder, str(index), visible)
            lines.append("  " + said(it, truth))
            fits = "oom" not in truth and "failed" not in truth
            if index >= first - 1:
                good &= fits == (index == first)
        rows.append((program, good, "\n".join(lines)))
        print(rows[-1][2], flush=True)


def judge(gputrace, library, folder, *programs):
    gputrace, library, folder = map(os.path.abspath, (gputrace, library, folder))
    os.makedirs(folder, exist_ok=True)
    turn, rows = threading.Semaphore(int(os.environ.get("JOBS", 2))), []
    work = [threading.Thread(target=one, args=(number, it, gputrace, library, folder, turn, rows)) for number, it in enumerate(programs)]
    for it in work: it.start()
    for it in work: it.join()
    judged = [good for _, good, _ in rows if good is not None]
    for _, good, text in rows:
        if good is None:
            print(text)
    print(f"{sum(judged)} of {len(judged)}: the first plan fits, and the one before it does not")


if __name__ == "__main__":
    verbs = {"run": (run, 4), "judge": (judge, 4)}
    verb, fewest = verbs.get((sys.argv[1:] or [""])[0], (None, 0))
    if verb is None or len(sys.argv) - 2 < fewest:
        sys.exit(__doc__)
    verb(*sys.argv[2:])
