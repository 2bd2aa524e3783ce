"""Layers that people use against clipping per example in float64, all of a framework together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping import layers
from tests.clipping.architectures import jit, opened
from tests.clipping.references import Reference, agrees, together

SIZES = layers.Sizes()
# The rest makes the same operations; `python -m benchmarks.layers` runs all.
LEFT_OUT = ("lstm", "lstm, both ways")
NAMES = {
    "linen": [name for name in layers.NAMES["linen"] if name not in LEFT_OUT],
    "nnx": ["conv2d, groups, dilated", "embedding bag", "group norm", "gru", "attention"],
}


def made(framework, names, dtype):
    """A loss of all layers, each of its own part of the example, and the batch."""
    each = {name: layers._made(framework, name, SIZES, dtype) for name in names}
    parts = {
        name: (params, lambda p, e, name=name, loss=loss: loss(p, e[name]))
        for name, (params, loss, _) in each.items()
    }
    return *together(parts), {name: batch for name, (_, _, batch) in each.items()}


def begun(framework, names):
    """Parameters of layers: those of nnx are begun, those of linen are begun in one program."""
    if framework == "nnx":
        return made(framework, names, jnp.float32)[0]
    each = layers._linen(SIZES, jnp.float32)
    batch = made(framework, names, jnp.float32)[2]
    init = lambda batch: {n: each[n][1].init(jax.random.key(0), batch[n][:1]) for n in names}  # noqa: E731
    return jit(init)(batch)


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize("start", [0, 1])
def test_norms_and_clipped_sums_are_those_of_float64(framework, start):
    names = NAMES[framework][start::2]
    params = begun(framework, names)
    _, loss_fn, batch = made(framework, names, jnp.float32)
    # Flax asks for the common type of float64 and float32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        _, exact, wide = made(framework, names, jnp.float64)
        to_wide = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
        reference = Reference(jax.tree.map(to_wide, params), exact, wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(reference.grads)} == {np.dtype(np.float64)}
    for engine in ("ghost", "auto"):
        run = opened(jaxdp.clipped_grad(loss_fn, reference.half(), engine))
        agrees(run, reference, reference.half(), params, batch)
