"""Warnings of a weak guarantee."""

import dataclasses
import math

from jaxdp import accounting as acc
from jaxdp.runs.report.schema import Caution, Guarantee, Report
from jaxdp.runs.report.subject import Subject
from jaxdp.runs.report.words import show, show_audited, show_epsilon, show_factor
from jaxdp.sampling import Poisson

LITTLE, NONE = 10.0, 50.0  # epsilons above which protection is called little, and none


def weak_guarantee(epsilon: float, delta: float, dataset_size: int) -> tuple[Caution, ...]:
    """The warnings about a guarantee; () for none."""
    found = []
    if text := _describe_epsilon(epsilon):
        found.append(Caution("epsilon", text))
    if delta * dataset_size >= 1:
        found.append(
            Caution(
                "delta",
                f"Delta ({delta:.3g}) is not below 1 / {dataset_size:,} = "
                f"{1 / dataset_size:.3g}, one over the number of records: such a guarantee would "
                "also be met by publishing a record picked at random. Choose a delta well below "
                "that.",
            )
        )
    return tuple(found)


def shuffling_cost(subject: Subject, guarantee: Guarantee) -> tuple[Caution, ...]:
    """The warning that shuffled epochs cost more than Poisson samples of the same size; or ()."""
    mechanism = subject.algorithm.mechanism
    if subject.sampling != "shuffle" or not math.isfinite(guarantee.epsilon):
        return ()
    poisson = Poisson(subject.batch_size / subject.dataset_size)
    pretended = dataclasses.replace(mechanism, sampling=poisson).total(guarantee.releases)
    claim = acc.epsilon(pretended, subject.delta, subject.relation).upper
    least = guarantee.epsilon_lower or 0.0
    text = (
        "Shuffled epochs are charged without amplification by sampling: epsilon "
        f"{show_epsilon(guarantee.epsilon)}. "
        + (f"Certified: it is at least {show_audited(least)}. " if least else "")
        + f"Taking the batches for Poisson samples would claim {show(claim)}, which is no "
        "guarantee (arXiv:2403.17673). Random allocation uses every record as often and has a "
        "proven amplification: take sampling allocation instead."
    )
    return (Caution("sampling", text),)


def _describe_epsilon(epsilon: float) -> str:
    """The warning about a large epsilon; "" for none."""
    if math.isinf(epsilon):
        return (
            "Nothing is proven (epsilon is infinite): this run must not be called differentially "
            "private."
        )
    if epsilon > NONE:
        return (
            f"Epsilon is above {NONE:g}: no meaningful protection. One record may change the "
            f"probability of what is seen by a factor of up to {show_factor(epsilon)}."
        )
    if epsilon > LITTLE:
        return (
            f"Epsilon is above {LITTLE:g}: this gives little protection. One record may change "
            f"the probability of what is seen by a factor of up to {show_factor(epsilon)}."
        )
    return ""


def all_warnings(report: Report) -> list[str]:
    """All warnings of a report in words, those of an audit and of a chosen seed included."""
    texts = [warning.text for warning in report.warnings]
    if report.label:
        texts.append(report.label)
    audited = report.audited
    if audited and audited.noise_refuted:
        tests = (audited.noise or "").removeprefix("noise: REFUTED: ")
        texts.insert(0, f"The audit refutes the noise that was charged ({tests}).")
    if audited and audited.broken:
        texts.insert(0, f"The audit contradicts the guarantee. {audited.verdict}")
    return texts
