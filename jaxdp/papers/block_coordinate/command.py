"""``jaxdp train --algorithm sbcd``: options into a run of block coordinate descent."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp import data
from jaxdp._extras import needed
from jaxdp.cli.failures import in_words
from jaxdp.cli.options import Option
from jaxdp.cli.progress import progress_bar
from jaxdp.data.specs import DatasetSpec, spec
from jaxdp.devices import processes
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers.registry import Setting
from jaxdp.papers.block_coordinate.audit import audit_blocks
from jaxdp.papers.block_coordinate.run import block_run, report_of, train
from jaxdp.papers.block_coordinate.settings import (
    ADD,
    ALGORITHMS,
    REPLACE,
    BlockConfig,
    resolved,
    setting_names,
)
from jaxdp.runs import reporting
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.recipes import own_constants
from jaxdp.runs.report import origin
from jaxdp.runs.report.schema import Report
from jaxdp.runs.run import Result

with needed("jaxdp train", "cli", "click"):
    import click

# Chosen by looking at test accuracy on MNIST, which is public here; docs/hidden_state.md.
RECIPES: dict[str, dict[str, Any]] = {
    "sbcd": {"batch_size": 512, "learning_rate": 8.0, "l2_clip_norm": 0.05, "hidden": 128},
    "sbcd-hidden": {"batch_size": 600, "learning_rate": 0.5, "l2_clip_norm": 0.05, "hidden": 64},
    "sbcd-one-layer": {"batch_size": 600, "learning_rate": 1.0, "l2_clip_norm": 1.0, "hidden": 1},
}
_EPOCHS = 10
# Options that mean something here; the others are refused in words.
_USED = {
    *("dataset", "data_file", "classes", "dataset_size", "data_dir", "algorithm", "settings"),
    *("epsilon", "delta", "noise_multiplier", "steps", "batch_size", "l2_clip_norm", "hidden"),
    *("learning_rate", "relation", "eval_every", "out", "resume", "seed", "as_json"),
    "set_aside_unreadable",
}
_WHY = {
    "canaries": "their gradients would have to be of a loss of all parameters at once; "
    "`jaxdp audit` attacks the algorithm itself in two worlds",
    "canary_kind": "there are no canaries in a sweep",
    "strategy": "correlated noise is proven for the steps of one clipped gradient, and a sweep has "
    "one for each block",
    "noise_schedule": "a sweep's noise is the same for all here; ReleasedBlocks(schedule=) has one",
    "optimizer": "block coordinate descent is one",
    "momentum": "block coordinate descent has none",
    "sampling": "R1 draws by poisson, and a hidden run has one fixed secret partition",
    "devices": "a sweep is computed on one device",
    "distributed": "a sweep is computed in one process: each of several would release its own "
    "numbers with the noise of all",
    "model": "the network is made of blocks: --hidden, and --set layers= and channels=",
    "activation": "the closed forms are those of ReLU",
    "physical_batch_size": "a sweep takes its whole draw at once",
    "sensitive": "a sweep tells nothing un-noised",
    "secure_noise": "noise on a grid is not built for sweeps",
    "recipe": "the best recipes are of other algorithms",
    "dry_run": "`jaxdp epsilon` tells what a budget costs",
}
_HIDDEN_WHY = {
    "steps": "a hidden run is one release; --set epochs= and sweeps= give its length",
    "eval_every": "an accuracy on the way would release the state that is hidden: it is told once, "
    "at the end",
}


def refuse(given: Mapping[str, object], algorithm: str) -> None:
    """Raises ValueError for an option of ``jaxdp train`` that does not go with the algorithm.

    Args:
        given: the options on the command line, by their parameters' names.
        algorithm: a name of ``ALGORITHMS``.
    """
    why = dict(_WHY) | ({} if algorithm == "sbcd" else _HIDDEN_WHY)
    for parameter, value in given.items():
        name = "recipe" if parameter == "named_recipe" else parameter
        if name in why or name not in _USED:
            reason = why.get(name, "it means nothing there")
            raise ValueError(
                f"{name} must not be given with algorithm {algorithm}: {reason}; got {value!r}"
            )


def configured(algorithm: str, dataset: str | DatasetSpec, given: Mapping[str, Any]) -> BlockConfig:
    """The resolved configuration: the given values, and the recipe's for the others.

    Args:
        algorithm: a name of ``ALGORITHMS``.
        dataset: the name of a built-in one, or the constants of a file's.
        given: fields of ``BlockConfig``; None leaves one to the recipe.
    """
    own = isinstance(dataset, DatasetSpec)
    chosen = dataset if isinstance(dataset, DatasetSpec) else spec(dataset)
    hidden = algorithm != "sbcd"
    values: dict[str, Any] = {
        **RECIPES[algorithm],
        "dataset_size": chosen.dataset_size,
        "relation": REPLACE if hidden else ADD,
        "delta": 1e-5,
        "epsilon": None,
        "noise_multiplier": None,
        "settings": {},
    }
    values |= {name: value for name, value in given.items() if value is not None}
    _check_convolution(values["settings"])
    size = values["dataset_size"]
    if given.get("batch_size") is None:
        values["batch_size"] = _batch_size(values["batch_size"], size, hidden)
    if values["epsilon"] is None and values["noise_multiplier"] is None:
        values["epsilon"] = 3.0
    values.setdefault("steps", 1 if hidden else round(_EPOCHS * size / values["batch_size"]))
    values.setdefault("eval_every", -(-values["steps"] // 10))
    constants = own_constants(chosen) if own else None
    return resolved(BlockConfig(chosen.name, algorithm, own=constants, **values))


def _check_convolution(settings: Mapping[str, Setting]) -> None:
    for name in ("kernel", "stride"):
        if name in settings and not settings.get("channels"):
            raise ValueError(
                f"{name} must not be set without channels: there is no convolution; got "
                f"{settings[name]!r}"
            )


def _batch_size(wanted: int, size: int, hidden: bool) -> int:
    """The recipe's batch, smaller for few records; of a hidden run one that divides them."""
    most = max(1, min(wanted, size // 8))
    if not hidden:
        return most
    return next((b for b in range(most, max(1, most // 2), -1) if size % b == 0), most)


def train_blocks(
    directory: RunDirectory,
    own: data.Dataset | None,
    options: Mapping[str, Any],
    given: Mapping[str, object],
    stored: Mapping[str, Any] | None,
    secret: Secret | None,
    data_dir: Path | None,
    as_json: bool,
    words: Mapping[str, Option] | None,
    set_aside_unreadable: bool = False,
) -> None:
    """Trains, writes the report and prints a summary.

    Args:
        directory: of the run.
        own: the data set of a file; None for a built-in one.
        options: of ``jaxdp train``, by their parameters' names.
        given: those of them that were on the command line.
        stored: the configuration of the run that is resumed; None for a new one.
        secret: of a new run; None resumes.
        data_dir: where prepared data sets lie.
        as_json: the result is one JSON object.
        words: the options of a new run, for the report; None where it is resumed.
        set_aside_unreadable: as for ``jaxdp.Run``.
    """
    processes.check_alone("a run of block coordinate descent")
    algorithm = stored["algorithm"] if stored else options["algorithm"]
    refuse(given, algorithm)
    fields = {field.name for field in dataclasses.fields(BlockConfig)} - {"dataset", "algorithm"}
    values = {name: value for name, value in options.items() if name in fields}
    if stored is None:
        if directory.exists():
            raise ValueError(
                f"--out must be a new folder, got {directory.path}, which holds a run: pass "
                "--resume to continue it"
            )
        config = configured(algorithm, own.spec if own else options["dataset"], values)
    else:
        changed = {k: v for k, v in values.items() if v is not None and k in given}
        config = dataclasses.replace(BlockConfig.from_dict(stored), **changed)
    for name in config.unread:
        if name in given:
            raise ValueError(
                f"{name} must not be given with algorithm {algorithm}: one layer has no hidden "
                f"units, and a softmax block a clip norm of its own; got {given[name]!r}"
            )
    dataset = own or data.load(config.dataset, data_dir)
    date = reporting.today()
    with in_words(directory):
        with _bar(config) as progress:
            run = block_run(config, directory, dataset, secret, progress, set_aside_unreadable)
            result = train(run, config)
        asked = None if words is None else origin.command(words)
        report = report_of(config, dataset, result, directory.ledger, date, asked)
        reporting.write(report, directory)
    _tell(report, directory, result, as_json)


@contextlib.contextmanager
def _bar(config: BlockConfig) -> Iterator[Any]:
    if config.is_hidden:
        epochs = config.chosen.epochs
        click.echo(
            f"{config.algorithm}: {epochs} passes over the data for every block; nothing is told "
            "before the end, for the states between are hidden",
            err=True,
        )
    with progress_bar(config) as progress:
        yield progress


def _tell(report: Report, directory: RunDirectory, result: Result, as_json: bool) -> None:
    from jaxdp.cli.launch import print_summary, public_numbers

    if as_json:
        click.echo(json.dumps(public_numbers(report, directory), allow_nan=False))
        return
    print_summary(report, directory)
    click.echo(f"{result.seconds:.1f} s (said here only)")


def audited(
    config: Mapping[str, Any],
    steps: int | None,
    delta: float | None,
    runs: int,
    confidence: float,
    seed: int | None,
    progress: Callable[[int], None],
) -> Any:
    """The audit of a run's algorithm, or of one given by its public numbers, on a tiny network.

    Args:
        config: of a finished run; or "algorithm", "settings" and public numbers, None for the
            usual ones.
        steps: sweeps of R1; None takes the run's, at most 50, or 10.
        delta: None takes the run's, or 1e-5.
        runs: in each world.
        confidence: of the bound.
        seed: of the runs, or None.
        progress: called with the number of runs done.
    """
    if "epsilon" in config:
        known = BlockConfig.from_dict(config)
        steps = known.steps if steps is None else steps
    else:
        given = {name: value for name, value in config.items() if value is not None}
        for name in ("sampling", "dataset_size", "batch_size"):
            if name in given:
                raise ValueError(
                    f"{name} must not be given with algorithm {config['algorithm']}, whose audit "
                    f"has its own four records; got {given[name]!r}"
                )
        values = {"noise_multiplier": 1.0, **given, "batch_size": 8, "dataset_size": 8}
        values.pop("algorithm")
        known = configured(config["algorithm"], "digits", values)
        steps = 10 if steps is None else steps
    return audit_blocks(
        known.blocks(),
        steps,
        known.delta if delta is None else delta,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )


def described() -> list[tuple[str, str]]:
    """(name, settings) of every algorithm, for ``jaxdp algorithms``."""
    return [(name, ", ".join(setting_names(name))) for name in ALGORITHMS]
