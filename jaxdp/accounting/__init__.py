"""Privacy accounting in NumPy and scipy.special alone: events in, bounds on (epsilon, delta) out.

Example:
    >>> from jaxdp import accounting as acc
    >>> step = acc.PoissonSampled(acc.Gaussian(noise_multiplier=1.23), sampling_prob=512 / 60_000)
    >>> print(f"{acc.epsilon(acc.Repeated(step, 5_000), delta=1e-5).upper:.2f}")
    2.45
"""

from jaxdp.accounting import hidden_state
from jaxdp.accounting.accountants import ACCOUNTANTS
from jaxdp.accounting.bounds import Bound, Claim, Relation, UnsupportedEventError
from jaxdp.accounting.calibrate import (
    calibrate,
    calibrate_count,
    calibrate_noise_multiplier,
    calibrate_sampling_prob,
    calibrate_steps,
)
from jaxdp.accounting.chains import NoisyChain, clipped_gradient_chain
from jaxdp.accounting.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    HiddenState,
    NonPrivate,
    PoissonSampled,
    Repeated,
    ShuffledBatches,
    anisotropic_gaussian,
    from_dict,
    joint_gaussian,
    to_dict,
)
from jaxdp.accounting.filter import BudgetExceededError, RenyiFilter
from jaxdp.accounting.queries import delta, epsilon, epsilons_over_steps, supports

__all__ = [
    "ACCOUNTANTS",
    "Bound",
    "BudgetExceededError",
    "Claim",
    "Composed",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "HiddenState",
    "NoisyChain",
    "NonPrivate",
    "PoissonSampled",
    "Relation",
    "RenyiFilter",
    "Repeated",
    "ShuffledBatches",
    "UnsupportedEventError",
    "anisotropic_gaussian",
    "calibrate",
    "calibrate_count",
    "calibrate_noise_multiplier",
    "calibrate_sampling_prob",
    "calibrate_steps",
    "clipped_gradient_chain",
    "delta",
    "epsilon",
    "epsilons_over_steps",
    "from_dict",
    "hidden_state",
    "joint_gaussian",
    "supports",
    "to_dict",
]
