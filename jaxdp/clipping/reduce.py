"""From per-example gradients to their clipped sum: the arithmetic that engines share."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.leaves import Factors, LeafGradients, Slices
from jaxdp.clipping.rules import PROVEN, CoordinateBox, Rule, bounded_factors
from jaxdp.types import PyTree


class Clipped(NamedTuple):
    """A clipped sum, with the norms before clipping.

    Attributes:
        total: the sum, float32 and shaped like the parameters; None at frozen leaves.
        norms: float32 [m]; norms before clipping, after the division by ``scale`` (for a coordinate
            box: before it).
        clipped: bool [m]; True where clipping shortened the gradient (for a coordinate box: where
            the norm is long enough for a coordinate to be out of it).
        votes: float32 scalar; a sum of ½ for every record whose norm is within the bound and -½ for
            every other. One record adds at most ½ in absolute value.
    """

    total: PyTree
    norms: jax.Array
    clipped: jax.Array
    votes: jax.Array


def clipped_sum(
    rule: Rule,
    grads: Sequence[LeafGradients | None],
    structure: jax.tree_util.PyTreeDef,
    mask: jax.Array,
    scale: Sequence[jax.Array | None] | None = None,
    bound: jax.Array | None = None,
    limit: float | jax.Array | None = None,
) -> Clipped:
    """Sums the rule's clipped gradients over the examples that the mask [m] lets through.

    An example whose gradient has a non-finite entry, or a norm beyond float32, contributes zero:
    a decision about that record alone, so the sensitivity is untouched.

    Args:
        rule: the clipping rule.
        grads: every parameter's per-example gradients; None where it is frozen.
        structure: the parameters' tree.
        mask: bool [m].
        scale: for every parameter, the divisor of its gradients before they are clipped.
        bound: takes the place of the rule's own.
        limit: the most that a record may add by a rule that is not jaxdp's own: the one number
            that the sum's ``l2`` is made of.

    Returns:
        The sum, with norms [m].

    Raises:
        ValueError: the rule takes no bound at run time.
    """
    scales = [None] * len(grads) if scale is None else scale
    boxes = type(rule) is CoordinateBox
    if boxes and bound is not None:
        raise ValueError("bound must be None for coordinate_box: give it a scale instead")

    # Norms [m]; squared norms, rounded up; bool [m], the rows that take part.
    divisors: Sequence[jax.Array | None] = [None] * len(grads) if boxes else scales
    if not boxes:
        grads = [
            leaf.for_scale() if isinstance(leaf, Factors | Slices) and s is not None else leaf
            for leaf, s in zip(grads, scales, strict=True)
        ]
    pairs = [
        None if leaf is None else leaf.squares(s) for leaf, s in zip(grads, divisors, strict=True)
    ]
    norms = jnp.sqrt(rounding.sum_arrays([pair[0] for pair in pairs if pair is not None]))
    largest = rounding.sum_arrays([pair[1] for pair in pairs if pair is not None])
    finite = jnp.isfinite(norms) & jnp.isfinite(largest)
    keep = mask & finite

    if boxes:
        assert isinstance(rule, CoordinateBox)
        total = [
            None if leaf is None else leaf.boxed_sum(rule.bound, keep, s)
            for leaf, s in zip(grads, scales, strict=True)
        ]
        long = keep & (norms > rule.bound)
        return Clipped(
            jax.tree.unflatten(structure, total), norms, long, jnp.zeros([], jnp.float32)
        )

    # The rule sees squared norms alone, and answers with a factor for every leaf and row.
    squares = [None if pair is None else jnp.where(keep, pair[1], 0.0) for pair in pairs]
    tree = jax.tree.unflatten(structure, squares)
    if type(rule) in PROVEN:
        tree = rule.factors(tree, bound)
    else:
        assert limit is not None
        tree = bounded_factors(rule, tree, limit, bound)
    factors = structure.flatten_up_to(tree)
    shortened = jnp.stack([f < 1.0 for f in factors if f is not None]).any(axis=0)
    # Written, so that both halves of a weighted bfloat16 factor are made with one number.
    weights = rounding.materialized(
        [None if f is None else jnp.where(keep, f, 0.0) for f in factors]
    )
    total = []
    for leaf, weight, s in zip(grads, weights, scales, strict=True):
        if leaf is None or weight is None:
            total.append(None)
            continue
        sum_of_leaf = leaf.weighted_sum(weight, keep, finite)
        total.append(sum_of_leaf if s is None else sum_of_leaf / s)
    votes = jnp.where(keep & ~shortened, 0.5, -0.5)
    votes = jnp.sum(jnp.where(mask, votes, 0.0)).astype(jnp.float32)
    return Clipped(jax.tree.unflatten(structure, total), norms, shortened & keep, votes)
