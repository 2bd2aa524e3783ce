"""Losses and pipelines that break the guarantee, each beside a twin that keeps it.

Each function returns the answer of ``jaxdp.check``; what it does where ``right`` is False is wrong
on purpose. `python -m benchmarks.planted_loops` and the tests ask for all of them, both ways.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

RECORDS, WIDTH = 120, 6
_RNG = np.random.default_rng(7)
X = (3 + 2 * _RNG.normal(size=(RECORDS, WIDTH))).astype(np.float32)
Y = _RNG.integers(0, 2, RECORDS).astype(np.int32)
PARAMS = {"w": jnp.zeros((WIDTH, 2)), "b": jnp.zeros(2)}
MECHANISM = jaxdp.dp_sgd(
    noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=12, dataset_size=RECORDS
)


def loss_fn(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def check(loss=loss_fn, data=(X, Y), params=PARAMS, mechanism=MECHANISM, **more):
    return jaxdp.check(loss, params, data, mechanism, **more)


def statistics_of_the_records(right):
    centre = np.full(WIDTH, 3.0, np.float32) if right else X.mean(axis=0)
    return check(lambda params, x, y: loss_fn(params, x - centre, y))


def closure_over_a_batch(right):
    batch = jnp.asarray(np.linspace(0, 1, 10 * WIDTH).reshape(10, WIDTH) if right else X[:10])
    batch = batch.astype(jnp.float32)

    def loss(params, x, y):
        near = jnp.exp(-jnp.sum(jnp.square(batch - x[None]), axis=1))
        return loss_fn(params, x, y) * (1 + jnp.sum(near))

    return check(loss)


def cache_of_the_first_example(right):
    kept = {}

    def loss(params, x, y):
        scale = jnp.mean(x) if right else kept.setdefault("scale", jnp.mean(x))
        return loss_fn(params, x - scale, y)

    return check(loss)


def python_counter(right):
    seen = []

    def loss(params, x, y):
        seen.append(1)
        return loss_fn(params, x, y) * (1.0 if right else 0.9 ** len(seen))

    return check(loss)


def shared_dropout_key(right):
    key = jax.random.key(3)

    def gradients(params, rows):
        x, y = rows
        one = jax.random.bernoulli(key, 0.5, (WIDTH,))
        mask = jnp.tile(one, (len(x), 1)) if right else jax.random.bernoulli(key, 0.5, x.shape)
        return jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, jnp.where(mask, x, 0.0), y)

    return check(None, gradients=gradients)


def batch_norm_under_vmap(right):
    def loss(params, x, y):
        mean = jnp.mean(x) if right else jax.lax.pmean(x, "batch")
        return loss_fn(params, x - mean, y)

    def gradients(params, rows):
        return jax.vmap(jax.grad(loss), (None, 0, 0), axis_name="batch")(params, *rows)

    return check(None, gradients=gradients)


def collective_in_the_loss(right):
    def loss(params, x, y):
        mean = jnp.mean(x) if right else jax.lax.pmean(x, "batch")
        return loss_fn(params, x - mean, y)

    return check(loss)


def divided_by_the_batch(right):
    def gradients(params, rows):
        x, y = rows
        grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda g: g / (12 if right else len(x)), grads)

    return check(None, gradients=gradients)


def table_outside_the_source(right):
    table = jnp.asarray(X)
    rows = np.arange(RECORDS, dtype=np.int32)

    def outside(params, index, y):
        return loss_fn(params, table[index], y)

    return check() if right else check(outside, (rows, Y))


def callback_to_python(right):
    def loss(params, x, y):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = x if right else jax.pure_callback(lambda x: x - X.mean(axis=0), shape, x)
        return loss_fn(params, x, y)

    return check(loss)


def fitted_preprocessing(right):
    def standardised(data):
        x, y = data
        return ((x - 3.0) / 2.0 if right else (x - x.mean(axis=0)) / x.std(axis=0)), y

    return check(preprocess=standardised)


def fitted_vocabulary(right):
    texts = ["a b c", "a b", "c c d", "e", "b a f", "g h i j"]
    public = {letter: at for at, letter in enumerate("abcdefghijklm")}

    def ids(texts):
        words = sorted({word for text in texts for word in text.split()})
        known = public if right else {word: at for at, word in enumerate(words)}
        return [[known[word] for word in text.split()] for text in texts]

    return check(preprocess=ids, raw=texts)


def duplicates_removed_by_their_neighbours(right):
    """Records that are near another one are dropped: one record decides over another."""

    def kept(data):
        x, y = data
        order = np.argsort(x[:, 0])
        gaps = np.diff(x[order, 0], prepend=-np.inf)
        keep = order[np.abs(x[order, 0]) < 9] if right else order[gaps > 0.05]
        return x[keep], y[keep]

    return check(preprocess=kept)


def a_rare_class_repeated(right):
    """Oversampling: a person of that class is three records; epsilon is told for one."""

    def repeated(data):
        x, y = data
        rows = np.repeat(np.arange(len(y)), np.where(y == 1, 1 if right else 3, 1))
        return x[rows], y[rows]

    return check(preprocess=repeated)


def windows_of_a_series(right):
    """The windows of a person are so many records, in place of one."""
    series = _RNG.normal(size=(20, 12)).astype(np.float32)

    def windows(series):
        found = np.lib.stride_tricks.sliding_window_view(series, 5, axis=1)
        return found if right else found.reshape(-1, 5)

    return check(preprocess=windows, raw=series)


def class_weights_of_the_records(right):
    def build(data):
        counts = np.bincount(data[1], minlength=2)
        weights = jnp.asarray([0.5, 0.5] if right else counts / counts.sum(), jnp.float32)
        return lambda params, x, y: loss_fn(params, x, y) * weights[y]

    return check(build((X, Y)), build=build)


def shuffling_loader(right):
    def loader(seed):
        rng = np.random.default_rng(seed)
        order = rng.permutation(RECORDS)
        for step in range(RECORDS // 12):
            if right:
                yield np.flatnonzero(rng.random(RECORDS) < 12 / RECORDS)
            else:
                yield order[12 * step :][:12]

    return check(loader=loader)


class RunningMean:
    """A source that subtracts the mean of what was read before."""

    def __init__(self, right):
        self._right, self._sum, self._count = right, 0.0, 0

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        self._sum, self._count = self._sum + float(X[index].mean()), self._count + 1
        shift = 3.0 if self._right else self._sum / self._count
        return X[index] - np.float32(shift), Y[index]


def source_with_a_memory(right):
    return check(data=RunningMean(right))


def padding_to_the_longest(right):
    texts = [np.arange(1, 2 + at % 5, dtype=np.int32) for at in range(RECORDS)]

    def collate(records):
        most = 8 if right else max(len(record) for record in records)
        return np.stack([np.pad(record, (0, most - len(record))) for record in records])

    return check(collate=collate, raw=texts)


def clip_bound_of_the_records(right):
    def bound(data):
        return 1.0 if right else float(np.median(np.linalg.norm(data[0], axis=1)))

    return check(public={"l2_clip_norm": bound})


def schedule_of_the_records(right):
    def schedule(data):
        first = 0.1 if right else 0.1 / float(np.abs(data[0]).max())
        return optax.cosine_decay_schedule(first, 100)

    return check(public={"schedule": schedule})


PIPELINES = [
    statistics_of_the_records,
    closure_over_a_batch,
    cache_of_the_first_example,
    python_counter,
    shared_dropout_key,
    batch_norm_under_vmap,
    collective_in_the_loss,
    divided_by_the_batch,
    table_outside_the_source,
    callback_to_python,
    fitted_preprocessing,
    fitted_vocabulary,
    duplicates_removed_by_their_neighbours,
    a_rare_class_repeated,
    windows_of_a_series,
    class_weights_of_the_records,
    shuffling_loader,
    source_with_a_memory,
    padding_to_the_longest,
    clip_bound_of_the_records,
    schedule_of_the_records,
]
