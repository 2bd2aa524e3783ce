"""The public facts of a run in words, one row each, in groups."""

from collections.abc import Callable
from typing import Any

from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.mechanism import Mechanism, participation
from jaxdp.noise import BandedInverse, Buffered, MadeAgain, Strategy, Toeplitz, sensitivity
from jaxdp.noise.sensitivity import Cyclic
from jaxdp.runs.report.schema import ChargedPart, Facts, Report
from jaxdp.runs.report.subject import Rows, Subject
from jaxdp.runs.report.words import A_USER, HIDDEN, RELATIONS, show_delta, show_epsilon

CODE = ("Command", "SHA-256 of ledger.jsonl")  # set in a monospaced font

_SAMPLINGS: dict[str, str] = {
    "poisson": "{batch:,} of {size:,} records expected a step, each with probability {rate:.3g}, "
    "independently of the others (Poisson sampling)",
    "WeightedPoisson": "{batch:,} of {size:,} records expected a step, each with a probability of "
    "its own ({rule.label}), at most {rule.largest:.3g}, independently of the others (weighted "
    "Poisson sampling)",
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
    "cyclic_allocation": "{batch:,} of {size:,} records expected a step: every record is in one of "
    "{rule.bands:,} groups by a hash of its content or identity, step after step takes the next "
    "group, and in every epoch each is in one of its group's {rule.slots:,} steps, drawn for it "
    "alone (cyclic allocation)",
    "ExampleLevel": "{batch:,} of {size:,} records expected a step, each with probability "
    "{rate:.3g}, independently of the others, those of one user too (example-level sampling)",
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
_CANCELS = (
    "the noise of a step takes back part of that of the steps before, so that the sum of all steps "
    "has less"
)


def grouped_facts(subject: Subject, report: Report) -> tuple[Facts, ...]:
    """The public facts as (heading, rows of name and value).

    Args:
        subject: of the report.
        report: without these facts.
    """
    guarantee, mechanism = report.guarantee, subject.algorithm.mechanism
    # The units that are drawn: records, or whole users.
    users = subject.records_per_user is not None and not mechanism.by_example
    size = subject.dataset_size
    protected = [
        (f"Number of {'users' if users else 'records'}", f"{size:,}, declared and public"),
        ("Privacy unit", f"{subject.unit}: this is who the guarantee protects"),
        ("Neighbours", f"data sets that are alike but for {describe_relation(report)}"),
        (
            "Delta",
            f"{show_delta(subject.delta)}; one over the number of records is {1 / size:.3g}",
        ),
    ]

    # How: sampling, clipping and noise in the order of a step; then what was released.
    sampling = _SAMPLINGS.get(subject.sampling, "{batch:,} of {size:,} records a step")
    sampling = (sampling.replace("record", "user") if users else sampling).format(
        batch=subject.batch_size,
        size=size,
        rate=subject.batch_size / size,
        rule=mechanism.sampling,
    )
    if mechanism.strategy is not None:
        noise = _describe_correlated(mechanism)
    else:
        values = subject.noise_multipliers
        shown = f"{values[0]:.4g}"
        if len(values) > 1:
            shown = f"from {shown} to {values[-1]:.4g}, in {len(values):,} levels"
        what = "the noise's standard deviation over what one record can add"
        noise = [("Noise multiplier", f"{shown}: {what}")]
    if mechanism.noise == "grid":
        said = "discrete Gaussian integers from ChaCha20, added to the sum rounded to integers"
        if report.parameters:
            said = mechanism.noise_description(report.parameters)
        noise.append(("Noise", said))
    done = [
        ("Sampling", sampling),
        ("Clipping", _RULES.get(type(mechanism.rule), repr)(mechanism.rule)),
        *noise,
        ("Released", guarantee.in_words),
    ]
    if counts := report.counts:
        done.append(
            (
                "Candidates",
                f"{counts.proposals:,} evaluated and charged, {counts.accepted:,} accepted "
                f"({counts.accepted / counts.proposals:.1%}), "
                f"{counts.forced:,} of them by force",
            )
        )
    done += [*(("Audit", note) for note in report.notes), ("Accountant", guarantee.accountant)]

    # Part by part, where epsilon counts more than one stage of one run.
    parts = [
        (part.name[:1].upper() + part.name[1:], _describe_part(part)) for part in report.parts or ()
    ]
    if subject.ledger:
        parts.append(("Ledger", subject.ledger))

    # Whatever lets a reader do it again. A row without a value is left out.
    origin = [
        ("Date", f"{report.date} (UTC; training began or was resumed)" if report.date else ""),
        ("Command", report.command),
        ("SHA-256 of ledger.jsonl", report.ledger_sha256 or ""),
        ("Versions", ", ".join(f"{name} {value}" for name, value in report.versions.items())),
        ("Machine", report.machine),
    ]
    training = [*subject.training, ("Parameters", f"{report.parameters:,}")]
    return (
        ("Who is protected", tuple(protected)),
        ("What is done to protect them", tuple(done)),
        *[("What epsilon counts", tuple(parts))][: len(parts)],
        ("The training", tuple(training)),
        ("Where this report comes from", tuple(row for row in origin if row[1])),
    )


def _describe_part(part: ChargedPart) -> str:
    """A part's releases, its own epsilon, and that of everything by its end."""
    alone = show_epsilon(part.epsilon)
    text = f"{part.in_words}; epsilon {alone} alone"
    if part.steps is not None:
        text = f"up to step {part.steps:,}: {text}"
    if part.epsilon_after is not None:
        text += f", {show_epsilon(part.epsilon_after)} of everything by its end"
    return text


def describe_relation(report: Report) -> str:
    """The neighbouring relation in words."""
    return of_unit(report, RELATIONS[acc.Relation(report.guarantee.relation)])


def of_unit(report: Report, words: str) -> str:
    """Words on a record, of a user where that is the privacy unit."""
    return words.replace("record", "user") if report.privacy_unit.startswith(A_USER) else words


def _describe_correlated(mechanism: Mechanism) -> Rows:
    """The facts of a mechanism's correlated noise: multiplier, strategy, sensitivity and charge.

    Args:
        mechanism: with a strategy.
    """
    assert mechanism.strategy is not None
    assert isinstance(mechanism.noise_multiplier, float)
    each = participation(mechanism.sampling, mechanism.dataset_size)
    moved = sensitivity(mechanism.strategy, each)
    once = isinstance(each, Cyclic)
    drawn = " Every step draws from one group of records; groups take turns." if once else ""
    of = "one draw of a record" if once else "one record, in all of its steps together,"
    return [
        (
            "Noise multiplier",
            f"{mechanism.noise_multiplier:.4g}: the standard deviation of the fresh noise of every "
            f"step over the most by which {of} can move what the strategy makes of the run's sums. "
            "It is no noise multiplier of a single step, and is not to be compared with one",
        ),
        ("Correlated noise", f"{_describe_strategy(mechanism.strategy)}: {_CANCELS}"),
        (
            "Sensitivity",
            f"{moved:.4g} clip norms is the most by which {of} can move what the strategy makes of "
            f"the sums; so the fresh noise has {moved * mechanism.noise_multiplier:.4g} clip norms",
        ),
        (
            "Charge",
            f"the whole run of {mechanism.strategy.steps:,} steps is one event, charged whole with "
            f"its first step: fewer steps cost as much.{drawn}",
        ),
    ]


def _describe_strategy(strategy: Strategy) -> str:
    """A strategy in words, with its number of bands or buffers."""
    if isinstance(strategy, Buffered):
        return f"a buffered Toeplitz strategy (BLT) of {len(strategy.decays):,} buffers"
    if isinstance(strategy, MadeAgain):
        share = -strategy.coefficients[1]
        return f"{share:.4g} of the noise of the step before, made again, is taken back (DP-λCGD)"
    if isinstance(strategy, BandedInverse):
        return f"a Toeplitz strategy whose inverse has {len(strategy.coefficients):,} bands"
    if strategy.bands == 1:
        return "the identity strategy (no correlation)"
    toeplitz = "Toeplitz " if isinstance(strategy, Toeplitz) else ""
    if strategy.bands == strategy.steps:
        return f"a full {toeplitz}strategy"
    return f"a banded {toeplitz}strategy of {strategy.bands:,} bands"
