"""The unsampled Gaussian mechanism against its definition."""

import mpmath as mp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import accounting as acc
from jaxdp.accounting.gaussian import gaussian_delta


def delta_by_quadrature(mu, epsilon):
    """Integral of max(P - e^epsilon Q, 0) for N(mu, 1) against N(0, 1)."""
    with mp.workdps(40):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        start = epsilon / mu + mu / 2

        def gap(x):
            return mp.npdf(x, mu, 1) - mp.exp(epsilon) * mp.npdf(x, 0, 1)

        scale = 1 / (1 + abs(start - mu))
        cuts = [start + k * scale for k in (0, 1, 3, 6, 10, 20, 40)]
        return mp.quad(gap, [*cuts, cuts[-1] + 40 + mu])


@pytest.mark.parametrize("mu", [1e-7, 1e-3, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 3.0, 8.0])
def test_profile_matches_the_definition(mu, ratio):
    epsilon = mu * ratio
    truth = delta_by_quadrature(mu, epsilon)
    assert gaussian_delta(mu, epsilon) == pytest.approx(float(truth), rel=2e-9)


def test_ten_full_batch_steps_under_each_relation():
    """Replace-one is twice the distance, because the noise multiplier is relative to ONE record."""
    run = acc.Repeated(acc.Gaussian(5.0), 10)
    assert acc.epsilon(run, 1e-5).upper == pytest.approx(2.594, abs=5e-4)
    assert acc.epsilon(run, 1e-5, acc.Relation.REPLACE_SPECIAL).upper < 2.5945
    assert acc.epsilon(run, 1e-5, acc.Relation.REPLACE_ONE).upper == pytest.approx(5.759, abs=5e-4)


@given(st.floats(1e-3, 1e3), st.floats(1e-15, 0.5))
def test_epsilon_and_delta_invert_each_other(z, delta):
    bound = acc.epsilon(acc.Gaussian(z), delta)
    assert bound.lower <= bound.estimate <= bound.upper
    assert acc.delta(acc.Gaussian(z), bound.upper).estimate <= delta
    if bound.lower > 0:
        assert acc.delta(acc.Gaussian(z), bound.lower).upper >= delta
    else:
        assert "already below" in bound.note


def test_the_central_limit_is_an_estimate_without_an_upper_end():
    """It runs below the exact value on the SA-DPSGD MNIST run, so it may not be a guarantee."""
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000), 5_000)
    clt = acc.epsilon(run, 1e-5, accountant="clt")
    assert clt.upper == float("inf")
    assert clt.estimate < acc.epsilon(run, 1e-5).lower
    assert acc.delta(run, 2.0, accountant="clt").upper == 1
    full = acc.Repeated(acc.Gaussian(5.0), 10)
    exact = acc.epsilon(full, 1e-5).estimate
    assert acc.epsilon(full, 1e-5, accountant="clt").estimate == pytest.approx(exact, rel=1e-9)
    with pytest.raises(acc.UnsupportedEventError, match="central limit"):
        acc.epsilon(run, 1e-5, acc.Relation.REPLACE_ONE, "clt")
