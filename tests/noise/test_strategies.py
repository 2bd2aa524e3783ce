"""Strategies are the matrices that their docstrings say, of float32 numbers, immutable and named.

Their errors are those of A C^-1 as dense matrices, and published values.
"""

import ast
import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import noise
from tests.refusing import all_refused

small = st.floats(-0.875, 0.875, width=32, allow_subnormal=False)
part = st.floats(0.0625, 0.5, width=32)
BLT = noise.Buffered((0.0122853238, 0.1878393665), (0.9999528892, 0.9857068667), 100_000)


@st.composite
def any_strategy(draw, most=12):
    """A strategy of any kind, with coefficients of either sign where it has them."""
    n = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["toeplitz", "inverse", "buffered", "dense"]))
    if kind == "dense":
        matrix = np.zeros((n, n))
        entries = draw(st.lists(small, min_size=n * n, max_size=n * n))
        matrix[np.tril_indices(n)] = entries[: n * (n + 1) // 2]
        np.fill_diagonal(matrix, draw(st.lists(part, min_size=n, max_size=n)))
        return noise.Dense.of(matrix)
    if kind == "buffered":
        m = draw(st.integers(1, 3))
        lists = st.lists(part, min_size=m, max_size=m)
        return noise.Buffered(tuple(draw(lists)), tuple(1 - x for x in draw(lists)), n)
    coefficients = (1.0, *draw(st.lists(small, max_size=n - 1)))
    return (noise.Toeplitz if kind == "toeplitz" else noise.BandedInverse)(coefficients, n)


@given(any_strategy())
def test_norms_and_inverses_are_those_of_the_matrix_and_equal_by_content(strategy):
    n, matrix = strategy.steps, strategy.matrix()
    inverse = np.linalg.inv(matrix)
    scale = np.abs(inverse).max()
    assert matrix.dtype == np.float64
    assert not np.triu(matrix, 1).any()
    assert not np.tril(matrix, -strategy.bands).any()
    np.testing.assert_allclose(strategy.column_norms(), np.linalg.norm(matrix, axis=0), rtol=1e-12)
    np.testing.assert_allclose(strategy.inverse_columns(0, n), inverse, atol=1e-9 * scale)
    some = strategy.inverse_columns(n // 3, n // 2 + 1)
    np.testing.assert_allclose(some, inverse[:, n // 3 : n // 2 + 1], atol=1e-9 * scale)
    rows = np.linalg.norm(inverse, axis=1)
    np.testing.assert_allclose(strategy.inverse_row_norms(), rows, rtol=1e-9, atol=1e-9)
    again = noise.from_dict(json.loads(json.dumps(strategy.to_dict())))
    assert (again, hash(again), repr(again)) == (strategy, hash(strategy), repr(strategy))
    assert len(repr(strategy)) < 400
    if isinstance(strategy, noise.ToeplitzStrategy):
        np.testing.assert_array_equal(strategy.first_column(), matrix[:, 0])
        assert (strategy.column_bound() >= np.abs(matrix[:, 0])).all()
        assert not strategy.non_negative or matrix.min() >= 0
        assert not strategy.non_increasing or (np.diff(matrix[:, 0]) <= 1e-12).all()


def test_numbers_are_float32_named_in_a_short_text_and_those_of_the_square_root():
    assert noise.Toeplitz((1, 0.1), 3).coefficients == (1.0, float(np.float32(0.1)))
    assert noise.Toeplitz((1, -0.0, 1e-40), 3).coefficients == (1.0, 0.0, 0.0)
    assert repr(noise.Toeplitz((1, -0.0), 3)) == repr(noise.Toeplitz((1, 0.0), 3))
    assert noise.Buffered((0.1,), (0.7,), 3).decays == (float(np.float32(0.7)),)
    minus, plain = (noise.Dense.of(np.array([[1.0, 0], [zero, 0.1]])) for zero in (-0.0, 0.0))
    assert minus.matrix()[1, 1] == np.float32(0.1)
    assert minus == plain
    one = noise.square_root(500)
    nudged = list(one.coefficients)
    nudged[400] = float(np.nextafter(np.float32(nudged[400]), np.float32(1)))
    others = noise.square_root(500, 499), noise.Toeplitz(tuple(nudged), 500), noise.square_root(501)
    shown = {repr(s) for s in (one, *others)}
    assert len(shown) == 4
    assert max(map(len, shown)) < 120
    moved = one.matrix()
    moved[300, 2] *= 1.001
    dense, other = noise.Dense.of(one.matrix()), noise.Dense.of(moved)
    assert repr(dense) != repr(other)
    assert dense != other
    n = 40
    root = noise.square_root(n).matrix()
    np.testing.assert_allclose(root @ root, np.tril(np.ones((n, n))), atol=1e-6)
    inverse = noise.banded_inverse_square_root(n, n)
    np.testing.assert_allclose(inverse.matrix(), root, atol=1e-6)
    assert inverse.coefficients[:4] == (1.0, -0.5, -0.125, -0.0625)
    assert noise.square_root(n, 4).coefficients == (1.0, 0.5, 0.375, 0.3125)
    assert noise.banded_inverse_square_root(n, 3).coefficients == (1.0, -0.5, -0.125)


@given(st.lists(st.floats(-0.5, 0.0, width=32, allow_subnormal=False), min_size=1, max_size=6))
def test_kaluza_on_banded_inverses(rest):
    """Exact columns of those proven not to increase do not."""
    strategy = noise.BandedInverse((1.0, *rest), 24)
    d = [Fraction(x) for x in strategy.coefficients]
    column = [Fraction(1)]
    for i in range(1, 24):
        column.append(-sum(d[j] * column[i - j] for j in range(1, min(i + 1, len(d)))))
    assert all(a >= b for a, b in pairwise(column)) or not strategy.non_increasing
    bound = strategy.column_bound()
    assert all(Fraction(float(b)) >= c for b, c in zip(bound, column, strict=True))


def test_kaluza_tells_apart_and_bands_are_the_fewest():
    for width in (1, 2, 3, 5, 16, 64, 700):
        assert noise.banded_inverse_square_root(700, width).non_increasing, width
    assert noise.BandedInverse((1, -1), 9).non_increasing
    assert noise.BandedInverse((1, -0.5, -0.1), 9).non_increasing
    assert not noise.BandedInverse((1, 0, -1), 9).non_increasing  # 1, 0, 1, 0, ...
    assert not noise.BandedInverse((1, -0.1, -0.5), 9).non_increasing
    assert not noise.BandedInverse((1, 0.5), 9).non_negative
    assert not noise.Toeplitz((1, 0.5, 0.6), 9).non_increasing
    assert not noise.Toeplitz((1, -0.5), 9).non_negative
    assert not noise.Buffered((0.6, 0.5), (0.5, 0.1), 9).non_increasing
    assert noise.Buffered((0.5, 0.5), (0.5, 0.1), 9).non_increasing
    inverse, eye = noise.banded_inverse_square_root, noise.Dense.of(np.eye(7))
    three = noise.square_root(7, 3)
    for strategy, bands in (
        *((noise.identity(7), 1), (eye, 1), (noise.Dense.of(three.matrix()), 3)),
        *((noise.square_root(7), 7), (inverse(7, 2), 7), (inverse(7, 1), 1)),
        *((noise.Buffered((0.5,), (0.0,), 7), 2), (noise.Buffered((0.5,), (0.5,), 7), 7)),
    ):
        assert strategy.bands == bands, strategy


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


def assert_either_way(strategy, workload, rel):
    errors = noise.step_errors(strategy, workload)
    assert noise.max_error(strategy, workload) == pytest.approx(errors.max(), rel=rel)
    rms = np.sqrt(np.mean(errors**2))
    assert noise.rms_error(strategy, workload) == pytest.approx(rms, rel=rel)


@given(st.integers(1, 3_000), st.sampled_from([0.0, 0.9]), st.sampled_from([1, 2, 4]))
def test_doubling_agrees_with_the_sum_over_all_steps(n, momentum, buffers):
    rates = np.geomspace(1e-3, 0.5, buffers)
    strategy = noise.Buffered(tuple(0.3 * np.sqrt(rates)), tuple(1 - rates), n)
    assert_either_way(strategy, noise.Workload(momentum), 1e-11)


def test_published_values_and_a_hundred_thousand_steps():
    def losses(strategy):
        value = noise.sensitivity(strategy, noise.Single()).value
        return noise.rms_error(strategy) * value, noise.max_error(strategy) * value

    assert losses(noise.identity(64)) == pytest.approx((5.700877, 8), abs=1e-6)
    assert losses(noise.square_root(64)) == pytest.approx((2.229676, 2.388848), abs=1e-6)
    assert losses(BLT)[1] == pytest.approx(5.296747, abs=1e-6)
    for workload in (noise.Workload(), noise.Workload(0.9, (0.1,) * BLT.steps)):
        assert_either_way(BLT, workload, 1e-10)


WRONG = [
    (r"coefficients\[0\] must be 1, got 0.5", lambda: noise.Toeplitz((0.5, 1), 3)),
    (r"at most steps \(2\), got 3", lambda: noise.Toeplitz((1, 2, 3), 2)),
    (r"coefficients must be a sequence of numbers, got \(\)", lambda: noise.Toeplitz((), 2)),
    ("finite numbers within float32, got .*nan", lambda: noise.Toeplitz((1, float("nan")), 2)),
    ("finite numbers within float32", lambda: noise.Toeplitz((1, 1e39), 2)),
    ("coefficients must be a sequence of numbers, got '1'", lambda: noise.Toeplitz("1", 2)),
    ("coefficients must be a sequence of numbers", lambda: noise.Toeplitz((1, "a"), 2)),
    ("coefficients must be a sequence of numbers", lambda: noise.Toeplitz(((1,), (2, 3)), 2)),
    ("coefficients must be a sequence of numbers, got 1.0", lambda: noise.Toeplitz(1.0, 2)),
    ("steps must be a whole number of at least 1, got 0", lambda: noise.Toeplitz((1,), 0)),
    (r"coefficients\[0\] must be 1", lambda: noise.BandedInverse((2,), 2)),
    (r"one number per scale \(1\)", lambda: noise.Buffered((0.1,), (0.1, 0.2), 3)),
    ("scales must be above 0", lambda: noise.Buffered((0.0,), (0.1,), 3)),
    ("scales must be above 0", lambda: noise.Buffered((1e-42,), (0.1,), 3)),
    (r"decays must be in \[0, 1\)", lambda: noise.Buffered((0.1,), (1.0,), 3)),
    (r"decays must be in \[0, 1\)", lambda: noise.Buffered((0.1,), (1 - 1e-9,), 3)),
    (r"decays must be in \[0, 1\)", lambda: noise.Buffered((0.1,), (-0.1,), 3)),
    ("matrix must be lower-triangular", lambda: noise.Dense.of(np.ones((2, 2)))),
    (r"matrix must be lower-triangular .*\(2, 3\)", lambda: noise.Dense.of(np.ones((2, 3)))),
    ("the diagonal must be above 0", lambda: noise.Dense.of(np.diag([1.0, 0.0]))),
    ("entries must be 12 bytes for steps=2, got 0", lambda: noise.Dense(b"", 2)),
    ("entries must be bytes, got a list", lambda: noise.Dense([1.0], 1)),
    (r"bands must be at most steps \(3\), got 4", lambda: noise.square_root(3, 4)),
    ("bands must be a whole number", lambda: noise.square_root(3, 0)),
    ("bands must be at most steps", lambda: noise.banded_inverse_square_root(3, 4)),
    ("description must have a 'type'", lambda: noise.from_dict({"type": "Other"})),
    ("description of a Toeplitz", lambda: noise.from_dict({"type": "Toeplitz", "steps": 1})),
    ("momentum must be at least 0 and below 1, got 1.0", lambda: noise.Workload(1.0)),
    ("momentum must be", lambda: noise.Workload(-0.1)),
    ("learning_rates must be a finite number of at least", lambda: noise.Workload(0, (1, -1))),
    ("learning_rates must have a number above 0", lambda: noise.Workload(0, (0, 0))),
    ("learning_rates must be constant here", lambda: noise.Workload(0, (1, 2)).toeplitz(2)),
    ("as many as", lambda: noise.rms_error(noise.identity(3), noise.Workload(0, (1, 2)))),
    (r"steps \(100000\), got 2", lambda: noise.max_error(BLT, noise.Workload(0, (1, 1)))),
    ("is unstable", lambda: noise.rms_error(noise.Buffered((9,), (0.5,), 5_000))),
    ("is unstable", lambda: noise.max_error(noise.Toeplitz((1, 4), 5_000))),
    (r"Toeplitz.* is unstable", lambda: noise.Toeplitz((1, 4), 5_000).first_inverse_column()),
    ("Buffered.* is unst", lambda: noise.Buffered((9,), (0.5,), 5_000).first_inverse_column()),
    ("BandedInverse.* is unstable", lambda: noise.BandedInverse((1, 4), 5_000).first_column()),
    ("rounding leaves unknown", lambda: noise.BandedInverse((1, -4), 100).column_bound()),
]


def test_wrong_arguments_and_unstable_noise_are_refused_by_name():
    all_refused(WRONG)


def test_nothing_but_the_noise_itself_needs_jax():
    host = "_gramian _minimise _series dense errors optimise optimise_dense participation "
    host += "sensitivity strategies strategy workloads"
    for stem in host.split():
        path = Path(noise.__file__).parent / f"{stem}.py"
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"jax", "optax"}, path
