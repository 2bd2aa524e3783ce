"""``jaxdp reproduce``: the papers' tables and figures."""

import os
import subprocess
import sys
from pathlib import Path

import click

_RESULTS = Path("benchmarks/results/papers.json")
_FOLDER = Path("runs/reproduce")


@click.group()
def reproduce() -> None:
    """Run the papers' experiments as a resumable queue, and draw their figures.

    \b
    Try:  jaxdp reproduce list
          jaxdp reproduce run --detach --data-dir DIR mnist-dp-sgd-tanh mnist-sa-dpsgd
          jaxdp reproduce status
          jaxdp reproduce figures
    """


_results = click.option(
    "--results", type=click.Path(path_type=Path), default=_RESULTS, show_default=True,
    help="JSON file of the finished rows.",
)
_out = click.option(
    "--out", type=click.Path(path_type=Path), default=_FOLDER, show_default=True,
    help="Folder of the runs; holds their secrets.",
)


@reproduce.command("list")
def list_rows() -> None:
    """List the rows, in the order of the queue."""
    from jaxdp.runs import queue

    for row in queue.ROWS.values():
        click.echo(f"{row.name:44}{row.paper}")


@reproduce.command()
@click.argument("rows", nargs=-1)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where prepared data sets lie.")
@click.option("--detach", is_flag=True, help="Go on in the background; see `status`.")
@_results
@_out
def run(
    rows: tuple[str, ...], data_dir: Path | None, detach: bool, results: Path, out: Path
) -> None:
    """Run ROWS (all, if none is named) that have no result yet, each from its last checkpoint."""
    from jaxdp.cli.progress import progress_bar
    from jaxdp.report import build
    from jaxdp.runs import queue

    names = rows or tuple(queue.ROWS)
    for name in names:
        queue.row_named(name)
    if detach:
        _detach(rows, data_dir, results, out)
        return
    queue.work(
        names, out, results, data_dir, build, lambda row: progress_bar(row.config(), row.name)
    )


@reproduce.command()
@_results
@_out
def status(results: Path, out: Path) -> None:
    """Show the finished rows and those under way."""
    from jaxdp.report.words import show_epsilon
    from jaxdp.runs import queue

    finished = queue.finished(results)
    for name in queue.ROWS:
        if name in finished:
            row = finished[name]
            rate = row["acceptance_rate"]
            click.echo(
                f"{name:44}{row['test_accuracy']:.2%}  proven epsilon "
                f"{show_epsilon(row['proven_epsilon'])}"
                + (f"  claimed {show_epsilon(row['claimed_epsilon'])}"
                   if row["claimed_epsilon"] is not None else "")
                + (f"  accepted {rate:.1%}" if rate is not None else "")
                + f"  {row['seconds']:.0f} s"
            )
        elif (out / name).exists():
            click.echo(f"{name:44}under way")


@reproduce.command()
@click.option(
    "--to", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True,
    help="Folder for the plots.",
)
def figures(to: Path) -> None:
    """Draw the papers' figures: Beale trajectories, Lemma 1's cosines, annealing in a plane."""
    from jaxdp.report.figures import save_all

    for path, sentence in save_all(to):
        click.echo(f"{path}: {sentence}")


def _detach(rows: tuple[str, ...], data_dir: Path | None, results: Path, out: Path) -> None:
    command = [sys.executable, "-m", "jaxdp", "reproduce", "run", *rows]
    command += ["--results", str(results.absolute()), "--out", str(out.absolute())]
    command += ["--data-dir", str(data_dir.absolute())] if data_dir else []
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env=dict(os.environ),
        )
    click.echo(f"process {process.pid}, log {log}")
