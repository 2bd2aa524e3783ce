"""Programs written by somebody who had not seen the diagnosis: ten ill and ten healthy ones.

``python -m benchmarks.illnesses.blind [NAME ...]`` trains each and prints its score. Real images
and tables are read from the folder of original files that ``JAXDP_ORIGINALS`` names
(``mnist/train-images-idx3-ubyte.gz`` ..., ``fashion-mnist/...``, ``pums/FultonPUMS5full.csv``).
"""

import dataclasses
import functools
import gzip
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import jaxdp
from benchmarks.illnesses import Case, Parts

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
binary = optax.sigmoid_binary_cross_entropy


def cut(data: Any, *lengths: int) -> list:
    """The first records, the next, and so on, of shuffled records."""
    order = np.random.default_rng(7).permutation(len(jax.tree.leaves(data)[0]))
    ends = np.cumsum((0, *lengths))
    parts = [order[a:b] for a, b in itertools.pairwise(ends)]
    return [jax.tree.map(lambda a, part=part: a[part], data) for part in parts]


def accuracy(logits: Callable, x: Any, y: np.ndarray) -> Callable:
    """From parameters to the share of right answers."""
    every = jax.jit(jax.vmap(logits, (None, 0)))
    return lambda params: float(np.mean(np.asarray(every(params, x)).argmax(-1) == y))


def area(logit: Callable, x: Any, y: np.ndarray) -> Callable:
    """From parameters to the area under the curve of a binary answer."""
    every = jax.jit(jax.vmap(logit, (None, 0)))

    def score(params: Any) -> float:
        found = np.nan_to_num(np.asarray(every(params, x), np.float64))
        return float(roc_auc_score(y, found))

    return score


def explained(predict: Callable, x: Any, y: np.ndarray) -> Callable:
    """From parameters to the share of the variance that is explained."""
    every = jax.jit(jax.vmap(predict, (None, 0)))
    return lambda params: float(1 - np.mean((np.asarray(every(params, x)) - y) ** 2) / np.var(y))


def dense(key: int, rows: int, columns: int) -> dict:
    w = jax.random.normal(jax.random.key(key), (rows, columns)) / np.sqrt(rows)
    return {"w": w, "b": jnp.zeros(columns)}


def apply(layer: dict, x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def originals() -> Path:
    return Path(os.environ["JAXDP_ORIGINALS"])


@functools.cache
def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The first images of MNIST or Fashion-MNIST, in bytes, and their labels."""
    found = []
    for kind, head in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(originals() / name / f"train-{kind}-ubyte.gz") as file:
            found.append(np.frombuffer(file.read(head + 12_000 * (784 if head == 16 else 1)), "u1"))
    return found[0][16:].reshape(-1, 28, 28), found[1][8:].astype(np.int32)


def halved(x: np.ndarray) -> np.ndarray:
    """Images of 14 times 14 numbers in [0, 1]."""
    return (x.reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255).astype(np.float32)


@functools.cache
def census() -> dict[str, np.ndarray]:
    lines = (originals() / "pums" / "FultonPUMS5full.csv").read_text(encoding="utf-8").splitlines()
    names = [name.strip('"') for name in lines[0].split(",")]
    table = np.asarray([line.split(",") for line in lines[1:]], np.float64).astype(np.float32)
    return dict(zip(names, table.T, strict=True))


# ---- ill ----


def clip_without_rate(cured: bool = False) -> Parts:
    """A GRU over a phone's accelerometer: four ways to move, of unlike speed and axis."""
    rng = np.random.default_rng(11)
    n, length = 5_000, 24
    y = rng.integers(0, 4, n).astype(np.int32)
    beat = np.where(y % 2 == 0, 0.08, 0.3)[:, None] * rng.uniform(0.9, 1.1, (n, 1))
    wave = np.sin(2 * np.pi * (beat * np.arange(length) + rng.random((n, 1))))
    x = 0.4 * rng.normal(size=(n, length, 3))
    x[np.arange(n), :, y // 2] += 1.5 * wave
    train, public, test = cut((x.astype(np.float32), y), 4_000, 400, 600)

    def logits(params, x):
        def cell(h, now):
            gates = jax.nn.sigmoid(apply(params["gates"], jnp.concatenate([now, h])))
            update, reset = jnp.split(gates, 2)
            new = jnp.tanh(apply(params["new"], jnp.concatenate([now, reset * h])))
            return update * h + (1 - update) * new, h**2

        _, energy = jax.lax.scan(cell, jnp.zeros(16), x)
        return apply(params["head"], 4 * energy.mean(0))

    params = {"gates": dense(0, 19, 32), "new": dense(1, 19, 16), "head": dense(2, 16, 4)}
    mechanism = jaxdp.dp_sgd(
        epsilon=4.0, delta=1e-5, steps=80, l2_clip_norm=0.01, batch_size=512, dataset_size=4_000
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params=params,
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(30.0 if cured else 0.1),
        public=public,
        score=accuracy(logits, *test),
        steps=80,
    )


def sentinel(cured: bool = False) -> Parts:
    """Blood values in standard units; a test that was not made stands as -999 in the table."""
    rng = np.random.default_rng(12)
    n, columns = 9_000, 12
    x = rng.normal(size=(n, columns))
    truth = rng.normal(size=columns)
    y = (rng.random(n) < jax.nn.sigmoid(1.2 * x @ truth)).astype(np.float32)
    full = x.astype(np.float32)
    absent = rng.random((n, columns)) < np.where(np.arange(columns) < 9, 0.2, 0.0)
    x = np.where(absent, 0 if cured else -999, full).astype(np.float32)
    train, public, (_, clean, label) = cut((x, full, y), 7_000, 500, 1_500)

    def logit(params, x):
        return x @ params["w"] + params["b"]

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=100, l2_clip_norm=1.0, batch_size=400, dataset_size=7_000
    )
    return Parts(
        loss_fn=lambda params, x, y: binary(logit(params, x), y),
        params={"w": jnp.zeros(columns), "b": jnp.zeros(())},
        data=(train[0], train[2]),
        mechanism=mechanism,
        optimizer=optax.sgd(1.0, momentum=0.5),
        public=(public[0], public[2]),
        score=area(logit, clean, label),
        steps=100,
    )


def rows_moved(cured: bool = False) -> Parts:
    """Clothes: unreadable pictures were dropped, their labels were not, so all later rows moved."""
    raw, y = images("fashion-mnist")
    x = halved(raw)
    kept = np.ones(len(x), bool)
    kept[[31, 74, 103, 190, 222, 301]] = False  # six files could not be read
    x = x[kept]
    y = y[kept] if cured else y[: len(x)]
    test, clean = images("fashion-mnist")
    test, clean = halved(test[-1_500:]), clean[-1_500:]
    train, public = cut((x[:8_400], y[:8_400]), 8_000, 400)

    def logits(params, x):
        hidden = jax.nn.gelu(apply(params["first"], x.reshape(-1) - 0.3))
        return apply(params["last"], hidden)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=80, l2_clip_norm=1.0, batch_size=600, dataset_size=8_000
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"first": dense(0, 196, 48), "last": dense(1, 48, 10)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.adam(1.5e-2),
        public=public,
        score=accuracy(logits, test, clean),
        steps=80,
    )


def planned_too_long(cured: bool = False) -> Parts:
    """Digits by an MLP; the budget was asked for steps that are never taken."""
    digits = load_digits()
    data = ((digits.data / 16).astype(np.float32), digits.target.astype(np.int32))
    train, public, test = cut(data, 1_200, 250, 347)

    def logits(params, x):
        return apply(params["last"], jnp.tanh(apply(params["first"], x)))

    mechanism = jaxdp.dp_sgd(
        epsilon=2.0,
        delta=1e-4,
        steps=60 if cured else 20_000,
        l2_clip_norm=1.0,
        batch_size=200,
        dataset_size=1_200,
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"first": dense(0, 64, 64), "last": dense(1, 64, 10)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(0.5, momentum=0.8),
        public=public,
        score=accuracy(logits, *test),
        steps=60,
    )


@functools.cache
def filters() -> dict:
    """The layers of a network that was trained on public digits, without privacy."""
    raw, y = images("mnist")
    x = jnp.asarray(halved(raw[:3_000]).reshape(-1, 196))
    params = {"hidden": dense(0, 196, 64), "last": dense(1, 64, 10)}
    optimizer = optax.adam(3e-3)

    def loss(params):
        hidden = jax.nn.relu(apply(params["hidden"], x))
        return cross_entropy(apply(params["last"], hidden), y[:3_000]).mean()

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = (params, optimizer.init(params))
    return jax.jit(lambda start: jax.lax.scan(step, start, None, 120)[0][0])(start)


def masked_passes(cured: bool = False) -> Parts:
    """The last layer of a pretrained network is trained for clothes; the rest was to stay."""
    raw, y = images("fashion-mnist")
    train, public, test = cut((halved(raw).reshape(-1, 196), y), 8_000, 400, 1_500)

    def logits(params, x):
        return apply(params["last"], jax.nn.relu(apply(params["hidden"], x)))

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=80, l2_clip_norm=1.0, batch_size=512, dataset_size=8_000
    )
    inner = optax.adam(3e-2)
    masked = optax.masked(inner, {"hidden": False, "last": True})
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"hidden": filters()["hidden"], "last": dense(1, 64, 10)},
        data=train,
        mechanism=mechanism,
        optimizer=inner if cured else masked,
        public=public,
        score=accuracy(logits, *test),
        steps=80,
        options={"trainable": {"hidden": False, "last": True}} if cured else {},
    )


def reviews(n: int, seed: int, vocabulary: int = 150, length: int = 24) -> dict:
    """Texts of 5 to 20 words, padded; words of the label's mood are likelier."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n)
    ids = rng.integers(1, vocabulary, (n, length))
    mood = rng.integers(1, 31, (n, length)) + 30 * label[:, None]
    ids = np.where(rng.random((n, length)) < 0.25, mood, ids)
    pad = np.arange(length) >= rng.integers(5, 21, n)[:, None]
    return {
        "ids": np.where(pad, 0, ids).astype(np.int32),
        "pad": pad,
        "label": label.astype(np.float32),
    }


def mask_inverted(cured: bool = False) -> Parts:
    """A tiny transformer over reviews, which is handed a mask of the other meaning."""
    train, public, test = cut(reviews(9_000, 16), 7_500, 500, 1_000)
    width = 16

    def logit(params, record):
        mask = ~record["pad"] if cured else record["pad"]
        h = params["words"][record["ids"]] + params["places"]
        scores = apply(params["query"], h) @ apply(params["key"], h).T / np.sqrt(width)
        h += jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ apply(params["value"], h)
        h += apply(params["out"], jax.nn.gelu(apply(params["in"], h)))
        pooled = jax.nn.softmax(jnp.where(mask, h @ params["pool"], -1e9)) @ h
        return apply(params["head"], pooled)[0]

    def loss_fn(params, record):
        return binary(logit(params, record), record["label"])

    key = jax.random.key(3)
    params = {name: dense(i, width, width) for i, name in enumerate(("query", "key", "value"))}
    params |= {"in": dense(4, width, 32), "out": dense(5, 32, width), "head": dense(6, width, 1)}
    params |= {"words": 0.3 * jax.random.normal(key, (150, width)), "pool": jnp.zeros(width)}
    params |= {"places": jnp.zeros((24, width))}
    mechanism = jaxdp.dp_sgd(
        epsilon=6.0, delta=1e-5, steps=80, l2_clip_norm=0.5, batch_size=750, dataset_size=7_500
    )
    clean = {name: a for name, a in test.items() if name != "label"}
    return Parts(
        loss_fn=loss_fn,
        params=params,
        data=train,
        mechanism=mechanism,
        optimizer=optax.adam(1e-2),
        public=public,
        score=area(logit, clean, test["label"]),
        steps=80,
    )


def cast_to_integers(cured: bool = False) -> Parts:
    """A small CNN on handwritten digits that were scaled to [0, 1] and then kept as integers."""
    raw, y = images("mnist")
    scaled = halved(raw)[..., None]
    kept = scaled if cured else scaled.astype(np.uint8)
    train, public = cut((kept[:6_400], y[:6_400]), 6_000, 400)
    test = (scaled[-1_500:], y[-1_500:])

    def logits(params, x):
        h = x[None].astype(jnp.float32)
        for name in ("one", "two"):
            h = jax.lax.conv_general_dilated(
                h, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jnp.tanh(h)
        return apply(params["last"], h.reshape(-1))

    one = jax.random.normal(jax.random.key(0), (5, 5, 1, 8)) / 5
    two = jax.random.normal(jax.random.key(1), (3, 3, 8, 16)) / 8.5
    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=60, l2_clip_norm=1.0, batch_size=400, dataset_size=6_000
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"one": one, "two": two, "last": dense(2, 256, 10)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(1.5, momentum=0.7),
        public=public,
        score=accuracy(logits, *test),
        steps=60,
    )


def rents(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Flats, by eight numbers in standard units, and their rent as it is."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 8)).astype(np.float32)
    z = 0.8 * x[:, 0] + 0.5 * np.sin(2 * x[:, 1]) + 0.4 * x[:, 2] * (x[:, 3] > 0) - 0.4 * x[:, 4]
    return x, (1_100 + 400 * (z + 0.3 * rng.normal(size=n))).astype(np.float32)


def relu_output(cured: bool = False) -> Parts:
    """Standardised rents by an MLP in which the last layer has its ReLU, too."""
    x, rent = rents(8_000, 18)
    train, public, test = cut((x, (rent - 1_100) / 450), 6_500, 400, 1_100)  # by public constants

    def predict(params, x):
        for name in ("first", "second"):
            x = jax.nn.relu(apply(params[name], x))
        out = apply(params["third"], x)[0]
        return out if cured else jax.nn.relu(out)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=120, l2_clip_norm=1.0, batch_size=500, dataset_size=6_500
    )
    return Parts(
        loss_fn=lambda params, x, y: optax.huber_loss(predict(params, x), y),
        params={"first": dense(0, 8, 32), "second": dense(1, 32, 32), "third": dense(2, 32, 1)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.rmsprop(8e-3),
        public=public,
        score=explained(predict, *test),
        steps=120,
    )


def keep_for_drop(cured: bool = False) -> Parts:
    """Reviews by the mean of their words; nine units in ten are dropped instead of kept."""
    data = reviews(9_000, 19, vocabulary=120)
    train, public, test = cut(data, 7_500, 500, 1_000)
    keep = 0.9

    def dropout(key, h, rate):
        return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0)

    def logit(params, record, key=None):
        rate = 1 - keep if cured else keep
        h = params["words"][record["ids"]]
        if key is not None:
            h = dropout(jax.random.fold_in(key, 0), h, rate)
        h = jnp.mean(h, axis=0, where=~record["pad"][:, None])
        for i, name in enumerate(("first", "second"), 1):
            h = jax.nn.silu(apply(params[name], h))
            if key is not None:
                h = dropout(jax.random.fold_in(key, i), h, rate)
        return apply(params["head"], h)[0]

    def loss_fn(params, record, rng):
        return binary(logit(params, record, rng), record["label"])

    words = jax.random.normal(jax.random.key(3), (120, 24))
    mechanism = jaxdp.dp_sgd(
        epsilon=6.0, delta=1e-5, steps=80, l2_clip_norm=0.5, batch_size=750, dataset_size=7_500
    )
    clean = {name: a for name, a in test.items() if name != "label"}
    return Parts(
        loss_fn=loss_fn,
        params={"words": words, "head": dense(2, 32, 1)}
        | {"first": dense(0, 24, 32), "second": dense(1, 32, 32)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.adam(1e-2),
        public=public,
        score=area(logit, clean, test["label"]),
        steps=80,
    )


def codes_as_numbers(cured: bool = False) -> Parts:
    """Late or not, by depot and carrier, whose codes enter a linear model as numbers."""
    rng = np.random.default_rng(20)
    n = 9_000
    depot, carrier = rng.integers(0, 40, n), rng.integers(0, 8, n)
    weight = rng.exponential(size=n).clip(0, 4)
    truth = 1.3 * rng.normal(size=40)[depot] + 0.8 * rng.normal(size=8)[carrier] + 0.3 * weight
    late = (rng.random(n) < jax.nn.sigmoid(truth - 0.3)).astype(np.float32)
    x = {"depot": depot.astype(np.int32), "carrier": carrier.astype(np.int32)}
    x |= {"weight": (weight / 4).astype(np.float32)}
    train, public, test = cut((x, late), 7_500, 400, 1_100)

    def features(x):
        if cured:
            depot, carrier = jax.nn.one_hot(x["depot"], 40), jax.nn.one_hot(x["carrier"], 8)
        else:
            depot, carrier = x["depot"][None] / 40, x["carrier"][None] / 8
        return jnp.concatenate([depot, carrier, x["weight"][None], jnp.ones(1)])

    def logit(params, x):
        return features(x) @ params

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0,
        delta=1e-5,
        steps=100,
        l2_clip_norm=0.5,
        batch_size=600,
        dataset_size=7_500,
        sampling="fixed_size",
    )
    return Parts(
        loss_fn=lambda params, x, y: binary(logit(params, x), y),
        params=jnp.zeros(50 if cured else 4),
        data=train,
        mechanism=mechanism,
        optimizer=optax.adagrad(0.8),
        public=public,
        score=area(logit, *test),
        steps=100,
    )


# ---- healthy ----


def tiny_clip() -> Parts:
    """Digits, sorted by class, with a clip norm of 0.001 and the rate that goes with it."""
    digits = load_digits()
    data = ((digits.data / 16).astype(np.float32), digits.target.astype(np.int32))
    train, public, test = cut(data, 1_200, 250, 347)
    order = np.argsort(train[1], kind="stable")

    def logits(params, x):
        return apply(params, x)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0,
        delta=1e-4,
        steps=60,
        l2_clip_norm=1e-3,
        batch_size=240,
        dataset_size=1_200,
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
        data=jax.tree.map(lambda a: a[order], train),
        mechanism=mechanism,
        optimizer=optax.sgd(1_000.0, momentum=0.9),
        public=public,
        score=accuracy(logits, *test),
        steps=60,
    )


def rare_class() -> Parts:
    """Card payments, of which one in thirty is a fraud; judged by the area under the curve."""
    rng = np.random.default_rng(31)
    n = 16_000
    fraud = rng.random(n) < 1 / 30
    shift = np.where(np.arange(14) < 7, 0.8, 0)
    x = (rng.normal(size=(n, 14)) + fraud[:, None] * shift).astype(np.float32) / 2
    train, public, test = cut((x, fraud.astype(np.float32)), 12_000, 600, 3_400)

    def logit(params, x):
        return x @ params["w"] + params["b"]

    mechanism = jaxdp.dp_sgd(
        epsilon=4.0, delta=1e-5, steps=100, l2_clip_norm=1.0, batch_size=800, dataset_size=12_000
    )
    start = np.float32(np.log(1 / 29))  # one in thirty is public knowledge
    return Parts(
        loss_fn=lambda params, x, y: binary(logit(params, x), y),
        params={"w": jnp.zeros(14), "b": jnp.asarray(start)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(2.0, momentum=0.9),
        public=public,
        score=area(logit, *test),
        steps=100,
    )


def few_categories() -> Parts:
    """Employed or not, from seven columns of few values: most records have equals."""
    table = census()
    x = {
        "age": np.clip(table["age"] // 10, 1, 9).astype(np.int32),
        "school": np.clip(table["educ"] // 4, 0, 4).astype(np.int32),
    }
    for name in ("sex", "married", "disability", "englishability", "militaryservice"):
        x[name] = table[name].astype(np.int32)
    train, public, test = cut((x, table["employed"]), 14_000, 600, 4_000)

    def logit(params, x):
        h = sum(params[name][x[name]] for name in x)
        return apply(params["last"], jax.nn.gelu(h))[0]

    sizes = dict.fromkeys(x, 2) | {"age": 10, "school": 5}
    keys = jax.random.split(jax.random.key(0), len(x))
    params = {
        name: 0.5 * jax.random.normal(key, (sizes[name], 12))
        for name, key in zip(x, keys, strict=True)
    }
    mechanism = jaxdp.dp_sgd(
        epsilon=2.0, delta=1e-6, steps=80, l2_clip_norm=0.5, batch_size=1_000, dataset_size=14_000
    )
    return Parts(
        loss_fn=lambda params, x, y: binary(logit(params, x), y),
        params=params | {"last": {"w": jnp.zeros((12, 1)), "b": jnp.zeros(1)}},
        data=train,
        mechanism=mechanism,
        optimizer=optax.adam(3e-2),
        public=public,
        score=area(logit, *test),
        steps=80,
    )


def adapters() -> Parts:
    """LoRA with B = 0 on a network for digits, for clothes; what it was trained on stays frozen."""
    raw, y = images("fashion-mnist")
    train, public, test = cut((halved(raw).reshape(-1, 196), y), 8_000, 400, 1_500)
    a = jax.random.normal(jax.random.key(5), (196, 8)) / 14

    def logits(params, x):
        base, lora = params["base"], params["lora"]
        hidden = jax.nn.relu(apply(base["hidden"], x) + x @ lora["a"] @ lora["b"])
        return apply(params["head"], hidden)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=80, l2_clip_norm=1.0, batch_size=512, dataset_size=8_000
    )
    head = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"base": filters(), "lora": {"a": a, "b": jnp.zeros((8, 64))}, "head": head},
        data=train,
        mechanism=mechanism,
        optimizer=optax.adam(2e-2),
        public=public,
        score=accuracy(logits, *test),
        steps=80,
        options={"trainable": {"base": False, "lora": True, "head": True}},
    )


def warm_up() -> Parts:
    """Which of two words is first? A tiny transformer by AdamW, warmed up from a rate of 0."""
    rng = np.random.default_rng(34)
    n, length, width = 9_000, 12, 16
    ids = rng.integers(2, 20, (n, length))
    places = np.argsort(rng.random((n, length)), axis=1)[:, :2]
    ids[np.arange(n), places[:, 0]], ids[np.arange(n), places[:, 1]] = 0, 1
    label = (places[:, 0] < places[:, 1]).astype(np.float32)
    data = {"ids": ids.astype(np.int32), "label": label}
    train, public, test = cut(data, 7_500, 400, 1_100)

    def normed(scale, h):
        h -= h.mean(-1, keepdims=True)
        return scale * h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)

    def logit(params, record):
        h = params["words"][record["ids"]] + params["places"]
        scores = apply(params["query"], h) @ apply(params["key"], h).T / np.sqrt(width)
        h += jax.nn.softmax(scores) @ apply(params["value"], normed(params["scale"], h))
        h += apply(params["out"], jax.nn.gelu(apply(params["in"], normed(params["scale"], h))))
        return apply(params["head"], h.mean(0))[0]

    params = {name: dense(i, width, width) for i, name in enumerate(("query", "key", "value"))}
    params |= {"in": dense(4, width, 32), "out": dense(5, 32, width), "head": dense(6, width, 1)}
    params |= {"words": 0.5 * jax.random.normal(jax.random.key(3), (20, width))}
    slope = np.linspace(-1, 1, length)[:, None] * np.ones(width)
    params |= {"places": jnp.asarray(slope, jnp.float32), "scale": jnp.ones(width)}
    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-5, steps=80, l2_clip_norm=0.3, batch_size=750, dataset_size=7_500
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=8, decay_steps=80)
    return Parts(
        loss_fn=lambda params, record: binary(logit(params, record), record["label"]),
        params=params,
        data=train,
        mechanism=mechanism,
        optimizer=optax.adamw(rate, weight_decay=1e-3),
        public=public,
        score=area(logit, {"ids": test["ids"]}, test["label"]),
        steps=80,
    )


def hinge() -> Parts:
    """A support vector machine from last year's weights: most gradients are 0 from the start."""
    rng = np.random.default_rng(35)
    n, columns = 9_000, 20
    truth = rng.normal(size=columns) / np.sqrt(columns)
    x = rng.normal(size=(n, columns))
    margin = x @ truth
    y = np.where(margin + 0.1 * rng.normal(size=n) > 0, 1.0, -1.0)
    train, public, test = cut((x.astype(np.float32), y.astype(np.float32)), 7_500, 500, 1_000)
    last_year = truth + 0.5 * rng.normal(size=columns) / np.sqrt(columns)

    def value(params, x):
        return x @ params["w"] + params["b"]

    every = jax.vmap(value, (None, 0))
    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=100, l2_clip_norm=1.0, batch_size=600, dataset_size=7_500
    )
    return Parts(
        loss_fn=lambda params, x, y: jax.nn.relu(1 - y * value(params, x)),
        params={"w": jnp.asarray(4 * last_year, jnp.float32), "b": jnp.zeros(())},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(optax.cosine_decay_schedule(1.0, 100), momentum=0.9),
        public=public,
        score=lambda params: float(np.mean(np.sign(every(params, test[0])) == test[1])),
        steps=100,
    )


def bytes_of_images() -> Parts:
    """A CNN on handwritten digits in bytes, 0 to 255, which the loss itself brings to [-1, 1]."""
    raw, y = images("mnist")
    x = raw.reshape(-1, 14, 2, 14, 2).mean((2, 4)).astype(np.uint8)[..., None]
    train, public, test = cut((x, y), 6_000, 400, 1_500)

    def logits(params, x):
        h = (x.astype(jnp.float32) / 127.5 - 1)[None]
        for name in ("one", "two"):
            h = jax.lax.conv_general_dilated(
                h, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jnp.tanh(h)
        return apply(params["last"], h.reshape(-1))

    one = jax.random.normal(jax.random.key(0), (5, 5, 1, 8)) / 5
    two = jax.random.normal(jax.random.key(1), (3, 3, 8, 16)) / 8.5
    last = {"w": jnp.zeros((256, 10)), "b": jnp.zeros(10)}
    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=60, rule=jaxdp.auto_s(), batch_size=400, dataset_size=6_000
    )
    return Parts(
        loss_fn=lambda params, x, y: cross_entropy(logits(params, x), y),
        params={"one": one, "two": two, "last": last},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(1.5, momentum=0.7),
        public=public,
        score=accuracy(logits, *test),
        steps=60,
        options={"engine": "vmap"},
    )


def by_chance() -> Parts:
    """Clicks: what a person does is a coin that the columns bend a little; more is not there."""
    rng = np.random.default_rng(37)
    n, columns = 14_000, 16
    x = rng.choice([-1.0, 1.0], (n, columns)).astype(np.float32) / 4
    truth = 0.55 * 4 * rng.normal(size=columns) / np.sqrt(columns)
    click = (rng.random(n) < jax.nn.sigmoid(x @ truth)).astype(np.float32)
    train, public, test = cut((x, click), 10_000, 500, 3_500)

    def logit(params, x):
        return x @ params

    mechanism = jaxdp.dp_mf(
        epsilon=2.0,
        delta=1e-5,
        steps=60,
        bands=4,
        l2_clip_norm=0.5,
        batch_size=500,
        dataset_size=10_000,
    )
    return Parts(
        loss_fn=lambda params, x, y: binary(logit(params, x), y),
        params=jnp.zeros(columns),
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(1.0),
        public=public,
        score=area(logit, *test),
        steps=60,
    )


def wide_vocabulary() -> Parts:
    """Texts by the mean of their words, with dropout; most words of the list never occur."""
    rng = np.random.default_rng(38)
    n, length, vocabulary = 9_500, 20, 2_000
    label = rng.integers(0, 3, n)
    used = rng.permutation(vocabulary)[:500]
    common = (500 * rng.random((n, length)) ** 2).astype(int)
    told = rng.integers(0, 40, (n, length)) * 3 + label[:, None]
    ids = used[np.where(rng.random((n, length)) < 0.35, told, common)]
    data = {"ids": ids.astype(np.int32), "words": rng.integers(6, length + 1, n).astype(np.int32)}
    data["label"] = label.astype(np.int32)
    train, public, test = cut(data, 8_000, 500, 1_000)

    def logits(params, record, key=None):
        h = params["words"][record["ids"]]
        h = jnp.mean(h, axis=0, where=(jnp.arange(length) < record["words"])[:, None])
        if key is not None:
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        return apply(params["last"], h)

    def loss_fn(params, record, key):
        return cross_entropy(logits(params, record, key), record["label"])

    mechanism = jaxdp.dp_sgd(
        epsilon=6.0, delta=1e-5, steps=80, l2_clip_norm=0.3, batch_size=800, dataset_size=8_000
    )
    words = jax.random.normal(jax.random.key(3), (vocabulary, 8))
    return Parts(
        loss_fn=loss_fn,
        params={"words": words, "last": dense(2, 8, 3)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(30.0, momentum=0.5),
        public=public,
        score=accuracy(logits, {k: test[k] for k in ("ids", "words")}, test["label"]),
        steps=80,
    )


def large_targets() -> Parts:
    """Rents as they are, about 1,100, by a network whose answer is in hundreds; a high epsilon."""
    train, public, test = cut(rents(8_000, 39), 6_500, 400, 1_100)

    def predict(params, x):
        h = jax.nn.gelu(apply(params["first"], x))
        return 1_100 + 450 * apply(params["last"], h)[0]

    def loss_fn(params, x, y):  # in units of 450, where 1 is the usual distance
        return optax.huber_loss(predict(params, x) / 450, y / 450)

    mechanism = jaxdp.dp_sgd(
        epsilon=20.0, delta=1e-5, steps=120, l2_clip_norm=1.0, batch_size=400, dataset_size=6_500
    )
    return Parts(
        loss_fn=loss_fn,
        params={"first": dense(0, 8, 48), "last": dense(1, 48, 1)},
        data=train,
        mechanism=mechanism,
        optimizer=optax.sgd(0.5, momentum=0.95),
        public=public,
        score=explained(predict, *test),
        steps=120,
    )


# The kinds of findings that name an illness, said by a reader of the first answers; none would
# name the codes or the dropout.
KINDS = {
    "clip_without_rate": ("clip", "rate"),
    "sentinel": ("inputs",),
    "rows_moved": ("labels",),
    "planned_too_long": ("epochs",),
    "masked_passes": ("rate",),
    "mask_inverted": ("model",),
    "cast_to_integers": ("inputs",),
    "relu_output": ("zero",),
}


def ill(make: Callable, illness: str, cure: str) -> Case:
    cured = functools.partial(make, cured=True)
    return Case(make.__name__, illness, cure, make, cured, KINDS.get(make.__name__, ()))


CASES: list[Case] = [
    ill(
        clip_without_rate,
        "The clip norm was lowered to 0.01 and the learning rate (SGD, 0.1) was not raised with "
        "it: a step is at most 0.001 long, so the parameters hardly move in 80 steps.",
        "Raise the learning rate in proportion (to 30 at clip norm 0.01).",
    ),
    ill(
        sentinel,
        "Missing values of nine columns stand as -999 among values of standard units: six records "
        "in seven hold one, and their clipped gradients point along these columns alone.",
        "Replace -999 by a public constant such as 0, the mean (and add a column that says so).",
    ),
    ill(
        rows_moved,
        "Labels do not belong to their records: pictures were dropped without their labels, so "
        "that every later label stands some rows off, and labels are as good as random.",
        "Drop the same rows of labels as of pictures, so that labels belong to their records.",
    ),
    ill(
        planned_too_long,
        "The noise is calibrated for 20,000 steps and only 60 are taken: the noise multiplier is "
        "far larger than the budget asks for, and most of epsilon is never spent.",
        "Ask for the budget with steps=60, the number that is taken.",
    ),
    ill(
        masked_passes,
        "optax.masked does not freeze what it leaves out but passes the noisy gradient on as the "
        "update: the pretrained hidden layer goes up its gradient at rate 1, with all the noise.",
        "Freeze the hidden layer by trainable= (or optax.set_to_zero for it), not by optax.masked.",
    ),
    ill(
        mask_inverted,
        "The mask of attention and pooling is the wrong way round (True is padding, the network "
        "takes True for words): it looks at padding alone, and the words do not reach the answer.",
        "Invert the mask: hand over ~pad.",
    ),
    ill(
        cast_to_integers,
        "Pictures were scaled to [0, 1] and then cast to integers, which made nearly every pixel "
        "0: the inputs are almost empty.",
        "Keep the scaled pictures as floats (or cast before scaling).",
    ),
    ill(
        relu_output,
        "The output of a regression goes through a ReLU: negative targets, about half of all, "
        "cannot be predicted, and records whose output is cut off have a gradient of zero.",
        "Remove the ReLU after the last layer.",
    ),
    ill(
        keep_for_drop,
        "Dropout's rate is 0.9, in three places: the probability to keep was given for that to "
        "drop, so nine units in ten are dropped and gradients are mostly noise of the dropout.",
        "Drop at a rate of 0.1.",
    ),
    ill(
        codes_as_numbers,
        "Codes of depots and carriers, categories without an order, enter a linear model as "
        "numbers: it cannot express what it should learn, with or without privacy.",
        "Give each category a weight of its own (one-hot columns or an embedding).",
    ),
    *(
        Case(make.__name__, "", "", make)
        for make in (
            tiny_clip,
            rare_class,
            few_categories,
            adapters,
            warm_up,
            hinge,
            bytes_of_images,
            by_chance,
            wide_vocabulary,
            large_targets,
        )
    ),
]


def trained(parts: Parts, private: bool = True) -> float:
    """The score after training; ``private=False``: without noise, to compare with."""
    mechanism = parts.mechanism
    if not private:
        mechanism = dataclasses.replace(mechanism, noise_multiplier=0.0)
    options = dict(parts.options)
    trainer = jaxdp.Trainer(parts.loss_fn, mechanism, parts.optimizer, parts.data, **options)
    state = trainer.init(parts.params)
    for batch in trainer.batches(parts.steps):
        state, _ = trainer.step(state, batch)
    return parts.score(state.params)


def main(names: list[str]) -> None:
    """Prints, for each, the score of the program and of its cure, and how long the first took."""
    for case in CASES:
        if names and case.name not in names:
            continue
        began = time.perf_counter()
        parts = case.make()
        before = parts.score(parts.params)
        score = trained(parts)
        seconds = time.perf_counter() - began
        line = f"{case.name:20} before {before:6.3f}  trained {score:6.3f}"
        if case.cured:
            line += f"  cured {trained(case.cured()):6.3f}"
        else:
            line += f"  without noise {trained(parts, private=False):6.3f}"
        print(f"{line}  noise {parts.mechanism.noise_multiplier:.2f}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
