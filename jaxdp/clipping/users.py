"""The loss of a user, where she and not a record is the privacy unit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.clipping.forms import form_of
from jaxdp.sources import User
from jaxdp.types import PyTree


def user_loss(loss_fn: Callable[..., Any], reduce: str = "mean") -> Callable[..., jax.Array]:
    """The loss of one user: the mean or sum of ``loss_fn`` over her records.

    Her records make one gradient, which is clipped once. ``loss_fn`` sees one record at a time, so
    no layer can couple two of them.

    Args:
        loss_fn: of one record, a scalar, in any form that ``jaxdp.clipped_grad`` takes.
        reduce: "mean" or "sum".

    Raises:
        ValueError: ``reduce`` is neither.
    """
    arguments.one_of("reduce", reduce, ("mean", "sum"))
    form = form_of(loss_fn)

    def of(params: PyTree, user: User, key: jax.Array | None) -> jax.Array:
        keys = None if key is None else jax.random.split(key, len(user.present))
        losses = jax.vmap(lambda record, own: form(loss_fn, params, record, own))(
            user.records, keys
        )
        total = jnp.sum(jnp.where(user.present, losses, jnp.zeros_like(losses)))
        count = jnp.sum(user.present, dtype=losses.dtype)
        return total if reduce == "sum" else total / jnp.maximum(count, jnp.ones_like(count))

    if form.rng is None:
        return lambda params, user: of(params, user, None)
    return lambda params, user, rng: of(params, user, rng)
