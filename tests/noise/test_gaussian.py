"""The link that adds Gaussian noise, its keys, lanes and refusals; links that are not of jaxdp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.ledger.tickets import simulated_key
from jaxdp.noise import IndependentNoise, IntegerMatrixNoise, IntegerNoise, MatrixNoise, identity
from jaxdp.optimizers.algorithm import Algorithm
from tests.laws import are_uncorrelated, is_gaussian
from tests.ledger import small
from tests.ledger.small import N, P, X, loss_fn, mechanism
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused


def keys(multiplier, count=1, seed=11):
    """Noise keys of so many steps."""
    split = jax.random.split(jax.random.key(seed), count)
    return [simulated_key(key, {"gradient": multiplier}, step) for step, key in enumerate(split)]


KEY = keys(1.0)[0]
PARAMS = {"w": jnp.zeros((60, 50)), "b": jnp.zeros((3000,))}
ONE = jaxdp.privatize(1.0, 1.0)
SCHEDULE = jaxdp.schedules.from_multipliers([1.0, 2.0])


def summed(value=0.0, l2=0.5, params=PARAMS, unscale=None):
    return jaxdp.Summed(
        jax.tree.map(lambda p: jnp.full(p.shape, value, jnp.float32), params), l2, unscale
    )


def released(tx, count=1, updates=None, params=PARAMS, multiplier=1.0):
    state, out = tx.init(params), []
    for key in keys(multiplier, count):
        update, state = tx.update(updates or summed(), state, params, key=key)
        out.append(update)
    return out


def test_noise_has_its_scale_and_no_other_on_the_sum_and_the_divisor_is_public():
    for multiplier, l2, batch in ((1.0, 0.5, 10.0), (4.0, 0.1, 512.0)):
        tx, std = jaxdp.privatize(multiplier, batch), multiplier * l2 / batch
        (update,) = released(tx, 1, summed(l2=l2), multiplier=multiplier)
        for leaf in jax.tree.leaves(update):
            assert is_gaussian(leaf, std)
            assert not any(is_gaussian(leaf, std * wrong) for wrong in (1.5, 1 / 1.5))
    tx = jaxdp.privatize(2.0, 10.0)
    (zero,), (seven,) = (released(tx, 1, summed(v), multiplier=2.0) for v in (0.0, 7.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b - a, 0.7, atol=1e-5), zero, seven)


def test_the_state_has_no_part_in_the_noise():
    """A state that is restored, dropped or begun anew uses no noise twice: keys come with draws."""
    state = ONE.init(PARAMS)
    one, other = released(ONE, 2)
    again = [ONE.update(summed(), state, PARAMS, key=key)[0] for key in keys(1.0, 2)]
    jax.tree.map(np.testing.assert_array_equal, again, [one, other])
    assert "key" not in state._fields
    assert all(leaf.size <= 2 for leaf in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ONE.init)(PARAMS), state)
    assert jax.vmap(ONE.init)({"w": jnp.zeros((2, 5))}).last.shape == (2, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_key_twice_gives_nan(compiled):
    def update(state, key):
        return ONE.update(summed(), state, PARAMS, key=key)

    update = jax.jit(update) if compiled else update
    first, state = update(ONE.init(PARAMS), KEY)
    second, _ = update(state, KEY)
    assert np.isfinite(first["b"]).all()
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(second))


def test_another_multiplier_than_was_charged_is_refused_and_nan_inside_jit():
    tx, words = jaxdp.privatize(0.1, 1.0), "must be the one that the step was charged for, 1.0, got"
    refused(words, tx.update, summed(), tx.init(PARAMS), PARAMS, key=KEY)
    inside = jax.jit(lambda key: tx.update(summed(), tx.init(PARAMS), PARAMS, key=key)[0])
    assert np.isnan(inside(KEY)["b"]).all()
    assert np.isfinite(inside(keys(0.1)[0])["b"]).all()


def test_what_is_no_sum_no_key_or_no_number_is_refused():
    chain = optax.chain(ONE, optax.sgd(0.1))
    votes = simulated_key(jax.random.key(0), {"votes": 1.0})
    wrong = jaxdp.Summed({"w": jnp.zeros(50), "b": jnp.zeros(3000)}, 1.0)
    schedule = optax.linear_schedule(1.0, 0.01, 10)
    injected = optax.inject_hyperparams(jaxdp.privatize)
    whole = {"n": jnp.zeros(3, jnp.int32)}
    search = "must not be passed to a private chain"

    def updated(tx=ONE, value=None, **options):
        return lambda: tx.update(value or summed(), tx.init(PARAMS), PARAMS, **options)

    all_refused(
        [
            ("key must be given to an update that you compile", updated()),
            ("key must be the noise key .* got PRNGKeyArray", updated(key=jax.random.key(0))),
            (r"part must be among .*\('votes',\), got 'gradient'", updated(key=votes)),
            ("the sum must have the parameters' shapes", updated(value=wrong, key=KEY)),
            (f"grad {search}", updated(chain, key=KEY, grad=jnp.zeros(()))),
            (f"value_fn {search}", updated(chain, key=KEY, value_fn=jnp.zeros(()))),
            ("multiplier must be a Python number", lambda: injected(schedule, 1.0).init(PARAMS)),
            (r"be floating-point arrays, got int32 at \['n'\]", lambda: ONE.init(whole)),
            ("must be a finite number of at least 0, got -1", lambda: jaxdp.privatize(-1.0, 10.0)),
            ("noise_multiplier", lambda: jaxdp.privatize(float("inf"), 10.0)),
            ("expected_batch_size must be a finite number abo", lambda: jaxdp.privatize(1.0, 0.0)),
            ("multiplier must be a Python number", lambda: jaxdp.privatize(jnp.ones(()), 10.0)),
            ("multiplier must be a Python number", lambda: IntegerNoise(jnp.ones(()))),
            ("multiplier must be a Python number", lambda: MatrixNoise(jnp.ones(()), identity(2))),
            ("noise_multiplier must be a number", lambda: MatrixNoise(SCHEDULE, identity(2))),
            (
                "noise_multiplier must be a number",
                lambda: IntegerMatrixNoise(SCHEDULE, identity(2)),
            ),
        ]
    )
    with pytest.raises(TypeError, match="must come first in the chain and take the Summed"):
        ONE.update(PARAMS, ONE.init(PARAMS), PARAMS)
    assert "<secret>" in repr(KEY)
    for word in np.ravel(KEY.words):
        assert str(int(word)) not in repr(KEY)
        assert f"{int(word):x}" not in repr(KEY)


def test_unscale_comes_after_the_noise():
    """Which is float32 whatever the parameters."""
    diagonal = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), PARAMS)
    (update,) = released(ONE, 1, summed(l2=2.0, unscale=diagonal))
    assert is_gaussian(update["b"], 6.0)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    (low,), (high,) = released(ONE, 1, summed(), params), released(ONE)
    assert low["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low["b"], high["b"].astype(jnp.bfloat16))


def test_selective_wrappers_go_around_what_follows():
    rates = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    parts = {"w": "fast", "b": "slow"}
    mixed = optax.multi_transform({"fast": rates, "slow": optax.sgd(0.01)}, parts)
    (update,) = released(optax.chain(ONE, mixed))
    assert is_gaussian(update["w"], 0.05)
    assert is_gaussian(update["b"], 0.005)
    around = optax.multi_transform({"fast": ONE, "slow": optax.identity()}, parts)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        around.update(summed(), around.init(PARAMS), PARAMS)


MECHANISM, INNER = mechanism(), jaxdp.privatize(1.0, 20)


def faint(updates, state, params=None, *, key, **_):
    words, _ = key.part("gradient")
    noise = 1e-6 * jax.random.normal(jax.random.wrap_key_data(words), (4,))
    return {"w": updates.value["w"] / 20 + noise}, state


def leaking(updates, state, params=None, **extra):
    noisy, state = INNER.update(updates, state, params, **extra)
    return {"w": noisy["w"] + updates.value["w"]}, state


class Fainter(IndependentNoise):
    """A kind of the user's own, which adds less than its multiplier says."""

    def add(self, state, paid):
        return super().add(state, paid._replace(multiplier=1e-6 * paid.multiplier))


OTHERS = [optax.GradientTransformationExtraArgs(INNER.init, each) for each in (faint, leaking)]
OTHERS.append(jaxdp.privatize(Fainter(1.0), 20))


@functools.cache
def summer():
    return MECHANISM.clipped_grad(loss_fn)


def trained(link, rows, ledger=None):
    """The ledger's complaints on two steps of an algorithm with the link."""
    algorithm = Algorithm(MECHANISM, optax.sgd(1.0), noise=link)
    given = {"physical_batch_size": rows, "ledger": ledger}
    train = jaxdp.Trainer(loss_fn, algorithm, None, X, **given)
    try:
        small.trained(train)
        return train.unverified()
    finally:
        train.close()


# Before: trained without any noise, unverified() == [], epsilon 3.9; or by another multiplier,
# which gave NaN parameters after the first step, and a warning nowhere.
@pytest.mark.parametrize("rows", [8, None])
def test_an_algorithm_that_adds_no_noise_or_other_noise_is_refused(rows):
    opens = lambda updates, state, params=None, **_: (updates.value, state)  # noqa: E731
    none = optax.GradientTransformationExtraArgs(INNER.init, opens)
    other = "must be the one that the step was charged for, 1.0"
    all_refused(
        [
            ("must add the noise", lambda: trained(none, rows)),
            (other, lambda: trained(jaxdp.privatize(0.1, 20), rows)),
            (other, lambda: trained(jaxdp.privatize(Fainter(0.1), 20), rows)),
        ]
    )
    tx = optax.chain(none, optax.sgd(1.0))
    total = summer()(P, X, MECHANISM.sampler(N).draw())
    refused("must add the noise", jaxdp.compile_update(tx, donate=False), P, tx.init(P), total)


# Before: unverified() == [], since the key was asked for; epsilon said nothing of what was released.
@pytest.mark.parametrize("link", OTHERS, ids=["too faint", "beside the noise", "a kind"])
def test_noise_that_is_not_of_jaxdp_is_told(link, tmp_path):
    words = "a link that is not jaxdp's own"
    sampler, tx = MECHANISM.sampler(N), optax.chain(link, optax.sgd(1.0))
    update = jaxdp.compile_update(tx, donate=False)
    for _ in range(2):  # traced, and from the cache
        total = summer()(P, X, sampler.draw())
        update(P, tx.init(P), total)
        (said,) = sampler.ledger.unverified()
        assert words in said
    for rows in (8, None):
        file = tmp_path / f"{rows}"
        (said,) = trained(link, rows, file)
        assert words in said
        assert jaxdp.Ledger(file).unverified() == [said]
    if link is OTHERS[-1]:  # outside jit nobody watches; a kind says itself that it is no own one
        total = summer()(P, X, (sampler := MECHANISM.sampler(N)).draw())
        link.update(total, link.init(P), P)
        (said,) = sampler.ledger.unverified()
        assert words in said


# Noise in many lanes: vmap, scan, shard_map and pmap.
SAME = "key must be another one for every member of a vmap"
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda key: jax.lax.cond(key.step >= 0, f, lambda k: 0.0 * f(k), key),
    "while": lambda f: (
        lambda key: jax.lax.while_loop(
            lambda at: at[0] < 1, lambda at: (at[0] + 1, f(key)), (0, PARAMS["w"])
        )[1]
    ),
}


def alone(key, value=0.0):
    """The noisy sum of one member of an ensemble."""
    return update(ONE.init(PARAMS), key, value)[0]["w"]


def update(state, key, value=0.0):
    sums = jax.tree.map(lambda p: p + value, PARAMS)
    return ONE.update(jaxdp.Summed(sums, 1.0), state, PARAMS, key=key)


def stacked(count=3, repeat=False):
    keys = [sgd_of(1.0, 1.0, 5, 50).sampler(50).draw().key() for _ in range(count)]
    keys = [keys[0], *keys[:-1]] if repeat else keys
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *keys)


def scanned(keys, sums):
    """Steps one after the other, over leading axes of keys and sums."""

    def step(state, now):
        updates, state = update(state, *now)
        return state, updates["w"]

    return jax.lax.scan(step, ONE.init(PARAMS), (keys, sums))[1]


def are_independent(rows):
    assert all(is_gaussian(row, 1.0) for row in rows)
    assert all(are_uncorrelated(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))


def test_members_have_each_their_own_noise():
    keys, again = stacked(), stacked(repeat=True)
    each = [alone(jax.tree.map(lambda leaf, n=n: leaf[n], keys)) for n in range(3)]
    for name, wrap in WRAPS.items():
        noises = jax.vmap(wrap(alone))(keys)
        are_independent(noises)
        np.testing.assert_allclose(noises, each, rtol=1e-6, err_msg=name)
        assert np.isnan(jax.vmap(wrap(alone))(again)).all(), name


def test_vmaps_and_scans_in_each_other_have_noise_of_their_own():
    nested = jax.vmap(jax.vmap(lambda seed: alone(simulated_key(seed, {"gradient": 1.0}))))
    are_independent(nested(jax.random.split(jax.random.key(0), (2, 2))).reshape(4, -1))
    again = jax.tree.map(lambda leaf: leaf[:, None], stacked(repeat=True))
    assert np.isnan(jax.vmap(jax.vmap(alone))(again)).all()
    keys = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), stacked(6))
    sums, values = jnp.zeros((2, 3)), jnp.arange(3.0)
    noises = jax.vmap(scanned)(keys, sums)
    are_independent(noises.reshape(6, -1))
    inner = jax.lax.map(lambda row: jax.vmap(alone)(row), keys)
    np.testing.assert_allclose(inner.reshape(6, -1), noises.reshape(6, -1), rtol=1e-6)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), keys)
    assert np.isnan(jax.vmap(scanned)(twice, sums)).all()
    # One key for all members, or for every member's step n, is refused.
    steps = jax.tree.map(lambda leaf: leaf[0], keys)
    nested = jax.vmap(jax.vmap(alone, (None, 0)), (0, None))
    inside = jax.jit(lambda key: jax.vmap(lambda v: alone(key, v))(values))
    wraps = (WRAPS[name] for name in ("plain", "jit", "checkpoint"))
    rows = [(SAME, lambda w=w: jax.vmap(w(lambda v: alone(KEY, v)))(values)) for w in wraps]
    rows += [(SAME, lambda: nested(stacked(), values)), (SAME, lambda: inside(KEY))]
    all_refused([*rows, (SAME, lambda: jax.vmap(scanned, (None, 0))(steps, sums))])


def test_a_key_from_outside_a_loop_gives_nan_and_each_member_s_state_and_multiplier_is_checked():
    def loop(key):
        def step(state, value):
            updates, state = update(state, key, value)
            return state, updates["w"]

        return jax.lax.scan(step, ONE.init(PARAMS), jnp.arange(4.0))[1]

    for wrap in (WRAPS["plain"], jax.jit):
        noises = wrap(loop)(KEY)
        assert np.isfinite(noises[0]).all()
        assert np.isnan(noises[1:]).all()
    assert np.isfinite(scanned(stacked(4), jnp.arange(4.0))).all()
    # A vmap over members with their own states sees a key that comes twice in a row.
    keys = stacked(2)
    states = jax.vmap(lambda _: ONE.init(PARAMS))(jnp.arange(2))
    first, states = jax.vmap(update)(states, keys)
    assert np.isfinite(first["w"]).all()
    fresh = jax.tree.map(lambda old, new: old.at[1].set(new[1]), keys, stacked(2))
    second, _ = jax.vmap(update)(states, fresh)
    assert np.isnan(second["w"][0]).all()
    assert np.isfinite(second["w"][1]).all()
    seeds, multipliers = jax.random.split(jax.random.key(0), 2), jnp.asarray([1.0, 10.0])
    noises = jax.vmap(lambda s, z: alone(simulated_key(s, {"gradient": z})))(seeds, multipliers)
    assert np.isfinite(noises[0]).all()
    assert np.isnan(noises[1]).all()
