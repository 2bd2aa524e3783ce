"""Brackets of roots: both ends evaluated, and few evaluations."""

import functools
import math

import numpy as np
import pytest

from jaxdp.accounting.roots import bracket_decreasing, least


@pytest.mark.parametrize(
    ("f", "root", "low", "high"),
    [
        (lambda x: math.exp(-x) - 0.3, -math.log(0.3), 0.0, 9.0),
        (lambda x: 2 - x**3, 2 ** (1 / 3), 0.0, 4.0),
        (lambda x: 1 / x - 5, 0.2, 0.01, 3.0),
    ],
)
def test_a_secant_step_moves_the_farther_end(f, root, low, high):
    asked = []

    def counted(x):
        asked.append(x)
        return f(x)

    low, high = bracket_decreasing(counted, low, high, rtol=1e-10)
    assert low <= root <= high
    assert high - low <= 1e-10 * high
    assert low in asked
    assert high in asked
    assert len(asked) <= 40  # moving the nearer end takes over 70


@pytest.mark.parametrize("ends", [(1e-9, 1e9), (1e9, 1e-9)])
@pytest.mark.parametrize("edge", [0.3, 1e-7, 5e6])
def test_a_search_returns_what_was_found_within(edge, ends):
    """Of a jump, from either side; smooth costs take a handful of evaluations."""
    sign = 1 if ends[1] > ends[0] else -1

    def jump(value, size):
        return math.copysign(size, sign * (edge - value))

    for size in (1.0, math.inf):
        found, _ = least(functools.partial(jump, size=size), 1.0, -1.0, ends, 1e-6)
        assert 0 <= sign * (found - edge) < 1e-4 * edge
    asked = []
    found, slope = least(
        lambda v: asked.append(v) or sign * 0.7 * math.log(edge / v), 1.0, -1.0, ends, 1e-6
    )
    assert 0 <= sign * (found / edge - 1) < 2e-6
    assert found in asked
    assert len(asked) <= 10
    assert slope == pytest.approx(-0.7)


@pytest.mark.parametrize("last", [1, 2, 3, 17, 7245, 10**9 + 7, 10**12])
@pytest.mark.parametrize("power", [0.5, 3.0])
def test_a_search_of_whole_numbers_finds_the_last(last, power):
    asked = []

    def excess(n):
        asked.append(n)
        return power * math.log(n / (last + 0.5))

    found, _ = least(excess, 1, -1.5, (10**12, 1), 1e-4, whole=True)
    assert isinstance(found, int)
    assert found in asked
    assert last * (1 - 1e-7) <= found <= last
    assert len(asked) <= 25


def test_a_search_that_finds_nothing_or_everything():
    assert least(lambda v: 1.0, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] is None
    assert least(lambda n: math.inf, 1, -1.0, (10**12, 1), 1e-6, whole=True)[0] is None
    assert least(lambda v: -math.inf, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] == 1e-9
    rng, asked = np.random.default_rng(0), []
    found, _ = least(lambda v: asked.append(v) or rng.normal(), 1.0, -1.0, (1e-9, 1e9), 1e-9)
    assert len(asked) <= 60
    assert found is None or found in asked
