"""Records which arrays jaxdp itself returned, and the ledger of the releases behind them."""

import weakref
from typing import Any

import jax


class _Returned(weakref.ref[Any]):
    """A weak reference to an array that jaxdp returned, and a note of what it was computed from."""

    __slots__ = ("key", "of_optimizer", "past")

    key: int
    past: bytes
    of_optimizer: bool


# By ``id``; an array that dies is forgotten before its ``id`` can be another's.
_returned: dict[int, _Returned] = {}


def _forget(dead: _Returned) -> None:
    if _returned.get(dead.key) is dead:
        del _returned[dead.key]


def record_returned(tree: Any, past: bytes = b"", of_optimizer: bool = False) -> None:
    """Records that jaxdp returned these arrays, computed from noisy releases and public constants.

    NumPy's are left out: they can be changed.

    Args:
        tree: pytree of arrays.
        past: the head of the ledger that holds these releases; ``past_of_bound`` of their clip
            bound, for bounds that follow it; b"" for what a trainer read from its own state.
        of_optimizer: True for an optimizer's state, in which its owner's arrays may stand as well.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            kept = _Returned(leaf, _forget)
            kept.key, kept.past, kept.of_optimizer = id(leaf), past, of_optimizer
            _returned[kept.key] = kept


def past_of_bound(bound: float) -> bytes:
    """The ``past`` of clip bounds that began at ``bound``, a declared constant."""
    return f"from the bound {float(bound)!r}".encode()


def find_past(leaf: Any, of_optimizer: bool = True) -> bytes | None:
    """The ``past`` that an array was returned with; None for what jaxdp did not return.

    Args:
        leaf: any object.
        of_optimizer: False looks for parameters alone.
    """
    kept = _returned.get(id(leaf))
    if kept is None or kept() is not leaf or (kept.of_optimizer and not of_optimizer):
        return None
    return kept.past


def copy_past(old: Any, new: Any) -> None:
    """Records each array whose counterpart in a tree of the same structure was returned.

    Args:
        old: what ``new`` was made from, leaf by leaf, and from noisy releases.
        new: likewise.
    """
    for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=False):
        if (past := find_past(one)) is not None:
            record_returned(other, past, find_past(one, of_optimizer=False) is None)
