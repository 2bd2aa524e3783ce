"""Upper bounds on membership-inference attacks: the trade-off curve, and the Gaussian mu.

An attack says "used" or "not used" of a record. Its false-positive rate (FPR) is how often it says
"used" of one that was not, its true-positive rate (TPR) how often it does of one that was.
"""

import math

import numpy as np

from jaxdp import accounting as acc
from jaxdp.accounting.curves import Profile, false_negative_rates, largest_mu_between, profile
from jaxdp.runs.report.schema import Tradeoff

AT = (1e-3, 1e-2)  # false-positive rates told in numbers
_RATES = np.logspace(-6, 0, 61)
_SMALL = 1e-9


def tradeoff(event: acc.Event, relation: acc.Relation, delta: float) -> Tradeoff | None:
    """The largest true-positive rates of any attack; None where nothing is proven.

    Formal guarantee: under ``relation`` no test between two neighbours has more than ``tpr`` hits
    at its ``fpr``: each point is implied by upper ends of delta at some epsilons (Dong, Roth and Su
    2019, arXiv:1905.02383v3, Proposition 2.5). ``mu`` is proven only where ``mu_is`` is "exact".
    """
    points = profile(event, relation, delta) if acc.supports(event, relation) else []
    if not points:
        return None
    mu, kind = _equivalent_mu(event, relation, points, delta)
    return Tradeoff(
        {
            f"{rate:g}": _round_up(1 - float(false_negative_rates(points, np.array([rate]))[0]))
            for rate in AT
        },
        mu,
        kind,
        tuple(
            (float(f"{rate:.6g}"), _round_up(1 - float(missed)))
            for rate, missed in zip(_RATES, false_negative_rates(points, _RATES), strict=True)
        ),
    )


def _equivalent_mu(
    event: acc.Event, relation: acc.Relation, points: Profile, delta: float
) -> tuple[float | None, str]:
    """mu of the Gaussian mechanism that is this one, or is no better wherever it was compared."""
    whole = acc.mu_gdp(event, relation)
    if whole.lower > 0 and math.isfinite(whole.upper):
        return _round_up(whole.upper), "exact"
    least = min(delta, points[0][1])
    found = [largest_mu_between(at, at) for at in points if least <= at[1] < 1 - _SMALL]
    # Next to no noise: no Gaussian mechanism whose mu a float holds is as bad.
    known = bool(found) and math.isfinite(max(found))
    return (_round_up(max(found)), "approximate") if known else (None, "")


def _round_up(value: float) -> float:
    """The number with six digits, rounded up: never better than what is proven."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.6g}")
