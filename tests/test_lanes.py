"""Noise in many lanes: vmap, scan, shard_map and pmap."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.tickets import simulated_key
from tests.compiling import with_flags
from tests.laws import are_uncorrelated, is_gaussian

PARAMS = {"w": jnp.zeros(3_000), "b": jnp.zeros((50, 41))}
TX = jaxdp.privatize(1.0, 1.0)
SAME = "key must be another one for every member of a vmap"


def member(seed, value=0.0):
    """The noisy zero of one member of an ensemble, from its own key."""
    return one(simulated_key(seed, {"gradient": 1.0}), value)


def one(key, value=0.0):
    sums = jax.tree.map(lambda p: p + value, PARAMS)
    return TX.update(jaxdp.Summed(sums, 1.0), TX.init(PARAMS), PARAMS, key=key)[0]["w"]


def stacked(count=3, repeat=False):
    keys = [jaxdp.dp_sgd(1.0, 1.0, 5, 50).sampler(50).draw().key() for _ in range(count)]
    keys = [keys[0], *keys[:-1]] if repeat else keys
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *keys)


def scanned(keys, sums):
    """Steps one after the other, over leading axes of keys and sums."""

    def step(state, now):
        key, value = now
        update, state = TX.update(
            jaxdp.Summed(jax.tree.map(lambda p: p + value, PARAMS), 1.0), state, PARAMS, key=key
        )
        return state, update["w"]

    return jax.lax.scan(step, TX.init(PARAMS), (keys, sums))[1]


def are_independent(rows):
    assert all(is_gaussian(row, 1.0) for row in rows)
    assert all(are_uncorrelated(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["vmap", "vmap of jit"])
def test_members_have_each_their_own_noise(wrap):
    keys = stacked()
    noises = jax.vmap(wrap(one))(keys)
    are_independent(noises)
    for n in range(3):
        alone = one(jax.tree.map(lambda leaf, n=n: leaf[n], keys))
        np.testing.assert_allclose(noises[n], alone, rtol=1e-6)


def test_members_of_a_nested_vmap_have_each_their_own():
    seeds = jax.random.split(jax.random.key(0), (2, 2))
    noises = jax.vmap(jax.vmap(member))(seeds)
    are_independent(noises.reshape(4, -1))


def test_one_key_for_all_members_is_refused():
    key, values = simulated_key(jax.random.key(0), {"gradient": 1.0}), jnp.arange(3.0)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(ValueError, match=SAME):
            jax.vmap(wrap(lambda v: one(key, v)))(values)
    with pytest.raises(ValueError, match=SAME):
        jax.vmap(jax.vmap(one, (None, 0)), (0, None))(stacked(), values)
    with pytest.raises(ValueError, match=SAME):
        jax.jit(lambda key: jax.vmap(lambda v: one(key, v))(values))(key)


@pytest.mark.parametrize("nested", [False, True])
def test_equal_keys_of_two_members_give_nan(nested):
    keys = stacked(repeat=True)
    if nested:
        keys = jax.tree.map(lambda leaf: leaf[:, None], keys)
        assert np.isnan(jax.vmap(jax.vmap(one))(keys)).all()
        return
    for wrap in (lambda f: f, jax.jit):
        assert np.isnan(jax.vmap(wrap(one))(keys)).all()


def test_a_scan_under_vmap_and_a_vmap_under_scan():
    keys = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), stacked(6))
    noises = jax.vmap(scanned)(keys, jnp.zeros((2, 3)))
    are_independent(noises.reshape(6, -1))
    inner = jax.lax.map(lambda row: jax.vmap(one)(row), keys)
    np.testing.assert_allclose(inner.reshape(6, -1), noises.reshape(6, -1), rtol=1e-6)
    steps = jax.tree.map(lambda leaf: leaf[0], keys)
    with pytest.raises(ValueError, match=SAME):  # every member's step n has one key
        jax.vmap(scanned, (None, 0))(steps, jnp.zeros((2, 3)))
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), keys)
    assert np.isnan(jax.vmap(scanned)(twice, jnp.zeros((2, 3)))).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_key_from_outside_a_loop_gives_nan(compiled):
    key = simulated_key(jax.random.key(0), {"gradient": 1.0})

    def loop(key):
        def step(state, value):
            update, state = TX.update(
                jaxdp.Summed(jax.tree.map(lambda p: p + value, PARAMS), 1.0), state, PARAMS, key=key
            )
            return state, update["w"]

        return jax.lax.scan(step, TX.init(PARAMS), jnp.arange(4.0))[1]

    noises = (jax.jit(loop) if compiled else loop)(key)
    assert np.isfinite(noises[0]).all()
    assert np.isnan(noises[1:]).all()
    many = stacked(4)
    assert np.isfinite(scanned(many, jnp.arange(4.0))).all()


def test_the_state_of_one_member_is_checked_for_each():
    """A vmap over members with their own states sees a key that comes twice in a row."""
    keys = stacked(2)
    states = jax.vmap(lambda _: TX.init(PARAMS))(jnp.arange(2))

    def update(state, key):
        return TX.update(jaxdp.Summed(PARAMS, 1.0), state, PARAMS, key=key)

    first, states = jax.vmap(update)(states, keys)
    assert np.isfinite(first["w"]).all()
    fresh = jax.tree.map(lambda old, new: old.at[1].set(new[1]), keys, stacked(2))
    second, _ = jax.vmap(update)(states, fresh)
    assert np.isnan(second["w"][0]).all()
    assert np.isfinite(second["w"][1]).all()


def test_a_key_of_another_multiplier_gives_nan_in_its_lane_alone():
    keys = jax.vmap(lambda s, z: simulated_key(s, {"gradient": z}))(
        jax.random.split(jax.random.key(0), 2), jnp.asarray([1.0, 10.0])
    )
    noises = jax.vmap(one)(keys)
    assert np.isfinite(noises[0]).all()
    assert np.isnan(noises[1]).all()


def test_devices_never_share_noise_and_replicas_do():
    env = with_flags("--xla_force_host_platform_device_count=8")
    script = str(Path(__file__).parent / "eight_devices.py")
    found = subprocess.run(
        [sys.executable, script],
        env={**env, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3_000:]
    assert found.stdout.split()[-1] == "done"
