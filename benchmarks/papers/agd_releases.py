"""Releases of AGD from the private records: noisy directions, and choices of a step size."""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from benchmarks.papers import choices
from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.data import models
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import issuer_of
from jaxdp.mechanism import with_rule
from jaxdp.noise.normals import add_normals
from jaxdp.runs import assemble
from jaxdp.runs.config import RunConfig
from jaxdp.sampling import Poisson, Sampler
from jaxdp.types import Draw, PyTree

# Of the authors' program: by how much a refused direction raises the budget, and the bound on a
# record's loss.
GAMMA, LOSS_BOUND = 0.1, 3.0


@dataclasses.dataclass
class Releases:
    """Charges releases whose noise earlier ones chose, each on a Poisson draw of its own.

    Formal guarantee: all releases together are (epsilon, delta)-differentially private, one record
    added or removed: each is charged to a Rényi filter before its draw, and refused where it does
    not fit. Nothing else of the records leaves ``gradient`` and ``choice``. A step is one event:
    where an interrupt took the ticket of a step, that step is passed over, as the event that was
    decided for it, and what is asked next has the step after it.

    Attributes:
        budget: the filter; what was released before is charged already.
        sampling_prob: q, of every draw.
        configuration: what else fixes the releases, public; goes into every key.
        made: how many gradients and choices were released.
    """

    budget: acc.RenyiFilter
    sampling_prob: float
    configuration: str = ""
    made: dict[str, int] = dataclasses.field(default_factory=lambda: {"gradient": 0, "choice": 0})
    # The release that was decided last: its step, and what the issuer charges for it.
    _last: tuple[int, acc.Event, dict[str, float]] = (-1, acc.Gaussian(0.0), {})

    def __repr__(self) -> str:
        public = self.budget.epsilon, self.budget.delta, self.sampling_prob, self.configuration
        return f"Releases{public!r}"

    def stretch(self, step: int) -> tuple[acc.Event, dict[str, float], int]:
        """For the issuer: the release that was decided for a step; a choice has no noise."""
        decided, event, multipliers = self._last
        if step != decided:
            raise ValueError(f"step must be one that a release was decided for, got {step}")
        return event, multipliers, step + 1

    def gradient(self, sampler: Sampler, multiplier: float) -> Draw | None:
        """The draw of a sum with Gaussian noise of this multiplier; None if it does not fit."""
        event = acc.PoissonSampled(acc.Gaussian(multiplier), self.sampling_prob)
        return self._drawn(sampler, event, "gradient", multiplier)

    def choice(self, sampler: Sampler, epsilon: Fraction) -> Draw | None:
        """The draw of an epsilon-private choice; None if it does not fit.

        On a Poisson draw it is log(1 + q(e^epsilon - 1))-private (Balle, Barthe and Gaboardi 2018,
        arXiv:1807.01647v2, Theorem 8).
        """
        amplified = math.log1p(self.sampling_prob * math.expm1(epsilon)) * (1 + 1e-12)
        return self._drawn(sampler, acc.EpsilonDelta(amplified, 0.0), "choice", 0.0)

    def _drawn(
        self, sampler: Sampler, event: acc.Event, part: str, multiplier: float
    ) -> Draw | None:
        if not self.budget.admits(event):
            return None
        self.budget.charge(event)
        self.made[part] += 1
        if sampler.step == self._last[0]:
            # An interrupt came before its ticket: the ledger may hold the step, as that event.
            sampler.issuer.take()
        self._last = sampler.step, event, {part: multiplier}
        return sampler.draw()


class Asked:
    """The questions to the private records: a direction, a better one, the best step size.

    Every answer is charged by ``Releases``; None where the budget has no room for it. Attributes:
    ``multiplier``, of the next gradient's noise; ``releases``; ``refused``, how many directions.

    Args:
        config: resolved.
        data: (x [n, ...], y [n]), all records.
        share: as for ``run``.
        secret: of the run.
        budget: the filter.
    """

    def __init__(
        self,
        config: RunConfig,
        data: tuple[np.ndarray, np.ndarray],
        share: float,
        secret: Secret,
        budget: acc.RenyiFilter,
    ):
        assert isinstance(config.noise_multiplier, float)
        assert config.dataset_size is not None
        self.multiplier = config.noise_multiplier
        self._epsilon = Fraction(share / self.multiplier).limit_denominator(1_000)
        self._loss_fn = models.cross_entropy(assemble.model_of(config))
        lot, size = config.batch_size, config.dataset_size
        mechanism = with_rule(clipping.clip(config.l2_clip_norm), self.multiplier, lot, size)
        self._grad_fn = mechanism.clipped_grad(self._loss_fn)
        self.releases = Releases(budget, lot / size, f"{mechanism!r} {self._epsilon}")
        issuer = issuer_of(self.releases, None, secret)
        rows = -(-(lot + 6 * math.isqrt(lot)) // 8) * 8
        self._sampler = Sampler(Poisson(lot / size), len(data[0]), rows, issuer)
        self._data = jax.device_put(data)
        # Of this stream alone: its name is in the issuer's label, as in the keys of the noise.
        self._secret = issuer.secret.child(f"choices {issuer.label}")
        self._gradient: PyTree = None
        self.refused = 0

    def direction(self, params: PyTree) -> PyTree | None:
        """A noisy gradient of norm 1."""
        self._gradient = self._noisy(params, self.multiplier)
        return None if self._gradient is None else _unit(self._gradient)

    def improved(self, params: PyTree) -> PyTree | None:
        """The last gradient averaged with one of γ times its budget, of norm 1.

        From now on gradients have the budget of both: noise smaller by √(1 + γ).
        """
        self.refused += 1
        more = self._noisy(params, self.multiplier / math.sqrt(GAMMA))
        if more is None:
            return None
        self.multiplier /= math.sqrt(1 + GAMMA)
        self._gradient = _averaged(self._gradient, more)
        return _unit(self._gradient)

    def best(self, params: PyTree, direction: PyTree, sizes: np.ndarray) -> int | None:
        """The place of a step size whose loss is about the least; 0 is no step."""
        draw = self.releases.choice(self._sampler, self._epsilon)
        if draw is None:
            return None
        assert draw.ticket is not None
        draw.ticket.spend("a choice of a step size", verified=True)
        totals = _totals(self._loss_fn, params, direction, jnp.asarray(sizes), self._data, draw)
        rng = self._secret.philox("step size", draw.step)
        return choices.permute_and_flip(totals, self._epsilon / choices.UNITS, rng)

    def _noisy(self, params: PyTree, multiplier: float) -> PyTree | None:
        draw = self.releases.gradient(self._sampler, multiplier)
        if draw is None:
            return None
        assert draw.ticket is not None
        summed = self._grad_fn(params, self._data, draw)
        words = draw.ticket.spend("a noisy gradient", verified=True).words[0]
        std = np.nextafter(np.float32(multiplier * float(summed.l2)), np.float32(np.inf))
        return _with_noise(summed.value, std, words)


_with_noise = jax.jit(add_normals)


@jax.jit
def _unit(tree: PyTree) -> PyTree:
    norm = optax.tree.norm(tree)
    return jax.tree.map(lambda leaf: leaf / norm, tree)


@jax.jit
def _averaged(first: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: (a + GAMMA * b) / (1 + GAMMA), first, more)


@jax.jit
def moved(params: PyTree, direction: PyTree, size: ArrayLike) -> PyTree:
    """``params`` after a step of this size against ``direction``."""
    return jax.tree.map(lambda p, d: p - size * d, params, direction)


def _totals(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    direction: PyTree,
    sizes: jax.Array,
    data: PyTree,
    draw: Draw,
) -> list[int]:
    """[k]: the draw's loss after each step, in whole units.

    One record more or less changes each by 0 to ``choices.UNITS``, the same way, if a record's loss
    is its own (docs/proofs/clip_bound.md, assumption 2). One program of one shape takes every
    physical batch: another number of rows would round the losses of all others otherwise.
    """
    total = np.zeros(len(sizes), np.int64)
    for places, mask in zip(draw.indices, draw.mask, strict=True):
        units = _losses(loss_fn, params, direction, sizes, data, places, mask)
        total += np.asarray(units).sum(axis=1, dtype=np.int64)
    return [int(each) for each in total]


@functools.partial(jax.jit, static_argnums=0)
def _losses(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    direction: PyTree,
    sizes: jax.Array,
    data: PyTree,
    places: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """int32 [k, m]: each record's loss after each step, bounded, in whole units; 0 where masked."""
    rows = jax.tree.map(lambda x: x[places], data)

    def after(size: jax.Array) -> jax.Array:
        losses = jax.vmap(functools.partial(loss_fn, moved(params, direction, size)))(rows)
        share = jnp.where(jnp.isnan(losses), 1.0, jnp.clip(losses / LOSS_BOUND, 0.0, 1.0))
        return jnp.where(mask, jnp.floor(share * choices.UNITS).astype(jnp.int32), 0)

    return jax.lax.map(after, sizes)
