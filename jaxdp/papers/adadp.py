"""AdaDp as published, which is not private, and its ablation with global clipping.

Xu et al., "An adaptive and fast convergent approach to differentially private deep learning",
Algorithm 1. Its claim is ``claims.adadp_theorem_1``; the repaired algorithm is
``jaxdp.optimizers.adadp``.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.clipping import coordinate_box
from jaxdp.mechanism import Mechanism, with_rule
from jaxdp.optimizers import hyperparameters as hyper
from jaxdp.optimizers.adadp import AdaDpState, count_step, rms_step, variance
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.papers import claims
from jaxdp.papers.raw_gradient import Contribution, RawGradient, ToTheLetter, flat_clip
from jaxdp.sampling import Sampling
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree


def adadp_step_only(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    rate_decay: float = 0.1,
    eps: float = 1e-8,
) -> Algorithm:
    """AdaL, the ablation with global clipping and AdaDp's step alone.

    Args:
        mechanism: with flat clipping.
        learning_rate: a number or an optax schedule.
        rate_decay: γ.
        eps: ε0.
    """
    gamma, eps = hyper.decay("rate_decay", rate_decay), hyper.positive("eps", eps)

    def update(
        updates: PyTree, rate: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        return rms_step(updates, rate, gamma, eps, True)

    tx = optax.GradientTransformation(optax.tree.zeros_like, update)
    lr = optax.scale_by_learning_rate(hyper.learning_rate(learning_rate))
    return Algorithm(mechanism, optax.chain(tx, lr))


@dataclasses.dataclass(frozen=True)
class _RawClipping:
    """The paper's clipping by a moment of un-noised gradients: by coordinates once it varies."""

    bound: float
    beta: float
    threshold: float
    of_lot: bool

    def sides(self, moment: PyTree) -> PyTree:
        """By how much a coordinate of one example is divided, [*leaf] each."""
        even = self.bound / math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(moment)))
        roots = jax.tree.map(jnp.sqrt, moment)
        local = self.local(moment)
        return jax.tree.map(lambda r: jnp.where(local, self.beta * r, even), roots)

    def local(self, moment: PyTree) -> jax.Array:
        """True where clipping is by coordinates; a scalar."""
        return variance(jax.tree.map(jnp.sqrt, moment)) > self.threshold

    def contribution(self, moment: PyTree) -> Contribution:
        """From one gradient to it, clipped, over the sides, and to what leaks of it."""
        local = self.local(moment)
        sides = self.sides(moment)

        def of_one(grad: PyTree) -> tuple[PyTree, PyTree]:
            clipped = jax.tree.map(
                lambda g, f, s: jnp.where(local, jnp.clip(g, -s, s), f),
                grad,
                flat_clip(grad, self.bound),
                sides,
            )
            scaled = jax.tree.map(
                lambda g, s: jnp.where(s > 0, g / jnp.where(s > 0, s, 1.0), 0.0), clipped, sides
            )
            return scaled, grad if self.of_lot else jax.tree.map(jnp.square, grad)

        return of_one


def adadp_as_published(
    noise_multiplier: float | NoiseSchedule,
    batch_size: int,
    dataset_size: int,
    learning_rate: optax.ScalarOrSchedule,
    *,
    bound: float = 4.0,
    beta: float = 1.2,
    threshold: float = 1e-6,
    rate_decay: float = 0.1,
    moment_decay: float = 0.9,
    eps: float = 1e-8,
    of_lot: bool = False,
    adaptive_rate: bool = True,
    sampling: str | Sampling = "poisson",
) -> Algorithm:
    """AdaDp as published: E′ from **un-noised** gradients sets clip bounds and noise. Not private.

    E′ averages the mean of squared per-example gradients (the paper's E[g²], g of one example), and
    clipping is per example. Its line 23 names no example: with ``of_lot`` E′ averages the square of
    the lot's mean gradient instead.

    One noise is added to the lot's sum and the RMS step is the mean's, as Theorem 1 charges; lines
    13 and 26 can be read as a noise and a step for every example.

    Clip bounds and noise are the paper's, with no margin for rounding: σ_i = σ √m s_i exactly.
    ``adaptive_rate`` False is the ablation AdaN: this clipping and noise with DpSgd's step.

    Charged as ``NonPrivate``: a coordinate in which no other record has a gradient gets noise only
    if the record is there. Arguments as ``adadp``.
    """
    for name, value in (("bound", bound), ("beta", beta), ("eps", eps)):
        arguments.positive(name, value)
    arguments.non_negative("threshold", threshold)
    gamma, keep = hyper.decay("rate_decay", rate_decay), hyper.decay("moment_decay", moment_decay)
    mechanism = ToTheLetter.of(
        # Its bound √m is that of the contributions below; its clipping is not used.
        with_rule(coordinate_box(1.0), noise_multiplier, batch_size, dataset_size, sampling),
        leak="un-noised squared gradients set the clip bounds and the noise of later steps",
    )
    clipping = _RawClipping(bound, beta, threshold, of_lot)

    def init(params: PyTree) -> AdaDpState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        none = jnp.zeros([], jnp.int32)
        return AdaDpState(none, zeros, zeros, none, none)

    def update(
        updates: PyTree,
        state: AdaDpState,
        params: PyTree | None = None,
        *,
        leaked: PyTree,
        **extra: Any,
    ) -> tuple[PyTree, AdaDpState]:
        del params, extra
        out, rate = rms_step(updates, state.rate, gamma, eps, adaptive_rate)
        squares = jax.tree.map(jnp.square, leaked) if of_lot else leaked
        moment = jax.tree.map(lambda e, g: keep * e + (1 - keep) * g, state.moment, squares)
        return out, count_step(state, clipping.local(state.moment), moment, rate)

    lr = optax.scale_by_learning_rate(hyper.learning_rate(learning_rate))
    tx = optax.chain(optax.GradientTransformationExtraArgs(init, update), lr)
    return Algorithm(
        mechanism,
        tx,
        raw=lambda state: state[0].moment,
        claim=claims.adadp_theorem_1,
        gradient=functools.partial(
            RawGradient,
            mechanism=mechanism,
            contribution=clipping.contribution,
            unscale=clipping.sides,
        ),
    )
