"""SA-DPSGD: simulated annealing accepts or rejects the candidates of a private optimizer.

Fu, Chen and Ling, "SA-DPSGD: Differentially Private Stochastic Gradient Descent based on Simulated
Annealing", Algorithm 2 and equation (3).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.mechanism import Mechanism
from jaxdp.optimizers import hyperparameters as hyper
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import DrawnEnergy, Judge
from jaxdp.types import PyTree, Summed


class AnnealingState(NamedTuple):
    """State of ``annealing``."""

    inner: PyTree  # state of the wrapped optimizer, as of the last accepted candidate
    coin: jax.Array  # uint32 [2]; the key of the acceptance draws, which are post-processing
    # float32 scalar, energy of the current parameters; infinite until a candidate is accepted: that
    # of the initial parameters is measured in the update.
    energy: jax.Array
    proposals: jax.Array  # int32 scalar, candidates so far: all of them are charged
    accepted: jax.Array  # int32 scalar, how many were accepted, forced ones included
    forced: jax.Array  # int32 scalar, how many were accepted because too many were rejected before
    rejected_in_a_row: jax.Array  # int32 scalar
    # uint32 [2], the tag of the last private energy: one that is used in two updates in a row
    # judges nothing in the second.
    judged_by: jax.Array


def annealing(
    inner: optax.GradientTransformation,
    key: jax.Array,
    temperature: float = 10.0,
    max_rejections: int = 10,
    restore_inner: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wraps the chain **after the noise**; its updates are candidates, judged by an energy.

    With ΔE the candidate's energy less the current one, at first that of the initial parameters:
    accepted if ΔE <= 0, otherwise with probability exp(-ΔE · Q), and in any case after
    ``max_rejections`` rejections in a row. Q is ``temperature`` for the first candidate and
    ``temperature`` · accepted so far for the others. A rejected candidate gives a zero update and
    leaves the inner optimizer's state as it was. A candidate whose energy is not a number is never
    accepted.

    Formal guarantee: judging is post-processing of the noisy gradient and of the energy, so a run
    costs one gradient event, and with a private energy one energy event, for **every proposal**:
    the law of an accepted candidate is not that of an unselected one, so charging acceptances alone
    is wrong. The first is judged too: a private energy releases its noisy difference to the initial
    parameters, which is that proposal's one event. Noise comes with the tickets of the gradient and
    of the energy, on rejection as well.

    Args:
        inner: the optimizer of the noisy gradient, momentum and learning rate included.
        key: the key of the draws by which worse candidates are accepted; it need not be secret.
            ``optax.inject_hyperparams`` must be told so, with ``static_args=("key",)``.
        temperature: Q0.
        max_rejections: μ0 >= 1.
        restore_inner: False keeps a rejected candidate's inner state, as the paper's code does.

    Returns:
        A transformation whose ``update`` needs ``params`` and the extra argument ``energy``: a
        ``PublicEnergy``, or what ``PrivateEnergy.prepare`` returned for this very update.

    Raises:
        ValueError: a negative temperature, ``max_rejections`` below 1, a key that is not one; at
            update, an energy of another kind, such as a bare function, which nothing charges, or an
        un-noised ``Summed``: the noise inside would be used again after every rejection.
    """
    temperature = hyper.non_negative("temperature", temperature)
    limit = hyper.at_least_one("max_rejections", max_rejections)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if not hasattr(key, "shape") or key.shape != (2,) or key.dtype != jnp.uint32:
        raise ValueError(
            f"key must be a threefry key such as jax.random.key(0), got {type(key).__name__}"
        )
    words = jnp.asarray(key)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> AnnealingState:
        zero = jnp.zeros([], jnp.int32)
        energy, tag = jnp.asarray(jnp.inf, jnp.float32), jnp.zeros(2, jnp.uint32)
        return AnnealingState(inner.init(params), words, energy, zero, zero, zero, zero, tag)

    def update(
        updates: PyTree,
        state: AnnealingState,
        params: PyTree | None = None,
        *,
        energy: Judge | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, AnnealingState]:
        if isinstance(updates, Summed):
            raise ValueError(
                "annealing must wrap what follows the noise and take a noisy gradient, got a "
                "Summed: a rejection would put the noise's state back, and the next candidate "
                "would use it again"
            )
        if params is None:
            raise ValueError("params must be passed to update, to judge the candidate; got None")
        if not isinstance(energy, Judge):
            raise ValueError(
                "energy must be a PublicEnergy, or what PrivateEnergy.prepare() returned for this "
                f"update, got {type(energy).__name__}: a bare function of data is charged nowhere"
            )
        if isinstance(energy, DrawnEnergy) and energy.ticket is not None:
            energy = energy.spent(verified=True)

        # The candidate, its energy, and how far that is above the current one; NaN where the same
        # private draw judges a second time.
        step, proposed = inner.update(updates, state.inner, params, **extra)
        rise, reached = energy.rise(optax.apply_updates(params, step), params, state.energy)
        judged = state._replace(proposals=state.proposals + 1)
        if isinstance(energy, DrawnEnergy) and energy.tag is not None:
            tag = jnp.asarray(energy.tag)
            again = jnp.all(tag == state.judged_by)
            rise, reached = (jnp.where(again, jnp.nan, x) for x in (rise, reached))
            judged = judged._replace(judged_by=tag)

        # A worse one is accepted with probability exp(-rise · Q). Q of Algorithm 2 is Q0 in its
        # line 1, and Q0 · τ from its line 22 on, hence 0 while τ is.
        so_far = state.accepted.astype(jnp.float32)
        heat = temperature * jnp.where(state.proposals == 0, 1.0, so_far)
        coin = jax.random.wrap_key_data(state.coin, impl="threefry2x32")
        drawn = jax.random.uniform(jax.random.fold_in(coin, state.proposals), dtype=jnp.float32)
        lucky = drawn <= jnp.exp(-rise * heat)
        better, forced = rise <= 0, state.rejected_in_a_row >= limit
        accept = (better | lucky | forced) & ~jnp.isnan(rise)

        def accepted() -> tuple[PyTree, AnnealingState]:
            only_by_force = forced & ~better & ~lucky
            return step, judged._replace(
                inner=proposed,
                energy=reached,
                accepted=state.accepted + 1,
                forced=state.forced + only_by_force.astype(jnp.int32),
                rejected_in_a_row=jnp.zeros_like(state.rejected_in_a_row),
            )

        def rejected() -> tuple[PyTree, AnnealingState]:
            kept = state.inner if restore_inner else proposed
            times = state.rejected_in_a_row + 1
            return optax.tree.zeros_like(step), judged._replace(inner=kept, rejected_in_a_row=times)

        return jax.lax.cond(accept, accepted, rejected)

    return optax.GradientTransformationExtraArgs(init, update)


def sa_dpsgd(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    key: jax.Array,
    *,
    momentum: float = 0.0,
    temperature: float = 10.0,
    max_rejections: int = 10,
    energy: Mechanism | None = None,
    restore_inner: bool = True,
) -> Algorithm:
    """SGD with simulated annealing (SA-DPSGD). Every candidate is charged, accepted or not.

    Algorithm 2 has no momentum, which is the default here.

    Args:
        mechanism: the mechanism of the gradient.
        learning_rate: a number or an optax schedule.
        key: see ``annealing``.
        momentum: momentum of SGD.
        temperature: Q0.
        max_rejections: μ0.
        energy: the mechanism of a private energy; None for a public one.
        restore_inner: see ``annealing``.

    Raises:
        ValueError: a mechanism with correlated noise.
    """
    if mechanism.strategy is not None:
        raise ValueError(
            "strategy must be None for annealing, got correlated noise: no proof covers candidates "
            "that are rejected"
        )
    rate, momentum = hyper.learning_rate(learning_rate), hyper.decay("momentum", momentum)
    sgd = optax.sgd(rate, momentum=momentum or None)
    chain = annealing(sgd, key, temperature, max_rejections, restore_inner)

    def counts(state: AnnealingState) -> dict[str, jax.Array]:
        return {name: getattr(state, name) for name in ("proposals", "accepted", "forced")}

    return Algorithm(mechanism, chain, energy=energy, counts=counts)
