"""Refuses losses whose operations could read other examples of a batch."""

import inspect
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import batching  # its public face cannot be read
from jax.extend import core

from jaxdp.clipping.ghost.program import inner_jaxprs

# Their code is handed the whole batch under ``vmap``, or other code is run than was traced.
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call", "custom_vmap_call")
# Bits of all rows from the first row's key, and kernels whose memory goes from row to row.
_SHARED = ("rng_bit_generator", "rng_uniform", "pallas_call", "custom_partitioning")
# Names of the one generator whose keys vmap keeps apart, as an operation's or its operands' type.
_THREEFRY = ("threefry2x32", "fry", "key<fry>")
# Gives a constant to each shard: no example sees another by it.
_HARMLESS = "axis_index"
# Their gradient rules are functions that are only called when a gradient is taken.
_RULED = ("custom_jvp", "custom_vjp", "custom_transpose", "linear_call")


class TracedFunction(NamedTuple):
    """A traced function, the loss itself or one inside it.

    Attributes:
        jaxpr: its operations.
        consts: the arrays that it captured.
        axes: names of the axes that the loss itself brought in around it.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    axes: frozenset[Any]


def parts(
    traced: core.ClosedJaxpr | core.Jaxpr, axes: frozenset[Any] = frozenset()
) -> Iterator[TracedFunction]:
    """A traced function and all functions inside it, such as bodies of ``scan`` or ``cond``."""
    jaxpr: Any = getattr(traced, "jaxpr", traced)
    yield TracedFunction(jaxpr, getattr(traced, "consts", ()), axes)
    for eqn in jaxpr.eqns:
        own: Any = ()  # the axes that a shard_map inside the loss brings in for its body
        if eqn.primitive.name == "shard_map":
            own = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
        for inner in inner_jaxprs(eqn):
            yield from parts(inner, axes | frozenset(own))


def refuse(traced: core.ClosedJaxpr) -> None:
    """Raises ValueError for operations in a traced loss that may read other examples.

    Raises:
        ValueError: a collective over an axis that the loss did not bring in itself, a callback or a
            foreign call, or a ``custom_vmap``.
    """
    for part in parts(traced):
        for eqn in part.jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            if name in _OUTSIDE:
                raise ValueError(
                    f"loss_fn must not use {name.removesuffix('_call')}, got one: under vmap its "
                    "code may see the whole batch and let one record change what the others add. "
                    "(jax.debug.print is allowed.)"
                )

            # The generator that the operation names, and those of the keys that it works on.
            impl = getattr(params.get("impl"), "name", params.get("impl"))
            avals: Sequence[Any] = [getattr(a, "aval", None) for a in (*eqn.invars, *eqn.outvars)]
            kinds = [aval.dtype for aval in avals if hasattr(aval, "dtype")]
            keys = [impl] if isinstance(impl, str) else []
            keys += [str(k) for k in kinds if jax.numpy.issubdtype(k, jax.dtypes.prng_key)]
            if others := [key for key in keys if key not in _THREEFRY]:
                raise ValueError(
                    f"loss_fn must not use keys of another generator than threefry, got {name} "
                    f"over {others[0]}: vmap gives every row the bits of the first row's key. Give "
                    "the loss an argument rng, which receives a threefry key of its example, or "
                    "make keys with impl='threefry2x32'"
                )

            # The rule for vmap, and what JAX wraps around one that was registered from outside.
            rule: Any = getattr(batching, "fancy_primitive_batchers", {}).get(eqn.primitive)
            rule = getattr(rule, "func", rule)
            if "PrimitiveBatchersProxy" in getattr(rule, "__qualname__", ""):
                inside = inspect.getclosurevars(rule).nonlocals.get("batcher")
                rule = getattr(inside, "func", inside)
            written_by = getattr(rule, "__module__", None) or "jax"
            if name in _SHARED or not written_by.startswith("jax"):
                raise ValueError(
                    f"loss_fn must not use {name}, got one: how vmap runs it over a batch is not "
                    "row by row (kernels) or not JAX's own rule"
                )

            # The axes that it works over. A number among ``axes`` is an array's; elsewhere it is a
            # name like any.
            axes = [axis for axis in _listed(eqn, "axes") if not isinstance(axis, numbers.Integral)]
            named = axes + _listed(eqn, "axis_name")
            if not inner_jaxprs(eqn):
                effects: Any = eqn.effects
                named += [e.name for e in effects if type(e).__name__ == "NamedAxisEffect"]
            outer = set(named) - part.axes
            if outer and name != _HARMLESS:
                raise ValueError(
                    f"loss_fn must not communicate over a mesh or vmap axis, got {name} over "
                    f"{sorted(outer, key=str)}: it, or its gradient, mixes the examples of all "
                    "shards. Sum over the axis after clipping, outside the loss"
                )


def has_rules(traced: core.ClosedJaxpr) -> bool:
    """True if the function has custom gradient rules, which only the traced gradient shows."""
    return any(e.primitive.name.startswith(_RULED) for p in parts(traced) for e in p.jaxpr.eqns)


def _listed(eqn: core.JaxprEqn, key: str) -> list[Any]:
    value = eqn.params.get(key, ())
    return list(value) if isinstance(value, tuple | list | set | frozenset) else [value]
