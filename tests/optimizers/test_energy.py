"""Energies on private records: their bound, noise and charge, and that each judges once."""

import copy
import dataclasses
import itertools
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import OpenEnergy, PrivateEnergy, PublicEnergy, energy_mechanism
from tests.laws import are_uncorrelated, is_gaussian
from tests.optimizers.test_annealing import KEY, MECH, PUBLIC, first, words
from tests.refusing import all_refused

PARAMS = {"w": jnp.zeros(1)}


def private(rows=60, noise=2.0, bound=0.5, loss_fn=first, secret=None, ledger=None, batch=20):
    mech = energy_mechanism(noise, bound, batch, 60)
    data = jnp.linspace(-1.0, 1.0, rows)
    sampler = mech.sampler(rows, secret=secret, ledger=ledger, physical_batch_size=8)
    return PrivateEnergy(loss_fn, data, mech, sampler)


def nasty(params, example):
    """One record in eight would, unclipped, decide alone; one has no loss at all."""
    scale = jnp.where(example > 0.8, 1e6, 1.0)
    return scale * params["w"][0] + jnp.where(example < -0.9, jnp.nan, 0.0)


def test_a_private_energy_judges_the_first_candidate_for_one_event():
    """Its noisy difference to the initial parameters, 0.5 a record, is of the one draw."""
    ledger = jaxdp.Ledger()
    energy, tx = private(noise=1e-3, ledger=ledger), annealing(optax.identity(), KEY, 1e6)
    step, state = tx.update({"w": jnp.ones(1)}, tx.init(PARAMS), PARAMS, energy=energy.prepare())
    assert float(step["w"][0]) == 0.0
    assert (int(state.proposals), int(state.accepted)) == (1, 0)
    (entry,) = ledger.entries
    assert (ledger.steps, entry.event) == (1, energy.mechanism.event)
    mech = energy_mechanism(2.0, 0.5, 20, 60)
    assert mech.event == acc.PoissonSampled(acc.Gaussian(2.0), 20 / 60)
    assert mech.rule.l2(None) == 0.5
    assert 0.5 < jaxdp.Summed({"w": jnp.zeros(2)}, mech.l2(None)).l2 < 0.51


def rises(opened, keys):
    """Of no step, judged with each of the keys: noise alone."""
    one = lambda w: dataclasses.replace(opened, words=w).rise(PARAMS, PARAMS, jnp.zeros([]))[0]  # noqa: E731
    return jax.jit(jax.vmap(one))(keys)


@pytest.mark.parametrize("batch", [20, 1])
def test_a_private_energy_has_its_noise_also_on_an_empty_draw(batch):
    energy = private(batch=batch)
    if batch == 1:
        energy.sampler._sampling = jaxdp.sampling.Poisson(1e-12)
    drawn = energy.prepare().energy
    assert drawn.mask.any() == (batch != 1)
    draws = rises(drawn, words(5000))
    assert is_gaussian(draws, 2.0 * 0.5 / batch)
    assert not is_gaussian(draws, 2.0 * 0.5 / batch * 1.2)


def test_a_private_energy_is_charged_for_every_candidate_on_its_own_draws():
    ledger = jaxdp.Ledger()
    energy = private(ledger=ledger)
    algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=energy.mechanism)
    given = {"source": np.asarray(energy.data), "energy": energy, "physical_batch_size": 16}
    trainer = jaxdp.Trainer(first, algorithm, ledger=ledger, **given)
    state = trainer.init({"w": jnp.zeros(3)})
    for i, batch in enumerate(trainer.batches(4)):
        assert energy.sampler.step == i
        state, _ = trainer.step(state, batch)
    assert energy.sampler.step == trainer.algorithm.counts_of(state.opt_state)["proposals"] == 4
    assert ledger.steps == 8
    both = acc.Composed((acc.Repeated(MECH.event, 4), acc.Repeated(energy.mechanism.event, 4)))
    assert ledger.epsilon(1e-5).upper == pytest.approx(acc.epsilon(both, 1e-5).upper)
    assert algorithm.epsilon(4, 1e-5).upper == pytest.approx(ledger.epsilon(1e-5).upper)
    assert list(algorithm.events(2, 3)) == ["", "energy"]
    assert trainer.unverified() == []


def test_a_gradient_and_an_energy_of_one_secret_share_neither_draws_nor_noise():
    """Also with one mechanism for both, one ledger and one seed; nor does the coin tell a key."""
    secret, ledger = jaxdp.Secret.from_seed(6), jaxdp.Ledger()
    mech, params = energy_mechanism(1.0, 1.0, 20, 60), PARAMS
    sampler, other = (mech.sampler(60, ledger=ledger, secret=secret) for _ in range(2))
    energy, tx = PrivateEnergy(first, jnp.zeros(60), mech, other), mech.privatize()
    coin = annealing(optax.identity(), secret.jax_key("judge")).init(params).coin
    keys, noise, judged, same = {tuple(coin.tolist())}, [], [], 0
    summed, begun = jaxdp.Summed(params, 1.0), tx.init(params)
    of_gradient = jax.jit(lambda key: tx.update(summed, begun, params, key=key)[0]["w"][0])
    of_energy = jax.jit(lambda drawn: drawn.rise(params, params, jnp.zeros([]))[0])
    for _ in range(500):
        draw, drawn = sampler.draw(), energy.prepare()
        opened, key = drawn.spent(), draw.key()
        same += set(draw.indices[draw.mask]) == set(opened.indices[opened.mask])
        keys |= {tuple(opened.words.tolist()), tuple(key.words[0].tolist())}
        noise.append(float(of_gradient(key)))
        judged.append(float(of_energy(opened)))
    assert len(keys) == 1001
    assert same == 0
    assert all(is_gaussian(np.array(found) * 20, 1.0) for found in (noise, judged))
    assert not set(noise) & set(judged)
    for one, other in ((noise, judged), (judged[1:], judged[:-1]), (noise[1:], judged[:-1])):
        assert are_uncorrelated(one, other)
    assert ledger.steps == 1000


def test_a_drawn_energy_judges_once():
    tx, energy, spent = annealing(optax.identity(), KEY), private(), "ticket must be spent once"
    drawn, state = energy.prepare(), tx.init(PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS, energy=drawn)
    update = jaxdp.compile_update(optax.chain(MECH.privatize(), tx))
    again, begun = energy.prepare(), (MECH.privatize().init(PARAMS), state)
    keys = [MECH.simulated_key(jax.random.key(i)) for i in range(2)]
    updated = partial(update, PARAMS, begun, jaxdp.Summed(PARAMS, 1.0), energy=again)
    updated(key=keys[0])
    late = partial(tx.update, PARAMS, state, PARAMS, energy=drawn)
    all_refused([(spent, late, "by hand"), (spent, partial(updated, key=keys[1]), "compiled")])
    assert energy.sampler.ledger.steps == 2
    assert energy.sampler.ledger.unverified() == []
    energy.prepare().spent()  # opened by hand
    assert "the noise key went to an update" in energy.sampler.ledger.unverified()[0]


# Before: an energy that was opened outside a loop judged every candidate by one noise.
def test_an_energy_that_was_opened_once_judges_once():
    energies = private()
    energy, tx = energies.prepare().spent(), annealing(optax.sgd(0.1), KEY)
    one = jax.jit(lambda n, state, e: tx.update({"w": n * jnp.ones(1)}, state, PARAMS, energy=e))
    state, seen = tx.init(PARAMS), []
    for n in range(1, 4):
        _, state = one(n, state, energy)
        seen.append(float(state.energy))
    assert len(set(seen)) == 1  # of the first
    assert int(state.accepted) <= 1

    # Two candidates of a step, on the host and inside jit: their difference told the sum's.
    def both(energy, candidate):
        rises = [energy.rise({"w": n * candidate}, PARAMS, 0.0)[0] for n in (1, 2)]
        return rises[1] - rises[0]

    once = "energy must judge one candidate"
    for call in (both, jax.jit(both)):
        all_refused([(once, partial(call, energies.prepare().spent(), jnp.ones(1)))])
    # In two compiled updates, also where another came between.
    tx, data = optax.chain(MECH.privatize(), tx), energies.data
    update, state, sampler = jaxdp.compile_update(tx), tx.init(PARAMS), MECH.sampler(60)
    grad_fn = MECH.clipped_grad(first)
    one, other = energies.prepare().spent(), energies.prepare().spent()

    def judged(energy):
        update(PARAMS, state, grad_fn.sum(PARAMS, data, sampler.draw())[0], energy=energy)

    judged(one)
    judged(other)
    all_refused([(once, partial(judged, one))])


def test_a_drawn_energy_is_never_compiled_in():
    """Its draw and its noise would judge in every call."""
    tx, drawn = annealing(optax.identity(), KEY), private().prepare()
    step = jax.jit(lambda s, p: tx.update(p, s, p, energy=drawn))
    whole = optax.chain(MECH.privatize(), tx)
    update, key = jaxdp.compile_update(whole), MECH.simulated_key(jax.random.key(0))
    all_of_it = jax.jit(lambda s, p, k: update(p, s, jaxdp.Summed(p, 1.0), key=k, energy=drawn))
    inside = "energy must not be used inside jit"
    all_refused(
        [
            (inside, lambda: step(tx.init(PARAMS), PARAMS)),
            (inside, lambda: all_of_it(whole.init(PARAMS), PARAMS, key)),
        ]
    )
    assert not drawn.ticket.spent
    step = jax.jit(lambda s, p, e: tx.update(p, s, p, energy=e))
    with pytest.raises(TypeError, match="un-noised sum"):
        step(tx.init(PARAMS), PARAMS, drawn)
    assert int(step(tx.init(PARAMS), PARAMS, drawn.spent())[1].proposals) == 1


def test_an_energy_is_charged_to_the_ledger_of_the_gradient_and_that_it_is_public_is_said():
    """Before: each sampler made a ledger, the gradient's told nothing of the energy, nor of trust."""
    data, tx = jnp.zeros(60), optax.chain(MECH.privatize(), annealing(optax.sgd(0.1), KEY))
    update, grad_fn = jaxdp.compile_update(tx), MECH.clipped_grad(first)

    def judged(sampler, energy):
        summed, _ = grad_fn.sum(PARAMS, data, sampler.draw())
        update(PARAMS, tx.init(PARAMS), summed, energy=energy)

    apart, sampler = private().prepare(), MECH.sampler(60)
    all_refused(
        [("energy must be charged to the ledger of the sum", lambda: judged(sampler, apart))]
    )
    sampler = MECH.sampler(60)
    judged(sampler, private(ledger=sampler.ledger).prepare())
    assert sampler.ledger.steps == 2
    assert sampler.ledger.unverified() == []
    judged(sampler, PUBLIC)
    assert [PublicEnergy.ASSUMED in line for line in sampler.ledger.unverified()] == [True]
    # That of a trainer is the charged one, on its ledger.
    data, charged = np.zeros(60, np.float32), private().mechanism
    made = partial(jaxdp.Trainer, first, source=data)
    words, rows = "energy must be the one that the algorithm charges", []
    for event, energy in ((None, private()), (charged, PUBLIC), (charged, None)):
        algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=event)
        rows.append((words, partial(made, algorithm, energy=energy)))
    for other, mine in itertools.product((None, jaxdp.Ledger()), (None, jaxdp.Ledger())):
        energy = private(ledger=other)
        algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=energy.mechanism)
        apart = "must be drawn by a sampler with the trainer's"
        rows.append((apart, partial(made, algorithm, energy=energy, ledger=mine)))
    all_refused(rows)


def test_members_of_a_vmap_never_share_an_energys_noise():
    tx, opened = annealing(optax.identity(), KEY), private().prepare().spent()
    state = tx.init(PARAMS)

    def judged(w, words):
        energy = dataclasses.replace(opened, words=words)
        return tx.update({"w": w}, state, {"w": w}, energy=energy)[1].energy

    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(judged, (0, None))(jnp.zeros((2, 1)), opened.words)
    one = words(1)
    assert np.isnan(rises(opened, jnp.concatenate([one, one]))).all()
    assert np.isfinite(rises(opened, words(2))).all()


def test_what_is_no_energy_or_charges_another_event_is_refused():
    five, six = (energy_mechanism(1.0, 1.0, size, 50) for size in (5, 6))
    tx, of = annealing(optax.identity(), KEY), partial(partial, PrivateEnergy, first)
    made = partial(partial, annealing, optax.identity())
    rows = [
        ("temperature must be a", made(KEY, temperature=-1.0)),
        ("max_rejections must be a", made(KEY, max_rejections=0)),
        ("key must be a threefry key", made(7)),
        ("must be a finite number above 0", partial(energy_mechanism, 1.0, 0.0, 5, 50)),
        ("mechanism must be a Mechanism", of(jnp.zeros(3), None, None)),
        ("sampler must be", of(jnp.zeros(3), five, six.sampler(50))),
        ("data must hold the records that", of(jnp.zeros(10), five, five.sampler(50))),
    ]
    for bad in (first, None, lambda p: 0.0, private()):
        update = partial(tx.update, PARAMS, tx.init(PARAMS), PARAMS, energy=bad)
        rows.append(("energy must be a PublicEnergy", update, bad))
    # Drawn alike and noised less: the gradient's event would be too cheap.
    cheap, sampler = energy_mechanism(0.1, 0.5, 20, 60), MECH.sampler(60, ledger=jaxdp.Ledger())
    rows.append(("got one that charges", of(jnp.zeros(60), cheap, sampler)))
    # Before: independent noise of the size that is enough for correlated, at its price. In 60 steps
    # 4.38 was told where 17.5 was spent.
    of_root = {"strategy": "square_root", "sampling": "fixed_order"}
    ordered = jaxdp.dp_mf(1.0, 1.0, 10, 60, steps=60, **of_root)
    independent = "mechanism of an energy must have independent noise"
    all_refused([*rows, (independent, of(jnp.zeros(60), ordered, ordered.sampler(60)))])


def test_an_energy_hides_its_key_and_records_and_is_not_copied():
    """Before: a copy judged a second candidate with the noise of the first."""
    drawn = private().prepare()
    opened = drawn.spent()
    for shown in (repr(drawn), repr(opened)):
        assert str(int(opened.words[1])) not in shown
        assert "data" not in shown
        assert "indices" not in shown
    words = r"energy must not be copied, .* energy.prepare\(\).spent"
    ways = (copy.copy, copy.deepcopy, pickle.dumps)
    all_refused([(words, partial(way, opened), way) for way in ways], TypeError)


def test_the_sum_of_an_energy_is_of_clipped_differences_of_who_was_drawn():
    def total(values, mask, passes=1):
        rows = np.arange(len(values), dtype=np.int32).reshape(passes, -1)
        drawn = OpenEnergy(
            jnp.asarray(values, jnp.float32), rows, np.asarray(mask, bool).reshape(passes, -1),
            np.int32(passes), None, lambda p, example: p * example, 1.0, 1.0, 0.0, 4,
        )  # fmt: skip
        return float(drawn.clipped_sum(jnp.float32(2.0), jnp.float32(1.0)))

    everybody = [True] * 4
    assert total([0.25, 9.0, 0.5, 0.0], everybody) == 1.75  # candidate less current, at most 1
    assert total([0.25, -9.0, 0.5, np.nan], everybody) == -0.25
    assert total([0.25, 9.0, 0.5, -0.25], [True, False, False, True]) == 0.0
    assert total([0.25, 0.25, 0.5, 0.5], everybody, passes=2) == 1.5
    mechanism = energy_mechanism(1.0, 1.0, 60, 60)
    sampler = mechanism.sampler(60, physical_batch_size=16)
    energy = PrivateEnergy(lambda p, example: p * example, jnp.ones(60), mechanism, sampler)
    drawn = energy.prepare().energy
    assert float(drawn.clipped_sum(jnp.float32(1.5), jnp.float32(1.0))) == 30.0
    # So one record moves the energy by at most its bound.
    drawn = private(loss_fn=nasty).prepare().energy
    now, then = PARAMS, {"w": jnp.ones(1)}
    sum_of = jax.jit(lambda drawn: drawn.clipped_sum(then, now))
    total, furthest = float(sum_of(drawn)), 0.0
    for i, j in zip(*np.nonzero(drawn.mask), strict=True):
        fewer = drawn.mask.copy()
        fewer[i, j] = False
        without = dataclasses.replace(drawn, mask=fewer)
        furthest = max(furthest, abs(total - float(sum_of(without))))
    assert furthest <= 0.5 * (1 + 1e-6)
    assert furthest > 0.49
