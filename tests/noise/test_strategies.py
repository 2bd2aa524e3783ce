"""Strategies are the matrices that their docstrings say, of float32 numbers, immutable and named.

Their errors are those of A C^-1 as dense matrices, and published values.
"""

import ast
import itertools
import json
import math
from fractions import Fraction
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
    matrix = strategy.matrix()
    inverse = np.linalg.inv(matrix)
    scale = np.abs(inverse).max()
    assert matrix.dtype == np.float64
    assert not np.triu(matrix, 1).any()
    assert not np.tril(matrix, -strategy.bands).any()
    np.testing.assert_allclose(strategy.inverse(), inverse, atol=1e-9 * scale)
    rows = np.linalg.norm(inverse, axis=1)
    np.testing.assert_allclose(strategy.inverse_row_norms(), rows, rtol=1e-9, atol=1e-9)
    again = noise.from_dict(json.loads(json.dumps(strategy.to_dict())))
    assert (again, hash(again), repr(again)) == (strategy, hash(strategy), repr(strategy))
    assert len(repr(strategy)) < 400
    if isinstance(strategy, noise.ToeplitzStrategy):
        np.testing.assert_array_equal(strategy.first_column(), matrix[:, 0])
        assert (strategy.column_bound() >= np.abs(matrix[:, 0])).all()
        assert not strategy.non_negative or matrix.min() >= 0


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


def test_signs_are_told_apart_and_bands_are_the_fewest():
    assert noise.BandedInverse((1, -0.5, -0.1), 9).non_negative
    assert not noise.BandedInverse((1, 0.5), 9).non_negative
    assert not noise.Toeplitz((1, -0.5), 9).non_negative
    inverse, eye = noise.banded_inverse_square_root, noise.Dense.of(np.eye(7))
    three = noise.square_root(7, 3)
    for strategy, bands in (
        *((noise.identity(7), 1), (eye, 1), (noise.Dense.of(three.matrix()), 3)),
        *((noise.square_root(7), 7), (inverse(7, 2), 7), (inverse(7, 1), 1)),
        *((noise.Buffered((0.5,), (0.0,), 7), 2), (noise.Buffered((0.5,), (0.5,), 7), 7)),
    ):
        assert strategy.bands == bands, strategy


def by_hand(workload, n):
    """A, by n runs of heavy-ball momentum."""
    matrix = np.zeros((n, n))
    for j in range(n):
        momentum = moved = 0.0
        for i in range(n):
            momentum = workload.momentum * momentum + (i == j)
            moved += momentum
            matrix[i, j] = moved
    return matrix


@given(any_strategy(), st.sampled_from([0.0, 0.5, 0.9]))
def test_errors_are_row_norms_of_a_times_the_inverse(strategy, momentum):
    n, workload = strategy.steps, noise.Workload(momentum)
    matrix = by_hand(workload, n)
    np.testing.assert_allclose(workload.matrix(n), matrix, rtol=1e-12)
    rows = np.linalg.norm(matrix @ np.linalg.inv(strategy.matrix()), axis=1)
    close = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(noise.step_errors(strategy, workload), rows, **close)
    np.testing.assert_allclose(noise.max_error(strategy, workload), rows.max(), **close)
    rms = np.sqrt(np.mean(rows**2))
    np.testing.assert_allclose(noise.rms_error(strategy, workload), rms, **close)
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
        value = noise.sensitivity(strategy, noise.Single())
        return noise.rms_error(strategy) * value, noise.max_error(strategy) * value

    assert losses(noise.identity(64)) == pytest.approx((5.700877, 8), abs=1e-6)
    assert losses(noise.square_root(64)) == pytest.approx((2.229676, 2.388848), abs=1e-6)
    assert losses(BLT)[1] == pytest.approx(5.296747, abs=1e-6)
    for workload in (noise.Workload(), noise.Workload(0.9)):
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
    for stem in ("errors", "optimise", "sensitivity", "strategies"):
        path = Path(noise.__file__).parent / f"{stem}.py"
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"jax", "optax"}, path


# Sensitivities are never below the truth, over all patterns and signs; exact where said.
ROOM = 1e-6  # how far above the truth an exact value may be


def patterns(participation, n):
    """Every set of steps that a record may take part in, as large as can be or not."""
    if isinstance(participation, noise.FixedEpochOrder):
        for j in range(n):
            yield tuple(range(j, n, participation.separation))[: participation.participations]
        return
    yield from ((j,) for j in range(n))


def lower_bound(matrix, participation):
    """The largest norm over all patterns, with equal or opposite gradients."""
    best = 0.0
    for steps in patterns(participation, len(matrix)):
        for signs in itertools.product((1, -1), repeat=len(steps) - 1):
            best = max(best, np.linalg.norm(matrix[:, steps] @ np.array((1, *signs))))
    return best


participations = st.one_of(
    st.just(noise.Single()),
    st.builds(noise.FixedEpochOrder, st.integers(1, 5), st.integers(1, 4)),
)


def check(strategy, participation, exact=False):
    found = noise.sensitivity(strategy, participation)
    truth = lower_bound(strategy.matrix(), participation)
    assert found >= truth * (1 - 1e-14)
    assert not exact or found <= truth * (1 + ROOM)
    return found


@given(st.lists(st.floats(0, 1, width=32), max_size=6), participations)
def test_in_a_fixed_order_coefficients_of_one_sign_are_exact(rest, participation):
    check(noise.Toeplitz((1.0, *rest), 7), participation, exact=True)


@given(any_strategy(most=8), st.integers(1, 4))
def test_no_more_bands_than_the_separation_is_exact_for_any_signs(strategy, count):
    matrix = np.triu(strategy.matrix(), -2)
    banded = noise.Dense.of(matrix)
    assert banded.bands <= 3
    check(banded, noise.FixedEpochOrder(3, count), exact=True)
    found = noise.sensitivity(banded, noise.Cyclic(3))
    assert found == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-6)


def test_what_is_not_proven_is_a_bound_and_more_bands_than_groups_are_refused():
    for strategy, participation in (
        # c_1 > 0 > c_2, and only a bound of the column is known.
        (noise.BandedInverse((1, -0.5, 0.5), 7), noise.FixedEpochOrder(1, 3)),
        # The products of the columns are above 0, above 0, and below: no signs suit all three.
        (noise.Dense.of(np.array([[1, 0, 0], [1, 1, 0], [-3, 1, 1]])), noise.FixedEpochOrder(1, 3)),
    ):
        check(strategy, participation)
    four, inverse = noise.square_root(64, 4), noise.banded_inverse_square_root(64, 2)
    check(noise.square_root(7, 4), noise.Cyclic(4), exact=True)
    groups = r"at most bands=3 under Cyclic\(bands=3\), got 4 of Toepl"
    all_refused(
        [
            (groups, lambda: noise.sensitivity(four, noise.Cyclic(3))),
            ("at most bands=3", lambda: noise.sensitivity(inverse, noise.Cyclic(3))),
            (
                "separation must be a whole number of at least 1",
                lambda: noise.FixedEpochOrder(0, 1),
            ),
            ("separation must be a whole number", lambda: noise.FixedEpochOrder(1.5, 1)),
            ("bands must be a whole number of at least 1, got 0", lambda: noise.Cyclic(0)),
        ]
    )


@given(any_strategy(most=6), st.integers(0, 2**32 - 1))
def test_gradients_in_more_dimensions_are_bounded_too(strategy, seed):
    gradients = np.random.default_rng(seed).normal(size=(20, strategy.steps, 3))
    gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
    moved = np.linalg.norm(strategy.matrix() @ gradients, axis=(1, 2)).max()
    assert noise.sensitivity(strategy, noise.FixedEpochOrder(1, strategy.steps)) >= moved


def random_strategy(rng, n):
    """Any kind and scale, more often of one sign, falling, or of few bands than by chance."""
    kind, width = rng.integers(4), int(rng.integers(1, n + 1))
    numbers = rng.normal(size=width) * rng.choice([0.1, 0.5, 1, 10.0 ** rng.uniform(-2, 2)])
    numbers = [numbers, abs(numbers), -abs(numbers), -np.sort(-abs(numbers))][rng.integers(4)]
    if kind == 0:
        decays = rng.choice([0, 1e-38, 0.5, 0.99, 1 - 6e-8, rng.uniform(0, 0.999)], width)
        return noise.Buffered(tuple(abs(numbers) + 1e-9), tuple(decays), n)
    if kind == 1:
        spread = 10.0 ** rng.uniform(-3, 3, size=(n, n)) if rng.random() < 0.5 else 1.0
        matrix = np.tril(rng.normal(size=(n, n)) * spread)
        signed = rng.choice([1, -1]) * abs(matrix) if rng.random() < 0.6 else matrix
        matrix = np.triu(signed, 1 - width)
        np.fill_diagonal(matrix, abs(matrix.diagonal()) + 1e-3)
        return noise.Dense.of(matrix)
    return (noise.Toeplitz, noise.BandedInverse)[kind - 2]((1.0, *numbers[1:]), n)


@pytest.mark.parametrize("seed", range(4))
def test_never_below_brute_force_at_random(seed):
    rng, checked = np.random.default_rng(seed), 0
    for _ in range(200):
        n = int(rng.integers(1, 8))
        strategy, (k, b) = random_strategy(rng, n), rng.integers(1, min(n, 5) + 1, 2).tolist()
        for participation in (
            noise.Single(),
            noise.Cyclic(max(b, strategy.bands)),
            noise.FixedEpochOrder(b, k),
        ):
            try:
                check(strategy, participation)
            except ValueError:  # a column that rounding leaves unknown
                assert isinstance(strategy, noise.BandedInverse)
                continue
            checked += 1
    assert checked > 500


def exact_column(strategy):
    """The first column in rational numbers."""
    n = strategy.steps
    if isinstance(strategy, noise.Buffered):
        numbers = ([Fraction(x) for x in each] for each in (strategy.scales, strategy.decays))
        pairs, column = list(zip(*numbers, strict=True)), [Fraction(1)]
        for _ in range(n - 1):
            column.append(sum(a for a, _ in pairs))
            pairs = [(a * d, d) for a, d in pairs]
        return column
    numbers = [Fraction(x) for x in strategy.coefficients]
    if isinstance(strategy, noise.Toeplitz):
        return (numbers + [Fraction(0)] * n)[:n]
    column = [Fraction(1)]
    for i in range(1, n):
        column.append(-sum(numbers[j] * column[i - j] for j in range(1, min(i + 1, len(numbers)))))
    return column


@pytest.mark.parametrize(
    "strategy",
    [
        noise.square_root(90),
        noise.square_root(90, 7),
        noise.banded_inverse_square_root(90, 7),
        noise.Buffered((0.01, 0.2), (0.9999, 0.9), 90),
        noise.BandedInverse((1, -1), 90),
    ],
    ids=lambda s: f"{type(s).__name__}{s.bands}",
)
def test_rounding_never_makes_it_too_small(strategy):
    column = exact_column(strategy)
    for count, separation in ((1, 1), (2, 30), (9, 10), (90, 1)):
        total = [
            sum(column[i - s] for s in range(0, min(i + 1, count * separation), separation))
            for i in range(90)
        ]
        square = sum(x * x for x in total)
        found = noise.sensitivity(strategy, noise.FixedEpochOrder(separation, count))
        assert square <= Fraction(found) ** 2 <= square * Fraction(1 + 1e-9)


def test_published_value_more_participations_than_fit_and_long_runs():
    root, once = noise.square_root(64), noise.sensitivity(noise.square_root(64), noise.Single())
    found = noise.sensitivity(root, noise.FixedEpochOrder(16, 4))
    assert found == pytest.approx(3.960620, abs=1e-6)
    assert noise.sensitivity(root, noise.FixedEpochOrder(16, 100)) == found
    assert noise.sensitivity(root, noise.FixedEpochOrder(16, 3)) < found
    assert noise.sensitivity(root, noise.FixedEpochOrder(64, 9)) == once
    n, many = 100_000, noise.FixedEpochOrder(1_000, 100)
    # Signs that cancel: in a long run a bound by magnitudes, in a short one that of C^T C.
    found = noise.sensitivity(noise.Toeplitz((1, *([0.01, -0.01] * 1_000)), n), many)
    assert math.sqrt(100) * 1.0 < found < 5 * math.sqrt(100 * 1.2)
    strategy, participation = noise.Toeplitz((1, -0.5, 0.3, -0.5), 12), noise.FixedEpochOrder(2, 3)
    found = noise.sensitivity(strategy, participation)
    truth = lower_bound(strategy.matrix(), participation)
    assert truth <= found <= 1.5 * truth
