"""Energies on private records: their bound, noise and charge, and that each judges once."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import OpenEnergy, PrivateEnergy, energy_mechanism
from tests.laws import are_uncorrelated, is_gaussian
from tests.optimizers.test_annealing import KEY, MECH, PUBLIC, first, words


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
    energy = private(noise=1e-3, ledger=ledger)
    tx, params = annealing(optax.identity(), KEY, temperature=1e6), {"w": jnp.zeros(1)}
    step, state = tx.update({"w": jnp.ones(1)}, tx.init(params), params, energy=energy.prepare())
    assert float(step["w"][0]) == 0.0
    assert (int(state.proposals), int(state.accepted)) == (1, 0)
    assert ledger.steps == 1
    assert acc.Composed((energy.mechanism.event,)) == acc.Composed(
        tuple(entry.event for entry in ledger.entries)
    )


def test_energy_events_are_those_of_the_mechanism():
    mech = energy_mechanism(2.0, 0.5, 20, 60)
    assert mech.event == acc.PoissonSampled(acc.Gaussian(2.0), 20 / 60)
    assert mech.rule.l2(None) == 0.5
    assert 0.5 < jaxdp.Summed({"w": jnp.zeros(2)}, mech.l2(None)).l2 < 0.51


def test_one_record_moves_the_private_energy_by_at_most_its_bound():
    drawn = private(loss_fn=nasty).prepare().energy
    now, then = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
    sum_of = jax.jit(lambda drawn: drawn.clipped_sum(then, now))
    total, furthest = float(sum_of(drawn)), 0.0
    for i, j in zip(*np.nonzero(drawn.mask), strict=True):
        fewer = drawn.mask.copy()
        fewer[i, j] = False
        without = dataclasses.replace(drawn, mask=fewer)
        furthest = max(furthest, abs(total - float(sum_of(without))))
    assert furthest <= 0.5 * (1 + 1e-6)
    assert furthest > 0.49


def rises(opened, keys):
    """Of no step, judged with each of the keys: noise alone."""
    now = {"w": jnp.zeros(1)}
    one = lambda w: dataclasses.replace(opened, words=w).rise(now, now, jnp.zeros([]))[0]  # noqa: E731
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
    trainer = jaxdp.Trainer(
        first,
        algorithm,
        source=np.asarray(energy.data),
        ledger=ledger,
        energy=energy,
        physical_batch_size=16,
    )
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
    mech, params = energy_mechanism(1.0, 1.0, 20, 60), {"w": jnp.zeros(1)}
    energy = PrivateEnergy(
        first, jnp.zeros(60), mech, mech.sampler(60, ledger=ledger, secret=secret)
    )
    sampler = mech.sampler(60, ledger=ledger, secret=secret)
    coin = annealing(optax.identity(), secret.jax_key("judge")).init(params).coin
    keys, noise, judged, same = {tuple(coin.tolist())}, [], [], 0
    of_gradient = jax.jit(
        lambda key: mech.privatize().update(
            jaxdp.Summed(params, 1.0), mech.privatize().init(params), params, key=key
        )[0]["w"][0]
    )
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
    assert is_gaussian(np.array(noise) * 20, 1.0)
    assert is_gaussian(np.array(judged) * 20, 1.0)
    assert not set(noise) & set(judged)
    assert are_uncorrelated(noise, judged)
    assert are_uncorrelated(judged[1:], judged[:-1])
    assert are_uncorrelated(noise[1:], judged[:-1])
    assert ledger.steps == 1000


def test_a_drawn_energy_judges_once():
    tx, params = annealing(optax.identity(), KEY), {"w": jnp.zeros(1)}
    energy = private()
    drawn, state = energy.prepare(), tx.init(params)
    _, state = tx.update(params, state, params, energy=drawn)
    with pytest.raises(ValueError, match="ticket must be spent once"):
        tx.update(params, state, params, energy=drawn)
    update = jaxdp.compile_update(optax.chain(MECH.privatize(), tx))
    again, begun = energy.prepare(), (MECH.privatize().init(params), state)
    keys = [MECH.simulated_key(jax.random.key(i)) for i in range(2)]
    update(params, begun, jaxdp.Summed(params, 1.0), key=keys[0], energy=again)
    with pytest.raises(ValueError, match="ticket must be spent once"):
        update(params, begun, jaxdp.Summed(params, 1.0), key=keys[1], energy=again)
    assert energy.sampler.ledger.steps == 2
    assert energy.sampler.ledger.unverified() == []


def test_a_drawn_energy_is_never_compiled_in():
    """Its draw and its noise would judge in every call."""
    tx, drawn, params = annealing(optax.identity(), KEY), private().prepare(), {"w": jnp.zeros(1)}
    step = jax.jit(lambda s, p: tx.update(p, s, p, energy=drawn))
    with pytest.raises(ValueError, match="energy must not be used inside jit"):
        step(tx.init(params), params)
    whole = optax.chain(MECH.privatize(), tx)
    update, key = jaxdp.compile_update(whole), MECH.simulated_key(jax.random.key(0))
    step = jax.jit(lambda s, p, k: update(p, s, jaxdp.Summed(p, 1.0), key=k, energy=drawn))
    with pytest.raises(ValueError, match="energy must not be used inside jit"):
        step(whole.init(params), params, key)
    assert not drawn.ticket.spent
    with pytest.raises(TypeError, match="un-noised sum"):
        jax.jit(lambda s, p, e: tx.update(p, s, p, energy=e))(tx.init(params), params, drawn)
    step = jax.jit(lambda s, p, e: tx.update(p, s, p, energy=e))
    assert int(step(tx.init(params), params, drawn.spent())[1].proposals) == 1


def test_an_energy_opened_by_hand_is_on_the_list():
    energy = private()
    energy.prepare().spent()
    assert "the noise key went to an update" in energy.sampler.ledger.unverified()[0]


def test_the_energy_must_be_the_one_that_is_charged():
    data, charged = np.zeros(60, np.float32), private().mechanism
    for event, energy in ((None, private()), (charged, PUBLIC), (charged, None)):
        algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=event)
        with pytest.raises(ValueError, match="energy must be the one that the algorithm charges"):
            jaxdp.Trainer(first, algorithm, source=data, energy=energy)


def test_the_energy_is_charged_to_the_trainers_ledger():
    data = np.zeros(60, np.float32)
    for other in (None, jaxdp.Ledger()):
        energy = private(ledger=other)
        algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=energy.mechanism)
        for mine in (None, jaxdp.Ledger()):
            with pytest.raises(ValueError, match="must be drawn by a sampler with the trainer's"):
                jaxdp.Trainer(first, algorithm, source=data, ledger=mine, energy=energy)


def test_an_energy_is_never_charged_as_the_gradient():
    """Drawn alike and noised less: the gradient's event would be too cheap."""
    cheap = energy_mechanism(0.1, 0.5, 20, 60)
    with pytest.raises(ValueError, match="got one that charges"):
        PrivateEnergy(first, jnp.zeros(60), cheap, MECH.sampler(60, ledger=jaxdp.Ledger()))


def test_members_of_a_vmap_never_share_an_energys_noise():
    tx, opened = annealing(optax.identity(), KEY), private().prepare().spent()
    state = tx.init({"w": jnp.zeros(1)})

    def judged(w, words):
        energy = dataclasses.replace(opened, words=words)
        return tx.update({"w": w}, state, {"w": w}, energy=energy)[1].energy

    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(judged, (0, None))(jnp.zeros((2, 1)), opened.words)
    one = words(1)
    assert np.isnan(rises(opened, jnp.concatenate([one, one]))).all()
    assert np.isfinite(rises(opened, words(2))).all()


def test_a_bare_function_is_no_energy():
    tx, params = annealing(optax.identity(), KEY), {"w": jnp.zeros(1)}
    state = tx.init(params)
    for bad in (first, None, lambda p: 0.0, private()):
        with pytest.raises(ValueError, match="energy must be a PublicEnergy"):
            tx.update(params, state, params, energy=bad)


def of(data, mechanism, sampler):
    return lambda: PrivateEnergy(first, data, mechanism, sampler)


FIVE, SIX = (energy_mechanism(1.0, 1.0, size, 50) for size in (5, 6))
REFUSED = [
    (lambda: annealing(optax.identity(), KEY, temperature=-1.0), "temperature must be a"),
    (lambda: annealing(optax.identity(), KEY, max_rejections=0), "max_rejections must be a"),
    (lambda: annealing(optax.identity(), 7), "key must be a threefry key"),
    (lambda: energy_mechanism(1.0, 0.0, 5, 50), "must be a finite number above 0"),
    (of(jnp.zeros(3), None, None), "mechanism must be a Mechanism"),
    (of(jnp.zeros(3), FIVE, SIX.sampler(50)), "sampler must be"),
    (of(jnp.zeros(10), FIVE, FIVE.sampler(50)), "data must hold the records that"),
]


def test_bad_input():
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            pytest.fail(f"{message}: not refused, {make()}")


def test_repr_hides_the_key_and_the_records():
    drawn = private().prepare()
    opened = drawn.spent()
    for shown in (repr(drawn), repr(opened)):
        assert str(int(opened.words[1])) not in shown
        assert "data" not in shown
        assert "indices" not in shown


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


def test_an_energy_opened_by_hand_is_not_copied():
    """Before: a copy judged a second candidate with the noise of the first."""
    opened, words = private().prepare().spent(), "energy must not be copied, .* energy.prepare"
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=rf"{words}\(\).spent"):
            way(opened)
