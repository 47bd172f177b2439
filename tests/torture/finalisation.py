"""Daemon threads that allocate while the interpreter ends, with the GIL and without, and objects that allocate in `__del__`."""

import atexit
import gc
import threading
import time

import torture


class Late:
    def __del__(self):
        torture.work(2)


def deeper(n):
    return torture.work(1, with_gil=n % 2 == 0) if n == 0 else deeper(n - 1)


def forever(depth):
    while True:
        deeper(depth)


torture.begin()
kept = Late()
cycle = [Late()]
cycle.append(cycle)
for i in range(6):
    threading.Thread(target=forever, args=(i * 3,), daemon=True).start()
time.sleep(0.05)
atexit.register(lambda: torture.work(3))
for i in range(50):
    garbage = [Late()]
    garbage.append(garbage)
    del garbage
gc.collect()
print("ends", flush=True)
