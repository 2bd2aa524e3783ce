"""Privacy accounting in NumPy and scipy.special alone: events in, bounds on (epsilon, delta) out.

Example:
    >>> from jaxdp import accounting as acc
    >>> step = acc.PoissonSampled(acc.Gaussian(noise_multiplier=1.23), sampling_prob=512 / 60_000)
    >>> print(f"{acc.epsilon(acc.Repeated(step, 5_000), delta=1e-5).upper:.2f}")
    2.45
"""

from jaxdp.accounting.batches import RandomlyAllocated, ShuffledEpoch, TruncatedPoissonSampled
from jaxdp.accounting.budget import Budget, BudgetExceededError
from jaxdp.accounting.curves import advantage, mu_gdp, renyi_curve, trade_off
from jaxdp.accounting.events import (
    Bound,
    Claim,
    Composed,
    CorrelatedNoise,
    CyclicallyAllocated,
    CyclicPoissonSampled,
    Event,
    FixedSizeSampled,
    Gaussian,
    GridNoise,
    NonPrivate,
    Parallel,
    PerUser,
    PoissonSampled,
    Relation,
    Repeated,
    UnsupportedEventError,
    WeightedPoissonSampled,
)
from jaxdp.accounting.filter import RenyiFilter
from jaxdp.accounting.groups import group_delta, group_epsilon
from jaxdp.accounting.primitives import (
    ZCDP,
    DiscreteGaussian,
    DiscreteLaplace,
    EpsilonDelta,
    ExamplesPerUser,
    ExponentialMechanism,
    Laplace,
    MixtureOfGaussians,
    ObjectivePerturbation,
    RandomizedResponse,
)
from jaxdp.accounting.queries import (
    calibrate,
    calibrate_noise_multiplier,
    calibrate_sampling_prob,
    calibrate_steps,
    delta,
    epsilon,
    supports,
)
from jaxdp.accounting.tuned import Geometric, Logarithmic, NegativeBinomial, PoissonTries, Tuned

# Under the names that ledgers have for them, too.
CyclicPoisson, RandomAllocation = CyclicPoissonSampled, RandomlyAllocated
CyclicAllocation, TruncatedPoisson = CyclicallyAllocated, TruncatedPoissonSampled

__all__ = [
    "ZCDP", "Bound", "Budget", "BudgetExceededError", "Claim", "Composed", "CorrelatedNoise",
    "CyclicAllocation", "CyclicPoisson",
    "CyclicPoissonSampled", "CyclicallyAllocated", "DiscreteGaussian", "DiscreteLaplace",
    "EpsilonDelta", "Event", "ExamplesPerUser",
    "ExponentialMechanism", "FixedSizeSampled", "Gaussian", "Geometric", "GridNoise", "Laplace",
    "Logarithmic", "MixtureOfGaussians", "NegativeBinomial", "NonPrivate", "ObjectivePerturbation",
    "Parallel", "PerUser", "PoissonSampled", "PoissonTries", "RandomAllocation",
    "RandomizedResponse",
    "RandomlyAllocated", "Relation", "RenyiFilter", "Repeated", "ShuffledEpoch", "TruncatedPoisson",
    "TruncatedPoissonSampled", "Tuned", "UnsupportedEventError",
    "WeightedPoissonSampled", "advantage", "calibrate",
    "calibrate_noise_multiplier", "calibrate_sampling_prob", "calibrate_steps", "delta", "epsilon",
    "group_delta", "group_epsilon", "mu_gdp", "renyi_curve", "supports",
    "trade_off",
]  # fmt: skip
