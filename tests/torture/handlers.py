"""Signal handlers in Python that allocate, while the main thread does; collections and exceptions in between."""

import gc
import signal
import time

import torture

seen = 0


def handler(number, frame):
    global seen
    seen += 1
    torture.work(1)


def raises(n):
    torture.work(1)
    if n == 0:
        raise ValueError
    raises(n - 1)


torture.begin()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
until = time.monotonic() + 20
while seen < 200 and time.monotonic() < until:
    try:
        raises(8)
    except ValueError:
        pass
    torture.work(3, with_gil=True)
    if seen % 50 == 0:
        gc.collect()
signal.setitimer(signal.ITIMER_REAL, 0)
print("handled", seen >= 200)
