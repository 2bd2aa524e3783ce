"""Attacks on noise on an integer grid: sensitivity, streams, epsilons, doors that pass over it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import (
    Toeplitz,
    _cells,
    dyadic,
    grid,
    grid_correlated,
    privatize,
    privatize_correlated_on_grid,
    privatize_on_grid,
)
from jaxdp.noise._integers import drawn
from jaxdp.noise._table import table
from jaxdp.optimizers import registry
from jaxdp.optimizers.adaptive import sgd
from jaxdp.tickets import ON_GRID, simulated_key
from jaxdp.types import Summed

KEY = simulated_key(jax.random.key(0), {ON_GRID: 1.0})
NUMBERS = {"l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 100}
DATA = jnp.ones((100, 3))


def loss_fn(w, example):
    return (example @ w - 1.0) ** 2


def step(mechanism, link):
    draw = mechanism.sampler(100).draw()
    summed, _ = mechanism.clipped_grad(loss_fn).sum(jnp.zeros(3), DATA, draw)
    return link.update(summed, link.init(jnp.zeros(3)), jnp.zeros(3))[0]


@pytest.mark.parametrize("kind", [np.float64, np.int32])
def test_a_sum_that_float32_rounds_again_is_refused(kind):
    """Rounding moved two float64 sums at a distance of 1e-10 by 2,048 cells, 63 being charged."""
    params = {"w": jnp.zeros(4000)}
    tx = privatize_on_grid(1.0, 1.0)
    with pytest.raises(ValueError, match="must be of float32, bfloat16, float16"):
        tx.update(Summed({"w": np.ones(4000, kind)}, 1.0), tx.init(params), params, key=KEY)


def test_integers_are_of_one_float32_whatever_computes_it_in_the_same_program():
    """A product that XLA contracted into the cut would have digits that no float32 sum has."""
    rng = np.random.default_rng(0)
    count = 4001
    a, b = (jnp.asarray(rng.standard_normal(count) * s, jnp.float32) for s in (10, 20))
    rows = jnp.asarray(rng.standard_normal((5, count)) * 30, jnp.float32)
    weights = jnp.asarray(rng.standard_normal(5), jnp.float32)
    law = grid.law_for(1.0, count)

    def whole(made, multiplier, l2, *args):
        c = grid.grid_scale(law, multiplier, count, l2)
        return _cells.on_grid(made(*args), c), c

    for made, args in (
        (lambda a, b: a * b, (a, b)),
        (lambda a, b: a * b + b, (a, b)),
        (lambda a, b: a / (b * b + 1.0), (a, b)),
        (lambda w, r: (w[:, None] * r).sum(0), (weights, rows)),
        (lambda w, r: w @ r, (weights, rows)),
        (lambda w, r: w[:1] @ r[:1], (weights, rows)),
    ):
        run = jax.jit(whole, static_argnums=0)
        found, c = run(made, jnp.float32(1.0), jnp.float32(1.0), *args)
        inside = np.abs(np.asarray(found, np.int64)) < 2**30 - 64
        cells = np.asarray(found, np.float64)[inside]
        near = np.float32(cells / float(c))
        each = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
        apart = [np.abs(x.astype(np.float64) * float(c) - cells) for x in each]
        assert inside.sum() > 3000
        assert np.min(apart, axis=0).max() <= 0.5 + 2.0**-23


def test_a_bad_sensitivity_releases_nothing():
    tx, params = privatize_on_grid(1.0, 1.0), jnp.zeros(5)
    for l2 in (0.0, -1.0, jnp.inf, jnp.nan, 1e-38, 3e38, 1e-45):
        summed = Summed(jnp.full(5, 1e6), jnp.float32(l2))
        assert np.isnan(tx.update(summed, tx.init(params), params, key=KEY)[0]).all(), l2
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        value = jnp.zeros(5).at[0].set(bad)
        out = tx.update(Summed(value, 1.0), tx.init(params), params, key=KEY)[0]
        assert np.isfinite(out).all()  # a public number in its place, with its noise


def test_a_threshold_is_decided_by_its_last_bit_beside_any_other_draws():
    tabled = table(2560, 16)
    rng = np.random.default_rng(1)
    slots = rng.integers(0, 2**16, 2000)
    parts = [tabled.first.astype(object) >> 16, *tabled.deeper.astype(object)]
    limits = [sum(int(p[s]) << (96 - 32 * n) for n, p in enumerate(parts)) for s in slots]
    off = rng.choice([-(2**64), -(2**32), -1, 0, 1, 2**32, 2**64], 2000)
    tried = [min(max(t + int(o), 0), 2**112 - 1) for t, o in zip(limits, off, strict=True)]
    first = np.asarray([(v >> 96) << 16 | int(s) for v, s in zip(tried, slots, strict=True)])
    deeper = [np.asarray([(v >> (64 - 32 * n)) % 2**32 for v in tried]) for n in range(3)]
    words = [jnp.asarray(each.astype(np.uint32)) for each in (first, *deeper)]
    wanted = [
        (int(s) if v < t else int(tabled.first[s]) % 2**16) - 2**15
        for v, t, s in zip(tried, limits, slots, strict=True)
    ]
    first, *deeper = words
    found = drawn(tabled, first[None], lambda lane: jnp.stack(deeper)[None, :, lane])
    assert np.asarray(found)[0].tolist() == wanted


@pytest.fixture
def far(monkeypatch):
    """A distance that shows in every epsilon."""
    monkeypatch.setattr(grid, "DISTANCE", 2e-11)


@pytest.mark.usefixtures("far")
def test_every_epsilon_pays_for_the_distance():
    budget = {"epsilon": 3.0, "delta": 1e-5, "steps": 100}
    plain = jaxdp.dp_sgd(**budget, **NUMBERS)
    made = jaxdp.dp_sgd(**budget, **NUMBERS, noise="grid")
    assert made.noise_multiplier > plain.noise_multiplier
    assert 2.99 < made.epsilon(100, 1e-5).upper <= 3.0
    same = jaxdp.dp_sgd(noise_multiplier=made.noise_multiplier, **NUMBERS)
    assert same.epsilon(100, 1e-5).upper < made.epsilon(100, 1e-5).upper
    trainer = jaxdp.Trainer(loss_fn, sgd(made, 0.1), None, DATA)
    state = trainer.init(jnp.zeros(3))
    for batch in trainer.batches(2):
        state, _ = trainer.step(state, batch)
    taken = made.epsilon(2, 1e-5).upper
    assert taken > same.epsilon(2, 1e-5).upper
    assert trainer.epsilon(1e-5).upper >= taken * (1 - 1e-9)
    assert trainer.ledger.epsilon(1e-5).upper >= taken * (1 - 1e-9)


def test_the_distance_of_groups_repetitions_and_epochs_adds_up():
    t = 1e-12
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
    run, whole = acc.Repeated(acc.GridNoise(step, t), 1000), acc.Repeated(step, 1000)
    for asked in (acc.delta, lambda e, at: acc.group_delta(e, at, 2)):
        more = asked(run, 1.0).upper - asked(whole, 1.0).upper
        assert more == pytest.approx((1 + math.e) * 1000 * t, rel=1e-2)
    assert acc.group_epsilon(run, 1e-5, 2).upper > acc.group_epsilon(whole, 1e-5, 2).upper
    nested = acc.GridNoise(acc.Repeated(acc.GridNoise(step, t), 500), 500 * t)
    again = acc.delta(nested, 1.0).upper - acc.delta(acc.Repeated(step, 500), 1.0).upper
    assert again == pytest.approx((1 + math.e) * 1000 * t, rel=1e-2)
    epochs = jaxdp.dp_sgd(noise_multiplier=1.0, **NUMBERS, sampling="allocation", noise="grid")
    ((event, _, _),) = epochs.events(0, 25)
    assert event.distance == 10 * grid.DISTANCE
    for bound in (acc.epsilon(run, 0.0), acc.mu_gdp(run)):
        assert bound.upper == math.inf
    with pytest.raises(acc.UnsupportedEventError, match="GridNoise"):
        acc.epsilon(acc.Tuned(run, acc.Geometric(0.1)), 1e-5)


def test_links_and_mechanisms_of_two_noises_do_not_meet():
    on_grid = jaxdp.dp_sgd(noise_multiplier=1.0, **NUMBERS, noise="grid")
    ordinary = jaxdp.dp_sgd(noise_multiplier=1.0, **NUMBERS)
    for mechanism, link in (
        (on_grid, privatize(1.0, 10)),
        (on_grid, ordinary.privatize()),
        (ordinary, on_grid.privatize()),
        (on_grid, privatize_on_grid(0.5, 10)),
    ):
        with pytest.raises(ValueError, match="charged for"):
            step(mechanism, link)
    ledger = jaxdp.Ledger(budget=acc.RenyiFilter(3.0, 1e-5))
    with pytest.raises(acc.UnsupportedEventError, match="GridNoise"):
        on_grid.sampler(100, ledger=ledger).draw()


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_no_algorithm_passes_over_noise_on_a_grid(name):
    """AdaDP as published made a mechanism of its own, with ordinary noise, and said nothing."""
    numbers = registry.Numbers(
        1.0, 1.0, 10, 100, 0.1, "poisson", key=jax.random.key(0), noise="grid"
    )
    if name in ("adadp-as-published", "sa-dpsgd-private"):
        with pytest.raises(ValueError, match="noise"):
            registry.build(name, numbers)
        return
    made = registry.build(name, numbers)
    assert made.mechanism.noise == "grid"
    assert made.noise is None
    assert made.energy is None
    assert made.mechanism.leak or isinstance(made.mechanism.event, acc.GridNoise)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("sampling", ["cyclic_poisson", "fixed_order"])
def test_a_correlated_run_pays_for_the_distance_of_every_step(sampling):
    asked = {"epsilon": 3.0, "delta": 1e-5, "steps": 8, "bands": 2, "strategy": "banded"}
    plain, made = (
        jaxdp.dp_mf(sampling=sampling, noise=noise, **asked, **NUMBERS)
        for noise in ("gaussian", "grid")
    )
    relation = "add_or_remove_one" if sampling == "cyclic_poisson" else "replace_special"
    relation = acc.Relation(relation)
    assert made.event.distance == 8 * 2e-11
    assert made.noise_multiplier >= plain.noise_multiplier
    assert made.epsilon(8, 1e-5, relation).upper <= 3.0
    same = dataclasses.replace(plain, noise_multiplier=made.noise_multiplier)
    assert same.epsilon(8, 1e-5, relation).upper < made.epsilon(8, 1e-5, relation).upper
    trainer = jaxdp.Trainer(loss_fn, made, optax.sgd(0.1), DATA)
    state = trainer.init(jnp.zeros(3))
    for batch in trainer.batches(1):  # the whole run is charged with its first step
        state, _ = trainer.step(state, batch)
    taken = made.epsilon(8, 1e-5, relation).upper
    assert trainer.epsilon(1e-5, relation).upper >= taken * (1 - 1e-9)


def test_sums_at_both_ends_of_the_grid_leave_the_noise_as_it_is():
    """Nothing of a sum is kept: what is taken back is noise, whatever overflowed before."""
    strategy = Toeplitz((1.0, -0.75, 0.5), 6)
    tx = privatize_correlated_on_grid(strategy, 1.0, 1.0)
    part = grid_correlated.part_on_grid(strategy)
    buffers = []
    for size in (0.0, 3e38, -3e38, np.nan):
        state = tx.init(jnp.zeros(5))
        for step in range(6):
            key = simulated_key(jax.random.key(step), {part: 1.0}, step)
            value = jnp.full(5, size if step % 2 else -size, jnp.float32)
            out, state = tx.update(Summed(value, 1.0), state, jnp.zeros(5), key=key)
            assert np.isfinite(out).all()
        buffers.append(np.asarray(state.buffers))
    assert all((each == buffers[0]).all() for each in buffers)


def test_coefficients_that_round_to_zero_are_charged_as_zero():
    """The sensitivity is the rounded strategy's, not that of the one that was asked for."""
    tiny = Toeplitz((1.0, 0.001, -0.0015), 12)
    made = jaxdp.dp_mf(1.0, strategy=dyadic(tiny), steps=12, noise="grid", **NUMBERS)
    assert made.strategy.coefficients == (1.0, 0.0, 0.0)
    assert made.fresh == pytest.approx(1.0, rel=1e-6)
    assert made.sampling.bands == 3  # more groups than are needed cost, and are safe
    both = [
        jaxdp.dp_mf(1.0, strategy=s, steps=12, noise="grid", **NUMBERS)
        for s in (dyadic(tiny), Toeplitz((1.0, -0.75, 0.5), 12))
    ]
    assert both[0].fresh < both[1].fresh
    norm = math.sqrt(1 + 0.75**2 + 0.5**2)
    assert norm <= both[1].fresh <= norm * (1 + 1e-5)
