"""The cheap form of the check, which a ``Trainer`` makes before its first step."""

from typing import Any

import jax

from jaxdp._passes import operations_of
from jaxdp.checks import loss, records
from jaxdp.clipping import ClippedGrad, captured, coupling
from jaxdp.clipping.ghost.plan import Plan
from jaxdp.sampling import Sampler
from jaxdp.sources import Source
from jaxdp.types import PyTree


def planned(
    grad_fn: Any, params: PyTree, source: Source, sampler: Sampler
) -> tuple[Plan | tuple[()], float]:
    """The plan of the gradients, and the operations of one example's loss.

    Nothing is computed, and the loss is traced once.

    Args:
        grad_fn: the clipped gradients; () and 0 for any but jaxdp's own.
        params: the parameters.
        source: the records; looked at only if they lie in memory and the loss captured an array.
        sampler: of the records.

    Raises:
        ValueError: the loss cannot be used, or captured an array, not declared public, that may
            hold the records, holds some, or is a statistic of them.
    """
    if not isinstance(grad_fn, ClippedGrad):
        return (), 0.0
    rows, operations = sampler.physical_batch_size, 0.0

    def look(traced: Any, public: captured.Declared) -> None:
        nonlocal operations
        operations = operations_of(traced)
        if any(len(part.consts) for part in coupling.parts(traced)):
            _refuse_records(traced, public, source)

    shape = lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype)  # noqa: E731
    with captured.looked_at(look):
        plan = grad_fn.plan(params, jax.tree.map(shape, source.example))
    captured.check_rows(plan, (), records=sampler.num_records)
    return plan, operations


def _refuse_records(traced: Any, public: captured.Declared, source: Source) -> None:
    columns = records.in_memory(source)
    if columns is None:
        return
    found = loss.holds_records(traced, columns, public, scalars=False)
    broken = [finding for finding in found if finding.certain]
    if broken:
        at = f" ({broken[0].where})" if broken[0].where else ""
        raise ValueError(
            f"loss_fn must not capture what was computed from the records, got: {broken[0].what}"
            f"{at}. {broken[0].why.capitalize()}. Use a public constant, or a charged release "
            "(jaxdp.preprocess); if it is public all the same, declare it: constants=array"
        )
