"""A training run in a directory: configuration, checkpoints, ledger, resuming."""

from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.loop import RunResult, resume, start
from jaxdp.runs.recipes import recipe
from jaxdp.runs.run import Progress

__all__ = [
    "Progress",
    "RunConfig",
    "RunDirectory",
    "RunResult",
    "recipe",
    "resolve",
    "resume",
    "start",
]
