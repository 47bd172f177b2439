# out_of_memory: JAX cannot get an array.
import os
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.02"
import jax, jax.numpy as jnp
weights = jnp.ones((4096, 4096), jnp.float32)
for size in (1, 2, 4, 64):
    x = jnp.ones((size * 4096, 4096), jnp.float32).block_until_ready()  # <- fault
