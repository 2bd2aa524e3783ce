"""Loads a data set into arrays."""

import dataclasses
import gzip
import hashlib
import importlib.util
import io
import os
import zlib
from pathlib import Path

import numpy as np

from jaxdp._extras import needed
from jaxdp.data.specs import TFDS, DatasetSpec, spec

_DIGITS_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
DEFAULT_DATA_DIR = "~/tensorflow_datasets"


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    Attributes:
        spec: its public constants.
        train_x: float32 [n, *example_shape], scaled by public constants to [0, 1] (images), to
            {-1, 1} (census columns) or to [-1, 1] (Madelon). Sensitive.
        train_y: int32 [n]. Sensitive.
        test_x: float32 [m, *example_shape]; assumed public.
        test_y: int32 [m]; assumed public.
    """

    spec: DatasetSpec
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def fingerprint(self, key: bytes) -> str:
        """A keyed hash of all arrays; without the key it reveals nothing about them."""
        digest = hashlib.blake2b(key=key, digest_size=16)
        for array in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Data set ``name``: embedded, prepared in ``data_dir``, or fetched by tensorflow-datasets.

    Args:
        name: one of ``jaxdp.data.specs.SPECS``.
        data_dir: where prepared data sets are; None means tensorflow-datasets' own default.

    Raises:
        ImportError: a package that it is read by is not installed; the message names the extra.
        ValueError: the name is unknown, or the data set is neither there nor to be fetched.
    """
    chosen = spec(name)
    if name == "digits":
        splits = _digits(chosen)
    else:
        folder = os.path.expanduser(data_dir or os.environ.get("TFDS_DATA_DIR", DEFAULT_DATA_DIR))
        splits = {split: _read(chosen, folder, split) for split in ("train", "test")}
    (train_x, train_y), (test_x, test_y) = splits["train"], splits["test"]
    return Dataset(chosen, _scaled(chosen, train_x), train_y, _scaled(chosen, test_x), test_y)


def _digits(chosen: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    table = np.loadtxt(io.BytesIO(_digits_csv()), delimiter=",")
    # Pixels are counts of 0 to 16; stretched to bytes, they are scaled like any other image.
    images = table[:, :-1].reshape(-1, *chosen.example_shape)
    images = np.round(images * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int32)
    # The split is by position: the last rows, by other writers, are the test set.
    count = chosen.dataset_size
    return {"train": (images[:count], labels[:count]), "test": (images[count:], labels[count:])}


def _digits_csv() -> bytes:
    """scikit-learn's file, without importing scikit-learn, which takes a second."""
    with needed("jaxdp.data.load('digits')", "data", "sklearn"):
        found = importlib.util.find_spec("sklearn")
    path = Path(
        found.submodule_search_locations[0] if found and found.submodule_search_locations else "",
        "datasets",
        "data",
        "digits.csv.gz",
    )
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"dataset 'digits' must be in an installed scikit-learn, got {error}: install it anew"
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != _DIGITS_SHA256:
        raise ValueError(
            f"dataset 'digits' must have the sha256 {_DIGITS_SHA256}, got {digest} from {path}"
        )
    return content


def _read(chosen: DatasetSpec, data_dir: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    with needed(f"jaxdp.data.load({chosen.name!r})", "data", *TFDS):
        import tensorflow_datasets as tfds

        from jaxdp.data.builders import prepared_folder, quiet_tfds

    folder = prepared_folder(chosen, data_dir)
    with quiet_tfds():
        if folder.is_dir():
            source = tfds.builder_from_directory(folder).as_data_source(split=split)
        else:
            source = _fetch(chosen, data_dir, split)
        rows = source.__getitems__(range(len(source)))
    field = "image" if len(chosen.example_shape) == 3 else "features"
    x = np.stack([row[field] for row in rows])
    return x, np.asarray([row["label"] for row in rows], dtype=np.int32)


def _fetch(chosen: DatasetSpec, data_dir: str, split: str):  # type: ignore[no-untyped-def]
    import requests
    import tensorflow_datasets as tfds

    hint = f"write it with `jaxdp data prepare {chosen.name} --source DIR --data-dir {data_dir}`"
    if not chosen.fetchable:
        raise ValueError(f"dataset {chosen.name!r} is not in {data_dir}: {hint}")
    try:
        # tfds retries for minutes where there is no network; one short question is enough.
        first_url = next(iter(tfds.builder_cls(chosen.name).url_infos))
        requests.head(first_url, timeout=10)
        return tfds.data_source(chosen.name, split=split, data_dir=data_dir)
    except Exception as error:  # tfds raises whatever its downloader, its extractor or its disk did
        raise ValueError(
            f"dataset {chosen.name!r} is not in {data_dir} and could not be fetched "
            f"({type(error).__name__}): {hint}"
        ) from error


def _scaled(chosen: DatasetSpec, x: np.ndarray) -> np.ndarray:
    shares = x.astype(np.float32) / np.float32(chosen.largest)
    return shares if x.ndim == 4 else 2 * shares - 1
