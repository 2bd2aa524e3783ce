"""One sampled step: its privacy profile in closed form, under every relation."""

import math

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.gaussian import PROFILE_ERROR, bracket_epsilon, gaussian_delta
from jaxdp.accounting.loss import Pair, directions, log_ratio, separation
from jaxdp.accounting.roots import bracket_decreasing, expand_right


def single_delta(step: Step, relation: Relation, epsilon: float) -> float:
    """delta(epsilon) of one Poisson-sampled step: the larger of both directions.

    The worst event is an output beyond a threshold, because the likelihood ratio is monotone. For
    add/remove that gives q delta_G(log(1 + (e^epsilon - 1)/q)), delta_G the unsampled profile
    (amplification by sampling: Balle, Barthe and Gaboardi 2018, arXiv:1807.01647v2, Theorem 8, with
    equality for the Gaussian); the reverse direction and replace-one follow the same way.
    The relative error is below `margin`.
    """
    if step.sampling_prob == 1:
        mu = (2.0 if relation is Relation.REPLACE_ONE else 1.0) / step.noise_multiplier
        return gaussian_delta(mu, epsilon)
    if relation is Relation.REPLACE_ONE:
        return _replace_one(step, epsilon)
    return max(_one_way(Pair(step, relation, r), epsilon) for r in directions(relation))


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
    known = margin(step, relation)
    return bracket_epsilon(
        lambda epsilon: single_delta(step, relation, epsilon), delta, 1e-12, known
    )


def margin(step: Step, relation: Relation) -> float:
    """Relative error within which `single_delta` is known.

    Under replace-one the two mixtures' tails cancel to about 1/z of their size.
    """
    if relation is Relation.REPLACE_ONE and step.sampling_prob < 1:
        return min(PROFILE_ERROR + 2e-13 * step.noise_multiplier, 0.5)
    return PROFILE_ERROR


def _one_way(pair: Pair, epsilon: float) -> float:
    q, mu = pair.step.sampling_prob, pair.mu
    if not pair.reverse:
        # epsilon' with e^epsilon' = 1 + (e^epsilon - 1)/q, without overflow.
        if epsilon > 30:
            inner = epsilon - math.log(q) + math.log1p((q - 1) * math.exp(-epsilon))
        else:
            inner = math.log1p(math.expm1(epsilon) / q)
        return q * gaussian_delta(mu, inner)
    room = 1 + math.expm1(-epsilon) / q
    if room <= 0:
        return 0.0  # the loss never exceeds -log(1-q)
    inner = -math.log(room)
    return math.exp(epsilon - inner) * q * gaussian_delta(mu, inner)


def _replace_one(step: Step, epsilon: float) -> float:
    """P's mass beyond the threshold minus e^epsilon Q's, for the symmetric pair of mixtures."""
    z, q = step.noise_multiplier, step.sampling_prob

    def shortfall(x: float) -> float:
        at = np.asarray([x, -x])
        p, other = log_ratio(at, z, q)
        return epsilon - float(p - other)

    if epsilon == 0:
        x = 0.0
    else:
        x = bracket_decreasing(shortfall, 0.0, expand_right(shortfall, 1e-6 * z), rtol=1e-16)[1]
    # With likelihood ratio e^epsilon at x, the unsampled parts nearly cancel; each term is written
    # as a difference from it: delta = q [A - e^epsilon B] - (e^epsilon - 1)(1-q) C.
    above, unsampled, below = (_tail((x - m) / z) for m in (1.0, 0.0, -1.0))
    if epsilon < 500:
        gain = q * (above - math.exp(epsilon) * below)
        return max(gain - math.expm1(epsilon) * (1 - q) * unsampled, 0.0)
    # e^epsilon alone would overflow; times a tail it does not.
    log_unsampled, log_below = (float(special.log_ndtr(-(x - m) / z)) for m in (0.0, -1.0))
    gain = q * (above - math.exp(min(epsilon + log_below, 0.0)))
    return max(gain - (1 - q) * (math.exp(min(epsilon + log_unsampled, 0.0)) - unsampled), 0.0)


def _tail(t: float) -> float:
    return float(special.ndtr(-t))
