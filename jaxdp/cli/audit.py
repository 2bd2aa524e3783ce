"""``jaxdp audit``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxdp.cli.options import BLOCK_ALGORITHMS, Filled, Option, papers

if TYPE_CHECKING:
    from jaxdp.runs.report.schema import AuditRow

_MOST_STEPS = 50
_DEFAULTS: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "l2_clip_norm": 1.0,
    "learning_rate": 0.1,
    "sampling": "poisson",
    "dataset_size": 4,
}


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
    tiny: bool,
    confidence: float,
    seed: int | None,
    out: Path | None,
    as_json: bool,
    **numbers: Option,
) -> None:
    """Attack an algorithm, a finished RUN or its mechanism: a lower bound on epsilon.

    A run that was trained with --canaries is itself audited, by what it released. Otherwise a tiny
    network is trained thousands of times with and without a canary, by the same clipping, noise,
    sampling rate and optimizer. The audited epsilon is a lower bound, valid at the given
    confidence; the proven one is an upper bound. Example:

    \b
      jaxdp audit --algorithm dp-sgd --steps 10 --noise-multiplier 1
      jaxdp audit runs/x
    """
    # A run has its own algorithm and numbers. Refused before JAX is imported, which takes seconds.
    if run is not None:
        own = {"algorithm": algorithm, **numbers, "set": settings or None}
        given = [name for name, value in own.items() if value is not None]
        if given:
            raise ValueError(
                f"{given[0]} must not be given with a run, whose own is used; got {given}"
            )
        if not run.is_dir():
            raise ValueError(f"run must be the folder of a finished run, got {run}")
    import jax

    from jaxdp.audit.algorithms import audit_algorithm
    from jaxdp.cli.train import parse_settings
    from jaxdp.optimizers import registry
    from jaxdp.papers.block_coordinate.audit import audit_configured
    from jaxdp.runs import RunDirectory
    from jaxdp.runs import audit as of_runs
    from jaxdp.runs.bar import counting_bar

    papers()
    kept, directory = None, None
    if run is not None:
        directory, out = RunDirectory(run), out or run
        kept = of_runs.report_of(directory).config or {}
    name = algorithm or "dp-sgd" if kept is None else str(kept.get("algorithm"))

    if name in BLOCK_ALGORITHMS:
        blocks = kept or {"algorithm": name, "settings": parse_settings(settings), **numbers}
        with counting_bar(f"auditing {name}", 2 * runs) as progress:
            found = audit_configured(blocks, steps, delta, runs, confidence, seed, progress)
    elif directory is not None and not tiny and of_runs.config_of(directory).canaries:
        source = click.get_current_context().get_parameter_source
        for option in ("steps", "runs", "seed"):
            if getattr(source(option), "name", "") == "COMMANDLINE":
                raise ValueError(
                    f"{option} must not be given with a run that has canaries, which is audited "
                    "as it is; with --tiny its mechanism is audited on a tiny network"
                )
        found = of_runs.audit_run(directory, delta, confidence)
    else:
        if directory is not None:
            config = of_runs.config_of(directory)
            # The two worlds of a fixed order: a record, and a null record in its place.
            fixed = config.sampling == "fixed_order"
            worlds = "replace_special" if fixed else "add_or_remove_one"
            if config.relation != worlds:
                raise ValueError(f"run must be under {worlds} to be audited, got {config.relation}")
            assert config.steps is not None
            steps = min(config.steps, _MOST_STEPS) if steps is None else steps
            delta = config.delta if delta is None else delta
            built = config.private_algorithm()
        else:
            own_numbers = {name: value for name, value in numbers.items() if value is not None}
            chosen: dict[str, Any] = {**_DEFAULTS, **own_numbers}
            full = chosen["sampling"] == "full_batch"
            chosen.setdefault("batch_size", chosen["dataset_size"] if full else 1)
            built = registry.build(
                name,
                registry.Numbers(**chosen, key=jax.random.key(0)),
                parse_settings(settings),
            )
        kind = registry.ALGORITHMS[name].energy if name in registry.ALGORITHMS else ""
        with counting_bar(f"auditing {name}", 2 * runs) as progress:
            found = audit_algorithm(
                built,
                10 if steps is None else steps,
                1e-5 if delta is None else delta,
                runs=runs,
                confidence=confidence,
                energy=kind,
                seed=seed,
                progress=progress,
            )
    row = of_runs.row_of(name, found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        of_runs.save_audit(out, row, found)
        if directory is not None:
            of_runs.into_report(directory, row)
    _show(row, as_json)


def _show(row: "AuditRow", as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row.to_dict(), allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    from jaxdp.runs.report.audited import count_steps, describe_last
    from jaxdp.runs.report.words import show_audited, show_epsilon

    title = f"Epsilon of {row.algorithm} after {count_steps(row)}, delta {row.delta:g}"
    table = Table(title=title)
    for heading in ("claimed", "proven, at most", f"audited, at least ({row.confidence:.0%})"):
        table.add_column(heading, justify="right")
    claimed = "-" if row.claimed is None else show_epsilon(row.claimed)
    table.add_row(claimed, show_epsilon(row.proven), show_audited(row.audited))
    console = Console()
    console.print(table)
    for bound, why in (
        (row.audited_profile, f", provided that {row.profile_assumes}"),
        (row.audited_family, f", provided that {row.family_assumes}"),
        (row.audited_last, f" from {describe_last(row)}"),
    ):
        if bound is not None:
            console.print(f"At least {show_audited(bound)}{why}.")
    if row.reachable is not None:
        console.print(
            f"Ideal scores of a mechanism that leaks all that is proven: about {row.reachable:.2f}."
        )
    runs = "1 run" if row.runs == 1 else f"{row.runs:,} runs"
    console.print(f"Audited: {row.what}; {runs}; attack: {row.adversary}.")
    if row.noise:
        console.print(row.noise, highlight=False)
    console.print(row.verdict)
