"""Carries out what `jaxdp train` was asked for: the run itself, or what it would cost."""

import json
from pathlib import Path
from typing import Any

import click

from jaxdp.cli.progress import progress_bar


def launch(
    config: Any, directory: Any, data_dir: Path | None, secret: Any, given: dict[str, Any] | None,
    as_json: bool,
) -> None:
    """Trains and reports.

    Args:
        config: resolved.
        directory: of the run.
        data_dir: where prepared data sets lie, or None.
        secret: of a new run; None resumes the one in the directory.
        given: the options of a new run, for the report; None where it is resumed.
        as_json: the result is one JSON object.
    """
    from jaxdp import data, runs
    from jaxdp.report import build, origin
    from jaxdp.runs.assemble import test_split

    date = origin.today()  # before the first step: how long steps take is private
    dataset = data.load(config.dataset, data_dir)
    with progress_bar(config) as progress:
        if secret is None:
            result = runs.resume(config, directory, dataset, progress)
        else:
            result = runs.start(config, directory, dataset, secret, progress)
    report = build(
        result, test_labels=test_split(config, dataset)[1][1], ledger=directory.ledger, date=date,
        command=None if given is None else origin.command(given),
    )
    _write(report, directory)
    if as_json:
        click.echo(json.dumps(_public(report, directory), allow_nan=False))
        return
    _print_summary(report, directory)
    click.echo(
        f"{result.seconds:.1f} s for {result.steps_run:,} steps (said here only: time depends on "
        "the private data)"
    )


def dry(config: Any, as_json: bool) -> None:
    """Says what a run would cost in privacy and in time; reads no data and charges nothing."""
    from jaxdp import accounting as acc
    from jaxdp.report.words import show_epsilon
    from jaxdp.runs.rehearsal import rehearse

    relation = acc.Relation(config.relation)
    total = config.total(config.steps)
    supported = acc.supports(total, relation)
    epsilon = acc.epsilon(total, config.delta, relation).upper if supported else float("inf")
    times = rehearse(config)
    answer = {
        "dry_run": True, "epsilon": _finite(epsilon), "delta": config.delta,
        "relation": config.relation, "noise_multiplier": config.noise_multiplier,
        "steps": config.steps, "batch_size": config.batch_size,
        "seconds_to_compile": times.compile, "seconds_a_step": times.step,
        "seconds": times.compile + config.steps * times.step,
    }
    if as_json:
        click.echo(json.dumps(answer, allow_nan=False))
        return
    click.echo(
        f"epsilon {show_epsilon(epsilon)} at delta {config.delta:g} ({config.relation}): "
        f"{config.steps:,} steps at noise multiplier {config.noise_multiplier:.5g}"
    )
    click.echo(
        f"about {answer['seconds']:.0f} s here: {times.compile:.1f} s to compile, "
        f"{1_000 * times.step:.1f} ms a step on random data, without loading and evaluations"
    )
    click.echo("dry run: no data were read, nothing was charged or written")


def _write(report: dict[str, Any], directory: Any) -> None:
    from jaxdp._durable import write_atomically
    from jaxdp.report import save_plots, to_html, to_markdown

    write_atomically(directory.path / "report.json", json.dumps(report, indent=1))
    write_atomically(directory.path / "report.md", to_markdown(report))
    save_plots(report, directory.path)
    write_atomically(directory.path / "report.html", to_html(report, directory.path))


def _public(report: dict[str, Any], directory: Any) -> dict[str, Any]:
    """The result without its curves; no time, which depends on the private data."""
    guarantee = report["guarantee"]
    names = (
        "epsilon", "delta", "relation", "sampling", "sampling_prob", "noise_multiplier", "releases"
    )
    claim = report["claim"]
    return {
        "out": str(directory.path), "dataset": report["dataset"], "method": report["method"],
        "steps": report["history"][-1]["step"], "test_accuracy": report["test_accuracy"],
        **{name: guarantee[name] for name in names},
        "claimed_epsilon": claim["epsilon"] if claim else None,
        "label": report["label"],
    }


def _finite(value: float) -> float | str:
    return value if value < float("inf") else "inf"


def _print_summary(report: dict[str, Any], directory: Any) -> None:
    from jaxdp.report.words import show_delta, show_epsilon

    guarantee = report["guarantee"]
    click.echo(
        f"test accuracy {report['test_accuracy']:.2%}   proven epsilon "
        f"{show_epsilon(guarantee['epsilon'])} at delta {show_delta(guarantee['delta'])} "
        f"({guarantee['relation']}, {guarantee['sampling']} sampling, "
        f"{guarantee['releases']:,} releases)"
    )
    if report["claim"]:
        claim = report["claim"]
        click.echo(f"claimed by the paper: epsilon {show_epsilon(claim['epsilon'])}, "
                   f"{claim['verdict']}")
    if report["counts"]:
        counts = report["counts"]
        click.echo(f"{counts['proposals']:,} candidates charged, {counts['accepted']:,} accepted, "
                   f"{counts['forced']:,} of them by force")
    if report["judged_by"]:
        click.echo(report["judged_by"])
    if report["label"]:
        click.echo(report["label"])
    for warning in report["warnings"]:
        click.echo(f"warning: {warning['text']}")
    click.echo(f"report: {directory.path / 'report.html'}")
    click.echo(f"secret, not to be published: {directory.secret}")
