"""Records clipped by an estimate of their norm: their law, and epsilon computed another way."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import integrate, stats

from benchmarks import randomised_norms as norms
from jaxdp import accounting as acc
from jaxdp.accounting.gaussian import gaussian_delta


def density_mean(f, columns):
    """E[f(C / sqrt(R))] in units of C, by quadrature."""
    law = stats.chi2(columns, scale=1 / columns)
    ends = law.ppf([1e-14, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-14])

    def weighed(r):
        return law.pdf(r) * f(1 / math.sqrt(r))

    return sum(integrate.quad(weighed, *part)[0] for part in itertools.pairwise(ends))


def test_sensitivities_are_never_below_the_law():
    s, p = norms.sensitivities(32, 1e-9)
    beyond = 1 - np.cumsum(p)
    true = stats.chi2.cdf(32 / s**2, 32)
    np.testing.assert_allclose(beyond, true, atol=1e-13)
    assert true[-1] <= 1e-9
    assert p.min() > 0


@pytest.mark.parametrize("columns", [32, 128])
def test_one_shown_step_beside_quadrature(columns):
    z, q, e = 0.8, 0.3, 1.5
    step = norms.ShownSketch(z, q, columns, 1e-9)
    # With the record sampled: Balle, Barthe and Gaboardi 2018, Theorem 2.
    inner = math.log1p(math.expm1(e) / q)
    exact = q * density_mean(lambda s: gaussian_delta(s / z, inner), columns)
    assert exact <= acc.delta(step, e).upper <= exact * 1.04


def test_one_secret_step_beside_quadrature():
    z, q, e, columns = 0.8, 0.3, 1.5, 32
    s, p = norms.sensitivities(columns, 1e-12)
    event = acc.MixtureOfGaussians(z, (0.0, *s), (1 - q, *(q * p / p.sum())))

    r = np.linspace(0.05, 6, 3_000)  # the law's mass outside is 1e-16
    weight, c = stats.chi2.pdf(columns * r, columns) * columns, r**-0.5 / z
    y = np.linspace(0, 12, 1_201)[:, None]
    mixed = np.trapezoid(weight * np.exp(c * y - c * c / 2), r, axis=1)
    gap = np.maximum(1 - q + q * mixed - math.exp(e), 0) * stats.norm.pdf(y[:, 0])
    exact = np.trapezoid(gap, y[:, 0])
    assert exact * 0.999 <= acc.delta(event, e).upper <= exact * 1.04


def test_gradients_of_one_rank_are_the_worst():
    """Contributions of sketched matrices themselves; a flat spectrum is estimated better."""
    rng, columns, z, e = np.random.default_rng(5), 8, 3.0, 0.5
    found = []
    for rank in (1, 2, 8):
        spectrum = np.full(rank, 100 / math.sqrt(rank))  # of a gradient of norm 100, C being 1
        sketch = rng.normal(size=(4_000, rank, columns)) / math.sqrt(columns)
        estimate = np.sqrt(((spectrum[:, None] * sketch) ** 2).sum((1, 2)))
        moved = 100 * np.minimum(1, 1 / estimate)
        found.append(np.mean([gaussian_delta(x / z, e) for x in moved]))
    exact = density_mean(lambda s: gaussian_delta(s / z, e), columns)
    assert found[0] == pytest.approx(exact, rel=0.05)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("e", [0.0, 0.1, 1.0, 5.0, 20.0])
def test_profiles_are_convex_in_the_estimate(e):
    """Lemma 3 of the page, noise multiplier 1: for estimates of a twelfth of the truth and more."""
    profile = np.asarray([gaussian_delta(r**-0.5, e) for r in np.linspace(1 / 12, 3, 400)])
    assert np.diff(profile, 2).min() > -1e-15


def test_kept_rows():
    """The row that is quick to compute again, and the order that all rows must have."""
    rows = {row["columns"]: row for row in json.loads(norms.RESULTS.read_text())}
    assert norms.shown(512) == pytest.approx(rows[512]["shown"], rel=1e-6)
    for row in rows.values():
        assert row["exact"] < row["secret"] < row["shown"] < row["at_most"]
