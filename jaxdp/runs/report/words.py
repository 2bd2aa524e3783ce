"""Events and numbers in words, and the limits of every guarantee."""

import decimal
import math

from jaxdp import accounting as acc
from jaxdp.accounting.flat import DominatedEvent

_FLOATS = "Floating-point attacks: noise is float32 from a non-cryptographic generator."
_DRAWS = (
    "The generator of the draws, Philox with a key of 128 bits, is statistical: that it tells "
    "nothing of who was drawn is not proven. (Noise and floating point are inside the guarantee: "
    "integers from ChaCha20, docs/grid_noise.md.)"
)
_OUTSIDE = (
    "Timing: the time of a step grows with the number of records drawn.",
    "Accuracy on the test set is published without noise: the test set is assumed public.",
    "Hyper-parameters chosen by looking at results on the private data.",
)
ONE_RECORD = "More than one record per person: the guarantee is for one record."
REPRODUCIBLE = (
    "Reproducible: the seed was chosen by a person. No guarantee against whoever knows the seed."
)
ASSUMED = (
    "The declared data set size is public, and records were not preprocessed by statistics of the "
    "private data.",
    "The folder secret/ stays secret.",
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
RELATIONS = {
    acc.Relation.ADD_OR_REMOVE_ONE: "one record added or removed",
    acc.Relation.REPLACE_ONE: "one record replaced by another",
    acc.Relation.REPLACE_SPECIAL: "one record replaced by a null record",
}


def outside(event: acc.Event) -> tuple[str, ...]:
    """Sentences about what no guarantee of a run with this event covers."""
    return (_DRAWS if on_grid(event) else _FLOATS, *_OUTSIDE)


def on_grid(event: acc.Event) -> bool:
    """True if all noise of a run is on an integer grid."""
    match event:
        case acc.Composed(events):
            return bool(events) and all(on_grid(part) for part in events)
        case acc.Repeated(inner, _):
            return on_grid(inner)
    return isinstance(event, acc.GridNoise)


def describe(event: acc.Event) -> str:
    """A description of one release of ``event``."""
    match event:
        case acc.PoissonSampled(inner, sampling_prob):
            return f"{describe(inner)}, each record drawn with probability {sampling_prob:.4g}"
        case acc.FixedSizeSampled(inner, dataset_size, batch_size):
            return (
                f"{describe(inner)}, over {batch_size} of {dataset_size} records drawn without "
                "replacement"
            )
        case acc.RandomAllocation(inner, steps, participations):
            return (
                f"an epoch of {steps:,} steps, each record in {participations:,} of them at "
                f"random: {describe(inner)}"
            )
        case acc.ShuffledEpoch(inner, steps):
            return f"an epoch of {steps:,} steps over shuffled records: {describe(inner)}"
        case acc.TruncatedPoisson(inner, sampling_prob, cap, dataset_size):
            return (
                f"{describe(inner)}, each of {dataset_size:,} records drawn with probability "
                f"{sampling_prob:.4g} and at most {cap:,} of them kept"
            )
        case acc.CorrelatedNoise(inner, steps):
            return (
                f"a run of {steps:,} steps with correlated noise over records in a public order, "
                f"together {describe(inner)}"
            )
        case acc.CyclicPoisson(inner, sampling_prob, bands, steps):
            return (
                f"a run of {steps:,} steps with noise correlated over {bands:,} of them, in turn "
                f"over {bands:,} groups of records, each record of the group drawn with "
                f"probability {sampling_prob:.4g}; every draw of a record costs what it does in "
                f"{describe(inner)}"
            )
        case acc.PerUser(inner, records):
            return f"{describe(inner)}, where a user with at most {records:,} records is one record"
        case acc.GridNoise(inner, distance):
            return (
                f"{describe(inner)}, on an integer grid: the noise is within {distance:.2g} of it "
                "in total variation, charged to delta"
            )
        case acc.Repeated(inner, 1):
            return describe(inner)
        case acc.Repeated(inner, count):
            return f"{count:,} times {describe(inner)}"
        case acc.Composed(events):
            return "; ".join(describe(part) for part in events) or "nothing"
        case DominatedEvent():
            return event.describe()
    return _mechanism(event)


def _mechanism(event: acc.Event) -> str:
    """A description of an event that holds no others."""
    match event:
        case acc.Gaussian(noise_multiplier):
            return (
                f"a sum of clipped contributions with Gaussian noise of {noise_multiplier:.4g} "
                "times the largest one"
            )
        case acc.Laplace(noise_multiplier):
            return (
                f"a sum of clipped contributions with Laplace noise of {noise_multiplier:.4g} "
                "times the largest one"
            )
        case acc.DiscreteLaplace(scale, _) | acc.DiscreteGaussian(scale, _):
            kind = "Laplace" if isinstance(event, acc.DiscreteLaplace) else "Gaussian"
            return (
                f"a sum of integers, up to {event.sensitivity} of a record, with discrete {kind} "
                f"noise of scale {scale:.4g}"
            )
        case acc.RandomizedResponse(noise_prob, buckets):
            return (
                f"each record's own answer, replaced with probability {noise_prob:.4g} by a random "
                f"one of {buckets}"
            )
        case acc.ExponentialMechanism(epsilon):
            return f"a choice by an exponential mechanism of epsilon {epsilon:.4g}"
        case acc.EpsilonDelta(epsilon, delta):
            return f"a release that is stated to be ({epsilon:.4g}, {delta:.4g})-private"
        case acc.ObjectivePerturbation(noise_multiplier, curvature):
            return (
                f"the minimum of a logistic loss with a random linear term (noise multiplier "
                f"{noise_multiplier:.4g}, curvature {curvature:.4g})"
            )
        case acc.ZCDP(rho, xi):
            return f"a release that is stated to be ({xi:.4g}, {rho:.4g})-zero-concentrated private"
        case acc.MixtureOfGaussians(noise_multiplier, sensitivities, _):
            return (
                f"a sum with Gaussian noise of {noise_multiplier:.4g}, which a record moves by one "
                f"of {len(sensitivities)} amounts at random, up to {max(sensitivities):.4g}"
            )
        case acc.NonPrivate(reason):
            return f"something without any guarantee: {reason}"
    return repr(event)


# The sampling of a run whose last state alone is released.
HIDDEN = "secret_partition"
ENERGIES = {
    "public": "Half of the test set, at most 5,000 examples, judged every candidate and is assumed "
    "public; accuracy is told of the other examples.",
    "private": "Candidates were judged by a noisy loss on training records, charged by itself.",
    "test": "Not held out: every step was chosen by looking at the very test set of which the "
    "accuracy is told, as the paper does.",
    "train": "Every step was chosen by an un-noised loss on the training records.",
}


def encodable(text: str) -> str:
    """The text with "?" for half characters, as names of files can hold, which no file can."""
    return text.encode("utf-8", "replace").decode()


def drawable(text: str) -> str:
    """The text with "?" for each character that cannot be drawn, such as a control character."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def show(value: float | str) -> str:
    """A number with four digits; a string, such as "inf", as it is."""
    return value if isinstance(value, str) else f"{value:.4g}"


def show_epsilon(epsilon: float | str) -> str:
    """Epsilon with three decimals, rounded up: never below the proven one."""
    value = float(epsilon)
    return f"{math.ceil(value * 1000) / 1000:.3f}" if math.isfinite(value) else str(epsilon)


def show_audited(epsilon: float) -> str:
    """An empirical epsilon with three decimals, rounded down: never above the one found."""
    return f"{math.floor(epsilon * 1000) / 1000:.3f}"


def show_factor(epsilon: float) -> str:
    """e to the power of a finite epsilon, rounded up; a power of ten where it is very large."""
    if epsilon >= 16:
        return f"10{str(math.ceil(epsilon / math.log(10))).translate(_RAISED)}"
    if epsilon >= 3:
        return f"{math.ceil(math.exp(epsilon)):,}"
    return f"{math.ceil(100 * math.exp(epsilon)) / 100:.2f}"


def show_rate(rate: float) -> str:
    """A rate in percent with three digits, rounded up: what an attack finds is not understated."""
    digits = decimal.Context(prec=3, rounding=decimal.ROUND_CEILING)
    return f"{100 * float(digits.create_decimal(repr(float(rate)))):.4g}%"


def show_delta(delta: float) -> str:
    """Delta with six digits, rounded up, as in 1e-5: never below the proven one."""
    digits = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
    return f"{float(digits.create_decimal(repr(float(delta)))):g}".replace("e-0", "e-")
