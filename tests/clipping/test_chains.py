"""Chains of one's own: where a sum cannot go, in words; scales and bounds; Flax's own steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxdp
from jaxdp.optimizers.adadp import Box, adadp, scale_by_adadp
from jaxdp.optimizers.adaptive import AdaptiveMoments, scale_by_moments
from jaxdp.optimizers.pigdo import Preconditioner, piadam
from jaxdp.optimizers.quantile import quantile_clip
from jaxdp.training.step import PrivateStep
from tests.clipping.test_rules import norm64
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
DATA = (jax.random.normal(jax.random.key(0), (8, 3)), jax.random.normal(jax.random.key(1), (8, 2)))


def loss_fn(params, x, y):
    return jnp.sum(jnp.square(x @ params["w"] + params["b"] - y))


MECH = sgd_of(1.0, 1.0, 8, 8, "full_batch")
privatize = MECH.privatize


def summed(loss=loss_fn, params=PARAMS, **options):
    draw = MECH.sampler(8).draw()
    return MECH.clipped_grad(loss, **options)(params, DATA, draw)


NOISY = optax.chain(privatize(), optax.sgd(0.1))


def test_before_the_noise_nothing_opens_a_sum():
    """Beside what tests/test_types.py has; compiled, too, and the ticket stays unspent."""
    both = {"noised": privatize(), "not": optax.sgd(0.1)}
    early = {
        "trace": optax.chain(optax.trace(0.9), privatize()),
        "centralize": optax.chain(optax.centralize(), privatize()),
        "no privatize": optax.adam(1e-3),
        "no privatize, injected": optax.inject_hyperparams(optax.adamw)(1e-3),
        "MultiSteps": optax.MultiSteps(NOISY, 2),
        "apply_if_finite": optax.apply_if_finite(NOISY, 5),
        "multi_transform": optax.multi_transform(both, {"w": "noised", "b": "not"}),
        "optax's own noise": optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
    }
    words, given, rows = r"Put privatize .* first in the optax chain, before scale", summed(), []
    for name, tx in early.items():
        state, update = tx.init(PARAMS), jaxdp.compile_update(tx, donate=False)
        rows.append((words, functools.partial(tx.update, given, state, PARAMS), name))
        rows.append((words, functools.partial(update, PARAMS, state, given), name, "compiled"))
    all_refused(rows, TypeError)
    assert not given.ticket.spent


def test_what_comes_after_the_noise_may_be_anything():
    for after in (
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        optax.apply_if_finite(optax.sgd(0.1), 5),
        optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    ):
        tx = optax.chain(privatize(), after)
        with jax.numpy_dtype_promotion("standard"):  # optax's MultiSteps needs it
            updates, _ = tx.update(summed(), tx.init(PARAMS), PARAMS)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_a_sum_is_no_array_nothing_else_takes_its_place_and_jit_does_not_hold_it():
    given, state = summed(), NOISY.init(PARAMS)
    batch = jaxdp.Batch(DATA, jnp.ones(8, bool))
    plain = jax.grad(lambda p: jax.vmap(loss_fn, (None, 0, 0))(p, *DATA).mean())(PARAMS)
    uses = [lambda s: s / 8, lambda s: 2 * s, lambda s: s * 2, lambda s: s - s, lambda s: s["w"]]
    remedy = r"got dict: .*Take jaxdp.clipped_grad\(loss_fn, rule\) in pl"
    inside = r"call the gradient and tx.update inside it, with key="
    rows = [
        (r"outside jit: jaxdp.compile_update\(tx\) compiles", jax.jit(NOISY.update), given, state),
        (inside, jax.jit(MECH.clipped_grad(loss_fn)), PARAMS, batch),
        (remedy, NOISY.update, plain, state, PARAMS),
        (
            "summed must be a Summed",
            jaxdp.compile_update(NOISY, donate=False),
            PARAMS,
            state,
            plain,
        ),
        *(("un-noised sum, which nothing but priv", use, given) for use in (*uses, list)),
    ]
    all_refused(
        ((words, functools.partial(*call), at) for at, (words, *call) in enumerate(rows)), TypeError
    )


FROZEN = {"w": True, "b": False}


def test_a_state_made_for_frozen_parameters_too_is_refused_with_the_remedy():
    trained = MECH.clipped_grad(loss_fn, trainable=FROZEN).trained(PARAMS)
    tx = optax.chain(privatize(), optax.rmsprop(0.1))
    wrong, right, update = tx.init(PARAMS), tx.init(trained), jaxdp.compile_update(tx, donate=False)
    given = [summed(trainable=FROZEN) for _ in range(4)]
    remedy = r"tx.init\(grad_fn.trained\(params\)\)"
    rows = [(f"opt_state must be .*{remedy}", functools.partial(update, PARAMS, wrong, given[3]))]
    for each, params in zip(given[:3], (PARAMS, trained, None), strict=True):
        rows.append((remedy, functools.partial(tx.update, each, wrong, params)))
    all_refused(rows)
    assert not any(each.ticket.spent for each in given[:3])
    updates, _ = tx.update(summed(trainable=FROZEN), right, trained)
    assert updates["b"] is None
    moved, _, _ = update(PARAMS, right, summed(trainable=FROZEN))
    np.testing.assert_array_equal(moved["b"], PARAMS["b"])
    assert np.abs(moved["w"] - PARAMS["w"]).min() > 0


def test_an_error_of_the_users_own_transformation_stays_as_it_is():
    def broken(updates, state, params=None):
        raise ValueError("mine")

    tx = optax.chain(privatize(), optax.GradientTransformation(optax.sgd(0.1).init, broken))
    refused(r"^mine", jaxdp.compile_update(tx, donate=False), PARAMS, tx.init(PARAMS), summed())


# ------------------------------------------------------------------- Flax


def test_flax_train_state_by_two_lines_or_with_the_noise_in_its_chain():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(TypeError, match=r"apply_gradients.* take what is noised"):
        state.apply_gradients(grads=summed())
    noise = privatize()
    noise_state = noise.init(PARAMS)
    for _ in range(2):
        noisy, noise_state = noise.update(summed(), noise_state)
        state = state.apply_gradients(grads=noisy)
    assert int(state.step) == 2
    chained = TrainState.create(apply_fn=None, params=PARAMS, tx=NOISY)
    for moved in (state, chained.apply_gradients(grads=summed())):
        assert all(np.abs(leaf - 1).min() > 0 for leaf in jax.tree.leaves(moved.params))


def test_nnx_optimizer_by_two_lines():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0, momentum=0.9), wrt=nnx.Param)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    before = np.asarray(model.kernel[...])

    def loss(params, x, y):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x) - y))

    with pytest.raises(TypeError, match=r"nnx.Optimizer.update.* take what is noised"):
        optimizer.update(model, summed(loss, params))
    noise = privatize()
    noise_state = noise.init(params)
    for _ in range(2):
        params = nnx.state(model, nnx.Param)
        noisy, noise_state = noise.update(summed(loss, params), noise_state)
        optimizer.update(model, noisy)
    assert np.abs(model.kernel[...] - before).min() > 0


# ------------------------------------------------------------------- scale and bound


@jax.jit
def rows(params):
    return jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, *DATA)


def close(a, b, rtol=2e-4, atol=2e-5):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((a, b)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


RULES = [
    jaxdp.clip(0.5),
    jaxdp.auto_s(0.5),
    jaxdp.normalize(0.5),
    jaxdp.coordinate_box(0.1),
    jaxdp.per_layer({"w": 0.3, "b": 0.4}),
]
SCALE = {"w": jnp.asarray([[0.5, 2.0], [1.0, 4.0], [0.1, 1.0]]), "b": jnp.asarray([3.0, 0.2])}
MASK = jnp.arange(8) % 3 != 0
BOUNDS = [None, 0.05, jnp.float32(0.05), jnp.float32(jnp.nan)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_clip_and_sum_equals_the_engine_with_scales_and_bounds(rule):
    link, grads = jaxdp.clip_and_sum(rule), rows(PARAMS)
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "vmap")
    by_link = lambda **given: link.update(grads, (), PARAMS, mask=MASK, **given)[0]  # noqa: E731
    if rule != RULES[0]:
        refused("bound must be None", by_link, bound=0.05)
    for scale in (None, SCALE):
        for bound in BOUNDS if rule == RULES[0] else BOUNDS[:1]:
            given = {"scale": scale, "bound": bound}
            found, wanted = by_link(**given), grad_fn(PARAMS, DATA, MASK, **given)
            for a, b in ((found.value, wanted.value), (found.unscale, wanted.unscale)):
                close(a, b, rtol=1e-5, atol=1e-11)
            assert float(found.l2) == float(wanted.l2), given
            assert (found.votes is None) is (wanted.votes is None) is (bound is None), given
            if bound is not None:
                assert float(found.votes) == float(wanted.votes), given


def test_no_record_adds_more_than_the_bound_of_the_step():
    link = jaxdp.clip_and_sum(jaxdp.clip(0.5))
    large = jax.tree.map(lambda g: 1e6 * g, rows(PARAMS))
    for scale in (None, SCALE):
        given = {"scale": scale, "bound": jnp.float32(0.05)}
        found, _ = link.update(large, (), PARAMS, mask=jnp.arange(8) == 2, **given)
        assert 0.049 < norm64(found.value) <= 0.05 < found.l2 < 0.06, scale


SLIPS = [("scale", n) for n in ("scales", "Scale", "scale_", "sacle")]
SLIPS += [("bound", "bounds"), ("bound", "Bound"), ("mask", "masks")]


def test_what_is_no_scale_bound_or_gradient_of_examples_is_refused_a_slip_of_the_pen_too():
    link, zeros = jaxdp.clip_and_sum(jaxdp.clip(0.5)), jnp.zeros
    w, b = SCALE["w"], SCALE["b"]
    bounds = (0.0, -1.0, float("nan"), 1e11, jnp.ones(2))
    one, mean = {"w": zeros((7, 4))}, {"w": zeros((3, 2)), "b": zeros(())}
    ragged = {"a": zeros((3, 2)), "b": zeros((4, 2))}
    bad = [
        *(("bound must be", {"bound": bound}) for bound in bounds),
        *(("scale must be shaped like", {"scale": s}) for s in ({"w": w}, {"w": b, "b": w})),
        ("scale must be shaped like", {"scale": jnp.float32(1.0)}),
        *((f"{meant} must be given by that name, got '{n}'", {n: SCALE}) for meant, n in SLIPS),
        ("updates must be per-example gradients", {}, mean, mean),
        (r"over parameters \[\(7, 4\)\], got \[\(7, 4\)\]", {}, one, one),
        ("params must be passed", {}, one, None),
        ("one and the same m", {}, ragged, {"a": zeros(2), "b": zeros(2)}),
        ("mask must be bool", {"mask": jnp.ones(2, bool)}, one, {"w": zeros(4)}),
    ]

    def update(given, grads=None, params=PARAMS):
        grads = rows(PARAMS) if grads is None else grads
        link.update(grads, (), params, **{"mask": "all", **given})

    all_refused((words, functools.partial(update, *call), call) for words, *call in bad)
    # Arguments of other links pass.
    update(dict.fromkeys(("key", "energy", "leaked", "value", "loss_scale", "step", "rng")))


def engine_steps(engine, steps=4):
    """The engine's path: the step behind the trainer."""
    step = PrivateStep.of(engine, loss_fn)
    params, state, seen = PARAMS, step.init(PARAMS), []
    for i in range(steps):
        given = step.clipped_by(state)
        total = step.grad_fn(params, DATA, "all", **given)
        key = engine.mechanism.simulated_key(jax.random.fold_in(jax.random.key(7), i), i)
        params, state, _, _ = step.release(params, state, total, key)
        seen.append(given["scale"])
    return params, seen


def chain_steps(tx, reads, mechanism, steps=4):
    """A user's own chain: per-example gradients in, updates out."""
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(steps):
        key = mechanism.simulated_key(jax.random.fold_in(jax.random.key(7), i), i)
        updates, state = tx.update(rows(params), state, params, mask="all", key=key, **reads(state))
        params = optax.apply_updates(params, updates)
    return params, state


def test_adadp_and_pigdo_by_hand():
    boxed = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 0.5, 8, 8, "full_batch")
    mech, box = sgd_of(0.5, 1.0, 8, 8, "full_batch"), Box(4.0, 8, cap=100.0)
    moments = AdaptiveMoments(0.999, 1e-8, 0.1, b1=0.9)
    diagonal = Preconditioner(moments)

    def composed(mech, own, reads):
        clip = jaxdp.clip_and_sum(mech.rule, mech.most_records)
        tx = optax.chain(clip, mech.privatize(), own, optax.scale_by_learning_rate(0.05))
        return chain_steps(tx, reads, mech)[0]

    wanted, scales = engine_steps(adadp(boxed, 0.05, bound=4.0, cap=100.0))
    others, more = engine_steps(piadam(mech, 0.05))
    for each in (scales, more):  # the composition shows nothing while all are alike
        last = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each[-1])])
        assert last.max() > 1.2 * last.min()
    own = scale_by_adadp(boxed, box)
    close(composed(boxed, own, lambda state: {"scale": box.sides(state[2].moment)}), wanted)
    lost = composed(boxed, own, lambda state: {})
    assert np.abs(lost["w"] - wanted["w"]).max() > 1e-3
    own = scale_by_moments(moments, mech.noise_std, diagonal)
    close(composed(mech, own, lambda state: {"scale": diagonal(state[2])}), others)


def test_quantile_clipping_by_hand():
    mech, link = quantile_clip(0.5, 8, 8, initial_bound=0.7, sampling="full_batch")
    tx = optax.chain(jaxdp.clip_and_sum(mech.rule, mech.most_records), link, optax.sgd(0.05))
    found, state = chain_steps(tx, lambda state: {"bound": state[1].bound}, mech)
    assert abs(float(state[1].bound) - 0.7) > 0.01
    grad_fn, plain = mech.clipped_grad(loss_fn), optax.chain(link, optax.sgd(0.05))
    params, other = PARAMS, plain.init(PARAMS)
    for i in range(4):
        total = grad_fn(params, DATA, "all", bound=other[0].bound)
        key = mech.simulated_key(jax.random.fold_in(jax.random.key(7), i), i)
        updates, other = plain.update(total, other, params, key=key)
        params = optax.apply_updates(params, updates)
    close(found, params)
    np.testing.assert_allclose(state[1].bound, other[0].bound, rtol=1e-6)


@pytest.mark.parametrize("noise", ["gaussian", "grid"])
def test_noise_std_is_that_of_the_noise_that_the_mechanism_adds(noise):
    """Before: ``clip_and_sum(rule)`` allowed for 2^14 records, and the noise was 2 % larger."""
    mech = sgd_of(1.0, 0.5, 16, 200, noise=noise)
    params = {"w": jnp.zeros(50)}
    key, noise_only = mech.simulated_key(jax.random.key(1)), mech.privatize()
    summed = jaxdp.Summed(params, mech.l2(params))  # noise_std is noise_multiplier times this l2
    wanted, _ = noise_only.update(summed, noise_only.init(params), params, key=key)
    for clip in (jaxdp.clip_and_sum(mech.rule), mech.clip_and_sum()):
        tx = optax.chain(clip, mech.privatize())
        none = {"w": jnp.zeros((4, 50))}
        found, _ = tx.update(none, tx.init(params), params, mask="all", key=key)
        np.testing.assert_array_equal(found["w"], wanted["w"])


def test_noise_covers_rows_that_the_mechanism_does_not_expect_and_sums_of_several_devices():
    """What a part of the records is allowed for does not do for a sum of parts."""
    mech = sgd_of(1.0, 0.5, 16, 200)
    params, key = {"w": jnp.zeros(50)}, mech.simulated_key(jax.random.key(1))
    clip, add = jaxdp.clip_and_sum(mech.rule), mech.privatize()

    def noise_of(summed):
        return float(jnp.linalg.norm(add.update(summed, add.init(params), params, key=key)[0]["w"]))

    def sum_of(rows):
        grads = {"w": jnp.zeros((rows, 50))}
        return clip.update(grads, clip.init(params), params, mask="all")[0]

    few, many = sum_of(4), sum_of(mech.most_records + 1)
    added = dataclasses.replace(few, value=jax.tree.map(jnp.add, few.value, few.value))
    assert noise_of(few) < noise_of(many) == noise_of(added)
    with pytest.raises(ValueError, match="most_records must be at least"):
        mech.clip_and_sum().update({"w": jnp.zeros((1057, 50))}, None, params, mask="all")
