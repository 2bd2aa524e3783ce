"""Loads NumPy's files, .npy ones as memory maps, and knows what memory holds."""

import contextlib
import math
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

# Limits of a container's memory, of both versions of cgroups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def load(
    path: str | os.PathLike[str],
) -> np.ndarray | dict[str, np.ndarray] | tuple[np.ndarray, ...]:
    """Returns the arrays in a .npy or .npz file.

    ``.npy``: the array as a memory map, read where it is touched. ``.npz``: all its arrays in
    memory, since a zip file **cannot be memory mapped**; a dict of them, or a tuple where they were
    saved without names. Larger than memory: save one ``.npy`` for each, and give
    ``{"x": load("x.npy"), "y": load("y.npy")}``.

    Args:
        path: a file that ends in .npy or .npz.

    Raises:
        ValueError: another kind of file, one that holds Python objects, or a .npz file whose arrays
            do not fit into the machine's memory.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    if name.endswith(".npy"):
        return np.load(name, mmap_mode="r", allow_pickle=False)
    if not name.endswith(".npz"):
        raise ValueError(f"path must end in .npy or .npz, got {name!r}")
    arrays = arrays_in(name)
    if all(re.fullmatch(r"arr_\d+", key) for key in arrays):
        return tuple(arrays[f"arr_{place}"] for place in range(len(arrays)))
    return arrays


def arrays_in(
    path: str, names: Sequence[str] | None = None, bytes_more: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, read once it is known that they fit into memory.

    Args:
        path: the file.
        names: of those that are read, where the file has them; None for all.
        bytes_more: that each number will take besides, once it was read.

    Raises:
        ValueError: they do not fit; one holds Python objects; it is no such file.
        OSError: the file cannot be read.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} must be a .npz file, got another kind of file")
    with np.load(path, allow_pickle=False) as archive:
        chosen = [name for name in archive.files if names is None or name in names]
        sizes, held, zipped = dict.fromkeys(chosen, 0), memory(), archive.zip
        for name in chosen:  # by its header; 0 where NumPy will refuse it
            with contextlib.suppress(ValueError, KeyError), zipped.open(f"{name}.npy") as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
                sizes[name] = math.prod(shape) * (dtype.itemsize + bytes_more)
        if held is not None and sum(sizes.values()) > held:
            raise ValueError(
                f"{path} must hold arrays that fit into memory, for a .npz file is read whole, got "
                f"{sum(sizes.values()) / 1e9:.3g} GB where there are {held / 1e9:.3g} GB (the "
                f"largest is {max(sizes, key=sizes.__getitem__)!r}): save each as a .npy file, "
                "which jaxdp.sampling.load reads where it is touched, and train with jaxdp.Run"
            )
        return {name: archive[name] for name in chosen}


def memory() -> int | None:
    """The bytes of memory of this machine, or of its container; None where neither says."""
    found = []
    if sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            found.append(int(Path(limit).read_text(encoding="utf-8")))
    return min(found, default=None)
