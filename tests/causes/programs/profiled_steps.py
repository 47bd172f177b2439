"""Training with the PyTorch profiler on a few steps (memory and shapes recorded)."""
import atexit

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def model_and_optimizer():
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)).cuda()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train_step(model, optimizer, step):
    images = torch.rand(64, 3, 96, 96, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def on_ready(prof):
    events = prof.key_averages()
    print(f"profiled {len(events)} kinds of events")


def main():
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    plan = schedule(wait=2, warmup=1, active=3, repeat=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=on_ready,
                 record_shapes=True, profile_memory=True) as prof:
        for step in range(24):
            loss = train_step(model, optimizer, step)
            prof.step()
    print(f"loss {loss:.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
