"""Small files in the formats of the original data sets, and specifications that match them."""

import dataclasses
import gzip
import hashlib
import io

import numpy as np
from PIL import Image

from jaxdp.data.specs import SPECS, SourceFile

_CSV_COLUMNS = (
    *("state", "puma", "sex", "age", "educ", "income", "latino", "black", "asian", "married"),
    *("divorced", "uscitizen", "children", "disability", "militaryservice", "employed"),
    *("englishability", "fips"),
)


def idx(array):
    """IDX: two zero bytes, 8 for bytes, the rank; big-endian sizes; the bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.tobytes())


def write(folder, files):
    """Writes {path: bytes} and returns the matching SourceFiles."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return tuple(SourceFile(p, hashlib.md5(c).hexdigest()) for p, c in files.items())


def mnist(folder, rng, train=30, test=10):
    arrays = {
        name: (rng.integers(0, 256, (rows, 28, 28), np.uint8), rng.integers(0, 10, rows, np.uint8))
        for name, rows in (("train", train), ("test", test))
    }
    flat = [a for split in arrays.values() for a in split]
    names = [file.path for file in SPECS["mnist"].files]
    files = write(folder, {n: idx(a) for n, a in zip(names, flat, strict=True)})
    spec = dataclasses.replace(
        SPECS["mnist"], files=files, dataset_size=train, test_size=test, fetchable=False
    )
    return spec, arrays


def pums(folder, rng, rows=50):
    table = rng.integers(0, 2, (rows, len(_CSV_COLUMNS)))
    table[:, 4] = rng.integers(1, 17, rows)
    text = ",".join(f'"{name}"' for name in _CSV_COLUMNS) + "\n"
    text += "\n".join(",".join(map(str, row)) for row in table) + "\n"
    files = write(folder, {"pums/FultonPUMS5full.csv": text.encode()})
    spec = dataclasses.replace(SPECS["pums"], files=files, dataset_size=40, test_size=10)
    return spec, dict(zip(_CSV_COLUMNS, table.T, strict=True))


def madelon(folder, rng, train=30, test=10):
    """Of each pair of files one is gzipped; the checksums are of what is inside."""
    files, arrays = {}, []
    for file, rows in zip(SPECS["madelon"].files, (train, train, test, test), strict=True):
        of_labels = file.path.endswith("labels")
        table = (
            rng.integers(0, 2, rows) * 2 - 1 if of_labels else rng.integers(0, 1_000, (rows, 500))
        )
        arrays.append(table)
        lines = (" ".join(map(str, np.atleast_1d(row))) + " \n" for row in table)
        files[file.path] = "".join(lines).encode()
    spec = dataclasses.replace(
        SPECS["madelon"], files=write(folder, files), dataset_size=train, test_size=test
    )
    for path in list(files)[::2]:
        (folder / path).unlink()
        (folder / f"{path}.gz").write_bytes(gzip.compress(files[path]))
    return spec, arrays


def mosaic(rng):
    """One CIFAR-10 batch as a lossless mosaic, and its 10,000 tiles."""
    tiles = np.zeros((10_000, 32, 32, 3), np.uint8)
    tiles[:, :4, :4] = rng.integers(0, 256, (10_000, 4, 4, 3))
    picture = tiles.reshape(100, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(3200, 3200, 3)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", lossless=True, method=0)
    return buffer.getvalue(), tiles
