"""Sources of records with audit canaries among them."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class WithRecords:
    """The records of another source, and canaries that are records like them.

    Attributes:
        real: the other source.
        added: pytree of NumPy arrays [k, ...], the canaries that take part. **Secret**.
        example: shape and dtype of one record.
        on_device: False: rows are gathered on the host.
    """

    real: Source
    added: PyTree = dataclasses.field(repr=False)
    example: PyTree
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, source: Source, added: PyTree) -> Source:
        """Makes the source; on the device where the real records are there."""
        if isinstance(source, DeviceArrays):
            both = jax.tree.map(
                lambda real, own: jnp.concatenate([real, jnp.asarray(own, real.dtype)]),
                source.arrays,
                added,
            )
            return DeviceArrays.of(both)
        return cls(source, added, source.example)

    def __len__(self) -> int:
        return len(self.real) + len(jax.tree.leaves(self.added)[0])

    def gather(self, indices: Any, mask: Any) -> PyTree:
        """The records at ``indices``, see ``Source.gather``."""
        indices, mask, count = np.asarray(indices), np.asarray(mask), len(self.real)
        is_real = mask & (indices < count)
        rows = self.real.gather(np.where(is_real, indices, 0), is_real)
        entered = mask & ~is_real
        chosen = indices[entered] - count

        def placed(row: Any, own: np.ndarray) -> np.ndarray:
            # Copied: the source may hand out what it keeps, or what cannot be written.
            row = np.array(row)
            row[entered] = own[chosen]
            return row

        return jax.tree.map(placed, rows, self.added)
