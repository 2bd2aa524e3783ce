"""The generator, the alias table and the law of the integers on the grid; docs/proofs/grid_noise.md.

Its numbers (Theorems 2, 3 and 5, and (1)) again, by other arithmetic.
"""

import decimal
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from mpmath import mpf
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.audit import audit_event
from jaxdp.noise import _integers, grid
from jaxdp.noise._integers import (
    DEEPER,
    IntegerLaw,
    alias_table,
    combine,
    integers,
    look_up,
    summation_error,
)
from tests.refusing import all_refused

TOTAL = 2**128
SIGMA = 2560
SMALL = IntegerLaw((3,), sigma=8, slot_bits=8)
WIDE = IntegerLaw((511,))
KEY = np.arange(8, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(3)


def plain_block(key, counter, nonce):
    """RFC 8439 in NumPy, [16, n]: written apart from the package."""
    start = np.zeros((16, len(counter)), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12], start[12], start[13:] = np.asarray(key)[:, None], counter, np.c_[nonce]
    x = start.copy()
    rounds = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    rounds += [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in rounds * 10:
        for i, j, k, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] += x[j]
            x[k] ^= x[i]
            x[k] = (x[k] << np.uint32(by)) | (x[k] >> np.uint32(32 - by))
    return x + start


def test_the_block_function_has_the_vectors_of_the_rfc():
    def found(key, counter, nonce):
        words = _integers.chacha20_block(
            jnp.asarray(key), jnp.asarray([counter], jnp.uint32), nonce
        )
        return np.stack(words)[:, 0].astype("<u4").tobytes().hex()

    key = np.frombuffer(bytes(range(32)), "<u4")
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4")
    # Section 2.3.2.
    assert found(key, 1, list(nonce)) == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    # Appendix A.1, vector 1.
    zeros = found(np.zeros(8, np.uint32), 0, (0, 0, 0))
    assert zeros.startswith("76b8e0ada0f13d90405d6ae55386bd28")
    # Keys of shards are the halves of a block that no stream has.
    made_of, both = np.asarray(_integers.derive_key(jnp.asarray(KEY), 5, 2)), 2**32 - 1
    assert (made_of == plain_block(KEY, np.array([5], np.uint32), [both, both, 2])[:8, 0]).all()


def test_a_key_of_64_bit_words_is_refused():
    """With x64 a simulated key had them: adding and rotating 64 bits is no ChaCha20.

    As are a factor that would leave gaps, and too many coordinates.
    """
    with jax.enable_x64(True):
        narrow, wide = jnp.zeros(8, jnp.uint32), jnp.zeros(8, jnp.uint64)
        at, far = jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int64)
        all_refused(
            [
                (
                    "key must be uint32, got uint64",
                    lambda: _integers.chacha20_block(wide, at, (0, 0, 0)),
                ),
                (
                    "must be uint32, got int64",
                    lambda: _integers.chacha20_block(narrow, far, (0, 0, 0)),
                ),
                ("factors must be below 1280", lambda: IntegerLaw((1300,))),
                ("sigma must be at most", lambda: alias_table(2560, 12)),
                ("at most 4294967296 coordinates", lambda: grid.integer_law(1.0, 2**32 + 1)),
                ("noise='gaussian'", lambda: grid.integer_law(1e6, 10**9)),
            ]
        )


def drawn_weights(sigma, bits):
    """Of 2^128, what the arrays of the alias table give to every slot."""
    found, share = alias_table(sigma, bits), TOTAL >> bits
    given = [0] * 2**bits
    rows = zip(found.first.tolist(), *found.deeper.tolist(), strict=True)
    for slot, (entry, *deep) in enumerate(rows):
        threshold = (entry >> bits << DEEPER) + (deep[0] << 64) + (deep[1] << 32) + deep[2]
        assert 0 <= threshold < share
        given[slot] += threshold
        given[entry & (2**bits - 1)] += share - threshold
    return given


def test_a_small_table_draws_the_gaussian_s_weights_within_the_distance():
    sigma, half, given = 8, 128, drawn_weights(8, 8)
    assert sum(given) == TOTAL
    assert given[1:] == given[1:][::-1]
    with decimal.localcontext(prec=60, Emin=-999999, Emax=999999):
        rho = [(-decimal.Decimal(z * z) / (2 * sigma * sigma)).exp() for z in range(half * 2)]
        norm = 2 * sum(rho) - 1
        off = [abs(decimal.Decimal(given[half + z]) / TOTAL - rho[z] / norm) for z in range(half)]
        tail = 2 * sum(rho[half:]) / norm
        distance = float((2 * sum(off) - off[0] + tail) / 2)
    assert 0 < distance <= alias_table(sigma, 8).distance < 1.1e-34


def test_the_joined_law_is_a_discrete_gaussian_within_the_distance():
    """And a Gaussian around any centre has one mass up to the gap."""
    given, half = drawn_weights(8, 8), 128
    law: dict[int, int] = {}
    for y, other in enumerate(given):
        for x, weight in enumerate(given):
            n = x - half + 3 * (y - half)
            law[n] = law.get(n, 0) + weight * other
    assert sum(law.values()) == TOTAL**2
    assert SMALL.std**2 == pytest.approx(64 * 10)
    with decimal.localcontext(prec=90, Emin=-999999, Emax=999999):
        rho = {n: (-decimal.Decimal(n * n) / decimal.Decimal(1280)).exp() for n in range(-900, 901)}
        norm = sum(rho.values())
        off = [abs(decimal.Decimal(law.get(n, 0)) / TOTAL**2 - r / norm) for n, r in rho.items()]
        found = float(sum(off) / 2)
    assert 1e-40 < found <= SMALL.distance < 1e-35
    for r in (0.7, 1.0, 1.3):
        ideal = r * math.sqrt(2 * math.pi)
        centres = np.linspace(0, 1, 41)
        sums = np.exp(-((np.arange(-60, 60)[:, None] - centres) ** 2) / (2 * r * r)).sum(axis=0)
        assert np.abs(sums / ideal - 1).max() <= summation_error(r) + 1e-15 * (r > 1)
    for digits in (1, 2**8):  # also with one more draw, which makes the integers finer
        finer = [IntegerLaw((digits, *law.factors)) for law in grid._LAWS]
        laws = grid._LAWS if digits == 1 else finer
        assert min(min(law.joint_widths) for law in laws) >= 2


@pytest.mark.parametrize(("sigma", "bits"), [(8, 8), (2560, 16)])
def test_every_bit_of_a_comparison_decides(sigma, bits):
    """Every draw is a lane, beside draws of any other kind."""
    found, low = alias_table(sigma, bits), 2**bits - 1
    off = [0, *(sign * 2**by for sign in (1, -1) for by in (0, 32, 64, 96))]
    slots = np.tile(np.random.default_rng(1).permutation(low + 1)[:256], len(off))
    deep, alias = found.deeper.astype(object)[:, slots], found.first[slots] & low
    lead = found.first[slots] >> bits
    threshold = (lead.astype(object) << 96) + (deep[0] << 64) + (deep[1] << 32) + deep[2]
    drawn_at = np.clip(threshold + np.repeat(np.array(off, object), 256), 0, (TOTAL >> bits) - 1)
    words = [
        slots + ((drawn_at >> 96) << bits),
        *(drawn_at >> by & (2**32 - 1) for by in (64, 32, 0)),
    ]
    arrays = [jnp.asarray(word.astype(np.uint32)) for word in words]
    # Two rows, so that what settles one leaves the other.
    first = jnp.stack([arrays[0], arrays[0] ^ np.uint32(1 << 31)])
    deeper = jnp.stack(arrays[1:], axis=-1)
    rows = np.asarray(look_up(found, first, lambda lane: jnp.stack([deeper[lane]] * 2)))
    one, other = rows + 2 ** (bits - 1)
    free = np.asarray(first[1]) >> bits
    assert (other == np.where(free < lead, slots, alias))[free != lead].all()
    assert (one == np.where(drawn_at < threshold, slots, alias)).all()
    assert (slots != alias).sum() > 1000


def test_moments_to_the_eighth_and_every_cell():
    rng, size = np.random.default_rng(5), 2**18
    words = jnp.asarray(rng.integers(0, 2**32, (2, size), np.uint32))
    deeper = jnp.asarray(rng.integers(0, 2**32, (2, size, 3), np.uint32))
    found = np.asarray(combine(SMALL, look_up(SMALL.table, words, lambda lane: deeper[:, lane])))
    z, s = np.arange(-700, 701), SMALL.std
    law = np.exp(-(z**2) / (2 * s * s))
    law /= law.sum()
    for power in range(1, 9):
        mean, square = (law @ (z / s) ** (k * power) for k in (1, 2))
        spread = math.sqrt((square - mean**2) / size)
        assert abs(np.mean((found / s) ** power) - mean) < 4.5 * spread
    cells = np.bincount(found + 700, minlength=1401)
    kept = law * size > 20
    seen = np.append(cells[kept], cells[~kept].sum())
    wanted = np.append(law[kept], law[~kept].sum()) * size
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


@functools.cache
def many():
    """Integers [8, 16, 2048] of KEY, which has ties that keep their slot."""
    size = 16 * 2048 * 8
    found = jax.jit(lambda key: integers(key, size, WIDE)[0])(jnp.asarray(KEY))
    return np.asarray(found).reshape(8, 16, 2048)


def plainly_drawn(counters, draw):
    """(draws [16, n] of alias_table() with all bits of a comparison; ties [16] that keep their slot)."""
    tabled, kept = alias_table(), np.zeros(16, int)
    first = plain_block(KEY, counters, [draw, 0, 0])
    slot, lead = first & 0xFFFF, first >> 16
    entry = tabled.first[slot]
    below = lead < entry >> 16
    for row, lane in zip(*np.nonzero(lead == entry >> 16), strict=True):
        at = counters[lane : lane + 1]
        deep = [int(plain_block(KEY, at, [draw, n, 0])[row, 0]) for n in (1, 2, 3)]
        below[row, lane] = deep < tabled.deeper[:, slot[row, lane]].tolist()
        kept[row] += below[row, lane]
    return np.where(below, slot, entry & 0xFFFF).astype(np.int64) - 2**15, kept


def test_integers_are_those_of_the_streams_by_place_and_a_tie_is_settled_by_its_own_lane():
    kept = np.zeros(16, int)
    for n, values in enumerate(many()):
        counters = np.arange(2048 * n, 2048 * (n + 1), dtype=np.uint32)
        (low, one), (high, other) = (plainly_drawn(counters, draw) for draw in range(2))
        assert (values == low + 511 * high).all()
        kept += one + other
    assert kept[1:].sum() >= 2
    assert abs(np.std(many()) / WIDE.std - 1) < 0.01
    # Two worlds are as far apart as the event says.
    found = many().reshape(-1)
    scores = found[:4000].astype(float), found[4000:8000].astype(float) + math.floor(WIDE.std)
    told = acc.GridNoise(acc.Gaussian(1.0), grid.DISTANCE)
    assert not audit_event(scores[1], scores[0], told).refuted
    assert audit_event(scores[1], scores[0], acc.GridNoise(acc.Gaussian(1.5), 0.0)).refuted


def test_the_law_has_as_little_noise_as_rounding_allows_and_its_finer_draw_changes_nothing():
    assert grid.integer_law(1.0, 10**6).factors == (204,)
    assert grid.integer_law(1.0, 124 * 10**6).draws == 2
    for count in (10, 10**6, 10**8, 2**32):
        law = grid.integer_law(1.0, count)
        assert Fraction(count) <= Fraction(law.std) ** 2 * Fraction(1, 256) ** 2
    assert IntegerLaw((3,), sigma=8, slot_bits=8).largest == 4 * 128
    assert grid._LAWS[-1].largest == 2**15 * (1 + 1250 * 33)
    key = jnp.asarray(KEY)
    coarse, fine = integers(key, 5000, WIDE, True)
    assert (integers(key, 5000, WIDE)[0] == coarse).all()
    three = integers(key, 5000, IntegerLaw((511, 2)))[0]
    assert (three == coarse + 511 * 2 * fine).all()  # it is the next draw of the same streams
    assert abs(np.std(fine) / SIGMA - 1) < 0.05


@pytest.fixture
def digits():
    with mpmath.workdps(60):
        yield


@functools.cache
def of_the_table():
    """Total variation from D(2560) of what the arrays of the alias table draw, nothing bounded."""
    given = drawn_weights(SIGMA, 16)
    rho = [mpmath.exp(-mpf(z * z) / (2 * SIGMA**2)) for z in range(2**15 + 1)]
    # The masses of all integers: Jacobi's identity, whose other terms are below 10^-50,000,000.
    norm = SIGMA * mpmath.sqrt(2 * mpmath.pi)
    inside = sum(
        abs(mpf(given[2**15 + z]) / TOTAL - rho[abs(z)] / norm) for z in range(-(2**15), 2**15)
    )
    beyond = 1 - (2 * sum(rho) - 1 - rho[-1]) / norm
    return (inside + beyond) / 2


def joint(r):
    """2 e(r), e the largest relative error of a sum over integers, with all of its terms."""
    return 4 * sum(mpmath.exp(-2 * (mpmath.pi * r * j) ** 2) for j in range(1, 9))


@functools.cache
def of_a_law(factors):
    """(distance from the discrete Gaussian, its variance, the largest integer), from the inside."""
    distance, variance, most = of_the_table(), mpf(SIGMA) ** 2, 2**15
    for factor in reversed(factors):
        r = SIGMA * mpmath.sqrt(variance / (SIGMA**2 + factor**2 * variance))
        distance += of_the_table() + joint(r)
        variance, most = SIGMA**2 + factor**2 * variance, 2**15 + factor * most
    return distance, variance, most


@pytest.mark.usefixtures("digits")
def test_no_law_is_farther_from_its_gaussian_than_a_step_is_charged_for():
    assert 0 < of_the_table() <= alias_table().distance < 1.1e-34
    for digits_of_a_row, told in ((0, 5.4e-34), (8, 6.5e-34)):
        finer, found = (2**digits_of_a_row,) if digits_of_a_row else (), []
        for law in grid._LAWS:
            found.append(of_a_law((*finer, *law.factors))[0] + joint(2))
            assert of_a_law(law.factors)[0] <= law.distance
        assert 0.85 * told < max(found) <= grid.distance(digits_of_a_row) < told
        assert grid.distance(digits_of_a_row) * 2**32 < grid.DISTANCE == 2.0**-78
    assert grid.COORDINATES == 2**32


def cases():
    """(coordinates, multiplier, growth, l2): anywhere, and where one law gives way to the next."""
    rng = np.random.default_rng(0)
    for n in range(90):
        d, m = int(2 ** rng.uniform(0, 32)), float(10 ** rng.uniform(-6, 6))
        if n % 3 == 0:
            law, share = grid._LAWS[n // 3 % 8], (2.0**-8, 2.0**-2)[n // 3 % 2]
            m = share * law.std / d**0.5 * (1 + (n % 9 - 3) * 2.0**-52)
        grown = 1.0 if n % 2 else float(1 + 10 ** rng.uniform(-3, 2.6))
        yield d, m, grown, float(np.float32(10 ** rng.uniform(-20, 20)))


@pytest.mark.usefixtures("digits")
def test_every_law_that_is_chosen_keeps_the_inequality_and_32_bits():
    kept, closest = set(), mpf(0)
    for d, m, grown, l2 in cases():
        try:
            law = grid.integer_law(m, d, grown)
        except ValueError:
            continue
        _, variance, most = of_a_law(law.factors)
        assert most == law.largest
        assert mpf(grown) * (most + 2**15 / mpf(2**8) + 1) < 2**31
        scale = float(grid.grid_scale(law, np.float32(m), d, np.float32(l2)))
        if math.isnan(scale):
            assert not 2.0**-99 < float(mpmath.sqrt(variance)) / m / l2 < 2.0**99
            continue
        left = mpf(m) * (mpf(scale) * mpf(l2) + mpmath.sqrt(d) * (1 + mpf(2) ** -22))
        assert left <= mpmath.sqrt(variance - 4)
        kept.add(law)
        closest = max(closest, left / mpmath.sqrt(variance - 4))
    assert len(kept) == len(grid._LAWS)
    assert closest > 1 - 2.0**-12
