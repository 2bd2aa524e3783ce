"""Records, while an optax chain is traced, who opened the sum and took parts of its noise key."""

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


def is_own(kind: Any) -> bool:
    """True for a class or function that jaxdp itself defines."""
    return str(kind.__module__).partition(".")[0] == "jaxdp"


@dataclasses.dataclass(eq=False)
class ChainRecord:
    """Observations of one update.

    Attributes:
        parts: the number of times that a part of the noise key was asked for.
        others: True if a link that is not jaxdp's own did so, or read the sum.
        multipliers: part -> (step -> noise multiplier) of the noise that jaxdp's links add.
    """

    parts: int = 0
    others: bool = False
    multipliers: dict[str, Callable[[int], Any]] = dataclasses.field(default_factory=dict)

    def require_charged(self, step: Any, charged: Mapping[str, Any]) -> None:
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
        self.seen: list[ChainRecord] = []
        self.own = 0


_now = _Now()


@contextlib.contextmanager
def recording(seen: ChainRecord) -> Iterator[None]:
    """Records in ``seen`` what happens inside."""
    _now.seen.append(seen)
    try:
        yield
    finally:
        _now.seen.remove(seen)


def trusted_link(update: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the ``update`` of a link that is jaxdp's own: it may open sums and keys."""

    @functools.wraps(update)
    def marked(*args: Any, **kwargs: Any) -> Any:
        _now.own += 1
        try:
            return update(*args, **kwargs)
        finally:
            _now.own -= 1

    return marked


def record_key_use() -> None:
    """Records that a part of a noise key was asked for."""
    for seen in _now.seen:
        seen.parts += 1
    record_opened()


def record_opened() -> None:
    """Records that a sum or a key was opened, unless by a link of jaxdp's own."""
    if not _now.own:
        for seen in _now.seen:
            seen.others = True


def record_noise(part: str, multiplier_at: Callable[[int], Any]) -> None:
    """Records that a link of jaxdp's own adds the noise of a part."""
    for seen in _now.seen:
        seen.multipliers[part] = multiplier_at
