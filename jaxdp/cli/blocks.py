"""``jaxdp train --algorithm sbcd``: options into a run of block coordinate descent."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from jaxdp import data
from jaxdp.cli.failures import explain_failures
from jaxdp.cli.launch import print_summary, public_numbers
from jaxdp.cli.options import Option
from jaxdp.devices import processes
from jaxdp.ledger.seeds import Secret
from jaxdp.papers.block_coordinate.run import block_run, report_of, train
from jaxdp.papers.block_coordinate.settings import BlockConfig, configured
from jaxdp.runs import reporting
from jaxdp.runs.bar import printing_bar
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.report import origin
from jaxdp.runs.report.schema import Report
from jaxdp.runs.run import Result

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
    "sensitive": "a sweep returns nothing un-noised",
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


def train_blocks(
    directory: RunDirectory,
    own: data.Dataset | None,
    options: Mapping[str, Any],
    given: Mapping[str, object],
    stored: Mapping[str, Any] | None,
    secret: Secret | None,
    data_dir: Path | None,
    as_json: bool,
    typed: Mapping[str, Option] | None,
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
        data_dir: where prepared data sets are.
        as_json: the result is one JSON object.
        typed: the options of a new run, for the report; None where it is resumed.
        set_aside_unreadable: as for ``jaxdp.Run``.
    """
    processes.require_single_process("a run of block coordinate descent")
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
    with explain_failures(directory):
        with _progress(config) as progress:
            run = block_run(config, directory, dataset, secret, progress, set_aside_unreadable)
            result = train(run, config)
        asked = None if typed is None else origin.command(typed)
        report = report_of(config, dataset, result, directory.ledger, date, asked)
        reporting.write(report, directory)
    _print_result(report, directory, result, as_json)


@contextlib.contextmanager
def _progress(config: BlockConfig) -> Iterator[Any]:
    if config.is_hidden:
        epochs = config.chosen.epochs
        click.echo(
            f"{config.algorithm}: {epochs} passes over the data for every block; nothing is told "
            "before the end, for the states between are hidden",
            err=True,
        )
    with printing_bar(f"{config.algorithm} on {config.dataset}", config.steps) as progress:
        yield progress


def _print_result(report: Report, directory: RunDirectory, result: Result, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(public_numbers(report, directory), allow_nan=False))
        return
    print_summary(report, directory)
    click.echo(f"{result.seconds:.1f} s (said here only)")
