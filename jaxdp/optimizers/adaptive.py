"""Adam, RMSprop and Adagrad on noisy gradients, with the noise's known variance subtracted.

Noise of standard deviation s adds s² to every second moment, so that a private Adam divides by
little but its own noise (Tang et al. 2023, "DP-AdamBC", arXiv:2312.14334, Section 3). The noise is
public: its variance is tracked with the same averaging as the moment and subtracted.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.mechanism import Mechanism
from jaxdp.optimizers import hyperparameters as hyper
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import PyTree

NoiseStd = float | Callable[[PyTree, jax.Array], jax.typing.ArrayLike]


class AdaptiveState(NamedTuple):
    """State of the ``scale_by_dp_*`` transformations; a function of noisy gradients."""

    step: jax.Array  # int32 scalar; updates so far
    mu: PyTree  # average of the gradients, shaped like the parameters; None where there is none
    # Average (or sum) of squares minus the noise's variance; unbiased, so it may be negative.
    nu: PyTree
    noise: PyTree  # the same average (or sum) of the noise's variance, shaped like the parameters


def scale_by_dp_adam_bc(
    noise_std: NoiseStd,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """Adam with the noise's variance subtracted from its second moment.

    DP-AdamBC (Tang et al. 2023, arXiv:2312.14334, Algorithm 1):
    m̂ / (√max(v̂, noise_floor · s²) + eps), v̂ the debiased average of g² − s².

    Args:
        noise_std: s, the noise in each coordinate of the gradient: a number (0 corrects nothing),
            or ``(params, step) -> scalar`` such as ``mechanism.noise_std``.
        b1: decay of the first moment.
        b2: decay of the second.
        eps: added to the denominator.
        noise_floor: least value of the corrected moment, as a fraction of the noise's variance:
            what is smaller cannot be told from the noise's own fluctuation.

    Raises:
        ValueError: an argument is out of its range; at update, no ``params`` for a callable s.
    """
    moments = AdaptiveMoments(hyper.decay("b2", b2), eps, noise_floor, hyper.decay("b1", b1))
    return scale_by_moments(moments, noise_std)


def scale_by_dp_rmsprop(
    noise_std: NoiseStd, decay: float = 0.9, eps: float = 1e-8, noise_floor: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    """RMSprop with the noise's variance subtracted; arguments as ``scale_by_dp_adam_bc``."""
    moments = AdaptiveMoments(hyper.decay("decay", decay), eps, noise_floor)
    return scale_by_moments(moments, noise_std)


def scale_by_dp_adagrad(
    noise_std: NoiseStd, eps: float = 1e-8, noise_floor: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with the noise's variance subtracted; arguments as ``scale_by_dp_adam_bc``."""
    return scale_by_moments(AdaptiveMoments(None, eps, noise_floor), noise_std)


def sgd(
    mechanism: Mechanism, learning_rate: optax.ScalarOrSchedule, momentum: float = 0.0
) -> Algorithm:
    """DP-SGD: SGD on the mechanism's noisy gradient, under whatever clipping rule it has.

    Args:
        mechanism: sampling, clipping and noise.
        learning_rate: a number or an optax schedule.
        momentum: momentum of SGD.
    """
    rate, momentum = hyper.learning_rate(learning_rate), hyper.decay("momentum", momentum)
    return Algorithm(mechanism, optax.sgd(rate, momentum=momentum or None))


def dp_adam(
    mechanism: Mechanism, learning_rate: optax.ScalarOrSchedule, **adam: float
) -> Algorithm:
    """DP-Adam: optax's Adam on the mechanism's noisy gradient.

    It is DPGDO in PIGDO's paper, as its released code has it.

    Args:
        mechanism: sampling, clipping and noise.
        learning_rate: a number or an optax schedule.
        adam: further arguments of ``optax.adam``.

    Example:
        >>> mechanism = jaxdp.dp_sgd(
        ...     noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=100, dataset_size=1_000
        ... )
        >>> algorithm = jaxdp.optimizers.dp_adam(mechanism, learning_rate=1e-3)
        >>> print(f"{algorithm.epsilon(steps=10, delta=1e-5).upper:.2f}")
        2.85
    """
    for name in ("b1", "b2"):
        hyper.decay(name, adam.get(name, 0.0))
    for name in ("eps", "eps_root"):
        hyper.non_negative(name, adam.get(name, 0.0))
    return Algorithm(mechanism, optax.adam(hyper.learning_rate(learning_rate), **adam))


def dp_adam_bc(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
) -> Algorithm:
    """DP-AdamBC (Tang et al. 2023); further arguments as ``scale_by_dp_adam_bc``."""
    moments = AdaptiveMoments(hyper.decay("b2", b2), eps, noise_floor, hyper.decay("b1", b1))
    return adaptive_algorithm(mechanism, learning_rate, moments)


def dp_rmsprop(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay: float = 0.9,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
) -> Algorithm:
    """DP-RMSprop with noise correction; further arguments as ``scale_by_dp_rmsprop``."""
    moments = AdaptiveMoments(hyper.decay("decay", decay), eps, noise_floor)
    return adaptive_algorithm(mechanism, learning_rate, moments)


def dp_adagrad(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    *,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
) -> Algorithm:
    """DP-Adagrad with noise correction; further arguments as ``scale_by_dp_adagrad``."""
    moments = AdaptiveMoments(None, eps, noise_floor)
    return adaptive_algorithm(mechanism, learning_rate, moments)


@dataclasses.dataclass(frozen=True)
class AdaptiveMoments:
    """The averages of an adaptive optimizer, and its denominator."""

    decay: float | None  # of the averaged squares; None sums them (Adagrad)
    eps: float  # added to the denominator
    noise_floor: float  # least value under the root, as a fraction of the noise's variance
    # Decay of the first moment of Adam, which debiases both; None uses the gradient itself.
    b1: float | None = None

    def __post_init__(self) -> None:
        if self.b1 is not None:
            hyper.decay("b1", self.b1)
        if self.decay is not None:
            hyper.decay("decay" if self.b1 is None else "b2", self.decay)
        eps = hyper.non_negative("eps", self.eps)
        floor = hyper.non_negative("noise_floor", self.noise_floor)
        injected = any(isinstance(value, jax.Array) for value in (eps, floor))
        if not injected and eps == floor == 0:
            raise ValueError(
                "eps and noise_floor must not both be 0: a corrected moment below 0 would make the "
                "step infinite"
            )

    def init(self, params: PyTree) -> AdaptiveState:
        """The state before the first update."""
        zeros = optax.tree.cast(optax.tree.zeros_like(params), jnp.float32)
        mu = None if self.b1 is None else zeros
        return AdaptiveState(jnp.zeros([], jnp.int32), mu, zeros, zeros)

    def with_gradients(
        self, state: AdaptiveState, grads: PyTree, variance: PyTree
    ) -> AdaptiveState:
        """The state after noisy gradients whose noise has this variance in each coordinate."""

        # Squares less the noise's variance, which is averaged in the same way: it says how small a
        # corrected moment can be and still mean something.
        def average(old: PyTree, new: PyTree, decay: float | None) -> PyTree:
            """The moving average with ``new``, or the sum."""
            if decay is None:
                return jax.tree.map(jnp.add, old, new)
            return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)

        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        squares = jax.tree.map(lambda g, v: jnp.square(g) - v, grads, variance)
        nu = average(state.nu, squares, self.decay)
        noise = average(state.noise, variance, self.decay)
        mu = None if self.b1 is None else average(state.mu, grads, self.b1)
        return AdaptiveState(optax.safe_increment(state.step), mu, nu, noise)

    def denominator(self, state: AdaptiveState) -> PyTree:
        """√max(corrected moment, floor) + eps; before the first update, eps."""
        # Not below a share of the noise's variance: what is left there is the noise's fluctuation.
        nu, noise = state.nu, state.noise
        if self.b1 is not None:
            step = jnp.maximum(state.step, 1)
            nu, noise = (_debiased(moment, self.decay, step) for moment in (nu, noise))
        above = jax.tree.map(lambda v, s: jnp.maximum(v, self.noise_floor * s), nu, noise)
        return jax.tree.map(lambda v: jnp.sqrt(v) + self.eps, above)

    def direction(self, state: AdaptiveState, grads: PyTree) -> PyTree:
        """The first moment, debiased, or the gradient where there is none."""
        if self.b1 is None:
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return _debiased(state.mu, self.b1, state.step)


def scale_by_moments(
    moments: AdaptiveMoments,
    noise_std: NoiseStd,
    scale: Callable[[AdaptiveState], PyTree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales gradients by the inverse root of the corrected second moment.

    Args:
        moments: the averages.
        noise_std: of the noise before unscaling, see ``scale_by_dp_adam_bc``.
        scale: from the state **before** an update to the diagonal that its noise was multiplied by.
    """
    if not callable(noise_std):
        noise_std = hyper.non_negative("noise_std", noise_std)

    def update(
        updates: PyTree, state: AdaptiveState, params: PyTree | None = None, **extra: PyTree
    ) -> tuple[PyTree, AdaptiveState]:
        """The moments with the noisy gradient, and the step by them."""
        del extra
        if callable(noise_std) and params is None:
            raise ValueError("params must be passed to update, to know the noise; got None")
        given = noise_std(params, state.step) if callable(noise_std) else noise_std
        # In the units of the gradient: where it was divided before clipping, noise was multiplied
        # back with it.
        std = jnp.asarray(given, jnp.float32)
        if scale is None:
            variance = jax.tree.map(lambda g: jnp.full(g.shape, jnp.square(std)), updates)
        else:
            variance = jax.tree.map(lambda s: jnp.square(std * s), scale(state))
        state = moments.with_gradients(state, updates, variance)
        direction = moments.direction(state, updates)
        out = jax.tree.map(jnp.divide, direction, moments.denominator(state))
        return jax.tree.map(lambda o, g: o.astype(g.dtype), out, updates), state

    return optax.GradientTransformationExtraArgs(moments.init, update)


def _debiased(average: PyTree, decay: float | None, step: jax.Array) -> PyTree:
    """An average that began at 0, over the weight of what is in it (Kingma and Ba 2015)."""
    assert decay is not None
    weight = 1 - decay ** step.astype(jnp.float32)
    return jax.tree.map(lambda leaf: leaf / weight, average)


def adaptive_algorithm(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    moments: AdaptiveMoments,
    diagonal: Callable[[AdaptiveState], PyTree] | None = None,
) -> Algorithm:
    """An adaptive algorithm; ``diagonal`` is what divides its gradients before they are clipped."""
    scaled = scale_by_moments(moments, mechanism.noise_std, diagonal)
    rate = optax.scale_by_learning_rate(hyper.learning_rate(learning_rate))
    scale = None if diagonal is None else lambda state: diagonal(state[0])
    return Algorithm(mechanism, optax.chain(scaled, rate), scale=scale)
