"""Off-policy training with transitions kept on the GPU in a ring of fixed length."""
import atexit
import collections

import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


class Ring:
    def __init__(self, capacity):
        self.items = collections.deque(maxlen=capacity)

    def push(self, obs, action, reward):
        self.items.append((obs.detach(), action.detach(), reward.detach()))

    def sample(self, index):
        return self.items[index % len(self.items)]


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten())
        self.value = nn.Linear(64 * 9 * 9, 6)

    def forward(self, obs):
        return self.value(self.features(obs.float() / 255))


def act(critic, envs):
    obs = torch.randint(0, 256, (envs, 4, 84, 84), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        action = critic(obs).argmax(1)
    return obs, action, torch.rand(envs, device="cuda")


def learn(critic, optimizer, obs, action, reward):
    pick = torch.randint(0, len(obs), (256,), device="cuda")
    value = critic(obs[pick]).gather(1, action[pick, None]).squeeze(1)
    loss = (value - reward[pick]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    critic = Critic().cuda()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    ring = Ring(capacity=24)
    for step in range(60):
        ring.push(*act(critic, 4096))
        loss = learn(critic, optimizer, *ring.sample(step * 5))
        if step % 6 == 0:
            print(f"step {step} loss {loss:.4f} kept {len(ring.items)} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
