"""Convolutions that crop one side and pad the other: XLA's CPU backend reads other memory there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from tests.clipping.architectures import opened
from tests.clipping.test_ghost import gap

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "a": jax.random.normal(KEYS[0], (3, 3, 2, 2)),
    "k": jax.random.normal(KEYS[1], (3, 3, 2, 4)),
}
X = jax.random.normal(KEYS[2], (4, 7, 7, 2))


def convolved(x, kernel, pads, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (pads, pads), dimension_numbers=DIMENSIONS
    )


def loss_of(second):
    return lambda p, x: jnp.sum(
        jnp.sin(second(jnp.tanh(convolved(x[None], p["a"], (1, 1))), p["k"]))
    )


@pytest.mark.parametrize("engine", ["auto", "vmap"])
@pytest.mark.parametrize(
    ("pads", "stride"), [((-1, 1), 1), ((-2, 1), 2), ((4, 0), 1), ((5, -1), 1)]
)
def test_cropped_and_widely_padded_convolutions_read_their_own_example(pads, stride, engine):
    # (4, 0): the gradient by the input is a convolution with padding (-2, 2).
    loss_fn = loss_of(lambda x, k: convolved(x, k, pads, stride))
    edges = [(0, 0, 0), (*pads, 0), (*pads, 0), (0, 0, 0)]
    safe = loss_of(lambda x, k: convolved(lax.pad(x, 0.0, edges), k, (0, 0), stride))
    found, _ = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e9), engine))(PARAMS, X)
    expected = jax.grad(lambda p: jnp.sum(jax.vmap(safe, (None, 0))(p, X)))(PARAMS)
    assert gap(found, expected) < 1e-5


def in_a_scan(pads):
    def loss_fn(p, x):
        def add(total, _):
            return total + jnp.sum(jnp.sin(convolved(x[None], p["k"], pads))), None

        return lax.scan(add, jnp.float32(0.0), None, length=2)[0]

    return loss_fn


def test_out_of_reach_they_are_refused_in_words():
    # Without a site inside, the loop is left as it is.
    grad_fn = jaxdp.clipped_grad(in_a_scan((-1, 1)), jaxdp.clip(1.0), "vmap")
    with pytest.raises(ValueError, match="padding of a convolution must not crop"):
        grad_fn(PARAMS, X, np.ones(4, bool))


def test_in_a_loop_whose_kernels_are_sites_they_read_their_own_example():
    found, _ = opened(jaxdp.clipped_grad(in_a_scan((-1, 1)), jaxdp.clip(1e9)))(PARAMS, X)

    def safe(p, x):
        padded = lax.pad(x[None], 0.0, [(0, 0, 0), (-1, 1, 0), (-1, 1, 0), (0, 0, 0)])
        return 2 * jnp.sum(jnp.sin(convolved(padded, p["k"], (0, 0))))

    expected = jax.grad(lambda p: jnp.sum(jax.vmap(safe, (None, 0))(p, X)))(PARAMS)
    assert gap(found, expected) < 1e-5
