"""Fit a large multilayer perceptron with a hand-written Adam in JAX."""
import atexit
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

FIXED = "--fixed" in sys.argv


@atexit.register
def memory_summary():
    print("peak_bytes_in_use =", jax.devices()[0].memory_stats().get("peak_bytes_in_use"))


def init_params(key, dim=4096, depth=12):
    keys = jax.random.split(key, depth)
    return [{"w": jax.random.normal(k, (dim, dim)) * dim ** -0.5, "b": jnp.zeros(dim)} for k in keys]


def init_state(params):
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return {"m": zeros(), "v": zeros(), "count": jnp.zeros((), jnp.int32)}


def predict(params, x):
    for layer in params:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x


def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def train_step_fn(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    count = state["count"] + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, state["v"], grads)
    scale = 1e-4 * jnp.sqrt(1 - 0.999 ** count) / (1 - 0.9 ** count)
    params = jax.tree.map(lambda p, a, b: p - scale * a / (jnp.sqrt(b) + 1e-8), params, m, v)
    return params, {"m": m, "v": v, "count": count}, loss


def fit(steps):
    train_step = jax.jit(train_step_fn, donate_argnums=(0, 1)) if FIXED else jax.jit(train_step_fn)
    params = init_params(jax.random.PRNGKey(0))
    state = init_state(params)
    key = jax.random.PRNGKey(1)
    for step in range(steps):
        key, sub = jax.random.split(key)
        x = jax.random.normal(sub, (256, 4096))
        params, state, loss = train_step(params, state, x, x)
        if step % 5 == 0:
            stats = jax.devices()[0].memory_stats()
            print(f"step {step} loss {float(loss):.4f} in use {stats['bytes_in_use'] >> 20} MiB "
                  f"peak {stats['peak_bytes_in_use'] >> 20} MiB")
    return params


if __name__ == "__main__":
    fit(20)
