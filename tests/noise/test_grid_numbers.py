"""The numbers of docs/grid_noise.md again, by other arithmetic: Theorems 2, 3 and 5, and (1)."""

import functools
import math

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from jaxdp.noise import grid
from jaxdp.noise._table import table

SIGMA = 2560


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


@functools.cache
def of_the_table():
    """Total variation from D(2560) of what the arrays of the alias table draw, nothing bounded."""
    found = table()
    weights, share = [0] * 2**16, 2**112
    for slot, (entry, *deep) in enumerate(
        zip(found.first.tolist(), *found.deeper.tolist(), strict=True)
    ):
        threshold = (entry >> 16 << 96) + (deep[0] << 64) + (deep[1] << 32) + deep[2]
        weights[slot] += threshold
        weights[entry & 0xFFFF] += share - threshold
    rho = [mpmath.exp(-mpf(z * z) / (2 * SIGMA**2)) for z in range(2**15 + 1)]
    # The masses of all integers: Jacobi's identity, whose other terms are below 10^-50,000,000.
    norm = SIGMA * mpmath.sqrt(2 * mpmath.pi)
    inside = sum(
        abs(mpf(weights[2**15 + z]) / 2**128 - rho[abs(z)] / norm) for z in range(-(2**15), 2**15)
    )
    beyond = 1 - (2 * sum(rho) - 1 - rho[-1]) / norm
    return (inside + beyond) / 2


def joint(r):
    """2 e(r), e the largest relative error of a sum over integers, with all of its terms."""
    return 4 * sum(mpmath.exp(-2 * (mpmath.pi * r * j) ** 2) for j in range(1, 9))


def of_a_law(factors):
    """(distance from the discrete Gaussian, its variance, the largest integer), from the inside."""
    distance, variance, most = of_the_table(), mpf(SIGMA) ** 2, 2**15
    for factor in reversed(factors):
        r = SIGMA * mpmath.sqrt(variance / (SIGMA**2 + factor**2 * variance))
        distance += of_the_table() + joint(r)
        variance, most = SIGMA**2 + factor**2 * variance, 2**15 + factor * most
    return distance, variance, most


@pytest.mark.parametrize(("digits_of_a_row", "told"), [(0, 5.4e-34), (8, 6.5e-34)])
def test_no_law_is_farther_from_its_gaussian_than_a_step_is_charged_for(digits_of_a_row, told):
    found = []
    for law in grid._LAWS:
        finer = (2**digits_of_a_row,) if digits_of_a_row else ()
        found.append(of_a_law((*finer, *law.factors))[0] + joint(2))
        assert of_a_law(law.factors)[0] <= law.distance
    assert 0.85 * told < max(found) <= grid.distance(digits_of_a_row) < told
    assert grid.distance(digits_of_a_row) * 2**32 < grid.DISTANCE == 2.0**-78


def cases():
    """(coordinates, multiplier, growth, l2): anywhere, and where one law gives way to the next."""
    rng = np.random.default_rng(0)
    for n in range(90):
        d, m = int(2 ** rng.uniform(0, 32)), float(10 ** rng.uniform(-6, 6))
        if n % 3 == 0:
            law, share = grid._LAWS[n // 3 % 8], (2.0**-8, 2.0**-2)[n // 3 % 2]
            m = share * law.std / d**0.5 * (1 + (n % 9 - 3) * 2.0**-52)
        grown = 1.0 if n % 2 else float(1 + 10 ** rng.uniform(-3, 2.6))
        yield d, m, grown, float(np.float32(10 ** rng.uniform(-20, 20)))


def test_every_law_that_is_chosen_keeps_the_inequality_and_32_bits():
    kept, closest = set(), mpf(0)
    for d, m, grown, l2 in cases():
        try:
            law = grid.law_for(m, d, grown)
        except ValueError:
            continue
        _, variance, most = of_a_law(law.factors)
        assert most == law.most
        assert mpf(grown) * (most + 2**15 / mpf(2**8) + 1) < 2**31
        scale = float(grid.grid_scale(law, np.float32(m), d, np.float32(l2)))
        if math.isnan(scale):
            assert not 2.0**-99 < float(mpmath.sqrt(variance)) / m / l2 < 2.0**99
            continue
        left = mpf(m) * (mpf(scale) * mpf(l2) + mpmath.sqrt(d) * (1 + mpf(2) ** -22))
        assert left <= mpmath.sqrt(variance - 4)
        kept.add(law)
        closest = max(closest, left / mpmath.sqrt(variance - 4))
    assert len(kept) == len(grid._LAWS)
    assert closest > 1 - 2.0**-12
