"""The rows of a pytree of arrays, counted from shapes alone (so also inside ``jit``)."""

from typing import Any

import jax


def rows(name: str, tree: Any) -> int:
    """The common first axis m of all leaves."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"{name} must hold arrays [m, ...] with one and the same m, got shapes {shapes}"
        )
    return int(sizes.pop())


def check_mask(mask: Any, size: int) -> None:
    """Refuses anything but bool [size]."""
    shape, dtype = getattr(mask, "shape", None), getattr(mask, "dtype", type(mask).__name__)
    if shape != (size,) or str(dtype) != "bool":
        found = f"{dtype} {list(shape)}" if shape is not None else dtype
        raise ValueError(f"mask must be bool [{size}], got {found}")


def check_records(data: Any, num_records: int) -> None:
    """Refuses data other than the ``num_records`` that a draw was made from."""
    # A gather beyond the end would count the last record again and again.
    if rows("data", data) != num_records:
        # Without the numbers: they are private.
        raise ValueError(
            "data must hold the records that the sampler draws from, got another number of them"
        )
