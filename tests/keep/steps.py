"""steps.py STEPS [late]: one rank of a job that makes two collectives a step. `late`: the last rank stops there, and the others wait for it.
Each makes the file COME when it has come that far."""

import os
import sys
import time

import fake_nccl as nccl

world = nccl.init("world")
for step in range(int(sys.argv[1])):
    world.all_reduce(1024)
    world.broadcast(16)
    if step % 16 == 0:
        world.wait()
world.wait()
if sys.argv[2:] == ["late"]:
    if nccl.RANK < nccl.WORLD - 1:
        world.all_reduce(1024)
    open(os.environ["COME"], "w").close()
    time.sleep(600)
world.destroy()
