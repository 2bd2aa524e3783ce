"""Losses made of a loss: the mean over views of one record, the loss of a user."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.clipping import forms
from jaxdp.clipping.captured import declaring
from jaxdp.sampling import User
from jaxdp.types import PyTree


def augmented(
    loss_fn: Callable[..., jax.Array],
    augment: Callable[[PyTree, jax.Array], PyTree],
    multiplicity: int,
) -> Callable[[PyTree, PyTree, jax.Array], jax.Array]:
    """The mean loss over ``multiplicity`` augmentations of one example (De et al. 2022, section 3).

    (arXiv:2204.13650v2.) The gradients of a record's views are averaged **before** clipping, so the
    record still contributes one clipped gradient: the guarantee is that of the clipping rule, and
    the views cost computation, not privacy.

    Args:
        loss_fn: in one of the forms of ``jaxdp.clipped_grad``.
        augment: ``(example, key) -> example`` of the same shapes; it sees one record only.
        multiplicity: how many views K ≥ 1.

    Returns:
        A loss ``(params, example, rng) -> scalar`` for ``jaxdp.clipped_grad``.

    Raises:
        ValueError: ``augment`` is not a function, or ``multiplicity`` is not a whole number of at
            least 1.
    """
    if not callable(augment):
        raise ValueError(f"augment must be a function (example, key), got {augment!r}")
    multiplicity = arguments.integer("multiplicity", multiplicity, least=1)
    form = forms.form_of(loss_fn)

    def mean_loss(params: PyTree, example: PyTree, rng: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            view_key, loss_key = jax.random.split(key)
            view = augment(example, view_key)
            loss: jax.Array = form(loss_fn, params, view, loss_key)
            return loss

        return jnp.mean(jax.vmap(one)(jax.random.split(rng, multiplicity)))

    return declaring(mean_loss, inner=loss_fn)


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
    form = forms.form_of(loss_fn)

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
