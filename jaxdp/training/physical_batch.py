"""The rows of a physical batch: those of least expected work, or as many as fit into the memory.

Padding is computed like records, and a draw larger than a physical batch takes another one. How
large a draw is follows a public law; what a row costs beside a physical batch is estimated from the
traced loss of one example and the parameters' sizes, and what fits is XLA's own account of the
compiled program. So no record has a part in the choice.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import special

from jaxdp.clipping import ClippedGrad
from jaxdp.clipping.engine import sum_physical_batch
from jaxdp.clipping.ghost.plan import device_memory
from jaxdp.clipping.ghost.program import REMAT, SCAN, carried_by, inner_jaxprs
from jaxdp.mechanism import Mechanism, default_physical_batch_size
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.sampling.text import BucketedText
from jaxdp.training.step import PrivateStep
from jaxdp.types import PyTree

# Numbers of one physical batch up to which a draw is one: larger draws run faster in several.
_SMALL = 2**19
# The cost of a further physical batch besides its rows, in multiplications of an ordinary forward
# pass, of which a row took 0.02 to 0.13 ns each with its gradient: 0.5 ms, and for every parameter
# what writing its sum and adding it up took in a network of dense layers (1.4 ns). Measured on two
# CPU cores with networks of 26,010 to 795,010 parameters. On an H100 a further physical batch took
# 0.5 to 0.9 ms, in which small networks did 4e9 multiplications; of deep ones much more, for every
# operation is started by itself: 6 ms of SmolLM2 by LoRA, whose loss has 2,600 (docs/gpu.md).
_FURTHER, _FURTHER_ON_ACCELERATOR, _PARAMETER = 2.0**22, 2.0**32, 64.0
_STARTED_ON_ACCELERATOR = 2.0**25
# What one program for all of a step saves beside two, likewise: about 0.15 ms of the host.
_PROGRAM, _PROGRAM_ON_ACCELERATOR = 2.0**20, 2.0**29
# A draw's size is looked at within so many standard deviations, and as many records: all but 1e-13.
_REACH = 12.0
# Candidates are multiples of this many rows.
_MULTIPLE = 8
# Of the device. The rest is for what XLA's account leaves out, on a CPU for all else that runs.
_SHARE, _SHARE_OF_CPU = 0.85, 0.5


def rows_for_most_draws(mechanism: Mechanism, any_number: bool = False) -> int:
    """Rows that hold nearly every draw: all of them where draws have one size, or are truncated.

    Args:
        mechanism: with the sampling rule.
        any_number: True however many records there are: where a draw's size is random there may be
            twice as many as declared.
    """
    if (exact := mechanism.sampling.largest_size(mechanism.dataset_size)) is not None:
        return exact
    size = (2 if any_number else 1) * mechanism.batch_size
    likely = -(-(size + 6 * math.isqrt(size) + 6) // 8) * 8
    return min(likely, 2 * mechanism.dataset_size) if any_number else likely


def default_rows(mechanism: Mechanism, source: Source) -> int:
    """The physical batch size where the network is not known: nearly every whole draw.

    Where that is fast and fits in memory; truncated draws are one physical batch always.
    """
    whole = rows_for_most_draws(mechanism)
    if hasattr(mechanism.sampling, "cap"):
        return whole
    usual = default_physical_batch_size(mechanism.batch_size)
    if isinstance(source, BucketedText):
        # Each length has batches of its own, the last of which is half empty.
        return min(usual, max(8, mechanism.batch_size // 8))
    return whole if _is_small(whole, source) else min(usual, whole)


class Work(NamedTuple):
    """The work of one example's loss, from its trace."""

    operations: float = 0.0  # multiplications of a forward pass, as ``operations_of`` counts them
    numbers: float = 0.0  # that its gradient holds at most, as ``numbers_of`` counts them
    started: float = 0.0  # operations, one by one, as ``started_of`` counts them


def rows_of_least_work(
    mechanism: Mechanism, source: Source, work: Work, params: PyTree, devices: int = 1
) -> int:
    """The physical batch size whose expected work over the law of a draw's size is least.

    A draw that is one physical batch for certain, however many records there are of the declared
    number, is one compiled call: networks of which that saves more than padding costs take it.

    Args:
        mechanism: with the sampling rule.
        source: whose records' shapes count.
        work: of one example.
        params: the parameters.
        devices: that share the rows.
    """
    whole = default_rows(mechanism, source)
    if hasattr(mechanism.sampling, "cap") or isinstance(source, BucketedText):
        return whole
    at_once = rows_for_most_draws(mechanism, any_number=True)
    size = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
    if jax.default_backend() == "cpu":
        usual = default_physical_batch_size(mechanism.batch_size)
        further, program = _FURTHER, _PROGRAM
        one, most = at_once <= usual or _is_small(at_once, source), min(whole, 2 * usual)
    else:
        most = devices * _likely_to_fit(work.numbers, size)
        one, program = at_once <= most, _PROGRAM_ON_ACCELERATOR
        further = _FURTHER_ON_ACCELERATOR + _STARTED_ON_ACCELERATOR * work.started
        most = min(most, rows_for_most_draws(mechanism))
    row, further = work.operations / devices, further + _PARAMETER * size
    rows = _candidates(mechanism, most)
    batches = expected_physical_batches(mechanism, rows)
    cost = batches * rows * row + (batches - 1.0) * further
    return at_once if one and at_once * row <= cost.min() + program else int(rows[np.argmin(cost)])


def _likely_to_fit(numbers: float, parameters: int) -> int:
    """Rows whose gradients fit on an accelerator, each number of a loss held with its cotangent.

    Of each parameter, too, where that leaves more than a few rows; else norms hold less.
    """
    if device_memory() is None:
        return 1_024
    rows = memory_budget() // int(8.0 * numbers + 4.0 * parameters + 1.0)
    return max(1, rows if rows >= _MULTIPLE else int(memory_budget() // (16.0 * numbers + 1.0)))


def _candidates(mechanism: Mechanism, most: int) -> np.ndarray:
    """Numbers of rows, ascending, that a physical batch of at most so many could have."""
    exact = mechanism.sampling.largest_size(mechanism.dataset_size) or 0
    even = {-(-exact // count) for count in range(1, exact // _MULTIPLE + 1)}  # without padding
    found = {*range(_MULTIPLE, most, _MULTIPLE), most, *even}
    return np.array(sorted(rows for rows in found if rows <= most))


def expected_physical_batches(mechanism: Mechanism, rows: np.ndarray) -> np.ndarray:
    """The expected number of physical batches of a draw, for each number of rows [n].

    A draw's size is fixed, or binomial by the declared number of records: under Poisson sampling,
    and likewise for a step of an allocation and of groups by a hash. It is the sum of
    P(K > j·rows) over j, and one where nobody is drawn.
    """
    size, records = mechanism.batch_size, mechanism.dataset_size
    if (exact := mechanism.sampling.largest_size(records)) is not None:
        return np.ceil(exact / rows)
    rate = min(1.0, size / records)
    reach = _REACH * (math.sqrt(size * (1.0 - rate)) + 1.0)
    low, high = max(0, math.floor(size - reach)), min(records, math.ceil(size + reach))
    above = special.bdtrc(np.arange(low, high, dtype=np.float64), records, rate)
    nobody = (1.0 - rate) ** records
    certain = -(-low // rows)  # multiples of the rows that lie below every likely size
    return np.array(
        [n + above[n * r - low :: r].sum() + nobody for n, r in zip(certain, rows, strict=True)]
    )


def operations_of(traced: Any, varies: Sequence[bool] | None = None) -> float:
    """Multiplications of a traced loss of one example, and a number for each other result.

    Args:
        traced: a (closed) jaxpr. Bodies of ``scan`` count as often as they run, those of ``while``
            once, and all branches of ``cond``, which ``vmap`` runs.
        varies: True of each argument that is the example's; what is computed from the others alone
            is computed once for all rows, and does not count. None: all.
    """
    total = 0.0
    for eqn, results, inner in _operations(traced, varies):
        if inner:
            found = sum(operations_of(*each) for each in inner)
            total += eqn.params.get("length", 1) * found
            continue
        # Each result takes as many multiplications as there are numbers along what is contracted.
        each, numbers = 1.0, eqn.params.get("dimension_numbers")
        if eqn.primitive.name == "dot_general":
            left, ((axes, _), _) = eqn.invars[0].aval.shape, numbers
            each = math.prod(left[axis] for axis in axes)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            each = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
        total += each * results
    return total


def numbers_of(traced: Any, varies: Sequence[bool] | None = None) -> tuple[float, float]:
    """The results of a traced loss that its gradient keeps, and those that it makes again at once.

    Args:
        traced: a (closed) jaxpr. What is checkpointed is kept at its end, and made again part by
            part; all iterations of a loop are kept.
        varies: as of ``operations_of``.
    """
    kept = again = 0.0
    for eqn, results, inner in _operations(traced, varies):
        inside = [numbers_of(*each) for each in inner]
        if not inside or eqn.primitive.name in REMAT:
            kept += results
            again = max([again, *map(sum, inside)])
        else:
            kept += eqn.params.get("length", 1) * sum(each for each, _ in inside)
            again = max([again, *(each for _, each in inside)])
    return kept, again


def started_of(traced: Any, varies: Sequence[bool] | None = None) -> float:
    """The number of operations of a traced loss, each as often as it runs; as ``operations_of``."""
    total = 0.0
    for eqn, _, inner in _operations(traced, varies):
        each = sum(started_of(*body) for body in inner) if inner else 1.0
        total += eqn.params.get("length", 1) * each
    return total


def _operations(
    traced: Any, varies: Sequence[bool] | None
) -> Iterator[tuple[Any, int, list[tuple[Any, list[bool] | None]]]]:
    """The operations that vary with the example, from first to last.

    Yields:
        The operation, how many numbers its varying results have, and its bodies, each with what
        varies of its own arguments: None, for all, where they are not the operation's.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    flags = [True] * len(jaxpr.invars) if varies is None else varies
    varying = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for eqn in jaxpr.eqns:
        given = [isinstance(var, core.Var) and var in varying for var in eqn.invars]
        if not any(given):
            continue
        name, outs = eqn.primitive.name, eqn.outvars
        if name == "optimization_barrier":  # each of its results is one operand
            outs = [out for out, flag in zip(outs, given, strict=True) if flag]
        elif name == SCAN:  # what is carried may vary from the second iteration on
            carried = carried_by(eqn)
            given[carried] = [True] * len(given[carried])
        elif name == "cond":
            given = given[1:]
        varying.update(outs)
        results = sum(math.prod(getattr(var.aval, "shape", ())) for var in outs)
        bodies = inner_jaxprs(eqn)
        own = (len(getattr(body, "jaxpr", body).invars) == len(given) for body in bodies)
        yield (
            eqn,
            results,
            [(body, given if alike else None) for body, alike in zip(bodies, own, strict=True)],
        )


def _is_small(rows: int, source: Source) -> bool:
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(source.example))
    return rows * size <= _SMALL


def memory_budget() -> int:
    """The bytes of the device's memory that a step may use; the same whenever it is asked.

    Raises:
        ValueError: the device does not say how much it has.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        if hasattr(os, "sysconf"):
            return int(_SHARE_OF_CPU * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    elif found := device_memory():
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
    devices, held, limit = 1, bytes_of(state), memory_budget()
    if place is not None:
        devices = place.devices
        if jax.default_backend() == "cpu":  # whose devices share its memory
            limit //= place.mesh.size
        at = place.shardings_like(step.grad_fn.trained(params), state)
        held = bytes_of(jax.tree.map(_part, state, at))

    def cost(rows: int) -> int:
        one = bytes_of_physical_batch(
            step.grad_fn, params, source.example, devices * rows, records, context
        )
        return one + held

    most = rows_for_most_draws(mechanism)
    return devices * largest_rows(cost, -(-most // devices), limit)


def bytes_of_physical_batch(
    grad_fn: ClippedGrad,
    params: PyTree,
    example: PyTree,
    rows: int,
    records: int | None,
    context: dict[str, PyTree],
) -> int:
    """The bytes of a device that one physical batch of a draw needs, and the sum of those before.

    Args:
        grad_fn: the clipped gradient.
        params: pytree of arrays, or of their shapes.
        example: shapes of one example.
        rows: of the physical batch.
        records: on the device, from which the program gathers; None where rows are handed to it.
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
    sums = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), grad_fn.trained(params)
    )
    if (place := grad_fn.placement) is not None:
        cut = NamedSharding(place.mesh, P(place.records)) if records else place.row_sharding
        data = jax.tree.map(lambda x: _at(x, cut), data)
        sums = jax.tree.map(_part, sums, place.shardings_like(grad_fn.trained(params), sums))
    more = (rng, context.get("scale"), context.get("bound"), 1.0)
    lowered = sum_physical_batch.lower(
        grad_fn, records is None, False, params, data, indices, mask, *more
    )
    found: Any = lowered.compile().memory_analysis()
    size = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    # The total, and what rounding took from it.
    return int(size - found.alias_size_in_bytes) + 2 * bytes_of(sums)


def bytes_of(tree: PyTree) -> int:
    """The memory of a pytree of arrays, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _at(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _part(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The part of an array that one device holds."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(shape.shape), shape.dtype)


def largest_rows(cost: Callable[[int], int], most: int, limit: int) -> int:
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
