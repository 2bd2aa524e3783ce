"""The origin of a report: date, command, ledger, versions; public facts and no duration."""

import datetime
import hashlib
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax

from jaxdp import __version__
from jaxdp.optimizers import registry
from jaxdp.runs.config import RunConfig
from jaxdp.types import PyTree

# Names of a folder of this machine say nothing of the run, and a seed is a secret.
LEFT_OUT = ("out", "data_dir", "seed", "fork")
_FIELDS = (
    "dataset", "model", "activation", "method", "noise_multiplier", "steps", "delta", "batch_size",
    "l2_clip_norm", "learning_rate", "sampling", "relation",
)


def today() -> str:
    """The date, UTC. To be asked before the first step: how long steps take is private."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def command(options: Mapping[str, Any]) -> str:
    """``jaxdp train`` with these options, without :data:`LEFT_OUT`.

    Args:
        options: from an option's name without dashes, such as "batch-size", to its value; True for
            a flag, a sequence for an option that is repeated.
    """
    parts = ["jaxdp", "train"]
    for name, value in options.items():
        if name.replace("-", "_") in LEFT_OUT:
            continue
        values = value if isinstance(value, list | tuple) else (value,)
        for each in values:
            whole = isinstance(each, float) and each.is_integer()
            shown = str(int(each) if whole else each)
            parts += [f"--{name}"] if each is True else [f"--{name}", shown]
    return shlex.join(parts)


def command_of(config: RunConfig) -> str:
    """The command with every public number of a resolved configuration written out."""
    options: dict[str, Any] = {
        name.replace("_", "-"): getattr(config, name) for name in _FIELDS
    }
    if config.optimizer != "sgd":
        options["optimizer"] = config.optimizer
    elif registry.METHODS[config.method].momentum:
        options["momentum"] = config.momentum
    if config.model == "mlp":
        options["hidden"] = config.hidden
    for name in ("noise_schedule", "pca_dimensions", "pca_noise_multiplier"):
        if getattr(config, name) is not None:
            options[name.replace("_", "-")] = getattr(config, name)
    if config.canaries:
        options["canaries"] = config.canaries
    if config.settings:
        options["set"] = [f"{name}={value}" for name, value in config.settings.items()]
    return command(options)


def sha256(path: Path) -> str:
    """Hexadecimal hash of a file, as ``sha256sum`` prints it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "jaxdp": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__,
        "python": platform.python_version(),
    }


def parameters(params: PyTree) -> int:
    """The number of parameters of the model."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
