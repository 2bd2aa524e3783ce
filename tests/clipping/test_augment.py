"""Augmentation multiplicity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping.architectures import opened
from tests.clipping.test_ghost import gap


def setup(multiplicity, engine="auto", bound=0.5):
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3))}
    loss_fn = lambda p, x: jnp.sum(jnp.sin(x @ p["w"]))  # noqa: E731
    augment = lambda x, key: x + jax.random.normal(key, x.shape)  # noqa: E731
    mean_loss = jaxdp.augmented(loss_fn, augment, multiplicity)
    batch = jax.random.normal(jax.random.key(1), (6, 4))
    return params, jaxdp.clipped_grad(mean_loss, jaxdp.clip(bound), engine), batch


@pytest.mark.parametrize("multiplicity", [1, 5])
def test_a_record_contributes_one_clipped_mean_however_many_views(multiplicity):
    key = jax.random.key(3)
    params, grad_fn, batch = setup(multiplicity)
    assert [leaf.engine for leaf in grad_fn.plan(params, batch)] != ["vmap"]
    total, info = opened(grad_fn)(params, batch, rng=key)
    reference, again = opened(setup(multiplicity, "vmap")[1])(params, batch, rng=key)
    np.testing.assert_allclose(info.norms, again.norms, rtol=1e-5)
    assert gap(total, reference) < 1e-5
    one = opened(grad_fn)(params, batch, jnp.arange(6) == 2, key)[0]["w"]
    assert np.linalg.norm(np.asarray(one, np.float64)) <= 0.5


def test_views_are_different_and_their_mean_steadies_the_gradient():
    keys = jax.random.split(jax.random.key(9), 40)

    def spread(multiplicity):
        params, grad_fn, batch = setup(multiplicity, bound=1e3)
        run = opened(grad_fn)
        totals = jax.vmap(lambda k: run(params, batch, rng=k)[0]["w"])(keys)
        return float(jnp.mean(jnp.var(totals, axis=0)))

    ratio = spread(1) / spread(8)
    assert 5.0 < ratio < 13.0  # 8 up to the noise of 40 runs


def test_bad_augmentations():
    with pytest.raises(ValueError, match="augment must be a function"):
        jaxdp.augmented(lambda p, x: 0.0, None, 2)
    with pytest.raises(ValueError, match="multiplicity must be"):
        jaxdp.augmented(lambda p, x: 0.0, lambda x, k: x, 0)
