"""Arrays that are made of records are told from public ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.clipping import statistics

COLUMN = np.random.default_rng(0).normal(1.0, 2.0, size=(50, 5)).astype(np.float32)
SCATTER = np.linalg.eigh(np.cov(COLUMN.astype(np.float64), rowvar=False))
IMAGES = np.random.default_rng(1).random((40, 3, 4, 2)).astype(np.float32)


def made_of(value, columns):
    made = statistics.match_statistic(value, statistics.KnownRecords(columns))
    return ("", False) if made is None else (made.words, made.certain)


def told(value, columns):
    return made_of(np.asarray(value, np.float32), columns)


def called(rows, columns, sure=True):
    """Every array of the rows, words -> arrays, is told in these words and is certain or not."""
    for words, values in rows.items():
        for value in values:
            found, certain = told(value, columns)
            assert words in found, (words, found)
            assert certain is sure, words


def nobodys(values, columns):
    for value in values:
        assert told(value, columns) == ("", False), value


def test_statistics_and_records_are_told():
    sizes, axes = SCATTER
    rows = {
        "mean": [COLUMN.mean(0)],
        "deviation": [COLUMN.std(0), COLUMN.std(0, ddof=1)],
        "variance": [COLUMN.var(0)],
        "maximum": [COLUMN.max(0)],
        "median": [np.median(COLUMN, 0)],
        "first records": [COLUMN[:7].mean(0)],
        "one of the records": [COLUMN[3]],
        "several of the records": [COLUMN[[4, 9]]],
        "covariance": [np.cov(COLUMN, rowvar=False)],
        "quantile of 0.95": [np.quantile(COLUMN, 0.95, axis=0)],
        "principal directions": [axes[:, :2], axes[:, 3:].T, axes, np.linalg.svd(COLUMN)[2][:2]],
        "projection": [axes[:, 2:] @ axes[:, 2:].T],
        "whitening": [(axes / np.sqrt(sizes)).T, axes / np.sqrt(sizes) @ axes.T],
    }
    called(rows, [COLUMN])


def test_statistics_are_told_up_to_a_scale_in_few_digits_and_by_channel():
    rng = np.random.default_rng(16)
    wide = (rng.normal(size=(300, 20)) * rng.uniform(0.5, 3, 20) + 1).astype(np.float32)
    first = wide[:100].mean(0)
    called({"first records": [first / 255, -first, 2 * first - 1]}, [wide])
    for short in (np.float16, jnp.bfloat16):
        assert made_of(wide.mean(0).astype(short), [wide]) == ("the records' mean", True)
        words = "the records' inverse standard deviation"
        assert made_of((1 / wide.std(0)).astype(short), [wide]) == (words, True)
    images = rng.normal(size=(200, 5, 5, 3)).astype(np.float32)
    ends = images.min((0, 1, 2)), images.max((0, 1, 2))
    rows = {"minimum by channel": [ends[0]], "maximum by channel": [ends[1]]}
    called(rows | {"range by channel": [ends[1] - ends[0]]}, [images])
    # Many numbers at a bound, such as where pixels were cut: it was chosen before the records.
    bounds = np.array([1.1234567, 1.2345678, 0.9876543], np.float32)
    assert not told(bounds, [np.minimum(images, bounds)])[1]


def test_most_matrices_are_left_alone_after_two_products_with_a_direction(monkeypatch):
    """Products of whole matrices took most of a second for one of 1024 rows and columns."""
    rng = np.random.default_rng(15)
    random = rng.normal(size=(5, 5)).astype(np.float32)
    monkeypatch.setattr(np.linalg, "eigvalsh", lambda *_: pytest.fail("factored"))
    rotation = np.linalg.qr(random)[0]
    nobodys((random, rotation, rotation[:3], random[:3]), [COLUMN])


def test_directions_that_records_alike_in_all_directions_have_are_nobody_s():
    """Any rotation, and a cosine transform, was called directions of balanced one-hot labels."""
    width, rng = 16, np.random.default_rng(3)
    balanced = np.eye(width, dtype=np.float32)[np.arange(50 * width) % width]
    places = np.arange(width)
    cosines = np.cos(np.pi * np.outer(places, 2 * places + 1) / (2 * width))
    cosines /= np.linalg.norm(cosines, axis=1, keepdims=True)
    rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
    nobodys((rotation, cosines, cosines[3:6], rotation * 4), [balanced])
    flat = (rng.normal(size=(20, 2)) @ rotation[:2]).astype(np.float32)
    fitted = np.linalg.svd(flat - flat.mean(0), full_matrices=False)[2][:2]
    assert made_of(fitted, [flat]) == ("principal directions of the records", True)


def test_statistics_of_labels_and_by_class_are_told():
    labels = np.random.default_rng(2).integers(0, 3, 50).astype(np.int32)
    share = np.bincount(labels, minlength=3) / 50
    by_class = np.stack([COLUMN[labels == k].mean(0) for k in range(3)])
    rows = {"frequencies": [share, np.log(share)], "weights": [1 / share / 3]}
    for words, values in (rows | {"means by class": [by_class]}).items():
        for value in values:
            assert words in told(value, [COLUMN, labels])[0], words
    nobodys([np.full(3, 1 / 3)], [COLUMN, labels])


def test_single_numbers_are_told_and_certain_where_they_are_means_deviations_or_class_ratios():
    labels = (np.arange(51) < 14).astype(np.float32)
    share, norms = labels.mean(), np.linalg.norm(COLUMN, axis=1)
    unsure = {
        "quantile of 0.99": [np.quantile(COLUMN, 0.99)],
        "median norm": [np.median(norms)],
        "largest number": [COLUMN.max()],
    }
    sure = {
        "ratio of two classes": [(labels == 0).sum() / (labels == 1).sum()],
        "share of a class": [1 / share, np.log(share / (1 - share)), np.log(share)],
        "mean": [COLUMN.mean()],
        "inverse standard deviation": [1 / COLUMN.std(ddof=1)],
    }
    called(unsure, [COLUMN, labels], sure=False)
    called(sure, [COLUMN, labels])
    nobodys((0.1, 1.0, 2.0, 0.3333333, 0.001234), [COLUMN, labels])


def unit(width):
    rows = np.random.default_rng(10).normal(size=(200, width)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


ANGLES = np.random.default_rng(11).random(200) * 7
HALF = np.repeat([0, 1, 2], [500, 233, 267])


def test_numbers_that_a_record_alone_has_and_round_shares_are_nobody_s():
    """Lengths 1, sums 1, and a round share of a class among shares that are not."""
    for value, column in (
        (5 / np.sqrt(512), 5 * unit(512)),
        (np.sqrt(512) / 5, 5 * unit(512)),
        (19 / 31, (np.argsort(unit(31), axis=1) < 19).astype(np.float32)),
        (np.sqrt(0.5), np.stack([np.sin(ANGLES), np.cos(ANGLES)], 1)),
        (13 / 14, np.random.default_rng(12).dirichlet(np.ones(14), 200) * 13),
        (np.log(0.37), np.repeat([0, 1, 2], [370, 313, 317])),
    ):
        assert not told(value, [column])[1], value


def test_numbers_of_any_program_are_nobody_s():
    """Roots, logarithms and fractions of whole numbers; of 200 label sets a third had log 10."""
    for value in (
        *(384**-0.5, 1 / np.sqrt(12), np.log(10), np.log(2), 1 / np.log(3), np.sqrt(3), 1 / 1_013),
        *(np.pi, 2 * np.pi, np.e, np.sqrt(2 / np.pi), np.log(2 * np.pi) / 2, np.log(1_000), 5 / 7),
    ):
        records = np.random.default_rng(13).normal(size=50)
        records += value - records.mean()
        assert told(value, [records]) == ("", False)
        assert told(value + 1e-5, [records + 1e-5])[1]
    labels = np.repeat([0, 1, 2], [600, 400, 13])
    for value in (13 / 1_013, np.log(13 / 1_000), np.sqrt(13 / 1_013)):
        assert told(value, [labels])[1]
    assert told(np.log(233 / 1_000), [HALF])[1]
    assert told(unit(5)[:1].mean(), [unit(5)[:1]])[1]  # of one record


GAPS = COLUMN.copy()
GAPS[range(5), range(5)] = [np.nan, np.nan, np.inf, np.nan, -np.inf]
FINITE = np.where(np.isfinite(GAPS), GAPS, np.nan)
CLASSES = np.repeat([0, 1, 3], [13, 20, 17])


def test_gaps_hide_nothing():
    """NaN or infinity in the array or in the records turned the comparison off."""
    third_unknown = np.where(np.arange(5) == 3, np.nan, np.nanmean(FINITE, 0))
    rows = {
        "mean": [np.nanmean(FINITE, 0), third_unknown, np.nanmean(FINITE)],
        "deviation": [np.nanstd(FINITE, 0)],
        "maximum": [np.nanmax(FINITE, 0)],
        "covariance": [np.cov(GAPS[5:], rowvar=False)],
        "several": [np.concatenate([COLUMN[7:20], np.full((1, 5), np.nan)])],
    }
    called(rows, [GAPS])
    infinite = np.where(np.arange(50)[:, None] == 0, np.inf, COLUMN)
    called({"mean": [COLUMN[1:].mean(0)]}, [infinite])
    by_class = [np.nanmean(FINITE[np.equal(CLASSES, k)], 0) for k in (0, 1, 3)]
    called({"means by class": [by_class]}, [GAPS, CLASSES])
    labels = np.append(CLASSES, 3)  # and one of the classes has no records
    with np.errstate(divide="ignore"):
        assert told(np.log(np.bincount(labels) / 51), [labels])[1]
    mask = np.where(np.tri(5) > 0, 0, -np.inf)
    nobodys((mask, np.full(5, np.nan), np.array([1, np.inf, 2, np.nan, 3])), [GAPS])


def test_a_few_statistics_in_one_array_and_those_of_a_table_of_leaves_are_told():
    mean, std = COLUMN.mean(0), COLUMN.std(0)
    few = (np.stack([mean, std]), np.stack([std, mean], 1), np.tile(mean, (8, 1)))
    leaves = [*COLUMN.T, np.arange(50) % 3]  # a dictionary of columns
    for value, columns in (*((v, [COLUMN]) for v in few), (mean, leaves), (few[0], leaves)):
        assert made_of(value, columns)[1]
    rng = np.random.default_rng(14)
    two = np.stack([np.zeros(5), np.ones(5)])
    nobodys((rng.normal(size=(2, 5)), two, np.eye(5)[:2]), [COLUMN])
    # More channels are needed to be certain.
    called({"by channel": [IMAGES.mean((0, 1, 2))]}, [IMAGES], sure=False)


def test_large_data_are_screened_by_a_sample_first(monkeypatch):
    monkeypatch.setattr(statistics, "_SMALL", 50)
    for of in (np.mean, np.std, np.var, np.max, np.min):
        assert made_of(of(COLUMN, 0), [COLUMN])[1], of
    # Not asked for what is far from all.
    monkeypatch.setattr(statistics._Leaf, "whole", property(lambda leaf: pytest.fail("read")))
    far = COLUMN.mean(0) + 1.5 * COLUMN.std(0) * np.array([1, -1, 1, -1, 1], np.float32)
    nobodys([far], [COLUMN])


def test_other_arrays_are_left_alone():
    normal = [np.random.default_rng(seed).normal(size=(5, 5)) for seed in (3, 4, 5)]
    for value in (
        *(np.zeros(5), np.ones((2, 5)), np.arange(5.0), np.eye(5), np.eye(5)[:2]),
        *(np.diag([1.0, 1.0, 0.0, 0.0, 0.0]), np.full((5, 5), np.nan), np.zeros(0)),
        *(np.float32(0.5), np.array(["a"]), COLUMN.mean(0) + 0.01, normal[0][0]),
        *(np.linalg.qr(normal[1])[0], np.linalg.qr(normal[2][:, :2])[0]),
    ):
        assert made_of(np.asarray(value), [COLUMN]) == ("", False), value


def test_small_integers_that_equal_a_record_are_never_certain():
    tokens = np.array([[1, 2, 3, 0], [4, 5, 6, 7]], np.int32)
    assert made_of(tokens[1], [tokens]) == ("one of the records", False)
    many = np.random.default_rng(6).integers(0, 9, (30, 8))
    assert made_of(many[:5], [many]) == ("several of the records", False)


def test_three_exact_rows_or_columns_of_wide_records_are_enough_at_any_scale():
    rng = np.random.default_rng(7)
    pixels = rng.integers(0, 256, (200, 5, 4)).astype(np.uint8)
    bank = np.concatenate([rng.integers(0, 256, (90, 20)), pixels[[9, 50, 199]].reshape(3, 20)])
    for scale in (1, 1 / 255, -2):
        for value in (bank, bank.T, bank.reshape(-1, 5, 4)):
            assert told(value * scale + 0.5, [pixels])[1], scale
        assert told(bank[:-1] * scale, [pixels]) == ("", False), scale


def test_columns_of_large_records_are_compared_at_some_of_them_in_all_rows(monkeypatch):
    rng = np.random.default_rng(8)
    records = rng.random((500, 6, 9, 4)).astype(np.float32) * np.linspace(0, 1, 9)[:, None]
    flat, labels = records.reshape(500, -1), rng.integers(0, 3, 500)
    means = np.stack([flat[labels == k].mean(0) for k in range(3)])
    monkeypatch.setattr(statistics, "_SMALL", 500 * 20)
    (leaf, _) = (known := statistics.KnownRecords([records, labels])).leaves
    assert leaf.x.shape == (500, 20)
    for value in (flat.mean(0), -3 * flat.std(0).reshape(6, 9, 4), means, means[1], flat[:3]):
        assert statistics.match_statistic(value.astype(np.float32), known).certain
    assert statistics.match_statistic(records.mean((0, 1, 2)), known).certain  # of channels
    assert statistics.match_statistic(records.mean(), known).certain
    assert statistics.match_statistic(rng.random(flat.shape[1:]), known) is None


def test_what_nobody_computed_from_records_is_nobody_s():
    """One-hot records, bounds that records are clipped to, rows and columns that all share."""
    rng = np.random.default_rng(9)
    hot = np.eye(8, dtype=np.float32)[rng.integers(0, 8, 90)]
    bounds = np.exp(np.linspace(0, 1, 9)).astype(np.float32)
    clipped = np.clip(rng.normal(size=(90, 9)) * 4, -bounds, bounds).astype(np.float32)
    code = rng.normal(size=(5, 9)).astype(np.float32)
    places = np.sin(np.arange(9) / np.arange(2, 11)).astype(np.float32)
    share_rows, share_columns = np.repeat(code, 30, axis=0), np.tile(places, (90, 1))
    for value, column in (
        *((np.eye(8), hot), (bounds, clipped), (code, share_rows), (places, share_columns)),
        (np.round(clipped.mean(0), 3), clipped),
    ):
        assert not told(value, [column])[1]


def test_numbers_near_0_and_beyond_float32_are_compared_too():
    for value in (1e-200 / 3, 1e200 / 3, 5e-324):
        assert made_of(np.float64(value), [COLUMN]) == ("", False)
