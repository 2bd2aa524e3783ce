"""Privacy accounting in NumPy and scipy.special alone: events in, bounds on (epsilon, delta) out.

Example:
    >>> from jaxdp import accounting as acc
    >>> step = acc.PoissonSampled(acc.Gaussian(noise_multiplier=1.23), sampling_prob=512 / 60_000)
    >>> print(f"{acc.epsilon(acc.Repeated(step, 5_000), delta=1e-5).upper:.2f}")
    2.45
"""

from jaxdp.accounting import hidden_state
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import Bound, Claim, Relation, UnsupportedEventError
from jaxdp.accounting.calibration import (
    calibrate,
    calibrate_noise_multiplier,
    calibrate_sampling_prob,
    calibrate_steps,
)
from jaxdp.accounting.events import (
    Composed,
    FixedSizeSampled,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    Repeated,
)
from jaxdp.accounting.filter import BudgetExceededError, RenyiFilter
from jaxdp.accounting.queries import delta, epsilon, epsilons_over_steps, supports
from jaxdp.accounting.sampled import PerUser, RandomAllocation, ShuffledEpoch, TruncatedPoisson
from jaxdp.accounting.tuned import (
    Geometric,
    Logarithmic,
    NegativeBinomial,
    PoissonTries,
    Tuned,
)

__all__ = [
    "Bound",
    "BudgetExceededError",
    "Claim",
    "Composed",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "Geometric",
    "Logarithmic",
    "NegativeBinomial",
    "NonPrivate",
    "PerUser",
    "PoissonSampled",
    "PoissonTries",
    "RandomAllocation",
    "Relation",
    "RenyiFilter",
    "Repeated",
    "ShuffledEpoch",
    "TruncatedPoisson",
    "Tuned",
    "UnsupportedEventError",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_sampling_prob",
    "calibrate_steps",
    "delta",
    "epsilon",
    "epsilons_over_steps",
    "hidden_state",
    "supports",
]
