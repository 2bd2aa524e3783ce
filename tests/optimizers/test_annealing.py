"""Simulated annealing, and the energies that judge its candidates.

What is taken and what a rejection restores; every candidate is charged. Of energies on private
records: their bound, noise and charge, and that each judges once.
"""

import copy
import dataclasses
import itertools
import json
import pickle
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.ledger.seeds import Secret
from jaxdp.noise import PrivatizeState
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import DrawnEnergy, PrivateEnergy, PublicEnergy, energy_mechanism
from jaxdp.papers.sa_dpsgd import sa_dpsgd_as_published
from tests.laws import are_uncorrelated, is_binomial, is_gaussian
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused, refused
from tests.runs import small

KEY = jax.random.key(3)
MECH = sgd_of(1.0, 1.0, 20, 60)


def first(params, example):
    """Energy: the first parameter, whatever the examples."""
    return params["w"][0] + 0.0 * example


PUBLIC = PublicEnergy(first, jnp.zeros(4))


def candidates(tx, moves, energy=PUBLIC, params=None):
    """Drives the annealer with given moves; returns parameters and states."""
    params = {"w": jnp.zeros(1)} if params is None else params
    state, seen = tx.init(params), []
    update = jax.jit(lambda u, s, p: tx.update(u, s, p, energy=energy))
    for move in moves:
        step, state = update({"w": jnp.full(1, move)}, state, params)
        params = optax.apply_updates(params, step)
        seen.append((float(params["w"][0]), state))
    return seen


def test_better_is_accepted_worse_forced_after_the_limit_and_a_broken_candidate_never():
    tx = annealing(optax.identity(), KEY, temperature=1e9, max_rejections=3)
    seen = candidates(tx, [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -5.0])
    assert [w for w, _ in seen] == [-1, -2, -2, -2, -2, -1, -1, -6]
    last = seen[-1][1]
    assert (int(last.proposals), int(last.accepted), int(last.forced)) == (8, 4, 1)
    assert int(last.rejected_in_a_row) == 0
    assert float(last.energy) == -6.0
    tx = annealing(optax.identity(), KEY, 10.0, max_rejections=1)
    seen = candidates(tx, [-1.0, jnp.nan, jnp.nan, jnp.nan, -1.0])
    assert [w for w, _ in seen] == [-1, -1, -1, -1, -2]
    # A start without an energy is left.
    energy = PublicEnergy(lambda p, e: jnp.log(p["w"][0]) + 0.0 * e, jnp.zeros(2))
    seen = candidates(annealing(optax.identity(), KEY), [2.0], energy, {"w": jnp.full(1, -1.0)})
    assert seen[-1][0] == 1.0
    # Rejection restores parameters and momentum.
    for restore in (True, False):
        tx = annealing(optax.trace(0.9), KEY, 1e9, 9, restore_inner=restore)
        seen = candidates(tx, [-1.0, 5.0, 5.0])
        assert [w for w, _ in seen] == [-1, -1, -1]
        kept = float(seen[-1][1].inner.trace["w"][0])
        assert (kept == -1.0) is restore


def words(count, seed=4):
    return jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(seed), count))


def judged(count, start, temperature=10.0):
    """How many of so many coins take a candidate, by its rise and the state that it meets."""

    @jax.jit
    def taken(rise, accepted):
        def one(coin):
            tx, params = annealing(optax.identity(), coin, temperature), {"w": jnp.full(1, start)}
            state = tx.init(params)
            begun = state._replace(
                energy=jnp.where(accepted > 0, start, state.energy),
                accepted=accepted,
                proposals=accepted,
            )
            step, _ = tx.update({"w": jnp.full(1, rise)}, begun, params, energy=PUBLIC)
            return step["w"][0] != 0

        return jnp.sum(jax.vmap(one)(words(count)))

    return lambda rise, accepted=0: int(taken(jnp.float32(rise), jnp.int32(accepted)))


def test_worse_is_accepted_with_the_papers_probability_and_the_first_judged_against_the_start():
    """Algorithm 2: ΔE = J(w_new) - J(w0), and Q = Q0 = 10; J(w0) is 3 here."""
    for rise, temperature, accepted in ((0.5, 1.0, 1), (0.1, 2.0, 3)):
        count = judged(4000, 0.0, temperature)(rise, accepted)
        p = [np.exp(-rise * temperature * many) for many in (accepted, accepted + 1)]
        assert is_binomial(count, 4000, p[0])
        assert not is_binomial(count, 4000, p[1])
    count = judged(4000, 3.0)
    assert is_binomial(count(0.1), 4000, np.exp(-1.0))
    assert (count(20.0), count(-1.0)) == (0, 4000)
    # After a rejected one its line 22 sets Q to Q0 · τ, which is 0 as long as none was accepted.
    seen = candidates(annealing(optax.identity(), KEY), [20.0, 20.0, 20.0])
    assert [w for w, _ in seen] == [0, 20, 20]
    shapes = {str(jax.tree.map(lambda x: (x.shape, x.dtype), state)) for _, state in seen}
    assert len(shapes) == 1
    assert [float(state.energy) for _, state in seen] == [np.inf, 20.0, 20.0]
    assert int(seen[-1][1].forced) == 0


def test_rejected_candidates_are_charged_and_never_share_noise(monkeypatch):
    proposals, original = [], jaxdp.noise.gaussian.add_normals

    def spy(tree, *rest):
        out = original(tree, *rest)
        jax.debug.callback(
            lambda a, b: proposals.append(np.asarray(a) - np.asarray(b)), out["w"], tree["w"]
        )
        return out

    monkeypatch.setattr(jaxdp.noise.gaussian, "add_normals", spy)
    # All candidates but the first few are rejected.
    algorithm = sa_dpsgd(MECH, 0.5, KEY, momentum=0.9, temperature=1e9, max_rejections=10_000)
    worse = PublicEnergy(lambda p, e: jnp.sum(jnp.abs(p["w"])) + 0.0 * e, jnp.zeros(3))
    given = {"source": np.ones((60, 300), np.float32), "physical_batch_size": 16, "energy": worse}
    ledger, loss_fn = jaxdp.Ledger(), lambda params, example: jnp.vdot(params["w"], example)
    trainer = jaxdp.Trainer(loss_fn, algorithm, ledger=ledger, **given)
    state = trainer.init({"w": jnp.zeros(300)})
    moved, tags = [], set()
    for batch in trainer.batches(8):
        before = np.asarray(state.params["w"])
        state, _ = trainer.step(state, batch)
        moved.append(not np.array_equal(before, state.params["w"]))
        assert isinstance(state.opt_state[0], PrivatizeState)
        tags.add(tuple(np.asarray(state.opt_state[0].last).tolist()))
    counts = trainer.algorithm.counts_of(state.opt_state)
    assert counts["proposals"] == 8
    assert counts["accepted"] == sum(moved) < 4
    assert ledger.steps == 8  # every candidate, not every acceptance
    assert state.step == len(tags) == 8
    (said,) = trainer.unverified()
    assert said.endswith(PublicEnergy.ASSUMED)
    jax.effects_barrier()
    assert len(proposals) == 8
    for i, one in enumerate(proposals):
        assert is_gaussian(one, trainer.mechanism.l2({"w": jnp.zeros(300)}))
        for other in proposals[:i]:
            assert are_uncorrelated(one, other)


def test_as_published_says_what_it_is():
    mech = sgd_of(1.23, 0.1, 512, 60_000)
    public = sa_dpsgd_as_published(mech, 0.1, KEY)
    assert public.mechanism.event == mech.event
    assert public.claim(512 / 60_000, 1.23, 4698, 1e-5).value == pytest.approx(3.0, abs=0.01)
    private_energy = sa_dpsgd_as_published(mech, 0.1, KEY, energy_on_private=True)
    assert private_energy.epsilon(1, 1e-5).upper == np.inf
    assert "un-noised loss" in private_energy.mechanism.event.reason


def test_every_candidate_has_a_coin_of_its_own():
    """64 candidates that are worse by log 2, each accepted with probability one half."""
    tx, params = annealing(optax.sgd(0.0), KEY, temperature=1.0), jnp.zeros(1)
    energy = PublicEnergy(lambda params, example: jnp.sum(params) + 1.0, jnp.zeros(1))
    begun = {"energy": jnp.float32(1.0 - np.log(2.0)), "accepted": jnp.int32(1)}
    start = tx.init(params)._replace(**begun)
    one = lambda n: tx.update(params, start._replace(proposals=n), params, energy=energy)[1]  # noqa: E731
    accepted = jax.jit(jax.vmap(lambda n: one(n).accepted))(jnp.arange(64, dtype=jnp.int32))
    assert 12 < int(jnp.sum(accepted - 1)) < 52


# Energies on private records.
PARAMS = {"w": jnp.zeros(1)}


def private(noise=2.0, ledger=None, batch=20, **options):
    mech = energy_mechanism(noise, 0.5, batch, 60)
    sampler = mech.sampler(60, ledger=ledger, physical_batch_size=8, **options)
    return PrivateEnergy(first, jnp.linspace(-1.0, 1.0, 60), mech, sampler)


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
    drawn = energy.prepare()
    assert drawn.mask.any() == (batch != 1)
    draws = rises(drawn, words(5000))
    assert is_gaussian(draws, 2.0 * 0.5 / batch)
    assert not is_gaussian(draws, 2.0 * 0.5 / batch * 1.2)


def test_a_private_energy_is_charged_for_every_candidate_on_its_own_draws(capsys):
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
    # A second model on the ledger, whose last row is its energy's; then in another process.
    made = dataclasses.replace(MECH, steps=4, delta=1e-5)
    algorithm = sa_dpsgd(made, 0.1, KEY, energy=energy.mechanism)
    new = lambda: {"ledger": ledger, **given, "energy": private(ledger=ledger)}  # noqa: E731
    second = jaxdp.Trainer(first, algorithm, another=True, **new())
    batches, state = second.batches(), second.init({"w": jnp.zeros(3)})
    state, _ = second.step(state, next(batches))
    assert "which holds 16 steps in the end: epsilon" in capsys.readouterr().err
    batches.close()
    again = jaxdp.Trainer(first, algorithm, **new())
    again.init({"w": jnp.zeros(3)})
    assert len(again.batches(state=state)) == 3


def steps_of(ledger):
    """The number of steps that each mechanism's event is charged for, by its noise."""
    return {e.event.event.noise_multiplier: e.steps for e in ledger.entries}


def test_a_refused_step_has_burnt_the_energys_ticket_alone_and_close_ends_both(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    energy = private(ledger=ledger, reserve=8)
    given = {"source": np.asarray(energy.data), "energy": energy, "physical_batch_size": 64}
    algorithm = sa_dpsgd(MECH, 0.1, KEY, energy=energy.mechanism)
    trainer = jaxdp.Trainer(first, algorithm, ledger=ledger, reserve=4, **given)
    state, batches = trainer.init({"w": jnp.zeros(3)}), trainer.batches(6)
    batch = next(batches)
    refused("batch must be as trainer.batches", trainer.step, state, dataclasses.replace(batch))
    assert energy.sampler.step == 0  # that batch was refused before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_step", lambda *args, **options: 1 / 0)
        refused("", trainer.step, state, batch, error=ZeroDivisionError)
    state, _ = trainer.step(state, batch)
    trainer.step(state, next(batches))
    assert steps_of(ledger) == {1.0: 2, 2.0: 3}
    both = [acc.Repeated(m.event, n) for m, n in ((MECH, 2), (energy.mechanism, 3))]
    assert trainer.epsilon(1e-5).upper == acc.epsilon(acc.Composed(tuple(both)), 1e-5).upper
    assert steps_of(jaxdp.Ledger(path)) == {1.0: 4, 2.0: 8}  # what a crash would cost
    trainer.close()
    assert steps_of(jaxdp.Ledger(path)) == {1.0: 2, 2.0: 3}
    assert ledger.unverified()[0].startswith("1 of 5 steps: drawn")


def test_the_energy_of_a_run_is_charged_with_each_block_and_anew_where_the_gradient_is(
    tmp_path, monkeypatch
):
    """Of 4 steps, evaluated after every 3, 6 of the energy were charged before."""
    used, prepare, settings = [], PrivateEnergy.prepare, {"energy_noise": 3.0, "energy_bound": 0.1}
    cfg = small.config(algorithm="sa-dpsgd-private", steps=4, settings=settings)

    def watched(self):
        used.append(prepare(self))
        return used[-1]

    def lines(folder):
        """(part of the run's name, [first, end)) of every charge in the file, in order."""
        rows = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
        rows = [row for row in rows if "event" in row]
        starts = [(row["stream"].partition("/")[2], row["first_step"]) for row in rows]
        return [(*start, start[1] + row["steps"]) for start, row in zip(starts, rows, strict=True)]

    monkeypatch.setattr(PrivateEnergy, "prepare", watched)
    folder, begun = tmp_path / "r", [("energy", 0, 3), ("", 0, 3)]
    small.crash(folder, cfg, 2)
    assert lines(folder) == begun
    result = small.go(folder, cfg)
    assert lines(folder) == [*begun, *begun, ("energy", 3, 4), ("", 3, 4)]
    assert steps_of(result.ledger) == {1.0: 4, 3.0: 4}
    # The state of step 3, which was shown, is gone on from once more.
    shutil.rmtree(folder / "secret" / "checkpoints" / "4")
    result = small.go(folder, cfg)
    assert lines(folder)[6:] == [("1/energy", 3, 4), ("1", 3, 4)]
    assert result.ledger.steps == 4 + 4 + 1 + 1
    assert [drawn.ticket.step for drawn in used] == [0, 1, 0, 1, 2, 3, 3]
    assert len({drawn.ticket.tag.tobytes() for drawn in used}) == 7
    assert len({drawn.indices[drawn.mask].tobytes() for drawn in used}) == 7
    # Where releases decide how many steps are taken, all of both count, for good.
    folder = runs.RunDirectory(tmp_path / "enough")
    given = (cfg, folder, small.dataset())
    runs.start(*given, Secret.from_seed(5), small.ignore, enough=lambda row: True)
    assert lines(folder.path) == [("energy", 0, 4), ("", 0, 4)]
    assert steps_of(runs.resume(*given, small.ignore).ledger) == {1.0: 4, 3.0: 4}
    assert [e.whole for e in jaxdp.Ledger(folder.ledger).entries] == [True, True]


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


def test_a_drawn_energy_judges_once_hides_its_key_and_records_and_is_not_copied():
    """Before: a copy judged a second candidate with the noise of the first."""
    tx, energy, spent = annealing(optax.identity(), KEY), private(), "ticket must be spent once"
    drawn, state = energy.prepare(), tx.init(PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS, energy=drawn)
    update = jaxdp.compile_update(optax.chain(MECH.privatize(), tx), donate=False)
    again, begun = energy.prepare(), (MECH.privatize().init(PARAMS), state)
    keys = [MECH.simulated_key(jax.random.key(i)) for i in range(2)]
    updated = partial(update, PARAMS, begun, jaxdp.Summed(PARAMS, 1.0), energy=again)
    updated(key=keys[0])
    late = partial(tx.update, PARAMS, state, PARAMS, energy=drawn)
    all_refused([(spent, late, "by hand"), (spent, partial(updated, key=keys[1]), "compiled")])
    assert energy.sampler.ledger.steps == 2
    assert energy.sampler.ledger.unverified() == []
    drawn = energy.prepare()
    opened = drawn.spent()  # by hand
    refused("energy must be as it was drawn to be spent", opened.spent)
    for shown in (repr(drawn), repr(opened)):
        assert not any(w in shown for w in ("data", "indices", str(int(opened.words[1]))))
    words = r"energy must not be copied, .* energy.prepare\(\).spent"
    ways = (copy.copy, copy.deepcopy, pickle.dumps)
    all_refused([(words, partial(way, opened), way) for way in ways], TypeError)
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
    update, state, sampler = (
        jaxdp.compile_update(tx, donate=False),
        tx.init(PARAMS),
        MECH.sampler(60, ledger=energies.sampler.ledger),
    )
    grad_fn = MECH.clipped_grad(first)
    one, other = energies.prepare().spent(), energies.prepare().spent()

    draws = []

    def judged(energy):
        draws.append(sampler.draw())
        update(PARAMS, state, grad_fn(PARAMS, data, draws[-1]), energy=energy)

    judged(one)
    judged(other)
    drawn = energies.prepare()
    judged(drawn)
    # Before: refused once the ticket of the gradient was spent.
    for used, words in ((one, once), (drawn, "ticket must be spent once")):
        refused(words, judged, used)
        assert not draws[-1].ticket.spent


def test_a_drawn_energy_is_never_compiled_in():
    """Its draw and its noise would judge in every call."""
    tx, drawn = annealing(optax.identity(), KEY), private().prepare()
    whole, key = optax.chain(MECH.privatize(), tx), MECH.simulated_key(jax.random.key(0))
    update = jaxdp.compile_update(whole, donate=False)
    step = jax.jit(lambda s, p: tx.update(p, s, p, energy=drawn))
    all_of_it = jax.jit(lambda s, p, k: update(p, s, jaxdp.Summed(p, 1.0), key=k, energy=drawn))
    inside = "energy must not be used inside jit"
    refused(inside, step, tx.init(PARAMS), PARAMS)
    refused(inside, all_of_it, whole.init(PARAMS), PARAMS, key)
    assert not drawn.ticket.spent
    step = jax.jit(lambda s, p, e: tx.update(p, s, p, energy=e))
    refused(inside, step, tx.init(PARAMS), PARAMS, drawn)
    # Before: judged with less noise than was charged, or by other records, and without a word.
    less, opened = dataclasses.replace(drawn, l2=1e-9), whole.init(PARAMS)
    calls = (
        partial(tx.update, PARAMS, tx.init(PARAMS), PARAMS, energy=less),
        partial(update, PARAMS, opened, jaxdp.Summed(PARAMS, 1.0), key=key, energy=less),
        less.spent,
    )
    all_refused(("with other fields|or was changed", call, n) for n, call in enumerate(calls))
    for array in (drawn.indices, drawn.mask):
        refused("read-only", array.fill, 0)
    assert not drawn.ticket.spent
    assert int(step(tx.init(PARAMS), PARAMS, drawn.spent())[1].proposals) == 1


def test_an_energy_is_charged_to_the_ledger_of_the_gradient_and_that_it_is_public_is_said():
    """Before: each sampler made a ledger, the gradient's told nothing of the energy, nor of trust."""
    data, tx = jnp.zeros(60), optax.chain(MECH.privatize(), annealing(optax.sgd(0.1), KEY))
    update, grad_fn = jaxdp.compile_update(tx, donate=False), MECH.clipped_grad(first)

    def judged(sampler, energy):
        summed = grad_fn(PARAMS, data, sampler.draw())
        update(PARAMS, tx.init(PARAMS), summed, energy=energy)

    apart, sampler = private().prepare(), MECH.sampler(60)
    rows = [("energy must be charged to the ledger of the sum", partial(judged, sampler, apart))]
    # That of a trainer is the charged one, on its ledger.
    charged, apart = private().mechanism, "must be drawn by a sampler with the trainer's"

    def made(event, energy, words, ledger=None):
        algorithm, given = sa_dpsgd(MECH, 0.1, KEY, energy=event), {"ledger": ledger}
        call = partial(jaxdp.Trainer, first, algorithm, source=np.zeros(60, np.float32), **given)
        rows.append((words, partial(call, energy=energy)))

    for event, energy in ((None, private()), (charged, PUBLIC), (charged, None)):
        made(event, energy, "energy must be the one that the algorithm charges")
    for other, mine in itertools.product((None, jaxdp.Ledger()), (None, jaxdp.Ledger())):
        energy = private(ledger=other)
        made(energy.mechanism, energy, apart, mine)
    all_refused(rows)
    sampler = MECH.sampler(60)
    judged(sampler, private(ledger=sampler.ledger).prepare())
    assert sampler.ledger.steps == 2
    assert sampler.ledger.unverified() == []
    judged(sampler, PUBLIC)
    assert [PublicEnergy.ASSUMED in line for line in sampler.ledger.unverified()] == [True]


def test_members_of_a_vmap_never_share_an_energys_noise():
    tx, opened = annealing(optax.identity(), KEY), private().prepare().spent()
    state = tx.init(PARAMS)

    def judged(w, words):
        energy = dataclasses.replace(opened, words=words)
        return tx.update({"w": w}, state, {"w": w}, energy=energy)[1].energy

    shared = jax.vmap(judged, (0, None))
    refused("another one for every member of a vmap", shared, jnp.zeros((2, 1)), opened.words)
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
    # A rejection would forget which key the noise used last.
    noise = annealing(optax.chain(MECH.privatize(), optax.sgd(0.1)), KEY)
    update = partial(jaxdp.compile_update(noise, donate=False), PARAMS, noise.init(PARAMS))
    given = {"key": MECH.simulated_key(jax.random.key(0)), "energy": PUBLIC}
    update = partial(update, jaxdp.Summed(PARAMS, 1.0), **given)
    rows.append(("annealing must wrap what follows the noise", update))
    for bad in (first, None, lambda p: 0.0, private()):
        update = partial(tx.update, PARAMS, tx.init(PARAMS), PARAMS, energy=bad)
        rows.append(("energy must be a PublicEnergy", update, bad))
    # Drawn alike and noised less: the gradient's event would be too cheap.
    cheap, sampler = energy_mechanism(0.1, 0.5, 20, 60), MECH.sampler(60, ledger=jaxdp.Ledger())
    rows.append(("got one that charges", of(jnp.zeros(60), cheap, sampler)))
    # Before: independent noise of the size that is enough for correlated, at its price. In 60 steps
    # 4.38 was told where 17.5 was spent.
    of_root = {"strategy": "square_root", "sampling": "fixed_order"}
    ordered = mf_of(1.0, 1.0, 10, 60, steps=60, **of_root)
    independent = "mechanism of an energy must have independent noise"
    all_refused([*rows, (independent, of(jnp.zeros(60), ordered, ordered.sampler(60)))])


def test_the_sum_of_an_energy_is_of_clipped_differences_of_who_was_drawn():
    def total(values, mask, passes=1):
        rows = np.arange(len(values), dtype=np.int32).reshape(passes, -1)
        drawn = DrawnEnergy(
            jnp.asarray(values, jnp.float32), rows, np.asarray(mask, bool).reshape(passes, -1),
            np.int32(passes), None, lambda p, example: p * example, 1.0, 1.0, 0.0, 4,
        )  # fmt: skip
        return float(drawn.clipped_sum(jnp.float32(2.0), jnp.float32(1.0)))

    everybody = [True] * 4
    assert total([0.25, 9.0, 0.5, 0.0], everybody) == 1.75  # candidate less current, at most 1
    assert total([0.25, -9.0, 0.5, np.nan], everybody) == -0.25
    assert total([0.25, 9.0, 0.5, -0.25], [True, False, False, True]) == 0.0
    assert total([0.25, 0.25, 0.5, 0.5], everybody, passes=2) == 1.5
    # So one record moves the energy by at most its bound, here 1.
    values = [1e6, -(2.0**-10), np.nan, -1e6]
    fewer = [total(values, [n != left for n in range(4)]) for left in range(4)]
    moved = np.abs(total(values, everybody) - np.array(fewer))
    np.testing.assert_array_equal(moved, [1.0, 2.0**-10, 0.0, 1.0])
    mechanism = energy_mechanism(1.0, 1.0, 60, 60)
    sampler = mechanism.sampler(60, physical_batch_size=16)
    energy = PrivateEnergy(lambda p, example: p * example, jnp.ones(60), mechanism, sampler)
    drawn = energy.prepare()
    assert float(drawn.clipped_sum(jnp.float32(1.5), jnp.float32(1.0))) == 30.0
