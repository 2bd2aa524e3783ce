"""Privacy curves of a release: Renyi, trade-off and Gaussian."""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.events import ADD, Array, Bound, Event, Relation
from jaxdp.accounting.flat import FlatRun, alternatives, flatten, flatten_exactly
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.pairs import bracket_decreasing
from jaxdp.accounting.queries import NOTHING_LEFT, delta, epsilon, largest, trivial_bound

Profile = list[tuple[float, float]]

_POINTS, _MOST = 16, 40  # epsilons up to the one at ``delta``, two for each unit of it; and at most
_BEYOND = 5 / 3  # how many times as far
_LEVELS = 4  # unlike steps beyond which fewer epsilons are asked for: each takes as much longer
_FAINT = 0.25  # noise so small that there is hardly anything to tell, and each answer is slow
_SMALL = 1e-9
_MAX_QUERIES = 64  # deltas that ``mu_gdp`` asks for
_MARGIN = 1e-9  # of a Gaussian's delta, for its rounding


def renyi_curve(event: Event, orders: Sequence[float], relation: Relation = ADD) -> Array:
    """Upper bounds on the Renyi divergences of ``event``, in the larger direction.

    Arguments and errors as for ``epsilon``.

    Returns:
        [k] divergences at the ``orders``, [k], infinite where none is known.

    Raises:
        ValueError: also for an order that is not finite or not above 1.
    """
    values = check.each("orders", orders, check.positive)
    for i, value in enumerate(values):
        if value <= 1:
            raise ValueError(f"orders[{i}]={value!r}: expected an order above 1")
    run = flatten_exactly(event, relation)
    if run.infinite:
        return np.full(len(values), np.inf)
    return run.renyi(relation, tuple(values))


def advantage(event: Event, relation: Relation = ADD) -> Bound:
    """Bounds on the membership advantage: the most that hits can exceed false alarms, in rates.

    It is delta at epsilon 0, the total variation between the worst neighbours (Kairouz, Oh and
    Viswanath 2015, arXiv:1311.0776v4, Theorem 2.1, at epsilon 0). Errors as ``delta``.
    """
    return delta(event, 0.0, relation)


def trade_off(
    event: Event, rates: ArrayLike, relation: Relation = ADD, delta: float = 1e-5
) -> Array:
    """The least false-negative rates of any attack at these false-positive rates, [k].

    Formal guarantee: no test between two neighbours has fewer misses. Upper ends of delta at some
    epsilons imply every point (Dong, Roth and Su 2019, arXiv:1905.02383v3, Proposition 2.5).

    Arguments and errors as for ``epsilon``, of which those asked for reach beyond the one at
    ``delta``.

    Raises:
        ValueError: for a rate outside [0, 1].
    """
    alphas = np.asarray(rates, dtype=np.float64)
    if not ((alphas >= 0) & (alphas <= 1)).all():
        raise ValueError(f"rates={rates!r}: expected numbers in [0, 1]")
    return false_negative_rates(profile(event, relation, delta), alphas)


def false_negative_rates(points: Profile, rates: Array) -> Array:
    """The least false-negative rates that a privacy profile implies at false-positive rates [k]."""
    out = np.zeros_like(rates)
    for e, d in points:
        if e <= 700:
            one, other = 1 - d - math.exp(e) * rates, math.exp(-e) * (1 - d - rates)
            out = np.maximum(out, np.maximum(one, other))
    return out


def profile(event: Event, relation: Relation, delta_at: float) -> Profile:
    """The privacy profile, [(epsilon, upper end of delta)]; empty where nothing is guaranteed.

    The epsilons reach beyond the one at ``delta_at``, which is among them.
    """
    end = epsilon(event, delta_at, relation).upper
    if not math.isfinite(end):
        return []
    runs = [flatten(each, relation) for each in alternatives(event, relation)]
    steps = [step for run in runs for step in run.steps]
    count = min(_MOST, max(_POINTS, math.ceil(2 * end)))
    count = max(6, count // max(1, len(steps) // _LEVELS))
    if min((step.noise_multiplier for step, _ in steps), default=math.inf) < _FAINT:
        count = 1
    found, least = [], 1.0
    for number in range(int(_BEYOND * count)):
        at = max(end, 0.1) * number / count
        # It falls with epsilon, and an upper end is enough.
        least = min(least, delta(event, at, relation, tolerance=1e-2).upper)
        found.append((at, least))
        if least < _SMALL:
            break
    return [*found, (end, delta_at)] if end else found


def mu_gdp(event: Event, relation: Relation = ADD, delta_min: float = 0.0) -> Bound:
    """Bounds on the least mu such that the event is as private as N(0, 1) against N(mu, 1).

    Formal guarantee: at every epsilon >= 0 the event is (epsilon, max(d, delta_min))-private, d
    the delta of the Gaussian pair at epsilon; with ``delta_min`` 0 that is mu-GDP (Dong, Roth and
    Su 2019, arXiv:1905.02383v3, Corollary 2.13). Sampling gains nothing at ``delta_min`` 0: at a
    large epsilon every step must have sampled the record, and such a run is no better than the full
    batch. docs/proofs/accounting.md derives the bound.

    Arguments and errors as for ``epsilon``; ``delta_min`` is public, in [1e-300, 1), or 0.
    """
    least = check.target("delta_min", delta_min)
    if len(seen := alternatives(event, relation)) > 1:
        return largest(mu_gdp(each, relation, least) for each in seen)
    run = flatten(seen[0], relation)
    whole = _full_batch_mu(run, relation)
    if run.distance:
        whole = Bound(0.0, None, math.inf, "none", NOTHING_LEFT)
    if least == 0 or whole.lower > 0:
        epsilon(event, 0.0, relation)  # refuses what must be refused
        return whole
    end = epsilon(event, least, relation).upper
    if end == 0:
        return Bound(0.0, 0.0, 0.0, "gdp", "delta(0) is already below delta_min")
    if not end <= 700:
        return whole
    lower, upper = _mu_interval(event, relation, end, least)
    upper = min(upper, whole.upper)
    return Bound(min(lower, upper), None, upper, "gdp", f"for deltas above {least:g}")


def _full_batch_mu(run: FlatRun, relation: Relation) -> Bound:
    """mu of the run with every batch full: sampling never hurts; exact without any.

    Epsilon-differential privacy implies mu = -2 Phi^-1(1/(1 + e^epsilon)): the trade-off function
    of mu is convex and meets the two lines of the other at 0, in their corner and at 1.
    """
    if known := trivial_bound(run):
        return known
    squares = [n * (relation.separation / step.noise_multiplier) ** 2 for step, n in run.steps]
    for part, n in run.parts:
        log_miss = -float(np.logaddexp(0.0, part.pure(relation)))
        squares.append(n * (2 * float(special.ndtri_exp(log_miss))) ** 2)
    mu = math.sqrt(math.fsum(squares))
    exact = not run.parts and not run.dominated and all(s.sampling_prob == 1 for s, _ in run.steps)
    lower, estimate = (mu * (1 - 1e-12), mu) if exact else (0.0, None)
    return Bound(lower, estimate, mu * (1 + 1e-12), "gdp")


def _mu_interval(event: Event, relation: Relation, end: float, least: float) -> tuple[float, float]:
    """(lower, upper) mu of the profile up to epsilon ``end``, where delta is at most ``least``."""
    lower = 0.0

    def evaluate(at: float) -> tuple[float, float]:
        """(epsilon, upper end of delta there); a lower end above ``least`` raises ``lower``."""
        nonlocal lower
        found = delta(event, at, relation)
        if found.lower > least:
            # So much less that the margins of ``largest_mu_between`` leave it below the least mu.
            point = (at, found.lower * (1 - 3 * _MARGIN))
            lower = max(lower, largest_mu_between(point, point))
        return at, found.upper

    # Between two epsilons mu is bounded by both deltas; the interval with the largest bound is
    # halved, until that bound is close to some lower end, or the queries are spent.
    nodes = [evaluate(end * i / 8) for i in range(8)] + [(end, least)]
    heap = [(-largest_mu_between(a, b), a, b) for a, b in itertools.pairwise(nodes)]
    heapq.heapify(heap)
    for _ in range(_MAX_QUERIES - 8):
        worst, a, b = heap[0]
        if not -worst > (1 + 1e-3) * lower or math.isinf(worst):
            break
        middle = evaluate(0.5 * (a[0] + b[0]))
        heapq.heapreplace(heap, (-largest_mu_between(a, middle), a, middle))
        heapq.heappush(heap, (-largest_mu_between(middle, b), middle, b))
    return lower * (1 - 2 * _MARGIN), -heap[0][0]


def largest_mu_between(left: tuple[float, float], right: tuple[float, float]) -> float:
    """mu of a Gaussian whose delta is no smaller between two epsilons, given delta at both.

    As a function of e^epsilon both deltas are convex: the one that is bounded lies below its chord,
    the Gaussian's above its tangents at both ends. So chord and tangents are compared, at the ends
    and where the tangents meet.
    """
    (a, da), (b, db) = left, right
    width = math.expm1(b - a)  # in units of e^a, as the slopes

    def excess(mu: float) -> float:
        """log of the bounded delta over the Gaussian's, where that is largest."""
        first, last = gaussian_delta(mu, a), gaussian_delta(mu, b)
        steep = -math.exp(a + float(special.log_ndtr(-a / mu - mu / 2)))
        flat = -math.exp(a + float(special.log_ndtr(-b / mu - mu / 2)))
        pairs = [(da, first), (db, last)]
        if steep < flat and width > 0:
            meet = min(max((last - flat * width - first) / (steep - flat), 0.0), width)
            tangent = max(first + steep * meet, last + flat * (meet - width))
            pairs.append((da + (db - da) * meet / width, tangent - 1e-14 * first))
        return max(math.log(d / g) if g > 0 else math.inf for d, g in pairs if d > 0) + _MARGIN

    if max(da, db) <= 0:
        return 0.0
    # The Gaussian's delta grows with mu.
    high = 1.0
    while not excess(high) <= 0:
        high *= 2
        if high > 1e3:
            return math.inf
    return bracket_decreasing(excess, 1e-300, high, rtol=1e-9)[1]
