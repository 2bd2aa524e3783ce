"""Entries of a ledger, and the intervals of steps that each stream was charged for."""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxdp import accounting as acc
from jaxdp import arguments

SOURCES = {
    "mechanism": "records were drawn, clipped and noised by one Mechanism",
    "sampler": "drawn by a Mechanism's sampler",
    "by hand": "charged by hand: that records were drawn, clipped and noised as the event says "
    "could not be verified",
}
# The note of charges whose randomness a person chose.
SEEDED = (
    "the randomness comes from a seed that a person chose: no guarantee against whoever knows or "
    "guesses it, nor where another run with the same seed is released"
)
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
_ASSUMED = "assumed to be public, computed from no record: "


@dataclasses.dataclass(frozen=True)
class Entry:
    """Releases of one kind on consecutive steps.

    Attributes:
        event: what each step released; or each epoch, of ``event.block`` steps. Epochs begin at
            the multiples of that.
        first_step: the first step.
        steps: how many consecutive steps.
        stream: names the randomness. A step of a stream is one release, charged once. Another
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
        # Plain ones, as a line of the ledger's file holds.
        first, steps = (
            arguments.integer("first_step", self.first_step, least=0),
            arguments.integer("steps", self.steps, least=1),
        )
        object.__setattr__(self, "first_step", first)
        object.__setattr__(self, "steps", steps)
        if self.stream is not None:
            check_stream(self.stream)
        arguments.one_of("source", self.source, SOURCES)
        if not isinstance(self.note, str):
            raise ValueError(f"note must be a string, got {self.note!r}")

    @property
    def end(self) -> int:
        """The step after the last."""
        return self.first_step + self.steps

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``from_dict`` is its inverse."""
        row = {
            "first_step": self.first_step,
            "steps": self.steps,
            "stream": self.stream,
            "source": self.source,
            "event": acc.events.to_dict(self.event),
        }
        return {**row, "note": self.note} if self.note else row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Entry":
        """The entry that ``to_dict`` wrote."""
        return cls(
            acc.events.from_dict(row["event"]),
            row["first_step"],
            row["steps"],
            row["stream"],
            row["source"],
            row.get("note", ""),
        )

    def between(self, start: int, stop: int) -> "Entry":
        """The same releases on other steps."""
        return dataclasses.replace(self, first_step=start, steps=stop - start)

    def continues(self, other: "Entry") -> bool:
        """True if this entry continues the same releases at the step where ``other`` ends."""
        return other.end == self.first_step and (
            (self.event, self.stream, self.source, self.note)
            == (other.event, other.stream, other.source, other.note)
        )


def check_stream(name: Any) -> None:
    """Raises ValueError for a name of a stream that the ledger's file could not give back."""
    if not isinstance(name, str):
        raise ValueError(f"stream must be a string, got {name!r}")


class Streams:
    """The entries of every stream in order of their steps; adjacent ones of a kind are merged."""

    def __init__(self) -> None:
        self._entries: dict[str | None, list[Entry]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self._entries.values() for entry in entries)

    def of(self, stream: str | None) -> list[Entry]:
        """The entries of one stream."""
        return self._entries.get(stream, [])

    def insert(self, entry: Entry) -> None:
        """Inserts an entry for steps that no other entry holds."""
        known = self._entries.setdefault(entry.stream, [])
        if known and entry.continues(known[-1]):
            known[-1] = known[-1].between(known[-1].first_step, entry.end)
            return
        bisect.insort(known, entry, key=lambda e: e.first_step)

    def remove(self, stream: str, first_step: int, end: int) -> None:
        """Forgets the steps [first_step, end) of a stream."""
        kept = []
        for entry in self._entries[stream]:
            if entry.first_step < first_step:
                kept.append(entry.between(entry.first_step, min(entry.end, first_step)))
            if entry.end > end:
                kept.append(entry.between(max(entry.first_step, end), entry.end))
        if kept:
            self._entries[stream] = kept
        else:
            del self._entries[stream]

    def missing(
        self, stream: str | None, start: int, end: int, event: acc.Event | None = None
    ) -> list[tuple[int, int]]:
        """The parts of [start, end) for which the stream holds no entry (of ``event``)."""
        gaps = []
        for entry in self.of(stream):
            if entry.end <= start or entry.first_step >= end or event not in (None, entry.event):
                continue
            if entry.first_step > start:
                gaps.append((start, entry.first_step))
            start = max(start, entry.end)
        return [*gaps, (start, end)] if start < end else gaps

    def new_events(self, entry: Entry) -> int:
        """The number of events that an entry adds: its steps, or the epochs that it begins."""
        size = entry.event.block
        first, end = _blocks(entry.first_step, entry.end, size)
        gaps = self.missing(entry.stream, first * size, end * size, entry.event)
        return sum(max(0, stop // size - -(-start // size)) for start, stop in gaps)


def check_replay(entry: Entry, known: Entry, replay: bool) -> None:
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


def check_block(entry: Entry, known: Iterable[Entry]) -> None:
    """Raises ValueError where an epoch would be charged as two events: it is one draw."""
    for other in known:
        size = max(entry.event.block, other.event.block)
        one, two = (_blocks(e.first_step, e.end, size) for e in (entry, other))
        if size > 1 and entry.event != other.event and one[0] < two[1] and two[0] < one[1]:
            raise ValueError(
                f"event must be one for all steps of an epoch of stream {entry.stream!r}, got "
                f"{entry.event} beside {other.event}: two events need two draws"
            )


def _blocks(first_step: int, end: int, size: int) -> tuple[int, int]:
    """(first, end) of the blocks of ``size`` steps that the steps [first_step, end) touch."""
    return first_step // size, -(-end // size)


def counted(entry: Entry, without: tuple[str, int] | None) -> int:
    """The number of an entry's steps, less those for which no ticket was handed out."""
    if without is None or entry.stream != without[0]:
        return entry.steps
    return max(0, min(entry.end, without[1]) - entry.first_step)


def composed(entries: Iterable[Entry], without: tuple[str, int] | None) -> acc.Event:
    """All entries as one event, equal ones counted together; ``without`` as for ``counted``."""
    counts = event_counts(entries, without)
    return acc.Composed(tuple(acc.Repeated(event, n) for event, n in counts.items()))


def event_counts(
    entries: Iterable[Entry], without: tuple[str, int] | None = None
) -> dict[acc.Event, int]:
    """The number of charges of each event; entries stream by stream, in the order of their steps.

    An epoch that is one event counts once in its stream, whole, however few of its steps and in
    however many entries.
    """
    counts: dict[acc.Event, int] = {}
    ends: dict[tuple[str | None, acc.Event], int] = {}
    for entry in entries:
        if steps := counted(entry, without):
            event, name = entry.event, (entry.stream, entry.event)
            first, end = _blocks(entry.first_step, entry.first_step + steps, event.block)
            counts[event] = counts.get(event, 0) + max(0, end - max(first, ends.get(name, 0)))
            ends[name] = max(end, ends.get(name, 0))
    return counts


def on_trust(steps: int, opened: int, unseen: int, assumed: Iterable[str]) -> list[str]:
    """The sentences about steps whose release jaxdp did not see, and about what is public."""
    told = [text.format(n, steps) for text, n in ((_OPENED, opened), (_UNSEEN, unseen)) if n]
    return [*told, *(_ASSUMED + what for what in sorted(assumed))]
