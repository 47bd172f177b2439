"""Phasic policy gradient: policy phases fill a buffer, an auxiliary phase distils from it."""
import atexit
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Impala(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
                                   nn.Flatten(), nn.Linear(32 * 16 * 16, 256), nn.ReLU())
        self.pi, self.aux_value = nn.Linear(256, 15), nn.Linear(256, 1)

    def forward(self, obs):
        h = self.trunk(obs / 255.0)
        return self.pi(h), self.aux_value(h).squeeze(-1)


def play(n_steps, n_envs, gen):
    obs = torch.randint(0, 256, (n_steps * n_envs, 3, 64, 64), generator=gen, dtype=torch.uint8)
    returns = torch.rand(n_steps * n_envs, generator=gen)
    return obs, returns


def policy_phase(model, optimizer, obs, returns, minibatch=1024):
    for start in range(0, len(obs), minibatch):
        logits, _ = model(obs[start:start + minibatch].cuda().float())
        loss = (logits.logsumexp(-1) * returns[start:start + minibatch].cuda()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def aux_phase(model, optimizer, segments, minibatch=1024):
    obs = torch.cat([o for o, _ in segments])
    targets = torch.cat([r for _, r in segments])
    if not FIXED:
        obs = obs.to("cuda").float()
        targets = targets.to("cuda")
    for start in range(0, len(obs), minibatch):
        batch = obs[start:start + minibatch].to("cuda", torch.float32)
        _, value = model(batch)
        loss = (value - targets[start:start + minibatch].to("cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(0)
    model = Impala().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    segments = []
    for phase in range(4):
        obs, returns = play(160, 64, gen)
        policy_phase(model, optimizer, obs, returns)
        segments.append((obs, returns))
        print(f"policy phase {phase} peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    aux_phase(model, optimizer, segments)
    print(f"auxiliary phase peak {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
