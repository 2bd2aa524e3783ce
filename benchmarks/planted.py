"""Planted bugs: mechanisms charged for less than they release. All of this is wrong on purpose.

Each breaks one link of the real chain (clipping, noise, sampling, state or charge) and keeps the
others. `python -m benchmarks.auditing` and the tests ask the auditor to flag every one. Bugs that
only residuals show are in planted_subtle.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc
from jaxdp import optimizers as opt
from jaxdp.audit import Worlds, audit_event, audit_noise, training_run, two_worlds
from jaxdp.audit.scores import split_runs
from jaxdp.mechanism import Mechanism, with_rule
from jaxdp.optimizers.energy import DrawnEnergy
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.papers.pigdo import pigdo_as_published
from jaxdp.types import Summed

STEPS, NOISE = 4, 2.0
U = np.array([1.0, 0.0])


def quadratic(params, example):
    """A loss whose gradient is nearly the example, and bends from step to step."""
    linear = sum(jnp.vdot(params[k], example[k]) for k in params)
    return linear + 0.05 * sum(jnp.sum(jnp.square(params[k] * example[k])) for k in params)


def linear(params, example):
    return sum(jnp.vdot(params[k], example[k]) for k in params)


def worlds(rows_w, rows_b, loss=quadratic, scale=50.0):
    records = {
        "w": scale * jnp.asarray(rows_w, jnp.float32),
        "b": scale * jnp.asarray(rows_b, jnp.float32),
    }
    params = {k: jnp.full(v.shape[1], 0.1) for k, v in records.items()}
    return Worlds(loss, params, records)


# Three others that leave coordinate 0 of each leaf alone, then the record.
APART = worlds([[0, 1.0], [0, -0.4], [0, 0.7], [1, 0]], [[0, -0.6], [0, 0.3], [0, 0.1], [1, 0]])
# The record and its neighbour in the batch point in opposite directions.
OPPOSED = worlds([0 * U, 0 * U, -U, 5 * U], np.zeros((4, 2)), linear)
# The record touches every coordinate.
EVERYWHERE = worlds([[0, 0], [0, 0], [0, 0], [1, 1]], [[0, 0], [0, 0], [0, 0], [1, 1]], linear)
# One other record; neither has a gradient; only the size of the batch tells.
EMPTY = worlds(np.zeros((2, 60)), np.zeros((2, 60)), linear)
BROKEN = worlds([[0, 1.0], [0, -0.4], [0, 0.7], [np.inf, 0]], np.zeros((4, 2)), linear)

# Thirty others of one kind, whose shared moments the record changes for all of them.
CROWD = worlds([[0, 0.02]] * 30 + [[0, 20.0]], [[0, 0.02]] * 30 + [[0, 20.0]], linear)


def flat(noise=NOISE, size=4, sampling="full_batch", bound=1.0):
    return jaxdp.dp_sgd(
        noise_multiplier=noise,
        l2_clip_norm=bound,
        batch_size=size,
        dataset_size=4 if size < 4 else size,
        sampling=sampling,
    )


@dataclasses.dataclass(frozen=True)
class BrokenNoise(Mechanism):
    """A mechanism whose noise passes through ``wrong``: (sum, noisy mean, key, mechanism)."""

    wrong: Callable[..., Any] = None

    def privatize(self, **options):
        inner = super().privatize(**options)

        def update(updates, state, params=None, *, key, **extra):
            noisy, moved = inner.update(updates, state, params, key=key, **extra)
            return self.wrong(updates, noisy, key, self), moved

        return optax.GradientTransformationExtraArgs(inner.init, update)


@dataclasses.dataclass(frozen=True)
class ReusedKeys(Mechanism):
    """A mechanism that derives the noise of step t from the key of step ``source(t)`` <= t.

    The tags of the keys differ, as after a key derivation that forgets the step.
    """

    source: Callable[..., Any] = None

    def privatize(self, **options):
        inner = super().privatize(**options)

        def init(params):
            return inner.init(params), jnp.zeros((STEPS, 1, 2), jnp.uint32)

        def update(updates, state, params=None, *, key, **extra):
            kept = state[1].at[key.step].set(key.words)
            again = dataclasses.replace(key, words=kept[self.source(key.step)])
            noisy, moved = inner.update(updates, state[0], params, key=again, **extra)
            return noisy, (moved, kept)

        return optax.GradientTransformationExtraArgs(init, update)


def with_noise(wrong, mechanism=None):
    return _of_kind(BrokenNoise, mechanism or flat(), wrong=wrong)


def with_keys(source, mechanism):
    return _of_kind(ReusedKeys, mechanism, source=source)


def _of_kind(kind, base, **more):
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return opt.sgd(kind(**fields, **more), 0.1)


def with_gradient(gradient, mechanism=None):
    return dataclasses.replace(opt.sgd(mechanism or flat(), 0.1), gradient=gradient)


def one_leaf_bare(updates, noisy, key, mechanism):
    return {**noisy, "b": updates.value["b"] / mechanism.batch_size}


def one_key_for_two_leaves(updates, noisy, key, mechanism):
    same = jax.random.wrap_key_data(key.words[0])
    std = mechanism.noise_multiplier * updates.l2
    drawn = {k: v + std * jax.random.normal(same, v.shape) for k, v in updates.value.items()}
    return jax.tree.map(lambda v: v / mechanism.batch_size, drawn)


def one_key_for_two_steps(step):
    return 0 * step


def resumed_with_old_noise(step):
    """After step 2 the run resumes with the noise of step 0 and the parameters of step 2."""
    return step % 2


def summed_by(of, bound=1.0):
    """A gradient link from ``of(per-example gradients [m, ...], mask)`` to a sum."""

    def gradient(loss_fn):
        def summed(params, batch, mask):
            grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
            return Summed(of(grads, mask), bound)

        return linked(summed)

    return gradient


def linked(summed):
    """A function as a link of the private step, which asks what is trained: everything."""
    summed.trained = lambda params: params
    return summed


def masked(grads, mask):
    return jax.tree.map(lambda g: jnp.where(mask[:, None], g, 0.0), grads)


def shorten(tree, axes):
    squares = sum(jnp.sum(jnp.square(g), axis=axes, keepdims=True) for g in jax.tree.leaves(tree))
    factor = 1 / jnp.maximum(1.0, jnp.sqrt(squares))
    return jax.tree.map(lambda g: g * factor, tree)


def clipped_after_the_sum(grads, mask):
    total = jax.tree.map(lambda g: jnp.sum(g, 0), masked(grads, mask))
    return shorten(total, 0)


def clipped_in_pairs(grads, mask):
    pairs = jax.tree.map(lambda g: g.reshape(-1, 2, g.shape[1]).sum(1), masked(grads, mask))
    return jax.tree.map(lambda g: jnp.sum(g, 0), shorten(pairs, 1))


def unchecked(grads, mask):
    clipped = shorten(grads, 1)
    return jax.tree.map(lambda g: jnp.sum(g, 0), masked(clipped, mask))


def _declared(rule, bound):
    """A real clipped sum whose sensitivity is declared to be ``bound``."""

    def gradient(loss_fn):
        inner = jaxdp.clipped_grad(loss_fn, rule)

        def summed(params, batch, mask):
            total = inner(params, batch, mask)
            return Summed(total.value, bound)

        return linked(summed)

    return gradient


def divided_by_realised_size(loss_fn):
    inner = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))

    def summed(params, batch, mask):
        total = inner(params, batch, mask)
        size = len(mask) / jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        ratio = jax.tree.map(lambda v: jnp.full(v.shape, size), total.value)
        return Summed(total.value, total.l2, ratio)

    return linked(summed)


def _first_coordinate(params, example):
    return -params["w"][0] * example["w"][0]


def opened_energy(key, there, noise):
    """The loss of the records that are ``there``, clipped to 1e-3 each, with noise or without."""
    return DrawnEnergy(
        APART.records,
        jnp.arange(4)[None],
        there[None],
        jnp.asarray(1),
        jax.random.key_data(key),
        _first_coordinate,
        1e-3,
        1e-3,
        noise,
        4,
    )


def private_energy(noise=1.0):
    """A noisy loss on the training records; the mechanism of the gradient alone is charged."""

    def at(key, there):
        return opened_energy(key, there, noise)

    return at


def annealed(noise=40.0, make=opt.sa_dpsgd, **changes):
    return make(
        flat(noise), 5.0, jax.random.key(2), temperature=1e9, max_rejections=1000, **changes
    )


def adadp_published():
    return adadp_as_published(NOISE, 4, 4, 0.1, bound=1.0, sampling="full_batch")


def noisy_norm(released):
    return jnp.log(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(released["noisy"])))[
        None
    ]


@dataclasses.dataclass(frozen=True)
class Bug:
    """A broken algorithm, what it is charged, and the two worlds that show it."""

    algorithm: Callable[[], Any]
    event: acc.Event
    worlds: Worlds = APART
    steps: int = STEPS
    energy: Any = None
    score: Any = None

    def samples(self, count, seed):
        run = training_run(
            self.algorithm(), self.worlds, self.steps, energy=self.energy, score=self.score
        )
        return prepared(*two_worlds(run, count, seed=seed), self.steps)

    def verdict(self, count=3000, seed=0):
        return audit_event(*self.samples(count, seed), self.event)

    def noise(self, count=1500, seed=0):
        """The verdict on its noise, from ``count`` runs in each world."""
        return audit_noise(
            self.algorithm(), self.worlds, self.steps, runs=count, energy=self.energy, seed=seed
        )


def expand(released, steps=1):
    """Scores [n, k'] for threshold tests, from released numbers [n, k].

    Each number and its size, differences between neighbours and between steps (noise used twice
    subtracts away), whether anything is not a number, and the norm of everything.

    Args:
        released: one row for each run.
        steps: the number of steps whose numbers are in a row, equally many of each.
    """
    broken = ~np.isfinite(released)
    plain = np.where(broken, 0.0, released)
    blocks, width = [plain], plain.shape[1] // steps
    for lag in sorted({1, 2, 3, width, 2 * width, 3 * width} - {0}):
        if lag < plain.shape[1]:
            blocks.append(plain[:, lag:] - plain[:, :-lag])
    plain = np.concatenate(blocks, axis=1)
    logs = np.log10(np.abs(plain) + 1e-12)
    norm = np.linalg.norm(released * ~broken, axis=1, keepdims=True)
    return np.concatenate([plain, logs, norm, broken.any(axis=1, keepdims=True)], axis=1)


def discriminant(with_record, without, *, held_out=0.3, seed=0, keep=12):
    """The ``keep`` columns that separate best, and their linear discriminant, of both worlds.

    Fitted on the very part that ``jaxdp.audit.audit_scores`` sets aside for the same
    ``held_out`` and ``seed``, so the runs that are tested stay untouched.

    Args:
        with_record: scores [n, k].
        without: scores [n', k].
        held_out: fraction on which it is fitted.
        seed: of that part.
        keep: columns that are kept as they are.
    """
    (x, y), _ = split_runs(with_record, without, held_out, seed)
    middle, spread = np.mean(np.r_[x, y], 0), np.std(np.r_[x, y], 0) + 1e-12
    x, y = (x - middle) / spread, (y - middle) / spread
    rows = np.c_[np.r_[x, y], np.ones(len(x) + len(y))]
    labels = np.r_[np.ones(len(x)), -np.ones(len(y))]
    ridge = 1e-3 * len(rows) * np.eye(rows.shape[1])
    line = np.linalg.solve(rows.T @ rows + ridge, rows.T @ labels)[:-1]
    cuts = np.quantile(np.r_[x, y], (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98), axis=0)
    apart = np.max([np.abs(np.mean(x > t, 0) - np.mean(y > t, 0)) for t in cuts], axis=0)
    best = np.argsort(-apart)[:keep]
    scaled = ((scores - middle) / spread for scores in (with_record, without))
    first, second = (np.c_[s[:, best], s @ line] for s in scaled)
    return first, second


def prepared(with_record, without, steps, held_out=0.3):
    """Scores of everything released, the line fitted on the part that is set aside."""
    if with_record.shape[1] == 1:
        return with_record, without
    return discriminant(expand(with_record, steps), expand(without, steps), held_out=held_out)


FULL = flat().total(STEPS)
BUGS = {
    "noise calibrated to the mean": Bug(lambda: opt.sgd(flat(NOISE / 4), 0.1), FULL),
    "half the noise": Bug(lambda: opt.sgd(flat(NOISE / 2), 0.1), FULL),
    "one leaf without noise": Bug(lambda: with_noise(one_leaf_bare), FULL),
    "one key for two leaves": Bug(
        lambda: with_noise(one_key_for_two_leaves),
        FULL,
        dataclasses.replace(APART, records={**APART.records, "b": 0 * APART.records["b"]}),
    ),
    "one key for two steps": Bug(
        lambda: with_keys(one_key_for_two_steps, flat(size=2, sampling="poisson")),
        flat(size=2, sampling="poisson").total(STEPS),
    ),
    "clipping after the sum": Bug(
        lambda: with_gradient(summed_by(clipped_after_the_sum)), FULL, OPPOSED
    ),
    "clipping a pair together": Bug(
        lambda: with_gradient(summed_by(clipped_in_pairs)), FULL, OPPOSED
    ),
    "twice the bound": Bug(lambda: with_gradient(_declared(jaxdp.clip(2.0), 1.0)), FULL),
    "coordinate clip without its root": Bug(
        lambda: with_gradient(_declared(jaxdp.coordinate_box(1.0), 1.0)), FULL, EVERYWHERE
    ),
    "no sampling, charged as Poisson": Bug(
        lambda: opt.sgd(flat(), 0.1), flat(size=1, sampling="poisson").total(STEPS)
    ),
    "mean over the realised size": Bug(
        lambda: with_gradient(divided_by_realised_size, flat(size=4)), FULL, EMPTY, score=noisy_norm
    ),
    "a non-finite example passes": Bug(lambda: with_gradient(summed_by(unchecked)), FULL, BROKEN),
    "private energy not charged": Bug(annealed, flat(40.0).total(STEPS), energy=private_energy()),
    "AdaDp's raw moments": Bug(adadp_published, FULL),
    "PIGDO's raw moments": Bug(lambda: pigdo_as_published(flat(), 0.1), FULL),
    "noise reused after a resume": Bug(
        lambda: with_keys(resumed_with_old_noise, flat(size=2, sampling="poisson")),
        flat(size=2, sampling="poisson").total(STEPS),
    ),
    "one step charged of four": Bug(lambda: opt.sgd(flat(), 0.1), flat().total(1)),
}

CORRECT = {
    "dp-sgd": Bug(lambda: opt.sgd(flat(), 0.1), FULL),
    "dp-sgd, sampled": Bug(
        lambda: opt.sgd(flat(size=2, sampling="poisson"), 0.1),
        flat(size=2, sampling="poisson").total(STEPS),
    ),
    "dp-adam-bc": Bug(lambda: opt.dp_adam_bc(flat(), 0.1), FULL),
    "adadp": Bug(
        lambda: opt.adadp(
            with_rule(jaxdp.coordinate_box(1.0), NOISE, 4, 4, "full_batch"), 0.1, bound=1.0
        ),
        FULL,
        EVERYWHERE,
    ),
    "piadam": Bug(lambda: opt.piadam(flat(), 0.1), FULL),
}


@functools.cache
def many_verdicts(name, audits, count):
    """Verdicts on one big set of runs of a correct algorithm, cut into independent audits."""
    case = CORRECT[name]
    run = training_run(case.algorithm(), case.worlds, case.steps, energy=case.energy)
    inside, outside = two_worlds(run, audits * count, seed=11)
    found = []
    for i in range(audits):
        rows = slice(i * count, (i + 1) * count)
        found.append(audit_event(*prepared(inside[rows], outside[rows], case.steps), case.event))
    return found
