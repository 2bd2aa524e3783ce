"""The records of a source, to be compared with what a loss captured."""

import jax
import numpy as np

from jaxdp.checks import neighbours
from jaxdp.sources import Source
from jaxdp.sources.arrays import DeviceArrays, HostArrays

_IN_MEMORY = 2**26  # numbers up to which all records are compared with captured arrays
_SAMPLE = 512


def columns(source: Source) -> list[np.ndarray]:
    """The records, one array [n, ...] for every leaf: all, or a sample of many."""
    if (found := in_memory(source)) is not None:
        return found
    rows = neighbours.records_of(source, _SAMPLE)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]


def in_memory(source: Source) -> list[np.ndarray] | None:
    """All records, if they lie in this process's memory and are not many; else None."""
    if not isinstance(source, DeviceArrays | HostArrays) or not len(source):
        return None
    leaves = jax.tree.leaves(source.arrays)
    here = all(getattr(leaf, "is_fully_addressable", type(leaf) is np.ndarray) for leaf in leaves)
    if not here or sum(leaf.size for leaf in leaves) > _IN_MEMORY:
        return None
    return [np.asarray(leaf) for leaf in leaves]
