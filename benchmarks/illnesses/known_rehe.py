"""Three programs whose learning rate, or whose inputs, do not suit the noise and the clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.illnesses import Case, Parts


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
