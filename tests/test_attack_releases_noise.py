"""Attacks on noise, keys and energies: above a test what it did until mended, or "held"."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import annealing
from jaxdp.optimizers.energy import PrivateEnergy, energy_mechanism
from jaxdp.optimizers.quantile import quantile_clip
from jaxdp.sampling import FullBatch, Sampler
from tests.ledger.small import N, P, X, loss_fn, mechanism, trained, whole


# Before: both trained without any noise; unverified() == [], epsilon 3.9.
def opens(updates, state, params=None, **_):
    return updates.value, state


OPENS = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), opens)


def test_a_chain_that_adds_no_noise_is_refused():
    mech = mechanism()
    tx = optax.chain(OPENS, optax.sgd(1.0))
    summed = whole(mech.clipped_grad(loss_fn), mech.sampler(N).draw())
    with pytest.raises(ValueError, match="must add the noise"):
        jaxdp.compile_update(tx)(P, tx.init(P), summed)


@pytest.mark.parametrize("rows", [8, None])
def test_an_algorithm_that_adds_no_noise_is_refused(rows):
    algorithm = Algorithm(mechanism(), optax.sgd(1.0), noise=OPENS)
    train = jaxdp.Trainer(loss_fn, algorithm, None, X, physical_batch_size=rows)
    with pytest.raises(ValueError, match="must add the noise"):
        trained(train)
    train.close()


def faint(updates, state, params=None, *, key, **_):
    words, _ = key.part("gradient")
    noise = 1e-6 * jax.random.normal(jax.random.wrap_key_data(words), (4,))
    return {"w": updates.value["w"] / 20 + noise}, state


INNER = jaxdp.privatize(1.0, 20)


def leaking(updates, state, params=None, **extra):
    noisy, state = INNER.update(updates, state, params, **extra)
    return {"w": noisy["w"] + updates.value["w"]}, state


# Before: unverified() == [], since the key was asked for; epsilon said nothing of what was released.
OTHERS = {
    "too faint": optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), faint),
    "beside the noise": optax.GradientTransformationExtraArgs(INNER.init, leaking),
}


@pytest.mark.parametrize("link", OTHERS)
def test_noise_that_is_not_of_jaxdp_is_told(link):
    mech = mechanism()
    sampler, tx = mech.sampler(N), optax.chain(OTHERS[link], optax.sgd(1.0))
    update = jaxdp.compile_update(tx)
    for _ in range(2):  # traced, and from the cache
        summed = whole(mech.clipped_grad(loss_fn), sampler.draw())
        update(P, tx.init(P), summed)
        (said,) = sampler.ledger.unverified()
        assert "a link that is not jaxdp's own" in said


@pytest.mark.parametrize("link", OTHERS)
@pytest.mark.parametrize("rows", [8, None])
def test_noise_of_an_algorithm_that_is_not_of_jaxdp_is_told(link, rows, tmp_path):
    algorithm = Algorithm(mechanism(), optax.sgd(1.0), noise=OTHERS[link])
    train = jaxdp.Trainer(
        loss_fn, algorithm, None, X, physical_batch_size=rows, ledger=tmp_path / "ledger"
    )
    trained(train)
    train.close()
    (said,) = jaxdp.Ledger(tmp_path / "ledger").unverified()
    assert "a link that is not jaxdp's own" in said


# Before: NaN parameters after the first step, and a warning nowhere.
@pytest.mark.parametrize("rows", [8, None])
def test_an_algorithm_with_other_noise_than_it_is_charged_for_is_refused(rows):
    algorithm = Algorithm(mechanism(), optax.sgd(1.0), noise=jaxdp.privatize(0.1, 20))
    train = jaxdp.Trainer(loss_fn, algorithm, None, X, physical_batch_size=rows)
    with pytest.raises(ValueError, match=r"must be the one that the step was charged for, 1.0"):
        trained(train)
    train.close()


# Before: full batches were charged as Poisson draws of a third; unverified() == [].
def test_a_sampler_draws_as_it_is_charged():
    issuer = mechanism().sampler(N).issuer
    with pytest.raises(ValueError, match="sampling must be the one that the issuer charges"):
        Sampler(FullBatch(), N, N, issuer)


# Before: the gradient was NaN, but the second bound told the un-noised difference of the counts.
def test_a_key_that_is_used_twice_gives_no_second_count():
    mech, tx = quantile_clip(1.0, 20, N)
    state, grad_fn = tx.init(P), mech.clipped_grad(loss_fn)
    key = mech.simulated_key(jax.random.key(0))
    for scale in (1, 5):
        summed, _ = grad_fn(P, scale * X[:8], "all", bound=state.bound)
        _, state = tx.update(summed, state, P, key=key)
    assert np.isnan(state.bound)


# Before: an energy that was prepared outside the loop judged every candidate by one noise.
def test_an_energy_that_was_opened_once_judges_once():
    mech = energy_mechanism(1.0, 1.0, 20, N)
    energy = PrivateEnergy(loss_fn, jnp.asarray(X), mech, mech.sampler(N)).prepare().spent()
    tx = annealing(optax.sgd(0.1), jax.random.key(1))
    one = jax.jit(
        lambda n, state, energy: tx.update({"w": n * jnp.ones(4)}, state, P, energy=energy)
    )
    state, seen = tx.init(P), []
    for n in range(1, 4):
        _, state = one(n, state, energy)
        seen.append(float(state.energy))
    assert len(set(seen)) == 1  # of the first
    assert int(state.accepted) <= 1


# Before: both were judged by one noise, on the host and inside jit; the difference told the sum's.
@pytest.mark.parametrize("compiled", [False, True])
def test_an_energy_judges_one_candidate_of_a_step(compiled):
    mech = energy_mechanism(1.0, 1.0, 20, N)
    drawn = PrivateEnergy(loss_fn, jnp.asarray(X), mech, mech.sampler(N)).prepare()

    def both(energy, candidate):
        rises = [energy.rise({"w": n * candidate}, P, 0.0)[0] for n in (1, 2)]
        return rises[1] - rises[0]

    with pytest.raises(ValueError, match="energy must judge one candidate"):
        (jax.jit(both) if compiled else both)(drawn.spent(), jnp.ones(4))


# Before: the second update was judged by the noise of the first, where another came between.
def test_an_energy_that_was_opened_goes_into_one_compiled_update():
    mech = energy_mechanism(1.0, 1.0, 20, N)
    private, main = PrivateEnergy(loss_fn, jnp.asarray(X), mech, mech.sampler(N)), mechanism()
    tx = optax.chain(main.privatize(), annealing(optax.sgd(0.1), jax.random.key(1)))
    update, state, sampler = jaxdp.compile_update(tx), tx.init(P), main.sampler(N)
    one, other = private.prepare().spent(), private.prepare().spent()

    def judged(energy):
        update(P, state, whole(main.clipped_grad(loss_fn), sampler.draw()), energy=energy)

    judged(one)
    judged(other)
    with pytest.raises(ValueError, match="energy must judge one candidate"):
        judged(one)


# Held: whatever is around the noise, equal keys give NaN.
@pytest.mark.parametrize("around", ["checkpoint", "jit", "cond", "scan", "while"])
def test_equal_keys_give_nan_whatever_is_around(around):
    mech = mechanism()
    tx = mech.privatize()
    state = tx.init(P)

    def noisy(value, key):
        return tx.update(jaxdp.Summed({"w": value}, 1.0), state, P, key=key)[0]["w"]

    def scanned(value, key):
        return jax.lax.scan(lambda c, _: (c, noisy(value, key)), 0, None, length=2)[1]

    def once(value, key):
        def body(at):
            return at[0] + 1, noisy(at[1], key)

        return jax.lax.while_loop(lambda at: at[0] < 1, body, (0, value))[1]

    step = {
        "checkpoint": jax.checkpoint(noisy),
        "jit": jax.jit(noisy),
        "scan": scanned,
        "while": once,
        "cond": lambda v, k: jax.lax.cond(v[0] >= 0, noisy, lambda v, k: 0.0 * noisy(v, k), v, k),
    }[around]
    key = mech.simulated_key(jax.random.key(0))
    equal = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 3), key)
    assert np.isnan(jax.vmap(step)(jnp.zeros((3, 4)), equal)).all()


# Held: the noise of a calibration against the closed forms (Balle and Wang 2018; one sampled step).
def phi(x):
    from scipy.stats import norm

    return norm.cdf(x)


def gaussian_delta(mu, eps):
    return phi(mu / 2 - eps / mu) - np.exp(eps) * phi(-mu / 2 - eps / mu)


@pytest.mark.parametrize(
    ("eps", "delta", "steps"), [(0.5, 1e-6, 4), (50.0, 0.4, 3), (1e-2, 1e-9, 1)]
)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_full_batches_meet_the_budget_and_no_more(eps, delta, steps, relation):
    mech = jaxdp.dp_sgd(
        l2_clip_norm=1.0,
        batch_size=9,
        dataset_size=9,
        sampling="full_batch",
        epsilon=eps,
        delta=delta,
        steps=steps,
        relation=relation,
    )
    far = 2 if relation == "replace_one" else 1
    found = gaussian_delta(far * np.sqrt(steps) / mech.noise_multiplier, eps)
    assert 0.98 * delta <= found <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    ("q", "eps", "delta"), [(1e-6, 0.01, 1e-9), (0.5, 1.0, 1e-5), (0.9, 3.0, 0.01)]
)
def test_one_sampled_step_meets_the_budget_and_no_more(q, eps, delta):
    size = 10**6
    mech = jaxdp.dp_sgd(
        l2_clip_norm=1.0,
        batch_size=round(q * size),
        dataset_size=size,
        epsilon=eps,
        delta=delta,
        steps=1,
    )
    mu = 1 / mech.noise_multiplier
    removed = q * gaussian_delta(mu, np.log1p(np.expm1(eps) / q))
    inside = 1 + np.expm1(-eps) / q  # of one added: H(N(0) || mixture)
    added = 0.0
    if inside > 0:
        e = -np.log(inside)
        added = np.exp(eps) * q * np.exp(-e) * gaussian_delta(mu, e)
    assert max(removed, added) <= delta * (1 + 1e-6)
    assert 0.98 * delta <= removed
