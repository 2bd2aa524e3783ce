"""Attacks on the bound: those that succeed fail here, those that held pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping import rounding
from tests.compiling import AS_USERS

# Of rounding, which depends on how loops are fused: compiled as users do.
jit = functools.partial(jax.jit, compiler_options=AS_USERS)

ROWS = 4


def summed(loss_fn, rule, params, batch, mask, engine="auto", scale=None):
    """The clipped sum's leaves, and l2, compiled."""
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, engine)

    @jit
    def run(params, batch, mask, scale):
        found, _ = grad_fn(params, batch, mask, scale=scale)
        return jax.tree.leaves(found.value), found.l2

    leaves, l2 = run(params, batch, jnp.asarray(mask), scale)
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves]), float(l2)


def change(*args, out, within, **options):
    """How far the sum moves between two masks, and l2."""
    one, l2 = summed(*args, out, **options)
    other, _ = summed(*args, within, **options)
    return np.linalg.norm(one - other), l2


def others(loss_fn, batch, moved, rule=None):
    """What row 2 adds alone, before and after row 0 changes."""
    only = np.arange(len(jax.tree.leaves(batch)[0])) == 2
    params = {"w": jnp.ones(3)}
    rule = rule or jaxdp.clip(1.0)
    return [summed(loss_fn, rule, params, x, only)[0] for x in (batch, moved)]


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
    x = np.zeros((rows, 2, 2 * size))
    x[:, 0, :1], x[:, 0, size : size + 1] = 1e5 * a, 1e5 * b
    x[:, 1, 0], x[:, 1, size] = 1e5 * a[:, 0] * s, -1e5 * b[:, 0] / s
    params = {"w": jnp.zeros((size, size))}
    grad_fn = jaxdp.clipped_grad(two_uses, rule)
    scale = jax.tree.map(jnp.ones_like, params)
    alone = jit(lambda x, i: grad_fn(params, x, jnp.arange(rows) == i, scale=scale)[0].value["w"])
    x = jnp.asarray(x, jnp.float32)
    worst = max(np.linalg.norm(np.asarray(alone(x, i), np.float64)) for i in range(rows // 2))
    assert worst <= rule.l2(params)


def test_siamese_records_with_a_scale_keep_the_bound():
    size, rows = 32, 256

    def siamese(p, x):
        return jnp.sum(jnp.square(x[0] @ p["w"] - x[1] @ p["w"]))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1, size))
    x = np.concatenate([x, x * (1 + 1e-7 * rng.normal(size=(rows, 1, 1)))], axis=1)
    params = {"w": jnp.asarray(rng.normal(size=(size, size)), jnp.float32)}
    scale = {"w": jnp.asarray(rng.uniform(0.1, 2.0, (size, size)), jnp.float32)}
    grad_fn = jaxdp.clipped_grad(siamese, jaxdp.normalize(1.0))
    alone = jit(lambda x, i: grad_fn(params, x, jnp.arange(rows) == i, scale=scale)[0].value["w"])
    x = jnp.asarray(x, jnp.float32)
    assert max(np.linalg.norm(np.asarray(alone(x, i), np.float64)) for i in range(60)) <= 1.0


# A scale at the ends of float32. -----------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_the_inverse_of_a_large_scale_is_not_flushed(engine):
    # 1 / 2^127 is below the smallest normal number: the norm is taken for zero.
    x = {"a": jnp.full((2, 1), 1e38), "b": jnp.full((2, 2), 3.0)}
    scale = {"w": jnp.full((1, 2), 2.0**127)}
    params, only = {"w": jnp.zeros((1, 2))}, [True, False]
    value, _ = summed(dense, jaxdp.clip(1e-3), params, x, only, engine, scale)
    assert np.linalg.norm(value) <= 1e-3


@pytest.mark.parametrize("rule", [jaxdp.normalize(1.0), jaxdp.auto_s(10.0)])
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_weight_times_a_large_factor_does_not_overflow(rule, engine):
    # Gradient 10 and scale 1e10, so the weight is 7e8; the factor 1e38 times it is infinite.
    x = {"a": jnp.full((2, 1), 1e38), "b": jnp.full((2, 2), 1e-37)}
    scale = {"w": jnp.full((1, 2), 1e10 if rule == jaxdp.normalize(1.0) else 1e3)}
    params, only = {"w": jnp.zeros((1, 2))}, [True, False]
    value, _ = summed(dense, rule, params, x, only, engine, scale)
    assert np.linalg.norm(value) <= rule.l2(params)


@pytest.mark.parametrize(("bound", "large"), [(1.0, 2.2e38), (1e3, 3e35)])
def test_scaled_sums_do_not_overflow(bound, large):
    x, scale = jnp.full((2, 1), 2e38), {"w": jnp.array([large])}
    params = {"w": jnp.zeros(1)}
    args = (linear, jaxdp.clip(bound), params, x)
    moved, l2 = change(*args, out=[True, False], within=[True, True], scale=scale)
    assert moved <= l2


def test_scaled_sums_of_others_are_not_flushed():
    # 2 units of others less 1.01 is below the smallest normal number, and taken for zero.
    unit = 2.0**-126
    x, scale = jnp.array([[unit], [unit], [-1.01 * unit]]), {"w": jnp.array([unit])}
    params = {"w": jnp.zeros(1)}
    args = (linear, jaxdp.clip(1.02), params, x)
    moved, l2 = change(*args, out=[True, True, False], within=[True] * 3, scale=scale)
    assert moved <= l2


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
    for first in (0, 2):
        draw = jaxdp.types.Draw(np.int32([[first, 1]]), np.array([[False, True]]), 0, 3)
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
        others(lambda p, x: 0.01 * jnp.sum(p["w"] * centred.bind(x)), x, x.at[0].set(9.0))


# Padding that counts. ----------------------------------------------------------------------------


def test_a_batch_inside_a_pytree_keeps_its_mask_or_is_refused():
    batch = jaxdp.Batch(jnp.ones((4, 3)), jnp.array([True, False, False, False]))
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * x["a"].data), jaxdp.clip(1.0))
    try:
        found, _ = grad_fn({"w": jnp.ones(3)}, {"a": batch}, "all")
    except ValueError:
        return
    assert np.linalg.norm(found.value["w"]) <= 1.0


# A sensitivity that depends on the draw. ---------------------------------------------------------


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


@pytest.mark.parametrize("blocks", [9, 17, 33, 100])
def test_sums_above_one_block_add_up_to_at_most_three_times_all_rows(blocks):
    # Theorem 3.2, as pairwise() pairs them: the sizes of the sums that hold block 0.
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


# What held. --------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", HELD)
def test_no_row_reaches_another(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    for value in (np.nan, np.inf, 1e38):
        np.testing.assert_array_equal(*others(HELD[name], x, x.at[0].set(value)))


def test_an_axis_named_by_a_numpy_integer_is_refused():
    axis = np.int64(7)
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(p["w"] * lax.pmean(x, axis)), jaxdp.clip(1.0))
    one = lambda x: grad_fn({"w": jnp.ones(3)}, x, "all")[0].value  # noqa: E731
    with pytest.raises(ValueError, match="communicate"):
        jax.vmap(one, axis_name=axis)(jnp.ones((2, 4, 3)))


@pytest.mark.parametrize(("a", "b"), [(1e18, 1e-30), (1.8e19, 1e-38), (1e-25, 1e19)])
def test_without_a_scale_no_factor_overflows(a, b):
    x = {"a": jnp.full((2, 1), a), "b": jnp.full((2, 2), b)}
    params, only = {"w": jnp.zeros((1, 2))}, [True, False]
    value, _ = summed(dense, jaxdp.normalize(1e10), params, x, only, "ghost")
    assert np.linalg.norm(value) <= 1e10
