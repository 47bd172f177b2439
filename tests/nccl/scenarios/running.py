"""Jobs that are asked while they run: some hang, some are healthy and slow.

    running.py --list     every scenario with what is expected, as JSON
    running.py NAME       one rank of a scenario

`# others` marks the line of the ranks that wait. A healthy job goes on until whoever started it is gone.
"""

import ctypes
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

SCENARIOS = []


def hang(kind, ranks, like, n_ranks=3, communicator="world", stack=None, **environment):
    """A scenario that hangs: its first finding must be this. `like`: a public thread (GitHub) about a job that hung in this way. `stack`: a
    function that the stack of the late rank must show."""

    def register(function):
        expected = {"kind": kind, "ranks": ranks, "communicator": communicator, "stack": stack, "like": like}
        SCENARIOS.append((function, n_ranks, environment, expected))
        return function

    return register


def healthy(n_ranks=3, **environment):
    """A scenario that is slow and goes on: it must never be called a hang."""

    def register(function):
        SCENARIOS.append((function, n_ranks, environment, None))
        return function

    return register


BLOCKING = {"FAKE_NCCL_BLOCKING": "1"}


def runs(test=os.getppid()):
    """Whether whoever started it is there."""
    return os.getppid() == test


def rest(test=os.getppid()):
    """Sleeps until it is killed, or until its parent ends. It calls no other Python function, so its stack always ends here."""
    while os.getppid() == test:
        time.sleep(1)


def steps(world, n):
    for _ in range(n):
        world.all_reduce(1024)
        world.broadcast(16)
        world.wait()
        time.sleep(0.05)


@hang("rank_stuck", [1], "instructlab/training#566", stack="rest")
def a_rank_sleeps():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 1:
        rest()
    world.all_reduce(1024)  # others
    world.wait()


@hang("rank_stuck", [1], "pytorch/pytorch#1355", stack="Condition.wait")
def a_worker_of_a_loader_waits_for_a_lock():
    world = nccl.init()
    lock, batches = threading.Lock(), queue.Queue(2)

    def load():
        for n in range(100):
            if (nccl.RANK, n) == (1, 8):
                lock.acquire()
                lock.acquire()
            batches.put(n)

    threading.Thread(target=load, daemon=True).start()
    for _ in range(12):
        batches.get()
        world.all_reduce(1024)  # others
        world.wait()
        time.sleep(0.05)
    rest()


@hang("missing_call", [2], "NVIDIA-NeMo/Automodel#2468", stack="_call")
def a_rank_skips_a_collective():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK != 2:
        world.all_reduce(1024)  # others
    world.broadcast(16)
    world.wait()


@hang("extra_call", [1], "huggingface/trl#7310", stack="_call")
def a_rank_makes_a_collective_too_many():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 1:
        world.all_gather(7)
    world.all_reduce(1024)  # others
    world.broadcast(16)
    world.wait()


@hang("rank_exited", [2], "facebookresearch/fairseq#810")
def a_rank_runs_out_of_memory_and_ends():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 2:
        raise MemoryError("out of memory")
    world.all_reduce(1024)  # others
    world.wait()


@hang("rank_killed", [0], "deepspeedai/DeepSpeed#4890")
def a_rank_is_killed():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_reduce(1024)  # others
    world.wait()


@hang("rank_stuck", [0], "dylanyunlon/Neuron_SP#73", stack="rest", **BLOCKING)
def calls_block_and_a_rank_does_not_come():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 0:
        rest()
    world.all_reduce(1024)  # others


@hang("missing_at_init", [2], "pytorch/pytorch#88103", stack="rest")
def a_rank_never_comes_to_init():
    nccl._context(0)
    if nccl.RANK == 2:
        nccl.allocate(4096)
        rest()
    nccl.init()  # others


@hang("unmatched_recv", [0], "xdit-project/xDiT#363", stack="_call")
def nobody_sends():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 0:
        world.recv(64, peer=1)  # others
        world.wait()
    rest()


@hang("rank_stuck", [1], "verl-project/verl#1158", stack="rest")
def the_host_runs_ahead_of_a_rank_that_does_not_come():
    world = nccl.init()
    steps(world, 8)
    if nccl.RANK == 1:
        rest()
    for _ in range(5):
        world.all_reduce(1024)  # others
        world.broadcast(16)
    world.wait()


@hang("rank_exited", [1], "pytorch/pytorch#33148")
def a_rank_has_fewer_batches_and_ends():
    world = nccl.init()
    steps(world, 6 if nccl.RANK == 1 else 8)
    if nccl.RANK != 1:
        world.all_reduce(1024)
        world.wait()


@hang("rank_stuck", [2], "pytorch/pytorch#97833", stack="acquire_it")
def a_rank_deadlocks_with_itself():
    world = nccl.init()
    steps(world, 8)

    def acquire_it():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    if nccl.RANK == 2:
        acquire_it()
    world.all_reduce(1024)  # others
    world.wait()


@hang("rank_stuck", [1], "huggingface/nanotron#204", stack="spin_for_ever")
def a_rank_is_busy_and_gets_nowhere():
    world = nccl.init()
    steps(world, 8)

    def spin_for_ever():
        while True:
            pass

    if nccl.RANK == 1:
        signal.alarm(1800)
        spin_for_ever()
    world.all_reduce(1024)  # others
    world.wait()


def spin(seconds):
    """Uses a processor, as a compilation does."""
    until, n = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        n += 1


def goes_on(world, before_step):
    """Steps for ever, with something before each."""
    step = 0
    while runs():
        before_step(step)
        steps(world, 1)
        step += 1


@healthy()
def saves_every_ten_steps():
    goes_on(nccl.init(), lambda step: time.sleep(8 if nccl.RANK == 0 and step % 10 == 5 else 0.1))


@healthy()
def evaluates_for_long_on_one_rank():
    def evaluate(step):
        if nccl.RANK == 0 and step % 20 == 10:
            for _ in range(150):
                nccl.free(nccl.allocate(4096))
                time.sleep(0.3)

    goes_on(nccl.init(), evaluate)


@healthy()
def compiles_on_one_rank():
    goes_on(nccl.init(), lambda step: spin(15) if (nccl.RANK, step) == (1, 4) else time.sleep(0.1))


@healthy()
def has_an_uneven_first_step():
    goes_on(nccl.init(), lambda step: time.sleep(10 if (nccl.RANK, step) == (2, 0) else 0.1))


@healthy()
def waits_for_data_that_comes():
    goes_on(nccl.init(), lambda step: time.sleep(9 if nccl.RANK == 1 and step % 12 == 6 else 0.1))


@healthy()
def writes_a_checkpoint_that_takes_long():
    def save(step):
        if nccl.RANK == 0 and step % 20 == 10:
            with open("/dev/null", "wb", buffering=0) as file:
                for _ in range(80):
                    file.write(bytes(1 << 20))
                    time.sleep(0.5)

    goes_on(nccl.init(), save)


@healthy()
def comes_late_to_init():
    if nccl.RANK == 1:
        nccl._context(0)
        time.sleep(12)
    goes_on(nccl.init(), lambda step: time.sleep(0.1))


@healthy()
def all_do_something_else_for_long():
    goes_on(nccl.init(), lambda step: time.sleep(10 if step % 8 == 4 else 0.1))


@healthy()
def a_pipeline_whose_last_stage_is_slow():
    world = nccl.init()
    while runs():
        if nccl.RANK > 0:
            world.recv(64, peer=nccl.RANK - 1)
        world.wait()
        time.sleep(1.5 if nccl.RANK == nccl.WORLD - 1 else 0.05)
        if nccl.RANK < nccl.WORLD - 1:
            world.send(64, peer=nccl.RANK + 1)
        world.wait()


@healthy()
def computes_for_long_in_one_function_after_another():
    def prepare(step):
        if (nccl.RANK, step) == (1, 6):
            for n in range(3):
                exec(f"def part_{n}(): spin(8)\npart_{n}()", {"spin": globals()["spin"]})

    goes_on(nccl.init(), prepare)


@healthy()
def compiles_in_processes_of_its_own():
    def compile_it(step):
        if (nccl.RANK, step) == (1, 4):
            code = "import time; until = time.monotonic() + 20\nwhile time.monotonic() < until: pass"
            subprocess.run([sys.executable, "-c", code], env={})

    goes_on(nccl.init(), compile_it)


@healthy()
def computes_longer_in_one_function_each_time():
    goes_on(nccl.init(), lambda step: spin(6 + step) if nccl.RANK == 2 and step % 6 == 5 else time.sleep(0.1))


def lines(function):
    """Where the marks of a scenario are."""
    source, first = inspect.getsourcelines(function)
    marked = [number for number, line in enumerate(source, first) if line.partition("#")[2].strip() == "others"]
    return {"others": marked[0]} if marked else {}


def main():
    global nccl
    if sys.argv[1] == "--list":
        listed = [
            {
                "name": function.__name__,
                "n_ranks": n_ranks,
                "environment": environment,
                "expected": expected and {**expected, **lines(function)},
            }
            for function, n_ranks, environment, expected in SCENARIOS
        ]
        return print(json.dumps(listed))
    import fake_nccl as nccl

    (function,) = [function for function, *_ in SCENARIOS if function.__name__ == sys.argv[1]]
    function()


main()
