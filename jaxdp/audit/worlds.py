"""Thousands of training runs at once, with one record and without it."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import (
    CyclicAllocation,
    CyclicPoisson,
    FixedOrder,
    FullBatch,
    Poisson,
    RandomAllocation,
)
from jaxdp.training.step import PrivateStep
from jaxdp.types import ExtraArgument, PyTree

# From (uint32 [2], bool scalar: whether the record is there) to features [k] of what was released.
Run = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Worlds:
    """Two neighbouring data sets, and the model that is trained on them.

    Attributes:
        loss_fn: ``(params, example) -> scalar``.
        params: pytree; the initial parameters.
        records: pytree [n, ...]; the **last** one is in one of the worlds alone.
    """

    loss_fn: Callable[..., jax.Array]
    params: PyTree
    records: PyTree

    @property
    def count(self) -> int:
        """The number of records in the larger world."""
        return len(jax.tree.leaves(self.records)[0])


def training_run(
    algorithm: Algorithm,
    worlds: Worlds,
    steps: int,
    *,
    score: Callable[[PyTree], jax.Array] | None = None,
    energy: Callable[[jax.Array, jax.Array], ExtraArgument] | None = None,
    trusted: bool = False,
) -> Run:
    """A function that trains once with the algorithm's own clipping, noise and optax chain.

    It returns features of what the run releases. Draws follow the mechanism's sampling, made on the
    device by float32 uniforms, for a few records.

    Args:
        algorithm: audited; its chain's links are used as they are.
        worlds: the data and the model.
        steps: the steps of the run.
        score: from what is released, a pytree of leaves [steps, ...], to features [k]: every
            iterate, "params", every noisy gradient, "noisy", the public "scale" and the "counts";
            None returns every number.
        energy: for annealed algorithms, from (key of the step, bool [n]: the records of this world)
            to the energy of that step.
        trusted: hand ``score`` what no run releases, for an auditor who computes the sums again: of
            every step the "params" that entered it, the "mask" of its draw, the "context" of its
            clipping, the sensitivity "l2" that the sum carried and the "noisy" gradient.

    Returns:
        ``(words, member) -> features [k]``: ``words`` is the key of the run, uint32 [2]; ``member``
        is True where the record takes part.
    """
    steps = arguments.integer("steps", steps, least=1)
    links = PrivateStep.of(algorithm, worlds.loss_fn)
    draw = _draw_function(algorithm, worlds.count)

    def run(words: jax.Array, member: jax.Array) -> jax.Array:
        """Trains once; returns the features [k] of what was released."""
        noise_key, draw_key, judge = jax.random.split(jax.random.wrap_key_data(words), 3)
        first, last = links.init(worlds.params)
        begun = first, with_acceptance_key(last, judge)

        def body(carry: tuple[PyTree, PyTree], step: jax.Array) -> tuple[PyTree, PyTree]:
            """One private step: draw, clipped sum, noise, update."""
            # The record of the other world keeps its place: absent, it is masked in every draw.
            params, state = carry
            there = (jnp.arange(worlds.count) < worlds.count - 1) | member
            mine, other = jax.random.split(jax.random.fold_in(draw_key, step))
            mask = draw(draw_key, mine, step) & there

            # The step of training itself, with a key that nothing is charged for.
            context = links.clipped_by(state)
            summed = links.grad_fn(params, worlds.records, mask, **context)
            extra = {} if energy is None else {"energy": energy(other, there)}
            of_step = functools.partial(jax.random.fold_in, noise_key)
            key = algorithm.mechanism.simulated_key(of_step(step), step, of_step(step - 1))
            moved, state, noisy, _ = links.release(params, state, summed, key, **extra)

            # What a run releases, or what only a trusted auditor may see.
            shown = {"params": moved, "noisy": noisy if energy is None else {}}
            if trusted:
                l2 = jnp.asarray(summed.l2, jnp.float32)
                shown = {
                    "params": params,
                    "noisy": noisy,
                    "mask": mask,
                    "context": context,
                    "l2": l2,
                }
            else:
                counts = algorithm.counts(state[1]) if algorithm.counts else {}
                shown["counts"] = {k: v.astype(jnp.float32) for k, v in counts.items()}
                shown["scale"] = context.get("scale", {})
            return (moved, state), shown

        _, shown = jax.lax.scan(body, (worlds.params, begun), jnp.arange(steps))
        return (score or flatten_by_step)(shown)

    return run


def flatten_by_step(released: PyTree) -> jax.Array:
    """All released numbers of leaves [steps, ...], [k]: those of the first step come first."""
    leaves = jax.tree.leaves(released)
    return jnp.ravel(jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1))


def with_acceptance_key(state: PyTree, key: jax.Array) -> PyTree:
    """An annealer's state with the acceptance key of this run; other states as they are."""
    if "coin" not in getattr(state, "_fields", ()):
        return state
    return state._replace(coin=jax.random.key_data(key))


def _draw_function(
    algorithm: Algorithm, count: int
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """A function from (key of the run, key of the step, step) to the records drawn, bool [n]."""
    sampling = algorithm.mechanism.sampling
    # The last record is among those of the first step, where it tells most.
    last = count - 1 - jnp.arange(count)
    if isinstance(sampling, RandomAllocation | CyclicAllocation):
        if isinstance(sampling, RandomAllocation):
            groups, size, often = 1, sampling.steps_per_epoch, sampling.participations
        else:
            groups, size, often = sampling.bands, sampling.slots, 1

        def allocated(run: jax.Array, own: jax.Array, step: jax.Array) -> jax.Array:
            """The records that random allocation puts into this step of a group, bool [n]."""
            epochs = jax.random.fold_in(run, jnp.uint32(2**32 - 1))  # no step's own key
            key = jax.random.fold_in(epochs, step // (groups * size))
            ranks = jnp.argsort(jnp.argsort(jax.random.uniform(key, (count, size))))
            drawn = ranks[:, step // groups % size] < often
            return drawn & (jnp.mod(last, groups) == jnp.mod(step, groups))

        return allocated
    if isinstance(sampling, CyclicPoisson):
        turns, rate = sampling.bands, sampling.sampling_prob
    elif isinstance(sampling, FixedOrder):
        turns, rate = sampling.separation(algorithm.mechanism.dataset_size), 1.0
    elif isinstance(sampling, Poisson | FullBatch):
        turns, rate = 1, sampling.sampling_prob if isinstance(sampling, Poisson) else 1.0
    else:
        raise ValueError(
            "algorithm must sample by Poisson or random allocation (also cyclic), in a fixed order "
            "or take the full batch: "
            f"otherwise the two worlds differ in more than one record, got {sampling!r}"
        )
    turn = jnp.mod(last, turns)

    def in_turn(run: jax.Array, own: jax.Array, step: jax.Array) -> jax.Array:
        """The records of the group whose turn it is, each with the sampling rate, bool [n]."""
        return (turn == jnp.mod(step, turns)) & jax.random.bernoulli(own, rate, (count,))

    return in_turn


def two_worlds(
    run: Run,
    count: int,
    *,
    seed: int | None = None,
    chunk: int = 5_000,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Features [count, k] of runs with the record, and as many without it; all keys differ.

    Args:
        run: from ``training_run``; compiled once, and run under ``jax.vmap``.
        count: the number of runs in each world.
        seed: of the runs; None takes one from the operating system.
        chunk: the number of runs at once: memory against speed.
        progress: called with the number of runs done, of 2 · ``count``.
    """
    count = arguments.integer("count", count, least=1)
    chunk = min(arguments.integer("chunk", chunk, least=1), count)
    if seed is not None:
        seed = arguments.integer("seed", seed, least=0)
    entropy = np.random.SeedSequence(seed).generate_state(1)[0]

    # Optimising a tiny program takes longer than running it.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def many(first: jax.Array, member: jax.Array) -> jax.Array:
        """Features [chunk, k] of the runs from number ``first`` on, in one world."""
        root = jax.random.fold_in(jax.random.key(entropy), member.astype(jnp.int32))

        def one(index: jax.Array) -> jax.Array:
            """The features of one run, by a key of its own."""
            return run(jax.random.key_data(jax.random.fold_in(root, index)), member)

        return jax.vmap(one)(first + jnp.arange(chunk))

    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for world, rows in parts.items():
        for first in range(0, count, chunk):
            rows.append(np.asarray(many(jnp.asarray(first), jnp.asarray(world))))
            if progress is not None:
                progress(min(first + chunk, count) + (0 if world else count))
    return tuple(np.concatenate(parts[world])[:count] for world in (True, False))  # type: ignore
