"""Arrays that a loss captures: refused where they may hold the batch, else listed.

jaxdp cannot see from what a captured array was computed. A traced one may be the batch itself and
is refused. A concrete one is accepted, listed in the plan, and named by the ledger as assumed
public unless it was declared so. One with as many rows as the batch is refused until declared.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxdp.clipping import coupling
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.tickets import Ticket
from jaxdp.types import PyTree

_DECLARED = "_jaxdp_constants"
_look: contextvars.ContextVar[Any] = contextvars.ContextVar("jaxdp_look", default=None)


@dataclasses.dataclass(frozen=True)
class Constant(LeafPlan):
    """A captured array in a plan, after the parameters; ``engine`` is "constant".

    Attributes:
        shape: shape of the array.
        is_key: True if it holds keys of random numbers.
    """

    shape: tuple[int, ...] = ()
    is_key: bool = False


class Declared:
    """Arrays that the caller declared public; hashable by identity, as ``jit`` needs it."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = tuple(arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Declared) and self._ids() == other._ids()

    def __hash__(self) -> int:
        return hash(self._ids())

    def __repr__(self) -> str:
        return f"Declared({len(self.arrays)} arrays)"

    def _ids(self) -> tuple[int, ...]:
        return tuple(id(array) for array in self.arrays)

    def holds(self, array: Any) -> bool:
        """True if ``array`` is one of them."""
        return bool(self.arrays) and _key(array) in self._keys

    @functools.cached_property
    def _keys(self) -> set[Any]:
        return {_key(array) for array in self.arrays}


def declared(constants: PyTree, loss_fn: Callable[..., Any]) -> Declared:
    """The arrays that ``constants`` names, and those that jaxdp's own losses declare."""
    arrays = jax.tree.leaves(constants)
    for array in arrays:
        if isinstance(array, jax.core.Tracer) or not hasattr(array, "shape"):
            kind = "a traced array" if hasattr(array, "shape") else repr(array)
            raise ValueError(f"constants must be a pytree of concrete arrays, got {kind}")
    return Declared([*arrays, *getattr(loss_fn, _DECLARED, ())])


def declaring(
    loss_fn: Callable[..., Any], constants: PyTree = None, inner: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``loss_fn`` with ``constants`` declared public, besides what the loss inside it declares."""
    arrays = (*jax.tree.leaves(constants), *getattr(inner, _DECLARED, ()))
    setattr(loss_fn, _DECLARED, arrays)
    return loss_fn


def found(
    traced: Any,
    public: Declared,
    loss_fn: Callable[..., Any],
    flags: Sequence[bool],
    params: PyTree,
    args: Sequence[PyTree],
) -> tuple[Constant, ...]:
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
    coupling.refuse(traced)
    arrays = _distinct(_arrays(traced))
    if any(flags) and coupling.has_rules(traced):
        gradient = _gradient(loss_fn, flags, params, args)
        coupling.refuse(gradient)
        arrays = _distinct([*arrays, *_arrays(gradient)])
    if (look := _look.get()) is not None:
        look(traced, public)
    return tuple(_entry(at, array, public) for at, array in enumerate(arrays))


@contextlib.contextmanager
def looked_at(look: Callable[[Any, Declared], None]) -> Iterator[None]:
    """Hands every loss that is traced inside to ``look``, with the arrays declared public."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def check_rows(plan: Sequence[LeafPlan], rows: Collection[int], records: int | None = None) -> None:
    """Raises ValueError for captured arrays, not declared, that may hold batch or data set.

    Args:
        plan: with the captured arrays.
        rows: lengths of a physical batch; no first axis may be one of them.
        records: length of the data set; no axis at all may be it, so that no ledger tells it.

    Raises:
        ValueError: there is one, named by its shape (with ``records`` without it: it is private).
    """
    for entry in plan:
        if not isinstance(entry, Constant) or entry.is_key or not entry.assumed:
            continue
        if records in entry.shape:
            kind = f"an array with {len(entry.shape)} axes, one of them as long as the data set"
        elif entry.shape and entry.shape[0] in rows:
            kind = f"{entry.assumed} where a batch has {entry.shape[0]} rows"
        else:
            continue
        raise ValueError(
            f"loss_fn must not capture an array that may hold the records, got {kind}. If it is "
            "public, make it outside the loss and declare it: constants=array in clipped_grad"
        )


def check_loss(
    loss_fn: Callable[..., Any], params: PyTree, example: PyTree, rows: int, records: int
) -> None:
    """The same refusals for a loss that is summed without a gradient, such as an energy's."""
    traced = jax.make_jaxpr(loss_fn)(params, example)
    plan = found(traced, declared(None, loss_fn), loss_fn, [], params, [example])
    check_rows(plan, (rows,), records)


def report(ticket: Ticket | None, plan: Sequence[Any]) -> None:
    """Tells the ledger of a draw what the draw's sum assumes to be public."""
    if ticket is not None:
        for entry in plan:
            if entry.assumed:
                ticket.assume(entry.assumed)


def _gradient(
    loss_fn: Callable[..., Any], flags: Sequence[bool], params: PyTree, args: Sequence[PyTree]
) -> Any:
    """The traced gradient by the trained leaves, in which custom rules have been called."""
    leaves, structure = jax.tree.flatten(params)
    trained = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

    def gradient(trained: Sequence[Any], leaves: Sequence[Any], *args: PyTree) -> Any:
        def loss(trained: Sequence[Any]) -> Any:
            each = iter(trained)
            whole = [next(each) if f else leaf for leaf, f in zip(leaves, flags, strict=True)]
            return loss_fn(jax.tree.unflatten(structure, whole), *args)

        return jax.grad(loss, has_aux=True)(trained)

    return jax.make_jaxpr(gradient)(trained, leaves, *args)


def _arrays(traced: Any) -> Iterator[Any]:
    """The captured arrays, constants written into operations included, but for their scalars."""
    for part in coupling.parts(traced):
        yield from part.consts
        for atoms in (part.jaxpr.outvars, *(eqn.invars for eqn in part.jaxpr.eqns)):
            literals = [atom.val for atom in atoms if isinstance(atom, core.Literal)]
            yield from (value for value in literals if np.shape(value))


def _distinct(arrays: Iterable[Any]) -> list[Any]:
    kept: dict[Any, Any] = {}
    for array in arrays:
        _refuse_unseen(array)
        kept.setdefault(_key(array), array)
    return list(kept.values())


def _refuse_unseen(array: Any) -> None:
    words = f"{jnp.result_type(array)} {list(np.shape(array))}"
    if "Ref" in type(getattr(array, "aval", None)).__name__:
        raise ValueError(
            f"loss_fn must not capture a mutable array (jax.Ref), got one of {words}: it carries "
            "values from one example to others"
        )
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            f"loss_fn must not capture a traced array, got {words}: it may be the batch, or "
            "computed from it. Hand it over as a leaf of params that trainable= freezes, or "
            "capture a concrete array, made outside jit, vmap, grad and scan"
        )


def _entry(at: int, array: Any, public: Declared) -> Constant:
    dtype, shape = jnp.result_type(array), tuple(np.shape(array))
    words = f"{dtype} {list(shape)}"
    if public.holds(array):
        reason, assumed = f"{words}, declared public", ""
    else:
        reason, assumed = f"{words}, assumed public", f"a captured array {words}"
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return Constant(f"captured[{at}]", "constant", reason, assumed, shape=shape, is_key=is_key)


def _key(array: Any) -> Any:
    """A key that tells arrays apart; NumPy's by content, since every trace copies them."""
    if not isinstance(array, np.ndarray):
        return id(array)
    plain = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return plain.shape, str(plain.dtype), hashlib.blake2b(plain.tobytes()).digest()
