#!/usr/bin/env python3
"""Records programs with one known fault each, and some without, and holds `report`'s verdict against what is known of each.

usage: [ONLY=WORD,...] faults.py FOLDER [WORK]

FOLDER has `gputrace` and `libgputrace.so`; WORK keeps a folder with program and trace for each (default: a temporary one). The programs
are those of tests/golden/verdicts: the first line of each says which kind of verdict is right, and with what setting if one mends it;
its faulty line is marked `<- fault`. Where a program keeps what another line made, the line that made it is the one that is marked: who
holds a tensor, no allocator sees. What needs CuPy, JAX or `nvcc` is a SKIP where these are missing. PASS, FAIL and SKIP lines; exit
status 0 only without FAIL. One GPU, a minute; LAUNCHER=target/release/fake-cuda runs it without one. Traces made in /job/verdicts of a
GPU's machine lie beside their programs, where `replay/tests/verdicts.rs` holds their verdicts.
"""
import glob, importlib.util, json, os, re, shlex, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

FOLDER = os.path.abspath(sys.argv[1])
WORK = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else tempfile.mkdtemp()
GPUTRACE = os.path.join(FOLDER, "gputrace")
LAUNCHER = shlex.split(os.environ.get("LAUNCHER", ""))
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
PROGRAMS = os.environ.get("PROGRAMS", os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden/verdicts"))


def lacking(text, file):
    """What a program needs and this machine has not."""
    if "(a real GPU only)" in text and LAUNCHER:
        return ["a real GPU"]
    if file.endswith(".cu"):
        return [] if os.path.exists(NVCC) else ["nvcc"]
    modules = re.findall(r"^import .*?\b(torch|cupy|jax)\b", text, re.MULTILINE)
    return [module for module in modules if importlib.util.find_spec(module) is None]


def record(path):
    name, file = path.split(os.sep)[-2:]
    with open(path) as program:
        text = program.read()
    folder, trace = os.path.join(WORK, name), f"{name}.gtr"
    os.makedirs(folder, exist_ok=True)
    shutil.copy(path, folder)
    if lacking(text, file):
        return f"SKIP  {name}: needs {', '.join(lacking(text, file))}"
    command, options = [sys.executable, file], []
    if file.endswith(".cu"):
        built = subprocess.run([NVCC, "-g", "-O1", "-o", "program", file], cwd=folder, capture_output=True, text=True)
        if built.returncode:
            return f"FAIL  {name}: nvcc: {built.stderr.strip()}"
        command, options = ["./program"], ["--stacks", "all"]
    ran = subprocess.run([*LAUNCHER, GPUTRACE, "record", "--force", "-o", trace, *options, "--", *command],
                         cwd=folder, capture_output=True, text=True, timeout=300)
    with open(os.path.join(folder, "said.txt"), "w") as said:
        said.write(ran.stdout + ran.stderr)
    told = subprocess.run([GPUTRACE, "report", "--json", trace], cwd=folder, capture_output=True, text=True)
    if told.returncode not in (0, 1):
        return f"FAIL  {name}: report: {told.stderr.strip()[-200:]} after {ran.stderr.strip()[-300:]}"
    size = os.path.getsize(os.path.join(folder, trace))
    return judge(name, file, text.splitlines(), json.loads(told.stdout)["processes"][0]["verdict"], size)


def judge(name, file, lines, verdict, size):
    kind, _, setting = lines[0].lstrip("#/ ").split(":")[0].partition(" with ")
    site, fix = verdict.get("call_site") or "", json.dumps(verdict.get("fix"))
    faults = [number for number, line in enumerate(lines, 1) if line.endswith("<- fault")]
    right = verdict["kind"] == kind and setting in fix and all(re.search(rf"{file}:{fault}\b", site) for fault in faults)
    said = f"{verdict['kind']} {site}".strip()
    return f"{'PASS' if right else 'FAIL'}  {name}: {said}; {verdict.get('what')}; {fix} ({size} bytes)"


def main():
    only = [word for word in os.environ.get("ONLY", "").split(",") if word]
    programs = sorted(glob.glob(f"{PROGRAMS}/*/*.py") + glob.glob(f"{PROGRAMS}/*/*.cu"))
    programs = [path for path in programs if not only or any(word in path.split(os.sep)[-2] for word in only)]
    with ThreadPoolExecutor(6) as pool:
        lines = list(pool.map(record, programs))
    print("\n".join(lines))
    n_passed, n_failed = (sum(line.startswith(word) for line in lines) for word in ("PASS", "FAIL"))
    print(f"{n_passed} passed, {n_failed} failed, {len(lines) - n_passed - n_failed} skipped; kept in {WORK}")
    sys.exit(n_failed > 0 or not lines)


if __name__ == "__main__":
    main()
