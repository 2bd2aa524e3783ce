"""Identities of records follow from each record alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.sources import as_source
from jaxdp.sources.identities import identities

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
