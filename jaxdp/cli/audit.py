"""``jaxdp audit``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxdp.cli.options import BLOCK_ALGORITHMS, Filled, Option, papers

if TYPE_CHECKING:
    from jaxdp.optimizers import Algorithm
    from jaxdp.report.schema import AuditRow

_MOST_STEPS = 50


@click.command()
@click.argument("run", required=False, type=Filled())
@click.option("--algorithm", help="An algorithm of `jaxdp algorithms` [default: dp-sgd].")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A further setting of the algorithm; may be repeated.",
)
@click.option("--steps", type=int, help="Steps of every run [default: 10; the run's, at most 50].")
@click.option("--noise-multiplier", type=float, help="[default: 1]")
@click.option("--batch-size", type=int, help="Expected batch size [default: 1].")
@click.option("--dataset-size", type=int, help="Number of records [default: 4].")
@click.option("--l2-clip-norm", type=float, help="[default: 1]")
@click.option("--learning-rate", type=float, help="[default: 0.1]")
@click.option(
    "--sampling",
    type=click.Choice(["poisson", "full_batch", "allocation"]),
    help="Of which two worlds differ in one record alone [default: poisson].",
)
@click.option("--delta", type=float, help="[default: the run's, or 1e-5]")
@click.option("--runs", type=int, default=10_000, show_default=True, help="Runs in each world.")
@click.option(
    "--results",
    type=Filled(),
    help="Fill the audited column of this file of `jaxdp reproduce` instead.",
)
@click.option(
    "--tiny",
    is_flag=True,
    help="Of a RUN with canaries: audit its mechanism on a tiny network instead of the run itself.",
)
@click.option("--confidence", type=float, default=0.95, show_default=True)
@click.option("--seed", type=int, help="Of the runs, to repeat them.")
@click.option(
    "--out",
    type=Filled(file_okay=False),
    help="Folder for audit.json and roc.png [default: the run's].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def audit(
    run: Path | None,
    algorithm: str | None,
    settings: tuple[str, ...],
    steps: int | None,
    delta: float | None,
    runs: int,
    results: Path | None,
    tiny: bool,
    confidence: float,
    seed: int | None,
    out: Path | None,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Attack an algorithm, a finished RUN or its mechanism: a lower bound on epsilon.

    A run that was trained with --canaries is itself audited, by what it released. Otherwise a tiny
    network is trained thousands of times with and without a canary, by the same clipping, noise,
    sampling rate and optimizer. The audited epsilon is a lower bound, valid at the given
    confidence; the proven one is an upper bound. Example:

    \b
      jaxdp audit --algorithm dp-sgd --steps 10 --noise-multiplier 1
      jaxdp audit runs/x
      jaxdp audit --results benchmarks/results/papers.json --runs 2000
    """
    from jaxdp.runs import RunDirectory
    from jaxdp.runs.audit import audit_run, into_report, row_of, save_audit

    papers()
    if results is not None:
        named = {"run": run, "algorithm": algorithm, "steps": steps, "delta": delta, "out": out}
        _fill(results, {**named, **numbers}, runs, confidence, seed)
        return
    if run is not None:
        _refuse_with_run({"algorithm": algorithm, **numbers}, settings)
        out = out or run
    if (config := _of_blocks(run, algorithm)) is not None:
        name, found = _blocks_audited(
            config, steps, numbers, settings, delta, runs, confidence, seed
        )
    elif run is not None and not tiny and _config(run).canaries:
        _refuse_with_canaries()
        name = _config(run).algorithm
        found = audit_run(RunDirectory(run), delta, confidence)
    else:
        if run is not None:
            chosen = _of_run(run, steps, delta)
        else:
            name = algorithm or "dp-sgd"
            built = _built(name, numbers, settings)
            chosen = name, built, 10 if steps is None else steps, 1e-5 if delta is None else delta
        name, found = chosen[0], _by_many_runs(*chosen, runs, confidence, seed)
    row = row_of(name, found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        save_audit(out, row, found)
        if run is not None:
            into_report(RunDirectory(run), row)
    _show(row, as_json)


def _fill(
    results: Path, others: Mapping[str, Option], runs: int, confidence: float, seed: int | None
) -> None:
    from jaxdp.cli.progress import counting_bar
    from jaxdp.papers.column import audit_rows

    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} must not be given with --results, got {given}")
    done = audit_rows(
        results,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=lambda name, count: counting_bar(f"auditing {name}", count),
    )
    for row in done:
        click.echo(f"{row['name']:44}at least {row['audited_epsilon']:.3f}: {row['audited']}")
    click.echo(f"{len(done)} rows audited, written to {results}")


def _by_many_runs(
    name: str,
    built: "Algorithm",
    steps: int,
    delta: float,
    runs: int,
    confidence: float,
    seed: int | None,
) -> Any:
    from jaxdp.audit.algorithms import audit_algorithm
    from jaxdp.cli.progress import counting_bar
    from jaxdp.optimizers import registry

    kind = registry.ALGORITHMS[name].energy if name in registry.ALGORITHMS else ""
    with counting_bar(f"auditing {name}", 2 * runs) as progress:
        return audit_algorithm(
            built,
            steps,
            delta,
            runs=runs,
            confidence=confidence,
            energy=kind,
            seed=seed,
            progress=progress,
        )


def _built(name: str, numbers: Mapping[str, Option], settings: tuple[str, ...]) -> Any:
    import jax

    from jaxdp.cli.train import parse_settings
    from jaxdp.optimizers import registry

    defaults = {
        "noise_multiplier": 1.0,
        "l2_clip_norm": 1.0,
        "learning_rate": 0.1,
        "sampling": "poisson",
        "dataset_size": 4,
    }
    given: dict[str, Any] = {**defaults, **{k: v for k, v in numbers.items() if v is not None}}
    full = given["sampling"] == "full_batch"
    given.setdefault("batch_size", given["dataset_size"] if full else 1)
    return registry.build(
        name, registry.Numbers(**given, key=jax.random.key(0)), parse_settings(settings)
    )


def _of_blocks(run: Path | None, algorithm: str | None) -> Any:
    """The configuration of a run of block coordinate descent, or its algorithm's name, or None."""
    from jaxdp.runs import RunDirectory
    from jaxdp.runs.audit import report_of

    if run is None:
        return algorithm if algorithm in BLOCK_ALGORITHMS else None
    config = report_of(RunDirectory(run)).config or {}
    return config if config.get("algorithm") in BLOCK_ALGORITHMS else None


def _blocks_audited(
    config: str | Mapping[str, object],
    steps: int | None,
    numbers: Mapping[str, Option],
    settings: tuple[str, ...],
    delta: float | None,
    runs: int,
    confidence: float,
    seed: int | None,
) -> tuple[str, Any]:
    from jaxdp.cli.progress import counting_bar
    from jaxdp.cli.train import parse_settings
    from jaxdp.papers.block_coordinate.command import audited

    if isinstance(config, str):
        config = {"algorithm": config, "settings": parse_settings(settings), **numbers}
    with counting_bar(f"auditing {config['algorithm']}", 2 * runs) as progress:
        found = audited(config, steps, delta, runs, confidence, seed, progress)
    return str(config["algorithm"]), found


def _config(run: Path) -> Any:
    from jaxdp.runs import RunDirectory
    from jaxdp.runs.audit import config_of

    return config_of(RunDirectory(run))


def _of_run(run: Path, steps: int | None, delta: float | None) -> tuple[str, Any, int, float]:
    config = _config(run)
    # The two worlds of a fixed order: a record, and a null record in its place.
    worlds = "replace_special" if config.sampling == "fixed_order" else "add_or_remove_one"
    if config.relation != worlds:
        raise ValueError(f"run must be under {worlds} to be audited, got {config.relation}")
    if steps is None:
        assert config.steps is not None
        steps = min(config.steps, _MOST_STEPS)
    return (
        config.algorithm,
        config.private_algorithm(),
        steps,
        config.delta if delta is None else delta,
    )


def _refuse_with_run(given: Mapping[str, Option], settings: tuple[str, ...]) -> None:
    named = [name for name, value in given.items() if value is not None]
    named += ["set"] if settings else []
    if named:
        raise ValueError(f"{named[0]} must not be given with a run, whose own is used; got {named}")


def _refuse_with_canaries() -> None:
    source = click.get_current_context().get_parameter_source
    for name in ("steps", "runs", "seed"):
        if getattr(source(name), "name", "") == "COMMANDLINE":
            raise ValueError(
                f"{name} must not be given with a run that has canaries, which is audited as it "
                "is; with --tiny its mechanism is audited on a tiny network"
            )


def _show(row: "AuditRow", as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row.to_dict(), allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    from jaxdp.report.audited import last_of, steps_of
    from jaxdp.report.words import show_audited, show_epsilon

    title = f"Epsilon of {row.algorithm} after {steps_of(row)}, delta {row.delta:g}"
    table = Table(title=title)
    for heading in ("claimed", "proven, at most", f"audited, at least ({row.confidence:.0%})"):
        table.add_column(heading, justify="right")
    claimed = "-" if row.claimed is None else show_epsilon(row.claimed)
    table.add_row(claimed, show_epsilon(row.proven), show_audited(row.audited))
    console = Console()
    console.print(table)
    if row.audited_profile is not None:
        value = show_audited(row.audited_profile)
        console.print(f"At least {value}, provided that {row.profile_assumes}.")
    if row.audited_family is not None:
        value = show_audited(row.audited_family)
        console.print(f"At least {value}, provided that {row.family_assumes}.")
    if row.audited_last is not None:
        value = show_audited(row.audited_last)
        console.print(f"At least {value} from {last_of(row)}.")
    if row.reachable is not None:
        console.print(
            f"Ideal scores of a mechanism that leaks all that is proven: about {row.reachable:.2f}."
        )
    runs = "1 run" if row.runs == 1 else f"{row.runs:,} runs"
    console.print(f"Audited: {row.what}; {runs}; attack: {row.adversary}.")
    if row.noise:
        console.print(row.noise, highlight=False)
    console.print(row.verdict)
