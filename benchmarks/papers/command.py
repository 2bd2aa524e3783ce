"""``jaxdp reproduce``: the papers' tables and figures."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxdp._extras import needed
from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.interrupts import status_of

with needed("jaxdp reproduce", "papers", "click", "rich"):
    import click

    from jaxdp.cli.failures import Stopped
    from jaxdp.cli.options import Filled

ROOT = Path(__file__).parent.parent.parent
# Named here, so that `--help` need not wait for JAX; benchmarks.papers.tables.TARGETS makes them.
_TARGETS = {
    "table1": "SA-DPSGD's Table 1: accuracy at (3, 1e-5) on three data sets.",
    "short": "Table 1's algorithms after five epochs, three runs each.",
    "not_private": "Table 1's networks and PIGDO's without privacy.",
    "accepted": "SA-DPSGD until its accepted steps claim epsilon 3.",
    "table3": "SA-DPSGD's Table 3: the epsilon that an accuracy takes.",
    "pareto": "Accuracy against proven epsilon, three runs a point.",
    "mlp": "AdaDp's and PIGDO's networks at noise 8, 4 and 2.",
    "adadp": "AdaDp's Table I (the epsilon that an accuracy takes) and its ablations.",
    "agd": "AGD of AdaDp's Figure 2, three runs each.",
    "pigdo": "PIGDO's Figure 7, small: its parameters.",
    "parameters": "Sweeps of SA-DPSGD's and AdaDp's parameters.",
    "pums": "Unemployment from census columns: accuracy, calibration, errors by group.",
    "accountants": "All accountants on one run, and the papers' formulas against the truth.",
    "printed": "What the papers print, beside ours.",
    "left": "Rows that were run, rows that are left, and hours each.",
    "claims": "Claimed, proven and audited epsilon of every algorithm.",
}
_RUN_NOTHING = ("left", "printed")


@click.group()
def reproduce() -> None:
    """Make the papers' tables and figures, from a resumable queue of runs.

    \b
    Try:  jaxdp reproduce pareto --data-dir DIR
          jaxdp reproduce table1 --render-only
          jaxdp reproduce list
          jaxdp reproduce run --detach --data-dir DIR mnist-dp-sgd-tanh mnist-sa-dpsgd
          jaxdp reproduce status
          jaxdp reproduce figures
          jaxdp reproduce audit --runs 2000
    """


Command = Callable[..., Any]


def _of_checkout(path: str) -> Path:
    """A path of the checkout, from whatever folder the command is called."""
    found = ROOT / path
    return found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found


def _path_option(name: str, of_checkout: str, about: str) -> Callable[[Command], Command]:
    """An option for a path that is one of the checkout by default."""
    default = functools.partial(_of_checkout, of_checkout)
    return click.option(name, type=Filled(), default=default, show_default=of_checkout, help=about)


_results = _path_option(
    "--results", "benchmarks/results/papers.json", "JSON file of the finished rows."
)
_results_dir = _path_option("--results-dir", "benchmarks/results", "Folder of the result rows.")
_out = _path_option("--out", "runs/reproduce", "Folder of the runs; holds their secrets.")
_data_dir = click.option("--data-dir", type=Filled(), help="Where prepared data sets are.")
_detached = click.option("--detach", is_flag=True, help="Go on in the background; see `status`.")
_runs = click.option("--runs", type=click.IntRange(min=1), help="How often a row is run.")


@reproduce.command("list")
def list_rows() -> None:
    """List the rows, in the order of the queue, with estimated times on two cores.

    "× 5": so many runs are wanted.
    """
    from benchmarks.papers import cost, order

    for row in order.ordered().values():
        often = f" × {row.runs}" if row.runs > 1 else ""
        click.echo(f"{row.name:56}{cost.shown(row):>8}{often:4}  {row.paper}".rstrip())


@reproduce.command()
@click.argument("rows", nargs=-1)
@_data_dir
@_detached
@_runs
@click.option("--again", is_flag=True, help="Take the results of ROWS out first.")
@_results
@_out
def run(
    rows: tuple[str, ...],
    data_dir: Path | None,
    detach: bool,
    runs: int | None,
    again: bool,
    results: Path,
    out: Path,
) -> None:
    """Run ROWS that have no result yet, each from its last checkpoint.

    If none is named, all; those of three hours and more only where there is a GPU.
    """
    from benchmarks.papers import order, queue

    for name in rows:
        queue.row_named(name)
    queue.finished(results)  # damage is found now, not after hours
    if again:
        with _stored():
            queue.forget(rows, out, results)
    if detach:
        _detach(
            ["run", *rows, "--results", str(results.absolute()), "--runs", str(runs or 1)],
            data_dir,
            out,
        )
        return
    _work(rows or _runnable(tuple(order.ordered())), results, data_dir, out, runs or 1)


@reproduce.command()
@_results
@_out
def status(results: Path, out: Path) -> None:
    """Show the finished rows and those that were begun."""
    from benchmarks.papers import queue
    from benchmarks.papers.tables.rows import NEEDED
    from jaxdp.runs.report.words import show_epsilon

    finished = queue.finished(results, NEEDED)
    if not finished:
        click.echo(f"no row is finished: there is none in {results}", err=True)
    for name in queue.ROWS:
        for (of, number), row in finished.items():
            if of != name:
                continue
            rate = row["acceptance_rate"]
            click.echo(
                f"{queue.folder_name(name, number):48}{row['test_accuracy']:.2%}  proven epsilon "
                f"{show_epsilon(row['proven_epsilon'])}"
                + (
                    f"  claimed {show_epsilon(row['claimed_epsilon'])}"
                    if row["claimed_epsilon"] is not None
                    else ""
                )
                + (f"  accepted {rate:.1%}" if rate is not None else "")
                + f"  {row['seconds']:.0f} s, {row['machine']}"
            )
        numbers = [number for (of, number) in finished if of == name]
        further = queue.folder_name(name, max(numbers, default=0) + 1)
        if (out / further).exists():
            click.echo(f"{further:48}begun, not finished")


@reproduce.command()
@click.argument(
    "results",
    metavar="[FILE]",
    type=Filled(),
    default=functools.partial(_of_checkout, "benchmarks/results/papers.json"),
)
@click.option("--runs", type=int, default=2_000, show_default=True, help="Runs in each world.")
@click.option("--confidence", type=float, default=0.95, show_default=True)
@click.option("--seed", type=int, help="Of the runs, to repeat them.")
def audit(results: Path, runs: int, confidence: float, seed: int | None) -> None:
    """Audit the algorithm of every finished row of FILE that has no audit yet, on a tiny network.

    FILE is benchmarks/results/papers.json if none is given. Each row is written as soon as it is
    done.
    """
    from benchmarks.papers.column import audit_rows
    from jaxdp.runs.bar import counting_bar

    with _stored(results):
        done = audit_rows(
            results,
            runs=runs,
            confidence=confidence,
            seed=seed,
            progress=lambda name, count: counting_bar(f"auditing {name}", count),
        )
    for filled in done:
        least = f"at least {filled['audited_epsilon']:.3f}"
        click.echo(f"{filled['name']:44}{least}: {filled['audited']}")
    click.echo(f"{len(done)} rows audited, written to {results}")


@reproduce.command()
@_path_option("--to", "docs/images", "Folder for the plots.")
@_results_dir
@_data_dir
def figures(to: Path, results_dir: Path, data_dir: Path | None) -> None:
    """Draw the papers' figures: Beale trajectories, Lemma 1's cosines, AdaDp's noise and others.

    AdaDp's noise and gradients are drawn from stored figures; with --data-dir they are made where
    they are missing: 1,000 steps on MNIST each, a few minutes.
    """
    from benchmarks.papers import adadp_gradients, adadp_noise
    from benchmarks.papers.figures import save_all

    for made, what in (
        (adadp_noise, "AdaDp's noise is"),
        (adadp_gradients, "AdaDp's gradients are"),
    ):
        if (stored := results_dir / made.FILE).exists():
            continue
        if data_dir is None:
            click.echo(f"{what} left out without --data-dir: no {stored}", err=True)
        else:
            made.work(stored, data_dir)
    for path, sentence in save_all(to, results_dir):
        click.echo(f"{path}: {sentence}")


def _target(name: str, about: str) -> click.Command:
    """The command of one table or figure."""
    does = "Runs nothing" if name in _RUN_NOTHING else "Runs what is missing"

    @click.command(name, help=f"{about} {does}; writes {name}.md and its plots.")
    @click.option("--render-only", is_flag=True, help="Run nothing; render the rows there are.")
    @_runs
    @_data_dir
    @_detached
    @_results_dir
    @_out
    @_path_option("--to", "docs/results", "Folder for the page and its plots.")
    def command(
        render_only: bool,
        runs: int | None,
        data_dir: Path | None,
        detach: bool,
        results_dir: Path,
        out: Path,
        to: Path,
    ) -> None:
        if detach:
            arguments = [name, "--results-dir", str(results_dir.absolute())]
            arguments += ["--to", str(to.absolute())]
            arguments += ["--runs", str(runs)] if runs else []
            _detach(arguments + ["--render-only"] * render_only, data_dir, out)
            return
        from benchmarks.papers import tables

        if render_only and not results_dir.is_dir():
            raise ValueError(
                f"results-dir must be a folder with result rows, got {results_dir}, where there is "
                "none: a page without a row would be written"
            )
        found = tables.Results(results_dir)
        if not render_only and name not in _RUN_NOTHING:
            _make(name, results_dir, data_dir, out, runs)
            found = tables.Results(results_dir)
        with _stored():
            for path in tables.render(name, found, to):
                click.echo(str(path))

    return command


for _name, _about in _TARGETS.items():
    reproduce.add_command(_target(_name, _about))


def _make(name: str, results_dir: Path, data_dir: Path | None, out: Path, runs: int | None) -> None:
    """Runs the rows of a target that are missing."""
    from benchmarks.papers import agd, census, not_private, tables
    from benchmarks.papers.tables import accountants
    from jaxdp.runs.bar import counting_bar

    target = tables.TARGETS[name]
    results, times = results_dir / target.file, runs or target.runs
    if name == "pums":
        with _stored(results), counting_bar("PUMS", times * len(census.ROWS)) as shown:
            census.work(results, out / "pums", data_dir, times, shown)
    elif name == "not_private":
        with _stored(results), counting_bar("not private", times * len(not_private.ROWS)) as shown:
            not_private.work(results, out / "not_private", data_dir, times, shown)
    elif name == "agd":
        with _stored(results), counting_bar("AGD", times * len(agd.ROWS)) as shown:
            agd.work(results, out / "agd", data_dir, times, shown)
    elif name == "accountants":
        accountants.work(results, out / "accountants", times)
    else:
        _work(_runnable(target.rows), results, data_dir, out, times)


def _runnable(names: tuple[str, ...]) -> tuple[str, ...]:
    """Without the rows that take hours, where there is no GPU; says which those are."""
    from benchmarks.papers import cost, queue

    if queue.has_gpu():
        return names
    waiting = [name for name in names if cost.long(queue.ROWS[name])]
    if waiting:
        click.echo(
            f"{len(waiting)} rows take hours on a CPU and are left out (`jaxdp reproduce run "
            f"NAME` runs them all the same): {', '.join(waiting)}",
            err=True,
        )
    return tuple(name for name in names if name not in waiting)


def _work(
    names: tuple[str, ...], results: Path, data_dir: Path | None, out: Path, runs: int
) -> None:
    from benchmarks.papers import queue
    from jaxdp.runs import described
    from jaxdp.runs.bar import printing_bar

    with _stored(results):
        queue.work(
            names,
            out,
            results,
            data_dir,
            described.report,
            lambda row: printing_bar(row.name, row.config().steps, f"{row.name}: "),
            runs,
        )


@contextlib.contextmanager
def _stored(results: Path | None = None) -> Iterator[None]:
    """Turns interrupts of a queue, and what cannot be written or read, into one line."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = f": rows that are done are in {results}; the same command goes on" if results else ""
        raise Stopped(f"interrupted{kept}", status_of(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename} cannot be written or read: " if error.filename else ""
        raise StorageError(f"{where}{error.strerror or error}") from error


def _detach(arguments: list[str], data_dir: Path | None, out: Path) -> None:
    """The same command in a process of its own."""
    command = [sys.executable, "-m", "jaxdp", "reproduce", *arguments]
    command += ["--out", str(out.absolute())]
    command += ["--data-dir", str(data_dir.absolute())] if data_dir else []
    with _stored():
        out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(os.environ),
            **_detached_options(),
        )
    click.echo(f"process {process.pid}, log {log}")


def _detached_options() -> dict[str, Any]:
    """Options of a process that goes on when the terminal that began it closes."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}
