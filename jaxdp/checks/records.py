"""The records of a source, to be compared with what enters a loss."""

from typing import Any

import jax
import numpy as np

from jaxdp.checks import neighbours
from jaxdp.clipping import captured, statistics
from jaxdp.sources import Source
from jaxdp.sources.arrays import DeviceArrays, HostArrays
from jaxdp.sources.users import Users

_IN_MEMORY = 2**26  # numbers that are copied at most
_SAMPLE, _FEW = 512, 64


def columns(source: Source) -> list[np.ndarray]:
    """The records, one array [n, ...] for every leaf: all, or a sample of many."""
    leaves = _leaves(source)
    if leaves and sum(leaf.size for leaf in leaves) <= _IN_MEMORY:
        return [np.asarray(leaf) for leaf in leaves]
    return _read(source, _SAMPLE)


def known(source: Source) -> statistics.KnownRecords | None:
    """All records, where they lie in this process's memory; nothing is read otherwise."""
    source = source.source if isinstance(source, Users) else source
    leaves = _leaves(source)
    on_host = all(isinstance(leaf, np.ndarray) or _is_on_cpu(leaf) for leaf in leaves)
    if not leaves or not (on_host or sum(leaf.size for leaf in leaves) <= _IN_MEMORY):
        return None
    return statistics.KnownRecords(leaves)


def sampled(source: Source, most: int = _FEW) -> statistics.KnownRecords:
    """A few records, evenly spaced, of a source that is read one by one."""
    return statistics.KnownRecords(_read(source, most))


def _leaves(source: Source) -> list[Any]:
    """The arrays of a source whose records lie in this process's memory; [] of another."""
    if not isinstance(source, DeviceArrays | HostArrays) or not len(source):
        return []
    leaves = jax.tree.leaves(source.arrays)
    # A memory map is a file.
    here = (
        isinstance(x, jax.Array) and captured.is_here(x) or type(x) is np.ndarray for x in leaves
    )
    return leaves if all(here) else []


def _is_on_cpu(leaf: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in leaf.devices())


def _read(source: Source, most: int) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(neighbours.records_of(source, most))]
