"""Canaries that are records: ordinary inputs for the user's own loss, and their scores.

Each candidate is a record of the training set or not by its own fair coin (Steinke, Nasr and
Jagielski 2023, arXiv:2305.08846v1, Algorithm 1). What the run released is compared with the
candidate's own clipped gradient at every step (the trajectory), and with its loss at the end (the
last iterate).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from jaxdp._shards import hashed
from jaxdp.audit import canaries
from jaxdp.audit.canaries import checked_coins, with_canaries
from jaxdp.clipping.losses import form_of
from jaxdp.clipping.rules import Rule
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sources import Source, as_source
from jaxdp.types import LossFn, PyTree, filled, like

PARTS = 3  # numbers of a candidate in every step
_AT_ONCE = 64  # candidates whose gradients are held together
_LARGEST = 1e6
_KEY = 0  # of a loss that takes one: scores need no randomness of their own


@dataclasses.dataclass(frozen=True, eq=False)
class RecordCanaries:
    """The candidate records of an audit; public. Those that take part are the auditor's secret.

    Attributes:
        records: pytree of NumPy arrays [m, ...], each row a record like those of the source.
        loss_fn: of one record.
        params: before the first step; frozen leaves stay as they are here.
    """

    records: PyTree
    loss_fn: LossFn
    params: PyTree

    @property
    def count(self) -> int:
        """The number m of candidates."""
        return len(jax.tree.leaves(self.records)[0])

    @property
    def columns(self) -> int:
        """The number of numbers that are released of every step."""
        return PARTS * self.count

    @property
    def name(self) -> str:
        """A text that changes with the candidates."""
        return f"{self.count} canaries of records {hashed(self.records)}"

    def loss(self, loss_fn: LossFn) -> Callable[..., Any]:
        """The loss itself: a candidate is differentiated as any record is."""
        return loss_fn

    def entered(self, source: Source, coins: np.ndarray) -> Source:
        """A source of the real records, then the candidates that take part.

        How many there are is as secret as the coins.

        Raises:
            ValueError: coins of another kind.
        """
        coins = checked_coins(coins, self.count)
        return with_canaries(source, jax.tree.map(lambda leaf: leaf[coins], self.records))

    def watched(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, whose state also keeps what the last step tells of the candidates.

        Formal guarantee: what is kept is a function of the noisy gradient that the mechanism is
        charged for, of the parameters before it, and of the public candidates: post-processing.
        """
        mechanism = algorithm.mechanism

        def seen(updates: PyTree, inner: PyTree, params: PyTree, moved: PyTree) -> jax.Array:
            unit = mechanism.l2(updates)
            noisy = jax.tree.map(lambda leaf: leaf * (mechanism.batch_size / unit), updates)
            along, size = self._along(noisy, params, mechanism.rule, unit)
            losses = self._losses(optax.apply_updates(params, moved))
            return jnp.concatenate([along, size, losses])

        return canaries.watching(algorithm, self.columns, seen)

    def _along(
        self, noisy: PyTree, params: PyTree, rule: Rule, unit: float
    ) -> tuple[jax.Array, jax.Array]:
        """float32 [m] twice: the noisy sum along each clipped gradient, and the gradient's length.

        Both in units of one record's largest contribution. A gradient that is not finite has
        length 0 and tells nothing, as the clipped sum leaves it out.
        """
        whole = filled(params, self.params)

        def of(records: PyTree) -> tuple[jax.Array, jax.Array]:
            grads = jax.vmap(jax.grad(self._loss, allow_int=True), (None, 0))(whole, records)
            grads = like(noisy, grads)
            squares = jax.tree.map(lambda g: _of_rows(g, g), grads)
            factors = rule.factors(squares)
            size = jnp.sqrt(_sum(jax.tree.map(lambda f, s: f * f * s, factors, squares)))
            dots = jax.tree.map(lambda f, g, n: f * _of_rows(g, n[None]), factors, grads, noisy)
            fits = jnp.isfinite(size) & (size > 0)
            along = _sum(dots) / jnp.where(fits, size, 1.0)
            return jnp.where(fits, along, 0.0), jnp.where(fits, size / unit, 0.0)

        return self._by_parts(of)

    def _losses(self, params: PyTree) -> jax.Array:
        """float32 [m], each candidate's loss."""
        whole = filled(params, self.params)
        found: jax.Array = self._by_parts(
            lambda records: jax.vmap(self._loss, (None, 0))(whole, records)
        )
        return found

    def _loss(self, params: PyTree, record: PyTree) -> jax.Array:
        form = form_of(self.loss_fn)
        found = form(self.loss_fn, params, record, jax.random.key(_KEY, impl="threefry2x32"))
        value = found[0] if isinstance(found, tuple) else found
        return jnp.asarray(value, jnp.float32)

    def _by_parts(self, of: Callable[[PyTree], Any]) -> Any:
        """Applies ``of`` to all candidates, some at a time."""
        size = min(_AT_ONCE, self.count)
        parts = -(-self.count // size)

        def cut(leaf: np.ndarray) -> jax.Array:
            # The last part is filled up with candidates that are there already.
            whole = np.resize(np.arange(self.count), parts * size)
            return jnp.asarray(leaf[whole]).reshape(parts, size, *leaf.shape[1:])

        found = jax.lax.map(of, jax.tree.map(cut, self.records))
        return jax.tree.map(lambda leaf: leaf.reshape(-1)[: self.count], found)


def _of_rows(one: jax.Array, other: jax.Array) -> jax.Array:
    """[k], the products of the rows of two arrays, each summed; of one row, with all."""
    product = one.astype(jnp.float32) * other.astype(jnp.float32)
    return jnp.sum(product.reshape(len(one), -1), axis=1)


def _sum(tree: PyTree) -> jax.Array:
    total, *others = jax.tree.leaves(tree)
    for leaf in others:
        total = total + leaf
    return jnp.asarray(total)


def record_canaries(
    records: PyTree, loss_fn: LossFn, params: PyTree, source: Source
) -> RecordCanaries:
    """Candidates that are records like those of a source.

    Args:
        records: pytree of arrays [m, ...], a row a candidate; **public**, and none of them a record
            of the source: somebody would be in the sum twice.
        loss_fn: of one record.
        params: before the first step.
        source: the records.

    Raises:
        ValueError: records of another structure, shape or dtype.
    """
    own = as_source(records)
    if own.example != source.example:
        raise ValueError(f"canaries must be records like {source.example}, got {own.example}")
    rows = own.gather(np.arange(len(own)), np.ones(len(own), bool))
    return RecordCanaries(jax.tree.map(np.asarray, rows), loss_fn, params)


def check(algorithm: Algorithm) -> None:
    """Raises ValueError for algorithms whose sums such canaries cannot be found in."""
    canaries.check(algorithm)
    for name in ("scale", "bound", "noise", "gradient"):
        if getattr(algorithm, name) is not None:
            raise ValueError(
                "canaries must be a number for an algorithm that scales or clips by its own state "
                f"({name}): a record's part in its noisy sums is not followed; got records"
            )


def parts(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64 [steps, m] thrice: sums along the gradients, their lengths, losses afterwards.

    Raises:
        ValueError: not three numbers of a candidate in every step.
    """
    if np.ndim(seen) != 2 or not np.size(seen) or np.shape(seen)[1] % PARTS:
        raise ValueError(f"seen must be [steps, {PARTS} m] of records, got {np.shape(seen)}")
    whole = np.nan_to_num(np.asarray(seen, np.float64), nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    along, size, losses = np.split(whole, PARTS, axis=1)
    return along, np.clip(size, 0.0, 1.0), losses


def scores(seen: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Scores [m] from the whole trajectory, higher for candidates that seem to have taken part.

    See ``jaxdp.audit.canaries.log_odds``: what a candidate adds is the length of its own clipped
    gradient, and what moves all candidates alike is taken away.
    """
    along, size, _ = parts(seen)
    return canaries.log_odds(along, size, algorithm)


def last_scores(seen: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """Scores [m] from the losses of the last iterate alone, as log odds.

    The losses' ranks as normal numbers: a candidate with a small loss seems to have taken part. How
    far the two halves can lie apart in the last iterate is taken from what was charged, as if every
    step's gradient stayed in it. Ranks of equal losses are equal.
    """
    from scipy import stats  # takes a second, and training needs none of it

    along, _, losses = parts(seen)
    z, rate = canaries.noise_of(algorithm, len(along)), canaries.rate_of(algorithm)
    apart = len(z) * rate / max(float(np.sqrt(np.square(z).sum())), 1e-6)
    ranks = stats.rankdata(-losses[-1])
    # The mixture of both halves is wider than either.
    normal = special.ndtri((ranks - 0.5) / len(ranks)) * np.sqrt(1 + apart**2 / 4)
    return np.asarray(apart * normal)
