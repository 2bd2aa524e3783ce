"""A training run in a directory: configuration, checkpoints, ledger, resuming."""

from jaxdp.runs.config import RunConfig, recipe, resolve
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.loop import Progress, RunResult, resume, start

__all__ = [
    "Progress", "RunConfig", "RunDirectory", "RunResult", "recipe", "resolve", "resume", "start",
]
