"""A source of records with audit canaries among them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.sources import Source
from jaxdp.sources.arrays import DeviceArrays
from jaxdp.types import PyTree

_REAL = -1  # the place of a record that is no canary


@dataclasses.dataclass(frozen=True, eq=False)
class WithCanaries:
    """Pairs (record, place): the records of another source, and canaries, which are zeros.

    Attributes:
        real: the other source.
        places: int32 [k], the canaries that take part. **Secret**.
        example: shape and dtype of one pair.
        on_device: False: rows are gathered on the host.
    """

    real: Source
    places: np.ndarray = dataclasses.field(repr=False)
    example: PyTree
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, source: Source, places: np.ndarray) -> Source:
        """Makes the source; on the device where the real records are there."""
        if isinstance(source, DeviceArrays):
            return DeviceArrays.of(_with_zeros(source.arrays, places))
        return cls(source, places, (source.example, jax.ShapeDtypeStruct((), np.int32)))

    def __len__(self) -> int:
        return len(self.real) + len(self.places)

    def gather(self, indices: Any, mask: Any) -> PyTree:
        """The pairs at ``indices``, see ``Source.gather``."""
        indices, mask, count = np.asarray(indices), np.asarray(mask), len(self.real)
        is_real = mask & (indices < count)
        rows = self.real.gather(np.where(is_real, indices, 0), is_real)
        places = np.full(indices.shape, _REAL, np.int32)
        entered = mask & ~is_real
        places[entered] = self.places[indices[entered] - count]
        return rows, places


def _with_zeros(arrays: PyTree, places: np.ndarray) -> PyTree:
    def longer(leaf: jax.Array) -> jax.Array:
        return jnp.concatenate([leaf, jnp.zeros((len(places), *leaf.shape[1:]), leaf.dtype)])

    count = jax.tree.leaves(arrays)[0].shape[0]
    tags = np.concatenate([np.full(count, _REAL, np.int32), places])
    return jax.tree.map(longer, arrays), jnp.asarray(tags)
