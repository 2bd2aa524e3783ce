"""Runs with correlated noise: what they cost, against whole releases worked out by brute force."""

import itertools
import math

import numpy as np
import pytest

from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp._entries import event_counts
from jaxdp.report.words import describe
from tests.accounting.judging import ADD, refusals, run
from tests.accounting.judging import REPLACE as ONE
from tests.accounting.judging import SPECIAL as ZERO

GAUSS = acc.Gaussian(2.0)
ORDERED = acc.CorrelatedNoise(GAUSS, 10)
CYCLIC = acc.CyclicPoisson(GAUSS, 0.1, 4, 10)
BANDED = np.asarray([[0.8, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0.6, 0.8, 0], [0, 0, 0.6, 0.8]])
SIGMA = 0.9


def test_eight_bands_and_one():
    """500 of 50,000 records expected in each of 2,000 steps, epsilon 2 at delta 1e-5."""

    def noise(bands):
        q = bands * 500 / 50_000
        return acc.calibrate(
            lambda z: acc.CyclicPoisson(acc.Gaussian(z), q, bands, 2_000), 2.0, 1e-5, tolerance=1e-6
        )

    assert noise(8) == pytest.approx(2.70808, rel=1e-4)
    assert noise(1) == acc.calibrate_noise_multiplier(2.0, 1e-5, 0.01, 2_000)


def test_cyclic_poisson_is_one_poisson_step_a_round():
    for bands, steps, rounds in ((1, 10, 10), (4, 10, 3), (5, 10, 2), (99, 7, 1)):
        event, plain = acc.CyclicPoisson(GAUSS, 0.1, bands, steps), run(0.1, 2.0, rounds)
        for relation, accountant in ((ADD, "auto"), (ZERO, "exact"), (ADD, "rdp")):
            found = acc.epsilon(event, 1e-5, relation, accountant)
            assert found == acc.epsilon(plain, 1e-5, relation, accountant), (bands, accountant)
        for relation in (ADD, ZERO):
            assert acc.delta(event, 0.5, relation) == acc.delta(plain, 0.5, relation), bands


def test_a_public_order_is_one_gaussian():
    for relation in (ONE, ZERO):
        for accountant in ("auto", "exact", "gdp", "rdp"):
            found = acc.epsilon(ORDERED, 1e-5, relation, accountant)
            assert found == acc.epsilon(GAUSS, 1e-5, relation, accountant), accountant
    half = acc.epsilon(acc.CorrelatedNoise(acc.Gaussian(1.0), 10), 1e-5, ZERO).upper
    assert acc.epsilon(ORDERED, 1e-5, ONE).upper == pytest.approx(half, rel=1e-9)


def test_refusals():
    inside = acc.Composed([GAUSS, acc.Repeated(acc.PerUser(CYCLIC, 2), 3)])
    whole = "PoissonSampled of a CyclicPoisson event: it is a whole run"
    rows = (
        (ORDERED, ADD, "one removed record shifts every position.*replace_special"),
        (CYCLIC, ONE, "two records may be in different groups.*add_or_remove_one"),
        (acc.PoissonSampled(CYCLIC, 0.5), ADD, "PoissonSampled of a CyclicPoisson event"),
        (acc.PoissonSampled(ORDERED, 1.0), ZERO, "PoissonSampled of a CorrelatedNoise event"),
        (acc.FixedSizeSampled(CYCLIC, 9, 3), ZERO, "FixedSizeSampled of a CyclicPoisson event"),
        (acc.PoissonSampled(inside, 0.5), ADD, whole),
    )
    refusals(
        acc.UnsupportedEventError,
        [(words, lambda e=e, r=r: acc.epsilon(e, 1e-5, r)) for e, r, words in rows],
    )
    assert not any(acc.supports(event, relation) for event, relation, _ in rows)


def test_fields_out_of_range():
    refusals(
        ValueError,
        [
            ("expected a Gaussian", lambda: acc.CorrelatedNoise(acc.Laplace(1.0), 3)),
            ("steps=0: expected an integer >= 1", lambda: acc.CorrelatedNoise(GAUSS, 0)),
            ("expected a Gaussian", lambda: acc.CyclicPoisson(CYCLIC, 0.1, 4, 10)),
            ("sampling_prob=1.5", lambda: acc.CyclicPoisson(GAUSS, 1.5, 4, 10)),
            ("bands=0", lambda: acc.CyclicPoisson(GAUSS, 0.1, 0, 10)),
            ("steps=2.5", lambda: acc.CyclicPoisson(GAUSS, 0.1, 4, 2.5)),
        ],
    )


def test_json_and_words():
    both = acc.Composed([acc.Repeated(acc.PerUser(CYCLIC, 3), 2), ORDERED])
    for event in (ORDERED, CYCLIC, both):
        assert acc.events.from_dict(acc.events.to_dict(event)) == event
        assert "10 steps" in describe(event)


def test_composed_repeated_and_of_users():
    steps = run(0.1, 2.0, 3)
    together = acc.Composed([acc.Repeated(CYCLIC, 2), acc.PerUser(ORDERED, 2), acc.Laplace(3.0)])
    plain = acc.Composed([acc.Repeated(steps, 2), GAUSS, acc.Laplace(3.0)])
    assert acc.epsilon(together, 1e-5, ZERO) == acc.epsilon(plain, 1e-5, ZERO)
    assert acc.epsilon(acc.PerUser(CYCLIC, 3), 1e-5) == acc.epsilon(CYCLIC, 1e-5)
    tuned, alike = (acc.Tuned(one, acc.Geometric(0.2)) for one in (CYCLIC, steps))
    assert acc.epsilon(tuned, 1e-5) == acc.epsilon(alike, 1e-5)


def test_several_records():
    third = acc.epsilon(acc.Gaussian(2.0 / 3), 1e-5, ZERO)
    assert acc.group_epsilon(ORDERED, 1e-5, 3, ZERO) == third
    one, three = acc.epsilon(CYCLIC, 1e-5), acc.group_epsilon(CYCLIC, 1e-5, 3)
    assert three.lower == one.lower  # the chain: the records may be in different groups
    assert three.upper > 3 * one.upper


def test_no_noise_and_no_draw():
    for event in (acc.CorrelatedNoise(acc.Gaussian(0.0), 3), acc.CyclicPoisson(GAUSS, 1.0, 2, 3)):
        assert acc.epsilon(event, 1e-5, ZERO).upper > 1
    nothing = acc.CyclicPoisson(acc.Gaussian(0.0), 0.5, 2, 3)
    assert acc.epsilon(nothing, 1e-5).upper == math.inf
    assert acc.epsilon(acc.CyclicPoisson(GAUSS, 0.0, 2, 3), 1e-5).upper == 0


def test_a_filter_admits_runs_as_long_as_they_fit():
    budget = acc.RenyiFilter(1.0, 1e-5)
    budget.charge(CYCLIC)
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(acc.Repeated(CYCLIC, 1_000))
    with pytest.raises(acc.UnsupportedEventError):
        budget.charge(ORDERED)


@pytest.mark.parametrize("event", [ORDERED, CYCLIC])
def test_a_run_is_charged_whole_at_its_first_step(event):
    assert event.block == acc.PerUser(event, 2).block == 10
    ledger = Ledger()
    for first in (0, 1, 7):
        ledger.charge(event, stream="s", first_step=first)
        assert event_counts(ledger.entries) == {event: 1}
    ledger.charge(event, 3, stream="s", first_step=8)
    assert event_counts(ledger.entries) == {event: 2}
    ledger.charge(event, stream="again")
    assert event_counts(Ledger.from_json(ledger.to_json()).entries) == {event: 3}
    assert ledger.epsilon(1e-5, ZERO) == acc.epsilon(acc.Repeated(event, 3), 1e-5, ZERO)
    with pytest.raises(ValueError, match="event must be one for all steps of an epoch"):
        ledger.charge(acc.PoissonSampled(GAUSS, 0.1), stream="s", first_step=4)


def exact_deltas(strategy, group, q, epsilons):
    """Deltas of all rows, both directions, for a record that always contributes 1.

    The means of the 2^k laws that its draws mix span k = 2 directions; what is orthogonal to them
    is the same noise in both worlds.
    """
    means = np.linalg.qr(strategy[:, group::2])[1].T / SIGMA
    x = np.linspace(-9, 11, 1001)
    w = np.stack(np.meshgrid(x, x, indexing="ij"))

    def law(mean):
        square = (w[0] - mean[0]) ** 2 + (w[1] - mean[1]) ** 2
        return np.exp(-square / 2) * (x[1] - x[0]) ** 2 / (2 * math.pi)

    p = sum(
        np.prod([q if drawn else 1 - q for drawn in draws]) * law(np.asarray(draws) @ means)
        for draws in itertools.product((0, 1), repeat=2)
    )
    none = law((0.0, 0.0))
    return [
        max(np.maximum(p - e * none, 0).sum(), np.maximum(none - e * p, 0).sum())
        for e in np.exp(epsilons)
    ]


def test_the_whole_release_of_four_steps_and_two_bands():
    epsilons = (0.0, 0.4, 1.0, 2.0)
    both = (exact_deltas(BANDED, group, 0.5, epsilons) for group in (0, 1))
    for epsilon, attained, less in zip(epsilons, *both, strict=True):
        bound = acc.delta(acc.CyclicPoisson(acc.Gaussian(SIGMA), 0.5, 2, 4), epsilon)
        assert attained == pytest.approx(bound.estimate, rel=2e-4)
        assert bound.lower * (1 - 2e-4) <= attained <= bound.upper * (1 + 2e-4), epsilon
        assert less < bound.lower, epsilon  # its last column is shorter


def sampled_deltas(mean, rows, draws, epsilons, size=400_000):
    """(delta, standard error) of a release of dependent rows, from the world without the record.

    ``mean(i, w, drawn)`` is the mean of row i, [size], after rows w, [i, size], where ``drawn`` are
    the steps in which the record was drawn; ``draws`` gives the probability of each of them.
    """
    rng, w = np.random.default_rng(1), np.zeros((0, size))
    for i in range(rows):
        w = np.vstack([w, mean(i, w, ()) + SIGMA * rng.standard_normal(size)])

    def law(drawn):
        squares = sum((w[i] - mean(i, w[:i], drawn)) ** 2 for i in range(rows))
        return np.exp(-squares / (2 * SIGMA**2))

    ratio = sum(chance * law(drawn) for drawn, chance in draws.items()) / law(())
    for e in np.exp(epsilons):
        both = [np.maximum(ratio - e, 0), np.maximum(1 - e * ratio, 0)]
        yield max((float(v.mean()), float(v.std()) / math.sqrt(size)) for v in both)


def others(j, w):
    """The others' sum in step j, which depends on the rows before."""
    return 5 * np.sin(w[:j].sum(axis=0)) if j else 0.0


def own(j, w):
    """The record's contribution, of norm 1, which it chooses after the rows before."""
    return np.where(w[j - 1] + w[0] > 0.5, 1.0, -1.0) if j else 1.0


@pytest.mark.parametrize("group", [0, 1])
def test_contributions_that_depend_on_the_release_cost_no_more(group):
    def mean(i, w, drawn):
        return sum(
            BANDED[i, j] * (others(j, w) + (own(j, w) if j in drawn else 0)) for j in range(i + 1)
        )

    steps = (group, group + 2)
    draws = {
        tuple(j for j, on in zip(steps, choice, strict=True) if on): 0.25
        for choice in itertools.product((0, 1), repeat=2)
    }
    epsilons = (0.0, 0.5, 1.5)
    deltas = sampled_deltas(mean, 4, draws, epsilons)
    for epsilon, (found, error) in zip(epsilons, deltas, strict=True):
        bound = acc.delta(acc.CyclicPoisson(acc.Gaussian(SIGMA), 0.5, 2, 4), epsilon)
        assert found <= bound.upper + 4 * error, epsilon
        if group == 0:  # every block is moved as far as a block can be
            assert found == pytest.approx(bound.upper, abs=5 * error), epsilon


STRATEGY = np.asarray([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0.4, 0.5, 1, 0], [0.3, 0.4, 0.5, 1]])


def test_a_public_order_and_its_tail_made_again():
    """The record is in steps 0 and 2; rows 2 and 3 are released again, after new contributions."""
    sensitivity = np.linalg.norm(STRATEGY[:, 0] + STRATEGY[:, 2])

    def mean(i, w, drawn):
        again = i > 3
        row, seen = (i - 2, np.vstack([w[:2], w[4:]])) if again else (i, w)

        def moved(j):
            if j not in drawn:
                return 0.0
            # The second run has seen the whole first one.
            return np.sign(w[3] - w[1]) if again and j == 2 else own(j, w)

        return sum(STRATEGY[row, j] * (others(j, seen) + moved(j)) for j in range(row + 1))

    for rows, times in ((4, 1), (6, 2)):
        deltas = sampled_deltas(mean, rows, {(0, 2): 1.0}, (0.0, 1.0, 2.5))
        event = acc.CorrelatedNoise(acc.Gaussian(SIGMA / sensitivity), 4)
        for epsilon, (found, error) in zip((0.0, 1.0, 2.5), deltas, strict=True):
            bound = acc.delta(acc.Repeated(event, times), epsilon, ZERO)
            assert found <= bound.upper + 4 * error, (rows, epsilon)
