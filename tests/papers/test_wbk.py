"""The Renyi bound of AdaDp's Theorem 1 is the printed sum."""

import mpmath as mp
import pytest

from jaxdp.papers.wbk import wbk_rdp


def alternating_b(power, z):
    with mp.workdps(60):
        return mp.fsum(
            (-1) ** i * mp.binomial(power, i) * mp.exp(mp.mpf(i * (i - 1)) / (2 * mp.mpf(z) ** 2))
            for i in range(power + 1)
        )


@pytest.mark.parametrize(("q", "z", "order"), [(0.01, 0.9, 4), (0.1, 5.0, 9), (0.3, 40.0, 16)])
def test_wbk_bound_matches_the_printed_sum(q, z, order):
    """AdaDp's Theorem 1, one step, with the alternating sums in 60 digits."""
    with mp.workdps(60):
        q_, z_ = mp.mpf(q), mp.mpf(z)
        second = min(4 * mp.expm1(1 / z_**2), 2 * mp.exp(1 / z_**2))
        total = 1 + q_**2 * mp.binomial(order, 2) * second
        for j in range(3, order + 1):
            b = alternating_b(2 * ((j + 1) // 2), z) * alternating_b(2 * (j // 2), z)
            total += 4 * q_**j * mp.binomial(order, j) * mp.sqrt(b)
        truth = float(mp.log(total) / (order - 1))
    assert wbk_rdp(q, z, (float(order),))[0] == pytest.approx(truth, rel=1e-9)
