"""AdaDp: a clip bound and a noise scale for every coordinate, and an RMSProp-style step.

Xu et al., "An adaptive and fast convergent approach to differentially private deep learning"
(AdaDp), Algorithm 1 and Lemma 1.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers import hyperparameters as hyper
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import PyTree


class AdaDpState(NamedTuple):
    """State of ``scale_by_adadp``.

    Attributes:
        step: int32 scalar; updates so far.
        moment: E′, shaped like the parameters: the noise's variance is subtracted, so it may be
            negative.
        rate: E, the average of squared noisy gradients.
        began: int32 scalar; the first step, counted from 1, whose sides differed; 0 until then.
        local: int32 scalar; steps so far whose sides differed.
    """

    step: jax.Array
    moment: PyTree
    rate: PyTree
    began: jax.Array
    local: jax.Array


def count_step(state: AdaDpState, local: jax.Array, moment: PyTree, rate: PyTree) -> AdaDpState:
    """The state after one more step, whose sides differed if ``local``."""
    step = optax.safe_increment(state.step)
    began = jnp.where(local & (state.began == 0), step, state.began)
    return AdaDpState(step, moment, rate, began, state.local + local.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class Box:
    """The constants that turn E′ into the clip interval [-s_i, s_i] of each coordinate.

    s_i = β r_i, clipped to ``floor`` and ``cap`` times C/√m, in the local phase: while the
    variance of the r_i over the coordinates is above ``threshold``. Else all sides are C/√m, whose
    noise is that of global clipping to C. r_i = √(L · max(E′_i, 0)) is the size of one example's
    gradient, for which the paper states β and G.

    Derivation: E′ averages squares of a mean over L examples, less the noise's variance. If g is
    the gradient of one, E[(mean of g)²] = E[g]² + (E[g²] − E[g]²)/L: between E[g²]/L, where
    examples cancel, and E[g²], where all agree. The paper's E′[g²] is thus L · E′ in the first
    case, to which training is close (docs/algorithms.md), and less than that in any other. So
    Var[√E′[g²]] = L · Var[√E′]: a threshold on √E′ itself would be G/L.

    Attributes:
        bound: C, in [1e-10, 1e10].
        batch_size: L, the expected batch size.
        beta: β.
        threshold: G, on the variance of the r_i.
        floor: least side, as a fraction of C/√m; in [1e-10, 1e10].
        cap: greatest side, as a fraction of C/√m; up to 1 the noise is at most global clipping's.
    """

    bound: float
    batch_size: int
    beta: float = 1.2
    threshold: float = 1e-6
    floor: float = 0.1
    cap: float = 1.0

    def __post_init__(self) -> None:
        arguments.positive("beta", self.beta)
        for name in ("bound", "floor"):
            # A side that float32 takes for zero would turn a gradient of zero into NaN, unlike any
            # other: the release would distinguish them.
            if not 1e-10 <= arguments.positive(name, getattr(self, name)) <= 1e10:
                raise ValueError(f"{name} must be in [1e-10, 1e10], got {getattr(self, name)!r}")
        arguments.non_negative("threshold", self.threshold)
        if arguments.positive("cap", self.cap) < self.floor:
            raise ValueError(f"cap must be at least floor ({self.floor}), got {self.cap!r}")

    def even_side(self, like: PyTree) -> float:
        """C/√m, m the number of coordinates."""
        return self.bound / math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(like)))

    def sides(self, moment: PyTree) -> PyTree:
        """The sides s_i, shaped like the parameters, positive and finite."""
        # The same side everywhere until the estimates differ; then each follows its own, within
        # public limits.
        even = self.even_side(moment)
        sizes, local = self.sizes(moment), self.local(moment)
        return jax.tree.map(
            lambda r: jnp.where(
                local, jnp.clip(self.beta * r, self.floor * even, self.cap * even), even
            ),
            sizes,
        )

    def sizes(self, moment: PyTree) -> PyTree:
        """The r_i, estimates of the size of one example's gradient, shaped like the parameters."""
        factor = math.sqrt(self.batch_size)
        return jax.tree.map(lambda e: factor * jnp.sqrt(jnp.maximum(e, 0.0)), moment)

    def local(self, moment: PyTree) -> jax.Array:
        """True in the local phase, where the sides follow E′; a scalar."""
        return variance(self.sizes(moment)) > self.threshold

    def first_moment(self, params: PyTree) -> PyTree:
        """E′ before the first step: public, the same for every coordinate."""
        start = (self.even_side(params) / (self.beta * math.sqrt(self.batch_size))) ** 2
        return jax.tree.map(lambda p: jnp.full(p.shape, start, jnp.float32), params)


def scale_by_adadp(
    mechanism: Mechanism,
    box: Box,
    rate_decay: float = 0.1,
    moment_decay: float = 0.9,
    eps: float = 1e-8,
    adaptive_rate: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Scales a noisy gradient as AdaDp does: both moments, then g / √(E + eps).

    E ← (1 − γ) E + γ g²; E′ ← γ′ E′ + (1 − γ′)(g² − σ_i²), σ_i the noise that was added to
    coordinate i of the mean: without it E′ would grow without end, since the next noise follows it.

    Args:
        mechanism: the mechanism whose noise is subtracted.
        box: the clip intervals.
        rate_decay: γ.
        moment_decay: γ′.
        eps: ε0.
        adaptive_rate: False leaves the gradient as it is (the ablation AdaN).

    Raises:
        ValueError: an argument is out of its range; at init, parameters of which
            ``optax.multi_transform`` or ``optax.masked`` hides some.
    """
    gamma, keep = hyper.decay("rate_decay", rate_decay), hyper.decay("moment_decay", moment_decay)
    eps = hyper.positive("eps", eps)

    def init(params: PyTree) -> AdaDpState:
        """E of zeros, and the public E′ of ``Box.first_moment``."""
        # Noise of a box follows the number of all coordinates.
        hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
        if any(hidden(leaf) for leaf in jax.tree.leaves(params, is_leaf=hidden)):
            raise ValueError(
                "params must be all that are trained, since AdaDp's noise follows their number, "
                "got some masked: let multi_transform label all alike, and stop the others after it"
            )
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        none = jnp.zeros([], jnp.int32)
        return AdaDpState(none, box.first_moment(params), zeros, none, none)

    def update(
        updates: PyTree, state: AdaDpState, params: PyTree | None = None, **extra: PyTree
    ) -> tuple[PyTree, AdaDpState]:
        """Both moments with the noisy gradient, and the gradient over the root of E."""
        del extra
        # E′ less the noise of each coordinate: that on the unit box, times the side that it was
        # scaled by, which came from the moment before this step.
        std = mechanism.noise_std(updates if params is None else params, state.step)
        moment = jax.tree.map(
            lambda e, g, s: keep * e + (1 - keep) * (jnp.square(g) - jnp.square(std * s)),
            state.moment,
            updates,
            box.sides(state.moment),
        )
        # E keeps its noise, as the paper's RMSProp step has it.
        out, rate = rms_step(updates, state.rate, gamma, eps, adaptive_rate)
        return out, count_step(state, box.local(state.moment), moment, rate)

    return optax.GradientTransformationExtraArgs(init, update)


def adadp(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    *,
    bound: float = 4.0,
    beta: float = 1.2,
    threshold: float = 1e-6,
    floor: float = 0.1,
    cap: float = 1.0,
    adaptive_rate: bool = True,
    **step: float,
) -> Algorithm:
    """AdaDp, repaired: E′ from noisy gradients, so that a step is exactly the mechanism's event.

    Formal guarantee: gradients are divided by s, a function of earlier noisy outputs and public
    constants, clipped to ±1 in each coordinate (norm at most √m) and get noise of standard
    deviation σ √m before s is multiplied back: the paper's σ_i = σ √m s_i, of which its Lemma 1
    says that it is one Gaussian mechanism of multiplier σ.

    Args:
        mechanism: made with ``jaxdp.coordinate_box(1.0)``.
        learning_rate: a number or an optax schedule.
        bound: C of the steps before the sides differ, and the unit of ``floor`` and ``cap``.
        beta: β of ``Box``.
        threshold: G of ``Box``, of the size of one example's gradient, as the paper has it.
        floor: see ``Box``.
        cap: see ``Box``.
        adaptive_rate: False is the ablation AdaN. (AdaL is "adadp-step-only" in the
            registry.)
        step: further arguments of ``scale_by_adadp``.

    Raises:
        ValueError: the mechanism's rule is no unit box, or an argument is out of its range.
    """
    if mechanism.rule != CoordinateBox(1.0):
        raise ValueError(
            "mechanism must clip each coordinate to ±1, by jaxdp.coordinate_box(1.0), got "
            f"{mechanism.rule!r}"
        )
    # Clipped to the unit box after a division by the sides, which are read from the state.
    box = Box(bound, mechanism.batch_size, beta, threshold, floor, cap)
    scaled = scale_by_adadp(mechanism, box, adaptive_rate=adaptive_rate, **step)
    rate = optax.scale_by_learning_rate(hyper.learning_rate(learning_rate))
    return Algorithm(
        mechanism,
        optax.chain(scaled, rate),
        scale=lambda state: box.sides(state[0].moment),
        counts=lambda state: {"local_began": state[0].began, "local_steps": state[0].local},
    )


def variance(tree: PyTree) -> jax.Array:
    """The variance over all coordinates of a tree, float32 scalar."""
    # In two passes: the mean of squares less the squared mean would cancel in float32.
    leaves = jax.tree.leaves(tree)
    size = sum(leaf.size for leaf in leaves)
    mean = sum(jnp.sum(leaf) for leaf in leaves) / size
    return sum(jnp.sum(jnp.square(leaf - mean)) for leaf in leaves) / size


def rms_step(
    grads: PyTree, rate: PyTree, gamma: float, eps: float, adaptive: bool
) -> tuple[PyTree, PyTree]:
    """AdaDp's step: gradients over the root of their averaged squares, and that average."""
    rate = jax.tree.map(lambda e, g: (1 - gamma) * e + gamma * jnp.square(g), rate, grads)
    if not adaptive:
        return grads, rate
    return jax.tree.map(lambda g, e: g / jnp.sqrt(e + eps), grads, rate), rate
