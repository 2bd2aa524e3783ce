"""Sites of parameters that are joined before they are used, such as the gates of an LSTM."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxdp.clipping.ghost import sites
from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.ghost.sites import Around
from jaxdp.clipping.ghost.views import Joined, View


@dataclasses.dataclass(frozen=True, eq=False)
class Part(Around):
    """The site of one of several parameters that a product takes joined.

    Where they are joined along an axis of the result, each has its share of the cotangent; where
    along one that is summed over, of the data.

    Attributes:
        inner: the site as if the parameter stood alone.
        of_data: True if the share is of the data.
        axis: of the data, or of the result.
        start: where the share begins.
        size: its length.
    """

    of_data: bool
    axis: int
    start: int
    size: int

    def inputs(self, data: jax.Array) -> jax.Array:
        """A [m, g, t, p], from data [m, *operand]."""
        found: jax.Array = self.inner.inputs(self._share(data) if self.of_data else data)
        return found

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, *result]."""
        share = cotangent if self.of_data else self._share(cotangent)
        found: jax.Array = self.inner.cotangent(share)
        return found

    def _share(self, whole: jax.Array) -> jax.Array:
        return lax.slice_in_dim(whole, self.start, self.start + self.size, axis=self.axis + 1)


def sites_of(
    node: Node, what: View | Joined, at: int, operand_shape: Sequence[int]
) -> list[tuple[View, Any]]:
    """The parameters at operand ``at`` of ``node``, and the site that it is for each, or None.

    Arguments as for ``sites.site``.
    """
    if isinstance(what, View):
        return [(what, sites.site(node, what, at, operand_shape))]
    found: list[tuple[View, Any]] = []
    shares = _shares(node, what, at, operand_shape)
    for view, share in zip(what.views, shares, strict=True):
        site = None
        if share is not None:
            of_data, axis, start, size = share
            shape = list(operand_shape)
            if of_data:
                shape[axis] = size
            if (alone := sites.site(node, view, at, shape)) is not None:
                site = Part(alone, of_data, axis, start, size)
        found.append((view, site))
    return found


def _shares(
    node: Node, what: Joined, at: int, operand_shape: Sequence[int]
) -> list[tuple[bool, int, int, int] | None]:
    """Of every joined parameter its share: of the data or not, axis, start and size."""
    nothing: list[tuple[bool, int, int, int] | None] = [None] * len(what.views)
    if node.name != "dot_general":
        return nothing
    contract, batch = node.eqn.params["dimension_numbers"]
    if what.axis in batch[at]:
        return nothing
    of_data = what.axis in contract[at]
    if of_data:
        axis = contract[1 - at][list(contract[at]).index(what.axis)]
    else:
        taken = (*contract[at], *batch[at])
        rank = len(what.views[0].shape)
        before = [a for a in range(rank) if a not in taken and a < what.axis]
        others = len(operand_shape) - len(contract[1 - at]) - len(batch[1 - at])
        axis = len(batch[at]) + len(before) + (others if at == 1 else 0)
    sizes = [view.shape[what.axis] for view in what.views]
    starts = [0, *itertools.accumulate(sizes)]
    return [(of_data, axis, start, size) for start, size in zip(starts, sizes, strict=False)]
