"""The rows of a ledger, each chained to those before, and the steps that they charge."""

import bisect
import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from jaxdp import accounting as acc
from jaxdp import arguments

FORMAT = 3
Row = dict[str, Any]
Rows = Iterable[tuple[str, Row, bytes]]  # (where, row, the head of the chain with it)
Known = Callable[[Rows], None]

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
    """Releases of one kind on consecutive steps."""

    # What each step released; or each block (an epoch), of ``event.block`` steps. Blocks begin at
    # the multiples of that.
    event: acc.Event
    first_step: int
    steps: int  # how many consecutive steps
    # Names the randomness. A step of a stream is one release, charged once. Another stream is
    # charged anew, and so is every charge without a stream (None).
    stream: str | None = None
    # Who vouches for the event: a whole "mechanism", its "sampler", or a hand.
    source: str = "by hand"
    # What a reader must know besides, such as that an auditor put records in; public.
    note: str = ""
    # True where releases decide how many of the steps are taken: all count, for good.
    whole: bool = False
    # How many steps of an epoch are one event; 1 otherwise.
    block: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.event, acc.Event):
            raise ValueError(f"event must be an accounting event, got {self.event!r}")
        for name, least in (("first_step", 0), ("steps", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # plain ones, as a line of the file holds
                value = arguments.integer(name, value, least=least)
                object.__setattr__(self, name, value)
        if self.stream is not None and not isinstance(self.stream, str):
            check_stream(self.stream)
        if self.source not in SOURCES:
            arguments.one_of("source", self.source, SOURCES)
        if not isinstance(self.note, str):
            raise ValueError(f"note must be a string, got {self.note!r}")
        object.__setattr__(self, "block", _block_of(self.event))

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
            "event": json.loads(_text_of(self.event)),
        }
        more = {"note": self.note, "whole": self.whole}
        return row | {name: value for name, value in more.items() if value}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Entry":
        """The entry that ``to_dict`` wrote."""
        event = _event_of(json.dumps(row["event"], sort_keys=True))
        names = ("first_step", "steps", "stream", "source")
        first, steps, stream, source = (row[name] for name in names)
        whole = bool(row.get("whole", False))
        return cls(event, first, steps, stream, source, row.get("note", ""), whole)

    def between(self, start: int, stop: int) -> "Entry":
        """The same releases on other steps."""
        return dataclasses.replace(self, first_step=start, steps=stop - start)


# Nearly all rows have the event of the row before.
@functools.lru_cache(maxsize=1_000)
def _block_of(event: acc.Event) -> int:
    return event.block


@functools.lru_cache(maxsize=1_000)
def _text_of(event: acc.Event) -> str:
    return json.dumps(acc.events.to_dict(event), sort_keys=True)


@functools.lru_cache(maxsize=1_000)
def _event_of(text: str) -> acc.Event:
    return acc.events.from_dict(json.loads(text))


def check_stream(name: Any) -> None:
    """Raises ValueError for a name of a stream that the ledger's file could not give back."""
    if not isinstance(name, str):
        raise ValueError(f"stream must be a string, got {name!r}")


class Streams:
    """The steps that each stream holds: disjoint entries in order, those of a kind merged."""

    def __init__(self) -> None:
        self.entries: dict[str | None, list[Entry]] = {}
        self.whole: set[str | None] = set()  # where a line said so, of steps held or not
        self._block = 1  # the largest of any event

    def of(self, stream: str | None) -> list[Entry]:
        """The entries of one stream."""
        return self.entries.get(stream, [])

    def meeting(self, stream: str | None, first: int, end: int) -> list[Entry]:
        """The entries of one stream that hold any of the steps [first, end)."""
        known = self.of(stream)
        start = bisect.bisect_right(known, first, key=lambda e: e.end)
        return known[start : bisect.bisect_left(known, end, key=lambda e: e.first_step)]

    def missing(self, entry: Entry) -> list[Entry]:
        """The parts of an entry whose steps its stream does not hold."""
        gaps, start = [], entry.first_step
        for other in self.meeting(entry.stream, entry.first_step, entry.end):
            if other.first_step > start:
                gaps.append(entry.between(start, other.first_step))
            start = other.end
        return [*gaps, entry.between(start, entry.end)] if start < entry.end else gaps

    def insert(self, entry: Entry) -> None:
        """Adds the steps of an entry that its stream does not hold."""
        if entry.whole:
            self.whole.add(entry.stream)
        self._block = max(self._block, entry.block)
        known = self.entries.setdefault(entry.stream, [])
        if known and known[-1].end > entry.first_step:  # rarely: the time is flat to 100,000 lines
            for part in self.missing(entry):
                bisect.insort(known, part, key=lambda e: e.first_step)
        elif known and known[-1] == entry.between(known[-1].first_step, entry.first_step):
            known[-1] = entry.between(known[-1].first_step, entry.end)
        else:
            known.append(entry)

    def take_out(self, stream: str, first: int, end: float = float("inf")) -> None:
        """Forgets the steps [first, end) of a stream."""
        kept = []  # an entry may stick out on both sides
        for entry in self.of(stream):
            if entry.first_step < first:
                kept.append(entry.between(entry.first_step, min(entry.end, first)))
            if entry.end > end:
                kept.append(entry.between(max(entry.first_step, int(end)), entry.end))
        self.entries[stream] = kept

    def check(self, entry: Entry) -> None:
        """Raises ValueError where a step, or a block, would be charged as two events."""
        if entry.stream is None or not self.entries.get(entry.stream):  # each a draw of its own
            return
        # A block that is one event reaches beyond the steps themselves, as far as the widest one.
        wide = max(self._block, entry.block)
        for other in self.meeting(entry.stream, entry.first_step - wide, entry.end + wide):
            size = max(entry.block, other.block)
            one, two = (blocks(e.first_step, e.end, size) for e in (entry, other))
            if entry.event != other.event and one[0] < two[1] and two[0] < one[1]:
                what = f"all steps of a block of {size}" if size > 1 else "a step"
                raise ValueError(
                    f"event must be one for {what} of stream {entry.stream!r}, got {entry.event} "
                    f"beside {other.event}: two events need two draws"
                )

    def new_events(self, entry: Entry) -> int:
        """The number of events that an entry adds: its steps, or the blocks that it begins."""
        # Blocks that the stream holds in part are paid for already.
        size = entry.block
        first, end = blocks(entry.first_step, entry.end, size)
        held = {
            number
            for e in self.meeting(entry.stream, first * size, end * size)
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
        first, end = blocks(entry.first_step, entry.end, entry.block)
        counts[event] = counts.get(event, 0) + max(0, end - max(first, ends.get(name, 0)))
        ends[name] = max(end, ends.get(name, 0))
    return counts


class Chain:
    """A running hash over rows, so that an edited, dropped or inserted one is found.

    Args:
        key: a secret that makes it a MAC: without it nobody can make a row that fits. b"" finds
            accidents only, and tells ledgers apart.
    """

    def __init__(self, key: bytes = b""):
        self._key = key
        self.head = b""
        self.heads: dict[bytes, int] = {}  # and their order

    def after(self, row: Row) -> bytes:
        """The hash of the chain with one more row."""
        found = hashlib.blake2b(digest_size=16, key=self._key[:64], person=b"jaxdp ledger")
        found.update(self.head + json.dumps(row, sort_keys=True).encode())
        return found.digest()

    def take(self, found: bytes) -> None:
        """Continues from a hash."""
        self.head = found
        self.heads.setdefault(found, len(self.heads))


def header(key: bytes = b"") -> Row:
    """The first row of a ledger: its name, random or of its key, and whether there is a key."""
    random = key or secrets.token_bytes(32)
    name = hashlib.blake2b(key=random[:64], digest_size=16, person=b"jaxdp ledger id")
    return {"ledger": FORMAT, "id": name.hexdigest(), "keyed": bool(key)}


class LedgerRows:
    """The rows of a ledger in memory; subclasses keep them in a file or in process 0."""

    several = False  # processes
    _known: Known

    def __init__(self, key: bytes = b"") -> None:
        self.chain = Chain(key)
        self.chain.take(self.chain.after(header()))

    @property
    def chained(self) -> bool:
        """True once there is a header."""
        return True

    @property
    def is_open(self) -> bool:
        """True while this process writes to a file."""
        return False

    def new_rows(self) -> Rows:
        """(where, row, head) for the rows beyond those already known."""
        return ()

    def open(self, known: Known, forget: Callable[[], None]) -> None:
        """Takes them for this process; ``known`` receives rows that were not known yet.

        Where it receives all rows, also those that were read before, ``forget`` is called first.
        """
        self._known = known

    def begin(self) -> None:
        """Writes the header, if there is none."""

    def append(self, row: Row) -> None:
        """Writes one row; it is durable, and was received by what ``open`` was given, on return."""
        head = self.chain.after(row)
        self._known([(f"row {len(self.chain.heads)} of this ledger", row, head)])
        self.chain.take(head)

    def note(self, row: Row) -> None:
        """As ``append``, for what no two processes need to say alike."""
        self.append(row)

    def end(self, stream: str, step: int, held: int) -> None:
        """Takes out a stream's steps from this one on; it holds steps up to ``held``.

        Where none is left the row says that they were all handed out (``Ledger.merged``).
        """
        if held and step <= held:
            self.append({"ended": step, "stream": stream})

    def close(self) -> None:
        """Closes the file, so that other processes can write."""
