"""AdaDp's moment as published."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.optimizers import registry
from jaxdp.papers.adadp import adadp_as_published

# What E′ averages
GRADS = np.array([[1.0, -2.0], [-3.0, 2.0]], np.float32)


def test_the_published_moment_is_of_examples_or_of_the_lots_mean():
    params, numbers = jnp.zeros(2), registry.Numbers(1.0, 4.0, 2, 8, 0.1)
    means = (np.mean(GRADS**2, axis=0), np.mean(GRADS, axis=0) ** 2)
    for of_lot, squares in enumerate(means):
        made = adadp_as_published(1.0, 2, 8, 0.1, of_lot=bool(of_lot))
        state = made.after_noise.init(params)
        gradient = made.gradient(lambda params, example: jnp.sum(params * example))
        summed = gradient(params, jnp.asarray(GRADS), "all", raw=made.raw(state))
        _, state = made.after_noise.update(params, state, params, leaked=summed.leaked)
        np.testing.assert_allclose(made.raw(state), 0.1 * squares, rtol=1e-5)
        assert registry.build("adadp-as-published", numbers, {"of_lot": of_lot}).claim
    with pytest.raises(ValueError, match="of_lot must be a whole number"):
        registry.build("adadp-as-published", numbers, {"of_lot": 2})
