import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.tickets import simulated_key
from tests.laws import are_uncorrelated, is_gaussian


def keys(multiplier, count=1, seed=11):
    """Noise keys of so many steps."""
    split = jax.random.split(jax.random.key(seed), count)
    return [simulated_key(key, {"gradient": multiplier}, step) for step, key in enumerate(split)]


KEY = keys(1.0)[0]
PARAMS = {"w": jnp.zeros((60, 50)), "b": jnp.zeros((3000,))}


def summed(value=0.0, l2=0.5, params=PARAMS, unscale=None):
    return jaxdp.Summed(
        jax.tree.map(lambda p: jnp.full(p.shape, value, jnp.float32), params), l2, unscale
    )


def releases(tx, count, updates=None, params=PARAMS, multiplier=1.0):
    state, out = tx.init(params), []
    for key in keys(multiplier, count):
        update, state = tx.update(updates or summed(), state, params, key=key)
        out.append(update)
    return out, state


@pytest.mark.parametrize(("multiplier", "l2", "batch"), [(1.0, 0.5, 10.0), (4.0, 0.1, 512.0)])
def test_noise_has_its_scale_and_no_other(multiplier, l2, batch):
    tx = jaxdp.privatize(multiplier, batch)
    (update,), _ = releases(tx, 1, summed(l2=l2), multiplier=multiplier)
    std = multiplier * l2 / batch
    for leaf in jax.tree.leaves(update):
        assert is_gaussian(leaf, std)
        for wrong in (std * 1.5, std / 1.5):
            assert not is_gaussian(leaf, wrong)


def test_noise_is_on_the_sum_and_the_divisor_is_public():
    tx = jaxdp.privatize(2.0, 10.0)
    (zero,), _ = releases(tx, 1, summed(0.0), multiplier=2.0)
    (seven,), _ = releases(tx, 1, summed(7.0), multiplier=2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b - a, 0.7, atol=1e-5), zero, seven)


def test_steps_and_leaves_never_share_noise():
    tx = jaxdp.privatize(1.0, 1.0)
    params = {"a": jnp.zeros(3000), "b": jnp.zeros(3000), "c": jnp.zeros(3000)}
    out, _ = releases(tx, 4, summed(params=params), params)
    noises = [leaf for update in out for leaf in jax.tree.leaves(update)]
    for i, one in enumerate(noises):
        for other in noises[i + 1 :]:
            assert are_uncorrelated(one, other)
            assert len(np.intersect1d(one, other)) < 10
    assert not are_uncorrelated(noises[0], noises[0] + noises[1])  # the test can fail


def test_halves_of_a_leaf_are_independent():
    (update,), _ = releases(jaxdp.privatize(1.0, 1.0), 1)
    half = PARAMS["b"].size // 2
    assert are_uncorrelated(update["b"][:half], update["b"][half:])


def test_an_empty_batch_gets_full_and_fresh_noise():
    tx = jaxdp.privatize(1.0, 1.0)
    (full, empty, again), _ = releases(tx, 3, summed(0.0))
    assert is_gaussian(empty["b"], 0.5)
    assert are_uncorrelated(full["b"], empty["b"])
    assert are_uncorrelated(empty["b"], again["b"])


def test_the_state_has_no_part_in_the_noise():
    """A state that is restored, dropped or begun anew uses no noise twice: keys come with draws."""
    tx = jaxdp.privatize(1.0, 1.0)
    state = tx.init(PARAMS)
    (one, other), _ = releases(tx, 2)
    again = [tx.update(summed(), state, PARAMS, key=key)[0] for key in keys(1.0, 2)]
    jax.tree.map(np.testing.assert_array_equal, again, [one, other])
    assert are_uncorrelated(one["b"], other["b"])
    assert "key" not in state._fields
    assert all(leaf.size <= 2 for leaf in jax.tree.leaves(state))


def test_a_state_can_be_made_under_jit_and_vmap():
    tx = jaxdp.privatize(1.0, 1.0)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(tx.init)(PARAMS), tx.init(PARAMS))
    assert jax.vmap(tx.init)({"w": jnp.zeros((2, 5))}).last.shape == (2, 2)


def test_an_update_without_key_or_ticket_is_refused():
    tx = jaxdp.privatize(1.0, 1.0)
    with pytest.raises(ValueError, match="key must be given to an update that you compile"):
        tx.update(summed(), tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"key must be the noise key of a draw.* got PRNGKeyArray"):
        tx.update(summed(), tx.init(PARAMS), PARAMS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"part must be among .*\('votes',\), got 'gradient'"):
        tx.update(
            summed(), tx.init(PARAMS), PARAMS, key=simulated_key(jax.random.key(0), {"votes": 1.0})
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_one_key_twice_gives_nan(compiled):
    tx = jaxdp.privatize(1.0, 1.0)

    def update(state, key):
        return tx.update(summed(), state, PARAMS, key=key)

    update = jax.jit(update) if compiled else update
    first, state = update(tx.init(PARAMS), KEY)
    second, _ = update(state, KEY)
    assert np.isfinite(first["b"]).all()
    assert np.isnan(second["b"]).all()
    assert np.isnan(second["w"]).all()


def test_another_multiplier_than_was_charged_is_refused_and_nan_inside_jit():
    tx = jaxdp.privatize(0.1, 1.0)
    with pytest.raises(
        ValueError, match=r"must be the one that the step was charged for, 1.0, got"
    ):
        tx.update(summed(), tx.init(PARAMS), PARAMS, key=KEY)
    inside = jax.jit(lambda key: tx.update(summed(), tx.init(PARAMS), PARAMS, key=key)[0])
    assert np.isnan(inside(KEY)["b"]).all()
    assert np.isfinite(inside(keys(0.1)[0])["b"]).all()


@pytest.mark.parametrize("name", ["grad", "value_fn"])
def test_what_a_line_search_asks_for_is_refused(name):
    tx = optax.chain(jaxdp.privatize(1.0, 1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match=f"{name} must not be passed to a private chain"):
        tx.update(summed(), tx.init(PARAMS), PARAMS, key=KEY, **{name: jnp.zeros(())})


def test_the_noise_multiplier_is_not_injectable():
    inject = optax.inject_hyperparams(jaxdp.privatize)
    schedule = optax.linear_schedule(1.0, 0.01, 10)
    with pytest.raises(ValueError, match="noise_multiplier must be a Python number"):
        inject(noise_multiplier=schedule, expected_batch_size=1.0).init(PARAMS)


def test_a_sum_of_another_shape_is_refused():
    tx = jaxdp.privatize(1.0, 1.0)
    wrong = jaxdp.Summed({"w": jnp.zeros(50), "b": jnp.zeros(3000)}, 1.0)
    with pytest.raises(ValueError, match="the sum must have the parameters' shapes"):
        tx.update(wrong, tx.init(PARAMS), PARAMS, key=KEY)


def test_repr_hides_the_key():
    assert "<secret>" in repr(KEY)
    for word in np.ravel(KEY.words):
        assert str(int(word)) not in repr(KEY)
        assert f"{int(word):x}" not in repr(KEY)


def test_seeds_under_vmap_are_independent():
    tx = jaxdp.privatize(1.0, 1.0)

    def run(key):
        key = simulated_key(key, {"gradient": 1.0})
        return tx.update(summed(), tx.init(PARAMS), PARAMS, key=key)[0]["b"]

    one, two = jax.vmap(run)(jax.random.split(jax.random.key(11), 2))
    assert is_gaussian(one, 0.5)
    assert are_uncorrelated(one, two)


def test_noise_is_float32_whatever_the_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jaxdp.privatize(1.0, 1.0)
    (low,), _ = releases(tx, 1, summed(), params)
    (high,), _ = releases(tx, 1)
    assert low["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low["b"], high["b"].astype(jnp.bfloat16))


def test_unscale_comes_after_the_noise():
    diagonal = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), PARAMS)
    (update,), _ = releases(jaxdp.privatize(1.0, 1.0), 1, summed(l2=2.0, unscale=diagonal))
    assert is_gaussian(update["b"], 6.0)


def test_selective_wrappers_go_around_what_follows():
    rates = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    mixed = optax.multi_transform(
        {"fast": rates, "slow": optax.sgd(0.01)}, {"w": "fast", "b": "slow"}
    )
    tx = optax.chain(jaxdp.privatize(1.0, 1.0), mixed)
    (update,), _ = releases(tx, 1)
    assert is_gaussian(update["w"], 0.05)
    assert is_gaussian(update["b"], 0.005)
    around = optax.multi_transform(
        {"noisy": jaxdp.privatize(1.0, 1.0), "plain": optax.identity()},
        {"w": "noisy", "b": "plain"},
    )
    with pytest.raises((TypeError, ValueError, AttributeError)):
        around.update(summed(), around.init(PARAMS), PARAMS)


def test_anything_but_a_sum_is_refused():
    tx = jaxdp.privatize(1.0, 1.0)
    with pytest.raises(TypeError, match="must come first in the chain and take the Summed"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 10.0), "noise_multiplier must be a finite number of at least 0, got -1.0"),
        ((float("inf"), 10.0), "noise_multiplier"),
        ((1.0, 0.0), "expected_batch_size must be a finite number above 0, got 0.0"),
        ((jnp.ones(()), 10.0), "noise_multiplier must be a Python number"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxdp.privatize(*arguments)


def test_integer_parameters_are_refused():
    with pytest.raises(
        ValueError, match=r"params must be floating-point arrays, got int32 at \['n'\]"
    ):
        jaxdp.privatize(1.0, 1.0).init({"n": jnp.zeros(3, jnp.int32)})
