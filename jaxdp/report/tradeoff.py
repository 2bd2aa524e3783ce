"""Upper bounds on membership-inference attacks: the trade-off curve, and the Gaussian mu.

An attack says "used" or "not used" of a record. Its false-positive rate (FPR) is how often it says
"used" of one that was not, its true-positive rate (TPR) how often it does of one that was.
"""

import math
from collections.abc import Callable

import numpy as np

from jaxdp import accounting as acc
from jaxdp.accounting.canonical import flatten
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.roots import bracket_decreasing
from jaxdp.auditing.bounds import approximate_dp
from jaxdp.report.schema import Tradeoff

AT = (1e-3, 1e-2)  # false-positive rates told in numbers
_RATES = np.logspace(-6, 0, 61)
_POINTS, _MOST = 16, 40  # epsilons up to the run's own, two for each unit of it; and at most
_BEYOND = 5 / 3  # how many times as far
_LEVELS = 4  # unlike steps beyond which fewer epsilons are asked for: each takes as much longer
_FAINT = 0.25  # noise so small that there is hardly anything to plot, and each answer is slow
_SMALL = 1e-9

Profile = list[tuple[float, float]]


def tradeoff(event: acc.Event, relation: acc.Relation, delta: float) -> Tradeoff | None:
    """The largest true-positive rates of any attack; None where nothing is proven.

    Formal guarantee: under ``relation`` no test between two neighbours has more than ``tpr`` hits
    at its ``fpr``: each point is implied by upper ends of delta at some epsilons (Dong, Roth and Su
    2019, arXiv:1905.02383v3, Proposition 2.5). ``mu`` is proven only where ``mu_is`` is "exact".
    """
    points = profile(event, relation, delta)
    if points is None:
        return None
    most = limit(points)
    mu, kind = _mu(event, relation, points, delta)
    return Tradeoff(
        {f"{rate:g}": _up(float(most(np.array([rate]))[0])) for rate in AT},
        mu,
        kind,
        tuple(
            (float(f"{rate:.6g}"), _up(float(hits)))
            for rate, hits in zip(_RATES, most(_RATES), strict=True)
        ),
    )


def profile(event: acc.Event, relation: acc.Relation, delta: float) -> Profile | None:
    """The privacy profile: (epsilon, upper bound on delta) at some epsilons; None without any."""
    if not acc.supports(event, relation):
        return None
    end = acc.epsilon(event, delta, relation).upper
    if not math.isfinite(end):
        return None
    steps = flatten(event, relation).steps
    count = min(_MOST, max(_POINTS, math.ceil(2 * end)))
    count = max(6, count // max(1, len(steps) // _LEVELS))
    if min((step.noise_multiplier for step, _ in steps), default=math.inf) < _FAINT:
        count = 1
    found, least = [], 1.0
    for number in range(int(_BEYOND * count)):
        epsilon = max(end, 0.1) * number / count
        least = min(least, acc.delta(event, epsilon, relation).upper)  # it falls with epsilon
        found.append((epsilon, least))
        if least < _SMALL:
            break
    return [*found, (end, delta)] if end else found


def limit(points: Profile) -> Callable[[np.ndarray], np.ndarray]:
    """A function from false-positive rates [k] to the largest true-positive rates [k]."""
    pieces = [approximate_dp(min(epsilon, 700.0), d) for epsilon, d in points if epsilon <= 700]
    if not pieces:
        return np.ones_like
    return lambda rates: 1 - np.max([piece(rates) for piece in pieces], axis=0)


def _mu(
    event: acc.Event, relation: acc.Relation, points: Profile, delta: float
) -> tuple[float | None, str]:
    """mu of the Gaussian mechanism that is this one, or is no better wherever it was compared."""
    run = flatten(event, relation)
    plain = not run.hidden and not run.parts
    if plain and len(run.steps) == 1 and run.steps[0][0].sampling_prob == 1:
        twice = 2 if relation is acc.Relation.REPLACE_ONE else 1
        return _up(twice * math.sqrt(run.steps[0][1]) / run.steps[0][0].noise_multiplier), "exact"
    least = min(delta, points[0][1])
    found = [_same(epsilon, d) for epsilon, d in points if least <= d < 1 - _SMALL]
    return (_up(max(found)), "approximate") if found else (None, "")


def _same(epsilon: float, delta: float) -> float:
    """mu of the Gaussian mechanism with this delta at this epsilon."""
    high = 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    return bracket_decreasing(lambda mu: delta - gaussian_delta(mu, epsilon), 0.0, high)[1]


def _up(value: float) -> float:
    """The number with six digits, rounded up: never better than what is proven."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.6g}")
