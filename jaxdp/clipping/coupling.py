"""Refuses losses whose operations could read other examples of a batch."""

import inspect
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import batching  # its public face cannot be read
from jax.extend import core

# Their code is handed the whole batch under ``vmap``, or other code is run than was traced.
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call", "custom_vmap_call")
# Bits of all rows from the first row's key, and kernels whose memory goes from row to row.
_SHARED = ("rng_bit_generator", "rng_uniform", "pallas_call", "custom_partitioning")
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
        for inner in jax.tree.leaves(dict(eqn.params), is_leaf=_is_traced):
            if _is_traced(inner):
                yield from parts(inner, axes | _introduced(eqn))


def refuse(traced: core.ClosedJaxpr) -> None:
    """Raises ValueError for operations in a traced loss that may read other examples.

    Raises:
        ValueError: a collective over an axis that the loss did not bring in itself, a callback or a
            foreign call, or a ``custom_vmap``.
    """
    for part in parts(traced):
        for eqn in part.jaxpr.eqns:
            name = eqn.primitive.name
            if name in _OUTSIDE:
                raise ValueError(
                    f"loss_fn must not use {name.removesuffix('_call')}, got one: under vmap its "
                    "code may see the whole batch and let one record change what the others add. "
                    "(jax.debug.print is allowed.)"
                )
            if generator := _other_keys(eqn):
                raise ValueError(
                    f"loss_fn must not use keys of another generator than threefry, got {name} "
                    f"over {generator}: vmap gives every row the bits of the first row's key. Give "
                    "the loss an argument rng, which receives a threefry key of its example, or "
                    "make keys with impl='threefry2x32'"
                )
            if name in _SHARED or _foreign(eqn.primitive):
                raise ValueError(
                    f"loss_fn must not use {name}, got one: how vmap runs it over a batch is not "
                    "row by row (kernels) or not JAX's own rule"
                )
            outer = sorted(_axes_of(eqn) - part.axes, key=str)
            if outer and name != _HARMLESS:
                raise ValueError(
                    f"loss_fn must not communicate over a mesh or vmap axis, got {name} over "
                    f"{outer}: it, or its gradient, mixes the examples of all shards. Sum over the "
                    "axis after clipping, outside the loss"
                )


def has_rules(traced: core.ClosedJaxpr) -> bool:
    """True if the function has custom gradient rules, which only the traced gradient shows."""
    return any(e.primitive.name.startswith(_RULED) for p in parts(traced) for e in p.jaxpr.eqns)


def _other_keys(eqn: core.JaxprEqn) -> str:
    """The other generator than threefry on whose keys an operation works; "" for none."""
    impl = eqn.params.get("impl")
    name = getattr(impl, "name", impl if isinstance(impl, str) else None)
    atoms: Sequence[Any] = (*eqn.invars, *eqn.outvars)
    kinds = [a.aval.dtype for a in atoms if hasattr(getattr(a, "aval", None), "dtype")]
    keys = [str(k) for k in kinds if jax.numpy.issubdtype(k, jax.dtypes.prng_key)]
    if (name or "threefry2x32") not in ("threefry2x32", "fry"):
        return str(name)
    return next((key for key in keys if "fry" not in key), "")


def _foreign(primitive: core.Primitive) -> bool:
    """True if its rule for ``vmap`` was written outside JAX."""
    rule: Any = getattr(batching, "fancy_primitive_batchers", {}).get(primitive)
    rule = getattr(rule, "func", rule)
    if "PrimitiveBatchersProxy" in getattr(rule, "__qualname__", ""):
        # What JAX wraps around a rule that was registered from outside.
        inside = inspect.getclosurevars(rule).nonlocals.get("batcher")
        rule = getattr(inside, "func", inside)
    return not (getattr(rule, "__module__", None) or "jax").startswith("jax")


def _is_traced(value: Any) -> bool:
    return hasattr(value, "eqns")


def _introduced(eqn: core.JaxprEqn) -> frozenset[Any]:
    """The axes that a ``shard_map`` inside the loss brings in for its body."""
    if eqn.primitive.name != "shard_map":
        return frozenset()
    for key in ("newly_manual_axes", "manual_axes"):
        if key in eqn.params:
            return frozenset(eqn.params[key])
    return frozenset()


def _axes_of(eqn: core.JaxprEqn) -> set[Any]:
    """The named axes that an operation works over; numbers among ``axes`` are an array's."""
    named = [axis for axis in _listed(eqn, "axes") if not isinstance(axis, numbers.Integral)]
    named += _listed(eqn, "axis_name")
    if not any(_is_traced(v) for v in jax.tree.leaves(dict(eqn.params), is_leaf=_is_traced)):
        effects: Any = eqn.effects
        named += [e.name for e in effects if type(e).__name__ == "NamedAxisEffect"]
    return set(named)


def _listed(eqn: core.JaxprEqn, key: str) -> list[Any]:
    value = eqn.params.get(key, ())
    return list(value) if isinstance(value, tuple | list | set | frozenset) else [value]
