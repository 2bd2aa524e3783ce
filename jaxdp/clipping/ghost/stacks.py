"""Parameters of which each device holds a part, and stacks of them that are gathered by layer.

Where a ``scan`` takes a layer of a stack in every iteration (and nothing else is done with it), the
stack stays in parts. A layer is gathered where an operation needs it, forwards, and again backwards
(Zhao et al. 2023, arXiv:2304.11277, 3.2): the same bits, for no update is between. Of the clipped
sum each device keeps its part of a layer, before the next layer's is made.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.leaves import Factors, LeafGradients, Slices, Squares, stacked_late
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.ghost.program import COND, SCAN, Node, Program, Traced, apply_node
from jaxdp.devices.placement import axes_of
from jaxdp.types import PyTree

_CAST = "convert_element_type"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["part"],
    meta_fields=["cut", "rows", "steps"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A device's part of a parameter, or of one layer of it: a pytree, so that ``scan`` slices it.

    Attributes:
        part: the array.
        cut: pairs of an axis, counted from the last (-1), and the mesh axes that it is cut over.
        rows: the mesh axes whose devices add their sums.
        steps: what is done with the whole before it meets data: operations, and which result.
    """

    part: jax.Array
    cut: tuple[tuple[int, tuple[str, ...]], ...]
    rows: tuple[str, ...]
    steps: tuple[tuple[Node, int], ...] = ()

    def gathered(self) -> jax.Array:
        """The whole array."""
        value = self.part
        for axis, names in self.cut:
            value = jax.lax.all_gather(value, names, axis=value.ndim + axis, tiled=True)
        return value

    def then(self, node: Node) -> list["Shard"]:
        """The results of an operation on the parameter alone, which is done when it is whole.

        A cast is done at once: fewer bytes may be gathered, and the numbers are the same.
        """
        if node.name == _CAST and not self.steps:
            return [dataclasses.replace(self, part=_applied(node, self.part)[0])]
        results = range(len(node.outs))
        return [dataclasses.replace(self, steps=(*self.steps, (node, i))) for i in results]

    def added(self, total: jax.Array) -> jax.Array:
        """This device's part of the sum over devices of a whole array."""
        rest = set(self.rows)
        for axis, names in self.cut:
            at = total.ndim + axis
            total = jax.lax.psum_scatter(total, names, scatter_dimension=at, tiled=True)
            rest -= set(names)
        names = tuple(axis for axis in self.rows if axis in rest)
        return jax.lax.psum(total, names) if names else total

    def by_layers(self) -> "Shard | None":
        """The same stack, every layer cut and no two devices with other layers; None if it cannot.

        Layers that are on single devices are exchanged for parts of all: as many bytes as a part.
        """
        first = {axis + self.part.ndim: names for axis, names in self.cut}
        if 0 not in first or len(self.cut) > 1:
            return self if self.cut and 0 not in first else None
        parts = math.prod(jax.lax.axis_size(name) for name in first[0])
        even = [axis for axis in range(1, self.part.ndim) if self.part.shape[axis] % parts == 0]
        if not even:
            return None
        axis = max(even, key=lambda axis: self.part.shape[axis])
        part = jax.lax.all_to_all(self.part, first[0], axis, 0, tiled=True)
        return dataclasses.replace(self, part=part, cut=((axis - part.ndim, first[0]),))

    def like(self, other: "Shard", total: jax.Array) -> jax.Array:
        """A total whose parts are ``by_layers``, in parts as the parameter ``other`` has them."""
        if self.cut == other.cut:
            return total
        ((axis, names),) = self.cut
        return jax.lax.all_to_all(total, names, 0, total.ndim + axis, tiled=True)


def shard(part: jax.Array, spec: P, rows: tuple[str, ...]) -> Shard:
    """The part of a parameter that is sharded as ``spec`` says over the axes of rows."""
    entries = ((axis - part.ndim, axes_of(entry)) for axis, entry in enumerate(spec))
    return Shard(part, tuple((axis, names) for axis, names in entries if names), rows)


def is_shard(value: object) -> bool:
    """True of a ``Shard``."""
    return isinstance(value, Shard)


def whole(value: jax.Array | Shard, held: dict[int, jax.Array] | None = None) -> jax.Array:
    """An array as it is, and of a part the whole, with what is done with it.

    Args:
        value: the array or part.
        held: what was gathered, by the identity of the part; what is gathered here is added.
    """
    if not isinstance(value, Shard):
        return value
    held = {} if held is None else held
    if (key := id(value.part)) not in held:
        held[key] = value.gathered()
    found = held[key]
    for node, result in value.steps:
        found = _applied(node, found)[result]
    return found


def _applied(node: Node, value: jax.Array) -> list[jax.Array]:
    """The results of an operation on a value and literals."""
    return apply_node(node, [value if isinstance(ref, int) else ref.val for ref in node.ins])


def sliced_leaves(traced: Traced, plan: Sequence[LeafPlan]) -> set[int]:
    """The parameters of which nothing but the layers that a ``scan`` takes is ever needed.

    Those whose gradients are arrays of every example are not among them: these are larger.
    """
    return {
        leaf
        for leaf, each in enumerate(plan[: traced.num_params])
        if each.engine in ("ghost", "layer", "frozen") and not each.whole
        if _is_only_sliced(traced.program, traced.program.ins[leaf])
    }


def _is_only_sliced(program: Program, number: int) -> bool:
    found = []
    for node in program.nodes:
        for at, ref in enumerate(node.ins):
            if not isinstance(ref, int) or ref != number:
                continue
            if node.name == SCAN:
                found.append(at >= node.carried.stop)
            elif node.name == _CAST:
                found.append(_is_only_sliced(program, node.outs[0]))
            elif node.bodies and node.name != COND:
                (body,) = node.bodies
                found.append(_is_only_sliced(body, body.ins[at]))
            else:
                return False
    return bool(found) and all(found) and number not in [x for x in program.outs if type(x) is int]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack(LeafGradients):
    """Gradients of a stack in parts: of their sum the device keeps its part of each layer."""

    grads: LeafGradients
    held: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grads.shape

    def squares(self, scale: jax.Array | None) -> Squares:
        return self.grads.squares(scale)

    def weighted_sum(self, weights: jax.Array, keep: jax.Array, finite: jax.Array) -> jax.Array:
        slices = self.grads.each if isinstance(self.grads, Slices) else [self.grads]
        found = [each.iterations() for each in slices if isinstance(each, Factors)]
        layered = [each for each in found if each is not None]
        if len(layered) < len(slices):
            return self.held.added(self.grads.weighted_sum(weights, keep, finite))

        def of_layer(arrays: PyTree) -> jax.Array:
            each = zip(layered, arrays, strict=True)
            sums = [of_one(one).layer_sum(weights, finite) for (of_one, _), one in each]
            return self.held.added(rounding.sum_arrays(sums))

        return stacked_late(of_layer, [arrays for _, arrays in layered], weights)

    def boxed_sum(self, bound: float, keep: jax.Array, scale: jax.Array | None) -> jax.Array:
        return self.held.added(self.grads.boxed_sum(bound, keep, scale))
