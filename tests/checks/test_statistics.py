"""Arrays that are made of records are told from public ones."""

import numpy as np
import pytest

from jaxdp.checks import statistics

COLUMN = np.random.default_rng(0).normal(1.0, 2.0, size=(50, 5)).astype(np.float32)
IMAGES = np.random.default_rng(1).random((40, 3, 4, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (COLUMN.mean(0), "mean"),
        (COLUMN.std(0), "deviation"),
        (COLUMN.std(0, ddof=1), "deviation"),
        (COLUMN.var(0), "variance"),
        (COLUMN.max(0), "maximum"),
        (np.median(COLUMN, 0), "median"),
        (COLUMN[:7].mean(0), "first records"),
        (COLUMN[3], "one of the records"),
        (COLUMN[[4, 9]], "2 of the records"),
        (np.cov(COLUMN, rowvar=False), "covariance"),
    ],
)
def test_statistics_and_records_are_told(value, words):
    found, certain = statistics.equal_to(value.astype(np.float32), [COLUMN])
    assert words in found
    assert certain


def test_statistics_of_labels_and_by_class_are_told():
    labels = np.random.default_rng(2).integers(0, 3, 50).astype(np.int32)
    share = np.bincount(labels, minlength=3) / 50
    for value, words in (
        (share, "frequencies"),
        (1 / share / 3, "weights"),
        (np.log(share), "frequencies"),
        (np.stack([COLUMN[labels == k].mean(0) for k in range(3)]), "means by class"),
    ):
        found, _ = statistics.equal_to(value.astype(np.float32), [COLUMN, labels])
        assert words in found
    assert statistics.equal_to(np.full(3, 1 / 3), [COLUMN, labels]) == ("", False)


def test_statistics_by_channel_need_more_channels_to_be_certain():
    found, certain = statistics.equal_to(IMAGES.mean((0, 1, 2)), [IMAGES])
    assert "by channel" in found
    assert not certain


@pytest.mark.parametrize("words", ["mean", "std", "var", "max", "min"])
def test_large_data_are_screened_by_a_sample_first(monkeypatch, words):
    monkeypatch.setattr(statistics, "_SMALL", 10)
    value = getattr(COLUMN, words)(0)
    assert statistics.equal_to(value, [COLUMN])[1]
    monkeypatch.setattr(statistics, "_statistics", None)  # not asked for what is far from all
    far = COLUMN.mean(0) + 1.5 * COLUMN.std(0) * np.array([1, -1, 1, -1, 1], np.float32)
    assert statistics.equal_to(far.astype(np.float32), [COLUMN]) == ("", False)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(5),
        np.ones((2, 5)),
        np.arange(5.0),
        np.eye(5),
        COLUMN.mean(0) + 0.01,
        np.random.default_rng(3).normal(size=5),
        np.float32(0.5),
        np.zeros(0),
        np.array(["a"]),
    ],
    ids=str,
)
def test_other_arrays_are_left_alone(value):
    assert statistics.equal_to(np.asarray(value), [COLUMN]) == ("", False)


def test_small_integers_that_equal_a_record_are_never_certain():
    tokens = np.array([[1, 2, 3, 0], [4, 5, 6, 7]], np.int32)
    words, certain = statistics.equal_to(tokens[1], [tokens])
    assert words == "one of the records"
    assert not certain
