"""The gradient as users call it: masks, batches, passes, keys, what it traces and refuses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import options, rounding
from jaxdp.types import Draw
from tests.clipping.architectures import ARCHITECTURES, jit, opened
from tests.clipping.references import gap
from tests.clipping.test_rules import norm64
from tests.mechanisms import sgd_of
from tests.refusing import all_refused


def assert_close(a, b, rtol=3e-4):
    scale = max(np.max(np.abs(x)) for x in jax.tree.leaves(b))
    chex.assert_trees_all_close(a, b, rtol=0, atol=rtol * scale)


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
    summed, info = grad_fn.with_info(PARAMS, data_of(90), "all")
    assert 0 < info.clipped.sum() < 90
    assert_close(summed.value, by_hand(data_of(90), 2.5))
    assert summed.l2 == 2.5 * (1.0 + rounding.error_of_sum(2**14))
    for rows in (1, 7, 16, 100):
        given = {"secret": jaxdp.Secret.from_seed(1), "physical_batch_size": rows}
        draw = sgd_of(1.0, 2.5, 45, 90).sampler(90, **given).draw()
        chosen = draw.indices[draw.mask]
        summed, infos = grad_fn.with_info(PARAMS, data_of(90), draw)
        assert_close(summed.value, by_hand(data_of(90), 2.5, chosen))
        assert len(infos) == max(1, -(-len(chosen) // rows))


def test_passes_of_all_sizes_compile_once_and_give_away_no_array_of_the_user():
    chex.clear_trace_counter()
    grad_fn = jaxdp.clipped_grad(chex.assert_max_traces(loss_fn, n=1), jaxdp.clip(1.0))
    sampler = sgd_of(1.0, 1.0, 40, 90).sampler(90, physical_batch_size=8)
    # The running totals are donated from pass to pass; parameters and data must not be.
    params, data = jax.tree.map(jnp.copy, (PARAMS, data_of(90)))
    first = grad_fn(params, data, sampler.draw())
    kept, passes = jax.tree.map(np.array, first.value), set()
    for _ in range(12):
        draw = sampler.draw()
        grad_fn(params, data, draw)
        passes.add(len(draw.indices))
    assert len(passes) > 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, data, first.value)))
    assert_close(first.value, kept)


def test_clip_infos_of_a_draw_are_kept_where_asked_for_alone():
    draw = Draw(np.arange(12, dtype=np.int32).reshape(4, 3), np.ones((4, 3), bool), 0, 90)
    given = PARAMS, data_of(90), draw
    quiet, (loud, infos) = GRAD_FN(*given), GRAD_FN.with_info(*given)
    assert GRAD_FN.sum_draw(*given)[1] == []
    assert [info.norms.shape for info in infos] == [(3,)] * 4
    assert infos[0].plan
    chex.assert_trees_all_equal(quiet.value, loud.value)


def test_masked_rows_and_empty_draws_add_nothing_and_a_removed_record_its_bound_at_most():
    run = opened(GRAD_FN)
    summed, info = run(PARAMS, data_of(5), np.asarray([True, False, True, False, False]))
    assert_close(summed, by_hand(data_of(5), 1.0, [0, 2]))
    assert not info.clipped[np.asarray([1, 3, 4])].any()
    empty, _ = run(PARAMS, data_of(5), np.zeros(5, bool))
    draw = Draw(np.zeros((1, 4), np.int32), np.zeros((1, 4), bool), 0, 5)
    none = GRAD_FN(PARAMS, data_of(5), draw).value
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
        infos = grad_fn.with_info(params, data, draw, key)[1]
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
    once = lambda params: GRAD_FN(params, data, "all").value  # noqa: E731
    assert jit(jax.vmap(once))(stacked)["w"].shape == (2, 3, 2)
    step = lambda carry, _: (jax.tree.map(jnp.add, carry, once(carry)), None)  # noqa: E731
    out, _ = jit(lambda p: jax.lax.scan(step, p, None, length=3))(PARAMS)
    assert_close(out, jax.tree.map(lambda x: 3 * x, by_hand(data_of(5), 1.0)))


# ------------------------------------------------------------------- what is traced, and its shapes


def test_a_user_jit_of_the_sum_and_the_update_is_traced_once():
    chex.clear_trace_counter()
    mechanism = sgd_of(1.0, 1.0, 30, 90)
    grad_fn = mechanism.clipped_grad(loss_fn)
    tx = optax.chain(mechanism.privatize(), optax.sgd(0.01))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, opt_state, batch, key):
        summed = grad_fn(params, batch)
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


class OneRow:
    """A source that gathers one row, which would count as often as there are records."""

    on_device = False

    def __init__(self, size):
        self.size = size
        self.example = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data_of(1)
        )

    def __len__(self):
        return self.size

    def gather(self, indices, mask):
        return data_of(1)


def test_bad_batches_masks_keys_bounds_and_data_are_refused():
    ragged, three = {"w": jnp.zeros((3, 3, 2)), "b": jnp.zeros((7, 2))}, data_of(3)
    draw = Draw(np.zeros((1, 2), np.int32), np.ones((1, 2), bool), 0, 3)
    once = functools.partial(GRAD_FN, PARAMS)
    needs = jaxdp.clipped_grad(lambda p, e, rng: jnp.sum(p["w"]), jaxdp.clip(1.0))
    rows = [
        ("batch must hold arrays", lambda: once(ragged, "all")),
        (r"bool \[3\], got int32 \[3\]", lambda: once(three, jnp.ones(3, jnp.int32))),
        (r"bool \[3\], got bool \[2\]", lambda: once(three, jnp.ones(2, bool))),
        ("rng must be None", lambda: once(three, "all", rng=jax.random.key(0))),
        ("rng must be a key", lambda: needs(PARAMS, three, "all")),
        ("data must hold the records that", lambda: once(data_of(5), draw)),
        ("data must hold arrays", lambda: once(ragged, draw)),
        ("data must hold a row for each of the 2", lambda: once(OneRow(3), draw)),
        ("data must hold the records that", lambda: once(OneRow(5), draw)),
    ]
    for bad in (-1.0, 0, float("nan"), 1e-11, True, "1", jnp.ones(3), jnp.int32(1), np.ones(2)):
        for to in ("all", draw):
            rows.append(("bound must be", functools.partial(once, three, to, bound=bad), bad))
    all_refused(rows)


# Which rows of a physical batch are records: never guessed, and never parted from the rows. --------

WEIGHT = {"w": jnp.zeros((3, 2))}
THREE_FORMS = r'draw must be a Draw .*, a mask .*bool \[128\], or "all".* left out where .*Batch'
FORGOTTEN = r'mask must say .* got None.*jaxdp.Batch.*mask=: bool \[128\], or "all"'


def of_weight(params, example):
    return jnp.vdot(params["w"], example)


def drawn():
    """Records whose gradients are all alike in size, and a draw of 16 padded to 128 rows."""
    data = 10.0 * jax.random.normal(jax.random.key(0), (40, 3, 2))
    indices = np.zeros((1, 128), np.int32)
    indices[0, :16] = np.arange(1, 17)
    return data, Draw(indices, np.arange(128)[None] < 16, 0, 40)


def test_record_0_adds_nothing_by_padding_whichever_way_a_draw_is_summed():
    data, draw = drawn()
    without = data.at[0].set(-data[0])  # another record 0, which the draw does not hold
    tx = jaxdp.clip_and_sum(jaxdp.clip(1.0))
    grad_fn = jaxdp.clipped_grad(of_weight, jaxdp.clip(1.0))

    @jax.jit
    def native(batch):
        grads = jax.vmap(jax.grad(of_weight), (None, 0))(WEIGHT, batch.data)
        return tx.update(grads, tx.init(WEIGHT), WEIGHT, mask=batch.mask)[0].value

    ways = {
        "sum": lambda data: grad_fn(WEIGHT, data, draw).value,
        "batch": lambda data: grad_fn(WEIGHT, *draw.batches(data)).value,
        "jit": jax.jit(lambda data: grad_fn(WEIGHT, *draw.batches(data)).value),
        "native": lambda data: native(*draw.batches(data)),
    }
    expected = sum(x / norm64(x) for x in np.asarray(data[1:17], np.float64)) * (
        1 - rounding.MARGIN
    )
    for name, way in ways.items():
        np.testing.assert_allclose(way(data)["w"], expected, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(way(data)["w"], way(without)["w"], err_msg=name)


def test_a_mask_is_never_guessed_and_all_lets_every_row_through():
    (data, draw), grad_fn = drawn(), jaxdp.clipped_grad(of_weight, jaxdp.clip(1.0))
    tx, rows, mask = jaxdp.clip_and_sum(jaxdp.clip(1.0)), data[draw.indices[0]], jnp.ones(128, bool)
    chain = optax.chain(tx, jaxdp.privatize(1.0, 16.0))
    native = jax.jit(lambda u: chain.update(u, chain.init(WEIGHT), WEIGHT)[0])
    words, batch = r'mask must be bool \[128\] or "all", got', jaxdp.Batch(rows, mask)
    beside = "mask must not be given with a Batch"
    all_refused(
        [
            *(
                (THREE_FORMS, lambda m=m: grad_fn(WEIGHT, rows, m))
                for m in (None, 1, WEIGHT, batch)
            ),
            (FORGOTTEN, lambda: tx.update({"w": rows}, tx.init(WEIGHT), WEIGHT)),
            (FORGOTTEN, lambda: native({"w": rows})),
            *((words, lambda w=w: grad_fn(WEIGHT, rows, w)) for w in ("none", "ALL", "")),
            *((beside, lambda m=m: grad_fn(WEIGHT, batch, m)) for m in (mask, "all")),
        ]
    )
    word, info = grad_fn.with_info(WEIGHT, rows, "all")
    assert info.mask.all()
    for other in (grad_fn(WEIGHT, rows, mask), grad_fn(WEIGHT, batch)):
        np.testing.assert_array_equal(word.value["w"], other.value["w"])


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, np.asarray), (5, jnp.asarray), (16, np.asarray), (64, jnp.asarray)]
)
def test_the_batches_of_a_draw_are_its_passes(rows, kind):
    data = {"x": kind(np.arange(80.0, dtype=np.float32).reshape(40, 2)), "y": kind(np.arange(40))}
    draw = sgd_of(1.0, 1.0, 20, 40).sampler(40, physical_batch_size=rows).draw()
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
    grad_fn = jaxdp.clipped_grad(of_weight, jaxdp.clip(1.0))
    for wrong in (lambda mask: None, lambda mask: mask[:3]):  # what JAX filled wrongly
        filled = jax.tree.map(lambda x, f=wrong: f(x) if x.dtype == bool else x, batch)
        rows.append((r"mask must be bool \[4\]", functools.partial(grad_fn, WEIGHT, filled)))
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
        summed, info = grad_fn.with_info(WEIGHT, empty)
        np.testing.assert_array_equal(summed.value["w"], none)
        assert info.norms.shape == info.mask.shape == info.clipped.shape == (0,)
        assert info.aux["seen"].shape == (0, 4, 3)
        assert len(grad_fn.plan(WEIGHT, empty)) == 1
    data = jnp.ones((2, 4, 3))
    for passes, rows in ((0, 4), (1, 0)):
        draw = Draw(np.zeros((passes, rows), np.int32), np.zeros((passes, rows), bool), 0, 2)
        np.testing.assert_array_equal(grad_fn(WEIGHT, data, draw).value["w"], none)
        assert len(list(draw.batches(data))) == passes
    link, grads = jaxdp.clip_and_sum(rule), {"w": jnp.zeros((0, 3, 2))}
    found, _ = link.update(grads, (), WEIGHT, mask=empty.mask)
    np.testing.assert_array_equal(found.value["w"], none)


def test_a_batch_without_rows_has_keys_of_none_and_votes_of_none():
    def random_loss(params, example, rng):
        return jnp.vdot(params["w"], example + jax.random.normal(rng, (3, 2)))

    grad_fn = jaxdp.clipped_grad(random_loss, jaxdp.clip(1.0), microbatch_size=2)
    empty = jaxdp.Batch(jnp.zeros((0, 3, 2)), jnp.zeros(0, bool))
    summed = grad_fn(WEIGHT, empty, rng=jax.random.key(0), bound=jnp.float32(1.0))
    assert summed.votes == 0.0
    np.testing.assert_array_equal(summed.value["w"], np.zeros((3, 2)))


# Microbatches, frozen parameters, auxiliary outputs, augmentation, options. -----------------------


def test_microbatches_change_nothing():
    params, loss_fn, batch = ARCHITECTURES["mlp"]()
    masks = jnp.asarray([[True] * 5, [True, True, False, True, True]])

    def both(size=None):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5), microbatch_size=size)
        return jax.vmap(opened(grad_fn), (None, None, 0))(params, batch, masks)

    whole, info = both()
    for size in (1, 2, 5, 9):
        found, again = both(size)
        assert gap(found, whole) < 1e-6, size
        np.testing.assert_allclose(again.norms, info.norms, rtol=1e-6)
        np.testing.assert_array_equal(again.clipped, info.clipped)


def test_a_million_aligned_gradients_are_added_without_drift():
    # One after another in float32 they would lose 5 %.
    passes, rows = 4096, 256
    draw = Draw(np.zeros((passes, rows), np.int32), np.ones((passes, rows), bool), 0, 1)
    loss_fn = lambda p, x: jnp.sum(p["w"] * x)  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), most_records=2**20)
    total = grad_fn({"w": jnp.zeros(2)}, jnp.asarray([[0.3, 0.4]]), draw).value["w"]
    aimed = 0.1 * (1 - rounding.MARGIN) * passes * rows
    np.testing.assert_allclose(np.linalg.norm(np.asarray(total, np.float64)), aimed, rtol=3e-6)


def test_frozen_parameters_get_no_gradient_no_norm_and_no_noise():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()
    moving = {name: params[name] for name in ("down", "up")}
    alone = lambda p, x: loss_fn({**p, "frozen": params["frozen"]}, x)  # noqa: E731
    reference = opened(jaxdp.clipped_grad(alone, jaxdp.clip(0.3), "vmap"))(moving, batch)
    flags = {"frozen": False, "down": True, "up": True}
    for engine, choice in (("auto", flags), ("vmap", lambda path: "frozen" not in path)):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), engine, trainable=choice)
        value, info = opened(grad_fn)(params, batch)
        assert value["frozen"] is None
        np.testing.assert_allclose(info.norms, reference[1].norms, rtol=1e-5)
        assert gap(value, reference[0]) < 1e-5
        engines = {leaf.path: leaf.engine for leaf in grad_fn.plan(params, batch)}
        assert engines["['frozen']"] == "frozen"


def test_auxiliary_outputs_are_handed_on_for_every_example():
    params, loss_fn, batch = ARCHITECTURES["mlp"]()

    def with_aux(params, example):
        return loss_fn(params, example), {"label": example[1], "double": 2.0 * example[0]}

    for size in (None, 2):
        grad_fn = jaxdp.clipped_grad(with_aux, jaxdp.clip(1.0), microbatch_size=size)
        _, info = opened(grad_fn)(params, batch)
        np.testing.assert_array_equal(info.aux["label"], batch[1])
        np.testing.assert_array_equal(info.aux["double"], 2.0 * batch[0])
        assert len(info.plan) == len(jax.tree.leaves(params))
    assert "norms" not in repr(info)


RULE, MADE_WITH = jaxdp.clip(1.0), {"engine", "microbatch_size", "trainable"}


def test_bad_options_scales_bounds_and_parameters_are_refused():
    params, loss_fn, batch = ARCHITECTURES["low_rank"]()

    def of(params=params, rule=RULE, **given):
        made = {name: given.pop(name) for name in MADE_WITH & given.keys()}
        grad_fn = jaxdp.clipped_grad(loss_fn, rule, **made)
        return grad_fn(params, batch, "all", **given)

    whole = {**params, "frozen": jnp.ones((6, 5), jnp.int32)}
    rows = [
        ("engine must be one of", {"engine": "fast"}),
        ("microbatch_size must be", {"microbatch_size": 0}),
        ("microbatch_size must be", {"microbatch_size": 2.5}),
        ("trainable must be a tree of bool", {"trainable": {"down": 1}}),
        ("trainable must be a tree of bool", {"trainable": {}}),
        ("trainable must be a prefix", {"trainable": {"up": True}}),
        ("trainable must let at least one", {"trainable": lambda path: False}),
        ("scale must be shaped like", {"scale": {"up": jnp.ones((2, 5))}}),
        (r"floating-point .* int32 at \['frozen'\]", {"params": whole}),
        ("bound must be None", {"rule": jaxdp.coordinate_box(1.0), "bound": jnp.float32(1.0)}),
    ]
    for no_number in ("a", object(), 1j, np.array("a")):
        rows.append(("scale must be a pytree of positive numbers", {"scale": no_number}))
    all_refused((words, functools.partial(of, **given), str(given)) for words, given in rows)
    views = functools.partial(jaxdp.augmented, loss_fn)
    all_refused([("augment must be a function", lambda: views(None, 2))])
    all_refused([("multiplicity must be", lambda: views(lambda x, key: x, 0))])


def augmented(multiplicity, engine="auto", bound=0.5):
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3))}
    loss_fn = lambda p, x: jnp.sum(jnp.sin(x @ p["w"]))  # noqa: E731
    augment = lambda x, key: x + jax.random.normal(key, x.shape)  # noqa: E731
    mean_loss = jaxdp.augmented(loss_fn, augment, multiplicity)
    batch = jax.random.normal(jax.random.key(1), (6, 4))
    return params, jaxdp.clipped_grad(mean_loss, jaxdp.clip(bound), engine), batch


def test_a_record_contributes_one_clipped_mean_however_many_views():
    key = jax.random.key(3)
    for views in (1, 5):
        params, grad_fn, batch = augmented(views)
        assert [leaf.engine for leaf in grad_fn.plan(params, batch)] != ["vmap"]
        run = opened(grad_fn)
        total, info = run(params, batch, np.ones(6, bool), key)
        reference, again = opened(augmented(views, "vmap")[1])(params, batch, rng=key)
        np.testing.assert_allclose(info.norms, again.norms, rtol=1e-5)
        assert gap(total, reference) < 1e-5, views
        one = run(params, batch, np.arange(6) == 2, key)[0]["w"]
        assert np.linalg.norm(np.asarray(one, np.float64)) <= 0.5, views


def test_views_are_different_and_their_mean_steadies_the_gradient():
    keys = jax.random.split(jax.random.key(9), 40)

    def spread(multiplicity):
        params, grad_fn, batch = augmented(multiplicity, bound=1e3)
        run = opened(grad_fn)
        totals = jax.vmap(lambda k: run(params, batch, rng=k)[0]["w"])(keys)
        return float(jnp.mean(jnp.var(totals, axis=0)))

    ratio = spread(1) / spread(8)
    assert 5.0 < ratio < 13.0  # 8 up to the noise of 40 runs


def test_bounds_and_scales_of_a_compiled_step_are_made_safe():
    for given, safe in ((np.nan, 1e-10), (0.0, 1e-10), (-1.0, 1e-10), (np.inf, 1e10), (2.0, 2.0)):
        value = jnp.float32(given)
        assert float(options.checked_bound(value)) == np.float32(safe)
        assert float(options.checked_scale({"w": value})["w"]) == np.float32(safe)


def given(**options):
    """What the ledger of a draw is told where its records are clipped by something given."""
    mechanism = sgd_of(1.0, 0.5, 8, 16)
    grad_fn = mechanism.clipped_grad(jnp.vdot)
    records, said = jnp.ones((16, 3)), []
    for by_batch in (False, True):
        sampler = mechanism.sampler(16, physical_batch_size=16)
        draw = sampler.draw()
        if by_batch:
            grad_fn(jnp.zeros(3), next(draw.batches(records)), **options)
        else:
            grad_fn(jnp.zeros(3), records, draw, **options)
        said.append([line for line in sampler.ledger.unverified() if "of a step" in line])
    assert said[0] == said[1]
    return said[0]


def of_a_trainer(array):
    """An array of the caller's that a trainer returned, as the parameters before the first step."""
    mechanism = sgd_of(1.0, 0.5, 8, 16)
    loss_fn = lambda w, x: jnp.sum(w) * x  # noqa: E731
    return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), jnp.ones(16)).init(array).params


def test_what_the_caller_gives_to_clip_by_is_on_the_list():
    """Before: an empty list, where the bound told whether the largest record had been drawn."""
    bound, scale = ["the clip bound (bound=)"], ["the scale (scale=)"]
    rows = (
        ({"bound": np.float32(7.0)}, bound),
        ({"bound": jnp.float32(7.0)}, bound),
        ({"bound": of_a_trainer(jnp.float32(7.0))}, bound),
        ({"scale": jnp.full(3, 2.0)}, scale),
        ({"scale": of_a_trainer(jnp.ones(3))}, scale),
        ({"scale": np.full(3, 2.0), "bound": 0.5}, scale),
        ({"bound": 0.5}, []),  # the rule's own
        ({}, []),
    )
    words = "of a step was given by the caller: assumed public, or computed from noisy"
    for by, named in rows:
        found = given(**by)
        assert [line.split(" of a step")[0] for line in found] == named, by
        assert all(words in line for line in found), by
