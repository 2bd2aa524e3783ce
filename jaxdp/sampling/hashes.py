"""Hashes of records: the identity of each, and a fingerprint by which a run knows its data."""

import hashlib

import jax
import numpy as np

from jaxdp.ledger.seeds import Secret
from jaxdp.sampling.rules import Identities, identity_bytes
from jaxdp.sampling.source import Source

_AT_ONCE = 4096  # records that are read together
_SAMPLED = 256  # records whose hash tells whether the data are the same
# Records that are read twice: one that a coin flips or not is alike both times with probability ½.
_TWICE = 16
_PLAIN = (np.ndarray, np.memmap)  # no reader of a user's own


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
    if not all(leaf.is_fully_addressable for leaf in _on_devices(source)):
        raise ValueError(
            "identities must be given for records that several processes hold in parts: the "
            "source needs an attribute identities, one value a record; got none"
        )
    # A hash of the content alone: the group that is made of it does not depend on other records.
    count = len(source)
    digests = np.empty(count, np.uint64)
    for start in range(0, count, _AT_ONCE):
        chosen = np.arange(start, min(count, start + _AT_ONCE))
        leaves = jax.tree.leaves(source.gather(chosen, np.ones(len(chosen), bool)))
        whole = [np.ascontiguousarray(leaf).reshape(len(chosen), -1) for leaf in leaves]
        rows = np.concatenate([leaf.view(np.uint8) for leaf in whole], axis=1)
        for place, row in zip(chosen, rows, strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
            digests[place] = int.from_bytes(digest, "big")
    return digests


def fingerprint(source: Source, secret: Secret) -> str:
    """A keyed hash of the number of records and of some of them. **Secret**.

    Of arrays that several processes hold in parts, of their shapes alone.
    """
    found = hashlib.blake2b(key=secret.stream("data hash"), digest_size=16)
    count = len(source)
    found.update(str(count).encode())
    known = getattr(source, "identities", None)
    for identity in () if known is None else known:  # groups of correlated noise follow from them
        name = identity_bytes(identity)
        found.update(len(name).to_bytes(8, "big") + name)
    some = _spread(count, _SAMPLED)
    if any(not leaf.is_fully_addressable for leaf in _on_devices(source)):
        found.update(f"{source.example}".encode())
        for leaf in _on_devices(source):
            if leaf.is_fully_replicated:  # each process wrote its own copy
                found.update(np.asarray(leaf.addressable_data(0)[some]).tobytes())
        return found.hexdigest()
    for leaf in jax.tree.leaves(source.gather(some, np.ones(len(some), bool))):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def check_repeatable(source: Source) -> None:
    """Raises ValueError where a record is another one the second time that it is read.

    Sixteen records are read twice, spread over the source by their places alone, which are public,
    and compared bit by bit. Arrays on the device, in memory and in memory maps are not read.

    Raises:
        ValueError: they read differently; the message names the remedy.
    """
    arrays = jax.tree.leaves(getattr(source, "arrays", ()))
    if source.on_device or (arrays and all(type(leaf) in _PLAIN for leaf in arrays)):
        return
    some = _spread(len(source), _TWICE)
    twice = (source.gather(some, np.ones(len(some), bool)) for _ in range(2))
    first, second = ([leaf.tobytes() for leaf in jax.tree.leaves(rows)] for rows in twice)
    if first != second:
        raise ValueError(
            "source must give the same record each time that it is read, got one that gave another "
            "the second time: a run that is taken up again knows its records by what it reads, and "
            "this one never could be. Where the source augments at random, let it give the record "
            "as it is, and augment in the loss: jaxdp.augmented(loss_fn, augment, multiplicity), "
            "with augment(example, key). Nothing was charged"
        )


def _spread(count: int, most: int) -> np.ndarray:
    """The places of at most that many records, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _on_devices(source: Source) -> list[jax.Array]:
    leaves = jax.tree.leaves(getattr(source, "arrays", ()))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
