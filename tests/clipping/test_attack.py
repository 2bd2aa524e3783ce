"""Attacks on the bound: those that succeed fail here, those that held pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping import rounding
from jaxdp.clipping.ghost import leaves
from tests.clipping.test_rules import AIM, norm64
from tests.compiling import AS_USERS

# Of rounding, which depends on how loops are fused: compiled as users do.
jit = functools.partial(jax.jit, compiler_options=AS_USERS)
HALF = jnp.bfloat16


def sums(loss_fn, rule, params, batches, masks, engine="auto", scale=None):
    """The clipped sums of these batches and masks, by one compiled program, and l2."""
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, engine)

    @jit
    def run(params, batch, mask, scale):
        found, _ = grad_fn(params, batch, mask, scale=scale)
        return found.value, found.l2

    found = [
        run(params, batch, np.asarray(mask), scale)
        for batch, mask in zip(batches, masks, strict=True)
    ]
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
    run = jit(lambda rows, mask, given: grad_fn(params, rows, mask, **given)[0].value)
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


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_the_inverse_of_a_large_scale_is_not_flushed(engine):
    # 1 / 2^127 is below the smallest normal number: the norm is taken for zero.
    x = {"a": jnp.full((2, 1), 1e38), "b": jnp.full((2, 2), 3.0)}
    scale, params = {"w": jnp.full((1, 2), 2.0**127)}, {"w": jnp.zeros((1, 2))}
    assert first(dense, jaxdp.clip(1e-3), params, x, engine=engine, scale=scale) <= 1e-3


@pytest.mark.parametrize("rule", [jaxdp.normalize(1.0), jaxdp.auto_s(10.0)])
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_weight_times_a_large_factor_does_not_overflow(rule, engine):
    # Gradient 10 and scale 1e10, so the weight is 7e8; the factor 1e38 times it is infinite.
    x = {"a": jnp.full((2, 1), 1e38), "b": jnp.full((2, 2), 1e-37)}
    scale = {"w": jnp.full((1, 2), 1e10 if rule == jaxdp.normalize(1.0) else 1e3)}
    params = {"w": jnp.zeros((1, 2))}
    assert first(dense, rule, params, x, engine=engine, scale=scale) <= rule.l2(params)


@pytest.mark.parametrize(("a", "b"), [(1e18, 1e-30), (1.8e19, 1e-38), (1e-25, 1e19)])
def test_without_a_scale_no_factor_overflows(a, b):
    x, params = {"a": jnp.full((2, 1), a), "b": jnp.full((2, 2), b)}, {"w": jnp.zeros((1, 2))}
    assert first(dense, jaxdp.normalize(1e10), params, x, engine="ghost") <= 1e10


UNIT = 2.0**-126


@pytest.mark.parametrize(
    ("bound", "x", "scale"),
    [
        (1.0, [2e38, 2e38], 2.2e38),
        (1e3, [2e38, 2e38], 3e35),
        # 2 units of others less 1.01 is below the smallest normal number, and taken for zero.
        (1.02, [UNIT, UNIT, -1.01 * UNIT], UNIT),
    ],
)
def test_scaled_sums_neither_overflow_nor_are_flushed(bound, x, scale):
    batch, rows = jnp.asarray(x)[:, None], np.arange(len(x))
    masks = [rows < len(x) - 1, rows < len(x)]
    given = {"scale": {"w": jnp.array([scale])}}
    rule, params = jaxdp.clip(bound), {"w": jnp.zeros(1)}
    (one, other), l2 = sums(linear, rule, params, [batch] * 2, masks, **given)
    assert np.linalg.norm(one - other) <= l2


@pytest.mark.parametrize(
    ("small", "huge", "scale"),
    [(1e-20, 1e18, 1e-3), (1e-20, 1e18, 1e-8), (1e-12, 1e19, 1e8), (1e-30, 1e30, 1e-2)],
)
def test_scaled_gradients_of_tiny_inputs_and_huge_cotangents_are_clipped(small, huge, scale):
    loss_fn = lambda p, x: x[3] * jnp.sum(x[:3] @ p["w"])  # noqa: E731
    batch, params = jnp.asarray([[small] * 3 + [huge]] * 2), {"w": jnp.zeros((3, 4))}
    scale = {"w": jnp.full((3, 4), scale)}
    added = first(loss_fn, jaxdp.clip(0.1), params, batch, engine="ghost", scale=scale)
    assert 0.1 * AIM <= added <= 0.1


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
        summed, _ = grad_fn({"w": jnp.zeros((6, 2))}, batch, "all", bound=bound)
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


@pytest.mark.parametrize(
    ("loss_fn", "rule"),
    [
        (alternating, jaxdp.normalize(1e10)),
        (alternating, jaxdp.clip(1e-10)),
        (tied_but_for_a_thousandth, jaxdp.normalize(1.0)),
        (tied_but_for_a_thousandth, jaxdp.normalize(1e10)),
    ],
)
def test_halves_at_the_ends_of_the_range_keep_the_bound(loss_fn, rule):
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost")
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), HALF)}
    rows = jax.tree.map(lambda *each: np.concatenate(each), *map(extreme, range(3)))
    assert 0.0 < np.max(alone(grad_fn, params, rows, 48)) <= rule.l2(params)


def multiplied(p, e):
    return jnp.sum((e["x"] @ p["w"]) * (e["p"] * e["q"] - e["r"]))


def in_halves(p, e):
    lost = (e["p"] * e["q"] - e["r"]).astype(HALF)
    return jnp.sum(((e["x"].astype(HALF) @ p["w"].astype(HALF)) * lost).astype(jnp.float32))


def multiple(p, e):
    return multiplied({"w": 0.3 * p["w"]}, e)


@pytest.mark.parametrize("loss_fn", [multiplied, in_halves, multiple])
def test_a_large_layer_is_multiplied_out_once(loss_fn):
    p, q = np.random.default_rng(0).normal(size=(2, 72, 64, 64)).astype(np.float32) * 1e3
    rows = {"p": p, "q": q, "r": p * q, "x": np.full_like(p, 1e-3)}
    params = {"w": jnp.zeros((64, 64))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6))
    assert grad_fn.plan(params, rows)[0].engine == "layer"
    assert leaves._LARGE <= 72 * 64 * 64

    @jit
    def run(rows, mask):
        summed, info = grad_fn(params, rows, mask)
        return summed.value, info.norms

    compiled = run.lower(rows, jnp.arange(72) == 3).compile()
    # One product for norm and sum both, and the weighted sum.
    assert compiled.as_text().count(" dot(") == 2
    value, norms = compiled(rows, jnp.arange(72) == 3)
    assert norm64(value) == pytest.approx(float(norms[3]), rel=1e-5)


# A record that changes what others add. ----------------------------------------------------------


def test_random_bits_from_an_examples_own_rbg_key_are_its_own():
    # vmap of rng_bit_generator makes all rows' bits from the first row's key.
    def loss(p, x):
        key = jax.random.wrap_key_data(x, impl="rbg")
        return jnp.sum(p["w"] * jax.random.normal(key, (3,)))

    x = jnp.arange(16, dtype=jnp.uint32).reshape(4, 4)
    try:
        found = others(loss, x, x.at[0].set(77))
    except ValueError:
        return
    np.testing.assert_array_equal(*found)


def test_an_rbg_key_gives_every_record_its_own_part_whoever_else_is_drawn():
    def loss(p, x, rng):
        return jnp.sum(p["w"] * x * jax.random.normal(rng, (3,)))

    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(10.0))
    key = jax.random.key(0, impl="rbg")
    found = []
    for number in (0, 2):
        draw = jaxdp.types.Draw(np.int32([[number, 1]]), np.array([[False, True]]), 0, 3)
        try:
            summed, _ = grad_fn.sum({"w": jnp.ones(3)}, jnp.ones((3, 3)), draw, key)
        except ValueError:
            return
        found.append(np.asarray(summed.value["w"]))
    np.testing.assert_array_equal(*found)


def test_memory_of_a_pallas_kernel_does_not_go_from_example_to_example():
    pl = pytest.importorskip("jax.experimental.pallas")
    tpu = pytest.importorskip("jax.experimental.pallas.tpu")

    def kernel(x, out, memory):
        memory[...] = jnp.where(jnp.isfinite(memory[...]), memory[...], 0.0) + x[...]
        out[...] = memory[...]

    def loss(p, x):
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        memory = [tpu.VMEM((3,), jnp.float32)]
        call = pl.pallas_call(kernel, out_shape=shape, scratch_shapes=memory, interpret=True)
        return 0.01 * jnp.sum(p["w"] * call(x))

    x = jnp.arange(12.0).reshape(4, 3)
    try:
        found = others(loss, x, x.at[0].set(9.0))
    except ValueError:
        return
    np.testing.assert_array_equal(*found)


def test_a_primitive_with_a_batching_rule_of_its_own_is_refused():
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    centred = Primitive("centred")
    centred.def_abstract_eval(lambda x: x)
    mlir.register_lowering(centred, mlir.lower_fun(lambda x: x, multiple_results=False))
    batching.primitive_batchers[centred] = lambda x, at: (
        x[0] - jnp.mean(x[0], 0, keepdims=True),
        0,
    )
    x = jnp.arange(12.0).reshape(4, 3)
    with pytest.raises(ValueError, match="loss_fn must not"):
        others(lambda p, x: 0.01 * jnp.sum(p["w"] * centred.bind(x)), x)


SQUARE = jnp.eye(3) * 3.0 + jnp.arange(9.0).reshape(3, 3) / 9.0


def _indices(x):
    return jnp.nan_to_num(x * 3).astype(jnp.int32)


HELD = {
    "solve": lambda p, x: jnp.sum(p["w"] * jnp.linalg.solve(SQUARE, x)),
    "window": lambda p, x: jnp.sum(
        p["w"][:2] * lax.reduce_window(x, 0.0, lax.add, (2,), (1,), [(-1, 1)])
    ),
    "while": lambda p, x: jnp.sum(
        p["w"] * lax.while_loop(lambda c: jnp.abs(jnp.sum(c)) < 5, lambda c: c * 1.5 + 0.1, x)
    ),
    "gather": lambda p, x: jnp.sum(p["w"] * x.at[_indices(x)].get(mode="promise_in_bounds")),
    "lookup": lambda p, x: jnp.sum(
        p["w"].at[_indices(x)].get(mode="promise_in_bounds") * jnp.nan_to_num(x)
    ),
    "scatter": lambda p, x: jnp.sum(
        p["w"] * jnp.zeros(3).at[_indices(x)].add(x, mode="promise_in_bounds")
    ),
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
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost")
    record = (jnp.zeros((1, 1), jnp.int32), one, two)
    value, norms = jit(lambda e: _opened(*grad_fn({"w": jnp.ones((6, 6))}, e, "all")))(record)
    np.testing.assert_allclose(norms, [200.0])
    assert norm64(value) <= 1.0


def _opened(summed, info):
    return summed.value, info.norms


def test_an_axis_named_by_a_numpy_integer_is_refused():
    axis = np.int64(7)
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * lax.pmean(x, axis)), jaxdp.clip(1.0))
    one = lambda x: grad_fn({"w": jnp.ones(3)}, x, "all")[0].value  # noqa: E731
    with pytest.raises(ValueError, match="communicate"):
        jax.vmap(one, axis_name=axis)(jnp.ones((2, 4, 3)))


# Padding that counts, and a sensitivity that depends on the draw. --------------------------------


def test_a_batch_inside_a_pytree_keeps_its_mask_or_is_refused():
    batch = jaxdp.Batch(jnp.ones((4, 3)), jnp.array([True, False, False, False]))
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * x["a"].data), jaxdp.clip(1.0))
    try:
        found, _ = grad_fn({"w": jnp.ones(3)}, {"a": batch}, "all")
    except ValueError:
        return
    assert np.linalg.norm(found.value["w"]) <= 1.0


def test_the_sensitivity_does_not_tell_the_number_of_rows():
    grad_fn = jaxdp.clipped_grad(linear, jaxdp.clip(1.0), most_records=4)
    found = set()
    for rows in (4, 1000):
        try:
            found.add(float(grad_fn({"w": jnp.ones(3)}, jnp.ones((rows, 3)), "all")[0].l2))
        except ValueError:
            continue
    assert len(found) == 1


# Constants of the proof. -------------------------------------------------------------------------


def test_sums_above_one_block_add_up_to_at_most_three_times_all_rows():
    # Theorem 3.2, as pairwise() pairs them: the sizes of the sums that hold block 0.
    for blocks in (9, 17, 33, 100):
        sizes, above = [1] * blocks, 0
        while len(sizes) > 1:
            half = len(sizes) // 2
            added = [x + y for x, y in zip(sizes[:half], sizes[half : 2 * half], strict=True)]
            sizes = [*added, *sizes[2 * half :]]
            above += sizes[0]
        assert above <= 3 * blocks


@pytest.mark.parametrize("rows", [600, 1400, 2001])
def test_leaves_whose_rows_cancel_nowhere_share_their_blocks(rows, monkeypatch):
    # Theorem 3.1 takes one block of at most 160 rows for all of them.
    cuts = []
    plain = rounding.cut
    monkeypatch.setattr(rounding, "cut", lambda r, size: cuts.append(size) or plain(r, size))
    x = {"a": jnp.ones((rows, 3)), "b": jnp.ones((rows, 2))}
    params = {"w": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
    loss = lambda p, x: dense(p, x) + jnp.sum(p["bias"] * x["b"])  # noqa: E731
    jax.eval_shape(lambda: jaxdp.clipped_grad(loss, jaxdp.clip(1.0))(params, x, "all")[0].value)
    size = rounding.even(rows, rounding.ROWS)
    assert size <= rounding.ROWS
    assert {cut for cut in cuts if cut <= rounding.ROWS} == {size}
    assert all(cut % size == 0 for cut in cuts)


def test_roundings_of_many_positions_and_uses_fit_the_stated_number():
    # K = min(βT, 128) + 24, for a product's 8 roundings and halves over blocks and uses.
    product, levels = 8, int(np.ceil(np.log2(2**20 / rounding.TERMS)))
    assert product + levels <= 24
