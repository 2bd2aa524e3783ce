"""Data sets: the embedded digits, those of tensorflow-datasets, and .npz files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.data.load import Dataset, load

if TYPE_CHECKING:
    from jaxdp.data.own import from_file

__all__ = ["Dataset", "from_file", "load", "prepare"]


def prepare(name: str, source: str | os.PathLike[str], data_dir: str | os.PathLike[str]) -> Path:
    """Writes the original files into tfds form; see ``jaxdp.data.builders.prepare``."""
    # Imported late: tensorflow-datasets is slow to import and training on digits needs none of it.
    from jaxdp.data import builders

    return builders.prepare(name, source, data_dir)


def __getattr__(name: str) -> Any:
    """The reader of .npz files, imported when asked for: names of data sets need no JAX."""
    if name != "from_file":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxdp.data.own import from_file

    return from_file
