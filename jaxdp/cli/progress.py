"""The progress bar of a run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jaxdp.runs import bar
from jaxdp.runs.run import Row

if TYPE_CHECKING:
    from jaxdp.papers.block_coordinate.settings import BlockConfig
    from jaxdp.runs.config import RunConfig


def show_epsilon(epsilon: float | str) -> str:
    """Epsilon as reports show it; imports their package at the first call."""
    from jaxdp.runs.report.words import show_epsilon as shown

    return shown(epsilon)


@contextlib.contextmanager
def progress_bar(
    config: "RunConfig | BlockConfig", name: str | None = None
) -> Iterator[Callable[[int, Row | None], None]]:
    """A function to be called after every step, with a history row at the end of a block.

    On a terminal it is a bar; elsewhere it prints a line for every block.
    """
    assert config.steps is not None
    title = name or f"{config.algorithm} on {config.dataset}"
    with bar.progress_bar(title, config.steps) as (update, console):

        def progress(step: int, row: Row | None) -> None:
            if row is None:
                update(completed=step)
                return
            latest = f"epsilon {show_epsilon(row['epsilon'])}"
            if "test_accuracy" in row:
                latest = f"accuracy {row['test_accuracy']:.2%}  {latest}"
            update(completed=step, latest=latest)
            if not console.is_terminal:
                prefix = f"{name}: " if name else ""
                line = f"{prefix}step {step}/{config.steps}  {latest}"
                console.print(line, highlight=False)

        yield progress


@contextlib.contextmanager
def counting_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be called with how many of ``total`` are done; a bar on a terminal alone."""
    with bar.progress_bar(title, total) as (update, _):
        yield lambda done: update(completed=done)
