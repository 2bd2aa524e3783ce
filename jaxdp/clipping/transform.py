"""Clipping as an optax transformation, for per-example gradients that the user computed."""

from typing import Any

import jax
import optax

from jaxdp.clipping import _batch, reduce
from jaxdp.clipping.ghost.leaves import Arrays
from jaxdp.clipping.rules import Rule
from jaxdp.types import PyTree, Summed


def clip_and_sum(rule: Rule) -> optax.GradientTransformationExtraArgs:
    """Per-example gradients in, their clipped ``Summed`` out; :func:`jaxdp.privatize` comes next.

    Formal guarantee: as :class:`jaxdp.ClippedGrad`, provided that row i of the gradients depends on
    record i alone (true of ``jax.vmap(jax.grad(loss), (None, 0))``, false once a layer such as
    batch normalisation couples the rows). jaxdp cannot see how the gradients were made, so the
    ledger names this as an assumption.

    The ``update`` takes gradients with leaves [m, ...] and the extra argument ``mask``, bool [m].

    Raises:
        ValueError: ``params`` is missing; the gradients are not [m, ...] for parameters [...], as
            when they were already averaged over the batch; the mask has another shape or dtype.
    """

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        mask: Any = None,
        **extra: Any,
    ) -> tuple[Summed, optax.EmptyState]:
        del extra
        _check_shapes(updates, params)
        keep = _batch.checked_mask(mask, _batch.rows("updates", updates))
        leaves, structure = jax.tree.flatten(updates)
        clipped = reduce.clipped_sum(rule, [Arrays(leaf) for leaf in leaves], structure, keep)
        return Summed(clipped.total, rule.l2(params)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _check_shapes(updates: PyTree, params: PyTree | None) -> None:
    if params is None:
        raise ValueError("params must be passed to update, to check the shapes; got None")
    found = [leaf.shape for leaf in jax.tree.leaves(updates)]
    wanted = [leaf.shape for leaf in jax.tree.leaves(params)]
    if [shape[1:] for shape in found] != wanted or () in found:
        raise ValueError(
            f"updates must be per-example gradients with shapes [m, ...] over parameters {wanted}, "
            f"got {found}"
        )
