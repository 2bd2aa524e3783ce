"""The work of `jaxdp train`: a run, or an estimate of its cost."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jaxdp.cli.options import Option
from jaxdp.runs.bar import printing_bar

if TYPE_CHECKING:
    import jax

    from jaxdp.data import Dataset
    from jaxdp.ledger.seeds import Secret
    from jaxdp.runs.assemble import RunResult
    from jaxdp.runs.config import RunConfig
    from jaxdp.runs.directory import RunDirectory
    from jaxdp.runs.report.schema import Report


def launch(
    config: "RunConfig",
    directory: "RunDirectory",
    dataset: "Dataset",
    secret: "Secret | None",
    given: Mapping[str, Option] | None,
    as_json: bool,
    mesh: "jax.sharding.Mesh | None" = None,
    set_aside_unreadable: bool = False,
) -> None:
    """Trains a run, writes its report and prints a summary.

    Args:
        config: resolved.
        directory: of the run.
        dataset: the data.
        secret: of a new run; None resumes the one in the directory.
        given: the options of a new run, for the report; None where it is resumed.
        as_json: the result is one JSON object.
        mesh: whose devices share the records of every step; None for one device.
        set_aside_unreadable: as for ``jaxdp.Run``, where it is resumed.
    """
    from jaxdp import runs
    from jaxdp.devices import processes
    from jaxdp.runs import reporting

    date = reporting.today()
    with printing_bar(f"{config.algorithm} on {config.dataset}", config.steps) as progress:
        if secret is None:
            result = runs.resume(
                config,
                directory,
                dataset,
                progress,
                mesh,
                set_aside_unreadable=set_aside_unreadable,
            )
        else:
            result = runs.start(config, directory, dataset, secret, progress, mesh)
    if processes.index():  # process 0 prints the summary
        return
    report = _report(result, directory, dataset, date, given)
    if result.steps_run or not reporting.is_written(directory, result.history[-1]["step"]):
        reporting.write(report, directory)
    if as_json:
        click.echo(json.dumps(public_numbers(report, directory), allow_nan=False))
        return
    print_summary(report, directory)
    click.echo(
        f"{result.seconds:.1f} s for {result.steps_run:,} steps (said here only: time depends on "
        "the private data)"
    )


def dry(config: "RunConfig", as_json: bool) -> None:
    """Prints the epsilon and the time of a run; reads no data and charges nothing."""
    from jaxdp import accounting as acc
    from jaxdp.runs.assemble import rehearse
    from jaxdp.runs.report.words import show_epsilon

    assert config.steps is not None
    relation = acc.Relation(config.relation)
    total = config.total(config.steps)
    supported = acc.supports(total, relation)
    epsilon = acc.epsilon(total, config.delta, relation).upper if supported else float("inf")
    times = rehearse(config)
    answer = {
        "dry_run": True,
        "epsilon": _finite(epsilon),
        "delta": config.delta,
        "relation": config.relation,
        "noise_multiplier": config.noise_multiplier,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "seconds_to_compile": times.compile,
        "seconds_a_step": times.step,
        "seconds": times.compile + config.steps * times.step,
        "grid": times.grid,
    }
    if as_json:
        click.echo(json.dumps(answer, allow_nan=False))
        return
    click.echo(
        f"epsilon {show_epsilon(epsilon)} at delta {config.delta:g} ({config.relation}): "
        f"{config.steps:,} steps at noise multiplier {config.noise_multiplier:.5g}"
    )
    if times.grid:
        click.echo(f"noise: {times.grid}")
    click.echo(
        f"about {answer['seconds']:.0f} s here: {times.compile:.1f} s to compile, "
        f"{1_000 * times.step:.1f} ms a step on random data, without loading and evaluations"
    )
    click.echo("dry run: no record was used, nothing was charged or written")


def _report(
    result: "RunResult",
    directory: "RunDirectory",
    dataset: "Dataset",
    date: str,
    given: Mapping[str, Option] | None,
) -> "Report":
    from jaxdp.runs import described
    from jaxdp.runs.assemble import test_split
    from jaxdp.runs.report import origin

    return described.report(
        result,
        test_labels=test_split(result.config, dataset)[1][1],
        ledger=directory.ledger,
        date=date,
        command=None if given is None else origin.command(given),
    )


def public_numbers(report: "Report", directory: "RunDirectory") -> dict[str, Any]:
    """The result without its curves; no time, which depends on the private data."""
    row = report.to_dict()
    names = (
        "epsilon",
        "delta",
        "relation",
        "sampling",
        "sampling_prob",
        "noise_multiplier",
        "releases",
    )
    return {
        "out": str(directory.path),
        "dataset": report.dataset,
        "algorithm": report.algorithm,
        "steps": report.history[-1].step,
        "test_accuracy": report.value,
        **{name: row["guarantee"][name] for name in names},
        "claimed_epsilon": row["claim"] and row["claim"]["epsilon"],
        "label": report.label,
    }


def _finite(value: float) -> float | str:
    return value if value < float("inf") else "inf"


def print_summary(report: "Report", directory: "RunDirectory") -> None:
    """Prints what was proven, and where the report is."""
    from jaxdp.runs.report.words import show_delta, show_epsilon

    guarantee, accuracy = report.guarantee, report.value
    click.echo(
        ("no test records   " if accuracy is None else f"test accuracy {accuracy:.2%}   ")
        + "proven epsilon "
        f"{show_epsilon(guarantee.epsilon)} at delta {show_delta(guarantee.delta)} "
        f"({guarantee.relation}, {guarantee.sampling} sampling, "
        f"{guarantee.releases:,} releases)"
    )
    if claim := report.claim:
        click.echo(f"claimed by the paper: epsilon {show_epsilon(claim.epsilon)}, {claim.verdict}")
    if counts := report.counts:
        click.echo(
            f"{counts.proposals:,} candidates charged, {counts.accepted:,} accepted, "
            f"{counts.forced:,} of them by force"
        )
    if report.judged_by:
        click.echo(report.judged_by)
    if report.label:
        click.echo(report.label)
    for warning in report.warnings:
        click.echo(f"warning: {warning.text}")
    click.echo(f"report: {directory.path / 'report.html'}")
    click.echo(f"secret, not to be published: {directory.secret}")
