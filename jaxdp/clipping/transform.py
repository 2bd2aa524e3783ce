"""Clipping as an optax transformation, for per-example gradients that the user computed."""

import difflib
import itertools
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from jaxdp.clipping import options, reduce, rounding
from jaxdp.clipping.ghost.leaves import Arrays
from jaxdp.clipping.rules import Rule, limit_of
from jaxdp.devices.placement import tracked_axes, varying
from jaxdp.types import PyTree, Summed, count_rows

# Records of a draw where nobody says how many there are at most.
_MOST = 2**14


def clip_and_sum(
    rule: Rule, most_records: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation from per-example gradients to their clipped ``Summed``.

    Put it first in a chain and ``jaxdp.privatize`` next. ``mechanism.clip_and_sum()`` is that of a
    mechanism: with its ``most_records`` the noise is what ``mechanism.noise_std`` says.

    Formal guarantee: as ``jaxdp.clipping.ClippedGrad``, provided that row i of the gradients
    depends on record i alone (true of ``jax.vmap(jax.grad(loss), (None, 0))``, false once a layer
    such as batch normalisation couples the rows). jaxdp cannot see how the gradients were made, so
    the ledger names this as an assumption.

    Args:
        rule: the clipping rule.
        most_records: the largest number of records of one draw, as for ``jaxdp.clipped_grad``. None
            takes the mechanism's where ``mechanism.privatize()`` comes next, and up to 16,384
            elsewhere, which ``jaxdp.privatize`` answers with 3.7 % more noise than the clip bound
            asks for.

    The ``update`` takes gradients with leaves [m, ...] (without rows the sum is zero) and, by name,

    - ``mask``: bool [m], such as that of a ``Batch``, or "all" where every row is a record;
    - ``scale`` and ``bound``, optional, as ``ClippedGrad.__call__``: a public diagonal by which the
      gradients are divided before clipping, and a public bound of this step.

    Raises:
        ValueError: ``params`` is missing; the gradients are not [m, ...] for parameters [...], as
            when they were already averaged over the batch; the mask is missing or has another
            shape or dtype; ``scale`` is not shaped like the parameters; ``bound`` is not a number
            in [1e-10, 1e10], or the rule takes none; an extra argument that is nearly one of these.
    """

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        mask: ArrayLike | str | None = None,
        scale: PyTree | None = None,
        bound: float | jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Summed, optax.EmptyState]:
        for name, own in itertools.product(extra, ("mask", "scale", "bound")):
            ratio = difflib.SequenceMatcher(None, name.lower(), own).ratio()
            if ratio > 0.8 or sorted(name) == sorted(own):
                raise ValueError(f"{own} must be given by that name, got {name!r}: it is lost")
        if params is None:
            raise ValueError("params must be passed to update, to check the shapes; got None")
        found, wanted = ([leaf.shape for leaf in jax.tree.leaves(t)] for t in (updates, params))
        if [shape[1:] for shape in found] != wanted or () in found:
            raise ValueError(
                "updates must be per-example gradients with shapes [m, ...] over parameters "
                f"{wanted}, got {found}"
            )
        bound, scale = options.checked_bound(bound), options.checked_scale(scale)
        scales = None if scale is None else options.scale_leaves(scale, params)
        rows = count_rows("updates", updates)
        keep = options.checked_mask(mask, rows)
        _refuse_summed(updates, keep)
        leaves, structure = jax.tree.flatten(updates)
        # Norms and sums must see the same numbers: XLA may compute a value twice.
        grads = [Arrays(leaf) for leaf in rounding.materialized(leaves)]
        limit = limit_of(rule, params, bound)
        clipped = reduce.clipped_sum(rule, grads, structure, keep, scales, bound, limit)
        most = _MOST if most_records is None else most_records
        rounding.check_records(rows, most)
        votes = None if bound is None else clipped.votes
        summed = Summed(clipped.total, limit * (1.0 + rounding.error_of_sum(most)), scale, votes)
        if most_records is None:
            summed = summed.carrying(None, undeclared=(limit, rows))
        return summed, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _refuse_summed(updates: PyTree, keep: jax.Array) -> None:
    """Raises ValueError where ``shard_map`` has summed gradients over devices before they clip."""
    tracked = tracked_axes()
    if not tracked:
        return
    # A mask that is made inside varies over nothing: gradients of some device's rows never do.
    none = {axis for leaf in jax.tree.leaves(updates) if not varying(leaf) for axis in tracked}
    more = (axis for leaf in jax.tree.leaves(updates) for axis in varying(keep) - varying(leaf))
    if summed := {str(axis) for axis in (*none, *more)}:
        raise ValueError(
            "updates must be gradients of this device's rows, got some that shard_map, with "
            f"check_vma=True, has summed over {sorted(summed)} where they were taken: cast the "
            "parameters first, jax.lax.pcast(params, axes, to='varying'), or take "
            "jaxdp.clipped_grad, which sees to it"
        )
