#!/usr/bin/env python3
"""A process that is checkpointed, by another process and by itself, and one that is stopped: what `top` and the trace say.

usage: checkpoint.py FOLDER

FOLDER has `gputrace` and `libgputrace.so`. One GPU; a driver with `cuCheckpointProcess*` (CUDA 12.8, R570 or later; a process that
checkpoints itself: as the driver allows). Python with ctypes, no PyTorch. A minute. PASS, FAIL and SKIP lines; exit status 0 only
without FAIL. `LAUNCHER=target/release/fake-cuda` runs it without a GPU.

Asserts that the process comes through unharmed (its memory has its bytes after it was restored), that `top` says suspended while it is
and running after it, that the driver lists no memory of it meanwhile, and that `report` has the times.
"""
import ctypes, json, os, signal, subprocess, sys, tempfile, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
LAUNCHER = [os.path.abspath(word) for word in os.environ.get("LAUNCHER", "").split()]
PROGRAM = r'''
import ctypes, os, sys
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
def ok(result, what): assert result == 0, f"{what}: {result}"
ok(cuda.cuInit(0), "cuInit")
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "retain")
ok(cuda.cuCtxSetCurrent(context), "set current")
N = 256 << 20
ok(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(N)), "alloc")
ok(cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0xa5), ctypes.c_size_t(N)), "memset")
print("ready", os.getpid(), flush=True)
for line in sys.stdin:
    verb = line.strip()
    if verb == "check":
        back = (ctypes.c_ubyte * 4096)()
        ok(cuda.cuMemcpyDtoH_v2(back, ctypes.c_uint64(address.value + N - 4096), ctypes.c_size_t(4096)), "copy")
        print("whole" if FAKE or all(byte == 0xa5 for byte in back) else "broken", flush=True)
    elif verb == "quit":
        break
    else:
        steps = {"checkpoint": ("Lock", "Checkpoint"), "restore": ("Restore", "Unlock")}[verb]
        print(*(getattr(cuda, "cuCheckpointProcess" + step)(os.getpid(), None) for step in steps), flush=True)
'''
# The fake driver's memory has no bytes.
PROGRAM = PROGRAM.replace("FAKE", str(bool(LAUNCHER)))
failed = []


def say(is_good, text):
    print("PASS" if is_good else "FAIL", text, flush=True)
    if not is_good: failed.append(text)


def gputrace(*words):
    return subprocess.run([*LAUNCHER, GPUTRACE, *words], capture_output=True, text=True).stdout


def top(folder):
    try: return json.loads(gputrace("top", "--once", "--json", folder))
    except ValueError: return {"processes": [], "gpus": []}


def state(folder):
    processes = top(folder)["processes"]
    return (processes[0]["state"], processes[0].get("suspended", "")) if processes else ("none", "")


def until(folder, wanted, patience=30):
    end = time.time() + patience
    while time.time() < end:
        if state(folder)[0] == wanted: return True
        time.sleep(0.2)
    return False


class Program:
    def __init__(self, folder):
        command = [*LAUNCHER, GPUTRACE, "record", "-q", "-o", f"{folder}/%p.gtr", "--", sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = int(self.process.stdout.readline().split()[1])

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def listed(pid):
    """Bytes that the driver charges to the process; None where it does not list it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try: lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError: return "no nvidia-smi"
    rows = dict(line.split(", ") for line in lines if ", " in line)
    return rows.get(str(pid))


def main():
    with tempfile.TemporaryDirectory() as work:
        if LAUNCHER: os.environ["FAKE_CUDA_STATE"] = f"{work}/state"
        folder = f"{work}/job"
        os.makedirs(folder)
        program = Program(folder)
        say(until(folder, "running"), "a process that runs is running")

        os.kill(program.pid, signal.SIGSTOP)
        say(until(folder, "suspended") and "SIGSTOP" in state(folder)[1], f"stopped: {state(folder)}")
        os.kill(program.pid, signal.SIGCONT)
        say(until(folder, "running"), "goes on after SIGCONT")

        # By another process: this one, with the driver's own calls. Under the fake driver, in a process that has it.
        steps = "import ctypes, sys; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); print([getattr(cuda, 'cuCheckpointProcess' + step)(int(sys.argv[1]), None) for step in sys.argv[2:]])"
        def other(*what): return subprocess.run([*LAUNCHER, sys.executable, "-c", steps, str(program.pid), *what], capture_output=True, text=True)
        before = listed(program.pid)
        done = other("Lock", "Checkpoint")
        if "[0, 0]" not in done.stdout:
            print(f"SKIP by another process: the driver answers {done.stdout.strip() or done.stderr[-200:]}")
        else:
            say(until(folder, "suspended") and "checkpoint" in state(folder)[1], f"checkpointed by another: {state(folder)}")
            print(f"     the driver lists {before} MiB of it before, {listed(program.pid)} while it is suspended")
            time.sleep(3)
            restored = other("Restore", "Unlock")
            say("[0, 0]" in restored.stdout and until(folder, "running"), f"restored: {restored.stdout.strip()} {state(folder)}")
            say(program.ask("check") == "whole", "its memory is whole")

        answer = program.ask("checkpoint")
        if answer != "0 0":
            print(f"SKIP by itself: the driver answers {answer or 'nothing'}")
        else:
            say(until(folder, "suspended"), f"checkpointed by itself: {state(folder)}")
            say(program.ask("restore") == "0 0" and until(folder, "running"), "restored by itself")
            say(program.ask("check") == "whole", "its memory is whole")
        if program.process.poll() is None: program.process.stdin.write("quit\n"), program.process.stdin.close()
        program.process.wait()
        (trace,) = [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".gtr")]
        lines = [line for line in gputrace("report", trace).splitlines() if "suspended" in line]
        say(len(lines) >= 1 and all(" UTC to " in line for line in lines), "the trace has the times")
        print("\n".join(lines))
    sys.exit(bool(failed))


main()
