"""What a run shows: report.json, .md, .html and plots, from noisy releases and public data."""

from jaxdp.report.build import build
from jaxdp.report.markdown import to_markdown
from jaxdp.report.page import to_html
from jaxdp.report.plots import save_plots
from jaxdp.report.words import describe

__all__ = ["build", "describe", "save_plots", "to_html", "to_markdown"]
