"""Every algorithm, by its line in the registry: under jit and scan, resumed. Also test_wrappers.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import schedules
from jaxdp.optimizers import registry
from jaxdp.optimizers.annealing import AnnealingState
from jaxdp.optimizers.energy import PublicEnergy
from jaxdp.types import Summed
from tests.compiling import QUICK

PARAMS = {"w": jnp.array([[0.3, -0.2], [0.1, 0.5]]), "b": jnp.zeros(2)}
ENERGY = PublicEnergy(lambda p, e: jnp.sum(jnp.square(p["b"] - 1.0)) + 0.0 * e, jnp.zeros(3))
KEY = jax.random.key(5)


def algorithm(name, noise=1.0, key=KEY):
    numbers = registry.Numbers(noise, 1.0, 6, 24, 0.1, momentum=0.5, key=key)
    made = registry.build(name, numbers)
    return dataclasses.replace(made, energy=None)  # judged by ENERGY here


def extras(made, raw):
    energy = {"energy": ENERGY} if made.counts else {}
    return {**energy, "leaked": raw} if made.raw else energy


def keys_of(made, steps, seed=KEY, first=0):
    """The noise keys of ``steps`` steps, stacked."""
    at = first + jnp.arange(steps)
    return jax.vmap(lambda i: made.mechanism.simulated_key(jax.random.fold_in(seed, i), i))(at)


def update_of(made, tx):
    def update(params, state, value, key):
        scale = made.context(state).get("scale")
        value = value if scale is None else jax.tree.map(jnp.divide, value, scale)
        summed = Summed(value, made.mechanism.l2(params), scale)
        updates, state = tx.update(summed, state, params, key=key, **extras(made, value))
        return optax.apply_updates(params, updates), state

    return update


def sums(steps):
    keys = jax.random.split(jax.random.key(8), steps)
    return jax.vmap(lambda k: jax.tree.map(lambda p: jax.random.normal(k, p.shape), PARAMS))(keys)


def trajectory(made, values, keys, start=None):
    tx = optax.with_extra_args_support(made.chain())
    update = update_of(made, tx)
    start = (PARAMS, tx.init(PARAMS)) if start is None else start
    body = lambda carry, x: (update(*carry, *x), carry[0])  # noqa: E731
    return jax.lax.scan(body, start, (values, keys))


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_an_algorithm_is_a_good_citizen(name):
    made, values = algorithm(name), sums(6)
    both = (values, keys_of(made, 6))
    first, last = (jax.tree.map(lambda v, s=s: v[s], both) for s in (slice(3), slice(3, 6)))
    tx = made.chain()
    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        some = jax.jit(lambda v, start: trajectory(made, *v, start)[0], compiler_options=QUICK)
        half, saved = some(first, (PARAMS, tx.init(PARAMS)))
        params, state = some(last, (half, saved))
        # Saved, restored and gone on with: the very same.
        restored = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, (half, saved)))
        again, _ = some(last, restored)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, PARAMS)
    assert any(jax.tree.leaves(moved))
    scale = made.context(state).get("scale")
    if scale is not None:
        assert all((np.asarray(s) > 0).all() for s in jax.tree.leaves(scale))


REPAIRED = [name for name in registry.ALGORITHMS if "as-published" not in name]


@pytest.mark.parametrize("name", REPAIRED)
def test_the_releases_alone_give_everything_that_follows(name):
    """Whatever the records were: parameters, moments and clip bounds from the noisy sums again."""
    made, values = algorithm(name), sums(5)
    noise, after = made.mechanism.privatize(), optax.with_extra_args_support(made.after_noise)

    def real(carry, given):
        (params, (first, rest)), (value, key) = carry, given
        scale = made.context((first, rest)).get("scale")
        value = value if scale is None else jax.tree.map(jnp.divide, value, scale)
        noisy, first = noise.update(
            Summed(value, made.mechanism.l2(params), scale), first, params, key=key
        )
        updates, rest = after.update(noisy, rest, params, **extras(made, None))
        return (optax.apply_updates(params, updates), (first, rest)), (noisy, scale)

    def replayed(carry, noisy):
        params, rest = carry
        scale = made.context((None, rest)).get("scale")
        updates, rest = after.update(noisy, rest, params, **extras(made, None))
        return (optax.apply_updates(params, updates), rest), scale

    start, again = (noise.init(PARAMS), after.init(PARAMS)), after.init(PARAMS)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        (params, (_, rest)), (released, scales) = jax.jit(
            lambda v: jax.lax.scan(real, (PARAMS, start), v), compiler_options=QUICK
        )((values, keys_of(made, 5)))
        (same, same_rest), same_scales = jax.jit(
            lambda v: jax.lax.scan(replayed, (PARAMS, again), v), compiler_options=QUICK
        )(released)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        (params, rest, scales),
        (same, same_rest, same_scales),
    )
    assert made.raw is None
    assert made.gradient is None


def test_wrappers_go_around_what_follows_the_noise():
    mech = jaxdp.dp_sgd(1.0, 1.0, 6, 24)
    inner = optax.inject_hyperparams(
        jaxdp.optimizers.scale_by_dp_adam_bc, static_args=("noise_std",)
    )(noise_std=mech.noise_std, b1=0.8)
    by_leaf = optax.multi_transform(
        {
            "fast": optax.chain(
                inner, optax.scale_by_schedule(optax.linear_schedule(-1.0, 0.0, 9))
            ),
            "still": optax.set_to_zero(),
        },
        {"w": "fast", "b": "still"},
    )
    tx = optax.chain(mech.privatize(), by_leaf)
    state, params = tx.init(PARAMS), PARAMS
    step = jax.jit(lambda s, p, key: tx.update(Summed(PARAMS, 1.0), s, p, key=key))
    for i in range(2):
        updates, state = step(state, params, mech.simulated_key(jax.random.key(i), i))
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["b"], PARAMS["b"])
    assert not np.array_equal(params["w"], PARAMS["w"])


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adam-bc", "piadam", "sa-dpsgd"])
def test_an_algorithm_follows_a_noise_schedule(name):
    schedule = schedules.NoiseSchedule(((5.0, 2), (1.0, 4)))
    made = algorithm(name, schedule)
    (params, _), _ = trajectory(made, sums(6), keys_of(made, 6))
    assert np.isfinite(params["w"]).all()
    # The schedule has 6 steps, and noise charged for another step is not this one's.
    noise, summed = made.mechanism.privatize(), Summed(PARAMS, 1.0)
    update = jax.jit(lambda key: noise.update(summed, noise.init(PARAMS), PARAMS, key=key)[0]["w"])
    at = [jax.tree.map(lambda k, i=i: k[i], keys_of(made, 7)) for i in (0, 2, 5, 6)]
    assert [bool(np.isnan(update(key)).all()) for key in at] == [False, False, False, True]
    assert np.isnan(update(dataclasses.replace(at[0], step=jnp.int32(2)))).all()
    assert [row[1:] for row in made.events(1, 4)[""]] == [(1, 1), (2, 3)]


def test_correction_takes_the_noise_out_of_the_moment():
    mech = jaxdp.dp_sgd(4.0, 1.0, 10, 100)
    params = {"w": jnp.zeros(4000)}
    made = jaxdp.optimizers.dp_adam_bc(mech, 0.1, b2=0.99)
    tx = made.chain()
    signal = jnp.where(jnp.arange(4000) < 2000, 0.6, 0.0)

    def body(state, key):
        return tx.update(Summed({"w": 10 * signal}, 1.0), state, params, key=key)[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(body, s, keys_of(made, 300)))(tx.init(params))
    moment = np.asarray(state[1][0].nu["w"]) / (1 - 0.99**300)
    assert abs(moment[:2000].mean() - 0.36) < 0.01  # 0.52 with the noise in it
    assert abs(moment[2000:].mean()) < 0.01  # 0.16


def test_adadps_moment_is_that_of_the_signal_whatever_its_own_noise():
    mech = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 4.0, 10, 100)
    params = {"w": jnp.zeros(6000)}
    made = jaxdp.optimizers.adadp(mech, 0.1, bound=10.0, moment_decay=0.98)
    tx, even = made.chain(), 10.0 / np.sqrt(6000)

    def body(state, key):
        scale = made.context(state)["scale"]
        summed = Summed(jax.tree.map(jnp.zeros_like, params), mech.l2(params), scale)
        return tx.update(summed, state, params, key=key)[1], jnp.mean(jnp.square(scale["w"]))

    state, squares = jax.jit(lambda s: jax.lax.scan(body, s, keys_of(made, 150)))(tx.init(params))
    noise = (4.0 * np.sqrt(6000) / 10) ** 2 * float(squares.mean())
    assert even**2 * 0.02 < float(squares.mean()) < even**2  # the sides did move
    assert abs(float(jnp.mean(state[1][0].moment["w"]))) < 0.05 * noise


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: registry.build("sgd", None), "algorithm must be one of dp-sgd"),
        (
            lambda: algorithm_with("dp-adam-bc", {"beta": 1}),
            "settings of dp-adam-bc must be among b1, b2",
        ),
        (lambda: algorithm_with("dp-sgd", {"x": 1}), "must be among none; got 'x'"),
        (lambda: algorithm_with("dp-adam-bc", {"b1": 1.0}), "b1 must be at least 0 and below 1"),
        (lambda: algorithm_with("dp-adam-bc", {"noise_floor": -1}), "noise_floor must be"),
        (lambda: algorithm_with("piadam", {"spread": 0.5}), "spread must be at least 1"),
        (lambda: algorithm_with("dp-adam-bc", {"eps": 0, "noise_floor": 0}), "must not both be 0"),
        (lambda: algorithm_with("auto-s", {"gamma": 0.0}), "gamma must be a finite number above 0"),
        (lambda: algorithm_with("sa-dpsgd-private", {"energy_noise": 0}), "energy_noise must be"),
        (lambda: algorithm_with("sa-dpsgd-private", {"energy_bound": 0}), "energy_bound must be"),
        (
            lambda: algorithm_with("sa-dpsgd-private", {"energy_batch_size": 0}),
            "energy_batch_size must be a whole number of at least 1, got 0",
        ),
        (
            lambda: algorithm_with("sa-dpsgd-private", {"energy_batch_size": 25}),
            r"energy_batch_size must be at most dataset_size \(24\), got 25",
        ),
        (lambda: algorithm_with("adadp-as-published", {"threshold": -1}), "threshold must be"),
        (lambda: algorithm_with("sa-dpsgd", {"temperature": -1.0}), "temperature must be"),
        (lambda: algorithm_with("sa-dpsgd", {"max_rejections": 0}), "max_rejections must be"),
        (lambda: algorithm_with("adadp-as-published", {"beta": 0.0}), "beta must be"),
        (lambda: algorithm_with("adadp", {"floor": 1e-40}), r"floor must be in \[1e-10"),
        (
            lambda: registry.build("adadp-noise-only", registry.Numbers(1.0, 1e-43, 6, 24, 0.1)),
            r"l2_clip_norm must be in \[1e-10",
        ),
        (
            lambda: jaxdp.optimizers.adadp(
                jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 1.0, 6, 24), 0.1, bound=1e-43
            ),
            r"bound must be in \[1e-10",
        ),
        (lambda: algorithm_with("dp-adam-bc", {"b1": 2.0}), "b1 must be at least 0 and below 1"),
        (lambda: algorithm_with("dp-adam-bc", {"b2": 1.0}), "b2 must be at least 0 and below 1"),
        (
            lambda: algorithm_with("dp-adam-bc", {"eps": -1.0}),
            "eps must be a finite number of at least 0",
        ),
        (
            lambda: registry.build("sa-dpsgd", registry.Numbers(1.0, 1.0, 6, 24, 0.1)),
            "key must be given to an annealed algorithm",
        ),
        (
            lambda: registry.build("dp-sgd", registry.Numbers(1.0, 1.0, 6, 24, -0.1)),
            "learning_rate must be a finite number above 0",
        ),
        (lambda: jaxdp.optimizers.scale_by_dp_adam_bc(-1.0), "noise_std must be"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def algorithm_with(name, settings):
    return registry.build(name, registry.Numbers(1.0, 1.0, 6, 24, 0.1, key=KEY), settings)


def test_the_correction_needs_the_parameters():
    tx = jaxdp.optimizers.scale_by_dp_adam_bc(jaxdp.dp_sgd(1.0, 1.0, 6, 24).noise_std)
    with pytest.raises(ValueError, match="params must be passed to update"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_what_leaks_is_charged_as_nothing_provable():
    for name in registry.ALGORITHMS:
        leaks = name.endswith("as-published") and not name.startswith("sa") or "train" in name
        assert bool(algorithm(name).mechanism.leak) is leaks, name


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_no_state_holds_what_makes_noise(name):
    """After an update: the key's tag, the annealer's tag and public coin, and no word of the key."""
    made = algorithm(name)
    key = made.mechanism.simulated_key(KEY)
    tx = optax.with_extra_args_support(made.chain())
    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        _, state = update_of(made, tx)(PARAMS, tx.init(PARAMS), PARAMS, key)
    words = [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.uint32]
    assert len(words) == (3 if name.startswith("sa") else 1)
    assert sum(np.array_equal(leaf, key.tag) for leaf in words) == 1
    assert not np.isin(np.concatenate(words), key.words).any()


def test_the_annealers_state_is_its_own_and_leaky_sums_are_hidden():
    state = algorithm("sa-dpsgd").chain().init(PARAMS)
    assert isinstance(state[1], AnnealingState)
    secret = {"w": jnp.full(2, 71.0)}
    shown = repr(Summed(secret, 0.5, votes=jnp.float32(71.0), leaked=secret))
    assert "value=<sensitive>" in shown
    assert "71" not in shown
