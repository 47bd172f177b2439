"""Load a chat model with the service's resource settings and answer a few prompts."""
import atexit
import json
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]
SETTINGS = json.loads('{"device": 0, "dtype": "bfloat16", "gpu_share": %s, "max_batch": 4}' % (1.0 if FIXED else 0.12))


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def apply_settings(settings):
    torch.cuda.set_device(settings["device"])
    torch.cuda.set_per_process_memory_fraction(settings["gpu_share"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class ChatModel(nn.Module):
    def __init__(self, dim=4096, share=0.15):
        super().__init__()
        depth = int(share * CARD / (8 * dim * dim * 2))
        self.embed = nn.Embedding(8000, dim)
        self.blocks = nn.ModuleList()
        for i in range(depth):
            self.blocks.append(Block(dim))
        self.head = nn.Linear(dim, 8000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def load_weights(settings):
    with torch.device("cuda"):
        return ChatModel().eval()


@torch.inference_mode()
def answer(model, settings):
    tokens = torch.randint(0, 8000, (settings["max_batch"], 256), device="cuda")
    return model(tokens)[:, -1].argmax(-1).tolist()


def main():
    torch.manual_seed(0)
    apply_settings(SETTINGS)
    model = load_weights(SETTINGS)
    free, total = torch.cuda.mem_get_info()
    print(f"model {torch.cuda.memory_allocated() >> 20} MiB, card free {free >> 20} of {total >> 20} MiB")
    print(answer(model, SETTINGS))


if __name__ == "__main__":
    main()
