"""Convolutions of all kinds, experts and odd uses: engines that JAX's ``vmap`` would mislead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from tests.clipping.architectures import ARCHITECTURES, ROWS, jit, opened
from tests.clipping.references import Reference, agrees, gap, together
from tests.clipping.test_ghost import EVERYONE, changes_no_other

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
KEYS = jax.random.split(jax.random.key(0), 5)
IMAGES = jax.random.normal(jax.random.key(1), (ROWS, 6, 5, 3))
KERNEL = {"k": jax.random.normal(KEYS[0], (3, 2, 1, 6))}


def convolve(x, kernel):
    """In three groups: XLA's CPU backend puts zeros between groups, and 0 · inf is NaN."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS, feature_group_count=3
    )


def square(x):
    return jnp.sum(jnp.square(x))


def standardised(p, x):
    """A kernel that is changed before it meets data."""
    return square(convolve(x[None], (p["k"] - p["k"].mean()) / p["k"].std()))


def of_the_example(p, x):
    """A kernel that is computed from the example."""
    return square(convolve(x[None], jnp.tanh(x.mean() * p["k"]))) + square(p["k"])


def in_a_branch(p, x):
    """A convolution inside a ``cond``, which cannot be taken apart."""
    kernel = p["k"] - p["k"].mean()
    twice = lambda x, k: convolve(2 * x, k)  # noqa: E731
    return square(lax.cond(jnp.sum(kernel) < 9.0, convolve, twice, x[None], kernel))


def in_a_scan(p, x):
    """Kernels of one shape, applied by a scan over them."""
    layer = lambda h, kernel: (jnp.tanh(convolve(h, kernel))[..., ::2] + h, None)  # noqa: E731
    return square(lax.scan(layer, x[None], p["k"])[0])


@jax.custom_vjp
def by_shifts(x, kernel):
    """``convolve`` without a convolution."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)))
    return sum(
        jnp.repeat(padded[:, i : i + 6, j : j + 5], 2, -1) * kernel[i, j, 0][None, None, None]
        for i in range(3)
        for j in range(2)
    )


by_shifts.defvjp(
    lambda x, k: (by_shifts(x, k), (x, k)), lambda saved, ct: jax.vjp(convolve, *saved)[1](ct)
)


def in_a_rule_of_its_own(p, x):
    """A convolution that only the gradient has, by a custom rule."""
    return square(by_shifts(x[None], p["k"] - p["k"].mean()))


STACK = {"k": jax.random.normal(KEYS[0], (2, 3, 3, 1, 6))}
NETWORKS = {
    "standardised": (KERNEL, standardised),
    "of_the_example": (KERNEL, of_the_example),
    "in_a_branch": (KERNEL, in_a_branch),
    "in_a_scan": (STACK, in_a_scan),
    "in_a_rule_of_its_own": (KERNEL, in_a_rule_of_its_own),
    "in_a_checkpoint": (KERNEL, jax.checkpoint(standardised)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_are_those_of_plain_jax_and_a_broken_example_changes_no_other(name):
    params, loss_fn = NETWORKS[name]
    true = Reference(params, loss_fn, IMAGES)
    rule = jaxdp.clip(float(np.median(true.norms())))
    for engine in ("auto", "vmap"):
        run = opened(jaxdp.clipped_grad(loss_fn, rule, engine))
        info = agrees(run, true, rule, params, IMAGES, EVERYONE, within=2e-5)
        changes_no_other(run, params, IMAGES, info)


# In one loop over the examples, or not.
ALONE = {"mnist_cnn": False, "convolutions": False, "standardised": False}
ALONE |= {"in_a_branch": True, "in_a_rule_of_its_own": True}


@pytest.mark.parametrize("name", ALONE)
def test_examples_are_worked_on_together_where_they_cannot_meet(name):
    made = ARCHITECTURES[name]() if name in ARCHITECTURES else (*NETWORKS[name], IMAGES)
    params, loss_fn, batch = made
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), "vmap")
    traced = jax.make_jaxpr(lambda p, b: grad_fn(p, b, "all").value)(params, batch)
    assert any(eqn.primitive.name in ("scan", "while") for eqn in traced.eqns) is ALONE[name]


# Convolutions that crop one side and pad the other: XLA's CPU backend reads other memory there. ---

SQUARES = jax.random.normal(KEYS[2], (4, 7, 7, 2))


def convolved(x, kernel, pads, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (pads, pads), dimension_numbers=DIMENSIONS
    )


def safely(x, kernel, pads, stride=1):
    padded = lax.pad(x, 0.0, [(0, 0, 0), (*pads, 0), (*pads, 0), (0, 0, 0)])
    return convolved(padded, kernel, (0, 0), stride)


@pytest.mark.parametrize("engine", ["auto", "vmap"])
@pytest.mark.parametrize("order", ["WNC", "NCW"])
def test_convolutions_whose_result_has_another_order_read_their_own_example_in_a_loop(
    engine, order
):
    """Of microbatches; XLA's CPU backend mixes them (1 × 1 kernels, batch and space exchanged)."""
    numbers, params = ("NWC", "WIO", order), {"k": KERNEL["k"][:1, 0, 0, :4].reshape(1, 2, 2)}
    images = jax.random.normal(KEYS[3], (6, 1, 7, 2))

    def loss_fn(p, x):
        return square(
            jnp.sin(lax.conv_general_dilated(x, p["k"], (1,), "VALID", (1,), (1,), numbers))
        )

    def by_product(p, x):
        return square(jnp.sin(x[0] @ p["k"][0]))

    true = Reference(params, by_product, images)
    agrees(
        opened(jaxdp.clipped_grad(loss_fn, true.half(), engine, 3)),
        true,
        true.half(),
        params,
        images,
    )


def cropped(second):
    """Losses for four paddings; of (4, 0) the gradient by the input has padding (-2, 2)."""

    def loss_of(pads, stride):
        first = lambda p, x: jnp.tanh(convolved(x[None], p["a"], (1, 1)))  # noqa: E731
        return lambda p, x: jnp.sum(jnp.sin(second(first(p, x), p["k"], pads, stride)))

    a, k = (jax.random.normal(KEYS[n], (3, 3, 2, size)) for n, size in enumerate((2, 4)))
    params = {"a": a, "k": k}
    cases = [((-1, 1), 1), ((-2, 1), 2), ((4, 0), 1), ((5, -1), 1)]
    return together({str(case): (params, loss_of(*case)) for case in cases})


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_cropped_and_widely_padded_convolutions_read_their_own_example(engine):
    params, loss_fn = cropped(convolved)
    true = Reference(params, cropped(safely)[1], SQUARES)
    run = opened(jaxdp.clipped_grad(loss_fn, true.half(), engine))
    agrees(run, true, true.half(), params, SQUARES)


def twice(conv):
    def loss_fn(p, x):
        add = lambda total, _: (total + jnp.sum(jnp.sin(conv(x[None], p["k"], (-1, 1)))), None)  # noqa: E731
        return lax.scan(add, jnp.float32(0.0), None, length=2)[0]

    return loss_fn


def test_in_a_loop_they_read_their_own_example_or_are_refused_in_words():
    params, loss_fn = {"k": cropped(safely)[0]["((4, 0), 1)"]["k"]}, twice(convolved)
    # Without a site inside, the loop is left as it is.
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "vmap")
    with pytest.raises(ValueError, match="padding of a convolution must not crop"):
        grad_fn(params, SQUARES, np.ones(4, bool))
    true = Reference(params, twice(safely), SQUARES)
    rule = jaxdp.clip(1e9)
    agrees(opened(jaxdp.clipped_grad(loss_fn, rule)), true, rule, params, SQUARES)


# Mixtures of experts by ``jax.lax.ragged_dot``, which JAX cannot ``vmap`` over examples. -----------

EXPERTS, D, WIDE, TIME = 3, 4, 5, 6
MIXTURE = {
    "gate": jax.random.normal(KEYS[0], (D, EXPERTS)),
    "up": jax.random.normal(KEYS[1], (EXPERTS, D, WIDE)),
    "down": jax.random.normal(KEYS[2], (EXPERTS, WIDE, D)),
}
SENTENCES = jax.random.normal(KEYS[3], (4, TIME, D))


def experts(params, x):
    """Tokens go to one expert each; the last of them to none."""
    scores = jax.nn.softmax(x @ params["gate"])
    chosen = jnp.argmax(scores, axis=1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    sizes = sizes - (jnp.arange(EXPERTS) == jnp.max(chosen)).astype(sizes.dtype)
    hidden = jnp.tanh(lax.ragged_dot(x[order], params["up"], sizes))
    out = lax.ragged_dot(hidden, params["down"], sizes)
    return jnp.sum(jnp.sin(out) * jnp.max(scores, axis=1)[order, None])


def looped(params, x):
    step = jax.checkpoint(lambda total, x: (total + experts(params, x), None))
    return lax.scan(step, jnp.float32(0.0), jnp.stack([x, x[::-1]]))[0]


@functools.cache
def mixtures():
    params, loss_fn = together({"once": (MIXTURE, experts), "looped": (MIXTURE, looped)})
    return params, loss_fn, Reference(params, loss_fn, SENTENCES, vmapped=False)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "auto"])
def test_mixtures_of_experts_are_clipped_example_by_example(engine):
    params, loss_fn, true = mixtures()
    grad_fn = jaxdp.clipped_grad(loss_fn, true.half(), engine)
    engines = {row.engine for row in grad_fn.plan(params, SENTENCES)}
    assert ("vmap" in engines) == (engine == "vmap")
    agrees(opened(grad_fn), true, true.half(), params, SENTENCES)


def test_rows_of_no_expert_reach_no_result():
    x = SENTENCES[0].at[-1].set(jnp.nan)
    sizes = jnp.asarray([2, 0, TIME - 3])
    loss_fn = lambda w, x: jnp.sum(lax.ragged_dot(x, w, sizes))  # noqa: E731
    run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e3), "ghost"))
    found, info = run(MIXTURE["up"], x[None])
    assert jnp.isfinite(info.norms).all()
    expected = jnp.zeros_like(MIXTURE["up"]).at[0].set(x[:2].sum(0)[:, None])
    np.testing.assert_allclose(found, expected.at[2].set(x[2:-1].sum(0)[:, None]), rtol=1e-5)


# Parameters are followed rightly or not at all. -------------------------------------------------

TABLE = {"w": jax.random.normal(KEYS[0], (6, 6))}
X = jax.random.normal(KEYS[1], (3, 4, 6))
TOKENS = jnp.arange(15, dtype=jnp.int32).reshape(3, 5) * 7 % 6


def wave(x):
    return jnp.sum(jnp.sin(x))


def rows_and_columns(p, e):
    return wave(p["w"][e["tokens"]]) + jnp.sum(jnp.cos(p["w"][:, e["tokens"][::-1]]))


def reshaped_in_another_order(p, e):
    return wave(e["x"] @ lax.reshape(p["w"], (6, 6), (1, 0))) + wave(jnp.cos(e["x"]) @ p["w"])


def kernels_under_vmap(p, e):
    one = lambda w, x: lax.conv_general_dilated(x[None], w, (1,), "VALID")  # noqa: E731
    return wave(jax.vmap(one)(p["w"], e["x"].reshape(2, 3, 4)))


def complex_data(p, e):
    x = e["x"].astype(jnp.complex64) * jnp.complex64(1.0 + 2.0j)
    product = lax.dot_general(x, p["w"], (((1,), (0,)), ((), ())))
    return jnp.sum(jnp.square(jnp.abs(product)))


def empty_weight(p, e):
    return wave(e["x"] @ p["empty"]) + wave(e["x"] @ p["w"])


def indices_beyond_the_rows(p, e):
    beyond = e["tokens"].astype(jnp.uint32) + jnp.uint32(2**32 - 3)
    return wave(p["w"].at[beyond].get(mode="clip"))


def test_parameters_are_followed_rightly_or_not_at_all():
    kernels = {"w": jax.random.normal(KEYS[2], (2, 4, 3, 2))}
    parts = {
        "rows and columns": (TABLE, rows_and_columns),
        "reshaped": (TABLE, reshaped_in_another_order),
        "kernels": (kernels, kernels_under_vmap),
        "complex": (TABLE, complex_data),
        "empty": ({**TABLE, "empty": jnp.zeros((6, 0))}, empty_weight),
        "indices": (TABLE, indices_beyond_the_rows),
    }
    (params, loss_fn), batch = together(parts), {"x": X, "tokens": TOKENS}
    true = Reference(params, loss_fn, batch)
    for engine in ("ghost", "vmap"):
        run = opened(jaxdp.clipped_grad(loss_fn, true.half(), engine))
        agrees(run, true, true.half(), params, batch)


def product(p, x):
    return wave(x @ p["w"])


def test_numpy_batches_in_double_precision_are_taken():
    grad_fn = jaxdp.clipped_grad(product, jaxdp.clip(1.0), "ghost")
    batch = np.asarray(X, np.float64)
    assert grad_fn.plan(TABLE, batch)[0].engine == "ghost"
    value = jit(lambda params: grad_fn(params, batch, "all").value)(TABLE)
    assert gap(value, Reference(TABLE, product, X).clipped(jaxdp.clip(1.0))) < 1e-5


@pytest.mark.parametrize("rule", [jaxdp.clip(1.0), jaxdp.coordinate_box(0.1)], ids=["clip", "box"])
def test_double_precision_models_are_summed_in_float32_microbatches_included(rule):
    with jax.enable_x64(True):
        params, batch = {"w": jnp.ones((6, 3))}, jnp.asarray(np.asarray(X), jnp.float64)
        assert params["w"].dtype == jnp.float64
        for size in (None, 2):
            grad_fn = jaxdp.clipped_grad(product, rule, "ghost", microbatch_size=size)
            assert opened(grad_fn)(params, batch)[0]["w"].dtype == jnp.float32
