"""The generator, the alias table and the law of the integers on the grid."""

import decimal
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.auditing.events import audit_event
from jaxdp.noise import _chacha, grid
from jaxdp.noise._integers import Sum, drawn, gap, integers, summed
from jaxdp.noise._table import DEEPER, table, weights

TOTAL = 2**128
SMALL = Sum((3,), sigma=8, slot_bits=8)
KEY = np.arange(8, dtype=np.uint32) * np.uint32(0x9E3779B9)


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
    key = np.frombuffer(bytes(range(32)), "<u4")
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4")
    found = np.stack(_chacha.block(jnp.asarray(key), jnp.asarray([1], jnp.uint32), list(nonce)))
    # Section 2.3.2.
    wanted = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert found[:, 0].astype("<u4").tobytes().hex() == wanted
    # Appendix A.1, vector 1.
    zeros = _chacha.block(jnp.zeros(8, jnp.uint32), jnp.zeros(1, jnp.uint32), (0, 0, 0))
    assert (
        np.stack(zeros)[:4, 0].astype("<u4").tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    )


def test_keys_of_shards_are_the_halves_of_a_block_that_no_stream_has():
    made = np.asarray(_chacha.subkey(jnp.asarray(KEY), 5, 2))
    both = 2**32 - 1
    assert (made == plain_block(KEY, np.array([5], np.uint32), [both, both, 2])[:8, 0]).all()


@pytest.mark.parametrize(("sigma", "bits"), [(8, 8), (2560, 16)])
def test_the_table_draws_its_weights_exactly(sigma, bits):
    found, given = table(sigma, bits), weights(sigma, bits)
    assert sum(given) == TOTAL
    assert given[1:] == given[1:][::-1]
    share, drawn_weights = TOTAL >> bits, [0] * len(given)
    for slot, entry in enumerate(found.first.tolist()):
        deep = [int(word) << (64 - 32 * n) for n, word in enumerate(found.deeper[:, slot])]
        threshold = (entry >> bits << DEEPER) + sum(deep)
        assert 0 <= threshold < share
        drawn_weights[slot] += threshold
        drawn_weights[entry & (2**bits - 1)] += share - threshold
    assert drawn_weights == given


@pytest.mark.parametrize(("sigma", "bits"), [(8, 8), (2560, 16)])
def test_the_weights_are_the_gaussian_s_within_the_distance(sigma, bits):
    half, given = 2 ** (bits - 1), weights(sigma, bits)
    with decimal.localcontext(prec=60, Emin=-999999, Emax=999999):
        rho = [(-decimal.Decimal(z * z) / (2 * sigma * sigma)).exp() for z in range(half * 2)]
        norm = 2 * sum(rho) - 1
        off = [abs(decimal.Decimal(given[half + z]) / TOTAL - rho[z] / norm) for z in range(half)]
        tail = 2 * sum(rho[half:]) / norm
        distance = float((2 * sum(off) - off[0] + tail) / 2)
    assert 0 < distance <= table(sigma, bits).distance < 1.1e-34


def test_the_joined_law_is_a_discrete_gaussian_within_the_distance():
    given, half = weights(8, 8), 128
    law: dict[int, int] = {}
    for y, other in enumerate(given):
        for x, weight in enumerate(given):
            n = x - half + 3 * (y - half)
            law[n] = law.get(n, 0) + weight * other
    assert sum(law.values()) == TOTAL**2
    square = SMALL.std**2
    assert square == pytest.approx(64 * 10)
    with decimal.localcontext(prec=90, Emin=-999999, Emax=999999):
        rho = {n: (-decimal.Decimal(n * n) / decimal.Decimal(1280)).exp() for n in range(-900, 901)}
        norm = sum(rho.values())
        off = [abs(decimal.Decimal(law.get(n, 0)) / TOTAL**2 - r / norm) for n, r in rho.items()]
        found = float(sum(off) / 2)
    assert 1e-40 < found <= SMALL.distance < 1e-35


def test_a_gaussian_around_any_centre_has_one_mass_up_to_the_gap():
    for r in (0.7, 1.0, 1.3):
        ideal = r * math.sqrt(2 * math.pi)
        centres = np.linspace(0, 1, 41)
        sums = np.exp(-((np.arange(-60, 60)[:, None] - centres) ** 2) / (2 * r * r)).sum(axis=0)
        assert np.abs(sums / ideal - 1).max() <= gap(r) + 1e-15 * (r > 1)
    assert grid.distance() * grid.COORDINATES <= grid.DISTANCE
    assert min(min(law.joints) for law in grid._LAWS) >= 2


def test_a_factor_that_would_leave_gaps_is_refused():
    with pytest.raises(ValueError, match="factors must be below 1280"):
        Sum((1300,))
    with pytest.raises(ValueError, match="sigma must be at most"):
        table(2560, 12)


@pytest.mark.parametrize("off", [-(2**96), -(2**64), -(2**32), -1, 0, 1, 2**32, 2**64, 2**96])
def test_every_bit_of_a_comparison_decides(off):
    found, bits = table(8, 8), 8
    deep = found.deeper.astype(object)
    lead, alias = found.first >> bits, found.first & 255
    threshold = (lead.astype(object) << 96) + (deep[0] << 64) + (deep[1] << 32) + deep[2]
    slots = np.arange(256)
    drawn_at = np.clip(threshold + off, 0, 2**120 - 1)
    words = [
        slots + ((drawn_at >> 96) << bits),
        *(drawn_at >> by & (2**32 - 1) for by in (64, 32, 0)),
    ]
    arrays = [jnp.asarray(word.astype(np.uint32)) for word in words]
    # Every slot is a lane; and two rows, so that what settles one leaves the other.
    first = jnp.stack([arrays[0], arrays[0] ^ np.uint32(1 << 31)])
    deeper = jnp.stack(arrays[1:], axis=-1)
    rows = np.asarray(drawn(found, first, lambda lane: jnp.stack([deeper[lane]] * 2))) + 128
    made, other = rows
    free = np.asarray(first[1]) >> bits
    assert (other == np.where(free < lead, slots, alias))[free != lead].all()
    wanted = np.where(drawn_at < threshold, slots, alias)
    assert (made == wanted).all()
    assert (wanted != np.where(drawn_at < threshold, alias, slots)).sum() > 100


def test_moments_to_the_eighth_and_every_cell():
    rng = np.random.default_rng(5)
    size = 2**19

    words = jnp.asarray(rng.integers(0, 2**32, (2, size), np.uint32))
    deeper = jnp.asarray(rng.integers(0, 2**32, (2, size, 3), np.uint32))
    made = np.asarray(summed(SMALL, drawn(SMALL.table, words, lambda lane: deeper[:, lane])))
    z, s = np.arange(-700, 701), SMALL.std
    law = np.exp(-(z**2) / (2 * s * s))
    law /= law.sum()
    for power in range(1, 9):
        mean, square = (law @ (z / s) ** (k * power) for k in (1, 2))
        spread = math.sqrt((square - mean**2) / size)
        assert abs(np.mean((made / s) ** power) - mean) < 4.5 * spread
    cells = np.bincount(made + 700, minlength=1401)
    kept = law * size > 20
    seen = np.append(cells[kept], cells[~kept].sum())
    wanted = np.append(law[kept], law[~kept].sum()) * size
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


@pytest.fixture(scope="module")
def made():
    return np.asarray(jax.jit(lambda key: integers(key, 8000, Sum((511,))))(jnp.asarray(KEY)))


def plainly_drawn(key, counters, draw):
    """Draws [16, n] of table() with all bits of a comparison, in Python integers."""
    tabled, levels = table(), [plain_block(key, counters, [draw, n, 0]) for n in range(4)]
    words = [level.astype(object) for level in levels]
    slot = levels[0] & 0xFFFF
    entry = tabled.first[slot].astype(object)
    deep = [part[slot].astype(object) for part in tabled.deeper]
    found = ((words[0] >> 16) << 96) + (words[1] << 64) + (words[2] << 32) + words[3]
    threshold = ((entry >> 16) << 96) + (deep[0] << 64) + (deep[1] << 32) + deep[2]
    kept = ((words[0] >> 16) == (entry >> 16)) & (found < threshold)
    return np.where(found < threshold, slot, entry & 0xFFFF).astype(np.int64) - 2**15, kept


def test_integers_are_those_of_the_streams_by_place(made):
    values = [plainly_drawn(KEY, np.arange(500, dtype=np.uint32), draw)[0] for draw in range(2)]
    assert (made == (values[0] + 511 * values[1]).reshape(-1)).all()
    assert abs(np.std(made) / Sum((511,)).std - 1) < 0.05


def test_a_tie_is_settled_by_the_words_of_its_own_lane():
    key, size = KEY + np.uint32(3), 16 * 2048 * 8  # a key with ties that keep their slot
    found = np.asarray(jax.jit(lambda key: integers(key, size, Sum((511,))))(jnp.asarray(key)))
    kept = np.zeros(16, int)
    for n, values in enumerate(found.reshape(8, 16, 2048)):
        counters = np.arange(2048 * n, 2048 * (n + 1), dtype=np.uint32)
        draws = [plainly_drawn(key, counters, draw) for draw in range(2)]
        assert (values == draws[0][0] + 511 * draws[1][0]).all()
        kept += sum(each[1].sum(axis=1) for each in draws)
    assert kept[1:].sum() >= 2


def test_two_worlds_are_as_far_apart_as_the_event_says(made):
    law = Sum((511,))
    scores = made[:4000].astype(float), made[4000:].astype(float) + math.floor(law.std)
    told = acc.GridNoise(acc.Gaussian(1.0), grid.DISTANCE)
    assert not audit_event(scores[1], scores[0], told).refuted
    assert audit_event(scores[1], scores[0], acc.GridNoise(acc.Gaussian(1.5), 0.0)).refuted


def test_the_law_has_as_little_noise_as_rounding_allows():
    assert grid.law_for(1.0, 10**6).factors == (204,)
    assert grid.law_for(1.0, 124 * 10**6).draws == 2
    for count in (10, 10**6, 10**8, 2**32):
        law = grid.law_for(1.0, count)
        assert Fraction(count) <= Fraction(law.std) ** 2 * Fraction(1, 256) ** 2
    with pytest.raises(ValueError, match="at most 4294967296 coordinates"):
        grid.law_for(1.0, 2**32 + 1)
    with pytest.raises(ValueError, match="noise='gaussian'"):
        grid.law_for(1e6, 10**9)
