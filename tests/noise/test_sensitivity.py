"""Sensitivities are never below the truth, found over all patterns and signs; exact where said."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import noise
from tests.noise.test_strategies import any_strategy

ROOM = 1e-6  # how far above the truth an exact value may be


def patterns(participation, n):
    """Every set of steps that a record may take part in, as large as can be or not."""
    if isinstance(participation, noise.FixedOrder):
        for j in range(n):
            yield tuple(range(j, n, participation.separation))[: participation.participations]
        return
    single = not isinstance(participation, noise.MinSeparation)
    most = 1 if single else participation.participations
    for size in range(1, most + 1):
        for steps in itertools.combinations(range(n), size):
            if all(b - a >= participation.separation for a, b in itertools.pairwise(steps)):
                yield steps


def lower_bound(matrix, participation):
    """The largest norm over all patterns, with equal or opposite gradients."""
    best = 0.0
    for steps in patterns(participation, len(matrix)):
        for signs in itertools.product((1, -1), repeat=len(steps) - 1):
            best = max(best, np.linalg.norm(matrix[:, steps] @ np.array((1, *signs))))
    return best


participations = st.one_of(
    st.just(noise.Single()),
    st.builds(noise.MinSeparation, st.integers(1, 4), st.integers(1, 5)),
    st.builds(noise.FixedOrder, st.integers(1, 5), st.integers(1, 4)),
)


def check(strategy, participation):
    found = noise.sensitivity(strategy, participation)
    truth = lower_bound(strategy.matrix(), participation)
    assert found.value >= truth
    if found.exact:
        assert found.value <= truth * (1 + ROOM)
    return found


@given(any_strategy(most=7), participations)
def test_never_below_brute_force_and_equal_where_exact(strategy, participation):
    check(strategy, participation)


@given(st.lists(st.floats(0, 1, width=32), max_size=6), participations)
def test_falling_coefficients_are_exact(rest, participation):
    strategy = noise.Toeplitz((1.0, *sorted(rest, reverse=True)), 7)
    assert check(strategy, participation).exact


@given(st.lists(st.floats(0, 1, width=32), max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_non_negative_coefficients_are_exact_in_a_fixed_order(rest, separation, count):
    strategy = noise.Toeplitz((1.0, *rest), 7)
    assert check(strategy, noise.FixedOrder(separation, count)).exact


@given(any_strategy(most=8), st.integers(1, 4))
def test_no_more_bands_than_the_separation_is_exact_for_any_signs(strategy, count):
    matrix = np.triu(strategy.matrix(), -2)
    banded = noise.Dense.of(matrix)
    assert banded.bands <= 3
    assert check(banded, noise.MinSeparation(count, 3)).exact
    assert check(banded, noise.FixedOrder(3, count)).exact
    found = noise.sensitivity(banded, noise.Cyclic(3))
    assert found.exact
    assert found.value == pytest.approx(np.linalg.norm(matrix, axis=0).max(), rel=1e-6)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("participation", [noise.MinSeparation(3, 2), noise.FixedOrder(2, 3)])
def test_the_kinds_that_are_proven(width, participation):
    for strategy in (
        noise.square_root(8, width),
        noise.banded_inverse_square_root(8, width),
        noise.Buffered((0.1,) * width, tuple(np.linspace(0, 0.99, width)), 8),
    ):
        assert check(strategy, participation).exact


@given(any_strategy(most=6), st.integers(0, 2**32 - 1))
def test_gradients_in_more_dimensions_are_bounded_too(strategy, seed):
    rng = np.random.default_rng(seed)
    participation = noise.FixedOrder(1, strategy.steps)
    for _ in range(20):
        gradients = rng.normal(size=(strategy.steps, 3))
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
        moved = np.linalg.norm(strategy.matrix() @ gradients)
        assert noise.sensitivity(strategy, participation).value >= moved


def exact_column(strategy):
    """The first column in rational numbers."""
    n = strategy.steps
    if isinstance(strategy, noise.Buffered):
        pairs = [
            (Fraction(a), Fraction(d))
            for a, d in zip(strategy.scales, strategy.decays, strict=True)
        ]
        column = [Fraction(1)]
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
@pytest.mark.parametrize(("count", "separation"), [(1, 1), (2, 30), (9, 10), (90, 1)])
def test_rounding_never_makes_it_too_small(strategy, count, separation):
    column = exact_column(strategy)
    total = [
        sum(column[i - s] for s in range(0, min(i + 1, count * separation), separation))
        for i in range(90)
    ]
    square = sum(x * x for x in total)
    for participation in (
        noise.MinSeparation(count, separation),
        noise.FixedOrder(separation, count),
    ):
        found = noise.sensitivity(strategy, participation)
        assert found.exact
        assert Fraction(found.value) ** 2 >= square
        assert Fraction(found.value) ** 2 <= square * Fraction(1 + 1e-9)


def test_published_value_and_more_participations_than_fit():
    root = noise.square_root(64)
    found = noise.sensitivity(root, noise.MinSeparation(4, 16))
    assert found.value == pytest.approx(3.960620, abs=1e-6)
    assert noise.sensitivity(root, noise.MinSeparation(100, 16)) == found
    assert noise.sensitivity(root, noise.MinSeparation(3, 16)).value < found.value
    assert noise.sensitivity(root, noise.MinSeparation(9, 64)) == noise.sensitivity(
        root, noise.Single()
    )


def test_a_bound_is_tighter_than_absolute_columns_where_signs_cancel():
    strategy = noise.Toeplitz((1, -0.5, 0.3, -0.5), 12)
    found = noise.sensitivity(strategy, noise.MinSeparation(3, 2))
    assert not found.exact
    truth = lower_bound(strategy.matrix(), noise.MinSeparation(3, 2))
    assert truth <= found.value <= 1.5 * truth


def test_long_runs():
    n = 100_000
    many = noise.MinSeparation(100, 1_000)
    for strategy in (
        noise.square_root(n, 32),
        noise.banded_inverse_square_root(n, 32),
        noise.Buffered((0.01, 0.2), (0.9999, 0.98), n),
    ):
        assert noise.sensitivity(strategy, many).exact
        assert noise.sensitivity(strategy, noise.Single()).exact
    rough = noise.Toeplitz((1, *([0.01, -0.01] * 1_000)), n)
    found = noise.sensitivity(rough, many)
    assert not found.exact
    assert math.sqrt(100) * 1.0 < found.value < 2 * math.sqrt(100 * 1.2)


def test_cyclic_groups_need_no_more_bands_than_groups():
    assert noise.sensitivity(noise.square_root(64, 4), noise.Cyclic(4)).exact
    with pytest.raises(
        ValueError, match=r"at most bands=3 under Cyclic\(bands=3\), got 4 of Toepl"
    ):
        noise.sensitivity(noise.square_root(64, 4), noise.Cyclic(3))
    with pytest.raises(ValueError, match="at most bands=3"):
        noise.sensitivity(noise.banded_inverse_square_root(64, 2), noise.Cyclic(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: noise.MinSeparation(0, 1), "participations must be a whole number of at least 1"),
        (lambda: noise.MinSeparation(1, 0), "separation must be a whole number of at least 1"),
        (lambda: noise.FixedOrder(1.5, 1), "separation must be a whole number"),
        (lambda: noise.Cyclic(0), "bands must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_participations_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()
