"""Entries, which the lines of a ledger charge, and the steps that each stream holds."""

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


@dataclasses.dataclass(frozen=True)
class Entry:
    """Releases of one kind on consecutive steps.

    Attributes:
        event: what each step released; or each block (an epoch), of ``event.block`` steps. Blocks
            begin at the multiples of that.
        first_step: the first step.
        steps: how many consecutive steps.
        stream: names the randomness. A step of a stream is one release, charged once. Another
            stream is charged anew, and so is every charge without a stream (None).
        source: who vouches for the event: a whole "mechanism", its "sampler", or a hand.
        note: what a reader must know besides, such as that an auditor put records in; public.
        whole: True where releases decide how many of the steps are taken: all count, for good.
    """

    event: acc.Event
    first_step: int
    steps: int
    stream: str | None = None
    source: str = "by hand"
    note: str = ""
    whole: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.event, acc.Event):
            raise ValueError(f"event must be an accounting event, got {self.event!r}")
        # Plain ones, as a line of the ledger's file holds.
        first = arguments.integer("first_step", self.first_step, least=0)
        object.__setattr__(self, "first_step", first)
        object.__setattr__(self, "steps", arguments.integer("steps", self.steps, least=1))
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
        more = {"note": self.note, "whole": self.whole}
        return row | {name: value for name, value in more.items() if value}

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
            bool(row.get("whole", False)),
        )

    def between(self, start: int, stop: int) -> "Entry":
        """The same releases on other steps."""
        return dataclasses.replace(self, first_step=start, steps=stop - start)


def check_stream(name: Any) -> None:
    """Raises ValueError for a name of a stream that the ledger's file could not give back."""
    if not isinstance(name, str):
        raise ValueError(f"stream must be a string, got {name!r}")


class Streams:
    """The steps that each stream holds: disjoint entries in order, those of a kind merged."""

    def __init__(self) -> None:
        self._entries: dict[str | None, list[Entry]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self._entries.values() for entry in entries)

    def of(self, stream: str | None) -> list[Entry]:
        """The entries of one stream."""
        return self._entries.get(stream, [])

    def missing(self, entry: Entry) -> list[Entry]:
        """The parts of an entry whose steps its stream does not hold."""
        gaps, start = [], entry.first_step
        for other in self.of(entry.stream):
            if start < other.end and other.first_step < entry.end:
                if other.first_step > start:
                    gaps.append(entry.between(start, other.first_step))
                start = other.end
        return [*gaps, entry.between(start, entry.end)] if start < entry.end else gaps

    def insert(self, entry: Entry) -> None:
        """Adds the steps of an entry that its stream does not hold."""
        known = self._entries.setdefault(entry.stream, [])
        if known and known[-1].end > entry.first_step:  # rarely: the time is flat to 100,000 lines
            for part in self.missing(entry):
                bisect.insort(known, part, key=lambda e: e.first_step)
        elif known and known[-1] == entry.between(known[-1].first_step, entry.first_step):
            known[-1] = entry.between(known[-1].first_step, entry.end)
        else:
            known.append(entry)

    def take_out(self, stream: str, first: int, end: float = float("inf")) -> None:
        """Forgets the steps [first, end) of a stream."""
        kept = []
        for entry in self.of(stream):
            if entry.first_step < first:
                kept.append(entry.between(entry.first_step, min(entry.end, first)))
            if entry.end > end:
                kept.append(entry.between(max(entry.first_step, int(end)), entry.end))
        self._entries[stream] = kept

    def check(self, entry: Entry) -> None:
        """Raises ValueError where a step, or a block, would be charged as two events."""
        for other in self.of(entry.stream):
            size = max(entry.event.block, other.event.block)
            one, two = (blocks(e.first_step, e.end, size) for e in (entry, other))
            if entry.event != other.event and one[0] < two[1] and two[0] < one[1]:
                what = f"all steps of a block of {size}" if size > 1 else "a step"
                raise ValueError(
                    f"event must be one for {what} of stream {entry.stream!r}, got {entry.event} "
                    f"beside {other.event}: two events need two draws"
                )

    def new_events(self, entry: Entry) -> int:
        """The number of events that an entry adds: its steps, or the blocks that it begins."""
        size = entry.event.block
        first, end = blocks(entry.first_step, entry.end, size)
        held = {
            number
            for e in self.of(entry.stream)
            if e.event == entry.event
            for number in range(max(first, e.first_step // size), min(end, -(-e.end // size)))
        }
        return end - first - len(held)


def blocks(first_step: int, end: int, size: int) -> tuple[int, int]:
    """(first, end) of the blocks of ``size`` steps that the steps [first_step, end) touch."""
    return first_step // size, -(-end // size)


def event_counts(entries: Iterable[Entry]) -> dict[acc.Event, int]:
    """The number of charges of each event; entries stream by stream, in the order of their steps.

    A block that is one event counts once in its stream, whole, however few of its steps and in
    however many entries.
    """
    counts: dict[acc.Event, int] = {}
    ends: dict[tuple[str | None, acc.Event], int] = {}
    for entry in entries:
        event, name = entry.event, (entry.stream, entry.event)
        first, end = blocks(entry.first_step, entry.end, event.block)
        counts[event] = counts.get(event, 0) + max(0, end - max(first, ends.get(name, 0)))
        ends[name] = max(end, ends.get(name, 0))
    return counts
