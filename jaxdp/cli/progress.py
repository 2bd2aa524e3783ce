"""The progress bar of a run."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxdp.report.words import show_epsilon


@contextlib.contextmanager
def progress_bar(config: Any, name: str | None = None) -> Iterator[Any]:
    """A function to be called after every step, with a history row at the end of a block.

    On a terminal it is a bar; elsewhere it prints a line for every block.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[latest]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        title = name or f"{config.method} on {config.dataset}"
        task = bar.add_task(title, total=config.steps, latest="")

        def progress(step: int, row: dict[str, Any] | None) -> None:
            if row is None:
                bar.update(task, completed=step)
                return
            latest = f"accuracy {row['test_accuracy']:.2%}  epsilon {show_epsilon(row['epsilon'])}"
            bar.update(task, completed=step, latest=latest)
            if not console.is_terminal:
                prefix = f"{name}: " if name else ""
                line = f"{prefix}step {step}/{config.steps}  {latest}"
                console.print(line, highlight=False)

        yield progress


@contextlib.contextmanager
def counting_bar(title: str, total: int) -> Iterator[Any]:
    """A function to be called with how many of ``total`` are done; a bar on a terminal alone."""
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
