import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.statistics import are_uncorrelated, is_gaussian

KEY = jax.random.key(11)
PARAMS = {"w": jnp.zeros((60, 50)), "b": jnp.zeros((3000,))}


def summed(value=0.0, l2=0.5, params=PARAMS, unscale=None):
    return jaxdp.Summed(
        jax.tree.map(lambda p: jnp.full(p.shape, value, jnp.float32), params), l2, unscale
    )


def releases(tx, count, updates=None, params=PARAMS):
    state, out = tx.init(params), []
    for _ in range(count):
        update, state = tx.update(updates or summed(), state, params)
        out.append(update)
    return out, state


@pytest.mark.parametrize(("multiplier", "l2", "batch"), [(1.0, 0.5, 10.0), (4.0, 0.1, 512.0)])
def test_noise_has_its_scale_and_no_other(multiplier, l2, batch):
    tx = jaxdp.privatize(multiplier, batch, KEY)
    (update,), _ = releases(tx, 1, summed(l2=l2))
    std = multiplier * l2 / batch
    for leaf in jax.tree.leaves(update):
        assert is_gaussian(leaf, std)
        for wrong in (std * 1.5, std / 1.5):
            assert not is_gaussian(leaf, wrong)


def test_noise_is_on_the_sum_and_the_divisor_is_public():
    tx = jaxdp.privatize(2.0, 10.0, KEY)
    (zero,), _ = releases(tx, 1, summed(0.0))
    (seven,), _ = releases(tx, 1, summed(7.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b - a, 0.7, atol=1e-5), zero, seven)


def test_steps_and_leaves_never_share_noise():
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    params = {"a": jnp.zeros(3000), "b": jnp.zeros(3000), "c": jnp.zeros(3000)}
    out, _ = releases(tx, 4, summed(params=params), params)
    noises = [leaf for update in out for leaf in jax.tree.leaves(update)]
    for i, one in enumerate(noises):
        for other in noises[i + 1 :]:
            assert are_uncorrelated(one, other)
            assert len(np.intersect1d(one, other)) < 10
    assert not are_uncorrelated(noises[0], noises[0] + noises[1])  # the test can fail


def test_halves_of_a_leaf_are_independent():
    (update,), _ = releases(jaxdp.privatize(1.0, 1.0, KEY), 1)
    half = PARAMS["b"].size // 2
    assert are_uncorrelated(update["b"][:half], update["b"][half:])


def test_an_empty_batch_gets_full_and_fresh_noise():
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    (full, empty, again), state = releases(tx, 3, summed(0.0))
    assert is_gaussian(empty["b"], 0.5)
    assert are_uncorrelated(full["b"], empty["b"])
    assert are_uncorrelated(empty["b"], again["b"])
    assert int(state.step) == 3


def test_a_resumed_state_goes_on_where_it_stopped():
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    out, _ = releases(tx, 3)
    _, state = releases(tx, 2)
    saved = jax.tree.map(np.asarray, state)  # what a checkpoint holds
    resumed, _ = tx.update(summed(), jax.tree.map(jnp.asarray, saved), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, resumed, out[2])
    assert are_uncorrelated(resumed["b"], out[1]["b"])


def test_without_a_key_two_runs_never_share_noise():
    tx = jaxdp.privatize(1.0, 1.0)
    (one,), _ = releases(tx, 1)
    (two,), _ = releases(tx, 1)
    assert are_uncorrelated(one["b"], two["b"])
    with pytest.raises(ValueError, match="key must be given to privatize when init runs under jit"):
        jax.jit(tx.init)(PARAMS)
    with pytest.raises(ValueError, match="key must be given"):
        jax.vmap(tx.init)({"w": jnp.zeros((2, 5))})


def test_members_of_a_vmap_never_share_a_key():
    tx, many = jaxdp.privatize(1.0, 1.0, KEY), {"w": jnp.zeros((2, 5))}
    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(tx.init)(many)
    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.jit(jax.vmap(tx.init))(many)
    one = tx.init({"w": jnp.zeros(5)})
    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(lambda v: tx.update(jaxdp.Summed({"w": v}, 1.0), one)[0])(many["w"])


@pytest.mark.parametrize("name", ["value", "grad", "value_fn"])
def test_what_a_line_search_asks_for_is_refused(name):
    tx = optax.chain(jaxdp.privatize(1.0, 1.0, KEY), optax.sgd(0.1))
    with pytest.raises(ValueError, match=f"{name} must not be passed to a private chain"):
        tx.update(summed(), tx.init(PARAMS), PARAMS, **{name: jnp.zeros(())})


def test_the_noise_multiplier_is_not_injectable():
    inject = optax.inject_hyperparams(jaxdp.privatize, static_args=("key",))
    schedule = optax.linear_schedule(1.0, 0.01, 10)
    with pytest.raises(ValueError, match="noise_multiplier must be a Python number"):
        inject(noise_multiplier=schedule, expected_batch_size=1.0, key=KEY).init(PARAMS)


def test_a_sum_of_another_shape_is_refused():
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    wrong = jaxdp.Summed({"w": jnp.zeros(50), "b": jnp.zeros(3000)}, 1.0)
    with pytest.raises(ValueError, match="the sum must have the parameters' shapes"):
        tx.update(wrong, tx.init(PARAMS), PARAMS)


def test_repr_hides_the_key():
    state = jaxdp.privatize(1.0, 1.0, KEY).init(PARAMS)
    assert "<secret>" in repr(state)
    assert str(int(state.key[1])) not in repr(state).replace("step=0", "")


def test_seeds_under_vmap_are_independent():
    def run(words):
        tx = jaxdp.privatize(1.0, 1.0, words)
        return tx.update(summed(), tx.init(PARAMS), PARAMS)[0]["b"]

    keys = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 2))
    one, two = jax.vmap(run)(keys)
    assert is_gaussian(one, 0.5)
    assert are_uncorrelated(one, two)


def test_noise_is_float32_whatever_the_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    (low,), _ = releases(tx, 1, summed(), params)
    (high,), _ = releases(tx, 1)
    assert low["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low["b"], high["b"].astype(jnp.bfloat16))


def test_unscale_comes_after_the_noise():
    diagonal = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), PARAMS)
    (update,), _ = releases(jaxdp.privatize(1.0, 1.0, KEY), 1, summed(l2=2.0, unscale=diagonal))
    assert is_gaussian(update["b"], 6.0)


def test_selective_wrappers_go_around_what_follows():
    rates = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    mixed = optax.multi_transform(
        {"fast": rates, "slow": optax.sgd(0.01)}, {"w": "fast", "b": "slow"}
    )
    tx = optax.chain(jaxdp.privatize(1.0, 1.0, KEY), mixed)
    (update,), _ = releases(tx, 1)
    assert is_gaussian(update["w"], 0.05)
    assert is_gaussian(update["b"], 0.005)
    around = optax.multi_transform(
        {"noisy": jaxdp.privatize(1.0, 1.0, KEY), "plain": optax.identity()},
        {"w": "noisy", "b": "plain"},
    )
    with pytest.raises((TypeError, ValueError, AttributeError)):
        around.update(summed(), around.init(PARAMS), PARAMS)


def test_anything_but_a_sum_is_refused():
    tx = jaxdp.privatize(1.0, 1.0, KEY)
    with pytest.raises(TypeError, match="must come first in the chain and take the Summed"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 10.0), "noise_multiplier must be a finite number of at least 0, got -1.0"),
        ((float("inf"), 10.0), "noise_multiplier"),
        ((1.0, 0.0), "expected_batch_size must be a finite number above 0, got 0.0"),
        ((1.0, 10.0, 7), "key must be a threefry key"),
        ((1.0, 10.0, jax.random.key(0, impl="rbg")), "key must be a threefry key"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxdp.privatize(*arguments)


def test_integer_parameters_are_refused():
    with pytest.raises(ValueError, match=r"params must be floating-point arrays, got int32 at \['n'\]"):
        jaxdp.privatize(1.0, 1.0, KEY).init({"n": jnp.zeros(3, jnp.int32)})


EIGHT_DEVICES = """
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import jaxdp
from tests.statistics import are_uncorrelated, is_gaussian
assert jax.device_count() == 8
tx = jaxdp.privatize(1.0, 1.0, jax.random.key(5))
update = jaxdp.compile_update(tx)
params = {"w": jnp.zeros(16_000)}
sums = jaxdp.Summed({"w": jnp.zeros(16_000)}, 1.0)
one = update(params, tx.init(params), sums)[0]["w"]
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
value = jax.device_put(sums.value, NamedSharding(mesh, PartitionSpec("x")))
many = update(sharded, tx.init(sharded), jaxdp.Summed(value, 1.0))[0]["w"]
assert len(many.sharding.device_set) == 8
np.testing.assert_array_equal(one, many)
shards = np.asarray(many).reshape(8, -1)
assert all(is_gaussian(s, 1.0) for s in shards)
assert all(are_uncorrelated(shards[i], shards[j]) for i in range(8) for j in range(i))
"""


def test_devices_never_share_noise():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EIGHT_DEVICES)], env=env, check=True, timeout=120
    )
