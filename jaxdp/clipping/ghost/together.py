"""Slices of one parameter that meet the same data, such as the parts of a fused projection.

Their inputs A are the same, so they are one site whose cotangents are added: with as many positions
as one of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.derived import innermost, prepared, sides
from jaxdp.clipping.ghost.loops import lengths
from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.ghost.sites import Around, Dense
from jaxdp.clipping.ghost.steps import Step


@dataclasses.dataclass(frozen=True, eq=False)
class Together(Around):
    """Sites of one parameter with the same inputs; ``inner`` is one of them.

    Attributes:
        parts: the operations and their sites.
    """

    parts: tuple[tuple[Node, Any], ...]


def together(used: Sequence[tuple[Node, Any]]) -> list[tuple[Node, Any]]:
    """The uses of one parameter, those with the same inputs as one."""
    groups: dict[Any, list[tuple[Node, Any]]] = {}
    for node, site in used:
        groups.setdefault(_shared(node, site), []).append((node, site))
    return [
        group[0] if len(group) == 1 else (group[0][0], Together(group[0][1], tuple(group)))
        for group in groups.values()
    ]


def parts_of(node: Node, site: Any) -> tuple[tuple[Node, Any], ...]:
    """The operations that a use stands for, and their sites."""
    return site.parts if isinstance(site, Together) else ((node, site),)


def changed(
    site: Any,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    value_of: Callable[[Step], tuple[Any, int]],
) -> tuple[Any, jax.Array, jax.Array]:
    """A site, and the data and the cotangent that it takes: factors where steps change them.

    Args:
        site: a site, or several together.
        pairs: data and cotangent of each, as the loss stacks them.
        value_of: the value that a step takes, and how many loops stacked it.
    """
    each = site.parts if isinstance(site, Together) else ((None, site),)
    found = [prepared(one, *pair, value_of) for (_, one), pair in zip(each, pairs, strict=True)]
    one = each[0][1]
    data, cotangent = found[0][0], rounding.total([cotangent for _, cotangent in found])
    # Norm and sum must see the same numbers.
    if True in sides(one):
        data = rounding.written(data)
    if False in sides(one):
        cotangent = rounding.written(cotangent)
    return one, data, cotangent


def _shared(node: Node, site: Any) -> Any:
    """All that sites must have in common to be added."""
    base = innermost(site)
    if sides(site) != {False} or not isinstance(base, Dense):
        return node, id(site)
    ins = node.ins[site.operand]
    return ins, base.data_axes, base.sizes[:3], site.sizes, site.key, lengths(site)
