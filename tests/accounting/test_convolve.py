"""The law of a sum against plain convolutions, with its error, its window and its scale."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.accounting.convolve import Law, log_moments, tilt
from jaxdp.accounting.discretise import Atoms


def atoms(index, mass, offset=0.0):
    return Atoms(np.asarray(index), np.asarray(mass, dtype=float), offset, math.inf, (0.0, 0.0))


def convolved(kinds, width):
    """(losses, masses) of the sum, by one step at a time; a mass for each sum of indices."""
    law, offset = {0: 1.0}, 0.0
    for atom, n in kinds:
        offset += n * atom.offset
        for _ in range(n):
            found = {}
            for at, mass in law.items():
                for i, m in zip(atom.index, atom.mass, strict=True):
                    found[at + int(i)] = found.get(at + int(i), 0.0) + mass * float(m)
            law = found
    index = np.asarray(sorted(law))
    return offset + width * index, np.asarray([law[i] for i in sorted(law)])


kind = st.tuples(
    st.lists(st.integers(-6, 9), min_size=2, max_size=4, unique=True),
    st.lists(st.floats(1e-8, 1.0), min_size=4, max_size=4),
    st.floats(-0.2, 0.2),
    st.integers(1, 4),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(kind, min_size=1, max_size=3), st.floats(0.0, 3.0), st.floats(0.05, 0.3))
def test_a_sum_of_unlike_losses(drawn, c, width):
    kinds = [(atoms(i, np.asarray(m[: len(i)]) / 4, o), n) for i, m, o, n in drawn]
    loss, mass = convolved(kinds, width)
    law = Law(kinds, width, float(loss[0]) - 3 * width, 256, c, (0.0, 0.0))
    at = np.rint((loss - law.loss[0]) / width).astype(int)
    np.testing.assert_allclose(law.loss[at], loss, atol=1e-12)
    truth = np.zeros(256)
    truth[at] = mass * np.exp(c * loss - law.log_scale)
    assert np.linalg.norm(law.weight - truth) <= law.error + (law.relative + 1e-13)
    assert law.error < 3e-13
    assert law.relative < 1e-12
    total = float(mass @ np.exp(c * loss))
    assert law.log_scale == pytest.approx(math.log(total), abs=1e-11)
    assert log_moments(kinds, width, np.asarray([c]))[0] == pytest.approx(math.log(total), abs=1e-9)


def delta(loss, mass, epsilon):
    return float(mass @ np.maximum(-np.expm1(epsilon - loss), 0.0))


@settings(deadline=None, max_examples=40)
@given(st.lists(kind, min_size=1, max_size=2), st.floats(0.2, 3.0), st.floats(0.1, 2.0))
def test_the_profile_of_a_sum(drawn, c, epsilon):
    kinds = [(atoms(i, np.asarray(m[: len(i)]) / 4, o), n) for i, m, o, n in drawn]
    loss, mass = convolved(kinds, 0.1)
    law = Law(kinds, 0.1, float(loss[0]) - 0.3, 256, c, (0.0, 0.0))
    profile = law.profile(epsilon)
    for at in (epsilon, 0.8 * epsilon, 1.3 * epsilon):
        for unit in (0.0, -3.0):
            value, error = profile(at, unit)
            truth = delta(loss, mass, at) * math.exp(-unit)
            assert abs(value - truth) <= error + 1e-14 * truth + 1e-300
            assert error <= 1e-11 * math.exp(law.log_scale - unit) + 1e-9 * truth
    assert profile(0.5 * epsilon, 0.0) == (0.0, math.inf)


@pytest.mark.parametrize(("low", "high"), [(-100, 3), (-3, 100), (-100, 100)])
@pytest.mark.parametrize("c", [0.3, 1.0])
def test_what_lies_outside_of_the_window_is_in_the_error(low, high, c):
    """Two points far outside are wrapped into the window; their tilted mass is the error."""
    law_of_one = atoms([low, 0, 7, high], [1e-3, 0.9, 0.098, 1e-3])
    loss, mass = convolved([(law_of_one, 2)], 0.1)
    tilted = mass * np.exp(c * loss)
    tilted /= tilted.sum()
    first, last = -1.6, -1.6 + 6.3
    outside = float(tilted[loss < first - 0.05].sum()), float(tilted[loss > last + 0.05].sum())
    law = Law([(law_of_one, 2)], 0.1, first, 64, c, outside)
    assert law.loss[0] == pytest.approx(first)
    assert law.loss[-1] == pytest.approx(last)
    assert law.alias == pytest.approx(sum(outside))
    assert law.above == outside[1]
    inside = (loss >= first - 0.05) & (loss <= last + 0.05)
    truth = np.zeros(64)
    truth[np.rint((loss[inside] - first) / 0.1).astype(int)] = tilted[inside]
    assert np.abs(law.weight - truth).sum() <= law.alias + 1e-13
    wrong = False
    for epsilon in (0.15, 0.65, 1.25):
        value, error = law.profile(epsilon)(epsilon, 0.0)
        off = abs(value - delta(loss, mass, epsilon))
        assert off <= error
        # Without the mass outside the error would not be one.
        wrong |= off > 1e-10
    assert wrong


def test_rounding_is_counted_where_the_steps_are_many():
    """Of 1e6 steps that hardly ever lose, a binomial law, in float64 by logarithms."""
    n, p = 10**6, 1e-6
    law = Law([(atoms([0, 1], [1 - p, p]), n)], 1.0, -1.0, 64, 0.5, (0.0, 0.0))
    k = np.arange(40)
    log_binomial = [
        math.lgamma(n + 1) - math.lgamma(n - i + 1) - math.lgamma(i + 1) if i else 0.0 for i in k
    ]
    exact = np.asarray(log_binomial) + k * math.log(p) + (n - k) * math.log1p(-p)
    truth = np.exp(exact + 0.5 * k - law.log_scale)
    found = law.weight[np.rint(k - law.loss[0]).astype(int)]
    off = float(np.linalg.norm(found - truth))
    assert off <= law.error + law.relative + 2e-8
    assert 1e-17 < law.error < 1e-12
    assert law.relative >= n * 4 * 2.0**-53 * 8


@pytest.mark.parametrize("size", [64, 4096])
def test_an_error_is_not_below_what_a_transform_must_lose(size):
    rng = np.random.default_rng(0)
    mass = rng.random(40)
    law = Law([(atoms(np.arange(40), mass / mass.sum()), 1)], 0.1, 0.0, size, 1.0, (0.0, 0.0))
    unit = 2.0**-53 * math.log2(size) * float(np.linalg.norm(law.weight))
    # Of both transforms: 16 for the last, 32 for the first.
    assert 45 * unit <= law.error <= 100 * unit + 1e-14


def test_means_of_an_untilted_law():
    law = Law([(atoms([0, 2], [0.5, 0.25], 0.1), 2)], 0.5, 0.0, 16, 0.0, (0.0, 0.0))
    payoff = law.loss**2
    value, error = law.mean(law.weight, payoff)
    truth = 0.25 * 0.2**2 + 0.25 * 1.2**2 + 0.0625 * 2.2**2
    assert abs(value - truth) <= error
    assert law.relative * truth < error < 1e-12


def test_a_tilt_is_a_law():
    law, log_total, largest = tilt(atoms([-3, 0, 5], [0.2, 0.3, 0.0]), 0.4)
    total = 0.2 * math.exp(-1.2) + 0.3
    np.testing.assert_allclose(law, [0.2 * math.exp(-1.2) / total, 0.3 / total, 0], rtol=1e-14)
    assert log_total == pytest.approx(math.log(total))
    assert largest >= 1.2
