"""DP-ZO: against NumPy, what a record adds, whose direction it is, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import optimizers as opt
from jaxdp.clipping import rounding
from jaxdp.optimizers.zero_order import direction_of
from jaxdp.types import Summed
from tests.refusing import refused

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5])).astype(np.float32)
PARAMS = {"w": jnp.array([0.3, -0.2, 0.1]), "frozen": jnp.ones(2), "b": jnp.zeros(())}
C, WIDTH, RATE = 2.0, 0.25, 0.05


def loss(params, x, y):
    return (x @ params["w"] + params["b"] * params["frozen"][0] - y) ** 2


def mechanism(noise=0.0, kind="gaussian", **given):
    sizes = {"batch_size": 64, "dataset_size": 64, "sampling": "full_batch", **given}
    return jaxdp.dp_sgd(noise_multiplier=noise, l2_clip_norm=C, noise=kind, **sizes)


def trainer(made, source=(X, Y), **given):
    algorithm = opt.dp_zo(made, RATE, width=WIDTH, seed=3)
    return jaxdp.Trainer(
        loss, algorithm, source=source, trainable=lambda p: "frozen" not in p, **given
    )


def run(made, steps, **given):
    t = trainer(made, **given)
    state = t.init(PARAMS)
    for batch in t.batches(steps):
        state, _ = t.step(state, batch)
    return t, state.params


def in_numpy(steps):
    """Algorithm 1 of arXiv:2401.04343 without noise, in float64: the parameters after each step."""
    w, b, found = np.array([0.3, -0.2, 0.1]), 0.0, []
    most = C * (1 - rounding.MARGIN)  # what is left for rounding, docs/proofs/clip_bound.md
    trained = {"w": PARAMS["w"], "frozen": None, "b": PARAMS["b"]}
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), step)
        u = jax.tree.map(np.float64, direction_of(jax.random.key_data(key), trained))
        total = 0.0
        for x, y in zip(X.astype(float), Y.astype(float), strict=True):
            ends = [
                (x @ (w + side * WIDTH * u["w"]) + b + side * WIDTH * u["b"] - y) ** 2
                for side in (1, -1)
            ]
            total += np.clip((ends[0] - ends[1]) / (2 * WIDTH), -most, most)
        w, b = w - RATE * total / 64 * u["w"], b - RATE * total / 64 * u["b"]
        found.append((w, b))
    return found


@pytest.mark.parametrize("rows", [64, 10])  # one program, and several physical batches
def test_it_is_the_papers_algorithm(rows):
    _, params = run(mechanism(), 5, physical_batch_size=rows)
    w, b = in_numpy(5)[-1]
    np.testing.assert_allclose(params["w"], w, atol=2e-6)
    np.testing.assert_allclose(params["b"], b, atol=2e-6)
    np.testing.assert_array_equal(params["frozen"], PARAMS["frozen"])


def made_gradient(loss_fn=loss, made=None):
    algorithm = opt.dp_zo(made or mechanism(), RATE, width=WIDTH)
    return algorithm.clipped_grad(loss_fn, trainable=lambda p: "frozen" not in p)


def test_a_record_adds_at_most_the_clip_norm_also_where_its_loss_is_no_number():
    def wild(params, x, y):
        return jnp.where(y > 90, 1 / (params["b"] - params["b"]), loss(params, x, y))

    grad_fn, words = made_gradient(wild), jnp.array([1, 2], jnp.uint32)
    rows = X.copy(), Y.copy()
    rows[1][0], rows[1][1], rows[0][2] = 99, np.nan, 1e15
    number = {}
    for n in range(64):
        mask = np.arange(64) == n
        summed, _ = grad_fn.with_info(PARAMS, rows, mask, direction=words)
        ((number[n],), l2) = jax.tree.leaves(summed.value), summed.l2
    assert [float(number[n]) for n in (0, 1)] == [0, 0]
    assert max(abs(float(v)) for v in number.values()) <= C < l2 < 1.04 * C
    whole, info = grad_fn.with_info(PARAMS, rows, "all", direction=words)
    np.testing.assert_allclose(jax.tree.leaves(whole.value)[0], sum(number.values()), rtol=1e-5)
    assert info.losses.shape == (64,)


def test_every_step_moves_along_a_direction_of_the_seed_and_the_step_alone():
    for kind, noise in (("gaussian", 0.5), ("gaussian", 2.0), ("laplace", 1.0)):
        t = trainer(mechanism(noise, kind), source=(X[:, ::-1].copy() * noise, Y))
        state = t.init(PARAMS)
        for step, batch in enumerate(t.batches(3)):
            before = jax.tree.map(np.array, state.params)
            state, _ = t.step(state, batch)
            key = jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), step)
            u = direction_of(jax.random.key_data(key), {"b": PARAMS["b"], "w": PARAMS["w"]})
            moved = np.append(state.params["w"] - before["w"], state.params["b"] - before["b"])
            along = np.append(u["w"], u["b"])
            share = moved @ along / (along @ along)
            np.testing.assert_allclose(moved, share * along, atol=1e-6)
            assert share != 0
        assert not any("at" in line for line in t.unverified() if "frozen']" not in line)


def test_only_the_callers_frozen_parameters_are_assumed_public():
    t, _ = run(mechanism(1.0), 2)
    (line,) = t.unverified()
    assert line.endswith("the frozen parameter ['frozen']")
    assert [leaf.engine for leaf in made_gradient().plan(PARAMS, (X, Y))] == [
        "forward", "frozen", "forward", "vmap", "frozen",
    ]  # fmt: skip


def test_no_gradient_of_the_network_is_formed():
    @jax.custom_jvp
    def forward_only(x):
        return x

    @forward_only.defjvp
    def _(primals, tangents):
        raise AssertionError("differentiated")

    grad_fn = made_gradient(lambda p, x, y: loss(jax.tree.map(forward_only, p), x, y))
    summed, _ = grad_fn.with_info(PARAMS, (X, Y), "all")
    assert isinstance(summed, Summed)


def test_a_network_with_convolutions_says_the_same():
    images, params = RNG.normal(size=(5, 6)).astype(np.float32), {"kernel": jnp.ones(3) / 3}

    def pooled(params, x):
        return jnp.sum(jnp.tanh(jnp.convolve(x, params["kernel"], mode="valid")))

    words, made = jnp.array([5, 6], jnp.uint32), opt.dp_zo(mechanism(), RATE, width=WIDTH)
    grad_fn, u = made.clipped_grad(pooled), direction_of(words, params)
    ends = [
        jax.vmap(pooled, (None, 0))(
            {"kernel": params["kernel"] + side * WIDTH * u["kernel"]}, images
        )
        for side in (1, -1)
    ]
    total = np.sum(np.clip((ends[0] - ends[1]) / (2 * WIDTH), -C, C))
    summed, _ = grad_fn.with_info(params, images, "all", direction=words)
    np.testing.assert_allclose(jax.tree.leaves(summed.value)[0], total, rtol=5e-3)


@pytest.mark.parametrize(("kind", "noise"), [("gaussian", 1.0), ("laplace", 4.0)])
def test_it_learns(kind, noise):
    x = RNG.normal(size=(2000, 8)).astype(np.float32)
    y = (x @ RNG.normal(size=8) > 0).astype(np.float32)

    def logistic(params, x, y):
        return optax.sigmoid_binary_cross_entropy(x @ params, y)

    made = mechanism(noise, kind, batch_size=200, dataset_size=2000, sampling="poisson")
    t = jaxdp.Trainer(logistic, opt.dp_zo(made, 0.1), source=(x, y))
    state = t.init(jnp.zeros(8))
    for batch in t.batches(200):
        state, _ = t.step(state, batch)
    assert np.mean((x @ np.asarray(state.params) > 0) == y.astype(bool)) > 0.88
    assert t.epsilon(delta=1e-5).upper < 10
    if kind == "laplace":
        rate = np.log1p(0.1 * np.expm1(1 / noise))
        np.testing.assert_allclose(t.epsilon(delta=0.0).upper, 200 * rate, rtol=1e-9)


def test_one_program_takes_draws_of_every_size():
    """Two round a loss differently, which a difference magnifies."""
    poisson = {"batch_size": 8, "sampling": "poisson"}
    for given, rows, fused in (({}, 64, True), (poisson, 64, False), (poisson, 128, True)):
        t, _ = run(mechanism(1.0, **given), 1, physical_batch_size=rows)
        assert t._fused == fused


def test_what_it_does_not_take_is_refused():
    refused("width", lambda: opt.dp_zo(mechanism(), 0.1, width=0.0))
    for seed in (-1, 2**32):  # that one would be 0 again
        refused("seed", lambda seed=seed: opt.dp_zo(mechanism(), 0.1, seed=seed))
    for rule in (jaxdp.per_layer({"w": 1.0}), jaxdp.coordinate_box(1.0)):
        made = jaxdp.dp_sgd(noise_multiplier=1.0, rule=rule, batch_size=1, dataset_size=9)
        refused("one norm", lambda made=made: opt.dp_zo(made, 0.1))
    refused("noise must be None", lambda: opt.dp_zo(mechanism(1.0, "grid"), 0.1))
    link = opt.dp_zo(mechanism(), 0.1).noise
    refused("params must be given", lambda: link.update(None, link.init(PARAMS)))
