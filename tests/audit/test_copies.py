"""Records that stand several times are found; those that are alike by chance are not."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.audit.copies import check_preprocess, find_copies
from jaxdp.sampling import as_source, users
from tests.refusing import refused

N, RNG = 2_000, np.random.default_rng(0)
FLOATS = RNG.normal(size=(N, 10)).astype(np.float32)
LABELS = RNG.integers(0, 2, N)
SPARSE = np.where(RNG.random((N, 64)) < 0.02, RNG.integers(1, 9, (N, 64)), 0)
SLOTS = np.where(np.arange(16) % 3 == 0, RNG.integers(0, 4, (N, 16)), np.arange(16))
TEXTS = RNG.integers(1, 5_000, (N, 64)) * (np.arange(64) < RNG.geometric(0.05, (N, 1)))
BLANK = np.where(np.arange(N)[:, None] < 600, 0, RNG.random((N, 300)))


def repeated(data, of, times):
    """With the first ``of`` records so many times."""
    rows = np.repeat(np.arange(N), np.where(np.arange(N) < of, times, 1))
    return tuple(leaf[rows] for leaf in data)


class Lazy:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return FLOATS[self.rows[at]]


# (records, expected (certain, (records that stand several times, records looked at)))
COPIES = {
    "oversampled": (repeated((FLOATS, LABELS), 100, 19), (True, (1_900, 3_800))),
    "one record three times": (repeated((FLOATS,), 1, 3), (True, (3, 2_002))),
    "one pair in two thousand": (repeated((FLOATS,), 1, 2), (False, (2, 2_001))),
    "long texts, and short ones": (repeated((TEXTS,), 100, 5), True),
    "images, and blank ones": (tuple(leaf[::-1] for leaf in repeated((BLANK,), 700, 3)), True),
    "rows side by side, read one by one": (Lazy(np.repeat(np.arange(N), 2)), True),
    "a set twice, read one by one": (Lazy(np.tile(np.arange(N), 2)), True),
}
BY_CHANCE = {
    "floats": (FLOATS, LABELS),
    "categories": RNG.integers(0, [2, 3, 5, 4], (N, 4)),
    "categories as floats": RNG.integers(0, 3, (N, 6)).astype(np.float32) / 0.83,
    "one-hot": np.concatenate([np.eye(5)[RNG.integers(0, 5, N)] for _ in range(4)], axis=1),
    "a sentence with slots": SLOTS,
    "twenty sentences": RNG.integers(0, 500, (20, 16))[RNG.integers(0, 20, N)],
    "few words": SPARSE,
    "texts that are padded": (TEXTS, LABELS),
    "blank images": (BLANK, LABELS),
    "one number": np.round(RNG.random(N), 2),
    "no record": np.zeros((0, 3)),
    "one record": np.zeros((1, 3)),
    "read one by one": Lazy(np.arange(N)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found(name):
    data, expected = COPIES[name]
    (found,) = find_copies(as_source(data))
    assert found.kind == "copies"
    assert not any(letter.isdigit() for letter in found.what + found.do)  # a diagnosis tells it
    assert expected in ((found.certain, found.count), found.certain)


@pytest.mark.parametrize("name", BY_CHANCE)
def test_what_is_alike_by_chance_is_not_accused(name):
    assert find_copies(as_source(BY_CHANCE[name])) == []


def test_records_that_share_a_key_are_told_with_the_epsilon_of_the_group():
    data = {"who": np.arange(N) // 4, "x": FLOATS}
    budget = {"epsilon": 3.0, "delta": 1e-5, "steps": 20}
    mechanism = jaxdp.dp_sgd(**budget, l2_clip_norm=1.0, batch_size=100, dataset_size=N)
    key = lambda record: int(record["who"])  # noqa: E731
    (found,) = find_copies(as_source(data), key, mechanism)
    assert (found.certain, found.count) == (True, (N, N))
    true = acc.group_epsilon(mechanism.total(20), 1e-5, records=4).upper
    assert true > 9
    assert f"is {true:.3g}, where 3 is told for one" in found.do
    loss = lambda w, record: record["x"] @ w  # noqa: E731
    checked = jaxdp.check(loss, jnp.zeros(10), data, mechanism, same=key)
    assert [finding.what for finding in checked.broken] == [found.what]
    words = "same must return a key that can be hashed .*, got a TypeError"
    refused(words, find_copies, as_source(data), lambda record: record["x"])
    persons = users(data, "who", records_per_user=4)
    assert find_copies(persons) == []
    for key in (lambda record: record["x"], lambda record: (record["x"], 0)):
        refused("same must return a key that can be hashed", find_copies, as_source(data), key)


def windows(series):
    return np.lib.stride_tricks.sliding_window_view(series, 4, axis=1).reshape(-1, 4)


def by_rows(rows):
    return lambda data: tuple(leaf[rows(data[1])] for leaf in data)


def balanced(y):
    few = np.flatnonzero(y == 1)
    more = np.random.default_rng(0).choice(few, 3 * len(few))
    return np.concatenate([np.flatnonzero(y == 0), more])


RARE = (FLOATS[:60], (np.arange(60) % 6 == 0).astype(np.int32))
TEXT = ["a" * (3 + at % 7) + "bc" * at for at in range(30)]
# (function of all records, records, kinds of what is found)
PREPROCESS = {
    "repeated": (by_rows(lambda y: np.repeat(np.arange(len(y)), 1 + 4 * y)), RARE, ["copies"]),
    "drawn with replacement": (by_rows(balanced), RARE, ["copies"]),
    "windows": (windows, FLOATS[:30], ["copies"]),
    "parts of a text": (
        lambda texts: [t[at : at + 8] for t in texts for at in range(0, len(t), 8)],
        TEXT,
        ["copies"],
    ),
    "augmented at random": (
        lambda x: np.repeat(x, 3, 0) + np.random.default_rng().normal(size=(3 * len(x), 10)),
        FLOATS[:30],
        ["copies", "preprocess"],
    ),
    "shuffled": (by_rows(lambda y: np.random.default_rng(1).permutation(len(y))), RARE, []),
    "filtered": (by_rows(lambda y: np.flatnonzero(y == 0)), RARE, []),
    "cut to a length": (lambda texts: [text[:8] for text in texts], TEXT, []),
    "centred": (lambda x: x - x.mean(0), FLOATS[:30], ["preprocess"]),
    "centred windows": (lambda x: windows(x - x.mean(0)), FLOATS[:30], ["preprocess"]),
}


@pytest.mark.parametrize("name", PREPROCESS)
def test_one_record_that_became_many_is_no_statistic(name):
    function, data, kinds = PREPROCESS[name]
    options = {"l2_clip_norm": 1.0, "batch_size": 8, "dataset_size": 60}
    mechanism = jaxdp.dp_sgd(noise_multiplier=1.0, **options)
    found = check_preprocess(function, data, mechanism)
    assert sorted(finding.kind for finding in found) == kinds
    assert all("jaxdp.sampling.users" in f.remedy for f in found if f.kind == "copies")
    if name == "repeated":
        assert "up to 5 records" in found[0].what
        assert "records=5)" in found[0].do
    # Of a person whose windows are one unit nothing is said.
    by_person = jaxdp.dp_sgd(noise_multiplier=1.0, records_per_user=9, **options)
    own = check_preprocess(function, data, by_person)
    assert sorted(finding.kind for finding in own) == [kind for kind in kinds if kind != "copies"]


def test_the_copies_of_the_case_are_told_with_what_is_true_of_them():
    """Before: 3.00 and not a word; 98 is true of a person with 19 copies."""
    rng = np.random.default_rng(0)
    y = (rng.random(4_000) < 0.05).astype(np.int32)
    x = rng.normal(size=(4_000, 10)).astype(np.float32)
    rows = np.repeat(np.arange(4_000), 1 + 18 * y)
    budget = {"epsilon": 3, "delta": 1e-5, "steps": 100, "l2_clip_norm": 1.0}
    mechanism = jaxdp.dp_sgd(**budget, batch_size=256, dataset_size=len(rows))
    loss = lambda w, x, y: optax.sigmoid_binary_cross_entropy(x @ w, y)  # noqa: E731
    (found,) = jaxdp.check(loss, jnp.zeros(10), (x[rows], y[rows]), mechanism).broken
    assert found.kind == "copies"
    assert "records=19) is 9" in found.do
