"""The largest physical batch that fits into the device's memory, from XLA's own account of it."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.clipping import ClippedGrad
from jaxdp.clipping.engine import add_pass, nothing
from jaxdp.mechanism import Mechanism
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.training.passes import rows_of_a_draw
from jaxdp.training.step import PrivateStep
from jaxdp.types import PyTree

# Of the device. The rest is for what XLA's account leaves out, on a CPU for all else that runs.
_SHARE, _SHARE_OF_CPU = 0.85, 0.5


def budget() -> int:
    """The bytes of the device's memory that a step may use; the same whenever it is asked.

    Raises:
        ValueError: the device does not say how much it has.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        if hasattr(os, "sysconf"):
            return int(_SHARE_OF_CPU * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    elif found := (device.memory_stats() or {}).get("bytes_limit"):
        return int(_SHARE * found)
    raise ValueError(
        "physical_batch_size must be a number where the device does not tell its memory, got "
        f'"auto" on {device.device_kind}'
    )


def rows_that_fit(step: PrivateStep, params: PyTree, source: Source, mechanism: Mechanism) -> int:
    """Rows of the largest physical batch, of at most a whole draw, whose step fits on the devices.

    Shapes, public numbers and the device alone decide; the records' number is the declared one.

    Raises:
        ValueError: not even one row fits; the device does not tell its memory; the gradient is an
            algorithm's as published.
    """
    if not isinstance(step.grad_fn, ClippedGrad):
        raise ValueError(
            'physical_batch_size must be a number for an algorithm as published, got "auto"'
        )
    state = jax.eval_shape(step.init, params)
    context = jax.eval_shape(step.clipped_by, state)
    here = isinstance(source, ArraySource) and source.on_device
    records = mechanism.dataset_size if here else None

    place = step.grad_fn.placement
    devices, held, limit = 1, bytes_of(state), budget()
    if place is not None:
        devices = place.devices
        if jax.default_backend() == "cpu":  # whose devices share its memory
            limit //= place.mesh.size
        at = place.shardings_like(step.grad_fn.trained(params), state)
        held = bytes_of(jax.tree.map(_part, state, at))

    def cost(rows: int) -> int:
        one = bytes_of_pass(step.grad_fn, params, source.example, devices * rows, records, context)
        return one + held

    most = rows_of_a_draw(mechanism)
    return devices * most_rows(cost, -(-most // devices), limit)


def bytes_of_pass(
    grad_fn: ClippedGrad,
    params: PyTree,
    example: PyTree,
    rows: int,
    records: int | None,
    context: dict[str, PyTree],
) -> int:
    """The memory of a device that one compiled pass needs, its arguments and results included.

    Args:
        grad_fn: the clipped gradient.
        params: pytree of arrays, or of their shapes.
        example: shapes of one example.
        rows: of the physical batch.
        records: on the device, from which the pass gathers; None where rows are handed to it.
        context: ``scale`` and ``bound``, arrays or shapes.
    """
    count = rows if records is None else records
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), example)
    rng = (
        jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        if grad_fn.takes_rng
        else None
    )
    indices, mask = (jax.ShapeDtypeStruct((rows,), kind) for kind in (jnp.int32, jnp.bool_))
    totals = jax.eval_shape(lambda params: nothing(grad_fn, params), params)
    if (place := grad_fn.placement) is not None:
        cut = NamedSharding(place.mesh, P(place.records)) if records else place.row_sharding
        data = jax.tree.map(lambda x: _at(x, cut), data)
        totals = jax.tree.map(_at, totals, place.shardings_like(grad_fn.trained(params), totals))
    more = (rng, context.get("scale"), context.get("bound"))
    lowered = add_pass.lower(
        grad_fn, records is None, False, totals, params, data, indices, mask, *more
    )
    found: Any = lowered.compile().memory_analysis()
    size = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return int(size - found.alias_size_in_bytes)


def bytes_of(tree: PyTree) -> int:
    """The memory of a pytree of arrays, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _at(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _part(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The part of an array that one device holds."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(shape.shape), shape.dtype)


def most_rows(cost: Callable[[int], int], most: int, limit: int) -> int:
    """``most``, or the largest power of two below it, whose cost is within the limit.

    Powers of two: a little more or less memory on a device changes nothing. Costs are close to
    linear in the rows, so that two of them give the third, which is then asked for.

    Args:
        cost: from rows to bytes; each call compiles.
        most: rows that are enough.
        limit: bytes.

    Raises:
        ValueError: not even one row fits.
    """
    if (whole := cost(most)) <= limit:
        return most
    if (least := cost(1)) > limit:
        raise ValueError(
            "physical_batch_size must be at least 1, but a step of one row needs "
            f"{least / 1e9:.3g} GB where the device has {limit / 1e9:.3g} GB for it: take a "
            "smaller model, freeze parameters (trainable=), or checkpoint layers (jax.checkpoint)"
        )
    slope = (whole - least) / (most - 1)
    rows = 2 ** int(math.log2(max(1, min(most - 1, 1 + int((limit - least) / slope)))))
    while rows > 1 and cost(rows) > limit:
        rows //= 2
    return rows
