"""The append-only ledger: an accounting event for every release, on disk before the release."""

import copy
import json
import os
import secrets
import sys
import threading
import types
from collections.abc import Iterable
from pathlib import Path

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp._entries import (
    SEEDED,
    SOURCES,
    Entry,
    Streams,
    check_block,
    check_replay,
    check_stream,
    composed,
    counted,
    on_trust,
)
from jaxdp._ledger_file import Row, is_running
from jaxdp._ledger_shared import book_of, check_shared

FORMAT = 2


class Ledger:
    """The list of all releases as accounting events, each charged before the release is made.

    With a ``path``, every charge is on disk (flushed and fsynced) before ``charge`` returns, so
    that a crash can over-count and never under-count. A ledger holds no un-noised data. Under
    add-or-remove-one nothing in it depends on the data at all, so it may be published. Every line
    is chained to those before it, so that an edited or removed one is found; lines cut off at the
    end are found by whoever kept the ``head`` (a ``TrainState`` does). In several processes of
    ``jax.distributed`` process 0 writes, and a charge returns in the others once it has.

    Args:
        path: a JSON-lines file: read now, and written to from the first charge on, by one process
            at a time. None keeps the ledger in memory.
        budget: a fresh ``acc.RenyiFilter``; a charge that it does not admit raises
            ``acc.BudgetExceededError`` before anything is released. With it, noise and the number
            of steps may be chosen by looking at what was released.
        key: secret bytes that make the chain a MAC; None chains without a secret.

    Raises:
        ValueError: the file is damaged, no ledger or no regular file, cannot be read, or holds more
            than the budget.

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

    _seen_on_disk: dict[str, list[int]]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: acc.RenyiFilter | None = None,
        key: bytes | None = None,
    ):
        self._budget = budget
        self._closed = False
        self._charging: types.FrameType | None = None
        self._lock = threading.RLock()
        self._forget()
        self._book = book_of(None if path is None else Path(path), key or b"", budget is None)
        self._read(self._book.new_rows())

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, stream by stream; adjacent entries of one kind are merged."""
        return tuple(self._streams)

    @property
    def event(self) -> acc.Event:
        """The composition of everything charged, as one event."""
        return composed(self._streams, None)

    @property
    def steps(self) -> int:
        """The number of charged steps over all streams."""
        return sum(entry.steps for entry in self._streams)

    @property
    def head(self) -> bytes:
        """A 16-byte hash of everything written so far."""
        if not self._book.chained:
            self._open()
            self._book.begin()
        return self._book.chain.head

    def holds(self, head: bytes, since: bytes = b"") -> bool:
        """True if ``head`` was this ledger's (after ``since``): it holds all releases up to it."""
        return self._book.chain.holds(head, since)

    @property
    def begun(self) -> int:
        """The number of streams begun in this ledger."""
        return len(self._names)

    def new_stream(self, name: str | None = None) -> tuple[str, int]:
        """Begins a stream of randomness; its name is on disk when this returns.

        Args:
            name: of the stream; None takes a random one.

        Returns:
            (name of the stream, number of streams begun before it).
        """
        if name is not None:
            check_stream(name)
        with self._lock:
            self._open()
            number = len(self._names)
            found: str = self._book.append({"begun": name or secrets.token_hex(8)})["begun"]
        return found, number

    def join(self) -> None:
        """Takes the ledger for this process; in several, each then knows all charges so far."""
        with self._lock:
            self._open()

    def charge(
        self,
        event: acc.Event,
        steps: int = 1,
        *,
        stream: str | None = None,
        first_step: int = 0,
        source: str = "by hand",
        replay: bool = False,
        note: str = "",
    ) -> None:
        """Charges ``steps`` releases of ``event``.

        Args:
            event: the release of one step; or of an epoch of ``event.block`` steps, charged whole.
            steps: the number of consecutive steps.
            stream: names the randomness; each of its steps can be charged once. None charges anew.
            first_step: the first of the steps in the stream.
            source: as for ``Entry``.
            replay: for a run that repeats steps whose releases nobody saw: those that the stream
                already holds then cost nothing.
            note: as for ``Entry``.

        Raises:
            ValueError: a step that was charged before, without ``replay`` or as another event; a
                closed ledger, or one that another process writes to; a bad argument; a full disk,
                or storage without locks.
        """
        entry = Entry(event, first_step, steps, stream, source, note)
        with self._lock:
            if is_running(self._charging):  # it would be charged for the same steps
                raise ValueError(
                    "ledger must not be charged while a charge is being made, got one of a signal "
                    "handler or a finalizer: let it set a flag, and look at it after the step"
                )
            self._charging = sys._getframe()  # stays after an interrupt, and means nothing
            self._open()
            known = self._streams.of(stream)
            if stream is None and known:
                start = -(-known[-1].end // event.block) * event.block  # never within an epoch
                entry = entry.between(start, start + steps)
            else:
                check_block(entry, known)
            if not known or entry.first_step >= known[-1].end:
                self._append(entry)
                return
            for other in known:
                if other.first_step < entry.end and entry.first_step < other.end:
                    check_replay(entry, other, replay)
            for start, stop in self._streams.missing(stream, entry.first_step, entry.end):
                self._append(entry.between(start, stop))

    def charged_until(self, stream: str) -> int:
        """The step after the last one that a stream was charged for; 0 where there is none.

        Raises:
            ValueError: the ledger cannot be charged here.
        """
        with self._lock:
            self._open()
            known = self._streams.of(stream)
            return known[-1].end if known else 0

    def give_back(self, stream: str, first_step: int, end: int) -> None:
        """Takes back the charge of steps [first_step, end) that no ticket was handed out for.

        Only for the issuer of the stream's tickets: a step that anybody saw stays charged.

        Args:
            stream: the stream.
            first_step: the first step that is given back.
            end: the step after the last one.

        Raises:
            ValueError: these are not the last steps that the stream was charged for.
        """
        with self._lock:
            known = self._streams.of(stream)
            last = bool(known) and end == known[-1].end and first_step < end
            if not last or self._streams.missing(stream, first_step, end):
                raise ValueError(
                    f"first_step and end must be the last steps charged to stream {stream!r}, got "
                    f"{first_step} and {end}"
                )
            self._open()
            self._book.append({"given_back": [first_step, end], "stream": stream})

    def assume(self, what: str) -> None:
        """Writes down, once, something that the guarantee takes to be public without verifying it.

        It is on disk when this returns, and ``unverified`` says it also after the ledger was opened
        anew.

        Args:
            what: in words, such as "the frozen parameter ['embedding']"; public, one line.

        Raises:
            ValueError: ``what`` is no such string; the ledger is closed, or another process writes.
        """
        self._say("assumed", what, self._assumed)

    def trust(self, what: str) -> None:
        """Writes down, once, an assumption of the guarantee other than those of ``assume``.

        Args:
            what: a whole sentence; public, one line.

        Raises:
            ValueError: as ``assume``.
        """
        self._say("trusted", what, self._trusted)

    def shown(self, stream: str) -> int:
        """The step up to which releases of a stream may have been seen; 0 at first."""
        return self._shown.get(stream, 0)

    def show(self, stream: str, step: int) -> None:
        """Writes down that releases of a stream up to this step may be seen from now on."""
        check_stream(stream)
        step = arguments.integer("step", step, least=0)
        with self._lock:
            if step > self.shown(stream):
                self._open()
                self._book.append({"shown": step, "stream": stream})

    def verified(self, stream: str, step: int) -> None:
        """Counts a step whose whole release jaxdp saw, so that sum, noise and event agree."""
        del step
        self._seen.setdefault(stream, [0, 0])[0] += 1

    def opened(self, stream: str, step: int) -> None:
        """Counts a step whose noise key was handed to the caller."""
        del step
        self._seen.setdefault(stream, [0, 0])[1] += 1

    def covers(self, other: "Ledger") -> bool:
        """True if every step that ``other`` charged is charged here too, as the same event."""
        return all(
            not self._streams.missing(entry.stream, entry.first_step, entry.end, entry.event)
            for entry in other.entries
        )

    def epsilon(
        self,
        delta: float,
        relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
        *,
        without: tuple[str, int] | None = None,
    ) -> acc.Bound:
        """Bounds on epsilon at ``delta`` for everything charged; the guarantee is ``.upper``.

        Args:
            delta: in (0, 1).
            relation: the neighbouring relation of everything; the bound says it. A ledger holds
                events and no relation: ``trainer.epsilon`` and ``run.epsilon`` ask with that of
                their own mechanism's budget. Where mechanisms share a ledger whose budgets have
                unlike relations, ask with the strictest.
            without: (stream, step): leaves out the steps of the stream from this one on, which were
                charged ahead and for which no ticket was handed out; see ``Issuer.ahead``.

        Raises:
            ValueError: nothing was charged; an event that has no bound under this relation.
        """
        if not self._streams:
            raise ValueError(
                "ledger must hold a charge to have an epsilon, got an empty one: whatever was "
                "trained was charged elsewhere or not at all. Hand this ledger to the trainer or "
                "the sampler (ledger=...)"
            )
        return acc.epsilon(composed(self._streams, without), delta, relation=relation)

    def notes(self) -> list[str]:
        """The distinct notes of the entries, without the note about a chosen seed."""
        said = {part for e in self._streams for part in e.note.split("; ")}
        return sorted(said - {"", SEEDED})

    def unverified(self, *, without: tuple[str, int] | None = None) -> list[str]:
        """The assumptions that jaxdp could not verify, one sentence each; [] if there is none.

        Args:
            without: as for ``epsilon``.
        """
        said = {SOURCES["by hand"] for e in self._streams if e.source == "by hand"} | self._trusted
        said |= {SEEDED for e in self._streams if SEEDED in e.note}
        drawn = [e for e in self._streams if e.source == "sampler"]
        steps = sum(counted(e, without) for e in drawn)
        seen = [self._seen.get(str(name), [0, 0]) for name in {e.stream for e in drawn}]
        opened = min(steps, sum(o for _, o in seen))
        unseen = max(0, steps - opened - sum(v for v, _ in seen))
        return [*sorted(said), *on_trust(steps, opened, unseen, self._assumed)]

    def to_json(self) -> str:
        """The whole ledger as JSON; ``from_json`` is its inverse."""
        content = {
            "format": FORMAT,
            "entries": [entry.to_dict() for entry in self.entries],
            "assumed": sorted(self._assumed),
            "trusted": sorted(self._trusted),
            "seen": self._seen,
            "begun": sorted(self._names),
            "shown": self._shown,
        }
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """An in-memory ledger from the text that ``to_json`` returned."""
        content = json.loads(text)
        if content.get("format") not in (1, FORMAT):
            raise ValueError(f"ledger format must be {FORMAT}, got {content.get('format')!r}")
        ledger = cls()
        for row in content["entries"]:
            ledger._streams.insert(Entry.from_dict(row))
        sets = (set(content.get(name, ())) for name in ("assumed", "trusted", "begun"))
        ledger._assumed, ledger._trusted, ledger._names = sets
        ledger._shown = dict(content.get("shown", {}))
        ledger._seen = {name: list(counts) for name, counts in content.get("seen", {}).items()}
        return ledger

    def close(self) -> None:
        """Lets other processes write to the file; every charge is already on disk."""
        with self._lock:
            if self._book.is_open and self._seen != self._seen_on_disk:
                self._book.append({"seen": self._seen})
            self._book.close()
            self._closed = True

    def _open(self) -> None:
        """Takes the file for this process at its first charge; until then a ledger only reads."""
        if self._closed:
            raise ValueError("ledger must be open to charge, got one that was closed")
        check_shared(self._book)
        if self._book.begins_anew:
            self._forget()
        self._book.open(self._read)

    def _forget(self) -> None:
        self._streams = Streams()
        self._assumed: set[str] = set()
        self._trusted: set[str] = set()
        self._seen: dict[str, list[int]] = {}  # by stream: verified, opened
        self._seen_on_disk = {}
        self._names: set[str] = set()
        self._shown: dict[str, int] = {}
        self._taking = ""  # where the row lies that was last begun to be taken in

    def _say(self, kind: str, what: str, known: set[str]) -> None:
        if not isinstance(what, str) or not what or len(what.splitlines()) != 1:
            raise ValueError(f"what must be one line of words, got {what!r}")
        with self._lock:
            if what in known:
                return
            self._open()
            if what not in known:
                self._book.append({kind: what})

    def _read(self, rows: Iterable[tuple[str, Row]]) -> None:
        for where, row in rows:
            again, self._taking = where == self._taking, where  # Ctrl-C may have cut it short
            try:
                self._take_in(row, again)
            except acc.BudgetExceededError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ValueError(f"{where} must be a ledger entry: {error}") from error

    def _take_in(self, row: Row, again: bool) -> None:
        if "assumed" in row:
            self._assumed.add(str(row["assumed"]))
        elif "trusted" in row:
            self._trusted.add(str(row["trusted"]))
        elif "begun" in row:
            self._names.add(row["begun"])
        elif "shown" in row:
            self._shown[row["stream"]] = max(self.shown(row["stream"]), int(row["shown"]))
        elif "seen" in row:
            self._seen.update({name: list(counts) for name, counts in row["seen"].items()})
            self._seen_on_disk.update({name: list(n) for name, n in row["seen"].items()})
        elif "given_back" in row:
            if not again or self._streams.of(row["stream"]):
                self._streams.remove(row["stream"], *row["given_back"])
        elif "ledger" not in row:
            entry = Entry.from_dict(row)
            if not again or self._streams.missing(entry.stream, entry.first_step, entry.end):
                self._spend(self._budget, entry)
                self._streams.insert(entry)

    def _spend(self, budget: acc.RenyiFilter | None, entry: Entry) -> None:
        if budget is not None:
            budget.charge(acc.Repeated(entry.event, self._streams.new_events(entry)))

    def _append(self, entry: Entry) -> None:
        self._spend(copy.copy(self._budget), entry)  # spent once the row is on disk
        row = entry.to_dict()
        Entry.from_dict(row)  # what could not be read again is not written
        self._book.append(row)
