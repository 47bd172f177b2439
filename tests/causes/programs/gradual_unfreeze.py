"""Fine-tuning that unfreezes one more group of layers per stage, from the top."""
import atexit

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def groups(dim=2560, per_group=3, count=5):
    return nn.ModuleList(nn.Sequential(*(m for _ in range(per_group) for m in (nn.Linear(dim, dim), nn.GELU())))
                         for _ in range(count)).cuda()


def forward(parts, x):
    for part in parts:
        x = part(x)
    return x


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    parts = groups().requires_grad_(False)
    head = nn.Linear(2560, 10).cuda()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for stage, part in enumerate(reversed(parts)):
        part.requires_grad_(True)
        optimizer.add_param_group({"params": list(part.parameters()), "lr": 1e-4 / (stage + 1)})
        for _ in range(6):
            x = torch.randn(2048, 2560, device="cuda")
            labels = torch.randint(0, 10, (2048,), device="cuda")
            loss = nn.functional.cross_entropy(head(forward(parts, x)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"stage {stage} loss {loss.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")
    for _ in range(20):
        x = torch.randn(2048, 2560, device="cuda")
        loss = nn.functional.cross_entropy(head(forward(parts, x)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"end loss {loss.item():.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
