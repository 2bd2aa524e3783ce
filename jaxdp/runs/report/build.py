"""The report of a run from its public facts, its ledger and what was shown of it."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxdp import __version__
from jaxdp import accounting as acc
from jaxdp.accounting.curves import Profile, false_negative_rates, largest_mu_between, profile
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import SEEDED
from jaxdp.noise.gaussian import LEAKED
from jaxdp.runs.report import cautions, facts, origin, words
from jaxdp.runs.report.schema import (
    CandidateCounts,
    ClaimRow,
    Guarantee,
    HistoryRow,
    Report,
    Tradeoff,
)
from jaxdp.runs.report.subject import Subject
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree

_SHOWN = (1e-3, 1e-2)  # false-positive rates given in numbers
_RATES = np.logspace(-6, 0, 61)
_SMALL = 1e-9


def build(
    subject: Subject,
    *,
    history: Sequence[Mapping[str, float]],
    params: PyTree,
    ledger: Ledger,
    reproducible: bool,
    ledger_file: Path | None = None,
    date: str | None = None,
) -> Report:
    """The report of a run; nothing in it is computed from un-noised data.

    It holds no duration: a step takes as long as its draw is large, and the draw is private.

    Args:
        subject: the run's public facts.
        history: the rows that were shown, numbers by name.
        params: the trained parameters.
        ledger: what was charged.
        reproducible: whether a person chose the seed.
        ledger_file: of the ledger, for its hash.
        date: on which the run began, asked for before the first step.
    """
    # What was charged, and what the ledger could not verify; an infinite epsilon says the rest.
    rows = tuple(HistoryRow.from_dict(row) for row in history)
    guarantee, names = _guarantee(subject, ledger), subject.names
    # An algorithm that names its leak is charged as not private, which says more.
    told_elsewhere = {SEEDED} if math.isfinite(guarantee.epsilon) else {SEEDED, LEAKED}
    report = Report(
        jaxdp=__version__,
        title=subject.title,
        **({} if names is None else vars(names)),
        config=subject.config,
        measured=subject.measured,
        levels=subject.levels,
        privacy_unit=subject.unit,
        guarantee=guarantee,
        warnings=cautions.weak_guarantee(guarantee.epsilon, subject.delta, subject.dataset_size)
        + cautions.shuffling_cost(subject, guarantee),
        tradeoff=limit_attacks(ledger.event, subject.relation, subject.delta),
        claim=_claim(subject, ledger, rows[-1]),
        counts=_counts(rows[-1]),
        judged_by=subject.judged_by,
        label=words.REPRODUCIBLE if reproducible else None,
        notes=tuple(ledger.notes()),
        unverified=tuple(said for said in ledger.unverified() if said not in told_elsewhere),
        assumed=words.ASSUMED,
        outside_the_guarantee=words.outside_guarantee(ledger.event)
        + ((words.ONE_RECORD,) if subject.records_per_user is None else ()),
        history=rows,
        parameters=origin.parameters(params),
        epochs=subject.epochs if subject.parts is None else None,
        parts=subject.parts,
        date=date,
        command=subject.command,
        ledger_sha256=None if ledger_file is None else origin.sha256(ledger_file),
        versions=origin.versions(),
        machine=f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
    )
    return dataclasses.replace(report, facts=facts.grouped_facts(subject, report))


def _guarantee(subject: Subject, ledger: Ledger) -> Guarantee:
    """The guarantee of everything charged; infinite where no accountant bounds it."""
    event = ledger.event
    found = Guarantee(
        relation=subject.relation.value,
        delta=subject.delta,
        sampling=subject.sampling,
        sampling_prob=subject.batch_size / subject.dataset_size,
        noise_multiplier=subject.noise_multipliers[0],
        releases=ledger.steps,
        in_words=event.describe(),
        epsilon=math.inf,
        accountant="none: no accountant bounds this event",
        provided=subject.provided,
    )
    if not acc.supports(event, subject.relation):
        return found
    bound = acc.epsilon(event, subject.delta, subject.relation)
    return dataclasses.replace(
        found,
        epsilon=bound.upper,
        epsilon_lower=bound.lower,
        epsilon_estimate=bound.estimate,
        accountant=bound.accountant,
    )


def _counts(row: HistoryRow) -> CandidateCounts | None:
    """The candidates of an annealed algorithm's last row; None of another."""
    if row.proposals is None or row.accepted is None or row.forced is None:
        return None
    return CandidateCounts(row.proposals, row.accepted, row.forced)


def _claim(subject: Subject, ledger: Ledger, last: HistoryRow) -> ClaimRow | None:
    """The epsilon that a paper claims of such a run, by its own formula; None where it has none.

    An algorithm that counts accepted steps alone claims those.
    """
    algorithm, mechanism = subject.algorithm, subject.algorithm.mechanism
    noise = mechanism.noise_multiplier
    # Papers' formulas are about steps with independent noise.
    if (
        algorithm.claim is None
        or subject.parts is not None
        or mechanism.strategy is not None
        or isinstance(noise, NoiseSchedule)
        or not noise
    ):
        return None
    steps = last.step if last.accepted is None else last.accepted
    rate = subject.batch_size / subject.dataset_size
    claim = algorithm.claim(rate, noise, max(1, steps), subject.delta)
    proven = ledger.epsilon(subject.delta, subject.relation)
    verdict = (
        f"nothing is proven, for {mechanism.leak}" if mechanism.leak else claim.verdict(proven)
    )
    return ClaimRow(claim.name, claim.value, steps, claim.source, verdict)


def limit_attacks(event: acc.Event, relation: acc.Relation, delta: float) -> Tradeoff | None:
    """The largest true-positive rates of any attack; None where nothing is proven.

    An attack says "used" or "not used" of a record. Its false-positive rate (FPR) is how often it
    says "used" of one that was not, its true-positive rate (TPR) how often it does of one that was.

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
            for rate in _SHOWN
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
