"""Refuses state of neural network libraries in a loss or its parameters, with the remedy.

Nothing is imported here: a library is asked only where the process has loaded it already.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.types import PyTree

_BATCH_STATS = (
    "loss_fn must not use batch statistics: they mix the examples, and one example has none. Use "
    "GroupNorm or LayerNorm, or keep the statistics fixed: {remedy}"
)
_FIXED = "BatchNorm(use_running_average=True), with public statistics and without mutable="
_FIXED_NNX = "model.eval(), or nnx.BatchNorm(use_running_average=True), with public statistics"
_DROPOUT = (
    "loss_fn must not take dropout from the random state of a captured module ({error}): every "
    "example would get the same numbers, and no step new ones. Give the loss an argument rng and "
    "seed the module with it: model = nnx.merge(graphdef, params, rest, copy=True); "
    "nnx.reseed(model, default=rng) (name the streams that the model has). Or switch dropout off: "
    "model.eval()"
)
_CHANGED = (
    "loss_fn must not change state of a captured module ({error}): it carries values from example "
    "to example. Make the module inside the loss, model = nnx.merge(graphdef, params, rest, "
    "copy=True), with graphdef, params, rest = nnx.split(model, nnx.Param, ...), and train params"
)
_lock = threading.RLock()
_local = threading.local()
_watching = 0
_originals: dict[Any, Any] = {}
_traced_here = jax.make_user_context(False)


def called(loss_fn: Callable[..., Any], *args: Any) -> Any:
    """The result of the loss; batch statistics and other state inside it raise an error."""
    try:
        # In a context of its own, so that functions jitted before are traced, and seen, again.
        with _traced_here(True), _flax_watched():
            return loss_fn(*args)
    except Exception as error:
        words = _words(error)
        if words is None:
            raise
        raise ValueError(words) from error


def check_params(params: PyTree, flags: Sequence[bool]) -> None:
    """Raises ValueError unless the parameters are arrays of kinds that can be trained.

    Raises:
        ValueError: leaves that are no arrays, such as an Equinox module's activation function;
            nnx state that is no ``nnx.Param``; batch statistics. With the remedy.
    """
    check_arrays(params)
    _refuse_states(params, flags)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), flag in zip(leaves, flags, strict=True):
        name = jax.tree_util.keystr(path)
        if flag and "batch_stats" in name:
            raise ValueError(
                f"params must not hold batch statistics where they are trained, got {name}: they "
                'would move by noise. Freeze them, trainable=lambda path: "batch_stats" not in '
                'path, or hand over variables["params"] alone'
            )
        if flag and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"params must be floating-point arrays where they are trained, got "
                f"{jnp.result_type(leaf)} at {name}"
            )


def check_arrays(params: PyTree) -> None:
    """Raises ValueError, with the remedy, if a leaf is no array, or one whose memory is gone."""
    if holds_reused(params):
        raise ValueError(
            "params must be those that the last update returned, got some whose memory it has "
            "reused (donate=True): write params, opt_state, info = update(params, opt_state, "
            "summed). To keep some for later copy them first, jax.tree.map(jnp.copy, params)"
        )
    if all(_is_number(leaf) for leaf in jax.tree.leaves(params)):
        return
    leaves = jax.tree_util.tree_leaves_with_path(params)
    path, leaf = next(pair for pair in leaves if not _is_number(pair[1]))
    raise ValueError(
        f"params must be a pytree of arrays, got a {type(leaf).__name__} at "
        f"{jax.tree_util.keystr(path)} of a {type(params).__name__}. Split a module such as "
        "Equinox's, params, static = eqx.partition(model, eqx.is_inexact_array), and put it "
        "together in the loss: model = eqx.combine(params, static)"
    )


def holds_reused(tree: PyTree) -> bool:
    """True if an array was donated to an earlier step, so that its memory is gone."""
    for leaf in jax.tree.leaves(tree):
        # At every step: isinstance(leaf, jax.Array) would take longer than the question itself.
        deleted = getattr(leaf, "is_deleted", None)
        if deleted is not None and not isinstance(leaf, jax.core.Tracer) and deleted():
            return True
    return False


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _refuse_states(params: PyTree, flags: Sequence[bool]) -> None:
    nnx: Any = sys.modules.get("flax.nnx")
    if not hasattr(nnx, "Variable"):
        return
    kinds = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    each = iter(flags)
    for path, kind in kinds:
        trained = [next(each) for _ in jax.tree.leaves(kind)]
        if isinstance(kind, nnx.Variable) and not isinstance(kind, nnx.Param) and any(trained):
            raise ValueError(
                f"params must be nnx.Param where they are trained, got {type(kind).__name__} at "
                f"{jax.tree_util.keystr(path)}. Split the model, graphdef, params, rest = "
                "nnx.split(model, nnx.Param, ...), train params, and put it together in the loss: "
                "model = nnx.merge(graphdef, params, rest, copy=True)"
            )


def _words(error: Exception) -> str | None:
    """Words for an error that state in the loss caused; None for any other."""
    name, found = type(error).__name__, str(error)
    short = found.split(" (http")[0]
    if name == "ModifyScopeVariableError":
        remedy = f"{_FIXED} ({short})"
        return _BATCH_STATS.format(remedy=remedy)
    if name == "TraceContextError":
        if "BatchStat" in found:
            return _BATCH_STATS.format(remedy=f"{_FIXED_NNX} ({short})")
        return (_DROPOUT if "mutate Rng" in found else _CHANGED).format(error=short)
    if isinstance(error, NameError) and "axis name" in found:
        return (
            f"loss_fn must not communicate over an axis that is not its own ({short}): it sees one "
            "example, and batch statistics over axis_name= mix them. Use GroupNorm or LayerNorm"
        )
    return None


@contextlib.contextmanager
def _flax_watched() -> Iterator[None]:
    """Refuses, inside, batch statistics that linen and nnx would compute from one example."""
    linen: Any = sys.modules.get("flax.linen")
    nnx: Any = sys.modules.get("flax.nnx")
    with contextlib.ExitStack() as stack:
        if hasattr(linen, "intercept_methods"):
            stack.enter_context(linen.intercept_methods(functools.partial(_linen, linen)))
        if hasattr(nnx, "BatchNorm"):
            stack.enter_context(_nnx_watched(nnx))
        yield


def _linen(linen: Any, method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Looks at every call of a linen module."""
    module = context.module
    if isinstance(module, linen.BatchNorm) and context.method_name == "__call__":
        given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
        fixed = module.use_running_average if given is None else given
        if not fixed:
            raise ValueError(_BATCH_STATS.format(remedy=_FIXED))
    outermost = module.scope is not None and module.scope.parent is None
    if not outermost or not module.is_mutable_collection("batch_stats"):
        return method(*args, **kwargs)
    before = jax.tree.leaves(module.variables.get("batch_stats"))
    result = method(*args, **kwargs)
    after = jax.tree.leaves(module.variables.get("batch_stats"))
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise ValueError(_BATCH_STATS.format(remedy=_FIXED))
    return result


@contextlib.contextmanager
def _nnx_watched(nnx: Any) -> Iterator[None]:
    """Looks at calls of nnx's BatchNorm and Dropout in this thread, while entered in any thread."""
    global _watching
    watched = ((nnx.BatchNorm, _check_norm), (nnx.Dropout, _check_dropout))
    with _lock:
        _watching += 1
        if _watching == 1:
            for kind, check in watched:
                _originals[kind] = kind.__call__
                kind.__call__ = _checked(kind.__call__, check)
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1
        with _lock:
            _watching -= 1
            if _watching == 0:
                for kind, _ in watched:
                    kind.__call__ = _originals.pop(kind)


def _checked(call: Callable[..., Any], check: Callable[[Any, dict[str, Any]], None]) -> Any:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "depth", 0):
            check(self, signature.bind(self, *args, **kwargs).arguments)
        return call(self, *args, **kwargs)

    return watched


def _check_norm(norm: Any, given: dict[str, Any]) -> None:
    if not _first(given.get("use_running_average"), norm.use_running_average):
        raise ValueError(_BATCH_STATS.format(remedy=_FIXED_NNX))


def _check_dropout(dropout: Any, given: dict[str, Any]) -> None:
    if _first(given.get("deterministic"), dropout.deterministic) or dropout.rate in (0.0, 1.0):
        return
    rngs = _first(given.get("rngs"), dropout.rngs)
    keys = jax.tree.leaves(rngs)
    if keys and not any(isinstance(key, jax.core.Tracer) for key in keys):
        raise ValueError(_DROPOUT.format(error="its keys are not the example's"))


def _first(given: Any, own: Any) -> Any:
    return own if given is None else given
