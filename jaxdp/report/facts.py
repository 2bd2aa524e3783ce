"""The public facts of a run in words, one row each, in groups."""

from collections.abc import Callable
from typing import Any

from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.report import correlated
from jaxdp.report.schema import CandidateCounts, Facts, Report
from jaxdp.report.subject import Rows, Subject
from jaxdp.report.words import HIDDEN, RELATIONS, show_delta

CODE = ("Command", "SHA-256 of ledger.jsonl")  # set in a monospaced font

_SAMPLINGS: dict[str, str] = {
    "poisson": "{batch:,} of {size:,} records expected a step, each with probability {rate:.3g}, "
    "independently of the others (Poisson sampling)",
    "fixed_size": "exactly {batch:,} of {size:,} records a step, drawn at random without "
    "replacement",
    "full_batch": "all {size:,} records in every step",
    "allocation": "{batch:,} of {size:,} records expected a step: in every epoch each is in "
    "{rule.participations:,} of {rule.steps_per_epoch:,} steps, drawn for it alone (random "
    "allocation)",
    "shuffle": "{batch:,} of {size:,} records a step: an epoch is one pass over the records in "
    "random order, the last batch what is left (shuffling, without amplification)",
    "truncated_poisson": "{batch:,} of {size:,} records expected a step, each with probability "
    "{rate:.3g}, independently of the others; of more than {rule.cap:,} that many are kept at "
    "random (truncated Poisson sampling)",
    "cyclic_poisson": "{batch:,} of {size:,} records expected a step: every record is in one of "
    "{rule.bands:,} groups by a hash of its content or identity, step after step takes the next "
    "group, and each record of it with probability {rule.sampling_prob:.3g}, independently of the "
    "others (cyclic Poisson sampling)",
    HIDDEN: "every record in one of {size:,} / {batch:,} fixed batches, of a secret partition that "
    "was drawn once",
    "fixed_order": "{batch:,} of {size:,} records a step: every pass takes the records in one and "
    "the same order, the last batch what is left (fixed order, no sampling)",
}
_RULES: dict[type, Callable[[Any], str]] = {
    clipping.rules.Clip: lambda rule: (
        f"a record's gradient that is longer than {rule.l2_clip_norm:.4g} is shortened to that "
        "length (flat clipping, Euclidean norm)"
    ),
    clipping.rules.AutoS: lambda rule: (
        f"every record's gradient is rescaled to a length below {rule.radius:.4g} (AUTO-S)"
    ),
    clipping.rules.Normalize: lambda rule: (
        f"every record's gradient is rescaled to the length {rule.radius:.4g} (normalisation)"
    ),
    clipping.rules.CoordinateBox: lambda rule: (
        f"every coordinate of a record's gradient is cut off at ±{rule.bound:.4g} times a side of "
        "its own, which follows from noisy gradients (box)"
    ),
}


def groups(subject: Subject, report: Report) -> tuple[Facts, ...]:
    """The public facts as (heading, rows of name and value).

    Args:
        subject: of the report.
        report: without these facts.
    """
    found = [
        ("Who is protected", _protected(subject)),
        ("What is done to protect them", _done(subject, report)),
        ("The training", [*subject.training, ("Parameters", f"{report.parameters:,}")]),
        ("Where this report comes from", _origin(report)),
    ]
    return tuple((heading, tuple(rows)) for heading, rows in found)


def neighbours(report: Report) -> str:
    """The neighbouring relation in words."""
    return RELATIONS[acc.Relation(report.guarantee.relation)]


def _protected(subject: Subject) -> Rows:
    return [
        (
            "Number of records" if subject.records_per_user is None else "Number of users",
            f"{subject.dataset_size:,}, declared and public",
        ),
        ("Privacy unit", f"{subject.unit}: this is who the guarantee protects"),
        ("Neighbours", f"data sets that are alike but for {RELATIONS[subject.relation]}"),
        (
            "Delta",
            f"{show_delta(subject.delta)}; one over the number of records is "
            f"{1 / subject.dataset_size:.3g}",
        ),
    ]


def _done(subject: Subject, report: Report) -> Rows:
    guarantee, rule = report.guarantee, subject.algorithm.mechanism.rule
    sampling = _SAMPLINGS.get(subject.sampling, "{batch:,} of {size:,} records a step")
    if subject.records_per_user is not None:
        sampling = sampling.replace("record", "user")
    return [
        (
            "Sampling",
            sampling.format(
                batch=subject.batch_size,
                size=subject.dataset_size,
                rate=subject.batch_size / subject.dataset_size,
                rule=subject.algorithm.mechanism.sampling,
            ),
        ),
        ("Clipping", _RULES.get(type(rule), repr)(rule)),
        *_noise(subject, report),
        ("Released", guarantee.in_words),
        *_counted(report.counts),
        *(("Audit", note) for note in report.notes),
        ("Accountant", guarantee.accountant),
    ]


def _noise(subject: Subject, report: Report) -> Rows:
    mechanism = subject.algorithm.mechanism
    correlates = mechanism.strategy is not None
    found = [("Noise multiplier", _independent(subject.noise_multipliers))]
    found = correlated.rows(mechanism) if correlates else found
    if mechanism.noise != "grid":
        return found
    said = "discrete Gaussian integers from ChaCha20, added to the sum rounded to integers"
    if report.parameters:
        said = mechanism.grid_in_words(report.parameters)
    return [*found, ("Noise", said)]


def _independent(values: list[float]) -> str:
    what = "the noise's standard deviation over what one record can add"
    if len(values) == 1:
        return f"{values[0]:.4g}: {what}"
    return f"from {values[0]:.4g} to {values[-1]:.4g}, in {len(values):,} levels: {what}"


def _counted(counts: CandidateCounts | None) -> Rows:
    if counts is None:
        return []
    return [
        (
            "Candidates",
            f"{counts.proposals:,} evaluated and charged, {counts.accepted:,} accepted "
            f"({counts.accepted / counts.proposals:.1%}), "
            f"{counts.forced:,} of them by force",
        )
    ]


def _origin(report: Report) -> Rows:
    rows = [
        (
            "Date",
            f"{report.date} (UTC; training began or was resumed)" if report.date else "",
        ),
        ("Command", report.command),
        ("SHA-256 of ledger.jsonl", report.ledger_sha256 or ""),
        ("Versions", ", ".join(f"{name} {value}" for name, value in report.versions.items())),
        ("Machine", report.machine),
    ]
    return [row for row in rows if row[1]]
