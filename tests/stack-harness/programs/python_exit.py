"""Ends the interpreter while daemon threads capture without the GIL, and captures in finalizers.

Once it has begun to end, other threads' states may be freed at any moment: they are not looked at any more. Exit code 9 if they are.
"""
import atexit, ctypes, sys, threading, time

held, released = ctypes.PyDLL(None), ctypes.CDLL(None)
for library in held, released:
    library.harness_repeat.argtypes = [ctypes.c_uint32, ctypes.c_uint64]


def work(n):
    if n: return work(n - 1)
    released.harness_watch_end()


class Last:
    # Modules may be gone when it is called.
    def __init__(self, *calls): self.calls = calls
    def __del__(self):
        for call, *arguments in self.calls: call(*arguments)


for n in range(4): threading.Thread(target=work, args=(n * 10,), daemon=True).start()
while held.harness_watchers() < 4: time.sleep(0.001)
atexit.register(held.harness_repeat, 3, 10)
capture = held.harness_repeat, 3, 10
# What only `sys` holds ends when the interpreter has long begun to.
sys.last = Last(capture, (held.harness_await_end,)); keep = Last(capture); sys.modules["keep"] = Last(capture)
time.sleep(0.05)
