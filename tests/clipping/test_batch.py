"""Which rows of a physical batch are records: never guessed, and never parted from the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.types import Draw
from tests.clipping.references import refuses

RULES = [
    jaxdp.clip(1.0),
    jaxdp.auto_s(),
    jaxdp.normalize(),
    jaxdp.coordinate_box(1.0),
    jaxdp.per_layer({"w": 1.0}),
]
PARAMS = {"w": jnp.zeros((3, 2))}
FORGOTTEN = r'mask must say .* got None.*jaxdp.Batch.*mask=: bool \[128\], or "all"'


def loss(params, example):
    return jnp.vdot(params["w"], example)


def drawn():
    """Records whose gradients are all alike in size, and a draw of 16 padded to 128 rows."""
    data = 10.0 * jax.random.normal(jax.random.key(0), (40, 3, 2))
    indices = np.zeros((1, 128), np.int32)
    indices[0, :16] = np.arange(1, 17)
    return data, Draw(indices, np.arange(128)[None] < 16, 0, 40)


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def test_record_0_adds_nothing_by_padding_whichever_way_a_draw_is_summed():
    data, draw = drawn()
    without = data.at[0].set(-data[0])  # another record 0, which the draw does not hold
    grad_fn, tx = jaxdp.clipped_grad(loss, jaxdp.clip(1.0)), jaxdp.clip_and_sum(jaxdp.clip(1.0))

    @jax.jit
    def native(batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, batch.data)
        return tx.update(grads, tx.init(PARAMS), PARAMS, mask=batch.mask)[0].value

    ways = {
        "sum": lambda data: grad_fn.sum(PARAMS, data, draw)[0].value,
        "batch": lambda data: grad_fn(PARAMS, *draw.batches(data))[0].value,
        "jit": jax.jit(lambda data: grad_fn(PARAMS, *draw.batches(data))[0].value),
        "native": lambda data: native(*draw.batches(data)),
    }
    expected = sum(x / norm(x) for x in np.asarray(data[1:17], np.float64)) * (1 - rounding.MARGIN)
    for name, way in ways.items():
        np.testing.assert_allclose(way(data)["w"], expected, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(way(data)["w"], way(without)["w"], err_msg=name)


def test_a_forgotten_mask_is_refused_in_words():
    data, draw = drawn()
    rows = data[draw.indices[0]]
    with pytest.raises(ValueError, match=FORGOTTEN):
        jaxdp.clipped_grad(loss, jaxdp.clip(1.0))(PARAMS, rows)
    tx = jaxdp.clip_and_sum(jaxdp.clip(1.0))
    with pytest.raises(ValueError, match=FORGOTTEN):
        tx.update({"w": rows}, tx.init(PARAMS), PARAMS)
    chain = optax.chain(tx, jaxdp.privatize(1.0, 16.0))
    with pytest.raises(ValueError, match=FORGOTTEN):
        jax.jit(lambda u: chain.update(u, chain.init(PARAMS), PARAMS)[0])({"w": rows})


def test_all_is_a_mask_that_lets_every_row_through():
    rows, grad_fn = drawn()[0], jaxdp.clipped_grad(loss, jaxdp.clip(1.0))
    word, info = grad_fn(PARAMS, rows, "all")
    assert info.mask.all()
    mask = jnp.ones(40, bool)
    by_mask = grad_fn(PARAMS, rows, mask)[0]
    by_batch = grad_fn(PARAMS, jaxdp.Batch(rows, mask))[0]
    for other in (by_mask, by_batch):
        np.testing.assert_array_equal(word.value["w"], other.value["w"])


def test_other_words_and_a_mask_beside_a_batch_are_refused():
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(1.0))
    rows, mask = jnp.ones((4, 3, 2)), jnp.ones(4, bool)
    for word in ("none", "ALL", ""):
        refuses(word, r'mask must be bool \[4\] or "all", got', grad_fn, PARAMS, rows, word)
    for given in (mask, "all"):
        words = "mask must not be given with a Batch"
        refuses(given, words, grad_fn, PARAMS, jaxdp.Batch(rows, mask), given)


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, np.asarray), (5, jnp.asarray), (16, np.asarray), (64, jnp.asarray)]
)
def test_the_batches_of_a_draw_are_its_passes(rows, kind):
    data = {"x": kind(np.arange(80.0, dtype=np.float32).reshape(40, 2)), "y": kind(np.arange(40))}
    sampler = jaxdp.dp_sgd(1.0, 1.0, 20, 40).sampler(40, physical_batch_size=rows)
    draw = sampler.draw()
    batches = list(draw.batches(data))
    assert len(batches) == len(draw.indices)
    found = np.concatenate([np.asarray(b.data["y"])[np.asarray(b.mask)] for b in batches])
    np.testing.assert_array_equal(found, draw.indices[draw.mask])
    for batch, at in zip(batches, draw.indices, strict=True):
        assert isinstance(batch.data["x"], type(data["x"]))
        np.testing.assert_array_equal(batch.data["x"], np.asarray(data["x"])[at])


def test_batches_of_other_data_are_refused_before_the_first():
    _, draw = drawn()
    with pytest.raises(ValueError, match="data must hold the records that the sampler draws from"):
        draw.batches(jnp.ones((39, 3, 2)))
    with pytest.raises(ValueError, match="data must hold arrays"):
        draw.batches({"a": jnp.ones((40, 3)), "b": jnp.ones((7, 3))})


BAD = {
    "mask of another length": (jnp.ones((4, 2)), jnp.ones(3, bool), r"bool \[4\], got bool \[3\]"),
    "mask of numbers": (jnp.ones((4, 2)), jnp.ones(4), r"bool \[4\], got float32 \[4\]"),
    "no mask": (np.ones((4, 2)), None, r"bool \[4\], got NoneType"),
    "the word": (np.ones((4, 2)), "all", r"bool \[4\], got str"),
    "ragged": ((np.ones((4, 2)), np.ones(5)), np.ones(4, bool), "data must hold arrays"),
    "no axis": (np.ones(()), np.ones(4, bool), "data must hold arrays"),
}


def test_a_batch_that_does_not_fit_together_is_refused():
    for name, (data, mask, message) in BAD.items():
        refuses(name, message, jaxdp.Batch, data, mask)
        traced = jax.jit(lambda data=data, mask=mask: jaxdp.Batch(data, mask).mask)
        refuses(name, message, traced)


def test_a_batch_is_a_pytree_that_jax_may_fill_with_anything():
    batch = jaxdp.Batch({"x": jnp.ones((4, 2))}, jnp.ones(4, bool))
    structure = jax.tree.structure(batch)
    for filler in (None, object(), 0, "x"):
        jax.tree.unflatten(structure, [filler, filler])
    assert jax.eval_shape(lambda b: b, batch).mask.shape == (4,)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch)
    rows = jax.vmap(lambda b: jnp.sum(b.data["x"]), in_axes=(jaxdp.Batch(0, 0),))(stacked)
    assert rows.shape == (2,)
    assert jax.vmap(lambda b: b)(batch).mask.shape == (4,)
    with jax.checking_leaks():
        assert jax.jit(lambda b: b)(batch).mask.all()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    assert paths == [".data['x']", ".mask"]


def test_what_jax_filled_wrongly_is_refused_where_it_is_summed():
    batch = jaxdp.Batch(jnp.ones((4, 3, 2)), jnp.ones(4, bool))
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(1.0))
    for change in (
        lambda leaf: None if leaf.dtype == bool else leaf,
        lambda leaf: leaf[:3] if leaf.dtype == bool else leaf,
    ):
        with pytest.raises(ValueError, match=r"mask must be bool \[4\]"):
            grad_fn(PARAMS, jax.tree.map(change, batch))


def test_a_batch_shows_no_records():
    assert repr(jaxdp.Batch(jnp.full((1, 2), 17.0), jnp.ones(1, bool))) == (
        "Batch(data=<sensitive>, mask=<sensitive>)"
    )


def with_aux(params, example):
    return jnp.sum(jnp.sin(example @ params["w"])), {"seen": example}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_batch_without_rows_sums_to_zero(rule):
    empty = jaxdp.Batch(jnp.zeros((0, 4, 3)), jnp.zeros(0, bool))
    for engine, size in (("auto", None), ("auto", 1), ("auto", 4), ("ghost", None), ("ghost", 4)):
        grad_fn = jaxdp.clipped_grad(with_aux, rule, engine, size)
        summed, info = grad_fn(PARAMS, empty)
        np.testing.assert_array_equal(summed.value["w"], np.zeros((3, 2)))
        assert info.norms.shape == info.mask.shape == info.clipped.shape == (0,)
        assert info.aux["seen"].shape == (0, 4, 3)
        assert len(grad_fn.plan(PARAMS, empty)) == 1
    data = jnp.ones((2, 4, 3))
    for passes, rows in ((0, 4), (1, 0)):
        draw = Draw(np.zeros((passes, rows), np.int32), np.zeros((passes, rows), bool), 0, 2)
        np.testing.assert_array_equal(grad_fn.sum(PARAMS, data, draw)[0].value["w"], 0.0)
        assert len(list(draw.batches(data))) == passes
    found, _ = jaxdp.clip_and_sum(rule).update(
        {"w": jnp.zeros((0, 3, 2))}, (), PARAMS, mask=empty.mask
    )
    np.testing.assert_array_equal(found.value["w"], np.zeros((3, 2)))


def test_a_batch_without_rows_has_keys_of_none_and_votes_of_none():
    def random_loss(params, example, rng):
        return jnp.vdot(params["w"], example + jax.random.normal(rng, (3, 2)))

    grad_fn = jaxdp.clipped_grad(random_loss, jaxdp.clip(1.0), microbatch_size=2)
    empty = jaxdp.Batch(jnp.zeros((0, 3, 2)), jnp.zeros(0, bool))
    summed, _ = grad_fn(PARAMS, empty, rng=jax.random.key(0), bound=jnp.float32(1.0))
    assert summed.votes == 0.0
    np.testing.assert_array_equal(summed.value["w"], np.zeros((3, 2)))
