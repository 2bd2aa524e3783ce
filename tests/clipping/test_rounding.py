"""Sums of which the rounding is bounded: every level, its constants, and one record's effect."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.leaves import Arrays, outer_sum, product
from jaxdp.clipping.rounding import UNIT
from jaxdp.types import Summed
from tests.clipping.test_rules import norm64
from tests.compiling import AS_USERS
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

as_users = functools.partial(jax.jit, compiler_options=AS_USERS)


def test_the_shares_of_all_blocks_fit_into_what_is_stated():
    # docs/proofs/clip_bound.md, Theorem 3: parameters whose blocks are equally large share one.
    classes = {rounding.ROWS: 2 * rounding.gamma(rounding.ROWS + 8)}
    for positions in range(2, 4 * rounding.TERMS):
        rows = rounding.rows_of_block(positions)
        terms = min(rounding.TERMS, rows * positions) + 24
        share = 2 * rounding.gamma(terms) * rounding.CANCELLED
        classes[rows] = max(classes.get(rows, 0.0), share)
    of_blocks = sum(size * share for size, share in classes.items())
    # Two blocks change: a record leaves, and the last of the draw takes its place.
    assert 0.9 * rounding.SHARE < 2 * of_blocks <= rounding.SHARE


@given(st.integers(1, 10_000))
def test_blocks_of_rows_are_as_small_as_their_positions_ask(positions):
    size = rounding.rows_of_block(positions)
    assert size.bit_count() == 1
    assert size * size * positions <= rounding.TERMS or size == 1


def test_cutting_and_halving_lose_no_row():
    # Corners of rows and blocks; every one is compiled.
    for rows, size in ((0, 4), (1, 1), (7, 9), (9, 9), (10, 9), (17, 4), (64, 8), (65, 8), (70, 1)):
        x = np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3)
        blocks = rounding.into_blocks(jnp.asarray(x), size)
        assert blocks.shape[1:] == (size, 3)
        np.testing.assert_array_equal(rounding.pairwise_sum(jnp.sum(blocks, axis=1)), x.sum(axis=0))
        total = rounding.sum_over_blocks(lambda block: jnp.sum(block, axis=0), jnp.asarray(x), size)
        np.testing.assert_array_equal(total, x.sum(axis=0))


@given(st.integers(0, 5_000), st.integers(1, 200))
def test_equal_blocks_hold_all_rows_and_no_more_than_they_may(rows, most):
    size = rounding.even_size(rows, most)
    assert 1 <= size <= most
    assert -(-rows // size) <= 2 * max(1, -(-rows // most))
    assert rounding.even_size(1000, 160) == 125  # divides


def test_squares_are_those_of_float64_and_never_below_their_error():
    for shape in ((7,), (3, 5), (40, 41, 3), (20_000,), (2, 50_000), (5, 0), ()):
        x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
        found, safe = rounding.square_norms(jnp.asarray(x))
        true = np.sum(np.square(x.astype(np.float64)).reshape(3, -1), axis=1)
        np.testing.assert_allclose(found, true, rtol=1e-5)
        assert np.all(np.asarray(safe, np.float64) * (1 + rounding.TOLERATED) >= true), shape


def test_inner_products_of_any_length():
    for size in (3, 1024, 1025, 5000):
        a, b = np.random.default_rng(1).normal(size=(2, 4, 3, size)).astype(np.float32)
        found, roundings = rounding.blocked_einsum("mtp,msp->mts", jnp.asarray(a), jnp.asarray(b))
        a, b = a.astype(np.float64), b.astype(np.float64)
        bound = rounding.gamma(roundings) * np.einsum("mtp,msp->mts", np.abs(a), np.abs(b))
        assert np.all(np.abs(found - np.einsum("mtp,msp->mts", a, b)) <= bound), size
        assert roundings < 1100


def test_products_over_positions():
    weights = np.float32([1.0, 0.5, 0.25])
    for positions in (1, 2, 100, 255, 600):
        a, b = np.random.default_rng(2).normal(size=(2, 3, 1, positions, 4)).astype(np.float32)
        found = product(jnp.asarray(a), jnp.asarray(b), jnp.asarray(weights))
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(found, np.einsum("m,mgtp,mgtq->gpq", weights, a, b), atol=1e-4)


def effect(rows, weights, removed, total):
    """How far the sum moved beyond what the removed row added, for a weighted sum's function."""
    kept = np.where(np.arange(len(weights)) == removed, np.float32(0.0), weights)
    ones, rows64 = jnp.ones(len(weights), bool), rows.astype(np.float64)
    found = [np.float64(total(jnp.asarray(rows), jnp.asarray(w), ones)) for w in (weights, kept)]
    return np.linalg.norm(found[0] - found[1] - float(weights[removed]) * rows64[removed])


@pytest.mark.parametrize("count", [600, 70_000])
def test_one_record_moves_the_rounding_of_the_others_by_no_more_than_its_share(count):
    total = as_users(lambda r, w, ones: Arrays(r).weighted_sum(w, ones, ones))
    for value in (1.0 / 3.0, 0.1):
        rows = np.full((count, 4), value, np.float32)
        weights = np.full(count, 1.0 / np.linalg.norm(rows[0]), np.float32)
        moved = max(effect(rows, weights, i, total) for i in (0, count // 2, count - 1))
        assert moved <= rounding.error_of_sum(count), value


def test_a_draw_larger_than_its_public_bound_is_refused_without_numbers():
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * x), jaxdp.clip(1.0), most_records=3)
    draw = sgd_of(1.0, 1.0, 5, 5, sampling="full_batch").sampler(5).draw()
    params, words = {"w": jnp.zeros(2)}, "most_records must be at least"
    of_a_draw = functools.partial(grad_fn, params, jnp.ones((5, 2)), draw)
    all_refused([(words, of_a_draw), (words, lambda: grad_fn(params, jnp.ones((4, 2)), "all"))])


def test_the_stated_sensitivity_counts_blocks_and_rows():
    """docs/proofs/clip_bound.md: a share for the blocks, and 24 roundings for every row."""
    assert rounding.error_of_sum(2**20) == rounding.SHARE + 24 / 16
    x = jnp.full((1, 4), 2.0)
    assert float(rounding.rounded_up(jnp.float32(1.0), jnp.float32(0.5))) > 1.49
    found, safe = rounding.square_norms(x * jnp.ones((1, 4)))
    assert float(found[0]) == 16.0
    assert float(safe[0]) >= 16.0


def roundings(passes):
    """docs/proofs/clip_bound.md: the roundings that a record moves, for each record on every device."""
    cells = [count for devices in passes for count in devices if count]
    each = [0 if count == 1 else count for count in cells]  # alone it is rounded nowhere
    two = sorted(each)[-2:]
    local = max(20 * max(each), 14 * sum(two) if len(two) == 2 else 0)
    added = sum(2 * (np.count_nonzero(devices) - 1) * sum(devices) for devices in passes)
    return local + added + 4 * sum(cells) * (len(passes) > 1)


def one_after_another(records, devices, rows):
    """Records on each device in passes of ``rows`` a device, full ones first."""
    left = records - rows * np.arange(-(-records // (rows * devices)) * devices)
    return np.clip(left, 0, rows).reshape(-1, devices).tolist()


@pytest.mark.parametrize("devices", [2, 3, 7, 8, 9, 16])
def test_what_devices_add_is_within_what_is_stated(devices):
    allowed = (rounding.error_of_sum(2**20, devices) - rounding.SHARE) * 16
    assert (allowed == 24) == (devices <= 8)
    for rows in (1, 2, 3, 8):
        for records in range(1, 3 * rows * devices + 1):
            passes = one_after_another(records, devices, rows)
            assert roundings(passes) <= allowed * records
    dealt = [[(n + d) // devices for d in range(devices)] for n in range(1, 4 * devices + 1)]
    for passes in (*([one] for one in dealt), *itertools.product(dealt, dealt)):
        assert roundings(passes) <= allowed * sum(map(sum, passes))
    some = (rounding.error_of_sum(2**20, devices, drawn=False) - rounding.SHARE) * 16
    assert some == 2 * devices + 22 >= 20 + 2 * (devices - 1) + 4


def test_no_draw_exceeds_the_public_bound():
    for batch_size in (1, 100, 500, 10_000):
        above = rounding.most_records(batch_size) - batch_size
        assert above**2 / (2 * (batch_size + above / 3)) > 1100, batch_size


def test_the_sensitivity_of_a_mechanism_is_the_one_that_sums_carry(linear):
    params, batch, loss_fn = linear
    mech = sgd_of(1.0, 0.5, 4, 40)
    summed = mech.clipped_grad(loss_fn)(params, batch(9), jnp.ones(9, bool))
    assert summed.l2 == mech.l2(params) == 0.5 * (1.0 + rounding.error_of_sum(1032))
    assert mech.l2(params) < 0.5 * 1.0147
    # A bound of this step takes the place of the rule's, also where it is larger.
    summed = mech.clipped_grad(loss_fn)(params, batch(9), "all", bound=jnp.float32(4.0))
    assert float(summed.l2) == pytest.approx(8 * mech.l2(params))


# Blocks' sums of 10 MiB and more: in four parts, in three of two groups, in one (509 is a prime).
@pytest.mark.parametrize(("groups", "p", "q"), [(1, 512, 1024), (2, 300, 1024), (1, 509, 1024)])
def test_sums_of_large_outer_products_are_those_of_float64(groups, p, q):
    a, b = (jax.random.normal(jax.random.key(n), (40, groups, n)) for n in (p, q))
    weights = jnp.linspace(0.5, 1.0, 40)
    found = jax.jit(outer_sum, static_argnums=1)((a, b, weights), 8)
    exact = [np.asarray(x, np.float64) for x in (a, b, weights)]
    wanted = np.einsum("mgp,mgq,m->gpq", *exact)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_long_positions_are_added_in_groups():
    # On either side of one, two and three groups of 32; every size is a compilation.
    for size in (1, 2, 31, 32, 33, 63, 64, 65, 97, 1000):
        terms = jnp.ones((2, size))
        np.testing.assert_array_equal(rounding.sum_last_axes(terms, 1), [size, size])
    assert rounding.roundings(1000) == 32 + math.ceil(1000 / 32)


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=8))
def test_two_halves_add_up(numbers):
    """docs/proofs/clip_bound.md, bfloat16: off by at most 256 units of every entry."""
    x = np.asarray(numbers, np.float32)
    high, low = jax.jit(rounding.split_bfloat16)(np.resize(x, 8))
    assert high.dtype == low.dtype == jnp.bfloat16
    both = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    exact = np.resize(x, 8).astype(np.float64)
    allowed = rounding.HALVED * rounding.UNIT * np.abs(exact) + 2.0**-125
    assert np.all(np.abs(both - exact) <= allowed)


# Norm and sum read the same numbers: XLA computes none of them again for one of the two. A cotangent
# ``p q - r`` with r the rounded product is zero, or what the product lost by rounding where
# multiplication and subtraction are fused. Computed anew for the sum, it may be one for the norm and
# the other for the sum: a record of norm 1e-18 added 5e-5, and as much more as p is larger. --------


def plain(params, e, part=lambda lost: lost):
    lost = part(e["p"] * e["q"] - e["r"])
    return jnp.sum((e["x"] @ params["w"]) * lost) + jnp.sum((e["x"] @ params["v"]) * lost)


def halved(params, e):
    return plain(params, e, lambda lost: jax.nn.relu(lost) - 0.5 * lost)


@pytest.mark.parametrize(
    ("loss_fn", "engine", "size"),
    [
        *((loss_fn, engine, 16) for loss_fn in (halved, plain) for engine in ("ghost", "vmap")),
        (halved, "ghost", 4),
        (plain, "auto", 4),
    ],
)
def test_what_is_lost_by_rounding_is_the_same_for_norm_and_sum(loss_fn, engine, size):
    p, q = np.random.default_rng(0).normal(size=(2, 8, size)).astype(np.float32) * 1e3
    rows = {"p": p, "q": q, "r": p * q, "x": np.full_like(p, 1e-3)}
    params = {"w": jnp.zeros((size, size)), "v": jnp.zeros((size, size))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5), engine)

    @as_users
    def run(params, rows, mask):
        summed, info = grad_fn.with_info(params, rows, mask)
        return summed.value, info.norms

    value, norms = run(params, rows, np.arange(8) == 3)
    assert norm64(value) == pytest.approx(float(norms[3]), rel=1e-5, abs=1e-16)


def test_every_reader_reads_what_was_written():
    @as_users
    def run(p, q, r):
        constants = {"constant": jnp.zeros(3), "count": jnp.arange(3)}
        return rounding.materialized({"lost": p * q - r, **constants})

    p, q = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    assert "while(" in run.lower(p, q, p * q).compile().as_text()
    found = run(p, q, p * q)
    assert found["lost"].shape == (8, 16)
    np.testing.assert_array_equal(found["constant"], np.zeros(3))
    np.testing.assert_array_equal(found["count"], np.arange(3))
    assert np.isnan(run(p * np.nan, q, p)["lost"]).all()


# Sums of many parts of one draw. ----------------------------------------------------------------

PARTS = 1_001


def parts(values):
    """Sums that are known to be of one draw, with these values."""
    ticket = sgd_of(1.0, 1.0, 20, 60).sampler(60).draw().ticket
    return [
        Summed({"w": jnp.full(3, v, jnp.float32)}, 1.0).carrying(ticket, passes={n})
        for n, v in enumerate(values)
    ]


def within(found, some, slack):
    exact = sum(Fraction(float(part.value["w"][0])) for part in some)
    off = max(abs(Fraction(float(v)) - exact) for v in np.asarray(found.value["w"]))
    return off <= Fraction(1.01 * UNIT) * abs(exact) + slack


def halves(some):
    while len(some) > 1:
        some = [sum(some[i + 1 : i + 2], some[i]) for i in range(0, len(some), 2)]
    return some[0]


ORDERS = {
    "one by one": lambda some: functools.reduce(lambda a, b: a + b, some),
    "from the other end": lambda some: functools.reduce(lambda a, b: b + a, some[::-1]),
    "by halves": halves,
}
SMALL = 0.95 * 2.0**-24


# Before: 1 + 1,000 * 0.95 * 2^-24 was 1, off by 950 roundings; the proof has room for four.
@pytest.mark.parametrize(
    ("order", "small"),
    [*((order, SMALL) for order in ORDERS), ("one by one", -0.45 * 2.0**-24), ("by halves", 0.3)],
)
def test_a_thousand_parts_are_rounded_as_one(order, small):
    some = parts([1.0] + [small] * (PARTS - 1))
    found = ORDERS[order](some)
    assert within(found, some, 0)
    assert found.ticket is some[0].ticket
    assert found.passes == set(range(PARTS))


def test_random_parts_are_rounded_as_one():
    some = parts(np.random.default_rng(0).normal(size=PARTS))
    assert within(ORDERS["one by one"](some), some, Fraction(2.0**-40))
