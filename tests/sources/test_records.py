"""Sources that are read record by record."""

import collections

import jax
import numpy as np
import pytest

from jaxdp.sources import as_source
from jaxdp.sources.records import Records
from tests.sources.fakes import GrainRange, HuggingFace, MapDataset


def ask(source, *indices):
    return source.gather(np.array(indices, np.int32), np.ones(len(indices), bool))


class Reader:
    """Anything with ``len`` and ``[index]``."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = self.records[index]
        if isinstance(record, BaseException):
            raise record
        return record


def test_a_torch_dataset_gives_tuples():
    data = MapDataset()
    source = as_source(data)
    assert isinstance(source, Records)
    assert not source.on_device
    assert source.example == (
        jax.ShapeDtypeStruct((2, 2), np.float32),
        jax.ShapeDtypeStruct((), np.int32),
    )
    images, labels = ask(source, 5, 1, 5)
    np.testing.assert_array_equal(labels, [5, 1, 5])
    np.testing.assert_array_equal(images[:, 0, 0], [5, 1, 5])
    assert data.asked[1:] == [1, 5]


def test_hugging_face_is_read_by_the_batch():
    data = HuggingFace({"x": [[0.5, i] for i in range(4)], "y": list(range(4)), "flag": [True] * 4})
    found = ask(as_source(data), 3, 0, 3)
    np.testing.assert_array_equal(found["x"], np.array([[0.5, 3], [0.5, 0], [0.5, 3]], np.float32))
    np.testing.assert_array_equal(found["y"], np.array([3, 0, 3], np.int32))
    assert found["flag"].dtype == bool
    assert data.batches == [[0, 3]]


def test_grain_and_other_readers_of_single_numbers():
    buffer = np.zeros(2, np.float32)

    class Reuses(Reader):
        def __getitem__(self, index):
            buffer[:] = index
            return buffer

    np.testing.assert_array_equal(ask(as_source(GrainRange(5)), 4, 0), np.array([4, 0], np.int32))
    np.testing.assert_array_equal(ask(as_source(range(10, 20)), 9), [19])
    np.testing.assert_array_equal(ask(as_source(Reuses([0] * 5)), 3, 1), [[3, 3], [1, 1]])


def test_a_list_is_a_list_of_records():
    Record = collections.namedtuple("Record", "x y")
    found = ask(as_source([Record(np.full(2, i, np.float32), {"z": i}) for i in range(3)]), 2, 1)
    np.testing.assert_array_equal(found.x, [[2, 2], [1, 1]])
    np.testing.assert_array_equal(found.y["z"], [2, 1])


def test_a_list_of_numbers_within_a_record_is_one_array():
    source = as_source([{"x": [[1, 2], [3, 4]], "pair": [np.zeros(2), np.ones(3)]}] * 2)
    assert source.example["x"].shape == (2, 2)
    assert [leaf.shape for leaf in source.example["pair"]] == [(2,), (3,)]


def test_padding_is_zeros_and_is_not_read():
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


def test_indices_outside_are_refused():
    for index in (-1, 7):
        with pytest.raises(ValueError, match="within the source"):
            ask(as_source(MapDataset()), 0, index)


def test_an_empty_source_needs_an_example():
    with pytest.raises(ValueError, match="example must be given"):
        as_source([])
    source = as_source([], example={"x": np.zeros(2)})
    assert len(source) == 0
    assert source.gather(np.zeros(2, int), np.zeros(2, bool))["x"].shape == (2, 2)


def test_a_declared_example_sets_the_dtype_and_has_a_shape():
    source = as_source([1, 2.5], example=jax.ShapeDtypeStruct((), np.float32))
    np.testing.assert_array_equal(ask(source, 1, 0), np.array([2.5, 1], np.float32))
    for example in ({}, "x", {"x": 1}):
        with pytest.raises(ValueError, match="example must be"):
            as_source([1, 2], example=example)
    with pytest.raises(ValueError, match="example must be None"):
        as_source(np.ones(3), example=np.ones(()))


def test_records_of_another_form_are_refused_without_showing_them(subtests):
    for other, words in (
        ({"x": [1.0, 2.0, 3.0]}, "shape"),
        ({"x": 1.0}, "shape"),
        ({"x": [1.5 + 2j, 2.0]}, "complex128"),
        ({"x": None}, "missing value"),
        ({}, "structure"),
        (None, "structure"),
        ({"x": ["a", "b"]}, "structure"),
        ({"x": "secret"}, "token ids"),
        ({"x": [[1.0], [2.0, 4.0]]}, "unlike lengths"),
        ({"x": [1.0, "secret"]}, "token ids"),
        ({"x": np.ma.masked_array([1.0, 2.0], [True, False])}, "masked"),
        ({"x": np.array([1, 2], "M8[s]")}, "float32 or int32"),
    ):
        with subtests.test(other=other):
            with pytest.raises(ValueError, match=words) as caught:
                ask(as_source([{"x": [1.0, 2.0]}] * 22 + [other]), 0, 22)
            for private in ("22", "23", "secret", "[3]", "3.0"):
                assert private not in str(caught.value)
    # Numbers that would lose something.
    for number, words in ((2.5, "example="), (2**40, "fit int32"), (2**70, "Python objects")):
        with subtests.test(number=number), pytest.raises(ValueError, match=words):
            ask(as_source([1, number]), 1)


def test_errors_of_the_reader_are_its_own():
    for error in (KeyError("gone"), OSError("disk"), IndexError("0")):
        with pytest.raises(type(error)) as caught:
            ask(as_source(Reader([1, error])), 0, 1)
        assert caught.value is error
    # It does not end the training quietly.
    with pytest.raises(RuntimeError, match="StopIteration"):
        ask(as_source(Reader([1, StopIteration()])), 0, 1)


def test_readers_of_another_length_than_they_say_are_refused():
    class Short(HuggingFace):
        def __getitems__(self, keys):
            return super().__getitems__(keys)[1:]

    class Endless(GrainRange):
        def __len__(self):
            return 2**63 - 1

    with pytest.raises(ValueError, match="one record for each index"):
        ask(as_source(Short({"y": [1, 2, 3]})), 0, 1)
    records = [1, 2, 3]
    source = as_source(records)
    records.append(4)
    with pytest.raises(ValueError, match="keep its number of records"):
        ask(source, 0)
    with pytest.raises(ValueError, match="repeat"):
        as_source(Endless(3))


def test_nothing_printed_shows_records_or_their_number():
    assert "31" not in repr(as_source([3.5] * 31))


def test_decoded_images_and_bytes():
    from PIL import Image

    images = [{"image": Image.fromarray(np.full((2, 3), i, np.uint8))} for i in range(3)]
    found = ask(as_source(images), 2)["image"]
    np.testing.assert_array_equal(found, np.full((1, 2, 3), 2, np.uint8))
    with pytest.raises(ValueError, match="decoding"):
        as_source([b"abcd"])
