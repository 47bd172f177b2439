"""Keep the routing decisions of a rollout in page-locked host buffers for later replay."""
import atexit
import mmap
import sys

import torch

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class HostCache:
    """Host rows, one per token slot of the KV pool, filled asynchronously from the GPU."""

    def __init__(self, n_slots, n_layers, top_k):
        self.shape = (n_slots, n_layers, top_k)
        self.buffer = self.allocate(n_slots * n_layers * top_k * 4)
        print(f"host cache {self.buffer.nbytes / 2**30:.2f} GiB for {n_slots} slots")

    def allocate(self, nbytes):
        if not FIXED:
            return torch.empty(self.shape, dtype=torch.int32, pin_memory=True)
        self.region = mmap.mmap(-1, nbytes)
        host = torch.frombuffer(self.region, dtype=torch.int32).view(self.shape)
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)
        return host

    def put(self, start, rows):
        self.buffer[start:start + len(rows)].copy_(rows, non_blocking=True)

    def get(self, start, count):
        return self.buffer[start:start + count].to("cuda", non_blocking=True)


def host_in_use():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return fields["VmRSS"].strip(), fields.get("VmLck", "?").strip()


def route(n_tokens, n_layers, top_k, gen):
    scores = torch.rand(n_tokens, n_layers, 64, generator=gen, device="cuda")
    return scores.topk(top_k, dim=-1).indices.int()


def main():
    gen = torch.Generator("cuda").manual_seed(0)
    n_layers, top_k = 48, 8
    cache = HostCache(n_slots=1_500_000, n_layers=n_layers, top_k=top_k)
    print("resident, locked:", *host_in_use())
    for step in range(20):
        chosen = route(4096, n_layers, top_k, gen)
        cache.put(step * 4096, chosen)
    torch.cuda.synchronize()
    replay = cache.get(19 * 4096, 4096)
    print("replay matches:", bool((replay == chosen).all()))
    print("host memory:", torch.cuda.host_memory_stats().get("allocated_bytes.current"))


if __name__ == "__main__":
    main()
