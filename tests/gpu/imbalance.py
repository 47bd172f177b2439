"""Rank 0 keeps an extra copy of the logits, and every rank touches cuda:0. Run by ranks.sh with torchrun."""
import os

import torch
import torch.distributed as dist


def main():
    rank = int(os.environ["LOCAL_RANK"])
    flag = torch.ones(1, device="cuda:0")  # touched by every rank
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model = torch.nn.Linear(4096, 32000).cuda()
    data = torch.randn(512, 4096, device="cuda")
    kept = []
    for _ in range(5):
        logits = model(data)
        if rank == 0:
            kept.append(logits.detach().float().clone())  # extra copy
        loss = logits.square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad()
    torch.cuda.synchronize()
    print(f"rank {rank} done {float(loss):.3f} {int(flag)} {len(kept)}", flush=True)
    dist.destroy_process_group()


main()
