"""Train a recurrent imputation network on simulated sensor sequences."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
DEVICE = "cuda"


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Imputer(nn.Module):
    def __init__(self, channels=256, hidden=256):
        super().__init__()
        self.rnn = nn.GRU(channels, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, channels)
        self.log_var = nn.Linear(hidden, channels)

    def forward(self, obs):
        h, _ = self.rnn(obs)
        return self.mean(h), self.log_var(h)


def sensor_batch(batch=256, steps=400, channels=256):
    t = torch.linspace(0, 20, steps, device=DEVICE)[None, :, None]
    phase = torch.rand(batch, 1, channels, device=DEVICE) * 6.28
    clean = torch.sin(t + phase)
    mask = (torch.rand_like(clean) > 0.3).float()
    return clean * mask, clean


def gaussian_nll(mean, log_var, target):
    return (0.5 * (log_var + (mean - target) ** 2 / log_var.exp())).mean()


def train_epoch(model, optimizer, n_batches, record):
    for _ in range(n_batches):
        obs, target = sensor_batch()
        mean, log_var = model(obs)
        loss = gaussian_nll(mean, log_var, target)
        mse = ((mean - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FIXED:
            record["nll"].append(loss.item())
            record["mse"].append(mse.item())
        else:
            record["nll"].append(loss)
            record["mse"].append(mse)


def main():
    torch.manual_seed(0)
    model = Imputer().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    record = {"nll": [], "mse": []}
    for epoch in range(4):
        train_epoch(model, optimizer, 10, record)
        last = [float(v) for v in record["mse"][-10:]]
        print(f"epoch {epoch} mse {sum(last) / len(last):.4f} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
