"""Reports of runs: report.json, .md, .html and plots, from noisy releases and public data."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxdp._extras import needed

with needed("jaxdp.runs.report", "train", "flax", "jinja2", "matplotlib"):
    from jaxdp.runs.report.build import build
    from jaxdp.runs.report.markdown import to_markdown

if TYPE_CHECKING:
    from jaxdp.runs.report.page import to_html
    from jaxdp.runs.report.plots import save_plots

__all__ = ["build", "save_plots", "to_html", "to_markdown"]

# Imported when asked for: a run that begins need not wait for matplotlib.
_HOME = {"save_plots": "plots", "to_html": "page"}


def __getattr__(name: str) -> Any:
    """A name of the package, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
