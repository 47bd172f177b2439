"""A healthy job: every kind of call once or more. Also what tests/gpu/nccl.py is tried on."""

import fake_nccl as nccl

world = nccl.init("world", comm_name="default_pg")
for _ in range(3):
    world.all_reduce(1 << 20)
world.broadcast(16, root=0)
world.reduce(16, root=0)
world.all_gather(16)
world.reduce_scatter(16)
world.all_to_all(16)
world.gather(16, root=0)
world.scatter(16, root=0)
with nccl.group():
    for peer in range(nccl.WORLD):
        if peer != nccl.RANK:
            world.send(8, peer)
            world.recv(8, peer)
half = world.split(color=nccl.RANK % 2, name="half")
half.all_reduce(4)
half.wait()
world.wait()
half.destroy()
world.destroy()
