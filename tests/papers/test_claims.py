"""The papers' own figures come out of their own formulas, and are set against the truth."""

import math

import pytest

from jaxdp import accounting as acc
from jaxdp.accounting.rdp import poisson_renyi
from jaxdp.papers import claims
from jaxdp.papers.wbk import wbk_rdp
from tests.accounting.judging import cost, run
from tests.refusing import refused


def mma(z, steps):
    return claims.modified_moments_accountant(0.01, z, steps, 1e-5).value


def test_figures_of_the_papers():
    assert mma(2.0, 40_000) == pytest.approx(6.786, abs=5e-4)
    closed = claims.moments_closed_form(0.01, 2.0, 40_000, 1e-5).value
    assert closed == pytest.approx(10.18, abs=5e-3)
    adadp = claims.adadp_theorem_1(0.01, 0.9, 1800, 1e-5)
    assert adadp.value == pytest.approx(6.92, abs=5e-3)
    assert adadp.order == 4
    # The 4.0 at alpha 6 that AdaDp prints belongs to another mechanism: it is the Poisson
    # add/remove value, 4.0153.
    rdp = poisson_renyi(0.9, 0.01, acc.Relation.ADD_OR_REMOVE_ONE, (6.0,))[0]
    assert 1800 * rdp + math.log(1e5) / 5 == pytest.approx(4.0153, abs=5e-5)
    # PIGDO's Section 5.2 tells epsilons of noise 2, 4 and 8: all are those of 2.
    for noise, epochs, printed, own in (
        (2.0, 260, 5.47, 5.471), (4.0, 100, 3.39, 1.696), (8.0, 30, 1.86, 0.464),
    ):  # fmt: skip
        assert mma(2.0, 100 * epochs) == pytest.approx(printed, abs=0.005), noise
        assert mma(noise, 100 * epochs) == pytest.approx(own, abs=5e-4), noise
        assert cost(run(0.01, noise, 100 * epochs)) < own, noise
    # SA-DPSGD buys these accepted steps.
    for q, z, accepted in (
        (512 / 60000, 1.23, 4698), (2048 / 60000, 2.15, 1157), (1024 / 50000, 1.54, 1435),
    ):  # fmt: skip
        assert claims.sa_dpsgd_theorem_1(q, z, accepted, 1e-5).value <= 3, (q, z, accepted)
        assert claims.sa_dpsgd_theorem_1(q, z, accepted + 1, 1e-5).value > 3, (q, z, accepted)
        assert claims.sa_dpsgd_theorem_1(q, z, accepted, 1e-5, printed=True).value > 10, q
    # Here the MMA is below the truth, and the verdict says so.
    for q, steps, claimed, truth in (
        (0.05, 10, 0.783, 1.656), (0.01, 3, 0.0342, 0.2752), (0.005, 2, 0.0065, 0.1056),
    ):  # fmt: skip
        claim = claims.modified_moments_accountant(q, 1.0, steps, 1e-5)
        proven = acc.epsilon(run(q, 1.0, steps), 1e-5)
        assert claim.value == pytest.approx(claimed, rel=1e-2), (q, steps, claimed, truth)
        assert proven.lower == pytest.approx(truth, rel=2e-3), (q, steps, claimed, truth)
        assert "below the truth" in claim.verdict(proven), (q, steps, claimed, truth)
    # The Renyi bound of AdaDp's Theorem 1 is the printed sum: one step, in 60 digits.
    for q, z, order, printed in (
        (0.01, 0.9, 4.0, 0.001713205361595072), (0.1, 5.0, 9.0, 0.007802360027476221),
        (0.3, 40.0, 16.0, 0.001887752064442885),
    ):  # fmt: skip
        assert wbk_rdp(q, z, (order,))[0] == pytest.approx(printed, rel=1e-9), order
    # Conditions are checked.
    claim = claims.modified_moments_accountant(0.05, 0.5, 10, 1e-5)
    held = dict(zip(claim.assumptions, claim.holds, strict=True))
    assert not held["sigma >= 1"]
    assert held["q < 1/sigma"]
    # Every claim answers for a full batch too.
    assert all(c.value > 0 for c in claims.all_claims(1.0, 5.0, 10, 1e-5))
    # A claim is not a guarantee.
    claim = claims.moments_accountant(0.01, 1.0, 100, 1e-5)
    refused("float", float, claim, error=TypeError)
    refused("epsilon must be", acc.calibrate_noise_multiplier, claim, 1e-5, 0.01, 100)
    refused("epsilon must be", acc.RenyiFilter, claim, 1e-5)
