#!/usr/bin/env python3
"""The traces of a job, reduced and replayed by `gputrace map` on every engine there is: the same bytes, whoever ran it and whatever was killed.

    executors.py RELEASE FOLDER [RANKS [EVENTS]]

RELEASE is the folder of `gputrace` and `examples/ranks`. PYTHON names one with ray and distributed; what is missing, and
Slurm where this user may not start it, is a SKIP. Ray and Dask start as their documentation says, Slurm by slurm.sh. While an engine reduces, one
task in ten is killed: its process or, of every second, the worker that runs it. Then ten settings are replayed for each rank, here and
on each, and what that took is printed; GRID is a number of ranks, where all are too many, and ENGINES names some. PASS, FAIL and SKIP lines; exit status 0 only without FAIL.
"""
import contextlib, filecmp, glob, os, shutil, signal, socket, subprocess, sys, threading, time

RELEASE, FOLDER = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
RANKS, EVENTS = (int(text) for text in (sys.argv[3:] + ["10", "300000"][len(sys.argv) - 3:]))
GPUTRACE, TRACES = f"{RELEASE}/gputrace", f"{FOLDER}/traces"
PYTHON = os.path.abspath(os.environ.get("PYTHON", sys.executable))
HERE = os.path.dirname(os.path.abspath(__file__))
SETTINGS = ["torch"] + [f"torch:{setting}" for setting in (
    "expandable_segments:True", "max_split_size_mb:64", "max_split_size_mb:128", "max_split_size_mb:256", "roundup_power2_divisions:4",
    "roundup_power2_divisions:8", "garbage_collection_threshold:0.8", "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:512")]
# Ray's own: no questions, nothing sent.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
os.environ["PYTHONPATH"] = os.path.join(HERE, "../../python/src")
ADDRESSES = {}
failed = []


def say(verdict, text):
    if verdict == "FAIL":
        failed.append(text)
    print(f"{verdict}  {text}", flush=True)


def lacks(engine):
    if engine in ("ray", "dask"):
        module = {"ray": "ray", "dask": "distributed"}[engine]
        found = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode == 0
        return "" if found else f"{PYTHON} has no {module}"
    if engine == "slurm":
        tried = subprocess.run([f"{HERE}/slurm.sh", f"{FOLDER}/cluster", "true"], capture_output=True, text=True)
        return tried.stderr.strip().splitlines()[-1] if tried.returncode == 77 else ""
    return ""


@contextlib.contextmanager
def clusters(engines):
    """Ray and Dask as their documentation starts them, for as long as this lasts."""
    bin, started = os.path.dirname(PYTHON), []
    if "ray" in engines:
        began = subprocess.run([f"{bin}/ray", "start", "--head", "--port", "6399", "--num-cpus", str(os.cpu_count()), "--include-dashboard", "false",
                        "--disable-usage-stats"], capture_output=True, text=True)
        if began.returncode:
            sys.exit(f"FAIL  ray start: {(began.stdout + began.stderr)[-1000:]}")
        ADDRESSES["ray"] = "127.0.0.1:6399"
    if "dask" in engines:
        started.append(subprocess.Popen([f"{bin}/dask", "scheduler", "--port", "28786", "--no-dashboard"], stderr=subprocess.DEVNULL))
        started.append(subprocess.Popen([f"{bin}/dask", "worker", "tcp://127.0.0.1:28786", "--nworkers", str(os.cpu_count()), "--nthreads", "1",
                                         "--no-dashboard"], stderr=subprocess.DEVNULL))
        ADDRESSES["dask"] = "tcp://127.0.0.1:28786"
        wait = f"import distributed; distributed.Client({ADDRESSES['dask']!r}).wait_for_workers({os.cpu_count()}, timeout=60)"
        subprocess.run([PYTHON, "-c", wait], check=True)
    try:
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()
        if "ray" in engines:
            subprocess.run([f"{bin}/ray", "stop", "--force"], capture_output=True)


def mapped(engine, name, *words):
    """Runs `gputrace map`; its folder, what it said, and seconds."""
    to, began = f"{FOLDER}/{name}", time.monotonic()
    shutil.rmtree(to, ignore_errors=True)
    jobs = ["--jobs", str(os.cpu_count())] if engine == "slurm" else []
    at = ["--address", ADDRESSES[engine]] if engine in ADDRESSES else []
    beside = [f"{HERE}/slurm.sh", f"{FOLDER}/cluster"] if engine == "slurm" else []
    ran = subprocess.run([*beside, GPUTRACE, "map", "--executor", engine, "--python", PYTHON, *jobs, *at, "-o", to, *words], capture_output=True, text=True,
                         timeout=7200)
    return to, ran, time.monotonic() - began


class Killer(threading.Thread):
    """Kills some of the processes `gputrace reduce`, each of another trace, and the parents of every second."""

    def __init__(self, most, parents):
        super().__init__(daemon=True)
        self.most, self.parents, self.killed, self.over = most, parents, {}, False

    def run(self):
        while not self.over and len(self.killed) < self.most:
            for path in glob.glob("/proc/[0-9]*/cmdline"):
                try:
                    words = open(path, "rb").read().split(b"\0")
                    if len(words) < 3 or words[0] != GPUTRACE.encode() or words[1] != b"reduce" or words[-2] in self.killed:
                        continue
                    pid = int(path.split("/")[2])
                    if self.parents and len(self.killed) % 2 == 1:
                        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
                    os.kill(pid, signal.SIGKILL)
                    self.killed[words[-2]] = pid
                except (OSError, ValueError):
                    continue
                if len(self.killed) == self.most:
                    break
            time.sleep(0.002)


def same(one, other):
    """What differs of two folders."""
    names = sorted(os.listdir(one))
    if names != sorted(os.listdir(other)):
        return f"{len(names)} files and {len(os.listdir(other))}"
    _, differing, odd = filecmp.cmpfiles(one, other, names, shallow=False)
    return ", ".join(differing + odd)


def main():
    shutil.rmtree(TRACES, ignore_errors=True)
    subprocess.run([f"{RELEASE}/examples/ranks", TRACES, str(RANKS), str(EVENTS), "0", str(RANKS - 1)], check=True)
    print(f"{RANKS} ranks of {EVENTS:,} events")
    first, ran, _ = mapped("local", "reference", "reduce", "--", TRACES)
    if ran.returncode != 0:
        sys.exit(f"FAIL  local: {ran.stderr}")
    expected = subprocess.run([GPUTRACE, "ranks", "--json", first], capture_output=True).stdout
    engines = [engine for engine in os.environ.get("ENGINES", "local,ray,dask,slurm").split(",") if not lacks(engine) or say("SKIP", f"{engine}: {lacks(engine)}")]
    with clusters(engines):
        compare(engines, first, expected)
    sys.exit(bool(failed))


def compare(engines, first, expected):
    for engine in engines:
        # On a host by its name, where an engine knows such.
        named = [f"{socket.gethostname()}:{path}" for path in sorted(glob.glob(f"{TRACES}/*.gtr"))]
        # A task may be over before it is seen: then all of it again.
        for _ in range(6):
            killer = Killer(-(-RANKS // 10), engine != "local")
            killer.start()
            to, ran, seconds = mapped(engine, engine, "reduce", "--", *named)
            killer.over = True
            killer.join()
            if len(killer.killed) == killer.most or ran.returncode:
                break
        os.path.exists(f"{to}/map.json") and os.remove(f"{to}/map.json")
        shutil.copy(f"{first}/map.json", to) if os.path.isdir(to) else None
        said = subprocess.run([GPUTRACE, "ranks", "--json", to], capture_output=True).stdout
        wrong = ran.returncode and ran.stderr[-600:] or same(first, to) or (said != expected and "ranks says something else")
        killed = f"{len(killer.killed)} of {killer.most} killed"
        if not wrong and len(killer.killed) < killer.most:
            wrong = "too fast to be killed"
        say("FAIL" if wrong else "PASS", f"{engine}: {RANKS} tasks in {seconds:.1f} s, {killed}: {wrong or 'the same bytes'}")
    grid = [word for setting in SETTINGS for word in ("--with", f"--policy {setting}")]
    few, took = sorted(glob.glob(f"{TRACES}/*.gtr"))[: int(os.environ.get("GRID", RANKS))], {}
    for engine in engines:
        to, ran, took[engine] = mapped(engine, f"{engine}.grid", *grid, "replay", "--json", "--", *few)
        wrong = ran.returncode and ran.stderr[-600:] or same(f"{FOLDER}/local.grid", to)
        n = len(few) * len(SETTINGS)
        say("FAIL" if wrong else "PASS", f"{engine}: {n} replays in {took[engine]:.1f} s: {wrong or 'the same bytes'}")
    for engine in engines[1:]:
        print(f"{engine} is {took['local'] / took[engine]:.2f} times as fast as here")


main()
