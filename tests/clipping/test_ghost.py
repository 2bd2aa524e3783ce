"""The engines against plain JAX, on networks of every kind; one broken example changes no other."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.clipping.ghost import leaves
from jaxdp.clipping.ghost import plan as plans
from jaxdp.clipping.ghost.leaves import Arrays
from tests.clipping import layers
from tests.clipping.architectures import ARCHITECTURES, ROWS, jit, opened
from tests.clipping.references import Reference, agrees, together
from tests.clipping.test_rules import AIM, norm64

BROKEN = 1
EVERYONE, OTHERS = np.ones(ROWS, bool), np.arange(ROWS) != BROKEN


@functools.cache
def reference(name):
    return Reference(*ARCHITECTURES[name]())


def compiled(name, engine, rule):
    """The clipped sum as a function of parameters, batch, mask, key, scale and bound."""
    return opened(jaxdp.clipped_grad(ARCHITECTURES[name]()[1], rule, engine))


def unlike(name, engines):
    """The engines less those that plan what an earlier one does: the same program."""
    params, loss_fn, batch = ARCHITECTURES[name]()
    plans = {}
    for engine in engines:
        plan = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine).plan(params, batch)
        plans.setdefault(tuple(leaf.engine for leaf in plan), engine)
    return plans.values()


def broken(batch, value):
    """The batch with one example that is not finite, or None where it holds tokens."""
    leaves, structure = jax.tree.flatten(batch)
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        return None
    return jax.tree.unflatten(structure, [leaves[0].at[BROKEN].set(value), *leaves[1:]])


def changes_no_other(run, params, batch, info):
    """That a broken example adds nothing, and that the others add what they add without it."""
    without, _ = run(params, batch, OTHERS)
    for value in (jnp.inf, jnp.nan, 3e38):
        found, again = run(params, broken(batch, value), EVERYONE)
        np.testing.assert_allclose(again.norms[OTHERS], info.norms[OTHERS], rtol=1e-5)
        if not np.isfinite(again.norms[BROKEN]):
            masked, _ = run(params, broken(batch, value), OTHERS)
            chex.assert_trees_all_equal(found, masked)
            # Batches with and without a broken example are summed by unlike branches.
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), found, without
            )


# By "auto" alone: the others of their kind are run by "ghost", too, here or below.
LARGE = ("cifar_cnn", "residual", "rematerialised", "untied", "lstm", "gru", "scanned", "nnx")
# What "vmap" has to keep apart are convolutions; the rest is the same gradients of JAX.
BY_VMAP = ("mnist_cnn", "convolutions", "plain")
SLOW = ("cifar_cnn", "residual", "untied", "gru", "rematerialised")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in ARCHITECTURES],
)
def test_norms_and_sums_are_those_of_plain_jax_and_a_broken_example_changes_no_other(name):
    params, _, batch = ARCHITECTURES[name]()
    true = reference(name)
    rule = jaxdp.clip(float(np.median(true.norms())))
    engines = unlike(name, ("ghost", "auto") if name not in LARGE else ("auto",))
    for engine in (*engines, *(["vmap"] if name in BY_VMAP else [])):
        run = compiled(name, engine, rule)
        # Ghost norms of 169 positions, which "auto" never takes, are enlarged on purpose.
        within = 1e-3 if (name, engine) == ("mnist_cnn", "ghost") else 1e-5
        info = agrees(run, true, rule, params, batch, EVERYONE, within=within)
        assert 0 < info.clipped.sum() < info.clipped.size
        np.testing.assert_allclose(info.losses, true.losses, rtol=1e-5)
        if name not in SLOW and broken(batch, 0.0) is not None:
            changes_no_other(run, params, batch, info)


def scale_of(params, least):
    keys = iter(jax.random.split(jax.random.key(5), 99))
    return jax.tree.map(lambda p: jax.random.uniform(next(keys), p.shape, minval=least), params)


# Every way a gradient is held; dense layers are those of "plain", and boxes multiply all out alike.
CLIP, BOX = jaxdp.clip(0.5), jaxdp.coordinate_box(0.01)
RULES = [
    *(("scaled", CLIP, n) for n in ("plain", "tied", "heads", "used_twice", "convolutions")),
    *(("scaled", BOX, n) for n in ("plain", "heads", "convolutions")),
    *(("plain", rule, "plain") for rule in (jaxdp.auto_s(), jaxdp.normalize(2.0))),
    ("plain", jaxdp.per_layer([0.1, 0.2]), "plain"),
    ("bound", jaxdp.clip(1.0), "plain"),
]


@pytest.mark.parametrize(
    ("kind", "rule", "name"), RULES, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_every_rule_scale_and_bound_is_that_of_plain_jax(kind, rule, name):
    params, _, batch = ARCHITECTURES[name]()
    true, bound = reference(name), {"bound": jnp.float32(0.3)}
    given = {"scaled": {"scale": scale_of(params, 0.1)}, "plain": {}, "bound": bound}[kind]
    for engine in unlike(name, ("ghost", "auto") if name in ("plain", "heads") else ("ghost",)):
        agrees(compiled(name, engine, rule), true, rule, params, batch, **given)


PIECES = [
    *(("_CHUNK_BYTES", 1, jaxdp.clip(0.3), name) for name in ("tied", "heads", "scanned")),
    ("_CHUNK_BYTES", 200, BOX, "plain"),
    ("_LARGE", 1, BOX, "convolutions"),
]


@pytest.mark.parametrize(("limit", "size", "rule", "name"), PIECES)
def test_large_gradients_are_worked_on_a_few_at_a_time(limit, size, rule, name, monkeypatch):
    monkeypatch.setattr(leaves, limit, size)
    params, _, batch = ARCHITECTURES[name]()
    # A scale of zero tells nothing of who has a gradient there: 0 / 0 counts as 0.
    zeros = lambda p: jnp.maximum(p - 0.1, 0.0)  # noqa: E731
    scale = jax.tree.map(zeros, scale_of(params, 0.0)) if name == "convolutions" else None
    agrees(compiled(name, "ghost", rule), reference(name), rule, params, batch, scale=scale)


def test_a_large_parameter_is_summed_in_parts_and_a_stack_of_them_one_by_one(monkeypatch):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {"table": (24, 4), "head": (4, 24), "stack": (3, 4, 4), "again": (3, 4, 4)}
    params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    batch = {"x": jnp.ones((ROWS, 6, 4)), "z": jax.random.randint(next(keys), (ROWS, 6), 0, 9)}

    def loss_fn(params, example):
        x = params["table"][example["z"]] * example["x"]
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, x, params["stack"])
        # All layers for each half of the places: a loop's own slices in a loop that shares them.
        halves = lambda _, x: (None, jax.lax.scan(layer, x, params["again"])[0])  # noqa: E731
        x = jax.lax.scan(halves, None, x.reshape(2, 3, 4))[1]

        def places(_, x):
            return None, jax.nn.logsumexp(x @ params["table"].T + x @ params["head"], -1)

        return jax.lax.scan(places, None, x.reshape(3, 2, 4))[1].sum()

    used = []
    for name in ("_summed_in_parts", "_one_by_one"):
        plain = getattr(leaves.Factors, name)

        def counted(*args, name=name, plain=plain):
            found = plain(*args)
            used.append(name if found is not None else None)
            return found

        monkeypatch.setattr(leaves.Factors, name, counted)
    monkeypatch.setattr(leaves, "_CHUNK_BYTES", 2**8)
    rule, true = jaxdp.clip(0.3), Reference(params, loss_fn, batch)
    run = opened(jaxdp.clipped_grad(loss_fn, rule, "ghost"))
    agrees(run, true, rule, params, batch)
    assert used.count("_summed_in_parts") == used.count("_one_by_one") == 2
    changes_no_other(run, params, batch, run(params, batch, EVERYONE)[1])


BROKEN_LARGE = [("mlp", "vmap", jaxdp.clip(0.1)), ("mlp", "ghost", BOX)]
BROKEN_LARGE.append(("convolutions", "auto", jaxdp.clip(0.1)))


@pytest.mark.parametrize(("name", "engine", "rule"), BROKEN_LARGE)
def test_large_gradients_are_added_row_by_row_beside_a_broken_one(monkeypatch, name, engine, rule):
    monkeypatch.setattr(leaves, "_LARGE", 1)
    params, _, batch = ARCHITECTURES[name]()
    run = compiled(name, engine, rule)
    changes_no_other(run, params, batch, run(params, batch, EVERYONE)[1])


def test_the_plan_names_every_parameter_its_engine_and_why():
    params, loss_fn, batch = ARCHITECTURES["gru"]()

    def plan(engine):
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine)
        return {leaf.path: (leaf.engine, leaf.reason) for leaf in grad_fn.plan(params, batch)}

    found = plan("auto")
    assert len(found) == len(jax.tree.leaves(params))
    assert found["['params']['Dense_0']['kernel']"][0] == "ghost"
    assert found["['params']['cell']['hn']['kernel']"][0] == "layer"
    assert found["['params']['cell']['hn']['bias']"] == ("vmap", "used by add in a scan")
    assert {engine for engine, _ in plan("vmap").values()} == {"vmap"}


def test_an_accelerator_writes_gradients_where_it_has_room(monkeypatch):
    params, loss_fn, batch = ARCHITECTURES["plain"]()
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(params)) * len(jax.tree.leaves(batch)[0])

    def found(room):
        monkeypatch.setattr("jaxdp.clipping.ghost.plan.room_for_gradients", lambda: room)
        grad_fn = jaxdp.clipped_grad(lambda p, *x: loss_fn(p, *x), jaxdp.clip(1.0))
        engines = [leaf.engine for leaf in grad_fn.plan(params, batch)]
        return engines, grad_fn(params, batch, "all").value

    (few, one), (many, other) = found(size - 1), found(size)
    assert few.count("layer") < many.count("layer")
    chex.assert_trees_all_close(one, other, rtol=1e-4, atol=1e-6)


def test_of_thin_matrices_in_a_loop_no_factors_are_held():
    params = {"a": jnp.ones((3, 8, 2)), "b": jnp.ones((3, 2, 8)), "w": jnp.ones((3, 8, 8))}

    def loss_fn(params, x):
        add = lambda x, p: (x @ p["w"] + x @ p["a"] @ p["b"], None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(add), x, params)[0].sum()

    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    plan = {leaf.path[2]: leaf for leaf in grad_fn.plan(params, jnp.ones((4, 20, 8)))}
    assert [(plan[name].engine, plan[name].whole) for name in "abw"] == [("layer", True)] * 3
    assert [plan[name].bytes for name in "abw"] == [192, 192, 768]
    assert plan["a"].reason == "a loop's, 192 against 2,592 bytes"


def test_of_checkpoints_so_many_rows_are_worked_on_together_as_their_memory_allows(monkeypatch):
    params = {"w": jnp.linspace(-1.0, 1.0, 3 * 1024).reshape(3, 32, 32), "b": jnp.ones((3, 32))}
    batch, rule = jax.random.normal(jax.random.key(0), (12, 4, 32)), jaxdp.clip(0.1)

    def noisy(x, p, key):
        for _ in range(3):  # more inside than enters
            x = jnp.sin(x @ p["w"] + p["b"][None])
        return x + jax.random.normal(key)

    def loss_fn(params, x, rng):
        step = lambda x, p: (jax.checkpoint(noisy)(x, p, rng), None)  # noqa: E731
        return jax.lax.scan(step, x, params)[0].sum()

    def sum_and_norms(**options):
        grad_fn = jaxdp.clipped_grad(loss_fn, rule, **options)
        run = opened(grad_fn)
        summed, info = run(params, batch, None, jax.random.key(1))
        alone, _ = run(params, batch, jnp.arange(12) == 7, jax.random.key(1))
        assert AIM * 0.0999 <= norm64(alone) <= 0.1
        return summed, info, str(grad_fn.plan(params, batch)).splitlines()[0]

    whole, by_all, plan = sum_and_norms()
    assert (by_all.plan.together, plan) == (12, "Of every example:")
    monkeypatch.setattr(plans, "_MANY_BYTES", 0)
    for positions, few in ((1, 1), (8, 2), (48, 12)):
        monkeypatch.setattr(plans, "_POSITIONS", positions)
        found, by_few, plan = sum_and_norms()
        assert by_few.plan.together == few
        assert ("checkpoints ask for memory" in plan) == (few < 12)
        np.testing.assert_allclose(by_few.norms, by_all.norms, rtol=1e-5)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-8), found, whole
        )
    monkeypatch.setattr(plans, "_POSITIONS", 1)
    assert sum_and_norms(microbatch_size=12)[1].plan.together == 12  # as asked


BFLOAT16 = [("tied", "ghost"), ("convolutions", "ghost"), ("convolutions", "vmap")]


@pytest.mark.parametrize(("name", "engine"), BFLOAT16)
def test_bfloat16_models_keep_their_bound(name, engine):
    halved = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x  # noqa: E731
    params, loss_fn, batch = ARCHITECTURES[name]()
    params, batch = jax.tree.map(halved, (params, batch))
    with jax.numpy_dtype_promotion("standard"):
        run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e-3), engine))
        for row in range(2):
            value, info = run(params, batch, jnp.arange(ROWS) == row)
            assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((value, info.norms)))
            # Where positions cancel, the allowance of bfloat16 counts.
            assert AIM * 0.999e-3 <= norm64(value) <= 1e-3


def test_a_tiny_input_times_a_huge_cotangent_is_still_clipped():
    # The squares of the input underflow: a norm from them alone would be zero, for a gradient of
    # norm 14 at 5e-20. (A still larger cotangent overflows, and the example counts as broken.)
    params, sizes = {"w": jnp.zeros((300, 4))}, (1e-22, 2e-20, 5e-20, 1e-18)
    loss_fn = lambda p, x: jnp.sum(x[0, 300] * (x[:, :300] @ p["w"]))  # noqa: E731
    run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost"))
    for positions, small, huge in itertools.product((1, 6), sizes, (1e14, 8e18)):
        parts = [jnp.full((positions, 300), small), jnp.full((positions, 1), huge)]
        value, _ = run(params, jnp.concatenate(parts, 1)[None])
        assert norm64(value) <= 1.0, (positions, small, huge)


def test_the_norm_of_an_outer_product_is_that_of_all_its_groups():
    a, b = (jax.random.normal(jax.random.key(n), (3, 2, 4 + n)) for n in (0, 1))
    true = jnp.sum(jnp.square(jnp.einsum("mgp,mgq->mgpq", a, b)), axis=(1, 2, 3))
    for found in leaves.outer_squares(a, b):
        np.testing.assert_allclose(found, true, rtol=3e-3)
    inverse = jnp.full((2, 4, 5), 0.5)
    for found in leaves.scaled_squares(a, b, inverse):
        np.testing.assert_allclose(found, true / 4, rtol=3e-3)


def test_a_broken_row_of_one_of_several_blocks_of_a_large_leaf_is_left_out():
    grads = jax.random.normal(jax.random.key(0), (320, 1024))
    keep = jnp.arange(320) != 7
    weights = jnp.where(keep, 0.5, 0.0)
    whole = Arrays(grads).weighted_sum(weights, keep, jnp.ones(320, bool))
    spoiled = Arrays(grads.at[7].set(jnp.nan)).weighted_sum(weights, keep, keep)
    np.testing.assert_allclose(whole, 0.5 * jnp.sum(grads[keep], axis=0), atol=1e-4)
    np.testing.assert_allclose(spoiled, whole, atol=1e-4)


# Layers that people use, against clipping per example in float64, half of them together. -----------

SIZES = layers.Sizes()
# The rest, and those of nnx, make the same operations; `python -m benchmarks.layers` runs all.
LAYERS = layers.linen(SIZES, jnp.float32)
NAMES = [name for name in LAYERS if name not in ("lstm", "lstm, both ways")]


def layers_of(names, dtype):
    """A loss of all layers, each of its own part of the example, and the batch."""
    of = layers.linen(SIZES, dtype)
    each = {name: layers.of_layer(of[name][1].apply, of[name][0], SIZES, dtype) for name in names}
    parts = {
        name: (None, lambda p, e, name=name, loss=loss: loss(p, e[name]))
        for name, (loss, _) in each.items()
    }
    return together(parts)[1], {name: batch for name, (_, batch) in each.items()}


@pytest.mark.parametrize("start", [0, 1])
def test_norms_and_clipped_sums_are_those_of_float64(start):
    names, of = NAMES[start::2], LAYERS
    loss_fn, batch = layers_of(names, jnp.float32)
    params = jit(lambda b: {n: of[n][1].init(jax.random.key(0), b[n][:1]) for n in names})(batch)
    # Flax asks for the common type of float64 and float32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        exact, wide = layers_of(names, jnp.float64)
        to_wide = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
        true = Reference(jax.tree.map(to_wide, params), exact, wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(true.grads)} == {np.dtype(np.float64)}
    run = opened(jaxdp.clipped_grad(loss_fn, true.half(), "ghost"))
    agrees(run, true, true.half(), params, batch)


# Lookups: merged by sorting, and what is measured is what is added. ---------------------------------


@pytest.mark.parametrize(
    ("size", "records", "positions"),
    [(7, 5, 1), (7, 5, 9), (1, 3, 6), (40, 32, 33), (2**28, 3, 40), (2**30, 4, 9)],
)
def test_each_row_is_there_once_and_its_cotangents_are_added_in_their_order(
    size, records, positions
):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, min(size, 12) + 1, (records, positions)).astype(np.int32)
    rows = np.where(rows == min(size, 12), size, rows)
    grads = rng.normal(size=(*rows.shape, 2)).astype(np.float32)
    grads[rows == size] = np.nan  # of what has no row
    merged = jax.jit(functools.partial(leaves.merge_lookups, size=size))
    for row, grad, found, sums in zip(
        rows, grads, *map(np.asarray, merged(rows, grads)), strict=True
    ):
        wanted = dict.fromkeys(row[row < size].tolist(), np.zeros(2, np.float32))
        for at, one in zip(row.tolist(), grad, strict=True):
            if at < size:
                wanted[at] = wanted[at] + one
        used = found[found < size].tolist()
        assert len(used) == len(wanted)
        assert not np.any(sums[found == size])
        for at, one in zip(used, sums[found < size], strict=True):
            np.testing.assert_array_equal(one, wanted[at])


TABLE_ROWS, TEXT = 9, 48


def texts(mode):
    """Losses that look ids up, by a mode of JAX; a factor of each position."""

    def loss_fn(p, e):
        ids, factors = e
        return jnp.sum(p["w"].at[ids].get(mode=mode, fill_value=0.0) * factors)

    return loss_fn


def adversaries():
    """Ids [m, t] and factors [m, t, q]: equal, unlike, out of range; cancelling, huge, tiny."""
    rng = np.random.default_rng(3)
    ids = np.stack([
        np.zeros(TEXT), np.arange(TEXT) % TABLE_ROWS, np.arange(TEXT) - 20,
        *rng.integers(-30, 30, (13, TEXT)),
    ]).astype(np.int32)  # fmt: skip
    factors = rng.normal(size=(len(ids), TEXT, 3)).astype(np.float32)
    factors[3:6, 1::2] = -factors[3:6, ::2] * np.float32(1 + 1e-6)
    factors[6:8] *= np.float32(1e15)
    factors[8:10] *= np.float32(1e-15)
    factors[10, 0] = 1e18
    factors[11] = np.nan
    return ids, factors


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_no_text_adds_more_than_the_bound_and_its_norm_is_that_of_float64(mode):
    ids, factors = adversaries()
    if mode == "promise_in_bounds":
        ids %= TABLE_ROWS
    run = opened(jaxdp.clipped_grad(texts(mode), jaxdp.normalize(1.0), "ghost"))
    params = {"w": jnp.ones((TABLE_ROWS, 3))}
    norms = run(params, (ids, factors))[1].norms
    for at, (own, pull) in enumerate(zip(ids, factors.astype(np.float64), strict=True)):
        own = np.where((own < 0) & (mode == "fill"), own + TABLE_ROWS, own)
        own = np.where(own < 0, own + TABLE_ROWS, own) if mode == "clip" else own
        own = np.clip(own, 0, TABLE_ROWS - 1) if mode == "clip" else own
        inside = (own >= 0) & (own < TABLE_ROWS)
        true = np.zeros((TABLE_ROWS, 3))
        np.add.at(true, own[inside], pull[inside])
        one = np.arange(len(ids)) == at
        value = np.asarray(run(params, (ids, factors), one)[0]["w"])
        if at == 11:
            assert not np.any(value)
            continue
        assert norm64({"w": value}) <= 1.0
        slack = 1e-5 * np.linalg.norm(np.abs(pull[inside]))
        np.testing.assert_allclose(norms[at], np.linalg.norm(true), rtol=1e-5, atol=slack)


def test_lookups_hold_nothing_that_is_quadratic_in_the_text():
    def loss_fn(p, ids):
        return jnp.sum(jnp.sin(p["w"][ids]))

    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost")
    ids = jnp.zeros((16, 512), jnp.int32)
    run = jit(lambda p, x: grad_fn(p, x, "all").value).lower({"w": jnp.zeros((50, 2))}, ids)
    assert run.compile().memory_analysis().temp_size_in_bytes < 16 * 512 * 64


def test_lookups_of_more_numbers_than_32_bits_count():
    rows, grads = (
        jax.ShapeDtypeStruct((2048, 1024, *q), k) for q, k in (((), "i"), ((1024,), "f"))
    )
    _, merged = jax.eval_shape(lambda *each: leaves.merge_lookups(*each, 50_257), rows, grads)
    assert merged.shape == grads.shape
