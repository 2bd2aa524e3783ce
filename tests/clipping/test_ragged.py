"""Mixtures of experts by ``jax.lax.ragged_dot``, which JAX cannot ``vmap`` over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping.architectures import jit, opened
from tests.clipping.test_ghost import gap

EXPERTS, D, WIDE, TIME, ROWS = 3, 4, 5, 6, 4
KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    "gate": jax.random.normal(KEYS[0], (D, EXPERTS)),
    "up": jax.random.normal(KEYS[1], (EXPERTS, D, WIDE)),
    "down": jax.random.normal(KEYS[2], (EXPERTS, WIDE, D)),
}
BATCH = jax.random.normal(KEYS[3], (ROWS, TIME, D))


def experts(params, x):
    """Tokens go to one expert each; the last of them to none."""
    scores = jax.nn.softmax(x @ params["gate"])
    chosen = jnp.argmax(scores, axis=1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    sizes = sizes - (jnp.arange(EXPERTS) == jnp.max(chosen)).astype(sizes.dtype)
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], params["up"], sizes))
    out = jax.lax.ragged_dot(hidden, params["down"], sizes)
    return jnp.sum(jnp.sin(out) * jnp.max(scores, axis=1)[order, None])


def looped(params, x):
    step = jax.checkpoint(lambda total, x: (total + experts(params, x), None))
    return jax.lax.scan(step, jnp.float32(0.0), jnp.stack([x, x[::-1]]))[0]


@pytest.mark.parametrize("engine", ["vmap", "ghost", "auto"])
@pytest.mark.parametrize("loss_fn", [experts, looped])
def test_mixtures_of_experts_are_clipped_example_by_example(loss_fn, engine):
    one = jit(jax.grad(loss_fn))
    grads = [one(PARAMS, x) for x in BATCH]
    norms = np.asarray(
        [np.linalg.norm(jnp.concatenate(list(map(jnp.ravel, g.values())))) for g in grads]
    )
    bound = float(np.median(norms))
    weights = np.minimum(1.0, bound * (1 - 2.0**-9) / norms)
    expected = {
        k: sum(float(w) * g[k] for w, g in zip(weights, grads, strict=True)) for k in PARAMS
    }
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(bound), engine)
    engines = {row.engine for row in grad_fn.plan(PARAMS, BATCH)}
    assert ("vmap" in engines) == (engine == "vmap")
    found, info = opened(grad_fn)(PARAMS, BATCH)
    np.testing.assert_allclose(info.norms, norms, rtol=1e-5)
    assert gap(found, expected) < 1e-5


def test_rows_of_no_expert_reach_no_result():
    x = BATCH[0].at[-1].set(jnp.nan)
    sizes = jnp.asarray([2, 0, TIME - 3])
    loss_fn = lambda w, x: jnp.sum(jax.lax.ragged_dot(x, w, sizes))  # noqa: E731
    found, info = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e3), "ghost"))(
        PARAMS["up"], x[None]
    )
    assert jnp.isfinite(info.norms).all()
    expected = jnp.zeros_like(PARAMS["up"]).at[0].set(x[:2].sum(0)[:, None])
    np.testing.assert_allclose(found, expected.at[2].set(x[2:-1].sum(0)[:, None]), rtol=1e-5)
