"""The report of a run as a JSON-ready dictionary."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxdp import __version__
from jaxdp import accounting as acc
from jaxdp._entries import SEEDED
from jaxdp.ledger import Ledger
from jaxdp.report import cautions, facts, origin, tradeoff, words
from jaxdp.report.subject import Subject
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree

History = list[dict[str, Any]]


def build(
    subject: Subject,
    *,
    history: History,
    params: PyTree,
    ledger: Ledger,
    reproducible: bool,
    ledger_file: Path | None = None,
    date: str | None = None,
) -> dict[str, Any]:
    """Everything that a reader needs to judge the run; nothing computed from un-noised data.

    No duration either: a step takes as long as its draw is large, and the draw is private.

    Infinite epsilons become the string "inf", so that the file is valid JSON everywhere.

    Args:
        subject: its public facts.
        history: the rows that were shown.
        params: the released parameters.
        ledger: what was charged.
        reproducible: whether a person chose the seed.
        ledger_file: of the ledger, for its hash.
        date: on which the run began, of ``origin.today()`` before the first step.
    """
    guarantee = _guarantee(subject, ledger)
    counts = _counts(history)
    report = {
        "jaxdp": __version__,
        "title": subject.title,
        **subject.names,
        **_measured(subject, history),
        "levels": subject.levels,
        "privacy_unit": subject.unit,
        "guarantee": guarantee,
        "warnings": cautions.cautions(guarantee["epsilon"], subject.delta, subject.dataset_size),
        "tradeoff": tradeoff.tradeoff(ledger.event, subject.relation, subject.delta),
        "claim": _claim(subject, ledger, history),
        "counts": counts,
        "judged_by": subject.judged_by,
        "label": words.REPRODUCIBLE if reproducible else None,
        "notes": ledger.notes(),
        "unverified": [said for said in ledger.unverified() if said != SEEDED],
        "assumed": list(words.ASSUMED),
        "outside_the_guarantee": list(words.OUTSIDE),
        "history": history,
        "parameters": origin.parameters(params),
        "epochs": subject.epochs,
        "date": date,
        "command": subject.command,
        "ledger_sha256": None if ledger_file is None else origin.sha256(ledger_file),
        "versions": origin.versions(),
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
    }
    return _finite({**report, "facts": facts.groups(subject, report)})


def _measured(subject: Subject, history: History) -> dict[str, Any]:
    """The number that the run is judged by, under its own name and described."""
    found = subject.measured
    if found is None:
        return {"measured": None}
    return {found.column: history[-1][found.column], "measured": dataclasses.asdict(found)}


def _guarantee(subject: Subject, ledger: Ledger) -> dict[str, Any]:
    event = ledger.event
    row = {
        "relation": subject.relation.value,
        "delta": subject.delta,
        "sampling": subject.sampling,
        "sampling_prob": subject.batch_size / subject.dataset_size,
        "noise_multiplier": subject.noise_multipliers[0],
        "releases": ledger.steps,
        "in_words": words.describe(event),
    }
    if not acc.supports(event, subject.relation):
        return {**row, "epsilon": math.inf, "algorithm": "none: no accountant bounds this event"}
    bound = acc.epsilon(event, subject.delta, subject.relation)
    return {
        **row,
        "epsilon": bound.upper,
        "epsilon_lower": bound.lower,
        "epsilon_estimate": bound.estimate,
        "algorithm": bound.accountant,
    }


def _counts(history: History) -> dict[str, int]:
    last = history[-1]
    return {name: last[name] for name in ("proposals", "accepted", "forced") if name in last}


def _claim(subject: Subject, ledger: Ledger, history: History) -> dict[str, Any] | None:
    """The epsilon that a paper claims of such a run, by its own formula; None where it has none.

    An algorithm that counts accepted steps alone claims those.
    """
    algorithm, mechanism = subject.algorithm, subject.algorithm.mechanism
    noise = mechanism.noise_multiplier
    if algorithm.claim is None or isinstance(noise, NoiseSchedule) or not noise:
        return None
    accepted = _counts(history).get("accepted")
    steps = history[-1]["step"] if accepted is None else accepted
    rate = subject.batch_size / subject.dataset_size
    claim = algorithm.claim(rate, noise, max(1, steps), subject.delta)
    proven = ledger.epsilon(subject.delta, subject.relation)
    return {
        "name": claim.name,
        "epsilon": claim.value,
        "steps": steps,
        "source": claim.source,
        "verdict": f"nothing is proven, for {mechanism.leak}"
        if mechanism.leak
        else claim.verdict(proven),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
