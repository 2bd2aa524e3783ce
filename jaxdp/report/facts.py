"""The public facts of a run in words, one row each, in groups."""

import math
from collections.abc import Callable
from typing import Any

from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.report.words import RELATIONS, show, show_delta
from jaxdp.runs.config import RunConfig
from jaxdp.schedules import NoiseSchedule

UNIT = "one training record"
CODE = ("Command", "SHA-256 of ledger.jsonl")  # to be read letter by letter

Rows = list[tuple[str, str]]

_SAMPLINGS: dict[str, str] = {
    "poisson": "{batch:,} of {size:,} records expected a step, each with probability {rate:.3g}, "
    "independently of the others (Poisson sampling)",
    "fixed_size": "exactly {batch:,} of {size:,} records a step, drawn at random without "
    "replacement",
    "full_batch": "all {size:,} records in every step",
}
_RULES: dict[type, Callable[[Any], str]] = {
    clipping.Clip: lambda rule: (
        f"a record's gradient that is longer than {rule.l2_clip_norm:.4g} is shortened to that "
        "length (flat clipping, Euclidean norm)"
    ),
    clipping.AutoS: lambda rule: (
        f"every record's gradient is rescaled to a length below {rule.radius:.4g} (AUTO-S)"
    ),
    clipping.Normalize: lambda rule: (
        f"every record's gradient is rescaled to the length {rule.radius:.4g} (normalisation)"
    ),
    clipping.CoordinateBox: lambda rule: (
        f"every coordinate of a record's gradient is cut off at ±{rule.bound:.4g} times a side of "
        "its own, which follows from noisy gradients (box)"
    ),
}


def groups(report: dict[str, Any]) -> list[tuple[str, Rows]]:
    """(heading, rows of name and value); what an older report lacks is left out."""
    config = RunConfig(**report["config"])
    return [
        ("Who is protected", _protected(report, config)),
        ("What is done to protect them", _done(report, config)),
        ("The training", _training(report, config)),
        ("Where this report comes from", _origin(report)),
    ]


def epochs(config: RunConfig) -> float:
    """The number of times that a record is used, on average."""
    assert config.steps is not None
    return config.steps * config.batch_size / config.dataset_size


def neighbours(report: dict[str, Any]) -> str:
    """The neighbouring relation in words."""
    return RELATIONS[acc.Relation(report["guarantee"]["relation"])]


def _protected(report: dict[str, Any], config: RunConfig) -> Rows:
    guarantee = report["guarantee"]
    return [
        ("Number of records", f"{config.dataset_size:,}, declared and public"),
        ("Privacy unit", f"{report.get('privacy_unit', UNIT)}: this is who the guarantee protects"),
        ("Neighbours", f"data sets that are alike but for {neighbours(report)}"),
        ("Delta", f"{show_delta(guarantee['delta'])}; one over the number of records is "
         f"{1 / config.dataset_size:.3g}"),
    ]


def _done(report: dict[str, Any], config: RunConfig) -> Rows:
    guarantee = report["guarantee"]
    rule = config.mechanism().rule
    return [
        ("Sampling", _SAMPLINGS[config.sampling].format(
            batch=config.batch_size, size=config.dataset_size,
            rate=config.batch_size / config.dataset_size,
        )),
        ("Clipping", _RULES.get(type(rule), repr)(rule)),
        ("Clipping norm", show(config.l2_clip_norm)),
        ("Noise multiplier", noise(config)),
        ("Released", guarantee["in_words"]),
        *_counted(report["counts"]),
        *(("Audit", note) for note in report.get("notes", ())),
        ("Accountant", guarantee["method"]),
    ]


def noise(config: RunConfig) -> str:
    """The multiplier, or how it moves, in words."""
    multiplier = config.noise()
    if not isinstance(multiplier, NoiseSchedule):
        return f"{multiplier:.4g}: the noise's standard deviation over what one record can add"
    values = [value for value, _ in multiplier.levels]
    return (
        f"from {values[0]:.4g} to {values[-1]:.4g}, in {len(values):,} levels "
        f"({config.noise_schedule}): the noise's standard deviation over what one record can add"
    )


def optimizer(config: RunConfig) -> str:
    """The optimizer with its rate, momentum and other settings."""
    known = config.method in ("dp-sgd", "auto-s", "normalised-sgd") or "sa-dpsgd" in config.method
    name = "Adam" if config.optimizer == "adam" else "SGD" if known else f"that of {config.method}"
    parts = [name, f"learning rate {config.learning_rate:.4g}"]
    if name == "SGD" and config.momentum:
        parts.append(f"momentum {config.momentum:.4g}")
    parts += [f"{key.replace('_', ' ')} {show(value)}" for key, value in config.settings.items()]
    return ", ".join(parts)


def _training(report: dict[str, Any], config: RunConfig) -> Rows:
    width = f", hidden width {config.hidden}" if config.model == "mlp" else ""
    size = f", {report['parameters']:,} parameters" if "parameters" in report else ""
    projected = []
    if config.pca_dimensions is not None:
        projected = [("Projection", f"to {config.pca_dimensions} dimensions, chosen privately "
                      f"(noise multiplier {show(config.pca_noise_multiplier or math.nan)})")]
    return [
        ("Method", report["method"]),
        ("Optimizer", optimizer(config)),
        ("Steps", f"{config.steps:,} ({epochs(config):.3g} epochs: the times that a record is "
         "used, on average)"),
        ("Model", f"{report['model']} ({report['activation']}){width}{size}"),
        *projected,
    ]


def _counted(counts: dict[str, int]) -> Rows:
    if not counts:
        return []
    return [(
        "Candidates",
        f"{counts['proposals']:,} evaluated and charged, {counts['accepted']:,} accepted "
        f"({counts['accepted'] / counts['proposals']:.1%}), {counts['forced']:,} of them by force",
    )]


def _origin(report: dict[str, Any]) -> Rows:
    versions = report.get("versions") or {"jaxdp": report["jaxdp"]}
    rows = [
        ("Date", f"{report['date']} (UTC; training began or was resumed)" if report.get("date")
         else ""),
        ("Command", report.get("command") or ""),
        ("SHA-256 of ledger.jsonl", report.get("ledger_sha256") or ""),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Machine", report["machine"]),
    ]
    return [row for row in rows if row[1]]
