"""Tickets: the right to release one charged step, once. Draws and noise keys derive from them.

Keys are derived from (secret, configuration, incarnation, step, part) by a keyed hash. Wherever a
sampler is made the incarnation is fresh randomness of the operating system, so that a restored
state, a repeated step or a second process gets another draw and other noise. (With a seed that a
person chose it is a count, so that a run can be repeated; the ledger notes it.) The draw of an
epoch that is one event comes from (secret, stream, epoch): a run that was interrupted keeps it.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _links
from jaxdp.ledger.alone import this_process
from jaxdp.ledger.seeds import Secret

if TYPE_CHECKING:
    from jaxdp.ledger.ledger import Ledger

# The part of a step's event whose noise is on an integer grid (``jaxdp.noise.grid``). Its key is
# long, and it has no other: nothing else can be taken for its noise. With correlated noise the name
# of the part begins so.
ON_GRID = "gradient on an integer grid"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "multipliers", "tag", "step", "before", "long"],
    meta_fields=["parts"],
)
@dataclass(frozen=True, eq=False)
class NoiseKey:
    """The noise key of one step, to be handed to a compiled update as ``key``. **Secret**.

    Attributes:
        words: uint32 [parts, 2]; a threefry key for every part.
        multipliers: float32 [parts]; the noise multiplier that was charged for it.
        tag: uint32 [2]; a name of the key that does not reveal it.
        step: int32 scalar; the step of the noise schedule.
        before: uint32 [2]; the tag of the step before, which correlated noise goes on from; zeros
            for the first step that an issuer hands out.
        parts: names of the parts, such as ("gradient",).
        long: uint32 [8], a ChaCha20 key; None where no part's noise is on an integer grid.
    """

    words: Any
    multipliers: Any
    tag: Any
    step: Any
    before: Any
    parts: tuple[str, ...] = ("gradient",)
    long: Any = None

    def __repr__(self) -> str:
        return f"NoiseKey(<secret>, parts={self.parts})"

    def part(self, name: str) -> tuple[jax.Array, jax.Array]:
        """The key (uint32 [2]) and the charged noise multiplier of one part.

        Raises:
            ValueError: the event of this key's step has no such part.
        """
        if name not in self.parts:
            raise ValueError(
                f"part must be among those that the step was charged for, {self.parts}, got "
                f"{name!r}: it is a release that no event covers"
            )
        _links.took_part()
        index = self.parts.index(name)
        return jnp.asarray(self.words)[index], jnp.asarray(self.multipliers)[index]


def _long_key(parts: Iterable[str]) -> bool:
    """True if a part has noise on an integer grid."""
    return any(part.startswith(ON_GRID) for part in parts)


def simulated_key(key: jax.Array, multipliers: Mapping[str, Any], step: Any = 0) -> NoiseKey:
    """A noise key from a JAX key, for simulations and tests: **nothing is charged**.

    Args:
        key: a threefry key; every run and step needs another one.
        multipliers: the noise multiplier of each part, such as ``{"gradient": 1.0}``.
        step: the step of the noise schedule.
    """
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    wrapped = jax.random.wrap_key_data(data, impl="threefry2x32")
    split = jax.random.key_data(jax.random.split(wrapped, len(multipliers) + 1))
    stds = jnp.asarray(list(multipliers.values()), jnp.float32)
    step, before = jnp.asarray(step, jnp.int32), jnp.zeros(2, jnp.uint32)
    parts, long = tuple(multipliers), None
    if _long_key(parts):
        last = jax.random.wrap_key_data(split[-1], impl="threefry2x32")
        long = jax.random.bits(last, (8,), jnp.uint32)  # 64 bits where x64 is on, if not said
    return NoiseKey(split[1:], stds, split[0], step, before, parts, long)


class OfStream(Protocol):
    """The issuer of a ticket, as its ticket knows it."""

    ledger: "Ledger"
    secret: Secret
    stream: str
    label: str


class Ticket:
    """The right to release one charged step, once. It cannot be copied, saved or sent.

    Args:
        issuer: that hands it out.
        step: the step of the noise schedule, counted from 0.
        multipliers: noise multiplier of every part of the step's event.
        first: True if it is the first that its issuer hands out.
    """

    def __init__(self, issuer: OfStream, step: int, multipliers: dict[str, float], first: bool):
        self.issuer, self.step, self.first = issuer, step, first
        self.multipliers = dict(multipliers)
        self._process = this_process()
        self._right = [True]  # taken out by whoever spends it, which needs no lock
        self._by = ""
        self._key: NoiseKey | None = None

    @property
    def spent(self) -> bool:
        """True if its noise key was taken."""
        return not self._right

    @property
    def usable(self) -> bool:
        """True if it can still be spent in this process."""
        return bool(self._right) and this_process() == self._process

    @property
    def tag(self) -> np.ndarray:
        """A name [2] of its draw and noise key, uint32, that does not reveal them."""
        return self._words("tag")

    @property
    def before(self) -> np.ndarray:
        """The tag [2] of the step before it; zeros where another issuer handed that out."""
        return np.zeros(2, np.uint32) if self.first else self._words("tag", self.step - 1)

    def key(self) -> NoiseKey:
        """Spends the ticket and returns its noise key, for an update that the caller compiles.

        Raises:
            ValueError: the ticket was spent before, or belongs to another process.
        """
        return self.spend("the caller's own compiled update")

    def spend(self, by: str, *, verified: bool = False) -> NoiseKey:
        """Spends the ticket and returns its noise key.

        Args:
            by: who spends it, in words, for the error message of a second use.
            verified: True if jaxdp clipped the sum record by record, from this ticket's draw.

        Raises:
            ValueError: as ``key``.
        """
        self.check()
        try:
            self._right.pop()
        except IndexError:  # another thread was faster
            self.check()
        self._by = by
        self.issuer.ledger.count(self.issuer.stream, verified=verified)
        key, self._key = self._key or self._derived(), None
        return key

    def derive(self) -> None:
        """Derives the noise key ahead of time, so that ``spend`` is quick."""
        self._key = self._derived()

    def check(self) -> None:
        """Raises ValueError if the ticket can no longer be spent in this process."""
        if this_process() != self._process:
            raise ValueError(
                "ticket must be spent by the process that drew it, got a forked one: both would "
                "add the same noise. Draw in the process that trains"
            )
        if self.spent:
            raise ValueError(
                f"ticket must be spent once, but that of step {self.step} was spent by "
                f"{self._by or 'another thread'}: two releases with one noise subtract to none. "
                "Draw anew for every update: call sampler.draw() (or take the next batch) inside "
                "the loop"
            )

    def rng(self, name: str) -> jax.Array:
        """A JAX key for randomness that is not noise, such as dropout and augmentation."""
        words = jnp.asarray(self._words(f"use {name}"))
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def blank(self) -> NoiseKey:
        """A noise key of zeros with this ticket's shapes, to trace an update; nothing is spent."""
        count = len(self.multipliers)
        return NoiseKey(
            np.zeros((count, 2), np.uint32),
            np.zeros(count, np.float32),
            np.zeros(2, np.uint32),
            np.int32(0),
            np.zeros(2, np.uint32),
            tuple(self.multipliers),
            np.zeros(8, np.uint32) if _long_key(self.multipliers) else None,
        )

    def note(self, kind: str, what: str) -> None:
        """Tells the ledger what this release rests on; see ``Ledger.note``."""
        self.issuer.ledger.note(kind, what)

    def _derived(self) -> NoiseKey:
        words = [self._words(f"noise {part}") for part in self.multipliers]
        long = None
        if _long_key(self.multipliers):
            name = f"noise {ON_GRID}|{self.issuer.label}|{self.step}"
            long = np.frombuffer(self.issuer.secret.key(name), dtype="<u4")
        return NoiseKey(
            np.stack(words),
            np.asarray(list(self.multipliers.values()), np.float32),
            self.tag,
            np.int32(self.step),
            self.before,
            tuple(self.multipliers),
            long,
        )

    def _words(self, name: str, step: int | None = None) -> np.ndarray:
        """Two words [2] of the stream of a name, of this step or another."""
        label = f"{name}|{self.issuer.label}|{self.step if step is None else step}"
        return np.frombuffer(self.issuer.secret.stream(label)[:8], dtype=np.uint32)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a batch, draw or sum (its ticket) cannot be copied, pickled or sent to another "
            "process: its noise would be used twice. Take batches where the step is taken"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        return f"Ticket(step={self.step}, spent={self.spent})"
