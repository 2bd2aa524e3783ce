"""jaxdp: differentially private deep learning in JAX, honest by construction.

Names are loaded on first use, so that ``import jaxdp.accounting`` (NumPy, SciPy) never imports JAX.
The distribution jaxdp-accounting has this file and the accountant; jaxdp-privacy has the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxdp._version import __version__

try:
    from jaxdp._extras import RUN, installed
except ModuleNotFoundError:  # of jaxdp-privacy
    _ALONE = True
else:
    _ALONE = False

if TYPE_CHECKING:
    from jaxdp import accounting
    from jaxdp.audit import check, check_loop, diagnose
    from jaxdp.clipping import (
        augmented,
        auto_s,
        clip,
        clip_and_sum,
        clipped_grad,
        coordinate_box,
        normalize,
        per_layer,
    )
    from jaxdp.ledger import Ledger
    from jaxdp.ledger.seeds import Secret
    from jaxdp.mechanism import Mechanism, dp_mf, dp_sgd
    from jaxdp.noise import privatize
    from jaxdp.optimizers import Algorithm
    from jaxdp.runs.export import load
    from jaxdp.runs.run import Run
    from jaxdp.runs.tuning import tune
    from jaxdp.training.step import apply_updates, compile_update
    from jaxdp.training.trainer import Trainer
    from jaxdp.types import Batch, Summed

_HOME = {
    "Batch": "types",
    "Algorithm": "optimizers",
    "Ledger": "ledger",
    "Mechanism": "mechanism",
    "Run": "runs.run",
    "Secret": "ledger.seeds",
    "Summed": "types",
    "apply_updates": "training.step",
    "augmented": "clipping",
    "auto_s": "clipping",
    "check": "audit",
    "check_loop": "audit",
    "clip": "clipping",
    "clip_and_sum": "clipping",
    "clipped_grad": "clipping",
    "compile_update": "training.step",
    "diagnose": "audit",
    "Trainer": "training.trainer",
    "coordinate_box": "clipping",
    "dp_mf": "mechanism",
    "dp_sgd": "mechanism",
    "load": "runs.export",
    "normalize": "clipping",
    "per_layer": "clipping",
    "privatize": "noise",
    "tune": "runs.tuning",
}
_SUBMODULES = (
    "accounting",
    "audit",
    "clipping",
    "data",
    "encoders",
    "features",
    "ledger",
    "linear",
    "mechanism",
    "models",
    "noise",
    "optimizers",
    "papers",
    "preprocess",
    "recipes",
    "runs",
    "sampling",
    "schedules",
    "training",
    "types",
)
# Those of a room, by a shorter name.
_ROOM = {
    "encoders": "recipes.encoders",
    "features": "recipes.features",
    "linear": "recipes.linear",
    "models": "data.models",
    "preprocess": "recipes.preprocess",
}

_OF_AN_EXTRA = {"Run", "load", "models", "runs", "tune"}

__all__ = [
    "Algorithm",
    "Batch",
    "Ledger",
    "Mechanism",
    "Run",
    "Secret",
    "Summed",
    "Trainer",
    "__version__",
    "accounting",
    "apply_updates",
    "augmented",
    "auto_s",
    "check",
    "check_loop",
    "clip",
    "clip_and_sum",
    "clipped_grad",
    "compile_update",
    "coordinate_box",
    "diagnose",
    "dp_mf",
    "dp_sgd",
    "load",
    "normalize",
    "per_layer",
    "privatize",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _SUBMODULES:
        raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")
    if _ALONE and name != "accounting":
        raise ImportError(
            f"jaxdp.{name} needs JAX and the rest of jaxdp; only jaxdp-accounting is installed: "
            "pip install jaxdp-privacy"
        )
    if name in _HOME:
        return getattr(importlib.import_module(f"jaxdp.{_HOME[name]}"), name)
    return importlib.import_module(f"jaxdp.{_ROOM.get(name, name)}")


def __dir__() -> list[str]:
    if _ALONE:
        return ["__version__", "accounting"]
    # Without what an extra brings: `help` asks for every name that stands here.
    absent = set() if installed(*RUN) else _OF_AN_EXTRA
    return sorted({*__all__, *_SUBMODULES} - absent)
