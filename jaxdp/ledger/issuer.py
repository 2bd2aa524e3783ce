"""The issuer of one stream's tickets: a step is charged when its ticket is handed out."""

import hashlib
from typing import Any, Protocol

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.ledger.alone import alone
from jaxdp.ledger.entries import SEEDED, Entry
from jaxdp.ledger.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import Ticket


class Chargeable(Protocol):
    """A mechanism, or an algorithm with noise of its own, whose steps an issuer charges."""

    def events(self, first_step: int, steps: int) -> list[tuple[acc.Event, int, int]]:
        """The events of these steps, as (event, first_step, steps)."""

    def multipliers(self, step: int) -> dict[str, float]:
        """The noise multiplier of every sum that a step releases."""


class Issuer:
    """Hands out the tickets of one stream, each step once; docs/releases.md has the proof.

    Args:
        mechanism: has ``events(first, steps)`` and ``multipliers(step)``; its ``repr`` is the
            configuration that goes into every key.
        ledger: where steps are charged; nobody else charges the stream.
        secret: the randomness.
        stream: its name in the ledger; see ``Ledger.new_stream``.
        incarnation: goes into every key besides the mechanism and the step; another one for every
            stream and every start of a run.
        first_step: the step of the first ticket.
        reserve: steps reserved by one line of the ledger, so that not every one waits for the disk.
            A crash counts so many too many at most; ``close`` says where it ended.
        source: as for ``Entry``.
        note: as for ``Entry``.
        resumed: True for a run, whose later starts do steps again within their reservation:
            ``close`` takes nothing out.
        draws: goes into the randomness of a block of steps that are drawn together (an epoch), in
            place of mechanism and incarnation: what is the same at every start of a run keeps the
            draw of an epoch that an interruption cut in two, which is one event.
    """

    def __init__(
        self,
        mechanism: Chargeable,
        ledger: Ledger,
        secret: Secret,
        stream: str,
        *,
        incarnation: str = "",
        first_step: int = 0,
        reserve: int = 1,
        source: str = "sampler",
        note: str = "",
        resumed: bool = False,
        draws: str = "",
    ):
        self.mechanism, self.ledger, self.secret, self.stream = mechanism, ledger, secret, stream
        self.guard = ledger.guard
        # The step that is handed out next, and the end of what this issuer has reserved.
        self.next = self._end = self._first = arguments.integer("first_step", first_step, least=0)
        self._ahead = arguments.integer("reserve", reserve, least=1)
        named = f"{mechanism!r}|{incarnation}".encode()
        self.label = hashlib.blake2b(named, digest_size=16).hexdigest()
        self._draws = draws or self.label
        self._source, self._note, self._resumed = source, note, resumed
        self.arranged: Any = None  # of a run with correlated noise: the sampler, and its records
        ledger.register(stream, self)

    @alone
    def take(self, step: int | None = None, until: int | None = None) -> Ticket | None:
        """Hands out the ticket of a step, once; None if it is not the next one.

        Args:
            step: None takes the next one.
            until: steps from this one on are not reserved.

        Raises:
            ValueError: as ``Ledger.charge``; nothing is handed out then.
        """
        if step is not None and step != self.next:
            return None
        self.ledger.check_open()  # also where the step is reserved: another may write by now
        step = self.next
        multipliers = self.mechanism.multipliers(step)  # what can fail, fails before the charge
        if step == self._end:
            ahead = step + self._ahead
            self._charge(ahead if until is None else min(ahead, max(until, step + 1)))
        self.next = step + 1  # from here on the step counts, whatever becomes of the ticket
        return Ticket(self, step, multipliers, first=step == self._first)

    @alone
    def reserve(self, until: int, whole: bool = False) -> None:
        """Reserves the steps before this one now, unless they are reserved.

        Args:
            until: the step.
            whole: releases decide how many of them are taken: all count, for good.
        """
        if until > self._end:
            self._charge(until, whole)

    def _charge(self, until: int, whole: bool = False) -> None:
        """Reserves the steps from the end on, by a line for each stretch that has one event."""
        first = self._end
        last = getattr(self.mechanism, "last", None)  # of a schedule, or a strategy
        until = until if last is None else max(first + 1, min(until, last))

        def line(event: acc.Event, start: int, steps: int) -> None:
            args = (event, start, steps, self.stream, self._source, self._note, whole)
            self.ledger.reserve(Entry(*args))

        try:
            for stretch in self.mechanism.events(first, until - first):
                line(*stretch)
        except acc.BudgetExceededError:
            if whole or until == first + 1:
                raise
            until = first + 1
            line(*self.mechanism.events(first, 1)[0])
        self._end = until

    def unused(self) -> tuple[int, int]:
        """[first, end) of the steps that are reserved and were not handed out."""
        return self.next, max(self.next, self._end)

    @alone
    def close(self) -> None:
        """Takes out of the ledger what was reserved and not handed out.

        Not in a run, nor where releases decide the number of steps. Whoever draws afterwards
        reserves anew. Where the ledger was closed before, what is reserved stays.
        """
        if self._resumed or self.ledger.closed or self.ledger.whole(self.stream):
            return
        self._end = self.next  # before the line: whatever becomes of it, no ticket lies behind it
        self.ledger.end(self.stream, self.next)

    def generator(self, step: int, block: int = 0) -> np.random.Generator:
        """NumPy's 64-bit Philox generator for a step's draw; it charges nothing.

        Args:
            step: the step.
            block: steps that are drawn together; the generator is then that of the block which the
                step is in. 0 for a step by itself.
        """
        name = f"epoch|{self._draws}|{block}|{step // block}" if block else None
        key = self.secret.stream(name or f"draw|{self.label}|{step}")
        return np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a trainer or sampler cannot be copied, pickled or sent to another process: both would "
            "hand out the same draws and noise. Make another one, with a ledger of its own, or "
            "with the same one after close()"
        )

    def __copy__(self) -> Any:
        return self.__reduce__()


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
    processes.agree(mechanism=mechanism, options=sorted(options.items()), **processes.versions())
    stream, place = ledger.new_stream()
    if secret.reproducible:
        options = {"incarnation": str(place), "note": SEEDED, **options}
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
    processes.check_alone("a release of a whole computation")
    ledger = Ledger() if ledger is None else ledger
    secret = Secret.of_all_processes(secret)
    stream, place = ledger.new_stream()
    note = SEEDED if secret.reproducible else ""
    ledger.charge(event, stream=stream, source=source, note=note)
    named = f"{f'{event!r}|{configuration}'!r}|{place if secret.reproducible else stream}"
    return secret.child(hashlib.blake2b(named.encode(), digest_size=16).hexdigest())
