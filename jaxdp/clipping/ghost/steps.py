"""Linear operations on a parameter, and what they do to the factors of its gradient.

Where the gradient of u is ``sum_t A_t B_t'`` and u depends linearly on v, that of v is such a sum,
too, if the operation concerns one side of u alone: for ``u = v @ M`` it is ``sum_t A_t (M B_t)'``.
So every step back from u to v changes one of the two factors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.rounding import exact

# An axis of a parameter by its number, a part of a split one, or another axis of a factor.
Name = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A linear operation that makes u of v, by its axes.

    Attributes:
        node: the operation.
        shape: of v.
        kept: for axes of u that are axes of v, which.
        new: the other axes of u.
        old: the other axes of v.
        operand: the operand whose value the operation takes; None for none.
        sliced: the axis of the value that a ``scan`` slices as it does the parameter, if any.
    """

    node: Node
    shape: tuple[int, ...]
    kept: Mapping[int, int]
    new: tuple[int, ...]
    old: tuple[int, ...]
    operand: int | None
    sliced: int | None = dataclasses.field(default=None, kw_only=True)

    def back(self, factor: jax.Array, names: Sequence[Name], value: Any) -> jax.Array:
        """A factor of the gradient of u, as one of v.

        Args:
            factor: its axes are ``names``; float32 or bfloat16.
            names: axes of u by number, parts of them, and others; all of ``new``.
            value: of the operand; a float32 array or, of a slice, where it begins.

        Returns:
            Its axes are ``self.renamed(names)``; in float32, where it is a product.
        """
        raise NotImplementedError

    def needed(self) -> set[int]:
        """The kept axes of u that the value runs over as well."""
        return set()

    def renamed(self, names: Sequence[Name]) -> list[Name]:
        """The names of axes of u as those of v: old ones where the new ones stood, or last."""
        found: list[Name] = []
        for name in names:
            if name in self.new:
                found += [] if set(self.old) & set(found) else self.old
            elif isinstance(name, tuple):
                split, (axis,), *which = name
                found.append((split, (self.kept[axis],), *which))
            else:
                found.append(self.kept.get(name, name))
        return found + [axis for axis in self.old if axis not in found]

    def of_slice(self) -> "Step | None":
        """The step of the slices along the first axes of u and v; None if they do not match."""
        if self.kept.get(0) != 0:
            return None
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            kept={at - 1: axis - 1 for at, axis in self.kept.items() if at},
            new=tuple(axis - 1 for axis in self.new),
            old=tuple(axis - 1 for axis in self.old),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Product(Step):
    """A multiple of v, or its product with another array.

    Attributes:
        axes: for each axis of the value the axis of u, ("v", axis of v) where it is summed over, or
            None where the value is the same all along.
        sign: what it is multiplied with besides.
        divides: True if v is divided by the value.
    """

    axes: tuple[Any, ...] = ()
    sign: float = 1.0
    divides: bool = False

    def back(self, factor: jax.Array, names: Sequence[Name], value: Any) -> jax.Array:
        """See ``Step``."""
        factor = factor.astype(jnp.float32)
        if self.operand is None:
            return factor * self.sign
        alone = [0 if axis is None else slice(None) for axis in self.axes]
        value = jnp.asarray(value)[tuple(alone)].astype(jnp.float32)
        value = 1.0 / value if self.divides else value
        if value.ndim == 0:
            return factor * value
        summed = self.renamed(names)
        letters = {name: chr(ord("a") + at) for at, name in enumerate(names)}
        gone = {("v", axis): chr(ord("A") + axis) for axis in self.old}
        of_value = [{**letters, **gone}[axis] for axis in self.axes if axis is not None]
        result = [gone.get(("v", name)) if self._is_old(name) else None for name in summed]
        kept = iter(letters[name] for name in names if name not in self.new)
        out = [letter or next(kept) for letter in result]
        return exact(
            f"{''.join(letters.values())},{''.join(of_value)}->{''.join(out)}", factor, value
        )

    def needed(self) -> set[int]:
        """See ``Step``."""
        return {axis for axis in self.axes if isinstance(axis, int) and axis not in self.new}

    def of_slice(self) -> "Step | None":
        """See ``Step``."""
        step = super().of_slice()
        if step is None:
            return None
        axes = list(self.axes)
        at = axes.index(0) if 0 in axes else None
        if at is not None:
            axes.pop(at)
        lowered = [("v", a[1] - 1) if isinstance(a, tuple) else a and a - 1 for a in axes]
        assert isinstance(step, Product)
        return dataclasses.replace(step, axes=tuple(lowered), sliced=at)

    def _is_old(self, name: Name) -> bool:
        return isinstance(name, int) and name in self.old


@dataclasses.dataclass(frozen=True, eq=False)
class Cut(Step):
    """A slice of v along one axis.

    Attributes:
        start: where it begins; of a ``dynamic_slice`` the value says it.
        stride: from entry to entry.
    """

    start: int = 0
    stride: int = 1

    def back(self, factor: jax.Array, names: Sequence[Name], value: Any) -> jax.Array:
        """See ``Step``. What was cut away has no gradient."""
        at, size = list(names).index(self.new[0]), self.shape[self.old[0]]
        zero = jnp.zeros([], factor.dtype)
        if self.operand is not None:
            whole = jnp.full((*factor.shape[:at], size, *factor.shape[at + 1 :]), zero)
            # The slice was clamped, also where it began below zero; the update would wrap around.
            start = jnp.clip(value, 0, size - factor.shape[at])
            return lax.dynamic_update_slice_in_dim(whole, factor, start, at)
        edges = [(0, 0, 0)] * factor.ndim
        last = self.start + self.stride * (factor.shape[at] - 1) + 1
        edges[at] = (self.start, size - last, self.stride - 1)
        return lax.pad(factor, zero, edges)
