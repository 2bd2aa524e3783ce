"""Layers that people use against clipping per example in float64."""

import pytest

import jaxdp
from tests.clipping import layers

SIZES = layers.Sizes()
# The rest makes the same operations; `python -m benchmarks.layers` runs all.
LINEN = [name for name in layers.NAMES["linen"] if name not in ("lstm", "lstm, both ways")]
NNX = ("conv2d, groups, dilated", "embedding bag", "group norm", "gru", "attention")


@pytest.mark.parametrize(
    ("framework", "name"), [("linen", name) for name in LINEN] + [("nnx", name) for name in NNX]
)
def test_norms_and_clipped_sums_are_those_of_float64(framework, name):
    params, loss_fn, batch = layers.make(framework, name, SIZES)
    reference = layers.exact(framework, name, SIZES, params)
    seen = set()
    for engine in ("ghost", "auto"):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine)
        engines = tuple(row.engine for row in grad_fn.plan(params, batch))
        if engines not in seen:
            seen.add(engines)
            assert max(layers.errors(grad_fn, params, batch, *reference)) < 1e-5
