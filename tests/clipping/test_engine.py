"""The gradient as users call it: masks, passes, keys, shapes, what it traces and what it refuses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.types import Draw
from tests.clipping.architectures import jit, opened
from tests.clipping.test_rules import norm64
from tests.refusing import all_refused


def assert_close(a, b, rtol=3e-4):
    scale = max(np.max(np.abs(x)) for x in jax.tree.leaves(b))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale), a, b)


def by_hand(data, bound, chosen=slice(None)):
    """The clipped sum in float64; every example is its own gradient."""
    rows = {name: np.asarray(x, np.float64)[chosen] for name, x in data.items()}
    norms = np.sqrt(sum(np.sum(x.reshape(len(x), -1) ** 2, axis=1) for x in rows.values()))
    weights = np.minimum(1.0, bound * (1.0 - rounding.MARGIN) / norms)
    return {name: np.tensordot(weights, x, 1) for name, x in rows.items()}


@functools.cache
def data_of(rows, scale=1.0):
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"w": (rows, 3, 2), "b": (rows, 2)}
    each = zip(keys, shapes.items(), strict=True)
    return {name: scale * jax.random.normal(key, shape) for key, (name, shape) in each}


PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


def loss_fn(params, example):
    return jnp.vdot(params["w"], example["w"]) + jnp.vdot(params["b"], example["b"])


GRAD_FN = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))


def test_mixed_clipping_whatever_the_size_of_a_pass():
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(2.5))
    summed, info = grad_fn(PARAMS, data_of(90), "all")
    assert 0 < info.clipped.sum() < 90
    assert_close(summed.value, by_hand(data_of(90), 2.5))
    assert summed.l2 == 2.5 * (1.0 + rounding.of_sum(2**14))
    for rows in (1, 7, 16, 100):
        given = {"secret": jaxdp.Secret.from_seed(1), "physical_batch_size": rows}
        draw = jaxdp.dp_sgd(1.0, 2.5, 45, 90).sampler(90, **given).draw()
        chosen = draw.indices[draw.mask]
        summed, infos = grad_fn.sum(PARAMS, data_of(90), draw, told=True)
        assert_close(summed.value, by_hand(data_of(90), 2.5, chosen))
        assert len(infos) == max(1, -(-len(chosen) // rows))


def test_passes_of_all_sizes_compile_once_and_give_away_no_array_of_the_user():
    traces = []

    def counted(params, example):
        traces.append(1)
        return loss_fn(params, example)

    grad_fn = jaxdp.clipped_grad(counted, jaxdp.clip(1.0))
    sampler = jaxdp.dp_sgd(1.0, 1.0, 40, 90).sampler(90, physical_batch_size=8)
    # The running totals are donated from pass to pass; parameters and data must not be.
    params, data = jax.tree.map(jnp.copy, (PARAMS, data_of(90)))
    first, _ = grad_fn.sum(params, data, sampler.draw())
    kept, passes = jax.tree.map(np.array, first.value), set()
    for _ in range(12):
        draw = sampler.draw()
        grad_fn.sum(params, data, draw)
        passes.add(len(draw.indices))
    assert len(passes) > 1
    once = len(traces)
    grad_fn.sum(params, data, sampler.draw())
    assert len(traces) == once <= 2
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, data, first.value)))
    assert_close(first.value, kept)


def test_clip_infos_of_a_draw_are_kept_where_asked_for_alone():
    draw = Draw(np.arange(12, dtype=np.int32).reshape(4, 3), np.ones((4, 3), bool), 0, 90)
    (quiet, none), (loud, infos) = (
        GRAD_FN.sum(PARAMS, data_of(90), draw, told=told) for told in (False, True)
    )
    assert none == []
    assert [info.norms.shape for info in infos] == [(3,)] * 4
    assert infos[0].plan
    jax.tree.map(np.testing.assert_array_equal, quiet.value, loud.value)


def test_masked_rows_and_empty_draws_add_nothing_and_a_removed_record_its_bound_at_most():
    run = opened(GRAD_FN)
    summed, info = run(PARAMS, data_of(5), np.asarray([True, False, True, False, False]))
    assert_close(summed, by_hand(data_of(5), 1.0, [0, 2]))
    assert not info.clipped[np.asarray([1, 3, 4])].any()
    empty, _ = run(PARAMS, data_of(5), np.zeros(5, bool))
    draw = Draw(np.zeros((1, 4), np.int32), np.zeros((1, 4), bool), 0, 5)
    none = GRAD_FN.sum(PARAMS, data_of(5), draw)[0].value
    assert not any(leaf.any() for leaf in jax.tree.leaves((empty, none)))
    whole, _ = run(PARAMS, data_of(5, 100.0), np.ones(5, bool))
    for removed in range(4):
        without, _ = run(PARAMS, data_of(5, 100.0), np.arange(5) != removed)
        gap = norm64(jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), whole, without))
        assert 0.99 <= gap <= 1 + 1e-6, removed


def test_every_example_gets_its_own_randomness_in_every_pass():
    def loss_fn(params, example, rng):
        return jnp.sum(params["w"] * jax.random.normal(rng, (4,))) + 0.0 * jnp.sum(example)

    params = {"w": jnp.zeros(4)}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e3))
    chosen, data, key = np.arange(12, dtype=np.int32), jnp.zeros((12, 1)), jax.random.key(0)

    def norms(draw):
        infos = grad_fn.sum(params, data, draw, key, told=True)[1]
        found = np.concatenate([info.norms for info in infos])
        return dict(zip(draw.indices.ravel().tolist(), found.tolist(), strict=True))

    whole = norms(Draw(chosen.reshape(3, 4), np.ones((3, 4), bool), 0, 12))
    assert len(set(whole.values())) == 12
    # A record that leaves, or another size of a pass, changes nobody else's randomness.
    fewer = norms(Draw(chosen[1:].reshape(1, 11), np.ones((1, 11), bool), 0, 12))
    assert fewer == {record: whole[record] for record in fewer}


def test_vmap_over_seeds_and_scan():
    stacked = jax.tree.map(lambda p: jnp.stack([p, p + 1.0]), PARAMS)
    data = data_of(5)
    once = lambda params: GRAD_FN(params, data, "all")[0].value  # noqa: E731
    assert jit(jax.vmap(once))(stacked)["w"].shape == (2, 3, 2)
    step = lambda carry, _: (jax.tree.map(jnp.add, carry, once(carry)), None)  # noqa: E731
    out, _ = jit(lambda p: jax.lax.scan(step, p, None, length=3))(PARAMS)
    assert_close(out, jax.tree.map(lambda x: 3 * x, by_hand(data_of(5), 1.0)))


# ------------------------------------------------------------------- what is traced, and its shapes


@pytest.mark.parametrize("rows", [None, 16], ids=["one physical batch", "several"])
def test_a_hundred_draws_of_unlike_sizes_trace_the_loss_twice(rows):
    # Once for the plan, and once for the compiled step.
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(loss_fn, n=2)
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 30, 90)
    trainer = jaxdp.Trainer(
        counted, mechanism, optax.sgd(0.01), data_of(90), physical_batch_size=rows
    )
    state, sizes = trainer.init(PARAMS), set()
    for batch in trainer.batches(100):
        sizes.add(int(np.count_nonzero(batch.draw.mask)))
        state, _ = trainer.step(state, batch)
    assert len(sizes) > 10
    trainer.close()


def test_a_user_jit_of_the_sum_and_the_update_is_traced_once():
    chex.clear_trace_counter()
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 30, 90)
    grad_fn = mechanism.clipped_grad(loss_fn)
    tx = optax.chain(mechanism.privatize(), optax.sgd(0.01))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, opt_state, batch, key):
        summed, _ = grad_fn(params, batch)
        updates, opt_state = tx.update(summed, opt_state, params, key=key)
        return optax.apply_updates(params, updates), opt_state

    sampler = mechanism.sampler(90, physical_batch_size=90)
    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(20):
        draw = sampler.draw()
        (batch,) = draw.batches(data_of(90))
        params, opt_state = step(params, opt_state, batch, draw.key())
    chex.assert_tree_all_finite(params)


# ------------------------------------------------------------------- refusals


def test_losses_and_rules_that_are_none_are_refused():
    aux = lambda p, e: (jnp.sum(p["w"] * e["w"]), {"batch_stats": e["b"]})  # noqa: E731
    made = functools.partial(jaxdp.clipped_grad, rule=jaxdp.clip(1.0))
    summed = lambda loss: made(loss)(PARAMS, data_of(3), "all")  # noqa: E731
    by_rule = lambda rule: jaxdp.clipped_grad(loss_fn, rule)  # noqa: E731
    rows = (
        ("scalar for one example, got shape", summed, lambda p, e: p["w"]),
        ("scalar for one example, got a int", summed, lambda p, e: 1),
        ("loss_fn must depend on its example", summed, lambda p, e: jnp.sum(p["w"])),
        ("loss_fn must depend on its example", summed, lambda p, e: jnp.float32(1.0)),
        ("floating-point scalar, got int32", summed, lambda p, e: jnp.sum(e["w"] > 0)),
        ("batch statistics", summed, aux),
        ("loss_fn must be a function", made, 3),
        ("loss_fn must take", made, lambda p: 0.0),
        ("loss_fn must take", made, lambda p, key: 0.0),
        ("rule must be a clipping", by_rule, optax.clip(1.0)),
        ("rule must be a clipping rule", by_rule, 0.1),
    )
    all_refused((words, functools.partial(*call), at) for at, (words, *call) in enumerate(rows))


def test_bad_batches_masks_keys_bounds_and_data_are_refused():
    ragged, three = {"w": jnp.zeros((3, 3, 2)), "b": jnp.zeros((7, 2))}, data_of(3)
    draw = Draw(np.zeros((1, 2), np.int32), np.ones((1, 2), bool), 0, 3)
    once, add = functools.partial(GRAD_FN, PARAMS), functools.partial(GRAD_FN.sum, PARAMS)
    needs = jaxdp.clipped_grad(lambda p, e, rng: jnp.sum(p["w"]), jaxdp.clip(1.0))
    rows = [
        ("batch must hold arrays", lambda: once(ragged, "all")),
        (r"bool \[3\], got int32 \[3\]", lambda: once(three, jnp.ones(3, jnp.int32))),
        (r"bool \[3\], got bool \[2\]", lambda: once(three, jnp.ones(2, bool))),
        ("rng must be None", lambda: once(three, "all", rng=jax.random.key(0))),
        ("rng must be a key", lambda: needs(PARAMS, three, "all")),
        ("data must hold the records that", lambda: add(data_of(5), draw)),
        ("data must hold arrays", lambda: add(ragged, draw)),
    ]
    for bad in (-1.0, 0, float("nan"), 1e-11, True, "1", jnp.ones(3), jnp.int32(1), np.ones(2)):
        for call, to in ((once, "all"), (add, draw)):
            rows.append(("bound must be", functools.partial(call, three, to, bound=bad), bad))
    all_refused(rows)
