"""Membership attacks: can anything released tell two neighbouring data sets apart, beyond the event?

Many vmapped runs of a tiny model on a data set with and without one record; everything that a
algorithm releases goes into features; some of the runs choose an event S, the others test it: an
epsilon of P(S | with) and P(S | without) above that of the charged event breaks the claim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp.audit import audit_scores
from jaxdp.audit.worlds import with_acceptance_key
from jaxdp.training.step import PrivateStep
from tests.compiling import QUICK

DELTAS = (0.3, 0.1, 0.01)
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
    algorithm,
    *,
    steps,
    count=6000,
    prob=1.0,
    energy=None,
    broken_key=False,
    data=DATA,
    candidates=False,
):
    """Released transcripts [count, features] with the record (first) and without it.

    ``candidates``: with an energy, the noisy gradients of the rejected ones are seen as well.
    ``broken_key``: the first step's noise in every step; the library refuses it, so what it
    remembers of the last key is wiped out.
    """
    links = PrivateStep.of(algorithm, loss_fn)
    batch = 50.0 * jnp.concatenate(data)

    def one(words, member):
        noise_key, draw_key, judge, coin = jax.random.split(jax.random.wrap_key_data(words), 4)
        first, last = links.init(PARAMS)

        def body(carry, step):
            params, state = carry
            drawn = jax.random.bernoulli(jax.random.fold_in(draw_key, step), prob, (len(batch),))
            mask = drawn & ((jnp.arange(len(batch)) < len(OTHERS)) | member)
            context = links.clipped_by(state)
            summed = links.grad_fn(params, batch, mask, **context)
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

        begun = (
            first,
            with_acceptance_key(last, coin),
        )  # the annealer's chances, others for every run
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
    """Scores whose thresholds are tried: each number, its size, and changes between steps."""
    width = shown.shape[1] // steps
    blocks = [shown]
    for lag in (width, 3, 1):
        if lag < shown.shape[1]:
            blocks.append(shown[:, lag:] - shown[:, :-lag])
    plain = np.concatenate(blocks, axis=1)
    return np.concatenate([plain, np.abs(plain)], axis=1)


def broken(with_record, without, event, steps):
    """Whether an audit of what was released tells more apart than the event allows.

    One score is the line that best parts a fifth of the runs (LDA); of the others a half chooses
    score and threshold, and the rest is counted.
    """
    x, y = features(with_record, steps), features(without, steps)
    middle, spread = np.mean(np.r_[x, y], 0), np.std(np.r_[x, y], 0) + 1e-12
    x, y, fifth = (x - middle) / spread, (y - middle) / spread, len(x) // 5
    seen = np.c_[np.r_[x[:fifth], y[:fifth]], np.ones(2 * fifth)]
    ridge = 1e-3 * len(seen) * np.eye(seen.shape[1])
    line = np.linalg.solve(seen.T @ seen + ridge, seen.T @ np.repeat([1.0, -1.0], fifth))[:-1]
    inside, outside = (np.c_[part, part @ line][fifth:] for part in (x, y))
    return any(
        audit_scores(inside, outside, d, confidence=1 - LEVEL, held_out=0.5).epsilon
        > _allowed(event, d)
        for d in DELTAS
    )


def claim_breaks(algorithm, event, *, steps, **options):
    """Whether the attack beats ``event``."""
    return broken(*runs(algorithm, steps=steps, **options), event, steps)


@functools.cache
def _allowed(event, delta):
    return acc.epsilon(event, delta).upper
