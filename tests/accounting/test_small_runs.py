"""Short runs whose epsilon is known, and every end of an answer that must count its own error.

The values are those that `test_exact.py` finds from the definition, in many digits.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import accountants, bands, exact, gaussian, pld, rare, rdp, single
from jaxdp.accounting.bounds import Bound
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.loss import Pair
from jaxdp.accounting.saddle import Composition, Moments, Unresolved, chernoff

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE
KNOWN = [
    (0.2, 1.0, 50, 1e-5, ADD, 10.1279513119),
    (0.2, 1.0, 50, 1e-5, REPLACE, 15.4109265461),
    (0.5, 1.0, 3, 1e-3, ADD, 3.8657456811),
    (0.5, 1.0, 3, 1e-3, REPLACE, 5.6878215672),
]


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize(("q", "z", "steps", "delta", "relation", "epsilon"), KNOWN)
def test_a_known_epsilon(q, z, steps, delta, relation, epsilon):
    event = run(q, z, steps)
    found = acc.epsilon(event, delta, relation, "exact")
    assert found.estimate == pytest.approx(epsilon, rel=1e-10)
    assert epsilon * (1 - 1e-8) < found.lower <= found.upper < epsilon * (1 + 1e-8)
    grid = acc.epsilon(event, delta, relation, "pld")
    assert epsilon * (1 - 2e-5) < grid.lower < epsilon < grid.upper < epsilon * (1 + 2e-5)
    renyi = acc.epsilon(event, delta, relation, "rdp")
    assert renyi.lower == 0
    assert epsilon < renyi.upper < 1.2 * epsilon


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_full_batches_beside_sampled_steps(relation):
    """Three accountants that share no way of composing; the full batches dominate."""
    full = acc.Repeated(acc.Gaussian(3.0), 4)
    event = acc.Composed((full, run(0.01, 1.0, 2)))
    found, grid = (acc.epsilon(event, 1e-5, relation, name) for name in ("exact", "pld"))
    alone = acc.epsilon(full, 1e-5, relation, "gdp").upper
    assert grid.lower <= found.upper
    assert found.lower <= grid.upper
    assert alone < found.lower < 1.05 * alone


def composed(**changes):
    """Four losses of probability 1e-2, 1e-3, and so on."""
    loss = np.arange(4, dtype=float)
    given = {
        "loss": loss,
        "weight": 10.0 ** -(2 + loss),
        "c": 0.0,
        "log_scale": 0.0,
        "infinite": 0.0,
        "wrapped": 0.0,
        "log_error": -math.inf,
        **changes,
    }
    return pld.Composed(**given)


def test_the_ends_of_a_grid_count_its_error():
    target, law = 3e-4, composed(wrapped=1e-4)
    upper, lower = law.epsilon(target, 1), law.epsilon(target, -1)
    assert law.delta(upper) + 1e-4 <= target < law.delta(upper - 1e-6) + 1e-4
    assert law.delta(lower) - 1e-4 > target >= law.delta(lower + 1e-6) - 1e-4


def test_losses_beyond_the_grid_and_offsets_are_composed():
    atoms = pld.Atoms(np.array([0, 1]), np.array([0.5, 0.49]), 0.25, 0.01)
    law = pld.compose([(atoms, 3)], 0.5, 64, -8.0, 1.0)
    assert law.infinite == pytest.approx(0.03)
    mass = law.weight * np.exp(law.log_scale - law.c * (law.loss - law.loss[0]))
    # A binomial law on the losses 0.75, 1.25, 1.75 and 2.25.
    for k in range(4):
        at = np.argmin(np.abs(law.loss - (0.75 + 0.5 * k)))
        assert law.loss[at] == pytest.approx(0.75 + 0.5 * k)
        assert mass[at] == pytest.approx(math.comb(3, k) * 0.5 ** (3 - k) * 0.49**k)


def test_what_wraps_around_the_grid_is_in_its_error():
    # The second atom lies beyond the 64 losses of the window.
    atoms = pld.Atoms(np.array([0, 100]), np.array([0.999, 0.001]), 0.0, 0.0)
    law = pld.compose([(atoms, 1)], 0.1, 64, -1.0, 1.0)
    for epsilon in (0.5, 2.0, 4.0):
        truth = 0.001 * -math.expm1(epsilon - 10.0)
        assert abs(law.delta(epsilon) - truth) <= law.error(epsilon)


def test_the_error_of_an_integral_holds_all_of_its_parts():
    def contour(value):
        return SimpleNamespace(delta=lambda _: value, rounding_error=lambda _: 1e-9)

    value, error = exact._Evaluated(contour(1e-5), contour(1.1e-5), 2e-7).delta(1.0)
    assert value == 1e-5
    assert error >= 10 * 1e-6 + 2e-7 + 1e-9
    whole = bands.Sum(((contour(1e-5), contour(1.1e-5)),), (), 2e-7)
    value, error = whole.delta_and_error(1.0)
    assert value == 1e-5
    assert error >= 10 * 1e-6 + 2e-7 + 1e-9
    exactly = bands.Sum(((contour(1e-5), contour(1e-5)),), (), 0.0)
    assert exactly.delta_and_error(1.0)[1] >= 2e-8 * 1e-5 + 1e-9


def test_the_ends_of_an_integral_count_its_error():
    contour = SimpleNamespace(delta_and_slope=lambda e: (math.exp(-e), 10 * math.exp(-e)))
    evaluated = SimpleNamespace(
        contour=contour, delta=lambda e: (math.exp(-e), 0.01 * math.exp(-e))
    )
    lower, estimate, upper = exact._widen(evaluated, 5.0, math.exp(-5.0))
    assert estimate == 5.0
    assert 5.0 + math.log(1.01) <= upper < 5.1
    assert 4.9 < lower <= 5.0 + math.log(0.99)


def test_the_ends_of_bands_count_their_error():
    total = SimpleNamespace(delta_and_error=lambda e: (math.exp(-e), 0.01 * math.exp(-e)))
    ends = [bands._root(total, math.exp(-5.0), 5.0, sign) for sign in (-1, 0, 1)]
    wanted = [5.0 + math.log(0.99), 5.0, 5.0 + math.log(1.01)]
    assert ends == pytest.approx(wanted, rel=1e-9)


def test_a_direction_that_matters_is_not_negligible():
    forward, reverse = exact.compositions(flatten(run(0.2, 1.0, 50), ADD), ADD, 1e-5)
    assert exact.negligible(reverse, 10.12, 1e-5)
    assert not exact.negligible(forward, 10.12, 1e-5)
    truth = exact.exact_delta(flatten(run(0.2, 1.0, 50), ADD), ADD, 10.0).estimate
    bound = chernoff(Moments(forward, 40.0), 10.0)
    assert math.log(truth) <= bound < math.log(truth) + 4


def test_rare_losses_are_asked_in_both_directions(monkeypatch):
    flat = flatten(run(1e-5, 0.5, 100), ADD)
    assert rare.rare_epsilon(flat, ADD, 1e-5).upper > 0
    monkeypatch.setattr(rare, "_smaller", lambda *_: False)
    with pytest.raises(Unresolved, match="the direction without large losses matters"):
        rare.rare_epsilon(flat, ADD, 1e-5)


def test_of_accountants_that_contradict_each_other_the_loosest_is_believed():
    low, high = Bound(1.0, 1.1, 1.2, "one"), Bound(1.9, 2.0, 2.1, "other")
    found = accountants._intersect([low, high])
    assert (found.lower, found.upper, found.accountant) == (1.0, 2.1, "other")
    assert "disagree" in found.note
    agreeing = accountants._intersect([low, Bound(1.05, 1.5, 2.1, "other")])
    assert (agreeing.lower, agreeing.upper, agreeing.accountant) == (1.05, 1.2, "one")


def test_nested_and_repeated_events_count_as_often_as_they_occur():
    one, other = run(0.2, 1.0, 1), run(0.1, 2.0, 2)
    both = acc.Composed((one, other, acc.Repeated(one, 3)))
    flat = flatten(acc.Repeated(acc.Repeated(both, 2), 5), ADD)
    assert dict(flat.steps) == {Step(1.0, 0.2): 40, Step(2.0, 0.1): 20}
    full = flatten(acc.Repeated(acc.Composed((acc.Gaussian(2.0), acc.Gaussian(2.0))), 8), ADD)
    assert full.steps == ((Step(0.5), 1),)


@pytest.mark.parametrize("order", [1.5, 2.0, 20.0])
def test_the_conversions_are_the_printed_ones(order):
    """Canonne, Kamath and Steinke 2020, Proposition 12, and Mironov 2017, Proposition 3."""
    spent, delta, orders = np.asarray([0.7]), 1e-5, (order,)
    improved = 0.7 + math.log((order - 1) / order) - (math.log(delta * order)) / (order - 1)
    plain = 0.7 + math.log(1 / delta) / (order - 1)
    for name, epsilon in (("improved", improved), ("mironov", plain)):
        assert rdp.rdp_to_epsilon(spent, delta, orders, name) == (pytest.approx(epsilon), order)
        assert rdp.rdp_to_delta(spent, epsilon, orders, name) == pytest.approx(delta)


def test_a_batch_of_nearly_all_records_costs_as_much_as_all():
    orders = np.asarray([2.0, 8.0, 64.0])
    full = 0.5 * orders * (2 / 3.0) ** 2  # replacing a record moves the sum by two contributions
    found = rdp.step_rdp(Step(3.0, 0.9999, "fixed_size"), REPLACE, tuple(orders))
    np.testing.assert_allclose(found, full, rtol=1e-2)
    twice = rdp.run_rdp(flatten(fixed(10), REPLACE), REPLACE, tuple(orders))
    once = rdp.run_rdp(flatten(fixed(1), REPLACE), REPLACE, tuple(orders))
    np.testing.assert_allclose(twice, 10 * once)


def fixed(steps):
    return acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(3.0), 1000, 10), steps)


@pytest.mark.parametrize("ratio", [0.1, 3.0, 7.0])
def test_the_profile_of_much_noise_keeps_its_digits(ratio):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        mu = mpmath.mpf(9e-4)
        epsilon = ratio * mu
        truth = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
            -mu / 2 - epsilon / mu
        )
        found = gaussian.gaussian_delta(9e-4, float(epsilon))
        assert abs(found / truth - 1) < 2e-11


@pytest.mark.parametrize(("z", "q"), [(0.8, 0.3), (0.3, 0.01)])
@pytest.mark.parametrize(("relation", "reverse"), [(ADD, False), (ADD, True), (REPLACE, False)])
def test_atoms_lie_above_and_below_the_step_also_on_a_coarse_grid(z, q, relation, reverse):
    """The mass beyond the grid is one in a thousand, so that it counts."""
    pair = Pair(Step(z, q), relation, reverse)
    whole = Composition(((pair, 1),), 0.0, math.log(1e-3))
    above = pld.pessimistic(whole, pair, 0.4, 8.0)
    below = [pld.optimistic(whole, pair, 0.4, 8.0, tilt) for tilt in (0.1, 1.0)]
    for epsilon in (0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 2.2, 3.0):
        upper, *lower = (_delta(atoms, 0.4, epsilon) for atoms in (above, *below))
        if relation is REPLACE:
            truth = single.single_delta(pair.step, relation, epsilon)
        else:
            truth = single._one_way(pair, epsilon)
        assert max(lower) <= truth * (1 + 1e-9) + 1e-12
        assert truth <= upper * (1 + 1e-9) + 1e-12
        assert upper - min(lower) < 0.1


def test_no_atom_below_the_step_lies_above_its_merged_cell(monkeypatch):
    merged, found = pld._merged_loss, []
    monkeypatch.setattr(pld, "_merged_loss", lambda *a: found.append(merged(*a)) or found[-1])
    pair = Pair(Step(0.3, 0.01), ADD)
    whole = Composition(((pair, 1),), 0.0, math.log(1e-3))
    atoms = pld.optimistic(whole, pair, 0.4, 8.0, 0.1)
    known = found[-1][found[-1] > -math.inf]
    assert (atoms.offset + 0.4 * atoms.index <= known + 1e-12).all()


def _delta(atoms, width, epsilon):
    loss = atoms.offset + width * atoms.index
    return float(atoms.mass @ np.maximum(-np.expm1(epsilon - loss), 0.0)) + atoms.infinite


def test_releases_of_one_draw_and_rates_of_a_fixed_size():
    assert acc.events.joint_gaussian([3.0, 4.0]).noise_multiplier == pytest.approx(2.4)
    assert flatten(fixed(7), REPLACE).steps == ((Step(3.0, 0.01, "fixed_size"), 7),)
    inner = acc.PoissonSampled(acc.Gaussian(1.0), 0.5)
    for outer in (acc.PoissonSampled(inner, 0.5), acc.FixedSizeSampled(inner, 10, 2)):
        with pytest.raises(acc.UnsupportedEventError, match="nested sampling"):
            flatten(outer, REPLACE)


def test_the_total_variation_is_that_of_every_step():
    for relation, apart in ((ADD, 0.3829249225), (REPLACE, 0.6826894921)):
        found = single.total_variation(flatten(run(0.01, 1.0, 10), relation), relation)
        assert found == pytest.approx(10 * 0.01 * apart)


def test_a_filter_adds_up_and_stops():
    budget, step = acc.RenyiFilter(1.0, 1e-5), acc.Gaussian(20.0)
    admitted = 0
    while budget.admits(step) and admitted < 60:
        budget.charge(step)
        admitted += 1
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(step)
    assert 10 < admitted < 60
    total = rdp.run_rdp(flatten(acc.Repeated(step, admitted), ADD), ADD, budget.orders)
    spent = rdp.rdp_to_epsilon(total, 1e-5 / len(budget.orders), budget.orders)[0]
    assert budget.spent() == pytest.approx(spent)
    assert spent <= 1.0


def test_the_bound_without_an_integral_is_the_printed_one():
    """Of a Gaussian alone, whose log moments are mu² c (c + 1) / 2."""
    moments = Moments(Composition((), 0.5, -30.0), 40.0)
    c = np.geomspace(1e-2, 1, 12) * moments.order
    each = 0.25 * c * (c + 1) - 3.0 * c + c * np.log(c) - (1 + c) * np.log1p(c)
    assert chernoff(moments, 3.0) == pytest.approx(each.min(), rel=1e-9)
