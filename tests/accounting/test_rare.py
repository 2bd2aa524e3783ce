"""Rare large losses counted one by one: against the contour integral, which works another way."""

import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import exact, rare, rare_tables, sums
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.loss import Pair
from jaxdp.accounting.saddle import Composition, Unresolved

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (run(1e-3, 0.5, 20), 1e-9),
        (run(1e-5, 0.5, 1000), 1e-9),
        (run(1e-4, 1.0, 100), 1e-13),
        (acc.Composed([run(1e-4, 0.5, 10), run(1e-5, 0.7, 300)]), 1e-8),
    ],
)
def test_the_contour_integral_lies_inside(event, delta, relation):
    run_ = flatten(event, relation)
    line = exact.exact_epsilon(run_, relation, delta)
    assert line.upper - line.lower <= 1e-5 * line.upper
    bound = rare.rare_epsilon(run_, relation, delta, tolerance=5e-3)
    assert bound.lower <= line.upper
    assert line.lower <= bound.upper
    assert bound.upper - bound.lower <= 5e-3 * bound.upper
    again = rare.rare_delta(run_, relation, line.estimate, tolerance=1e-2)
    assert again.lower <= delta * (1 + 1e-4)
    assert again.upper >= delta * (1 - 1e-4)


@pytest.mark.parametrize("q", [1e-6, 1e-3])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_contracted_losses_lie_below_the_step(q, relation):
    """Its privacy profile, epsilon by epsilon: what makes the lower end a lower end."""
    pair = Pair(Step(0.5, q), relation)
    composition = Composition(((pair, 1),), 0.0, math.log(1e-20))
    width = 3 * q
    atoms = sums.contracted(composition, pair, width, 4000 * width)
    loss = atoms.offset + width * atoms.index
    for epsilon in np.linspace(0.0, 500 * width, 41):
        below = atoms.mass @ np.maximum(-np.expm1(epsilon - loss), 0.0)
        top = float(rare_tables.large(pair, epsilon, epsilon)[2])
        kept = top - float(rare_tables.large(pair, atoms.top, epsilon)[2])
        assert below <= kept + 1e-12 * q
        if epsilon > 20 * width:
            assert below >= kept * (1 - 1e-2)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_a_kind_of_step_that_hardly_loses_anything_beside_one_that_does(relation):
    """All of the former lies inside one cell of the grid: that cell counts whole."""
    event = acc.Composed([run(1e-3, 0.5, 20), run(8e-9, 4.3, 100)])
    alone = exact.exact_epsilon(flatten(run(1e-3, 0.5, 20), relation), relation, 1e-6)
    bound = rare.rare_epsilon(flatten(event, relation), relation, 1e-6, tolerance=5e-3)
    assert alone.lower <= bound.upper
    assert bound.lower <= alone.upper * (1 + 1e-4)
    assert bound.upper - bound.lower <= 5e-3 * bound.upper
    pair = Pair(Step(4.3, 8e-9), relation)
    atoms = sums.contracted(Composition(((pair, 1),), 0.0, -40.0), pair, 1e-6, 1.0)
    assert atoms.mass.sum() == pytest.approx(1.0)


def test_two_large_losses_count_where_they_need_not_exceed_epsilon():
    """The remainder against an integral over the other step, with the cap below half of epsilon."""
    step, epsilon, cap = Step(0.5, 0.02), 1.0, 0.3
    pair = Pair(step, ADD)
    composition = Composition(((pair, 2),), 0.0, -60.0)
    high = rare_tables._side(composition, cap, epsilon, 1 << 14, True)
    z, q, top = 0.5, 0.02, high.atoms[0][1].top
    x = np.linspace(float(rare_tables.inverse_loss(pair, np.asarray([top]))[0]), 8.0, 2001)
    density = ((1 - q) * np.exp(-0.5 * (x / z) ** 2) + q * np.exp(-0.5 * ((x - 1) / z) ** 2)) / (
        z * math.sqrt(2 * math.pi)
    )
    loss = np.log1p(q * np.expm1((x - 0.5) / z**2))
    lack = np.maximum(np.expm1(epsilon - loss[:, None] - loss), 0.0)
    missing = float(density @ lack @ density) * (x[1] - x[0]) ** 2
    probability = rare_tables._several(high.atoms, epsilon)[2]
    found = rare_tables.Rare(high, 16 * cap / (1 << 14), cap)._shortfall(epsilon) * probability
    assert 0 < missing <= found


def mass(edges, mean, z):
    t = (edges - mean) / z
    left, right = t[:-1], t[1:]
    return np.where(
        left > 0,
        special.ndtr(-left) - special.ndtr(-right),
        special.ndtr(right) - special.ndtr(left),
    )


def replace_one_delta(q, z, steps, epsilon):
    """delta by one plain grid of losses up to 500 epsilons; of larger ones, P - e^epsilon Q."""
    width, size = epsilon / 1000, 1 << 20
    reach = size // 4 * width
    edges = np.linspace(-1 - 9 * z, 1 + 9 * z, 1_000_001)
    middle = 0.5 * (edges[1:] + edges[:-1])
    unsampled = (1 - q) * mass(edges, 0, z)
    first, second = unsampled + q * mass(edges, 1, z), unsampled + q * mass(edges, -1, z)
    one, other = (np.log1p(q * np.expm1((x - 0.5) / z**2)) for x in (middle, -middle))
    loss = np.maximum(one - other, -reach)
    beyond = loss > reach
    p_large, q_large = first[beyond].sum(), second[beyond].sum()
    cell = np.floor(loss[~beyond] / width)
    up, cell = loss[~beyond] / width - cell, cell.astype(np.int64)
    law = np.bincount(cell % size, first[~beyond] * (1 - up), minlength=size)
    law += np.bincount((cell + 1) % size, first[~beyond] * up, minlength=size)
    total = np.fft.irfft(np.fft.rfft(law) ** steps, size)[: size // 2]
    gain = -np.expm1(np.minimum(epsilon - width * np.arange(size // 2), 0.0))
    large = -math.expm1(steps * math.log1p(-p_large))
    return total @ gain + large + math.exp(epsilon) * math.expm1(steps * math.log1p(-q_large))


def test_a_heavy_tail_near_epsilon_is_narrow_and_true():
    """Many losses are neither large nor small: once refused, as two large ones seemed too many."""
    bound = rare.rare_epsilon(flatten(run(1e-7, 0.3, 300), REPLACE), REPLACE, 1e-5)
    assert bound.upper - bound.lower <= 1e-3 * bound.upper
    below, above, shaved = (
        replace_one_delta(1e-7, 0.3, 300, e)
        for e in (bound.lower, bound.upper, 0.999 * bound.upper)
    )
    assert above <= 1e-5 < shaved
    assert below >= 1e-5


@pytest.mark.parametrize(
    ("steps", "relation"), [(5_000, ADD), (5_000, REPLACE), (100_000, REPLACE)]
)
def test_an_answer_far_above_the_largest_single_loss_is_found(steps, relation):
    event = flatten(run(1e-7, 0.45, steps), relation)
    bound = rare.rare_epsilon(event, relation, 1e-5)
    assert bound.upper - bound.lower <= 1e-3 * bound.upper


def test_mixed_rare_runs_are_counted_before_bands_are_built(monkeypatch):
    """Bands of three kinds of steps take up to a minute, and then refuse."""

    def slow(*args):
        raise AssertionError(args)

    monkeypatch.setattr(exact, "banded_epsilon", slow)
    monkeypatch.setattr(exact, "banded_delta", slow)
    kinds = [run(3.4e-7, 0.54, 21), run(1.4e-5, 1.4, 1), run(1.6e-7, 4.3, 178_709)]
    bound = acc.epsilon(acc.Composed(kinds), 1.73e-10)
    assert bound.accountant == "rare"
    assert bound.upper - bound.lower <= 1e-3 * bound.upper
    again = acc.delta(acc.Composed(kinds), bound.estimate)
    assert again.accountant == "rare"
    assert again.lower <= 1.73e-10 * 1.01
    assert again.upper >= 1.73e-10 * 0.99


def test_the_best_cap_is_kept_for_either_end():
    asked = []

    def ask(high, cap, upper):
        asked.append((high, cap, upper))
        return {1.5: 4.0, 3.0: 2.0, 6.0: 3.0}[cap] if high else 1.0 / cap

    ends = rare._narrower(rare._Ends(0.0, math.inf), ask, 1e-3)
    assert ends[:2] == (1 / 1.5, 2.0)
    assert ends.high_caps == (3.0, 6.0)
    assert ends.low_caps == (1.5, 3.0)
    assert asked[:3] == [(True, 1.5, math.inf), (True, 3.0, 4.0), (True, 6.0, 2.0)]
    # A finer grid that does no better leaves them, and one that refuses does too.
    assert rare._narrower(ends, lambda high, *_: 9.0 if high else 0.1, 1e-3)[:2] == ends[:2]

    def refuse(*_):
        raise Unresolved("no")

    assert rare._narrower(ends, refuse, 1e-3)[:2] == ends[:2]
    with pytest.raises(Unresolved, match="no"):
        rare._narrower(rare._Ends(0.0, math.inf), refuse, 1e-3)


def test_ends_that_contradict_each_other_are_refused():
    with pytest.raises(Unresolved, match="contradict"):
        rare._narrower(rare._Ends(0.0, math.inf), lambda high, *_: 1.0 if high else 2.0, 1e-3)


def test_an_upper_end_was_always_evaluated():
    asked = []

    def bound(epsilon):
        asked.append(epsilon)
        return 1e-9 * math.exp(-epsilon)

    for near, delta in ((1.0, 1e-10), (1.0, 1e-3), (5.0, 1e-9)):
        found = rare._root(bound, delta, near)
        assert found in asked
        assert bound(found) <= delta
    with pytest.raises(Unresolved, match="not a number"):
        rare._root(lambda _: math.nan, 1e-9, 1.0)
    with pytest.raises(Unresolved, match="no upper end"):
        rare._root(lambda _: math.inf, 1e-9, 1.0)
