"""A training run in a directory: configuration, checkpoints, ledger, resuming."""

from jaxdp._extras import RUN, needed

with needed("jaxdp.Run", "train", *RUN):
    from jaxdp.runs.config import RunConfig, resolve
    from jaxdp.runs.directory import RunDirectory
    from jaxdp.runs.loop import resume, start
    from jaxdp.runs.recipes import recipe

__all__ = [
    "RunConfig",
    "RunDirectory",
    "recipe",
    "resolve",
    "resume",
    "start",
]
