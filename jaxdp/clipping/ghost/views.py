"""Parameters seen through reshapes, transposes and casts: the same numbers, arranged otherwise."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost.program import Node

# A label names the axes of the leaf that an axis of the view runs over, so that two uses of one
# parameter can be compared.
Label = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A parameter after operations that only rearrange it (so gradients keep their norm).

    Attributes:
        leaf: number of the parameter's leaf.
        leaf_shape: shape of the leaf.
        shape: shape of the view.
        labels: for each axis of the view, the leaf's axes that it runs over.
        chain: the operations, first to last; casts are left out.
        stack: for a slice that a ``scan`` takes in every pass, what is sliced along its first axis.
    """

    leaf: int
    leaf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    labels: tuple[Label, ...]
    chain: tuple[Node, ...] = ()
    stack: "View | None" = None

    def to_leaf(self, gradient: jax.Array) -> jax.Array:
        """A float32 gradient of the view (of all slices, stacked), arranged like the leaf."""
        aval = jax.ShapeDtypeStruct(self.leaf_shape, jnp.float32)
        return jax.linear_transpose(self.of_leaf, aval)(gradient)[0]

    def of_leaf(self, leaf: jax.Array) -> jax.Array:
        """A float32 array shaped like the leaf, arranged like the view, or its slices, stacked."""
        if self.stack is not None:
            return jax.vmap(self._chained)(self.stack.of_leaf(leaf))
        return self._chained(leaf)

    def _chained(self, value: jax.Array) -> jax.Array:
        for node in self.chain:
            value = _rearranged(node, value)
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """Parameters one after the other along an axis, such as the kernels of a cell's gates.

    Attributes:
        views: the parameters, or what was made of each.
        axis: where they are joined.
    """

    views: tuple[Any, ...]
    axis: int


def of_parameter(leaf: int, shape: Sequence[int]) -> View:
    """The parameter itself."""
    return View(leaf, tuple(shape), tuple(shape), tuple(((axis,)) for axis in range(len(shape))))


def through(node: Node, view: View | Joined) -> View | Joined | None:
    """The view after one more operation; None if that does more than rearrange it."""
    shape = node.out_shape()
    if node.name in ("convert_element_type", "copy", "copy_p"):
        floating = jnp.issubdtype(node.out_dtype(), jnp.floating)
        return view if floating else None
    if isinstance(view, Joined):
        return None
    if node.name == "transpose":
        labels = tuple(view.labels[axis] for axis in node.eqn.params["permutation"])
    elif node.name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        # The size tells a broadcast that repeats values, whose gradient would add up.
        if len(node.ins) != 1 or math.prod(shape) != math.prod(view.shape) or 0 in shape:
            return None
        labels = _regrouped(_turned(view, _turn(node)), shape)
    else:
        return None
    return dataclasses.replace(view, shape=shape, labels=labels, chain=(*view.chain, node))


def sliced(view: View) -> View | None:
    """The slice of a view that a ``scan`` takes in every pass; None of what is one already."""
    if view.stack is not None:
        return None
    # A stack of its own: another scan may slice the same view, in every pass of this one.
    own = dataclasses.replace(view)
    return View(view.leaf, view.leaf_shape, view.shape[1:], view.labels[1:], stack=own)


def _rearranged(node: Node, value: jax.Array) -> jax.Array:
    if node.name == "transpose":
        return jnp.transpose(value, node.eqn.params["permutation"])
    turn = _turn(node)
    return jnp.reshape(value if turn is None else jnp.transpose(value, turn), node.out_shape())


def _turn(node: Node) -> Sequence[int] | None:
    """The order in which a reshape reads its axes, such as that of a kernel under ``vmap``."""
    return node.eqn.params["dimensions"] if node.name == "reshape" else None


def _turned(view: View, turn: Sequence[int] | None) -> View:
    if turn is None:
        return view
    shape = tuple(view.shape[axis] for axis in turn)
    labels = tuple(view.labels[axis] for axis in turn)
    return dataclasses.replace(view, shape=shape, labels=labels)


def merged(label: Sequence[Any]) -> Label:
    """A label in which all parts of a split axis, one after the other, are that axis again."""
    found: list[Any] = []
    for atom in label:
        found.append(atom)
        while isinstance(found[-1], tuple) and found[-1][0] == "split":
            _, whole, sizes, at = found[-1]
            parts = [("split", whole, sizes, i) for i in range(len(sizes))]
            if at + 1 < len(sizes) or found[-len(sizes) :] != parts:
                break
            found[-len(sizes) :] = whole
    return tuple(found)


def _regrouped(view: View, shape: tuple[int, ...]) -> tuple[Label, ...]:
    """Labels after a reshape in row-major order: axes that merge join their labels."""
    old = [(size, label) for size, label in zip(view.shape, view.labels, strict=True) if size > 1]
    new = [axis for axis, size in enumerate(shape) if size > 1]
    labels: list[Label] = [()] * len(shape)
    while new:
        (size, whole), run = old.pop(0), [new.pop(0)]
        # The shortest runs of axes, old and new, over the same entries.
        while (made := math.prod(shape[axis] for axis in run)) != size:
            if made < size:
                run.append(new.pop(0))
            else:
                more, label = old.pop(0)
                size, whole = size * more, whole + label
        sizes = tuple(shape[axis] for axis in run)
        for at, axis in enumerate(run):
            labels[axis] = (
                merged(whole) if len(run) == 1 else (("split", merged(whole), sizes, at),)
            )
    return tuple(labels)
