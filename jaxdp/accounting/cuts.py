"""Terms of the sum over bands: a step cut softly above, and the moments of the rest."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.loss import (
    Array,
    LossTable,
    Pair,
    grid_width,
    mass_window,
    tabulate,
    weighted_expm1,
)
from jaxdp.accounting.saddle import Composition, Unresolved

_SOFT = 0.5  # width of a cut in noise standard deviations


@dataclass(frozen=True)
class Part:
    """The tables of one kind of step in one term.

    Attributes:
        below: [m] log weights of what is below the lower cut (the only one, in the lowest term).
        band: [m] log weights of what lies between the cuts; all -inf in the lowest term.
        table: the uncut table.
        cut_off: (first, second) law's probability of what ``below`` leaves out.
        count: how many such steps.
    """

    below: Array
    band: Array
    table: LossTable
    cut_off: tuple[float, float]
    count: int


@dataclass(frozen=True)
class Band:
    """One term: what the cut at level ``k`` adds to the cut at level ``k - 1``.

    Attributes:
        composition: one direction of the run.
        upper: log tail probability at the upper cut (of the whole run), or None for no cut.
        lower: the same at the lower cut; None when this is the lowest term.
    """

    composition: Composition
    upper: float | None
    lower: float | None

    def parts(self, order: float, last: float) -> list[Part]:
        """The tables of each kind of step for orders up to ``order``, frequencies to ``last``."""
        out = []
        total = math.log(sum(n for _, n in self.composition.pairs))
        for pair, n in self.composition.pairs:
            left, right = self.composition.window(pair)
            z = pair.step.noise_multiplier
            tops = [
                None if v is None else self._cut(pair, v - total) for v in (self.upper, self.lower)
            ]
            if tops[0] is not None:
                right = min(right, tops[0] + 6.5 * _SOFT * z)
            # A soft cut adds frequencies up to 12.5/width to the integrand over the output.
            width = 1 / (1 / grid_width(pair, (left, right), order, last) + 2.0 / (_SOFT * z))
            table = tabulate(pair, (left, right), width)
            if table is None:
                raise Unresolved("a step needs too many nodes")
            first = math.floor(left / width)
            x: Array = width * (first + np.arange(table.loss.size, dtype=np.float64))
            below_upper = _log_below(x, tops[0], _SOFT * z)
            if tops[1] is None:
                tails = _cut_off(pair, tops[0], _SOFT * z)
                nothing = np.full(x.size, -np.inf)
                out.append(Part(table.log_weight + below_upper, nothing, table, tails, n))
                continue
            below_lower = _log_below(x, tops[1], _SOFT * z)
            with np.errstate(divide="ignore", invalid="ignore"):
                # Of the two ways to write the difference, the one of the small tails.
                upper_tail = -np.expm1(below_upper)
                lower_tail = -np.expm1(below_lower)
                low_side = x < tops[1]
                gap = np.where(
                    low_side, lower_tail - upper_tail, np.exp(below_upper) - np.exp(below_lower)
                )
                band = np.log(np.maximum(gap, 0.0))
            below = table.log_weight + below_lower
            tails = _cut_off(pair, tops[1], _SOFT * z)
            out.append(Part(below, table.log_weight + band, table, tails, n))
        return out

    def _cut(self, pair: Pair, log_tail: float) -> float:
        return mass_window(pair, log_tail)[1]

    def log_moment(self, c: float) -> float:
        """log of the term's E[exp(c loss)] (a difference of two), on the real axis."""
        base, ratio = 0.5 * c * (c + 1) * self.composition.mu2, 0.0
        for part in self.parts(c, 0.0):
            log_below = float(special.logsumexp(part.below + c * part.table.loss))
            base += part.count * log_below
            if self.lower is not None:
                log_band = float(special.logsumexp(part.band + c * part.table.loss))
                ratio += part.count * float(np.logaddexp(0.0, log_band - log_below))
        if self.lower is None:
            return base
        return base + (ratio + math.log(-math.expm1(-ratio)) if ratio > 0 else -math.inf)


def _log_below(x: Array, cut: float | None, width: float) -> Array:
    """log of the soft indicator of x < cut."""
    if cut is None:
        return np.zeros(x.size)
    return np.asarray(special.log_ndtr((cut - x) / width * math.sqrt(2)))


def _cut_off(pair: Pair, cut: float | None, width: float) -> tuple[float, float]:
    """(first, second) law's probability beyond the soft cut: normal laws, widened by the cut."""
    if cut is None:
        return 0.0, 0.0
    q, scale = pair.step.sampling_prob, math.hypot(pair.step.noise_multiplier, width / math.sqrt(2))
    apart, none, sampled = special.ndtr((np.asarray([-1.0, 0.0, 1.0]) - cut) / scale).tolist()
    mixed = (1 - q) * none + q * sampled
    if pair.relation is Relation.REPLACE_ONE:
        return mixed, (1 - q) * none + q * apart
    return (none, mixed) if pair.reverse else (mixed, none)


def log_total(part: Part, c: float) -> tuple[float, float]:
    """log of the cut E[exp(c loss)] and its rounding error; see ``loss.log_moment``.

    With s the soft cut, E[s e^(c loss)] - 1 = E[s (e^(c loss) - 1)] - E[1 - s], from which
    c (E_second[s (e^loss - 1)] - E_second[1 - s] + E[1 - s]) = 0 is taken out. What the nodes miss
    of that zero is charged.
    """
    table, exponent = part.table, part.below + c * part.table.loss
    peak = float(exponent.max())
    if peak > 10:
        value = peak + math.log(float(np.exp(exponent - peak).sum()))
        return value, 4e-16 * (1 + abs(value))
    first, second = part.cut_off
    gain = weighted_expm1(part.below, c * table.loss)
    drift = c * weighted_expm1(part.below - table.loss, table.loss)
    outside = c * (second - first)
    excess = float((gain - drift).sum()) + outside - first
    size = float(np.abs(gain).sum() + np.abs(drift).sum()) + c * (first + second) + first
    missed = abs(float(drift.sum()) - outside)
    return math.log1p(max(excess, -0.999)), 4e-15 * size + missed
