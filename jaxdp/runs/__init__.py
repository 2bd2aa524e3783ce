"""A training run in a directory: configuration, checkpoints, ledger, resuming."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxdp._extras import RUN, needed

if TYPE_CHECKING:
    from jaxdp.runs.assemble import resume, start
    from jaxdp.runs.config import RunConfig, resolve
    from jaxdp.runs.directory import RunDirectory
    from jaxdp.runs.recipes import recipe

__all__ = ["RunConfig", "RunDirectory", "recipe", "resolve", "resume", "start"]

with needed("jaxdp.Run", "train", *RUN):
    pass  # looked for, not imported

# Imported when asked for: a page is read, and an interrupt waited for, without what a run needs.
_HOME = {
    "RunConfig": "config",
    "RunDirectory": "directory",
    "recipe": "recipes",
    "resolve": "config",
    "resume": "assemble",
    "start": "assemble",
}


def __getattr__(name: str) -> Any:
    """A name of the package, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
