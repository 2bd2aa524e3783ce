"""Ten healthy programs: on none of them may the diagnosis find anything.

Each is a program as people write it, with settings that a careful person would choose.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.illnesses import Case, Parts

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def parted(records: Any, *sizes: int) -> list[Any]:
    """Shuffled records in parts of these sizes, and the rest."""
    order = np.random.default_rng(1).permutation(len(jax.tree.leaves(records)[0]))
    return [jax.tree.map(lambda a: a[i], records) for i in np.split(order, np.cumsum(sizes))]  # noqa: B023


def accuracy(
    logits: Callable[[Any, Any], jax.Array], x: Any, y: np.ndarray
) -> Callable[[Any], float]:
    """The share of right answers on a test set, as a function of the parameters."""
    every = jax.jit(jax.vmap(logits, (None, 0)))
    return lambda params: float(np.mean(np.argmax(every(params, x), -1) == y))


def dense(key: int, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """A layer with the usual first values."""
    w = jax.random.normal(jax.random.key(key), (inputs, outputs)) * np.sqrt(2 / inputs)
    return {"w": w, "b": jnp.zeros(outputs)}


def applied(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All digits as 8 by 8 images in [0, 1], and their labels."""
    found = jaxdp.data.load("digits")
    x = np.concatenate([found.train_x, found.test_x])[..., 0]
    return x, np.concatenate([found.train_y, found.test_y])


@functools.cache
def mnist() -> tuple[np.ndarray, np.ndarray]:
    """The first 14,000 images of MNIST in [0, 1], 28 by 28, and their labels."""
    found = jaxdp.data.load("mnist")
    return found.train_x[:14_000], found.train_y[:14_000]


def digits_cnn() -> Parts:
    """Two convolutions on digits."""
    train, public, test = parted(digits(), 1_200, 250)
    kernels = [
        jax.random.normal(jax.random.key(i), s) / 3
        for i, s in enumerate(((3, 3, 1, 8), (3, 3, 8, 16)))
    ]
    kernels[1] = kernels[1] / np.sqrt(8)
    params = {"kernels": kernels, "out": dense(2, 4 * 16, 10)}

    def logits(params, x):
        h = x[None, ..., None]
        for kernel in params["kernels"]:
            h = jax.lax.conv_general_dilated(
                h, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jnp.tanh(h)
        return applied(params["out"], h.reshape(-1))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-4, steps=300, l2_clip_norm=1.0, batch_size=240, dataset_size=1_200
    )
    return Parts(
        loss, params, train, mechanism, optax.adam(1e-2), public, accuracy(logits, *test), 300
    )


def digits_mlp() -> Parts:
    """One hidden layer on digits, by SGD with momentum."""
    train, public, test = parted(digits(), 1_200, 250)
    params = {"in": dense(0, 64, 32), "out": dense(1, 32, 10)}

    def logits(params, x):
        return applied(params["out"], jax.nn.gelu(applied(params["in"], x.reshape(-1))))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-4, steps=300, l2_clip_norm=1.0, batch_size=240, dataset_size=1_200
    )
    optimizer = optax.sgd(0.3, momentum=0.9)
    return Parts(loss, params, train, mechanism, optimizer, public, accuracy(logits, *test), 300)


def mnist_linear() -> Parts:
    """Multinomial regression on a part of MNIST."""
    x, y = mnist()
    train, public, test = parted((x.reshape(-1, 784), y), 10_000, 1_000)
    params = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}

    def loss(params, x, y):
        return cross_entropy(applied(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=200, l2_clip_norm=1.0, batch_size=1_000, dataset_size=10_000
    )
    return Parts(
        loss, params, train, mechanism, optax.sgd(1.0), public, accuracy(applied, *test), 200
    )


def table_logistic() -> Parts:
    """Logistic regression of a table with numbers in several units, scaled by public bounds."""
    rng = np.random.default_rng(0)
    age, hours, income = (
        rng.uniform(18, 90, 12_000),
        rng.uniform(0, 80, 12_000),
        rng.lognormal(10, 1, 12_000),
    )
    z = 0.08 * (age - 50) + 0.05 * (hours - 40) - 0.9 * (np.log(income) - 10)
    y = rng.random(12_000) < 1 / (1 + np.exp(-z))
    x = np.stack([age / 50 - 1, hours / 40 - 1, np.log(income) / 10 - 1], 1).astype(np.float32)
    x[:, 2] *= 5
    train, public, test = parted((x, y.astype(np.int32)), 10_000, 500)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}

    def logit(params, x):
        return x @ params["w"] + params["b"]

    def loss(params, x, y):
        return optax.sigmoid_binary_cross_entropy(logit(params, x), y.astype(jnp.float32))

    two = lambda params, x: jnp.stack([0.0 * logit(params, x), logit(params, x)])  # noqa: E731
    mechanism = jaxdp.dp_sgd(
        epsilon=1.0, delta=1e-6, steps=150, l2_clip_norm=1.0, batch_size=500, dataset_size=10_000
    )
    return Parts(loss, params, train, mechanism, optax.sgd(1.0), public, accuracy(two, *test), 150)


def made_texts(count: int, length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Texts of 500 words in four classes, which prefer 30 words each; 0 is padding at the end."""
    rng = np.random.default_rng(2)
    y = rng.integers(0, 4, count)
    words = rng.integers(121, 500, (count, length))
    own = 1 + 30 * y[:, None] + rng.integers(0, 30, (count, length))
    tokens = np.where(rng.random((count, length)) < 0.3, own, words)
    tokens[np.arange(length) >= rng.integers(12, length + 1, count)[:, None]] = 0
    return tokens.astype(np.int32), y.astype(np.int32)


def text_embedding() -> Parts:
    """Texts as token ids: a mean of embeddings, and a layer."""
    train, public, test = parted(made_texts(12_000), 10_000, 800)
    table = jax.random.normal(jax.random.key(0), (500, 16)) / 4
    params = {"table": table, "out": dense(1, 16, 4)}

    def logits(params, tokens):
        mask = (tokens > 0).astype(jnp.float32)
        mean = mask @ params["table"][tokens] / jnp.maximum(mask.sum(), 1.0)
        return applied(params["out"], 4 * mean)

    def loss(params, tokens, y):
        return cross_entropy(logits(params, tokens), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-5, steps=200, l2_clip_norm=1.0, batch_size=500, dataset_size=10_000
    )
    return Parts(
        loss, params, train, mechanism, optax.adam(2e-2), public, accuracy(logits, *test), 200
    )


def regression() -> Parts:
    """Least squares with targets in about [-3, 3]; the score is the explained variance."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8_000, 10)).astype(np.float32) / np.sqrt(10)
    y = (x @ rng.normal(size=10) + 0.2 * rng.normal(size=8_000)).astype(np.float32)
    train, public, (test_x, test_y) = parted((x, y), 6_000, 500)
    params = {"w": jnp.zeros(10), "b": jnp.zeros(())}

    def loss(params, x, y):
        return 0.5 * jnp.square(x @ params["w"] + params["b"] - y)

    def score(params):
        left = test_x @ params["w"] + params["b"] - test_y
        return float(1 - np.var(left) / np.var(test_y))

    mechanism = jaxdp.dp_sgd(
        epsilon=2.0, delta=1e-5, steps=150, l2_clip_norm=1.0, batch_size=400, dataset_size=6_000
    )
    return Parts(loss, params, train, mechanism, optax.sgd(0.5, 0.9), public, score, 150)


def imbalanced() -> Parts:
    """5 % positives, a weight of 10, and a clip norm that lets it act; the score is balanced."""
    rng = np.random.default_rng(4)
    y = rng.random(24_000) < 0.05
    x = np.c_[rng.normal(size=(24_000, 10)) / 2 + 0.4 * y[:, None], np.ones(24_000)]
    train, public, (test_x, test_y) = parted(
        (x.astype(np.float32), y.astype(np.int32)), 20_000, 1_000
    )

    def loss(params, x, y):
        return jnp.where(y == 1, 10.0, 1.0) * optax.sigmoid_binary_cross_entropy(
            x @ params, y.astype(jnp.float32)
        )

    def score(params):
        right = (test_x @ params > 0) == (test_y == 1)
        return float((right[test_y == 1].mean() + right[test_y == 0].mean()) / 2)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=100, l2_clip_norm=10.0, batch_size=1_000, dataset_size=20_000
    )
    return Parts(loss, jnp.zeros(11), train, mechanism, optax.sgd(0.1, 0.9), public, score, 100)


def last_layer() -> Parts:
    """The last layer and a LoRA of a network that was trained on other, public digits."""
    pretrained, train, public, test = parted(digits(), 400, 900, 150)
    layers = {"in": dense(0, 64, 64), "out": dense(1, 64, 10)}

    def logits(layers, x, low=0.0):
        x = x.reshape(-1)
        return applied(layers["out"], jnp.tanh(applied(layers["in"], x) + low))

    # Trained here on the first four classes alone, without privacy: those records are public.
    known = jax.tree.map(lambda a: a[pretrained[1] < 4], pretrained)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(layers, state):
        loss = lambda p: cross_entropy(jax.vmap(logits, (None, 0))(p, known[0]), known[1]).mean()  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(layers), state)
        return optax.apply_updates(layers, updates), state

    state = tx.init(layers)
    for _ in range(100):
        layers, state = step(layers, state)
    low = {"a": jax.random.normal(jax.random.key(2), (64, 4)) / 8, "b": jnp.zeros((4, 64))}
    params = {"public": layers, "low": low, "out": dense(3, 64, 10)}

    def private_logits(params, x):
        low = x.reshape(-1) @ params["low"]["a"] @ params["low"]["b"]
        return logits({"in": params["public"]["in"], "out": params["out"]}, x, low)

    def loss(params, x, y):
        return cross_entropy(private_logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-4, steps=150, l2_clip_norm=1.0, batch_size=300, dataset_size=900
    )
    trainable = {"public": False, "low": True, "out": True}
    score = accuracy(private_logits, *test)
    return Parts(
        loss, params, train, mechanism, optax.adam(1e-2), public, score, 150,
        {"trainable": trainable},
    )  # fmt: skip


def adamw_schedule() -> Parts:
    """AdamW with a warm-up and a cosine on two rings of points."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 10_000)
    angle, radius = rng.uniform(0, 2 * np.pi, 10_000), 0.5 + y + 0.15 * rng.normal(size=10_000)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)
    train, public, test = parted((x, y.astype(np.int32)), 8_000, 500)
    params = {"in": dense(0, 2, 32), "out": dense(1, 32, 2)}

    def logits(params, x):
        return applied(params["out"], jnp.tanh(applied(params["in"], x)))

    def loss(params, x, y):
        return cross_entropy(logits(params, x), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=200, l2_clip_norm=0.5, batch_size=400, dataset_size=8_000
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 20, 200)
    optimizer = optax.adamw(rate, weight_decay=1e-4)
    return Parts(loss, params, train, mechanism, optimizer, public, accuracy(logits, *test), 200)


def dropout() -> Parts:
    """An MLP on a part of MNIST with dropout, whose loss takes a key."""
    x, y = mnist()
    x = x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    train, public, test = parted((x, y), 10_000, 1_000)
    params = {"in": dense(0, 196, 64), "out": dense(1, 64, 10)}

    def logits(params, x, keep=1.0):
        return applied(params["out"], keep * jax.nn.relu(applied(params["in"], x)))

    def loss(params, x, y, rng):
        keep = jax.random.bernoulli(rng, 0.8, (64,)) / 0.8
        return cross_entropy(logits(params, x, keep), y)

    mechanism = jaxdp.dp_sgd(
        epsilon=4.0, delta=1e-5, steps=200, l2_clip_norm=1.0, batch_size=500, dataset_size=8_000
    )
    return Parts(
        loss, params, train, mechanism, optax.adam(3e-3), public, accuracy(logits, *test), 200
    )


PROGRAMS = (
    digits_cnn, digits_mlp, mnist_linear, table_logistic, text_embedding, regression, imbalanced,
    last_layer, adamw_schedule, dropout,
)  # fmt: skip
CASES = [Case(make.__name__.replace("_", "-"), "", "", make) for make in PROGRAMS]
