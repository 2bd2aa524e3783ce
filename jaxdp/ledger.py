"""The append-only record of what was released: events keyed by step, durable before the release."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TextIO

from jaxdp import _durable, _validate
from jaxdp import accounting as acc

SOURCES = {
    "mechanism": "records were drawn, clipped and noised by one Mechanism",
    "sampler": "drawn by a Mechanism's sampler: that each draw was clipped record by record (no "
    "layer or gradient coupling two records) and noised by the same Mechanism, once and with fresh "
    "noise, could not be verified",
    "by hand": "charged by hand: that records were drawn, clipped and noised as the event says "
    "could not be verified",
}
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """Releases of one kind on consecutive steps.

    Attributes:
        event: what each step released.
        first_step: the first step.
        steps: how many consecutive steps.
        stream: names the randomness: a step of a stream is one release and charged once. Another
            stream is charged anew, and so is every charge without a stream (None).
        source: who vouches for the event: a whole "mechanism", its "sampler", or a hand.
        note: what a reader must know besides, such as that an auditor put records in; public.
    """

    event: acc.Event
    first_step: int
    steps: int
    stream: str | None = None
    source: str = "by hand"
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.event, acc.Event):
            raise ValueError(f"event must be an accounting event, got {self.event!r}")
        _validate.integer("first_step", self.first_step, least=0)
        _validate.integer("steps", self.steps, least=1)
        _validate.one_of("source", self.source, SOURCES)
        if not isinstance(self.note, str):
            raise ValueError(f"note must be a string, got {self.note!r}")

    @property
    def end(self) -> int:
        """The step after the last."""
        return self.first_step + self.steps

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; :meth:`from_dict` is its inverse."""
        row = {
            "first_step": self.first_step,
            "steps": self.steps,
            "stream": self.stream,
            "source": self.source,
            "event": acc.to_dict(self.event),
        }
        return {**row, "note": self.note} if self.note else row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Entry":
        """The entry that :meth:`to_dict` wrote."""
        return cls(
            acc.from_dict(row["event"]), row["first_step"], row["steps"], row["stream"],
            row["source"], row.get("note", ""),
        )


class Ledger:
    """What a run released so far. Charge before releasing; ask for epsilon at any time.

    With a ``path``, every charge is on disk (flushed and fsynced) before :meth:`charge` returns, so
    that a crash can over-count and never under-count. A ledger holds no un-noised data, but under
    add-or-remove-one nothing in it depends on the data at all, so it may be published.

    Args:
        path: a JSON-lines file: read now, and written to from the first charge on, by one process
            at a time. None keeps the ledger in memory.
        budget: a fresh ``acc.RenyiFilter``; a charge that it does not admit raises
            ``acc.BudgetExceededError`` before anything is released. With it, noise and the number
            of steps may be chosen by looking at what was released.

    Raises:
        ValueError: the file is damaged, or holds more than the budget.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: acc.RenyiFilter | None = None,
    ):
        self._path = None if path is None else Path(path)
        self._budget = budget
        self._entries: list[Entry] = []
        self._file: TextIO | None = None
        self._closed = False
        if self._path is not None and self._path.exists():
            self._read(_durable.whole_lines(self._path))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, in the order of charging."""
        return tuple(self._entries)

    @property
    def event(self) -> acc.Event:
        """Everything that was charged, as one event: equal events counted together."""
        counts: dict[acc.Event, int] = {}
        for entry in self._entries:
            counts[entry.event] = counts.get(entry.event, 0) + entry.steps
        return acc.Composed(tuple(acc.Repeated(event, n) for event, n in counts.items()))

    @property
    def steps(self) -> int:
        """The number of charged steps over all streams."""
        return sum(entry.steps for entry in self._entries)

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

        With a stream, the charge is for its steps from ``first_step`` on, each to be charged once.
        ``replay`` is for a resumed run that repeats the very same releases, bit by bit: steps that
        the stream already holds then cost nothing.

        Raises:
            ValueError: a step that was charged before, without ``replay`` or as another event; a
                closed ledger, or one that another process writes to; a bad argument.
        """
        entry = Entry(event, first_step, steps, stream, source, note)
        self._open()
        if stream is None:
            first_step = sum(e.steps for e in self._entries if e.stream is None)
            entry = dataclasses.replace(entry, first_step=first_step)
        known = [e for e in self._entries if e.stream == stream]
        for other in known:
            if other.first_step < entry.end and entry.first_step < other.end:
                _check_replay(entry, other, replay)
        for start, stop in _uncovered(entry.first_step, entry.end, known):
            self._append(dataclasses.replace(entry, first_step=start, steps=stop - start))

    def covers(self, other: "Ledger") -> bool:
        """Whether every step that ``other`` charged is charged here too, as the same event."""
        return all(
            not _uncovered(
                entry.first_step, entry.end,
                [e for e in self._entries if (e.stream, e.event) == (entry.stream, entry.event)],
            )
            for entry in other.entries
        )

    def epsilon(
        self, delta: float, relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE
    ) -> acc.Bound:
        """Bounds on epsilon at ``delta`` for everything charged; the guarantee is ``.upper``."""
        return acc.epsilon(self.event, delta, relation=relation)

    def notes(self) -> list[str]:
        """What the entries' notes say, each once."""
        return sorted({e.note for e in self._entries if e.note})

    def unverified(self) -> list[str]:
        """What the ledger took on trust, in words."""
        return sorted({SOURCES[e.source] for e in self._entries if e.source != "mechanism"})

    def to_json(self) -> str:
        """The whole ledger as JSON; :meth:`from_json` is its inverse."""
        rows = [entry.to_dict() for entry in self._entries]
        return json.dumps({"format": FORMAT, "entries": rows}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """A ledger in memory from :meth:`to_json`."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(f"ledger format must be {FORMAT}, got {content.get('format')!r}")
        ledger = cls()
        ledger._entries = [Entry.from_dict(row) for row in content["entries"]]
        return ledger

    def close(self) -> None:
        """Lets other processes write to the file; every charge is already on disk."""
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Takes the file for this process at its first charge; until then a ledger only reads."""
        if self._closed:
            raise ValueError("ledger must be open to charge, got one that was closed")
        if self._path is None or self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        busy = f"ledger {self._path} is in use by another writer"
        file = _durable.open_locked(self._path, "a", busy)
        whole = _durable.whole_lines(self._path)
        try:
            self._read(whole)
        except ValueError:
            file.close()  # and with it the lock
            raise
        # A torn last line was never followed by its release: the fsync comes first.
        os.truncate(self._path, sum(len(line) for line in whole))
        _durable.sync_directory(self._path.parent)
        self._file = file

    def _read(self, lines: list[bytes]) -> None:
        """Takes over what the file holds beyond the entries already known."""
        for number, line in enumerate(lines[len(self._entries) :], len(self._entries) + 1):
            entry = _parse(self._path, number, line)
            self._spend(entry)
            self._entries.append(entry)

    def _spend(self, entry: Entry) -> None:
        if self._budget is not None:
            self._budget.charge(acc.Repeated(entry.event, entry.steps))

    def _append(self, entry: Entry) -> None:
        self._spend(entry)
        if self._file is not None:
            _durable.append_line(self._file, json.dumps(entry.to_dict(), sort_keys=True))
            self._entries.append(entry)
            return
        last = self._entries[-1] if self._entries else None
        if last is not None and _continues(last, entry):
            entry = dataclasses.replace(last, steps=last.steps + entry.steps)
            self._entries.pop()
        self._entries.append(entry)


def _check_replay(entry: Entry, known: Entry, replay: bool) -> None:
    step = max(entry.first_step, known.first_step)
    if not replay:
        raise ValueError(
            f"first_step must be one that stream {entry.stream!r} was not charged for, got {step}: "
            "two releases from one draw are not two events"
        )
    if (known.event, known.source) != (entry.event, entry.source):
        raise ValueError(
            f"event for step {step} must be {known.event} as charged before ({known.source}), got "
            f"{entry.event} ({entry.source})"
        )


def _continues(last: Entry, entry: Entry) -> bool:
    return dataclasses.replace(entry, first_step=last.first_step, steps=last.steps) == last and (
        last.end == entry.first_step
    )


def _uncovered(start: int, end: int, known: list[Entry]) -> list[tuple[int, int]]:
    gaps = []
    for entry in sorted(known, key=lambda e: e.first_step):
        if entry.end <= start or entry.first_step >= end:
            continue
        if entry.first_step > start:
            gaps.append((start, entry.first_step))
        start = max(start, entry.end)
    return [*gaps, (start, end)] if start < end else gaps


def _parse(path: Path | None, number: int, line: bytes) -> Entry:
    try:
        return Entry.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}, must be a ledger entry: {error}") from error
