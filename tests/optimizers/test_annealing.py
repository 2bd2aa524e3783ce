"""Simulated annealing: what is taken, what a rejection restores; every candidate is charged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.noise import PrivatizeState
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import PublicEnergy
from jaxdp.papers.sa_dpsgd import sa_dpsgd_as_published
from tests.laws import are_uncorrelated, is_binomial, is_gaussian

KEY = jax.random.key(3)
MECH = jaxdp.dp_sgd(1.0, 1.0, 20, 60)


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


def test_better_is_accepted_and_worse_forced_after_the_limit():
    tx = annealing(optax.identity(), KEY, temperature=1e9, max_rejections=3)
    seen = candidates(tx, [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -5.0])
    assert [w for w, _ in seen] == [-1, -2, -2, -2, -2, -1, -1, -6]
    last = seen[-1][1]
    assert (int(last.proposals), int(last.accepted), int(last.forced)) == (8, 4, 1)
    assert int(last.rejected_in_a_row) == 0
    assert float(last.energy) == -6.0


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


def test_worse_is_accepted_with_the_papers_probability():
    for rise, temperature, accepted in ((0.5, 1.0, 1), (0.1, 2.0, 3)):
        count = judged(4000, 0.0, temperature)(rise, accepted)
        p = [np.exp(-rise * temperature * many) for many in (accepted, accepted + 1)]
        assert is_binomial(count, 4000, p[0])
        assert not is_binomial(count, 4000, p[1])


def test_the_first_candidate_is_judged_against_the_start():
    """Algorithm 2: ΔE = J(w_new) - J(w0), and Q = Q0 = 10; J(w0) is 3 here."""
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


def test_a_broken_candidate_is_never_accepted_and_rejection_restores_all():
    """And a start without an energy is left."""
    tx = annealing(optax.identity(), KEY, 10.0, max_rejections=1)
    seen = candidates(tx, [-1.0, jnp.nan, jnp.nan, jnp.nan, -1.0])
    assert [w for w, _ in seen] == [-1, -1, -1, -1, -2]
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


def test_rejected_candidates_are_charged_and_never_share_noise(monkeypatch):
    proposals, original = [], jaxdp.noise.gaussian.noised

    def spy(tree, *rest):
        out = original(tree, *rest)
        jax.debug.callback(
            lambda a, b: proposals.append(np.asarray(a) - np.asarray(b)), out["w"], tree["w"]
        )
        return out

    monkeypatch.setattr(jaxdp.noise.gaussian, "noised", spy)
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


def test_the_noise_itself_cannot_be_annealed():
    """A rejection would forget which key the noise used last."""
    params, key = {"w": jnp.zeros(1)}, MECH.simulated_key(jax.random.key(0))
    tx = annealing(optax.chain(MECH.privatize(), optax.sgd(0.1)), KEY)
    update = jaxdp.compile_update(tx)
    with pytest.raises(ValueError, match="annealing must wrap what follows the noise"):
        update(params, tx.init(params), jaxdp.Summed(params, 1.0), key=key, energy=PUBLIC)


def test_as_published_says_what_it_is():
    mech = jaxdp.dp_sgd(1.23, 0.1, 512, 60_000)
    public = sa_dpsgd_as_published(mech, 0.1, KEY)
    assert public.mechanism.event == mech.event
    assert public.claim(512 / 60_000, 1.23, 4698, 1e-5).value == pytest.approx(3.0, abs=0.01)
    private_energy = sa_dpsgd_as_published(mech, 0.1, KEY, energy_on_private=True)
    assert private_energy.epsilon(1, 1e-5).upper == np.inf
    assert "un-noised loss" in private_energy.mechanism.event.reason


def test_every_candidate_has_a_coin_of_its_own():
    """64 candidates that are worse by log 2, each accepted with probability one half."""
    tx = annealing(optax.sgd(0.0), jax.random.key(0), temperature=1.0)
    energy = PublicEnergy(lambda params, example: jnp.sum(params) + 1.0, jnp.zeros(1))
    params = jnp.zeros(1)
    start = tx.init(params)._replace(
        energy=jnp.float32(1.0 - np.log(2.0)), accepted=jnp.asarray(1, jnp.int32)
    )
    one = lambda n: tx.update(params, start._replace(proposals=n), params, energy=energy)[1]  # noqa: E731
    accepted = jax.jit(jax.vmap(lambda n: one(n).accepted))(jnp.arange(64, dtype=jnp.int32))
    assert 12 < int(jnp.sum(accepted - 1)) < 52
