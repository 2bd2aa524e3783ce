"""The loss of one example: how it is called, what it may do and capture, losses made of losses.

One record may change its own gradient alone. So a loss sees one example, no operation in it may
read another one, no state may go from example to example, and what it captures is public: an array
that is traced may be the batch itself and is refused; one that is concrete is compared with the
records, where they are known, listed in the plan, and named by the ledger as assumed public, unless
it was declared so. jaxdp cannot see from what else a captured array was computed.

Flax is not imported here: it is asked only where the process has loaded it already.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import itertools
import numbers
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import batching  # its public face cannot be read
from jax.extend import core
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.clipping import options, statistics
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.ghost.program import inner_jaxprs
from jaxdp.ledger.returned import find_past
from jaxdp.ledger.tickets import Ticket
from jaxdp.sampling import User
from jaxdp.types import PyTree

# The way out for an array that holds the records, which to declare public would publish.
OF_RECORDS = (
    "make what belongs to a record a leaf of it. Among the nodes of one graph the loss of one "
    "record reads others through what it captured, and privacy of a node would need a bound on the "
    "losses that it enters (its degree), which jaxdp does not have: let a whole graph be a record, "
    "or a node with its neighbours where nobody is in two of these"
)
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
_nnx_lock = threading.RLock()
_traced_here = jax.make_user_context(False)
# What looks at every loss that is traced.
_inspect: contextvars.ContextVar[Any] = contextvars.ContextVar("jaxdp_inspect", default=None)
# Where a loss of jaxdp's own keeps the arrays that it declares public.
_CONSTANTS = "_jaxdp_constants"
# Their code sees the whole batch under ``vmap``, or other code is run than was traced.
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call", "custom_vmap_call")
# Bits of all rows from the first row's key, and kernels whose memory goes from row to row.
_SHARED = ("rng_bit_generator", "rng_uniform", "pallas_call", "custom_partitioning")
# The one generator whose keys differ from row to row under vmap, as operations or types name it.
_THREEFRY = ("threefry2x32", "fry", "key<fry>")
# Gives a constant to each shard: no example sees another by it.
_HARMLESS = "axis_index"
# Their gradient rules are functions that are only called when a gradient is taken.
_RULED = ("custom_jvp", "custom_vjp", "custom_transpose", "linear_call")


@dataclasses.dataclass(frozen=True)
class Form:
    """The way to call a loss with one example; made by ``form_of``."""

    # The arguments after the parameters that are given by their place.
    names: tuple[str, ...] = ("example",)
    # The argument that takes the key, or None; given by its name if it is none of those.
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
                    f"{options.describe_shapes(example)}. Let the loss take (params, example) and "
                    "open the example inside, or rearrange the data"
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
    # By its place where it stands between these or next to them: wrappers may take places alone.
    has_place = rng in positional[1 : len(wanted) + 2]
    return Form(tuple(positional[1 : len(wanted) + 1 + has_place]), rng)


def call(loss_fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Calls the loss, which may use no batch statistics and change no state of a library.

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
                stack.enter_context(linen.intercept_methods(_require_fixed_statistics))
            if hasattr(nnx, "BatchNorm"):
                stack.enter_context(_checking_nnx(nnx, args[1]))
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


def _require_fixed_statistics(
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
def _checking_nnx(nnx: Any, params: PyTree) -> Iterator[None]:
    """Checks every call of nnx's BatchNorm and Dropout inside, of this thread alone.

    Keys of dropout that stand among ``params`` would be the same for all examples and steps.
    The two classes are changed while the loss is traced, so one thread traces at a time.
    """
    here = threading.get_ident()
    of_params = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own_unless(given: Any, own: Any) -> Any:
        return own if given is None else given

    def check_norm(norm: Any, given: Mapping[str, Any]) -> None:
        if not own_unless(given.get("use_running_average"), norm.use_running_average):
            raise ValueError(_BATCH_STATS.format(_FIXED_NNX))

    def check_dropout(dropout: Any, given: Mapping[str, Any]) -> None:
        off = own_unless(given.get("deterministic"), dropout.deterministic)
        keys = jax.tree.leaves(own_unless(given.get("rngs"), dropout.rngs))
        traced = any(isinstance(key, jax.core.Tracer) for key in keys)
        traced &= of_params.isdisjoint(map(id, keys))
        if not off and dropout.rate not in (0.0, 1.0) and keys and not traced:
            raise ValueError(_DROPOUT.format("its keys are not the example's"))

    def checked(call: Callable[..., PyTree], check: Callable[..., None]) -> Any:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def checked_call(self: Any, *args: Any, **kwargs: Any) -> PyTree:
            if threading.get_ident() == here:
                check(self, signature.bind(self, *args, **kwargs).arguments)
            return call(self, *args, **kwargs)

        return checked_call

    with _nnx_lock, contextlib.ExitStack() as stack:
        for kind, check in ((nnx.BatchNorm, check_norm), (nnx.Dropout, check_dropout)):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = checked(kind.__call__, check)
        yield


class TracedFunction(NamedTuple):
    """A traced function, the loss itself or one inside it."""

    jaxpr: core.Jaxpr  # its operations
    consts: Sequence[Any]  # the arrays that it captured
    axes: frozenset[Any]  # names of the axes that the loss itself brought in around it


def traced_functions(
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
            yield from traced_functions(inner, axes | frozenset(own))


def inspect_loss(
    traced: core.ClosedJaxpr,
    public: "Constants",
    loss_fn: Callable[..., PyTree],
    flags: Sequence[bool],
    params: PyTree,
    args: Sequence[PyTree],
) -> tuple[LeafPlan, ...]:
    """Checks a traced loss, and the gradient rules of its own; lists the arrays that it captured.

    Args:
        traced: the loss as a ``ClosedJaxpr``.
        public: the arrays declared public.
        loss_fn: ``(params, *args) -> (scalar, aux)``.
        flags: for each leaf of the parameters, True if it is trained.
        params: the parameters.
        args: shapes of the other arguments.

    Raises:
        ValueError: an operation could reach other examples, or an array is traced or mutable.
    """
    of_loss, arrays = traced, {_identity(array): array for array in captured_alone(traced)}
    # Gradient rules of its own are functions that are called only when a gradient is taken, and
    # capture what they like: the gradient by the trained leaves is traced, and checked as well.
    operations = (eqn for function in traced_functions(traced) for eqn in function.jaxpr.eqns)
    if any(flags) and any(eqn.primitive.name.startswith(_RULED) for eqn in operations):
        leaves, structure = jax.tree.flatten(params)

        def gradient(
            trained: Sequence[jax.Array], leaves: Sequence[jax.Array], *args: PyTree
        ) -> PyTree:
            def loss(trained: Sequence[jax.Array]) -> PyTree:
                each = iter(trained)
                whole = [next(each) if f else leaf for leaf, f in zip(leaves, flags, strict=True)]
                return loss_fn(jax.tree.unflatten(structure, whole), *args)

            return jax.grad(loss, has_aux=True)(trained)

        trained = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
        traced = jax.make_jaxpr(gradient)(trained, leaves, *args)
        arrays = {_identity(array): array for array in captured_alone(traced)} | arrays
    if (look := _inspect.get()) is not None:
        look(traced, public, of_loss)

    entries = []
    for at, array in enumerate(arrays.values()):
        words = f"{jnp.result_type(array)} {list(np.shape(array))}"
        how, assumed = "assumed", f"a captured array {words}"
        if public.holds(array):
            how, assumed = "declared", ""
        reason = f"{words}, {how} public"
        entries.append(LeafPlan(f"captured[{at}]", "constant", reason, assumed))
    return tuple(entries)


def captured_alone(traced: core.ClosedJaxpr, name: str = "loss_fn") -> list[ArrayLike]:
    """The arrays that a function of one example captured, once it is seen to read no other one.

    Args:
        traced: the function.
        name: in words.

    Raises:
        ValueError: an operation could reach other examples, or an array is traced or mutable.
    """
    arrays: list[ArrayLike] = []
    for function in traced_functions(traced):
        for eqn in function.jaxpr.eqns:
            _check_operation(eqn, function.axes, name)
        # Constants written into operations are arrays, too, but for their scalars.
        atoms = itertools.chain(function.jaxpr.outvars, *(e.invars for e in function.jaxpr.eqns))
        written = [a.val for a in atoms if isinstance(a, core.Literal) and np.shape(a.val)]
        for array in (*function.consts, *written):
            words = f"{jnp.result_type(array)} {list(np.shape(array))}"
            if "Ref" in type(getattr(array, "aval", None)).__name__:
                raise ValueError(
                    f"{name} must not capture a mutable array (jax.Ref), got one of "
                    f"{words}: it carries values from one example to others"
                )
            if isinstance(array, jax.core.Tracer):
                raise ValueError(
                    f"{name} must not capture a traced array, got {words}: it may be the "
                    "batch, or computed from it. If it is public, hand it over as a leaf of "
                    "params that trainable= freezes, or capture a concrete array, made "
                    "outside jit, vmap, grad and scan"
                )
            arrays.append(array)
    return arrays


def check_loss(loss_fn: Callable[..., PyTree], params: PyTree, data: PyTree) -> None:
    """The same refusals for a loss that is summed without a gradient, such as an energy's."""
    example = options.example_shapes(data)
    traced = jax.make_jaxpr(loss_fn)(params, example)
    with comparing(data):
        inspect_loss(traced, declared_constants(None, loss_fn), loss_fn, [], params, [example])


def _check_operation(eqn: core.JaxprEqn, own_axes: frozenset[Any], what: str) -> None:
    """Refuses an operation of ``what`` that may read other examples.

    Raises:
        ValueError: it is a collective over an axis that the loss did not bring in itself
            (``own_axes``), a callback or a foreign call, a kernel, a generator whose bits all rows
            share, or a ``custom_vmap``.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in _OUTSIDE:
        raise ValueError(
            f"{what} must not use {name.removesuffix('_call')}, got one: under vmap its code may "
            "see the whole batch and let one record change what the others add. (jax.debug.print "
            "is allowed.)"
        )

    # The generator that the operation names, and those of the keys that it works on.
    impl = getattr(params.get("impl"), "name", params.get("impl"))
    avals: Sequence[Any] = [getattr(a, "aval", None) for a in (*eqn.invars, *eqn.outvars)]
    kinds = [aval.dtype for aval in avals if hasattr(aval, "dtype")]
    keys = [impl] if isinstance(impl, str) else []
    keys += [str(k) for k in kinds if jax.numpy.issubdtype(k, jax.dtypes.prng_key)]
    if others := [key for key in keys if key not in _THREEFRY]:
        raise ValueError(
            f"{what} must not use keys of another generator than threefry, got {name} over "
            f"{others[0]}: vmap gives every row the bits of the first row's key. Give the loss an "
            "argument rng, which receives a threefry key of its example, or make keys with "
            "impl='threefry2x32'"
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
            f"{what} must not use {name}, got one: how vmap runs it over a batch is not row by "
            "row (kernels) or not JAX's own rule"
        )

    # The axes that it works over. A number in ``axes`` is an array's; elsewhere it is a name
    # like any.
    named: list[Any] = []
    for key in ("axes", "axis_name"):
        value = params.get(key, ())
        axes = value if isinstance(value, tuple | list | set | frozenset) else [value]
        named += [a for a in axes if key == "axis_name" or not isinstance(a, numbers.Integral)]
    if not inner_jaxprs(eqn):
        effects: Any = eqn.effects
        named += [e.name for e in effects if type(e).__name__ == "NamedAxisEffect"]
    outer = set(named) - own_axes
    if outer and name != _HARMLESS:
        raise ValueError(
            f"{what} must not communicate over a mesh or vmap axis, got {name} over "
            f"{sorted(outer, key=str)}: it, or its gradient, mixes the examples of all shards. Sum "
            "over the axis after clipping, outside the loss"
        )


class Constants:
    """Arrays that the caller declared public; hashable by identity, as ``jit`` needs it."""

    def __init__(self, arrays: Sequence[ArrayLike]) -> None:
        self.arrays = tuple(arrays)
        self._ids = tuple(id(a) if np.shape(a) else _identity(a) for a in self.arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)

    def __repr__(self) -> str:
        return f"Constants({len(self.arrays)} arrays)"

    def holds(self, array: ArrayLike) -> bool:
        """True if ``array`` is one of them; a single number, if it has the value of one."""
        if not self.arrays or _identity(array) in self._keys:
            return bool(self.arrays)
        return not np.shape(array) and self.holds_value(array)

    def holds_value(self, array: ArrayLike) -> bool:
        """True if ``array`` has the numbers of one of them: what was copied is another array."""
        if not is_readable(array) or is_key(array):
            return False
        array = np.asarray(array)
        same = (np.asarray(a) for a in self.arrays if np.shape(a) == array.shape and not is_key(a))
        real = (a for a in same if a.dtype.kind != "c")
        with np.errstate(all="ignore"):  # in its dtype: what a program computes with is rounded
            return any(np.array_equal(a.astype(array.dtype), array) for a in real)

    @functools.cached_property
    def _keys(self) -> set[Any]:
        return {_identity(array) for array in self.arrays}


def declared_constants(constants: PyTree, loss_fn: Callable[..., PyTree]) -> Constants:
    """The arrays that ``constants`` names, and those that jaxdp's own losses declare."""
    leaves, number = jax.tree.leaves(constants), np.generic | bool | int | float
    arrays = [np.asarray(leaf) if isinstance(leaf, number) else leaf for leaf in leaves]
    for array in arrays:
        traced = isinstance(array, jax.core.Tracer)
        if traced or not hasattr(array, "shape") or array.dtype == np.dtype(object):
            kind = "a traced array" if traced else repr(array)
            raise ValueError(
                f"constants must be a pytree of concrete arrays and numbers, got {kind}"
            )
    return Constants([*arrays, *getattr(loss_fn, _CONSTANTS, ())])


def with_constants(
    loss_fn: Callable[..., PyTree],
    constants: PyTree = None,
    inner: Callable[..., PyTree] | None = None,
) -> Callable[..., PyTree]:
    """``loss_fn`` with ``constants`` declared public, besides what the loss inside it declares."""
    arrays = (*jax.tree.leaves(constants), *getattr(inner, _CONSTANTS, ()))
    setattr(loss_fn, _CONSTANTS, arrays)
    return loss_fn


def named_key(
    loss_fn: Callable[..., PyTree], rng_name: str | Sequence[str] | None
) -> Callable[..., PyTree]:
    """The loss as ``(params, example)`` or ``(params, example, rng)``; ``rng_name`` as there."""
    form = form_of(loss_fn, rng_name)
    if form.rng is None:
        named: Any = lambda params, example: form(loss_fn, params, example)  # noqa: E731
    else:
        named = lambda params, example, rng: form(loss_fn, params, example, rng)  # noqa: E731
    return with_constants(named, inner=loss_fn)


@contextlib.contextmanager
def inspecting(
    look: Callable[[core.ClosedJaxpr, Constants, core.ClosedJaxpr], None],
) -> Iterator[None]:
    """Calls ``look(traced, public, loss)`` for every loss that is traced inside.

    ``traced`` is the loss, or its gradient where it has gradient rules of its own; ``public`` are
    the arrays declared public.

    In place of what ``comparing`` does there: a caller that has compared the loss with all records
    lets it be compared with no part of them again.
    """
    token = _inspect.set(look)
    try:
        yield
    finally:
        _inspect.reset(token)


def comparing(data: PyTree) -> contextlib.AbstractContextManager[None]:
    """Refuses losses traced inside that captured records [n, ...] or a statistic of them.

    Nothing is done where the numbers of ``data`` are not known, as those of traced arrays, and
    where a caller inspects by itself.
    """
    leaves = jax.tree.leaves(data)
    if not leaves or _inspect.get() is not None or not all(map(is_readable, leaves)):
        return contextlib.nullcontext()

    def compare(traced: core.ClosedJaxpr, public: Constants, loss: core.ClosedJaxpr) -> None:
        records = statistics.KnownRecords(leaves)
        match = functools.partial(statistics.match_statistic, records=records)
        for found in captured_from_records(traced, match, public):
            if found.match.certain:
                raise captured_error(found, records.count)

    return inspecting(compare)


class CapturedArray(NamedTuple):
    """A captured array that was computed from records."""

    value: Any
    match: statistics.Match  # the rows or the statistic of the records that it is
    function: TracedFunction  # the traced function that it stands in
    at: Any  # its variable there, or the operation that it is written into


def captured_from_records(
    traced: core.ClosedJaxpr,
    match: Callable[[Any], statistics.Match | None],
    public: Constants | None = None,
) -> Iterator[CapturedArray]:
    """Yields the arrays and numbers that a loss captured and that were computed from records.

    Args:
        traced: the loss.
        match: ``statistics.match_statistic``, of the records.
        public: arrays that are not compared.
    """
    for function in traced_functions(traced):
        jaxpr, consts = function.jaxpr, function.consts
        captured = zip(jaxpr.constvars, consts, strict=True) if consts else ()
        written = ((e, a.val) for e in jaxpr.eqns for a in e.invars if isinstance(a, core.Literal))
        for at, value in (*captured, *written):
            if is_key(value) or (public is not None and public.holds(value)):
                continue
            if is_readable(value) and (found := match(value)) is not None:
                yield CapturedArray(value, found, function, at)


def captured_error(found: CapturedArray, records: int, where: str = "") -> ValueError:
    """The error for a captured array that was computed from records.

    Args:
        found: the array.
        records: their number, which no message tells.
        where: the line where it is used.
    """
    place = f" ({where})" if where else ""
    way_out = (
        "use a public constant, or a charged release (jaxdp.preprocess); if it is public all the "
        "same, declare it: constants=array"
    )
    return ValueError(
        "loss_fn must not capture what was computed from the records, got: "
        f"{describe_captured(found, records)}{place}. Every example's gradient then depends on the "
        "records it was computed from, which are neither clipped nor noised there: "
        f"{OF_RECORDS if found.match.whole else way_out}"
    )


def describe_captured(found: CapturedArray, records: int) -> str:
    """Words for a captured array that was computed from records, without their number."""
    shape = describe_shape(found.value, records)
    return f"a {f'constant {shape} in the loss' if shape else 'number'} is {found.match.words}"


def describe_shape(value: ArrayLike, records: int) -> str:
    """The shape of an array, with N for the number of records; "" for a single number."""
    sizes = ["N" if size == records else str(size) for size in np.shape(value)]
    return f"[{', '.join(sizes)}]" if sizes else ""


def is_key(value: ArrayLike) -> bool:
    """True for keys of random numbers."""
    return bool(jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key))


def is_readable(value: PyTree) -> bool:
    """True for an array whose numbers this process can read."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


def note_assumed(ticket: Ticket | None, plan: Sequence[LeafPlan], params: PyTree) -> None:
    """Notes in the ledger of a draw what the draw's sum assumes to be public.

    Frozen leaves that jaxdp returned from steps of this very ledger are none of that: what they
    were computed from is charged there, or was noted at the first of these steps.
    """
    if ticket is None:
        return
    # The plan has an entry for every leaf, then one for every captured array.
    holds, leaves = ticket.issuer.ledger.holds, jax.tree.leaves(params)
    assumed = {
        entry.assumed
        for entry, leaf in itertools.zip_longest(plan, leaves[: len(plan)])
        if entry.assumed and not holds(find_past(leaf, of_optimizer=False) or b"")
    }
    for what in sorted(assumed):
        ticket.note("assumed", what)


def _identity(array: ArrayLike) -> Any:
    """A hashable that differs between arrays; NumPy's by content, since every trace copies them."""
    if not isinstance(array, np.ndarray):
        return id(array)
    plain = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()


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
        augment: ``(example, key)`` to what ``loss_fn`` takes; it sees one record only.
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

    return with_constants(mean_loss, inner=loss_fn)


def user_loss(loss_fn: Callable[..., Any], reduce: str = "mean") -> Callable[..., jax.Array]:
    """The loss of one user: the mean or sum of ``loss_fn`` over the user's records.

    These make one gradient, which is clipped once. ``loss_fn`` sees one record at a time, so
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
        one = functools.partial(form, loss_fn, params)
        losses = jax.vmap(one)(user.records, keys)
        total = jnp.sum(jnp.where(user.present, losses, jnp.zeros_like(losses)))
        count = jnp.sum(user.present, dtype=losses.dtype)
        return total if reduce == "sum" else total / jnp.maximum(count, jnp.ones_like(count))

    if form.rng is None:
        return lambda params, user: of(params, user, None)
    return lambda params, user, rng: of(params, user, rng)
