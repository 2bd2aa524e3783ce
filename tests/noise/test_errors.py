"""Errors against A C^-1 as dense matrices, and against published values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import noise
from tests.noise.test_strategies import any_strategy

BLT = noise.Buffered((0.0122853238, 0.1878393665), (0.9999528892, 0.9857068667), 100_000)


@st.composite
def cases(draw):
    strategy = draw(any_strategy())
    rates = st.lists(st.floats(0.1, 2), min_size=strategy.steps, max_size=strategy.steps)
    given = draw(st.one_of(st.none(), rates, st.just([0.5] * strategy.steps)))
    return strategy, noise.Workload(draw(st.sampled_from([0.0, 0.5, 0.9])), given)


def by_hand(workload, n):
    """A, by n runs of heavy-ball momentum."""
    matrix = np.zeros((n, n))
    rates = workload.learning_rates or (1.0,) * n
    for j in range(n):
        momentum = moved = 0.0
        for i in range(n):
            momentum = workload.momentum * momentum + (i == j)
            moved += rates[i] * momentum
            matrix[i, j] = moved
    return matrix


@given(cases())
def test_errors_are_row_norms_of_a_times_the_inverse(case):
    strategy, workload = case
    n = strategy.steps
    matrix = by_hand(workload, n)
    np.testing.assert_allclose(workload.matrix(n), matrix, rtol=1e-12)
    rows = np.linalg.norm(matrix @ np.linalg.inv(strategy.matrix()), axis=1)
    close = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(noise.step_errors(strategy, workload), rows, **close)
    np.testing.assert_allclose(noise.max_error(strategy, workload), rows.max(), **close)
    rms = np.sqrt(np.mean(rows**2))
    np.testing.assert_allclose(noise.rms_error(strategy, workload), rms, **close)
    if workload.constant:
        np.testing.assert_allclose(workload.toeplitz(n), matrix[:, 0], rtol=1e-12)


@given(st.integers(1, 3_000), st.sampled_from([0.0, 0.9]), st.sampled_from([1, 2, 4]))
def test_doubling_agrees_with_the_sum_over_all_steps(n, momentum, buffers):
    rates = np.geomspace(1e-3, 0.5, buffers)
    strategy = noise.Buffered(tuple(0.3 * np.sqrt(rates)), tuple(1 - rates), n)
    workload = noise.Workload(momentum)
    errors = noise.step_errors(strategy, workload)
    assert noise.max_error(strategy, workload) == pytest.approx(errors.max(), rel=1e-11)
    rms = np.sqrt(np.mean(errors**2))
    assert noise.rms_error(strategy, workload) == pytest.approx(rms, rel=1e-11)


def test_a_hundred_thousand_steps_by_either_way():
    for workload in (noise.Workload(), noise.Workload(0.9, (0.1,) * BLT.steps)):
        errors = noise.step_errors(BLT, workload)
        assert noise.max_error(BLT, workload) == pytest.approx(errors[-1], rel=1e-10)
        rms = np.sqrt(np.mean(errors**2))
        assert noise.rms_error(BLT, workload) == pytest.approx(rms, rel=1e-10)


def test_published_values():
    unit = noise.Single()

    def losses(strategy):
        value = noise.sensitivity(strategy, unit).value
        return noise.rms_error(strategy) * value, noise.max_error(strategy) * value

    assert losses(noise.identity(64)) == pytest.approx((5.700877, 8), abs=1e-6)
    assert losses(noise.square_root(64)) == pytest.approx((2.229676, 2.388848), abs=1e-6)
    assert losses(BLT)[1] == pytest.approx(5.296747, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: noise.Workload(1.0), "momentum must be at least 0 and below 1, got 1.0"),
        (lambda: noise.Workload(-0.1), "momentum must be"),
        (lambda: noise.Workload(0, (1, -1)), "learning_rates must be a finite number of at least"),
        (lambda: noise.Workload(0, (0, 0)), "learning_rates must have a number above 0"),
        (lambda: noise.Workload(0, (1, 2)).toeplitz(2), "learning_rates must be constant here"),
        (lambda: noise.rms_error(noise.identity(3), noise.Workload(0, (1, 2))), "as many as"),
        (lambda: noise.max_error(BLT, noise.Workload(0, (1, 1))), r"steps \(100000\), got 2"),
        (lambda: noise.rms_error(noise.Buffered((9,), (0.5,), 5_000)), "is unstable"),
        (lambda: noise.max_error(noise.Toeplitz((1, 4), 5_000)), "is unstable"),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
