"""Canaries of a real run: records whose gradient lies in one coordinate, and their scores.

Each candidate takes part or not by its own fair coin (Steinke, Nasr and Jagielski 2023,
arXiv:2305.08846v1, Algorithm 1); its gradient is a Dirac (Nasr et al. 2023, arXiv:2302.07956v1), in
a coordinate of its own. It is a record like any other: drawn, differentiated, clipped, summed and
noised by the very code that handles the others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from jaxdp import arguments
from jaxdp.audit.guesses import binomial_pmf
from jaxdp.clipping.captured import declaring
from jaxdp.clipping.losses import form_of
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import FullBatch, Poisson, RandomAllocation
from jaxdp.sampling.named import name_of, rate
from jaxdp.schedules import NoiseSchedule
from jaxdp.sources import Source
from jaxdp.sources.arrays import DeviceArrays
from jaxdp.types import LossFn, PyTree

_REAL = -1  # the place of a record that is no canary
_PULL = 1e3  # the gradient's size: far beyond any clipping norm in use here
_PLACES = 8  # fixes the coordinates, which are public
_BLOCK = 1_000  # steps that are looked at together for what the coordinates share
_FEWEST = 20  # steps, or candidates, below which noise has no edge to speak of
_MANY = 2_000  # candidates that tell a step's noise by themselves
_RARE = 0.25  # up to this rate the median over steps is hardly moved by the candidate itself


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """The candidate canaries of an audit; public. Those that took part are the auditor's secret.

    Attributes:
        leaf: position of the parameters' largest leaf, which holds all their coordinates.
        places: int [m], each candidate's coordinate there, all different.
    """

    leaf: int
    places: np.ndarray

    @property
    def count(self) -> int:
        """The number m of candidates."""
        return len(self.places)

    @property
    def columns(self) -> int:
        """The number of numbers that are released of every step."""
        return self.count

    @property
    def name(self) -> str:
        """A text that changes with the candidates."""
        return f"{self.count} canaries"

    def loss(self, loss_fn: LossFn) -> Callable[..., Any]:
        """The loss of a pair (record, place), as ``entered`` makes them.

        Of a real record, whose place is -1, loss and gradient are what they were; of candidate k,
        whose place is k, the loss is a pull along its coordinate.

        Args:
            loss_fn: of one record, in any form that ``jaxdp.clipped_grad`` takes.
        """
        form, places = form_of(loss_fn), jnp.asarray(self.places)

        def of(params: PyTree, example: tuple[PyTree, jax.Array], key: Any) -> Any:
            record, place = example
            found = form(loss_fn, params, record, key)
            value, *aux = found if isinstance(found, tuple) else (found,)
            mine = jnp.ravel(jax.tree.leaves(params)[self.leaf])[places[jnp.maximum(place, 0)]]
            pulled = jnp.where(place < 0, value, -_PULL * mine.astype(value.dtype))
            return (pulled, *aux) if aux else pulled

        if form.rng is None:
            with_canaries: Callable[..., Any] = lambda params, example: of(params, example, None)  # noqa: E731
        else:
            with_canaries = lambda params, example, rng: of(params, example, rng)  # noqa: E731
        return declaring(with_canaries, places, inner=loss_fn)

    def require_finite(self, loss_fn: LossFn, params: PyTree, example: PyTree) -> None:
        """Raises ValueError if the gradient of the loss at a record of zeros is not finite.

        A canary would then be left out of the sum, and the audit would find nothing.

        Args:
            loss_fn: of one record.
            params: the parameters before the first step.
            example: shape and dtype of a record.

        Raises:
            ValueError: the gradient is not finite.
        """
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), example)
        form, loss = form_of(loss_fn), self.loss(loss_fn)
        keys = () if form.rng is None else (jax.random.key(0, impl="threefry2x32"),)

        def value(params: PyTree) -> jax.Array:
            found = loss(params, (zeros, jnp.zeros((), jnp.int32)), *keys)
            return found[0] if isinstance(found, tuple) else found

        gradients = jax.tree.leaves(jax.jit(jax.grad(value, allow_int=True))(params))
        floats = [leaf for leaf in gradients if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in floats):
            raise ValueError(
                "canaries must be 0 for a loss whose gradient at a record of zeros is not finite, "
                f"got {self.count}: let the loss be finite there"
            )

    def entered(self, source: Source, coins: np.ndarray) -> Source:
        """A source of pairs (record, place): the real records, then the candidates that take part.

        A candidate's record is zeros. How many there are is as secret as the coins.

        Raises:
            ValueError: coins of another kind.
        """
        places = np.flatnonzero(checked_coins(coins, self.count)).astype(np.int32)
        zeros = jax.tree.map(
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), (len(places), *leaf.shape)),
            source.example,
        )
        return with_canaries(source, (zeros, places), paired=True)

    def watched(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, whose state also keeps the last noisy gradient at the candidates.

        Formal guarantee: what is kept is a part of the noisy gradient that the mechanism is charged
        for, in units of one clipped record: post-processing.
        """
        mechanism = algorithm.mechanism

        def seen(updates: PyTree, inner: PyTree, params: PyTree, moved: PyTree) -> jax.Array:
            found = self._at(updates) * (-mechanism.batch_size / mechanism.l2(updates))
            return found if algorithm.scale is None else found / self._at(algorithm.scale(inner))

        return watching(algorithm, self.columns, seen)

    def _at(self, tree: PyTree) -> jax.Array:
        leaf = jax.tree.leaves(tree)[self.leaf]
        return jnp.ravel(leaf)[jnp.asarray(self.places)].astype(jnp.float32)


def checked_coins(coins: np.ndarray, count: int) -> np.ndarray:
    """The coins; ValueError unless they are bool [count]."""
    if coins.shape != (count,) or coins.dtype != bool:
        raise ValueError(f"coins must be bool [{count}], got {coins.dtype} {coins.shape}")
    return coins


@dataclasses.dataclass(frozen=True, eq=False)
class WithCanaries:
    """The records of another source, then the canaries that take part.

    Attributes:
        real: the other source.
        added: pytree of NumPy arrays [k, ...], the canaries. **Secret**.
        example: shape and dtype of one row.
        paired: rows are pairs (record, place), where the place of a real record is -1.
        on_device: False: rows are gathered on the host.
    """

    real: Source
    added: PyTree = dataclasses.field(repr=False)
    example: PyTree
    paired: bool = False
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.real) + len(jax.tree.leaves(self.added)[0])

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The rows at ``indices``, see ``Source.gather``."""
        indices, mask, count = np.asarray(indices), np.asarray(mask), len(self.real)
        is_real = mask & (indices < count)
        rows = self.real.gather(np.where(is_real, indices, 0), is_real)
        if self.paired:
            rows = rows, np.full(indices.shape, _REAL, np.int32)
        entered = mask & ~is_real
        chosen = indices[entered] - count

        def placed(row: np.ndarray, own: np.ndarray) -> np.ndarray:
            # Copied: the source may hand out what it keeps, or what cannot be written.
            row = np.array(row)
            row[entered] = own[chosen]
            return row

        return jax.tree.map(placed, rows, self.added)


def with_canaries(real: Source, added: PyTree, *, paired: bool = False) -> Source:
    """The records of a source and canaries; on the device where the records are there.

    Args:
        real: the source.
        added: pytree [k, ...] like its rows.
        paired: see ``WithCanaries``.
    """
    if isinstance(real, DeviceArrays):
        arrays = (real.arrays, jnp.full(len(real), _REAL, jnp.int32)) if paired else real.arrays
        return DeviceArrays.of(
            jax.tree.map(
                lambda rows, own: jnp.concatenate([rows, jnp.asarray(own, rows.dtype)]),
                arrays,
                added,
            )
        )
    place = jax.ShapeDtypeStruct((), np.int32)
    return WithCanaries(real, added, (real.example, place) if paired else real.example, paired)


class Watched(NamedTuple):
    """State of a watched algorithm.

    Attributes:
        inner: state of the algorithm's own ``after_noise``.
        seen: float32 [m], the last noisy sum at each candidate's coordinate, downhill, over the
            norm of one clipped record: 1 and noise where the candidate was drawn, 0 and noise where
            it was not.
    """

    inner: PyTree
    seen: jax.Array


def watching(
    algorithm: Algorithm,
    columns: int,
    seen: Callable[[PyTree, PyTree, PyTree, PyTree], jax.Array],
) -> Algorithm:
    """The same algorithm, whose state is a ``Watched`` of its own.

    Args:
        algorithm: watched.
        columns: how many numbers are kept.
        seen: from the noisy gradients, the state and the parameters before the update and the
            update of the parameters to the numbers.
    """
    inner = optax.with_extra_args_support(algorithm.after_noise)

    def init(params: PyTree) -> Watched:
        return Watched(inner.init(params), jnp.zeros(columns, jnp.float32))

    def update(
        updates: PyTree, state: Watched, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Watched]:
        moved, after = inner.update(updates, state.inner, params, **extra)
        return moved, Watched(after, seen(updates, state.inner, params, moved))

    def through(read: Callable[[PyTree], Any] | None) -> Callable[[PyTree], Any] | None:
        return None if read is None else (lambda state: read(state.inner))

    return dataclasses.replace(
        algorithm,
        after_noise=optax.GradientTransformationExtraArgs(init, update),
        scale=through(algorithm.scale),
        raw=through(algorithm.raw),
        counts=through(algorithm.counts),
        average=through(algorithm.average),
    )


def candidates(count: int, params: PyTree) -> Canaries:
    """``count`` candidates, each in a coordinate of its own of the largest leaf.

    Args:
        count: m.
        params: pytree of the parameters' shapes.

    Raises:
        ValueError: more candidates than the largest leaf has coordinates.
    """
    count = arguments.integer("canaries", count, least=1)
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)]
    leaf = int(np.argmax(sizes))
    if count > sizes[leaf]:
        raise ValueError(
            f"canaries must be at most the {sizes[leaf]} coordinates of the largest parameter, "
            f"got {count}"
        )
    order = np.random.Generator(np.random.Philox(key=_PLACES)).permutation(sizes[leaf])
    return Canaries(leaf, order[:count])


def check(algorithm: Algorithm) -> None:
    """Raises ValueError for algorithms that such canaries cannot audit."""
    mechanism = algorithm.mechanism
    if mechanism.strategy is not None:
        raise ValueError(
            "canaries must be 0 with correlated noise: the audit scores every step by itself, as "
            "if its noise were independent; got a number of them"
        )
    if not isinstance(mechanism.sampling, Poisson | FullBatch | RandomAllocation):
        raise ValueError(
            f"canaries must be 0 for {name_of(mechanism.sampling)} sampling: a record more changes "
            "who else is drawn, got a number of them"
        )
    if mechanism.records_per_user is not None:
        raise ValueError(
            "canaries must be 0 where a user is the privacy unit: each is a record by itself, got "
            "a number of them"
        )
    if isinstance(algorithm.mechanism.rule, CoordinateBox) or algorithm.raw is not None:
        raise ValueError(
            "canaries must be 0 for an algorithm that clips every coordinate by itself or by raw "
            "moments: a gradient in one coordinate says nothing there, got a number of them"
        )


def scores(seen: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Scores [m], higher for candidates that seem to have taken part; see ``log_odds``."""
    seen = np.nan_to_num(np.asarray(seen, np.float64), nan=0.0, posinf=1e6, neginf=-1e6)
    return log_odds(seen, np.ones(()), algorithm)


def log_odds(seen: np.ndarray, size: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Log odds [m] of having taken part.

    The log-likelihood ratio of a sampled Gaussian, summed over the steps: the most powerful test
    where the other records leave the candidate's direction alone. What they do there is estimated
    and taken away, and with it a share of every step, the candidate's own part included, so that
    1 - share is left of a draw. In the Gaussian model of the others' part that is the exact
    likelihood ratio of one draw: with the noise's and the others' covariance S, it is
    s'S^-1 y - s'S^-1 s / 2. The noise is taken to be as large as what is left.

    Args:
        seen: [steps, m], the noisy sums along the candidates, in units of one clipped record.
        size: [steps, m] or [], what a candidate adds to its own.
        algorithm: of the run.
    """
    z, rate, share = noise_of(algorithm, len(seen)), rate_of(algorithm), np.zeros((1, 1))
    if rate < _RARE:  # at a large rate nothing is taken away
        shared, share = _shared(seen, z, rate)
        seen = seen - shared
        seen = seen - _background(seen)
    # By step: ordinary gradients shrink as the model learns. Of few candidates, over all steps.
    axis = 1 if seen.shape[1] >= _MANY else None
    spread = 1.4826 * np.median(np.abs(seen) / np.maximum(z, 1e-6), axis=axis, keepdims=True)
    variance = np.square(np.maximum(z * np.maximum(spread, 1.0), 1e-6))
    ratios = size * (2 * seen - (1 - share) * size) / (2 * variance)
    with np.errstate(divide="ignore"):
        stay = np.log1p(-rate)
    return np.sum(np.logaddexp(stay, np.log(rate) + ratios), axis=0)


def last_scores(seen: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Scores [m] from the sum of the noisy gradients alone: all that SGD's last iterate has.

    The log-likelihood ratio of a sum over T steps with noise of variance z^2 each, of which a
    candidate that took part is in a binomial number. What ordinary records do at a coordinate
    cannot be told from noise here, so the noise is taken to be as large as the sums' spread.
    """
    seen = np.nan_to_num(np.asarray(seen, np.float64), nan=0.0, posinf=1e6, neginf=-1e6)
    z, rate = noise_of(algorithm, len(seen)), rate_of(algorithm)
    total = seen.sum(axis=0)
    total = total - (np.median(total) - len(seen) * rate / 2)
    variance = max(
        np.square(z).sum(), np.square(1.4826 * np.median(np.abs(total - np.median(total))))
    )
    spread = 6 * np.sqrt(len(seen) * rate * (1 - rate)) + 1
    first, last = len(seen) * rate - spread, len(seen) * rate + spread
    times = np.arange(max(0, int(first)), min(len(seen), int(last) + 1) + 1)
    weights = binomial_pmf(len(seen), rate)[times]
    with np.errstate(divide="ignore"):
        ratios = np.log(weights)[:, None] + (2 * total - times[:, None]) * times[:, None] / (
            2 * np.maximum(variance, 1e-12)
        )
    return special.logsumexp(ratios, axis=0)


def simulated(coins: np.ndarray, steps: int, algorithm: Algorithm, seed: int) -> np.ndarray:
    """float [steps, m], what a run would release of its candidates if nothing else were there."""
    rng = np.random.default_rng(seed)
    drawn = (rng.random((steps, len(coins))) < rate_of(algorithm)) & coins
    return drawn + noise_of(algorithm, steps) * rng.standard_normal(drawn.shape)


def _shared(seen: np.ndarray, z: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """The part that moves many coordinates together, which no candidate does: the low-rank one.

    Also the share [steps, 1] of a number of one step that is counted as such.

    Ordinary gradients of a layer have a low rank; noise has none, and each candidate is alone in
    its coordinate. The singular values above the noise's edge are kept, shrunk by what noise adds
    to them (Gavish and Donoho 2017, arXiv:1405.7511, Frobenius loss). Nothing is taken away where
    the candidates themselves, all together, would come near the edge.
    """
    found, shares = [], []
    for part, level in zip(
        *(np.array_split(each, -(-len(seen) // _BLOCK)) for each in (seen, z)), strict=True
    ):
        scaled = part / np.maximum(level, 1e-6)
        steps, m = scaled.shape
        noise, ratio = np.sqrt(max(steps, m)), min(steps, m) / max(steps, m)
        edge = noise * (1 + np.sqrt(ratio))
        signal = rate * np.sqrt(steps * m) / 2 / max(float(level.mean()), 1e-6)
        if min(steps, m) < _FEWEST or signal > 0.5 * edge:
            found.append(np.zeros_like(part))
            shares.append(np.zeros((steps, 1)))
            continue
        # The eigenvectors of the smaller side, which cost far less than all singular vectors.
        wide = scaled if steps <= m else scaled.T
        squares, left = np.linalg.eigh(wide @ wide.T)
        above = squares > edge**2
        y, left = np.sqrt(squares[above]) / noise, left[:, above]
        kept = np.sqrt(np.square(np.square(y) - ratio - 1) - 4 * ratio) / np.square(y)
        lowered = (left * kept) @ (left.T @ wide)
        found.append((lowered if steps <= m else lowered.T) * level)
        by_step = left if steps <= m else scaled @ left / np.sqrt(squares[above])
        shares.append((np.square(by_step) @ kept)[:, None])
    return np.concatenate(found), np.concatenate(shares)


def _background(seen: np.ndarray, width: int = 100) -> np.ndarray:
    """The mean that ordinary records add at each coordinate, over stretches of ``width`` steps.

    A median over a stretch is also moved by noise (and by the candidate itself, which is to be
    found), so it counts only as far as the medians of the coordinates differ by more than noise
    explains: empirical Bayes.
    """
    found = []
    for part in np.array_split(seen, max(1, round(len(seen) / width))):
        middle = np.median(part, axis=0)
        noise = 1.4826 * np.median(np.abs(part - middle))
        by_chance = 1.5708 * noise**2 / len(part)  # variance of a Gaussian's median
        kept = max(0.0, 1 - by_chance / max(float(np.var(middle)), 1e-30))
        found.append(np.broadcast_to(kept * middle, part.shape))
    return np.concatenate(found)


def noise_of(algorithm: Algorithm, steps: int) -> np.ndarray:
    """[steps, 1], the noise multiplier of every step."""
    noise = algorithm.mechanism.noise_multiplier
    if isinstance(noise, NoiseSchedule):
        return np.asarray(noise.table())[:steps, None]
    return np.full((steps, 1), float(noise))


def rate_of(algorithm: Algorithm) -> float:
    """The share of the steps that a record is drawn in."""
    mechanism = algorithm.mechanism
    return rate(mechanism.sampling, mechanism.batch_size, mechanism.dataset_size)
