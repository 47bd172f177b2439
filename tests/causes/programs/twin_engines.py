"""Two small language-model engines with paged key-value memory in one process."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class EngineArgs:
    def __init__(self, name, gpu_memory_utilization=0.90, block_size=16):
        self.name = name
        self.gpu_memory_utilization = gpu_memory_utilization
        self.block_size = block_size


class Engine:
    def __init__(self, args, dim=768, depth=12, heads=12):
        self.args, self.depth, self.heads, self.head_dim = args, depth, heads, dim // heads
        before = torch.cuda.memory_allocated()
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, depth).to("cuda", torch.float16).eval()
        torch.cuda.reset_peak_memory_stats()
        self.profile_run(dim)
        self.used = torch.cuda.max_memory_allocated() - before
        self.kv_blocks = self.allocate_kv()

    @torch.inference_mode()
    def profile_run(self, dim):
        self.model(torch.zeros(8, 512, dim, device="cuda", dtype=torch.float16))

    def allocate_kv(self):
        budget = int(CARD * self.args.gpu_memory_utilization) - self.used
        per_block = 2 * self.args.block_size * self.heads * self.head_dim * 2
        n_blocks = budget // (per_block * self.depth)
        print(f"{self.args.name}: own use {self.used >> 20} MiB, {n_blocks} blocks "
              f"({n_blocks * per_block * self.depth >> 20} MiB)")
        shape = (2, n_blocks, self.args.block_size, self.heads, self.head_dim)
        return [torch.empty(shape, device="cuda", dtype=torch.float16) for _ in range(self.depth)]

    @torch.inference_mode()
    def generate(self, batch, length):
        hidden = self.model(torch.randn(batch, length, self.heads * self.head_dim, device="cuda", dtype=torch.float16))
        return hidden.float().mean().item()


def main():
    torch.manual_seed(0)
    share = {"gpu_memory_utilization": 0.30} if FIXED else {}
    draft = Engine(EngineArgs("draft", **share))
    print("draft says", draft.generate(4, 128))
    judge = Engine(EngineArgs("judge", **share))
    print("judge says", judge.generate(4, 128))


if __name__ == "__main__":
    main()
