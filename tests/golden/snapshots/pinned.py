"""pinned.py OUTPUT: writes a snapshot of PyTorch with pinned memory of the host in it: `host_segments` and `host_traces`, from PyTorch 2.14 on.

`pinned-2.15.pickle.gz` is what an unmodified PyTorch 2.15.0 (for CUDA 13.2) wrote on the fake driver: `fake-cuda python /job/pinned.py pinned.pickle`.
"""
import sys

import torch

MIB = 1 << 20


def pinned(bytes):
    return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)


def batch():
    return pinned(3 * MIB)  # a segment of 4 MiB


def checkpoint():
    return pinned(MIB)  # one that stays


before = pinned(2 * MIB)  # there before the history, as is the next
given_back = pinned(MIB)
torch.cuda.memory._record_memory_history(record_pinned_host_memory=True, stacks="python")
del given_back
weights = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
kept = []
for step in range(12):
    on_host = batch()
    on_device = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    if step % 4 == 0:
        kept.append(checkpoint())
    del on_host, on_device
big = pinned(32 * MIB)
del big
torch._C._host_emptyCache()
spare = pinned(16 * MIB)
del spare  # stays pinned, and nobody has it
registered = torch.empty(MIB, dtype=torch.uint8)
assert torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), MIB, 0) == torch.cuda.cudart().cudaError.success
torch.cuda.memory._dump_snapshot(sys.argv[1])
