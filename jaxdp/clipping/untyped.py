"""A function inside ``shard_map`` with ``check_vma=True`` as if it were called with False.

With ``check_vma=True`` JAX types who varies over which mesh axis, and the gradient of a parameter
that is the same on all devices is summed over them where it is taken: before it could be clipped.
Here the function is traced by itself, without such types, so that every device computes on what it
holds and nothing is summed. All results count as varying over all axes that anything given varies
over.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config  # the flag that check_vma sets has no public face
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

from jaxdp._placement import varying
from jaxdp.types import PyTree

_PRIMITIVE = core.Primitive("jaxdp_untyped")
_PRIMITIVE.multiple_results = True


def untyped(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
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


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _run(*leaves: Any, closed: Any, axes: frozenset[str]) -> Sequence[Any]:
    with config._check_vma(False):
        return core.jaxpr_as_fun(closed)(*leaves)


def _types(*avals: Any, closed: Any, axes: frozenset[str]) -> list[Any]:
    like = next(aval for aval in avals if aval.manual_axis_type.varying)
    kind = type(like.manual_axis_type)(varying=axes)

    def typed(aval: Any) -> Any:
        whole = like.sharding.update(spec=P(*[None] * aval.ndim))
        return aval.update(sharding=whole, manual_axis_type=kind)

    return [typed(aval) for aval in closed.out_avals]


def _lowered(ctx: Any, *args: Any, closed: Any, axes: frozenset[str]) -> Any:
    inside = ctx.replace(avals_in=closed.in_avals, avals_out=closed.out_avals)
    with config._check_vma(False):
        return mlir.lower_fun(core.jaxpr_as_fun(closed), multiple_results=True)(inside, *args)


def _mapped(args: Any, dims: Any, *, closed: Any, axes: frozenset[str]) -> Any:
    every_one = jax.vmap(core.jaxpr_as_fun(closed), list(dims))
    with config._check_vma(False):
        every = jax.make_jaxpr(every_one)(*(_plain(arg) for arg in args))
    return _PRIMITIVE.bind(*args, closed=every, axes=axes), [0] * len(every.out_avals)


_PRIMITIVE.def_impl(_run)
_PRIMITIVE.def_abstract_eval(_types)
mlir.register_lowering(_PRIMITIVE, _lowered)
batching.primitive_batchers[_PRIMITIVE] = _mapped
