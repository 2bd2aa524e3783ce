"""A source of token sequences padded or cut to one public length."""

import dataclasses

import numpy as np
from jax.typing import ArrayLike

from jaxdp import arguments
from jaxdp.sources import _leaves
from jaxdp.sources._leaves import RandomAccess
from jaxdp.types import PyTree

_INT32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedText:
    """Records whose token ids are padded as they are read; ``padded_text`` makes it.

    Attributes:
        data: the records, with ``len`` and ``[index]``. Sensitive.
        max_length: the length of every sequence.
        pad_id: the token id that pads a shorter one.
        field: the key of the token ids, or None where a record is a sequence.
    """

    data: RandomAccess = dataclasses.field(repr=False)
    max_length: int
    pad_id: int
    field: str | None

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
        if self.field is None:
            tokens, mask = self._cut(record)
            return {"tokens": tokens, "mask": mask}
        mask_name = f"{self.field}_mask"
        if not isinstance(record, dict) or self.field not in record or mask_name in record:
            raise ValueError(
                f"field must be a key of every record, which must be dicts without a key "
                f"{mask_name!r}; {self.field!r} is not"
            )
        tokens, mask = self._cut(record[self.field])
        return {**record, self.field: tokens, mask_name: mask}

    def _cut(self, sequence: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        ids = _token_ids(sequence, self.field)[: self.max_length]
        tokens = np.full(self.max_length, self.pad_id, _INT32)
        tokens[: len(ids)] = ids
        return tokens, np.arange(self.max_length) < len(ids)


def padded_text(
    data: RandomAccess, max_length: int, pad_id: int = 0, field: str | None = None
) -> PaddedText:
    """Returns records whose token ids are padded or cut to ``max_length``.

    A mask says which tokens are there. A loss must use it for more than looks: what padding holds
    would otherwise count, and a mean over tokens must divide by the record's own ``mask.sum()``
    (at least 1), or by ``max_length``.

    **Why one length.** With several, the shapes of a step, and so the time it takes, follow the
    lengths of the records that were drawn: no release, but nothing that epsilon counts either.
    Padding to the longest *drawn* record is the same, and compiles anew. What one length costs can
    be had back where the lengths do not depend on private records (choose ``max_length`` from
    public text, or split the data **once** by a public attribute and give each part a length and a
    training step of its own), or by ``jaxdp.sources.bucketed_text``, which says what it shows.

    Args:
        data: anything with ``len`` and ``[index]``; a record is a sequence of token ids, or a dict
            that holds one under ``field``. A list of lists will do.
        max_length: a public constant of at least 1.
        pad_id: a public constant that fits int32.
        field: the key of the sequence; None where a record is the sequence. Two fields: apply the
            function twice.

    Returns:
        Records for ``as_source`` with two leaves, int32 [max_length] and bool [max_length]:
        ``tokens`` and ``mask``, or ``field`` and ``<field>_mask`` besides what the record held.

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


def _token_ids(sequence: ArrayLike, field: str | None) -> np.ndarray:
    """int32 [n]; no integer is lost."""
    name = f"leaf [{field!r}]" if field is not None else "a record"
    ids = _leaves.as_numbers(sequence, name)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a sequence [n] of integers, the token ids, got another")
    # An empty list has the dtype float64.
    return _leaves.converted(ids, _INT32, name) if ids.size else ids.astype(_INT32)
