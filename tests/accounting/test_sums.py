"""Laws of sums: plain, by way of bunches, and with small losses apart from large ones."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.accounting import certificate
from jaxdp.accounting import grid as summing
from jaxdp.accounting.certificate import binomial_upper_bound
from jaxdp.accounting.events import Unresolved
from jaxdp.accounting.grid import (
    Atoms,
    BunchPair,
    LargeLosses,
    Law,
    LawProfile,
    Layout,
    SmallLosses,
    TiltedMoments,
    TransformProfile,
    dominated_atoms,
    dominating_atoms,
    law_of_sum,
    log_moments,
    profile_of,
)
from jaxdp.accounting.pairs import Discrete, SampledGaussian
from tests.accounting.judging import ADD, REPLACE, directions, run


def atoms(index, mass, offset=0.0):
    return Atoms(np.asarray(index), np.asarray(mass, dtype=float), offset, math.inf, (0.0, 0.0))


def convolved(kinds, width):
    """(losses, masses) of the sum, by one step at a time; a mass for each sum of indices."""
    law, offset = {0: 1.0}, 0.0
    for atom, n in kinds:
        offset += n * atom.offset
        for _ in range(n):
            found = {}
            for at, mass in law.items():
                for i, m in zip(atom.index, atom.mass, strict=True):
                    found[at + int(i)] = found.get(at + int(i), 0.0) + mass * float(m)
            law = found
    index = np.asarray(sorted(law))
    return offset + width * index, np.asarray([law[i] for i in sorted(law)])


kind = st.builds(
    lambda at, mass, offset, n: (atoms(at, np.asarray(mass[: len(at)]) / 4, offset), n),
    st.lists(st.integers(-6, 9), min_size=2, max_size=4, unique=True),
    st.lists(st.floats(1e-8, 1.0), min_size=4, max_size=4), st.floats(-0.2, 0.2), st.integers(1, 4),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(kind, min_size=1, max_size=3), st.floats(0.0, 3.0), st.floats(0.05, 0.3))
def test_a_sum_of_unlike_losses(kinds, c, width):
    loss, mass = convolved(kinds, width)
    law = Law(kinds, width, float(loss[0]) - 3 * width, 256, c, (0.0, 0.0))
    at = np.rint((loss - law.loss[0]) / width).astype(int)
    np.testing.assert_allclose(law.loss[at], loss, atol=1e-12)
    truth = np.zeros(256)
    truth[at] = mass * np.exp(c * loss - law.log_scale)
    assert np.linalg.norm(law.weight - truth) <= law.error + (law.relative + 1e-13)
    assert law.error < 3e-13
    assert law.relative < 1e-12
    total = float(mass @ np.exp(c * loss))
    assert law.log_scale == pytest.approx(math.log(total), abs=1e-11)
    assert log_moments(kinds, width, np.asarray([c]))[0] == pytest.approx(math.log(total), abs=1e-9)


def plain(loss, mass, epsilon):
    """delta of these losses."""
    return float(mass @ np.maximum(-np.expm1(epsilon - loss), 0.0))


@settings(deadline=None, max_examples=40)
@given(st.lists(kind, min_size=1, max_size=2), st.floats(0.2, 3.0), st.floats(0.1, 2.0))
def test_the_profile_of_a_sum(kinds, c, epsilon):
    loss, mass = convolved(kinds, 0.1)
    law = Law(kinds, 0.1, float(loss[0]) - 0.3, 256, c, (0.0, 0.0))
    few, many = TransformProfile(law), LawProfile(law, epsilon)
    cases = [(few, at) for at in (epsilon, 0.5 * epsilon, 1.3 * epsilon, float(loss[0]) - 1)]
    for profile, at in cases + [(many, share * epsilon) for share in (0.8, 1.0, 1.3)]:
        for unit in (0.0, -3.0):
            value, error = profile(at, unit)
            truth = plain(loss, mass, at) * math.exp(-unit)
            assert abs(value - truth) <= error + 1e-14 * truth + 1e-300
            below = math.exp(-c * min(at, 0.0))
            assert error <= 1e-11 * below * math.exp(law.log_scale - unit) + 1e-9 * truth
    assert few(-900 / c, 0.0) == many(0.5 * epsilon, 0.0) == (0.0, math.inf)


@pytest.mark.parametrize(("c", "width", "middle"), [(4e4, 1e-7, 0.0), (5e-4, 5.0, 3e5)])
def test_beyond_the_largest_sum_of_a_lattice_hardly_anything_is_in_doubt(c, width, middle):
    """No frequency is negligible, the tilt is steep or the losses are large."""
    kinds = [(atoms([-1000, 0, 1000], [0.3, 0.3, 0.4], offset=middle / 3), 3)]
    law = Law(kinds, width, middle - 4000 * width, 1 << 13, c, (0.0, 0.0))
    profile, top = TransformProfile(law), middle + 3000 * width
    value, error = profile(top + 0.3 * width, law.log_scale - c * top)
    assert value + error < 2e-15 / min(c, 1)
    value, error = profile(top - 2.3 * width, law.log_scale - c * top)
    truth = 0.4**3 * -math.expm1(-2.3 * width) / math.exp(law.log_scale - c * top)
    assert abs(value - truth) <= error <= 1e-8 * truth


@pytest.mark.parametrize(("low", "high"), [(-100, 3), (-3, 100), (-100, 100)])
@pytest.mark.parametrize("c", [0.3, 1.0])
def test_what_lies_outside_of_the_window_is_in_the_error(low, high, c):
    """Two points far outside are wrapped into the window; their tilted mass is the error."""
    law_of_one = atoms([low, 0, 7, high], [1e-3, 0.9, 0.098, 1e-3])
    loss, mass = convolved([(law_of_one, 2)], 0.1)
    tilted = mass * np.exp(c * loss)
    tilted /= tilted.sum()
    first, last = -1.6, -1.6 + 6.3
    outside = float(tilted[loss < first - 0.05].sum()), float(tilted[loss > last + 0.05].sum())
    law = Law([(law_of_one, 2)], 0.1, first, 64, c, outside)
    assert (law.loss[0], law.loss[-1]) == pytest.approx((first, last))
    assert law.alias == pytest.approx(sum(outside))
    assert law.above == outside[1]
    inside = (loss >= first - 0.05) & (loss <= last + 0.05)
    truth = np.zeros(64)
    truth[np.rint((loss[inside] - first) / 0.1).astype(int)] = tilted[inside]
    assert np.abs(law.weight - truth).sum() <= law.alias + 1e-13
    wrong = False
    cases = [(TransformProfile(law), at) for at in (0.15, 0.65, 1.25)]
    for profile, epsilon in cases + [(LawProfile(law, at), at) for _, at in cases]:
        value, error = profile(epsilon, 0.0)
        off = abs(value - plain(loss, mass, epsilon))
        assert off <= error
        wrong |= off > 1e-10  # without the mass outside the error would not be one
    assert wrong


def test_rounding_is_counted_by_steps_and_by_transforms():
    """Of 1e6 steps that hardly ever lose, a binomial law, in float64 by logarithms."""
    n, p = 10**6, 1e-6
    law = Law([(atoms([0, 1], [1 - p, p]), n)], 1.0, -1.0, 64, 0.5, (0.0, 0.0))
    k = np.arange(40)
    log_binomial = [
        math.lgamma(n + 1) - math.lgamma(n - i + 1) - math.lgamma(i + 1) if i else 0.0 for i in k
    ]
    exact = np.asarray(log_binomial) + k * math.log(p) + (n - k) * math.log1p(-p)
    truth = np.exp(exact + 0.5 * k - law.log_scale)
    found = law.weight[np.rint(k - law.loss[0]).astype(int)]
    assert float(np.linalg.norm(found - truth)) <= law.error + law.relative + 2e-8
    assert 1e-17 < law.error < 1e-12
    assert law.relative >= n * 4 * 2.0**-53 * 8
    # And no less than a transform must lose.
    mass = np.random.default_rng(0).random(40)
    one = atoms(np.arange(40), mass / mass.sum())
    for size in (64, 4096):
        law = Law([(one, 1)], 0.1, 0.0, size, 1.0, (0.0, 0.0))
        unit = 2.0**-53 * math.log2(size) * float(np.linalg.norm(law.weight))
        # Of both transforms: 16 for the last, 32 for the first.
        assert 45 * unit <= law.error <= 100 * unit + 1e-14, size


def test_few_frequencies_are_enough_and_known_to_their_doubt(monkeypatch):
    steps, width, size = [(SampledGaussian(1.0, 0.1, ADD), 3000)], 1e-3, 1 << 18
    kinds = [(dominating_atoms(p, width, *p.span(1e-20), 0.01), n) for p, n in steps]
    few = Law(kinds, width, -64.0, size, 0.8, (0.0, 0.0))
    assert 20 < few.values.size < 100
    monkeypatch.setattr(summing, "low_frequencies", lambda kinds, size: 0)
    all_of_them = Law(kinds, width, -64.0, size, 0.8, (0.0, 0.0))
    assert few.values.size == all_of_them.values.size
    assert few.inexact < all_of_them.inexact < 1e-9
    off = np.linalg.norm(few.values - all_of_them.values) * math.sqrt(2 / size)
    assert off <= few.inexact + all_of_them.inexact
    monkeypatch.undo()
    # Of laws that come back at half of all frequencies, or never fall, all are needed.
    for one in (atoms([-400, 400, 1000], [0.3, 0.3, 0.4]), atoms([0, 1], [1 - 1e-9, 1e-9])):
        law = one.index, one.mass, 200
        assert summing.low_frequencies([law], 1 << 18) == 0
    # Every sum and its error, in 40 digits.
    rng = np.random.default_rng(3)
    index, mass = rng.integers(-3000, 90_000, 400), rng.random(400) / 200
    found, doubt = summing._transform_at(index, mass, 1 << 17, 50)
    with mp.workdps(40):
        for k in (0, 1, 7, 8, 48, 49):
            turns = (mp.expm1(-2j * mp.pi * k * int(i) / 2**17) for i in index)
            truth = mp.fsum(mp.mpf(m) * t for m, t in zip(mass.tolist(), turns, strict=True))
            assert abs(mp.mpc(complex(found[k])) - truth) <= doubt[k] <= 1e-10, k


@pytest.mark.parametrize("points", [1, 16])
def test_cells_of_sums_and_one_large_loss_beside_them(points, monkeypatch):
    """Against all sums one by one; in a short window, in which the law is wrapped."""
    pair, top, size = SampledGaussian(0.5, 0.01, ADD), 1.5, 1 << 12
    small = dominating_atoms(SampledGaussian(1.0, 0.1, ADD), 4e-3, -1.0, 2.5, 0.01)
    law = Law([(small, 30)], 4e-3, -8.0, size, 0.0, (0.0, 0.0))
    first, weight, gain, doubt = law.cells(points)
    rows = law.loss.reshape(-1, points), law.weight.reshape(-1, points)
    np.testing.assert_allclose(first, rows[0][:, 0], atol=1e-12)
    off = weight - rows[1].sum(axis=1)
    assert np.linalg.norm(off) <= (1 + points) * (doubt + law.error)
    fall = -np.expm1(first[:, None] - rows[0])
    np.testing.assert_allclose(gain, (rows[1] * fall).sum(axis=1), atol=points * 1e-14)
    monkeypatch.setattr(certificate, "_CELLS_OF_SUMS", size // points)
    p, q = (float(v[0]) for v in pair.tails(np.asarray([top])))
    atom = Atoms(np.asarray([0]), np.asarray([1.0]), 0.0, top, (p, q))
    for epsilon in (-1.0, 0.5, 2.0, 4.0, 9.0):
        at = epsilon - law.loss
        above = pair.tails(np.maximum(at, top))
        truth = 7 * float(law.weight @ (above[0] - np.exp(at) * above[1])) * math.exp(law.log_scale)
        low, high = (
            certificate._SingleLargeLoss(pair, 7, atom, law, sign)(epsilon) for sign in (-1, 1)
        )
        assert low <= truth <= high, epsilon
        assert high - low <= 1e-2 * truth + 1e-12, epsilon


# Bunches: sums of sums.

KINDS = (
    (SampledGaussian(1.0, 0.1, ADD), 700),
    (SampledGaussian(2.0, 0.3, ADD), 411),
)
WHOLE = Layout((128 / (1 << 18),), 1, 1 << 18, 0)
ONCE = Layout((128 / (1 << 18), 128 / (1 << 14)), 20, 1 << 14, 0)


def steps_of(put, kinds=KINDS):
    return lambda width: [(put(p, width, *p.span(1e-20), 0.01), n) for p, n in kinds]


def sums(steps, put, layout, c, lowest):
    return law_of_sum(steps, put, layout, TiltedMoments(steps(0.01), 0.01, c), lowest)


def delta(put, layout, epsilon, kinds=KINDS, c=0.8, lowest=-32.0):
    law = sums(steps_of(put, kinds), put, layout, c, lowest)
    return profile_of(law, epsilon)(epsilon, 0.0)


def test_bunches_enclose_the_sum_by_one_transform():
    for epsilon in (14.0, 20.0):
        (high, by), (low, less) = (
            delta(put, WHOLE, epsilon) for put in (dominating_atoms, dominated_atoms)
        )
        (upper, error), (lower, also) = (
            delta(put, ONCE, epsilon) for put in (dominating_atoms, dominated_atoms)
        )
        assert max(by, less, error, also) < 1e-3 * low
        assert lower - also <= high + by
        assert upper + error >= low - less
        # Coarser than the single transform, hence on the outer side of it, but not by much.
        assert high <= upper <= 1.01 * high
        assert low >= lower >= 0.99 * low
    # Gaussians add up: n full batches of z are one of z/sqrt(n), whatever n leaves over.
    layout = Layout((40 / (1 << 17), 40 / (1 << 13)), 20, 1 << 13, 0)
    for n in (97, 100, 119):
        kinds = ((SampledGaussian(20.0, 1.0, ADD), n),)
        exact = acc.delta(acc.Repeated(acc.Gaussian(20.0), n), 1.0).estimate
        low, less = delta(dominated_atoms, layout, 1.0, kinds, 4.0, -4.0)
        high, more = delta(dominating_atoms, layout, 1.0, kinds, 4.0, -4.0)
        assert low - less <= exact <= high + more <= 1.01 * exact, n


def test_a_bunch_keeps_its_digits_far_from_zero():
    """p - q e^base, where q is e^300 times p or e^-300 times it."""
    pair = BunchPair(np.asarray([-300.0, -299.5, 0.25, 299.5, 300.0]), np.full(5, 0.2))
    masses = pair.masses(np.asarray([-300.25, -299.0, 0.0, 1.0, 299.0, 301.0]))
    np.testing.assert_allclose(masses.p, [0.4, 0.0, 0.2, 0.0, 0.4])
    first, last = (0.2 * math.exp(-a) + 0.2 * math.exp(-b) for a, b in ((0.25, 0.75), (0.5, 1)))
    wanted = [first, 0, 0.2 * math.exp(-0.25), 0, last]
    np.testing.assert_allclose(masses.q, wanted, rtol=1e-14)
    np.testing.assert_allclose(masses.gain, masses.p - wanted, rtol=1e-13, atol=1e-16)
    first, _ = pair.tails(np.asarray([300.0, 0.0]))
    assert first[0] == 0.0
    assert first[1] >= 0.4
    # Cells of many nats keep both masses.
    pair = BunchPair(np.asarray([0.0, 36.0, 80.0]), np.asarray([0.2, 0.5, 0.3]))
    wanted = [0.2 * math.exp(-1), 0.5 * math.exp(-36) + 0.3 * math.exp(-80)]
    np.testing.assert_allclose(pair.masses(np.asarray([-1.0, 0.0, 100.0])).q, wanted, rtol=1e-14)


def test_what_a_bunch_may_lose_is_charged(monkeypatch):
    """Errors of the bunches' laws reach the error of the sum, as often as there are bunches."""
    _, before = delta(dominating_atoms, ONCE, 14.0)
    made = summing.Law

    def worse(*args):
        law = made(*args)
        if law.loss.size != ONCE.size:
            law.alias += 1e-9
        return law

    monkeypatch.setattr(summing, "Law", worse)
    _, after = delta(dominating_atoms, ONCE, 14.0)
    c, total = 0.8, 0.0
    for atom, n in steps_of(dominating_atoms)(ONCE.widths[0]):
        total += n * float(log_moments([(atom, 1)], ONCE.widths[0], np.asarray([c]))[0])
    peak = math.exp(c * math.log(c) - (1 + c) * math.log1p(c) + total - c * 14.0)
    assert after - before >= 2 * 20 * 1e-9 * peak * 0.99


def test_what_windows_leave_out_is_told():
    """Against the tilted law of 200 steps by one transform."""
    atoms, width = steps_of(dominating_atoms, KINDS[:1])(1e-3), 1e-3
    moments, counts = TiltedMoments(atoms, width, 0.8), np.asarray([200])
    first, last = moments.window(counts, 5.0)
    one = Layout((width,), 1, 1 << 16, 0)
    law = sums(lambda w: [(a, 200) for a, _ in atoms], dominating_atoms, one, 0.8, -20.0)
    assert 0 < law.weight[law.loss > last].sum() <= math.exp(-5.0)
    assert 0 < law.weight[law.loss < first].sum() <= math.exp(-5.0)
    # What is left out of a bunch is told.
    steps = steps_of(dominating_atoms, KINDS[:1])
    moments = TiltedMoments(steps(0.01), 0.01, 0.8)
    first, last = moments.window(np.asarray([40]), 4.0)
    width = (last - first) / 4096
    atoms = [(atom, 40) for atom, _ in steps(width)]
    law = law_of_sum(
        lambda _: atoms, dominating_atoms, Layout((width,), 1, 4096, 0), moments, first
    )
    atom, scale, _, cut = summing._bunch_on_coarse_grid(law, 8 * width, dominating_atoms)
    assert cut > 1e-3
    kept = log_moments([(atom, 1)], 8 * width, np.asarray([0.8]))[0] + scale - law.log_scale
    assert math.exp(kept) + cut >= law.weight.sum()
    # Was a fault: what bunches may lose was charged as e^50 at most.
    count, z, epsilon = 352, 2.201290168020447, 61.9
    kinds = ((SampledGaussian(z, 1.0, ADD, True), count),)
    exact = acc.delta(acc.Repeated(acc.Gaussian(z), count), epsilon).estimate
    for each in (2, 8):
        layout = Layout((1.8e-5, 9.9e-3), each, 1 << 14, 0)
        value, error = delta(dominating_atoms, layout, epsilon, kinds, 0.35)
        assert value + error >= exact, each


# Small losses apart: the two pairs of a step, and sums on two grids.

PAIRS = (
    SampledGaussian(0.8, 0.01, ADD),
    SampledGaussian(0.8, 0.01, ADD, reverse=True),
    SampledGaussian(1.3, 0.05, REPLACE),
)


def fine_atoms(pair, edges):
    """(losses, P masses, Q masses) of fine cells, each at its own mean loss."""
    p, q, *_ = pair.masses(edges)
    kept = (p > 0) & (q > 0)
    return np.log(p[kept] / q[kept]), p[kept], q[kept]


def of_product(first, second, gamma):
    """H_gamma of a product of two pairs of atoms."""
    p = first[1][:, None] * second[1]
    q = first[2][:, None] * second[2]
    return float(np.maximum(p - gamma * q, 0.0).sum())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("reach", [0.003, 0.02])
def test_the_two_pairs_dominate_a_step_and_hardly_more(pair, reach):
    inner = SmallLosses(pair, pair.center - reach, pair.center + 1.5 * reach)
    outer = LargeLosses(inner)
    grid = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-0.05, 0.05, 2001)])
    cells = np.unique(np.append(grid, [inner.low, inner.high, inner.shift]))
    small = fine_atoms(inner, np.unique(np.append(np.linspace(-0.05, 0.05, 1501), inner.shift)))
    whole, others = fine_atoms(pair, cells), fine_atoms(outer, cells)
    everything = np.asarray([0.0]), np.asarray([1.0]), np.asarray([1.0])
    for gamma in (0.7, 0.99, 1.0, 1.004, 1.007, 1.5, 4.0):
        one, two = of_product(whole, everything, gamma), of_product(others, small, gamma)
        assert two >= one * (1 - 1e-4)
        assert two <= one + 2.2 * outer.chance() * small[1] @ np.abs(np.expm1(-small[0])) + 1e-6


@pytest.mark.parametrize("pair", PAIRS)
def test_masses_are_those_of_the_step(pair):
    inner = SmallLosses(pair, pair.center - 0.004, pair.center + 0.007)
    outer = LargeLosses(inner)
    for part in (inner, outer):
        p, q, *_ = part.masses(np.asarray([-np.inf, np.inf]))
        assert (p[0], q[0]) == pytest.approx((1, 1), abs=1e-11)
        edges = np.linspace(-0.3, 0.3, 97)
        for beyond, cells in zip(part.tails(edges), part.masses(edges)[:2], strict=True):
            np.testing.assert_allclose(beyond[:-1] - beyond[1:], cells, atol=1e-11)
        # A cell's masses have a ratio between those of its ends.
        p, q, gain, error, _ = part.masses(edges)
        assert (np.abs(p - q - gain) <= error + 1e-13).all()
        used = q > 1e-9
        ratio = np.log(p[used] / q[used])
        assert (ratio >= edges[:-1][used] - 1e-9).all()
        assert (ratio <= edges[1:][used] + 1e-9).all()
    here = outer.masses(np.asarray([inner.shift - 1e-9, inner.shift]))
    assert here[0][0] == pytest.approx(inner.small[0], rel=1e-12)
    assert outer.chance() == pytest.approx(1 - inner.small[0], rel=1e-9, abs=1e-13)


def test_no_more_large_losses_than_said():
    for n, p, target in ((10, 0.3, -5.0), (1000, 0.01, -20.0), (10**7, 1e-5, -46.0), (5, 0.9, -9)):
        k = binomial_upper_bound(n, p, target)
        assert stats.binom.logsf(k, n, p) <= target
        assert k == n or stats.binom.logsf(k // 2, n, p) > target
    assert binomial_upper_bound(1000, 0.0, -30.0) == 0
    assert binomial_upper_bound(7, 1.0, -30.0) == binomial_upper_bound(7, 0.99, -30.0) == 7


RUNS = (  # q, z, steps, delta, relation, epsilon by the contour integral or a convolution
    (1e-5, 0.8, 10**7, 1e-9, REPLACE, 0.5101313483387562),
    (1e-7, 0.8, 10**5, 1e-5, REPLACE, 8.377844691620995e-05),
    (1e-5, 1.23, 5_000, 1e-18, REPLACE, 0.0110398670),
    (1e-7, 0.45, 5_000, 1e-9, ADD, 0.019257430066021),
)


@pytest.mark.parametrize(("q", "z", "steps", "delta", "relation", "truth"), RUNS)
def test_rare_samplings_are_enclosed_closely(q, z, steps, delta, relation, truth):
    bound = acc.epsilon(run(q, z, steps), delta, relation)
    assert bound.lower <= truth * (1 + 1e-8)
    assert truth * (1 - 1e-8) <= bound.upper
    assert bound.upper - bound.lower < 5e-4 * truth


def first_direction():
    return directions(run(1e-5, 0.8, 10**7), REPLACE, 1e-9, 1e-4)[0]


def test_a_lower_end_gives_up_small_losses_and_their_probability(monkeypatch):
    direction, truth = first_direction(), RUNS[0][-1]
    plan = certificate.choose_plan(direction.upper, truth, direction.log_delta)
    upper, lower = (
        certificate.DiscretizedComposition(kinds, plan, high, 7e-5)
        for kinds, high in ((direction.upper, True), (direction.lower, False))
    )
    assert upper.layout.small
    assert lower.layout.small
    assert upper.lost == 0 < lower.lost <= 1.01e-3 * 7e-5 * 1e-9
    (_, n), (_, fewer) = upper._inner[0], lower._inner[0]
    outer, steps = lower.kinds[0]
    assert n == steps == 10**7
    assert stats.binom.logsf(n - fewer, n, outer.chance()) <= math.log(lower.lost)
    # What it gives up is taken off.
    direction, truth = first_direction(), RUNS[0][-1]
    before = direction.delta_end(False, truth, 1e-3)
    made = certificate.DiscretizedComposition

    def more(*args):
        parts = made(*args)
        parts.lost = 0.25 * 1e-9
        return parts

    monkeypatch.setattr(certificate, "DiscretizedComposition", more)
    assert direction.delta_end(False, truth, 1e-3) == pytest.approx(before - 0.25, abs=1e-3)


# Small losses with point masses at the ends of the interval, ratios far from 1, no small loss.


def points(high):
    """Losses of which one is ``high``, with a fifth of the probability."""
    loss = high * np.asarray([-12.0, -0.4, 0.0, 0.3, 1.0, 15.0])
    return Discrete(loss, np.asarray([1e-4, 0.1, 0.6, 0.1, 0.1998, 1e-4]))


def test_point_masses_at_the_ends_are_kept():
    """high - shift + shift may be less than high by rounding."""
    moved = 0
    for high in np.geomspace(1e-4, 1.0, 301).tolist():
        inner = SmallLosses(points(high), -high, high)
        moved += high - inner.shift + inner.shift < high
        atoms = dominating_atoms(inner, high / 50, *inner.span(0.0), 0.01)
        assert atoms.mass.sum() >= 1
        assert atoms.over[0] == 0
        top = high - inner.shift
        first, _ = inner.tails(np.asarray([top - 1e-6 * high, top]))
        assert first[0] == pytest.approx(0.1998 / 0.9998)
        assert first[1] == 0
    assert moved > 3
    # The merged outcome and the others have all of the masses, point masses at the ends too.
    one = points(1.0)
    for low, high in ((-0.4, 1.0), (-0.4, 0.3), (-12.0, 15.0), (-13.0, 16.0)):
        outer = LargeLosses(SmallLosses(one, low, high))
        most, least = (
            put(outer, 0.1, -14.0, 16.0, 0.01).mass.sum()
            for put in (dominating_atoms, dominated_atoms)
        )
        assert most >= 1 - 1e-15 >= least >= 1 - 1e-12
        inside = (one.loss > low) & (one.loss <= high)
        assert outer.chance() == pytest.approx(one.p[~inside].sum(), abs=1e-12)


def test_small_losses_are_known_to_their_doubt():
    """Also where the two probabilities of a small loss differ: the masses of a loss cancel."""
    mass = np.asarray([0.2, 0.3])
    for ratio in (-9.0, -0.5, 0.5, 9.0):
        q = np.asarray([0.2 / math.exp(ratio), 0.0])
        one = Discrete(np.asarray([ratio, ratio + 5]), mass, q=q)
        inner = SmallLosses(one, ratio - 1, ratio + 1)
        assert abs(inner.shift - ratio) <= inner.doubt < 1e-10
        _, _, gain, error, _ = inner.masses(np.asarray([-1.0, 1.0]) * inner.doubt * 2)
        assert abs(gain[0]) <= error[0]
        assert inner.doubt >= 0.999 * one.rounding * abs(math.expm1(-ratio))
    # No small loss is refused.
    for ends in ((0.1, 0.2), (-3.0, -2.0)):
        with pytest.raises(Unresolved):
            SmallLosses(points(1.0), *ends)


def test_a_randomised_response_does_not_widen_rare_samplings():
    """All of its losses are small, whichever of them is the likeliest."""
    q, z, steps, delta, relation, truth = RUNS[2]
    response = acc.RandomizedResponse(1 - 1e-9)
    bound = acc.epsilon(acc.Composed([run(q, z, steps), response]), delta, relation)
    assert bound.upper - bound.lower < 5e-4 * bound.upper
    assert bound.upper >= truth * (1 - 1e-8)
    assert bound.lower <= truth * (1 + 1e-8) + 1e-8
