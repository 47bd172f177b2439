"""Frames stay right while signals come every millisecond, threads come and go, and libraries too."""
import ctypes, signal, sys, threading, time
sys.argv = sys.argv[:1]
import python_frames
from python_frames import check, held, recursion, released

N_THREADS, SECONDS = 64, 2
LIBRARIES = "libresolv.so.2", "libanl.so.1", "libutil.so.1", "libnsl.so.1", "libthread_db.so.1"
stop = threading.Event()
n_signals = n_loads = n_threads = 0


def on_signal(*_):
    global n_signals
    n_signals += 1
    # The interrupted function's frames are below this one's.
    check("signal handler", held); check("signal handler", released)


def load_and_unload():
    global n_loads
    libc = ctypes.CDLL(None)
    libc.dlclose.argtypes = [ctypes.c_void_p]
    while not stop.is_set():
        for name in LIBRARIES:
            try: handle = ctypes.CDLL(name)._handle
            except OSError: continue
            n_loads += 1
            libc.dlclose(handle)
            released.harness_note_unloaded()


def work(n):
    for at in range(5): recursion(n + at, held, "short thread"); recursion(n - at, released, "short thread")


def crowd():
    global n_threads
    workers = [threading.Thread(target=work, args=(n % 20 + 5,)) for n in range(N_THREADS)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    n_threads += len(workers)


loader = threading.Thread(target=load_and_unload)
loader.start()
signal.signal(signal.SIGPROF, on_signal)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
end = time.monotonic() + SECONDS
while time.monotonic() < end or not (n_signals and n_loads):
    crowd()
    python_frames.generators(); python_frames.callbacks(); recursion(50, held); recursion(50, released)
    python_frames.redefinitions(20)
signal.setitimer(signal.ITIMER_PROF, 0)
stop.set(); loader.join()
assert not python_frames.unfit, python_frames.unfit[0]
print(f"{python_frames.n_stacks} stacks, {len(python_frames.failures)} wrong; {n_signals} signals, {n_threads} threads, {n_loads} loads")
for failure in python_frames.failures[:2]: print(failure)
sys.exit(1 if python_frames.failures else 0)
