#!/usr/bin/env python3
"""Shows whether the remedy in the verdict of `gputrace report` brings what the verdict promises.

usage: [ONLY=NAME,...] [JOBS=6] remedies.py FOLDER OUT   judges the programs of remedies_programs.py; all if none is named
       remedies.py list                                 their names and planted causes

FOLDER has `gputrace` and `libgputrace.so`. Each program has one fault. It is recorded, and `gputrace report --json` is asked for its
verdict. Then the remedied program runs really, without gputrace: a changed line, or the variable that the verdict's `fix` exports. The
peaks are PyTorch's own (NVML's figure of the process if the memory is not PyTorch's). PASS: the verdict names the planted cause, and
the real figure is what it promises, within 2 % or in the range that it states. A range counts only if something is gained. FAIL: all
else. SKIP: the verdict promises no number, or a library is missing. Of growth the verdict states what it sums up to; the real
difference stands beside it, and stays a SKIP.

It writes to OUT, as results arrive: table.txt and rows.jsonl; programs, traces and outputs are in OUT/work. The exit status is 0
only without FAIL. One GPU of 80 GB with PyTorch 2.11 takes less than four minutes. LAUNCHER=target/release/fake-cuda runs it without a GPU:
sizes are right there, and programs that need values or half precision are skipped. SECONDS limits one run (120).
"""
import importlib.util, json, os, re, shlex, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from remedies_programs import PROGRAMS

LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
LIMIT = float(os.environ.get("SECONDS", "120"))
MIB = 1 << 20
# How far from a promise the real figure may be.
NEAR = 0.02
# How far the sum of what grew may be from the real difference: the last turn may be there or not.
NEAR_GROWTH = 0.1
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE = r"(\d+(?:\.\d+)?) (B|KiB|MiB|GiB|TiB)\b"

# What every program imports. At the end, even after an error, it prints what PyTorch and NVML count.
TOLD = """
import atexit, ctypes, json, os, sys, torch

def limit(gib):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * (1 << 30) / total)

class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("compute", ctypes.c_uint)]

def of_process():
    # None where NVML does not list this process: in a container it may have another number.
    try:
        nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(int(chosen), ctypes.byref(device)):
            return None
        count, found = ctypes.c_uint(256), (Process * 256)()
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
            return None
        return next((it.used for it in found[: count.value] if it.pid == os.getpid() and it.used < 1 << 62), None)
    except (OSError, ValueError, AttributeError):
        return None

@atexit.register
def tell():
    stats = torch.cuda.memory_stats()
    figures = {name: stats[name + "_bytes.all.peak"] for name in ["allocated", "reserved"]}
    figures["end"] = stats["allocated_bytes.all.current"]
    figures["process"] = of_process()
    if "cupy" in sys.modules:
        pool = sys.modules["cupy"].get_default_memory_pool()
        figures["pools"] = stats["reserved_bytes.all.peak"] + pool.total_bytes()
    print("TOLD", json.dumps(figures), flush=True)
"""


def sizes(text):
    return [float(number) * UNITS[unit] for number, unit in re.findall(SIZE, text)]


class Promise:
    """What the real figure will be: `measure` from `low` to `high` bytes."""

    def __init__(self, measure, low, high):
        self.measure, self.low, self.high = measure, low, high

    @property
    def is_range(self):
        return self.high > self.low

    def keeps(self, real, before):
        if not self.low * (1 - NEAR) <= real <= self.high * (1 + NEAR):
            return False
        return not self.is_range or real <= before * (1 - NEAR)


def promised(verdict, report, before, program):
    """What the remark on the fix promises, as a figure of the remedied run; None if that is no number of bytes."""
    remark, stated = verdict.get("fix_remark", ""), sizes(verdict.get("fix_remark", ""))
    if not stated:
        return None
    # When a request failed: what was in use, and what was requested.
    failed = next((it for it in report["sections"] if it["name"] == "oom"), None)
    used = asked = 0
    if failed and failed.get("allocated_bytes"):
        used, asked = failed["allocated_bytes"], failed.get("asked_bytes") or 0
    allocated, reserved = before["allocated"], before["reserved"]
    outside = "process" if before.get("process") else "pools"
    first, last = stated[0], stated[-1]
    if "instead of" in remark or "fits so far" in remark or remark.startswith("perhaps"):
        return Promise("reserved", first, first)
    if "without any of it" in remark:
        return Promise("allocated", last, allocated)
    if "lower, at" in remark:
        return Promise("allocated", last, last)
    if "and stays" in remark:
        return Promise("allocated", allocated, allocated)
    if "pool keeps at least" in remark:
        # In the recorded order of captures, as replayed; the remedied program captures the largest first.
        rest = reserved - sizes(verdict["what"])[0]
        return Promise("reserved", rest + first, rest + last if last > first else reserved)
    if "stream keeps" in remark and "lower, at" not in remark:
        rest = allocated - sizes(verdict["what"])[0]
        return Promise("allocated", rest + first, rest + first)
    if program.get("outside"):
        return Promise(outside, before[outside] - first, before[outside] - ("up to" not in remark) * first)
    if "scales with the rows" in remark:
        # The remedied program has half the rows.
        half = sizes(verdict["what"])[0] / 2
        return Promise("allocated", allocated - half, allocated - half)
    measure = program.get("measure", "allocated")
    if used:
        # Of the moment that failed, and of the request itself.
        low = used + asked - first
        if "up to" in remark:
            # It may be that request that is no longer made.
            return Promise(measure, used - first, used + asked)
        return Promise(measure, low, low)
    if "up to" in remark or "the copy is" in remark:
        return Promise(measure, before[measure] - first, before[measure])
    return Promise(measure, before[measure] - first, before[measure] - first)


def stated_growth(verdict, before, after):
    """Beside a verdict without a promise: what it says grew, and what really goes."""
    stated = re.search(r"grew by " + SIZE, verdict.get("what", ""))
    if not stated:
        return ""
    total = re.search(SIZE + r" in all", verdict["what"])
    said = sizes((total or stated).group(0))[0]
    real = before["end"] - after["end"]
    near = "agrees" if abs(said - real) <= NEAR_GROWTH * max(said, real) else "DISAGREES"
    return f"; what it says grew: {mib(said)}, really {mib(real)} ({near})"


def mib(figure):
    return "-" if figure is None else f"{figure / MIB:.1f} MiB"


def variants(source):
    """The program, and the remedied one: lines that begin with - and + are of one of them."""
    both = []
    for other in "+-":
        lines = [line for line in source.strip("\n").split("\n") if not line.startswith(other)]
        both.append("\n".join(line[1:] if line[:1] in ("+", "-") else line for line in lines) + "\n")
    return both


def run(command, folder, name, environment):
    """Runs a program; returns its status and what it told. SKIPPED if it says that it cannot run here."""
    path = os.path.join(folder, name)
    with open(path + ".out", "w") as out:
        try:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            done = 124
    with open(path + ".out", errors="replace") as out:
        text = out.read()
    told = re.search(r"^TOLD (.*)$", text, re.M)
    return done, json.loads(told.group(1)) if told else None, text


class Judge:
    def __init__(self, folder, out):
        self.folder, self.out, self.lock, self.rows = os.path.abspath(folder), os.path.abspath(out), threading.Lock(), []
        os.makedirs(os.path.join(self.out, "work"), exist_ok=True)
        for name in ["table.txt", "rows.jsonl"]:
            open(os.path.join(self.out, name), "w").close()
        self.say(f"{'result':6} {'program':22} {'promise':>32} {'real':>12} {'before':>12}  cause said; why")

    def say(self, line):
        print(line, flush=True)
        with open(os.path.join(self.out, "table.txt"), "a") as table:
            table.write(line + "\n")

    def judge(self, name):
        begin = time.monotonic()
        row = {"program": name, "planted": PROGRAMS[name]["causes"], "result": "SKIP", "why": ""}
        try:
            self.judged(name, PROGRAMS[name], row)
        except Exception as error:
            row.update(result="FAIL", why=f"{type(error).__name__}: {error}")
        row["seconds"] = round(time.monotonic() - begin, 1)
        with self.lock:
            self.rows.append(row)
            with open(os.path.join(self.out, "rows.jsonl"), "a") as rows:
                rows.write(json.dumps(row) + "\n")
            promise = row.get("promise")
            text = "-"
            if promise:
                numbers = [promise["low"], promise["high"]] if promise["is_range"] else [promise["low"]]
                text = " to ".join(f"{number / MIB:.1f}" for number in numbers) + f" {promise['measure']}"
            before, real = row.get("before_bytes"), row.get("real_bytes")
            why = "; ".join(filter(None, [row.get("cause") or "(no cause)", row["why"]]))
            self.say(f"{row['result']:6} {name:22} {text:>32} {mib(real):>12} {mib(before):>12}  {why}")

    def judged(self, name, program, row):
        missing = [it for it in program.get("libraries", []) if not importlib.util.find_spec(it)]
        if missing or LAUNCHER and program.get("real"):
            row["why"] = f"{', '.join(missing)} is missing" if missing else "needs a real GPU"
            return
        work = os.path.join(self.out, "work", name)
        os.makedirs(work, exist_ok=True)
        before_text, after_text = variants(program["source"])
        for file, text in [("told.py", TOLD), ("program.py", before_text), ("remedied.py", after_text)]:
            with open(os.path.join(work, file), "w") as out:
                out.write(text)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
        environment.update({"OMP_NUM_THREADS": "2", **program.get("env", {})})
        trace = os.path.join(work, "program.gtr")
        if os.path.exists(trace):
            os.remove(trace)
        gputrace = os.path.join(self.folder, "gputrace")
        record = [*LAUNCHER, gputrace, "record", "-o", trace, "--", sys.executable, "program.py"]
        status, before, text = run(record, work, "program", environment)
        if before is None or (status != 0) != program.get("fails", False):
            last = text.strip().splitlines()[-1:] or [""]
            row.update(result="FAIL", why=f"the program ended with {status}: {last[0][:200]}")
            return
        asked = subprocess.run([gputrace, "report", "--json", trace], capture_output=True, text=True, timeout=LIMIT)
        if asked.returncode not in (0, 1) or not asked.stdout:
            row.update(result="FAIL", why=f"report ended with {asked.returncode}: {asked.stderr[-200:]}")
            return
        report = json.loads(asked.stdout)["processes"][0]
        verdict = report["verdict"]
        row.update({key: verdict.get(key) for key in ["kind", "cause", "what", "call_site", "confidence", "fix", "fix_remark", "second_cause", "third_cause"]})
        row.update(before=before)
        remedied = {**environment, **program.get("remedy", {})}
        if "PYTORCH_CUDA_ALLOC_CONF" in program.get("remedy", {}):
            # Exactly what the verdict says.
            remedied.pop("PYTORCH_CUDA_ALLOC_CONF")
            fix = verdict.get("fix") or ""
            for key, value in re.findall(r"export (PYTORCH_\w+)=(\S*)", fix):
                remedied[key] = value
            if "export" not in fix and "unset" not in fix:
                remedied.update(program["remedy"])
        status, after, text = run([*LAUNCHER, sys.executable, "remedied.py"], work, "remedied", remedied)
        if after is None or status != 0:
            last = text.strip().splitlines()[-1:] or [""]
            row.update(result="FAIL", why=f"the remedied program ended with {status}: {last[0][:200]}")
            return
        row.update(after=after)
        is_planted = verdict.get("cause") in program["causes"]
        promise = promised(verdict, report, before, program)
        whys = []
        if not is_planted:
            whys.append(f"planted: {program['causes'][0]}")
        if promise is None:
            measure = program.get("measure", "allocated")
            row.update(before_bytes=before[measure], real_bytes=after[measure])
            whys.append(f"promises no number of bytes: {verdict.get('fix_remark') or '(no remark)'}{stated_growth(verdict, before, after)}")
            row["result"] = "SKIP" if is_planted else "FAIL"
        else:
            now, then = after[promise.measure], before[promise.measure]
            row["promise"] = {"measure": promise.measure, "low": promise.low, "high": promise.high, "is_range": promise.is_range}
            row.update(before_bytes=then, real_bytes=now)
            kept = promise.keeps(now, then)
            if promise.is_range and then > promise.low:
                row["reached"] = (then - now) / (then - promise.low)
                whys.append(f"{row['reached']:.0%} of what it saves at most")
            elif not promise.is_range:
                whys.append(f"off by {now / promise.low - 1:+.1%}" if promise.low > 0 else "nothing is left")
            if not kept:
                whys.append("NOT AS PROMISED")
            row["result"] = "PASS" if is_planted and kept else "FAIL"
        row["why"] = "; ".join(whys)


def main():
    if sys.argv[1:] == ["list"]:
        for name, program in PROGRAMS.items():
            print(f"{name:22} {program['causes'][0]}")
        return 0
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    only = [name for name in os.environ.get("ONLY", "").split(",") if name]
    unknown = [name for name in only if name not in PROGRAMS]
    if unknown:
        sys.exit(f"remedies.py: no program is named {', '.join(unknown)}")
    judge, begin = Judge(sys.argv[1], sys.argv[2]), time.monotonic()
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "6"))) as pool:
        list(pool.map(judge.judge, only or PROGRAMS))
    numbers = [row for row in judge.rows if row.get("promise")]
    count = lambda result, rows: sum(row["result"] == result for row in rows)
    exact = [row for row in numbers if not row["promise"]["is_range"]]
    judge.say(
        f"{len(judge.rows)} programs: {count('PASS', judge.rows)} PASS, {count('FAIL', judge.rows)} FAIL, {count('SKIP', judge.rows)} SKIP; "
        f"numbers promised: {len(numbers)}, kept {count('PASS', numbers)} (one figure: {count('PASS', exact)} of {len(exact)}); "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if count("FAIL", judge.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
