"""Dominating pairs of a Gaussian release that holds a record with a known probability.

docs/sampling_bounds.md derives them (Theorem 1). Everything here is in noise standard deviations.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array
from jaxdp.accounting.cells import normal_cells

_U = 2.0**-53


class Mixture:
    """The pair of (1-k) A + k B against (1-k) A + k C, for the worst unit Gaussians at distances.

    With the record the release is B, without it C, and A where neither is drawn. The profile for
    epsilon >= 0 is attained with A and C on the same side of B, for epsilon < 0 with A and B on the
    same side of C; both losses are monotone, and what is left of the probability has loss 0.
    Distances (AB, AC, BC) in contributions: Poisson (1, 0, 1), its reverse (0, 1, 1), Poisson under
    replace-one (1, 1, 2), a batch of fixed size under replace-one (2, 2, 2).

    Masses are those of edges moved by at most ``slack``, up to ``rounding``.

    Args:
        probability: k in (0, 1].
        noise_multiplier: z > 0.
        distances: those of the means of A and B, A and C, B and C, each 0, 1 or 2 contributions.
    """

    infinite = 0.0
    rounding = 1e-12

    def __init__(
        self, probability: float, noise_multiplier: float, distances: tuple[int, int, int]
    ) -> None:
        self.k, self.distances = probability, distances
        self.unit = 1 / noise_multiplier
        self.ab, self.ac, self.bc = (self.unit * d for d in distances)
        if self.k == 1:
            self.center = 0.5 * self.bc**2
        else:
            middle = float(np.log1p(self.k * np.expm1(-0.5 * self.bc**2)))
            self.center = 0.0 if self.ab and self.ac else (middle if self.ab else -middle)

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """(P masses, Q masses, P - Q, bound on the error of the difference) of the cells, [m] each.

        A has no part in the difference, which so keeps its digits where k is small.
        """
        x = self._outputs(np.maximum(edges, 0.0), self.distances[0])[::-1]
        up = [normal_cells(x, mean, 1.0)[::-1] for mean in (self.ab, 0.0, self.bc)]
        y = self._outputs(np.maximum(-edges, 0.0), self.distances[1])
        down = [normal_cells(y, mean, 1.0) for mean in (self.ac, 0.0, self.bc)]
        at_zero = (edges[:-1] < 0) & (edges[1:] >= 0)
        x0, y0 = (float(self._outputs(np.zeros(1), d)[0]) for d in self.distances[:2])
        middle = max(special.ndtr(self.ab - x0) - special.ndtr(y0 - self.ac), 0.0)
        base = (1 - self.k) * (up[0] + down[0] + middle * at_zero)
        p, q = self.k * (up[1] + down[2]), self.k * (up[2] + down[1])
        return base + p, base + q, p - q, self.rounding * (p + q)

    def slack(self, edges: Array) -> float:
        """The loss by which the rounded outputs of finite ``edges`` may lie off them.

        The logs that make up an output are each known to a few units of rounding, and by one unit
        of the output the loss changes by at most the larger distance times the posterior weights of
        B under P and of C under Q. Near the largest loss, which A = B has, the loss itself moves by
        that rounding.
        """
        logit = np.log(self.k) - (np.log1p(-self.k) if self.k < 1 else -np.inf)
        size = abs(np.log(self.k)) + (abs(np.log1p(-self.k)) if self.k < 1 else 0.0)
        largest = 0.0
        for sign, d, base in ((1, self.distances[0], self.ab), (-1, self.distances[1], self.ac)):
            losses = np.maximum(sign * edges, 0.0)
            x = self._outputs(losses, d)
            losses, x = losses[np.isfinite(x)], x[np.isfinite(x)]
            turns = 4 + size + 2 * losses + (base + self.bc) * np.abs(x) + base**2 + self.bc**2
            weight = special.expit(logit - base * x + 0.5 * base**2) + special.expit(
                logit + (self.bc - base) * x - 0.5 * (self.bc**2 - base**2)
            )
            steep = max(d, self.distances[2]) * weight + np.minimum(losses, 1.0)
            largest = max(largest, float(np.max(steep * turns, initial=0.0)))
        return 16 * _U * largest

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        x = self._outputs(np.maximum(losses, 0.0), self.distances[0])
        y = self._outputs(np.maximum(-losses, 0.0), self.distances[1])
        base, p, q = (
            special.ndtr(np.where(losses < 0, below - y, x - above))
            for below, above in ((self.ac, self.ab), (self.bc, 0.0), (0.0, self.bc))
        )
        return (1 - self.k) * base + self.k * p, (1 - self.k) * base + self.k * q

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        far, rare = special.ndtri(tail / 2), special.ndtri(min(tail / (2 * self.k), 0.5))
        low = self._loss(min(self.ac + far, self.bc + rare), self.ac)
        return -low, self._loss(min(self.ab + far, rare), self.ab)

    def log_rest(self, loss: float, order: float) -> float:
        """Bound on log E_Q[(P/Q)^order; L > loss], for a loss >= 0.

        From there the loss grows at most as fast as the output times the larger distance.
        """
        far = max(self.ab, self.bc)
        x = float(self._outputs(np.asarray([loss]), self.distances[0])[0])
        if x == -np.inf:
            return -np.inf
        s, means = (order - 1) * far, np.asarray([self.ab, 0.0])
        logs = (order - 1) * (loss + far * x) - s * means + 0.5 * s * s
        logs = logs + special.log_ndtr(x - means + s)
        with np.errstate(divide="ignore"):
            return float(np.logaddexp.reduce(logs + np.log([1 - self.k, self.k])))

    def _loss(self, x: float, base: float) -> float:
        """Loss at output x, at least 0: B at 0, A at ``base``, C at the distance BC."""
        with np.errstate(divide="ignore"):
            rest = np.log1p(-self.k) + base * x - 0.5 * base**2
        log_k = np.log(self.k)
        without = log_k + self.bc * x - 0.5 * self.bc**2
        return max(0.0, float(np.logaddexp(rest, log_k) - np.logaddexp(rest, without)))

    def _outputs(self, losses: Array, base: int) -> Array:
        """Outputs below which the loss is above ``losses`` >= 0, [m]; -inf where it never is.

        (e^loss - 1) (1-k)/k A/B + e^loss C/B = 1 is quadratic in exp(unit x).
        """
        # Losses beyond 1e300 stand for an empty event; infinities would not subtract.
        losses = np.minimum(losses, 1e300)
        with np.errstate(all="ignore"):
            rest = losses + np.log(-np.expm1(-losses)) + np.log1p(-self.k) - np.log(self.k)
            # log of the coefficients of exp(unit x) to the powers 0, 1 and 2.
            power = [np.full(losses.shape, -np.inf) for _ in range(3)]
            for log_weight, d in ((rest, base), (losses, self.distances[2])):
                power[d] = np.logaddexp(power[d], log_weight - 0.5 * (d * self.unit) ** 2)
            left = np.log(np.maximum(-np.expm1(np.minimum(power[0], 1.0)), 0.0))
            root = np.logaddexp(2 * power[1], np.log(4) + power[2] + left)
            x = (np.log(2) + left - np.logaddexp(power[1], 0.5 * root)) / self.unit
            x = np.where(np.isnan(x), -np.inf, x)
            # One Newton step where a small unit has cost digits: there the exponents are near 0.
            exponent = losses + self.bc * x - 0.5 * self.bc**2
            other = np.exp(rest + self.unit * base * x - 0.5 * (self.unit * base) ** 2)
            slope = self.unit * base * other + self.bc * np.exp(exponent)
            step = (other + np.expm1(exponent)) / slope
            return np.where(np.abs(exponent) < 0.5, x - step, x)


class Branches:
    """A pair whose public branch is drawn first, with the same probabilities under both laws.

    Args:
        branches: (probability, pair), the probabilities known to a relative ``rounding``.
        rounding: of the probabilities.
    """

    infinite = 0.0

    def __init__(self, branches: Sequence[tuple[float, Mixture]], rounding: float) -> None:
        self.branches = [(weight, pair) for weight, pair in branches if weight > 0]
        self.center = max(self.branches, key=lambda branch: branch[0])[1].center
        self.rounding = rounding + 2 * Mixture.rounding

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """As ``discretise.Masses``."""
        found = [[weight * v for v in pair.masses(edges)] for weight, pair in self.branches]
        p, q, gain, error = (np.sum(values, axis=0) for values in zip(*found, strict=True))
        # The branches' probabilities are off by as much under both laws.
        off = np.sum([np.abs(values[2]) for values in found], axis=0)
        return p, q, gain, error + self.rounding * off

    def slack(self, edges: Array) -> float:
        """The largest distance, in loss, of the rounded outputs from finite ``edges``."""
        return max(pair.slack(edges) for _, pair in self.branches)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        found = [(weight, pair.tails(losses)) for weight, pair in self.branches]
        p, q = (np.sum([weight * tails[i] for weight, tails in found], axis=0) for i in (0, 1))
        return p, q

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        spans = [pair.span(min(tail / weight, 0.5)) for weight, pair in self.branches]
        return min(low for low, _ in spans), max(high for _, high in spans)


def renyi(pair: Mixture, orders: Array) -> Array:
    """Renyi divergence of P from Q at orders > 1, [k], never below the truth; inf where unknown.

    With t the likelihood ratio, E_Q[t^a] - 1 is the mean of t^a - 1 - a(t - 1), convex in t: on a
    cell of losses it is below its chord, whose mean follows from the cell's two masses.
    """
    reach = max(1e-200, *(abs(end) for end in pair.span(1e-290)))
    grid = [np.linspace(0.0, reach, 1500), np.geomspace(min(1e-9, 1e-3 * reach), reach, 1500)]
    up = np.unique(np.concatenate(grid))
    down = np.concatenate([[-np.inf], -up[::-1]])
    # Above 0 by masses under P: the likelihood ratio may be large where those of Q underflow.
    p, share = _shares(pair, up, above=True)
    q, other = _shares(pair, down, above=False)
    out = np.full(orders.shape, np.inf)
    with np.errstate(all="ignore"):
        log_p = np.log(p)
        for i, a in enumerate(orders.tolist()):
            log_high = np.where(a * up < 600, np.log(_convex(up, a)) - up, (a - 1) * up)
            log_rest = pair.log_rest(reach, a)
            scale = max(0.0, log_rest, float(np.max(log_p + log_high[1:])))
            left, right = (np.exp(log_p + log - scale) for log in (log_high[:-1], log_high[1:]))
            low = _convex(down, a)
            below = float(q @ (other * low[1:] + (1 - other) * low[:-1])) * np.exp(-scale)
            total = float(np.sum(share * right + (1 - share) * left)) + below
            total = (total + np.exp(log_rest - scale)) * (1 + 1e-9)
            log_moment = scale + np.log(total + np.exp(-scale)) if scale else np.log1p(total)
            out[i] = log_moment / (a - 1) * (1 + 1e-12)
    return np.where(np.isnan(out), np.inf, out)


def _shares(pair: Mixture, loss: Array, above: bool) -> tuple[Array, Array]:
    """(mass, its part at the upper end) of each cell: the two masses of the cell are kept.

    Under P if ``above``, else under Q. More at the upper end is safe: all doubt goes there.
    """
    p, q = pair.cells(loss)
    gap = np.diff(loss)
    # A mass is a difference of tails, which are known to 1e-13 of themselves.
    step = -1 if above else 1
    with np.errstate(all="ignore"):
        doubt = sum(np.cumsum(m[::step])[::step] / m for m in (p, q)) * 2e-13
        rise = np.log(p) - np.log(q) - loss[:-1]
        share = np.expm1(-rise) / np.expm1(-gap) if above else np.expm1(rise) / np.expm1(gap)
        share = share + 1e-6 + doubt / gap
    # The lowest cell has no lower end: there the convex function is at most its value at t = 0.
    share = np.where(np.isinf(gap), 0.0, np.nan_to_num(share, nan=1.0))
    return (p if above else q), np.clip(share, 0.0, 1.0)


def _convex(loss: Array, order: float) -> Array:
    """t^a - 1 - a (t - 1) at t = e^loss, to 1e-10 of itself."""
    a = order
    series = (a - 1) * a / 2 * loss**2 * (1 + loss * ((a + 1) / 3 + (a * a + a + 1) / 12 * loss))
    return np.where(np.abs(a * loss) < 1e-3, series, np.expm1(a * loss) - a * np.expm1(loss))
