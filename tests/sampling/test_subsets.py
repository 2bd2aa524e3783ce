"""Laws of subsets and permutations, and of binomial counts against whole numbers and fractions."""

from fractions import Fraction
from itertools import permutations, product
from math import comb

import numpy as np
import pytest
from scipy import stats

from jaxdp.sampling import exact as subsets
from jaxdp.sampling.exact import _bounds, binomial, permutation, shuffle_within_groups, subset
from tests.laws import LEVEL, is_binomial, is_uniform
from tests.refusing import refused


def rng(key):
    return np.random.Generator(np.random.Philox(key=[8, key]))


def orders(below, size, draws, draw):
    """How often each ordered tuple was drawn."""
    found = dict.fromkeys(permutations(range(below), size), 0)
    for key in range(draws * len(found)):
        found[tuple(draw(key))] += 1
    return list(found.values())


@pytest.mark.parametrize("few", [0, 1024, "too few numbers at once"])
@pytest.mark.parametrize(("below", "size"), [(6, 2), (6, 3), (5, 3), (5, 4), (4, 4)])
def test_every_ordered_tuple_is_as_likely(monkeypatch, below, size, few):
    if isinstance(few, str):
        monkeypatch.setattr(subsets, "_DEVIATIONS", -(10**6))
    else:
        monkeypatch.setattr(subsets, "_FEW", few)
        monkeypatch.setattr(subsets, "_RARE", 1)
    assert is_uniform(orders(below, size, 100, lambda key: subset(rng(key), below, size)))


def test_of_equal_numbers_the_last_stays(monkeypatch):
    for places, below, key in product((1, 2**16), (50, 700, 100_000, 2**33, 2**40), range(20)):
        monkeypatch.setattr(subsets, "_PLACES", places)
        numbers = rng(key).integers(0, below, 40 if below < 100 else 600)
        numbers = np.concatenate([numbers, numbers[:9], numbers[:3]])
        last = list(dict.fromkeys(numbers.tolist()[::-1]))[::-1]
        assert subsets._without_repeats(numbers, below).tolist() == last, (places, below, key)
    # Both ways to find them agree.
    numbers = rng(1).integers(0, 3 * 10**6, 10**5)
    found = subsets._without_repeats(numbers, 3 * 10**6)
    assert 1_000 < len(numbers) - len(found) < 2_500
    monkeypatch.setattr(subsets, "_EACH", 1)
    np.testing.assert_array_equal(subsets._without_repeats(numbers, 3 * 10**6), found)


SIZES = [(200, 1), (200, 60), (200, 139), (200, 160), (7_000, 90)]


@pytest.mark.parametrize(("below", "size"), SIZES)
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
    rate = size / below
    assert all(is_binomial(count, draws, rate) for count in (counts.min(), counts.max()))
    spread = np.sum((counts - draws * rate) ** 2) / (draws * rate * (1 - rate))
    assert LEVEL < stats.chi2(below - 1).cdf(spread * (below - 1) / below) < 1 - LEVEL
    assert is_binomial(pairs, draws, size * (size - 1) / (below * (below - 1)))
    assert below != 200 or all(map(is_uniform, places))


def test_ranges_beyond_32_bits_are_covered_evenly_and_enough_is_drawn_at_once(monkeypatch):
    for below in (2**31 - 1, 2**31, 2**32, 2**32 + 1, 10**10, 2**53):
        found = np.concatenate([subset(rng(key), below, 5_000) for key in range(4)])
        assert found.dtype == np.int64
        assert 0 <= found.min() <= found.max() < below
        for cells in (found * 16 // below if below < 2**50 else found >> 49, found & 15):
            assert is_uniform(np.bincount(cells, minlength=16)), below
    drawn, distinct = [], subsets._without_repeats
    monkeypatch.setattr(subsets, "_without_repeats", lambda *a: drawn.append(a[0]) or distinct(*a))
    monkeypatch.setattr(subsets, "_FEW", 0)
    for below, size in product((10_000, 10**7), (1, 100, 3_000, 7_000)):
        for key in range(20):
            drawn.clear()
            subset(rng(key), below, size)
            assert len(drawn) == 1
            assert size <= len(set(drawn[0].tolist())) <= 1.03 * size + 150


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
    assert is_uniform(orders(4, 4, 200, lambda key: permutation(FewBits(key, bits), 4)))


@pytest.mark.parametrize("bits", [0, 3, 64])
def test_groups_are_kept_and_their_orders_are_as_likely(bits):
    groups = np.array([2, 0, 2, 5, 0, 2], np.uint64)
    values = np.array([7, 7, 1, 0, 3, 3])
    counts = {}
    for key in range(2_400):
        # With the 61 bits of the value nothing is left to chance: whole groups are shuffled.
        below = 2**61 if bits == 0 else 8
        found = tuple(shuffle_within_groups(FewBits(key, bits), values, below, groups, 6).tolist())
        assert (set(found[:2]), set(found[2:5]), found[5]) == ({3, 7}, {1, 3, 7}, 0)
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 12
    assert is_uniform(list(counts.values()))
    words = "must fit in 64 bits, got 16 groups"
    refused(words, shuffle_within_groups, rng(0), values, 2**61, groups, 16)


def test_permutations_hold_every_position_once_and_large_ones_mix_everything(monkeypatch):
    size, draws = 300_000, 20
    found = np.stack([permutation(rng(key), size) for key in range(draws)])
    for places in (found[:, :100], found[:, 150_000:150_100], found[:, -100:]):
        assert is_uniform(np.bincount(places.ravel() // 30_000, minlength=10))
    steps = np.diff(found, axis=1)
    rises = np.sum(steps > 0, axis=1)  # Eulerian: mean (n - 1) / 2, variance (n + 1) / 12
    assert np.all(np.abs(rises - (size - 1) / 2) < 6 * np.sqrt((size + 1) / 12))
    assert np.mean(steps == 1) < 1e-4
    # Of any size, every position once.
    for size in (0, 1, 600, 20_000, 100_000):
        assert sorted(permutation(rng(0), size).tolist()) == list(range(size)), size
    monkeypatch.setattr(subsets, "_SHUFFLED", 100)  # large ones are sorted by random keys
    for size in (101, 5_000):
        assert sorted(permutation(rng(0), size).tolist()) == list(range(size)), size
    assert not np.array_equal(permutation(rng(0), 5_000), permutation(rng(1), 5_000))


class Words:
    """Stands for a generator that gives chosen words."""

    def __init__(self, words):
        self.bit_generator, self.words = self, list(words)

    def random_raw(self):
        return self.words.pop(0)


def exact(trials, prob):
    """The distribution function at -1, 0, ..., trials, as fractions."""
    p, total = Fraction(prob), [Fraction(0)]
    for k in range(trials + 1):
        total.append(total[-1] + comb(trials, k) * p**k * (1 - p) ** (trials - k))
    return total


@pytest.mark.parametrize("bits", [8, 64, 128])
@pytest.mark.parametrize(
    ("trials", "prob"), [(1, 0.5), (3, 0.3), (60, 0.9), (200, 1e-9), (300, 0.999), (7, 5e-324)]
)
def test_bounds_hold_the_distribution_function_and_little_else(trials, prob, bits):
    first, lower, upper = _bounds(trials, prob, bits)
    function = exact(trials, prob)
    for place, (low, high) in enumerate(zip(lower, upper, strict=True)):
        assert low <= 2**bits * function[first + place] <= high <= low + 3
    left_out = function[first] + 1 - function[first + len(lower) - 1]
    assert left_out <= Fraction(2, 2**bits)


def test_counts_are_binomial_also_at_scale_and_at_the_outermost_words():
    for trials, prob in ((10**7, 0.25), (10**10, 1e-4), (60_000, 256 / 60_000)):
        first, lower, upper = _bounds(trials, prob, 64)
        law, counts = stats.binom(trials, prob), first - 1 + np.arange(len(lower))
        found = np.array(lower) / 2.0**64
        np.testing.assert_allclose(found, law.cdf(counts), rtol=1e-9, atol=1e-12)
        assert max(high - low for low, high in zip(lower, upper, strict=True)) <= 2, trials
        assert max(law.cdf(counts[0]), law.sf(counts[-1])) < 1e-19, trials
    # Outermost words ask for more and end far out.
    law = stats.binom(10**7, 0.25)
    low = binomial(Words([0, 2**63]), 10**7, 0.25)
    high = binomial(Words([2**64 - 1, 2**63]), 10**7, 0.25)
    for far in (law.mean() - low, high - law.mean()):
        assert 9 < far / law.std() < 14
    assert binomial(Words([2**64 - 1, 0]), 3, 0.5) == 3
    assert binomial(Words([0]), 3, 0.5) == 0
    # What needs no word takes none.
    assert binomial(Words([]), 0, 0.5) == 0
    assert binomial(Words([]), 7, 1.0) == 7
    assert binomial(np.random.Generator(np.random.Philox(1)), 10**10, np.float64(1e-30)) == 0
    for bits in (3, 64):
        words = np.random.Generator(np.random.Philox(key=[5, bits]))
        found = np.bincount([binomial(words, 12, 0.3, bits) for _ in range(20_000)], minlength=13)
        law = 20_000 * stats.binom(12, 0.3).pmf(np.arange(13))
        rare = law < 20
        pooled = [np.append(x[~rare], x[rare].sum()) for x in (found, law)]
        assert stats.chisquare(*pooled).pvalue > LEVEL, bits


@pytest.mark.parametrize(("trials", "prob"), [(3, 0.3), (5, 0.5), (9, 0.03)])
def test_a_count_has_its_probability_to_the_last_word(trials, prob):
    """Of all sequences of two words of 6 bits those that decide; a third word decides the rest."""
    found, open_ = np.zeros(trials + 1), 0
    for pair in np.ndindex(64, 64):
        try:
            found[binomial(Words(int(word) << 58 for word in pair), trials, prob, bits=6)] += 1
        except IndexError:
            open_ += 1
    function = [float(4096 * f) for f in exact(trials, prob)]
    assert 0 < open_ <= 4 * (trials + 1)
    for k in range(trials + 1):
        assert abs(found[k] - (function[k + 1] - function[k])) <= 5
