# nothing_wrong: a step of JAX that gives its arguments away.
import functools, jax, jax.numpy as jnp
@functools.partial(jax.jit, donate_argnums=0)
def step(weights, x):
    loss = lambda weights: (x @ weights).mean()
    return weights - 0.01 * jax.grad(loss)(weights)
weights, x = jnp.ones((2048, 2048)), jnp.ones((512, 2048))
for _ in range(40):
    weights = step(weights, x)
weights.block_until_ready()
