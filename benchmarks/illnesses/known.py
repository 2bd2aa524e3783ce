"""The programs by those who wrote the diagnosis: ten healthy ones, and here ten ill ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.illnesses import Case, Parts, known_healthy
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


def _digits(rate: float) -> Parts:
    """A multi-layer perceptron on digits; the last 400 records of the training set are public."""
    data = jaxdp.data.load("digits")
    x, y = data.train_x.reshape(len(data.train_x), -1), data.train_y
    private = len(x) - 400
    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-4, steps=300, l2_clip_norm=1.0, batch_size=200, dataset_size=private
    )
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
        "out": jax.random.normal(keys[1], (64, 10)) / 8,
    }

    def logits(params, x):  # type: ignore[no-untyped-def]
        return jnp.tanh(x @ params["hidden"]) @ params["out"]

    def loss_fn(params, example):  # type: ignore[no-untyped-def]
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), label)

    test_x = data.test_x.reshape(len(data.test_x), -1)

    def accuracy(params) -> float:  # type: ignore[no-untyped-def]
        return float(np.mean(np.argmax(logits(params, test_x), axis=1) == data.test_y))

    return Parts(
        loss_fn, params, (x[:private], y[:private]), mechanism, optax.sgd(rate),
        (x[private:], y[private:]), accuracy, 300,
    )  # fmt: skip


def _people(standardised: bool) -> Parts:
    """A table of made people: age in years, income in a currency, three shares; a yes or no."""
    rng = np.random.default_rng(7)
    shares = rng.normal(size=(6_400, 3))
    age, income = rng.normal(45, 12, 6_400), rng.lognormal(10.5, 0.6, 6_400)
    logit = 1.5 * shares[:, 0] - shares[:, 1] + 0.08 * (age - 45) + 1.2 * (np.log(income) - 10.5)
    y = (rng.uniform(size=6_400) < 1 / (1 + np.exp(-2 * logit))).astype(np.float32)
    if standardised:  # by round numbers that one knows without the records
        age, income = (age - 45) / 12, (income - 40_000) / 25_000
    x = np.column_stack([age, income, shares]).astype(np.float32)
    mechanism = jaxdp.dp_sgd(
        epsilon=2.0, delta=1e-5, steps=200, l2_clip_norm=1.0, batch_size=200, dataset_size=5_000
    )

    def loss_fn(params, example):  # type: ignore[no-untyped-def]
        x, label = example["x"], example["y"]
        return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], label)

    def accuracy(params) -> float:  # type: ignore[no-untyped-def]
        said = x[5_400:] @ np.asarray(params["w"]) + float(params["b"]) > 0
        return float(np.mean(said == y[5_400:]))

    rows = {"private": slice(0, 5_000), "public": slice(5_000, 5_400)}
    data = {name: {"x": x[these], "y": y[these]} for name, these in rows.items()}
    return Parts(
        loss_fn, {"w": jnp.zeros(5), "b": jnp.zeros(())}, data["private"], mechanism,
        optax.sgd(0.5), data["public"], accuracy, 200,
        diagnose={"group": lambda record: int(record["y"])},
    )  # fmt: skip


CASES = [
    *known_healthy.CASES,
    *(
        Case(name, illness, cure, make, functools.partial(make, cured=True), (kind,))
        for name, illness, cure, make, kind in (
            (
                "log of no income",
                "records without income have log(0): they add nothing",
                "log1p",
                logarithm_of_income,
                "nonfinite",
            ),
            (
                "a batch of one",
                "a contrastive loss is given one pair: it is constant",
                "a record is eight pairs",
                halves_of_digits,
                "zero",
            ),
            (
                "softmax twice",
                "the loss applies a softmax to probabilities",
                "logits",
                softmax_twice,
                "softmax",
            ),
            (
                "units off",
                "biases of -10 switch every hidden unit off",
                "biases of 0",
                units_off,
                "units",
            ),
        )
    ),
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
    Case(
        "rate too high",
        "SGD at a rate of 30 where 1 suits: the weights go where the noise goes",
        "a learning rate of 1",
        lambda: _digits(30.0),
        lambda: _digits(1.0),
        ("rate",),
    ),
    Case(
        "rate too low",
        "SGD at a rate of 0.01: 300 steps hardly leave the start",
        "a learning rate of 1",
        lambda: _digits(0.01),
        lambda: _digits(1.0),
        ("rate",),
    ),
    Case(
        "inputs as they come",
        "an income in tens of thousands beside shares: it takes all of every clipped gradient",
        "inputs standardised by public constants",
        lambda: _people(False),
        lambda: _people(True),
        ("inputs",),
    ),
]
