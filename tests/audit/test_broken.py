"""Mistakes by which records add nothing or parameters learn nothing; nothing on healthy programs."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.audit.broken import find_broken
from jaxdp.audit.examined import Examined

N, D = 48, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, 4, N).astype(np.int32)
T = (X[:, 0] > 0).astype(np.float32)
HOLES = np.where(np.arange(N) % 2 == 0, np.nan, X[:, 0]).astype(np.float32)
MASK = (np.arange(N) % 4 != 0).astype(np.float32)[:, None] * np.ones((N, D), np.float32)
NET = {
    "a": (0.3 * RNG.normal(size=(D, 16))).astype(np.float32),
    "b": np.zeros(16, np.float32),
    "c": (0.3 * RNG.normal(size=(16, 4))).astype(np.float32),
}
MECHANISM = jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=8, dataset_size=N)
W = np.full(D, 0.1, np.float32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def examined(loss, data, params, optimizer=None, mechanism=MECHANISM, **options):
    params = jax.tree.map(jnp.asarray, params)
    grad_fn = mechanism.clipped_grad(loss, **options)
    return Examined(grad_fn, params, mechanism, optimizer, data)


def logits(p, x, act=jax.nn.relu):
    return act(x @ p["a"] + p["b"]) @ p["c"]


def net(p, x, y):
    return cross_entropy(logits(p, x), y)


def missing(w, x, y):
    return jnp.where(jnp.isnan(y), 0.0, (x @ w - y) ** 2)  # here


def of_a_batch(w, x, y):
    z = (x @ w)[None]
    return ((z[0] - y) / jnp.std(z)) ** 2  # here


def masked_mean(w, x, m):
    return (m * (x * w) ** 2).sum() / m.sum()  # here


def norm_at_zero(w, x, y):
    return jnp.linalg.norm((x - x) * w) + (x @ w - y) ** 2  # here


def log_of_zero(w, x, y):
    p = jax.nn.sigmoid(500 * jnp.sign(x[0]) * (1 + jnp.abs(x @ w)))
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))  # here


def in_a_loop(w, x, m):
    def body(carry, row):
        value, mask = row
        return carry + value / mask * w[0], None  # here

    return jax.lax.scan(body, x[0] * w[1], (x, m))[0]


def contrastive(w, x, y):
    u, v = (x * w)[None], (x * w + y)[None]
    return cross_entropy(u @ v.T, jnp.arange(1)).mean()  # here


def stopped(p, x, y):
    hidden = jax.nn.relu(x @ jax.lax.stop_gradient(p["a"]) + p["b"])  # here
    return cross_entropy(hidden @ p["c"], y)


def softmaxed(p, x, y):
    q = jax.nn.softmax(logits(p, x)[None])[0]  # here
    return cross_entropy(q, y)


def sigmoided(w, x, y):
    q = jax.nn.sigmoid(x @ w)  # here
    return optax.sigmoid_binary_cross_entropy(q, y)


def half(w, x, y):
    z = (x.astype(jnp.float16) * 300) @ w.astype(jnp.float16)
    return jnp.square(z * 200).astype(jnp.float32) - y  # here


def scaled(w, x, y):
    return 1024.0 * ((x @ w - y) / 8) ** 2  # here


OFF = NET | {"b": np.full(16, -20.0, np.float32)}
# The loss, its records, its parameters; the kind, and a word of what is said.
ILL = {
    "features NaN": (lambda w, x, y: (x @ w - y) ** 2, (X * np.nan, T), W, "nonfinite", "in [0]"),
    "labels NaN under jnp.where": (missing, (X, HOLES), W, "nonfinite", "in [1]"),
    "deviation of a batch of one": (of_a_batch, (X, T), W, "nonfinite", "of one entry"),
    "mean over no token": (masked_mean, (X, MASK), W, "nonfinite", "division by 0"),
    "norm at 0": (norm_at_zero, (X, T), W, "nonfinite", "square root"),
    "log(0)": (log_of_zero, (X, T), W, "nonfinite", "logarithm"),
    "division in a loop": (in_a_loop, (X, MASK), W, "nonfinite", "division by 0"),
    "half precision overflows": (half, (X, T), W, "precision", "float16"),
    "parameters NaN": (net, (X, Y), NET | {"b": np.full(16, np.nan)}, "nonfinite", "['b']"),
    "contrastive": (contrastive, (X, T), W, "zero", "softmax over one entry"),
    "one logit": (
        lambda w, x, y: cross_entropy((x @ w)[None], 0 * y), (X, Y), W, "zero", "over one entry",
    ),
    "a target below a relu": (
        lambda w, x, y: (jax.nn.relu(x @ w) - y) ** 2, (X, T), W, "zero", "loss is not small",
    ),
    "rounded": (lambda w, x, y: (jnp.round(x @ w) - y) ** 2, (X, T), W, "zero", "round lets no"),
    "both factors 0": (
        lambda p, x, y: (x @ p["a"] @ p["c"]).sum() ** 1,
        (X, Y), {"a": 0 * NET["a"], "c": 0 * NET["c"]}, "zero", "and not nearby",
    ),
    "stop_gradient": (stopped, (X, Y), NET, "dead", "['a']"),
    "forgotten": (net, (X, Y), NET | {"d": W}, "dead", "does not use it"),
    "units off": (net, (X, Y), OFF, "units", "most units"),
    "tanh at its bound": (
        lambda p, x, y: cross_entropy(logits(p, x, jnp.tanh), y),
        (X, Y), NET | {"b": np.full(16, 30.0, np.float32)}, "units", "at their bound",
    ),
    "two softmaxes": (softmaxed, (X, Y), NET, "softmax", "result of a softmax"),
    "two sigmoids": (sigmoided, (X, T), W, "softmax", "result of a sigmoid"),
    "loss scale": (scaled, (X, T), W, "loss scale", "multiplied by 1024"),
    "labels from 1": (net, (X, Y + 1), NET, "labels", "an index"),
    "labels from 1, by []": (
        lambda p, x, y: -jax.nn.log_softmax(logits(p, x))[y], (X, Y + 1), NET, "labels", "larger",
    ),
    "labels from 1, one-hot": (
        lambda p, x, y: optax.softmax_cross_entropy(logits(p, x), jax.nn.one_hot(y, 4)),
        (X, Y + 1), NET, "labels", "larger",
    ),
    "bytes": (net, (np.abs(X * 100).astype(np.uint8), Y), NET, "inputs", "far above 1"),
}  # fmt: skip


def cast(loss):
    """The loss of records that are no floating-point numbers."""
    return lambda p, x, y: loss(p, x.astype(jnp.float32), y)


@pytest.mark.parametrize("name", ILL)
def test_a_mistake_is_named_at_its_line(name):
    loss, data, params, kind, words = ILL[name]
    loss = cast(loss) if data[0].dtype == np.uint8 else loss
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = find_broken(examined(loss, data, params))
    assert [each.kind for each in found][:1] == [kind], found
    assert words in found[0].what
    assert found[0].certain == (kind != "inputs" and "not small" not in words)
    lines, start = inspect.getsourcelines(loss)
    for at, line in enumerate(lines, start):
        if line.endswith("# here\n"):
            assert found[0].where == f"audit/test_broken.py:{at}"


LORA = {"a": NET["a"], "c": 0 * NET["c"], "b": NET["b"]}
HEALTHY = {
    "net": (net, (X, Y), NET),
    "hinge": (lambda w, x, y: jax.nn.relu(1 - jnp.sign(x[0]) * (x @ w)), (X, Y), 3 * W),
    "LoRA at zero": (net, (X, Y), LORA),
    "missing values": (
        lambda w, x, y: jnp.where(jnp.isnan(y), 0.0, x @ w - jnp.where(jnp.isnan(y), 0.0, y)) ** 2,
        (X, HOLES), W,
    ),
    "a mask of -inf": (
        lambda w, x, m: jax.nn.logsumexp(jnp.where(m + x > 0, x * w, -jnp.inf)), (X, MASK + 9), W,
    ),
    "attention and a gate": (
        lambda p, x, y: cross_entropy(
            (jax.nn.softmax(x @ p["a"]) * jax.nn.sigmoid(x @ p["a"])) @ p["c"] + p["b"][:4], y
        ),
        (X, Y), NET,
    ),
    "log_softmax twice": (
        lambda p, x, y: cross_entropy(jax.nn.log_softmax(logits(p, x)), y), (X, Y), NET,
    ),
    "labels of -1 are left out": (
        lambda p, x, y: optax.softmax_cross_entropy(logits(p, x), jax.nn.one_hot(y, 4)),
        (X, np.where(Y == 0, -1, Y)), NET,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_has_no_finding(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert find_broken(examined(*HEALTHY[name])) == []


def labelled(fast, slow):
    def labels(params):
        return {name: "slow" if name == "a" else "fast" for name in params}

    return optax.partition({"fast": fast, "slow": slow}, labels)


mask = {"a": False, "b": True, "c": True}
warm = optax.linear_schedule(0.0, 0.1, 10)
later = optax.piecewise_constant_schedule(0.0, {30: 1.0})
OPTIMIZERS = {
    "a rate of 0": (optax.sgd(0.0), "dead", "any parameter"),
    "one leaf is set to zero": (labelled(optax.sgd(0.1), optax.set_to_zero()), "dead", "['a']"),
    "a mask lets the gradient pass": (optax.masked(optax.sgd(0.1), mask), "rate", "['a']"),
    "no rate in the chain": (optax.scale_by_adam(), "rate", "['a'], ['b'], ['c']"),
    "warmup": (optax.adam(warm), None, ""),
    "added up over steps": (optax.MultiSteps(optax.sgd(0.1), 4), None, ""),
    "decay": (optax.adamw(1e-3, weight_decay=0.1), None, ""),
    "thawed later": (
        labelled(optax.sgd(0.1), optax.sgd(optax.join_schedules([lambda _: 0.0, warm], [100]))),
        None, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_changes_nothing_or_climbs_is_named(name):
    optimizer, kind, words = OPTIMIZERS[name]
    mechanism = dataclasses.replace(MECHANISM, steps=400)
    with jax.numpy_dtype_promotion("standard"):  # optax's own
        found = find_broken(examined(net, (X, Y), NET, optimizer, mechanism))
    assert [each.kind for each in found] == ([kind] if kind else [])
    assert all(words in each.what for each in found)


def test_parameters_in_half_precision_lose_their_updates():
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf + 1, jnp.bfloat16), NET)
    loss = lambda p, x, y: net(jax.tree.map(lambda v: v.astype(jnp.float32), p), x, y)  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):  # optax's own
        found, *rest = find_broken(examined(loss, (X, Y), params, optax.adam(1e-4)))
        assert (found.kind, "rounded away" in found.what) == ("precision", True)
        assert find_broken(examined(loss, (X, Y), params, optax.adam(0.1))) == rest


def test_a_delta_beyond_one_in_n_is_named_from_public_numbers():
    for delta, kinds in ((0.05, ["delta"]), (1e-5, [])):
        mechanism = dataclasses.replace(MECHANISM, delta=delta)
        found = find_broken(examined(net, (X, Y), NET, mechanism=mechanism))
        assert [each.kind for each in found] == kinds


def test_check_counts_the_records_that_add_nothing():
    """Cases 01 and 02: it said "nothing broken"."""
    found = jaxdp.check(missing, W, (X, HOLES), MECHANISM)
    (broken,) = found.broken
    assert broken.count == (N // 2, N)
    assert f"(in {N // 2} of the {N} records looked at)" in str(found)
    (zero,) = jaxdp.check(contrastive, W, (X, T), MECHANISM).broken
    assert (zero.kind, zero.count) == ("zero", (N, N))
