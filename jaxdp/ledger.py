"""The append-only record of what was released: events keyed by step, durable before the release."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TextIO

from jaxdp import _validate
from jaxdp import accounting as acc

SOURCES = {
    "mechanism": "records were drawn, clipped and noised by one Mechanism",
    "sampler": "drawn by a Mechanism's sampler: that its records were clipped and noised by the "
    "same Mechanism, once each, could not be verified",
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
        stream: names the randomness; the same step of the same stream is the same release, so
            charging it again (a replay after a crash) costs nothing. Another stream is charged
            anew, and so is every charge without a stream (None).
        source: who vouches for the event: a whole "mechanism", its "sampler", or a hand.
    """

    event: acc.Event
    first_step: int
    steps: int
    stream: str | None = None
    source: str = "by hand"

    @property
    def end(self) -> int:
        """The step after the last."""
        return self.first_step + self.steps

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; :meth:`from_dict` is its inverse."""
        return {
            "first_step": self.first_step,
            "steps": self.steps,
            "stream": self.stream,
            "source": self.source,
            "event": acc.to_dict(self.event),
        }

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Entry":
        """The entry that :meth:`to_dict` wrote."""
        return cls(
            acc.from_dict(row["event"]), row["first_step"], row["steps"], row["stream"],
            row["source"],
        )


class Ledger:
    """What a run released so far. Charge before releasing; ask for epsilon at any time.

    With a ``path``, every charge is on disk (flushed and fsynced) before :meth:`charge` returns, so
    that a crash can over-count and never under-count. A ledger holds no un-noised data, but under
    add-or-remove-one nothing in it depends on the data at all, so it may be published.

    Args:
        path: a JSON-lines file; created, or read and continued. None keeps the ledger in memory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._entries: list[Entry] = []
        self._file: TextIO | None = None
        if path is not None:
            self._open(Path(path))

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
    ) -> None:
        """Charges ``steps`` releases of ``event``; without a stream, always anew.

        With a stream, the charge is for its steps from ``first_step`` on, and those that it already
        holds are replays of the same release, with the same noise, and cost nothing.

        Raises:
            ValueError: a step that was charged as another event before, or a bad argument.
        """
        steps = _validate.integer("steps", steps, least=1)
        first_step = _validate.integer("first_step", first_step, least=0)
        _validate.one_of("source", source, SOURCES)
        if not isinstance(event, acc.Event):
            raise ValueError(f"event must be an accounting event, got {event!r}")
        if stream is None:
            first_step = sum(e.steps for e in self._entries if e.stream is None)
        end = first_step + steps
        known = [e for e in self._entries if e.stream == stream]
        for entry in known:
            overlap = entry.first_step < end and first_step < entry.end
            if overlap and (entry.event, entry.source) != (event, source):
                raise ValueError(
                    f"event for step {max(first_step, entry.first_step)} must be {entry.event} as "
                    f"charged before ({entry.source}), got {event} ({source})"
                )
        for start, stop in _uncovered(first_step, end, known):
            self._append(Entry(event, start, stop - start, stream, source))

    def epsilon(
        self, delta: float, relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE
    ) -> acc.Bound:
        """Bounds on epsilon at ``delta`` for everything charged; the guarantee is ``.upper``."""
        return acc.epsilon(self.event, delta, relation=relation)

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
        ledger = cls()
        for row in json.loads(text)["entries"]:
            ledger._append(Entry.from_dict(row))
        return ledger

    def close(self) -> None:
        """Closes the file, if there is one; every charge is already on disk."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = _whole_lines(path)
            self._entries = [_parse(path, i, line) for i, line in enumerate(whole, 1)]
            # A torn last line was never followed by its release: the fsync comes first.
            os.truncate(path, sum(len(line) for line in whole))
        self._file = path.open("a", encoding="utf-8")
        _sync_directory(path.parent)

    def _append(self, entry: Entry) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry.to_dict(), sort_keys=True) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._entries.append(entry)
            return
        last = self._entries[-1] if self._entries else None
        if last is not None and _continues(last, entry):
            entry = dataclasses.replace(last, steps=last.steps + entry.steps)
            self._entries.pop()
        self._entries.append(entry)


def _continues(last: Entry, entry: Entry) -> bool:
    same = (last.event, last.stream, last.source) == (entry.event, entry.stream, entry.source)
    return same and last.end == entry.first_step


def _uncovered(start: int, end: int, known: list[Entry]) -> list[tuple[int, int]]:
    gaps = []
    for entry in sorted(known, key=lambda e: e.first_step):
        if entry.end <= start or entry.first_step >= end:
            continue
        if entry.first_step > start:
            gaps.append((start, entry.first_step))
        start = max(start, entry.end)
    return [*gaps, (start, end)] if start < end else gaps


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _parse(path: Path, number: int, line: bytes) -> Entry:
    try:
        return Entry.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}, must be a ledger entry: {error}") from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
