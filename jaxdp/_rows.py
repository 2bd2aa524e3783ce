"""The rows of a pytree of arrays, counted from shapes alone, and exact sums of two pytrees."""

from typing import Any

import jax


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
        raise ValueError(
            "data must hold the records that the sampler draws from, got another number of them"
        )


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


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)
