"""Soft actor-critic on a vectorised ant, with the replay buffer on the device (JAX)."""
import atexit
import subprocess
import sys

import jax
import jax.numpy as jnp

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print("peak_bytes_in_use =", jax.devices()[0].memory_stats().get("peak_bytes_in_use"))


def card_bytes():
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True)
    return int(out.stdout.split()[0]) << 20 if out.returncode == 0 else 85 << 30


class ReplayBuffer:
    """Fixed-size queue of flattened transitions."""

    def __init__(self, max_replay_size, row_size):
        self.size = max_replay_size
        self.data = jnp.zeros((max_replay_size, row_size), jnp.float32)
        self.position = 0

    def insert(self, rows):
        self.data = write_rows(self.data, rows, self.position)
        self.position = (self.position + len(rows)) % self.size

    def sample(self, key, batch):
        return self.data[jax.random.randint(key, (batch,), 0, max(self.position, 1))]


write_rows = jax.jit(lambda data, rows, at: jax.lax.dynamic_update_slice(data, rows, (at, 0)), donate_argnums=0)


@jax.jit
def critic_update(weights, batch):
    def loss(w):
        return jnp.mean((jnp.tanh(batch @ w["h"]) @ w["o"] - batch[:, :1]) ** 2)
    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, weights, grads), value


def train(num_timesteps, num_envs=2048, observation_size=64, action_size=8, max_replay_size=None, iterations=20):
    row_size = 2 * observation_size + action_size + 2
    replay = ReplayBuffer(max_replay_size or num_timesteps, row_size)
    key = jax.random.PRNGKey(0)
    weights = {"h": jax.random.normal(key, (row_size, 256)) * 0.05, "o": jax.random.normal(key, (256, 1)) * 0.05}
    for i in range(iterations):
        key, k1, k2 = jax.random.split(key, 3)
        replay.insert(jax.random.normal(k1, (num_envs, row_size)))
        weights, value = critic_update(weights, replay.sample(k2, 512))
    print(f"{iterations * num_envs} steps, critic loss {float(value):.4f}")


if __name__ == "__main__":
    timesteps = int(1.2 * card_bytes() / (138 * 4))
    if FIXED:
        train(num_timesteps=timesteps, max_replay_size=1 << 20)
    else:
        train(num_timesteps=timesteps)
