"""The loss of one example: how it is called, what it may not do there, and losses made of losses.

Flax is not imported here: it is asked only where the process has loaded it already.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.clipping.captured import declaring
from jaxdp.clipping.options import shapes
from jaxdp.sampling import User
from jaxdp.types import PyTree

# An argument of one of these names takes the key of its example.
KEY_NAMES = ("rng", "key")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_OTHERS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

_BATCH_STATS = (
    "loss_fn must not use batch statistics: they mix the examples, and one example has none. Use "
    "GroupNorm or LayerNorm, or keep the statistics fixed: {}"
)
_FIXED = "BatchNorm(use_running_average=True), with public statistics and without mutable="
_FIXED_NNX = "model.eval(), or nnx.BatchNorm(use_running_average=True), with public statistics"
_DROPOUT = (
    "loss_fn must not take dropout from the random state of a captured module ({}): every "
    "example would get the same numbers, and no step new ones. Give the loss an argument rng and "
    "seed the module with it: model = nnx.merge(graphdef, params, rest, copy=True); "
    "nnx.reseed(model, default=rng) (name the streams that the model has). Or switch dropout off: "
    "model.eval()"
)
_CHANGED = (
    "loss_fn must not change state of a captured module ({}): it carries values from example "
    "to example. Make the module inside the loss, model = nnx.merge(graphdef, params, rest, "
    "copy=True), with graphdef, params, rest = nnx.split(model, nnx.Param, ...), and train params"
)
_AXIS = (
    "loss_fn must not communicate over an axis that is not its own ({}): it sees one example, and "
    "batch statistics over axis_name= mix them. Use GroupNorm or LayerNorm"
)
_watching = threading.RLock()
_traced_here = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Form:
    """The way to call a loss with one example; made by ``form_of``.

    Attributes:
        names: the arguments after the parameters that are given by their place.
        rng: the argument that takes the key, or None; given by its name if it is none of those.
    """

    names: tuple[str, ...] = ("example",)
    rng: str | None = None

    def __call__(
        self,
        loss_fn: Callable[..., PyTree],
        params: PyTree,
        example: PyTree,
        key: jax.Array | None = None,
    ) -> PyTree:
        """The result of the loss for one example; ``key`` only where ``rng`` is not None."""
        wanted = [name for name in self.names if name != self.rng]
        parts = [example]
        if len(wanted) > 1:
            listed = ", ".join(wanted)
            if isinstance(example, dict) and set(example) == set(wanted):
                parts = [example[name] for name in wanted]
            elif isinstance(example, tuple | list) and len(example) == len(wanted):
                parts = list(example)
            else:
                of_key = "" if self.rng is None else f" (and the key as {self.rng!r})"
                raise ValueError(
                    f"loss_fn takes ({listed}) besides the parameters{of_key}, so an example must "
                    f"be a tuple or list of {len(wanted)}, or a dict with the keys ({listed}); got "
                    f"{shapes(example)}. Let the loss take (params, example) and open the example "
                    "inside, or rearrange the data"
                )
        values = dict(zip(wanted, parts, strict=True))
        if self.rng is not None:
            values[self.rng] = key
        return loss_fn(params, *[values.pop(name) for name in self.names], **values)


def form_of(
    loss_fn: Callable[..., PyTree], rng_name: str | Sequence[str] | None = KEY_NAMES
) -> Form:
    """The form of a loss by its signature; ``(params, example)`` where it has none.

    Args:
        loss_fn: the loss.
        rng_name: the argument that takes the key: its name, names to look for, or None for none.

    Raises:
        ValueError: the arguments are not those of a loss, named as they were found.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda params, example, **others: None)
    given = list(signature.parameters.values())
    kinds = {p.kind for p in given}

    names = (rng_name,) if isinstance(rng_name, str) else tuple(rng_name or ())
    keys = [p.name for p in given if p.name in names and p.kind not in _OTHERS]
    if isinstance(rng_name, str) and not keys:
        if Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"rng_name must be an argument of loss_fn, got {rng_name!r} for {signature}"
            )
        keys = [rng_name]
    inner: Any = loss_fn
    while inner is not None and not isinstance(rng_name, str):
        partial = isinstance(inner, functools.partial)
        if partial:  # a key that it has given already stays
            keys = [name for name in keys if name not in inner.keywords]
        inner = inner.func if partial else getattr(inner, "__wrapped__", None)
    if len(keys) > 1:
        raise ValueError(
            f"rng_name must say which of ({', '.join(keys)}) takes the key, as in "
            f"rng_name={keys[0]!r}: loss_fn has the arguments {signature}"
        )
    rng = keys[0] if keys else None

    positional = [p.name for p in given if p.kind in _POSITIONAL]
    required = {p.name for p in given if p.default is Parameter.empty and p.name != rng}
    required -= {p.name for p in given if p.kind in _OTHERS}
    wanted = [name for name in positional[1:] if name in required]
    if Parameter.VAR_POSITIONAL in kinds and not wanted:
        return Form(rng=rng)
    if not wanted or positional[0] == rng or required - set(positional):
        raise ValueError(
            "loss_fn must take (params, example), or (params, x, y) for examples that are tuples, "
            f"with the key in an argument called rng or key; got the arguments {signature}"
        )
    # By its place where it stands among these or next to them: wrappers may take places alone.
    among = rng in positional[1 : len(wanted) + 2]
    return Form(tuple(positional[1 : len(wanted) + 1 + among]), rng)


def called(loss_fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """The result of the loss, which may use no batch statistics and change no state of a library.

    Raises:
        ValueError: it does. Flax's own errors, and JAX's for an axis without a name, get words with
            the remedy; statistics that raise none are looked for where Flax computes them.
    """
    try:
        # In a context of its own, so that functions jitted before are traced, and seen, again.
        with _traced_here(True), contextlib.ExitStack() as stack:
            linen: Any = sys.modules.get("flax.linen")
            nnx: Any = sys.modules.get("flax.nnx")
            if hasattr(linen, "intercept_methods"):
                stack.enter_context(linen.intercept_methods(_without_new_statistics))
            if hasattr(nnx, "BatchNorm"):
                stack.enter_context(_nnx_watched(nnx))
            return loss_fn(*args)
    except Exception as error:
        name, found = type(error).__name__, str(error)
        short = found.split(" (http")[0]
        if name == "ModifyScopeVariableError":
            words = _BATCH_STATS.format(f"{_FIXED} ({short})")
        elif name == "TraceContextError" and "BatchStat" in found:
            words = _BATCH_STATS.format(f"{_FIXED_NNX} ({short})")
        elif name == "TraceContextError":
            words = (_DROPOUT if "mutate Rng" in found else _CHANGED).format(short)
        elif isinstance(error, NameError) and "axis name" in found:
            words = _AXIS.format(short)
        else:
            raise
        raise ValueError(words) from error


def _without_new_statistics(
    method: Callable[..., PyTree], args: Sequence[Any], kwargs: Mapping[str, Any], context: Any
) -> PyTree:
    """Calls a linen module's method, which must leave its batch statistics as they are."""
    module = context.module
    if module.scope is None or not module.is_mutable_collection("batch_stats"):
        return method(*args, **kwargs)
    before = jax.tree.leaves(module.variables.get("batch_stats"))
    result = method(*args, **kwargs)
    after = jax.tree.leaves(module.variables.get("batch_stats"))
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise ValueError(_BATCH_STATS.format(_FIXED))
    return result


@contextlib.contextmanager
def _nnx_watched(nnx: Any) -> Iterator[None]:
    """Looks at this thread's calls of nnx's BatchNorm and Dropout, one thread at a time."""
    here = threading.get_ident()

    def check_norm(norm: Any, given: Mapping[str, Any]) -> None:
        if not _first(given.get("use_running_average"), norm.use_running_average):
            raise ValueError(_BATCH_STATS.format(_FIXED_NNX))

    def check_dropout(dropout: Any, given: Mapping[str, Any]) -> None:
        off = _first(given.get("deterministic"), dropout.deterministic)
        keys = jax.tree.leaves(_first(given.get("rngs"), dropout.rngs))
        own = any(isinstance(key, jax.core.Tracer) for key in keys)
        if not off and dropout.rate not in (0.0, 1.0) and keys and not own:
            raise ValueError(_DROPOUT.format("its keys are not the example's"))

    with _watching, contextlib.ExitStack() as stack:
        for kind, check in ((nnx.BatchNorm, check_norm), (nnx.Dropout, check_dropout)):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = _checked(kind.__call__, check, here)
        yield


def _checked(call: Callable[..., PyTree], check: Callable[..., None], here: int) -> Any:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def watched(self: Any, *args: Any, **kwargs: Any) -> PyTree:
        if threading.get_ident() == here:
            check(self, signature.bind(self, *args, **kwargs).arguments)
        return call(self, *args, **kwargs)

    return watched


def _first(given: Any, own: Any) -> Any:
    return own if given is None else given


def augmented(
    loss_fn: Callable[..., jax.Array],
    augment: Callable[[PyTree, jax.Array], PyTree],
    multiplicity: int,
) -> Callable[[PyTree, PyTree, jax.Array], jax.Array]:
    """The mean loss over ``multiplicity`` augmentations of one example (De et al. 2022, section 3).

    (arXiv:2204.13650v2.) The gradients of a record's views are averaged **before** clipping, so the
    record still contributes one clipped gradient: the guarantee is that of the clipping rule, and
    the views cost computation, not privacy.

    Args:
        loss_fn: in one of the forms of ``jaxdp.clipped_grad``.
        augment: ``(example, key) -> example`` of the same shapes; it sees one record only.
        multiplicity: how many views K ≥ 1.

    Returns:
        A loss ``(params, example, rng) -> scalar`` for ``jaxdp.clipped_grad``.

    Raises:
        ValueError: ``augment`` is not a function, or ``multiplicity`` is not a whole number of at
            least 1.
    """
    if not callable(augment):
        raise ValueError(f"augment must be a function (example, key), got {augment!r}")
    multiplicity = arguments.integer("multiplicity", multiplicity, least=1)
    form = form_of(loss_fn)

    def mean_loss(params: PyTree, example: PyTree, rng: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            view_key, loss_key = jax.random.split(key)
            view = augment(example, view_key)
            loss: jax.Array = form(loss_fn, params, view, loss_key)
            return loss

        return jnp.mean(jax.vmap(one)(jax.random.split(rng, multiplicity)))

    return declaring(mean_loss, inner=loss_fn)


def user_loss(loss_fn: Callable[..., Any], reduce: str = "mean") -> Callable[..., jax.Array]:
    """The loss of one user: the mean or sum of ``loss_fn`` over her records.

    Her records make one gradient, which is clipped once. ``loss_fn`` sees one record at a time, so
    no layer can couple two of them.

    Args:
        loss_fn: of one record, a scalar, in any form that ``jaxdp.clipped_grad`` takes.
        reduce: "mean" or "sum".

    Raises:
        ValueError: ``reduce`` is neither.
    """
    arguments.one_of("reduce", reduce, ("mean", "sum"))
    form = form_of(loss_fn)

    def of(params: PyTree, user: User, key: jax.Array | None) -> jax.Array:
        keys = None if key is None else jax.random.split(key, len(user.present))
        losses = jax.vmap(lambda record, own: form(loss_fn, params, record, own))(
            user.records, keys
        )
        total = jnp.sum(jnp.where(user.present, losses, jnp.zeros_like(losses)))
        count = jnp.sum(user.present, dtype=losses.dtype)
        return total if reduce == "sum" else total / jnp.maximum(count, jnp.ones_like(count))

    if form.rng is None:
        return lambda params, user: of(params, user, None)
    return lambda params, user, rng: of(params, user, rng)
