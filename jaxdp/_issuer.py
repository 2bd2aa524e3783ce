"""The issuer of one stream's tickets: each step is charged before its ticket is handed out."""

import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxdp import _processes, arguments
from jaxdp import accounting as acc
from jaxdp._durable import StorageError
from jaxdp._entries import SEEDED
from jaxdp.ledger import Ledger
from jaxdp.seeds import Secret
from jaxdp.tickets import Account, Ticket, block_generator


class Chargeable(Protocol):
    """A mechanism, or an algorithm with noise of its own, whose steps an issuer charges."""

    def events(self, first_step: int, steps: int) -> list[tuple[acc.Event, int, int]]:
        """The events of these steps, as (event, first_step, steps)."""

    def multipliers(self, step: int) -> dict[str, float]:
        """The noise multiplier of every sum that a step releases."""


class Issuer:
    """Issues the tickets of one stream, each charged to the ledger before it is handed out.

    Args:
        mechanism: has ``events(first, steps)`` and ``multipliers(step)``; its ``repr`` is the
            configuration that goes into every key.
        ledger: where steps are charged.
        secret: the randomness.
        stream: its name in the ledger; see ``Ledger.new_stream``.
        incarnation: goes into every key besides the mechanism and the step; another one for every
            stream and every start of a run.
        first_step: the step of the first ticket.
        reserve: steps charged at a time, so that not every one waits for the disk; ``close``
            gives back what was never handed out. A crash over-counts by so many at most.
        source: as for ``Entry``.
        note: as for ``Entry``.
        replay: True issues steps that the stream was charged for before, and whose releases nobody
            saw, within that charge; nothing is given back then.
        draws: goes into the randomness of a block of steps that are drawn together (an epoch), in
            place of mechanism and incarnation: what is the same at every start of a run keeps the
            draw of an epoch that an interruption cut in two, which is one event.
    """

    def __init__(
        self,
        mechanism: Chargeable,
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
        draws: str = "",
    ):
        self.mechanism, self.ledger, self.secret, self.stream = mechanism, ledger, secret, stream
        self.step = self._first = arguments.integer("first_step", first_step, least=0)
        self.reserve = arguments.integer("reserve", reserve, least=1)
        named = f"{mechanism!r}|{incarnation}".encode()
        self.label = hashlib.blake2b(named, digest_size=16).hexdigest()
        self._draws = draws or self.label
        self._source, self._note, self._replay = source, note, replay
        self.arranged: Any = None  # of a run with correlated noise: the sampler, and its records
        self._reserved = self.step
        self._unsure = self.step  # steps before this one may be charged where the ledger failed
        self._handed = self.step
        self._kept = self.step  # steps before this one are never given back
        self._counts_all = False
        self._live: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._account = Account(
            functools.partial(self._spent, ledger.verified),
            functools.partial(self._spent, ledger.opened),
            ledger.assume,
            ledger.trust,
        )
        self._process = os.getpid()
        # Asked once: after a ``jax.distributed.shutdown()`` there seems to be one alone.
        self._several = _processes.count() > 1
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
                self._draws,
                first=self.step == self._first,
            )
            self._live[self.step] = ticket
            self.step += 1
        return ticket

    def charge_until(self, step: int) -> None:
        """Charges all steps before this one now, unless they are charged, and counts them for good.

        For a number of steps that releases decide: epsilon is then that of all, from the first.
        """
        with self._lock:
            self._counts_all = True
            if step > self._reserved:
                self._charge(step)

    def generator(self, block: int) -> np.random.Generator:
        """NumPy's Philox at the beginning of the stream of the first ``block`` steps.

        The same at every start of a run; see ``draws``.
        """
        return block_generator(self.secret, self._draws, block, 0)

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
        ahead = self._replay or handed < max(self._reserved, self._unsure)
        return (self.stream, handed) if ahead else None

    def uncounted(self) -> tuple[str, int] | None:
        """(stream, step): the steps from here on are not in epsilon yet; None if all are.

        In several processes all that is reserved counts: another one may have handed out more.
        """
        return None if self._counts_all or self._several else self.ahead()

    def close(self, unused: int = 0) -> None:
        """Gives back the steps that were charged ahead and never handed out.

        In several processes they stay charged, for another one may have handed them out; the
        tickets to come use them. So do those of ``charge_until``.

        Args:
            unused: the number of tickets, the last ones issued, that nobody saw; they become void.

        Raises:
            ValueError: one of these was spent; nothing is given back then, and the others are void.
        """
        arguments.integer("unused", unused, least=0)
        with self._lock:
            left = self._withdrawn(unused)
            if left < unused:
                raise ValueError(
                    f"unused must be at most {left}, the tickets since the last one that was "
                    f"spent, got {unused}"
                )
            self.step -= unused
            self._handed = min(self._handed, self.step)
            if self._several or self._counts_all:
                return
            end = max(self._reserved, self._unsure)
            reserved, self._reserved = self._reserved, self.step
            if end > self.step and not self._replay:
                self._give_back(end, reserved)

    def _give_back(self, end: int, reserved: int) -> None:
        self._unsure = end
        try:
            # What a call that failed has charged or given back, the ledger alone knows.
            end = self.ledger.charged_until(self.stream)
            if end > self.step:
                self.ledger.give_back(self.stream, self.step, end)
        except StorageError:  # as after an interrupt, the ledger says it at the next charge
            raise
        except ValueError:  # nothing was given back
            self._reserved = reserved
            raise
        self._unsure = self.step

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
            # What an earlier call may have charged before it failed was handed out by nobody.
            replay = self._replay or first < self._unsure
            self._unsure = max(self._unsure, first + count)
            self.ledger.charge(
                event,
                count,
                stream=self.stream,
                first_step=first,
                source=self._source,
                note=self._note,
                replay=replay,
            )
            self._reserved = first + count


def issuer_of(
    mechanism: Any, ledger: Ledger | None = None, secret: Secret | None = None, **options: Any
) -> Issuer:
    """The issuer of a mechanism's tickets, on a new stream of the ledger.

    A secret from the operating system gives other keys to every stream; a seed that a person chose
    gives them by the number of streams before, so that a figure can be made again. Several
    processes get one secret and one stream.

    Raises:
        ValueError: the ledger is no ``Ledger``; processes disagree.
    """
    ledger = Ledger() if ledger is None else ledger
    if not isinstance(ledger, Ledger):
        raise ValueError(f"ledger must be a jaxdp.Ledger, got {type(ledger).__name__}")
    secret = Secret.of_all_processes(secret)
    _processes.agree(mechanism=mechanism, options=sorted(options.items()), **_processes.versions())
    stream, before = ledger.new_stream()
    if secret.reproducible:
        options = {"incarnation": str(before), "note": SEEDED, **options}
    return Issuer(mechanism, ledger, secret, stream, **{"incarnation": stream, **options})


def released_once(
    event: acc.Event,
    configuration: str,
    ledger: Ledger | None = None,
    secret: Secret | None = None,
    source: str = "mechanism",
) -> Secret:
    """Charges a whole computation as one release, and returns the secret of its randomness.

    Args:
        event: what is released.
        configuration: names the computation and its public numbers; goes into the randomness, as
            the event does.
        ledger: the ledger that is charged; None makes one that is then dropped.
        secret: None takes one from the operating system.
        source: as for ``Entry``.
    """
    _processes.check_alone("a release of a whole computation")
    issuer = issuer_of(f"{event!r}|{configuration}", ledger, secret)
    note = SEEDED if issuer.secret.reproducible else ""
    issuer.ledger.charge(event, stream=issuer.stream, source=source, note=note)
    return issuer.secret.child(issuer.label)
