"""Identities of records: what stays a record's own whatever the other records are."""

import hashlib

import jax
import numpy as np

from jaxdp.sampling.rules import Identities
from jaxdp.sources.source import Source
from jaxdp.types import PyTree

_AT_ONCE = 4096  # records that are read together


def identities(source: Source) -> Identities:
    """The identity of each record, [n]: ``source.identities`` where it has them, else its content.

    The content is read once, all of it, and hashed: uint64 [n]. Equal records share an identity,
    which costs nothing: what is made of it is a function of the record alone.

    Args:
        source: the records; reading one twice must give the same.

    Raises:
        ValueError: as many as the records are needed; arrays that other processes hold in part.
    """
    found = getattr(source, "identities", None)
    if found is not None:
        if len(found) != len(source):
            raise ValueError("identities must be as many as the records, got another number")
        return found
    for leaf in jax.tree.leaves(getattr(source, "arrays", ())):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                "identities must be given for records that several processes hold in parts: the "
                "source needs an attribute identities, one value a record; got none"
            )
    count = len(source)
    digests = np.empty(count, np.uint64)
    for start in range(0, count, _AT_ONCE):
        chosen = np.arange(start, min(count, start + _AT_ONCE))
        rows = _bytes(source.gather(chosen, np.ones(len(chosen), bool)))
        for place, row in zip(chosen, rows, strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
            digests[place] = int.from_bytes(digest, "big")
    return digests


def _bytes(records: PyTree) -> np.ndarray:
    """uint8 [m, bytes of a record]."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(records)]
    return np.concatenate([leaf.reshape(len(leaf), -1).view(np.uint8) for leaf in leaves], axis=1)
