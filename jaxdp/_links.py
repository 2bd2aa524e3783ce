"""Notes of what a chain's links do with a sum and its noise key, taken while it is traced."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

OTHERS = (
    "the chain has a link that is not jaxdp's own and that opened the sum or its noise key: that "
    "it adds noise of noise_multiplier times l2 to every coordinate, and releases nothing else of "
    "the sum, was not verified"
)


@dataclasses.dataclass(eq=False)
class Seen:
    """Notes of one update.

    Attributes:
        parts: how often a part of the noise key was asked for.
        others: True where a link that is not jaxdp's own did so, or read the sum.
        multipliers: of the noise that jaxdp's links add: by part, a function of the step.
    """

    parts: int = 0
    others: bool = False
    multipliers: dict[str, Callable[[int], Any]] = dataclasses.field(default_factory=dict)

    def agree(self, step: Any, charged: Mapping[str, Any]) -> None:
        """Refuses a step that was charged for other noise than the update adds.

        Args:
            step: of the noise schedule.
            charged: the multiplier of each part, on the host.
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
    """The notes being taken in this thread, and the number of jaxdp's own links at work."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.own = 0


_now = _Now()


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Notes in ``seen`` what happens inside."""
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
    """A part of a noise key is asked for."""
    for seen in _now.seen:
        seen.parts += 1
    read()


def read() -> None:
    """A sum or a key is opened; by whom?"""
    if not _now.own:
        for seen in _now.seen:
            seen.others = True


def adds(part: str, multiplier_at: Callable[[int], Any]) -> None:
    """One of jaxdp's links adds the noise of a part."""
    for seen in _now.seen:
        seen.multipliers[part] = multiplier_at
