"""The problems of the block coordinate descent benchmark, scaled by public constants only."""

import dataclasses
import math

import numpy as np

from jaxdp import data as datasets
from jaxdp.papers import block_coordinate as bc


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set split in two, and how each algorithm is set on it."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    hidden: tuple[int, ...]
    batch_size: int
    bound: float
    epsilon: float
    step_size: float
    clip: float
    sgd_rate: float
    sgd_clip: float = 1.0
    projection: float | None = 1.0

    @property
    def size(self) -> int:
        return len(self.train[1])

    @property
    def classes(self) -> int:
        return int(self.train[1].max()) + 1

    @property
    def wanted(self) -> np.ndarray:
        return np.eye(self.classes, dtype=np.float32)[self.train[1]]

    @property
    def lifted(self) -> tuple[np.ndarray, np.ndarray]:
        """What block coordinate descent trains on: its networks have no biases."""
        return with_constant(self.train[0]), self.wanted

    @property
    def network(self) -> bc.Network:
        return bc.Network((self.train[0].shape[1] + 1, *self.hidden, self.classes), self.bound)

    def steps(self, epochs: int) -> int:
        return round(epochs * self.size / self.batch_size)


def with_constant(x: np.ndarray) -> np.ndarray:
    """Appends a feature that is always 1/2."""
    return np.concatenate([x, np.full((len(x), 1), 0.5, np.float32)], axis=1)


def generated() -> Problem:
    """2,600 records, 20 features, five classes, from scikit-learn; the data are always the same."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        n_samples=2600, n_features=20, n_informative=5, n_redundant=0, n_repeated=0, n_classes=5,
        n_clusters_per_class=1, class_sep=2.0, flip_y=0.01, shuffle=True, random_state=0,
    )  # fmt: skip
    # Public constants only: features have unit scale by construction.
    x = (x / (2 * math.sqrt(20))).astype(np.float32)
    return Problem(
        (x[:2080], y[:2080]), (x[2080:], y[2080:]), (32, 32, 32), 64, 1.5, 3.0, 0.5, 0.05, 0.5
    )


def madelon(data_dir: str) -> Problem:
    """NIPS-2003 Madelon: 2,000 and 600 records, 500 features around 478, two classes."""
    found = datasets.load("madelon", data_dir)
    pairs = ((found.train_x, found.train_y), (found.test_x, found.test_y))
    # 499.5 (x + 1) are the original columns, which are to be (column - 478) / (20 √500).
    parts = (((499.5 * x + 21.5) / (20 * math.sqrt(500)), y) for x, y in pairs)
    return Problem(*parts, (64, 64, 64), 100, 1.5, 3.0, 0.5, 0.05, 0.5)


def mnist(data_dir: str) -> Problem:
    """60,000 and 10,000 images of 784 pixels in [0, 1], divided by 10."""
    found = datasets.load("mnist", data_dir)
    flat = lambda x: np.asarray(x, np.float32).reshape(len(x), -1)  # noqa: E731
    scale = 1.0 if flat(found.train_x[:64]).max() <= 1.0 else 255.0
    train, test = (
        (flat(x) / scale / 10, np.asarray(y))
        for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y))
    )
    return Problem(train, test, (128,), 512, 1.5, 3.0, 8.0, 0.05, 0.5, projection=None)
