"""Adaptive quantile clipping: the clip norm follows a quantile of the gradient norms, privately."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import _validate
from jaxdp.mechanism import Mechanism, dp_sgd
from jaxdp.noise import PrivatizeState, add_gaussian, privatize
from jaxdp.types import PyTree, Summed


class QuantileState(NamedTuple):
    """State of :func:`quantile_clip`. **Secret**: it holds the noise key.

    Attributes:
        privatize: state of the gradient's noise.
        bound: float32 scalar; the clip norm of the next step, computed from noisy counts: public.
    """

    privatize: PrivatizeState
    bound: jax.Array


def split_noise(noise_multiplier: float, count_noise_multiplier: float) -> float:
    """The gradient's multiplier z_g with (z_g⁻² + z_c⁻²)^-½ = ``noise_multiplier``.

    Gradient and count are computed from one draw, so they are one Gaussian mechanism (Andrew et al.
    2021, arXiv:1905.03871v5, theorem 1).

    Raises:
        ValueError: the count alone would cost more than the whole step may.
    """
    whole = _validate.positive("noise_multiplier", noise_multiplier)
    count = _validate.positive("count_noise_multiplier", count_noise_multiplier)
    if count <= whole:
        raise ValueError(
            f"count_noise_multiplier must be above noise_multiplier ({whole}), got {count}: the "
            "count would use the step's whole budget"
        )
    # Rounded up, so that the two together are never more than the event says.
    return (whole**-2 - count**-2) ** -0.5 * (1.0 + 1e-12)


def quantile_clip(
    noise_multiplier: float,
    batch_size: int,
    dataset_size: int,
    *,
    initial_bound: float = 0.1,
    target_quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_noise_multiplier: float | None = None,
    sampling: str = "poisson",
    key: jax.Array | None = None,
) -> tuple[Mechanism, optax.GradientTransformationExtraArgs]:
    """Clips to a bound that follows a quantile of the norms (Andrew et al. 2021, algorithm 1).

    (arXiv:1905.03871v5.) Each step releases the clipped sum with noise z_g · bound and the count of
    gradients within the bound with noise z_c / 2; the next bound is bound · exp(-η (b̃ - γ)), with b̃
    the noisy count over the expected batch size.

    Formal guarantee: both releases come from one draw of records and are together one Gaussian
    mechanism with multiplier ``noise_multiplier`` = (z_g⁻² + z_c⁻²)^-½ under every relation: a
    record adds at most ``bound`` to the sum and at most ½ to the count shifted by one half. The
    first bound is a public constant and every later one is computed from noisy counts.

    Hand the bound of the state to the gradient: ``grad_fn.sum(..., bound=state[0].bound)``, with
    ``grad_fn = mechanism.clipped_grad(loss_fn)``.

    Args:
        noise_multiplier: of the whole step; what the accountant is told.
        batch_size: expected number of records of a step.
        dataset_size: number of records, a declared public constant.
        initial_bound: the first clip norm, a public constant.
        target_quantile: γ in (0, 1): the share of gradients that should be within the bound.
        learning_rate: η > 0 of the bound's geometric updates.
        count_noise_multiplier: z_c, standard deviation of the count's noise over ½. None takes
            batch_size / 10 (the paper's choice: σ_b = m / 20), at least 2 · noise_multiplier.
        sampling: as for :func:`jaxdp.dp_sgd`.
        key: as for :func:`jaxdp.privatize`.

    Returns:
        The mechanism, whose event is that of the whole step, and the transformation that comes
        first in an optax chain.

    Raises:
        ValueError: an argument is out of its range; at update, a sum without ``votes`` (the bound
            was not handed to the gradient).
    """
    mechanism = dp_sgd(noise_multiplier, initial_bound, batch_size, dataset_size, sampling)
    if count_noise_multiplier is None:
        count_noise_multiplier = max(batch_size / 10, 2 * noise_multiplier)
    gradient_noise = split_noise(noise_multiplier, count_noise_multiplier)
    target = _validate.positive("target_quantile", target_quantile)
    if target >= 1:
        raise ValueError(f"target_quantile must be in (0, 1), got {target_quantile!r}")
    rate = _validate.positive("learning_rate", learning_rate)
    inner = privatize(gradient_noise, batch_size, key)

    def init(params: PyTree) -> QuantileState:
        return QuantileState(inner.init(params), jnp.asarray(initial_bound, jnp.float32))

    def update(
        updates: Summed, state: QuantileState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, QuantileState]:
        votes = _votes(updates)
        count = add_gaussian(votes, 0.5 * count_noise_multiplier, _count_key(state.privatize))
        mean, noise_state = inner.update(updates, state.privatize, params, **extra)
        within = count / batch_size + 0.5
        bound = state.bound * jnp.exp(-rate * (within - target))
        # Public limits of the rule that the bound goes to.
        return mean, QuantileState(noise_state, jnp.clip(bound, 1e-10, 1e10))

    return mechanism, optax.GradientTransformationExtraArgs(init, update)


def _votes(updates: Summed) -> jax.Array:
    if not isinstance(updates, Summed):
        raise TypeError(
            "quantile_clip must come first in the chain and take the Summed that clipping returns, "
            f"got {type(updates).__name__}"
        )
    if updates.votes is None:
        raise ValueError(
            "updates must carry votes: give the clipped gradient bound=state.bound, got none"
        )
    return updates.votes


def _count_key(state: PrivatizeState) -> jax.Array:
    """A key that the gradient's noise of no step uses."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
    return jax.random.fold_in(key, _COUNT)


# Far beyond the numbers of the leaves, whose keys are split from the same one.
_COUNT = 0x636F756E
