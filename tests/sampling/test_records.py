"""Sources that are read record by record, and what is refused without the number of records."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from jax.experimental import sparse
from PIL import Image

import jaxdp
from jaxdp.sampling import as_source, padded_text, users
from jaxdp.sampling.hashes import check_repeatable, identities
from jaxdp.sampling.source import Records
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.sampling.fakes import GrainRange, HuggingFace, MapDataset, ask, refused_without


class Reader(collections.UserList):
    """Anything with ``len`` and ``[index]``, whose errors are its own."""

    def __getitem__(self, index):
        record = self.data[index]
        if isinstance(record, BaseException):
            raise record
        return record


def test_a_torch_dataset_gives_tuples():
    data = MapDataset()
    source = as_source(data)
    assert isinstance(source, Records)
    assert not source.on_device
    form = jax.ShapeDtypeStruct
    assert source.example == (form((2, 2), np.float32), form((), np.int32))
    images, labels = ask(source, 5, 1, 5)
    np.testing.assert_array_equal(labels, [5, 1, 5])
    np.testing.assert_array_equal(images[:, 0, 0], [5, 1, 5])
    assert data.asked[1:] == [1, 5]


def test_hugging_face_is_read_by_the_batch_and_others_one_by_one():
    data = HuggingFace({"x": [[0.5, i] for i in range(4)], "y": list(range(4)), "flag": [True] * 4})
    found = ask(as_source(data), 3, 0, 3)
    np.testing.assert_array_equal(found["x"], np.array([[0.5, 3], [0.5, 0], [0.5, 3]], np.float32))
    np.testing.assert_array_equal(found["y"], np.array([3, 0, 3], np.int32))
    assert found["flag"].dtype == bool
    assert data.batches == [[0, 3]]
    # Grain and other readers give single numbers.
    buffer = np.zeros(2, np.float32)

    class Reuses(Reader):
        def __getitem__(self, index):
            buffer[:] = index
            return buffer

    np.testing.assert_array_equal(ask(as_source(GrainRange(5)), 4, 0), np.array([4, 0], np.int32))
    np.testing.assert_array_equal(ask(as_source(range(10, 20)), 9), [19])
    np.testing.assert_array_equal(ask(as_source(Reuses([0] * 5)), 3, 1), [[3, 3], [1, 1]])


def test_a_list_is_a_list_of_records_and_images_are_decoded():
    Record = collections.namedtuple("Record", "x y")
    found = ask(as_source([Record(np.full(2, i, np.float32), {"z": i}) for i in range(3)]), 2, 1)
    np.testing.assert_array_equal(found.x, [[2, 2], [1, 1]])
    np.testing.assert_array_equal(found.y["z"], [2, 1])
    # A list of numbers within a record is one array.
    source = as_source([{"x": [[1, 2], [3, 4]], "pair": [np.zeros(2), np.ones(3)]}] * 2)
    assert source.example["x"].shape == (2, 2)
    assert [leaf.shape for leaf in source.example["pair"]] == [(2,), (3,)]
    images = [{"image": Image.fromarray(np.full((2, 3), i, np.uint8))} for i in range(3)]
    found = ask(as_source(images), 2)["image"]
    np.testing.assert_array_equal(found, np.full((1, 2, 3), 2, np.uint8))
    refused("decoding", as_source, [b"abcd"])


def test_padding_is_zeros_and_is_not_read_and_an_empty_source_needs_an_example():
    data = MapDataset()
    images, labels = as_source(data).gather(np.array([-1, 3, 99]), np.array([False, True, False]))
    np.testing.assert_array_equal(labels, [0, 3, 0])
    np.testing.assert_array_equal(images[[0, 2]], 0)
    assert data.asked == [0, 3]
    data = HuggingFace({"y": [1, 2]})
    found = as_source(data).gather(np.zeros(3, int), np.zeros(3, bool))["y"]
    np.testing.assert_array_equal(found, 0)
    assert as_source(data).gather(np.zeros(0, int), np.zeros(0, bool))["y"].shape == (0,)
    assert data.batches == []
    for index in (-1, 7):
        refused("within the source", ask, as_source(MapDataset()), 0, index)
    # One that is declared sets the dtype and has a shape.
    refused("example must be given", as_source, [])
    source = as_source([], example={"x": np.zeros(2)})
    assert len(source) == 0
    assert source.gather(np.zeros(2, int), np.zeros(2, bool))["x"].shape == (2, 2)
    source = as_source([1, 2.5], example=jax.ShapeDtypeStruct((), np.float32))
    np.testing.assert_array_equal(ask(source, 1, 0), np.array([2.5, 1], np.float32))
    for example in ({}, "x", {"x": 1}):
        refused("example must be", as_source, [1, 2], example=example)
    refused("example must be None", as_source, np.ones(3), example=np.ones(()))


def test_records_of_another_form_are_refused_without_showing_them():
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    # fmt: off
    for words, *others in (
        ("shape", {"x": [1.0, 2.0, 3.0]}, {"x": 1.0}), ("complex128", {"x": [1.5 + 2j, 2.0]}),
        ("missing value", {"x": None}), ("structure", {}, None, {"x": ["a", "b"]}),
        ("token ids", {"x": "secret"}, {"x": [1.0, "secret"]}), ("masked", {"x": masked}),
        ("unlike lengths", {"x": [[1.0], [2.0, 4.0]]}),
        ("float32 or int32", {"x": np.array([1, 2], "M8[s]")}),
    ):
        for other in others:
            source = as_source([{"x": [1.0, 2.0]}] * 22 + [other])
            refused_without(r"22|23|secret|\[3\]|3\.0", words, ask, source, 0, 22)
    # fmt: on
    # Numbers that would lose something.
    for number, words in ((2.5, "example="), (2**40, "fit int32"), (2**70, "Python objects")):
        refused(words, ask, as_source([1, number]), 1)


def test_errors_of_a_reader_are_its_own_and_one_of_another_length_than_it_says_is_refused():
    for error in (KeyError("gone"), OSError("disk"), IndexError("0")):
        with pytest.raises(type(error)) as caught:
            ask(as_source(Reader([1, error])), 0, 1)
        assert caught.value is error
    # It does not end the training quietly.
    source = as_source(Reader([1, StopIteration()]))
    refused("StopIteration", ask, source, 0, 1, error=RuntimeError)

    class Short(HuggingFace):
        def __getitems__(self, keys):
            return super().__getitems__(keys)[1:]

    class Endless(GrainRange):
        def __len__(self):
            return 2**63 - 1

    refused("one record for each index", ask, as_source(Short({"y": [1, 2, 3]})), 0, 1)
    records = [1, 2, 3]
    source = as_source(records)
    records.append(4)
    refused("keep its number of records", ask, source, 0)
    refused("repeat", as_source, Endless(3))
    assert "31" not in repr(as_source([3.5] * 31))


def kind(name, *bases, **members):
    """A class of a library that is not installed here, by its name and what it has."""
    return type(name, bases, members)


def raising(error):
    def raises(*args):
        raise error

    return raises


SIZED, ITERATED = {"__len__": lambda self: 23}, {"__iter__": lambda self: iter(())}
UNKNOWN = {"__len__": raising(TypeError("The dataset length is unknown."))}
BASE = {"__getitem__": raising(NotImplementedError()), **ITERATED}
INDEXED = {"__getitem__": lambda self, index: [1, 2, 3]}
ITERABLE = kind("IterableDataset", **BASE)  # torch's, of which the base class brings the index
STREAMS = (
    kind("TfDataset", **ITERATED, **UNKNOWN)(),
    ITERABLE(),
    kind("Counted", ITERABLE, **SIZED)(),
    kind("DataLoader", **SIZED, **ITERATED)(),
    kind("Iterator", **SIZED, **INDEXED, __next__=lambda self: 1)(),
)
FRAME = kind(
    "DataFrame",
    **{"columns": ("a",), "shape": (23, 1), "iloc": None, **SIZED},
    to_numpy=lambda self: np.zeros((23, 1)),
    __getitem__=raising(KeyError("a")),
)()
# pyarrow's, of which [0] is a column.
TABLE = kind("Table", columns=(), to_pandas=lambda self: FRAME, **SIZED, **INDEXED)()


STREAM = r"len\(data\) and data\[index\]"


def test_what_is_no_source_is_refused_without_showing_how_many_or_which_records_there_are():
    eye, bcoo, single = scipy.sparse.eye(23), sparse.BCOO.fromdense(jnp.eye(23)), jnp.float32(1)
    on, off = np.ones(23), np.ones(22)
    # fmt: off
    for words, *many in (
        (STREAM, (i for i in range(3)), {"x": (i for i in range(3))}, {"x": on}.values(),
         map(str, [1]), *STREAMS, {1, 2}, 3.0, object(), lambda: 1),
        ("load", "train.npy", b"abc"),
        ("choose a split", kind("Splits", dict)(train=[1]), collections.UserDict(x=1)),
        ("to_numpy", FRAME, (FRAME, on), TABLE),
        ("sparse", eye.tocsr(), {"x": scipy.sparse.coo_array(eye)}, bcoo, (bcoo, jnp.ones(23))),
        ("at least one array", {}, (), {"x": None}), ("must be given", None),
        ("without axes", np.float32(1)), (r"without axes in leaf \[1\]", (jnp.ones(23), single)),
        (r"leaf \['y'\] than in leaf \['x'\]", {"x": on, "y": off}),
        ("another number of", (jnp.ones(23), jnp.ones(22))),
        ("np.asarray", {"x": [1, 2, 3]}, {"x": on, "y": list(range(23))}, {"x": object()}),
        # A column of a table: a public list of categories, in words.
        ("text in the array: give categories as integers, by a public list",
         np.array(["secret"] * 23), np.array(["secret"] * 23, np.dtypes.StringDType())),
        ("object in the array.*a public list", np.array(["secret"] * 23, object)),
        ("bytes.*a public list", np.array([b"secret"] * 23)),
        ("fields of a structured array", np.zeros(23, [("a", "f4"), ("b", "i4")])),
        ("float32 or int32", np.zeros(23, "M8[s]"), np.zeros(23, "m8[s]")),
        ("masked", np.ma.masked_array(on, np.ones(23, bool))),
        ("keys", jax.random.split(jax.random.key(0), 23)),
        ("two ways", [np.zeros((23, 2)), on], [on] * 3),
        ("at least one number", [None, None], [{}, {}]), ("token ids", ["secret", "b"]),
        ("Python objects", np.array([{}] * 23), [(i for i in range(3))], [{1, 2}]),
    ):
        for data in many:
            refused_without("23|22|secret", words, as_source, data)
    # fmt: on
    if np.dtype(np.longdouble).itemsize > 8:
        refused("float32", as_source, np.zeros(3, np.longdouble))
    values = np.broadcast_to(np.zeros(1, np.uint8), 2**53 + 1)
    refused("2**53", as_source, values)
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


def loss_fn(params, record):
    return jnp.mean((record["x"] @ params - record["y"]) ** 2)


def trained_on(source, records, loss=loss_fn, **options):
    mechanism = sgd_of(1.0, 1.0, 20, records, **options)
    trainer = jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), source)
    trainer.init(jnp.zeros(3))
    return trainer


def test_a_source_that_was_batched_is_told():
    """Before: taken for records by 2, and by 3 refused for a dataset_size that was right."""
    for size, rule in ((2, "poisson"), (3, "poisson"), (2, "fixed_size")):
        words = f"source must give one record for each index, got .* records batched by {size}"
        source, private = Batched(200, size), str(-(-200 // size))
        refused_without(private, words, trained_on, source, 200, sampling=rule)
        mechanism = sgd_of(1.0, 1.0, 20, 200)
        refused(words, jaxdp.check, loss_fn, jnp.zeros(3), source, mechanism)
    # Groups that are records are taken.
    trained_on(Batched(200, 2), 100)  # declared as many as they are
    trained_on({"x": np.ones((150, 2, 3), np.float32), "y": np.zeros((150, 2))}, 200)
    trained_on({"x": np.ones((100, 3), np.float32), "y": np.zeros(100)}, 200)  # no such axis
    each = {"x": np.ones((200, 3), np.float32), "y": np.zeros(200)}
    grouped, loss = users(each, np.arange(200) // 2, 2), jaxdp.clipping.user_loss(loss_fn)
    trained_on(grouped, 200, loss, records_per_user=2)
    # An empty source is told as empty. Before: a dataset_size that was refused, or nothing said.
    empty = {"x": np.ones((0, 3), np.float32), "y": np.zeros(0)}
    words = "source must hold records to draw from, got an empty one"
    for rule, size in (("poisson", 20), ("fixed_size", 20), ("full_batch", 200)):
        mechanism = sgd_of(1.0, 1.0, size, 200, rule)
        refused(words, jaxdp.Trainer, loss_fn, mechanism, optax.sgd(0.1), empty)
    refused("got an empty source", as_source, [])


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
    words = r"same record each time .* jaxdp\.augmented\(loss_fn"
    pair, grouped = (np.zeros(50, np.float32), Columns()), users(Flipping(), np.arange(100) // 2, 2)
    for data in (Flipping(), Flipping(17), Columns(), pair, grouped):
        refused(words, check_repeatable, as_source(data))
    # Sixteen records are read over the whole source, at places that are public.
    source = Flipping(31)
    source.rng = type("Never", (), {"choice": lambda self, sides: sides[0]})()
    source = as_source(source)
    source.data.asked.clear()
    check_repeatable(source)
    assert source.data.asked == 2 * [2 * place for place in range(16)]


def test_sources_that_read_the_same_pass_and_arrays_are_not_read(tmp_path):
    columns = {"x": [[float(i), float("nan")] for i in range(30)], "y": list(range(30))}
    own, text = [{"x": np.float32(np.nan)} for _ in range(20)], padded_text([[1, 2, 3], [4]], 4)
    for data in (MapDataset(), MapDataset(100), GrainRange(40), HuggingFace(columns), own, text):
        check_repeatable(as_source(data))

    class Unread(np.memmap):
        def __getitem__(self, key):
            raise AssertionError

    np.save(tmp_path / "x.npy", np.zeros((20, 2), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = as_source((mapped, np.zeros(20)))
    object.__setattr__(source, "gather", None)
    check_repeatable(source)
    own = as_source(mapped.view(Unread))  # an array type of a user's own is
    refused("", check_repeatable, own, error=AssertionError)


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 3)).astype(np.float32), np.arange(50, dtype=np.int32)


MADE = {
    "records": lambda x, y: [{"x": a, "y": b} for a, b in zip(x, y, strict=True)],
    "on the host": lambda x, y: {"x": x, "y": y},
    "on the device": lambda x, y: {"x": jnp.asarray(x), "y": jnp.asarray(y)},
}


def test_the_same_record_has_the_same_identity_wherever_it_lies_and_every_leaf_counts():
    for name, make in MADE.items():
        whole = identities(as_source(make(X, Y)))
        assert len(set(whole.tolist())) == 50
        for rows in (RNG.permutation(50), np.delete(np.arange(50), 7)):
            found = identities(as_source(make(X[rows], Y[rows])))
            np.testing.assert_array_equal(found, whole[rows], name)
    plain = identities(as_source((X, Y)))
    for x, y in [(X + np.eye(50, 3, dtype=np.float32), Y), (X, Y + (np.arange(50) == 3))]:
        changed = identities(as_source((x, y.astype(np.int32))))
        assert 0 < np.sum(changed != plain) <= 3
    # More records than are read together.
    many = identities(as_source(np.arange(10_000, dtype=np.int32)))
    assert len(set(many.tolist())) == 10_000
    # A source may name its records.
    names = [f"record {i}" for i in range(50)]
    assert identities(Named(names)) == names
    refused("identities must be as many as the records", identities, Named(names[1:]))


class Named:
    """A source of the caller's own."""

    def __init__(self, names):
        self.inner, self.identities = as_source((X, Y)), names
        self.example, self.on_device = self.inner.example, False

    def __len__(self):
        return len(self.inner)

    def gather(self, indices, mask):
        raise AssertionError("nothing is read")
