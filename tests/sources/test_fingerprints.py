"""Sources that read differently each time are told; identities follow from each record alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.sources import as_source, padded_text, users
from jaxdp.sources.fingerprints import check_repeatable
from jaxdp.sources.identities import identities
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


def test_a_source_that_reads_differently_is_refused_with_the_remedy():
    for data in (
        Flipping(),
        Flipping(17),
        Columns(),
        (np.zeros(50, np.float32), Columns()),
        users(Flipping(), np.arange(100) // 2, 2),
    ):
        with pytest.raises(ValueError, match=r"same record each time .* jaxdp\.augmented\(loss_fn"):
            check_repeatable(as_source(data))


def test_sixteen_records_are_read_over_the_whole_source_at_places_that_are_public():
    source = Flipping(31)
    source.rng = type("Never", (), {"choice": lambda self, sides: sides[0]})()
    source = as_source(source)
    source.data.asked.clear()
    check_repeatable(source)
    assert source.data.asked == 2 * [2 * place for place in range(16)]


def test_sources_that_read_the_same_pass():
    for data in (
        MapDataset(),
        MapDataset(100),
        GrainRange(40),
        HuggingFace({"x": [[float(i), float("nan")] for i in range(30)], "y": list(range(30))}),
        [{"x": np.float32(np.nan)} for _ in range(20)],
        padded_text([[1, 2, 3], [4]], 4),
    ):
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


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 3)).astype(np.float32), np.arange(50, dtype=np.int32)


def records(x, y):
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"x": jnp.asarray(x), "y": jnp.asarray(y)},
        records,
    ],
    ids=["host", "device", "one by one"],
)
def test_the_same_record_has_the_same_identity_wherever_it_lies(make):
    whole = identities(as_source(make(X, Y)))
    assert len(set(whole.tolist())) == 50
    order = RNG.permutation(50)
    np.testing.assert_array_equal(identities(as_source(make(X[order], Y[order]))), whole[order])
    fewer = np.delete(np.arange(50), 7)
    np.testing.assert_array_equal(identities(as_source(make(X[fewer], Y[fewer]))), whole[fewer])


def test_every_leaf_of_a_record_counts():
    plain = identities(as_source((X, Y)))
    for x, y in [(X + np.eye(50, 3, dtype=np.float32), Y), (X, Y + (np.arange(50) == 3))]:
        changed = identities(as_source((x, y.astype(np.int32))))
        assert 0 < np.sum(changed != plain) <= 3


def test_more_records_than_are_read_together():
    many = identities(as_source(np.arange(10_000, dtype=np.int32)))
    assert len(set(many.tolist())) == 10_000


class Named:
    """A source of the caller's own."""

    def __init__(self, names):
        self.inner, self.identities = as_source((X, Y)), names
        self.example, self.on_device = self.inner.example, False

    def __len__(self):
        return len(self.inner)

    def gather(self, indices, mask):
        raise AssertionError("nothing is read")


def test_a_source_may_name_its_records():
    names = [f"record {i}" for i in range(50)]
    assert identities(Named(names)) == names
    with pytest.raises(ValueError, match="identities must be as many as the records"):
        identities(Named(names[1:]))
