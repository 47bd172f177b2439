"""Records jobs of two ranks that hang, has `gputrace reproduce` write a program of each, and runs it: it must hang in the same call.

    hanging.py FOLDER            FOLDER has gputrace, libgputrace.so and fake-cuda
    hanging.py FOLDER --python PYTHON     also on that interpreter's PyTorch, with gloo on the processor
    hanging.py NAME              one rank of a job; launch.py starts it

A healthy job must have no program. No GPU and, without --python, no PyTorch is needed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def skips_a_call(world, other):
    for step in range(20):
        world.all_reduce(1024)
        if (nccl.RANK, step) != (1, 12):
            world.broadcast(16)
    world.wait()


def sends_another_size(world, other):
    for step in range(20):
        world.all_reduce(1024 if (nccl.RANK, step) != (1, 12) else 1025)
        world.wait()


def receives_what_nobody_sends(world, other):
    world.all_reduce(1024)
    if nccl.RANK == 1:
        world.recv(64, peer=0)
    world.wait()


def uses_two_communicators_in_another_order(world, other):
    for step in range(20):
        first, second = (world, other) if (nccl.RANK, step) != (1, 12) else (other, world)
        first.all_reduce(1024)
        second.all_reduce(1024)


def healthy(world, other):
    for _ in range(20):
        world.all_reduce(1024)
        other.all_reduce(64)
    world.wait()


# What the program says of both ranks.
JOBS = {
    skips_a_call: ["done|broadcast of 16", "all_reduce of 1024"],
    sends_another_size: ["all_reduce of 1024", "all_reduce of 1025"],
    receives_what_nobody_sends: ["done", "receive of 64"],
    uses_two_communicators_in_another_order: ["communicator 0", "communicator 1"],
    healthy: None,
}
BLOCKING = {"FAKE_NCCL_BLOCKING": "1"}


def record(folder, job, traces):
    fake = subprocess.run([folder / "fake-cuda", "--dir"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([sys.executable, HERE / "launch.py", "--fake", fake, "--gputrace", folder / "gputrace", "--out", traces, "--timeout", "6",
                    __file__, job.__name__], env=dict(os.environ, **BLOCKING), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return fake


def run(command, program, environment):
    """What the program says, of ranks in the environment that torchrun gives them."""
    with tempfile.TemporaryDirectory() as store:
        common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581", "STORE": store, "REPRO_SECONDS": "5",
                  "FAKE_NCCL_JOB": f"reproduce.{os.getpid()}.{program.stem}", **environment}
        ranks = [subprocess.Popen([command, program], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                                  text=True) for rank in range(2)]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return ranks[0].returncode, said[0].strip()


def main(folder, python):
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for job, expected in JOBS.items():
            traces, program = pathlib.Path(scratch) / job.__name__, pathlib.Path(scratch) / f"{job.__name__}.py"
            fake = record(folder, job, traces)
            written = subprocess.run([folder / "gputrace", "reproduce", "--json", "-o", program, traces], capture_output=True, text=True)
            if expected is None:
                is_right, said = written.returncode != 0, written.stderr.strip()
                wrong += not is_right
                print(f"{job.__name__}: {'no program' if is_right else 'A PROGRAM'}: {said}")
                continue
            if written.returncode != 0:
                wrong += 1
                print(f"{job.__name__}: NO PROGRAM: {written.stderr.strip()}")
                continue
            facts = json.loads(written.stdout)
            print(f"{job.__name__}: {facts['n_requests_before']} -> {facts['n_requests']} calls, {facts['n_lines']} lines")
            libraries = os.pathsep.join(filter(None, [fake, os.environ.get("LD_LIBRARY_PATH")]))
            paths = os.pathsep.join([str(HERE / "stand-in"), str(HERE)])
            ways = [("stand-in for NCCL", sys.executable, {"PYTHONPATH": paths, "LD_LIBRARY_PATH": libraries, **BLOCKING})]
            if python:
                ways.append(("gloo", python, {"REPRO_BACKEND": "gloo"}))
            for name, command, environment in ways:
                status, said = run(command, program, environment)
                states = said.splitlines()[1:]
                waits = all(any(it in state for it in word.split("|")) for word, state in zip(expected, states)) and len(states) == 2
                # Gloo ends the process where sizes differ.
                is_aborted = name == "gloo" and status < 0 and job is sends_another_size
                said = f"aborts with signal {-status}" if is_aborted else said
                is_right = is_aborted or (status == 0 and said.startswith("reproduced") and waits)
                wrong += not is_right
                print(f"  {name}: {'' if is_right else 'WRONG: '}{said}")
    sys.exit(1 if wrong else 0)


if len(sys.argv) > 1 and sys.argv[1] in [job.__name__ for job in JOBS]:
    import fake_nccl as nccl

    next(job for job in JOBS if job.__name__ == sys.argv[1])(nccl.init("world"), nccl.init("other"))
elif len(sys.argv) in (2, 4):
    main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[3] if len(sys.argv) == 4 else None)
else:
    sys.exit(__doc__)
