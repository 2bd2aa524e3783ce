"""The five papers: algorithms as published, claims, block coordinate descent, networks.

Nothing of the core imports this package. Importing ``jaxdp.papers.algorithms`` and
``jaxdp.papers.networks`` registers what they hold by name, as the command line does.
"""

import importlib
from typing import Any

_SUBMODULES = ("algorithms", "block_coordinate", "claims", "hidden_state", "networks")


def __getattr__(name: str) -> Any:
    """Imports a module of the package when it is asked for: two of them need no JAX."""
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
