"""Tickets: the right to release one charged step, once. Draws and noise keys derive from them.

Keys are derived from (secret, configuration, incarnation, step, part) by a keyed hash. Wherever a
sampler is made the incarnation is fresh randomness of the operating system, so that a restored
state, a repeated step or a second process gets another draw and other noise. (With a seed that a
person chose it is a count, so that a run can be repeated; the ledger notes it.)
"""

import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _links, _validate
from jaxdp.seeds import Secret


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "multipliers", "tag", "step"],
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
        parts: names of the parts, such as ("gradient",).
    """

    words: Any
    multipliers: Any
    tag: Any
    step: Any
    parts: tuple[str, ...] = ("gradient",)

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
    return NoiseKey(split[1:], stds, split[0], jnp.asarray(step, jnp.int32), tuple(multipliers))


class Ticket:
    """The right to release one charged step, once. It cannot be copied, saved or sent.

    Attributes:
        step: the step of the noise schedule, counted from 0.
        multipliers: noise multiplier of every part of the step's event.
        account: the ledger's callbacks.
    """

    def __init__(
        self,
        secret: Secret,
        label: str,
        step: int,
        multipliers: dict[str, float],
        account: "Account",
    ):
        self.step = step
        self.multipliers = dict(multipliers)
        self._secret, self._label, self.account = secret, f"{label}|{step}", account
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._spent = ""
        self._withdrawn = False
        self._key: NoiseKey | None = None

    @property
    def spent(self) -> bool:
        """True if its noise key was taken."""
        return bool(self._spent)

    @property
    def usable(self) -> bool:
        """True if it can still be spent in this process."""
        return not self._spent and not self._withdrawn and os.getpid() == self._process

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
            ValueError: as :meth:`key`.
        """
        with self._lock:
            self.check()
            self._spent = by
        if verified:
            self.account.verified(self.step)
        else:
            self.account.opened(self.step)
        key, self._key = self._key or self._derived(), None
        return key

    def derive(self) -> None:
        """Derives the noise key ahead of time, so that :meth:`spend` is quick."""
        self._key = self._derived()

    def check(self) -> None:
        """Raises ValueError if the ticket can no longer be spent in this process."""
        if os.getpid() != self._process:
            raise ValueError(
                "ticket must be spent by the process that drew it, got a forked one: both would "
                "add the same noise. Draw in the process that trains"
            )
        if self._withdrawn:
            raise ValueError(
                f"ticket must be one that is charged, but that of step {self.step} was given back "
                "to the ledger: draw anew"
            )
        if self._spent:
            raise ValueError(
                f"ticket must be spent once, but that of step {self.step} was spent by "
                f"{self._spent}: two releases with one noise subtract to none. Draw anew for "
                "every update: call sampler.draw() (or take the next batch) inside the loop"
            )

    def withdraw(self) -> bool:
        """Voids the ticket, whose charge is given back; returns False if it was spent before."""
        with self._lock:
            self._withdrawn = not self._spent
        return self._withdrawn

    def generator(self) -> np.random.Generator:
        """NumPy's 64-bit Philox generator for this step's draw."""
        key = np.frombuffer(self._secret.stream(f"draw|{self._label}"), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def rng(self, name: str) -> jax.Array:
        """A JAX key for randomness that is not noise, such as dropout and augmentation."""
        words = jnp.asarray(_words(self._secret, f"use {name}|{self._label}"))
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def blank(self) -> NoiseKey:
        """A noise key of zeros with this ticket's shapes, to trace an update; nothing is spent."""
        count = len(self.multipliers)
        return NoiseKey(
            np.zeros((count, 2), np.uint32),
            np.zeros(count, np.float32),
            np.zeros(2, np.uint32),
            np.int32(0),
            tuple(self.multipliers),
        )

    def trust(self, what: str) -> None:
        """Tells the ledger another assumption of this release; see ``Ledger.trust``."""
        self.account.trust(what)

    def assume(self, what: str) -> None:
        """Tells the ledger what this release takes to be public; see ``Ledger.assume``."""
        self.account.assume(what)

    def _derived(self) -> NoiseKey:
        words = [_words(self._secret, f"noise {part}|{self._label}") for part in self.multipliers]
        return NoiseKey(
            np.stack(words),
            np.asarray(list(self.multipliers.values()), np.float32),
            _words(self._secret, f"tag|{self._label}"),
            np.int32(self.step),
            tuple(self.multipliers),
        )

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


@dataclass(frozen=True)
class Account:
    """The callbacks by which a ticket tells its ledger what was verified and what assumed.

    Attributes:
        verified: called with a step whose whole release jaxdp saw.
        opened: called with a step whose noise key was handed to the caller.
        assume: called with what is taken to be public, in words.
        trust: called with any other assumption, a whole sentence.
    """

    verified: Callable[[int], None]
    opened: Callable[[int], None]
    assume: Callable[[str], None]
    trust: Callable[[str], None]


class Issuer:
    """Issues the tickets of one stream, each charged to the ledger before it is handed out.

    Args:
        mechanism: has ``events(first, steps)`` and ``multipliers(step)``; its ``repr`` is the
            configuration that goes into every key.
        ledger: where steps are charged.
        secret: the randomness.
        stream: its name in the ledger; see :meth:`Ledger.new_stream`.
        incarnation: goes into every key besides the mechanism and the step; another one for every
            stream and every start of a run.
        first_step: the step of the first ticket.
        reserve: steps charged at a time, so that not every one waits for the disk; :meth:`close`
            gives back what was never handed out. A crash over-counts by so many at most.
        source: as for ``Entry``.
        note: as for ``Entry``.
        replay: True issues steps that the stream was charged for before, and whose releases nobody
            saw, within that charge; nothing is given back then.
    """

    def __init__(
        self,
        mechanism: Any,
        ledger: Any,
        secret: Secret,
        stream: str,
        *,
        incarnation: str = "",
        first_step: int = 0,
        reserve: int = 1,
        source: str = "sampler",
        note: str = "",
        replay: bool = False,
    ):
        self.mechanism, self.ledger, self.secret, self.stream = mechanism, ledger, secret, stream
        self.step = _validate.integer("first_step", first_step, least=0)
        self.reserve = _validate.integer("reserve", reserve, least=1)
        named = f"{mechanism!r}|{incarnation}".encode()
        self.label = hashlib.blake2b(named, digest_size=16).hexdigest()
        self._source, self._note, self._replay = source, note, replay
        self._reserved = self.step
        self._handed = self.step
        self._kept = self.step  # steps before this one are never given back
        self._live: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._account = Account(
            functools.partial(self._spent, ledger.verified),
            functools.partial(self._spent, ledger.opened),
            ledger.assume,
            ledger.trust,
        )
        self._process = os.getpid()
        self._lock = threading.Lock()

    def issue(self, until: int | None = None) -> Ticket:
        """Charges the next step and returns its ticket.

        Args:
            until: steps from this one on are not charged ahead.

        Raises:
            ValueError: as ``Ledger.charge``; after a fork. Nothing is issued then.
        """
        if os.getpid() != self._process:
            raise ValueError(
                "a sampler or trainer must draw in the process that made it, got a forked one: "
                "both would draw the same records with the same noise. Make it after the fork, "
                "with a ledger of its own"
            )
        with self._lock:
            if self.step >= self._reserved:
                ahead = self.step + self.reserve
                self._charge(ahead if until is None else max(self.step + 1, min(until, ahead)))
            ticket = Ticket(
                self.secret,
                self.label,
                self.step,
                self.mechanism.multipliers(self.step),
                self._account,
            )
            self._live[self.step] = ticket
            self.step += 1
        return ticket

    def issued(self, ticket: Any) -> bool:
        """True if the ticket is one of this issuer's."""
        return isinstance(ticket, Ticket) and ticket.account is self._account

    def handed_out(self, step: int) -> None:
        """Notes that the ticket of this step was handed out, so that its charge stays."""
        with self._lock:
            self._handed = max(self._handed, step + 1)  # threads may speak in any order

    def ahead(self) -> tuple[str, int] | None:
        """(stream, step): the steps from here on were not handed out; None if all were."""
        handed = max(self._handed, self._kept)
        # A run may hold charges of steps that an earlier process took and nobody saw.
        ahead = self._replay or handed < self._reserved
        return (self.stream, handed) if ahead else None

    def close(self, unused: int = 0) -> None:
        """Gives back the steps that were charged ahead and never handed out.

        Args:
            unused: the number of tickets, the last ones issued, that nobody saw; they become void.

        Raises:
            ValueError: one of these was spent; nothing is given back then, and the others are void.
        """
        _validate.integer("unused", unused, least=0)
        with self._lock:
            left = self._withdrawn(unused)
            if left < unused:
                raise ValueError(
                    f"unused must be at most {left}, the tickets since the last one that was "
                    f"spent, got {unused}"
                )
            self.step -= unused
            self._handed = min(self._handed, self.step)
            end, self._reserved = self._reserved, self.step
            if end > self.step and not self._replay:
                self._give_back(end)

    def _give_back(self, end: int) -> None:
        try:
            self.ledger.give_back(self.stream, self.step, end)
        except ValueError:  # nothing was given back; after an interrupt, nobody knows
            self._reserved = end
            raise

    def __reduce__(self) -> Any:
        raise TypeError(
            "a trainer or sampler cannot be copied, pickled or sent to another process: both would "
            "hand out the same draws and noise. Make another one, with a ledger of its own, or "
            "with the same one after close()"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()

    def _withdrawn(self, unused: int) -> int:
        """Voids up to ``unused`` of the last tickets, and returns how many before a spent one."""
        for n, step in enumerate(range(self.step - 1, self.step - 1 - unused, -1)):
            ticket = self._live.get(step)
            if step < self._kept or (ticket is not None and not ticket.withdraw()):
                return n
        return unused

    def _spent(self, tell: Callable[[str, int], None], step: int) -> None:
        with self._lock:
            self._kept = max(self._kept, step + 1)
            tell(self.stream, step)

    def _charge(self, until: int) -> None:
        for event, first, count in self.mechanism.events(self.step, until - self.step):
            self.ledger.charge(
                event,
                count,
                stream=self.stream,
                first_step=first,
                source=self._source,
                note=self._note,
                replay=self._replay,
            )
            self._reserved = first + count


def _words(secret: Secret, label: str) -> np.ndarray:
    return np.frombuffer(secret.stream(label)[:8], dtype=np.uint32)
