"""The rows of a pytree of arrays, counted from shapes alone, and exact sums of two pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A compiled step gathers by indices of 32 bits. Floating-point numbers count to 2^53.
MOST_ON_DEVICE, MOST_RECORDS = 2**31 - 1, 2**53
ON_DEVICE = (
    "data on the device must hold fewer than 2**31 records, got more: keep them on the host, in "
    "NumPy arrays, memory maps or a reader, so that a draw's rows are gathered there"
)
OTHER_RECORDS = "data must hold the records that the sampler draws from, got another number of them"


def rows(name: str, tree: Any) -> int:
    """The common length m of the first axis of all leaves."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"{name} must hold arrays [m, ...] with one and the same m, got shapes {shapes}"
        )
    return int(sizes.pop())


def check_mask(mask: Any, size: int) -> None:
    """Raises ValueError unless the mask is bool [size]."""
    shape, dtype = getattr(mask, "shape", None), getattr(mask, "dtype", type(mask).__name__)
    if shape != (size,) or str(dtype) != "bool":
        found = f"{dtype} {list(shape)}" if shape is not None else dtype
        raise ValueError(f"mask must be bool [{size}], got {found}")


def check_records(data: Any, num_records: int) -> None:
    """Raises ValueError unless the data hold ``num_records`` records."""
    # A gather beyond the end would count the last record again and again.
    if rows("data", data) != num_records:
        # Without the numbers: they are private.
        raise ValueError(OTHER_RECORDS)
    if num_records > MOST_ON_DEVICE and any(
        isinstance(x, jax.Array) for x in jax.tree.leaves(data)
    ):
        raise ValueError(ON_DEVICE)


def require_gathered(num_records: int) -> None:
    """Raises ValueError for more records than can be gathered on the device."""
    if num_records > MOST_ON_DEVICE:
        raise ValueError(ON_DEVICE)


def for_device(indices: np.ndarray, num_records: int, gathered: bool) -> np.ndarray:
    """Positions [..., m] as a compiled function takes them.

    As they are where 32 bits reach every record; beyond, uint32 [..., m, 2], their low and high
    halves: without 64-bit numbers JAX would drop the high ones silently.

    Raises:
        ValueError: it is to gather rows by such halves.
    """
    if num_records <= MOST_ON_DEVICE:
        return indices
    if not gathered:
        raise ValueError(ON_DEVICE)
    whole = indices.astype(np.uint64)
    halves = (whole & np.uint64(2**32 - 1), whole >> np.uint64(32))
    return np.stack(halves, axis=-1).astype(np.uint32)


def folded(rng: jax.Array, indices: jax.Array) -> jax.Array:
    """A key [m] for each position [m], or [m, 2] as ``for_device`` makes them.

    Each position has its own: ``fold_in`` of its low half, and of the high one where it is not 0.
    """
    if indices.ndim == 1:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, indices)

    def of_one(halves: jax.Array) -> jax.Array:
        low = jax.random.fold_in(rng, halves[0])
        return jnp.where(halves[1] == 0, low, jax.random.fold_in(low, halves[1]))

    return jax.vmap(of_one)(indices)


@jax.jit
def added(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sum of two (value, lost) as such a pair: value is rounded once in all.

    Knuth's two-sum (The Art of Computer Programming, vol. 2, 4.2.2, Theorem B): exact in any order
    of the two, so that parts may be added one by one, by halves or from the other end.
    """
    both = jax.tree.map(_two_sum, one[0], other[0])
    total, rounded = (jax.tree.map(lambda _, pair, i=i: pair[i], one[0], both) for i in (0, 1))
    lost = jax.tree.map(lambda a, b, c: a + b + c, one[1], other[1], rounded)
    pairs = jax.tree.map(_two_sum, total, lost)
    first, second = (jax.tree.map(lambda _, pair, i=i: pair[i], total, pairs) for i in (0, 1))
    return first, second


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[Any, Any]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)
