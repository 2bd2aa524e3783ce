"""delta(epsilon) as an integral over a vertical line of complex moments, with its error.

With K(z) = sum_t log E[exp(z loss_t)], for any c > 0

    delta(epsilon) = 1/(2 pi i) * integral over Re z = c of exp(K(z) - z epsilon) / (z (z+1)) dz,

the Laplace inversion of E[(1 - e^(epsilon - loss))+] (Zhu, Dong and Wang 2022, arXiv:2106.08567v2,
Section 4, evaluate privacy profiles from characteristic functions; the line through the saddle
point is what makes it exact for tiny delta). The trapezoid rule with spacing h adds to delta
exactly the aliased copies delta(epsilon + 2 pi k/h) e^(2 pi k c/h), k != 0, which ``period``
bounds.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.base import Unresolved
from jaxdp.accounting.fourier import Complex, fourier_excess
from jaxdp.accounting.loss import Array, LossTable, grid_width, log_moment, tabulate
from jaxdp.accounting.saddle import Composition, Moments, orders_beyond

# Beyond these a line is worse than several, one for each band of outputs.
_MAX_FREQUENCIES = 30_000
_MAX_NODES = 60_000
_ALIAS = 28.0  # aliased copies are kept below e^-28 of delta
DECAYED = 1e-15


@dataclass(frozen=True)
class Contour:
    """Values of the integrand on a line, from which delta follows at any epsilon.

    Attributes:
        c: real part of the line.
        frequencies: [n] imaginary parts, equally spaced from 0.
        values: [n] complex; trapezoid weight * exp(K(z) - K(c)) / (pi z (z+1)).
        log_scale: K(c).
        rounding: bound on the relative rounding error of the values.
        decayed: True if the integrand fell below rounding before the last frequency; otherwise it
            was tapered smoothly, which smooths delta on the scale of 1/frequency.
    """

    c: float
    frequencies: Array
    values: Complex
    log_scale: float
    rounding: float
    decayed: bool

    @property
    def length(self) -> float:
        """The period in epsilon after which the trapezoid rule's answer repeats."""
        return 2 * math.pi / float(self.frequencies[1])

    def delta(self, epsilon: float) -> float:
        """The delta at epsilon."""
        return self._scale(epsilon) * float((self.values * self._wave(epsilon)).real.sum())

    def delta_and_slope(self, epsilon: float) -> tuple[float, float]:
        """(delta, -d delta/d epsilon); the slope is e^epsilon times the second law's tail."""
        wave = self.values * self._wave(epsilon)
        # Re sum (c + iy) wave, without forming the complex product.
        total = float(wave.real.sum())
        turned = self.c * total - float((self.frequencies * wave.imag).sum())
        return self._scale(epsilon) * total, self._scale(epsilon) * turned

    def rounding_error(self, epsilon: float) -> float:
        """Bound on the absolute rounding error of ``delta``."""
        return self._scale(epsilon) * float(np.abs(self.values).sum()) * self.rounding

    def _scale(self, epsilon: float) -> float:
        return math.exp(min(self.log_scale - self.c * epsilon, 700.0))

    def _wave(self, epsilon: float) -> Complex:
        return np.exp(-1j * epsilon * self.frequencies)


def taper(y: Array) -> Array:
    """1 at 0 and 0 at the end to rounding, so smooth that its transform has no tail to smear."""
    return np.asarray(0.5 * special.erfc((y / y[-1] - 0.48) * 11.8))


def period(moments: Moments, c: float, epsilon: float, log_delta: float) -> float:
    """A period 2 pi/h for which the aliased copies of delta are below e^-28 of it.

    To the left delta <= 1, so a copy weighs at most e^(-c period). To the right delta(x) <=
    exp(K(c') - c' x) for every c' > c.

    Raises:
        Unresolved: when no order bounds the copies on the right.
    """
    left = (_ALIAS - log_delta) / c
    right = math.inf
    for other in orders_beyond(c):
        if other <= moments.order:
            value, _ = moments.value(other)
            needed = (value - other * epsilon - log_delta + _ALIAS) / (other - c)
            right = min(right, needed)
    if not math.isfinite(right):
        raise Unresolved("the tail of the loss has no finite moment beyond the contour")
    return max(left, right)


def build(composition: Composition, c: float, last: float, length: float) -> Contour:
    """The contour tabulated for frequencies up to ``last``, with a period of ``length``.

    Raises:
        Unresolved: when that needs too many nodes.
    """
    spacing = 2 * math.pi / length
    count = int(last / spacing) + 2
    if not count < _MAX_FREQUENCIES:
        raise Unresolved(f"{count} frequencies")
    y: Array = spacing * np.arange(count, dtype=np.float64)
    z = c + 1j * y
    log_scale = 0.5 * composition.mu2 * c * (c + 1)
    rounding = 1e-13
    exponent: Complex = (0.5 * composition.mu2 * (z * (z + 1) - c * (c + 1))).astype(complex)
    for pair, n in composition.pairs:
        window = composition.window(pair)
        table = tabulate(pair, window, grid_width(pair, window, c, y[-1]), _MAX_NODES)
        if table is None:
            raise Unresolved("a step needs too many nodes")
        # From the same nodes as the rest of the line: the cut-off falls where the nodes let it.
        moment, moment_error = log_moment(table, c)
        log_ratio, moved = _log_ratio(table, c, spacing, count)
        exponent = exponent + n * log_ratio
        log_scale += n * moment
        rounding += n * (moment_error + 3e-14 * moved)
    factor = np.exp(exponent)
    decayed = bool(np.abs(factor[-max(2, count // 16) :]).max() < DECAYED)
    if not decayed:
        factor *= taper(y)
    values: Complex = (factor / (z * (z + 1)) * (spacing / math.pi)).astype(complex)
    values[0] *= 0.5
    return Contour(c, y, values, log_scale, rounding + 4e-16 * abs(log_scale), decayed)


def _log_ratio(table: LossTable, c: float, spacing: float, count: int) -> tuple[Complex, float]:
    """log E[e^(z loss)] - log E[e^(c loss)] at z = c + i k spacing, and how far it moves from 0."""
    weight, loss = _tilted(table, c)
    mean = float(weight @ loss)
    excess = fourier_excess(weight, loss - mean, spacing, count)
    # log(1 + u) without losing the digits of a small u, which is multiplied by the step count.
    square = 2 * excess.real + excess.real**2 + excess.imag**2
    log_ratio = 0.5 * np.log1p(np.maximum(square, -1 + 2e-16)) + 1j * (
        np.arctan2(excess.imag, 1 + excess.real) + mean * spacing * np.arange(count)
    )
    return log_ratio, float(np.abs(excess).max())


def _tilted(table: LossTable, c: float) -> tuple[Array, Array]:
    """Weights of the law tilted by exp(c loss), normalised; nodes below e^-60 are left out."""
    exponent = table.log_weight + c * table.loss
    keep = exponent > exponent.max() - 60
    weight = np.exp(exponent[keep] - exponent.max())
    return weight / weight.sum(), table.loss[keep]
