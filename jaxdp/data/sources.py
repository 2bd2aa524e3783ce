"""Reads the original files of the built-in data sets; each is checked by its checksum."""

import gzip
import hashlib
import io
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp._extras import needed
from jaxdp.data.specs import DatasetSpec, SourceFile

Arrays = tuple[np.ndarray, np.ndarray]

# The slides' columns; `collegedegree` is `educ >= 13`. Each is 0 or 1 by the survey's codebook.
PUMS_COLUMNS = (
    "sex",
    "married",
    "black",
    "asian",
    "collegedegree",
    "militaryservice",
    "uscitizen",
    "disability",
    "englishability",
)
PUMS_COLLEGE_FROM = 13
_PUMS_SPLIT_KEY = 2021  # fixes the 80/20 split by row number, whatever the rows hold


def read(spec: DatasetSpec, source: Path) -> dict[str, Arrays]:
    """The splits {"train", "test"} of (x, labels) from the files under ``source``.

    Returns:
        Images as uint8 [n, h, w, c], the census columns as uint8 [n, 9], Madelon's as uint16
        [n, 500]; labels int64 [n].

    Raises:
        ValueError: a file is missing or damaged; it is named.
    """
    if spec.name == "cifar10":
        return _read_cifar(spec.files, source)
    contents = [_checked(source, file) for file in spec.files]
    if spec.name == "pums":
        return _read_pums(spec, contents[0])
    return _read_pairs(spec, [(_numbers if spec.name == "madelon" else _idx)(c) for c in contents])


def _checked(source: Path, file: SourceFile) -> bytes:
    data = _bytes(source, file)
    _check_md5(source, file, data)
    return data


def _bytes(source: Path, file: SourceFile) -> bytes:
    path, zipped = source / file.path, source / f"{file.path}.gz"
    if path.is_file():
        return path.read_bytes()
    if not zipped.is_file():
        raise ValueError(f"source must hold {file.path}, but {path} is missing")
    content = zipped.read_bytes()
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{zipped} is damaged: it must be gzipped, got {error}") from error


def _check_md5(source: Path, file: SourceFile, data: bytes) -> None:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != file.md5:
        raise ValueError(
            f"{source / file.path} is damaged: its md5 must be {file.md5}, got {found}"
        )


def _read_pairs(spec: DatasetSpec, arrays: list[np.ndarray]) -> dict[str, Arrays]:
    train, test = arrays[:2], arrays[2:]
    return {
        name: (x.reshape(-1, *spec.example_shape), labels.astype(np.int64))
        for name, (x, labels) in (("train", train), ("test", test))
    }


def _numbers(content: bytes) -> np.ndarray:
    """The numbers of a text, a line a record; its labels, -1 and 1, as 0 and 1."""
    table = np.loadtxt(io.BytesIO(content), np.int64)
    return table.astype(np.uint16) if table.ndim == 2 else (table + 1) // 2


def _idx(content: bytes) -> np.ndarray:
    """The array of an IDX file: a magic number whose last byte is the rank, sizes, then bytes."""
    raw = gzip.decompress(content)
    rank = raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, dtype=">u4", count=rank, offset=4))
    start = 4 + 4 * rank
    return np.frombuffer(raw, dtype=np.uint8, count=math.prod(shape), offset=start).reshape(shape)


def _read_cifar(files: tuple[SourceFile, ...], source: Path) -> dict[str, Arrays]:
    *mosaics, label_file = files
    labels = np.load(io.BytesIO(_checked(source, label_file)))
    images = []
    for file, batch_labels in zip(mosaics, labels, strict=True):
        tiles = _tiles(_bytes(source, file), source / file.path)
        planar = tiles.transpose(0, 3, 1, 2).reshape(len(tiles), -1)
        original = np.concatenate([batch_labels[:, None], planar], axis=1)
        _check_md5(source, file, original.tobytes())
        images.append(tiles)
    train_labels = labels[:-1].reshape(-1).astype(np.int64)
    return {
        "train": (np.concatenate(images[:-1]), train_labels),
        "test": (images[-1], labels[-1].astype(np.int64)),
    }


def _tiles(content: bytes, path: Path) -> np.ndarray:
    """uint8 [10000, 32, 32, 3] from a 3200×3200 mosaic, row-major."""
    with needed("reading CIFAR-10's mosaics", "data", "PIL"):
        from PIL import Image
    try:
        mosaic = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        grid = mosaic.reshape(100, 32, 100, 32, 3)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it must be a 3200×3200 image, got {error}") from error
    return grid.transpose(0, 2, 1, 3, 4).reshape(10_000, 32, 32, 3)


def _read_pums(spec: DatasetSpec, content: bytes) -> dict[str, Arrays]:
    table: Any = np.genfromtxt(
        io.BytesIO(content),
        delimiter=",",
        names=True,
        dtype=np.int64,
        encoding="utf-8",
        deletechars='"',
    )
    columns = {name.strip('"'): table[name] for name in table.dtype.names}
    columns["collegedegree"] = (columns["educ"] >= PUMS_COLLEGE_FROM).astype(np.int64)
    features = np.stack([columns[name] for name in PUMS_COLUMNS], axis=1)
    if features.min() < 0 or features.max() > 1:
        raise ValueError("the PUMS columns must be 0 or 1, got another value")
    labels = 1 - columns["employed"]
    order = np.random.Generator(np.random.Philox(key=_PUMS_SPLIT_KEY)).permutation(len(labels))
    train, test = order[: spec.dataset_size], order[spec.dataset_size :]
    features = features.astype(np.uint8)
    return {"train": (features[train], labels[train]), "test": (features[test], labels[test])}
