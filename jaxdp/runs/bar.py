"""Progress bars, in terminals and notebooks; elsewhere silent, or a line for a row."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxdp.runs.directory import Row


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[tuple[Callable[..., None], Console]]:
    """Yields (update, console): ``update(completed=, latest=)`` moves the bar.

    Args:
        title: stands beside the bar.
        total: how many steps there are.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    silent = not (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=silent) as bar:
        task = bar.add_task(title, total=total, latest="")
        yield lambda **changes: bar.update(task, **changes), console


@contextlib.contextmanager
def counting_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function of how many of ``total`` are done."""
    with progress_bar(title, total) as (update, _):
        yield lambda done: update(completed=done)


@contextlib.contextmanager
def row_bar(title: str, total: int) -> Iterator[Callable[[int, Row | None], None]]:
    """Yields a function of (steps taken, a row or None); arguments as for ``progress_bar``."""
    with progress_bar(title, total) as (update, _):

        def progress(step: int, row: Row | None) -> None:
            update(completed=step)
            if row is not None:
                told = {n: value for n, value in row.items() if n not in ("step", "update_norm")}
                update(latest="  ".join(f"{name} {value:.4g}" for name, value in told.items()))

        yield progress


@contextlib.contextmanager
def printing_bar(
    title: str, total: int | None, prefix: str = ""
) -> Iterator[Callable[[int, Row | None], None]]:
    """As ``row_bar``, for the command line: without a terminal it prints a line for a row."""
    assert total is not None
    with progress_bar(title, total) as (update, console):

        def progress(step: int, row: Row | None) -> None:
            if row is None:
                update(completed=step)
                return
            from jaxdp.runs.report.words import show_epsilon  # its package draws, and is slow

            latest = f"epsilon {show_epsilon(row['epsilon'])}"
            if "test_accuracy" in row:
                latest = f"accuracy {row['test_accuracy']:.2%}  {latest}"
            update(completed=step, latest=latest)
            if not console.is_terminal:
                console.print(f"{prefix}step {step}/{total}  {latest}", highlight=False)

        yield progress
