"""Adversaries: canary gradients, the worst of several records, a black-box attacker."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp

from jaxdp import arguments
from jaxdp.audit.worlds import Worlds, training_run, two_worlds
from jaxdp.clipping.captured import declaring
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import CyclicPoisson
from jaxdp.sampling.rules import rate
from jaxdp.types import PyTree

LOG_RATIO = 1  # the column of the log-likelihood ratio in the scores of a canary
_FAR = 1e3  # times the direction: far beyond any clipping norm in use here


@dataclasses.dataclass(frozen=True, eq=False)
class Canary:
    """A record whose gradient is constant: along one direction, whatever the parameters.

    Attributes:
        direction: pytree shaped like the parameters, of norm 1.
        words: a description for the report.
        alone: True if no other record has a gradient along it.
    """

    direction: PyTree
    words: str
    alone: bool = False

    def worlds(self, loss_fn: Callable[..., jax.Array], params: PyTree, records: PyTree) -> Worlds:
        """Two data sets: the records [n, ...], and these with the canary as record n + 1.

        The auditor inserts it: no data set holds a record with such a gradient.
        """
        count = len(jax.tree.leaves(records)[0])
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), records)

        def with_canary(parameters: PyTree, record: dict[str, PyTree]) -> jax.Array:
            pull = -_FAR * dot(parameters, self.direction)
            return jnp.where(record["canary"], pull, loss_fn(parameters, record["example"]))

        flags = jnp.arange(count + 1) == count
        loss = declaring(with_canary, self.direction, inner=loss_fn)
        return Worlds(loss, params, {"example": rows, "canary": flags})


def dirac(params: PyTree, leaf: int, index: tuple[int, ...]) -> Canary:
    """A canary whose gradient lies in one chosen coordinate.

    A coordinate in which other records have no gradient is best.

    Args:
        params: the parameters' shapes.
        leaf: position of the leaf among ``jax.tree.leaves(params)``.
        index: of the coordinate in the leaf.

    Raises:
        ValueError: no such coordinate.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.zeros_like, params))
    arguments.integer("leaf", leaf, least=0)
    if leaf >= len(leaves) or len(index) != leaves[leaf].ndim:
        raise ValueError(f"leaf and index must name a coordinate of params, got {leaf}, {index}")
    leaves[leaf] = leaves[leaf].at[index].set(1.0)
    return Canary(jax.tree.unflatten(structure, leaves), "a Dirac gradient in a chosen coordinate")


def random_dirac(params: PyTree, seed: int) -> Canary:
    """A canary whose gradient lies in one coordinate, drawn uniformly from ``seed``."""
    rng = np.random.default_rng(arguments.integer("seed", seed, least=0))
    flat, as_tree = ravel_pytree(jax.tree.map(jnp.zeros_like, params))
    one = flat.at[int(rng.integers(flat.size))].set(1.0)
    return Canary(as_tree(one), "a Dirac gradient in a random coordinate")


def dense(params: PyTree) -> Canary:
    """A canary whose gradient is equal in every coordinate: the worst for coordinate clipping."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    even = jax.tree.map(lambda leaf: jnp.full(leaf.shape, size**-0.5, jnp.float32), params)
    return Canary(even, "a gradient equal in every coordinate")


def dot(tree: PyTree, other: PyTree) -> jax.Array:
    """The inner product over all leaves, float32 scalar."""
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), tree, other)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def canary_score(algorithm: Algorithm, canary: Canary) -> Callable[[PyTree], jax.Array]:
    """A score function [k] along a canary's direction, for runs that release "gradients".

    The sum of the noisy gradients, the log-likelihood ratio of a sampled Gaussian (the most
    powerful test where other records have no gradient along it), the last iterate, extremes and
    sizes over the steps (a step without noise is told by its size), and the algorithm's counters.
    """
    unit = algorithm.mechanism.l2(canary.direction) / algorithm.mechanism.batch_size

    def score(released: PyTree) -> jax.Array:
        gradients = released["noisy"]
        if not jax.tree.leaves(gradients):  # differences of iterates, with the sign of gradients
            gradients = jax.tree.map(lambda leaf: leaf[:-1] - leaf[1:], released["params"])
        noisy = jax.vmap(lambda g: dot(g, canary.direction))(gradients)
        sizes = jnp.log10(jnp.abs(noisy) + 1e-12)
        last = jax.tree.map(lambda leaf: leaf[-1], released["params"])
        columns = [
            jnp.sum(noisy),
            jnp.sum(log_ratios(algorithm, -noisy / unit)),
            dot(last, canary.direction),
            jnp.max(noisy),
            jnp.min(noisy),
            jnp.max(sizes),
            jnp.min(sizes),
            *(jnp.sum(leaf[-1]) for leaf in jax.tree.leaves(released["counts"])),
        ]
        return jnp.stack([column.astype(jnp.float32) for column in columns])

    return score


def log_ratios(algorithm: Algorithm, sums: jax.Array) -> jax.Array:
    """Log-likelihood ratios of noisy sums [steps] along the canary, in its clipped norms.

    Of every step; with correlated noise of every time that the canary may take part.
    """
    mechanism = algorithm.mechanism
    if mechanism.strategy is not None:
        return _correlated_ratios(mechanism, sums)
    prob = rate(mechanism.sampling, mechanism.batch_size, mechanism.dataset_size)
    noise = mechanism.noise_multiplier
    steps = noise if isinstance(noise, int | float) else noise.table()[: len(sums)]
    z = jnp.asarray(steps, jnp.float32)
    shifted = (2 * sums - 1) / (2 * jnp.maximum(z, 1e-6) ** 2)
    if prob == 1.0:
        return shifted
    stay = jnp.full(sums.shape, np.log1p(-prob), jnp.float32)
    return logsumexp(jnp.stack([stay, shifted + np.float32(np.log(prob))]), axis=0)


def _correlated_ratios(mechanism: Mechanism, sums: jax.Array) -> jax.Array:
    """As ``log_ratios``: the strategy times the sums has independent noise."""
    assert mechanism.strategy is not None
    steps, sampling = len(sums), mechanism.sampling
    matrix = mechanism.strategy.matrix()[:steps, :steps]
    (noise,) = mechanism.multipliers(0).values()
    if isinstance(sampling, CyclicPoisson):
        moved, prob = matrix[:, :: sampling.bands], sampling.sampling_prob
    else:
        turns = sampling.separation(mechanism.dataset_size)  # type: ignore[attr-defined]
        moved, prob = matrix[:, ::turns].sum(axis=1, keepdims=True), 1.0
    way = jnp.asarray(moved, jnp.float32)
    seen = jnp.asarray(matrix, jnp.float32) @ sums @ way
    shifted = (seen - jnp.sum(way**2, axis=0) / 2) / max(noise, 1e-6) ** 2
    stay = jnp.full(shifted.shape, np.log1p(-prob) if prob < 1 else -np.inf, jnp.float32)
    return logsumexp(jnp.stack([stay, shifted + np.float32(np.log(prob))]), axis=0)


def iterate_score(
    algorithm: Algorithm, canary: Canary, start: PyTree, learning_rate: float
) -> Callable[[PyTree], jax.Array]:
    """A score function [2] for runs of plain SGD that release "iterates" alone.

    The noisy gradients are the iterates' differences over the learning rate.
    """
    unit = learning_rate * algorithm.mechanism.l2(canary.direction) / algorithm.mechanism.batch_size

    def score(released: PyTree) -> jax.Array:
        along = jax.vmap(lambda p: dot(p, canary.direction))(released["params"])
        before = jnp.concatenate([dot(start, canary.direction)[None], along[:-1]])
        sums = (along - before) / unit
        return jnp.stack([jnp.sum(sums), jnp.sum(log_ratios(algorithm, sums))])

    return score


def loss_score(worlds: Worlds) -> Callable[[PyTree], jax.Array]:
    """A score function [1] of a black-box attacker: minus the loss of the record at the end.

    For runs that release the "last" parameters.
    """
    record = jax.tree.map(lambda leaf: leaf[-1], worlds.records)
    return lambda params: -worlds.loss_fn(params, record)[None]


def worst_record(
    algorithm: Algorithm, worlds: Sequence[Worlds], steps: int, *, count: int = 500, seed: int = 0
) -> tuple[int, list[float]]:
    """The position of the record that is easiest to detect, and the separation of each.

    It is found by pilot runs with the loss score. These are not used again, so an audit of that
    record needs no correction.

    Args:
        algorithm: audited.
        worlds: one for each candidate record.
        steps: of a run.
        count: pilot runs in each world.
        seed: of the pilot runs.

    Raises:
        ValueError: there is no candidate.
    """
    if not worlds:
        raise ValueError("worlds must hold at least one candidate, got none")
    apart = []
    for candidate in worlds:
        run = training_run(algorithm, candidate, steps, release="last", score=loss_score(candidate))
        inside, outside = two_worlds(run, count, seed=seed)
        spread = np.sqrt(np.var(inside) + np.var(outside)) + 1e-12
        apart.append(float(abs(np.mean(inside) - np.mean(outside)) / spread))
    return int(np.argmax(apart)), apart


def tiny_network(seed: int = 0, records: int = 4) -> tuple[Callable[..., jax.Array], PyTree, Any]:
    """(loss, params, data): a network of 23 parameters on random records whose first feature is 0.

    No record has a gradient in the weights of the first feature; a Dirac there meets noise alone.
    """
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "w1": 0.5 * jax.random.normal(keys[0], (4, 3)),
        "b1": jnp.zeros(3),
        "w2": 0.5 * jax.random.normal(keys[1], (3, 2)),
        "b2": jnp.zeros(2),
    }
    x = jax.random.normal(keys[2], (records, 4)).at[:, 0].set(0.0)
    labels = jax.random.bernoulli(keys[3], 0.5, (records,)).astype(jnp.int32)

    def loss_fn(parameters: PyTree, example: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(example["x"] @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        return logsumexp(logits) - logits[example["y"]]

    return loss_fn, params, {"x": x, "y": labels}


W1 = 2  # the position of "w1" among the leaves of the tiny network: b1, b2, w1, w2
