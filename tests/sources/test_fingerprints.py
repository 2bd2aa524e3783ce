"""Sources that read differently each time are told, and all others pass."""

import numpy as np
import pytest

from jaxdp.sources import as_source, padded_text, users
from jaxdp.sources.fingerprints import check_repeatable
from tests.sources.fakes import GrainRange, HuggingFace, MapDataset


class Flipping:
    """Images, each flipped with probability ½ whenever it is read."""

    def __init__(self, size=100):
        self.x = np.random.default_rng(0).normal(size=(size, 2, 2)).astype(np.float32)
        self.rng, self.asked = np.random.default_rng(1), []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.x[index][:, :: self.rng.choice([-1, 1])]


class Columns:
    """An array-like of a user's own that adds noise, read by an array of indices."""

    shape, dtype = (50, 3), np.dtype(np.float32)

    def __getitem__(self, indices):
        return np.random.default_rng().normal(size=(len(indices), 3)).astype(np.float32)


@pytest.mark.parametrize(
    "data", [Flipping(), Flipping(17), Columns(), (np.zeros(50, np.float32), Columns())]
)
def test_a_source_that_reads_differently_is_refused_with_the_remedy(data):
    with pytest.raises(ValueError, match=r"same record each time .* jaxdp\.augmented\(loss_fn"):
        check_repeatable(as_source(data))


def test_users_of_such_a_source_too():
    with pytest.raises(ValueError, match="same record each time"):
        check_repeatable(users(Flipping(), np.arange(100) // 2, 2))


def test_sixteen_records_are_read_over_the_whole_source_at_places_that_are_public():
    source = Flipping(31)
    source.rng = type("Never", (), {"choice": lambda self, sides: sides[0]})()
    source = as_source(source)
    source.data.asked.clear()
    check_repeatable(source)
    assert source.data.asked == 2 * [2 * place for place in range(16)]


@pytest.mark.parametrize(
    "data",
    [
        MapDataset(),
        MapDataset(100),
        GrainRange(40),
        HuggingFace({"x": [[float(i), float("nan")] for i in range(30)], "y": list(range(30))}),
        [{"x": np.float32(np.nan)} for _ in range(20)],
        padded_text([[1, 2, 3], [4]], 4),
    ],
)
def test_sources_that_read_the_same_pass(data):
    check_repeatable(as_source(data))


def test_arrays_are_not_read(tmp_path):
    class Unread(np.memmap):
        def __getitem__(self, key):
            raise AssertionError

    np.save(tmp_path / "x.npy", np.zeros((20, 2), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = as_source((mapped, np.zeros(20)))
    object.__setattr__(source, "gather", None)
    check_repeatable(source)
    with pytest.raises(AssertionError):  # an array type of a user's own is
        check_repeatable(as_source(mapped.view(Unread)))
