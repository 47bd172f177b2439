"""Embedding service: every request runs on its own CUDA stream."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Embedder(nn.Module):
    def __init__(self, dim=1024):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 256))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)


class Service:
    def __init__(self, model):
        self.model = model
        self.shared_stream = torch.cuda.Stream()
        self.answered = 0

    def stream_for_request(self):
        return self.shared_stream if FIXED else torch.cuda.Stream()

    @torch.inference_mode()
    def handle(self, texts):
        stream = self.stream_for_request()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            features = torch.stack(texts).cuda(non_blocking=True)
            result = self.model(features).cpu()
        stream.synchronize()
        self.answered += 1
        return result


def fake_texts(n, gen):
    return [torch.randn(1024, generator=gen) for _ in range(n)]


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    service = Service(Embedder().cuda().eval())
    for i in range(48):
        service.handle(fake_texts(64, gen))
        if i % 8 == 0:
            print(f"request {i} allocated {torch.cuda.memory_allocated() >> 20} MiB "
                  f"reserved {torch.cuda.memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
