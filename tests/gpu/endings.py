#!/usr/bin/env python3
"""A training job that ends in many ways, alone and recorded: the same exit status and the same output; and what an event costs.

usage: [PART=endings|cost] [ONLY=WORD,...] endings.py FOLDER [OLDER]       FOLDER (and OLDER, another build to compare the cost with) has gputrace and
libgputrace.so

Each way is a process that trains a small transformer with fixed seeds, prints its losses, and then ends: it returns, exits, aborts, is
killed, cancels threads, forks while others allocate, runs out of memory, becomes another program. Threads allocate
at the moment of the end. PASS and FAIL lines; exit status 0 only without FAIL. About five minutes on one GPU.
"""
import json, os, signal, statistics, subprocess, sys, tempfile, textwrap

CANCEL = r"""
#include <pthread.h>
#include <stddef.h>
#include <unistd.h>
typedef int (*Alloc)(unsigned long long *, size_t);
typedef int (*Free)(unsigned long long);
typedef int (*Current)(void *);
static Alloc alloc; static Free give_back; static Current current; static void *context; static volatile long calls;
static void *work(void *asynchronous)
{
    int before;
    current(context);
    if (asynchronous) pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
    for (int i = 0; i < 3; i++) {
        unsigned long long at;
        /* In the driver nobody may be cancelled: it holds locks, and hangs without us too. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        if (alloc(&at, 1 << 20) == 0) give_back(at);
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &before);
        calls++;
    }
    for (;;) if (asynchronous) calls += 0; else usleep(1000);
    return NULL;
}
int cancel(void *a, void *f, void *c, void *ctx, int rounds)
{
    int cancelled = 0;
    alloc = a; give_back = f; current = c; context = ctx;
    for (int i = 0; i < rounds; i++) {
        pthread_t thread; void *how; long before = calls;
        pthread_create(&thread, NULL, work, (i & 1) ? (void *)1 : NULL);
        while (calls < before + 3) usleep(100);
        pthread_cancel(thread);
        pthread_join(thread, &how);
        cancelled += how == PTHREAD_CANCELED;
    }
    return cancelled;
}
"""

WAYS = {
    "returns": "",
    "sys.exit(3)": "sys.exit(3)",
    "os._exit(4) while others allocate": "churn(); os._exit(4)",
    "exit() of C from a second thread": "threading.Thread(target=lambda: C.CDLL(None).exit(5)).start(); time.sleep(60)",
    "abort while others allocate": "churn(); os.abort()",
    "an exception nobody caught": "raise ValueError('the end')",
    "SIGTERM": "churn(); os.kill(os.getpid(), 15); time.sleep(60)",
    "SIGINT": "churn(); signal.raise_signal(2); time.sleep(60)",
    "SIGKILL": "churn(); os.kill(os.getpid(), 9); time.sleep(60)",
    "SIGSEGV": "churn(); C.string_at(8)",
    "threads cancelled between calls of the driver": """
        alloc, free, current, get = (C.cast(getattr(cuda, n), C.c_void_p) for n in ('cuMemAlloc_v2', 'cuMemFree_v2', 'cuCtxSetCurrent', 'cuCtxGetCurrent'))
        context = C.c_void_p()
        cuda.cuCtxGetCurrent(C.byref(context))
        print('cancelled', C.CDLL(os.environ['CANCEL']).cancel(alloc, free, current, context, 200))
        train(3)""",
    "forks while others allocate": """
        churn()
        done = []
        for i in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(i)
            done.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print('children', done, 'wait', wait_all())
        print(subprocess.run(['sh', '-c', 'echo a child; exit 7']))
        loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=8, num_workers=4)
        print('loaded', sum(float(b.sum()) for b in loader))
        train(3)
        stop.set()""",
    "out of memory, caught": """
        for size in (1 << 44, 1 << 43):
            try:
                torch.empty(size, dtype=torch.uint8, device='cuda')
            except torch.OutOfMemoryError as error:
                print('caught', str(error).split('.')[0])
        train(3)""",
    "becomes another program": "churn(); sys.stdout.flush(); os.execv('/bin/echo', ['echo', 'another program'])",
    "timer jumps out of calls": """
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        jumped = 0
        for _ in range(50):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                while True: torch.empty(5 << 20, dtype=torch.uint8, device='cuda')
            except Late:
                jumped += 1
        print('jumped', jumped)
        train(3)""",
    "PID 1 of a namespace": None,
    "a subreaper that waits for all": "print('wait', wait_all())",
}

# What a way needs before CUDA is there: PR_SET_CHILD_SUBREAPER.
EARLY = {"a subreaper that waits for all": "C.CDLL(None).prctl(36, 1, 0, 0, 0)"}

PROGRAM = """
import ctypes as C, os, signal, subprocess, sys, threading, time
if {early!r}: exec({early!r})
import torch
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
cuda = C.CDLL('libcuda.so.1')
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(512, 8, 1024, dropout=0.0, batch_first=True), 3).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(8, 64, 512, device='cuda')
def train(steps):
    for _ in range(steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f'{{loss.item():.9f}}', flush=True)
stop = threading.Event()
def churn():
    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                torch.empty(3 << 20, dtype=torch.uint8, device='cuda')
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
def wait_all():
    n = 0
    signal.alarm(20)
    while True:
        try:
            os.wait()
            n += 1
        except ChildProcessError:
            signal.alarm(0)
            return n
train(6)
{end}
"""

HOT = """
import json, time, torch
def deep(n, call): return deep(n - 1, call) if n else call()
def pairs(n=20000):
    begin = time.perf_counter()
    for _ in range(n): torch.empty(1000, device='cuda', dtype=torch.uint8)
    return (time.perf_counter() - begin) / n * 1e9
torch.empty(1, device='cuda')
print(json.dumps(min(deep(20, pairs) for _ in range(6))))
"""


def program(end, early=""):
    return PROGRAM.format(end=textwrap.dedent(end), early=early)


def run(text, out, folder=None, prefix=()):
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CANCEL": f"{out}/cancel.so", "PYTHONFAULTHANDLER": ""}
    if folder:
        env |= {"LD_PRELOAD": f"{folder}/libgputrace.so", "GPUTRACE_OUTPUT": f"{out}/%p.gtr", "GPUTRACE_OOM": "0"}
    try:
        done = subprocess.run([*prefix, sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        return "hangs", (late.stdout or b"").decode(), (late.stderr or b"").decode()


def main():
    folders = [os.path.abspath(folder) for folder in sys.argv[1:]]
    out, failed = tempfile.mkdtemp(), 0
    source = f"{out}/cancel.c"
    open(source, "w").write(CANCEL)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", f"{out}/cancel.so", source], check=True)
    part = os.environ.get("PART", "all")
    only = os.environ.get("ONLY", "")
    for way, end in WAYS.items() if part != "cost" else ():
        if not any(word in way for word in only.split(",")):
            continue
        prefix = ()
        if end is None:
            end, prefix = "print('pid', os.getpid(), 'wait', wait_all())", ("unshare", "--pid", "--fork", "--mount-proc")
        text = program(end, EARLY.get(way, ""))
        alone = run(text, out, None, prefix)
        if prefix and alone[0] and "unshare" in alone[2]:
            print(f"  SKIP  {way}: {alone[2].strip()[:80]}", flush=True)
            continue
        known = set(os.listdir(out))
        recorded = run(text, out, folders[0], prefix)
        same = alone[:2] == recorded[:2]
        ours = [line for line in recorded[2].splitlines() if line.startswith("gputrace")]
        traces = [name for name in os.listdir(out) if name not in known and name.endswith(".gtr")]
        told = []
        for name in traces:
            doctor = subprocess.run([f"{folders[0]}/gputrace", "doctor", f"{out}/{name}"], capture_output=True, text=True).stdout
            told += [line.strip() for line in doctor.splitlines() if "lost" in line][:1]
        failed += not same
        print(f"  {'PASS' if same else 'FAIL'}  {way}: exit status {alone[0]} and {recorded[0]}, {len(recorded[1].splitlines())} lines of output"
              f", {'same' if alone[1] == recorded[1] else 'other'}; {len(traces)} traces; {'; '.join(told)} {' | '.join(ours)}"[:300], flush=True)
        if not same:
            print(textwrap.indent(f"alone:    {alone[1][-400:]}\n{alone[2][-600:]}\nrecorded: {recorded[1][-400:]}\n{recorded[2][-1500:]}", "        "))
    modes = [("alone", None, "")] + [(f"{os.path.basename(f)} {m}", f, m) for f in folders for m in ("python", "all", "none")]
    times = {name: [] for name, _, _ in modes}
    for _ in range(3 if part != "endings" else 0):
        for name, folder, mode in modes:
            os.environ["GPUTRACE_STACKS"] = mode or "python"
            times[name].append(json.loads(run(HOT, out, folder)[1]))
    if part == "endings":
        modes, times = [], {}
    plain = statistics.median(times["alone"]) if times else 0
    print("a pair of torch.empty and free, 20 Python frames deep; medians of 3 processes in turn, and their range")
    for name, values in times.items():
        print(f"  {name:20} {statistics.median(values):8.0f} ns a pair {(statistics.median(values) - plain) / 2:+8.0f} ns an event"
              f"   ({min(values):.0f}–{max(values):.0f})")
    print("PASS" if not failed else f"FAIL: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
