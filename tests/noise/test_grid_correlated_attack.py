"""Attacks on correlated noise on an integer grid: its keys, its rows, its sensitivity."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.clipping import rules
from jaxdp.noise import (
    Toeplitz,
    _cells,
    grid,
    grid_correlated,
    privatize_correlated_on_grid,
    sensitivity,
)
from jaxdp.noise._integers import made
from jaxdp.noise.participation import participation
from jaxdp.tickets import Ticket, simulated_key
from jaxdp.types import Summed
from tests.runs import small

ODD = {"a": jnp.zeros(()), "b": jnp.zeros((3, 0)), "c": jnp.zeros(17), "d": jnp.zeros((1, 5, 3))}
STRATEGY = Toeplitz((1.0, -0.5, 0.25), 5)


class Killed(BaseException):
    """The process, from outside."""


def mechanism(**changes):
    given = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 100}
    return jaxdp.dp_mf(**{**given, "steps": 8, "bands": 3, "noise": "grid", **changes})


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("noise", ["grid", "gaussian"])
@pytest.mark.parametrize("sampling", ["cyclic_poisson", "fixed_order"])
def test_a_multiplier_of_few_digits_has_the_noise_that_is_charged(kind, noise, sampling):
    """The fresh noise of float16(2.68) was rounded to 16 bits: 6e-4 below what was charged."""
    start = mechanism(noise=noise, sampling=sampling, strategy="banded")
    moved = sensitivity(start.strategy, participation(start.sampling, 100)).value
    for number in np.linspace(0.3, 3, 40):
        made_of = dataclasses.replace(start, noise_multiplier=kind(number))
        assert Fraction(made_of.fresh) >= Fraction(float(kind(number))) * Fraction(moved)
        assert made_of.fresh == np.float32(made_of.fresh)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_bound_of_few_digits_is_not_rounded_in_the_sensitivity(kind):
    """The box of float16(0.45) said a norm 1.8e-4 below that of a clipped record."""
    params = {"a": jnp.zeros(7), "b": jnp.zeros(3)}
    for number in np.linspace(0.1, 2, 50).astype(kind):
        exact = float(number)
        assert rules.CoordinateBox(number).l2(params) >= exact * math.sqrt(10)
        groups = rules.per_layer({"a": number, "b": number})
        assert groups.l2(params) == pytest.approx(exact * math.sqrt(2), rel=1e-15)


def traced(tx, params):
    """A compiled function from (state, key) to (what is released of sums of 0, the state after)."""

    @jax.jit
    def update(state, key):
        value = jax.tree.map(jnp.zeros_like, params)
        out, state = tx.update(Summed(value, jnp.float32(1.0)), state, params, key=key)
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(out)]), state

    return update


def test_leaves_of_odd_sizes_have_each_an_integer_of_their_own():
    """Scalars, nothing, 17 and 15: 33 coordinates of one stream, none of which comes twice."""
    tx = privatize_correlated_on_grid(STRATEGY, 1.5, 1.0)
    law = grid.law_for(1.5, 33, grid_correlated.carried(STRATEGY))
    c = float(grid.grid_scale(law, 1.5, 33, 1.0))
    state, part, seen = tx.init(ODD), grid_correlated.part_on_grid(STRATEGY), []
    rows, update = [np.zeros(33, object)] * 2, traced(tx, ODD)
    for step in range(5):
        key = simulated_key(jax.random.key(step), {part: 1.5}, step)
        found, state = update(state, key)
        coarse, fine = (np.asarray(x).astype(object) for x in made(key.long, 33, law, True))
        exact = 256 * coarse + fine + 128 * rows[-1] - 64 * rows[-2]
        rows.append(np.array([(int(z) + 128) // 256 for z in exact], dtype=object))
        np.testing.assert_allclose(found * c, rows[-1].astype(float), rtol=3e-7)
        seen += coarse.tolist()
    assert len(set(seen)) == len(seen)


def test_what_was_released_and_one_row_give_that_row_alone_away():
    """A state that leaks holds b - 1 rows: the noise of every later step is fresh all the same."""
    tx = privatize_correlated_on_grid(STRATEGY, 1.5, 1.0)
    params, part = {"w": jnp.zeros(500)}, grid_correlated.part_on_grid(STRATEGY)
    state, out, update = tx.init(params), [], traced(tx, params)
    for step in range(5):
        key = simulated_key(jax.random.key(step), {part: 1.5}, step)
        found, state = update(state, key)
        out.append(found)
    fresh = [out[0]]
    for step in range(1, 5):
        before = sum(c * out[step - j] for j, c in ((1, -0.5), (2, 0.25)) if step >= j)
        fresh.append(out[step] + before)
    np.testing.assert_allclose(np.std(fresh, axis=1), 1.5, rtol=0.15)
    assert np.abs(np.corrcoef(fresh) - np.eye(5)).max() < 0.2


def test_a_step_that_is_refused_in_the_middle_ends_the_release_for_good():
    """Skipped, repeated, rejected and rolled back: NaN, or the state it was rolled back to."""
    tx = privatize_correlated_on_grid(STRATEGY, 1.5, 1.0)
    params, part = {"w": jnp.zeros(40)}, grid_correlated.part_on_grid(STRATEGY)
    keys = [simulated_key(jax.random.key(t), {part: 1.5}, t) for t in range(5)]
    update = traced(tx, params)
    first, one = update(tx.init(params), keys[0])
    for state, key in ((one, keys[0]), (one, keys[2]), (tx.init(params), keys[1])):
        found, after = update(state, key)
        assert np.isnan(found).all()
        assert after.step == -1
        for later in keys:
            assert np.isnan(update(after, later)[0]).all()
    assert np.isfinite(first).all()


def test_two_worlds_are_as_far_apart_as_the_sensitivity_of_the_rounded_coefficients():
    """Coefficients that rounding made larger: the sensitivity before rounding would be too low."""
    steep = Toeplitz((1.0, 0.9999, 0.9999, 0.9999), 8)
    rough = Toeplitz((1.0, 0.50196, 0.50196), 8)
    for exact in (steep, rough):
        taken = jaxdp.noise.dyadic(exact)
        made_of = mechanism(strategy=taken, bands=None, sampling="fixed_order", batch_size=50)
        times = participation(made_of.sampling, 100)
        moved = sensitivity(taken, times).value
        column = np.zeros(8)
        for start in range(0, 8, 2):
            column += taken.matrix()[:, start]
        assert moved >= np.linalg.norm(column) * (1 - 1e-12)
        assert made_of.fresh >= moved
        with pytest.raises(ValueError, match="8 binary digits"):
            mechanism(strategy=exact, bands=None, sampling="fixed_order", batch_size=50)


def test_rounding_takes_a_whole_number_out_at_both_ends_of_32_bits():
    """(2) of Theorem 5 for rows near +-2^31, in Python integers."""
    rng = np.random.default_rng(0)
    edge = 2**31 - 1
    for weights in ([256, 128], [-255, 200, -64], [2**13, -(2**13)]):
        kept = np.concatenate(
            [rng.choice([edge, -edge - 1, 0, 1, -1, 65535, 65536, -65536], (len(weights), 200))]
        )
        coarse, fine = rng.integers(-(2**28), 2**28, 200), rng.integers(-(2**15), 2**15, 200)
        high = sum(w * (k >> 16) for w, k in zip(weights, kept, strict=True))
        low = sum(w * (k & 0xFFFF) for w, k in zip(weights, kept, strict=True))
        assert np.abs(low).max() < 2**30
        cells = [jnp.asarray(x.astype(np.int32)) for x in (coarse, fine, high, low)]
        found = _cells._row(cells[:2], tuple(cells[2:]), 8)
        back = sum(w * k.astype(object) for w, k in zip(weights, kept, strict=True))
        whole = [(256 * int(a) + int(b) - int(p) + 128) // 256 for a, b, p in
                 zip(coarse, fine, back, strict=True)]  # fmt: skip
        wrapped = [(n + 2**31) % 2**32 - 2**31 for n in whole]
        assert np.asarray(found).tolist() == wrapped


def test_no_key_of_a_run_that_is_killed_again_and_again_comes_twice(tmp_path, monkeypatch):
    keys, long = [], Ticket._long

    def spied(self):
        keys.append((self.step, long(self).tobytes()))
        return long(self)

    def kill_at(last):
        def progress(step, row):
            if step == last:
                raise Killed

        return progress

    monkeypatch.setattr(Ticket, "_long", spied)
    made_of = small.config(
        strategy="banded", bands=2, steps=6, batch_size=40, secure_noise=True, eval_every=2
    )
    for last in (1, 3, 4):
        with pytest.raises(Killed):
            small.go(tmp_path / "r", made_of, kill_at(last), seed=None)
    result = small.go(tmp_path / "r", made_of, seed=None)
    assert {step for step, _ in keys} == set(range(6))
    assert len(keys) > 6
    assert len({key for _, key in keys}) == len(keys)
    assert [entry.event for entry in result.ledger.entries] == [made_of.mechanism().event]
