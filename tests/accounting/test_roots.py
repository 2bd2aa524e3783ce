"""Brackets of roots: both ends evaluated, and few evaluations."""

import math

import pytest

from jaxdp.accounting.roots import bracket_decreasing


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
