"""Optimised strategies: published optima, gradients, and nothing that they contain is better."""

import itertools
import warnings

import numpy as np
import pytest

from jaxdp import noise
from jaxdp.noise import optimise
from tests.refusing import all_refused

SGD = noise.Workload()
HEAVY = noise.Workload(0.9)


def losses(strategy, participation=None, workload=SGD):
    value = noise.sensitivity(strategy, participation or noise.Single())
    return noise.rms_error(strategy, workload) * value, noise.max_error(strategy, workload) * value


def assert_gradient(loss, at, rtol=1e-6, atol=0.0, width=1e-5):
    """Of central differences."""
    rows = np.eye(len(at)) * width
    found = [(loss(at + row)[0] - loss(at - row)[0]) / (2 * width) for row in rows]
    np.testing.assert_allclose(loss(at)[1], found, rtol=rtol, atol=atol)


def test_published_optima_and_all_matrices_contain_the_others():
    rms, most = (noise.optimal_banded(64, 4, error=error) for error in ("rms", "max"))
    assert losses(rms) == pytest.approx((3.240594, 4.365494), abs=1e-6)
    assert losses(most) == pytest.approx((3.254153, 4.350253), abs=1e-6)
    assert losses(noise.optimal_banded(2_000, 8))[0] == pytest.approx(11.580, abs=1e-3)
    assert noise.optimal_banded(64, 1) == noise.identity(64)
    found = noise.optimal_buffered(100_000, 2, error="max")
    assert losses(found)[1] == pytest.approx(5.296747, abs=2e-6)
    np.testing.assert_allclose(found.scales, (0.0122853238, 0.1878393665), rtol=1e-4)
    np.testing.assert_allclose(found.decays, (0.9999528892, 0.9857068667), rtol=1e-6)
    dense = noise.optimal_dense(64)
    assert losses(dense)[0] == pytest.approx(2.099856, abs=1e-6)
    np.testing.assert_allclose(np.linalg.norm(dense.matrix(), axis=0), 1, atol=1e-6)
    best = losses(noise.optimal_dense(64))[0]
    four = noise.optimal_banded(64, 4)
    for other in (noise.square_root(64), noise.optimal_banded(64, 64), four):
        assert best < losses(other)[0]
    assert best < losses(noise.optimal_buffered(64, 3))[0]


@pytest.mark.parametrize("error", ["rms", "max"])
def test_the_share_that_is_taken_back_is_the_best_of_all(error):
    """Against all of a grid, each by matrices, the sensitivity that of one record's columns."""
    steps = 60
    for momentum, turn in ((0.0, 60), (0.0, 7), (0.9, 20)):
        each = noise.Single() if turn == steps else noise.FixedEpochOrder(turn, steps)
        made = noise.optimal_lambda(steps, each, noise.Workload(momentum), error)

        def loss(share, momentum=momentum, turn=turn):
            inverse = np.eye(steps) - share * np.eye(steps, k=-1)
            errors = np.linalg.norm(noise.Workload(momentum).matrix(steps) @ inverse, axis=1)
            moved = np.linalg.norm(np.linalg.inv(inverse)[:, ::turn].sum(axis=1))
            return moved * (errors.max() if error == "max" else np.sqrt(np.mean(errors**2)))

        best = min(map(loss, np.linspace(0, 0.999, 1000)))
        assert loss(-made.coefficients[1]) <= best * (1 + 1e-5)
        place = 0 if error == "rms" else 1
        found = losses(made, each, noise.Workload(momentum))[place]
        assert found == pytest.approx(loss(-made.coefficients[1]), rel=1e-9)


@pytest.mark.parametrize("error", ["rms", "max"])
def test_the_gradient_of_buffered_strategies(error):
    at = np.array([-3.0, -1.5, 5.0, 1.0])
    scales, decays = optimise._scales_and_decays(at)
    strategy = noise.Buffered(tuple(scales), tuple(decays), 500)
    often = ((1, 500), (7, 60), (3, 200), (500, 1))
    for each, momentum in itertools.product(often, (0.0, 0.9)):

        def loss(free, each=each, momentum=momentum):
            return optimise._buffered_loss(free, 500, each, momentum, error)

        assert_gradient(loss, at, atol=1e-8)
        # The loss is that of the strategy which these numbers stand for, but for float32.
        order = noise.FixedEpochOrder(*each[::-1])
        both = losses(strategy, order, noise.Workload(momentum))
        factor = 1.0 if error == "rms" else 1 / np.sqrt(500)
        by_hand = 2 * np.log(both[error == "max"] * np.sqrt(500) * factor)
        assert loss(at)[0] == pytest.approx(by_hand, abs=1e-5)


def test_the_gradients_of_banded_strategies_and_of_all_matrices():
    for workload in (SGD, HEAVY):
        for error in ("rms", "max"):
            loss = optimise._banded_loss(workload.toeplitz(200), error)
            assert_gradient(loss, np.array([0.4, 0.1, 0.2, 0.05]))
    free = np.tril_indices(6, -1)
    at = np.random.default_rng(0).uniform(-0.1, 0.3, len(free[0]))
    for workload in (SGD, HEAVY):
        loss = optimise._dense_loss(workload, free, 6)
        assert_gradient(loss, at, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("steps", "bands"), [(5, 5), (50, 3), (300, 16), (20_000, 4)])
def test_banded_optima_are_no_worse_than_what_they_contain(steps, bands):
    for workload, (index, error) in itertools.product((SGD, HEAVY), enumerate(("rms", "max"))):
        found = noise.optimal_banded(steps, bands, workload, error)
        best = losses(found, None, workload)[index]
        others = [noise.square_root(steps, bands), noise.identity(steps)]
        others.append(noise.optimal_banded(steps, bands - 1, workload, error))
        for shift in np.eye(bands)[1:]:
            near = np.asarray(found.coefficients) + np.outer([1e-3, -1e-3], shift)
            others += [noise.Toeplitz(tuple(c), steps) for c in near]
        for other in others:
            assert best <= losses(other, None, workload)[index] * (1 + 1e-6)


def test_more_buffers_are_no_worse():
    for participation in (noise.Single(), noise.FixedEpochOrder(100, 10)):
        found = [noise.optimal_buffered(1_000, m, participation) for m in (1, 2, 3)]
        rms = [losses(strategy, participation)[0] for strategy in found]
        assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(rms)), participation
        assert rms[2] < 1.01 * losses(noise.square_root(1_000), participation)[0], participation


@pytest.mark.parametrize("workload", [SGD, HEAVY], ids=repr)
@pytest.mark.parametrize("times", [4, 2])
def test_all_matrices_for_records_that_come_again(times, workload):
    participation = noise.FixedEpochOrder(6, times)
    found = noise.optimal_dense(24, participation, workload)
    again = noise.sensitivity(found, participation)
    assert again == pytest.approx(np.sqrt(times), rel=1e-5)
    plain = losses(noise.Dense.of(noise.square_root(24, 6).matrix()), participation, workload)[0]
    assert losses(found, participation, workload)[0] < plain
    # No better one exists: the gap to the dual problem is small, and grows away from the optimum.
    square = found.matrix().T @ found.matrix()
    apart = np.subtract.outer(np.arange(24), np.arange(24))
    free = np.nonzero((apart > 0) & ~((apart % 6 == 0) & (apart < 6 * times)))
    gap = optimise._duality_gap(workload.matrix(24), square, free)
    assert abs(gap) < 1e-5
    assert optimise._duality_gap(workload.matrix(24), (square + np.eye(24)) / 2, free) > 0.01


def test_the_optimum_of_all_matrices_is_that_of_its_dual_and_the_same_again():
    """Denisov et al. 2022, arXiv:2202.08312: v = diag((V^1/2 S V^1/2)^1/2), S = A^T A."""
    matrix, v = HEAVY.matrix(12), np.ones(12)
    for _ in range(300):
        root = np.sqrt(v)
        values, vectors = np.linalg.eigh(root[:, None] * (matrix.T @ matrix) * root)
        v = np.square(vectors) @ np.sqrt(np.maximum(values, 0))
    found = noise.optimal_dense(12, workload=HEAVY)
    assert losses(found, None, HEAVY)[0] == pytest.approx(np.sqrt(v.sum() / 12), rel=1e-6)
    assert found == noise.optimal_dense(12, workload=HEAVY)
    assert noise.optimal_banded(300, 8) == noise.optimal_banded(300, 8)
    assert noise.optimal_buffered(300, 2) == noise.optimal_buffered(300, 2)


def test_very_short_and_long_runs():
    short = noise.FixedEpochOrder(1, 4)
    for steps in (1, 2, 3, 10):
        for strategy in (
            noise.optimal_banded(steps, steps),
            noise.optimal_buffered(steps, 2),
            noise.optimal_buffered(steps, 1, short, HEAVY, "max"),
            noise.optimal_dense(steps),
            noise.optimal_dense(steps, short),
        ):
            assert np.isfinite(losses(strategy)).all(), strategy
    n = 100_000
    for error, index in (("rms", 0), ("max", 1)):
        eight = losses(noise.optimal_banded(n, 8, error=error))[index]
        many = losses(noise.optimal_banded(n, 32, error=error))[index]
        assert many < eight < losses(noise.square_root(n, 8))[index]
    order = noise.FixedEpochOrder(100_000, 10)
    million = noise.optimal_buffered(1_000_000, 3, order, HEAVY)
    assert np.isfinite(losses(million, order, HEAVY)).all()


def test_wrong_arguments_are_named_and_an_optimum_that_was_not_reached():
    all_refused(
        [
            (r"bands must be at most steps \(4\), got 5", lambda: noise.optimal_banded(4, 5)),
            ("error must be one of rms, max; go", lambda: noise.optimal_banded(4, 2, error="mean")),
            ("buffers must be a whole number of at least 1", lambda: noise.optimal_buffered(4, 0)),
            ("ation must not be cyclic", lambda: noise.optimal_buffered(4, 1, noise.Cyclic(2))),
            ("participation must be one of", lambda: noise.optimal_buffered(4, 1, None)),
            ("error must be one of", lambda: noise.optimal_buffered(4, 1, error="")),
            ("ation must not be cyclic", lambda: noise.optimal_dense(4, noise.Cyclic(2))),
        ]
    )
    # An optimum that was not reached is announced.
    loss = optimise._banded_loss(SGD.toeplitz(64), "rms")
    with pytest.warns(RuntimeWarning, match="8 bands: no optimum was reached in 1 iterations"):
        optimise.minimize(loss, [np.zeros(7)], "8 bands", maxiter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimise.minimize(loss, [np.zeros(7)], "8 bands")


def test_parameters_whose_error_overflows_are_infeasible():
    free = np.asarray([800.0, 800.0])
    found, slope = optimise._buffered_loss(free, 10, (1, 1), 1.0, "rms")
    assert found == optimise.INFEASIBLE
    assert not slope.any()
