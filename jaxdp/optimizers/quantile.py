"""Adaptive quantile clipping: the clip norm follows a quantile of the gradient norms, privately."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.ledger import links, returned
from jaxdp.ledger.tickets import NoiseKey
from jaxdp.mechanism import Mechanism, dp_sgd
from jaxdp.noise.gaussian import PrivatizeState, check_update, noise_key
from jaxdp.noise.normals import add_normals
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import Sampling
from jaxdp.types import PyTree, Summed


class QuantileState(NamedTuple):
    """State of ``quantile_clip``."""

    privatize: PrivatizeState  # state of the gradient's noise
    # float32 scalar; the clip norm of the next step, computed from noisy counts: public.
    bound: jax.Array


def quantile_clip(
    noise_multiplier: float,
    batch_size: int,
    dataset_size: int,
    *,
    initial_bound: float = 0.1,
    target_quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_noise_multiplier: float | None = None,
    sampling: str | Sampling = "poisson",
) -> tuple[Mechanism, optax.GradientTransformationExtraArgs]:
    """Clips to a bound that follows a quantile of the norms (Andrew et al. 2021, algorithm 1).

    (arXiv:1905.03871v5.) Each step releases the clipped sum with noise z_g · bound and the count of
    gradients within the bound with noise z_c / 2; the next bound is bound · exp(-η (b̃ - γ)), with b̃
    the noisy count over the expected batch size.

    Formal guarantee: both releases come from one draw of records and are together one Gaussian
    mechanism with multiplier ``noise_multiplier`` = (z_g⁻² + z_c⁻²)^-½ under every relation: a
    record adds at most ``bound`` to the sum and at most ½ to the count shifted by one half. The
    first bound is a public constant and every later one is computed from noisy counts.

    Hand the bound of the state to the gradient: ``grad_fn(..., bound=state[0].bound)``, with
    ``grad_fn = mechanism.clipped_grad(loss_fn)``.

    Args:
        noise_multiplier: that of the whole step, which is charged.
        batch_size: expected number of records of a step.
        dataset_size: number of records, a declared public constant.
        initial_bound: the first clip norm, a public constant.
        target_quantile: γ in (0, 1): the share of gradients that should be within the bound.
        learning_rate: η > 0 of the bound's geometric updates.
        count_noise_multiplier: z_c, standard deviation of the count's noise over ½. None takes
            batch_size / 10 (the paper's choice: σ_b = m / 20), at least 2 · noise_multiplier.
        sampling: as for ``jaxdp.dp_sgd``.

    Returns:
        The mechanism, whose event is that of the whole step, and the transformation that comes
        first in an optax chain.

    Raises:
        ValueError: an argument is out of its range; at update, a sum without ``votes`` (the bound
            was not given to the gradient).
    """
    mechanism = dp_sgd(
        noise_multiplier=noise_multiplier,
        l2_clip_norm=initial_bound,
        batch_size=batch_size,
        dataset_size=dataset_size,
        sampling=sampling,
    )
    # The count needs little of the budget: it is one number for all coordinates of the gradient.
    if count_noise_multiplier is None:
        count_noise_multiplier = max(batch_size / 10, 2 * noise_multiplier)
    mechanism = dataclasses.replace(mechanism, count_noise_multiplier=count_noise_multiplier)
    target = arguments.positive("target_quantile", target_quantile)
    if target >= 1:
        raise ValueError(f"target_quantile must be in (0, 1), got {target_quantile!r}")
    rate = arguments.positive("learning_rate", learning_rate)
    inner = mechanism.privatize()

    def init(params: PyTree) -> QuantileState:
        """The state of the noise, and the public first bound."""
        bound = jnp.array(initial_bound, jnp.float32)
        returned.record_returned(bound, returned.past_of_bound(initial_bound))
        return QuantileState(inner.init(params), bound)

    def update(
        updates: Summed,
        state: QuantileState,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, QuantileState]:
        if not isinstance(updates, Summed):
            raise TypeError(
                "quantile_clip must come first in the chain and take the Summed that clipping "
                f"returns, got {type(updates).__name__}"
            )
        if updates.votes is None:
            raise ValueError(
                "updates must carry votes: give the clipped gradient bound=state.bound, got none"
            )
        check_update(updates, params, extra)

        # The noisy count, and then the noisy gradient, of one key.
        key = noise_key(updates, key, state, params)
        words, multiplier = key.part("votes")
        links.record_noise("votes", lambda step: count_noise_multiplier)
        fresh = jnp.where(jnp.all(jnp.asarray(key.tag) == state.privatize.last), jnp.nan, 1.0)
        count = add_normals(updates.votes, 0.5 * multiplier * fresh, words)
        spent = dataclasses.replace(updates)  # it has no ticket
        mean, noise_state = inner.update(spent, state.privatize, params, key=key, **extra)
        # The bound of the next step, from the noisy count alone: post-processing. Votes are
        # ±½, which the ½ undoes.
        within = count / batch_size + 0.5
        bound = state.bound * jnp.exp(-rate * (within - target))
        # Public limits of the rule that the bound goes to.
        after = QuantileState(noise_state, jnp.clip(bound, 1e-10, 1e10))
        returned.copy_past(state.bound, after.bound)
        return mean, after

    return mechanism, optax.GradientTransformationExtraArgs(init, links.trusted_link(update))


def quantile_algorithm(
    optimizer: optax.GradientTransformation, *args: Any, **options: Any
) -> Algorithm:
    """Quantile clipping as an ``Algorithm``; further arguments as for ``quantile_clip``."""
    mechanism, link = quantile_clip(*args, **options)
    return Algorithm(mechanism, optimizer, noise=link, bound=lambda state: state.bound)
