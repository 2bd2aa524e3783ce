"""What a run shows: report.json, report.md and plots, from noisy releases and public data only."""

from jaxdp.report.build import build
from jaxdp.report.markdown import to_markdown
from jaxdp.report.plots import save_plots
from jaxdp.report.words import describe

__all__ = ["build", "describe", "save_plots", "to_markdown"]
