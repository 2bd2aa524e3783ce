import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import models
from jaxdp.clipping import rounding
from jaxdp.types import Draw


def by_hand(loss_fn, params, batch, bound):
    """The clipped sum, one example and one NumPy line at a time, in float64."""
    bound = bound * (1.0 - rounding.MARGIN)
    rows = jax.tree.leaves(batch)[0].shape[0]
    total = jax.tree.map(lambda p: np.zeros(p.shape), params)
    grad_fn = jax.jit(jax.grad(loss_fn))
    for i in range(rows):
        grad = grad_fn(params, jax.tree.map(lambda x, i=i: x[i], batch))
        grad = jax.tree.map(lambda g: np.asarray(g, np.float64), grad)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grad)))
        total = jax.tree.map(lambda t, g, n=norm: t + g * min(1.0, bound / n), total, grad)
    return total


def assert_close(a, b, rtol=3e-4):
    scale = max(np.max(np.abs(x)) for x in jax.tree.leaves(b))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale), a, b)


def test_mnist_cnn_against_one_example_at_a_time():
    model = models.build("mnist-cnn", num_classes=10, example_shape=(28, 28, 1))
    params = models.init(model, jax.random.key(0), (28, 28, 1))
    loss_fn = models.cross_entropy(model)
    x = jax.random.uniform(jax.random.key(1), (6, 28, 28, 1))
    batch = (x, jnp.arange(6, dtype=jnp.int32))
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1))

    @jax.jit
    def compiled(params, batch):
        summed, info = grad_fn(params, batch, "all")
        return summed.value, info

    summed, info = compiled(params, batch)
    assert_close(summed, by_hand(loss_fn, params, batch, 0.1))
    assert info.clipped.all()
    losses = [loss_fn(params, (batch[0][i], batch[1][i])) for i in range(6)]
    np.testing.assert_allclose(info.losses, losses, rtol=1e-5)


def test_mixed_clipping(linear):
    params, batch, loss_fn = linear
    data = batch(40)
    summed, info = jaxdp.clipped_grad(loss_fn, jaxdp.clip(2.5))(params, data, "all")
    assert 0 < info.clipped.sum() < 40
    assert_close(summed.value, by_hand(loss_fn, params, data, 2.5))
    assert summed.l2 == 2.5 * (1.0 + rounding.of_sum(2**14))


@pytest.mark.parametrize("rows", [1, 7, 16, 100])
def test_the_size_of_a_pass_changes_nothing(linear, rows):
    params, batch, loss_fn = linear
    data = batch(90)
    sampler = jaxdp.dp_sgd(1.0, 2.5, 45, 90).sampler(
        90, secret=jaxdp.Secret.from_seed(1), physical_batch_size=rows
    )
    draw = sampler.draw()
    chosen = draw.indices[draw.mask]
    summed, infos = jaxdp.clipped_grad(loss_fn, jaxdp.clip(2.5)).sum(params, data, draw, told=True)
    picked = jax.tree.map(lambda x: x[chosen], data)
    assert_close(summed.value, by_hand(loss_fn, params, picked, 2.5))
    assert len(infos) == max(1, -(-len(chosen) // rows))


def test_passes_of_all_sizes_compile_once(linear):
    params, batch, _ = linear
    traces = []

    def loss_fn(params, example):
        traces.append(1)
        return jnp.sum(params["w"] * example["w"]) + jnp.sum(params["b"] * example["b"])

    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    sampler = jaxdp.dp_sgd(1.0, 1.0, 40, 90).sampler(90, physical_batch_size=8)
    passes = set()
    for _ in range(12):
        draw = sampler.draw()
        grad_fn.sum(params, batch(90), draw)
        passes.add(len(draw.indices))
    assert len(passes) > 1
    once = len(traces)
    grad_fn.sum(params, batch(90), sampler.draw())
    assert len(traces) == once <= 2


def test_passes_give_away_no_array_of_the_user(linear):
    # The running totals are donated from pass to pass; parameters and data must not be.
    params, batch, loss_fn = linear
    data = batch(90)
    sampler = jaxdp.dp_sgd(1.0, 1.0, 40, 90).sampler(90, physical_batch_size=8)
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    first, _ = grad_fn.sum(params, data, sampler.draw())
    kept = jax.tree.map(np.array, first.value)
    grad_fn.sum(params, data, sampler.draw())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, data, first.value)))
    assert_close(first.value, kept)


def test_clip_infos_of_a_draw_are_kept_where_asked_for_alone(linear):
    params, batch, loss_fn = linear
    grad_fn, data = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0)), batch(12)
    draw = Draw(np.arange(12, dtype=np.int32).reshape(4, 3), np.ones((4, 3), bool), 0, 12)
    (quiet, none), (loud, infos) = (grad_fn.sum(params, data, draw, told=t) for t in (False, True))
    assert none == []
    assert [info.norms.shape for info in infos] == [(3,)] * 4
    assert infos[0].plan
    jax.tree.map(np.testing.assert_array_equal, quiet.value, loud.value)


def test_masked_rows_and_empty_draws_add_nothing(linear):
    params, batch, loss_fn = linear
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    data = batch(5)
    mask = jnp.asarray([True, False, True, False, False])
    summed, info = grad_fn(params, data, mask)
    kept = jax.tree.map(lambda x: x[jnp.asarray([0, 2])], data)
    assert_close(summed.value, by_hand(loss_fn, params, kept, 1.0))
    assert not (info.clipped & ~mask).any()
    empty, _ = grad_fn(params, data, jnp.zeros(5, bool))
    assert all(not leaf.any() for leaf in jax.tree.leaves(empty.value))
    draw = Draw(np.zeros((1, 4), np.int32), np.zeros((1, 4), bool), 0, 5)
    assert all(not leaf.any() for leaf in jax.tree.leaves(grad_fn.sum(params, data, draw)[0].value))


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


def test_data_other_than_the_sampler_draws_from_is_refused(linear):
    params, batch, loss_fn = linear
    draw = jaxdp.dp_sgd(1.0, 1.0, 20, 90).sampler(90).draw()
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    with pytest.raises(ValueError, match="data must hold the records that"):
        grad_fn.sum(params, batch(80), draw)
    ragged = {"w": jnp.zeros((90, 3, 2)), "b": jnp.zeros((7, 2))}
    with pytest.raises(ValueError, match="data must hold arrays"):
        grad_fn.sum(params, ragged, draw)


def test_bf16_parameters_are_summed_in_float32(linear):
    params, batch, loss_fn = linear
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    data = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch(30))
    summed, _ = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))(low, data, "all")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(summed.value))


@pytest.mark.parametrize("removed", range(4))
def test_removing_any_record_moves_the_sum_by_at_most_the_bound(linear, removed):
    params, batch, loss_fn = linear
    data = batch(4, scale=100.0)
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.7))
    mask = jnp.arange(4) != removed
    with_all, without = grad_fn(params, data, "all")[0].value, grad_fn(params, data, mask)[0].value
    gap = np.sqrt(
        sum(
            np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)
            for a, b in zip(jax.tree.leaves(with_all), jax.tree.leaves(without), strict=True)
        )
    )
    assert 0.99 * 0.7 <= gap <= 0.7 * (1 + 1e-6)


def test_vmap_over_seeds_and_scan(linear):
    params, batch, loss_fn = linear
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    stacked = jax.tree.map(lambda p: jnp.stack([p, p + 1.0]), params)
    values = jax.vmap(lambda p: grad_fn(p, batch(5), "all")[0].value)(stacked)
    assert values["w"].shape == (2, 3, 2)

    def body(carry, _):
        return jax.tree.map(jnp.add, carry, grad_fn(carry, batch(5), "all")[0].value), None

    out, _ = jax.lax.scan(body, params, None, length=3)
    assert out["w"].shape == (3, 2)


BAD_LOSSES = [
    (lambda p, e: p["w"], "scalar for one example, got shape"),
    (lambda p, e: 1, "scalar for one example, got a int"),
    (lambda p, e: jnp.sum(p["w"]), "loss_fn must depend on its example"),
    (lambda p, e: jnp.sum(e["w"] > 0), "floating-point scalar, got int32"),
    (lambda p, e: (jnp.sum(p["w"] * e["w"]), {"batch_stats": e["b"]}), "batch statistics"),
]


@pytest.mark.parametrize(("loss_fn", "message"), BAD_LOSSES)
def test_bad_loss_values(linear, loss_fn, message):
    params, batch, _ = linear
    with pytest.raises(ValueError, match=message):
        jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))(params, batch(3), "all")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxdp.clipped_grad(3, jaxdp.clip(1.0)), "loss_fn must be a function"),
        (lambda: jaxdp.clipped_grad(lambda p: 0.0, jaxdp.clip(1.0)), "loss_fn must take"),
        (lambda: jaxdp.clipped_grad(lambda p, key: 0.0, jaxdp.clip(1.0)), "loss_fn must take"),
        (lambda: jaxdp.clipped_grad(lambda p, e: 0.0, optax.clip(1.0)), "rule must be a clipping"),
        (lambda: jaxdp.clipped_grad(lambda p, e: 0.0, 0.1), "rule must be a clipping rule"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_batches_masks_and_keys(linear):
    params, batch, loss_fn = linear
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    ragged = {"w": jnp.zeros((3, 3, 2)), "b": jnp.zeros((4, 2))}
    with pytest.raises(ValueError, match="batch must hold arrays"):
        grad_fn(params, ragged, "all")
    with pytest.raises(ValueError, match=r"mask must be bool \[3\], got int32 \[3\]"):
        grad_fn(params, batch(3), jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"mask must be bool \[3\], got bool \[2\]"):
        grad_fn(params, batch(3), jnp.ones(2, bool))
    with pytest.raises(ValueError, match="rng must be None"):
        grad_fn(params, batch(3), "all", rng=jax.random.key(0))
    needs = jaxdp.clipped_grad(lambda p, e, rng: jnp.sum(p["w"]), jaxdp.clip(1.0))
    with pytest.raises(ValueError, match="rng must be a key"):
        needs(params, batch(3), "all")
