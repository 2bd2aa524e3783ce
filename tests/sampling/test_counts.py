"""The law of binomial counts, against whole numbers and fractions."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from scipy import stats

from jaxdp.sampling.counts import _bounds, binomial
from tests.laws import LEVEL


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


@pytest.mark.parametrize(
    ("trials", "prob"), [(10**7, 0.25), (10**10, 1e-4), (60_000, 256 / 60_000)]
)
def test_bounds_are_those_of_scipy_at_scale(trials, prob):
    first, lower, upper = _bounds(trials, prob, 64)
    law = stats.binom(trials, prob)
    counts = first - 1 + np.arange(len(lower))
    np.testing.assert_allclose(np.array(lower) / 2.0**64, law.cdf(counts), rtol=1e-9, atol=1e-12)
    assert max(high - low for low, high in zip(lower, upper, strict=True)) <= 2
    assert max(law.cdf(counts[0]), law.sf(counts[-1])) < 1e-19


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


def test_outermost_words_ask_for_more_and_end_far_out():
    law = stats.binom(10**7, 0.25)
    low = binomial(Words([0, 2**63]), 10**7, 0.25)
    high = binomial(Words([2**64 - 1, 2**63]), 10**7, 0.25)
    assert 9 < (law.mean() - low) / law.std() < 14
    assert 9 < (high - law.mean()) / law.std() < 14
    assert binomial(Words([2**64 - 1, 0]), 3, 0.5) == 3
    assert binomial(Words([0]), 3, 0.5) == 0


@pytest.mark.parametrize("bits", [3, 64])
def test_counts_are_binomial(bits):
    rng = np.random.Generator(np.random.Philox(key=[5, bits]))
    found = np.bincount([binomial(rng, 12, 0.3, bits) for _ in range(20_000)], minlength=13)
    law = 20_000 * stats.binom(12, 0.3).pmf(np.arange(13))
    rare = law < 20
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (found, law)]
    assert stats.chisquare(*pooled).pvalue > LEVEL


def test_what_needs_no_word_takes_none():
    assert binomial(Words([]), 0, 0.5) == 0
    assert binomial(Words([]), 7, 1.0) == 7
    assert binomial(np.random.Generator(np.random.Philox(1)), 10**10, np.float64(1e-30)) == 0
