"""The append-only ledger: an accounting event for every release, on disk before the release."""

import bisect
import copy
import functools
import json
import os
import secrets
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.ledger import durable
from jaxdp.ledger.entries import (
    FORMAT,
    SEEDED,
    SOURCES,
    Entry,
    LedgerRows,
    Row,
    Streams,
    check_stream,
    event_counts,
)
from jaxdp.ledger.file import LedgerFile
from jaxdp.ledger.merged import Book, united
from jaxdp.ledger.shared import RowsOfAll

_forks = 0  # of which this process is the last


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """(id, number of forks) of this process: an id alone may be that of another namespace."""
    return os.getpid(), _forks


class ProcessLock:
    """The lock of an object, the process that made it, and the frame that is inside."""

    def __init__(self) -> None:
        self.lock, self.process = threading.RLock(), this_process()
        self.inside: types.FrameType | None = None


class Guarded(Protocol):
    """An object with a guard, of its own or that of its ledger."""

    guard: ProcessLock


_Self = TypeVar("_Self", bound=Guarded)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def alone(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Runs a method under its object's lock, which a fork or an interrupting handler cannot enter.

    Other threads wait. Refused are the thread that is inside already (a signal handler, or a
    finalizer that the garbage collector runs there: it would see a charge that is half made), and a
    fork. Who is inside is told by the frame that runs: an interrupt leaves no flag behind.

    Raises:
        ValueError: it is refused.
    """

    def guarded(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        guard = self.guard
        if this_process() != guard.process:  # before the lock: a thread of the process that was
            raise ValueError(  # forked may have held it
                "a ledger, sampler, trainer or its batches must be used by the process that made "
                "them, got a forked one: both would release with the same draws and noise, and "
                "each miss what the other releases. Make them after the fork, with a ledger of "
                "their own"
            )
        with guard.lock:
            if guard.inside is not None and _is_running(guard.inside):
                raise ValueError(
                    "a ledger, sampler, trainer or its batches must not be used by a signal "
                    "handler or a finalizer that interrupts them, got one: let it set a flag, and "
                    "look at it after the step"
                )
            guard.inside = sys._getframe()
            try:
                return method(self, *args, **kwargs)
            finally:
                guard.inside = None

    functools.update_wrapper(guarded, method)
    return guarded


def _is_running(frame: types.FrameType) -> bool:
    """True for a frame that called this one, as what a signal handler has interrupted did."""
    above: types.FrameType | None = sys._getframe()
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None


# What a ledger takes on trust, for ``unverified``.
_OPENED = (
    "{} of {} steps: the noise key went to an update that the caller compiled, where jaxdp does "
    "not see that the sum was clipped record by record (no layer, gradient or captured array "
    "coupling two records), from the records that were drawn, nor that the key's noise was added "
    "to it, once"
)
_UNSEEN = (
    "{} of {} steps: drawn, but that jaxdp added their noise is not written down (it added none, "
    "or the ledger was not closed): whatever else was released of these draws, nothing covers it"
)
_LATE = (
    "the budget was put on a ledger that held steps already: that it and its orders were not "
    "chosen by looking at what these released was not verified"
)
_ASSUMED = "assumed to be public, or made from what this ledger released: "


class Shown(NamedTuple):
    """A state of a run that may have been seen."""

    step: int  # how many steps it has behind it
    past: bytes | None  # its own; b"" for one that nobody could read, None in lines of format 2
    start: bytes  # the head of the ledger at the last line "begun" before it was shown


class Left(NamedTuple):
    """The rest of a ledger's budget, and which kind of budget it is."""

    rule: str  # "plan" (``acc.Budget``: the exact accountant) or "filter" (``acc.RenyiFilter``)
    steps: int | None  # that still fit; None for a filter that was asked for no event
    # Epsilon at delta of what was charged. Of a filter it is a guarantee only at a time fixed
    # beforehand; at one that was chosen by looking, the guarantee is the budget.
    spent: float
    epsilon: float  # of the budget
    delta: float  # of the budget


class Reserving(Protocol):
    """An issuer, as a ledger looks at it."""

    def unused(self) -> tuple[int, int]:
        """[first, end) of the steps that are reserved, and that nobody can have been handed."""


class Ledger:
    """The list of all releases as accounting events, each charged before the release is made.

    With a ``path``, every charge is on disk (flushed and fsynced) before ``charge`` returns, so
    that a crash can over-count and never under-count. A ledger holds no un-noised data. Under
    add-or-remove-one nothing in it depends on the data at all, so it may be published. Every line
    is chained to those before it, so that an edited or removed one is found; lines cut off at the
    end are found by whoever kept the ``head`` (a ``TrainState`` does). In several processes of
    ``jax.distributed`` process 0 writes, and a charge returns in all once it has.

    Args:
        path: a JSON-lines file: read now, and written to from the first charge on, by one process
            at a time. None keeps the ledger in memory.
        budget: a fresh ``acc.Budget``, which admits the steps of one plan that was fixed before
            the first release; or a fresh ``acc.RenyiFilter``, with which noise and the number of
            steps may be chosen by looking at what was released. A charge that it does not admit
            raises ``acc.BudgetExceededError``, which says how many fit, before anything is
            released. The file keeps what was fixed, and is opened with the same one again.
        key: secret bytes that make the chain a MAC; None chains without a secret.

    Raises:
        ValueError: the file is damaged, no ledger or no regular file, cannot be read, or holds more
            than the budget, or was begun with another one.

    Example:
        >>> from jaxdp import accounting as acc
        >>> ledger = jaxdp.Ledger()  # or jaxdp.Ledger("ledger.jsonl"): durable
        >>> step = acc.PoissonSampled(acc.Gaussian(1.0), sampling_prob=0.01)
        >>> ledger.charge(step, steps=1_000)
        >>> ledger.steps
        1000
        >>> print(f"{ledger.epsilon(delta=1e-5).upper:.2f}")
        1.83
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: acc.Budget | acc.RenyiFilter | None = None,
        key: bytes | None = None,
    ):
        self.guard = ProcessLock()
        self.path, self.key = None if path is None else Path(path), key
        self._budget, self._processes = budget, processes.count()
        self.has_budget = budget is not None
        self.closed = False  # True once ``close`` was called
        self._issuers: dict[str | None, Reserving] = {}  # made on this object, by stream
        self._forget()
        self._rows = LedgerRows() if path is None else LedgerFile(Path(path), key or b"")
        if self._processes > 1:  # process 0 writes; with a budget all read once it is taken
            self._rows = RowsOfAll(self._rows, budget is None)
        self._read(self._rows.new_rows())

    # What it holds.

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The charges, stream by stream; adjacent entries of one kind are merged.

        Steps that an issuer of this ledger reserved and did not hand out are left out, while it
        lives in this process; for any other reader of the file they count.
        """
        if this_process() != self.guard.process:  # a thread of the parent may hold the lock
            return self.reserved
        with self.guard.lock:
            return tuple(self._charged())

    @property
    def reserved(self) -> tuple[Entry, ...]:
        """As ``entries``, with what was reserved and not handed out: so its file counts."""
        # A signal handler may charge while somebody looks.
        held = tuple(self._streams.entries.values())
        return tuple(entry for entries in held for entry in entries)

    @property
    def event(self) -> acc.Event:
        """The composition of everything charged, as one event."""
        counts = event_counts(self.entries)
        return acc.Composed(tuple(acc.Repeated(event, n) for event, n in counts.items()))

    @property
    def steps(self) -> int:
        """The number of charged steps over all streams."""
        return sum(entry.steps for entry in self.entries)

    @property
    def head(self) -> bytes:
        """A 16-byte hash of everything written so far."""
        return self.last_head()

    def holds(self, head: bytes, since: bytes = b"") -> bool:
        """True if ``head`` was this ledger's (after ``since``): it holds all releases up to it."""
        heads = self._rows.chain.heads
        return head in heads and (not since or heads[head] > heads.get(since, len(heads)))

    def last_head(self, *streams: str) -> bytes:
        """The last head at which ``last_stream`` is one of these; without any, the head.

        A state has it as its past, which so tells one model from others on the same ledger.
        """
        if not self._rows.chained:
            self.join()
        head = self._rows.chain.head
        if not streams or self._named.get(head) in streams:
            return head
        heads = (self._head_of[stream] for stream in streams if stream in self._head_of)
        return max(heads, key=self._rows.chain.heads.__getitem__, default=head)

    def last_stream(self, head: bytes) -> str:
        """The stream named last in the rows up to this head; "" where none is."""
        return self._named.get(head, "")

    def model_of(self, stream: str | None) -> str:
        """The model that a trainer's stream belongs to; "" for the first one."""
        return self._models.get(stream, "")

    @property
    def begun(self) -> tuple[str, ...]:
        """The names of the streams, and of a run's starts, in the order in which they began."""
        return tuple(self._begun)

    def shown(self, stream: str) -> Shown | None:
        """The state of a stream that was shown last, or that it began from; None without one."""
        return self._shown[stream][-1] if stream in self._shown else None

    def first_shown(self, stream: str) -> Shown | None:
        """The state that a stream began from, or that was shown first of it; None without one."""
        return self._shown[stream][0] if stream in self._shown else None

    def was_shown(self, stream: str, step: int, past: bytes) -> bool:
        """True if this very state of a stream was shown, or the stream began from it."""
        return any((each.step, each.past) == (step, past) for each in self._shown.get(stream, ()))

    def epsilon(
        self, delta: float, relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE
    ) -> acc.Bound:
        """Bounds on epsilon at ``delta`` for everything charged; the guarantee is ``.upper``.

        Args:
            delta: in (0, 1).
            relation: the neighbouring relation of everything; the bound says it. A ledger holds
                events and no relation: ``trainer.epsilon`` and ``run.epsilon`` ask with that of
                their own mechanism's budget. Where mechanisms share a ledger whose budgets have
                unlike relations, ask with the strictest.

        Raises:
            ValueError: nothing was charged; an event that has no bound under this relation.
        """
        if not self.entries:
            raise ValueError(
                "ledger must hold a charge to have an epsilon, got an empty one: whatever was "
                "trained was charged elsewhere or not at all. Hand this ledger to the trainer or "
                "the sampler (ledger=...)"
            )
        return acc.epsilon(self.event, delta, relation=relation)

    def left(self, event: acc.Event | None = None) -> Left:
        """The rest of the budget: the steps of its plan, or of an event, that still fit.

        Steps that a live trainer reserved and did not hand out are left, to it alone until it is
        closed.

        Args:
            event: of one step (``mechanism.event``), or of a block of steps. None takes all of the
                plan; a filter then tells what is spent.

        Raises:
            ValueError: the ledger has no budget.
        """
        if self._budget is None:
            raise ValueError(
                "budget must be given to have something left, got none: jaxdp.Ledger(..., "
                "budget=acc.Budget(epsilon, delta, plan=mechanism))"
            )
        if event is not None and not isinstance(event, acc.Event):
            raise ValueError(f"event must be an accounting event, got {event!r}")
        # Of a copy, without what is reserved and not handed out.
        budget, unused = copy.copy(self._budget), event_counts(self.reserved)
        for held, n in event_counts(self.entries).items():
            unused[held] -= n
        for held, n in unused.items():
            budget.give_back(acc.Repeated(held, n))
        known: tuple[acc.Event, ...] = () if event is None else (event,)
        if isinstance(budget, acc.Budget):
            known = known or tuple(budget.admitted)
            rule, spent = "plan", acc.epsilon(self.event, budget.delta, budget.relation).upper
        else:
            rule, spent = "filter", budget.spent()
        steps = sum(budget.fits(each, 10**12) * each.block for each in known)
        asked = rule == "plan" or event is not None
        return Left(rule, steps if asked else None, spent, budget.epsilon, budget.delta)

    def notes(self) -> list[str]:
        """The distinct notes of the entries, without the note about a chosen seed."""
        said = {part for e in self.entries for part in e.note.split("; ")}
        return sorted(said - {"", SEEDED})

    def unverified(self) -> list[str]:
        """The assumptions that jaxdp could not verify, one sentence each; [] if there is none."""
        entries = self.entries
        said = {SOURCES["by hand"] for e in entries if e.source == "by hand"}
        said |= self._noted["trusted"] | {SEEDED for e in entries if SEEDED in e.note}
        # Steps of a sampler whose noise jaxdp did not add itself: the key went to the caller, or
        # nobody saw any. Counts are by stream, for a ledger may hold several loops.
        drawn = [e for e in entries if e.source == "sampler"]
        steps = sum(e.steps for e in drawn)
        seen = [self._seen.get(name, [0, 0]) for name in {e.stream for e in drawn}]
        opened = min(steps, sum(o for _, o in seen))
        unseen = max(0, steps - opened - sum(v for v, _ in seen))
        counted = [text.format(n, steps) for text, n in ((_OPENED, opened), (_UNSEEN, unseen)) if n]
        assumed = [_ASSUMED + what for what in sorted(self._noted["assumed"])]
        return [*sorted(said), *counted, *assumed]

    # What is written.

    @alone
    def join(self) -> None:
        """Takes the ledger for this process; in several, each then knows all charges so far."""
        self._open()
        self._rows.begin()

    @alone
    def new_stream(
        self, name: str | None = None, start: tuple[int, bytes] | None = None
    ) -> tuple[str, int]:
        """Begins a stream of randomness; its name is on disk when this returns.

        Args:
            name: of the stream; None takes a random one.
            start: (step, past) of the state that a run goes on from; None where there is none.

        Returns:
            (name of the stream, its place among those begun).
        """
        if name is None:
            name = processes.from_process_0(lambda: secrets.token_hex(8))
        else:
            check_stream(name)
        row: Row = {"begun": name}
        if start is not None:
            row |= {"step": start[0], "past": start[1].hex()}
        self._open()
        self._rows.append(row)
        return name, self._begun[name]

    @alone
    def assign_model(self, stream: str, model: str) -> None:
        """Writes down that the steps of a trainer's stream are this model's, one of several."""
        self._open()
        self._rows.append({"model": model, "stream": stream})

    @alone
    def charge(
        self,
        event: acc.Event,
        steps: int = 1,
        *,
        stream: str | None = None,
        first_step: int = 0,
        source: str = "by hand",
        again: bool = False,
        note: str = "",
    ) -> None:
        """Charges ``steps`` releases of ``event`` by hand; an ``Issuer`` charges a sampler's.

        Args:
            event: the release of one step; or of an epoch of ``event.block`` steps, charged whole.
            steps: the number of consecutive steps.
            stream: names the randomness; each of its steps can be charged once. None charges anew.
            first_step: the first of the steps in the stream.
            source: as for ``Entry``.
            again: for what repeats steps whose releases nobody saw: those that the stream holds
                cost nothing.
            note: as for ``Entry``.

        Raises:
            ValueError: a step that was charged before, or that an issuer charges; a closed ledger,
                or one that another process writes to; a bad argument; a full disk, or storage
                without locks.
        """
        # An issuer alone knows which steps of its stream it handed out.
        entry = Entry(event, first_step, steps, stream, source, note)
        self._open()
        if stream in self._issuers:
            raise ValueError(
                f"stream must be one that no sampler or trainer charges, got {stream!r}: its steps "
                "are charged as they are handed out"
            )
        # Without a stream every charge is a draw of its own: behind all others.
        if stream is None and (known := self._streams.of(None)):
            start = -(-known[-1].end // event.block) * event.block  # never within an epoch
            entry = entry.between(start, start + steps)
        # A step of a stream is one draw, which is paid for once and released once.
        held = self._streams.meeting(stream, entry.first_step, entry.end)
        if held and not again:
            raise ValueError(
                "first_step must be one that stream "
                f"{stream!r} was not charged for, got {max(first_step, held[0].first_step)}: two "
                "releases from one draw are not two events"
            )
        if others := {e.source for e in held} - {source}:
            raise ValueError(
                f"source must be that of the steps that stream {stream!r} holds, "
                f"{others.pop()!r}, got {source!r}"
            )
        self._reserve(entry)

    def take_over(self, other: "Ledger", name: str) -> None:
        """Charges all that another ledger holds, with what it takes on trust.

        What is reserved there counts. Done again, it adds what the other holds more by then.

        Args:
            other: the ledger; it is only read.
            name: of this ledger's streams for it; another one for every other ledger.

        Raises:
            ValueError: as ``charge``.
        """
        for entry in other.reserved:
            self.charge(
                entry.event,
                entry.steps,
                # Without a stream it has the bare name, which no stream of the other gets.
                stream=name if entry.stream is None else f"{name}/{entry.stream}",
                first_step=entry.first_step,
                source=entry.source,
                again=True,
                note=entry.note,
            )
        for kind, said in other._noted.items():
            for what in sorted(said):
                self.note(kind, what)

    def assume(self, what: str) -> None:
        """Writes down, once, what the guarantee takes to be public; ``note("assumed", what)``."""
        self.note("assumed", what)

    def trust(self, what: str) -> None:
        """Writes down, once, any other assumption, a whole sentence; ``note("trusted", what)``."""
        self.note("trusted", what)

    def note(self, kind: str, what: str) -> None:
        """Writes down, once, what the guarantee rests on and nobody verified.

        It is on disk when this returns (said by another process than 0: at the next charge of all),
        and ``unverified`` says it also after the ledger was opened anew.

        Args:
            kind: "assumed" for what is taken to be public, such as "the frozen parameter
                ['embedding']"; "trusted" for any other assumption, a whole sentence.
            what: in words; public, one line.

        Raises:
            ValueError: an argument is none of these; the ledger is closed, or another process
                writes.
        """
        arguments.one_of("kind", kind, tuple(self._noted))
        if not isinstance(what, str) or not what or len(what.splitlines()) != 1:
            raise ValueError(f"what must be one line of words, got {what!r}")
        if what not in self._noted[kind]:
            self._note(kind, what)

    @alone
    def _note(self, kind: str, what: str) -> None:
        self._open()
        if what not in self._noted[kind]:
            self._rows.note({kind: what})

    @alone
    def show(self, stream: str, step: int, past: bytes = b"") -> None:
        """Writes down that a state of a stream may be seen from now on.

        Args:
            stream: the stream.
            step: of the state; all releases up to it may be seen.
            past: of the state; b"" for one that nobody could read, and that nothing goes on from.
        """
        check_stream(stream)
        step = arguments.integer("step", step, least=0)
        self._open()
        last = self.shown(stream)
        if last is None or (step, past) != (last.step, last.past):
            self._rows.append({"shown": step, "stream": stream, "past": past.hex()})

    def _count(self, stream: str, *, verified: bool) -> None:
        """Counts a step whose whole release jaxdp saw, or whose noise key went to the caller."""
        with self.guard.lock:
            self._seen.setdefault(stream, [0, 0])[0 if verified else 1] += 1

    @alone
    def close(self) -> None:
        """Lets other processes write to the file; every charge is already on disk."""
        self._write_seen()
        self._rows.close()
        self.closed = True

    def _write_seen(self) -> None:
        """Writes down which draws jaxdp has noised, for whoever reads the file meanwhile."""
        if self._rows.is_open and self._seen != self._seen_on_disk:
            self._rows.note({"seen": self._seen})
            self._seen_on_disk.update({name: list(counts) for name, counts in self._seen.items()})

    # For issuers, which hold the lock.

    def _register(self, stream: str, issuer: Reserving) -> None:
        """Makes a stream an issuer's, which alone charges it from now on."""
        with self.guard.lock:
            if self._issuers.setdefault(stream, issuer) is not issuer:
                raise ValueError(
                    f"stream must be one that no sampler or trainer charges, got {stream!r}"
                )

    def _retire(self, issuer: Reserving) -> None:
        """Ends an issuer, for another one of its stream; what it has reserved counts."""
        with self.guard.lock:
            for stream in [name for name, each in self._issuers.items() if each is issuer]:
                del self._issuers[stream]

    def _check_processes(self) -> None:
        """Raises ValueError where there are more or fewer processes than it was made in."""
        if processes.count() != self._processes:
            raise ValueError(
                "ledger must be made after jax.distributed.initialize() and closed before "
                f"shutdown(), got {processes.count()} processes and a ledger of {self._processes}: "
                "each would miss what the others release, or add their noise to another sum"
            )

    def _reserve(self, entry: Entry) -> None:
        """Charges the steps of an entry by one durable line; those held before cost nothing.

        Raises:
            ValueError: another event for a step, or a block, that the stream holds.
            BudgetExceededError: the budget does not admit them.
        """
        # What can be refused is refused before the line: afterwards it counts.
        self._open()
        self._streams.check(entry)
        if self._budget is not None:  # spent once the row is on disk
            count = self._streams.new_events(entry)
            fit = self._budget.fits(entry.event, count) if count else 0
            if fit < count:
                raise acc.BudgetExceededError(self._budget.refusal(entry.event, fit, count))
            if not self._fixed:
                late = bool(self.reserved)  # a filter: a plan's budget was refused by then
                self._rows.append({"budget": repr(self._budget)})
                if late and _LATE not in self._noted["trusted"]:
                    self._rows.note({"trusted": _LATE})
        elif self._fixed:  # forgotten, as where a trainer is given the path alone
            raise acc.BudgetExceededError(
                f"budget must be given again to charge this ledger, {self._fixed}, got none: "
                "nothing would stop at it. Ledger(path, budget=...) in place of the path"
            )
        row = entry.to_dict()
        Entry.from_dict(row)  # what could not be read again is not written
        self._rows.append(row)

    def _fits(self, entry: Entry, trial: acc.Budget | acc.RenyiFilter | None = None) -> int:
        """The number of an entry's first steps that the budget admits; blocks count whole.

        Args:
            entry: the steps.
            trial: a copy of the budget, to be asked in its place, and charged what fits.
        """
        budget, fit, first = trial or self._budget, entry.steps, entry.first_step
        assert budget is not None
        self._open()
        count = self._streams.new_events(entry)
        most = budget.fits(entry.event, count) if count else 0
        if most < count:
            fit = bisect.bisect_right(
                range(1, entry.steps + 1),
                most,
                key=lambda n: self._streams.new_events(entry.between(first, first + n)),
            )
        if trial is not None and most:
            trial.charge(acc.Repeated(entry.event, most))
        return fit

    def _end_stream(self, stream: str, step: int) -> None:
        """Takes out the steps of a stream from this one on: nobody was handed them.

        Raises:
            ValueError: it is no close of their issuer, which alone knows what was handed out.
        """
        if self.guard.inside is None:
            raise ValueError(
                "steps must be taken out by close() of their sampler or trainer, which knows what "
                f"was handed out, got a call for stream {stream!r}: what was released counts"
            )
        self._open()
        held = [entry.end for entry in self._streams.of(stream) if not entry.whole]
        if self._ended.get(stream) != step or step < max(held, default=0):
            self._rows.end(stream, step, max(held, default=0))

    def counts_whole(self, stream: str) -> bool:
        """True if releases decide how many steps of the stream are taken."""
        return stream in self._streams.whole

    # As text, and how it is read.

    def to_json(self) -> str:
        """The whole ledger as JSON; ``from_json`` is its inverse. What is reserved counts."""
        content = {
            "format": FORMAT,
            "entries": [entry.to_dict() for entry in self.reserved],
            **{kind: sorted(said) for kind, said in self._noted.items()},
            "seen": self._seen,
            "begun": list(self._begun),
            "models": self._models,
            "shown": {
                name: [[s.step, None if s.past is None else s.past.hex()] for s in states]
                for name, states in tuple(self._shown.items())
            },
        }
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """An in-memory ledger from the text that ``to_json`` returned."""
        content = json.loads(text)
        if content.get("format") not in (1, 2, FORMAT):
            raise ValueError(f"ledger format must be {FORMAT}, got {content.get('format')!r}")
        ledger = cls()
        for row in content["entries"]:
            ledger._streams.insert(Entry.from_dict(row))
        for kind in ledger._noted:
            ledger._noted[kind] = set(content.get(kind, ()))
        ledger._begun = {name: place for place, name in enumerate(content.get("begun", ()))}
        ledger._models = dict(content.get("models", {}))
        for name, found in content.get("shown", {}).items():
            states = [(found, None)] if isinstance(found, int) else found
            for step, past in states:
                ledger._see(name, step, past if past is None else bytes.fromhex(past))
        ledger._seen = {name: list(counts) for name, counts in content.get("seen", {}).items()}
        return ledger

    @classmethod
    def merged(cls, *ledgers: "Ledger") -> "Ledger":
        """A ledger in memory that holds what several hold together, to be read and not charged.

        Their charges add up. Where files have a common beginning, as copies have, what was ended
        or shown in it counts once, and what was reserved and open at its end counts in each
        (docs/proofs/releases.md, "Ledgers merged"). What is reserved counts until ``close``.

        Args:
            ledgers: each opened with its key, if it has one. One given twice counts once.

        Raises:
            ValueError: they cannot be read, or not without a key; copies whose steps were drawn
                alike. Several processes.

        Example:
            >>> from jaxdp import accounting as acc
            >>> one, other = jaxdp.Ledger(), jaxdp.Ledger()
            >>> one.charge(acc.Gaussian(5.0), steps=2)
            >>> other.charge(acc.Gaussian(4.0))
            >>> jaxdp.Ledger.merged(one, other).steps
            3
        """
        processes.require_single_process("merging ledgers")
        books: dict[Any, Book] = {}
        for place, ledger in enumerate(ledgers):
            if not isinstance(ledger, Ledger):
                raise ValueError(
                    f"ledgers[{place}] must be a jaxdp.Ledger, such as jaxdp.Ledger(path), got "
                    f"{arguments.described(ledger)}"
                )
            rows = ledger._rows
            if isinstance(rows, LedgerFile):
                if durable.is_file(rows.path):
                    found = rows.path.stat()
                    books[found.st_dev, found.st_ino] = rows.whole()
            elif id(ledger) not in books:  # in memory: no other has a row in common with it
                said = [{kind: what} for kind, whats in ledger._noted.items() for what in whats]
                held = [*said, *(e.to_dict() for e in ledger.reserved), {"seen": ledger._seen}]
                books[id(ledger)] = [(secrets.token_bytes(16), row) for row in held]
        ledger = cls()
        ledger._read(("a merged ledger", row, b"") for row in united(list(books.values())))
        ledger.closed = True
        return ledger

    def _charged(self) -> Iterator[Entry]:
        """The entries, without what is reserved and known not to be handed out."""
        # Another process may have handed out what this one did not.
        live = {} if self._rows.several else self._issuers
        for entry in self.reserved:
            counts = entry.stream in self._streams.whole
            issuer = None if counts else live.get(entry.stream)
            first, end = (0, 0) if issuer is None else issuer.unused()
            if entry.first_step < min(first, entry.end):
                yield entry.between(entry.first_step, min(first, entry.end))
            if max(end, entry.first_step) < entry.end:
                yield entry.between(max(end, entry.first_step), entry.end)

    def _open(self) -> None:
        """Takes the file for this process at its first charge; until then a ledger only reads."""
        if self.closed:
            raise ValueError("ledger must be open to charge, got one that was closed")
        self._check_processes()
        self._rows.open(self._read, self._forget)

    def _forget(self) -> None:
        self._streams = Streams()
        self._noted: dict[str, set[str]] = {"assumed": set(), "trusted": set()}
        self._seen: dict[str | None, list[int]] = {}  # by stream: verified, opened
        self._seen_on_disk: dict[str | None, list[int]] = {}
        self._begun: dict[str, int] = {}  # name: place
        self._shown: dict[str, list[Shown]] = {}
        self._ended: dict[str, int] = {}  # by stream: where its last issuer has ended it
        self._fixed = ""  # the budget that it was begun with
        self._models: dict[str | None, str] = {}  # by stream, where it is not the first
        # The stream that the last row which names one names: up to each head, and now; and the
        # last head with a row that names it.
        self._named: dict[bytes, str] = {}
        self._last_named = ""
        self._head_of: dict[str, bytes] = {}
        self._start = b""  # the head at the last line "begun"
        self.renewed = b""  # the head at the first line of this format in a file of an older one

    def _read(self, rows: Iterable[tuple[str, Row, bytes]]) -> None:
        """Takes in rows; one that Ctrl-C stopped in between is taken in once more."""
        for where, row, head in rows:
            try:
                if kind := next((kind for kind in self._noted if kind in row), None):
                    self._noted[kind].add(str(row[kind]))
                elif "begun" in row:
                    self._begun.setdefault(row["begun"], len(self._begun))
                    self._start = head
                    if "past" in row:
                        self._see(row["begun"], int(row["step"]), bytes.fromhex(row["past"]))
                elif "shown" in row:
                    past = bytes.fromhex(row["past"]) if "past" in row else None
                    self._see(row["stream"], int(row["shown"]), past)
                elif "model" in row:
                    self._models[row["stream"]] = str(row["model"])
                elif "seen" in row:
                    self._seen.update({name: list(n) for name, n in row["seen"].items()})
                    self._seen_on_disk.update({name: list(n) for name, n in row["seen"].items()})
                elif "ended" in row:
                    self._ended[row["stream"]] = int(row["ended"])
                    if not self.counts_whole(row["stream"]):
                        self._take_out(row["stream"], int(row["ended"]))
                elif "budget" in row:
                    self._fixed = row["budget"]
                    self._check_budget()
                elif "given_back" in row:  # of format 2
                    self._streams.take_out(row["stream"], *map(int, row["given_back"]))
                elif "format" in row:
                    self.renewed = head
                elif "ledger" not in row:
                    entry = Entry.from_dict(row)
                    if self._budget is not None and (n := self._streams.new_events(entry)):
                        self._check_budget()
                        self._budget.charge(acc.Repeated(entry.event, n))
                    self._streams.insert(entry)
                if name := row.get("stream", row.get("begun")):
                    self._last_named, self._head_of[name] = name, head
                self._named[head] = self._last_named
            except acc.BudgetExceededError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ValueError(f"{where} must be a ledger entry: {error}") from error

    def _see(self, stream: str, step: int, past: bytes | None) -> None:
        states, found = self._shown.setdefault(stream, []), Shown(step, past, self._start)
        if states[-1:] != [found]:
            states.append(found)

    def _check_budget(self) -> None:
        """Raises ``BudgetExceededError`` where another budget, or none, was fixed first."""
        fixed, given = self._fixed, self._budget
        late = not fixed and isinstance(given, acc.Budget)
        if given is None or not (late or fixed and fixed != repr(given)):
            return
        raise acc.BudgetExceededError(
            f"budget must be the one that this ledger was begun with, {fixed or 'none'}, got "
            f"{given!r}: it may not follow from what was released since. Give the same again, or "
            "begin a ledger of its own"
        )

    def _take_out(self, stream: str, first: int) -> None:
        """Forgets the steps of a stream from this one on, which cost the budget nothing then."""
        before = event_counts(self._streams.of(stream))
        self._streams.take_out(stream, first)
        if self._budget is not None:
            after = event_counts(self._streams.of(stream))
            for event, count in before.items():
                if back := count - after.get(event, 0):
                    self._budget.give_back(acc.Repeated(event, back))
