"""The origin of a report: command, hash of the ledger, versions, number of parameters."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax
import jax
import numpy as np
import optax

from jaxdp import __version__
from jaxdp.types import PyTree

# The value of an option of the command line.
Option = float | str | Path | Sequence[str] | None
# Names of a folder of this machine say nothing of the run, and a seed is a secret.
LEFT_OUT = ("out", "data_dir", "seed", "fork")


def command(options: Mapping[str, Option]) -> str:
    """The command line ``jaxdp train`` with these options, but for ``LEFT_OUT``.

    Args:
        options: from an option's name without dashes, such as "batch-size", to its value; True for
            a flag, a sequence for an option that is repeated.
    """
    parts = ["jaxdp", "train"]
    if "data" in options:  # without its folder
        options = {**options, "data": os.path.basename(str(options["data"]))}
    for name, value in options.items():
        if name.replace("-", "_") in LEFT_OUT:
            continue
        values = value if isinstance(value, list | tuple) else (value,)
        for each in values:
            whole = isinstance(each, float) and each.is_integer()
            shown = str(int(each) if whole else each)
            parts += [f"--{name}"] if each is True else [f"--{name}", shown]
    return shlex.join(parts)


def sha256(path: Path) -> str:
    """Hexadecimal hash of a file, as ``sha256sum`` prints it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """The versions of the libraries that the numbers depend on, by name."""
    return {
        "jaxdp": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flax": flax.__version__,
        "optax": optax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def parameters(params: PyTree) -> int:
    """The number of parameters."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
