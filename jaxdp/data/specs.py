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
        path: relative to the source folder; the file gzipped, with .gz behind its name, will do.
        md5: of the file of that name; for the CIFAR-10 mosaics, of the original binary batch
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
        largest: number of the original files, whose numbers begin at 0.
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
    largest: int = 255


# Checksums and files; what a checksum is of, `SourceFile` says.
_FILES = """
f68b3c2dcbeaaa9fbdd348bbdeb94873 mnist/train-images-idx3-ubyte.gz
d53e105ee54ea40749a09fcbcd1e9432 mnist/train-labels-idx1-ubyte.gz
9fb629c4189551a2d022fa330f9573f3 mnist/t10k-images-idx3-ubyte.gz
ec29112dd5afa0611ce80d1b7f02629c mnist/t10k-labels-idx1-ubyte.gz
8d4fb7e6c68d591d4c3dfef9ec88bf0d fashion-mnist/train-images-idx3-ubyte.gz
25c81989df183df01b3e8a0aad5dffbe fashion-mnist/train-labels-idx1-ubyte.gz
bef4ecab320f06d8554ea6380940ec79 fashion-mnist/t10k-images-idx3-ubyte.gz
bb300cfdad3c16e7a12a480ee83cd310 fashion-mnist/t10k-labels-idx1-ubyte.gz
5dd7e06a14cb22eb9f671a540d1b7c25 cifar-10-webp/data_batch_1.webp
5ea93a67294ea407fff1d09f752e9692 cifar-10-webp/data_batch_2.webp
942cd6a4bcdd0dd3c604fbe906cb4421 cifar-10-webp/data_batch_3.webp
ae636b3ba5c66a11e91e8cb52e771fcb cifar-10-webp/data_batch_4.webp
53f37980c15c3d472c316c40844f3f0d cifar-10-webp/data_batch_5.webp
803d5f7f4d78ea53de84dbe85f74fb6d cifar-10-webp/test_batch.webp
393c2e4e50001986b9978cf7a5d5691b cifar-10-webp/labels.npy
85145db1d4cd5c02423d3c8856a8ceb9 pums/FultonPUMS5full.csv
a484bd3dd24fec0e6cc1df7079df1466 madelon/madelon_train.data
7c0c3363967eb43ab2c36e2fa90f18e6 madelon/madelon_train.labels
9e8d7e33a891953378aa140b8009c8aa madelon/madelon_valid.data
fbe2d438b908adf81dcea277f907c2cd madelon/madelon_valid.labels
"""


def _files(folder: str) -> tuple[SourceFile, ...]:
    pairs = (line.split() for line in _FILES.split("\n") if f" {folder}/" in line)
    return tuple(SourceFile(path, md5) for md5, path in pairs)


_ALL = (
    DatasetSpec("digits", "Digits", "1.0.0", (8, 8, 1), 10, 1_437, 360),
    DatasetSpec("mnist", "MNIST", "3.0.1", (28, 28, 1), 10, 60_000, 10_000, _files("mnist"), True),
    DatasetSpec(
        "fashion_mnist",
        "Fashion-MNIST",
        "3.0.1",
        (28, 28, 1),
        10,
        60_000,
        10_000,
        _files("fashion-mnist"),
        True,
    ),
    DatasetSpec(
        "cifar10",
        "CIFAR-10",
        "3.0.2",
        (32, 32, 3),
        10,
        50_000,
        10_000,
        _files("cifar-10-webp"),
        True,
    ),
    DatasetSpec(
        "pums", "PUMS Fulton County", "1.0.0", (9,), 2, 20_612, 5_154, _files("pums"), largest=1
    ),
    # Its validation records are the test set: labels of its test records were not published.
    # 0 to 999 is the range that the challenge gave all columns but binary ones (Guyon, "Design of
    # experiments for the NIPS 2003 variable selection benchmark", July 2003, "Method").
    DatasetSpec(
        "madelon", "Madelon", "1.0.0", (500,), 2, 2_000, 600, _files("madelon"), largest=999
    ),
)
SPECS: dict[str, DatasetSpec] = {known.name: known for known in _ALL}


def spec(name: str) -> DatasetSpec:
    """The data set ``name``; ValueError lists the known ones."""
    return SPECS[arguments.one_of("dataset", name, tuple(SPECS))]
