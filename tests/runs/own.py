"""``jaxdp.Run`` on a program of one's own: 200 records of three numbers, and 60 weights."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from tests.runs.small import ignore

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = RNG.normal(size=200).astype(np.float32)
SIZES = {"l2_clip_norm": 1.0, "batch_size": 40, "dataset_size": 200}
MECHANISM = jaxdp.dp_sgd(epsilon=3.0, delta=1e-3, steps=12, **SIZES)
PLAIN = jaxdp.dp_sgd(noise_multiplier=2.0, **SIZES)
SGD = optax.sgd(0.1)


def loss_fn(params, x, y):
    return jnp.square(jnp.vdot(params["w"][0], x) - y)


def run(folder, data=(X, Y), mechanism=MECHANISM, loss=loss_fn, optimizer=SGD, **options):
    """A row each three steps, and no report."""
    given = {"params": {"w": jnp.zeros((20, 3))}, "every": 3, "report": False, "progress": ignore}
    return jaxdp.Run(folder, loss, mechanism, optimizer, data, **{**given, **options})


def again(folder, **options):
    """With canaries."""
    return run(folder, canaries=5, **options)
