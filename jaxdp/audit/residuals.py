"""The auditor of noise: residuals (releases without their sums), and p-values of what may be wrong.

Where sums and the charged deviation are known (``audit_residuals``, ``audit_noise``), residuals
must be independent standard normals: ``p_values`` tests that in a fixed order, and the error is
divided among the tests (Bonferroni). Where a loop is a black box (``jaxdp.check_loop``) they are
what a regression leaves, of unknown deviation on f degrees of freedom; ``tails``, ``shared`` and
``largest_std`` hold for both, and each of the loop's tests accuses a right loop with ``SURE``.

Every p-value is exact or an upper bound. Most rest on one fact: the inner product of fresh standard
normals with a unit vector that was known before they were drawn is standard normal itself, whatever
the vector depends on, and independent from draw to draw.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # scipy.stats takes a second to import

from jaxdp import arguments
from jaxdp.audit.canaries import noise_multipliers
from jaxdp.audit.worlds import Worlds, flatten_by_step, training_run, two_worlds
from jaxdp.clipping import clipped_grad
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import PyTree

RUNS = 3_000  # of an algorithm, in each world
_NUMBERS = 2**21  # that they may give
_AT_ONCE = 1_000  # runs
SURE = 1e-7  # the probability that one of the tests of a loop accuses a right one
MOST = 2**22  # numbers: with more, the float32 generator's own grid would be seen
_ROUNDING = 2.0**-22  # of the greatest numbers involved: a few roundings of float32
_SHIFT = 0.05  # standard deviations by which rounding may move a test statistic
_SHARE = 0.95  # of the error goes to the tests, the rest to rounding
_SLACK = 1 + 1e-6  # a sensitivity is carried in float32
_BOUNDED, _HEAVY = (1.8, 2.5, 3.2), 3.5  # standard deviations: fewer beyond, or more
_NOTHING = 1e-4  # of full noise, this share of the blocks has a norm as small
_CELLS = 2**16  # 128 values of the float32 generator in each: its own grid is not seen
_CELLS_OF_A_PAIR = 2**13
_PAIRS, _NEAR, _SPAN = 1_024, 4, 96  # coordinates of which all pairs, combinations are looked at


@dataclasses.dataclass(frozen=True)
class ResidualVerdict:
    """The result of testing the noise of many releases against the charged noise.

    Attributes:
        p_values: of every test, by its name in words; the list depends on what was given, not
            on its values. Empty where float32 is too coarse to test.
        confidence: of the verdict.
        runs: the number of runs tested, of both worlds together.
        steps: the steps of every run.
        resolution: the greatest rounding error of a residual, in standard deviations, about.
    """

    p_values: Mapping[str, float]
    confidence: float
    runs: int
    steps: int
    resolution: float

    @property
    def p_value(self) -> float:
        """The p-value of "the noise is as charged" over all tests (Bonferroni), with rounding."""
        least = min(self.p_values.values(), default=1.0)
        return min(1.0, max(1, len(self.p_values)) * least / _SHARE)

    @property
    def refuted(self) -> bool:
        """True if ``p_value`` is at most 1 - ``confidence``."""
        return self.p_value <= 1 - self.confidence

    @property
    def findings(self) -> tuple[str, ...]:
        """The tests that refute by themselves (Bonferroni), smallest p-value first."""
        level = _SHARE * (1 - self.confidence) / max(1, len(self.p_values))
        found = [(p, i, name) for i, (name, p) in enumerate(self.p_values.items()) if p <= level]
        return tuple(name for _, _, name in sorted(found))

    def in_words(self) -> str:
        """The verdict on one line."""
        if not self.p_values:
            return f"noise: not tested, for float32 rounds it to {self.resolution:.1g} of itself"
        count = len(self.p_values)
        name = min(self.p_values, key=lambda n: self.p_values[n])
        if self.refuted:
            p = self.p_values[name]
            shown = f"p {p:.1g}" if p > 1e-300 else "p below 1e-300"
            return f"noise: REFUTED: {name} ({shown}; {len(self.findings)} of {count} tests refute)"
        return (
            f"noise: as charged ({count} tests, smallest p {self.p_values[name]:.2g}; "
            f"{_SHARE * (1 - self.confidence) / count:.2g} would refute)"
        )


def audit_noise(
    algorithm: Algorithm,
    worlds: Worlds,
    steps: int,
    *,
    runs: int = RUNS,
    confidence: float = 0.95,
    energy: Callable[[jax.Array, jax.Array], PyTree] | None = None,
    seed: int | None = None,
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

    Raises:
        ValueError: a number is out of range; parameters are not float32; the algorithm adds
            no noise, samples a fixed size, names a leak or has a sum of its own: it releases
            no sum plus noise then.
    """
    steps = arguments.integer("steps", steps, least=1)
    runs = arguments.integer("runs", runs, least=1)
    arguments.fraction("confidence", confidence)
    numbers = steps * sum(leaf.size for leaf in jax.tree.leaves(worlds.params))
    count = max(1, min(runs, _NUMBERS // (2 * numbers)))
    seen = trusted_steps(algorithm, worlds, steps, count, energy=energy, seed=seed)
    return noise_verdict(algorithm, worlds, seen, confidence)


def trusted_steps(
    algorithm: Algorithm,
    worlds: Worlds,
    steps: int,
    count: int,
    *,
    energy: Callable[[jax.Array, jax.Array], PyTree] | None = None,
    seed: int | None = None,
) -> dict[str, PyTree]:
    """The auditor's view of every step, by name: float64 [2 · count, steps, ...].

    "clipped" and "raw": every record's contribution, and its gradient before clipping, [..., n,
    *shape]; "l2": the sensitivity that was carried; "mask": [..., n]; "noisy": the noisy mean;
    "params": what entered the step; "scale": the public diagonal. Runs with the record come first.

    Raises:
        ValueError: a number is out of range, or parameters are not float32.
    """
    _noise_multipliers(algorithm, steps)
    for leaf in jax.tree.leaves(worlds.params):
        if jnp.result_type(leaf) != jnp.float32:
            raise ValueError(f"worlds must have float32 parameters, got {jnp.result_type(leaf)}")
    # Another engine than the run's, one record at a time: the sum must not be the run's own.
    reference = clipped_grad(worlds.loss_fn, algorithm.mechanism.rule, engine="vmap")

    def at_step(shown: PyTree) -> PyTree:
        """The auditor's view of one step, from what no run releases."""
        params, context = shown["params"], shown["context"]

        def clip_alone(record: PyTree) -> PyTree:
            """(one record's clipped gradient, the public scale), by the reference engine."""
            one = jax.tree.map(lambda leaf: leaf[None], record)
            summed = reference(params, one, jnp.ones(1, bool), **context)
            scale = summed.unscale
            return summed.value, jax.tree.map(jnp.ones_like, params) if scale is None else scale

        clipped, scales = jax.vmap(clip_alone)(worlds.records)
        return {
            "clipped": clipped,
            "l2": shown["l2"],
            "mask": shown["mask"].astype(jnp.float32),
            "noisy": shown["noisy"],
            "params": params,
            "raw": jax.vmap(jax.grad(worlds.loss_fn), (None, 0))(params, worlds.records),
            "scale": jax.tree.map(lambda leaf: leaf[0], scales),
        }

    # A run gives features [k]: the parts of its steps, whose shapes are kept while it is traced.
    kept: list[PyTree] = []

    def score(shown: PyTree) -> jax.Array:
        """All numbers of a run, flat; their shapes are kept."""
        kept.append(jax.eval_shape(at_step, jax.tree.map(lambda leaf: leaf[0], shown)))
        return flatten_by_step(jax.vmap(at_step)(shown))

    # Both worlds, and the flat rows as the trees that they were.
    run = training_run(algorithm, worlds, steps, score=score, energy=energy, trusted=True)
    rows = np.concatenate(two_worlds(run, count, seed=seed, chunk=_AT_ONCE))
    leaves, structure = jax.tree.flatten(kept[0])
    cut = np.split(rows.reshape(2 * count, steps, -1), np.cumsum([v.size for v in leaves])[:-1], 2)
    found = [
        part.reshape(2 * count, steps, *leaf.shape).astype(np.float64)
        for part, leaf in zip(cut, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _noise_multipliers(algorithm: Algorithm, steps: int) -> np.ndarray:
    """The noise multipliers [steps] of the gradient."""
    mechanism = algorithm.mechanism
    if mechanism.leak:
        raise ValueError(
            f"algorithm must release noisy sums alone, got one that leaks: {mechanism.leak}"
        )
    if algorithm.is_of_own_sum:
        raise ValueError(
            "algorithm must release noisy sums of its loss's clipped gradients, got one with a "
            "sum of its own (dp_zo, dp_adafest)"
        )
    found = noise_multipliers(algorithm, steps)[:, 0]
    if not np.all(found > 0):
        raise ValueError(
            "algorithm must add noise for its noise to be audited, got multiplier "
            f"{mechanism.noise_multiplier!r}"
        )
    return found


def noise_verdict(
    algorithm: Algorithm, worlds: Worlds, seen: dict[str, PyTree], confidence: float = 0.95
) -> ResidualVerdict:
    """Tests what ``trusted_steps`` returned, or some of its runs."""
    mask, size = seen["mask"], algorithm.mechanism.batch_size
    steps, strategy = mask.shape[1], algorithm.mechanism.strategy

    def total(leaf: np.ndarray) -> np.ndarray:
        """The sum of the clipped gradients of the records drawn, [runs, steps, ...]."""
        column = mask.reshape(*mask.shape, *(1,) * (leaf.ndim - 3))
        return np.sum(np.where(column > 0, leaf, 0.0), axis=2)

    def whitened(tree: PyTree) -> PyTree:
        """The strategy times rows of correlated noise, which then are independent."""
        if strategy is None:
            return tree
        matrix = strategy.matrix()[:steps, :steps]
        return jax.tree.map(lambda leaf: np.einsum("ij,rj...->ri...", matrix, leaf), tree)

    # The noisy sum of the mean that was released, and what its noise must not depend on: all that
    # was known when it was drawn.
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
        _noise_multipliers(algorithm, steps) * seen["l2"],
        confidence=confidence,
        known=known,
        drawn=mask > 0,
        norms=np.sqrt(sum(each.sum(3) for each in squares)),
        l2=seen["l2"],
    )


def audit_residuals(
    released: PyTree,
    unnoised: PyTree,
    std: ArrayLike,
    *,
    confidence: float = 0.95,
    known: Mapping[str, PyTree] | None = None,
    drawn: ArrayLike | None = None,
    norms: ArrayLike | None = None,
    l2: ArrayLike | None = None,
) -> ResidualVerdict:
    """Tests whether (released - unnoised) / std are independent standard normals.

    Formal guarantee: where they are, and no record's norm exceeds ``l2``, the verdict is refuted
    with probability at most 1 - ``confidence``. The tests are a fixed list, ``p_values``; each has
    an exact or conservative p-value, and the error is divided among them (Bonferroni). Rounding of
    float32 is no part of that: a twentieth of the error is set aside for it, and nothing is tested
    where its sum over all numbers could move a statistic by more than 0.05 standard deviations. A
    step's ``unnoised`` and ``known`` must not depend on the noise of that step or of later ones,
    ``drawn`` on none.

    Args:
        released: pytree of [runs, steps, ...], the noisy **sums**, before any other processing. At
            most 2**22 numbers are tested, those of the first runs. At least float32: what was cast
            below it lies on a grid, harmless or not.
        unnoised: the same without noise, from a trusted computation, float64 where possible.
        std: standard deviation that is charged, a scalar or [runs, steps]: the noise multiplier
            times the sensitivity that was carried.
        confidence: in (0, 1).
        known: name in words -> pytree shaped like ``released``, such as the parameters that entered
            the step: what the noise must not depend on.
        drawn: bool [runs, steps, n]; which records took part.
        norms: [runs, steps, n]; norms of the records' contributions. Needs ``l2``.
        l2: scalar or [runs, steps]; the sensitivity that was carried.

    Raises:
        ValueError: shapes or precision do not fit, ``std`` or ``l2`` is not positive, there are
            fewer than two runs.
    """
    # All arrays as float64 [runs, steps, coordinates], refused by name where they do not fit.
    arguments.fraction("confidence", confidence)
    for leaf in jax.tree.leaves(released):
        if (dtype := np.asarray(leaf).dtype) not in (np.float32, np.float64):
            raise ValueError(f"released must be float32 or float64, got {dtype}")
    noisy, sizes = _join_leaves("released", released)
    shape = noisy.shape[:2]

    def like(name: str, tree: PyTree) -> np.ndarray:
        """A pytree as ``_join_leaves``, of the shape of the releases."""
        found, widths = _join_leaves(name, tree)
        if found.shape != noisy.shape or widths != sizes:
            raise ValueError(
                f"{name} must be shaped like released, {shape} and leaves of {sizes} numbers, "
                f"got {found.shape[:2]} and {widths}"
            )
        return found

    def positive(name: str, value: ArrayLike) -> np.ndarray:
        """A number for each run and step, [runs, steps]."""
        found = np.asarray(value, np.float64)
        if found.shape not in ((), shape):
            raise ValueError(f"{name} must be a number or {shape}, got shape {found.shape}")
        if not (np.all(np.isfinite(found)) and np.all(found > 0)):
            raise ValueError(f"{name} must be finite and above 0, got {np.min(found)} as its least")
        return np.broadcast_to(found, shape)

    def per_record(name: str, value: ArrayLike, dtype: type) -> np.ndarray:
        """An array [runs, steps, n] of this dtype."""
        found = np.asarray(value)
        if found.ndim != 3 or found.shape[:2] != shape or (dtype is bool and found.dtype != bool):
            raise ValueError(
                f"{name} must be {dtype.__name__} {[*shape, 'records']}, got {found.dtype} "
                f"{found.shape}"
            )
        return found.astype(dtype)

    clean, scale = like("unnoised", unnoised), positive("std", std)
    before = {"the un-noised sum": clean}
    before |= {name: like("known", tree) for name, tree in (known or {}).items()}
    masks = None if drawn is None else per_record("drawn", drawn, bool)
    if (norms is None) != (l2 is None):
        raise ValueError(f"norms and l2 must be given together, got {norms!r} and {l2!r}")
    runs = min(shape[0], MOST // noisy[0].size)
    if runs < 2:
        raise ValueError(
            f"released must be at least 2 runs of at most {MOST // 2} numbers, got {noisy.shape}"
        )

    # What refutes by itself: numbers that are not finite, a record above the sensitivity.
    noisy, clean, scale = noisy[:runs], clean[:runs], scale[:runs, :, None]
    with np.errstate(invalid="ignore", over="ignore"):
        r = (noisy - clean) / scale
    finite = np.isfinite(r)
    found = {"numbers that are not finite": 1.0 if finite.all() else 0.0}
    if norms is not None and l2 is not None:
        ratios = per_record("norms", norms, float) / positive("l2", l2)[..., None]
        ratio = float(np.max(ratios, initial=0.0))
        found["a record's norm above the sensitivity"] = 1.0 if ratio <= _SLACK else 0.0

    # The statistical tests, where float32 is fine enough for them.
    largest = np.where(finite, np.maximum(np.abs(noisy), np.abs(clean)) / scale, 0.0)
    resolution = float(_ROUNDING * np.max(largest))
    if np.sqrt(r.size) * resolution <= _SHIFT:
        before = {name: vectors[:runs] for name, vectors in before.items()}
        masks = None if masks is None else masks[:runs]
        found |= p_values(np.where(finite, r, 0.0), sizes, before, masks)
    elif min(found.values()) == 1.0:
        found = {}
    return ResidualVerdict(found, confidence, runs, shape[1], resolution)


def _join_leaves(name: str, tree: PyTree) -> tuple[np.ndarray, tuple[int, ...]]:
    """Leaves as one float64 [runs, steps, coordinates], and the coordinates of each."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    leads = {leaf.shape[:2] for leaf in leaves}
    if len(leads) != 1 or any(leaf.ndim < 2 or not leaf.size for leaf in leaves):
        raise ValueError(
            f"{name} must be a pytree of arrays [runs, steps, ...] with the same runs and steps, "
            f"got {[leaf.shape for leaf in leaves]}"
        )
    flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]
    return np.concatenate(flat, axis=2), tuple(leaf.shape[2] for leaf in flat)


def p_values(
    x: np.ndarray,
    sizes: Sequence[int],
    known: Mapping[str, np.ndarray],
    drawn: np.ndarray | None = None,
) -> dict[str, float]:
    """P-values of every way in which numbers can fail to be independent standard normals, by name.

    Args:
        x: float64 [runs, steps, coordinates], finite.
        sizes: coordinates of each leaf, in their order.
        known: [runs, steps, coordinates] by name: known before the noise of the step was drawn.
        drawn: bool [runs, steps, n], the records that took part.
    """
    runs, steps, coordinates = x.shape
    flat, squares = x.reshape(runs, -1), np.square(x)
    ends = np.cumsum(sizes)
    leaves = np.split(x, ends[:-1], axis=-1)

    # Single numbers: their size, mean and law.
    far = 2 * special.ndtr(-np.max(np.abs(x)))
    found = {
        "the noise's standard deviation": bonferroni([test_energy(squares.sum(), x.size)]),
        "its standard deviation in a coordinate": bonferroni(
            test_energy(squares.sum((0, 1)), runs * steps)
        ),
        "its standard deviation in a step": bonferroni(
            test_energy(squares.sum((0, 2)), runs * coordinates)
        ),
        "its standard deviation in a run": bonferroni(
            test_energy(squares.sum((1, 2)), steps * coordinates)
        ),
        "its mean": bonferroni([test_mean(x.sum() / np.sqrt(x.size))]),
        "its mean in a coordinate and step": bonferroni(test_mean(x.sum(0) / np.sqrt(runs))),
        "its distribution": test_uniform(special.ndtr(x.ravel())),
        "its tails": test_tails(squares, lambda edge: float(special.chdtrc(1, edge)), x.size)[0],
        "its largest number": float(-np.expm1(x.size * np.log1p(-far))),
    }

    # Norms: of steps, and of steps and leaves that have next to no noise.
    norms = special.chdtr(coordinates, squares.sum(2)).ravel()
    blocks = [special.chdtr(v.shape[2], np.square(v).sum(2)).ravel() for v in leaves]
    small = [np.sum(part < _NOTHING) for part in (np.concatenate(blocks), norms)]
    found["the norms of the steps"] = test_uniform(norms)
    found["steps or leaves without noise"] = bonferroni(
        [
            special.bdtrc(small[0] - 1, len(blocks) * runs * steps, _NOTHING),
            special.bdtrc(small[1] - 1, runs * steps, _NOTHING),
        ]
    )

    # Numbers that come again: too few different values; neighbours that occur twice anywhere, with
    # either sign.
    cells = np.minimum(special.ndtr(x.ravel()) * _CELLS, _CELLS - 1).astype(np.int64)
    found["a coarse grid of values"] = test_collisions(cells, _CELLS)
    pairs = [leaf[..., : leaf.shape[-1] // 2 * 2].reshape(-1, 2) for leaf in leaves]
    cells = special.erf(np.abs(np.concatenate(pairs)) / np.sqrt(2)) * _CELLS_OF_A_PAIR
    one, two = np.minimum(cells, _CELLS_OF_A_PAIR - 1).astype(np.int64).T
    twice = test_collisions(one * _CELLS_OF_A_PAIR + two, _CELLS_OF_A_PAIR**2)
    found["noise that is used twice"] = twice

    # Independence: of coordinates, and of steps, leaves, shards and runs against one another.
    found["noise of two coordinates or steps"] = find_shared_noise(
        flat, runs, np.zeros(flat.shape[1])
    ).p_value
    found["noise of a step and of an earlier one"] = bonferroni(
        [test_dependence(x[:, lag:], x[:, :-lag]) for lag in (1, 2, 3) if lag < steps]
    )
    found["noise of two leaves"] = bonferroni(
        [
            test_dependence(later[..., : earlier.shape[-1]], earlier[..., : later.shape[-1]])
            for i, later in enumerate(leaves)
            for earlier in leaves[max(0, i - 8) : i]
        ]
    )
    cuts = [
        leaf[..., : leaf.shape[-1] // parts * parts].reshape(runs, steps, parts, -1)
        for leaf in leaves
        for parts in (2, 3, 4, 8)
        if leaf.shape[-1] >= parts
    ]
    found["noise of two shards of a leaf"] = bonferroni(
        [test_dependence(cut[:, :, 1:], cut[:, :, :-1]) for cut in cuts]
    )
    lags = [lag for lag in {1, 2, 3, runs // 2} if 0 < lag < runs]
    found["noise of two runs"] = bonferroni(
        [test_dependence(flat[lag:], flat[:-lag]) for lag in lags]
    )

    # Independence of what was known before, and of the records that took part.
    for name, vectors in known.items():
        found[f"dependence on {name}"] = test_dependence(x, vectors)
    if drawn is not None:
        count = drawn.sum((0, 1)).astype(float)
        here, count = drawn[..., count > 0].astype(float), count[count > 0]
        sums = np.einsum("rtn,rtd->nd", here, x) / np.sqrt(count)[:, None]
        energy = np.einsum("rtn,rt->n", here, squares.sum(2))
        means, energies = (
            bonferroni(test_mean(sums)),
            bonferroni(test_energy(energy, count * coordinates)),
        )
        found["dependence on who took part"] = bonferroni([means, energies])
    return found


def test_mean(z: np.ndarray) -> np.ndarray:
    """Two-sided p-values of standard normals."""
    return np.asarray(2 * special.ndtr(-np.abs(z)))


def test_energy(total: np.ndarray, degrees: np.ndarray | int) -> np.ndarray:
    """Two-sided p-values of sums of squares, chi-square of ``degrees``."""
    tails = np.minimum(special.chdtr(degrees, total), special.chdtrc(degrees, total))
    return np.minimum(1.0, 2 * tails)


def bonferroni(found: ArrayLike) -> float:
    """The least of several p-values, times their number (Bonferroni); 1 of none."""
    each = np.asarray(found, float)
    return float(min(1.0, each.size * np.min(each))) if each.size else 1.0


def test_uniform(numbers: np.ndarray) -> float:
    """P-value of numbers in [0, 1] (Kolmogorov and Smirnov), at most twice that of one side."""
    count, ordered = len(numbers), np.sort(numbers)
    above = np.max(np.arange(1, count + 1) / count - ordered)
    below = np.max(ordered - np.arange(count) / count)
    return float(min(1.0, 2 * special.smirnov(count, max(above, below))))


def test_dependence(values: np.ndarray, known: np.ndarray) -> float:
    """P-value of mean and size of ``values`` [..., d] along vectors known before them [..., d].

    Where nothing is known, the vector is equal in every coordinate.
    """
    finite = np.nan_to_num(known, nan=0.0, posinf=0.0, neginf=0.0)
    largest = np.max(np.abs(finite), axis=-1, keepdims=True, initial=0.0)
    scaled = np.where(largest > 0, finite / np.where(largest > 0, largest, 1.0), 1.0)
    scaled /= np.linalg.norm(scaled, axis=-1, keepdims=True)
    along = np.sum(values * scaled, axis=-1).ravel()
    if not along.size:
        return 1.0
    return bonferroni(
        [
            test_mean(along.sum() / np.sqrt(along.size)),
            test_energy(np.sum(along**2), along.size),
        ]
    )


def test_collisions(cells: np.ndarray, count: int) -> float:
    """P-value of too few different cells among draws from ``count`` equally likely ones.

    The number of occupied cells is a sum of independent indicators (Vatutin and Mikhailov 1982);
    so, up to a constant, are the collisions, whose upper tail is below that of a Poisson variable
    of their mean from one above the mean on (Hoeffding 1956; Anderson and Samuels 1967).
    """
    draws = len(cells)
    if not draws:
        return 1.0
    sure = max(0, draws - count)
    expected = draws + count * np.expm1(draws * np.log1p(-1.0 / count)) - sure
    found = draws - 1 - np.count_nonzero(np.diff(np.sort(cells))) - sure
    return float(special.pdtrc(found - 1, expected)) if found >= expected + 1 else 1.0


def test_tails(
    squares: np.ndarray, beyond: Callable[[float], float], count: float
) -> tuple[float, str]:
    """(p-value, words): too few numbers beyond 1.8, 2.5, 3.2 deviations, or too many beyond 3.5.

    Chernoff's bound exp(-n KL), times the four tests.

    Args:
        squares: of the numbers, in units of their variance.
        beyond: from e to the probability that such a square exceeds e.
        count: n, how many of them are independent.
    """
    found = []
    for far, fewer in (*((each, True) for each in _BOUNDED), (_HEAVY, False)):
        wanted, got = beyond(far**2), float(np.mean(squares > far**2))
        p = math.exp(-count * binary_divergence(got, wanted)) if (got < wanted) == fewer else 1.0
        words = f"{got:.2%} of the noise is beyond {far:g} standard deviations, of Gaussian noise "
        found.append((p, f"{words}{wanted:.2%}"))
    p, words = min(found)
    return min(1.0, 4 * p), words


def binary_divergence(got: float, wanted: float) -> float:
    """KL of two coins: the exponent of Chernoff's bound."""
    return float(special.rel_entr(got, wanted) + special.rel_entr(1 - got, 1 - wanted))


def largest_std(energy: ArrayLike, freedom: float, tests: int) -> np.ndarray:
    """A deviation that the true one exceeds with SURE / tests, from a sum of squares."""
    return np.sqrt(energy / (2 * special.gammaincinv(freedom / 2, SURE / tests)))


@dataclasses.dataclass(frozen=True)
class SharedNoise:
    """Coordinates whose noise depends on that of others.

    Attributes:
        p_value: of "all are independent".
        pairs: int [p, 2], the pairs of coordinates that were looked at.
        related: [p], their correlations.
        combined: (int [k], weights [k], norm of what is left) of every combination of coordinates
            of norm 1 that has less than a thousandth of the noise of one of them.
    """

    p_value: float
    pairs: np.ndarray
    related: np.ndarray
    combined: list[tuple[np.ndarray, np.ndarray, float]]


def find_shared_noise(columns: np.ndarray, freedom: int, groups: np.ndarray) -> SharedNoise:
    """Looks for coordinates that share noise, so that a combination of them has little or none.

    Looked at are: all pairs of 1,024 coordinates; of all coordinates, those whose noise is nearest
    in a random direction, which finds every equal or opposite pair; and of each group the linear
    combinations of its first 96, with the sum of its others, and of a random 96 of all. At norm 1
    the squared correlation of two independent normals over f degrees of freedom has the law
    Beta(1/2, (f - 1) / 2), and the squared distance of one of k from the span of the others
    Beta((f - k + 1) / 2, (k - 1) / 2).

    Args:
        columns: [n, m], the noise of each coordinate.
        freedom: f, at least 2, of a column.
        groups: int [m], the group (such as the leaf) of each coordinate.
    """
    rng, lengths = np.random.default_rng(0), np.linalg.norm(columns, axis=0)
    at = np.flatnonzero(lengths)
    rows, count = columns[:, at] / lengths[at], len(at)
    if count < 2:
        return SharedNoise(1.0, np.zeros((0, 2), int), np.zeros(0), [])

    # Pairs: of some coordinates all, of the others the nearest, of equal or opposite sign.
    some = np.sort(rng.permutation(count)[:_PAIRS])
    together = rows[:, some].T @ rows[:, some]
    i, j = np.nonzero(np.triu(np.abs(together) > 0.2, 1))
    pairs, related = [np.column_stack([some[i], some[j]])], [together[i, j]]
    order = np.argsort(np.abs(rng.normal(size=len(rows)) @ rows))
    for step in range(1, min(_NEAR + 1, count)) if count > _PAIRS else ():
        one, two = order[:-step], order[step:]
        pairs.append(np.sort(np.column_stack([one, two]), axis=1))
        related.append(np.sum(rows[:, one] * rows[:, two], axis=0))
    every, first = np.unique(np.concatenate(pairs), axis=0, return_index=True)
    alike = np.clip(np.concatenate(related)[first], -1, 1)
    chance = special.betainc((freedom - 1) / 2, 0.5, 1 - np.square(alike))
    of_pairs = min(1.0, count * (count - 1) / 2 * float(np.min(chance, initial=1.0)))

    # Combinations of up to 96 coordinates, and fewer than half of the degrees of freedom.
    span, distances, combined = min(_SPAN, freedom // 2 - 1), [], []
    blocks = [np.flatnonzero(groups[at] == group) for group in np.unique(groups[at])]
    for block in [*blocks, rng.permutation(count)[:_SPAN]]:
        k = min(len(block), span)
        if k < 2:
            continue
        weights = np.zeros((len(block), k))
        weights[:k] = np.eye(k)
        if len(block) > k:
            rest = 1 / max(float(np.linalg.norm(rows[:, block[k:]].sum(1))), 1e-9)
            weights = np.column_stack([weights, (np.arange(len(block)) >= k) * rest])
        _, values, turned = np.linalg.svd(rows[:, block] @ weights, full_matrices=False)
        k = len(values)
        nearest = 1 / np.max(np.square(turned).T @ np.maximum(values, 1e-150) ** -2.0)
        distances.append(k * special.betainc((freedom - k + 1) / 2, (k - 1) / 2, nearest))
        combined += [
            (at[block], weights @ turned[one], float(values[one]))
            for one in np.flatnonzero(values < 1e-3)
        ]
    return SharedNoise(bonferroni([of_pairs, bonferroni(distances)]), at[every], alike, combined)
