"""Three ill programs whose clip norm is wrong: too small, far too large, and against weights."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.illnesses import Case, Parts
from benchmarks.illnesses.known_healthy import (
    accuracy,
    applied,
    cross_entropy,
    dense,
    digits,
    parted,
)


def clip_of_a_paper(clip_norm: float = 1e-3) -> Parts:
    """A network on digits by SGD, with the clip norm of a paper and the rate of another."""
    train, public, test = parted(digits(), 1_200, 250)

    def logits(params, x):
        return applied(params["out"], jnp.tanh(applied(params["in"], x.reshape(-1))))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=8.0,
        delta=1e-5,
        steps=150,
        l2_clip_norm=clip_norm,
        batch_size=200,
        dataset_size=1_200,
    )
    params = {"in": dense(0, 64, 32), "out": dense(1, 32, 10)}
    score = accuracy(logits, *test)
    return Parts(loss, params, train, mechanism, optax.sgd(0.5), public, score, 150)


def clip_without_privacy(clip_norm: float = 1_000.0) -> Parts:
    """Logistic regression of a table; the clip norm was chosen so that nothing is clipped."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(7_000, 20)).astype(np.float32)
    y = (x[:, :5].sum(1) + rng.normal(size=7_000) > 0).astype(np.int32)
    train, public, test = parted((x, y), 4_000, 500)

    def logits(params, x):
        return jnp.stack([jnp.zeros(()), applied(params, x)[0]])

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=2.0,
        delta=1e-5,
        steps=200,
        l2_clip_norm=clip_norm,
        batch_size=200,
        dataset_size=4_000,
    )
    params = {"w": jnp.zeros((20, 1)), "b": jnp.zeros(1)}
    score = accuracy(logits, *test)
    return Parts(loss, params, train, mechanism, optax.adam(0.03), public, score, 200)


def weights_defeated(clip_norm: float = 0.5) -> Parts:
    """One in twenty is positive and weighs 15 times as much; the score is balanced."""
    rng = np.random.default_rng(4)
    y = (rng.random(9_000) < 0.05).astype(np.int32)
    x = (rng.normal(size=(9_000, 10)) / 2 + 0.4 * y[:, None]).astype(np.float32)
    train, public, test = parted((x, y), 6_000, 1_000)

    def loss(params, x, y):
        weight = jnp.where(y == 1, 15.0, 1.0)
        return weight * optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y)

    def score(params):
        called = np.asarray(test[0] @ params["w"] + params["b"]) > 0
        return float((called[test[1] == 1].mean() + 1 - called[test[1] == 0].mean()) / 2)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0,
        delta=1e-5,
        steps=100,
        l2_clip_norm=clip_norm,
        batch_size=300,
        dataset_size=6_000,
    )
    params = {"w": jnp.zeros(10), "b": jnp.zeros(())}
    return Parts(loss, params, train, mechanism, optax.adam(0.05), public, score, 100)


CASES = [
    Case(
        "clip of a paper",
        "a clip norm of 0.001 with SGD at a rate of 0.5: the steps are too short to lead anywhere",
        "a clip norm of 1, or a rate in proportion",
        clip_of_a_paper,
        lambda: clip_of_a_paper(1.0),
        ("clip",),
    ),
    Case(
        "clip without privacy",
        "a clip norm of 1,000, which no gradient comes near: the noise is scaled to it",
        "a clip norm of 2",
        clip_without_privacy,
        lambda: clip_without_privacy(2.0),
        ("clip",),
    ),
    Case(
        "weights defeated",
        "class weights of 15 under a clip norm of 0.5, which shortens all gradients to one length",
        "a clip norm of 15",
        weights_defeated,
        lambda: weights_defeated(15.0),
        ("groups",),
    ),
]
