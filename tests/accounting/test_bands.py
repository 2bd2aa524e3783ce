"""Steps with heavy-tailed losses: tiny q, tiny delta. The judge is a plain double integral."""

import dataclasses
import math

import mpmath as mp
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import bands, cuts, exact
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.loss import Pair, mass_window
from jaxdp.accounting.saddle import Composition, Unresolved

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def two_step_delta(q, z, epsilon):
    """delta of two add/remove steps: over the first output, the second step's closed form."""
    with mp.workdps(28):
        q, z, epsilon = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon)

        def tail(t):
            return mp.erfc(t / mp.sqrt(2)) / 2

        def loss(x):
            return mp.log1p(q * mp.expm1((x - mp.mpf(1) / 2) / z**2))

        def output(value):
            return z**2 * mp.log1p(mp.expm1(value) / q) + mp.mpf(1) / 2

        def one(value):
            if value <= mp.log1p(-q):
                return -mp.expm1(value)
            x = output(value)
            first = q * tail((x - 1) / z) + (1 - q) * tail(x / z)
            return first - mp.exp(value) * tail(x / z)

        def integrand(x):
            first = q * mp.npdf(x, 1, z) + (1 - q) * mp.npdf(x, 0, z)
            return first * one(epsilon - loss(x))

        alone = output(epsilon)  # from here on the first step is enough
        certain = output(epsilon - mp.log1p(-q))
        cuts = [-14 * z + k * (alone + 14 * z) / 30 for k in range(30)]
        cuts += [alone, certain, *(certain + k * z for k in (0.5, 1, 2, 4, 8, 16))]
        return mp.quad(integrand, cuts)


@pytest.mark.parametrize(
    ("q", "z", "delta"),
    [(1e-3, 0.5, 1e-10), (1e-5, 0.5, 1e-18), (1e-7, 1.0, 1e-12), (0.1, 0.35, 1e-15)],
)
def test_two_steps_against_the_double_integral(q, z, delta):
    bound = acc.epsilon(run(q, z, 2), delta)
    assert bound.upper - bound.lower <= 1e-6 * bound.upper
    assert float(two_step_delta(q, z, bound.upper)) <= delta
    assert float(two_step_delta(q, z, bound.lower)) >= delta


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"), [(0.01, 0.9, 1800, 1e-5), (0.2, 1.0, 50, 1e-12)]
)
def test_bands_and_one_line_agree_where_both_work(q, z, steps, delta, relation):
    run_ = flatten(run(q, z, steps), relation)
    composition = exact.compositions(run_, relation, delta)[0]
    lower, _, upper = bands.banded_epsilon(composition, delta)
    line = exact.exact_epsilon(run_, relation, delta)
    assert lower <= line.upper
    assert line.lower <= upper
    assert upper - lower <= 1e-7 * upper


@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(1e-3, 1.0, 1000, 1e-18), (1e-5, 0.5, 100_000, 1e-18), (1e-7, 1.0, 10**7, 1e-18)],
)
def test_one_expected_sampling_and_a_tiny_delta(q, z, steps, delta):
    """Tq = 1: a tilt that reaches epsilon is dominated by jumps too rare to matter."""
    event = run(q, z, steps)
    bound = acc.epsilon(event, delta)
    assert bound.upper - bound.lower <= 1e-6 * bound.upper
    assert acc.epsilon(event, delta, accountant="rdp").upper >= bound.lower
    again = acc.delta(event, bound.estimate)
    assert again.estimate == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(0.03, 0.5, 10, 0.05), (0.03, 0.5, 10, 0.1), (0.3, 1.0, 3, 0.05), (0.05, 1.0, 10, 0.02)],
)
def test_bands_hold_the_line_where_the_lowest_cut_matters(q, z, steps, delta, relation):
    """What a cut leaves out belongs in the moments of the rest: once 1e-6 to 1e-4 too much."""
    composition = exact.compositions(flatten(run(q, z, steps), relation), relation, delta)[0]
    lower, _, upper = bands.banded_epsilon(composition, delta)
    line = exact.exact_epsilon(flatten(run(q, z, steps), relation), relation, delta)
    assert lower <= line.upper
    assert line.lower <= upper
    assert upper - lower <= 1e-6 * upper


@pytest.mark.parametrize(("relation", "reverse"), [(ADD, False), (ADD, True), (REPLACE, False)])
@pytest.mark.parametrize("order", [0.02, 0.4, 2.0])
def test_the_cut_moment_is_the_definition(relation, reverse, order):
    q, z, level = 0.2, 0.7, -0.9
    pair = Pair(Step(z, q), relation, reverse)
    composition = Composition(((pair, 4),), 0.0, math.log(1e-20))
    found = cuts.Band(composition, level, None).parts(order, 0.0)[0]
    value, error = cuts.log_total(found, order)
    cut, width = pair_cut(composition, pair, level), 0.5 * z

    def density(x, mean):
        return (1 - q) * mp.npdf(x, 0, z) + q * mp.npdf(x, mean, z)

    def integrand(x):
        first = density(x, 1)
        second = density(x, -1) if relation is REPLACE else mp.npdf(x, 0, z)
        if reverse:
            first, second = second, first
        kept = mp.ncdf((cut - x) / width * mp.sqrt(2))
        return first * kept * (first / second) ** order

    with mp.workdps(25):
        truth = mp.log(mp.quad(integrand, [-20, -3, -1, 0, 1, 2, 4, 20]))
    assert abs(float(truth) - value) <= error + 1e-15
    assert error <= 1e-12


def pair_cut(composition, pair, log_tail):
    return mass_window(pair, log_tail - math.log(sum(n for _, n in composition.pairs)))[1]


def test_dropped_terms_are_bounded_at_the_epsilon_that_is_asked():
    """A bound taken where the terms were tabulated is too small at a lower epsilon."""
    delta = 1e-9
    event = flatten(run(1e-3, 0.5, 100), ADD)
    composition = exact.compositions(event, ADD, delta)[0]
    terms = bands.split(composition)
    epsilon = bands.rough_epsilon(terms, math.log(delta))
    total = bands.tabulate_all(composition, terms, epsilon, math.log(delta))
    assert total.dropped
    everything = dataclasses.replace(total, terms=(), lost=0.0)
    for at in (epsilon, 0.9 * epsilon, 0.5 * epsilon):
        bound = sum(math.exp(t.exponents(at).min()) for t in total.dropped)
        assert everything.delta_and_error(at)[1] >= bound * (1 - 1e-12)


def test_hopeless_bands_are_refused_before_they_are_refined(monkeypatch):
    """Each table of the terms costs seconds; the second is never built when the first says no."""
    built = []
    tabulate_all = bands.tabulate_all

    def counted(*args):
        built.append(args)
        return tabulate_all(*args)

    monkeypatch.setattr(bands, "tabulate_all", counted)
    composition = exact.compositions(flatten(run(1e-7, 0.8, 300), REPLACE), REPLACE, 1e-9)[0]
    with pytest.raises(Unresolved):
        bands.banded_epsilon(composition, 1e-9)
    assert len(built) == 1


def test_rare_steps_start_near_the_answer():
    composition = exact.compositions(flatten(run(1e-7, 0.8, 100_000), ADD), ADD, 1e-15)[0]
    lower, _, upper = bands.banded_epsilon(composition, 1e-15)
    rough = bands.rough_epsilon(bands.split(composition), math.log(1e-15))
    start = bands.lone_epsilon(composition, 1e-15)
    assert abs(math.log(start / upper)) < 0.5 * math.log(rough / upper)
    assert upper - lower <= 1e-7 * upper


def test_a_term_that_fails_spares_the_ones_behind_it(monkeypatch):
    built = []
    extend = bands._extend

    def counted(*args):
        built.append(args)
        return extend(*args)

    monkeypatch.setattr(bands, "_extend", counted)
    composition = exact.compositions(flatten(run(1e-7, 0.8, 300), REPLACE), REPLACE, 1e-9)[0]
    with pytest.raises(Unresolved):
        bands.banded_epsilon(composition, 1e-9)
    assert len(built) < len(bands.split(composition)) / 2


def test_what_decays_to_nothing_is_no_division_by_zero():
    """Two steps with much noise: a cut's characteristic function was exactly 0 somewhere."""
    bound = acc.delta(run(0.25, 63.8, 2), 0.20991037201085547)
    assert 0 <= bound.lower <= bound.upper <= 1e-100


@pytest.mark.parametrize("kept", [1.0, 1e-3, 1e-12, 0.0])
def test_the_rise_over_what_was_kept(kept):
    moved, jump = np.asarray([kept - 1 + 0j]), np.asarray([0.2 + 0.1j])
    log_kept = bands._log1p(moved)
    found = log_kept + bands._log_rise(moved, jump, log_kept)
    assert np.exp(found)[0] == pytest.approx(kept + 0.2 + 0.1j, rel=1e-12)


def test_a_bracket_does_not_grow_out_of_the_tables():
    """Half an epsilon below its own the sum of the terms means nothing, and was once negative."""
    event = flatten(run(1e-5, 0.8, 10**7), REPLACE)
    lower, _, upper = bands.banded_epsilon(exact.compositions(event, REPLACE, 1e-18)[0], 1e-18)
    assert upper - lower <= 1e-7 * upper
    assert upper == pytest.approx(1.0716873678, rel=1e-8)
