"""Events and numbers in words, and the limits of every guarantee."""

import decimal
import math

from jaxdp import accounting as acc

FLOATS = (
    "Floating-point attacks: noise is float32 from a non-cryptographic generator. The last bits of "
    "what is released can tell more than epsilon says to whoever knows all other records "
    "(docs/grid_noise.md)."
)
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
A_USER = "one user, "  # as a privacy unit begins that is no record
RELATIONS = {
    acc.Relation.ADD_OR_REMOVE_ONE: "one record added or removed",
    acc.Relation.REPLACE_ONE: "one record replaced by another",
    acc.Relation.REPLACE_SPECIAL: "one record replaced by a null record",
}


def outside_guarantee(event: acc.Event) -> tuple[str, ...]:
    """Sentences about what no guarantee of a run with this event covers."""
    return (_DRAWS if on_grid(event) else FLOATS, *_OUTSIDE)


def on_grid(event: acc.Event) -> bool:
    """True if all noise of a run is on an integer grid."""
    match event:
        case acc.Composed(events):
            return bool(events) and all(on_grid(part) for part in events)
        case acc.Repeated(inner, _):
            return on_grid(inner)
    return isinstance(event, acc.GridNoise)


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
