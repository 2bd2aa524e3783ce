"""The rows of a physical batch that make the expected work of a step least.

Padding is computed like records, and a draw larger than a physical batch takes a further pass. How
large a draw is follows a public law; what a row costs beside a pass is estimated from the traced
loss of one example and the parameters' sizes. So no record has a part in the choice.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.extend import core
from scipy import special

from jaxdp.clipping.ghost.program import inner_jaxprs
from jaxdp.mechanism import Mechanism, default_physical_batch_size
from jaxdp.sampling import Source
from jaxdp.sampling.text import BucketedText
from jaxdp.types import PyTree

# Numbers of one physical batch up to which a draw is one pass: larger ones run faster in passes.
_ONE_PASS = 2**19
# What a pass costs besides its rows, in multiplications of an ordinary forward pass, of which a row
# took 0.02 to 0.13 ns each with its gradient: 0.5 ms, and for every parameter what writing its sum
# and adding it up took in a network of dense layers (1.4 ns). Measured on two CPU cores with
# networks of 26,010 to 795,010 parameters. The number for accelerators is an estimate: what a small
# pass leaves idle there was not measured.
_PASS, _PASS_OF_ACCELERATOR, _PARAMETER = 2.0**22, 2.0**35, 64.0
# A draw's size is looked at within so many standard deviations, and as many records: all but 1e-13.
_REACH = 12.0
# Candidates are multiples of this many rows.
_MULTIPLE = 8


def rows_of_a_draw(mechanism: Mechanism) -> int:
    """Rows that hold nearly every draw: all of them where draws have one size, or are truncated."""
    if (exact := mechanism.sampling.largest_size(mechanism.dataset_size)) is not None:
        return exact
    return _likely(mechanism.batch_size)


def rows_of_any_draw(mechanism: Mechanism) -> int:
    """As ``rows_of_a_draw``, however many records there are of the declared number.

    Where a draw's size is random there may be twice as many as declared.
    """
    if (exact := mechanism.sampling.largest_size(mechanism.dataset_size)) is not None:
        return exact
    return min(_likely(2 * mechanism.batch_size), 2 * mechanism.dataset_size)


def _likely(size: int) -> int:
    """Rows that hold nearly every draw of so many expected records."""
    return -(-(size + 6 * math.isqrt(size) + 6) // 8) * 8


def rows_of_a_pass(mechanism: Mechanism, source: Source) -> int:
    """The physical batch size where the network is not known: nearly every whole draw.

    Where that is fast and fits in memory; truncated draws are one pass always.
    """
    whole = rows_of_a_draw(mechanism)
    if hasattr(mechanism.sampling, "cap"):
        return whole
    usual = default_physical_batch_size(mechanism.batch_size)
    if isinstance(source, BucketedText):
        # Each length has passes of its own, the last of which is half empty.
        return min(usual, max(8, mechanism.batch_size // 8))
    return whole if _is_small(whole, source) else min(usual, whole)


def rows_of_least_work(
    mechanism: Mechanism, source: Source, operations: float, params: PyTree, devices: int = 1
) -> int:
    """The physical batch size whose expected work over the law of a draw's size is least.

    A draw that is one pass for certain, however many records there are of the declared number, is
    one compiled call, and needs no sum over passes.

    Args:
        mechanism: with the sampling rule.
        source: whose records' shapes count.
        operations: of one example, from ``operations_of``.
        params: the parameters.
        devices: that share the rows.
    """
    whole = rows_of_a_pass(mechanism, source)
    if hasattr(mechanism.sampling, "cap") or isinstance(source, BucketedText):
        return whole
    at_once, usual = rows_of_any_draw(mechanism), default_physical_batch_size(mechanism.batch_size)
    one = at_once <= usual or _is_small(at_once, source)
    row = operations / devices
    each = _PASS if jax.default_backend() == "cpu" else _PASS_OF_ACCELERATOR
    each += _PARAMETER * sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
    if one and at_once * row <= each:
        return at_once
    rows = _candidates(mechanism, min(whole, 2 * usual))
    work = expected_passes(mechanism, rows) * (rows * row + each)
    return at_once if one and at_once * row <= work.min() else int(rows[np.argmin(work)])


def _candidates(mechanism: Mechanism, most: int) -> np.ndarray:
    """Numbers of rows, ascending, that a physical batch of at most so many could have."""
    exact = mechanism.sampling.largest_size(mechanism.dataset_size) or 0
    even = {-(-exact // count) for count in range(1, exact // _MULTIPLE + 1)}  # without padding
    found = {*range(_MULTIPLE, most, _MULTIPLE), most, *even}
    return np.array(sorted(rows for rows in found if rows <= most))


def expected_passes(mechanism: Mechanism, rows: np.ndarray) -> np.ndarray:
    """The expected number of physical batches of a draw, for each number of rows [n].

    A draw's size is fixed, or binomial by the declared number of records: under Poisson sampling,
    and likewise for a step of an allocation and of groups by a hash. It is the sum of
    P(K > j·rows) over j, and one pass where nobody is drawn.
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


def operations_of(traced: Any) -> float:
    """Multiplications of a traced loss of one example, and a number for each other result.

    Args:
        traced: a (closed) jaxpr. Bodies of ``scan`` count as often as they run, those of ``while``
            once, and all branches of ``cond``, which ``vmap`` runs.
    """
    return sum(map(_operations, getattr(traced, "jaxpr", traced).eqns))


def _operations(eqn: core.JaxprEqn) -> float:
    if inner := list(inner_jaxprs(eqn)):
        return float(eqn.params.get("length", 1) * sum(map(operations_of, inner)))
    results = sum(math.prod(_shape(var)) for var in eqn.outvars)
    numbers: Any = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "dot_general":
        (of_left, _), _ = numbers
        return float(results * math.prod(_shape(eqn.invars[0])[axis] for axis in of_left))
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        return float(results * math.prod(kernel) / kernel[numbers.rhs_spec[0]])
    return float(results)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _is_small(rows: int, source: Source) -> bool:
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(source.example))
    return rows * size <= _ONE_PASS
