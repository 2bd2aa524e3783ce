"""Arrays that a loss captures: refused where they hold records or a statistic, else listed.

jaxdp cannot see from what a captured array was computed. A traced one may be the batch itself and
is refused. A concrete one is compared with the records, where they are known; it is listed in the
plan, and named by the ledger as assumed public, unless it was declared so.
"""

import contextlib
import contextvars
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jaxdp.clipping import coupling, options, statistics
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.ledger.tickets import Ticket
from jaxdp.types import PyTree

_DECLARED = "_jaxdp_constants"
_look: contextvars.ContextVar[Any] = contextvars.ContextVar("jaxdp_look", default=None)


class Declared:
    """Arrays that the caller declared public; hashable by identity, as ``jit`` needs it."""

    def __init__(self, arrays: Sequence[ArrayLike]) -> None:
        self.arrays = tuple(arrays)
        self._ids = tuple(id(a) if np.shape(a) else _key(a) for a in self.arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Declared) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)

    def __repr__(self) -> str:
        return f"Declared({len(self.arrays)} arrays)"

    def holds(self, array: ArrayLike) -> bool:
        """True if ``array`` is one of them; a single number, if it has the value of one."""
        if not self.arrays or _key(array) in self._keys:
            return bool(self.arrays)
        return not np.shape(array) and self.holds_value(array)

    def holds_value(self, array: ArrayLike) -> bool:
        """True if ``array`` has the numbers of one of them: what was copied is another array."""
        if not is_here(array) or is_key(array):
            return False
        array = np.asarray(array)
        same = (a for a in self.arrays if np.shape(a) == array.shape and not is_key(a))
        with np.errstate(all="ignore"):  # in its dtype: what a program computes with is rounded
            return any(
                np.array_equal(np.asarray(a, array.dtype), array)
                for a in map(np.asarray, same)
                if a.dtype.kind != "c"
            )

    @functools.cached_property
    def _keys(self) -> set[Any]:
        return {_key(array) for array in self.arrays}


def declared(constants: PyTree, loss_fn: Callable[..., PyTree]) -> Declared:
    """The arrays that ``constants`` names, and those that jaxdp's own losses declare."""
    arrays = [
        np.asarray(leaf) if isinstance(leaf, np.generic | bool | int | float) else leaf
        for leaf in jax.tree.leaves(constants)
    ]
    for array in arrays:
        traced = isinstance(array, jax.core.Tracer)
        if traced or not hasattr(array, "shape") or array.dtype == np.dtype(object):
            kind = "a traced array" if traced else repr(array)
            raise ValueError(
                f"constants must be a pytree of concrete arrays and numbers, got {kind}"
            )
    return Declared([*arrays, *getattr(loss_fn, _DECLARED, ())])


def declaring(
    loss_fn: Callable[..., PyTree],
    constants: PyTree = None,
    inner: Callable[..., PyTree] | None = None,
) -> Callable[..., PyTree]:
    """``loss_fn`` with ``constants`` declared public, besides what the loss inside it declares."""
    arrays = (*jax.tree.leaves(constants), *getattr(inner, _DECLARED, ()))
    setattr(loss_fn, _DECLARED, arrays)
    return loss_fn


def found(
    traced: core.ClosedJaxpr,
    public: Declared,
    loss_fn: Callable[..., PyTree],
    flags: Sequence[bool],
    params: PyTree,
    args: Sequence[PyTree],
) -> tuple[LeafPlan, ...]:
    """The arrays that a loss captured, those in its custom gradient rules included.

    Args:
        traced: the loss as a ``ClosedJaxpr``.
        public: the arrays declared public.
        loss_fn: ``(params, *args) -> (scalar, aux)``.
        flags: for each leaf of the parameters, True if it is trained.
        params: the parameters.
        args: shapes of the other arguments.

    Raises:
        ValueError: an array is traced or mutable, or an operation could reach other examples.
    """
    arrays: dict[Any, ArrayLike] = {}

    def look_through(whole: core.ClosedJaxpr) -> None:
        coupling.refuse(whole)
        for part in coupling.parts(whole):
            # Constants written into operations are arrays, too, but for their scalars.
            atoms = itertools.chain(part.jaxpr.outvars, *(e.invars for e in part.jaxpr.eqns))
            written = [a.val for a in atoms if isinstance(a, core.Literal) and np.shape(a.val)]
            for array in (*part.consts, *written):
                words = f"{jnp.result_type(array)} {list(np.shape(array))}"
                if "Ref" in type(getattr(array, "aval", None)).__name__:
                    raise ValueError(
                        "loss_fn must not capture a mutable array (jax.Ref), got one of "
                        f"{words}: it carries values from one example to others"
                    )
                if isinstance(array, jax.core.Tracer):
                    raise ValueError(
                        f"loss_fn must not capture a traced array, got {words}: it may be the "
                        "batch, or computed from it. If it is public, hand it over as a leaf of "
                        "params that trainable= freezes, or capture a concrete array, made "
                        "outside jit, vmap, grad and scan"
                    )
                arrays.setdefault(_key(array), array)

    look_through(traced)
    if any(flags) and coupling.has_rules(traced):
        # The traced gradient by the trained leaves, in which custom rules have been called.
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
        look_through(traced)
    if (look := _look.get()) is not None:
        look(traced, public)

    entries = []
    for at, array in enumerate(arrays.values()):
        words = f"{jnp.result_type(array)} {list(np.shape(array))}"
        how, assumed = "assumed", f"a captured array {words}"
        if public.holds(array):
            how, assumed = "declared", ""
        reason = f"{words}, {how} public"
        entries.append(LeafPlan(f"captured[{at}]", "constant", reason, assumed))
    return tuple(entries)


@contextlib.contextmanager
def looked_at(look: Callable[[core.ClosedJaxpr, Declared], None]) -> Iterator[None]:
    """Hands every loss that is traced inside to ``look``, with the arrays declared public."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


class Found(NamedTuple):
    """A captured array that was computed from records.

    Attributes:
        value: the array.
        made: what of the records it is.
        part: the program that it stands in, as ``coupling.parts`` has it.
        at: its variable there, or the operation that it is written into.
    """

    value: Any
    made: statistics.Made
    part: Any
    at: Any


def of_records(
    traced: core.ClosedJaxpr,
    made_of: Callable[[Any], statistics.Made | None],
    public: Declared | None = None,
) -> Iterator[Found]:
    """The arrays and numbers that a loss captured and that were computed from records.

    Args:
        traced: the loss.
        made_of: ``statistics.made_of``, of the records.
        public: arrays that are not looked at.

    Yields:
        Each of them.
    """
    for part in coupling.parts(traced):
        consts = zip(part.jaxpr.constvars, part.consts, strict=True) if part.consts else ()
        written = (
            (e, a.val) for e in part.jaxpr.eqns for a in e.invars if isinstance(a, core.Literal)
        )
        for at, value in (*consts, *written):
            if is_key(value) or (public is not None and public.holds(value)):
                continue
            if is_here(value) and (made := made_of(value)) is not None:
                yield Found(value, made, part, at)


def check_loss(loss_fn: Callable[..., PyTree], params: PyTree, data: PyTree) -> None:
    """The same refusals for a loss that is summed without a gradient, such as an energy's."""
    example = options.example(data)
    traced = jax.make_jaxpr(loss_fn)(params, example)
    with compared(data):
        found(traced, declared(None, loss_fn), loss_fn, [], params, [example])


@contextlib.contextmanager
def compared(data: PyTree) -> Iterator[None]:
    """Compares what every loss that is traced inside captured with records, where they are known.

    Args:
        data: pytree of arrays [n, ...]; traced ones are not known.
    """
    leaves = jax.tree.leaves(data)
    if not leaves or _look.get() is not None or not all(map(is_here, leaves)):
        yield
        return

    def look(traced: core.ClosedJaxpr, public: Declared) -> None:
        records = statistics.KnownRecords(leaves)
        made_of = functools.partial(statistics.made_of, records=records)
        for found in of_records(traced, made_of, public):
            if found.made.certain:
                raise refusal(found, records.count)

    with looked_at(look):
        yield


def compared_before() -> contextlib.AbstractContextManager[None]:
    """Compares nothing inside: whoever calls this has compared the loss with all records."""
    return looked_at(lambda traced, public: None)


def refusal(found: Found, records: int, where: str = "") -> ValueError:
    """The error for a captured array that was computed from records.

    Args:
        found: the array.
        records: their number, which no message tells.
        where: the line where it is used.
    """
    return ValueError(
        f"loss_fn must not capture what was computed from the records, got: {named(found, records)}"
        f"{f' ({where})' if where else ''}. Every example's gradient then depends on the records "
        "it was computed from, which are neither clipped nor noised there. Use a public constant, "
        "or a charged release (jaxdp.preprocess); if it is public all the same, declare it: "
        "constants=array"
    )


def named(found: Found, records: int) -> str:
    """Words for a captured array that was computed from records, without their number."""
    shape = shape_of(found.value, records)
    return f"a {f'constant {shape} in the loss' if shape else 'number'} is {found.made.words}"


def shape_of(value: ArrayLike, records: int) -> str:
    """The shape of an array, with N for the number of records; "" for a single number."""
    sizes = ["N" if size == records else str(size) for size in np.shape(value)]
    return f"[{', '.join(sizes)}]" if sizes else ""


def is_key(value: ArrayLike) -> bool:
    """True for keys of random numbers."""
    return bool(jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key))


def is_here(value: PyTree) -> bool:
    """True for an array whose numbers this process can read."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


def report(ticket: Ticket | None, plan: Sequence[LeafPlan]) -> None:
    """Tells the ledger of a draw what the draw's sum assumes to be public."""
    if ticket is not None:
        for entry in plan:
            if entry.assumed:
                ticket.note("assumed", entry.assumed)


def _key(array: ArrayLike) -> Any:
    """A key that tells arrays apart; NumPy's by content, since every trace copies them."""
    if not isinstance(array, np.ndarray):
        return id(array)
    plain = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()
