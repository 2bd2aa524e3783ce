import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import PrivatizeState
from jaxdp.optimizers.annealing import _DOMAIN, _keys, annealing, sa_dpsgd
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy, energy_mechanism
from jaxdp.train import trainer_of
from tests.statistics import are_uncorrelated, is_binomial, is_gaussian

KEY = jax.random.key(3)


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


@pytest.mark.parametrize(("rise", "temperature", "accepted"), [(0.5, 1.0, 1), (0.1, 2.0, 3)])
def test_worse_is_accepted_with_the_papers_probability(rise, temperature, accepted):
    def lucky(words):
        tx = annealing(optax.identity(), words, temperature, max_rejections=10)
        params = {"w": jnp.zeros(1)}
        state = tx.init(params)._replace(
            energy=jnp.zeros([], jnp.float32), accepted=jnp.full([], accepted, jnp.int32)
        )
        step, _ = tx.update({"w": jnp.full(1, rise)}, state, params, energy=PUBLIC)
        return step["w"][0] > 0

    keys = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 4000))
    count = int(jax.jit(jax.vmap(lucky))(keys).sum())
    p = np.exp(-rise * temperature * accepted)
    assert is_binomial(count, 4000, p)
    assert not is_binomial(count, 4000, np.exp(-rise * temperature * (accepted + 1)))


@pytest.mark.parametrize("restore", [True, False])
def test_rejection_restores_parameters_and_momentum(restore):
    tx = annealing(optax.trace(0.9), KEY, 1e9, 9, restore_inner=restore)
    seen = candidates(tx, [-1.0, 5.0, 5.0])
    assert [w for w, _ in seen] == [-1, -1, -1]
    kept = float(seen[-1][1].inner.trace["w"][0])
    assert (kept == -1.0) is restore


def test_a_broken_candidate_is_never_accepted():
    tx = annealing(optax.identity(), KEY, 10.0, max_rejections=1)
    seen = candidates(tx, [-1.0, jnp.nan, jnp.nan, jnp.nan, -1.0])
    assert [w for w, _ in seen] == [-1, -1, -1, -1, -2]


def rejecting(secret, ledger=None, noise=1.0):
    """A method all of whose candidates but the first few are rejected."""
    mech = jaxdp.dp_sgd(noise, 1.0, 20, 60)
    method = sa_dpsgd(mech, 0.5, secret.jax_key("judge"), momentum=0.9, temperature=1e9,
                         max_rejections=10_000)

    def loss_fn(params, example):
        return jnp.vdot(params["w"], example)

    worse = PublicEnergy(lambda p, e: jnp.sum(jnp.abs(p["w"])) + 0.0 * e, jnp.zeros(3))
    return trainer_of(method, loss_fn, 60, secret=secret, ledger=ledger, energy=worse,
                      physical_batch_size=16), method


def test_rejected_candidates_are_charged_and_never_share_noise(monkeypatch):
    proposals = []
    original = jaxdp.noise.add_gaussian

    def spy(tree, std, key):
        out = original(tree, std, key)
        jax.debug.callback(lambda a, b: proposals.append(np.asarray(a) - np.asarray(b)),
                           out["w"], tree["w"])
        return out

    monkeypatch.setattr(jaxdp.noise, "add_gaussian", spy)
    ledger = jaxdp.Ledger()
    train, method = rejecting(jaxdp.Secret.from_seed(1), ledger)
    state = train.init({"w": jnp.zeros(300)})
    data, moved = jnp.ones((60, 300)), []
    for _ in range(8):
        before = np.asarray(state.params["w"])
        state, _, _ = train.step(state, data)
        moved.append(not np.array_equal(before, state.params["w"]))
    counts = method.counts_of(state.opt_state)
    assert counts["proposals"] == 8
    assert counts["accepted"] == sum(moved) < 4
    assert ledger.steps == 8  # every candidate, not every acceptance
    assert train.sampler.step == 8
    assert int(state.opt_state[0].step) == 8
    assert isinstance(state.opt_state[0], PrivatizeState)
    jax.effects_barrier()
    assert len(proposals) == 8
    for i, one in enumerate(proposals):
        for other in proposals[:i]:
            assert are_uncorrelated(one, other)


def private(rows=60, noise=2.0, bound=0.5, loss_fn=first, secret=None, ledger=None, batch=20):
    mech = energy_mechanism(noise, bound, batch, 60)
    data = jnp.linspace(-1.0, 1.0, rows)
    sampler = mech.sampler(rows, secret=secret or jaxdp.Secret.new(), ledger=ledger,
                           physical_batch_size=8)
    return PrivateEnergy(loss_fn, data, mech, sampler)


def energy_of(rows, drawn):
    mech = energy_mechanism(2.0, 0.5, 20, 60)
    return PrivateEnergy(first, jnp.zeros(rows), mech, mech.sampler(drawn))


def nasty(params, example):
    """One record in eight would, unclipped, decide alone; one has no loss at all."""
    scale = jnp.where(example > 0.8, 1e6, 1.0)
    return scale * params["w"][0] + jnp.where(example < -0.9, jnp.nan, 0.0)


def test_one_record_moves_the_private_energy_by_at_most_its_bound():
    energy = private(loss_fn=nasty)
    drawn = energy.prepare()
    now, then = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
    indices, mask = np.asarray(drawn.indices), np.asarray(drawn.mask)
    sum_of = jax.jit(lambda drawn: drawn.clipped_sum(then, now))
    total, furthest = float(sum_of(drawn)), 0.0
    for i, j in zip(*np.nonzero(mask), strict=True):
        fewer = mask.copy()
        fewer[i, j] = False
        without = type(drawn)(**{**vars(drawn), "mask": fewer, "indices": indices})
        furthest = max(furthest, abs(total - float(sum_of(without))))
    assert furthest <= 0.5 * (1 + 1e-6)
    assert furthest > 0.49


@pytest.mark.parametrize("batch", [20, 1])
def test_a_private_energy_has_its_noise_also_on_an_empty_draw(batch):
    energy = private(batch=batch)
    if batch == 1:
        object.__setattr__(energy.sampler, "sampling", jaxdp.Poisson(1e-12))
    drawn = energy.prepare()
    now = {"w": jnp.zeros(1)}
    draws = jax.vmap(lambda k: drawn.rise(now, now, jnp.zeros([]), k)[0])(jax.random.split(KEY, 5000))
    assert is_gaussian(draws, 2.0 * 0.5 / batch)
    assert not is_gaussian(draws, 2.0 * 0.5 / batch * 1.2)


def test_a_private_energy_is_charged_for_every_candidate_on_its_own_draws():
    ledger, secret = jaxdp.Ledger(), jaxdp.Secret.from_seed(2)
    energy = private(secret=jaxdp.Secret.from_seed(3), ledger=ledger)
    mech = jaxdp.dp_sgd(1.0, 1.0, 20, 60)
    method = sa_dpsgd(mech, 0.1, secret.jax_key("judge"), energy=energy.mechanism)
    train = trainer_of(method, first, 60, secret=secret, ledger=ledger, energy=energy,
                       physical_batch_size=16)
    state = train.init({"w": jnp.zeros(3)})
    draws = []
    for _ in range(4):
        state, _, _ = train.step(state, energy.data)
        draws.append((train.sampler.step, energy.sampler.step))
    assert draws == [(i, i) for i in range(1, 5)]
    assert ledger.steps == 8
    both = acc.Composed((acc.Repeated(mech.event, 4), acc.Repeated(energy.mechanism.event, 4)))
    assert ledger.epsilon(1e-5).upper == pytest.approx(acc.epsilon(both, 1e-5).upper)
    assert method.epsilon(4, 1e-5).upper == pytest.approx(ledger.epsilon(1e-5).upper)
    assert list(method.events(2, 3)) == ["", "energy"]


def test_judging_never_shares_randomness_with_the_gradients_noise():
    """Also when a user gives both the same key."""
    params = {"w": jnp.zeros(1)}
    tx, annealed = jaxdp.privatize(1.0, 1.0, KEY), annealing(optax.identity(), KEY)
    drawn = private(noise=1.0, bound=1.0, batch=1).prepare()

    @jax.vmap
    def both(step):
        noise = tx.update(jaxdp.Summed(params, 1.0), tx.init(params)._replace(step=step), params)
        state = annealed.init(params)._replace(proposals=step)
        rise, _ = drawn.rise(params, params, state.energy, _keys(state)[1])
        return noise[0]["w"][0], rise

    noise, judge = (np.asarray(x).tolist() for x in jax.jit(both)(jnp.arange(500)))
    assert are_uncorrelated(noise, judge)
    assert not set(noise) & set(judge)
    assert are_uncorrelated(judge[1:], judge[:-1])


def test_no_step_of_the_noise_derives_a_key_that_judges():
    """privatize splits fold_in(key, step); a split is a fold_in of the position."""
    annealed = annealing(optax.identity(), KEY).init({"w": jnp.zeros(1)})
    judging = {
        tuple(jax.random.key_data(k).tolist())
        for n in range(3) for k in _keys(annealed._replace(proposals=jnp.int32(n)))
    }
    for step in (0, _DOMAIN & 0xFF, 2**31 - 1):
        leaves = jax.random.split(jax.random.fold_in(KEY, step), 3)
        below = {
            tuple(jax.random.key_data(k).tolist()) for leaf in leaves
            for k in (leaf, *jax.random.split(leaf))
        }
        assert not judging & below


def test_the_energy_must_be_the_one_that_is_charged():
    mech, secret = jaxdp.dp_sgd(1.0, 1.0, 20, 60), jaxdp.Secret.from_seed(1)
    free = sa_dpsgd(mech, 0.1, KEY)
    with pytest.raises(ValueError, match="energy must be the one that the method charges"):
        trainer_of(free, first, 60, secret=secret, energy=private())
    charged = sa_dpsgd(mech, 0.1, KEY, energy=private().mechanism)
    with pytest.raises(ValueError, match="energy must be the one that the method charges"):
        trainer_of(charged, first, 60, secret=secret, energy=PUBLIC)


@pytest.mark.parametrize("other", [None, jaxdp.Ledger()])
def test_with_a_ledger_the_energy_is_charged_to_that_one(other):
    energy, ledger = private(ledger=other), jaxdp.Ledger()
    method = sa_dpsgd(jaxdp.dp_sgd(1.0, 1.0, 20, 60), 0.1, KEY, energy=energy.mechanism)
    with pytest.raises(ValueError, match="energy must be drawn by a sampler with a ledger"):
        trainer_of(method, first, 60, ledger=ledger, energy=energy)


def test_an_energy_is_never_charged_as_the_gradient():
    """Drawn alike and noised less: the gradient's event would be too cheap."""
    mech, ledger = jaxdp.dp_sgd(1.0, 1.0, 20, 60), jaxdp.Ledger()
    with pytest.raises(ValueError, match="got one that charges"):
        PrivateEnergy(first, jnp.zeros(60), energy_mechanism(0.1, 0.5, 20, 60),
                      mech.sampler(60, ledger=ledger))


def test_an_energy_never_shares_the_gradients_draws():
    secret = jaxdp.Secret.new()
    energy = private(secret=secret)
    method = sa_dpsgd(jaxdp.dp_sgd(1.0, 1.0, 20, 60), 0.1, KEY, energy=energy.mechanism)
    with pytest.raises(ValueError, match="energy must be drawn with a secret of its own"):
        trainer_of(method, first, 60, secret=secret, energy=energy)
    assert trainer_of(method, first, 60, energy=energy).energy is energy


def test_the_noise_itself_cannot_be_annealed():
    """A rejection would put the noise's counter back: the next candidate had the same noise."""
    mech, params = jaxdp.dp_sgd(1.0, 1.0, 20, 60), {"w": jnp.zeros(1)}
    tx = annealing(optax.chain(mech.privatize(KEY), optax.sgd(0.1)), KEY)
    update = jaxdp.compile_update(tx)
    with pytest.raises(ValueError, match="annealing must wrap what follows the noise"):
        update(params, tx.init(params), jaxdp.Summed(params, 1.0), energy=PUBLIC)


def test_members_of_a_vmap_never_share_an_energys_noise():
    tx, drawn = annealing(optax.identity(), KEY), private().prepare()
    state = tx.init({"w": jnp.zeros(1)})
    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(lambda w: tx.update({"w": w}, state, {"w": w}, energy=drawn)[0])(jnp.zeros((2, 1)))


def test_as_published_says_what_it_is():
    mech = jaxdp.dp_sgd(1.23, 0.1, 512, 60_000)
    public = sa_dpsgd(mech, 0.1, KEY, as_published=True)
    assert public.mechanism.event == mech.event
    assert public.claim(512 / 60_000, 1.23, 4698, 1e-5).value == pytest.approx(3.0, abs=0.01)
    private_energy = sa_dpsgd(mech, 0.1, KEY, as_published=True, energy_on_private=True)
    assert private_energy.epsilon(1, 1e-5).upper == np.inf
    assert "un-noised loss" in private_energy.mechanism.event.reason


@pytest.mark.parametrize("bad", [first, None, lambda p: 0.0, private()])
def test_a_bare_function_is_no_energy(bad):
    tx = annealing(optax.identity(), KEY)
    params = {"w": jnp.zeros(1)}
    with pytest.raises(ValueError, match="energy must be a PublicEnergy"):
        tx.update(params, tx.init(params), params, energy=bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: annealing(optax.identity(), KEY, temperature=-1.0), "temperature must be a"),
        (lambda: annealing(optax.identity(), KEY, max_rejections=0), "max_rejections must be a"),
        (lambda: annealing(optax.identity(), 7), "key must be a threefry key"),
        (lambda: energy_mechanism(1.0, 0.0, 5, 50), "must be a finite number above 0"),
        (lambda: PrivateEnergy(first, jnp.zeros(3), None, None), "mechanism must be a Mechanism"),
        (lambda: PrivateEnergy(first, jnp.zeros(3), energy_mechanism(1.0, 1.0, 5, 50),
                               energy_mechanism(1.0, 1.0, 6, 50).sampler(50)), "sampler must be"),
        (lambda: sa_dpsgd(jaxdp.dp_sgd(1.0, 1.0, 5, 50), 0.1, KEY, energy_on_private=True),
         "energy_on_private must come with as_published"),
        (lambda: energy_of(rows=10, drawn=60), "data must hold the records that"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_repr_hides_the_key():
    state = annealing(optax.identity(), KEY).init({"w": jnp.zeros(1)})
    assert "<secret>" in repr(state)
    assert str(int(state.key[1])) not in repr(state)
