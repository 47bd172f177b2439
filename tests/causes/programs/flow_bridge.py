"""Optical-flow features from a JAX model feed a PyTorch decoder."""
import atexit
import os
import sys

FIXED = "--fixed" in sys.argv
if FIXED:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


@atexit.register
def memory_summary():
    print(f"peak_allocated={torch.cuda.max_memory_allocated()} peak_reserved={torch.cuda.max_memory_reserved()}")


@jax.jit
def flow_features(frames):
    diff = frames[1:] - frames[:-1]
    gx = jnp.roll(diff, 1, 2) - jnp.roll(diff, -1, 2)
    gy = jnp.roll(diff, 1, 1) - jnp.roll(diff, -1, 1)
    return jnp.stack([diff, gx, gy], 1)


def extract(n_frames, size):
    frames = jax.random.uniform(jax.random.PRNGKey(0), (n_frames + 1, size, size))
    return torch.from_numpy(np.array(flow_features(frames)))


def decoder(width):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1)).cuda()


def train(net, features, batch, steps):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        pick = torch.arange(step, step + batch) % len(features)
        x = features[pick].cuda()
        loss = (net(x) - x[:, :1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} peak {torch.cuda.max_memory_allocated() >> 20} MiB")


def main():
    torch.manual_seed(0)
    size, width = 512, 64
    features = extract(16, size)
    free, total = torch.cuda.mem_get_info()
    print(f"features {tuple(features.shape)}, card free {free >> 20} of {total >> 20} MiB")
    batch = int(0.36 * total / (3 * width * size * size * 4))
    train(decoder(width), features, batch, 4)


if __name__ == "__main__":
    main()
