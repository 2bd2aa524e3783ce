"""The law of subsets and permutations: every ordered tuple of positions is equally likely."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy import stats

from jaxdp.sampling import subsets
from jaxdp.sampling.subsets import arranged, permutation, subset
from tests.laws import LEVEL, is_binomial


def rng(key):
    return np.random.Generator(np.random.Philox(key=[8, key]))


def uniform(counts):
    return stats.chisquare(counts).pvalue > LEVEL


@pytest.mark.parametrize("few", [0, 1024])
@pytest.mark.parametrize(("below", "size"), [(6, 2), (6, 3), (5, 3), (5, 4), (4, 4)])
def test_every_ordered_tuple_is_as_likely(monkeypatch, below, size, few):
    monkeypatch.setattr(subsets, "_FEW", few)
    monkeypatch.setattr(subsets, "_RARE", 1)
    found = dict.fromkeys(permutations(range(below), size), 0)
    for key in range(100 * len(found)):
        found[tuple(subset(rng(key), below, size))] += 1
    assert uniform(list(found.values()))


def test_of_equal_numbers_the_last_stays(monkeypatch):
    for places, below, key in product((1, 2**16), (50, 700, 100_000, 2**33, 2**40), range(20)):
        monkeypatch.setattr(subsets, "_PLACES", places)
        numbers = rng(key).integers(0, below, 40 if below < 100 else 600)
        numbers = np.concatenate([numbers, numbers[:9], numbers[:3]])
        last = list(dict.fromkeys(numbers.tolist()[::-1]))[::-1]
        assert subsets._distinct(numbers, below).tolist() == last, (places, below, key)


def test_both_ways_to_find_equal_numbers_agree(monkeypatch):
    numbers = rng(1).integers(0, 3 * 10**6, 10**5)
    found = subsets._distinct(numbers, 3 * 10**6)
    assert 1_000 < len(numbers) - len(found) < 2_500
    monkeypatch.setattr(subsets, "_EACH", 1)
    np.testing.assert_array_equal(subsets._distinct(numbers, 3 * 10**6), found)


@pytest.mark.parametrize(("below", "size"), [(6, 3), (5, 2)])
def test_every_tuple_is_as_likely_where_too_few_numbers_are_drawn_at_once(monkeypatch, below, size):
    monkeypatch.setattr(subsets, "_enough", lambda below, size: size)
    found = dict.fromkeys(permutations(range(below), size), 0)
    for key in range(100 * len(found)):
        found[tuple(subset(rng(key), below, size))] += 1
    assert uniform(list(found.values()))


@pytest.mark.parametrize(
    ("below", "size"), [(200, 1), (200, 60), (200, 139), (200, 160), (7_000, 90)]
)
@pytest.mark.parametrize("places", [1, 2**16])
def test_positions_pairs_and_places_are_as_likely(monkeypatch, below, size, places):
    monkeypatch.setattr(subsets, "_PLACES", places)
    monkeypatch.setattr(subsets, "_FEW", 0)
    draws = 3_000
    counts, places, pairs = np.zeros(below), np.zeros((2, below)), 0
    for key in range(draws):
        found = subset(rng(key), below, size)
        assert len(np.unique(found)) == len(found) == size
        counts[found] += 1
        places[0, found[0]] += 1
        places[1, found[-1]] += 1
        pairs += 3 in found and below - 2 in found
    assert all(is_binomial(count, draws, size / below) for count in (counts.min(), counts.max()))
    spread = np.sum((counts - draws * size / below) ** 2) / (
        draws * size / below * (1 - size / below)
    )
    assert LEVEL < stats.chi2(below - 1).cdf(spread * (below - 1) / below) < 1 - LEVEL
    assert is_binomial(pairs, draws, size * (size - 1) / (below * (below - 1)))
    if below == 200:
        assert uniform(places[0])
        assert uniform(places[1])


@pytest.mark.parametrize("below", [2**31 - 1, 2**31, 2**32, 2**32 + 1, 10**10, 2**53])
def test_ranges_beyond_32_bits_are_covered_evenly(below):
    found = np.concatenate([subset(rng(key), below, 5_000) for key in range(4)])
    assert found.dtype == np.int64
    assert 0 <= found.min() <= found.max() < below
    assert uniform(np.bincount(found * 16 // below if below < 2**50 else found >> 49, minlength=16))
    assert uniform(np.bincount(found & 15, minlength=16))


def test_a_permutation_holds_every_position_once():
    for size in (0, 1, 600, 20_000, 100_000):
        assert sorted(permutation(rng(0), size).tolist()) == list(range(size)), size


class FewBits:
    """A generator whose words of 64 bits differ in their first bits only, so that many are tied."""

    def __init__(self, key, bits):
        self.real, self.bits = rng(key), np.uint64(64 - bits)

    def integers(self, low, high, size, dtype, endpoint):
        words = self.real.integers(low, high, size, dtype, endpoint=endpoint)
        return words >> self.bits << self.bits

    def shuffle(self, values):
        self.real.shuffle(values)


@pytest.mark.parametrize("bits", [0, 1, 2, 64])
def test_all_orders_are_as_likely(monkeypatch, bits):
    monkeypatch.setattr(subsets, "_SHUFFLED", 1)
    found = dict.fromkeys(permutations(range(4)), 0)
    for key in range(4_800):
        found[tuple(permutation(FewBits(key, bits), 4))] += 1
    assert uniform(list(found.values()))


@pytest.mark.parametrize("bits", [0, 3, 64])
def test_groups_are_kept_and_their_orders_are_as_likely(bits):
    groups = np.array([2, 0, 2, 5, 0, 2], np.uint64)
    values = np.array([7, 7, 1, 0, 3, 3])
    counts = {}
    for key in range(2_400):
        # With the 61 bits of the value nothing is left to chance: whole groups are shuffled.
        below = 2**61 if bits == 0 else 8
        found = tuple(arranged(FewBits(key, bits), values, below, groups, 6).tolist())
        assert set(found[:2]) == {3, 7}
        assert set(found[2:5]) == {1, 3, 7}
        assert found[5] == 0
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 12
    assert uniform(list(counts.values()))
    with pytest.raises(ValueError, match="must fit in 64 bits, got 16 groups"):
        arranged(rng(0), values, 2**61, groups, 16)


def test_large_permutations_mix_everything():
    size, draws = 300_000, 20
    found = np.stack([permutation(rng(key), size) for key in range(draws)])
    for places in (found[:, :100], found[:, 150_000:150_100], found[:, -100:]):
        assert uniform(np.bincount(places.ravel() // 30_000, minlength=10))
    steps = np.diff(found, axis=1)
    rises = np.sum(steps > 0, axis=1)  # Eulerian: mean (n - 1) / 2, variance (n + 1) / 12
    assert np.all(np.abs(rises - (size - 1) / 2) < 6 * np.sqrt((size + 1) / 12))
    assert np.mean(steps == 1) < 1e-4


def test_as_many_as_are_missing_are_nearly_always_drawn_at_once():
    for below, size in product((10_000, 10**7), (1, 100, 3_000, 7_000)):
        for key in range(20):
            numbers = rng(key).integers(0, below, subsets._enough(below, size))
            assert size <= len(set(numbers.tolist())) <= 1.03 * size + 150


def test_large_permutations_are_sorted_by_random_keys(monkeypatch):
    monkeypatch.setattr(subsets, "_SHUFFLED", 100)
    for size in (101, 5_000):
        assert sorted(permutation(rng(0), size).tolist()) == list(range(size))
    assert not np.array_equal(permutation(rng(0), 5_000), permutation(rng(1), 5_000))
