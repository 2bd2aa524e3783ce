"""Gaussian differential privacy by the central limit theorem: an approximation, not a bound."""

import math

from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.gaussian import gaussian_delta, gaussian_epsilon

_NOTE = "a limit for many small steps; it may be below the truth, so there is no upper end"


def clt_mu(run: Run, relation: Relation) -> float:
    """The mu of GDP, sqrt(sum n q^2 (e^(1/z^2) - 1)), plus mu^2 = 1/z^2 of full-batch steps.

    Bu, Dong, Long and Su 2020, "Deep learning with Gaussian differential privacy"
    (arXiv:1911.11607), the central limit for Poisson sampling under add/remove.

    Raises:
        UnsupportedEventError: the relation is replace-one.
    """
    if relation is Relation.REPLACE_ONE:
        raise UnsupportedEventError("clt under replace_one: the limit is stated for add/remove")
    total = 0.0
    for step, n in run.steps:
        inverse = step.noise_multiplier**-2
        if step.sampling_prob == 1:
            total += n * inverse
        else:
            total += n * step.sampling_prob**2 * math.expm1(min(inverse, 700.0))
    return math.sqrt(total)


def clt_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    """Estimate of epsilon at delta; lower 0 and upper infinite, because it can underestimate."""
    estimate = gaussian_epsilon(clt_mu(run, relation), delta)[1]
    return Bound(0.0, estimate, math.inf, "clt", _NOTE)


def clt_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    """Estimate of delta at epsilon; lower 0 and upper 1, because it can underestimate."""
    estimate = gaussian_delta(clt_mu(run, relation), epsilon)
    return Bound(0.0, estimate, 1.0, "clt", _NOTE)
