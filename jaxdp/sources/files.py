"""Loads NumPy's files, .npy ones as memory maps."""

import os
import re
from typing import Any

import numpy as np


def load(path: str | os.PathLike[str]) -> Any:
    """Returns the arrays in a .npy or .npz file.

    ``.npy``: the array as a memory map, read where it is touched. ``.npz``: all its arrays in
    memory, since a zip file **cannot be memory mapped**; a dict of them, or a tuple where they were
    saved without names. Larger than memory: save one ``.npy`` for each, and give
    ``{"x": load("x.npy"), "y": load("y.npy")}``.

    Args:
        path: a file that ends in .npy or .npz.

    Raises:
        ValueError: another kind of file, or one that holds Python objects.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    if name.endswith(".npy"):
        return np.load(name, mmap_mode="r", allow_pickle=False)
    if not name.endswith(".npz"):
        raise ValueError(f"path must end in .npy or .npz, got {name!r}")
    with np.load(name, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    if all(re.fullmatch(r"arr_\d+", key) for key in arrays):
        return tuple(arrays[f"arr_{place}"] for place in range(len(arrays)))
    return arrays
