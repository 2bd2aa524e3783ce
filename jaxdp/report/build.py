"""The report of a run as a JSON-ready dictionary."""

import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxdp import __version__
from jaxdp import accounting as acc
from jaxdp._entries import SEEDED
from jaxdp.optimizers import registry
from jaxdp.report import cautions, facts, levels, origin, tradeoff, words
from jaxdp.runs.config import RunConfig
from jaxdp.runs.loop import RunResult


def build(
    result: RunResult, *, test_labels: Any = None, ledger: Path | None = None,
    date: str | None = None, command: str | None = None,
) -> dict[str, Any]:
    """Everything that a reader needs to judge the run; nothing computed from un-noised data.

    No duration either: a step takes as long as its draw is large, and the draw is private.

    Infinite epsilons become the string "inf", so that the file is valid JSON everywhere.

    Args:
        result: of the run.
        test_labels: int [n] of the test examples that accuracy is told of; public.
        ledger: the ledger's file, for its hash.
        date: on which the run began, of ``origin.today()`` before the first step.
        command: that started the run; None writes one with all of its public numbers.
    """
    config = result.config
    guarantee = _guarantee(config, result)
    report = {
        "jaxdp": __version__,
        "method": config.method,
        "dataset": config.dataset,
        "model": config.model,
        "activation": config.activation,
        "test_accuracy": result.history[-1]["test_accuracy"],
        "levels": levels.levels(config.dataset, config.model, test_labels),
        "privacy_unit": facts.UNIT,
        "guarantee": guarantee,
        "warnings": cautions.cautions(guarantee["epsilon"], config.delta, config.dataset_size),
        "tradeoff": tradeoff.tradeoff(
            result.ledger.event, acc.Relation(config.relation), config.delta
        ),
        "claim": _claim(config, result),
        "counts": _counts(result),
        "judged_by": words.ENERGIES.get(registry.METHODS[config.method].energy),
        "label": words.REPRODUCIBLE if result.reproducible else None,
        "notes": result.ledger.notes(),
        "unverified": [said for said in result.ledger.unverified() if said != SEEDED],
        "assumed": list(words.ASSUMED),
        "outside_the_guarantee": list(words.OUTSIDE),
        "history": result.history,
        "config": config.to_dict(),
        "parameters": origin.parameters(result.params),
        "epochs": facts.epochs(config),
        "date": date,
        "command": command or origin.command_of(config),
        "ledger_sha256": None if ledger is None else origin.sha256(ledger),
        "versions": origin.versions(),
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
    }
    return _finite(report)


def _guarantee(config: RunConfig, result: RunResult) -> dict[str, Any]:
    relation = acc.Relation(config.relation)
    event = result.ledger.event
    row = {
        "relation": relation.value,
        "delta": config.delta,
        "sampling": config.sampling,
        "sampling_prob": config.batch_size / config.dataset_size,
        "noise_multiplier": config.noise_multiplier,
        "l2_clip_norm": config.l2_clip_norm,
        "releases": result.ledger.steps,
        "in_words": words.describe(event),
    }
    if not acc.supports(event, relation):
        return {**row, "epsilon": math.inf, "method": "none: no accountant bounds this event"}
    bound = acc.epsilon(event, config.delta, relation)
    return {
        **row,
        "epsilon": bound.upper,
        "epsilon_lower": bound.lower,
        "epsilon_estimate": bound.estimate,
        "method": bound.method,
    }


def _counts(result: RunResult) -> dict[str, int]:
    last = result.history[-1]
    return {name: last[name] for name in ("proposals", "accepted", "forced") if name in last}


def _claim(config: RunConfig, result: RunResult) -> dict[str, Any] | None:
    """What the paper claims of such a run, by its own formula; None where it claims nothing else.

    A method that counts accepted steps alone claims those.
    """
    claimed = config.private_method().claim
    if claimed is None or config.noise_schedule is not None or not config.noise_multiplier:
        return None
    accepted = _counts(result).get("accepted")
    steps = result.history[-1]["step"] if accepted is None else accepted
    rate = config.batch_size / config.dataset_size
    claim = claimed(rate, config.noise_multiplier, max(1, steps), config.delta)
    proven = result.ledger.epsilon(config.delta, acc.Relation(config.relation))
    leak = config.mechanism().leak
    return {
        "name": claim.name, "epsilon": claim.value, "steps": steps, "source": claim.source,
        "verdict": f"nothing is proven, for {leak}" if leak else claim.verdict(proven),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
