"""Sites, where a parameter meets an example: weight gradients that are sums of outer products.

At a site the gradient of one example is ``G[g, p, q] = sum_t A[g, t, p] B[g, t, q]``: A from the
operand that is not the parameter, B from the loss's cotangent at the result. p and q run over the
weight's axes, g over groups, t over positions (pixels, tokens). (Goodfellow 2015, arXiv:1510.01799,
for dense layers; Rochette et al. 2019, arXiv:1912.06015, for convolutions; Li et al. 2021,
arXiv:2110.05679, for positions.) A site inside a ``scan`` is one of all its passes; of parameters
that are joined before they meet data, such as the gates of an LSTM, each has a share.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.clipping.ghost.program import Node
from jaxdp.clipping.ghost.views import Joined, Label, View, merged


class Site(Protocol):
    """One use of a parameter."""

    @property
    def view(self) -> View:
        """The parameter as the operation sees it."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, positions, p, q)."""

    @property
    def key(self) -> tuple[Label, Label, Label]:
        """Labels of (g, p, q): sites with one key have gradients arranged alike."""

    @property
    def operand(self) -> int:
        """The operand of the operation that is not the parameter."""

    @property
    def looks_up(self) -> bool:
        """True if rows are looked up: A is one-hot, and ``rows`` says where it is one."""

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, *result]."""

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the view."""

    def of_view(self, view: jax.Array) -> jax.Array:
        """The view, arranged as [g, p, q]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """``dot_general`` of a parameter and data; axes of each, in the order (g, p or t, q or t)."""

    view: View
    sizes: tuple[int, int, int, int]
    key: tuple[Label, Label, Label]
    operand: int
    view_axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    data_axes: tuple[int, ...]
    looks_up: ClassVar[bool] = False

    def inputs(self, data: jax.Array) -> jax.Array:
        """A [m, g, t, p], from data [m, *operand]."""
        groups, positions, p, _ = self.sizes
        axes = (0, *(axis + 1 for axis in self.data_axes))
        moved = jnp.transpose(data, axes)
        return moved.reshape(data.shape[0], groups, positions, p)

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, *result]."""
        groups, positions, _, q = self.sizes
        wide = cotangent
        if self.operand == 1:  # the parameter stood first, so its axes come before the data's
            wide = wide.reshape(-1, groups, q, positions)
            return jnp.swapaxes(wide, 2, 3)
        return wide.reshape(-1, groups, positions, q)

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the view."""
        order = tuple(itertools.chain(*self.view_axes))
        split = gradient.reshape([self.view.shape[axis] for axis in order])
        return jnp.transpose(split, [order.index(axis) for axis in range(len(order))])

    def of_view(self, view: jax.Array) -> jax.Array:
        """The view, arranged as [g, p, q]."""
        order = tuple(itertools.chain(*self.view_axes))
        groups, _, p, q = self.sizes
        return jnp.transpose(view, order).reshape(groups, p, q)


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """``conv_general_dilated`` with a parameter as its kernel: dense over patches."""

    view: View
    sizes: tuple[int, int, int, int]
    key: tuple[Label, Label, Label]
    operand: int
    node: Node
    looks_up: ClassVar[bool] = False

    def inputs(self, data: jax.Array) -> jax.Array:
        """A [m, g, t, p], from data [m, *operand]: patches, cut by slices.

        On a CPU that took a third of the time of ``lax.conv_general_dilated_patches``, which
        convolves with an identity kernel, and a sixth of that of a batched kernel gradient.
        """
        params = self.node.eqn.params
        images, channels, *space = params["dimension_numbers"].lhs_spec
        x = jnp.transpose(data, [0, *(axis + 1 for axis in (images, *space, channels))])
        holes = [size - 1 for size in params["lhs_dilation"]]
        edges = [(*pair, hole) for pair, hole in zip(params["padding"], holes, strict=True)]
        none = (0, 0, 0)
        x = lax.pad(x, jnp.zeros([], x.dtype), [none, none, *edges, none])
        patches = x
        for axis in range(len(space)):
            # One axis after the other: the sum and not the product of the kernel's sides.
            patches = jnp.stack(self._slices(patches, axis), axis=-2)
        groups, positions, p, _ = self.sizes
        patches = patches.reshape(x.shape[0], positions, -1, groups, x.shape[-1] // groups)
        patches = jnp.moveaxis(patches, 3, 1)  # [m, g, t, offset, channel]
        return patches.reshape(x.shape[0], groups, positions, p)

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, *result]."""
        images, features, *space = self.node.eqn.params["dimension_numbers"].out_spec
        order = [0, *(axis + 1 for axis in (images, *space, features))]
        groups, positions, _, q = self.sizes
        wide = jnp.transpose(cotangent, order)
        return jnp.moveaxis(wide.reshape(wide.shape[0], positions, groups, q), 2, 1)

    def result(self, outs: jax.Array) -> jax.Array:
        """The result of one example, from [g, t, q]: the inverse of ``cotangent``."""
        spec = self.node.eqn.params["dimension_numbers"].out_spec
        images, features, *space = spec
        order = (images, *space, features)
        shape = self.node.out_shape()
        flat = jnp.moveaxis(outs, 0, 1).reshape([shape[axis] for axis in order])
        return jnp.transpose(flat, [order.index(axis) for axis in range(len(order))])

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the kernel."""
        spec = self.node.eqn.params["dimension_numbers"].rhs_spec  # (out, in, *space)
        groups, _, _, q = self.sizes
        features, channels, *space = (self.view.shape[axis] for axis in spec)
        split = gradient.reshape(groups, *space, channels, q)
        split = jnp.moveaxis(split, (-1, -2), (1, 2)).reshape(features, channels, *space)
        return jnp.transpose(split, [spec.index(axis) for axis in range(len(spec))])

    def of_view(self, view: jax.Array) -> jax.Array:
        """The kernel, arranged as [g, p, q]."""
        spec = self.node.eqn.params["dimension_numbers"].rhs_spec
        groups, _, p, q = self.sizes
        _, channels, *space = (self.view.shape[axis] for axis in spec)
        kernel = jnp.transpose(view, spec).reshape(groups, q, channels, *space)
        return jnp.moveaxis(kernel, (1, 2), (-1, -2)).reshape(groups, p, q)

    def _slices(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """The parts of x [m, n, *space, ...] seen by each kernel entry along one space axis."""
        params = self.node.eqn.params
        numbers = params["dimension_numbers"]
        size = self.view.shape[numbers.rhs_spec[2 + axis]]
        found = self.node.out_shape()[numbers.out_spec[2 + axis]]
        stride, hole = params["window_strides"][axis], params["rhs_dilation"][axis]
        last = stride * (found - 1) + 1
        starts = range(0, size * hole, hole)
        return [lax.slice_in_dim(x, at, at + last, stride, axis=2 + axis) for at in starts]


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """``gather`` of rows of a parameter at the data's indices: A is one-hot, never built."""

    view: View
    sizes: tuple[int, int, int, int]
    key: tuple[Label, Label, Label]
    operand: int
    axis: int
    offset_dims: tuple[int, ...]
    clips: bool
    looks_up: ClassVar[bool] = True

    def rows(self, indices: jax.Array) -> jax.Array:
        """The looked-up rows, int32 [m, t]; the number of rows p where none was looked up."""
        flat = indices.reshape(indices.shape[0], -1)
        # Neither may the number of rows be too large for the type, nor an index wrap around.
        flat = flat if flat.dtype.itemsize >= 4 else flat.astype(jnp.int32)
        if self.clips:
            return jnp.clip(flat, 0, self.sizes[2] - 1).astype(jnp.int32)
        inside = (flat >= 0) & (flat < self.sizes[2])
        return jnp.where(inside, flat, self.sizes[2]).astype(jnp.int32)

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, 1, t, q], from cotangents [m, *result]."""
        rank = cotangent.ndim - 1
        positions = [axis for axis in range(rank) if axis not in self.offset_dims]
        order = (0, *(axis + 1 for axis in (*positions, *self.offset_dims)))
        _, size, _, q = self.sizes
        return jnp.transpose(cotangent, order).reshape(-1, 1, size, q)

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[1, p, q], arranged like the view."""
        shape = list(self.view.shape)
        rows = shape.pop(self.axis)
        return jnp.moveaxis(gradient.reshape(rows, *shape), 0, self.axis)

    def of_view(self, view: jax.Array) -> jax.Array:
        """The view, arranged as [1, p, q]."""
        return jnp.moveaxis(view, self.axis, 0).reshape(1, self.sizes[2], self.sizes[3])


@dataclasses.dataclass(frozen=True, eq=False)
class Around:
    """A site that stands for another with something around it, such as a loop.

    Attributes:
        inner: the other.
    """

    inner: Any

    @property
    def view(self) -> View:
        """The parameter as the operation sees it."""
        return self.inner.view

    @property
    def operand(self) -> int:
        """The operand of the operation that is not the parameter."""
        return self.inner.operand

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, positions, p, q)."""
        return self.inner.sizes

    @property
    def key(self) -> tuple[Label, Label, Label]:
        """Labels of (g, p, q)."""
        return self.inner.key

    @property
    def looks_up(self) -> bool:
        """True if rows are looked up."""
        return self.inner.looks_up

    def rows(self, indices: jax.Array) -> jax.Array:
        """The looked-up rows, int32 [m, t]; the number of rows p where none was looked up."""
        return self.inner.rows(indices)

    def to_view(self, gradient: jax.Array) -> jax.Array:
        """[g, p, q], arranged like the view."""
        return self.inner.to_view(gradient)

    def of_view(self, view: jax.Array) -> jax.Array:
        """The view, arranged as [g, p, q]."""
        return self.inner.of_view(view)


@dataclasses.dataclass(frozen=True, eq=False)
class Share(Around):
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
        return self.inner.inputs(self._share(data) if self.of_data else data)

    def cotangent(self, cotangent: jax.Array) -> jax.Array:
        """B [m, g, t, q], from cotangents [m, *result]."""
        share = cotangent if self.of_data else self._share(cotangent)
        return self.inner.cotangent(share)

    def _share(self, whole: jax.Array) -> jax.Array:
        return lax.slice_in_dim(whole, self.start, self.start + self.size, axis=self.axis + 1)


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


def sites_of(
    node: Node, what: View | Joined, at: int, operand_shape: Sequence[int]
) -> list[tuple[View, Any]]:
    """The parameters at operand ``at`` of ``node``, and the site that it is for each, or None.

    Arguments as for ``site``.
    """
    if isinstance(what, View):
        return [(what, site(node, what, at, operand_shape))]
    nothing: list[tuple[View, Any]] = [(view, None) for view in what.views]
    if node.name != "dot_general":
        return nothing
    contract, batch = node.eqn.params["dimension_numbers"]
    if what.axis in batch[at]:
        return nothing
    # The axis of the data, or of the result, that the parameters share: the result's axes are those
    # of the batch, then the first operand's, then the second's.
    of_data = what.axis in contract[at]
    if of_data:
        axis = contract[1 - at][list(contract[at]).index(what.axis)]
    else:
        taken = (*contract[at], *batch[at])
        before = [a for a in range(what.axis) if a not in taken]
        others = len(operand_shape) - len(contract[1 - at]) - len(batch[1 - at])
        axis = len(batch[at]) + len(before) + (others if at == 1 else 0)
    found, start = [], 0
    for view in what.views:
        size, shape = view.shape[what.axis], list(operand_shape)
        if of_data:
            shape[axis] = size
        alone = site(node, view, at, shape)
        found.append((view, None if alone is None else Share(alone, of_data, axis, start, size)))
        start += size
    return found


def looped(site: Site, passes: int, stacks: Sequence[View | None]) -> Looped | None:
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


def lengths(site: Site) -> tuple[int, ...]:
    """Numbers of passes of the loops around a site, the outermost first."""
    return (site.passes, *lengths(site.inner)) if isinstance(site, Looped) else ()


def site(node: Node, view: View, at: int, operand_shape: Sequence[int]) -> Any:
    """The site that ``node`` is for the parameter at operand ``at``; None if it is none.

    Args:
        node: the operation.
        view: the parameter as it enters.
        at: which operand the parameter is.
        operand_shape: shape of the other operand, which holds data.
    """
    makers = {
        "dot_general": _dense,
        "conv_general_dilated": _convolution,
        "gather": _lookup,
        "dynamic_slice": _one_row,
    }
    maker = makers.get(node.name)
    # Factors are real and in float32, so a complex operation is none.
    if maker is None or not jnp.issubdtype(node.out_dtype(), jnp.floating):
        return None
    found = maker(node, view, at, tuple(operand_shape))
    return None if found is None or 0 in found.sizes else found


def _dense(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Product | None:
    contract, batch = node.eqn.params["dimension_numbers"]
    w_contract, w_batch = tuple(contract[at]), tuple(batch[at])
    x_contract, x_batch = tuple(contract[1 - at]), tuple(batch[1 - at])
    w_free = tuple(a for a in range(len(view.shape)) if a not in w_contract + w_batch)
    x_free = tuple(a for a in range(len(data_shape)) if a not in x_contract + x_batch)
    sizes = (
        _size(view.shape, w_batch),
        _size(data_shape, x_free),
        _size(view.shape, w_contract),
        _size(view.shape, w_free),
    )
    key = tuple(_joined(view, axes) for axes in (w_batch, w_contract, w_free))
    data_axes = (*x_batch, *x_free, *x_contract)
    axes = (w_batch, w_contract, w_free)
    return Product(view, sizes, key, 1 - at, axes, data_axes)  # type: ignore[arg-type]


def _convolution(
    node: Node, view: View, at: int, data_shape: tuple[int, ...]
) -> Convolution | None:
    params = node.eqn.params
    if at != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    groups = params["feature_group_count"]
    out_axis, *in_axes = numbers.rhs_spec
    features = view.shape[out_axis]
    space = math.prod(node.out_shape()[axis] for axis in numbers.out_spec[2:])
    positions = data_shape[numbers.lhs_spec[0]] * space
    sizes = (groups, positions, _size(view.shape, in_axes), features // groups)
    # Patches are arranged in an order of their own, so a kernel matches only kernels.
    here = ("convolution", groups, *(view.labels[axis] for axis in numbers.rhs_spec))
    key = ((here, "g"), (here, "p"), (here, "q"))
    return Convolution(view, sizes, key, 0, node)


def _lookup(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Lookup | None:
    params = node.eqn.params
    numbers = params["dimension_numbers"]
    if at != 0 or len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    rest = [size for i, size in enumerate(view.shape) if i != axis]
    sliced = [size for i, size in enumerate(params["slice_sizes"]) if i != axis]
    if tuple(numbers.collapsed_slice_dims) != (axis,) or sliced != rest:
        return None
    positions = math.prod(data_shape[:-1])
    others = [i for i in range(len(view.shape)) if i != axis]
    key = ((), view.labels[axis], _joined(view, others))
    sizes = (1, positions, view.shape[axis], math.prod(rest))
    clips = params["mode"] == lax.GatherScatterMode.CLIP
    return Lookup(view, sizes, key, 1, axis, tuple(numbers.offset_dims), clips)


def _one_row(node: Node, view: View, _: int, __: tuple[int, ...]) -> Lookup | None:
    sizes = node.eqn.params["slice_sizes"]
    cut = [axis for axis, size in enumerate(sizes) if size != view.shape[axis]]
    if len(cut) != 1 or sizes[cut[0]] != 1:
        return None
    (axis,) = cut
    others = [i for i in range(len(view.shape)) if i != axis]
    key = ((), view.labels[axis], _joined(view, others))
    size = (1, 1, view.shape[axis], _size(view.shape, others))
    return Lookup(view, size, key, 1 + axis, axis, tuple(others), clips=True)


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _joined(view: View, axes: Sequence[int]) -> Label:
    return merged(tuple(itertools.chain(*(view.labels[axis] for axis in axes))))
