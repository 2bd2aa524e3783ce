"""Attacks on the bound: those that succeed fail here, those that held pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.clipping.ghost import leaves, sites
from tests.clipping import search
from tests.clipping.architectures import opened
from tests.clipping.judged import judged
from tests.clipping.test_rules import AIM, norm64
from tests.compiling import AS_USERS, QUICK
from tests.refusing import all_refused

# Of rounding, which depends on how loops are fused: compiled as users do.
jit = functools.partial(jax.jit, compiler_options=AS_USERS)
HALF = jnp.bfloat16


def sums(loss_fn, rule, params, batches, masks, engine="auto", scale=None):
    """The clipped sums of these batches and masks, by one compiled program, and l2."""
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, engine)

    @jit
    def run(params, batch, mask, scale):
        found = grad_fn(params, batch, mask, scale=scale)
        return found.value, found.l2

    each = zip(batches, masks, strict=True)
    found = [run(params, batch, np.asarray(mask), scale) for batch, mask in each]
    flat = lambda tree: np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])  # noqa: E731
    return [flat(value) for value, _ in found], float(found[0][1])


def first(loss_fn, rule, params, batch, **options):
    """The length of what the first of two rows adds."""
    return np.linalg.norm(sums(loss_fn, rule, params, [batch], [[True, False]], **options)[0][0])


def others(loss_fn, *batches):
    """What row 2 adds alone, to each of the batches."""
    only = np.arange(len(jax.tree.leaves(batches[0])[0])) == 2
    params = {"w": jnp.ones(3)}
    return sums(loss_fn, jaxdp.clip(1.0), params, batches, [only] * len(batches))[0]


def alone(grad_fn, params, rows, number, **given):
    """float64: the length of what each of the first rows adds."""
    every = np.arange(len(jax.tree.leaves(rows)[0]))
    run = jit(lambda rows, mask, given: grad_fn(params, rows, mask, **given).value)
    return np.asarray([norm64(run(rows, every == k, given)) for k in range(number)])


def dense(p, x):
    return jnp.sum((x["a"] @ p["w"]) * x["b"])


def linear(p, x):
    return jnp.sum(p["w"] * x)


# One value, two numbers: with a scale, gradients are multiplied out once for the norm and once
# for the sum, in two loops that round a1*b1 + a2*b2 in unlike ways (fused differently). ----------


@pytest.mark.parametrize("rule", [jaxdp.clip(1.0), jaxdp.normalize(1.0)])
def test_scaled_gradients_that_cancel_have_one_norm(rule):
    size, rows = 32, 256

    def two_uses(p, x):
        return sum(jnp.sum((x[k, :size] @ p["w"]) * x[k, size:]) for k in range(2))

    rng = np.random.default_rng(1)
    a, b, s = rng.uniform(1, 2, (rows, 1)), rng.uniform(1, 2, (rows, 1)), rng.uniform(0.5, 2, rows)
    x = np.zeros((rows, 2, 2 * size), np.float32)
    x[:, 0, :1], x[:, 0, size : size + 1] = 1e5 * a, 1e5 * b
    x[:, 1, 0], x[:, 1, size] = 1e5 * a[:, 0] * s, -1e5 * b[:, 0] / s
    params = {"w": jnp.zeros((size, size))}
    grad_fn, scale = jaxdp.clipped_grad(two_uses, rule), jax.tree.map(jnp.ones_like, params)
    assert np.max(alone(grad_fn, params, x, rows // 2, scale=scale)) <= rule.l2(params)


def test_siamese_records_with_a_scale_keep_the_bound():
    size, rows = 32, 256
    siamese = lambda p, x: jnp.sum(jnp.square(x[0] @ p["w"] - x[1] @ p["w"]))  # noqa: E731
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1, size))
    x = np.concatenate([x, x * (1 + 1e-7 * rng.normal(size=(rows, 1, 1)))], axis=1)
    params = {"w": jnp.asarray(rng.normal(size=(size, size)), jnp.float32)}
    scale = {"w": jnp.asarray(rng.uniform(0.1, 2.0, (size, size)), jnp.float32)}
    grad_fn = jaxdp.clipped_grad(siamese, jaxdp.normalize(1.0))
    assert np.max(alone(grad_fn, params, np.float32(x), 60, scale=scale)) <= 1.0


# At the ends of float32. -------------------------------------------------------------------------

EVERY = ("auto", "ghost", "vmap")
# The input, the cotangent and the scale of a product [1, 2], by which engines and rules.
PRODUCTS = {
    # 1 / 2^127 is below the smallest normal number: the norm is taken for zero.
    "an inverse that is flushed": (1e38, 3.0, 2.0**127, jaxdp.clip(1e-3), EVERY),
    # Gradient 10 and scale 1e10, so the weight is 7e8; the factor 1e38 times it is infinite.
    "weight times factor": (1e38, 1e-37, 1e10, jaxdp.normalize(1.0), EVERY[1:]),
    "weight of auto_s": (1e38, 1e-37, 1e3, jaxdp.auto_s(10.0), EVERY[1:]),
    "no scale": (1e18, 1e-30, None, jaxdp.normalize(1e10), EVERY[1:2]),
    "no scale, large": (1.8e19, 1e-38, None, jaxdp.normalize(1e10), EVERY[1:2]),
    "no scale, small": (1e-25, 1e19, None, jaxdp.normalize(1e10), EVERY[1:2]),
}


def test_factors_weights_and_inverses_neither_overflow_nor_are_flushed():
    params = {"w": jnp.zeros((1, 2))}
    for name, (a, b, size, rule, engines) in PRODUCTS.items():
        x = {"a": jnp.full((2, 1), a), "b": jnp.full((2, 2), b)}
        scale = None if size is None else {"w": jnp.full((1, 2), size)}
        for engine in engines:
            added = first(dense, rule, params, x, engine=engine, scale=scale)
            assert added <= rule.l2(params), (name, engine)


UNIT, ONE_OF_TWO = 2.0**-126, np.asarray([True, False])


# Bound, gradients of the rows, and scale.
SUMS = [
    (1.0, [2e38, 2e38], 2.2e38),
    (1e3, [2e38, 2e38], 3e35),
    # 2 units of others less 1.01 is below the smallest normal number, and taken for zero.
    (1.02, [UNIT, UNIT, -1.01 * UNIT], UNIT),
]


def test_scaled_sums_neither_overflow_nor_are_flushed():
    for bound, x, scale in SUMS:
        batch, rows = jnp.asarray(x)[:, None], np.arange(len(x))
        masks = [rows < len(x) - 1, rows < len(x)]
        given = {"scale": {"w": jnp.array([scale])}}
        rule, params = jaxdp.clip(bound), {"w": jnp.zeros(1)}
        (one, other), l2 = sums(linear, rule, params, [batch] * 2, masks, **given)
        assert np.linalg.norm(one - other) <= l2, bound


TINY_AND_HUGE = [(1e-20, 1e18, 1e-3), (1e-20, 1e18, 1e-8), (1e-12, 1e19, 1e8), (1e-30, 1e30, 1e-2)]


def test_scaled_gradients_of_tiny_inputs_and_huge_cotangents_are_clipped():
    loss_fn = lambda p, x: x[3] * jnp.sum(x[:3] @ p["w"])  # noqa: E731
    params = {"w": jnp.zeros((3, 4))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), "ghost")
    run = jit(lambda batch, scale: grad_fn(params, batch, ONE_OF_TWO, scale=scale).value)
    for small, huge, size in TINY_AND_HUGE:
        batch, scale = jnp.asarray([[small] * 3 + [huge]] * 2), {"w": jnp.full((3, 4), size)}
        assert 0.1 * AIM <= norm64(run(batch, scale)) <= 0.1, (small, huge, size)


def test_a_scale_in_low_precision_is_the_same_for_norm_and_sum():
    loss_fn, params = (lambda p, x: jnp.sum(x @ p["w"])), {"w": jnp.zeros((6, 3))}
    scale = {"w": jnp.linspace(0.1, 1.0, 18).reshape(6, 3).astype(HALF)}
    x = 1e3 * jax.random.normal(jax.random.key(1), (3, 6))
    added = alone(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost"), params, x, 3, scale=scale)
    assert AIM <= np.min(added) <= np.max(added) <= 1.0


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_bound_at_run_time_that_is_no_bound_is_made_a_safe_one(engine):
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(x @ p["w"]), jaxdp.clip(1.0), engine)

    @jit
    def run(batch, bound):
        summed = grad_fn({"w": jnp.zeros((6, 2))}, batch, "all", bound=bound)
        return summed.value, summed.l2

    for bad in (np.nan, -1.0, 0.0, 1e-30, np.inf):
        for size in (0.0, 1e-20, 1e-9, 1.0, 1e12):
            value, l2 = run(jnp.full((1, 6), size), jnp.float32(bad))
            assert 1e-11 < l2 < 1e11
            assert norm64(value) <= l2


# Factors in bfloat16. ----------------------------------------------------------------------------


def alternating(p, e):
    terms = e["b"].astype(HALF) * (e["x"].astype(HALF) @ p["w"])
    return jnp.sum(terms.astype(jnp.float32))


def tied_but_for_a_thousandth(p, e):
    y = e["b"] * e["x"][:, :5]
    found = jnp.sum((p["w"][e["k"]] * y.astype(HALF)).astype(jnp.float32))
    return found - jnp.sum((jax.nn.one_hot(e["k"], 6) * 1.001 @ p["w"].astype(jnp.float32)) * y)


def extreme(seed, rows=16, positions=12):
    """Positions that nearly cancel, at either end of the range."""
    rng = np.random.default_rng(seed)
    close = 10.0 ** rng.uniform(-4, 0, (rows, 1, 1))
    x = rng.uniform(0.1, 2, (rows, 1, 6)) + close * rng.normal(size=(rows, positions, 6))
    b = rng.normal(size=(rows, positions, 1))
    b -= b.mean(axis=1, keepdims=True) * (1 - close)
    x *= 2.0 ** rng.choice([-120.0, -60.0, 0.0, 30.0, 55.0], size=(rows, 1, 1))
    b *= 2.0 ** rng.choice([-120.0, -60.0, 0.0, 30.0, 55.0], size=(rows, 1, 1))
    tokens = rng.integers(0, 3, (rows, positions))
    return {"x": x.astype(np.float32), "b": b.astype(np.float32), "k": tokens}


@pytest.mark.parametrize("loss_fn", [alternating, tied_but_for_a_thousandth])
def test_halves_at_the_ends_of_the_range_keep_the_bound(loss_fn):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), HALF)}
    rows = jax.tree.map(lambda *each: np.concatenate(each), *map(extreme, range(3)))
    other = jaxdp.clip(1e-10) if loss_fn is alternating else jaxdp.normalize(1.0)
    for rule in (jaxdp.normalize(1e10), other):
        grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost")
        assert 0.0 < np.max(alone(grad_fn, params, rows, 48)) <= rule.l2(params), rule


def multiplied(p, e):
    return jnp.sum((e["x"] @ p["w"]) * (e["p"] * e["q"] - e["r"]))


def in_halves(p, e):
    lost = (e["p"] * e["q"] - e["r"]).astype(HALF)
    return jnp.sum(((e["x"].astype(HALF) @ p["w"].astype(HALF)) * lost).astype(jnp.float32))


@pytest.mark.parametrize(
    "loss_fn", [multiplied, in_halves, lambda p, e: multiplied({"w": 0.3 * p["w"]}, e)]
)
def test_a_large_layer_is_multiplied_out_once(loss_fn):
    p, q = np.random.default_rng(0).normal(size=(2, 72, 64, 64)).astype(np.float32) * 1e3
    rows = {"p": p, "q": q, "r": p * q, "x": np.full_like(p, 1e-3)}
    params = {"w": jnp.zeros((64, 64))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6))
    assert grad_fn.plan(params, rows)[0].engine == "layer"
    assert leaves._LARGE <= 72 * 64 * 64

    @jit
    def run(rows, mask):
        summed, info = grad_fn.with_info(params, rows, mask)
        return summed.value, info.norms

    compiled = run.lower(rows, jnp.arange(72) == 3).compile()
    # One product for norm and sum both, and the weighted sum.
    assert compiled.as_text().count(" dot(") == 2
    value, norms = compiled(rows, jnp.arange(72) == 3)
    assert norm64(value) == pytest.approx(float(norms[3]), rel=1e-5)


# A record that changes what others add. ----------------------------------------------------------


def of_rbg_keys_of_its_own(p, x):
    """vmap of rng_bit_generator makes all rows' bits from the first row's key."""
    key = jax.random.wrap_key_data(x, impl="rbg")
    return jnp.sum(p["w"] * jax.random.normal(key, (3,)))


def of_one_rbg_key(p, x):  # before: "must not use jit", where the key's use was inside one
    return jnp.vdot(p["w"], x * jax.random.normal(jax.random.key(0, impl="rbg"), x.shape))


def of_a_pallas_kernel(p, x):
    """Its memory goes from example to example."""
    pl = pytest.importorskip("jax.experimental.pallas")
    tpu = pytest.importorskip("jax.experimental.pallas.tpu")

    def kernel(x, out, memory):
        memory[...] = jnp.where(jnp.isfinite(memory[...]), memory[...], 0.0) + x[...]
        out[...] = memory[...]

    shape, memory = jax.ShapeDtypeStruct((3,), jnp.float32), [tpu.VMEM((3,), jnp.float32)]
    call = pl.pallas_call(kernel, out_shape=shape, scratch_shapes=memory, interpret=True)
    return 0.01 * jnp.sum(p["w"] * call(x))


def of_a_primitive_with_a_batching_rule_of_its_own(p, x):
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    centred = Primitive("centred")
    centred.def_abstract_eval(lambda x: x)
    mlir.register_lowering(centred, mlir.lower_fun(lambda x: x, multiple_results=False))
    mean_of_all = lambda x, at: (x[0] - jnp.mean(x[0], 0, keepdims=True), 0)  # noqa: E731
    batching.primitive_batchers[centred] = mean_of_all
    return 0.01 * jnp.sum(p["w"] * centred.bind(x))


def test_what_mixes_rows_under_vmap_is_refused():
    x, axis = jnp.arange(12.0).reshape(4, 3), np.int64(7)
    keys = jnp.arange(16, dtype=jnp.uint32).reshape(4, 4)
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * lax.pmean(x, axis)), jaxdp.clip(1.0))
    one = lambda x: grad_fn({"w": jnp.ones(3)}, x, "all").value  # noqa: E731
    centred = of_a_primitive_with_a_batching_rule_of_its_own
    noisy = lambda p, x, rng: jax.random.normal(rng) * p["w"] @ x  # noqa: E731
    draws = jaxdp.clipped_grad(noisy, jaxdp.clip(1.0))
    rbg = jax.random.key(0, impl="rbg")
    generator = r"loss_fn must not use keys of another generator than threefry, got .* rbg"
    all_refused(
        [
            (generator, lambda: others(of_rbg_keys_of_its_own, keys)),
            (generator, lambda: others(of_one_rbg_key, x)),
            ("rng must be a threefry key", lambda: draws({"w": jnp.ones(3)}, x, "all", rbg)),
            ("loss_fn must not use .*not row by row", lambda: others(of_a_pallas_kernel, x)),
            ("loss_fn must not use centred", lambda: others(centred, x)),
            ("communicate", lambda: jax.vmap(one, axis_name=axis)(jnp.ones((2, 4, 3)))),
        ]
    )


SQUARE = jnp.eye(3) * 3.0 + jnp.arange(9.0).reshape(3, 3) / 9.0


def _indices(x):
    return jnp.nan_to_num(x * 3).astype(jnp.int32)


def window(p, x):
    return jnp.sum(p["w"][:2] * lax.reduce_window(x, 0.0, lax.add, (2,), (1,), [(-1, 1)]))


def loop(p, x):
    grown = lax.while_loop(lambda c: jnp.abs(jnp.sum(c)) < 5, lambda c: c * 1.5 + 0.1, x)
    return jnp.sum(p["w"] * grown)


def lookup(p, x):
    found = p["w"].at[_indices(x)].get(mode="promise_in_bounds")
    return jnp.sum(found * jnp.nan_to_num(x))


def scatter(p, x):
    return jnp.sum(p["w"] * jnp.zeros(3).at[_indices(x)].add(x, mode="promise_in_bounds"))


HELD = {fn.__name__: fn for fn in (window, loop, lookup, scatter)} | {
    "solve": lambda p, x: jnp.sum(p["w"] * jnp.linalg.solve(SQUARE, x)),
    "gather": lambda p, x: jnp.sum(p["w"] * x.at[_indices(x)].get(mode="promise_in_bounds")),
}


def test_no_row_reaches_another():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    for name, loss_fn in HELD.items():
        own, *found = others(loss_fn, x, *(x.at[0].set(value) for value in (np.nan, np.inf, 1e38)))
        for other in found:
            np.testing.assert_array_equal(other, own, err_msg=name)


def test_a_record_that_looks_up_a_row_and_a_column_of_one_table_keeps_the_bound():
    # Both uses add to one entry, so the norm is the sum of theirs, not the root of their squares.
    def loss_fn(p, e):
        return jnp.sum(p["w"][e[0]] * e[1]) + jnp.sum(p["w"][:, e[0] + 1].T * e[2])

    one, two = (100.0 * jax.nn.one_hot(jnp.full((1, 1), at), 6) for at in (1, 0))
    run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost"))
    value, info = run({"w": jnp.ones((6, 6))}, (jnp.zeros((1, 1), jnp.int32), one, two))
    np.testing.assert_allclose(info.norms, [200.0])
    assert norm64(value) <= 1.0


def test_a_batch_inside_a_pytree_keeps_its_mask_or_is_refused():
    batch = jaxdp.Batch(jnp.ones((4, 3)), jnp.array([True, False, False, False]))
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * x["a"].data), jaxdp.clip(1.0))
    try:
        found = grad_fn({"w": jnp.ones(3)}, {"a": batch}, "all")
    except ValueError:
        return
    assert np.linalg.norm(found.value["w"]) <= 1.0


@pytest.mark.parametrize("rows", [600, 1400, 2001])
def test_leaves_whose_rows_cancel_nowhere_share_their_blocks(rows, monkeypatch):
    # Theorem 3.1 takes one block of at most 160 rows for all of them.
    cuts = []
    plain = rounding.into_blocks
    monkeypatch.setattr(
        rounding, "into_blocks", lambda r, size: cuts.append(size) or plain(r, size)
    )
    x = {"a": jnp.ones((rows, 3)), "b": jnp.ones((rows, 2))}
    params = {"w": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
    loss = lambda p, x: dense(p, x) + jnp.sum(p["bias"] * x["b"])  # noqa: E731
    jax.eval_shape(lambda: jaxdp.clipped_grad(loss, jaxdp.clip(1.0))(params, x, "all").value)
    size = rounding.even_size(rows, rounding.ROWS)
    assert size <= rounding.ROWS
    assert {cut for cut in cuts if cut <= rounding.ROWS} == {size}
    assert all(cut % size == 0 for cut in cuts)


# The adversarial search: no record adds more than the bound, by any engine or rule. ----------------

PROGRAMS = search.programs()
CLIP, NORMALIZE = jaxdp.clip(1e-3), jaxdp.normalize(1e-3)
ROWS = 24


@functools.cache
def compiled(name, rule, engine="ghost"):
    """What a batch of ``ROWS`` records adds; compiled once for all tests."""
    loss_fn, params, _ = PROGRAMS[name]
    flags = QUICK if name in AS_TESTS else AS_USERS
    return functools.partial(search.added, search.compiled(loss_fn, rule, engine, flags), params)


# Much like others, which are compiled as users do; `python -m benchmarks.clip_bound` does all so.
AS_TESTS = (
    *("ranking-784", "triplet-300", "positions-2", "positions-300", "long-4096", "over-time"),
    *("joined", "lookups"),
)
# What "ghost" adds of every program; gradients that are held multiplied out, of a few.
BY_AUTO = ("siamese-784", "over-layers", "sliced", "kernel")
BY_VMAP = ("siamese-784", "wide")


def engines(name):
    """Those that differ in their plan."""
    loss_fn, params, make = PROGRAMS[name]
    batch, found = search.records(make, ROWS, seed=1), {}
    for engine, names in (("ghost", PROGRAMS), ("auto", BY_AUTO), ("vmap", BY_VMAP)):
        if name in names:
            plan = jaxdp.clipped_grad(loss_fn, CLIP, engine).plan(params, batch)
            found.setdefault(tuple(row.engine for row in plan), engine)
    return found.values()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_constructed_record_adds_more_than_the_bound(name):
    """Normalised, every record is at its bound."""
    batch = search.records(PROGRAMS[name][2], ROWS, seed=1)
    for engine in engines(name):
        assert 0.99e-3 * AIM < np.max(compiled(name, NORMALIZE, engine)(batch)) <= 1e-3, engine


@pytest.mark.parametrize(
    ("name", "rule"), [("siamese-784", CLIP), ("lookups", CLIP), ("tied", jaxdp.auto_s(1e-3))]
)
def test_rules_with_a_threshold_and_auto_s_keep_it_too(name, rule):
    batch = search.records(PROGRAMS[name][2], ROWS, seed=2)
    assert 0.0 < np.max(compiled(name, rule)(batch)) <= 1e-3


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied", "attention"])
def test_records_found_by_ascent_keep_the_bound(name):
    loss_fn, params, make = PROGRAMS[name]
    climb = search.ascent(loss_fn, params)
    for seed in range(2):
        start = jax.tree.map(lambda x: x[0], search.records(make, 1, seed))
        batch = climb(start, ROWS)
        assert np.max(compiled(name, NORMALIZE)(batch)) <= 1e-3, seed


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied-lookups"])
def test_the_ghost_engine_without_its_allowance_is_found_out(name, monkeypatch):
    # The search itself: with the rounding bound taken away it must find a record over the bound.
    monkeypatch.setattr("jaxdp.clipping.rounding.gamma", lambda operations: 0.0)
    monkeypatch.setattr("jaxdp.clipping.rounding.CANCELLED", 1e30)
    adds = compiled.__wrapped__(name, NORMALIZE)
    batches = [search.records(PROGRAMS[name][2], ROWS, seed) for seed in range(4)]
    assert max(np.max(adds(batch)) for batch in batches) > 1.05e-3


# Passes that cancel. -----------------------------------------------------------------------------


def over_layers_and_time(p, x):
    """Positions that cancel, of two loops in one another, both checkpointed."""

    def layer(total, w):
        step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ w)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), total, x)[0], None

    return jax.lax.scan(jax.checkpoint(layer), jnp.float32(0.0), p["w"])[0]


def in_and_after_a_loop(p, x):
    step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ p["w"])), None)  # noqa: E731
    total = jax.lax.scan(step, jnp.float32(0.0), x[:5])[0]
    return total + jnp.sum(x[5:, -1:] * (x[5:, :-1] @ p["w"]))


def gates_in_bfloat16(p, x):
    both = jnp.concatenate([p["w"], p["v"], p["w"]], axis=1).astype(jnp.bfloat16)

    def step(total, row):
        gates = row[:-1].astype(jnp.bfloat16) @ both
        return total + jnp.sum(row[-1] * gates.astype(jnp.float32)), None

    return jax.lax.scan(step, jnp.float32(0.0), x, reverse=True)[0]


WEIGHTS = {"w": search._dense(20, 4)["w"], "v": search._dense(20, 3, 1)["w"]}
CANCELLING = {
    "layers and time": (over_layers_and_time, {"w": jnp.stack([WEIGHTS["w"]] * 2)}),
    "in and after": (in_and_after_a_loop, {"w": WEIGHTS["w"]}),
    "gates": (gates_in_bfloat16, WEIGHTS),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_no_record_whose_passes_cancel_adds_more_than_the_bound(name, monkeypatch):
    # A prime number of rows: one at a time.
    monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", 1)
    loss_fn, params = CANCELLING[name]
    batch = search.records(functools.partial(search._cancelling, 9, 20), 13, seed=1)
    found = search.contributed(loss_fn, params, batch, NORMALIZE, "ghost")
    assert 0.0 < np.max(found) <= 1e-3


# Random programs, of which `python -m benchmarks.random_programs` judges thousands. --------------


def test_a_random_program_is_clipped_as_by_float64():
    text, wrong, counts = judged(3766)
    assert not wrong, text
    assert counts["ghost"] > 0


def test_a_wrong_share_of_joined_weights_is_noticed(monkeypatch):
    def first(arrange, axis, start, size):
        return lambda whole: arrange(jax.lax.slice_in_dim(whole, 0, size, axis=axis))

    monkeypatch.setattr(sites, "_on_slice", first)
    text, wrong, _ = judged(5001)
    assert "joined" in text
    assert any("the norm of record" in words for words in wrong)
