"""One broken example changes nothing about any other: else one record decides for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping.ghost import leaves
from tests.clipping.architectures import ARCHITECTURES, ROWS, opened

BROKEN = 1
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel):
    """In three groups: XLA's CPU backend puts zeros between groups, and 0 · inf is NaN."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS, feature_group_count=3
    )


def images():
    return jax.random.normal(jax.random.key(1), (ROWS, 6, 5, 3))


def standardised():
    """A kernel that is changed before it meets data."""

    def loss_fn(params, x):
        kernel = (params["k"] - params["k"].mean()) / params["k"].std()
        return jnp.sum(jnp.square(convolve(x[None], kernel)))

    return {"k": jax.random.normal(jax.random.key(0), (3, 2, 1, 6))}, loss_fn, images()


def of_the_example():
    """A kernel that is computed from the example."""

    def loss_fn(params, x):
        kernel = jnp.tanh(x.mean() * params["k"])
        return jnp.sum(jnp.square(convolve(x[None], kernel))) + jnp.sum(jnp.square(params["k"]))

    return {"k": jax.random.normal(jax.random.key(0), (3, 2, 1, 6))}, loss_fn, images()


def in_a_branch():
    """A convolution inside a ``cond``, which cannot be taken apart."""

    def loss_fn(params, x):
        kernel = params["k"] - params["k"].mean()
        out = lax.cond(
            jnp.sum(kernel) < 9.0, convolve, lambda x, k: convolve(2 * x, k), x[None], kernel
        )
        return jnp.sum(jnp.square(out))

    return {"k": jax.random.normal(jax.random.key(0), (3, 2, 1, 6))}, loss_fn, images()


def in_a_scan():
    """Kernels of one shape, applied by a scan over them."""

    def loss_fn(params, x):
        def layer(hidden, kernel):
            return jnp.tanh(convolve(hidden, kernel))[..., ::2] + hidden, None

        return jnp.sum(jnp.square(lax.scan(layer, x[None], params["k"])[0]))

    return {"k": jax.random.normal(jax.random.key(0), (2, 3, 3, 1, 6))}, loss_fn, images()


def by_shifts(x, kernel):
    """``convolve`` without a convolution."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)))
    return sum(
        jnp.repeat(padded[:, i : i + 6, j : j + 5], 2, -1) * kernel[i, j, 0][None, None, None]
        for i in range(3)
        for j in range(2)
    )


def in_a_rule_of_its_own():
    """A convolution that only the gradient has, by a custom rule."""
    shifts = jax.custom_vjp(by_shifts)
    shifts.defvjp(
        lambda x, k: (by_shifts(x, k), (x, k)), lambda saved, ct: jax.vjp(convolve, *saved)[1](ct)
    )

    def loss_fn(params, x):
        return jnp.sum(jnp.square(shifts(x[None], params["k"] - params["k"].mean())))

    return {"k": jax.random.normal(jax.random.key(0), (3, 2, 1, 6))}, loss_fn, images()


def in_a_checkpoint():
    """The standardised kernel, rematerialised."""
    params, loss_fn, x = standardised()
    return params, jax.checkpoint(loss_fn), x


# Tokens cannot be broken; these convolutions are like those of mnist_cnn, and slow to compile.
LEFT_OUT = ("tied", "untied", "rematerialised", "cifar_cnn", "residual")
NETWORKS = {
    **{name: make for name, make in ARCHITECTURES.items() if name not in LEFT_OUT},
    "standardised": standardised,
    "of_the_example": of_the_example,
    "in_a_branch": in_a_branch,
    "in_a_scan": in_a_scan,
    "in_a_rule_of_its_own": in_a_rule_of_its_own,
    "in_a_checkpoint": in_a_checkpoint,
}


def broken(batch, value):
    x, *rest = jax.tree.leaves(batch)
    assert jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.unflatten(jax.tree.structure(batch), [x.at[BROKEN].set(value), *rest])


@pytest.mark.parametrize("engine", ["auto", "vmap"])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_broken_example_changes_no_other(name, engine):
    params, loss_fn, batch = NETWORKS[name]()
    run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), engine))
    others = np.arange(ROWS) != BROKEN
    total, info = run(params, batch, jnp.asarray(others))
    for value in (jnp.inf, jnp.nan, 3e38):
        found, again = run(params, broken(batch, value), jnp.ones(ROWS, bool))
        np.testing.assert_allclose(again.norms[others], info.norms[others], rtol=1e-5)
        if not np.isfinite(again.norms[BROKEN]):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), found, total
            )


@pytest.mark.parametrize(("name", "engine"), [("mlp", "vmap"), ("convolutions", "auto")])
def test_large_gradients_are_added_row_by_row_beside_a_broken_one(monkeypatch, name, engine):
    monkeypatch.setattr(leaves, "_LARGE", 1)
    params, loss_fn, batch = NETWORKS[name]()
    run = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), engine))
    total, _ = run(params, batch, jnp.arange(ROWS) != BROKEN)
    found, info = run(params, broken(batch, jnp.inf), jnp.ones(ROWS, bool))
    assert not np.isfinite(info.norms[BROKEN])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), found, total)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ARCHITECTURES])
def test_gradients_are_those_of_jax(name):
    params, loss_fn, batch = NETWORKS[name]()
    total, _ = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e9), "vmap"))(params, batch)
    expected = jax.grad(lambda p: sum(loss_fn(p, x) for x in batch))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), total, expected
    )


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("mnist_cnn", False),
        ("convolutions", False),
        ("standardised", False),
        ("in_a_branch", True),
        ("in_a_rule_of_its_own", True),
    ],
)
def test_examples_are_worked_on_together_where_they_cannot_meet(name, alone):
    params, loss_fn, batch = NETWORKS[name]()
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), "vmap")
    traced = jax.make_jaxpr(lambda p, b: grad_fn(p, b, "all")[0].value)(params, batch)
    assert any(eqn.primitive.name in ("scan", "while") for eqn in traced.eqns) is alone
