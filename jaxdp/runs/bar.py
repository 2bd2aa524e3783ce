"""Progress bars, in terminals and notebooks; silent elsewhere."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
def row_bar(title: str, total: int) -> Iterator[Callable[[int, dict[str, Any] | None], None]]:
    """Yields a function of (steps taken, a row or None); arguments as for ``progress_bar``."""
    with progress_bar(title, total) as (update, _):

        def progress(step: int, row: Mapping[str, float] | None) -> None:
            update(completed=step)
            if row is not None:
                update(latest=_in_words(row))

        yield progress


def _in_words(row: Mapping[str, float]) -> str:
    """The numbers of a row on one line."""
    numbers = {name: value for name, value in row.items() if name not in ("step", "update_norm")}
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
