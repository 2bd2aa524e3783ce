"""Releases whose law is near that of another: a total-variation distance is charged to delta.

If M is (epsilon, delta)-private and every output law of M' is within t of M's in total variation,
then M' is (epsilon, delta + (1 + e^epsilon) t)-private: P'(S) <= P(S) + t <= e^epsilon Q(S) + delta
+ t <= e^epsilon (Q'(S) + t) + delta + t. Over the steps of a run, each adaptive, distances add up.
"""

import math

from jaxdp.accounting import rdp
from jaxdp.accounting.accountants import ask, trivial
from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run

# Rounding of all that is computed here.
_MARGIN = 1 + 1e-9
NOTHING_LEFT = "nothing of delta is left beside the distance of the noise from a Gaussian's"


def taken(epsilon: float, distance: float) -> float:
    """(1 + e^epsilon) distance: what it takes of delta; infinite beyond float64."""
    if not distance:
        return 0.0
    return (1 + math.exp(epsilon)) * distance * _MARGIN if epsilon < 700 else math.inf


def epsilon_near(
    run: Run, relation: Relation, accountant: str, delta: float, goal: float | None, distance: float
) -> Bound:
    """Bounds on epsilon at ``delta`` of a release within ``distance`` of the run."""
    if known := trivial(run):
        # Without a run that depends on data only the distance is charged.
        return known if run.infinite or taken(0.0, distance) <= delta else _none()
    start = _start(run, relation, accountant, delta)
    share = taken(start, distance)
    if not share <= 0.5 * delta:
        return _none()
    bound = ask("epsilon", run, relation, accountant, (delta - share) * (1 - 1e-15), goal)
    upper = min(bound.upper, start)
    lower = _lower(min(bound.lower, upper), start, share / delta)
    estimate = None if bound.estimate is None else min(max(bound.estimate, lower), upper)
    return Bound(lower, estimate, upper, bound.accountant, bound.note)


def delta_near(
    run: Run, relation: Relation, accountant: str, epsilon: float, distance: float
) -> Bound:
    """Bounds on delta at ``epsilon`` of a release within ``distance`` of the run."""
    share = taken(epsilon, distance)
    if not share < 1:
        return Bound(0.0, None, 1.0, "none", NOTHING_LEFT)
    bound = ask("delta", run, relation, accountant, epsilon)
    return Bound(
        max(0.0, bound.lower - share),
        bound.estimate,
        min(1.0, (bound.upper + share) * (1 + 1e-15)),
        bound.accountant,
        bound.note,
    )


def _none() -> Bound:
    return Bound(0.0, None, math.inf, "none", NOTHING_LEFT)


def _start(run: Run, relation: Relation, accountant: str, delta: float) -> float:
    """An epsilon that is proven at half of ``delta``."""
    if not run.hidden:
        start = rdp.convert("epsilon", rdp.run_rdp(run, relation), 0.5 * delta)
        if math.isfinite(start):
            return start
    return ask("epsilon", run, relation, accountant, 0.5 * delta).upper


def _lower(lower: float, start: float, share: float) -> float:
    """A lower end at delta (1 + share), from one at delta (1 - share) and an upper end at half.

    delta falls with x = e^epsilon as a convex function, so x is convex in delta: at 1 - share it is
    at most (1 - w) times that at 1 + share and w times that at 1/2, w = 2 share / (1/2 + share).
    """
    weight = 2 * share / (0.5 + share) * _MARGIN
    lost = weight * math.exp(min(start - lower, 700.0))
    return max(0.0, (lower + math.log1p(-lost)) * (1 - 1e-12)) if lost < 1 else 0.0
