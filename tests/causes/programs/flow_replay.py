"""Generative flow network with a replay buffer of past trajectories."""
import atexit
import collections
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv
CARD = torch.cuda.mem_get_info()[1]
WIDTH, DEPTH = 4096, 5


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


def policy_net():
    layers = [nn.Linear(64, WIDTH), nn.ReLU()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 32)).cuda()


class ReplayBuffer:
    def __init__(self, capacity=10000):
        self.items = collections.deque(maxlen=capacity)

    def push(self, states, log_prob, reward):
        if FIXED:
            states, log_prob, reward = (t.detach().cpu() for t in (states, log_prob, reward))
        self.items.append((states, log_prob, reward))

    def sample(self, index):
        states, log_prob, reward = self.items[index % len(self.items)]
        return states[:1024].cuda().detach(), reward[:1024].cuda().detach()


def rollout(policy, n_trajectories):
    states = torch.randn(n_trajectories, 64, device="cuda")
    logits = policy(states)
    dist = torch.distributions.Categorical(logits=logits)
    actions = dist.sample()
    reward = (states.mean(1) * actions).sigmoid()
    return states, dist.log_prob(actions), reward


def update(policy, optimizer, states, reward):
    loss = (torch.log_softmax(policy(states), -1).amax(-1) - reward.log()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    policy = policy_net()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
    replay = ReplayBuffer()
    n_trajectories = int(0.022 * CARD / (WIDTH * DEPTH * 4))
    for step in range(60):
        replay.push(*rollout(policy, n_trajectories))
        loss = update(policy, optimizer, *replay.sample(step * 7))
        if step % 6 == 0:
            print(f"step {step} loss {loss:.4f} buffer {len(replay.items)} allocated {torch.cuda.memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
