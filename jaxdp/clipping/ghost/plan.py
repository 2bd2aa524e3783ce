"""Chooses the engine for each parameter's gradient norms, by a cost model of operations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost.sites import Site
from jaxdp.clipping.ghost.uses import Uses

# Writing a per-example gradient and reading it twice costs as much as this many multiplications an
# entry, in the processor's cache and out of it; measured on two CPU cores with convolutions of
# 1,000 to 600,000 weights.
_IN_CACHE, _IN_MEMORY = 8.0, 30.0
_CACHE_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The engine that clips one parameter's gradients, and the reason.

    Attributes:
        path: where it stands in the tree, as ``jax.tree_util.keystr`` writes it.
        engine: "vmap": per-example gradients by automatic differentiation; "layer": per-example
            gradients of this layer alone, as products of its inputs and cotangents; "ghost": norms
            without per-example gradients; "frozen": not trained, nothing is computed; "constant":
            no parameter but an array that the loss captured.
        reason: why, in a few words.
        assumed: what is assumed to be public, in words for a ledger; "" if nothing is.
    """

    path: str
    engine: str
    reason: str
    assumed: str = ""


def plan(
    paths: Sequence[str], trained: Sequence[bool], uses: Uses, batch_size: int, engine: str
) -> tuple[LeafPlan, ...]:
    """The engine of every leaf.

    Args:
        paths: where every leaf stands in the tree.
        trained: for every leaf, True if it is trained.
        uses: the uses of every leaf.
        batch_size: rows m of the physical batch.
        engine: "auto" weighs the costs; "ghost" takes the ghost norm wherever there is one; "vmap"
            never does.
    """
    return tuple(
        LeafPlan(path, *_engine(leaf, uses, batch_size, engine)) if flag else _frozen(path)
        for leaf, (path, flag) in enumerate(zip(paths, trained, strict=True))
    )


def _frozen(path: str) -> LeafPlan:
    return LeafPlan(path, "frozen", "not trained", f"the frozen parameter {path}")


def _engine(leaf: int, uses: Uses, batch_size: int, engine: str) -> tuple[str, str]:
    if engine == "vmap":
        return "vmap", "as asked"
    if leaf in uses.refused:
        return "vmap", f"used by {uses.refused[leaf]}"
    found = [site for _, site in uses.of_leaf.get(leaf, [])]
    if not found:
        return "vmap", "not used"
    if not all(same_arrangement(found[0].key, site.key) for site in found):
        return "vmap", "used in unlike ways"
    lookups = [site.key for site in found if site.looks_up]
    if any(key != lookups[0] for key in lookups):
        # Their norms take every lookup for one of rows of the same kind.
        return "vmap", "looked up by unlike axes"
    if engine == "ghost":
        return "ghost", "as asked"
    ghost, layer = _costs(found, batch_size)
    costs = f"{ghost:.2g} against {layer:.2g} operations an example"
    return ("ghost", costs) if ghost <= layer else ("layer", costs)


def same_arrangement(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """True if gradients of two sites differ at most by exchanging p and q."""
    return other in (one, (one[0], one[2], one[1]))


def _costs(found: Sequence[Site], batch_size: int) -> tuple[float, float]:
    """Operations an example beyond those of an ordinary gradient: ghost norm, per-layer gradient.

    The ghost norm costs T²(p + q) an example (Bu et al. 2022, arXiv:2205.10683, table 2), of which
    a lookup needs T²q only, since its inputs are compared and not multiplied; the gradient of the
    layer costs its size.
    """
    groups, _, p, q = found[0].sizes
    dense, looked_up = (
        sum(site.sizes[1] for site in found if site.looks_up is flag) for flag in (False, True)
    )
    ghost = float(groups) * (p + q)
    if dense + looked_up > 1:
        of_lookups = looked_up * (looked_up + 2 * dense) * q
        ghost = float(groups) * (dense * dense * (p + q) + of_lookups)
    entries = float(groups) * p * q
    cached = 4 * entries * batch_size <= _CACHE_BYTES
    return ghost, entries * (_IN_CACHE if cached else _IN_MEMORY)
