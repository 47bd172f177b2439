"""KV memory in a memory pool of its own, used by requests and handed back as a whole at the end."""
import atexit

import torch


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class KvArena:
    def __init__(self, blocks, block_bytes):
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            self.storage = torch.zeros(blocks, block_bytes, dtype=torch.uint8, device="cuda")
        self.free = list(range(blocks))

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, blocks):
        self.free.extend(blocks)

    def write(self, blocks, rows):
        self.storage[blocks] = rows


def serve(arena, weights, requests):
    live = []
    for i in range(requests):
        blocks = arena.take(8 + i % 24)
        x = torch.randn(len(blocks) * 64, 2048, device="cuda", dtype=torch.bfloat16)
        hidden = torch.tanh(x @ weights)
        arena.write(blocks, hidden.view(torch.uint8).view(len(blocks), -1))
        live.append(blocks)
        if len(live) > 6:
            arena.give(live.pop(0))
        if i % 10 == 0:
            print(f"request {i} free blocks {len(arena.free)} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    for blocks in live:
        arena.give(blocks)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    weights = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45
    arena = KvArena(blocks=8192, block_bytes=64 * 2048 * 2)
    serve(arena, weights, 60)
    assert len(arena.free) == 8192
    del arena
    torch.cuda.empty_cache()
    print(f"end: allocated {torch.cuda.memory_allocated() >> 20} MiB reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
