"""Starts a job of several ranks without a GPU; README.md beside this file."""

import argparse
import os
import signal
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", help="folder of the traces")
    parser.add_argument("--gputrace", help="path of gputrace: record each rank")
    parser.add_argument("--fake", help="folder of the fake libraries")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which those that still run are killed, which is a failure")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args()


def start(options, rank, job):
    environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks), FAKE_NCCL_JOB=job)
    here = os.path.dirname(os.path.abspath(__file__))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    if options.fake:
        old = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [options.fake, old]))
    command = [sys.executable, *options.program]
    if options.gputrace:
        trace = os.path.join(options.out, f"rank{rank}.gtr")
        command = [options.gputrace, "record", "-f", "-o", trace, "--", *command]
    return subprocess.Popen(command, env=environment)


def main():
    options = arguments()
    job = f"{os.getpid()}.{time.monotonic_ns()}"
    if options.out:
        os.makedirs(options.out, exist_ok=True)
    ranks = [start(options, rank, job) for rank in range(options.ranks)]
    ends, enough = time.monotonic() + options.timeout, f"/dev/shm/fake-nccl.{job}.enough"
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < ends and not os.path.exists(enough):
        time.sleep(0.02)
    killed = os.path.exists(enough)
    hung = [rank for rank in ranks if rank.poll() is None]
    for rank in hung:
        rank.send_signal(signal.SIGKILL)
    codes = [rank.wait() for rank in ranks]
    for number, code in enumerate(codes):
        print(f"rank {number}: {code}")
    for name in os.listdir("/dev/shm"):
        if name.startswith(f"fake-nccl.{job}."):
            os.unlink(os.path.join("/dev/shm", name))
    return 0 if all(code == 0 or (killed and code == -signal.SIGKILL) for code in codes) else 1


sys.exit(main())
