"""``jax.lax.ragged_dot`` as a dense product, since JAX has no ``vmap`` of it for one example."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

RAGGED = "ragged_dot_general"


def dense(eqn: core.JaxprEqn) -> Callable[..., jax.Array] | None:
    """The operation written with ``dot_general``; None where it is not ``jax.lax.ragged_dot``.

    Position t of expert e is row (t, e) of positions by experts, whose other rows are zero: what
    JAX computes, too, where there is no kernel for it (jax 0.10).
    """
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    basic = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    sizes: Any = eqn.invars[2].aval
    if numbers != basic or len(eqn.invars) != 3 or len(sizes.shape) != 1:
        return None

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        ends = jnp.cumsum(sizes)[None]
        at = lax.broadcasted_iota(ends.dtype, (lhs.shape[0], 1), 0)
        mine = (at >= ends - sizes[None]) & (at < ends)
        rows = jnp.where(mine[:, :, None], lhs[:, None, :], jnp.zeros([], lhs.dtype))
        return lax.dot_general(
            rows,
            rhs,
            (((1, 2), (0, 1)), ((), ())),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )

    return product
