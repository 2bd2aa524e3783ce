"""The report of a configuration's run, and the command that gives the same run."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import accounting as acc
from jaxdp.optimizers import registry
from jaxdp.recipes import encoders
from jaxdp.runs.assemble import RunResult
from jaxdp.runs.config import RunConfig
from jaxdp.runs.report import build, levels, origin, words
from jaxdp.runs.report.schema import TEST_ACCURACY, Report
from jaxdp.runs.report.subject import Names, Rows, Subject, steps_in_words
from jaxdp.runs.report.words import show

_FIELDS = (
    "dataset",
    "model",
    "activation",
    "algorithm",
    "noise_multiplier",
    "steps",
    "delta",
    "batch_size",
    "l2_clip_norm",
    "learning_rate",
    "sampling",
    "relation",
)
# Written out where they are not what they are usually.
_UNUSUAL = (
    "participations",
    "strategy",
    "bands",
    "cap",
    "features",
    "noise_schedule",
    "learning_rate_schedule",
    "average",
    "pca_dimensions",
    "pca_noise_multiplier",
    "whiten_noise_multiplier",
    "secure_noise",
    "canaries",
    "canary_kind",
)


def report(
    result: RunResult,
    *,
    test_labels: np.ndarray | None = None,
    ledger: Path | None = None,
    date: str | None = None,
    command: str | None = None,
) -> Report:
    """The report of a configuration's run.

    Args:
        result: of the run.
        test_labels: int [n] of the test examples that accuracy is measured on; public.
        ledger: the ledger's file, for its hash.
        date: on which the run began.
        command: that started the run; None writes one with all of its public numbers.
    """
    return build(
        subject_of(result.config, test_labels, command),
        history=result.history,
        params=result.params,
        ledger=result.ledger,
        reproducible=result.reproducible,
        ledger_file=ledger,
        date=date,
    )


def subject_of(
    config: RunConfig, test_labels: np.ndarray | None = None, command: str | None = None
) -> Subject:
    """The public facts of a resolved configuration; arguments as for ``report``."""
    assert config.steps is not None
    algorithm, spec = config.private_algorithm(), config.spec
    return Subject(
        f"{config.algorithm.upper()} on {spec.title}",
        algorithm,
        config.steps,
        config.delta,
        acc.Relation(config.relation),
        _training(config),
        command or command_of(config),
        TEST_ACCURACY if spec.test_size else None,
        levels.levels(config.dataset, config.model, spec.num_classes, test_labels),
        words.ENERGIES.get(registry.ALGORITHMS[config.algorithm].energy),
        names=Names(config.algorithm, config.dataset, config.model, config.activation),
        config=config.to_dict(),
    )


def command_of(config: RunConfig) -> str:
    """The command with every public number of a resolved configuration written out."""
    options: dict[str, Any] = {name.replace("_", "-"): getattr(config, name) for name in _FIELDS}
    if config.own is not None:
        del options["dataset"]
        options |= {
            "data": f"{config.dataset}.npz",
            "classes": config.own["num_classes"],
            "dataset-size": config.dataset_size,
        }
    if config.optimizer != "sgd":
        options["optimizer"] = config.optimizer
    elif registry.ALGORITHMS[config.algorithm].momentum:
        options["momentum"] = config.momentum
    if config.model == "mlp":
        options["hidden"] = config.hidden
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    for name in _UNUSUAL:
        if getattr(config, name) != usual[name]:
            options[name.replace("_", "-")] = getattr(config, name)
    if config.settings:
        options["set"] = [f"{name}={value}" for name, value in config.settings.items()]
    return origin.command(options)


def _training(config: RunConfig) -> Rows:
    """The rows of the report about the training, in words."""
    assert config.steps is not None
    width = f", hidden width {config.hidden}" if config.model == "mlp" else ""
    epochs = config.steps * config.batch_size / config.dataset_size
    rows = [
        ("Algorithm", config.algorithm),
        ("Optimizer", optimizer(config)),
        ("Steps", steps_in_words(config.steps, epochs)),
        ("Model", f"{config.model} ({config.activation}){width}"),
    ]
    if config.features is not None:
        text = (
            f"{config.features}, a fixed function of each record, of no data of anybody's: "
            "computed before training, at no cost in privacy"
            if config.encoder is None
            else encoders.in_words(config.encoder["words"])
        )
        rows.append(("Features", text))
    if config.whiten_noise_multiplier is not None:
        text = (
            "features centred and their channels' variances evened out by a private mean and "
            f"covariance (noise multiplier {show(config.whiten_noise_multiplier)})"
        )
        rows.append(("Whitening", text))
    elif config.pca_dimensions is not None:
        text = (
            f"to {config.pca_dimensions} dimensions, chosen privately "
            f"(noise multiplier {show(config.pca_noise_multiplier or 0.0)})"
        )
        rows.append(("Projection", text))
    return rows


def optimizer(config: RunConfig) -> str:
    """The optimizer with its rate, momentum and other settings."""
    known = (
        config.algorithm in ("dp-sgd", "auto-s", "normalised-sgd") or "sa-dpsgd" in config.algorithm
    )
    name = (
        "Adam" if config.optimizer == "adam" else "SGD" if known else f"that of {config.algorithm}"
    )
    parts = [name, f"learning rate {config.learning_rate:.4g}"]
    if config.learning_rate_schedule is not None:
        parts[-1] += f" ({config.learning_rate_schedule})"
    if name == "SGD" and config.momentum:
        parts.append(f"momentum {config.momentum:.4g}")
    if config.average is not None:
        parts.append(f"average of the parameters with decay {show(config.average)}")
    parts += [f"{key.replace('_', ' ')} {show(value)}" for key, value in config.settings.items()]
    return ", ".join(parts)
