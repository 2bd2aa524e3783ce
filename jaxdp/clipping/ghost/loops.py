"""Sites inside a ``scan``: a weight of all passes, or a slice of a stack for each of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdp.clipping.ghost.sites import Around
from jaxdp.clipping.ghost.views import Label, View


@dataclasses.dataclass(frozen=True, eq=False)
class Looped(Around):
    """A site of every pass of a ``scan``, as one; data and cotangents are [m, passes, ...].

    A weight that all passes share meets ``passes`` times as many positions. Where every pass has a
    slice of its own, passes are groups.

    Attributes:
        inner: the site of one pass.
        passes: their number.
    """

    passes: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, positions, p, q)."""
        groups, positions, p, q = self.inner.sizes
        return groups, positions * self.passes, p, q

    def inputs(self, data: jax.Array) -> jax.Array:
        """A [m, g, t, p], from data [m, passes, *operand]."""
        return self._joined(jax.vmap(self.inner.inputs, 1, 1)(data))

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, passes, *result]."""
        return self._joined(jax.vmap(self.inner.cotangent, 1, 1)(cotangent))

    def _joined(self, each: jax.Array) -> jax.Array:
        """[m, g, t, x] from [m, passes, g, t, x]."""
        rows, _, groups, _, size = each.shape
        return each.swapaxes(1, 2).reshape(rows, groups, self.sizes[1], size)


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked(Looped):
    """A site whose every pass has a slice of its own: groups of one site; views are stacked."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, positions, p, q)."""
        groups, positions, p, q = self.inner.sizes
        return self.passes * groups, positions, p, q

    @property
    def key(self) -> tuple[Label, Label, Label]:
        """Labels of (g, p, q)."""
        groups, p, q = self.inner.key
        stack = self.view.stack
        assert stack is not None
        return ("stack", *stack.labels[0], *groups), p, q

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the stacked views."""
        split = gradient.reshape(self.passes, -1, *gradient.shape[1:])
        return jax.vmap(self.inner.to_view)(split)

    def of_view(self, view: jax.Array) -> jax.Array:
        """The stacked views, arranged as [g, p, q]."""
        each = jax.vmap(self.inner.of_view)(view)
        return each.reshape(-1, *each.shape[2:])

    def _joined(self, each: jax.Array) -> jax.Array:
        return each.reshape(each.shape[0], -1, *each.shape[3:])


def looped(site: Any, passes: int, stacks: Sequence[View | None]) -> Looped | None:
    """The site of all passes together; None where there is no pass, or each has a table of its own.

    Args:
        site: of one pass.
        passes: their number.
        stacks: the parameters that are sliced pass by pass.
    """
    mine = any(site.view.stack is stack for stack in stacks)
    if passes == 0 or (mine and site.looks_up):
        return None
    return (Stacked if mine else Looped)(site, passes)


def lengths(site: Any) -> tuple[int, ...]:
    """Numbers of passes of the loops around a site, the outermost first."""
    return (site.passes, *lengths(site.inner)) if isinstance(site, Looped) else ()
