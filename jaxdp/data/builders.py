"""Writes the original files into tensorflow-datasets' array_record form, without TensorFlow."""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp._extras import needed
from jaxdp.data import sources
from jaxdp.data.specs import TFDS, DatasetSpec, spec

with needed("jaxdp.data.prepare", "data", *TFDS):
    import tensorflow_datasets as tfds
    from PIL import Image


def prepare(name: str, source: str | os.PathLike[str], data_dir: str | os.PathLike[str]) -> Path:
    """Writes data set ``name`` from the original files under ``source`` into ``data_dir``.

    Returns:
        The folder of the prepared form; if it is already there, nothing is done.

    Raises:
        ValueError: the data set is unknown or embedded, or a source file is missing or damaged.
    """
    chosen = spec(name)
    if not chosen.files:
        raise ValueError(f"dataset {name!r} is embedded: it needs no preparing")
    folder = prepared_folder(chosen, data_dir)
    if folder.is_dir():
        return folder
    if not Path(source).is_dir():
        raise ValueError(
            f"source must be a folder with the original files, such as "
            f"{chosen.files[0].path}, got {str(source)!r}, which is none: download them "
            "into one first, and name it"
        )
    splits = sources.read(chosen, Path(source))
    with quiet_tfds():
        _builder(chosen, splits, data_dir).download_and_prepare()
    return folder


def prepared_folder(chosen: DatasetSpec, data_dir: str | os.PathLike[str]) -> Path:
    """The folder of a data set's prepared form."""
    return Path(data_dir) / chosen.name / chosen.version


@contextlib.contextmanager
def quiet_tfds() -> Iterator[None]:
    """Silences tfds's progress bars and its advice about OpenCV."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _builder(
    chosen: DatasetSpec, splits: dict[str, sources.Arrays], data_dir: str | os.PathLike[str]
) -> tfds.core.GeneratorBasedBuilder:
    image = len(chosen.example_shape) == 3
    features = tfds.features.FeaturesDict(_features(chosen, splits["train"][0].dtype))

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = chosen.name
        VERSION = tfds.core.Version(chosen.version)

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=tuple(features)
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(*splits[split]) for split in splits}

        def _generate_examples(self, xs: np.ndarray, labels: np.ndarray) -> Iterator[Any]:
            for i, (x, label) in enumerate(zip(xs, labels, strict=True)):
                row = {"image": _png(x)} if image else {"features": x}
                yield i, {**row, "label": int(label)}

    return Builder(data_dir=data_dir, file_format="array_record")


def _features(chosen: DatasetSpec, dtype: np.dtype) -> dict[str, Any]:
    label = tfds.features.ClassLabel(num_classes=chosen.num_classes)
    if len(chosen.example_shape) == 3:
        # As tensorflow-datasets' own builders declare it, so that both are read alike.
        return {"image": tfds.features.Image(shape=chosen.example_shape), "label": label}
    tensor = tfds.features.Tensor(shape=chosen.example_shape, dtype=dtype, encoding="bytes")
    return {"features": tensor, "label": label}


def _png(image: np.ndarray) -> io.BytesIO:
    """An image encoded as PNG; tfds would import TensorFlow to encode pixels."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, "PNG")
    buffer.seek(0)
    return buffer
