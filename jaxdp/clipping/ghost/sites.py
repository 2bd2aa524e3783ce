"""Sites, where a parameter meets an example: weight gradients that are sums of outer products.

At a site the gradient of one example is ``G[g, p, q] = sum_t A[g, t, p] B[g, t, q]``: A from the
operand that is not the parameter, B from the loss's cotangent at the result. p and q run over the
weight's axes, g over groups, t over positions (pixels, tokens). (Goodfellow 2015, arXiv:1510.01799,
for dense layers; Rochette et al. 2019, arXiv:1912.06015, for convolutions; Li et al. 2021,
arXiv:2110.05679, for positions.) A site inside a ``scan`` is one of all its iterations; of
parameters that are joined before they meet data, such as the gates of an LSTM, each has a share.

A parameter is followed through reshapes, transposes, casts, slices and multiplications by one
number. None of these adds entries up, so the squared norm of the parameter's gradient is that of
the view's (times the number's square), and of slices that share no entry the sum of theirs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.clipping.ghost.program import Node

# A label names the axes of the leaf that an axis of the view runs over, so that two uses of one
# parameter can be compared.
Label = tuple[Any, ...]
Arrange = Callable[[jax.Array], jax.Array]
Sizes = tuple[int, int, int, int]
Key = tuple[Label, Label, Label]


class Sliced(NamedTuple):
    """An axis of which a slice was taken; ``whole`` is its label, ``kept`` says which entries."""

    whole: Label
    kept: range


class Multiple(NamedTuple):
    """An operation that multiplies all entries by one number."""

    node: Node  # ``mul``, ``div`` or ``neg``
    number: int | None  # the operand that holds the number; None for -1

    def factor(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The number, from the operation's operands."""
        if self.number is None:
            return jnp.float32(-1.0)
        number = jnp.ravel(jax.lax.stop_gradient(operands[self.number]))[0].astype(jnp.float32)
        return 1.0 / number if self.node.name == "div" else number


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A parameter, or a slice of it, arranged otherwise, perhaps times a number."""

    leaf: int  # number of the parameter's leaf
    leaf_shape: tuple[int, ...]  # shape of the leaf
    shape: tuple[int, ...]  # shape of the view
    labels: tuple[Label, ...]  # for each axis of the view, the leaf's axes that it runs over
    chain: tuple[Arrange, ...] = ()  # what rearranges and slices it, first to last
    # For a slice that a ``scan`` takes in every iteration, what is sliced, along its first axis.
    stack: "View | None" = None
    # The slices that were taken; views with equal ones show the same entries.
    slices: frozenset[Sliced] = frozenset()
    # The multiplications. ``of_leaf`` and ``to_leaf`` leave them out: the run multiplies the
    # cotangents.
    multiples: tuple[Multiple, ...] = ()

    def to_leaf(self, gradient: jax.Array) -> jax.Array:
        """A float32 gradient of the view (of all slices, stacked), arranged like the leaf."""
        aval = jax.ShapeDtypeStruct(self.leaf_shape, jnp.float32)
        return jax.linear_transpose(self.of_leaf, aval)(gradient)[0]

    def to_slice(self, gradient: jax.Array) -> jax.Array:
        """A float32 gradient of one slice that a ``scan`` takes, arranged like the leaf's slice."""
        assert self.stack is not None
        aval = jax.ShapeDtypeStruct(self.stack.shape[1:], jnp.float32)
        return jax.linear_transpose(self._chained, aval)(gradient)[0]

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
    """Parameters one after the other along an axis, such as the kernels of a cell's gates."""

    views: tuple[Any, ...]  # the parameters, or what was made of each
    axis: int  # where they are joined


def parameter_view(leaf: int, shape: Sequence[int]) -> View:
    """The parameter itself."""
    return View(leaf, tuple(shape), tuple(shape), tuple(((axis,)) for axis in range(len(shape))))


def rearrange(node: Node, view: View | Joined) -> list[View | Joined] | None:
    """The results of an operation on a parameter alone; None if it is not followed."""
    shape, params = node.out_shape(), node.eqn.params
    if not jnp.issubdtype(node.out_dtype(), jnp.floating):
        return None
    if node.name in ("convert_element_type", "copy", "copy_p"):
        return [view]
    if isinstance(view, Joined):
        return None

    def then(
        operation: Arrange,
        shape: Sequence[int],
        labels: Sequence[Label],
        slices: Collection[Sliced] = (),
    ) -> View:
        chain, taken = (*view.chain, operation), view.slices | set(slices)
        moved = dataclasses.replace(view, shape=tuple(shape), labels=tuple(labels))
        return dataclasses.replace(moved, chain=chain, slices=taken)

    if node.name == "transpose":
        order = params["permutation"]
        transpose = functools.partial(jnp.transpose, axes=order)
        return [then(transpose, shape, [view.labels[axis] for axis in order])]
    if node.name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        # The size tells a broadcast that repeats values, whose gradient would add up.
        if len(node.ins) != 1 or math.prod(shape) != math.prod(view.shape) or 0 in shape:
            return None
        # A reshape may read its axes in another order, such as that of a kernel under ``vmap``.
        order = params.get("dimensions") if node.name == "reshape" else None
        order = range(len(view.shape)) if order is None else order
        labels = _regrouped([(view.shape[axis], view.labels[axis]) for axis in order], shape)
        reshape = functools.partial(jax.lax.reshape, new_sizes=shape, dimensions=tuple(order))
        return [then(reshape, shape, labels)]

    # Slices: of every result the entries that it has along each axis.
    whole, gone = [range(size) for size in view.shape], set[int]()
    if node.name == "slice":
        strides = params["strides"] or [1] * len(whole)
        every = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        results = [[range(*each) for each in every]]
    elif node.name == "split":
        axis, sizes = params["axis"], params["sizes"]
        ends = zip(sizes, itertools.accumulate(sizes), strict=True)
        parts = [range(end - size, end) for size, end in ends]
        results = [[*whole[:axis], part, *whole[axis + 1 :]] for part in parts]
    elif node.name == "unstack":  # from JAX 0.11 on: the entries along an axis, without the axis
        axis, gone = params["axis"], {params["axis"]}
        parts = [range(i, i + 1) for i in whole[axis]]
        results = [[*whole[:axis], part, *whole[axis + 1 :]] for part in parts]
    else:
        return None
    found: list[View | Joined] = []
    for ranges in results:
        cut = [axis for axis, kept in enumerate(ranges) if len(kept) != view.shape[axis]]
        sliced = {axis: Sliced(view.labels[axis], ranges[axis]) for axis in cut}
        labels = [(sliced[i],) if i in sliced else label for i, label in enumerate(view.labels)]
        left = [axis for axis in range(len(ranges)) if axis not in gone]

        def take(leaf: jax.Array, ranges: Sequence[range] = ranges) -> jax.Array:
            starts, stops, strides = zip(*((r.start, r.stop, r.step) for r in ranges), strict=True)
            return jax.lax.squeeze(jax.lax.slice(leaf, starts, stops, strides), tuple(gone))

        axes = [len(ranges[axis]) for axis in left]
        found.append(then(take, axes, [labels[axis] for axis in left], sliced.values()))
    return found


def multiply_view(node: Node, at: int, view: View) -> View | None:
    """The view times one number, which is the other operand; None if it is no such product."""
    product = node.name == "mul" or (node.name == "div" and at == 0)
    if node.name != "neg" and not (product and view.shape == node.out_shape()):
        return None
    number = None if node.name == "neg" else 1 - at
    return dataclasses.replace(view, multiples=(*view.multiples, Multiple(node, number)))


def scan_slice(view: View | Joined) -> View | None:
    """The slice of a view that a ``scan`` takes in every iteration; None of what is one already."""
    if isinstance(view, Joined) or view.stack is not None:
        return None
    # A stack of its own: another scan may slice the same view, in every iteration of this one.
    own = dataclasses.replace(view)
    shape, labels = view.shape[1:], view.labels[1:]
    return dataclasses.replace(view, shape=shape, labels=labels, chain=(), stack=own)


def are_disjoint(one: frozenset[Sliced], other: frozenset[Sliced]) -> bool:
    """True if slices of one parameter share no entry: of some axis both take others."""
    return any(a.whole == b.whole and set(a.kept).isdisjoint(b.kept) for a in one for b in other)


def merge_label(label: Sequence[Any]) -> Label:
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


def _regrouped(axes: Sequence[tuple[int, Label]], shape: tuple[int, ...]) -> list[Label]:
    """Labels after a reshape in row-major order: axes (size, label) that merge are joined."""
    old = [(size, label) for size, label in axes if size > 1]
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
        parts, merged = tuple(shape[axis] for axis in run), merge_label(whole)
        for at, axis in enumerate(run):
            regrouped[axis] = merged if len(run) == 1 else (("split", merged, parts, at),)
    return regrouped


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One use of a parameter."""

    view: View  # the parameter as the operation sees it
    operand: int  # the operand of the operation that is not the parameter
    sizes: Sizes  # (groups, positions, p, q)
    key: Key  # labels of (g, p, q): sites with one key have gradients arranged alike
    # A [m, g, t, p], from data [m, *operand]. Where rows are looked up A is one-hot and never
    # built: the looked-up rows, int32 [m, t]; the number of rows p where there is none.
    inputs: Arrange
    cotangent: Arrange  # B [m, g, t, q], from cotangents [m, *result]
    to_view: Arrange  # a gradient [g, p, q], arranged like the view
    of_view: Arrange  # the view, arranged as [g, p, q]
    looks_up: bool = False  # True if rows of the parameter are looked up
    # True if the parameter is added to the data, so that its gradient is the cotangent, which the
    # product before it may share. A is one whatever the data are, which need not be kept.
    adds: bool = False
    # True if A comes out of memory with its positions innermost, as [m, g, p, t].
    positions_last: bool = False
    # Of the loops around it, the outermost first; their axes follow m in data and cotangents.
    iterations: tuple[int, ...] = ()
    # Of a loop that takes a slice of its own in every iteration: the site of one iteration.
    inner: "Site | None" = None


def sites_of(
    node: Node, what: View | Joined, at: int, operand_shape: Sequence[int]
) -> list[tuple[View, Site | None]]:
    """The parameters at operand ``at`` of ``node``, and the site that it is for each, or None.

    Arguments as for ``site``. Of joined parameters each has its share: where they are joined along
    an axis of the result, of the cotangent; where along one that is summed over, of the data.
    """
    if isinstance(what, View):
        return [(what, site(node, what, at, operand_shape))]
    nothing: list[tuple[View, Site | None]] = [(view, None) for view in what.views]
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
    found: list[tuple[View, Site | None]] = []
    start = 0
    for view in what.views:
        size, shape = view.shape[what.axis], list(operand_shape)
        if of_data:
            shape[axis] = size
        alone = site(node, view, at, shape)
        if alone is not None and of_data:
            of_share = _on_slice(alone.inputs, axis + 1, start, size)
            alone = dataclasses.replace(alone, inputs=of_share)
        elif alone is not None:
            of_share = _on_slice(alone.cotangent, axis + 1, start, size)
            alone = dataclasses.replace(alone, cotangent=of_share)
        found.append((view, alone))
        start += size
    return found


def _on_slice(arrange: Arrange, axis: int, start: int, size: int) -> Arrange:
    return lambda whole: arrange(lax.slice_in_dim(whole, start, start + size, axis=axis))


def site_of_scan(inner: Site, iterations: int, stacks: Sequence[View | None]) -> Site | None:
    """The site of all iterations of a ``scan`` as one; None where there is none.

    A weight that all iterations share meets that many times as many positions. Where every
    iteration has a slice of its own, iterations are groups. Where there is no iteration, or each
    looks up rows in a table of its own, there is no such site; nor where all add one bias, whose
    gradient the loop sums up in less memory than cotangents take.

    Args:
        inner: the site of one iteration.
        iterations: their number.
        stacks: the parameters that are sliced iteration by iteration.
    """
    stack = inner.view.stack
    own = stack is not None and any(stack is each for each in stacks)
    if iterations == 0 or (own and inner.looks_up) or (inner.adds and not own):
        return None
    groups, positions, p, q = inner.sizes
    sizes = (
        (iterations * groups, positions, p, q) if own else (groups, iterations * positions, p, q)
    )

    def of_all(arrange: Arrange) -> Arrange:
        """[m, g, t, x] of all iterations, from arrays [m, iterations, ...]."""

        def arranged(x: jax.Array) -> jax.Array:
            each = jax.vmap(arrange, 1, 1)(x)  # [m, iterations, g, t, x]
            each = each if own else each.swapaxes(1, 2)
            return each.reshape(each.shape[0], *sizes[:2], each.shape[-1])

        return arranged

    site = dataclasses.replace(
        inner,
        sizes=sizes,
        inputs=inner.inputs if inner.looks_up else of_all(inner.inputs),
        cotangent=of_all(inner.cotangent),
        iterations=(iterations, *inner.iterations),
        inner=None,  # that of a loop inside is one of its iterations, not of this one's
    )
    if not own:
        return site
    assert stack is not None
    of_groups, of_p, of_q = inner.key

    def to_views(gradient: jax.Array) -> jax.Array:
        split = gradient.reshape(iterations, -1, *gradient.shape[1:])
        return jax.vmap(inner.to_view)(split)

    def of_views(views: jax.Array) -> jax.Array:
        each = jax.vmap(inner.of_view)(views)
        return each.reshape(-1, *each.shape[2:])

    key = ("stack", *stack.labels[0], *of_groups), of_p, of_q
    one = None if inner.iterations else inner
    return dataclasses.replace(site, key=key, to_view=to_views, of_view=of_views, inner=one)


def site(node: Node, view: View, at: int, operand_shape: Sequence[int]) -> Site | None:
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
        "add": _bias,
        "gather": _lookup,
        "dynamic_slice": _dynamic_row,
    }
    maker = makers.get(node.name)
    # Factors are real and in float32, so a complex operation is none.
    if maker is None or not jnp.issubdtype(node.out_dtype(), jnp.floating):
        return None
    found = maker(node, view, at, tuple(operand_shape))
    return None if found is None or 0 in found.sizes else found


def _dense(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Site:
    """``dot_general`` of a parameter and data."""
    contract, batch = node.eqn.params["dimension_numbers"]
    w_contract, w_batch = tuple(contract[at]), tuple(batch[at])
    x_contract, x_batch = tuple(contract[1 - at]), tuple(batch[1 - at])
    w_free = tuple(a for a in range(len(view.shape)) if a not in w_contract + w_batch)
    x_free = tuple(a for a in range(len(data_shape)) if a not in x_contract + x_batch)
    of_each = w_batch, w_contract, w_free
    groups, p, q = (math.prod(view.shape[axis] for axis in axes) for axes in of_each)
    positions = math.prod(data_shape[axis] for axis in x_free)
    # The axes of each in the order (g, p, q), and (g, t, p).
    of_weight, of_data = (*w_batch, *w_contract, *w_free), (*x_batch, *x_free, *x_contract)

    def inputs(data: jax.Array) -> jax.Array:
        moved = jnp.transpose(data, (0, *(axis + 1 for axis in of_data)))
        return moved.reshape(data.shape[0], groups, positions, p)

    def cotangent(wide: jax.Array) -> jax.Array:
        if at == 0:  # the parameter stood first, so its axes come before the data's
            return jnp.swapaxes(wide.reshape(-1, groups, q, positions), 2, 3)
        return wide.reshape(-1, groups, positions, q)

    def to_view(gradient: jax.Array) -> jax.Array:
        split = gradient.reshape([view.shape[axis] for axis in of_weight])
        return jnp.transpose(split, [of_weight.index(axis) for axis in range(len(of_weight))])

    def of_view(weight: jax.Array) -> jax.Array:
        return jnp.transpose(weight, of_weight).reshape(groups, p, q)

    key = _join_labels(view, w_batch), _join_labels(view, w_contract), _join_labels(view, w_free)
    sizes = groups, positions, p, q
    return Site(view, 1 - at, sizes, key, inputs, cotangent, to_view, of_view)


def _bias(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Site | None:
    """``add`` of a parameter and data of one shape: an outer product with one."""
    if view.shape != data_shape or view.shape != node.out_shape():
        return None
    sizes = 1, 1, 1, math.prod(view.shape)

    def inputs(ones: jax.Array) -> jax.Array:
        return ones.reshape(-1, 1, 1, 1)

    def cotangent(wide: jax.Array) -> jax.Array:
        return wide.reshape(wide.shape[0], *sizes[:2], sizes[3])

    def to_view(gradient: jax.Array) -> jax.Array:
        return gradient.reshape(view.shape)

    def of_view(bias: jax.Array) -> jax.Array:
        return bias.reshape(1, 1, sizes[3])

    key = (), (), _join_labels(view, range(len(view.shape)))
    return Site(view, 1 - at, sizes, key, inputs, cotangent, to_view, of_view, adds=True)


def _convolution(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Site | None:
    """``conv_general_dilated`` with a parameter as its kernel: dense over patches."""
    params = node.eqn.params
    if at != 1 or params["batch_group_count"] != 1:
        return None
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    batch, feature, *space = numbers.out_spec
    of_result = batch, *space, feature
    features, channels, *window = (view.shape[axis] for axis in numbers.rhs_spec)
    found = [node.out_shape()[axis] for axis in space]
    positions = data_shape[numbers.lhs_spec[0]] * math.prod(found)
    p, q = channels * math.prod(window), features // groups
    # Of (groups, *window, channels, q) the axes that each axis of the kernel is.
    axes = {numbers.rhs_spec[0]: (0, len(window) + 2), numbers.rhs_spec[1]: (len(window) + 1,)}
    axes |= {axis: (1 + i,) for i, axis in enumerate(numbers.rhs_spec[2:])}
    order = [*itertools.chain(*(axes[axis] for axis in range(len(axes))))]
    back = sorted(range(len(order)), key=order.__getitem__)
    arranged = groups, *window, channels, q

    def inputs(data: jax.Array) -> jax.Array:
        """Patches, taken by slices, with the positions innermost: whole rows of them are copied.

        On a CPU a batched kernel gradient took six times as long. So written, patches and their
        products with the cotangents take a third to a half less than with channels innermost.
        """
        patches = jnp.transpose(data, [0, *(axis + 1 for axis in numbers.lhs_spec)])
        holes = [size - 1 for size in params["lhs_dilation"]]
        edges = [(*pair, hole) for pair, hole in zip(params["padding"], holes, strict=True)]
        none = (0, 0, 0)
        patches = lax.pad(patches, jnp.zeros([], data.dtype), [none, none, none, *edges])
        # [m, n, g, channel, *place], where n are examples of a batch of the loss's own.
        patches = patches.reshape(*patches.shape[:2], groups, channels, *patches.shape[3:])
        for axis, size in enumerate(window):
            # One axis after the other: the sum and not the product of the kernel's sides.
            stride, hole = params["window_strides"][axis], params["rhs_dilation"][axis]
            last, place = stride * (found[axis] - 1) + 1, 4 + 2 * axis
            starts = range(0, size * hole, hole)
            slices = [lax.slice_in_dim(patches, i, i + last, stride, axis=place) for i in starts]
            patches = jnp.stack(slices, axis=3 + axis)
        patches = patches.reshape(*patches.shape[:3], p, math.prod(found))
        patches = jnp.moveaxis(patches, 1, 3).reshape(patches.shape[0], groups, p, positions)
        return patches.swapaxes(2, 3)

    def cotangent(wide: jax.Array) -> jax.Array:
        wide = jnp.transpose(wide, [0, *(axis + 1 for axis in of_result)])
        return jnp.moveaxis(wide.reshape(wide.shape[0], positions, groups, q), 2, 1)

    def to_view(gradient: jax.Array) -> jax.Array:
        # One transpose, or none: XLA made two of this by way of (features, channels, *window).
        split = jnp.transpose(gradient.reshape(arranged), order)
        return split.reshape(view.shape)

    def of_view(kernel: jax.Array) -> jax.Array:
        split = jnp.transpose(kernel.reshape([arranged[i] for i in order]), back)
        return split.reshape(groups, p, q)

    # Patches are arranged in an order of their own, so a kernel matches only kernels.
    here = ("convolution", groups, *(view.labels[axis] for axis in numbers.rhs_spec))
    key = ((here, "g"), (here, "p"), (here, "q"))
    sizes = groups, positions, p, q
    return Site(view, 0, sizes, key, inputs, cotangent, to_view, of_view, positions_last=True)


def _lookup(node: Node, view: View, at: int, data_shape: tuple[int, ...]) -> Site | None:
    """``gather`` of rows of a parameter at the data's indices."""
    params = node.eqn.params
    numbers = params["dimension_numbers"]
    if at != 0 or len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    rest = [size for i, size in enumerate(view.shape) if i != axis]
    sliced = [size for i, size in enumerate(params["slice_sizes"]) if i != axis]
    if tuple(numbers.collapsed_slice_dims) != (axis,) or sliced != rest:
        return None
    clips = params["mode"] == lax.GatherScatterMode.CLIP
    positions = math.prod(data_shape[:-1])
    return _row_lookup(view, 1, positions, axis, tuple(numbers.offset_dims), clips)


def _dynamic_row(node: Node, view: View, _: int, __: tuple[int, ...]) -> Site | None:
    """``dynamic_slice`` of one row."""
    sizes = node.eqn.params["slice_sizes"]
    partial = [axis for axis, size in enumerate(sizes) if size != view.shape[axis]]
    if len(partial) != 1 or sizes[partial[0]] != 1:
        return None
    others = tuple(i for i in range(len(view.shape)) if i != partial[0])
    return _row_lookup(view, 1 + partial[0], 1, partial[0], others, clips=True)


def _row_lookup(
    view: View, operand: int, positions: int, axis: int, offset_dims: tuple[int, ...], clips: bool
) -> Site:
    """The site where rows along ``axis`` are looked up.

    Args:
        view: the table.
        operand: the indices.
        positions: how many rows are looked up.
        axis: of the table.
        offset_dims: the axes of the result that run over a row.
        clips: True if an index out of range is that of the nearest row; else it has none.
    """
    others = [i for i in range(len(view.shape)) if i != axis]
    rows, shape = view.shape[axis], [view.shape[i] for i in others]
    sizes = 1, positions, rows, math.prod(shape)

    def looked_up(indices: jax.Array) -> jax.Array:
        flat = indices.reshape(indices.shape[0], -1)
        # Neither may the number of rows be too large for the type, nor an index wrap around.
        flat = flat if flat.dtype.itemsize >= 4 else flat.astype(jnp.int32)
        if clips:
            return jnp.clip(flat, 0, rows - 1).astype(jnp.int32)
        inside = (flat >= 0) & (flat < rows)
        return jnp.where(inside, flat, rows).astype(jnp.int32)

    def cotangent(wide: jax.Array) -> jax.Array:
        places = [i for i in range(wide.ndim - 1) if i not in offset_dims]
        wide = jnp.transpose(wide, (0, *(i + 1 for i in (*places, *offset_dims))))
        return wide.reshape(-1, 1, positions, sizes[3])

    def to_view(gradient: jax.Array) -> jax.Array:
        return jnp.moveaxis(gradient.reshape(rows, *shape), 0, axis)

    def of_view(table: jax.Array) -> jax.Array:
        return jnp.moveaxis(table, axis, 0).reshape(1, rows, sizes[3])

    key = ((), view.labels[axis], _join_labels(view, others))
    return Site(view, operand, sizes, key, looked_up, cotangent, to_view, of_view, looks_up=True)


def _join_labels(view: View, axes: Sequence[int]) -> Label:
    return merge_label(tuple(itertools.chain(*(view.labels[axis] for axis in axes))))
