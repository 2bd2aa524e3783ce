"""Chooses the engine for each parameter's gradient norms, by operations and bytes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.ghost.sites import Site
from jaxdp.clipping.ghost.uses import Used, Uses

# Writing a per-example gradient and reading it twice costs as much as this many multiplications an
# entry, in the processor's cache and out of it; measured on two CPU cores with convolutions of
# 1,000 to 600,000 weights.
_IN_CACHE, _IN_MEMORY = 8.0, 30.0
_CACHE_BYTES = 8 * 2**20
# Where per-example gradients are larger than the factors, the ghost norm may cost this share of
# the parameter's part of an ordinary step before they are held for speed.
_SHARE = 0.1


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
        bytes: of every example, what is held for this parameter until the sum is taken.
        operations: of every example, multiplications beyond those of an ordinary gradient.
    """

    path: str
    engine: str
    reason: str
    assumed: str = ""
    bytes: int = 0
    operations: float = 0.0


class Plan(tuple[LeafPlan, ...]):
    """The rows of a plan; printed, a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("parameter", "engine", "bytes", "operations", "reason")]
        rows += [
            (row.path, row.engine, f"{row.bytes:,}", f"{row.operations:.2g}", row.reason)
            for row in self
        ]
        held = sum(row.bytes for row in self)
        rows.append(("all", "", f"{held:,}", f"{sum(row.operations for row in self):.2g}", ""))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(r, wide, strict=True)) for r in rows]
        return "Of every example:\n" + "\n".join(line.rstrip() for line in lines)


def plan(
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    trained: Sequence[bool],
    uses: Uses,
    batch_size: int,
    engine: str,
) -> tuple[LeafPlan, ...]:
    """The engine of every leaf.

    Args:
        paths: where every leaf stands in the tree.
        shapes: of every leaf.
        trained: for every leaf, True if it is trained.
        uses: the uses of every leaf.
        batch_size: rows m of the physical batch.
        engine: "auto" weighs the costs; "ghost" takes the ghost norm wherever there is one; "vmap"
            never does.
    """
    found = []
    for leaf, (path, shape, flag) in enumerate(zip(paths, shapes, trained, strict=True)):
        why = _whole(leaf, uses, engine)
        entries = math.prod(shape)
        if not flag:
            row = LeafPlan(path, "frozen", "not trained", f"the frozen parameter {path}")
        elif why:
            row = LeafPlan(path, "vmap", why, bytes=4 * entries, operations=float(entries))
        else:
            row = _weighed(path, uses.by_slice(leaf), batch_size, engine)
        found.append(row)
    return tuple(found)


def _whole(leaf: int, uses: Uses, engine: str) -> str:
    """The reason why a leaf's gradients must be taken by automatic differentiation; or ""."""
    if engine == "vmap":
        return "as asked"
    if leaf in uses.refused:
        how, write = uses.refused[leaf]
        return f"used by {how}" + (f"; write {write}" if write else "")
    if leaf not in uses.of_leaf:
        return "not used"
    if not (slices := uses.by_slice(leaf)):
        return "used by slices that overlap"
    for used in slices:
        sites = [site for _, site in used]
        if not all(same_arrangement(sites[0].key, site.key) for site in sites):
            return "used in unlike ways"
        lookups = [site.key for site in sites if site.looks_up]
        if any(key != lookups[0] for key in lookups):
            # Their norms take every lookup for one of rows of the same kind.
            return "looked up by unlike axes"
    return ""


def _weighed(path: str, slices: Sequence[Sequence[Used]], batch_size: int, engine: str) -> LeafPlan:
    ghost = layer = ordinary = 0.0
    factors = gradients = 0
    for used in slices:
        sites = [site for _, site in used]
        groups, _, p, q = sites[0].sizes
        of_ghost, of_layer = _costs(sites, batch_size)
        ghost, layer = ghost + of_ghost, layer + of_layer
        ordinary += 3.0 * groups * sum(site.sizes[1] for site in sites) * p * q
        factors += sum(_held(*use) for use in used)
        gradients += 4 * groups * p * q
    costs = f"{ghost:.2g} against {layer:.2g} operations"
    if engine == "ghost":
        return LeafPlan(path, "ghost", "as asked", "", factors, ghost)
    if ghost <= layer:
        return LeafPlan(path, "ghost", costs, "", factors, ghost)
    if gradients > factors and ghost <= _SHARE * ordinary:
        costs += f", but {factors:,} against {gradients + factors:,} bytes"
        return LeafPlan(path, "ghost", costs, "", factors, ghost)
    return LeafPlan(path, "layer", costs, "", factors + gradients, layer)


def same_arrangement(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """True if gradients of two sites differ at most by exchanging p and q."""
    return other in (one, (one[0], one[2], one[1]))


def _held(node: Node, site: Site) -> int:
    """Bytes of one example's input and cotangent at a site."""
    sizes = math.prod(node.shape_of(site.operand)), math.prod(node.out_shape())
    itemsize: int = node.out_dtype().itemsize
    return math.prod(site.passes) * sum(sizes) * itemsize


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
