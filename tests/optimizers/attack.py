"""Membership attacks: can anything released tell two neighbouring data sets apart, beyond the event?

Many vmapped runs of a tiny model on a data set with and without one record; everything that a
algorithm releases goes into features; half of the runs choose an event S, the other half test it:
P(S | with) - e^ε P(S | without) beyond δ(ε) of the charged event breaks the claim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.auditing.worlds import with_coin
from tests.compiling import QUICK

EPSILONS = (0.0, 0.3, 1.0, 2.0, 4.0)
CUTS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
LEVEL = 1e-5  # how often a sound algorithm may be called broken, over all events tried

# One batch: the last record is the one in question; the others leave coordinate 2 alone, and the
# first coordinate to it. The loss bends, so that gradients change from step to step.
OTHERS = jnp.array([[0.0, 1.0, 0.0], [0.0, -0.4, 0.0], [0.0, 0.7, 0.0], [0.0, 0.2, 0.0]])
RECORD = jnp.array([[1.0, 0.0, 1.0]])
# A record whose gradient dwarfs the others' in their own coordinate, and points the other way.
DWARFED = jnp.tile(jnp.array([[0.0, -0.02, 0.0]]), (4, 1)), jnp.array([[0.0, 40.0, 0.0]])
PARAMS = {"w": jnp.full(3, 0.1)}


def loss_fn(params, example):
    return jnp.vdot(params["w"], example) + 0.05 * jnp.sum(jnp.square(params["w"] * example))


DATA = OTHERS, RECORD


def runs(
    algorithm, *, steps, count, prob=1.0, energy=None, broken_key=False, data=DATA, candidates=False
):
    """Released transcripts [count, features] with the record (first) and without it.

    ``candidates``: with an energy, the noisy gradients of the rejected ones are seen as well.
    ``broken_key``: the first step's noise in every step; the library refuses it, so what it
    remembers of the last key is wiped out.
    """
    links = algorithm.step(loss_fn)
    batch = 50.0 * jnp.concatenate(data)

    def one(words, member):
        noise_key, draw_key, judge, coin = jax.random.split(jax.random.wrap_key_data(words), 4)
        first, last = links.init(PARAMS)

        def body(carry, step):
            params, state = carry
            drawn = jax.random.bernoulli(jax.random.fold_in(draw_key, step), prob, (len(batch),))
            mask = drawn & ((jnp.arange(len(batch)) < len(OTHERS)) | member)
            context = links.clipped_by(state)
            summed, _ = links.grad_fn(params, batch, mask, **context)
            extra = {}
            if energy is not None:
                extra["energy"] = energy(jax.random.key_data(jax.random.fold_in(judge, step)), mask)
            mine = jax.random.fold_in(noise_key, 0 if broken_key else step)
            if broken_key:
                state = (state[0]._replace(last=jnp.zeros_like(state[0].last)), state[1])
            key = algorithm.mechanism.simulated_key(mine, step)
            params, new, noisy, _ = links.release(params, state, summed, key, **extra)
            shown = {"w": params["w"], "scale": context.get("scale", {})}
            if energy is None or candidates:  # without one all reach the parameters
                shown["noisy"] = noisy["w"]
            counts = algorithm.counts(new[1]) if algorithm.counts else {}
            shown["counts"] = {k: v.astype(jnp.float32) for k, v in counts.items()}
            return (params, new), shown

        begun = first, with_coin(last, coin)  # the annealer's chances, others for every run
        _, shown = jax.lax.scan(body, (PARAMS, begun), jnp.arange(steps))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(shown)])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def many(keys, member):
        return jax.vmap(lambda k: one(k, member))(keys)

    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(17), 2 * count))
    worlds = (keys[:count], True), (keys[count:], False)
    shown = tuple(np.asarray(many(each, jnp.asarray(there))) for each, there in worlds)
    # A refused key would show as NaN, which beats no claim.
    assert all(np.isfinite(part).all() for part in shown)
    return shown


def features(shown, steps):
    """Scores whose thresholds are tried: each number, its size, changes between steps, and LDA."""
    per_step = shown.reshape(len(shown), -1)
    width = per_step.shape[1] // steps
    blocks = [per_step]
    for lag in (width, 3, 1):
        if lag < per_step.shape[1]:
            blocks.append(per_step[:, lag:] - per_step[:, :-lag])
    plain = np.concatenate(blocks, axis=1)
    with np.errstate(divide="ignore"):
        logs = np.log10(np.abs(plain) + 1e-12)
    return np.concatenate([plain, np.abs(plain), logs], axis=1)


def broken(with_record, without, event, steps):
    """The worst certified excess over δ(ε) of the event, as (excess, ε, P, Q), or None."""
    half = len(with_record) // 2
    x, y = features(with_record, steps), features(without, steps)
    middle, spread = np.mean(np.r_[x, y], 0), np.std(np.r_[x, y], 0) + 1e-12
    x, y = (x - middle) / spread, (y - middle) / spread
    train = np.c_[np.r_[x[:half], y[:half]], np.ones(2 * half)]
    labels = np.r_[np.ones(half), -np.ones(half)]
    ridge = 1e-3 * len(train) * np.eye(train.shape[1])
    line = np.linalg.solve(train.T @ train + ridge, train.T @ labels)[:-1]
    scores = [np.c_[x, x @ line], np.c_[y, y @ line]]
    apart = np.max(
        [
            np.abs(np.mean(scores[0][:half] > t, 0) - np.mean(scores[1][:half] > t, 0))
            for t in np.quantile(np.r_[scores[0], scores[1]], CUTS, axis=0)
        ],
        axis=0,
    )
    order = np.argsort(-apart)
    cuts = ((i, np.quantile(each[:half, i], CUTS)) for i in order[:8] for each in scores)
    found, tried = None, [(i, float(t)) for i, values in cuts for t in values]
    for epsilon in EPSILONS:
        allowed = _allowed(event, epsilon)
        best = max(
            (_gain(scores, slice(None, half), t, side, swap, epsilon), t, side, swap)
            for t in tried
            for side in (1, -1)
            for swap in (0, 1)
        )
        _, chosen, side, swap = best
        p, q = _rates(scores, slice(half, None), chosen, side, swap)
        low = _lower(p, len(with_record) - half)
        high = _upper(q)
        excess = low - np.exp(epsilon) * high - allowed
        if excess > 0 and (found is None or excess > found[0]):
            found = (float(excess), epsilon, p, q[0] / q[1])
    return found


def claim_breaks(algorithm, event, *, steps, count=6000, **options):
    """Whether the attack beats ``event``."""
    return broken(*runs(algorithm, steps=steps, count=count, **options), event, steps)


@functools.cache
def _allowed(event, epsilon):
    return acc.delta(event, epsilon).upper


def _rates(scores, rows, chosen, side, swap):
    i, threshold = chosen
    hits = [np.sum(side * s[rows, i] >= side * threshold) for s in scores]
    sizes = [len(s[rows]) for s in scores]
    first, second = (1, 0) if swap else (0, 1)
    return hits[first] / sizes[first], (hits[second], sizes[second])


def _gain(scores, rows, chosen, side, swap, epsilon):
    p, (hits, size) = _rates(scores, rows, chosen, side, swap)
    return float(p - np.exp(epsilon) * hits / size)


def _lower(rate, size):
    hits = round(rate * size)
    return float(stats.beta.ppf(LEVEL, hits, size - hits + 1)) if hits else 0.0


def _upper(counted):
    hits, size = counted
    return float(stats.beta.ppf(1 - LEVEL, hits + 1, size - hits)) if hits < size else 1.0
