"""What cannot be sampled from is refused with the remedy, and without the number of records."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from jax.experimental import sparse

import jaxdp
from jaxdp.sources import as_source


class Frame:
    """pandas' DataFrame."""

    columns = ("a",)
    shape = (23, 1)
    iloc = None

    def __len__(self):
        return 23

    def __getitem__(self, name):
        raise KeyError(name)

    def to_numpy(self):
        return np.zeros((23, 1))


class Sized:
    def __len__(self):
        return 23


class Iterated:
    def __iter__(self):
        return iter(())


class Table(Sized):
    """pyarrow's Table: [0] is a column."""

    columns = ()

    def __getitem__(self, index):
        return [1, 2, 3]

    def to_pandas(self):
        return Frame()


class TfDataset(Iterated):
    """tf.data.Dataset: a length that may be unknown, and no [index]."""

    def __len__(self):
        raise TypeError("The dataset length is unknown.")


class IterableDataset(Iterated):
    """torch's, of which the base class brings the index."""

    def __getitem__(self, index):
        raise NotImplementedError


class Counted(IterableDataset, Sized):
    pass


class DataLoader(Sized, Iterated):
    pass


class Iterator(Sized):
    def __getitem__(self, index):
        return index

    def __next__(self):
        return 1


class Splits(dict):
    """datasets.DatasetDict."""


STREAM = r"len\(data\) and data\[index\]"


def test_refused(subtests):
    for data, words in (
        ((i for i in range(3)), STREAM),
        ({"x": (i for i in range(3))}, STREAM),
        ({"x": np.ones(3)}.values(), STREAM),
        (map(str, [1]), STREAM),
        (TfDataset(), STREAM),
        (IterableDataset(), STREAM),
        (Counted(), STREAM),
        (DataLoader(), STREAM),
        (Iterator(), STREAM),
        ({1, 2}, STREAM),
        (3.0, STREAM),
        (object(), STREAM),
        (lambda: 1, STREAM),
        ("train.npy", "load"),
        (b"abc", "load"),
        (Splits(train=[1]), "choose a split"),
        (collections.UserDict(x=1), "choose a split"),
        (Frame(), "to_numpy"),
        ((Frame(), np.zeros(23)), "to_numpy"),
        (Table(), "to_numpy"),
        (scipy.sparse.eye(23).tocsr(), "sparse"),
        ({"x": scipy.sparse.coo_array(np.eye(23))}, "sparse"),
        (sparse.BCOO.fromdense(jnp.eye(23)), "sparse"),
        ((sparse.BCOO.fromdense(jnp.eye(23)), jnp.ones(23)), "sparse"),
        ({}, "at least one array"),
        ((), "at least one array"),
        (None, "must be given"),
        ({"x": None}, "at least one array"),
        (np.float32(1), "without axes"),
        ((jnp.ones(23), jnp.float32(1)), r"without axes in leaf \[1\]"),
        ({"x": np.ones(23), "y": np.ones(22)}, r"leaf \['y'\] than in leaf \['x'\]"),
        ((jnp.ones(23), jnp.ones(22)), "another number of"),
        ({"x": [1, 2, 3]}, "np.asarray"),
        ({"x": np.ones(23), "y": list(range(23))}, "np.asarray"),
        ({"x": object()}, "np.asarray"),
        (np.array([{}] * 23), "Python objects"),
        (np.array(["secret"] * 23), "text in the array: turn text into token ids"),
        (np.array([b"secret"] * 23), "bytes"),
        (np.zeros(23, [("a", "f4"), ("b", "i4")]), "fields of a structured array"),
        (np.zeros(23, "M8[s]"), "float32 or int32"),
        (np.zeros(23, "m8[s]"), "float32 or int32"),
        (np.ma.masked_array(np.zeros(23), np.ones(23, bool)), "masked"),
        (jax.random.split(jax.random.key(0), 23), "keys"),
        ([np.zeros((23, 2)), np.zeros(23)], "two ways"),
        ([np.zeros(23)] * 3, "two ways"),
        ([None, None], "at least one number"),
        ([{}, {}], "at least one number"),
        (["secret", "b"], "token ids"),
        ([(i for i in range(3))], "Python objects"),
        ([{1, 2}], "Python objects"),
    ):
        with subtests.test(f"{type(data)} {words}"):
            with pytest.raises(ValueError, match=words) as caught:
                as_source(data)
            for private in ("23", "22", "secret"):
                assert private not in str(caught.value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="no extended precision here")
def test_extended_precision_is_refused():
    with pytest.raises(ValueError, match="float32"):
        as_source(np.zeros(3, np.longdouble))


def test_more_records_than_can_be_counted_are_refused():
    values = np.broadcast_to(np.zeros(1, np.uint8), 2**53 + 1)
    with pytest.raises(ValueError, match=r"2\*\*53"):
        as_source(values)
    assert len(as_source(values[: 2**31])) == 2**31


class Batched:
    """Records that were batched by ``size``, as grain's ``.batch`` gives them."""

    def __init__(self, records, size):
        self.records, self.size = records, size

    def __len__(self):
        return -(-self.records // self.size)

    def __getitem__(self, index):
        rows = range(index * self.size, min(self.records, (index + 1) * self.size))
        return {"x": np.ones((len(rows), 3), np.float32), "y": np.zeros(len(rows), np.float32)}


def trained_on(source, records, loss=None, **options):
    loss = loss or (lambda p, r: jnp.mean((r["x"] @ p - r["y"]) ** 2))
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 20, records, **options)
    trainer = jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), source)
    trainer.init(jnp.zeros(3))
    return trainer


@pytest.mark.parametrize(("size", "rule"), [(2, "poisson"), (3, "poisson"), (2, "fixed_size")])
def test_a_source_that_was_batched_is_told(size, rule):
    """Before: taken for records by 2, and by 3 refused for a dataset_size that was right."""
    words = f"source must give one record for each index, got .* records batched by {size}"
    with pytest.raises(ValueError, match=words) as error:
        trained_on(Batched(200, size), 200, sampling=rule)
    assert str(-(-200 // size)) not in str(error.value)
    loss = lambda p, r: jnp.mean((r["x"] @ p - r["y"]) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=words):
        jaxdp.check(loss, jnp.zeros(3), Batched(200, size), jaxdp.dp_sgd(1.0, 1.0, 20, 200))


def test_groups_that_are_records_are_taken():
    trained_on(Batched(200, 2), 100)  # declared as many as they are
    trained_on({"x": np.ones((150, 2, 3), np.float32), "y": np.zeros((150, 2))}, 200)
    trained_on({"x": np.ones((100, 3), np.float32), "y": np.zeros(100)}, 200)  # no such axis
    users = jaxdp.sources.users(
        {"x": np.ones((200, 3), np.float32), "y": np.zeros(200)}, np.arange(200) // 2, 2
    )
    one = jaxdp.clipping.user_loss(lambda p, r: (r["x"] @ p - r["y"]) ** 2)
    trained_on(users, 200, one, records_per_user=2)


def test_an_empty_source_is_told_as_empty(subtests):
    """Before: a dataset_size that was refused, or nothing said."""
    empty = {"x": np.ones((0, 3), np.float32), "y": np.zeros(0)}
    words = "source must hold records to draw from, got an empty one"
    for rule, size in (("poisson", 20), ("fixed_size", 20), ("full_batch", 200)):
        mechanism = jaxdp.dp_sgd(1.0, 1.0, size, 200, rule)
        with subtests.test(rule=rule), pytest.raises(ValueError, match=words):
            jaxdp.Trainer(lambda p, r: r["x"] @ p, mechanism, optax.sgd(0.1), empty)
    with pytest.raises(ValueError, match="got an empty source"):
        as_source([])
