"""Greenlets, each with a part of the thread's stack of its own, that allocate in turn."""

import sys

import torture

try:
    import greenlet
except ImportError:
    print("launch: skip: this Python has no greenlet", file=sys.stderr)
    sys.exit(125)


def deeper(n):
    torture.work(1, with_gil=n % 2 == 0)
    if n:
        deeper(n - 1)
    main.switch()


def run():
    for turn in range(5):
        deeper(turn)


torture.begin()
main = greenlet.getcurrent()
all_of_them = [greenlet.greenlet(run) for _ in range(200)]
while any(not one.dead for one in all_of_them):
    for one in all_of_them:
        if not one.dead:
            one.switch()
print(len(all_of_them), "greenlets")
