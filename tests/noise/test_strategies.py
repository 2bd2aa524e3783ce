"""Strategies are the matrices that their docstrings say, of float32 numbers, immutable and named."""

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

small = st.floats(-0.875, 0.875, width=32, allow_subnormal=False)
part = st.floats(0.0625, 0.5, width=32)


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
def test_norms_and_inverses_are_those_of_the_matrix(strategy):
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
    if isinstance(strategy, noise.ToeplitzStrategy):
        np.testing.assert_array_equal(strategy.first_column(), matrix[:, 0])
        assert (strategy.column_bound() >= np.abs(matrix[:, 0])).all()
        assert not strategy.non_negative or matrix.min() >= 0
        assert not strategy.non_increasing or (np.diff(matrix[:, 0]) <= 1e-12).all()


@given(any_strategy())
def test_they_are_equal_by_content_and_round_trip_through_json(strategy):
    again = noise.from_dict(json.loads(json.dumps(strategy.to_dict())))
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert repr(again) == repr(strategy)
    assert len(repr(strategy)) < 400


def test_the_bands_of_a_matrix_are_the_fewest():
    assert noise.identity(7).bands == 1
    assert noise.Dense.of(np.eye(7)).bands == 1
    assert noise.Dense.of(noise.square_root(7, 3).matrix()).bands == 3
    assert noise.square_root(7).bands == 7
    assert noise.banded_inverse_square_root(7, 2).bands == 7
    assert noise.banded_inverse_square_root(7, 1).bands == 1
    assert noise.Buffered((0.5,), (0.0,), 7).bands == 2
    assert noise.Buffered((0.5,), (0.5,), 7).bands == 7


def recurrence(strategy, z):
    """The noise, as the docstrings define it."""
    y = np.zeros_like(z)
    if isinstance(strategy, noise.Buffered):
        states, decays = np.zeros(len(strategy.scales)), np.asarray(strategy.decays)
        for i, value in enumerate(z):
            y[i] = value - states @ strategy.scales
            states = decays * states + y[i]
        return y
    if isinstance(strategy, noise.Dense):
        matrix = strategy.matrix()
        for i, value in enumerate(z):
            y[i] = (value - matrix[i, :i] @ y[:i]) / matrix[i, i]
        return y
    c = strategy.coefficients
    for i in range(len(z)):
        if isinstance(strategy, noise.Toeplitz):
            y[i] = z[i] - sum(c[j] * y[i - j] for j in range(1, min(i + 1, len(c))))
        else:
            y[i] = sum(c[j] * z[i - j] for j in range(min(i + 1, len(c))))
    return y


@given(any_strategy(), st.integers(0, 2**32 - 1))
def test_the_recurrence_of_the_docstring_applies_the_inverse(strategy, seed):
    z = np.random.default_rng(seed).normal(size=strategy.steps)
    y = recurrence(strategy, z)
    np.testing.assert_allclose(strategy.matrix() @ y, z, atol=1e-9 * (1 + np.abs(y).max()))


def test_numbers_are_float32_and_no_others():
    assert noise.Toeplitz((1, 0.1), 3).coefficients == (1.0, float(np.float32(0.1)))
    assert noise.Toeplitz((1, -0.0, 1e-40), 3).coefficients == (1.0, 0.0, 0.0)
    assert repr(noise.Toeplitz((1, -0.0), 3)) == repr(noise.Toeplitz((1, 0.0), 3))
    assert noise.Buffered((0.1,), (0.7,), 3).decays == (float(np.float32(0.7)),)
    assert noise.Dense.of(np.array([[1.0, 0], [-0.0, 0.1]])).matrix()[1, 1] == np.float32(0.1)
    plain = noise.Dense.of(np.array([[1.0, 0], [0.0, 0.1]]))
    assert noise.Dense.of(np.array([[1.0, 0], [-0.0, 0.1]])) == plain


def test_a_representation_names_every_number_and_is_short():
    one, other = noise.square_root(500), noise.square_root(500, 499)
    nudged = list(one.coefficients)
    nudged[400] = float(np.nextafter(np.float32(nudged[400]), np.float32(1)))
    shown = {
        repr(s) for s in (one, other, noise.Toeplitz(tuple(nudged), 500), noise.square_root(501))
    }
    assert len(shown) == 4
    assert max(map(len, shown)) < 120
    dense = noise.Dense.of(one.matrix())
    moved = one.matrix()
    moved[300, 2] *= 1.001
    assert repr(dense) != repr(noise.Dense.of(moved))
    assert dense != noise.Dense.of(moved)


def test_the_square_root_squared_is_prefix_sums_and_its_inverse_undoes_it():
    n = 40
    root = noise.square_root(n).matrix()
    np.testing.assert_allclose(root @ root, np.tril(np.ones((n, n))), atol=1e-6)
    inverse = noise.banded_inverse_square_root(n, n)
    np.testing.assert_allclose(inverse.matrix(), root, atol=1e-6)
    assert inverse.coefficients[:4] == (1.0, -0.5, -0.125, -0.0625)
    assert noise.square_root(n, 4).coefficients == (1.0, 0.5, 0.375, 0.3125)
    assert noise.banded_inverse_square_root(n, 3).coefficients == (1.0, -0.5, -0.125)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16, 64, 700])
def test_the_inverse_square_root_is_proven_to_be_non_increasing(width):
    assert noise.banded_inverse_square_root(700, width).non_increasing


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


def test_kaluza_tells_apart():
    assert noise.BandedInverse((1, -1), 9).non_increasing
    assert noise.BandedInverse((1, -0.5, -0.1), 9).non_increasing
    assert not noise.BandedInverse((1, 0, -1), 9).non_increasing  # 1, 0, 1, 0, ...
    assert not noise.BandedInverse((1, -0.1, -0.5), 9).non_increasing
    assert not noise.BandedInverse((1, 0.5), 9).non_negative
    assert not noise.Toeplitz((1, 0.5, 0.6), 9).non_increasing
    assert not noise.Toeplitz((1, -0.5), 9).non_negative
    assert not noise.Buffered((0.6, 0.5), (0.5, 0.1), 9).non_increasing
    assert noise.Buffered((0.5, 0.5), (0.5, 0.1), 9).non_increasing


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: noise.Toeplitz((0.5, 1), 3), r"coefficients\[0\] must be 1, got 0.5"),
        (lambda: noise.Toeplitz((1, 2, 3), 2), r"at most steps \(2\), got 3"),
        (lambda: noise.Toeplitz((), 2), r"coefficients must be a sequence of numbers, got \(\)"),
        (lambda: noise.Toeplitz((1, float("nan")), 2), "finite numbers within float32, got .*nan"),
        (lambda: noise.Toeplitz((1, 1e39), 2), "finite numbers within float32"),
        (lambda: noise.Toeplitz("1", 2), "coefficients must be a sequence of numbers, got '1'"),
        (lambda: noise.Toeplitz((1, "a"), 2), "coefficients must be a sequence of numbers"),
        (lambda: noise.Toeplitz(((1,), (2, 3)), 2), "coefficients must be a sequence of numbers"),
        (lambda: noise.Toeplitz(1.0, 2), "coefficients must be a sequence of numbers, got 1.0"),
        (lambda: noise.Toeplitz((1,), 0), "steps must be a whole number of at least 1, got 0"),
        (lambda: noise.BandedInverse((2,), 2), r"coefficients\[0\] must be 1"),
        (lambda: noise.Buffered((0.1,), (0.1, 0.2), 3), r"one number per scale \(1\)"),
        (lambda: noise.Buffered((0.0,), (0.1,), 3), "scales must be above 0"),
        (lambda: noise.Buffered((1e-42,), (0.1,), 3), "scales must be above 0"),
        (lambda: noise.Buffered((0.1,), (1.0,), 3), r"decays must be in \[0, 1\)"),
        (lambda: noise.Buffered((0.1,), (1 - 1e-9,), 3), r"decays must be in \[0, 1\)"),
        (lambda: noise.Buffered((0.1,), (-0.1,), 3), r"decays must be in \[0, 1\)"),
        (lambda: noise.Dense.of(np.ones((2, 2))), "matrix must be lower-triangular"),
        (lambda: noise.Dense.of(np.ones((2, 3))), r"matrix must be lower-triangular .*\(2, 3\)"),
        (lambda: noise.Dense.of(np.diag([1.0, 0.0])), "the diagonal must be above 0"),
        (lambda: noise.Dense(b"", 2), "entries must be 12 bytes for steps=2, got 0"),
        (lambda: noise.Dense([1.0], 1), "entries must be bytes, got a list"),
        (lambda: noise.square_root(3, 4), r"bands must be at most steps \(3\), got 4"),
        (lambda: noise.square_root(3, 0), "bands must be a whole number"),
        (lambda: noise.banded_inverse_square_root(3, 4), "bands must be at most steps"),
        (lambda: noise.from_dict({"type": "Other"}), "description must have a 'type'"),
        (lambda: noise.from_dict({"type": "Toeplitz", "steps": 1}), "description of a Toeplitz"),
    ],
)
def test_wrong_arguments_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_unstable_noise_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Toeplitz.* is unstable"):
        noise.Toeplitz((1, 4), 5_000).first_inverse_column()
    with pytest.raises(ValueError, match=r"Buffered.* is unstable"):
        noise.Buffered((9,), (0.5,), 5_000).first_inverse_column()
    with pytest.raises(ValueError, match=r"BandedInverse.* is unstable"):
        noise.BandedInverse((1, 4), 5_000).first_column()
    with pytest.raises(ValueError, match="rounding leaves unknown"):
        noise.BandedInverse((1, -4), 100).column_bound()


def test_nothing_but_the_noise_itself_needs_jax():
    for path in Path(noise.__file__).parent.glob("*.py"):
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        host = path.stem in HOST
        assert not (host and names & {"jax", "optax"}), path


HOST = {
    "_gramian",
    "_minimise",
    "_series",
    "dense",
    "errors",
    "optimise",
    "optimise_dense",
    "participation",
    "sensitivity",
    "strategies",
    "strategy",
    "workloads",
}
