"""Captures in a forked child, whose thread was not the first of its parent."""
import os, sys, threading
sys.argv = sys.argv[:1]
import python_frames


def child():
    python_frames.recursion(5, python_frames.held, "parent")
    pid = os.fork()
    if pid == 0:
        python_frames.recursion(7, python_frames.held, "child")
        python_frames.recursion(7, python_frames.released, "child")
        os._exit(len(python_frames.failures))
    assert os.waitpid(pid, 0)[1] == 0


child()
worker = threading.Thread(target=child)
worker.start(); worker.join()
sys.exit(len(python_frames.failures))
