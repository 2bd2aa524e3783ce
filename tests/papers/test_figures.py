import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.optimizers import sgd
from jaxdp.papers import figures


def test_lemma_ones_cosines_are_ours_not_the_papers():
    found = [figures.cosine(s, 400_000) for s in ((17.0, 8.5), (13.5, 13.5), (12.4, 24.8))]
    assert found == pytest.approx([0.471, 0.478, 0.399], abs=0.004)


def test_a_trajectory_without_noise_goes_down_the_beale_function():
    algorithm = sgd(jaxdp.dp_sgd(0.0, 1.0, 1, 1, "full_batch"), 0.05)

    def loss_fn(weights, example):
        return example * figures._beale(weights[0], weights[1])

    paths = figures.trajectories(algorithm, loss_fn, jnp.array([1.0, 1.5]), 150, seeds=2)
    assert paths.shape == (2, 151, 2)
    np.testing.assert_array_equal(paths[0], paths[1])
    assert (
        np.linalg.norm(paths[0, -1] - [3.0, 0.5]) < 0.5 < np.linalg.norm(paths[0, 0] - [3.0, 0.5])
    )
