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
from tests.refusing import all_refused

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
    assert found.value >= truth * (1 - 1e-14)
    if found.exact:
        assert found.value <= truth * (1 + ROOM)
    return found


@given(any_strategy(most=7), participations)
def test_never_below_brute_force_and_equal_where_exact(strategy, participation):
    found = check(strategy, participation)
    assert found.value >= lower_bound(strategy.matrix(), participation)


@given(
    st.lists(st.floats(0, 1, width=32), max_size=6),
    participations,
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_falling_coefficients_are_exact_and_in_a_fixed_order_all_of_one_sign(
    rest, participation, separation, count
):
    falling = noise.Toeplitz((1.0, *sorted(rest, reverse=True)), 7)
    assert check(falling, participation).exact
    assert check(noise.Toeplitz((1.0, *rest), 7), noise.FixedOrder(separation, count)).exact


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


def test_what_is_not_proven_is_a_bound_and_more_bands_than_groups_are_refused():
    for strategy, participation in (
        # 1, 0, 1, 0, ...: steps 0 and 4 are worse than 0 and 3.
        (noise.BandedInverse((1, 0, -1), 7), noise.MinSeparation(2, 3)),
        # c_1 > c_0.
        (noise.Buffered((0.9, 0.9), (0.5, 0.2), 7), noise.MinSeparation(3, 2)),
        # The products of the columns are above 0, above 0, and below: no signs suit all three.
        (noise.Dense.of(np.array([[1, 0, 0], [1, 1, 0], [-3, 1, 1]])), noise.FixedOrder(1, 3)),
    ):
        assert not check(strategy, participation).exact, strategy
    four, inverse = noise.square_root(64, 4), noise.banded_inverse_square_root(64, 2)
    assert noise.sensitivity(four, noise.Cyclic(4)).exact
    groups = r"at most bands=3 under Cyclic\(bands=3\), got 4 of Toepl"
    all_refused(
        [
            (groups, lambda: noise.sensitivity(four, noise.Cyclic(3))),
            ("at most bands=3", lambda: noise.sensitivity(inverse, noise.Cyclic(3))),
            ("participations must be a whole number of at lea", lambda: noise.MinSeparation(0, 1)),
            ("separation must be a whole number of at least 1", lambda: noise.MinSeparation(1, 0)),
            ("separation must be a whole number", lambda: noise.FixedOrder(1.5, 1)),
            ("bands must be a whole number of at least 1, got 0", lambda: noise.Cyclic(0)),
        ]
    )


@given(any_strategy(most=6), st.integers(0, 2**32 - 1))
def test_gradients_in_more_dimensions_are_bounded_too(strategy, seed):
    gradients = np.random.default_rng(seed).normal(size=(20, strategy.steps, 3))
    gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
    moved = np.linalg.norm(strategy.matrix() @ gradients, axis=(1, 2)).max()
    assert noise.sensitivity(strategy, noise.FixedOrder(1, strategy.steps)).value >= moved


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
            (noise.MinSeparation(k, b), noise.FixedOrder(b, k))[rng.integers(2)],
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
        both = noise.MinSeparation(count, separation), noise.FixedOrder(separation, count)
        for participation in both:
            found = noise.sensitivity(strategy, participation)
            assert found.exact
            assert square <= Fraction(found.value) ** 2 <= square * Fraction(1 + 1e-9)


def test_published_value_more_participations_than_fit_and_long_runs():
    root, once = noise.square_root(64), noise.sensitivity(noise.square_root(64), noise.Single())
    found = noise.sensitivity(root, noise.MinSeparation(4, 16))
    assert found.value == pytest.approx(3.960620, abs=1e-6)
    assert noise.sensitivity(root, noise.MinSeparation(100, 16)) == found
    assert noise.sensitivity(root, noise.MinSeparation(3, 16)).value < found.value
    assert noise.sensitivity(root, noise.MinSeparation(9, 64)) == once
    n, many = 100_000, noise.MinSeparation(100, 1_000)
    for strategy in (
        noise.square_root(n, 32),
        noise.banded_inverse_square_root(n, 32),
        noise.Buffered((0.01, 0.2), (0.9999, 0.98), n),
    ):
        assert noise.sensitivity(strategy, many).exact, strategy
        assert noise.sensitivity(strategy, noise.Single()).exact, strategy
    # Where signs cancel, a bound that is tighter than absolute columns.
    found = noise.sensitivity(noise.Toeplitz((1, *([0.01, -0.01] * 1_000)), n), many)
    assert not found.exact
    assert math.sqrt(100) * 1.0 < found.value < 2 * math.sqrt(100 * 1.2)
    strategy, participation = noise.Toeplitz((1, -0.5, 0.3, -0.5), 12), noise.MinSeparation(3, 2)
    found = noise.sensitivity(strategy, participation)
    truth = lower_bound(strategy.matrix(), participation)
    assert not found.exact
    assert truth <= found.value <= 1.5 * truth
