"""Sites of what linear operations make of a parameter, as sites of the parameter itself."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost.linear import Term
from jaxdp.clipping.ghost.loops import Looped, Stacked
from jaxdp.clipping.ghost.sites import Around
from jaxdp.clipping.ghost.steps import Name, Step
from jaxdp.clipping.ghost.views import Label, View, merged

Names = tuple[tuple[Name, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Derived(Around):
    """The site of v where the operation takes u, which a step makes of v.

    The factor that the step changes is computed beforehand (``prepared``), since norm and sum must
    see the same numbers; it takes the place of the data or of the cotangent.

    Attributes:
        inner: the site as if u were a parameter.
        step: from v to u.
        target: v, as the step takes it.
        shape: of u.
        names: (g, p, q) of the inner site as axes of u.
        of_inputs: True if the step changes A, False if B.
    """

    step: Step
    target: View
    shape: tuple[int, ...]
    names: Names
    of_inputs: bool

    @property
    def view(self) -> View:
        """The parameter as the step takes it."""
        return self.target

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, positions, p, q)."""
        groups, p, q = (math.prod(map(self._size, names)) for names in self._of_target())
        return groups, self.inner.sizes[1], p, q

    @property
    def key(self) -> tuple[Label, Label, Label]:
        """Labels of (g, p, q)."""
        g, p, q = (merged(self._labels(names)) for names in self._of_target())
        return g, p, q

    def inputs(self, data: jax.Array) -> jax.Array:
        """A, float32 [m, g, t, p], from data [m, *operand], or as ``prepared``."""
        found: jax.Array = data if self.of_inputs else self.inner.inputs(data)
        return found

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B, float32 [m, g, t, q], from cotangents [m, *result], or as ``prepared``."""
        found: jax.Array = self.inner.cotangent(cotangent) if self.of_inputs else cotangent
        return found

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the view."""
        order, sizes = self._order()
        split = gradient.reshape([sizes[at] for at in order])
        moved = jnp.transpose(split, [order.index(at) for at in range(len(order))])
        return moved.reshape(self.step.shape)

    def of_view(self, view: jax.Array) -> jax.Array:
        """The view, arranged as [g, p, q]."""
        order, sizes = self._order()
        groups, _, p, q = self.sizes
        return jnp.transpose(view.reshape(sizes), order).reshape(groups, p, q)

    def steps(self) -> list[Step]:
        """From the parameter to what meets data, the last one first."""
        inner = self.inner.steps() if isinstance(self.inner, Derived) else []
        return [*inner, self.step]

    def changed(self, data: Any, cotangent: Any, values: Sequence[Any]) -> tuple[Any, Any]:
        """The data and the cotangent, factors in place of what steps change."""
        if isinstance(self.inner, Derived):
            data, cotangent = self.inner.changed(data, cotangent, values[:-1])
        value = values[-1]
        if self.of_inputs:
            return self._back(self.inner.inputs(data), self.names[1], value), cotangent
        return data, self._back(self.inner.cotangent(cotangent), self.names[2], value)

    def _back(self, factor: jax.Array, last: Sequence[Name], value: Any) -> jax.Array:
        """A factor [m, g, t, x] after the step."""
        groups, positions, *_ = self.sizes
        names = ["m", *self.names[0], "t", *last]
        known = {"m": factor.shape[0], "t": positions}
        shape = [known[name] if isinstance(name, str) else self._size_of_u(name) for name in names]
        found = self.step.back(factor.reshape(shape), names, value)
        return found.reshape(factor.shape[0], groups, positions, -1)

    def _of_target(self) -> Names:
        groups, p, q = self.names
        whole = self.step.renamed([*groups, "|", *(p if self.of_inputs else q)])
        bar = whole.index("|")
        changed, kept = tuple(whole[bar + 1 :]), q if self.of_inputs else p
        other = tuple(self.step.renamed(kept)[: len(kept)])
        p, q = (changed, other) if self.of_inputs else (other, changed)
        return tuple(whole[:bar]), p, q

    def _size(self, name: Name) -> int:
        return self.step.shape[name] if isinstance(name, int) else int(name[2][name[3]])

    def _size_of_u(self, name: Name) -> int:
        return self.shape[name] if isinstance(name, int) else int(name[2][name[3]])

    def _labels(self, names: Sequence[Name]) -> Label:
        found: list[Any] = []
        for name in names:
            if isinstance(name, int):
                found += self.target.labels[name]
            else:
                split, (axis,), *which = name
                found.append((split, self.target.labels[axis], *which))
        return tuple(found)

    def _order(self) -> tuple[list[int], list[int]]:
        """Places of the parts of v's axes among (g, p, q), and their sizes in v's order."""
        names = list(itertools.chain(*self._of_target()))
        missing = [
            axis for axis in range(len(self.step.shape)) if not any(_in(n, axis) for n in names)
        ]
        names += missing  # axes of one entry
        ordered = sorted(names, key=_place)
        return [ordered.index(name) for name in names], [self._size(name) for name in ordered]


def around(site: Any, what: View | Term) -> Any:
    """The site of the parameter, from that of what was made of it last; None where there is none.

    Args:
        site: takes ``outermost(what)`` for a parameter.
        what: the parameter and what was made of it.
    """
    if site is None or isinstance(what, View):
        return site
    inner, step = what.inner, what.step
    target = inner if isinstance(inner, View) else inner.outer
    names = _names(site, what)
    if names is None:
        return None
    # Of a lookup A is never built.
    possible = [i for i in (1, 2)[site.looks_up :] if _concerns_only(step, names, i)]
    if not possible:
        return None
    here = {name for each in names for name in each}
    hidden = tuple(axis for axis in step.new if axis not in here)  # of one entry
    # Slices of one entry change the cotangents, so that those of the same data can be added.
    side = possible[-1] if hidden else min(possible, key=lambda i: site.sizes[1 + i])
    names = tuple((*hidden, *each) if i == side else each for i, each in enumerate(names))
    found = Derived(site, step, target, what.outer.leaf_shape, names, side == 1)
    return around(found, inner)


def outermost(what: View | Term) -> View:
    """The view that an operation takes for a parameter."""
    return what if isinstance(what, View) else what.outer


def steps_of(site: Any) -> list[Step]:
    """The steps of a site, the last one first."""
    _, inner = _unlooped(site)
    return inner.steps() if isinstance(inner, Derived) else []


def sides(site: Any) -> set[bool]:
    """The factors that steps change: True is A, False is B."""
    _, inner = _unlooped(site)
    return {inner.of_inputs, *sides(inner.inner)} if isinstance(inner, Derived) else set()


def innermost(site: Any) -> Any:
    """The site without the loops and steps around it."""
    _, inner = _unlooped(site)
    return innermost(inner.inner) if isinstance(inner, Derived) else inner


def prepared(
    site: Any, data: jax.Array, cotangent: jax.Array, value_of: Callable[[Step], tuple[Any, int]]
) -> tuple[jax.Array, jax.Array]:
    """The data and the cotangent as the site takes them: factors where steps change them.

    Args:
        site: a site.
        data: [*passes, m, *operand]: what entered the operation, stacked by the loops around it.
        cotangent: [*passes, m, *result].
        value_of: the value that a step takes, and how many loops stacked it.
    """
    loops, inner = _unlooped(site)
    if not isinstance(inner, Derived):
        return data, cotangent
    values, axes = [], []
    for step in inner.steps():
        value, own = value_of(step)
        if step.sliced is not None:
            value = jnp.moveaxis(value, own + step.sliced, own)
        sliced = [step.sliced is not None and isinstance(loop, Stacked) for loop in loops[own:]]
        values.append(value)
        axes.append([0 if flag else None for flag in (*[True] * own, *sliced)])
    changed = inner.changed
    for of_loop in reversed(list(zip(*axes, strict=True))):
        changed = jax.vmap(changed, (0, 0, list(of_loop)))
    a, b = changed(data, cotangent, values)
    which = sides(site)
    return a if True in which else data, b if False in which else cotangent


def _unlooped(site: Any) -> tuple[list[Looped], Any]:
    loops = []
    while isinstance(site, Looped):
        loops.append(site)
        site = site.inner
    return loops, site


def _names(site: Any, what: Term) -> Names | None:
    """(g, p, q) of a site as axes of u; None if one is not there as a whole or in its parts."""
    rank = len(what.outer.leaf_shape)
    found = [name for label in site.key for name in label]
    for name in found:
        if not _is_name(name, rank):
            return None
    sizes = what.outer.leaf_shape
    wanted = {axis for axis in range(rank) if sizes[axis] > 1}
    if wanted - {name if isinstance(name, int) else name[1][0] for name in found}:
        return None
    return tuple(tuple(label) for label in site.key)


def _is_name(name: Any, rank: int) -> bool:
    if isinstance(name, int):
        return name < rank
    return name[0] == "split" and len(name[1]) == 1 and isinstance(name[1][0], int)


def _concerns_only(step: Step, names: Names, side: int) -> bool:
    """True if the step changes one factor only: A for side 1, B for side 2."""
    other = names[3 - side]
    elsewhere = {name if isinstance(name, int) else name[1][0] for name in other}
    broken = {name[1][0] for each in names for name in each if not isinstance(name, int)}
    groups = set(names[0])
    wanted = {*step.new, *step.needed()}
    return not wanted & (elsewhere | broken) and not groups & set(step.new)


def _in(name: Name, axis: int) -> bool:
    return bool(name == axis if isinstance(name, int) else name[1][0] == axis)


def _place(name: Name) -> tuple[int, int]:
    return (name, 0) if isinstance(name, int) else (name[1][0], name[3])
