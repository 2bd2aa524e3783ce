"""Sources of token sequences of one public length, or of a few, so that short records cost less."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxdp import arguments
from jaxdp.sampling.source import RandomAccess, Records, Source, as_numbers, converted
from jaxdp.types import MOST_ON_DEVICE, PyTree

_INT32 = np.dtype(np.int32)
# int32 [passes, size] (int64 from 2^31 records on), bool [passes, size], the rows of every pass.
Passes = tuple[np.ndarray, np.ndarray, list[PyTree]]


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedText:
    """Records whose token ids are padded as they are read; ``padded_text`` makes it."""

    # The records, with ``len`` and ``[index]``. Sensitive.
    data: RandomAccess = dataclasses.field(repr=False)
    max_length: int  # the length of every sequence
    pad_id: int  # the token id that pads a shorter one
    field: str | None  # the key of the token ids, or None where a record is a sequence

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> PyTree:
        return self._padded(self.data[index])

    def __getitems__(self, indices: list[int]) -> list[PyTree]:
        """The records at ``indices``, read in one call if the data support it."""
        together = getattr(self.data, "__getitems__", None)
        if callable(together):
            return [self._padded(record) for record in together(indices)]
        return [self[index] for index in indices]

    def _padded(self, record: PyTree) -> PyTree:
        sequence, name, others = record, "a record", {}
        tokens_name, mask_name = self.names
        if self.field is not None:
            if not isinstance(record, dict) or self.field not in record or mask_name in record:
                raise ValueError(
                    f"field must be a key of every record, which must be dicts without a key "
                    f"{mask_name!r}; {self.field!r} is not"
                )
            sequence, name, others = record[self.field], f"leaf [{self.field!r}]", record
        ids = as_numbers(sequence, name)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} must be a sequence [n] of integers, the token ids, got another"
            )
        # No integer is lost; an empty list has the dtype float64.
        ids = converted(ids, _INT32, name) if ids.size else ids.astype(_INT32)
        ids = ids[: self.max_length]
        tokens = np.full(self.max_length, self.pad_id, _INT32)
        tokens[: len(ids)] = ids
        return {**others, tokens_name: tokens, mask_name: np.arange(self.max_length) < len(ids)}

    @property
    def names(self) -> tuple[str, str]:
        """The keys of the token ids and of their mask."""
        return ("tokens", "mask") if self.field is None else (self.field, f"{self.field}_mask")


def padded_text(
    data: RandomAccess, max_length: int, pad_id: int = 0, field: str | None = None
) -> PaddedText:
    """Returns records whose token ids are padded or truncated to ``max_length``.

    A mask says which tokens are there. A loss must use it for more than looks: what padding holds
    would otherwise count, and a mean over tokens must divide by the record's own ``mask.sum()``
    (at least 1), or by ``max_length``.

    **Why one length.** With several, the shapes of a step, and so the time it takes, follow the
    lengths of the records that were drawn: no release, but nothing that epsilon counts either.
    Padding to the longest *drawn* record is the same, and compiles anew. What one length costs can
    be had back where the lengths do not depend on private records (choose ``max_length`` from
    public text, or split the data **once** by a public attribute and give each part a length and a
    training step of its own), or by ``jaxdp.sampling.bucketed_text``, which says what it shows.

    Args:
        data: anything with ``len`` and ``[index]``; a record is a sequence of token ids, or a dict
            that holds one under ``field``. A list of lists will do.
        max_length: a public constant of at least 1.
        pad_id: a public constant that fits int32.
        field: the key of the sequence; None where a record is the sequence. Two fields: apply the
            function twice.

    Returns:
        Records for ``as_source`` with two leaves, int32 [max_length] and bool [max_length]:
        ``tokens`` and ``mask``, or ``field`` and ``<field>_mask`` beside the record's others.

    Raises:
        ValueError: an argument is none of the above; when a record is read, it has no sequence of
            integers that fit int32.
    """
    arguments.integer("max_length", max_length, least=1)
    arguments.integer("pad_id", pad_id, least=-(2**31))
    if pad_id >= 2**31:
        raise ValueError(f"pad_id must fit int32, got {pad_id!r}")
    if not hasattr(data, "__len__") or not hasattr(type(data), "__getitem__"):
        raise ValueError(
            f"data must have len(data) and data[index], got {type(data).__name__}: a stream cannot "
            "be sampled from"
        )
    return PaddedText(data, int(max_length), int(pad_id), field)


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedText:
    """A source of records in a few lengths; ``bucketed_text`` makes it."""

    # The records, all at the largest length. Sensitive.
    text: Source = dataclasses.field(repr=False)
    buckets: tuple[tuple[int, int], ...]  # (length, room) pairs, shortest first; public
    names: tuple[str, str]  # the keys of the token ids and of their mask
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @property
    def example(self) -> PyTree:
        """Shape and dtype of one record at the largest length."""
        return self.text.example

    def __len__(self) -> int:
        return len(self.text)

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, all at the largest length, see ``Source.gather``."""
        return self.text.gather(indices, mask)

    def passes(self, indices: np.ndarray, size: int) -> Passes:
        """The records of one draw in physical batches of one length each, shortest first.

        A record's length alone decides its bucket, never who else was drawn: if a full bucket
        sent records on to the next, one record would move what the others add.

        Args:
            indices: integer [k], in random order, which each bucket keeps.
            size: rows of a physical batch.

        Returns:
            (indices [passes, size], mask [passes, size], rows): ``rows`` holds for every pass a
            pytree of arrays [size, ...] with the token ids at the length of its bucket.

        Raises:
            ValueError: as ``gather``.
        """
        # A row more, of zeros, which place -1 points at: the padding of a pass.
        with_none = np.append(indices, 0)
        rows = self.text.gather(with_none, np.arange(len(with_none)) < len(indices))
        lengths = [length for length, _ in self.buckets]
        bucket = np.searchsorted(lengths, rows[self.names[1]].sum(1))[:-1]
        # Each bucket runs as many physical batches as its public room takes, more where it must.
        order, made = [], []
        for number, (length, room) in enumerate(self.buckets):
            short = {**rows, **{name: rows[name][:, :length] for name in self.names}}
            places = np.flatnonzero(bucket == number)
            passes = max(-(-room // size), -(-len(places) // size))
            padded = np.full((passes, size), -1)
            padded.flat[: len(places)] = places
            order.append(padded)
            made += [jax.tree.map(lambda leaf, at=at: leaf[at], short) for at in padded]
        found = np.concatenate(order)
        dtype = np.int32 if len(self) <= MOST_ON_DEVICE else np.int64
        return with_none.astype(dtype)[found], found >= 0, made


def bucketed_text(
    data: RandomAccess, buckets: Mapping[int, int], pad_id: int = 0, field: str | None = None
) -> BucketedText:
    """Returns a source of records padded to the smallest of a few public lengths.

    A step runs physical batches of one length each, shortest first, and adds them to one sum, which
    is noised once. A record longer than all lengths is truncated to the largest. Whatever its
    length, a record adds one clipped gradient; with a loss that uses the mask
    (``jaxdp.sampling.padded_text`` says how) it is the one at the largest length, to rounding.

    **What this reveals, and to whom.** What is released (parameters, ledger, report) depends on
    the lengths through the noisy sum alone. The number of passes, the time and the memory of a step
    do not pass through it: a bucket runs as many passes as its ``room`` takes, and **more where
    more records of that length were drawn**, which an observer of step times may see. No epsilon
    covers that. Each bucket's number is constant as long as its draws fit its room: choose the room
    from public text, with some to spare (a bucket that b records are expected in has room enough
    with b + 6·√b). A room as large as the draw, b + 6·√b at the expected batch size b, is safe
    whatever the lengths are; safest and simplest is one length, ``padded_text``.

    Args:
        data: as for ``padded_text``.
        buckets: from each length, at least two of them, to its room: for how many records of a
            step its passes run in any case, at least 1. Public constants. A room is rounded up to
            whole passes of the trainer's ``physical_batch_size``.
        pad_id: as for ``padded_text``.
        field: as for ``padded_text``.

    Returns:
        A source for ``Trainer`` and ``Run``, with the leaves of ``padded_text``, int32 [length] and
        bool [length], where ``length`` is that of the record's bucket.

    Raises:
        ValueError: as ``padded_text``; ``buckets`` is none of the above.
    """
    if not isinstance(buckets, Mapping) or len(buckets) < 2:
        raise ValueError(
            "buckets must map two or more lengths to rooms, such as {64: 128, 256: 32}, got "
            f"{arguments.described(buckets)}; for one length there is padded_text"
        )
    for length, room in buckets.items():
        arguments.integer("a length of buckets", length, least=1)
        arguments.integer("a room of buckets", room, least=1)
    found = tuple(sorted((int(length), int(room)) for length, room in buckets.items()))
    text = padded_text(data, found[-1][0], pad_id, field)
    return BucketedText(Records.of(text), found, text.names)
