"""Noise in many lanes: vmap, scan, shard_map and pmap."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.tickets import simulated_key
from tests.compiling import with_flags
from tests.laws import are_uncorrelated, is_gaussian
from tests.noise.refusals import assert_refused

PARAMS = {"w": jnp.zeros(3_000), "b": jnp.zeros((50, 41))}
TX = jaxdp.privatize(1.0, 1.0)
SAME = "key must be another one for every member of a vmap"
KEY = simulated_key(jax.random.key(0), {"gradient": 1.0})
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


def one(key, value=0.0):
    """The noisy sum of one member of an ensemble."""
    return update(TX.init(PARAMS), key, value)[0]["w"]


def update(state, key, value=0.0):
    sums = jax.tree.map(lambda p: p + value, PARAMS)
    return TX.update(jaxdp.Summed(sums, 1.0), state, PARAMS, key=key)


def stacked(count=3, repeat=False):
    keys = [jaxdp.dp_sgd(1.0, 1.0, 5, 50).sampler(50).draw().key() for _ in range(count)]
    keys = [keys[0], *keys[:-1]] if repeat else keys
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *keys)


def scanned(keys, sums):
    """Steps one after the other, over leading axes of keys and sums."""

    def step(state, now):
        updates, state = update(state, *now)
        return state, updates["w"]

    return jax.lax.scan(step, TX.init(PARAMS), (keys, sums))[1]


def are_independent(rows):
    assert all(is_gaussian(row, 1.0) for row in rows)
    assert all(are_uncorrelated(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))


def test_members_have_each_their_own_noise():
    keys, again = stacked(), stacked(repeat=True)
    alone = [one(jax.tree.map(lambda leaf, n=n: leaf[n], keys)) for n in range(3)]
    for name, wrap in WRAPS.items():
        noises = jax.vmap(wrap(one))(keys)
        are_independent(noises)
        np.testing.assert_allclose(noises, alone, rtol=1e-6, err_msg=name)
        assert np.isnan(jax.vmap(wrap(one))(again)).all(), name


def test_members_of_a_nested_vmap_have_each_their_own():
    nested = jax.vmap(jax.vmap(lambda seed: one(simulated_key(seed, {"gradient": 1.0}))))
    are_independent(nested(jax.random.split(jax.random.key(0), (2, 2))).reshape(4, -1))
    again = jax.tree.map(lambda leaf: leaf[:, None], stacked(repeat=True))
    assert np.isnan(jax.vmap(jax.vmap(one))(again)).all()


def test_one_key_for_all_members_is_refused():
    values = jnp.arange(3.0)
    nested = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    inside = jax.jit(lambda key: jax.vmap(lambda v: one(key, v))(values))
    wraps = (WRAPS[name] for name in ("plain", "jit", "checkpoint"))
    assert_refused(
        [
            *((lambda w=w: jax.vmap(w(lambda v: one(KEY, v)))(values), SAME) for w in wraps),
            (lambda: nested(stacked(), values), SAME),
            (lambda: inside(KEY), SAME),
        ]
    )


def test_a_scan_under_vmap_and_a_vmap_under_scan():
    keys = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), stacked(6))
    sums = jnp.zeros((2, 3))
    noises = jax.vmap(scanned)(keys, sums)
    are_independent(noises.reshape(6, -1))
    inner = jax.lax.map(lambda row: jax.vmap(one)(row), keys)
    np.testing.assert_allclose(inner.reshape(6, -1), noises.reshape(6, -1), rtol=1e-6)
    steps = jax.tree.map(lambda leaf: leaf[0], keys)
    # Every member's step n has one key.
    assert_refused([(lambda: jax.vmap(scanned, (None, 0))(steps, sums), SAME)])
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), keys)
    assert np.isnan(jax.vmap(scanned)(twice, sums)).all()


def test_a_key_from_outside_a_loop_gives_nan():
    def loop(key):
        def step(state, value):
            updates, state = update(state, key, value)
            return state, updates["w"]

        return jax.lax.scan(step, TX.init(PARAMS), jnp.arange(4.0))[1]

    for wrap in (WRAPS["plain"], jax.jit):
        noises = wrap(loop)(KEY)
        assert np.isfinite(noises[0]).all()
        assert np.isnan(noises[1:]).all()
    assert np.isfinite(scanned(stacked(4), jnp.arange(4.0))).all()


def test_the_state_of_one_member_is_checked_for_each():
    """A vmap over members with their own states sees a key that comes twice in a row."""
    keys = stacked(2)
    states = jax.vmap(lambda _: TX.init(PARAMS))(jnp.arange(2))
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
    found = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "eight_devices.py")],
        env={
            **with_flags("--xla_force_host_platform_device_count=8"),
            "PYTHONPATH": os.getcwd(),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3_000:]
    assert found.stdout.split()[-1] == "done"
