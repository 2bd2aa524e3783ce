"""A page of results as Markdown."""

import dataclasses
from collections.abc import Sequence

import jinja2


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Headers and rows of text."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot on a page: its file beside the page, and what it shows."""

    file: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and a table."""

    heading: str
    text: Sequence[str] = ()
    table: TextTable | None = None
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """A page: title, paragraphs, plots, sections."""

    title: str
    text: Sequence[str]
    plots: Sequence[Plot]
    sections: Sequence[Section]
    command: str


def to_markdown(page: Page) -> str:
    """The page; the same rows give the same text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("benchmarks.papers.tables", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown of our own words and numbers
    )
    return environment.get_template("page.md.jinja").render(page=page)
