"""Clipping as an optax transformation, for per-example gradients that the user computed."""

from typing import Any

import optax

from jaxdp.clipping import _batch, reduce
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
        ValueError: the leaves have no common leading axis, or the mask has another shape or dtype.
    """

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        mask: Any = None,
        **extra: Any,
    ) -> tuple[Summed, optax.EmptyState]:
        del params, extra
        keep = _batch.checked_mask(mask, _batch.rows("updates", updates))
        total, _, _ = reduce.clipped_sum(rule, updates, keep)
        return Summed(total, rule.l2), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
