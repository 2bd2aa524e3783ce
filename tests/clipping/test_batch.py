"""Which rows of a physical batch are records: never guessed, and never parted from the rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.types import Draw
from tests.refusing import all_refused

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


def test_a_mask_is_never_guessed_and_all_lets_every_row_through():
    (data, draw), grad_fn = drawn(), jaxdp.clipped_grad(loss, jaxdp.clip(1.0))
    tx, rows, mask = jaxdp.clip_and_sum(jaxdp.clip(1.0)), data[draw.indices[0]], jnp.ones(128, bool)
    chain = optax.chain(tx, jaxdp.privatize(1.0, 16.0))
    native = jax.jit(lambda u: chain.update(u, chain.init(PARAMS), PARAMS)[0])
    words, batch = r'mask must be bool \[128\] or "all", got', jaxdp.Batch(rows, mask)
    beside = "mask must not be given with a Batch"
    all_refused(
        [
            (FORGOTTEN, lambda: grad_fn(PARAMS, rows)),
            (FORGOTTEN, lambda: tx.update({"w": rows}, tx.init(PARAMS), PARAMS)),
            (FORGOTTEN, lambda: native({"w": rows})),
            *((words, lambda w=w: grad_fn(PARAMS, rows, w)) for w in ("none", "ALL", "")),
            *((beside, lambda m=m: grad_fn(PARAMS, batch, m)) for m in (mask, "all")),
        ]
    )
    word, info = grad_fn(PARAMS, rows, "all")
    assert info.mask.all()
    for other in (grad_fn(PARAMS, rows, mask)[0], grad_fn(PARAMS, batch)[0]):
        np.testing.assert_array_equal(word.value["w"], other.value["w"])


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, np.asarray), (5, jnp.asarray), (16, np.asarray), (64, jnp.asarray)]
)
def test_the_batches_of_a_draw_are_its_passes(rows, kind):
    data = {"x": kind(np.arange(80.0, dtype=np.float32).reshape(40, 2)), "y": kind(np.arange(40))}
    draw = jaxdp.dp_sgd(1.0, 1.0, 20, 40).sampler(40, physical_batch_size=rows).draw()
    batches = list(draw.batches(data))
    found = np.concatenate([np.asarray(b.data["y"])[np.asarray(b.mask)] for b in batches])
    np.testing.assert_array_equal(found, draw.indices[draw.mask])
    for batch, at in zip(batches, draw.indices, strict=True):
        assert isinstance(batch.data["x"], type(data["x"]))
        np.testing.assert_array_equal(batch.data["x"], np.asarray(data["x"])[at])


def test_batches_of_other_data_are_refused_before_the_first():
    _, draw = drawn()
    ragged = {"a": jnp.ones((40, 3)), "b": jnp.ones((7, 3))}
    other = functools.partial(draw.batches, jnp.ones((39, 3, 2)))
    all_refused([("data must hold the records that the sampler draws from", other)])
    all_refused([("data must hold arrays", functools.partial(draw.batches, ragged))])


FOUR = np.ones((4, 2))
BAD = [
    ("mask of another length", jnp.ones((4, 2)), jnp.ones(3, bool), r"bool \[4\], got bool \[3\]"),
    ("mask of numbers", jnp.ones((4, 2)), jnp.ones(4), r"bool \[4\], got float32 \[4\]"),
    ("no mask", FOUR, None, r"bool \[4\], got NoneType"),
    ("the word", FOUR, "all", r"bool \[4\], got str"),
    ("ragged", (FOUR, np.ones(5)), np.ones(4, bool), "data must hold arrays"),
    ("no axis", np.ones(()), np.ones(4, bool), "data must hold arrays"),
]


def test_a_batch_that_does_not_fit_together_is_refused():
    rows = []
    for name, data, mask, words in BAD:
        make = functools.partial(jaxdp.Batch, data, mask)
        rows += [(words, make, name), (words, jax.jit(lambda make=make: make().mask), name, "jit")]
    batch = jaxdp.Batch(jnp.ones((4, 3, 2)), jnp.ones(4, bool))
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(1.0))
    for wrong in (lambda mask: None, lambda mask: mask[:3]):  # what JAX filled wrongly
        filled = jax.tree.map(lambda x, f=wrong: f(x) if x.dtype == bool else x, batch)
        rows.append((r"mask must be bool \[4\]", functools.partial(grad_fn, PARAMS, filled)))
    all_refused(rows)


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


def with_aux(params, example):
    return jnp.sum(jnp.sin(example @ params["w"])), {"seen": example}


RULES = [jaxdp.clip(1.0), jaxdp.auto_s(), jaxdp.normalize(), jaxdp.coordinate_box(1.0)]
RULES += [jaxdp.per_layer({"w": 1.0})]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_batch_without_rows_sums_to_zero(rule):
    empty, none = jaxdp.Batch(jnp.zeros((0, 4, 3)), jnp.zeros(0, bool)), np.zeros((3, 2))
    for engine, size in (("auto", None), ("auto", 1), ("auto", 4), ("ghost", None), ("ghost", 4)):
        grad_fn = jaxdp.clipped_grad(with_aux, rule, engine, size)
        summed, info = grad_fn(PARAMS, empty)
        np.testing.assert_array_equal(summed.value["w"], none)
        assert info.norms.shape == info.mask.shape == info.clipped.shape == (0,)
        assert info.aux["seen"].shape == (0, 4, 3)
        assert len(grad_fn.plan(PARAMS, empty)) == 1
    data = jnp.ones((2, 4, 3))
    for passes, rows in ((0, 4), (1, 0)):
        draw = Draw(np.zeros((passes, rows), np.int32), np.zeros((passes, rows), bool), 0, 2)
        np.testing.assert_array_equal(grad_fn.sum(PARAMS, data, draw)[0].value["w"], none)
        assert len(list(draw.batches(data))) == passes
    link, grads = jaxdp.clip_and_sum(rule), {"w": jnp.zeros((0, 3, 2))}
    found, _ = link.update(grads, (), PARAMS, mask=empty.mask)
    np.testing.assert_array_equal(found.value["w"], none)


def test_a_batch_without_rows_has_keys_of_none_and_votes_of_none():
    def random_loss(params, example, rng):
        return jnp.vdot(params["w"], example + jax.random.normal(rng, (3, 2)))

    grad_fn = jaxdp.clipped_grad(random_loss, jaxdp.clip(1.0), microbatch_size=2)
    empty = jaxdp.Batch(jnp.zeros((0, 3, 2)), jnp.zeros(0, bool))
    summed, _ = grad_fn(PARAMS, empty, rng=jax.random.key(0), bound=jnp.float32(1.0))
    assert summed.votes == 0.0
    np.testing.assert_array_equal(summed.value["w"], np.zeros((3, 2)))
