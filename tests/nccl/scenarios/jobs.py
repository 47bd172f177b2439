"""Jobs with one fault each, and healthy ones: what `gputrace ranks` must say of each stands beside it.

    jobs.py --list        every scenario with what is expected, as JSON
    jobs.py NAME          one rank of a scenario

`# own` marks the line of the rank that is at fault, `# others` the line of those who wait for it.
"""

import contextlib
import ctypes
import inspect
import json
import os
import signal
import sys
import time

SCENARIOS = []


def fault(kind, ranks, communicator="world", sequence=None, n_ranks=4, untraced=(), on_time=False, **environment):
    """A scenario with one fault: its first finding must be this. These ranks are not recorded. What shows only in times may be
    hidden by those of a busy machine: then there must be no finding."""

    def register(function):
        expected = {"kind": kind, "ranks": ranks, "communicator": communicator, "sequence": sequence}
        expected["or_nothing"] = on_time
        function.untraced = list(untraced)
        SCENARIOS.append((function, n_ranks, environment, expected))
        return function

    return register


def healthy(n_ranks=4, endless=False, **environment):
    """A scenario in which all is well; an endless one is stopped at work."""

    def register(function):
        SCENARIOS.append((function, n_ranks, environment, None))
        function.endless = endless
        return function

    return register


BLOCKING = {"FAKE_NCCL_BLOCKING": "1"}


def steps(comm, n):
    """Iterations of a healthy program."""
    for _ in range(n):
        comm.all_reduce(1024)
        comm.broadcast(16)
        comm.wait()


def come(rank):
    """The file in which a rank says how far it came; the test removes it with the meetings."""
    return f"/dev/shm/fake-nccl.{os.environ['FAKE_NCCL_JOB']}.come.{rank}"


def has_come():
    with open(come(nccl.RANK), "a") as file:
        file.write(".")


def comes_after_the_others(step):
    """However slow they are."""
    others = [come(rank) for rank in range(nccl.WORLD) if rank != nccl.RANK]
    while not all(os.path.exists(other) and os.path.getsize(other) > step for other in others):
        time.sleep(0.001)
    time.sleep(0.02)


def hang(test=os.getppid()):
    """Does nothing until it is killed, or whoever started it is gone."""
    while os.getppid() == test:
        time.sleep(5)


@fault("missing_call", [2], sequence=5)
def skips_a_broadcast():
    world = nccl.init()
    for step in range(4):
        world.all_reduce(1024)
        if (nccl.RANK, step) != (2, 1):
            world.broadcast(16)
        world.all_gather(8)
        world.reduce_scatter(4)
        if step < 3:
            continue
        world.wait()


@fault("missing_call", [1], sequence=4)
def skips_one_of_many_calls_that_are_alike():
    world = nccl.init()
    for step in range(5):
        world.all_reduce(64)
        if (nccl.RANK, step) != (1, 1):
            world.all_reduce(64)  # others
        world.all_reduce(64)
    world.wait()


@fault("missing_call", [3], sequence=4, **BLOCKING)
def skips_a_call_where_calls_block():
    world = nccl.init()
    for step in range(4):
        if (nccl.RANK, step) != (3, 2):
            world.all_reduce(1024)  # others
        world.broadcast(16)  # own


@fault("extra_call", [1], sequence=4)
def makes_an_extra_call():
    world = nccl.init()
    steps(world, 2)
    if nccl.RANK == 1:
        world.all_gather(7)  # own
    world.all_reduce(1024)  # others
    world.broadcast(16)
    world.wait()


@fault("swapped_calls", [0], sequence=4)
def makes_two_calls_in_the_other_order():
    world = nccl.init()
    steps(world, 2)
    if nccl.RANK == 0:
        world.broadcast(16)  # own
    world.all_reduce(1024)  # others
    if nccl.RANK != 0:
        world.broadcast(16)
    world.reduce_scatter(8)
    world.wait()


@fault("size_mismatch", [2], sequence=2)
def sends_another_size():
    world = nccl.init()
    steps(world, 1)
    world.all_reduce(1025 if nccl.RANK == 2 else 1024)  # own others
    world.wait()


@fault("size_mismatch", [1], sequence=2, **BLOCKING)
def sends_another_size_where_calls_block():
    world = nccl.init()
    steps(world, 1)
    world.all_gather(1025 if nccl.RANK == 1 else 1024)  # own others


@fault("dtype_mismatch", [3], sequence=2)
def uses_another_datatype():
    world = nccl.init()
    steps(world, 1)
    world.all_reduce(1024, dtype=nccl.HALF if nccl.RANK == 3 else nccl.FLOAT)  # own others
    world.wait()


@fault("redop_mismatch", [1], sequence=2)
def uses_another_reduction():
    world = nccl.init()
    steps(world, 1)
    world.all_reduce(1024, op=nccl.MAX if nccl.RANK == 1 else nccl.SUM)  # own others
    world.wait()


@fault("redop_mismatch", [2], sequence=2)
def scales_on_one_rank_only():
    world = nccl.init()
    steps(world, 1)
    op = world.redop() if nccl.RANK == 2 else nccl.SUM
    world.all_reduce(1024, op=op)  # own others
    world.wait()


@fault("root_mismatch", [0], sequence=2)
def broadcasts_from_another_root():
    world = nccl.init()
    steps(world, 1)
    world.broadcast(16, root=1 if nccl.RANK == 0 else 2)  # own others
    world.wait()


@fault("op_mismatch", [3], sequence=2)
def calls_another_operation():
    world = nccl.init()
    steps(world, 1)
    call = world.reduce if nccl.RANK == 3 else world.all_reduce
    call(1024)  # own others
    world.wait()


@fault("size_mismatch", [1], sequence=2, n_ranks=2)
def two_ranks_differ_and_none_is_the_majority():
    world = nccl.init()
    steps(world, 1)
    world.all_reduce(10 + nccl.RANK)  # own others
    world.wait()


@fault("unmatched_send", [0], sequence=1)
def sends_what_nobody_receives():
    world = nccl.init()
    for step in range(2):
        if nccl.RANK == 0:
            world.send(64, peer=1)  # own
        if nccl.RANK == 1 and step == 0:
            world.recv(64, peer=0)
        world.wait()


@fault("unmatched_recv", [3], sequence=0)
def receives_what_nobody_sends():
    world = nccl.init()
    if nccl.RANK == 3:
        world.recv(64, peer=1)  # own
    world.wait()


@fault("unmatched_send", [2], sequence=0, **BLOCKING)
def sends_to_a_rank_that_waits_for_it():
    world = nccl.init()
    if nccl.RANK == 2:
        world.send(64, peer=3)  # own
    world.all_reduce(1024)  # others


@fault("deadlock_cycle", [0, 1, 2, 3], sequence=0, **BLOCKING)
def all_send_before_they_receive():
    world = nccl.init()
    world.send(64, peer=(nccl.RANK + 1) % nccl.WORLD)  # own
    world.recv(64, peer=(nccl.RANK - 1) % nccl.WORLD)


@fault("peer_size_mismatch", [0, 1], sequence=0)
def sends_more_than_is_received():
    world = nccl.init()
    if nccl.RANK == 0:
        world.send(64, peer=1)  # own
    if nccl.RANK == 1:
        world.recv(32, peer=0)  # others
    world.wait()


@fault("rank_exited", [1], sequence=4)
def raises_an_exception():
    world = nccl.init()
    for step in range(4):
        if (nccl.RANK, step) == (1, 2):
            raise RuntimeError("nan")
        world.all_reduce(1024)  # others
        world.broadcast(16)  # own
        world.wait()


@fault("rank_killed", [3], sequence=4)
def is_killed():
    world = nccl.init()
    for step in range(4):
        if (nccl.RANK, step) == (3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(1024)  # others
        world.broadcast(16)  # own
        world.wait()


@fault("rank_stuck", [2], sequence=4)
def waits_for_its_data():
    world = nccl.init()
    for step in range(4):
        if (nccl.RANK, step) == (2, 2):
            hang()
        world.all_reduce(1024)  # others
        world.broadcast(16)  # own
        world.wait()


@fault("rank_stuck", [0], sequence=2, **BLOCKING)
def waits_for_its_data_where_calls_block():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 0:
        nccl.allocate(4096)  # own
        hang()
    world.all_reduce(1024)  # others


@fault("missing_at_init", [2])
def never_comes_to_init():
    if nccl.RANK == 2:
        nccl.attach()
        nccl.allocate(4096)  # own
        hang()
    nccl.init()  # others


@fault("missing_at_init", [1])
def has_no_trace_and_never_comes_to_init():
    if nccl.RANK == 1:
        hang()
    nccl.init()  # others


@fault("init_conflict", [1])
def claims_another_rank():
    nccl.init(rank=1 if nccl.RANK == 3 else nccl.RANK)


@fault("init_conflict", [0])
def counts_other_ranks():
    nccl.init(n_ranks=5 if nccl.RANK == 0 else 4)  # own


@fault("abort", [1], sequence=2)
def gives_the_communicator_up():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 1:
        world.abort()  # own
        hang()
    world.all_reduce(1024)  # others
    world.wait()


@fault("async_error", [2], sequence=1)
def is_told_of_an_error():
    world = nccl.init()
    world.all_reduce(1024)
    world.broadcast(16)  # own
    world.wait()
    if nccl.RANK == 2:
        nccl.break_network(world)
        world.async_error()


@fault("missing_in_split", [3], sequence=0)
def never_comes_to_the_split():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 3:
        world.all_reduce(1024)  # own
        world.wait()
    world.split(color=0)  # others


@fault("missing_in_split", [1], sequence=0)
def is_elsewhere_while_the_others_split():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 1:
        hang()
    world.split(color=nccl.RANK // 2)  # others


@fault("missing_in_shrink", [2], sequence=0)
def never_comes_to_the_shrink():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 3:
        return
    if nccl.RANK == 2:
        hang()
    world.shrink([3])  # others


@fault("group_incomplete", [1], sequence=2)
def never_closes_a_group():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 1:
        with nccl.group():  # own
            world.all_reduce(1024)
            hang()
    world.all_reduce(1024)  # others
    world.wait()


@fault("wrong_communicator", [2], communicator="other", sequence=0)
def uses_the_wrong_communicator():
    world = nccl.init(comm_name="world")
    other = nccl.init("other", comm_name="other")
    comm = other if nccl.RANK == 2 else world
    comm.all_reduce(1024)  # own others
    comm.wait()


@fault("swapped_communicators", [1], communicator="other", sequence=0, **BLOCKING)
def uses_two_communicators_in_the_other_order():
    world = nccl.init(comm_name="world")
    other = nccl.init("other", comm_name="other")
    if nccl.RANK == 1:
        other.all_reduce(64)  # own
        world.all_reduce(1024)
    else:
        world.all_reduce(1024)  # others
        other.all_reduce(64)


@fault("out_of_memory", [3], sequence=2)
def runs_out_of_memory():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 3:
        with contextlib.suppress(AssertionError):
            nccl.allocate(1 << 40)  # own
        hang()
    world.all_reduce(1024)  # others
    world.wait()


@fault("rank_exited", [2], sequence=3)
def has_one_batch_less():
    world = nccl.init()
    for _ in range(3 if nccl.RANK == 2 else 4):
        world.all_reduce(1024)  # own others
        world.wait()


@fault("no_trace", [1], communicator=None, untraced=[1])
def has_no_trace_and_is_waited_for():
    world = nccl.init()
    steps(world, 1)
    if nccl.RANK == 1:
        hang()
    world.all_reduce(1024)  # others
    world.wait()


@fault("rank_stuck", [2], communicator="the group of ranks 0, 2 (2 of 4)", sequence=1)
def waits_in_a_group_before_there_is_one_of_all():
    half = nccl.init("odd" if nccl.RANK % 2 else "even", n_ranks=2, rank=nccl.RANK // 2)
    half.all_reduce(64)  # own
    half.wait()
    if nccl.RANK == 2:
        hang()
    half.all_reduce(64)  # others
    half.wait()
    # On a busy machine one half would be over before the other begins, and then nothing says that they are one job.
    hang()


@fault("rank_stuck", [1], communicator="the group of all 4 ranks created at jobs.py:{second}", sequence=0)
def waits_in_the_second_of_two_groups_of_all():
    first = nccl.init("first")
    second = nccl.init("second")  # second
    first.all_reduce(64)  # own
    first.wait()
    if nccl.RANK == 1:
        hang()
    second.all_reduce(64)  # others
    second.wait()


@fault("size_mismatch", [0], sequence=2)
def differs_from_three_others():
    world = nccl.init()
    steps(world, 1)
    world.all_reduce(1024 if nccl.RANK else 4096)  # own others
    world.wait()


@fault("rank_stuck", [1], communicator="half of ranks 0, 1 (2 of 4)", sequence=1)
def is_waited_for_in_a_part_of_the_job():
    world = nccl.init(comm_name="world")
    half = world.split(color=nccl.RANK // 2, name="half")
    half.all_reduce(64)  # own
    half.wait()
    if nccl.RANK == 1:
        hang()
    half.all_reduce(64)  # others
    half.wait()


@fault("straggler", [2], sequence="any", on_time=True)
def comes_late_each_time():
    world = nccl.init()
    for step in range(30):
        if nccl.RANK == 2:
            comes_after_the_others(step)
        world.all_reduce(1024)  # own
        has_come()
        world.wait()


@healthy()
def plain_steps():
    steps(nccl.init(), 20)


@healthy()
def one_rank_starts_late():
    world = nccl.init()
    if nccl.RANK == 1:
        time.sleep(1.5)
    for _ in range(30):
        world.all_reduce(1024)
    world.wait()


@healthy()
def ranks_call_from_different_lines():
    world = nccl.init()
    for _ in range(10):
        if nccl.RANK == 0:
            world.broadcast(16)
        else:
            world.broadcast(16)
        world.wait()


@healthy()
def halves_work_on_their_own():
    world = nccl.init()
    half = world.split(color=nccl.RANK % 2)
    for _ in range(5 + 5 * (nccl.RANK % 2)):
        half.all_reduce(64)
        half.wait()
    steps(world, 2)


@healthy()
def one_rank_is_left_out_of_a_split():
    world = nccl.init()
    part = world.split(color=-1 if nccl.RANK == 3 else 0)
    if part:
        steps(part, 2)
    steps(world, 2)


@healthy()
def a_ring_of_sends_and_receives():
    world = nccl.init()
    for _ in range(5):
        with nccl.group():
            world.send(64, peer=(nccl.RANK + 1) % nccl.WORLD)
            world.recv(64, peer=(nccl.RANK - 1) % nccl.WORLD)
        world.wait()


@healthy()
def all_to_all_of_different_sizes():
    world = nccl.init()
    with nccl.group():
        for peer in range(nccl.WORLD):
            if peer != nccl.RANK:
                world.send(10 * nccl.RANK + peer, peer=peer)
                world.recv(10 * peer + nccl.RANK, peer=peer)
    world.all_to_all(64)
    world.wait()


@healthy()
def a_pipeline():
    world = nccl.init()
    for _ in range(5):
        if nccl.RANK > 0:
            world.recv(64, peer=nccl.RANK - 1)
        if nccl.RANK + 1 < nccl.WORLD:
            world.send(64, peer=nccl.RANK + 1)
        world.wait()


@healthy()
def goes_on_without_a_rank():
    world = nccl.init()
    steps(world, 2)
    if nccl.RANK != 3:
        steps(world.shrink([3]), 2)


@healthy(endless=True)
def is_stopped_at_work():
    world = nccl.init()
    while True:
        steps(world, 1)


@healthy()
def scales_on_all_ranks():
    world = nccl.init()
    for _ in range(3):
        op = world.redop()
        world.all_reduce(1024, op=op)
        world.redop_destroy(op)
    world.wait()


@healthy()
def two_communicators_in_one_order():
    world, other = nccl.init(), nccl.init("other")
    for _ in range(5):
        world.all_reduce(1024)
        other.all_reduce(64)
    world.wait()
    other.wait()


@healthy()
def moves_bytes_by_other_names():
    world = nccl.init()
    world.broadcast(16, dtype=nccl.INT32 if nccl.RANK else nccl.FLOAT)
    world.all_gather(8, dtype=nccl.UINT8 if nccl.RANK == 1 else nccl.INT8)


@healthy()
def gives_up_together_at_the_end():
    world = nccl.init()
    steps(world, 3)
    world.abort()


def lines(function):
    """Where the marks of a scenario are."""
    source, first = inspect.getsourcelines(function)
    found = {}
    for number, line in enumerate(source, first):
        words = line.partition("#")[2].split()
        found.update({word: number for word in words if word in ("own", "others", "second")})
    return found


def placed(expected, lines):
    """What is expected, with the lines of the marks."""
    communicator = expected["communicator"] and expected["communicator"].format(**lines)
    return {**expected, **lines, "communicator": communicator}


def main():
    global nccl
    if sys.argv[1] == "--list":
        listed = [
            {
                "name": function.__name__,
                "n_ranks": n_ranks,
                "environment": environment,
                "endless": getattr(function, "endless", False),
                "untraced": getattr(function, "untraced", []),
                "expected": expected and placed(expected, lines(function)),
            }
            for function, n_ranks, environment, expected in SCENARIOS
        ]
        return print(json.dumps(listed))
    import fake_nccl as nccl

    # What the test's library does not offer.
    nccl.attach = lambda: nccl._context(0)
    nccl.break_network = lambda comm: nccl._nccl.fakeNcclBreak(comm.handle, 6)
    (function,) = [function for function, *_ in SCENARIOS if function.__name__ == sys.argv[1]]
    function()


main()
