"""Canaries of a real run: candidates that take part by a coin, and the scores that guess the coins.

Each candidate takes part or not by its own fair coin (Steinke, Nasr and Jagielski 2023,
arXiv:2305.08846v1, Algorithm 1). One that takes part is a record like any other: drawn,
differentiated, clipped, summed and noised by the very code that handles the others.

There are two kinds. The gradient of one is a Dirac (Nasr et al. 2023, arXiv:2302.07956v1), in a
coordinate of its own; the noisy gradients are read there. The other is a record for the user's own
loss; what the run released is compared with its own clipped gradient at every step (the
trajectory), and with its loss at the end (the last iterate); or, at no cost in a step, by its
losses before and after the run alone.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from jaxdp import arguments
from jaxdp.audit.bounds import binomial_pmf
from jaxdp.clipping.losses import form_of, with_constants
from jaxdp.clipping.options import paths
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import FullBatch, Poisson, RandomAllocation
from jaxdp.sampling.source import ArraySource, Source
from jaxdp.sampling.text import BucketedText
from jaxdp.types import LossFn, PyTree, filled, like

PARTS = 3  # numbers of a candidate record in every step
_REAL = -1  # the place of a record that is no canary
_PULL = 1e3  # the gradient's size: far beyond any clipping norm in use here
_PLACES = 8  # fixes the coordinates, which are public
_AT_ONCE = 64  # candidates whose gradients are computed together
_KEY = 0  # of a loss that takes one: scores need no randomness of their own
_BLOCK = 1_000  # steps that are looked at together for what the coordinates share
_STRETCH = 100  # steps over which ordinary records add about the same at a coordinate
_FEWEST = 20  # steps, or candidates, below which noise has no edge to speak of
_MANY = 2_000  # candidates that tell a step's noise by themselves
_RARE = 0.25  # up to this rate the median over steps is hardly moved by the candidate itself
_LARGEST = 1e6


class Watched(NamedTuple):
    """State of a watched algorithm.

    Attributes:
        inner: state of the algorithm's own ``after_noise``.
        seen: float32 [k], what the last step shows of the candidates: of each the noisy sum at its
            coordinate, downhill, over the norm of one clipped record: 1 and noise where it was
            drawn, 0 and noise where it was not; of records see ``parts``.
    """

    inner: PyTree
    seen: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """The candidates of an audit; public. Those that took part are the auditor's secret.

    Attributes:
        rows: int [m], the coordinate of each candidate's gradient, all different; or a pytree of
            NumPy arrays [m, ...], records like those of the source, and none of them among these:
            one would be in the sum twice.
        leaf: path of the largest trained leaf, which holds all the coordinates; None of records,
            which have
        loss_fn: their loss, that of the run, and
        params: the parameters before the first step; frozen leaves stay as they are here.
        last: True where records are scored by the last iterate alone, and no step computes a thing.
    """

    rows: PyTree
    leaf: str | None = None
    loss_fn: LossFn | None = None
    params: PyTree = None
    last: bool = False

    @property
    def count(self) -> int:
        """The number m of candidates."""
        return len(jax.tree.leaves(self.rows)[0])

    def loss(self, loss_fn: LossFn) -> LossFn:
        """The loss of the rows that ``entered`` makes: of records the loss itself.

        Else of a pair (record, place). Of a real record, whose place is -1, loss and gradient are
        what they were; of candidate k, whose place is k and whose record is zeros, the loss is a
        pull along its coordinate.

        Args:
            loss_fn: of one record, in any form that ``jaxdp.clipped_grad`` takes.
        """
        if self.leaf is None:
            return loss_fn
        form, places = form_of(loss_fn), jnp.asarray(self.rows)

        def of(params: PyTree, example: tuple[PyTree, jax.Array], key: jax.Array | None) -> PyTree:
            """Loss, and what the user's returns besides, of a pair (record, place)."""
            record, place = example
            found = form(loss_fn, params, record, key)
            value, *aux = found if isinstance(found, tuple) else (found,)
            mine = self._leaf_of(params)[places[jnp.maximum(place, 0)]]
            pulled = jnp.where(place < 0, value, -_PULL * mine.astype(value.dtype))
            return (pulled, *aux) if aux else pulled

        if form.rng is None:
            with_canaries: LossFn = lambda params, example: of(params, example, None)  # noqa: E731
        else:
            with_canaries = lambda params, example, rng: of(params, example, rng)  # noqa: E731
        return with_constants(with_canaries, places, inner=loss_fn)

    def entered(self, source: Source, coins: np.ndarray) -> Source:
        """A source of the real records, then the candidates that take part.

        How many there are is as secret as the coins. It stays on the device where the records are.

        Raises:
            ValueError: coins of another kind.
        """
        if coins.shape != (self.count,) or coins.dtype != bool:
            raise ValueError(f"coins must be bool [{self.count}], got {coins.dtype} {coins.shape}")
        paired, chosen = self.leaf is not None, np.flatnonzero(coins)
        if paired:
            zeros = jax.tree.map(
                lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), (len(chosen), *leaf.shape)),
                source.example,
            )
            added = zeros, chosen.astype(np.int32)
        else:
            added = jax.tree.map(lambda leaf: leaf[chosen], self.rows)
        if isinstance(source, ArraySource) and source.on_device:
            places = jnp.full(len(source), _REAL, jnp.int32)
            return ArraySource.of(
                jax.tree.map(
                    lambda rows, own: jnp.concatenate([rows, jnp.asarray(own, rows.dtype)]),
                    (source.arrays, places) if paired else source.arrays,
                    added,
                )
            )
        if (
            isinstance(source, BucketedText) and not paired
        ):  # a canary's bucket is that of its length
            text = WithCanaries(source.text, added, source.example, paired=False)
            return dataclasses.replace(source, text=text)
        place = jax.ShapeDtypeStruct((), np.int32)
        example = (source.example, place) if paired else source.example
        return WithCanaries(source, added, example, paired)

    def watched(self, algorithm: Algorithm) -> Algorithm:
        """Returns the algorithm; its state also keeps what the last step tells of the candidates.

        The same algorithm where the last iterate alone is scored.

        Formal guarantee: what is kept is a function of the noisy gradient that the mechanism is
        charged for, of the parameters before it, and of the public candidates: post-processing.
        """
        if self.last:
            return algorithm
        inner = optax.with_extra_args_support(algorithm.after_noise)
        numbers = (1 if self.leaf is not None else PARTS) * self.count

        def init(params: PyTree) -> Watched:
            """The algorithm's own state, and numbers of zero."""
            return Watched(inner.init(params), jnp.zeros(numbers, jnp.float32))

        def update(
            updates: PyTree, state: Watched, params: PyTree | None = None, **extra: PyTree
        ) -> tuple[PyTree, Watched]:
            """The algorithm's own update, and what the noisy gradient tells of the candidates."""
            moved, after = inner.update(updates, state.inner, params, **extra)
            # In units of one clipped record, downhill: 1 and noise where a candidate was drawn.
            if self.leaf is None:
                seen = self._compare_records(algorithm.mechanism, updates, params, moved)
            else:
                size = algorithm.mechanism.batch_size / algorithm.mechanism.l2(updates)
                seen = self._leaf_of(updates)[jnp.asarray(self.rows)].astype(jnp.float32) * -size
                if algorithm.scale is not None:
                    scale = self._leaf_of(algorithm.scale(state.inner))
                    seen = seen / scale[jnp.asarray(self.rows)].astype(jnp.float32)
            return moved, Watched(after, seen)

        def through(read: Callable[[PyTree], PyTree] | None) -> Callable[[PyTree], PyTree] | None:
            """The same reading of the algorithm's own state, which lies inside."""
            return None if read is None else (lambda state: read(state.inner))

        # What the algorithm reads of its own state it now finds one level deeper.
        return dataclasses.replace(
            algorithm,
            after_noise=optax.GradientTransformationExtraArgs(init, update),
            scale=through(algorithm.scale),
            raw=through(algorithm.raw),
            counts=through(algorithm.counts),
            average=through(algorithm.average),
        )

    def losses(self, params: PyTree) -> np.ndarray:
        """float64 [m], the losses of candidate records at some parameters."""
        assert self.loss_fn is not None
        value, most = loss_value(self.loss_fn), min(_AT_ONCE, self.count)
        of = lambda params, rows: jax.lax.map(  # noqa: E731
            lambda row: value(params, row), rows, batch_size=most
        )
        return np.asarray(jax.jit(of)(params, jax.tree.map(jnp.asarray, self.rows)), np.float64)

    def _leaf_of(self, tree: PyTree) -> jax.Array:
        """The leaf that holds all the coordinates, flat."""
        assert self.leaf is not None
        return jnp.ravel(jax.tree.leaves(tree)[paths(tree).index(self.leaf)])

    def _compare_records(
        self, mechanism: Mechanism, updates: PyTree, params: PyTree, moved: PyTree
    ) -> jax.Array:
        """float32 [3 m], see ``parts``: of candidate records."""
        assert self.loss_fn is not None
        value, unit, rule = loss_value(self.loss_fn), mechanism.l2(updates), mechanism.rule
        noisy = jax.tree.map(lambda leaf: leaf * (mechanism.batch_size / unit), updates)
        before = filled(params, self.params)
        after = filled(optax.apply_updates(params, moved), self.params)

        def dot(one: jax.Array, other: jax.Array) -> jax.Array:
            """The inner product of two leaves, [1]."""
            return jnp.sum(one.astype(jnp.float32) * other.astype(jnp.float32))[None]

        def of(record: PyTree) -> jax.Array:
            """[3], the noisy sum along the clipped gradient, the gradient's length, the loss after.

            The first two in units of one record's largest contribution. A gradient that is not
            finite has length 0 and tells nothing, as the clipped sum leaves it out.
            """
            grads = like(noisy, jax.grad(value, allow_int=True)(before, record))
            squares = jax.tree.map(lambda g: dot(g, g), grads)
            factors = rule.factors(squares)
            size = jnp.sqrt(_sum(jax.tree.map(lambda f, s: f * f * s, factors, squares)))
            along = _sum(jax.tree.map(lambda f, g, n: f * dot(g, n), factors, grads, noisy))
            fits = jnp.isfinite(size) & (size > 0)
            along, size = along / jnp.where(fits, size, 1.0), size / unit
            numbers = (jnp.where(fits, along, 0.0), jnp.where(fits, size, 0.0))
            return jnp.concatenate([*numbers, value(after, record)[None]])

        records, most = jax.tree.map(jnp.asarray, self.rows), min(_AT_ONCE, self.count)
        return jnp.ravel(jax.lax.map(of, records, batch_size=most).T)


def loss_value(loss_fn: LossFn) -> Callable[[PyTree, PyTree], jax.Array]:
    """The loss of (params, record) as one float32 number, with a fixed key if it takes one."""

    def value(params: PyTree, record: PyTree) -> jax.Array:
        """float32 [], without what the loss returns besides."""
        key = jax.random.key(_KEY, impl="threefry2x32")
        found = form_of(loss_fn)(loss_fn, params, record, key)
        return jnp.asarray(found[0] if isinstance(found, tuple) else found, jnp.float32)

    return value


def _sum(tree: PyTree) -> jax.Array:
    """The sum of all leaves."""
    return jnp.asarray(sum(jax.tree.leaves(tree)))


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
    paired: bool
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
            """One leaf's rows, with the canaries' own in their places."""
            # Copied: the source may hand out what it keeps, or what cannot be written.
            row = np.array(row)
            row[entered] = own[chosen]
            return row

        return jax.tree.map(placed, rows, self.added)


def dirac_canaries(count: int, params: PyTree) -> Canaries:
    """``count`` candidates, each in a coordinate of its own of the largest leaf.

    Args:
        count: m.
        params: pytree of the trained parameters' shapes, None where they are frozen.

    Raises:
        ValueError: more candidates than the largest leaf has coordinates.
    """
    count = arguments.integer("canaries", count, least=1)
    sizes = {
        path: int(np.prod(leaf.shape))
        for path, leaf in zip(paths(params), jax.tree.leaves(params), strict=True)
    }
    leaf = max(sizes, key=lambda path: sizes[path])
    if count > sizes[leaf]:
        raise ValueError(
            f"canaries must be at most the {sizes[leaf]} coordinates of the largest parameter, "
            f"got {count}"
        )
    order = np.random.Generator(np.random.Philox(key=_PLACES)).permutation(sizes[leaf])
    return Canaries(order[:count], leaf)


def require_auditable(algorithm: Algorithm, *, records: bool = False) -> None:
    """Raises ValueError for algorithms that canaries, or those that are records, cannot audit."""
    # A score adds up the steps, and a candidate changes nothing but its own contribution.
    mechanism = algorithm.mechanism
    if mechanism.strategy is not None:
        raise ValueError(
            "canaries must be 0 with correlated noise: the audit scores every step by itself, as "
            "if its noise were independent; got a number of them"
        )
    if not isinstance(mechanism.sampling, Poisson | FullBatch | RandomAllocation):
        raise ValueError(
            f"canaries must be 0 for {mechanism.sampling.name} sampling: a record more changes "
            "who else is drawn, or has a rate of its own; got a number of them"
        )
    if mechanism.records_per_user is not None:
        raise ValueError(
            "canaries must be 0 where a user is the privacy unit: each is a record by itself, got "
            "a number of them"
        )
    if isinstance(mechanism.rule, CoordinateBox) or algorithm.raw is not None:
        raise ValueError(
            "canaries must be 0 for an algorithm that clips every coordinate by itself or by raw "
            "moments: a gradient in one coordinate says nothing there, got a number of them"
        )
    # Of a record the score needs its clipped gradient as the run clipped it.
    for name in ("scale", "bound", "noise", "gradient") if records else ():
        if getattr(algorithm, name) is not None:
            raise ValueError(
                "canaries must be a number for an algorithm that scales or clips by its own state "
                f"({name}): a record's part in its noisy sums is not followed; got records"
            )


def split_parts(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64 [steps, m] thrice: sums along the gradients, their lengths, losses afterwards."""
    along, size, losses = np.split(_as_finite(seen), PARTS, axis=1)
    return along, np.clip(size, 0.0, 1.0), losses


def _as_finite(seen: np.ndarray) -> np.ndarray:
    """float64; numbers that are not finite become 0 or ±1e6."""
    wide = np.asarray(seen, np.float64)
    return np.nan_to_num(wide, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def log_odds(seen: np.ndarray, algorithm: Algorithm, *, records: bool = False) -> np.ndarray:
    """Log odds [m] of having taken part, from every step.

    The log-likelihood ratio of a sampled Gaussian, summed over the steps: the most powerful test
    where the other records leave the candidate's direction alone. What they do there is estimated
    and taken away, and with it a share of every step, the candidate's own part included, so that
    1 - share is left of a draw. In the Gaussian model of the others' part that is the exact
    likelihood ratio of one draw: with the noise's and the others' covariance S, it is
    s'S^-1 y - s'S^-1 s / 2. The noise is taken to be as large as what is left.

    Args:
        seen: [steps, m], the noisy sums along the candidates, in units of one clipped record; of
            ``records`` [steps, 3 m], see ``parts``.
        algorithm: of the run.
        records: what a candidate adds is the length of its own clipped gradient, in place of 1.
    """
    seen, size = split_parts(seen)[:2] if records else (_as_finite(seen), np.ones(()))
    z, rate, share = (
        noise_multipliers(algorithm, len(seen)),
        sampling_rate(algorithm),
        np.zeros((1, 1)),
    )
    if rate < _RARE:  # at a large rate nothing is taken away
        seen, share = subtract_background(seen, z, rate)
    # By step: ordinary gradients shrink as the model learns. Of few candidates, over all steps.
    axis = 1 if seen.shape[1] >= _MANY else None
    spread = 1.4826 * np.median(np.abs(seen) / np.maximum(z, 1e-6), axis=axis, keepdims=True)
    variance = np.square(np.maximum(z * np.maximum(spread, 1.0), 1e-6))
    ratios = size * (2 * seen - (1 - share) * size) / (2 * variance)
    with np.errstate(divide="ignore"):
        stay = np.log1p(-rate)
    return np.sum(np.logaddexp(stay, np.log(rate) + ratios), axis=0)


def last_log_odds(seen: np.ndarray, algorithm: Algorithm, *, records: bool = False) -> np.ndarray:
    """Scores [m] from the end of a run alone, as log odds of having taken part.

    Of gradients the sum of all noisy ones: all that SGD's last iterate has. The log-likelihood
    ratio of a sum over T steps with noise of variance z^2 each, of which a candidate that took part
    is in a binomial number. What ordinary records do at a coordinate looks like noise
    here, so the noise is taken to be as large as the sums' spread.

    Of ``records`` the losses of the last iterate, their ranks as normal numbers: a candidate with a
    small loss seems to have taken part. How far the two halves can differ in the last iterate is
    taken from what was charged, as if every step's gradient stayed in it. Ranks of equal losses are
    equal.
    """
    z, rate = noise_multipliers(algorithm, len(seen)), sampling_rate(algorithm)
    if records:
        from scipy import stats  # takes a second, and training needs none of it

        losses = split_parts(seen)[2]
        distance = len(z) * rate / max(float(np.sqrt(np.square(z).sum())), 1e-6)
        ranks = stats.rankdata(-losses[-1])
        # The mixture of both halves is wider than either.
        normal = special.ndtri((ranks - 0.5) / len(ranks)) * np.sqrt(1 + distance**2 / 4)
        return np.asarray(distance * normal)
    total = _as_finite(seen).sum(axis=0)
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


def loss_falls(seen: np.ndarray) -> np.ndarray:
    """Scores [m], how far the losses fell, from those before and after a run [2, m].

    A loss that is not finite at either end tells nothing: its canary stands in the middle.
    """
    with np.errstate(invalid="ignore"):
        found = np.asarray(seen[0], np.float64) - np.asarray(seen[1], np.float64)
    finite = np.isfinite(found)
    return np.where(finite, found, np.median(found[finite]) if finite.any() else 0.0)


def subtract_background(
    seen: np.ndarray, z: np.ndarray, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Removes the estimated contribution of ordinary records, [steps, m].

    Also returns the fraction [steps, 1] of each step's signal that was removed with it. What moves
    many coordinates together goes first: ordinary gradients of a layer have a low rank, noise has
    none, and each candidate is alone in its coordinate. Nothing of it is removed where the
    candidates themselves, all together, would come near the noise's edge. Then the mean of every
    coordinate over stretches of steps.

    Args:
        seen: [steps, m], the noisy sums along the candidates.
        z: [steps, 1], the noise multipliers.
        rate: the share of the steps that a candidate is drawn in.
    """
    rest, shares = [], []
    for part, level in zip(
        *(np.array_split(each, -(-len(seen) // _BLOCK)) for each in (seen, z)), strict=True
    ):
        scaled = part / np.maximum(level, 1e-6)
        steps, m = scaled.shape
        noise, ratio = np.sqrt(max(steps, m)), min(steps, m) / max(steps, m)
        edge = noise * (1 + np.sqrt(ratio))
        signal = rate * np.sqrt(steps * m) / 2 / max(float(level.mean()), 1e-6)
        if min(steps, m) < _FEWEST or signal > 0.5 * edge:
            rest.append(part)
            shares.append(np.zeros((steps, 1)))
            continue

        # The singular values above the noise's edge are kept, shrunk by what noise adds to them
        # (Gavish and Donoho 2017, arXiv:1405.7511, Frobenius loss). The eigenvectors of the smaller
        # side cost far less than all singular vectors.
        wide = scaled if steps <= m else scaled.T
        squares, left = np.linalg.eigh(wide @ wide.T)
        above = squares > edge**2
        y, left = np.sqrt(squares[above]) / noise, left[:, above]
        kept = np.sqrt(np.square(np.square(y) - ratio - 1) - 4 * ratio) / np.square(y)
        lowered = (left * kept) @ (left.T @ wide)
        rest.append(part - (lowered if steps <= m else lowered.T) * level)
        by_step = left if steps <= m else scaled @ left / np.sqrt(squares[above])
        shares.append((np.square(by_step) @ kept)[:, None])
    left_over = np.concatenate(rest)

    # A median over a stretch is also moved by noise (and by the candidate itself, which is to be
    # found), so it counts only as far as the medians of the coordinates differ by more than noise
    # explains: empirical Bayes.
    means = []
    for part in np.array_split(left_over, max(1, round(len(seen) / _STRETCH))):
        middle = np.median(part, axis=0)
        spread = 1.4826 * np.median(np.abs(part - middle))
        by_chance = 1.5708 * spread**2 / len(part)  # variance of a Gaussian's median
        weight = max(0.0, 1 - by_chance / max(float(np.var(middle)), 1e-30))
        means.append(np.broadcast_to(weight * middle, part.shape))
    return left_over - np.concatenate(means), np.concatenate(shares)


def noise_multipliers(algorithm: Algorithm, steps: int) -> np.ndarray:
    """[steps, 1], the noise multiplier of every step."""
    each = (algorithm.mechanism.multipliers(step) for step in range(steps))
    return np.array([[next(iter(parts.values()))] for parts in each])  # the gradient's comes first


def sampling_rate(algorithm: Algorithm) -> float:
    """The share of the steps that a record is drawn in."""
    mechanism = algorithm.mechanism
    return mechanism.sampling.rate(mechanism.batch_size, mechanism.dataset_size)
