"""Four ill programs: mistakes by which records add nothing, or parameters learn nothing."""

import functools

import jax
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


def of_digits(loss, params, logits, rate: float = 0.5) -> Parts:
    """A classifier of digits by SGD with momentum."""
    train, public, test = parted(digits(), 1_200, 250)
    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-4, steps=300, l2_clip_norm=1.0, batch_size=240, dataset_size=1_200
    )
    optimizer = optax.sgd(rate, momentum=0.9)
    return Parts(loss, params, train, mechanism, optimizer, public, accuracy(logits, *test), 300)


def logarithm_of_income(cured: bool = False) -> Parts:
    """A table in which two records of five have no income: log(0)."""
    rng = np.random.default_rng(0)
    age = rng.uniform(18, 90, 7_000)
    income = np.where(rng.random(7_000) < 0.4, 0.0, rng.lognormal(1, 1, 7_000))
    z = 0.05 * (age - 50) + np.where(income == 0, -2.0, 3.0 - 2.0 * income / 3.0)
    x = np.stack([age / 50 - 1, income], 1).astype(np.float32)
    y = (rng.random(7_000) < 1 / (1 + np.exp(-z))).astype(np.int32)
    train, public, test = parted((x, y), 5_000, 500)

    def logits(params, x):
        size = jnp.log1p(x[1]) if cured else jnp.log(x[1])
        return applied(params, jnp.stack([x[0], size, x[1] > 0]))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    mechanism = jaxdp.dp_sgd(
        epsilon=2.0, delta=1e-5, steps=150, l2_clip_norm=1.0, batch_size=500, dataset_size=5_000
    )
    return Parts(
        loss, params, train, mechanism, optax.sgd(1.0), public, accuracy(logits, *test), 150
    )


def halves_of_digits(cured: bool = False) -> Parts:
    """The upper half of a digit is to find its lower half among others: a loss of a batch."""
    images, _ = digits()
    images = images[:1_792].reshape(-1, 2, 32)
    train, public, test = parted((images[:, 0], images[:, 1]), 1_200, 192)
    if cured:  # a record is eight digits
        train, public = (jax.tree.map(lambda a: a.reshape(-1, 8, 32), d) for d in (train, public))
    params = {
        name: 0.2 * jax.random.normal(jax.random.key(i), (32, 12)) for i, name in enumerate("ab")
    }

    def similarities(params, a, b):
        u, v = a @ params["a"], b @ params["b"]
        u, v = (w / jnp.sqrt(jnp.sum(w**2, -1, keepdims=True) + 1e-6) for w in (u, v))
        return 10 * u @ v.T

    def of_batch(params, a, b):
        found = similarities(params, a, b)
        return cross_entropy(found, jnp.arange(len(found))).mean()

    def loss(params, a, b):
        return of_batch(params, a, b) if cured else of_batch(params, a[None], b[None])

    def score(params):
        a, b = (v[:400].reshape(-1, 8, 32) for v in test)
        found = jax.vmap(similarities, (None, 0, 0))(params, a, b)
        return float(np.mean(np.argmax(found, -1) == np.arange(8)))

    size = len(train[0])
    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-4, steps=200, l2_clip_norm=1.0, batch_size=size // 2,
        dataset_size=size,
    )  # fmt: skip
    return Parts(loss, params, train, mechanism, optax.adam(3e-3), public, score, 200)


def softmax_twice(cured: bool = False) -> Parts:
    """A network that ends in a softmax, and a loss that applies its own."""

    def logits(params, x):
        h = applied(params["out"], jax.nn.gelu(applied(params["in"], x.reshape(-1))))
        return h if cured else jax.nn.softmax(h)

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    return of_digits(loss, {"in": dense(0, 64, 32), "out": dense(1, 32, 10)}, logits, 0.2)


def units_off(cured: bool = False) -> Parts:
    """First biases so low that no unit is ever on."""

    def logits(params, x):
        return applied(params["out"], jax.nn.relu(applied(params["in"], x.reshape(-1))))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    params = {"in": dense(0, 64, 32), "out": dense(1, 32, 10)}
    params["in"]["b"] -= 0.0 if cured else 10.0
    return of_digits(loss, params, logits)


CASES = [
    Case(name, illness, cure, make, functools.partial(make, cured=True), (kind,))
    for name, illness, cure, make, kind in (
        (
            "log of no income", "records without income have log(0): they add nothing",
            "log1p", logarithm_of_income, "nonfinite",
        ),
        (
            "a batch of one", "a contrastive loss is given one pair: it is constant",
            "a record is eight pairs", halves_of_digits, "zero",
        ),
        (
            "softmax twice", "the loss applies a softmax to probabilities",
            "logits", softmax_twice, "softmax",
        ),
        (
            "units off", "biases of -10 switch every hidden unit off",
            "biases of 0", units_off, "units",
        ),
    )
]  # fmt: skip
