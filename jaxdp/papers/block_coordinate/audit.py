"""Audits of block coordinate descent: whole runs in two neighbouring worlds."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import audit_event, audit_scores, two_worlds
from jaxdp.audit.algorithms import EpsilonAudit
from jaxdp.audit.scores import roc_curve
from jaxdp.audit.worlds import Run
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, train_block
from jaxdp.papers.block_coordinate.network import Network
from jaxdp.papers.block_coordinate.published import claimed_for
from jaxdp.papers.block_coordinate.released import ReleasedBlocks, noise_share
from jaxdp.papers.block_coordinate.settings import BlockConfig, configured
from jaxdp.papers.block_coordinate.sweep import sums_given, sweep
from jaxdp.types import PyTree

Data = tuple[jax.Array, jax.Array]
FAR = 100.0  # a wanted output so far off that every gradient of the record is clipped
_TINY = 4  # records of a tiny world
_MOST_STEPS = 50
HIDDEN = (
    "a hidden run of one sweep on a tiny network, over four records in two batches, with the same "
    "noise, clip norms, epochs, step size and weight decay; its last iterates alone are seen"
)
RELEASED = (
    "sweeps on a tiny network, with the same noise, clip norms and sampling rate, without rescaling"
)


def hidden_run(
    algorithm: HiddenBlocks,
    data: Data,
    other: Data,
    *,
    partition: bool = True,
    score: Callable[[list[jax.Array]], jax.Array] | None = None,
) -> Run:
    """One whole run through the compiled loop of training, for ``jaxdp.audit.two_worlds``.

    The worlds are neighbours under replace-one: the last record, or ``other`` in its place. It
    returns what such a run releases: the last iterate of every block in every sweep.

    Args:
        algorithm: R2 or R3.
        data: (x [N, d_0], y [N, d_L]), N the declared size.
        other: (x [d_0], y [d_L]), what replaces the last record where ``member`` is False.
        partition: draw a secret partition anew for each run; False keeps the records' order, for
            an algorithm that is charged for the worst batch whatever the partition.
        score: from the released blocks, one [d_i, d_{i-1}] each, to features [k]; None returns
            every number.

    Raises:
        ValueError: the records are not as many as declared or do not fill their batches; a fixed
            order for an algorithm that is charged for the average over the partition.
    """
    x, y = (jnp.asarray(part, jnp.float32) for part in data)
    records, size = algorithm.dataset_size, algorithm.batch_size
    if x.shape[0] != records or y.shape[0] != records or records % size:
        raise ValueError(
            f"data must hold the declared {records} records in whole batches of {size}, got "
            f"{x.shape[0]} and {y.shape[0]}"
        )
    if algorithm.average and not partition:
        raise ValueError(
            "partition must be True for an algorithm charged for its average, got False"
        )
    returned = score or (lambda blocks: jnp.concatenate([jnp.ravel(w) for w in blocks]))
    start = algorithm.init(jax.random.key(0))

    def run(words: jax.Array, member: jax.Array) -> jax.Array:
        noise, draw = jax.random.split(jax.random.wrap_key_data(words))
        order = jax.random.permutation(draw, records) if partition else jnp.arange(records)

        def batches(part: jax.Array, replaced: jax.Array) -> PyTree:
            rows = part.at[-1].set(jnp.where(member, part[-1], jnp.asarray(replaced, part.dtype)))
            return rows[order].reshape(-1, size, part.shape[1])

        full = jnp.ones((records // size, size), bool)
        batched = batches(x, other[0]), batches(y, other[1]), full
        weights, released = start, []
        for number, block in algorithm.order:
            key = jax.random.fold_in(jax.random.fold_in(noise, number), block)
            weights = train_block(algorithm, block, weights, batched, key, number, None)
            released.append(weights[block])
        return returned(released)

    return run


def released_run(algorithm: ReleasedBlocks, data: Data, steps: int) -> Run:
    """One whole run of R1, for ``jaxdp.audit.two_worlds``; the worlds differ in the last record.

    It returns one number, the logarithm of the likelihood ratio of all releases: the record's
    contribution to every block is computed again from what was released, as an adversary can who
    knows the record and that all others contribute nothing.

    Args:
        algorithm: R1 without rescaling.
        data: (x [n, d_0], y [n, d_L]); all records but the last must contribute nothing, x = 0.
        steps: sweeps.

    Raises:
        ValueError: another record has an input, or the algorithm rescales.
    """
    x, y = (jnp.asarray(part, jnp.float32) for part in data)
    if np.any(np.asarray(x[:-1])) or algorithm.rescale is not None:
        raise ValueError(
            "data must hold zeros but for the last record, and the algorithm must not rescale, got "
            "others: the score would be no likelihood ratio"
        )
    network, rate = algorithm.network, algorithm.sampling.sampling_prob
    clips = jnp.asarray(algorithm.l2_clip_norms, jnp.float32)
    start, count = network.init(jax.random.key(0)), x.shape[0]
    levels = jnp.asarray([algorithm.multipliers(step) for step in range(steps)], jnp.float32)
    last = x[-1:], y[-1:], jnp.ones(1, bool)
    size = algorithm.step_size / algorithm.batch_size

    def run(words: jax.Array, member: jax.Array) -> jax.Array:
        there = (jnp.arange(count) < count - 1) | member

        def body(weights: PyTree, now: tuple[jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
            draw, noise = jax.random.split(now[0])
            stds = now[1] * clips * noise_share(algorithm.batch_size)
            new = sweep(
                network, algorithm.proximal, None, algorithm.step_size,
                float(algorithm.batch_size), weights, x, y,
                jax.random.bernoulli(draw, rate, (count,)) & there, clips, stds, noise,
            )  # fmt: skip
            sums = sums_given(network, weights, new, *last, clips)
            noisy = [(old - moved) / size for old, moved in zip(weights, new, strict=True)]
            ratio = _log_ratio(noisy, sums, stds)
            return new, jnp.logaddexp(jnp.log1p(-rate), jnp.log(rate) + ratio)

        keys = jax.random.split(jax.random.wrap_key_data(words), steps)
        return jnp.sum(jax.lax.scan(body, start, (keys, levels))[1])[None]

    return run


def _log_ratio(noisy: list[jax.Array], sums: list[jax.Array], stds: jax.Array) -> jax.Array:
    """log N(noisy; sums, stds^2) - log N(noisy; 0, stds^2), over all blocks."""
    each = (
        (jnp.sum(seen * own) - 0.5 * jnp.sum(own * own)) / std**2
        for seen, own, std in zip(noisy, sums, stds, strict=True)
    )
    return jnp.asarray(sum(each))


def tiny(algorithm: ReleasedBlocks | HiddenBlocks) -> ReleasedBlocks | HiddenBlocks:
    """The same noise, clip norms, rate and losses on four records and a network of a few weights.

    The blocks are as many as the algorithm's; of a convolution there is none, the others are
    clipped alike. A hidden run keeps its step size, epochs and weight decay, over two batches.
    """
    old = algorithm.network
    network = Network((2, *(2,) * (old.blocks - 1), 2), old.activation_bound, old.gamma, old.loss)
    if isinstance(algorithm, HiddenBlocks):
        return dataclasses.replace(
            algorithm, network=network, dataset_size=_TINY, batch_size=2, sweeps=1
        )
    size = max(1, round(1 / algorithm.sampling.sampling_prob))
    # A large step reveals nothing more: the weights before it are known.
    return dataclasses.replace(
        algorithm, network=network, batch_size=1, dataset_size=size, rescale=None,
        proximal=dataclasses.replace(algorithm.proximal, spectral_radius=None, sparsity=0.0,
                                     weight_decay=0.0),
    )  # fmt: skip


def audit_blocks(
    algorithm: ReleasedBlocks | HiddenBlocks,
    steps: int,
    delta: float,
    *,
    runs: int = 2_000,
    confidence: float = 0.95,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> EpsilonAudit:
    """Audits R1, R2 or R3 by ``2 * runs`` trainings of a tiny network by its own compiled sweep.

    Formal guarantee: the audited number exceeds the true epsilon of what was run with probability
    at most 1 - ``confidence``: of R1 under add-or-remove-one, of R2 and R3 under replace-one.

    Args:
        algorithm: audited; ``tiny`` says what is kept of it.
        steps: sweeps of R1, at most 50; not read for a hidden run.
        delta: of the epsilons.
        runs: in each world.
        confidence: of the audited number.
        seed: of the runs; None takes one from the operating system.
        progress: called with the number of runs done.
    """
    steps = min(arguments.integer("steps", steps, least=1), _MOST_STEPS)
    small, hidden = tiny(algorithm), isinstance(algorithm, HiddenBlocks)
    event: acc.Event
    if isinstance(small, HiddenBlocks):
        steps, event, relation = 1, small.event(), acc.Relation.REPLACE_ONE
        run = hidden_run(small, *_replaced(small), score=_first_weights)
        words = "a record of another class in its place"
    else:
        event, relation = small.events(steps), acc.Relation.ADD_OR_REMOVE_ONE
        run = released_run(small, _alone(small), steps)
        words = "a record whose wanted output is far off, alone among records of zeros"
    inside, outside = two_worlds(run, runs, seed=seed, progress=progress)
    found = audit_scores(inside, outside, delta, confidence=confidence)
    assert found.rule is not None
    column = found.rule.sign * np.c_[inside[:, found.rule.column], outside[:, found.rule.column]]
    verdict = audit_event(inside, outside, event, confidence=confidence, relation=relation)
    claim = claimed_for(small, steps, delta) if hidden else None
    return EpsilonAudit(
        steps=steps,
        runs=2 * runs,
        delta=delta,
        confidence=confidence,
        claim=None if claim is None else (claim.name, claim.value),
        proven=acc.epsilon(event, delta, relation).upper,
        audited=found,
        p_value=verdict.p_value,
        broken=verdict.refuted,
        event=event,
        adversary=words,
        roc=roc_curve(column[:, 0], column[:, 1]),
        what=HIDDEN if hidden else RELEASED,
    )


def audit_configured(
    config: Mapping[str, Any],
    steps: int | None,
    delta: float | None,
    runs: int,
    confidence: float,
    seed: int | None,
    progress: Callable[[int], None],
) -> EpsilonAudit:
    """The audit of a run's algorithm, or of one given by its public numbers, on a tiny network.

    Args:
        config: of a finished run; or "algorithm", "settings" and public numbers, None for the
            usual ones.
        steps: sweeps of R1; None takes the run's, at most 50, or 10.
        delta: None takes the run's, or 1e-5.
        runs: in each world.
        confidence: of the bound.
        seed: of the runs, or None.
        progress: called with the number of runs done.
    """
    if "epsilon" in config:
        known = BlockConfig.from_dict(config)
        steps = known.steps if steps is None else steps
    else:
        given = {name: value for name, value in config.items() if value is not None}
        for name in ("sampling", "dataset_size", "batch_size"):
            if name in given:
                raise ValueError(
                    f"{name} must not be given with algorithm {config['algorithm']}, whose audit "
                    f"has its own four records; got {given[name]!r}"
                )
        values = {"noise_multiplier": 1.0, **given, "batch_size": 8, "dataset_size": 8}
        values.pop("algorithm")
        known = configured(config["algorithm"], "digits", values)
        steps = 10 if steps is None else steps
    return audit_blocks(
        known.blocks(),
        steps,
        known.delta if delta is None else delta,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )


def _alone(small: ReleasedBlocks) -> Data:
    """Three records of zeros, and one with an input of the largest length."""
    bound, far = small.network.activation_bound, FAR * small.network.activation_bound
    x = np.zeros((_TINY, 2), np.float32)
    x[-1, 0] = bound
    y = np.zeros((_TINY, 2), np.float32)
    y[-1, 0] = far
    return jnp.asarray(x), jnp.asarray(y)


def _replaced(small: HiddenBlocks) -> tuple[Data, Data]:
    """Records without the first feature, and one with nothing else, of either class."""
    bound = small.network.activation_bound
    x = np.zeros((_TINY, 2), np.float32)
    x[:-1, 1], x[-1, 0] = np.array([0.5, -0.5, 0.25]) * bound, bound
    y = np.zeros((_TINY, 2), np.float32)
    y[:-1, 0], y[-1, 0] = (0.3, -0.3, 0.1), FAR * bound
    return (jnp.asarray(x), jnp.asarray(y)), (jnp.asarray(x[-1]), jnp.asarray(-y[-1]))


def _first_weights(released: list[jax.Array]) -> jax.Array:
    """The weights of the first input, of one class less those of another, in every block."""
    return jnp.stack([w[0, 0] - w[-1, 0] if len(w) > 1 else w[0, 0] for w in released])
