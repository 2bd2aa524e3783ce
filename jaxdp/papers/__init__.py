"""The five papers: algorithms as published, claims, block coordinate descent, networks.

Nothing of the core imports this package. Importing ``jaxdp.papers.algorithms`` and
``jaxdp.papers.networks`` registers what they hold by name, as the command line does.
"""

import importlib
from typing import Any

_SUBMODULES = ("algorithms", "block_coordinate", "claims", "networks")


def __getattr__(name: str) -> Any:
    """A module of the package, imported when it is asked for: claims need no JAX."""
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
