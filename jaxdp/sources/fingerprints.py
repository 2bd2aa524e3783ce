"""Hashes of records, to recognise them."""

import hashlib

import jax
import numpy as np

from jaxdp.sampling.whole import named
from jaxdp.seeds import Secret
from jaxdp.sources.source import Source

_SAMPLED = 256  # records whose hash tells whether the data are the same


def fingerprint(source: Source, secret: Secret) -> str:
    """A keyed hash of the number of records and of some of them. **Secret**.

    Of arrays that several processes hold in parts, of their shapes alone.

    Args:
        source: the records.
        secret: the key.
    """
    found = hashlib.blake2b(key=secret.stream("data hash"), digest_size=16)
    count = len(source)
    found.update(str(count).encode())
    known = getattr(source, "identities", None)
    for identity in () if known is None else known:  # groups of correlated noise follow from them
        name = named(identity)
        found.update(len(name).to_bytes(8, "big") + name)
    some = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(np.int64))
    if any(not leaf.is_fully_addressable for leaf in _on_devices(source)):
        found.update(f"{source.example}".encode())
        for leaf in _on_devices(source):
            if leaf.is_fully_replicated:  # each process wrote its own copy
                found.update(np.asarray(leaf.addressable_data(0)[some]).tobytes())
        return found.hexdigest()
    for leaf in jax.tree.leaves(source.gather(some, np.ones(len(some), bool))):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _on_devices(source: Source) -> list[jax.Array]:
    leaves = jax.tree.leaves(getattr(source, "arrays", ()))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
