"""The auditor's own computation of every un-noised sum, to be compared with the real loop's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.audit.residuals import ResidualVerdict, audit_residuals
from jaxdp.audit.worlds import Worlds, step_by_step, training_run, two_worlds
from jaxdp.clipping import clipped_grad
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree

RUNS = 3_000  # in each world
_NUMBERS = 2**21


def audit_noise(
    algorithm: Algorithm,
    worlds: Worlds,
    steps: int,
    *,
    runs: int = RUNS,
    confidence: float = 0.95,
    energy: Callable[[jax.Array, jax.Array], PyTree] | None = None,
    seed: int | None = None,
    chunk: int = 1_000,
) -> ResidualVerdict:
    """Runs the loop of training in both worlds and tests its noise and sensitivity.

    The trusted sum clips one record at a time by the reference engine (``engine="vmap"``), by the
    mechanism's own rule, and adds in float64; it knows the masks and the parameters that entered
    every step.

    Formal guarantee: as ``jaxdp.audit.audit_residuals``, for an algorithm that releases the
    sum plus Gaussian noise of its noise multiplier times the sensitivity that the sum carries;
    where noise is correlated, for what the strategy makes of the sums.

    Args:
        algorithm: audited; its chain's links are used as they are.
        worlds: the data and the model.
        steps: of every run.
        runs: in each world; fewer are made where they would give more than 2**21 numbers.
        confidence: in (0, 1).
        energy: as in ``jaxdp.audit.training_run``.
        seed: of the runs; None takes one from the operating system.
        chunk: runs at once: memory against speed.

    Raises:
        ValueError: a number is out of range; parameters are not float32; the algorithm adds
            no noise, samples a fixed size, or names a leak: it releases no sum plus noise then.
    """
    steps = arguments.integer("steps", steps, least=1)
    runs = arguments.integer("runs", runs, least=1)
    arguments.fraction("confidence", confidence)
    numbers = steps * sum(leaf.size for leaf in jax.tree.leaves(worlds.params))
    count = max(1, min(runs, _NUMBERS // (2 * numbers)))
    seen = trusted_steps(algorithm, worlds, steps, count, energy=energy, seed=seed, chunk=chunk)
    return noise_verdict(algorithm, worlds, seen, confidence)


def trusted_steps(
    algorithm: Algorithm,
    worlds: Worlds,
    steps: int,
    count: int,
    *,
    energy: Callable[[jax.Array, jax.Array], PyTree] | None = None,
    seed: int | None = None,
    chunk: int = 1_000,
) -> dict[str, PyTree]:
    """The auditor's view of every step, by name: float64 [2 · count, steps, ...].

    "clipped" and "raw": every record's contribution, and its gradient before clipping, [..., n,
    *shape]; "l2": the sensitivity that was carried; "mask": [..., n]; "noisy": the noisy mean;
    "params": what entered the step; "scale": the public diagonal. Runs with the record come first.

    Raises:
        ValueError: a number is out of range, or parameters are not float32.
    """
    _multipliers(algorithm, steps)
    for leaf in jax.tree.leaves(worlds.params):
        if jnp.result_type(leaf) != jnp.float32:
            raise ValueError(f"worlds must have float32 parameters, got {jnp.result_type(leaf)}")
    reference = clipped_grad(worlds.loss_fn, algorithm.mechanism.rule, engine="vmap")

    def at_step(shown: PyTree) -> PyTree:
        params, context = shown["params"], shown["context"]

        def alone(record: PyTree) -> PyTree:
            one = jax.tree.map(lambda leaf: leaf[None], record)
            summed, _ = reference(params, one, jnp.ones(1, bool), **context)
            scale = summed.unscale
            return summed.value, jax.tree.map(jnp.ones_like, params) if scale is None else scale

        clipped, scales = jax.vmap(alone)(worlds.records)
        return {
            "clipped": clipped,
            "l2": shown["l2"],
            "mask": shown["mask"].astype(jnp.float32),
            "noisy": shown["noisy"],
            "params": params,
            "raw": jax.vmap(jax.grad(worlds.loss_fn), (None, 0))(params, worlds.records),
            "scale": jax.tree.map(lambda leaf: leaf[0], scales),
        }

    # A run gives features [k], the parts of its steps in the order of their names.
    score = lambda shown: step_by_step(jax.vmap(at_step)(shown))  # noqa: E731
    run = training_run(algorithm, worlds, steps, score=score, energy=energy, trusted=True)
    rows = np.concatenate(two_worlds(run, count, seed=seed, chunk=chunk))
    n = worlds.count

    def like(*lead: int) -> PyTree:
        return jax.tree.map(lambda p: np.empty((*lead, *np.shape(p)), bool), worlds.params)

    parts = {"clipped": like(n), "l2": np.empty(()), "mask": np.empty(n), "noisy": like()}
    parts |= {"params": like(), "raw": like(n), "scale": like()}
    leaves, structure = jax.tree.flatten(parts)
    ends = np.cumsum([leaf.size for leaf in leaves])
    cut = np.split(rows.reshape(2 * count, steps, -1), ends[:-1], axis=2)
    found = [
        part.reshape(2 * count, steps, *leaf.shape).astype(np.float64)
        for part, leaf in zip(cut, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _multipliers(algorithm: Algorithm, steps: int) -> np.ndarray:
    """The noise multipliers [steps]."""
    given, leak = algorithm.mechanism.noise_multiplier, algorithm.mechanism.leak
    if leak:
        raise ValueError(f"algorithm must release noisy sums alone, got one that leaks: {leak}")
    if algorithm.mechanism.strategy is not None:
        (given,) = algorithm.mechanism.multipliers(0).values()
    if isinstance(given, NoiseSchedule):
        levels = given.levels_between(0, steps)
        found = np.concatenate([np.full(count, level) for level, _, count in levels])
    else:
        found = np.full(steps, float(given))
    if not np.all(found > 0):
        raise ValueError(f"algorithm must add noise for its noise to be audited, got {given!r}")
    return found


def noise_verdict(
    algorithm: Algorithm, worlds: Worlds, seen: dict[str, PyTree], confidence: float = 0.95
) -> ResidualVerdict:
    """The verdict on what ``trusted_steps`` returned, or on some of its runs."""
    mask, size = seen["mask"], algorithm.mechanism.batch_size
    steps, strategy = mask.shape[1], algorithm.mechanism.strategy

    def total(leaf: np.ndarray) -> np.ndarray:
        column = mask.reshape(*mask.shape, *(1,) * (leaf.ndim - 3))
        return np.sum(np.where(column > 0, leaf, 0.0), axis=2)

    def whitened(tree: PyTree) -> PyTree:
        """The strategy times rows of correlated noise, which then are independent."""
        if strategy is None:
            return tree
        matrix = strategy.matrix()[:steps, :steps]
        return jax.tree.map(lambda leaf: np.einsum("ij,rj...->ri...", matrix, leaf), tree)

    released = jax.tree.map(lambda noisy, scale: noisy * size / scale, seen["noisy"], seen["scale"])
    with np.errstate(invalid="ignore", over="ignore"):
        squares = [
            np.square(leaf).reshape(*mask.shape, -1) for leaf in jax.tree.leaves(seen["clipped"])
        ]
        known = {
            "the parameters": seen["params"],
            "the way they have gone": jax.tree.map(
                lambda p, start: p - np.asarray(start, np.float64), seen["params"], worlds.params
            ),
            "the sum before clipping": jax.tree.map(total, seen["raw"]),
            "the record in question": jax.tree.map(lambda leaf: leaf[:, :, -1], seen["clipped"]),
        }
    return audit_residuals(
        whitened(released),
        whitened(jax.tree.map(total, seen["clipped"])),
        _multipliers(algorithm, steps) * seen["l2"],
        confidence=confidence,
        known=known,
        drawn=mask > 0,
        norms=np.sqrt(sum(each.sum(3) for each in squares)),
        l2=seen["l2"],
    )
