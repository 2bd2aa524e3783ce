"""The link that adds correlated noise: the rows of C⁻¹Z, and refusals of what does not go on."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.ledger.tickets import simulated_key
from jaxdp.noise import (
    BandedInverse,
    Buffered,
    Dense,
    MadeAgain,
    Toeplitz,
    optimal_banded,
    strategies,
)
from jaxdp.noise.correlated import MatrixNoise
from jaxdp.noise.normals import add_normals
from tests.compiling import AS_USERS
from tests.laws import is_gaussian
from tests.mechanisms import mf_of
from tests.refusing import all_refused, refused

N = 24
PARAMS = {"w": jnp.zeros((40, 5)), "b": jnp.zeros(30)}
FOUR = optimal_banded(N, 4)
TWO = Toeplitz((1.0, 0.5), N)
STRATEGIES = {
    "identity": strategies.identity(N),
    "square root": strategies.square_root(N),
    "four bands": FOUR,
    "banded inverse": strategies.banded_inverse_square_root(N, 5),
    "made again": MadeAgain((1.0, -0.9), N),
    "buffered": Buffered((0.2, 0.3), (0.95, 0.5), N),
    "dense": Dense.of(np.tril(np.random.default_rng(0).uniform(0.1, 0.4, (N, N))) + np.eye(N)),
    "dense, banded": Dense.of(np.tril(np.triu(np.full((N, N), 0.3), -2)) + np.eye(N)),
}


def keys(strategy, multiplier=1.0, count=N, seed=3):
    split = jax.random.split(jax.random.key(seed), count)
    part = MatrixNoise(multiplier, strategy).part
    return [simulated_key(k, {part: multiplier}, i, split[i - 1]) for i, k in enumerate(split)]


def stacked(each):
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *each)


def summed(value=0.0, l2=1.0):
    return jaxdp.Summed(jax.tree.map(lambda p: jnp.full_like(p, value), PARAMS), l2)


def flat(tree):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def rows_of(strategy, multiplier, l2=1.0, batch=1.0):
    """A function of stacked keys to the updates [n, parameters] of zeros, and the keys' normals."""
    tx = jaxdp.privatize(MatrixNoise(multiplier, strategy), batch)

    def step(state, key):
        updates, state = tx.update(summed(l2=l2), state, key=key)
        return state, (flat(updates), flat(add_normals(PARAMS, 1.0, key.words[0])))

    return lambda each: jax.lax.scan(step, tx.init(PARAMS), each)[1]


@functools.cache
def compiled():
    """The update with four bands."""
    tx = jaxdp.privatize(MatrixNoise(1.0, FOUR), 1.0)
    return jax.jit(lambda state, key: tx.update(summed(), state, key=key)), tx.init(PARAMS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_times_noise_is_independent_noise(name):
    strategy = STRATEGIES[name]
    noise, normals = rows_of(strategy, 2.0, l2=0.5, batch=4.0)(stacked(keys(strategy, 2.0)))
    fresh = strategy.matrix() @ np.asarray(noise, float) / (2.0 * 0.5 / 4.0)
    np.testing.assert_allclose(fresh, normals, atol=3e-5)
    assert is_gaussian(normals, 1.0)


def test_members_of_a_vmap_get_the_noise_of_their_own_keys_and_the_gradient_passes_through():
    both, run = [stacked(keys(FOUR, seed=seed)) for seed in (1, 2)], rows_of(FOUR, 1.0)
    found, _ = jax.vmap(run)(stacked(both))
    for place, each in enumerate(both):
        np.testing.assert_allclose(found[place], run(each)[0], atol=2e-5)
    tx, key = jaxdp.privatize(MatrixNoise(1.0, FOUR), 2.0), keys(FOUR)[0]
    zero, seven = (tx.update(summed(v), tx.init(PARAMS), key=key)[0] for v in (0.0, 7.0))
    np.testing.assert_allclose(flat(seven) - flat(zero), 3.5, atol=1e-5)


def test_what_does_not_go_on_from_the_state_is_nan_for_ever():
    update, start = compiled()
    made, other = keys(FOUR, count=N + 1), keys(FOUR, seed=9)
    linked = [made[0]]
    for before, key in itertools.pairwise(made):
        linked.append(dataclasses.replace(key, previous_tag=before.tag))
    states = [start]
    for key in linked[:N]:
        updates, state = update(states[-1], key)
        assert np.isfinite(flat(updates)).all(), key.step
        states.append(state)
    for wrong, state, key in (
        ("a step left out", states[4], linked[5]),
        ("a step again", states[4], linked[3]),
        ("the state before", states[3], linked[4]),
        ("another stream", states[4], dataclasses.replace(other[4], previous_tag=other[3].tag)),
        ("the first of another stream", states[4], made[0]),
        ("beyond", states[N], linked[N]),
    ):
        updates, after = update(state, key)
        assert np.isnan(flat(updates)).all(), wrong
        if wrong != "beyond":
            follow = made[int(after.step)]
            assert np.isnan(flat(update(after, follow)[0])).all(), wrong


@pytest.mark.parametrize("size", [50, 70_000], ids=["small", "large"])
def test_normals_made_again_are_those_that_were_added_bit_for_bit(size):
    """Leaves that share a loop, and one by itself; against normals of another program."""
    strategy = STRATEGIES["made again"]
    tx, params = (
        jaxdp.privatize(MatrixNoise(1.0, strategy), 1.0),
        {"a": jnp.zeros(size), "b": PARAMS["w"]},
    )
    user = functools.partial(jax.jit, compiler_options=AS_USERS)  # whose digits these are
    update = user(lambda state, key: tx.update(jaxdp.Summed(params, 1.0), state, key=key))
    alone = user(lambda key: add_normals(params, 1.0, key.words[0]))
    state, before = tx.init(params), {name: np.zeros(p.shape, "f4") for name, p in params.items()}
    assert not any(leaf.size for leaf in jax.tree.leaves(state.buffers))
    for key in keys(strategy, count=4):
        noise, state = update(state, key)
        own = {name: np.asarray(z) for name, z in alone(key).items()}
        share = np.float32(strategy.coefficients[1])
        for name in params:
            # The product is rounded to float32 first, or it is not, as the device has it.
            twice = own[name] + share * before[name]
            once = np.float32(own[name].astype(float) + float(share) * before[name].astype(float))
            found = np.asarray(noise[name])
            assert ((found == twice) | (found == once)).all(), (name, key.step)
        before = own


def test_normals_are_taken_back_only_where_ticket_and_state_name_one_key():
    strategy = STRATEGIES["made again"]
    tx = jaxdp.privatize(MatrixNoise(1.0, strategy), 1.0)
    made, other = (keys(strategy, seed=seed) for seed in (3, 9))
    update = jax.jit(lambda state, key: tx.update(summed(), state, key=key))
    _, state = update(tx.init(PARAMS), made[0])
    assert np.isfinite(flat(update(state, made[1])[0])).all()
    nobody = dataclasses.replace(made[1], previous_tag=jnp.zeros(2, jnp.uint32))
    for wrong in (other[1], nobody, made[2], made[0]):
        noise, after = update(state, wrong)
        assert np.isnan(flat(noise)).all()
        for follow in (made[2], dataclasses.replace(made[2], previous_tag=wrong.tag), made[0]):
            assert np.isnan(flat(update(after, follow)[0])).all()


@pytest.mark.parametrize("changed", [{"w": None, "b": jnp.zeros(6)}, {"w": jnp.zeros((3, 2))}])
def test_normals_are_taken_back_of_the_same_leaves_alone(changed):
    """The state has no rows that would not fit: another leaf of as many would get the first's."""
    tx, first = (
        jaxdp.privatize(MatrixNoise(1.0, STRATEGIES["made again"]), 1.0),
        {"w": jnp.zeros(6)},
    )
    first |= {name: None for name in changed if name != "w"}
    made = keys(STRATEGIES["made again"], count=2)
    _, state = tx.update(jaxdp.Summed(first, 1.0), tx.init(first), key=made[0])
    refused(
        "the sum must have the leaves", tx.update, jaxdp.Summed(changed, 1.0), state, key=made[1]
    )


def test_a_simulated_key_takes_back_the_noise_of_its_part_wherever_that_stands():
    part = MatrixNoise(1.0, STRATEGIES["made again"]).part
    one, two = jax.random.split(jax.random.key(0))
    for parts in ({part: 1.0, "votes": 2.0}, {"votes": 2.0, part: 1.0}):
        before, key = simulated_key(one, parts), simulated_key(two, parts, 1, one)
        np.testing.assert_array_equal(key.before, before.part(part)[0])
        np.testing.assert_array_equal(key.previous_tag, before.tag)


def test_noise_that_float32_rounds_away_or_of_another_part_multiplier_or_place_is_refused():
    """Its last rows had no fresh normals; one of 1e38 had none at all, with an epsilon of 4.4."""
    within, between = "inverse that stays within float32", "diagonal between 1e-9 and 1e9"
    rows = []
    for strategy, words in (
        (Toeplitz(tuple(jaxdp.noise.Workload(0.9).toeplitz(4)), 96), within),  # momentum
        (Toeplitz((1.0, 2.0), 48), within),
        (Buffered((2.5,), (0.5,), 48), within),
        (Dense.of(np.asarray([[1e-8, 0.0], [1.0, 1.0]])), within),
        (Dense.of(np.eye(4) * 1e38), between),
        (Dense.of(np.eye(4) * 1e-37), between),
    ):
        given = {"steps": strategy.steps, "strategy": strategy, "sampling": "fixed_order"}
        sizes = 64, 64 * strategy.steps
        rows.append((words, functools.partial(mf_of, 1.0, 1.0, *sizes, **given), strategy))
        rows.append((words, functools.partial(MatrixNoise, 1.0, strategy), strategy))
    all_refused(rows)
    # Noise of another part, multiplier or place.
    (key, *_) = keys(FOUR)

    def updated(tx):
        return lambda: tx.update(summed(), tx.init(PARAMS), key=key)

    all_refused(
        [
            ("must be among those that the step was charged", updated(jaxdp.privatize(1.0, 1.0))),
            ("part must be among", updated(jaxdp.privatize(MatrixNoise(1.0, TWO), 1.0))),
            (
                "must be the one that the step was",
                updated(jaxdp.privatize(MatrixNoise(1.5, FOUR), 1.0)),
            ),
        ]
    )
    tx = optax.chain(jaxdp.privatize(MatrixNoise(1.0, FOUR), 1.0), optax.sgd(0.1))
    refused("must come first in the chain", tx.update, PARAMS, tx.init(PARAMS), error=TypeError)


def fresh_of(strategy, width=64):
    """C times the noise of a run, float [n, width]."""
    tx = jaxdp.privatize(adds := MatrixNoise(1.0, strategy), 1.0)

    def step(state, given):
        number, seed, before = given
        key = simulated_key(seed, {adds.part: 1.0}, number, before)
        row, state = tx.update(jaxdp.Summed(jnp.zeros(width), 1.0), state, key=key)
        return state, row

    n = strategy.steps
    seeds = jax.random.split(jax.random.key(0), n)
    given = jnp.arange(n), seeds, jnp.roll(seeds, 1)
    rows = np.asarray(jax.lax.scan(step, tx.init(jnp.zeros(width)), given)[1], float)
    column = np.fft.rfft(strategy.first_column(), 2 * n)[:, None]
    return np.fft.irfft(column * np.fft.rfft(rows, 2 * n, axis=0), 2 * n, axis=0)[:n]


LONG = {
    "banded": optimal_banded(3000, 16),
    "buffered, decay near 1": Buffered((0.02, 0.003), (0.9, 1 - 2**-24), 3000),
    "on the unit circle": Toeplitz((1.0, 1.0), 3000),
    "banded inverse": BandedInverse((1.0, -0.5, -0.125, -0.0625), 3000),
    "made again": MadeAgain((1.0, -0.999), 3000),
}


@pytest.mark.parametrize("strategy", LONG.values(), ids=LONG)
def test_the_noise_of_3000_steps_is_fresh_in_float32(strategy):
    found = fresh_of(strategy)
    for part in (found[:500], found[-500:]):
        assert abs(part.std() - 1) < 0.02
        assert abs(part.mean()) < 0.03
        assert abs((part[1:] * part[:-1]).mean()) < 0.03


@pytest.mark.parametrize(
    "strategy", [TWO, BandedInverse((1.0, -0.5), N), MadeAgain((1.0, -0.5), N)], ids=repr
)
def test_one_key_for_members_of_a_vmap_is_refused(strategy):
    """Whatever has lanes: the sums, their sensitivities, or states that were copied."""
    tx, params = jaxdp.privatize(MatrixNoise(1.0, strategy), 1.0), jnp.zeros(3)
    (key, *_), given = keys(strategy), (params, jnp.float32(1.0), tx.init(params))

    def updated(value, l2, state):
        return tx.update(jaxdp.Summed(value, l2), state, params, key=key)[0]

    rows = []
    for n, shared in enumerate(given):
        twice = [*given[:n], jax.tree.map(lambda x: jnp.stack([x, x]), shared), *given[n + 1 :]]
        axes = tuple(0 if n == m else None for m in range(3))
        call = functools.partial(jax.vmap(updated, axes), *twice)
        rows.append(("another one for every member", call, n))
    all_refused(rows)
