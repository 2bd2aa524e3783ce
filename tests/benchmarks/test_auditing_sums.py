"""The bounds on sums of scores: against quadrature, and against the mechanisms they speak of."""

import numpy as np
import pytest

from benchmarks import auditing_sums as sums
from jaxdp import accounting as acc


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_moments_of_the_posterior_mean_are_those_of_the_gaussian(mu):
    """E psi(m) of a mechanism's own pair: the lemma holds with equality there."""
    x = np.linspace(-12, 12, 200_001)
    law = np.exp(-((x - mu / 2) ** 2) / 2) * (x[1] - x[0]) / np.sqrt(2 * np.pi)
    mean, deltas, v = np.tanh(mu * x / 2), sums.gaussian_deltas(mu), sums.V[:-1]
    for second, psi in ((2.0, mean**2), (12 * v**2, mean**4)):  # psi'' of v^2 and of v^4
        found = np.diff(sums.V) @ ((1 - v) * second * deltas)
        assert found == pytest.approx(law @ psi, rel=1e-2)


def test_chords_of_an_event_lie_above_its_profile():
    event = acc.Gaussian(1.0)
    assert np.all(sums.event_deltas(event) >= sums.gaussian_deltas(1.0) - 1e-12)


def test_a_sum_is_refuted_no_more_often_than_it_may_be():
    """Quantiles of S where canaries are independent, and where they share one |x|."""
    rng, m, runs = np.random.default_rng(0), 100, 2_000
    coins = rng.random((runs, m)) < 0.5
    alone = rng.normal(size=(runs, m)) + coins - 0.5
    size = abs(rng.normal(0.5, size=(runs, 1)))
    joined = np.where(rng.random((runs, m)) < 1 / (1 + np.exp(-size)), 1, -1) * size
    joined = np.where(coins, joined, -joined)
    deltas = sums.gaussian_deltas(1.0)
    for odds, chances in (
        (alone, (sums.log_chance_independent, sums.log_chance_joined)),
        (joined, (sums.log_chance_joined,)),
    ):
        totals = np.array([sums.statistic(*pair) for pair in zip(odds, coins, strict=True)])
        for share in (0.5, 0.1, 0.01):
            total = float(np.quantile(totals, 1 - share))
            assert all(np.exp(of(total, m, deltas)) >= share for of in chances)
    # One |x| for all: no bound for independent canaries.
    worst = float(np.quantile(totals, 0.9))
    assert np.exp(sums.log_chance_independent(worst, m, deltas)) < 0.1


def test_the_normal_pair_is_the_gaussian_where_the_variances_agree():
    found = sums.pair_epsilon(np.array([1.0]), np.array([1.0]), np.array([1.0]))
    assert found[0] == pytest.approx(acc.epsilon(acc.Gaussian(1.0), 1e-5).upper, rel=1e-3)
