#!/usr/bin/env python3
"""Attaches late to PyTorch's own allocators of several releases, on the fake device: what they held before is in the trace, and from then on
their totals are the trace's, to the byte.

usage: [ROUNDS=N] living.py ORACLE WHEELS FOLDER VERSION...

ORACLE is the folder that tests/oracle/build.sh made for these releases, WHEELS that of tests/fetch-wheels.sh; FOLDER has gputrace,
libgputrace.so and fake-cuda. Each release works with and without expandable segments, is attached to, works on, and says ten times what it
counts; then it is detached from, works on, and once more from the beginning. At each of the ten instants the books made of the trace's events alone
(what is handed out, what is asked for) must be the allocator's, and so must the totals that the trace shows. Then three threads give and take
all the while, and ROUNDS times (default 10) it is attached to in the middle of that: when they are done, the books of the events are the
allocator's. PASS, FAIL and SKIP lines. Exit status 1 with a FAIL.
"""
import glob, json, os, random, re, subprocess, sys, tempfile, time

ORACLE, WHEELS, FOLDER = (os.path.realpath(it) for it in sys.argv[1:4])
HERE = os.path.dirname(os.path.realpath(__file__))
GPUTRACE = os.path.join(FOLDER, "gputrace")
failed = 0


def say(good, what, detail=""):
    global failed
    failed += not good
    print(f"{'PASS' if good else 'FAIL'}  {what}{'' if good else ': ' + str(detail)}", flush=True)


def build(version, work):
    """The program, and the environment that it needs."""
    torch = os.path.join(ORACLE, f"torch-{version}", "torch")
    dynamic = subprocess.run(["readelf", "-d", f"{torch}/lib/libc10_cuda.so"], capture_output=True, text=True).stdout
    runtime = re.search(r"libcudart\.so\.\d+", dynamic)[0]
    library = next(iter(glob.glob(f"{WHEELS}/**/{runtime}", recursive=True)))
    symbols = subprocess.run(["nm", "-DC", f"{torch}/lib/libc10.so"], capture_output=True, text=True).stdout
    abi = int("torchCheckFail(char const*, char const*, unsigned int, std::__cxx11" in symbols)
    standard = 20 if re.match(r"2\.1[2-9]\.", version) else 17
    includes = [f"-I{torch}/include", f"-I{ORACLE}/cuda13/nvidia/cu13/include", f"-I{ORACLE}/crt13/nvidia/cu13/include"]
    subprocess.run(["g++", f"-std=c++{standard}", "-O1", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DC10_USE_GLOG=0", *includes,
                    f"{HERE}/torch_blocks.cc", "-o", f"{work}/libblocks.so", f"-L{torch}/lib", "-l:libc10.so", "-l:libc10_cuda.so", library,
                    "-Wl,--allow-shlib-undefined", "-ldl"], check=True)
    subprocess.run(["gcc", "-x", "c", "-", "-x", "none", "-o", f"{work}/blocks", f"{work}/libblocks.so", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{work}"],
                   input="int run(void); int main(void) { return run(); }", text=True, check=True)
    return f"{work}/blocks", dict(os.environ, LD_LIBRARY_PATH=f"{torch}/lib:{os.path.dirname(library)}")


def verb(*arguments):
    return subprocess.run([GPUTRACE, *arguments], capture_output=True, text=True, timeout=120)


def books(trace):
    """After each block of 512 bytes that was asked for and freed: what the events so far come to, and the totals that the last one has."""
    lines = [json.loads(line) for line in verb("export", "--format", "jsonl", trace).stdout.splitlines()]
    held, found, mark = {}, [], None
    for line in lines:
        if line["kind"] != "block": continue
        if line["action"] == "alloc":
            held[line["addr"]] = (line["bytes"], line["requested_bytes"])
            mark = line["addr"] if line["requested_bytes"] == 512 else None
        elif line["action"] == "free":
            known = held.pop(line["addr"], None)
            if mark == line["addr"] and known:
                sums = [sum(it[n] for it in held.values()) for n in (0, 1)]
                found.append((sums[0], line["torch_reserved_bytes"], sums[1], line["torch_allocated_bytes"]))
            mark = None
    return found


class Program:
    """It works when it is asked to."""

    def __init__(self, program, environment):
        self.process = subprocess.Popen([f"{FOLDER}/fake-cuda", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.number = str(pid_of(self.process))

    def begin(self, n):
        self.process.stdin.write(f"step {n}\n"); self.process.stdin.flush()

    def said(self):
        return tuple(map(int, self.process.stdout.readline().split()))

    def step(self, n):
        self.begin(n)
        return self.said()

    def end(self):
        self.process.stdin.close()
        return self.process.wait()


def fails(what, *arguments):
    answer = verb(*arguments)
    if answer.returncode: say(False, f"{what}: {arguments[0]}", answer.stdout + answer.stderr)
    return answer.returncode


def instants(what, program, work):
    trace = os.path.join(work, "blocks.gtr")
    for turn in (1, 2):
        if os.path.exists(trace): os.remove(trace)
        program.step(211)
        if fails(what, "attach", "--timeout", "60", "-o", trace, program.number): return
        said = [program.step(17) for _ in range(10)]
        if fails(what, "detach", "--timeout", "60", program.number): return
        program.step(50)
        found = books(trace)
        known = re.search(r"torch.before=(.* segments)", verb("doctor", trace).stdout)
        ours = [it[:3] for it in found]
        say(known and ours == said, f"{what}: {len(said)} times the books of the events are the allocator's, {known and known[1]} before attach", f"{said} {ours}")
        say([it[3] for it in found] == [it[0] for it in said], f"{what}: and so are the totals that events have")


def rounds(what, program, work):
    trace, wrong, before = os.path.join(work, "blocks.gtr"), [], []
    chance = random.Random(20)
    n = int(os.environ.get("ROUNDS", 10))
    for turn in range(n):
        if os.path.exists(trace): os.remove(trace)
        program.begin(40_000)
        time.sleep(chance.uniform(0, 0.02))
        if fails(what, "attach", "--timeout", "60", "-o", trace, program.number): return
        program.said()
        said = program.step(10)
        if fails(what, "detach", "--timeout", "60", program.number): return
        found = books(trace)
        doctor = verb("doctor", trace).stdout
        known = re.search(r"torch.before=([0-9]+)", doctor)
        before.append(int(known[1]) if known else None)
        # What was asked for by a request that was under way when the library came is not known.
        if not known or not found or found[-1][:2] != said[:2] or "nothing was lost" not in doctor: wrong.append((turn, said, found[-1:], before[-1]))
    say(not wrong, f"{what}, three threads: {n} times attached while they give and take, each time the books are the allocator's ({before[:8]} blocks before)", wrong)


def tried(version, settings, program, environment, work):
    what = f"{version}{', ' + settings if settings else ''}"
    if settings: environment = dict(environment, PYTORCH_CUDA_ALLOC_CONF=settings)
    for test, threads in ((instants, "1"), (rounds, "3")):
        running = Program(program, dict(environment, THREADS=threads))
        if not running.step(211):
            running.end()
            return print(f"SKIP  {what}: this allocator does not run so on the fake device", flush=True)
        test(what, running, work)
        status = running.end()
        say(status == 0, f"{what}: ends as alone", status)


def pid_of(process):
    """Of the program that the launcher has become, or started."""
    for _ in range(200):
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file: children = file.read().split()
        with open(f"/proc/{process.pid}/maps") as file: is_it = "libblocks" in file.read()
        if is_it: return process.pid
        for child in children:
            with open(f"/proc/{child}/maps") as file:
                if "libblocks" in file.read(): return int(child)
        time.sleep(0.05)
    sys.exit("the program did not start")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        for version in sys.argv[4:]:
            program, environment = build(version, work)
            for settings in ("", "expandable_segments:True"):
                tried(version, settings, program, environment, work)
    sys.exit(failed != 0)
