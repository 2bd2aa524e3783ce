"""AdaDp as published: what E′ averages."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.optimizers import registry
from jaxdp.papers import algorithms  # noqa: F401  (registers them)
from jaxdp.papers.adadp import adadp_as_published

GRADS = np.array([[1.0, -2.0], [-3.0, 2.0]], np.float32)


def loss(params, example):
    return jnp.sum(params * example)


@pytest.mark.parametrize(
    ("of_lot", "squares"), [(False, np.mean(GRADS**2, axis=0)), (True, np.mean(GRADS, axis=0) ** 2)]
)
def test_the_moment_is_of_examples_or_of_the_lots_mean(of_lot, squares):
    made = adadp_as_published(1.0, 2, 8, 0.1, of_lot=of_lot)
    params = jnp.zeros(2)
    state = made.after_noise.init(params)
    summed, _ = made.gradient(loss)(params, jnp.asarray(GRADS), "all", raw=made.raw(state))
    _, state = made.after_noise.update(params, state, params, leaked=summed.leaked)
    np.testing.assert_allclose(made.raw(state), 0.1 * squares, rtol=1e-5)


def test_both_have_a_name_in_the_registry():
    numbers = registry.Numbers(1.0, 4.0, 2, 8, 0.1)
    for of_lot in (0, 1):
        assert registry.build("adadp-as-published", numbers, {"of_lot": of_lot}).claim
