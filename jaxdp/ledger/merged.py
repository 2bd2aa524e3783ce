"""Several ledgers as one: what copies have in common counts once, if it was over by then."""

import copy
from collections.abc import Sequence

from jaxdp import accounting as acc
from jaxdp.ledger.entries import Entry, Row, Streams, blocks

Book = list[tuple[bytes, Row]]  # the rows of a ledger, each with the head of the chain up to it
Seen = dict[str, list[int]]


def united(books: Sequence[Book]) -> list[Row]:
    """Rows that hold what the books hold together, each stream under a name of its own.

    docs/proofs/releases.md, "Ledgers merged", has the argument.

    Raises:
        ValueError: copies went on within one draw of records.
    """
    numbered = {str(number): book for number, book in enumerate(books, 1)}
    return _united(numbered, 0, Streams(), {}) if books else []


def _united(books: dict[str, Book], first: int, held: Streams, seen: Seen) -> list[Row]:
    """As ``united``, of books whose rows before ``first`` are common to all.

    Args:
        books: by number.
        first: the row that is next.
        held: the steps of the rows before that were neither ended nor shown there.
        seen: what these rows say of each stream.
    """
    found: list[Row] = []
    some, end, ended = next(iter(books.values())), first, dict[str | None, int]()
    while all(end < len(book) and book[end][0] == some[end][0] for book in books.values()):
        end += 1

    # The rows that all of them have; all rows, where it is one book. Steps before "ended" or
    # "shown" are over: their releases were made, once, before the copies went apart.
    now = dict(seen)
    for _, row in some[first:end]:
        if "assumed" in row or "trusted" in row:
            found.append(row)
        elif "seen" in row:
            now.update(row["seen"])
        elif "shown" in row:
            ended[row["stream"]] = max(int(row["shown"]), ended.get(row["stream"], 0))
        elif "ended" in row:
            ended[row["stream"]] = max(int(row["ended"]), ended.get(row["stream"], 0))
            if row["stream"] not in held.whole:
                held.take_out(row["stream"], int(row["ended"]))
        elif "given_back" in row:  # of format 2
            held.take_out(row["stream"], *map(int, row["given_back"]))
        elif "event" in row:
            held.insert(Entry.from_dict(row))

    # What is over counts once, up to a whole block; what is open goes to each. Of one book all.
    name, going_on = "+".join(books), Streams()
    going_on.whole = set(held.whole)
    for stream, entries in held.entries.items():
        for entry in entries:
            # Two copies may be charged by hand alike, row by row: nobody knows when they parted.
            over = 0 if entry.source == "by hand" else ended.get(stream, 0)
            stop = entry.end if len(books) == 1 else over - over % entry.block
            if entry.first_step < stop:
                part = entry.between(entry.first_step, min(stop, entry.end))
                found.append({**part.to_dict(), "stream": _named(name, stream)})
            if entry.end > stop:
                going_on.insert(entry.between(max(stop, entry.first_step), entry.end))
    counts = {
        _named(name, stream): [n - b for n, b in zip(both, seen.get(stream, (0, 0)), strict=True)]
        for stream, both in now.items()
    }
    found.append({"seen": counts})
    if len(books) == 1:
        return found

    # Those that still have a row in common go on together; a book that ends here is by itself.
    groups: dict[bytes, dict[str, Book]] = {}
    for number, book in books.items():
        key = book[end][0] if end < len(book) else number.encode()
        groups.setdefault(key, {})[number] = book
    _check_draws(going_on, groups, end)
    for group in groups.values():
        found += _united(group, end, copy.deepcopy(going_on), now)
    return found


def _named(books: str, stream: str | None) -> str:
    """A stream's name in the merged ledger: of other books another."""
    return books if stream is None else f"{books}:{stream}"


def _check_draws(going_on: Streams, groups: dict[bytes, dict[str, Book]], end: int) -> None:
    """Refuses copies of which two went on within blocks whose records were drawn at once.

    The draw of a block follows from the secret, the stream and the block. So both have the same
    records, and two releases of one draw cost more than those of two draws. Blocks that are charged
    without amplification by sampling add up all the same.

    Raises:
        ValueError: two did.
    """
    known = {
        each
        for entries in going_on.entries.values()
        for entry in entries
        for each in blocks_drawn(entry)
    }
    for group in groups.values():
        own = {
            each
            for book in group.values()
            for _, row in book[end:]
            if "event" in row
            for each in blocks_drawn(Entry.from_dict(row))
        }
        if both := own & known:
            stream, block = min(both, key=str)
            raise ValueError(
                f"ledgers must not be copies that went on within one draw of records, got block "
                f"{block} of stream {stream!r} in two of them: its records were drawn alike, and "
                "two releases of one draw cost more than two draws"
            )
        known |= own


def blocks_drawn(entry: Entry) -> set[tuple[str | None, int]]:
    """(stream, number) of the entry's blocks whose records were sampled at once."""
    event = entry.event
    while isinstance(event, acc.PerUser | acc.GridNoise):
        event = event.event
    alone = entry.block == 1 or entry.stream is None  # each is a draw of its own
    if alone or isinstance(event, acc.CorrelatedNoise | acc.ShuffledEpoch):
        return set()
    return {(entry.stream, n) for n in range(*blocks(entry.first_step, entry.end, entry.block))}
