"""A physical batch over the devices of a mesh: each clips and sums its own rows.

What belongs to one example stays on its device: the devices exchange the parameters that are cut
over the axes of rows, before, and the sums, after. Axes that are not taken by hand (of tensor
parallelism) are XLA's.

Inside a ``shard_map`` of the user's with ``check_vma=True`` JAX types who varies over which mesh
axis, and the gradient of a parameter that is the same on all devices is summed over them where it
is taken: before it could be clipped. ``without_mesh_types`` traces a function by itself, without
such types, so that every device computes on what it has and nothing is summed. All results count as
varying over all axes that anything given varies over.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config  # the flag that check_vma sets has no public face
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

from jaxdp.clipping.ghost import stacks
from jaxdp.clipping.ghost.leaves import ShardedAxis
from jaxdp.clipping.reduce import Clipped
from jaxdp.devices.placement import Placement, axes_of, varying
from jaxdp.types import ClipInfo, PyTree

# (this device's parts of the parameters, its rows, what all devices share) -> its part of the sum
# over the devices, and votes and information of those rows.
Each = Callable[[list[stacks.Shard], PyTree, PyTree], tuple[Clipped, ClipInfo]]


def with_mesh(grad_fn: Any, place: Placement) -> Any:
    """The clipped gradient with its rows spread over the devices of a mesh.

    Raises:
        ValueError: it is an algorithm's own, which sums rows by itself.
    """
    if not hasattr(grad_fn, "placement"):
        raise ValueError(
            "mesh must be None for an algorithm with a gradient of its own, as published, got one: "
            "train it on one device, with parameters and records there"
        )
    return dataclasses.replace(grad_fn, placement=place)


def sum_over_devices(
    place: Placement, each: Each, params: PyTree, rows: PyTree, shared: PyTree
) -> tuple[Clipped, ClipInfo]:
    """``each`` of every device's own rows, the sums added over the devices.

    Args:
        place: where the rows lie.
        each: what one device does, the sum over the devices included.
        params: the parameters.
        rows: pytree of arrays [m, ...], m a multiple of the devices.
        shared: pytree of arrays that every device gets whole.

    Raises:
        ValueError: the devices cannot share the rows evenly.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(params)
    specs = [place.row_spec(n) for n in range(len(leaves))]

    def local(leaves: list[jax.Array], rows: PyTree, shared: PyTree) -> Any:
        each_part = zip(leaves, specs, strict=True)
        held = [stacks.shard(leaf, spec, place.rows) for leaf, spec in each_part]
        clipped, info = each(held, rows, shared)
        votes = jax.lax.psum(clipped.votes, place.rows)
        summed = structure.flatten_up_to(clipped.total)
        return summed, votes, (clipped.norms, clipped.clipped, info)

    count = jax.tree.leaves(rows)[0].shape[0]
    if count % place.devices:
        raise ValueError(
            f"batch must hold a multiple of {place.devices} rows, which so many devices of the "
            f"mesh share, got {count}: pad it, with False in the mask"
        )
    of_rows = P(place.rows)
    summed, votes, (norms, short, info) = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(specs, of_rows, P()),
        out_specs=(specs, P(), of_rows),
        axis_names=place.manual_axes,
        check_vma=False,
    )(leaves, rows, shared)
    total = jax.tree.unflatten(structure, place.with_sharding(summed))
    return Clipped(total, norms, short, votes), info


def sharded_leaves(place: Placement | None) -> dict[int, ShardedAxis]:
    """The parameters that are cut along one axis, over mesh axes that are not taken by hand."""
    if place is None:
        return {}
    found = {}
    for leaf, spec in enumerate(place.leaves or ()):
        cut = {
            axis: names
            for axis, entry in enumerate(spec)
            if (names := tuple(name for name in axes_of(entry) if name not in place.rows))
        }
        if len(cut) == 1:
            ((axis, names),) = cut.items()
            parts = math.prod(place.mesh.shape[name] for name in names)
            found[leaf] = ShardedAxis(axis, parts, names, place.mesh)
    return found


def gather_to_devices(place: Placement, records: PyTree, indices: jax.Array) -> PyTree:
    """The records [m, ...] at ``indices`` [m], each on the device that will work on it.

    Every device looks up what it holds of all, as bits, with zeros elsewhere: their sum is exact.
    (XLA does it for records that are cut over other axes than rows.)
    """
    if place.records != place.rows:
        found = jax.tree.map(lambda leaf: leaf[indices], records)
        return jax.lax.with_sharding_constraint(found, place.row_sharding)
    count = place.devices

    def local(number: jax.Array, records: PyTree, indices: jax.Array) -> PyTree:
        def one(leaf: jax.Array) -> jax.Array:
            at = indices - number[0] * leaf.shape[0]
            mine = (at >= 0) & (at < leaf.shape[0])
            kind: Any = f"uint{8 * leaf.dtype.itemsize}"
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                kind = leaf.dtype
            bits = leaf.view(kind)[jnp.clip(at, 0, leaf.shape[0] - 1)]
            bits = jnp.where(mine.reshape(-1, *[1] * (bits.ndim - 1)), bits, 0)
            own = jax.lax.psum_scatter(bits, place.rows, scatter_dimension=0, tiled=True)
            return own.view(leaf.dtype)

        return jax.tree.map(one, records)

    of_rows = P(place.rows)
    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(of_rows, of_rows, P()),
        out_specs=of_rows,
        axis_names=place.manual_axes,
        check_vma=False,
    )(jnp.arange(count, dtype=jnp.int32), records, indices)


_PRIMITIVE = core.Primitive("jaxdp_without_mesh_types")
_PRIMITIVE.multiple_results = True


def without_mesh_types(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """``fn(*args)``, where nothing in it is summed over a mesh axis that JAX tracks.

    Raises:
        ValueError: an argument is what is left of a sum over devices that was not taken yet.
    """
    leaves, structure = jax.tree.flatten(args)
    if any(getattr(jax.typeof(leaf).manual_axis_type, "unreduced", ()) for leaf in leaves):
        raise ValueError(
            "parameters and batch must be values, got one that is still to be summed over a mesh "
            "axis (unreduced): reduce it first"
        )
    axes = frozenset(axis for leaf in leaves for axis in varying(leaf))
    if not axes:
        return fn(*args)
    with config._check_vma(False):
        closed, shapes = jax.make_jaxpr(
            lambda *leaves: fn(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*(_plain(leaf) for leaf in leaves))
    found = _PRIMITIVE.bind(*leaves, closed=closed, axes=axes)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _plain(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _run(*leaves: jax.Array, closed: core.ClosedJaxpr, axes: frozenset[str]) -> Sequence[Any]:
    with config._check_vma(False):
        return core.jaxpr_as_fun(closed)(*leaves)


def _types(*avals: Any, closed: core.ClosedJaxpr, axes: frozenset[str]) -> list[Any]:
    like = next(aval for aval in avals if aval.manual_axis_type.varying)
    kind = type(like.manual_axis_type)(varying=axes)

    def typed(aval: Any) -> Any:
        whole = like.sharding.update(spec=P(*[None] * aval.ndim))
        return aval.update(sharding=whole, manual_axis_type=kind)

    return [typed(aval) for aval in closed.out_avals]


def _lowered(
    ctx: mlir.LoweringRuleContext, *args: Any, closed: core.ClosedJaxpr, axes: frozenset[str]
) -> Any:
    inside = ctx.replace(avals_in=closed.in_avals, avals_out=closed.out_avals)
    with config._check_vma(False):
        return mlir.lower_fun(core.jaxpr_as_fun(closed), multiple_results=True)(inside, *args)


def _mapped(args: Any, dims: Any, *, closed: core.ClosedJaxpr, axes: frozenset[str]) -> Any:
    every_one = jax.vmap(core.jaxpr_as_fun(closed), list(dims))
    with config._check_vma(False):
        every = jax.make_jaxpr(every_one)(*(_plain(arg) for arg in args))
    return _PRIMITIVE.bind(*args, closed=every, axes=axes), [0] * len(every.out_avals)


_PRIMITIVE.def_impl(_run)
_PRIMITIVE.def_abstract_eval(_types)
mlir.register_lowering(_PRIMITIVE, _lowered)
batching.primitive_batchers[_PRIMITIVE] = _mapped
