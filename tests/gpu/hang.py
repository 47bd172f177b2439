"""One rank skips an all-reduce; then all hang until they are killed. Run by ranks.sh with torchrun.

RANK_AT_FAULT and the marked lines are what `gputrace ranks` must name.
"""
import os
import time

import torch
import torch.distributed as dist

RANK_AT_FAULT = 2


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    gradients = torch.ones(1 << 20, device="cuda")
    statistics = torch.ones(64, device="cuda")
    for step in range(20):
        dist.all_reduce(gradients)
        if (rank, step) != (RANK_AT_FAULT, 12):
            dist.all_reduce(statistics)  # skipped
        dist.broadcast(gradients, src=0)
        if step % 4 == 3:
            torch.cuda.synchronize()  # everybody hangs here
    print(f"rank {rank} came to the end", flush=True)
    time.sleep(60)


main()
