"""Sums by way of bunches lie on the right side of the same sum by one transform."""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import bunches
from jaxdp.accounting.base import Discrete
from jaxdp.accounting.bunches import Layout, Moments, Summed, Sums
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.discretise import above, below
from jaxdp.accounting.pairs import SampledGaussian

ADD = acc.Relation.ADD_OR_REMOVE_ONE
KINDS = (
    (SampledGaussian(Step(1.0, 0.1, "poisson"), ADD), 700),
    (SampledGaussian(Step(2.0, 0.3, "poisson"), ADD), 411),
)


def steps_of(put, kinds=KINDS):
    return lambda width: [(put(p, width, *p.span(1e-20), 0.01), n) for p, n in kinds]


def sums(steps, put, layout, c):
    return Sums(steps, put, layout, Moments(steps(0.01), 0.01, c))


def delta(put, layout, epsilon, kinds=KINDS, c=0.8):
    found = sums(steps_of(put, kinds), put, layout, c).whole(-32.0)
    value, error = found.profile(epsilon)(epsilon, 0.0)
    return value, error


WHOLE = Layout((128 / (1 << 18),), 1, 1 << 18, 0)
ONCE = Layout((128 / (1 << 18), 128 / (1 << 14)), 20, 1 << 14, 0)
TWICE = Layout((128 / (1 << 18), 128 / (1 << 16), 128 / (1 << 14)), 6, 1 << 14, 0)


@pytest.mark.parametrize("layout", [ONCE, TWICE])
@pytest.mark.parametrize("epsilon", [14.0, 20.0])
def test_bunches_enclose_the_sum_by_one_transform(layout, epsilon):
    (high, by), (low, less) = delta(above, WHOLE, epsilon), delta(below, WHOLE, epsilon)
    (upper, error), (lower, also) = delta(above, layout, epsilon), delta(below, layout, epsilon)
    assert max(by, less, error, also) < 1e-3 * low
    assert lower - also <= high + by
    assert upper + error >= low - less
    # Coarser than the single transform, hence on the outer side of it, but not by much.
    assert high <= upper <= 1.01 * high
    assert low >= lower >= 0.99 * low


def test_no_step_is_lost_or_counted_twice():
    """Gaussians add up: n full batches of z are one of z/sqrt(n), whatever n leaves over."""
    for n in (97, 100, 119):
        kinds = ((SampledGaussian(Step(20.0, 1.0, "poisson"), ADD), n),)
        layout = Layout((40 / (1 << 17), 40 / (1 << 13)), 20, 1 << 13, 0)
        exact = acc.delta(acc.Repeated(acc.Gaussian(20.0), n), 1.0).estimate
        ends = []
        for put, sign in ((below, -1), (above, 1)):
            found = sums(steps_of(put, kinds), put, layout, 4.0).whole(-4.0)
            value, error = found.profile(1.0)(1.0, 0.0)
            ends.append(value + sign * error)
        assert ends[0] <= exact <= ends[1] <= 1.01 * ends[0]


def test_a_bunch_keeps_its_digits_far_from_zero():
    """p - q e^base, where q is e^300 times p or e^-300 times it."""
    loss = np.asarray([-300.0, -299.5, 0.25, 299.5, 300.0])
    pair = Summed(loss, np.full(5, 0.2))
    masses = pair.masses(np.asarray([-300.25, -299.0, 0.0, 1.0, 299.0, 301.0]))
    np.testing.assert_allclose(masses.p, [0.4, 0.0, 0.2, 0.0, 0.4])
    wanted = [
        0.2 * (math.exp(-0.25) + math.exp(-0.75)),
        0,
        0.2 * math.exp(-0.25),
        0,
        0.2 * (math.exp(-0.5) + math.exp(-1)),
    ]
    np.testing.assert_allclose(masses.q, wanted, rtol=1e-14)
    np.testing.assert_allclose(masses.gain, masses.p - wanted, rtol=1e-13, atol=1e-16)
    first, _ = pair.tails(np.asarray([300.0, 0.0]))
    assert first[0] == 0.0
    assert first[1] >= 0.4


def test_what_a_bunch_may_lose_is_charged(monkeypatch):
    """Errors of the bunches' laws reach the error of the sum, as often as there are bunches."""
    _, before = delta(above, ONCE, 14.0)
    made = bunches.Law

    def worse(*args):
        law = made(*args)
        if law.loss.size != ONCE.size:
            law.alias += 1e-9
        return law

    monkeypatch.setattr(bunches, "Law", worse)
    _, after = delta(above, ONCE, 14.0)
    c, total = 0.8, 0.0
    for atom, n in steps_of(above)(ONCE.widths[0]):
        total += n * float(bunches.log_moments([(atom, 1)], ONCE.widths[0], np.asarray([c]))[0])
    peak = math.exp(c * math.log(c) - (1 + c) * math.log1p(c) + total - c * 14.0)
    assert after - before >= 2 * 20 * 1e-9 * peak * 0.99


def test_windows_leave_out_what_they_say():
    """Against the tilted law of 200 steps by one transform."""
    kinds = KINDS[:1]
    atoms, width = steps_of(above, kinds)(1e-3), 1e-3
    moments = Moments(atoms, width, 0.8)
    counts = np.asarray([200])
    first, last = moments.window(counts, 5.0)
    law = sums(
        lambda w: [(a, 200) for a, _ in atoms], above, Layout((width,), 1, 1 << 16, 0), 0.8
    ).whole(-20.0)
    assert 0 < law.weight[law.loss > last].sum() <= math.exp(-5.0)
    assert 0 < law.weight[law.loss < first].sum() <= math.exp(-5.0)
    orders = moments.near(counts, first, last)
    assert orders.min() < 0.8 < orders.max()


def test_what_is_left_out_of_a_bunch_is_told():
    steps = steps_of(above, KINDS[:1])
    moments = Moments(steps(0.01), 0.01, 0.8)
    first, last = moments.window(np.asarray([40]), 4.0)
    width = (last - first) / 4096
    atoms = [(atom, 40) for atom, _ in steps(width)]
    law = Sums(lambda _: atoms, above, Layout((width,), 1, 4096, 0), moments).whole(first)
    atom, scale, _, cut = bunches._coarser(law, 8 * width, above)
    assert cut > 1e-3
    kept = bunches.log_moments([(atom, 1)], 8 * width, np.asarray([0.8]))[0] + scale - law.log_scale
    assert math.exp(kept) + cut >= law.weight.sum()


def test_what_lies_above_the_cap_is_the_same_on_every_grid():
    """Else a loss between two grids' tops is counted twice, or not at all, where grids are mixed."""
    pair = Discrete(np.asarray([-0.1, 0.0, 0.1, 1.003]), np.asarray([0.4, 0.2, 0.399, 0.001]))
    for put in (above, below):
        for cap in (0.9, 0.98, 1.0, 1.01):
            fine, coarse = (put(pair, width, -0.1, cap, 1e-3) for width in (0.004, 0.03))
            assert fine.top == coarse.top == cap
            assert fine.over == coarse.over
            assert (fine.over[0] > 0) == (cap < 1.003)


@pytest.mark.parametrize("bunches", [2, 8])
def test_windows_that_are_far_too_short_leave_no_wrong_bound(bunches):
    """Was a fault: what bunches of bunches may lose was charged as e^50 at most."""
    count, z, c, epsilon = 352, 2.201290168020447, 0.35, 61.9
    kinds = ((SampledGaussian(Step(z, 1.0, "poisson"), ADD, True), count),)
    widths = (1.8e-5, 1.5e-4, 1.2e-3, 9.9e-3)
    exact = acc.delta(acc.Repeated(acc.Gaussian(z), count), epsilon).estimate
    layout = Layout(widths, bunches, 1 << 14, 0)
    found = sums(steps_of(above, kinds), above, layout, c).whole(-32.0)
    value, error = found.profile(epsilon)(epsilon, 0.0)
    assert value + error >= exact


def test_cells_of_many_nats_keep_both_masses():
    pair = Summed(np.asarray([0.0, 36.0, 80.0]), np.asarray([0.2, 0.5, 0.3]))
    masses = pair.masses(np.asarray([-1.0, 0.0, 100.0]))
    wanted = 0.5 * math.exp(-36) + 0.3 * math.exp(-80)
    np.testing.assert_allclose(masses.q, [0.2 * math.exp(-1), wanted], rtol=1e-14)
