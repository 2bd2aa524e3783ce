"""Every algorithm, by its line in the registry: under jit, scan and vmap, resumed, wrapped, replayed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import optimizers as opt
from jaxdp import schedules
from jaxdp.optimizers import adaptive, pigdo, registry
from jaxdp.optimizers.adadp import Box, scale_by_adadp, variance
from jaxdp.optimizers.annealing import AnnealingState
from jaxdp.optimizers.energy import PublicEnergy
from jaxdp.types import Summed
from tests.compiling import QUICK
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

PARAMS = {"w": jnp.array([[0.3, -0.2], [0.1, 0.5]]), "b": jnp.zeros(2)}
ENERGY = PublicEnergy(lambda p, e: jnp.sum(jnp.square(p["b"] - 1.0)) + 0.0 * e, jnp.zeros(3))
KEY = jax.random.key(5)
SEEDS = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 2))
RATE = optax.linear_schedule(0.1, 0.05, 4)
STEPS = 6
quick = functools.partial(jax.jit, compiler_options=QUICK)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def variant(name):
    """True of an algorithm whose links after the noise are those of another one."""
    same = name in ("auto-s", "normalised-sgd", "sa-dpsgd-private")
    return same or name.endswith("-only") or "as-published" in name


def algorithm(name, noise=1.0, key=KEY, rate=RATE, settings=None):
    numbers = registry.Numbers(noise, 1.0, 6, 24, rate, momentum=0.5, key=key)
    made = registry.build(name, numbers, settings)
    return dataclasses.replace(made, energy=None)  # judged by ENERGY here


def extras(made, raw):
    energy = {"energy": ENERGY} if made.counts else {}
    return {**energy, "leaked": raw} if made.raw else energy


def keys_of(made, steps, seed=KEY, first=0):
    """The noise keys of ``steps`` steps, stacked."""
    at = first + jnp.arange(steps)
    return jax.vmap(lambda i: made.mechanism.simulated_key(jax.random.fold_in(seed, i), i))(at)


def sums(steps):
    keys = jax.random.split(jax.random.key(8), steps)
    return jax.vmap(lambda k: jax.tree.map(lambda p: jax.random.normal(k, p.shape), PARAMS))(keys)


# A wrapper of the chain, and its state -> the chain's.
PLAIN = (lambda tx: tx), (lambda state: state)


def links(made, wrap=PLAIN):
    """The noise and what follows it, as a step of a scan, and where it starts."""
    wrapper, inner_state = wrap
    noise, after = made.noise_link(), optax.with_extra_args_support(wrapper(made.after_noise))

    def step(carry, given):
        (params, (first, rest)), (value, key) = carry, given
        scale = made.context((first, inner_state(rest))).get("scale")
        value = value if scale is None else jax.tree.map(jnp.divide, value, scale)
        value = value["b"][0] if made.direction else value  # one number
        summed = Summed(value, made.mechanism.l2(params), scale)
        noisy, first = noise.update(summed, first, params, key=key)
        updates, rest = after.update(noisy, rest, params, **extras(made, value))
        return (optax.apply_updates(params, updates), (first, rest)), (noisy, scale)

    return step, (PARAMS, (noise.init(PARAMS), after.init(PARAMS)))


@functools.cache
def plain(name):
    """Three steps from a state on, compiled: of (words, state, sums, number of the first)."""

    def go(words, carry, values, first):
        made = algorithm(name, key=words)
        noises = keys_of(made, 3, jax.random.wrap_key_data(words), first)
        return jax.lax.scan(links(made)[0], carry, (values, noises))

    compiled = quick(go)

    def called(words, *given):
        with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
            return compiled(words, *given)

    return called


@functools.cache
def ran(name):
    """Six steps of the first seed: where they start, stood halfway, end, and what they released."""
    values, three = sums(STEPS), plain(name)
    halves = [jax.tree.map(lambda v, s=s: v[s], values) for s in (slice(3), slice(3, 6))]
    start = links(algorithm(name, key=SEEDS[0]))[1]
    half, released = three(SEEDS[0], start, halves[0], 0)
    end, more = three(SEEDS[0], half, halves[1], 3)
    return start, half, end, jax.tree.map(lambda *a: jnp.concatenate(a), released, more), halves


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_an_algorithm_is_a_good_citizen(name):
    made, (_, half, (params, state), _, halves) = algorithm(name), ran(name)
    # Saved, restored and gone on with: the very same.
    restored = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, half))
    (again, _), _ = plain(name)(SEEDS[0], restored, halves[1], 3)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, PARAMS)
    assert any(jax.tree.leaves(moved))
    for side in jax.tree.leaves(made.context(state).get("scale", ())):
        assert (np.asarray(side) > 0).all()
    # No state holds what makes noise: the key's tag, the annealer's tag and public coin, and no
    # word of the key.
    last = jax.random.fold_in(jax.random.wrap_key_data(SEEDS[0]), STEPS - 1)
    key = made.mechanism.simulated_key(last, STEPS - 1)
    words = [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.uint32]
    assert len(words) == (3 if name.startswith("sa") else 1)
    assert sum(np.array_equal(leaf, key.tag) for leaf in words) == 1
    assert not np.isin(np.concatenate(words), key.words).any()
    # What leaks is charged as nothing provable.
    leaks = name.endswith("as-published") and not name.startswith("sa") or "train" in name
    assert bool(made.mechanism.leak) is leaks


@pytest.mark.parametrize("name", [n for n in registry.ALGORITHMS if "as-published" not in n])
def test_the_releases_alone_give_everything_that_follows(name):
    """Whatever the records were: parameters, moments and clip bounds from the noisy sums again."""
    made, (start, _, (params, (_, rest)), (released, scales), _) = algorithm(name), ran(name)
    after = optax.with_extra_args_support(algorithm(name, key=SEEDS[0]).after_noise)

    def replayed(carry, noisy):
        params, rest = carry
        scale = made.context((start[1][0], rest)).get("scale")
        updates, rest = after.update(noisy, rest, params, **extras(made, None))
        return (optax.apply_updates(params, updates), rest), scale

    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        (same, same_rest), same_scales = quick(
            lambda v: jax.lax.scan(replayed, (PARAMS, start[1][1]), v)
        )(released)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, (params, rest, scales), (same, same_rest, same_scales))
    assert made.raw is None
    assert made.gradient is None or made.direction is not None
    if name == "adadp":  # also where its sides differ
        assert made.counts_of((None, rest))["local_steps"] == 5


def in_all_wrappers(after):
    once = optax.inject_hyperparams(optax.scale)(step_size=optax.constant_schedule(1.0))
    every = jax.tree.map(lambda _: "all", PARAMS)
    return optax.multi_transform({"all": optax.chain(after, once)}, every)


WRAPPED = in_all_wrappers, lambda state: state.inner_states["all"].inner_state[0]


def final(name, words, values):
    """The last parameters, inside all the wrappers."""
    made = algorithm(name, key=words)
    step, start = links(made, WRAPPED)
    noises = keys_of(made, STEPS, jax.random.wrap_key_data(words))
    return jax.lax.scan(step, start, (values, noises))[0][0]


@functools.cache
def of_seeds(name):
    return quick(jax.vmap(lambda words: final(name, words, sums(STEPS))))


@pytest.mark.parametrize("name", [slow(n) if variant(n) else n for n in registry.ALGORITHMS])
def test_wrappers_and_vmap_over_seeds_change_nothing(name):
    """Also with the rate on a schedule."""
    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        ends = of_seeds(name)(SEEDS)
    end, halves = ran(name)[2], ran(name)[4]
    other = links(algorithm(name, key=SEEDS[1]))[1]
    for at in (0, 1):
        other, _ = plain(name)(SEEDS[1], other, halves[at], 3 * at)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, *each: close(a, jnp.stack(each)), ends, end[0], other[0])
    assert not np.array_equal(ends["w"][0], ends["w"][1])
    assert np.isfinite(ends["w"]).all()


@pytest.mark.parametrize("name", ["dp-sgd", "piadam"])  # a candidate of NaN is rejected
def test_one_key_for_every_seed_is_refused(name):
    """Also inside all the wrappers, through jit and scan: equal keys give NaN, a shared one words."""
    assert np.isnan(of_seeds(name)(jnp.stack([SEEDS[0], SEEDS[0]]))["w"]).any()
    shared = jax.vmap(lambda v: final(name, SEEDS[0], v))
    two = jax.tree.map(lambda v: jnp.stack([v, v]), sums(STEPS))
    refused("another one for every member of a vmap", shared, two)


MECH = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 1.0, 6, 24)
OWN = {
    "scale_by_dp_adam_bc": ((MECH.noise_std,), ("noise_std",), {"b1", "b2", "eps", "noise_floor"}),
    "scale_by_dp_rmsprop": ((0.3,), (), {"noise_std", "decay", "eps", "noise_floor"}),
    "scale_by_dp_adagrad": ((MECH.noise_std,), ("noise_std",), {"eps", "noise_floor"}),
    "scale_by_adadp": ((MECH, Box(1.0, 6)), (), {"rate_decay", "moment_decay", "eps"}),
    "annealing": ((optax.sgd(0.1), KEY), ("key",), {"temperature", "max_rejections"}),
}


@pytest.mark.parametrize("name", OWN)
def test_own_transformations_give_one_answer_compiled_or_not_or_with_injected_numbers(name):
    arguments, static, expected = OWN[name]
    make, energy = getattr(opt, name), {"energy": ENERGY} if name == "annealing" else {}
    alone, injected = make(*arguments), optax.inject_hyperparams(make, static_args=static)
    outcomes = []
    for tx, compiled in ((alone, True), (injected(*arguments), True), (alone, False)):
        state, params = tx.init(PARAMS), PARAMS
        step = lambda s, p, tx=tx: tx.update(PARAMS, s, p, **energy)  # noqa: E731
        step = quick(step) if compiled else step
        for _ in range(2):
            updates, state = step(state, params)
            params = optax.apply_updates(params, updates)
        outcomes.append((params, state))
    assert set(outcomes[1][1].hyperparams) == expected
    close = np.testing.assert_allclose
    for other in outcomes[1:]:
        jax.tree.map(lambda a, b: close(a, b, rtol=1e-5), outcomes[0][0], other[0])
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-6), outcomes[0][1], outcomes[2][1])
    like = jax.tree.map(lambda u: (u.shape, u.dtype), updates)
    assert like == jax.tree.map(lambda p: (p.shape, p.dtype), PARAMS)
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_a_part_of_the_parameters_may_be_wrapped_and_does_not_know_adadps_noise():
    def in_part(tx):
        return optax.multi_transform(
            {"some": tx, "still": optax.set_to_zero()}, {"w": "some", "b": "still"}
        )

    mech = sgd_of(1.0, 1.0, 6, 24)
    make = optax.inject_hyperparams(opt.scale_by_dp_adam_bc, static_args=("noise_std",))
    falling = optax.scale_by_schedule(optax.linear_schedule(-1.0, 0.0, 9))
    after = optax.chain(make(noise_std=mech.noise_std, b1=0.8), falling)
    tx = optax.chain(mech.privatize(), in_part(after))
    state, params = tx.init(PARAMS), PARAMS
    step = jax.jit(lambda s, p, key: tx.update(Summed(PARAMS, 1.0), s, p, key=key))
    for i in range(2):
        updates, state = step(state, params, mech.simulated_key(jax.random.key(i), i))
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["b"], PARAMS["b"])
    assert not np.array_equal(params["w"], PARAMS["w"])
    unknown = in_part(opt.scale_by_adadp(MECH, Box(1.0, 6)))
    refused("params must be all that are trained", unknown.init, PARAMS)


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adam-bc", "piadam", "sa-dpsgd"])
def test_an_algorithm_follows_a_noise_schedule(name):
    made = algorithm(name, schedules.NoiseSchedule(((5.0, 2), (1.0, 4))))
    step, start = links(made)
    (params, _), _ = quick(lambda v: jax.lax.scan(step, start, v))((sums(6), keys_of(made, 6)))
    assert np.isfinite(params["w"]).all()
    assert [row[1:] for row in made.events(1, 4)[""]] == [(1, 1), (2, 3)]


def moments(made, params, steps, summed):
    """The state after so many steps of ``summed``, and what it says of each."""
    tx = made.chain()

    def body(state, key):
        given, told = summed(state)
        return tx.update(given, state, params, key=key)[1], told

    run = jax.jit(lambda state: jax.lax.scan(body, state, keys_of(made, steps)))
    return run(tx.init(params))


def test_correction_takes_the_noise_out_of_the_moment():
    made = opt.dp_adam_bc(sgd_of(4.0, 1.0, 10, 100), 0.1, b2=0.99)
    signal = Summed({"w": 10 * jnp.where(jnp.arange(4000) < 2000, 0.6, 0.0)}, 1.0)
    state, _ = moments(made, {"w": jnp.zeros(4000)}, 300, lambda state: (signal, 0.0))
    moment = np.asarray(state[1][0].nu["w"]) / (1 - 0.99**300)
    assert abs(moment[:2000].mean() - 0.36) < 0.01  # 0.52 with the noise in it
    assert abs(moment[2000:].mean()) < 0.01  # 0.16
    # AdaDP's moment is that of the signal, nothing, whatever its own noise.
    mech = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 4.0, 10, 100)
    made, nothing = opt.adadp(mech, 0.1, bound=10.0, moment_decay=0.98), {"w": jnp.zeros(6000)}

    def summed(state):
        scale = made.context(state)["scale"]
        return Summed(nothing, mech.l2(nothing), scale), jnp.mean(jnp.square(scale["w"]))

    state, squares = moments(made, nothing, 150, summed)
    even, noise = 10.0 / np.sqrt(6000), (4.0 * np.sqrt(6000) / 10) ** 2 * float(squares.mean())
    assert even**2 * 0.02 < float(squares.mean()) < even**2  # the sides did move
    assert abs(float(jnp.mean(state[1][0].moment["w"]))) < 0.05 * noise


def with_settings(name, **settings):
    return lambda: algorithm(name, settings=settings)


def of_numbers(name, *numbers):
    return lambda: registry.build(name, registry.Numbers(*numbers))


def without_parameters():
    tx = opt.scale_by_dp_adam_bc(MECH.noise_std)
    tx.update(PARAMS, tx.init(PARAMS))


BATCH, AT_LEAST_0 = "energy_batch_size must be a", "must be at least 0 and below 1"
# fmt: off
REFUSED = [
    ("algorithm must be one of dp-sgd", lambda: registry.build("sgd", None)),
    ("settings of dp-adam-bc must be among b1, b2", with_settings("dp-adam-bc", beta=1)),
    ("must be among none; got 'x'", with_settings("dp-sgd", x=1)),
    (f"b1 {AT_LEAST_0}", with_settings("dp-adam-bc", b1=1.0)),
    (f"b2 {AT_LEAST_0}", with_settings("dp-adam-bc", b2=1.0)),
    ("b1 must be a number, got None", lambda: opt.scale_by_dp_adam_bc(0.1, b1=None)),
    ("decay must be a number, got None", lambda: opt.scale_by_dp_rmsprop(0.1, decay=None)),
    ("noise_floor must be", with_settings("dp-adam-bc", noise_floor=-1)),
    ("eps must be a finite number of at least 0", with_settings("dp-adam-bc", eps=-1.0)),
    ("must not both be 0", with_settings("dp-adam-bc", eps=0, noise_floor=0)),
    ("spread must be at least 1", with_settings("piadam", spread=0.5)),
    ("gamma must be a finite number above 0", with_settings("auto-s", gamma=0.0)),
    ("energy_noise must be", with_settings("sa-dpsgd-private", energy_noise=0)),
    ("energy_bound must be", with_settings("sa-dpsgd-private", energy_bound=0)),
    (f"{BATCH} whole number of at least 1", with_settings("sa-dpsgd-private", energy_batch_size=0)),
    (rf"{BATCH}t most dataset_size \(24\)", with_settings("sa-dpsgd-private", energy_batch_size=25)),
    ("threshold must be", with_settings("adadp-as-published", threshold=-1)),
    ("beta must be", with_settings("adadp-as-published", beta=0.0)),
    ("temperature must be", with_settings("sa-dpsgd", temperature=-1.0)),
    ("max_rejections must be", with_settings("sa-dpsgd", max_rejections=0)),
    (r"floor must be in \[1e-10", with_settings("adadp", floor=1e-40)),
    (r"l2_clip_norm must be in \[1e-10", of_numbers("adadp-noise-only", 1.0, 1e-43, 6, 24, 0.1)),
    (r"bound must be in \[1e-10", lambda: opt.adadp(MECH, 0.1, bound=1e-43)),
    ("key must be given to an annealed algorithm", of_numbers("sa-dpsgd", 1.0, 1.0, 6, 24, 0.1)),
    ("learning_rate must be a finite number above 0", of_numbers("dp-sgd", 1.0, 1.0, 6, 24, -0.1)),
    ("noise_std must be", lambda: opt.scale_by_dp_adam_bc(-1.0)),
    ("params must be passed to update", without_parameters),
]
# fmt: on


def test_wrong_settings_and_numbers_are_refused_and_leaky_sums_hidden():
    all_refused(REFUSED)
    assert isinstance(algorithm("sa-dpsgd").chain().init(PARAMS)[1], AnnealingState)
    secret = {"w": jnp.full(2, 71.0)}
    shown = repr(Summed(secret, 0.5, votes=jnp.float32(71.0), leaked=secret))
    assert "value=<sensitive>" in shown
    assert "71" not in shown


# Two steps of every adaptive algorithm against its formulas, written down again in NumPy.
B1, B2, EPS, FLOOR = 0.9, 0.8, 1e-3, 0.5
# In the first two coordinates the noise's variance is more than is seen, so that the floor holds.
GRADS = np.array([[0.05, 0.3, 2.0, -1.0], [0.1, -0.2, -1.5, 0.7]], np.float32)
STDS = np.array([0.4, 0.3, 0.1], np.float32)
SCALE = np.array([0.5, 1.0, 2.0, 1.5], np.float32)


def expected(kind, scale=1.0):
    """The directions of the steps (Tang et al. 2023, arXiv:2312.14334, Algorithm 1)."""
    m, v, n = np.zeros(4), np.zeros(4), np.zeros(4)
    found = []
    for t, (g, s) in enumerate(zip(GRADS.astype(float), STDS, strict=False), 1):
        noise = (s * scale) ** 2
        keep, take = (1.0, 1.0) if kind == "adagrad" else (B2, 1 - B2)
        v, n = keep * v + take * (g**2 - noise), keep * n + take * noise
        m = B1 * m + (1 - B1) * g
        bias = 1 - B2**t if kind == "adam" else 1.0
        direction = m / (1 - B1**t) if kind == "adam" else g
        found.append(direction / (np.sqrt(np.maximum(v / bias, FLOOR * n / bias)) + EPS))
    return found


MOMENTS = {
    "adam": adaptive.AdaptiveMoments(B2, EPS, FLOOR, B1),
    "rmsprop": adaptive.AdaptiveMoments(B2, EPS, FLOOR),
    "adagrad": adaptive.AdaptiveMoments(None, EPS, FLOOR),
}


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("scaled", [False, True])
def test_two_steps_are_those_of_the_formulas(kind, scaled):
    tx = adaptive.scale_by_moments(
        MOMENTS[kind],
        lambda params, step: jnp.asarray(STDS)[step],
        (lambda state: jnp.asarray(SCALE)) if scaled else None,
    )
    params = jnp.zeros(4)
    state, found = tx.init(params), []
    for g in GRADS:
        out, state = tx.update(jnp.asarray(g), state, params)
        found.append(out)
    np.testing.assert_allclose(found, expected(kind, SCALE if scaled else 1.0), rtol=2e-5)
    assert int(state.step) == 2


BOUND, BETA, GAMMA, KEEP, RATE_EPS = 4.0, 1.2, 0.1, 0.9, 1e-2


def test_two_steps_of_adadp_are_those_of_the_formulas_with_sides_between_floor_and_cap():
    mechanism = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 0.5, 16, 64)
    box = Box(BOUND, 16, BETA, threshold=1e-6, floor=0.2, cap=0.6)
    tx = scale_by_adadp(mechanism, box, GAMMA, KEEP, RATE_EPS)
    params, size = {"a": jnp.zeros(3), "b": jnp.zeros(1)}, 4
    even = BOUND / np.sqrt(size)
    moment = np.full(size, (even / (BETA * np.sqrt(16))) ** 2)
    rate, std = np.zeros(size), float(mechanism.noise_std(params))
    sides, state = np.full(size, even), tx.init(params)
    for g in np.array([[0.01, 0.4, 3.0, -1.0], [0.02, -0.3, -2.0, 0.5], [0.0, 0.2, 2.0, 0.4]]):
        found = box.sides(state.moment)
        np.testing.assert_allclose(np.r_[found["a"], found["b"]], sides, rtol=1e-5)
        grads = {"a": jnp.asarray(g[:3], jnp.float32), "b": jnp.asarray(g[3:], jnp.float32)}
        out, state = tx.update(grads, state, params)
        moment = KEEP * moment + (1 - KEEP) * (g**2 - (std * sides) ** 2)
        rate = (1 - GAMMA) * rate + GAMMA * g**2
        np.testing.assert_allclose(
            np.r_[out["a"], out["b"]], g / np.sqrt(rate + RATE_EPS), rtol=1e-4, atol=1e-7
        )
        np.testing.assert_allclose(
            np.r_[state.moment["a"], state.moment["b"]], moment, rtol=1e-4, atol=1e-6
        )
        wanted = BETA * np.sqrt(16) * np.sqrt(np.maximum(moment, 0.0))
        sides = np.clip(wanted, 0.2 * even, 0.6 * even)
    np.testing.assert_allclose(box.sides(jnp.full(4, 0.3)), even, rtol=1e-6)  # all alike
    found, even = box.sides(jnp.asarray([0.0, 0.04, 9.0, 0.0])), BOUND / 2  # none is zero
    np.testing.assert_allclose(found, [0.2 * even, BETA * 0.8, 0.6 * even, 0.2 * even], rtol=1e-6)
    found = float(variance([jnp.asarray([1.0, 2.0]), jnp.asarray([6.0])]))
    assert found == pytest.approx(np.var([1.0, 2.0, 6.0]))


def test_pigdos_divisor_is_of_mean_square_one_and_held_to_its_spread():
    moments = adaptive.AdaptiveMoments(B2, EPS, FLOOR)
    diagonal = pigdo.Preconditioner(moments, spread=1.5)
    state = moments.init({"a": jnp.zeros(3), "b": jnp.zeros(2)})
    jax.tree.map(lambda d: np.testing.assert_array_equal(d, 1.0), diagonal(state))
    squares = {"a": jnp.asarray([0.01, 1.0, 1.44]), "b": jnp.asarray([1.0, 9.0])}
    state = moments.with_gradients(state, jax.tree.map(jnp.sqrt, squares), moments.init(squares).nu)
    roots = np.sqrt((1 - B2) * np.array([0.01, 1.0, 1.44, 1.0, 9.0])) + EPS
    wanted = np.clip(roots / np.sqrt(np.mean(roots**2)), 1 / 1.5, 1.5)
    found = diagonal(state)
    np.testing.assert_allclose(np.r_[found["a"], found["b"]], wanted, rtol=1e-5)
    assert wanted[0] == 1 / 1.5
    assert wanted[-1] == 1.5
    assert 1 / 1.5 < wanted[2] < 1.5
