"""Public constants of the built-in data sets, and their source files with checksums."""

import dataclasses

from jaxdp import arguments

# The packages that read and write the form of tensorflow-datasets; it needs the second without
# declaring it.
TFDS = ("tensorflow_datasets", "importlib_resources", "requests", "PIL")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of the original data.

    Attributes:
        path: relative to the source folder.
        md5: of the file as it is there; for the CIFAR-10 mosaics, of the original binary batch
            (label byte and planar RGB) that the decoded mosaic must reproduce.
    """

    path: str
    md5: str


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """A data set's public constants: none is computed from the data.

    Attributes:
        name: the name in tensorflow-datasets.
        title: as people write it.
        version: of the prepared form.
        example_shape: shape of one example as the models see it.
        num_classes: number of labels.
        dataset_size: declared number of training records.
        test_size: declared number of test records.
        files: the source files, empty for an embedded set.
        fetchable: whether tensorflow-datasets can download it.
    """

    name: str
    title: str
    version: str
    example_shape: tuple[int, ...]
    num_classes: int
    dataset_size: int
    test_size: int
    files: tuple[SourceFile, ...] = ()
    fetchable: bool = False


def _idx_files(folder: str, *md5: str) -> tuple[SourceFile, ...]:
    names = (
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    )
    return tuple(
        SourceFile(f"{folder}/{name}", digest) for name, digest in zip(names, md5, strict=True)
    )


_CIFAR_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
_CIFAR_NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

SPECS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec("digits", "Digits", "1.0.0", (8, 8, 1), 10, 1_437, 360),
    "mnist": DatasetSpec(
        "mnist",
        "MNIST",
        "3.0.1",
        (28, 28, 1),
        10,
        60_000,
        10_000,
        _idx_files(
            "mnist",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        fetchable=True,
    ),
    "fashion_mnist": DatasetSpec(
        "fashion_mnist",
        "Fashion-MNIST",
        "3.0.1",
        (28, 28, 1),
        10,
        60_000,
        10_000,
        _idx_files(
            "fashion-mnist",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        fetchable=True,
    ),
    "cifar10": DatasetSpec(
        "cifar10",
        "CIFAR-10",
        "3.0.2",
        (32, 32, 3),
        10,
        50_000,
        10_000,
        (
            *(
                SourceFile(f"cifar-10-webp/{name}.webp", digest)
                for name, digest in zip(_CIFAR_NAMES, _CIFAR_MD5, strict=True)
            ),
            SourceFile("cifar-10-webp/labels.npy", "393c2e4e50001986b9978cf7a5d5691b"),
        ),
        fetchable=True,
    ),
    "pums": DatasetSpec(
        "pums",
        "PUMS Fulton County",
        "1.0.0",
        (9,),
        2,
        20_612,
        5_154,
        (SourceFile("pums/FultonPUMS5full.csv", "85145db1d4cd5c02423d3c8856a8ceb9"),),
    ),
}


def spec(name: str) -> DatasetSpec:
    """The data set ``name``; ValueError lists the known ones."""
    return SPECS[arguments.one_of("dataset", name, tuple(SPECS))]
