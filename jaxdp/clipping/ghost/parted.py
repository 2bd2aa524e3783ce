"""Per-example gradients of parameters that a mesh cuts over other axes than rows.

Each device has a part of them. Squares are added part by part, each on its own device, and parts
are added last, as numbers for every row: reshapes that merge a cut axis, and inner products over
it, would send gradients or Gram matrices from device to device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.clipping.ghost.views import Sliced

# Squared norms [m], as computed and rounded up.
Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The axis of a parameter that is cut over devices.

    Attributes:
        axis: of the parameter.
        parts: their number.
        names: of the mesh axes.
        mesh: the mesh.
    """

    axis: int
    parts: int
    names: tuple[str, ...]
    mesh: Mesh

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """[parts, ...]: the parts of an array along ``axis``, each on its devices."""
        shape = (*x.shape[:axis], self.parts, x.shape[axis] // self.parts, *x.shape[axis + 1 :])
        return self._pinned(jnp.moveaxis(x.reshape(shape), axis, 0))

    def _pinned(self, x: jax.Array) -> jax.Array:
        free = [P.UNCONSTRAINED] * (x.ndim - 1)
        spec = P(self.names, *free)
        if jax.sharding.get_abstract_mesh().manual_axes:
            return jax.lax.with_sharding_constraint(x, spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def squares(self, of_part: Callable[..., Pair], *arrays: tuple[Any, int | None]) -> Pair:
        """The sum over parts of ``of_part``'s squared norms.

        Args:
            of_part: from the arrays of one part.
            arrays: pairs of an array (or a pytree of them), and the axis that is cut, or None.
        """
        split = [
            x if axis is None else jax.tree.map(lambda leaf, a=axis: self.split(leaf, a), x)
            for x, axis in arrays
        ]
        over = [None if axis is None else 0 for _, axis in arrays]
        one, other = jax.vmap(of_part, over)(*split)
        return jnp.sum(one, axis=0), jnp.sum(other, axis=0)


def place_in(key: Sequence[Sequence[Any]], sizes: Sequence[int], cut: Cut, shape: Any) -> int:
    """The one of (g, p, q) that the cut axis comes first in: 0, 1 or 2; -1 if in none.

    Args:
        key: labels of (g, p, q), see ``sites.Site``.
        sizes: of (g, p, q).
        cut: of the parameter.
        shape: of the parameter.
    """
    for place, label in enumerate(key):
        if sizes[place] % cut.parts == 0 and _leads(label, cut, shape):
            return place
    return -1


def _leads(label: Sequence[Any], cut: Cut, shape: Any) -> bool:
    for atom in label:
        if isinstance(atom, int):
            if atom == cut.axis:
                return True
            size = shape[atom]
        elif isinstance(atom, tuple) and atom[0] == "split":
            _, whole, parts, at = atom
            if whole[0] == cut.axis and at == 0:
                return bool(parts[0] % cut.parts == 0)
            size = parts[at]
        elif isinstance(atom, Sliced):
            return False
        else:
            continue
        if size > 1:
            return False
    return False
