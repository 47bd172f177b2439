"""Forward pass over layers whose full weights are gathered on a communication stream."""
import atexit
import sys

import torch

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class GatheredLayers:
    def __init__(self, n_layers, dim):
        self.dim = dim
        self.n_layers = n_layers
        self.shards = torch.randn(4, dim * dim // 4, device="cuda", dtype=torch.bfloat16) / dim ** 0.5
        self.comm = torch.cuda.Stream()
        self.slots = [torch.empty(dim, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)] if FIXED else None
        self.slot_free = [torch.cuda.Event() for _ in range(2)]

    def gather(self, layer):
        """Copies the shards into one full weight on the communication stream."""
        with torch.cuda.stream(self.comm):
            if FIXED:
                self.comm.wait_event(self.slot_free[layer % 2])
                full = self.slots[layer % 2]
            else:
                full = torch.empty(self.dim, self.dim, device="cuda", dtype=torch.bfloat16)
            full.view(-1).copy_(self.shards.view(-1))
            ready = self.comm.record_event()
        return full, ready

    def release(self, full, layer):
        main = torch.cuda.current_stream()
        if FIXED:
            self.slot_free[layer % 2].record(main)
        else:
            full.record_stream(main)

    def forward(self, x):
        main = torch.cuda.current_stream()
        for layer in range(self.n_layers):
            full, ready = self.gather(layer)
            main.wait_event(ready)
            for _ in range(3):
                x = torch.tanh(x @ full)
            self.release(full, layer)
            del full
        return x


def main():
    torch.manual_seed(0)
    dim = 8192
    model = GatheredLayers(n_layers=48, dim=dim)
    x = torch.randn(16384, dim, device="cuda", dtype=torch.bfloat16)
    print(f"shards and input {torch.cuda.memory_allocated() >> 20} MiB")
    with torch.no_grad():
        for step in range(3):
            out = model.forward(x)
            torch.cuda.synchronize()
            print(f"step {step} out {out.float().std().item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB "
                  f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
