"""The papers' own figures come out of their own formulas, and are set against the truth."""

import pytest

from jaxdp import accounting as acc
from jaxdp.papers import claims


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def test_figures_of_the_papers():
    assert claims.modified_moments_accountant(0.01, 2.0, 40_000, 1e-5).value == pytest.approx(
        6.786, abs=5e-4
    )
    assert claims.moments_closed_form(0.01, 2.0, 40_000, 1e-5).value == pytest.approx(
        10.18, abs=5e-3
    )
    adadp = claims.adadp_theorem_1(0.01, 0.9, 1800, 1e-5)
    assert adadp.value == pytest.approx(6.92, abs=5e-3)
    assert adadp.order == 4


@pytest.mark.parametrize(
    ("noise", "epochs", "printed", "own"),
    [(2.0, 260, 5.47, 5.471), (4.0, 100, 3.39, 1.696), (8.0, 30, 1.86, 0.464)],
)
def test_pigdos_printed_epsilons_are_all_those_of_noise_2(noise, epochs, printed, own):
    """Its Section 5.2 tells them of 2, 4 and 8; its own formula gives half and a quarter there."""

    def mma(sigma):
        return claims.modified_moments_accountant(0.01, sigma, 100 * epochs, 1e-5).value

    assert mma(2.0) == pytest.approx(printed, abs=0.005)
    assert mma(noise) == pytest.approx(own, abs=5e-4)
    assert acc.epsilon(run(0.01, noise, 100 * epochs), 1e-5).upper < own


def test_the_figure_that_adadp_prints_belongs_to_another_mechanism():
    """4.0 at alpha 6 is the Poisson add/remove value, 4.0153."""
    import math

    from jaxdp.accounting.canonical import Step
    from jaxdp.accounting.rdp import step_rdp

    rdp = step_rdp(Step(0.9, 0.01), acc.Relation.ADD_OR_REMOVE_ONE, (6.0,))[0]
    assert 1800 * rdp + math.log(1e5) / 5 == pytest.approx(4.0153, abs=5e-5)


@pytest.mark.parametrize(
    ("q", "z", "accepted"),
    [(512 / 60000, 1.23, 4698), (2048 / 60000, 2.15, 1157), (1024 / 50000, 1.54, 1435)],
)
def test_sa_dpsgd_buys_these_accepted_steps(q, z, accepted):
    assert claims.sa_dpsgd_theorem_1(q, z, accepted, 1e-5).value <= 3
    assert claims.sa_dpsgd_theorem_1(q, z, accepted + 1, 1e-5).value > 3
    printed = claims.sa_dpsgd_theorem_1(q, z, accepted, 1e-5, printed=True)
    assert printed.value > 10


@pytest.mark.parametrize(
    ("q", "z", "steps", "claimed", "truth"),
    [
        (0.05, 1.0, 10, 0.783, 1.656),
        (0.01, 1.0, 3, 0.0342, 0.2752),
        (0.005, 1.0, 2, 0.0065, 0.1056),
    ],
)
def test_mma_is_below_the_truth_here_and_the_verdict_says_so(q, z, steps, claimed, truth):
    claim = claims.modified_moments_accountant(q, z, steps, 1e-5)
    proven = acc.epsilon(run(q, z, steps), 1e-5)
    assert claim.value == pytest.approx(claimed, rel=1e-2)
    assert proven.lower == pytest.approx(truth, rel=2e-3)
    assert "below the truth" in claim.verdict(proven)


def test_conditions_are_checked():
    claim = claims.modified_moments_accountant(0.05, 0.5, 10, 1e-5)
    held = dict(zip(claim.assumptions, claim.holds, strict=True))
    assert not held["sigma >= 1"]
    assert held["q < 1/sigma"]


def test_a_claim_is_not_a_guarantee():
    claim = claims.moments_accountant(0.01, 1.0, 100, 1e-5)
    with pytest.raises(TypeError):
        float(claim)
    with pytest.raises(ValueError, match="epsilon="):
        acc.calibrate_noise_multiplier(claim, 1e-5, 0.01, 100)
    with pytest.raises(ValueError, match="epsilon="):
        acc.RenyiFilter(claim, 1e-5)


def test_every_claim_answers_for_a_full_batch_too():
    assert all(c.value > 0 for c in claims.all_claims(1.0, 5.0, 10, 1e-5))
