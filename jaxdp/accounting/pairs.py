"""The dominating pair of a Poisson-sampled Gaussian step, with its masses to full precision."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.cells import normal_cells
from jaxdp.accounting.loss import log_ratio, posterior, separation

_U = 2.0**-53


@dataclass(frozen=True)
class SampledGaussian:
    """The worst pair of a Poisson-sampled (or full-batch) Gaussian step in one direction.

    The pairs, and who proved them, stand in ``jaxdp.accounting.loss``. Both ends of a guarantee may
    rest on them: a record that always contributes the same unit vector attains them.

    Attributes:
        step: the step; its sampling is "poisson".
        relation: the neighbouring relation.
        reverse: the absent record's direction. Replace-one is symmetric.
    """

    step: Step
    relation: Relation
    reverse: bool = False

    rounding = 8e-13  # of 40 standard deviations: exp(-t^2/2) with t rounded, docs/certificate.md
    infinite = 0.0

    @property
    def center(self) -> float:
        """The loss of a step whose record was not sampled, or typical of a full batch."""
        sampled = 1.0 if self.step.sampling_prob == 1 and not self.reverse else 0.0
        loss = float(self._loss(np.asarray([sampled]))[0])
        return -loss if self.reverse else loss

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        reach = -z * float(special.ndtri(max(tail, 1e-310) / 2))
        sampled = -z * float(special.ndtri(min(max(tail, 1e-310) / (2 * q), 0.5)))
        least = -max(reach, sampled) - (self.relation is Relation.REPLACE_ONE)
        ends = np.asarray([least, max(reach, 1 + sampled)])
        low, high = (float(v) for v in self._loss(ends))
        if q < 1 and self.relation is not Relation.REPLACE_ONE:
            # What rounding cannot tell from the least loss is not left beyond it.
            floor = math.log1p(-q)
            low = floor * (1 + 1e-15) if low < floor * (1 - 1e-10) else low
        return (-high, -low) if self.reverse else (low, high)

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """(P masses, Q masses, P - Q, bound on the error of the difference) of the cells, [m] each.

        The part that both laws share is left out of the difference, which so keeps its digits where
        hardly any record is sampled.
        """
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        x = self.output(-edges[::-1] if self.reverse else edges)
        base, present = normal_cells(x, 0.0, z), normal_cells(x, 1.0, z)
        absent = normal_cells(x, -1.0, z) if self.relation is Relation.REPLACE_ONE else base
        p, other = (1 - q) * base + q * present, (1 - q) * base + q * absent
        gain, error = q * (present - absent), self.rounding * q * (present + absent)
        if self.reverse:
            return other[::-1], p[::-1], -gain[::-1], error[::-1]
        return p, other, gain, error

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        sign = 1.0 if self.reverse else -1.0
        x = self.output(-losses if self.reverse else losses)
        base, present = special.ndtr(sign * x / z), special.ndtr(sign * (x - 1) / z)
        absent = base
        if self.relation is Relation.REPLACE_ONE:
            absent = special.ndtr(sign * (x + 1) / z)
        p, other = (1 - q) * base + q * present, (1 - q) * base + q * absent
        return (other, p) if self.reverse else (p, other)

    def slack(self, edges: Array) -> float:
        """The largest distance, in loss, of the rounded outputs from finite ``edges``."""
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        x = self.output(-edges if self.reverse else edges)
        x = x[np.isfinite(x)]
        wide = np.abs(x) if self.relation is Relation.REPLACE_ONE else x
        steep = posterior(wide, z, q) * separation(self.relation)
        turns = 3 + (2 * np.abs(x) + 1) / z**2
        largest = float(np.max(steep * turns, initial=0.0))
        return 8 * _U * (largest + 2 * float(np.max(np.abs(edges), initial=0.0)))

    def _loss(self, x: Array) -> Array:
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        loss = log_ratio(x, z, q)
        return loss - log_ratio(-x, z, q) if self.relation is Relation.REPLACE_ONE else loss

    def output(self, loss: Array) -> Array:
        """The output x at which the forward loss is ``loss``; -inf below its infimum."""
        z, q = self.step.noise_multiplier, self.step.sampling_prob
        if self.relation is Relation.REPLACE_ONE:
            if q == 1:
                return np.asarray(loss * (z * z / 2))
            # u = e^(x/z^2) solves B u^2 - (1-q)(e^loss - 1) u - e^loss B = 0,
            # B = q e^(-1/(2 z^2)).
            half = np.abs(loss) / 2
            with np.errstate(divide="ignore"):
                log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
            log_y = math.log1p(-q) - math.log(q) + 0.5 / (z * z) + log_sinh
            small = np.arcsinh(np.exp(np.minimum(log_y, 300)))
            asinh = np.where(log_y > 300, log_y + math.log(2), small)
            return np.asarray(z * z * np.sign(loss) * (half + asinh))
        if q == 1:
            return np.asarray(z * z * loss + 0.5)
        # log(1 + (e^loss - 1)/q) = loss - log q + log(1 - (1 - q) e^-loss).
        # Also below, where q is near 1 and the other form would cancel.
        direct = (loss > 30) | (loss < -0.5)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30.0)) / q, -1.0))
            inside = np.maximum(-(1 - q) * np.exp(-np.where(direct, loss, 30.0)), -1.0)
            far = loss - math.log(q) + np.log1p(inside)
        return np.asarray(z * z * np.where(direct, far, near) + 0.5)


def gaussian_pairs(step: Step, relation: Relation) -> tuple[SampledGaussian, ...]:
    """The pairs of one Poisson-sampled or full-batch step, one for each direction."""
    both = (False,) if relation is Relation.REPLACE_ONE else (False, True)
    return tuple(SampledGaussian(step, relation, reverse) for reverse in both)
