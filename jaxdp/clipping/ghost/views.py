"""Parameters seen through reshapes, transposes, casts, slices and multiplications by one number.

None of these adds entries up, so the squared norm of the parameter's gradient is that of the view's
(times the number's square), and of slices that share no entry the sum of theirs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost.program import Node

# A label names the axes of the leaf that an axis of the view runs over, so that two uses of one
# parameter can be compared.
Label = tuple[Any, ...]


class Sliced(NamedTuple):
    """An axis of which a slice was taken; ``whole`` is its label, ``kept`` says which entries."""

    whole: Label
    kept: range


class Multiple(NamedTuple):
    """An operation that multiplies all entries by one number.

    Attributes:
        node: ``mul``, ``div`` or ``neg``.
        number: the operand that holds the number; None for -1.
    """

    node: Node
    number: int | None

    def factor(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The number, from the operation's operands."""
        if self.number is None:
            return jnp.float32(-1.0)
        number = jnp.ravel(jax.lax.stop_gradient(operands[self.number]))[0].astype(jnp.float32)
        return 1.0 / number if self.node.name == "div" else number


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A parameter, or a slice of it, arranged otherwise, perhaps times a number.

    Attributes:
        leaf: number of the parameter's leaf.
        leaf_shape: shape of the leaf.
        shape: shape of the view.
        labels: for each axis of the view, the leaf's axes that it runs over.
        chain: what rearranges and slices it, first to last.
        stack: for a slice that a ``scan`` takes in every pass, what is sliced along its first axis.
        slices: the slices that were taken; views with equal ones show the same entries.
        multiples: the multiplications. ``of_leaf`` and ``to_leaf`` leave them out: the run
            multiplies the cotangents.
    """

    leaf: int
    leaf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    labels: tuple[Label, ...]
    chain: tuple[Callable[[jax.Array], jax.Array], ...] = ()
    stack: "View | None" = None
    slices: frozenset[Sliced] = frozenset()
    multiples: tuple[Multiple, ...] = ()

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
        for operation in self.chain:
            value = operation(value)
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


def through(node: Node, view: View | Joined) -> list[View | Joined] | None:
    """The results of an operation on a parameter alone; None if it is not followed."""
    shape, params = node.out_shape(), node.eqn.params
    if not jnp.issubdtype(node.out_dtype(), jnp.floating):
        return None
    if node.name in ("convert_element_type", "copy", "copy_p"):
        return [view]
    if isinstance(view, Joined):
        return None
    if node.name == "transpose":
        order = params["permutation"]
        return [
            _then(view, functools.partial(jnp.transpose, axes=order), shape, _turned(view, order))
        ]
    if node.name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        # The size tells a broadcast that repeats values, whose gradient would add up.
        if len(node.ins) != 1 or math.prod(shape) != math.prod(view.shape) or 0 in shape:
            return None
        # A reshape may read its axes in another order, such as that of a kernel under ``vmap``.
        order = params.get("dimensions") if node.name == "reshape" else None
        order = range(len(view.shape)) if order is None else order
        labels = _regrouped([view.shape[axis] for axis in order], _turned(view, order), shape)
        reshape = functools.partial(jax.lax.reshape, new_sizes=shape, dimensions=tuple(order))
        return [_then(view, reshape, shape, labels)]
    whole = [range(size) for size in view.shape]
    if node.name == "slice":
        strides = params["strides"] or [1] * len(whole)
        every = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        kept = [[range(*each) for each in every]]
    elif node.name == "split":
        axis, sizes = params["axis"], params["sizes"]
        ends = itertools.accumulate(sizes)
        kept = [
            [*whole[:axis], range(end - size, end), *whole[axis + 1 :]]
            for size, end in zip(sizes, ends, strict=True)
        ]
    else:
        return None
    return [_sliced(view, ranges) for ranges in kept]


def multiplied(node: Node, at: int, view: View) -> View | None:
    """The view times one number, which is the other operand; None if it is no such product."""
    if node.name == "neg":
        number = None
    elif (
        node.name == "mul" or (node.name == "div" and at == 0)
    ) and view.shape == node.out_shape():
        number = 1 - at
    else:
        return None
    return dataclasses.replace(view, multiples=(*view.multiples, Multiple(node, number)))


def of_passes(view: View | Joined) -> View | None:
    """The slice of a view that a ``scan`` takes in every pass; None of what is one already."""
    if isinstance(view, Joined) or view.stack is not None:
        return None
    # A stack of its own: another scan may slice the same view, in every pass of this one.
    own = dataclasses.replace(view)
    return dataclasses.replace(
        view, shape=view.shape[1:], labels=view.labels[1:], chain=(), stack=own
    )


def are_apart(one: frozenset[Sliced], other: frozenset[Sliced]) -> bool:
    """True if slices of one parameter share no entry: of some axis both take others."""
    return any(a.whole == b.whole and set(a.kept).isdisjoint(b.kept) for a in one for b in other)


def _then(
    view: View,
    operation: Callable[[jax.Array], jax.Array],
    shape: Sequence[int],
    labels: Sequence[Label],
) -> View:
    return dataclasses.replace(
        view, shape=tuple(shape), labels=tuple(labels), chain=(*view.chain, operation)
    )


def _turned(view: View, order: Sequence[int]) -> list[Label]:
    return [view.labels[axis] for axis in order]


def _sliced(view: View, ranges: Sequence[range]) -> View:
    """The entries of a view that the ranges name."""
    labels, taken = list(view.labels), set(view.slices)
    for axis, kept in enumerate(ranges):
        if len(kept) != view.shape[axis]:
            part = Sliced(view.labels[axis], kept)
            labels[axis] = (part,)
            taken.add(part)
    cut = functools.partial(
        jax.lax.slice,
        start_indices=[kept.start for kept in ranges],
        limit_indices=[kept.stop for kept in ranges],
        strides=[kept.step for kept in ranges],
    )
    found = _then(view, cut, [len(kept) for kept in ranges], labels)
    return dataclasses.replace(found, slices=frozenset(taken))


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


def _regrouped(
    sizes: Sequence[int], labels: Sequence[Label], shape: tuple[int, ...]
) -> list[Label]:
    """Labels after a reshape in row-major order: axes that merge join their labels."""
    old = [(size, label) for size, label in zip(sizes, labels, strict=True) if size > 1]
    new = [axis for axis, size in enumerate(shape) if size > 1]
    regrouped: list[Label] = [()] * len(shape)
    while new:
        (size, whole), run = old.pop(0), [new.pop(0)]
        # The shortest runs of axes, old and new, over the same entries.
        while (made := math.prod(shape[axis] for axis in run)) != size:
            if made < size:
                run.append(new.pop(0))
            else:
                more, label = old.pop(0)
                size, whole = size * more, whole + label
        parts = tuple(shape[axis] for axis in run)
        for at, axis in enumerate(run):
            regrouped[axis] = (
                merged(whole) if len(run) == 1 else (("split", merged(whole), parts, at),)
            )
    return regrouped
