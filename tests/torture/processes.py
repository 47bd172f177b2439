"""os.fork, subprocess and multiprocessing, from a program whose threads allocate."""

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings

import torture

warnings.simplefilter("ignore")


def child(n):
    return n * 2 + torture.work(5)


def background(stop):
    while not stop.is_set():
        torture.work(2)


if __name__ == "__main__":
    torture.begin()
    stop = threading.Event()
    threads = [threading.Thread(target=background, args=(stop,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(6):
        pid = os.fork()
        if pid == 0:
            torture.work(4)
            os._exit(3)
        print("fork", os.waitpid(pid, 0)[1] >> 8)
    for i in range(3):
        print(subprocess.run([sys.executable, "-c", "print('hello')"], capture_output=True, text=True).stdout.strip())
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(pool.map(child, range(10)))
    stop.set()
    for thread in threads:
        thread.join()
    print("done")
