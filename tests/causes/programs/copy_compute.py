"""Double buffering: a copy stream fills one buffer while the compute stream works on the other."""
import atexit

import torch


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class DoubleBuffer:
    def __init__(self, shape):
        self.host = [torch.empty(shape, pin_memory=True) for _ in range(2)]
        self.device = [torch.empty(shape, device="cuda") for _ in range(2)]
        self.copy_stream = torch.cuda.Stream()
        self.filled = [torch.cuda.Event() for _ in range(2)]
        self.consumed = [torch.cuda.Event() for _ in range(2)]

    def fill(self, slot, value):
        self.consumed[slot].synchronize()
        self.host[slot].fill_(value)
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(self.consumed[slot])
            self.device[slot].copy_(self.host[slot], non_blocking=True)
            self.filled[slot].record(self.copy_stream)

    def use(self, slot, function):
        stream = torch.cuda.current_stream()
        stream.wait_event(self.filled[slot])
        result = function(self.device[slot])
        self.consumed[slot].record(stream)
        return result


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    buffers = DoubleBuffer((8192, 4096))
    weight = torch.randn(4096, 4096, device="cuda") / 64
    total = torch.zeros((), device="cuda")
    buffers.fill(0, 1.0)
    for i in range(60):
        if i + 1 < 60:
            buffers.fill((i + 1) % 2, float(i + 1))
        total += buffers.use(i % 2, lambda x: (x @ weight).tanh().mean())
        if i % 12 == 0:
            print(f"chunk {i} sum {total.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
