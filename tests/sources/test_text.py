"""Sequences brought to one length."""

import numpy as np
import pytest

from jaxdp.sources import as_source, padded_text
from tests.sources.fakes import HuggingFace, Tensor

TEXTS = [[], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def ask(source, *indices):
    return source.gather(np.array(indices, np.int32), np.ones(len(indices), bool))


MAKERS = {
    "list": list,
    "array": np.array,
    "int64": lambda ids: np.array(ids, np.int64),
    "tuple": tuple,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_longer_texts_are_cut_and_shorter_ones_padded(make):
    texts = [make(ids) if ids else [] for ids in TEXTS]
    source = as_source(padded_text(texts, 3, pad_id=-1))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in source.example.items()} == {
        "tokens": ((3,), np.int32),
        "mask": ((3,), bool),
    }
    found = ask(source, 1, 0, 2, 3)
    np.testing.assert_array_equal(
        found["tokens"], [[1, 2, 3], [-1, -1, -1], [6, 7, -1], [8, 9, 10]]
    )
    np.testing.assert_array_equal(
        found["mask"], [[True] * 3, [False] * 3, [True, True, False], [True] * 3]
    )


def test_a_field_of_a_record_is_padded_and_the_others_stay():
    data = HuggingFace({"ids": TEXTS, "label": [0, 1, 2, 3], "other": TEXTS})
    source = as_source(padded_text(padded_text(data, 4, field="ids"), 2, field="other"))
    found = ask(source, 2, 1)
    np.testing.assert_array_equal(found["ids"], [[6, 7, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_array_equal(found["ids_mask"].sum(1), [2, 4])
    np.testing.assert_array_equal(found["other"], [[6, 7], [1, 2]])
    np.testing.assert_array_equal(found["label"], [2, 1])
    assert data.batches == [[1, 2]]


def test_rows_that_are_padding_are_masked_whole():
    found = as_source(padded_text(TEXTS, 3)).gather(np.array([1, 0]), np.array([True, False]))
    assert not found["mask"][1].any()


def test_tensors_and_the_limits_of_int32():
    texts = [Tensor(np.array([2**31 - 1, -(2**31)]))]
    np.testing.assert_array_equal(
        ask(as_source(padded_text(texts, 2)), 0)["tokens"][0], texts[0].numpy()
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1.5, 2.0], "integers"),
        ([[1, 2], [3, 4]], "integers"),
        ([True, False], "integers"),
        (5, "integers"),
        ("secret", "token ids"),
        (["secret"], "token ids"),
        ([2**31], "fit int32"),
        ([[1], [2, 3]], "unlike lengths"),
        (None, "Python objects"),
    ],
)
def test_other_sequences_are_refused_without_showing_them(record, words):
    with pytest.raises(ValueError, match=words) as caught:
        ask(as_source(padded_text([[1, 2], record], 3)), 0, 1)
    assert "secret" not in str(caught.value)
    assert str(2**31) not in str(caught.value)


@pytest.mark.parametrize("record", [{"other": [1]}, [1, 2], {"ids": [1], "ids_mask": [1]}])
def test_a_field_that_is_not_there_or_a_mask_that_is_are_refused(record):
    with pytest.raises(ValueError, match="field must be a key"):
        as_source(padded_text([record], 3, field="ids"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": 2.5}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"max_length": 3, "pad_id": 2**31}, "pad_id"),
        ({"max_length": 3, "pad_id": -(2**31) - 1}, "pad_id"),
        ({"max_length": 3, "pad_id": 0.5}, "pad_id"),
        ({"max_length": 3, "data": iter(TEXTS)}, "stream"),
    ],
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        padded_text(**{"data": TEXTS, **arguments})


def test_nothing_printed_shows_records():
    assert "123456" not in repr(padded_text([[123456]], 3))
