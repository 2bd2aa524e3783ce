"""Norms, the mean's signal and advice, beside NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.audit.examined import Examined
from jaxdp.audit.gradient_numbers import (
    GradientNumbers,
    Mean,
    Travel,
    find_in_numbers,
    measure,
    norm_bins,
    norm_edges,
)
from jaxdp.clipping.rounding import MARGIN
from tests.mechanisms import sgd_of

C, M = 0.8, 60
BUDGET = {"epsilon": 3.0, "delta": 1e-5, "batch_size": 100, "dataset_size": 1_000}


def mechanism_of(clip_norm=C, steps=50, **more):
    return jaxdp.dp_sgd(**{**BUDGET, **more}, l2_clip_norm=clip_norm, steps=steps)


def test_numbers_are_those_of_numpy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(M, 20)).astype(np.float32), rng.integers(0, 3, M)
    x[:, :3] += 3 * np.eye(3)[y]
    x[0], x[1] = np.nan, 0.0
    params = {
        "a": jnp.asarray(rng.normal(size=(20, 16)) / 4, jnp.float32),
        "b": jnp.asarray(rng.normal(size=(16, 3)) / 4, jnp.float32),
    }

    def loss(params, x, y):
        logits = jnp.tanh(x @ params["a"]) @ params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    mechanism = mechanism_of()
    grad_fn = mechanism.clipped_grad(loss)
    group = np.where(np.arange(M) == M - 1, -1, y)  # the last is of none
    records = x, y.astype(np.int32)
    e = Examined(grad_fn, params, mechanism, optax.sgd(0.5), records, group)
    numbers = measure(e)

    # By hand.
    grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *map(jnp.asarray, records))
    a, b = (np.asarray(grads[k], np.float64).reshape(M, -1) for k in ("a", "b"))
    each = np.nan_to_num(np.concatenate([a, b], 1))
    norms = np.linalg.norm(each, axis=1)

    def mean_of(each, clip_norm):
        own = np.linalg.norm(each, axis=1)
        clipped = each * np.minimum(1, (1 - MARGIN) * clip_norm / np.maximum(own, 1e-30))[:, None]
        gram = clipped @ clipped.T
        square = (gram.sum() - np.trace(gram)) / (M * (M - 1)) / clip_norm**2
        return square, math.sqrt(np.trace(gram) / M) / clip_norm, clipped.mean(0)

    for group in range(3):
        own = np.histogram(norms[2:-1][y[2:-1] == group], numbers.edges)[0]
        np.testing.assert_array_equal(numbers.counts[group, 3:-1], own)
    np.testing.assert_array_equal(numbers.counts[:, 0], np.eye(3)[y[0]])
    np.testing.assert_array_equal(numbers.counts[:, 1], np.eye(3)[y[1]])
    assert numbers.share(numbers.clipped) == pytest.approx((norms[:-1] > C).mean())
    for q in (0.25, 0.5, 0.9):
        assert numbers.quantile(q) == pytest.approx(np.quantile(norms[1:], q), rel=0.1)
    pulls = [[n[y == k].sum() / n.sum() for k in range(3)] for n in (norms, np.minimum(norms, C))]
    np.testing.assert_allclose(numbers.pull(), pulls, rtol=0.05)

    tried = {"clip norm / 4": C / 4, "clip norm x 4": 4 * C}
    for name, clip_norm in {"": C, **tried}.items():
        mean = numbers.others[name] if name else numbers.mean
        np.testing.assert_allclose(mean[:3:2], mean_of(each, clip_norm)[:2], rtol=1e-2)
        assert (mean.clip_norm, mean.parameters) == pytest.approx((clip_norm, 368))
    last, lora = numbers.others["last layer alone"], numbers.others["LoRA of rank 4"]
    found = mean_of(np.nan_to_num(b), last.clip_norm)
    np.testing.assert_allclose(last[:3:2], found[:2], rtol=1e-2)
    assert (last.parameters, lora.parameters) == (48, 4 * 36)
    assert lora.square > 0

    slope = numbers.mean.norm * max(C, numbers.quantile(0.5))
    way = 0.5 * 50 * np.linalg.norm(mean_of(each, C)[2])
    assert numbers.travel[1:] == pytest.approx((slope * way, 10 * slope * way), rel=1e-2)
    wants_more = jaxdp.optimizers.sa_dpsgd(mechanism, 0.5, jax.random.key(0)).after_noise
    assert measure(dataclasses.replace(e, optimizer=wants_more)).travel is None

    # Signal over noise, by the multiplier: T B |m|^2 over sqrt(T) z C |g|.
    square, rms, _ = mean_of(each, C)
    signal = math.sqrt(50) * 100 * square / (mechanism.noise_multiplier * rms)
    assert numbers.mean.signal(numbers.noise) == pytest.approx(signal, rel=1e-2)
    assert numbers.choices["as it is"] == pytest.approx(
        (signal * rms / math.sqrt(square * 368), signal), rel=1e-2
    )
    assert numbers.choices["twice the batch: 200"][1] > signal
    assert "clip norm 0.8" in str(numbers)


def test_the_mean_is_right_beside_chance_and_noise():
    rng, size, noise = np.random.default_rng(0), 30, 2.0
    truth = np.zeros(size)
    truth[0] = 0.1

    def found():  # a Poisson sample of 400, with noise
        each = truth + rng.normal(size=(rng.poisson(400), size)) / 10
        total = each.sum(0) + rng.normal(size=size) * noise
        return Mean.of_sum(np.sum(total**2), np.sum(each**2), 400, 0.5, size, noise=noise)

    means = [found() for _ in range(400)]
    squares = np.array([mean.square for mean in means])
    assert squares.mean() == pytest.approx(0.01 / 0.25, rel=0.05)
    # The error of the noise, beside that of the sample.
    assert np.mean([mean.square_error for mean in means]) < squares.std()
    without = 2 * noise * 0.1 / 400 / 0.25
    assert means[0].square_error == pytest.approx(without, rel=0.2)


def test_bins():
    edges = norm_edges(2.0, doublings=1, per_doubling=1)
    np.testing.assert_allclose(edges, [1.0, 2.0, 4.0])
    norms = jnp.array([jnp.nan, jnp.inf, 0.0, 0.5, 1.0, 2.0, 3.9, 4.0])
    np.testing.assert_array_equal(norm_bins(norms, edges), [0, 0, 1, 2, 3, 4, 4, 5])


def numbers_of(
    norms, clip_norm=1.0, square=0.04, travel=None, mechanism=None, error=0.0, count_error=0.0
):
    """Numbers of made norms, by group."""
    edges = norm_edges(clip_norm)
    counts = [
        np.bincount(norm_bins(jnp.asarray(n), edges), minlength=len(edges) + 3) for n in norms
    ]
    mean = Mean(square, error, 1.0, clip_norm, 100)
    return GradientNumbers(
        mechanism or mechanism_of(clip_norm),
        edges,
        np.array(counts, np.float64),
        mean,
        travel=travel,
        count_error=count_error,
    )


ONES = np.ones(500)
RARE = [np.full(475, 0.5), np.full(25, 5.0)]
FEW_STEPS = Travel(loss=2.0, fall=0.01, tenfold=0.1)
SCALE_FREE = FEW_STEPS._replace(tenfold=0.01)
HEALTHY = {
    "as it should be": numbers_of([ONES]),
    "all clipped": numbers_of([ONES * 300]),
    "all clipped, by Adam": numbers_of([ONES * 300], travel=SCALE_FREE),
    "all clipped, at a rate that fits": numbers_of([ONES * 300], travel=FEW_STEPS._replace(fall=1.0)),
    "a rate too low without clipping, too": numbers_of([ONES], travel=FEW_STEPS),
    "a long clip norm, and signal to spare": numbers_of([ONES / 10], square=0.5),
    "weights that act": numbers_of(RARE, clip_norm=5.0),
    "ten groups": numbers_of([ONES * (1 + k / 5) for k in range(10)]),
    "a rare group without weight": numbers_of([np.ones(475), np.ones(25)]),
    "a rule without a norm": numbers_of([ONES / 100], square=0.01, mechanism=mechanism_of(None, rule=jaxdp.auto_s())),
    "no number of steps": numbers_of([ONES / 100], square=1e-9, mechanism=sgd_of(1.0, 1.0, 100, 1_000)),
    "too little noise to tell": numbers_of([ONES], square=0.0, error=1.0),
}  # fmt: skip
ILL = {
    "far too long a clip norm": (numbers_of([ONES / 50], square=1e-4), ["clip", "signal"]),
    "steps too short": (numbers_of([ONES * 300], travel=FEW_STEPS), ["clip"]),
    "weights defeated": (numbers_of(RARE, clip_norm=0.1), ["groups"]),
    "a group without gradients": (numbers_of([ONES, np.zeros(50)]), ["groups"]),
    "noise": (numbers_of([ONES], square=1e-4), ["signal"]),
}


def test_advice_where_it_is_due(subtests):
    for name, numbers in HEALTHY.items():
        with subtests.test(name):
            assert find_in_numbers(numbers) == []
    for name, (numbers, kinds) in ILL.items():
        with subtests.test(name):
            found = find_in_numbers(numbers)
            assert [each.kind for each in found] == kinds
            assert not any(each.certain for each in found)
            assert all(0.3 <= each.weight <= 1 and str(each) for each in found)
    words = str(find_in_numbers(ILL["weights defeated"][0])[0])
    assert "9.5 times as hard as another before clipping, and 1 times after it" in words
    assert "clip at 0.02" in find_in_numbers(ILL["far too long a clip norm"][0])[0].do


def test_counts_that_may_be_noise_alone_are_not_told():
    numbers = numbers_of([np.ones(400), np.full(5, 9.0)], count_error=10.0)
    assert numbers.by_group.tolist() == [400.0, 0.0]
    assert "?" in str(numbers).splitlines()[4]
    assert find_in_numbers(numbers) == []
