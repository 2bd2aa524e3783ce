"""Small losses apart from large ones: the two pairs of a step, and sums on two grids."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.accounting import layouts
from jaxdp.accounting.apart import Inner, Outer, most
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.kinds import directions
from jaxdp.accounting.pairs import SampledGaussian

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE
PAIRS = (
    SampledGaussian(Step(0.8, 0.01), ADD),
    SampledGaussian(Step(0.8, 0.01), ADD, reverse=True),
    SampledGaussian(Step(1.3, 0.05), REPLACE),
)


def atoms(pair, edges):
    """(losses, P masses, Q masses) of fine cells, each at its own mean loss."""
    p, q = pair.cells(edges)
    kept = (p > 0) & (q > 0)
    return np.log(p[kept] / q[kept]), p[kept], q[kept]


def profile(first, second, gamma):
    """H_gamma of a product of two pairs of atoms."""
    p = first[1][:, None] * second[1]
    q = first[2][:, None] * second[2]
    return float(np.maximum(p - gamma * q, 0.0).sum())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("reach", [0.003, 0.02])
def test_the_two_pairs_dominate_a_step_and_hardly_more(pair, reach):
    inner = Inner(pair, pair.center - reach, pair.center + 1.5 * reach)
    outer = Outer(inner)
    grid = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-0.05, 0.05, 2001)])
    cells = np.unique(np.append(grid, [inner.low, inner.high, inner.shift]))
    small = atoms(inner, np.unique(np.append(np.linspace(-0.05, 0.05, 1501), inner.shift)))
    whole, others = atoms(pair, cells), atoms(outer, cells)
    everything = np.asarray([0.0]), np.asarray([1.0]), np.asarray([1.0])
    for gamma in (0.7, 0.99, 1.0, 1.004, 1.007, 1.5, 4.0):
        one, two = profile(whole, everything, gamma), profile(others, small, gamma)
        assert two >= one * (1 - 1e-4)
        assert two <= one + 2.2 * outer.chance() * small[1] @ np.abs(np.expm1(-small[0])) + 1e-6


@pytest.mark.parametrize("pair", PAIRS)
def test_masses_are_those_of_the_step(pair):
    inner = Inner(pair, pair.center - 0.004, pair.center + 0.007)
    outer = Outer(inner)
    everywhere = np.asarray([-np.inf, np.inf])
    for part in (inner, outer):
        p, q = part.cells(everywhere)
        assert p[0] == pytest.approx(1, abs=1e-11)
        assert q[0] == pytest.approx(1, abs=1e-11)
        edges = np.linspace(-0.3, 0.3, 97)
        first, second = part.tails(edges)
        np.testing.assert_allclose(first[:-1] - first[1:], part.cells(edges)[0], atol=1e-11)
        np.testing.assert_allclose(second[:-1] - second[1:], part.cells(edges)[1], atol=1e-11)
        # A cell's masses have a ratio between those of its ends.
        p, q, gain, error = part.masses(edges)
        assert (np.abs(p - q - gain) <= error + 1e-13).all()
        used = q > 1e-9
        ratio = np.log(p[used] / q[used])
        assert (ratio >= edges[:-1][used] - 1e-9).all()
        assert (ratio <= edges[1:][used] + 1e-9).all()
    here = outer.cells(np.asarray([inner.shift - 1e-9, inner.shift]))
    assert here[0][0] == pytest.approx(inner.small[0], rel=1e-12)
    assert outer.chance() == pytest.approx(1 - inner.small[0], rel=1e-9, abs=1e-13)


def test_no_more_large_losses_than_said():
    for n, p, target in ((10, 0.3, -5.0), (1000, 0.01, -20.0), (10**7, 1e-5, -46.0), (5, 0.9, -9)):
        k = most(n, p, target)
        assert stats.binom.logsf(k, n, p) <= target
        assert k == n or stats.binom.logsf(k // 2, n, p) > target
    assert most(1000, 0.0, -30.0) == 0


RUNS = (  # q, z, steps, delta, relation, epsilon by the contour integral or a convolution
    (1e-5, 0.8, 10**7, 1e-9, REPLACE, 0.5101313483387562),
    (1e-7, 0.8, 10**5, 1e-5, REPLACE, 8.377844691620995e-05),
    (1e-5, 1.23, 5_000, 1e-18, REPLACE, 0.0110398670),
    (1e-7, 0.45, 5_000, 1e-9, ADD, 0.019257430066021),
)


@pytest.mark.parametrize(("q", "z", "steps", "delta", "relation", "truth"), RUNS)
def test_rare_samplings_are_enclosed_closely(q, z, steps, delta, relation, truth):
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    bound = acc.epsilon(event, delta, relation)
    assert bound.lower <= truth * (1 + 1e-8)
    assert truth * (1 - 1e-8) <= bound.upper
    assert bound.upper - bound.lower < 5e-4 * truth


def laid(high, tolerance=7e-5):
    q, z, steps, delta, relation, truth = RUNS[0]
    run = flatten(acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps), relation)
    direction = directions(run, relation, math.log(delta), 1e-4)[0]
    kinds = direction._upper if high else direction._lower
    return layouts.Laid(kinds, direction._plan(truth), high, tolerance)


def test_a_lower_end_gives_up_small_losses_and_their_probability():
    upper, lower = laid(True), laid(False)
    assert upper.layout.small
    assert lower.layout.small
    assert upper.lost == 0 < lower.lost <= 1.01e-3 * 7e-5 * 1e-9
    (_, n), (_, fewer) = upper._inner[0], lower._inner[0]
    outer, steps = lower.kinds[0]
    assert n == steps == RUNS[0][2]
    log_tail = stats.binom.logsf(n - fewer, n, outer.chance())
    assert log_tail <= math.log(lower.lost)


def test_what_a_lower_end_gives_up_is_taken_off(monkeypatch):
    q, z, steps, delta, relation, truth = RUNS[0]
    run = flatten(acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps), relation)
    direction = directions(run, relation, math.log(delta), 1e-4)[0]
    before = direction.delta_end(False, truth, 1e-3)
    give_up = layouts.Laid._give_up

    def more(self, log_lost):
        give_up(self, log_lost)
        self.lost = 0.25 * delta

    monkeypatch.setattr(layouts.Laid, "_give_up", more)
    assert direction.delta_end(False, truth, 1e-3) == pytest.approx(before - 0.25, abs=1e-3)
