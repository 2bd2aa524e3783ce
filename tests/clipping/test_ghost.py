"""The ghost engine against the reference, on networks of every kind."""

import jax
import numpy as np
import pytest

import jaxdp
from tests.clipping.architectures import ARCHITECTURES


def gap(a, b):
    """Relative distance of two trees."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)])
        for t in (a, b)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def results(name, method, rule, **options):
    params, loss_fn, batch = ARCHITECTURES[name]()
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, method)
    summed, info = jax.jit(lambda *a: _open(grad_fn(*a, **options)))(params, batch)
    return summed, info


def _open(pair):
    return pair[0].value, pair[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ghost_norms_and_sums_are_the_reference_s(name):
    _, reference = results(name, "vmap", jaxdp.clip(1.0))
    rule = jaxdp.clip(float(np.median(reference.norms)))
    expected, reference = results(name, "vmap", rule)
    assert 0 < reference.clipped.sum() < reference.clipped.size
    for method in ("ghost", "auto"):
        found, info = results(name, method, rule)
        np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5)
        assert gap(found, expected) < 1e-5
        np.testing.assert_allclose(info.losses, reference.losses, rtol=1e-5)
