"""Observations of an optax chain while it is traced: who opened the sum and its noise key.

And of arrays: which of them jaxdp itself returned, computed from noisy releases.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

OTHERS = (
    "the chain has a link that is not jaxdp's own and that opened the sum or its noise key: that "
    "it adds noise of noise_multiplier times l2 to every coordinate, and releases nothing else of "
    "the sum, was not verified"
)


@dataclasses.dataclass(eq=False)
class Seen:
    """Observations of one update.

    Attributes:
        parts: the number of times that a part of the noise key was asked for.
        others: True if a link that is not jaxdp's own did so, or read the sum.
        multipliers: part -> (step -> noise multiplier) of the noise that jaxdp's links add.
    """

    parts: int = 0
    others: bool = False
    multipliers: dict[str, Callable[[int], Any]] = dataclasses.field(default_factory=dict)

    def agree(self, step: Any, charged: Mapping[str, Any]) -> None:
        """Raises ValueError if a step was charged for other noise than the update adds.

        Args:
            step: the step of the noise schedule.
            charged: the multiplier of each part, on the host.

        Raises:
            ValueError: the multipliers differ.
        """
        for part, multiplier_at in self.multipliers.items():
            wanted = np.float32(charged.get(part, np.nan))
            # A part that was not charged is refused elsewhere; a step past a schedule is NaN.
            if part in charged and (found := np.float32(multiplier_at(step))) != wanted:
                raise ValueError(
                    f"noise_multiplier must be the one that the step was charged for, {wanted}, "
                    f"got {found}: take mechanism.privatize() of the mechanism that drew"
                )


class _Now(threading.local):
    """The observations of this thread, and the number of jaxdp's own links at work."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.own = 0


_now = _Now()


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Records in ``seen`` what happens inside."""
    _now.seen.append(seen)
    try:
        yield
    finally:
        _now.seen.remove(seen)


def own(update: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the ``update`` of a link that is jaxdp's own: it may open sums and keys."""

    @functools.wraps(update)
    def marked(*args: Any, **kwargs: Any) -> Any:
        _now.own += 1
        try:
            return update(*args, **kwargs)
        finally:
            _now.own -= 1

    return marked


def took_part() -> None:
    """Records that a part of a noise key was asked for."""
    for seen in _now.seen:
        seen.parts += 1
    read()


def read() -> None:
    """Records that a sum or a key was opened, unless by a link of jaxdp's own."""
    if not _now.own:
        for seen in _now.seen:
            seen.others = True


def adds(part: str, multiplier_at: Callable[[int], Any]) -> None:
    """Records that a link of jaxdp's own adds the noise of a part."""
    for seen in _now.seen:
        seen.multipliers[part] = multiplier_at


class _Returned(weakref.ref[Any]):
    """A weak reference to an array that jaxdp returned, and a note of what it was computed from."""

    __slots__ = ("key", "past")

    key: int
    past: bytes


# By ``id``; an array that dies is forgotten before its ``id`` can be another's.
_returned: dict[int, _Returned] = {}


def _forget(dead: _Returned) -> None:
    if _returned.get(dead.key) is dead:
        del _returned[dead.key]


def give_out(tree: Any, past: bytes = b"") -> None:
    """Notes that jaxdp returned these arrays, computed from noisy releases and public constants.

    NumPy's are left out: they can be changed.

    Args:
        tree: pytree of arrays.
        past: the head of the ledger that holds these releases; ``start_of`` their clip bound, for
            bounds that follow it; b"" for what a trainer read from its own state.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            kept = _Returned(leaf, _forget)
            kept.key, kept.past = id(leaf), past
            _returned[kept.key] = kept


def start_of(bound: float) -> bytes:
    """The ``past`` of clip bounds that began at ``bound``, a declared constant."""
    return f"from the bound {float(bound)!r}".encode()


def past_of(leaf: Any) -> bytes | None:
    """The ``past`` that an array was given out with; None for what jaxdp did not return."""
    kept = _returned.get(id(leaf))
    return kept.past if kept is not None and kept() is leaf else None


def hand_on(old: Any, new: Any) -> None:
    """Gives out each array whose counterpart in a tree of the same structure was given out.

    Args:
        old: what ``new`` was made from, leaf by leaf, and from noisy releases.
        new: likewise.
    """
    for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=False):
        if (past := past_of(one)) is not None:
            give_out(other, past)
