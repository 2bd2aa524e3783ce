"""Trees in which the frozen leaves of the parameters are None."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.types import PyTree


def like(value: PyTree, params: PyTree) -> PyTree:
    """The parameters, with None where the sum has None (frozen)."""
    return _leafwise(lambda v, leaf: None if v is None else leaf, value, params)


def filled(moved: PyTree, params: PyTree) -> PyTree:
    """The moved parameters, and the frozen ones where they are None."""
    return _leafwise(lambda m, leaf: leaf if m is None else m, moved, params)


def _leafwise(choose: Callable[[Any, Any], Any], tree: PyTree, params: PyTree) -> PyTree:
    """Maps ``choose`` over the leaves of ``tree``, which may be None, and of ``params``."""
    structure: Any = jax.tree.structure(params)
    found = zip(structure.flatten_up_to(tree), jax.tree.leaves(params), strict=True)
    return jax.tree.unflatten(structure, [choose(*pair) for pair in found])
