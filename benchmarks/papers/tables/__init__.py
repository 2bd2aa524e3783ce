"""The tables and figures of the papers, rendered from committed result rows and nothing else."""

from jaxdp._extras import needed

with needed("benchmarks.papers.tables", "papers", "jinja2", "matplotlib", "sklearn"):
    from benchmarks.papers.tables.page import Page, Section, TextTable, to_markdown
    from benchmarks.papers.tables.rows import Results
    from benchmarks.papers.tables.targets import TARGETS, Target, render

__all__ = [
    "TARGETS",
    "Page",
    "Results",
    "Section",
    "Target",
    "TextTable",
    "render",
    "to_markdown",
]
