"""The link that adds correlated noise: the rows of C⁻¹Z, and refusals of what does not go on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.noise import Dense, optimal_banded, strategies
from jaxdp.noise.correlated import part_of, privatize_correlated
from jaxdp.normals import noised
from jaxdp.tickets import NoiseKey, simulated_key
from tests.laws import is_gaussian

N = 24
PARAMS = {"w": jnp.zeros((40, 5)), "b": jnp.zeros(30)}
STRATEGIES = {
    "identity": strategies.identity(N),
    "square root": strategies.square_root(N),
    "four bands": optimal_banded(N, 4),
    "two bands": strategies.Toeplitz((1.0, 0.5), N),
    "banded inverse": strategies.banded_inverse_square_root(N, 5),
    "buffered": strategies.Buffered((0.2, 0.3), (0.95, 0.5), N),
    "dense": Dense.of(np.tril(np.random.default_rng(0).uniform(0.1, 0.4, (N, N))) + np.eye(N)),
    "dense, banded": Dense.of(np.tril(np.triu(np.full((N, N), 0.3), -2)) + np.eye(N)),
}


def keys(strategy, multiplier=1.0, count=N, seed=3):
    split = jax.random.split(jax.random.key(seed), count)
    return [simulated_key(k, {part_of(strategy): multiplier}, i) for i, k in enumerate(split)]


def summed(value=0.0, l2=1.0, params=PARAMS):
    return jaxdp.Summed(jax.tree.map(lambda p: jnp.full(p.shape, value, jnp.float32), params), l2)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def rows(strategy, multiplier=1.0, l2=1.0, batch=1.0, params=PARAMS):
    """The updates [n, parameters] of sums of zeros, and the normals [n, parameters] of their keys."""
    tx = privatize_correlated(strategy, multiplier, batch)
    update = jax.jit(lambda state, key: tx.update(summed(l2=l2, params=params), state, key=key))
    state, found, fresh = tx.init(params), [], []
    for key in keys(strategy, multiplier):
        updates, state = update(state, key)
        found.append(flat(updates))
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        fresh.append(flat(noised(zeros, 1.0, jnp.asarray(key.words[0]))))
    return np.stack(found).astype(float), np.stack(fresh).astype(float)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_times_noise_is_independent_noise(name):
    strategy = STRATEGIES[name]
    noise, normals = rows(strategy)
    np.testing.assert_allclose(strategy.matrix() @ noise, normals, atol=3e-5)
    assert is_gaussian(normals, 1.0)


@pytest.mark.parametrize("name", ["four bands", "buffered", "dense", "banded inverse"])
def test_each_step_has_the_deviation_that_the_strategy_says(name):
    strategy = STRATEGIES[name]
    noise, _ = rows(strategy, 2.0, l2=0.5, batch=4.0, params={"w": jnp.zeros((200, 50))})
    found = noise.std(axis=1)
    np.testing.assert_allclose(found, strategy.inverse_row_norms() * 2.0 * 0.5 / 4.0, rtol=0.05)


def test_prefix_sums_have_the_error_that_the_strategy_says():
    strategy = STRATEGIES["four bands"]
    noise, _ = rows(strategy, params={"w": jnp.zeros((200, 50))})
    found = np.sqrt(np.mean(np.cumsum(noise, axis=0) ** 2))
    assert found == pytest.approx(jaxdp.noise.rms_error(strategy), rel=0.03)


def test_the_gradient_itself_passes_through():
    strategy = STRATEGIES["four bands"]
    tx = privatize_correlated(strategy, 1.0, 2.0)
    (key, *_) = keys(strategy)
    zero, _ = tx.update(summed(0.0), tx.init(PARAMS), key=key)
    seven, _ = tx.update(summed(7.0), tx.init(PARAMS), key=key)
    np.testing.assert_allclose(flat(seven) - flat(zero), 3.5, atol=1e-5)


def test_members_of_a_vmap_and_a_scan_get_the_noise_of_their_own_keys():
    strategy = STRATEGIES["four bands"]
    tx = privatize_correlated(strategy, 1.0, 1.0)
    seeds = [1, 2]
    stacked = jax.tree.map(
        lambda *k: jnp.stack([jnp.asarray(x) for x in k]),
        *[
            jax.tree.map(lambda *s: jnp.stack([jnp.asarray(x) for x in s]), *keys(strategy, seed=s))
            for s in seeds
        ],
    )

    def member(each):
        def body(state, key):
            updates, state = tx.update(summed(), state, key=key)
            return state, updates

        return jax.lax.scan(body, tx.init(PARAMS), each)[1]

    both = jax.jit(jax.vmap(member))(stacked)
    for place, seed in enumerate(seeds):
        state = tx.init(PARAMS)
        for i, key in enumerate(keys(strategy, seed=seed)):
            updates, state = tx.update(summed(), state, key=key)
            jax.tree.map(
                lambda a, b, at=(place, i): np.testing.assert_allclose(a[at], b, atol=2e-5),
                both,
                updates,
            )


@pytest.mark.parametrize(
    "wrong",
    [
        "a step left out",
        "a step again",
        "the state before",
        "another stream",
        "the first of another stream",
        "beyond",
    ],
)
def test_what_does_not_go_on_from_the_state_is_nan_for_ever(wrong):
    strategy = STRATEGIES["four bands"]
    tx = privatize_correlated(strategy, 1.0, 1.0)
    made = keys(strategy, count=N + 1)
    linked = [made[0]] + [
        NoiseKey(k.words, k.multipliers, k.tag, k.step, before.tag, k.parts)
        for before, k in itertools.pairwise(made)
    ]
    state = tx.init(PARAMS)
    last = N if wrong == "beyond" else 4
    for key in linked[:last]:
        before, (updates, state) = state, tx.update(summed(), state, key=key)
    assert np.isfinite(flat(updates)).all()
    other = keys(strategy, seed=9)
    alien = NoiseKey(
        other[4].words,
        other[4].multipliers,
        other[4].tag,
        other[4].step,
        other[3].tag,
        other[4].parts,
    )
    after, key = {
        "a step left out": (state, linked[5]),
        "a step again": (state, linked[3]),
        "the state before": (before, linked[4]),
        "another stream": (state, alien),
        "the first of another stream": (state, made[0]),
        "beyond": (state, linked[-1]),
    }[wrong]
    updates, after = tx.update(summed(), after, key=key)
    assert np.isnan(flat(updates)).all()
    if wrong != "beyond":
        follow = NoiseKey(*keys(strategy)[int(after.step)].__dict__.values())
        updates, _ = tx.update(summed(), after, key=follow)
        assert np.isnan(flat(updates)).all()


def test_noise_charged_as_correlated_is_not_added_independently():
    strategy = STRATEGIES["four bands"]
    (key, *_) = keys(strategy)
    tx = jaxdp.privatize(1.0, 1.0)
    with pytest.raises(ValueError, match="part must be among those that the step was charged for"):
        tx.update(summed(), tx.init(PARAMS), key=key)
    tx = privatize_correlated(STRATEGIES["two bands"], 1.0, 1.0)
    with pytest.raises(ValueError, match="part must be among"):
        tx.update(summed(), tx.init(PARAMS), key=key)
    tx = privatize_correlated(strategy, 1.5, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be the one that the step was"):
        tx.update(summed(), tx.init(PARAMS), key=key)


def test_it_is_first_in_the_chain_and_takes_a_summed():
    tx = optax.chain(privatize_correlated(STRATEGIES["four bands"], 1.0, 1.0), optax.sgd(0.1))
    with pytest.raises(TypeError, match="must come first in the chain"):
        tx.update(PARAMS, tx.init(PARAMS))
