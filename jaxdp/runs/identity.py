"""Hashes of a run's programs and data, to recognise them when it is resumed."""

import re

import jax

from jaxdp._shards import hashed
from jaxdp.clipping import ClippedGrad
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import LossFn, PyTree


def programs(algorithm: Algorithm, loss_fn: LossFn, params: PyTree, example: PyTree) -> str:
    """The programs of a step as text: of the gradients and of what comes after the noise.

    With a hash of the numbers that they begin with, where a learning rate may stand, and of the
    arrays that they captured.
    """
    links = algorithm.step(loss_fn)
    _, after = links.init(params)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), example)
    key = (
        jax.random.key(0, impl="threefry2x32")
        if getattr(links.grad_fn, "takes_rng", False)
        else None
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        update = jax.make_jaxpr(links.after.update)(params, after, params)
    loss, numbers = "", [params, after, update.consts]
    if isinstance(links.grad_fn, ClippedGrad):
        norms = lambda p, b: links.grad_fn(p, b, "all", key)[1].norms  # noqa: E731
        traced = jax.make_jaxpr(norms)(params, batch)
        loss, numbers = str(traced), [*numbers, traced.consts]
    text = re.sub(r"0x[0-9a-f]+", "", f"{update} {loss}")  # addresses differ in every process
    return f"{text} {hashed(numbers)}"
