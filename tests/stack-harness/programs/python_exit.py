"""Ends the interpreter while daemon threads capture without the GIL, and captures in finalizers."""
import atexit, ctypes, sys, threading, time

held, released = ctypes.PyDLL(None), ctypes.CDLL(None)
for library in held, released:
    library.harness_repeat.argtypes = [ctypes.c_uint32, ctypes.c_uint64]


def work(n):
    if n: return work(n - 1)
    released.harness_repeat(3, 1 << 40)


class Last:
    def __del__(self): held.harness_repeat(3, 10)


for n in range(4): threading.Thread(target=work, args=(n * 10,), daemon=True).start()
atexit.register(held.harness_repeat, 3, 10)
sys.last = Last(); keep = Last(); sys.modules["keep"] = Last()
time.sleep(0.05)
