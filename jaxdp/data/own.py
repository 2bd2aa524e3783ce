"""Data sets in .npz files."""

import os
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from jaxdp import arguments
from jaxdp.data.load import Dataset
from jaxdp.data.specs import DatasetSpec
from jaxdp.sampling.files import arrays_in
from jaxdp.sampling.source import kept_dtype

_READ = ("x", "y", "x_test", "y_test")
_ARRAYS = (
    "x [n, ...] and y [n] (whole numbers from 0) of the training records, and perhaps x_test and "
    "y_test of public ones"
)


def from_file(
    path: str | os.PathLike[str], num_classes: int, dataset_size: int | None = None
) -> Dataset:
    """The data set in a .npz file with the arrays x, y and perhaps x_test, y_test.

    Bytes are scaled to [0, 1]; all else is taken as float32, as it is. Scale by public bounds
    beforehand: statistics of the records would be a release of their own. A warning names further
    arrays of the file, which are not read.

    Args:
        path: the file. Arrays x [n, ...], y [n]: training records, **sensitive**; x_test [m, ...],
            y_test [m]: assumed public.
        num_classes: number of labels, public: it is not read off the labels.
        dataset_size: declared number of training records, public; None declares that of the file.

    Raises:
        ValueError: the file or an array is not of that kind, or larger than the machine's memory,
            which it is read into whole. No message holds a record.
    """
    arrays = _read(os.fspath(path))
    count = arguments.integer("num_classes", num_classes, least=2)
    x, y = _checked(arrays["x"], arrays["y"], "x", "y", count, None)
    shape = x.shape[1:]
    test_x, test_y = np.zeros((0, *shape), np.float32), np.zeros(0, np.int32)
    if "x_test" in arrays:
        test_x, test_y = _checked(
            arrays["x_test"], arrays["y_test"], "x_test", "y_test", count, shape
        )
    size = (
        len(y) if dataset_size is None else arguments.integer("dataset_size", dataset_size, least=1)
    )
    name = Path(path).stem
    spec = DatasetSpec(name, name, "", shape, count, size, len(test_y))
    return Dataset(spec, x, y, test_x, test_y)


def _read(path: str) -> dict[str, np.ndarray]:
    if not path.endswith(".npz"):
        raise ValueError(f"data must be a .npz file with {_ARRAYS}; got {path}")
    try:
        # Each number is one of float32 in the end.
        arrays = arrays_in(path, _READ, bytes_more=4)
        with np.load(path, allow_pickle=False) as archive:
            names = sorted(archive.files)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"data must be a .npz file to be read, got {path}: {error}") from error
    if not {"x", "y"} <= set(arrays) or ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"data must hold {_ARRAYS}; got {', '.join(names) or 'nothing'}")
    if more := [name for name in names if name not in _READ]:
        warnings.warn(
            f"{path} holds {', '.join(map(repr, more))}, which is not read: a model is trained on "
            "x and y alone. Columns that it shall learn from belong into x",
            stacklevel=3,
        )
    return arrays


def _checked(
    x: np.ndarray,
    y: np.ndarray,
    x_name: str,
    y_name: str,
    num_classes: int,
    shape: tuple[int, ...] | None,
) -> tuple[np.ndarray, np.ndarray]:
    for name, array in ((x_name, x), (y_name, y)):
        kept_dtype(array.dtype, name)  # text is refused in words that say how to encode it
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise ValueError(f"{x_name} must be numbers [n, ...], got {x.dtype} of {x.ndim} axes")
    if shape is not None and x.shape[1:] != shape:
        raise ValueError(f"{x_name} must have rows of shape {shape} like x, got {x.shape[1:]}")
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"{y_name} must be whole numbers [n], got {y.dtype} of {y.ndim} axes")
    if len(x) != len(y) or not len(y):
        raise ValueError(
            f"{x_name} and {y_name} must have one row for each record, and at least "
            "one, got other numbers of rows"
        )
    if y.min() < 0 or y.max() >= num_classes:
        # Without the label: it is private.
        raise ValueError(
            f"{y_name} must be at least 0 and below {num_classes}, the number of classes, got a "
            "label outside"
        )
    with np.errstate(over="ignore"):  # refused below
        values = x.astype(np.float32)
    if x.dtype == np.uint8:
        values /= np.float32(255)
    if not np.isfinite(values).all():
        raise ValueError(f"{x_name} must be finite, got a number that is not")
    return values, y.astype(np.int32)
