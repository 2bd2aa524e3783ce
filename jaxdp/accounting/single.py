"""One sampled step: its privacy profile in closed form, under every relation."""

import math

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.cells import normal_cells
from jaxdp.accounting.gaussian import PROFILE_ERROR, bracket_epsilon, gaussian_delta
from jaxdp.accounting.loss import separation
from jaxdp.accounting.pairs import SampledGaussian


def single_delta(step: Step, relation: Relation, epsilon: float) -> float:
    """The delta(epsilon) of one Poisson-sampled step, the larger of both directions.

    The worst event is an output beyond a threshold, because the likelihood ratio is monotone. For
    add/remove that gives q delta_G(log(1 + (e^epsilon - 1)/q)), delta_G the unsampled profile
    (amplification by sampling: Balle, Barthe and Gaboardi 2018, arXiv:1807.01647v2, Theorem 8, with
    equality for the Gaussian); replace-one follows the same way. The reverse of add/remove has
    a H_b, H_b = sup_A N1(A) - b N0(A), where the forward direction has q H_c: with t = e^epsilon
    and r = 1 - q, a = max(1 - r t, 0) <= q and b = q t/a, and a q (b - c) = r (t - 1)^2 >= 0 with
    c = 1 + (t - 1)/q. So it is never larger. The relative error is below 1e-10.
    """
    q, mu = step.sampling_prob, separation(relation) / step.noise_multiplier
    if q == 1:
        return gaussian_delta(mu, epsilon)
    if relation is Relation.REPLACE_ONE:
        return _replace_one(step, epsilon)
    # epsilon' with e^epsilon' = 1 + (e^epsilon - 1)/q, without overflow.
    if epsilon > 30:
        inner = epsilon - math.log(q) + math.log1p((q - 1) * math.exp(-epsilon))
    else:
        inner = math.log1p(math.expm1(epsilon) / q)
    return q * gaussian_delta(mu, inner)


def total_variation(run: Run, relation: Relation) -> float:
    """An upper bound on delta(0) of a composition: the sum over its steps of q TV(N(0), N(s)).

    Infinite when a step is not Poisson-sampled. Below it every delta has epsilon exactly 0.
    """
    total = 0.0
    for step, n in run.steps:
        if step.sampling != "poisson":
            return math.inf
        mu = separation(relation) / step.noise_multiplier
        total += n * step.sampling_prob * float(special.erf(mu / (2 * math.sqrt(2))))
    return total * (1 + 1e-12)


def single_epsilon(step: Step, relation: Relation, delta: float) -> tuple[float, float]:
    """(lower, upper) ends of epsilon at delta; (0, 0) if delta(0) <= delta."""
    return bracket_epsilon(
        lambda epsilon: single_delta(step, relation, epsilon), delta, 1e-12, PROFILE_ERROR
    )


def _replace_one(step: Step, epsilon: float) -> float:
    """P's mass beyond the threshold minus e^epsilon Q's, for the symmetric pair of mixtures.

    The threshold is where that is largest, so that its rounding enters squared.
    """
    z, q = step.noise_multiplier, step.sampling_prob
    x = float(SampledGaussian(step, Relation.REPLACE_ONE).output(np.asarray([epsilon]))[0])
    # delta = first - e^epsilon second = q (A - B) - (e^epsilon - 1) second, second = (1-q) C + q B:
    # the parts that nearly cancel are taken as one difference.
    t, h = x / z, 1 / z
    if epsilon < 500:
        # Of [t - h, t + h], whose width the difference of these two would lose.
        between = float(normal_cells(np.asarray([-h, h]), -t, 1.0)[0])
        second = (1 - q) * special.ndtr(-t) + q * special.ndtr(-t - h)
        return max(q * between - math.expm1(epsilon) * float(second), 0.0)
    # e^epsilon alone would overflow; times a tail it does not.
    log_second = np.logaddexp(
        math.log1p(-q) + special.log_ndtr(-t), math.log(q) + special.log_ndtr(-t - h)
    )
    first = (1 - q) * special.ndtr(-t) + q * special.ndtr(h - t)
    return max(float(first) - math.exp(min(epsilon + float(log_second), 0.0)), 0.0)
