"""Normal masses of intervals, to full relative precision."""

import math

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array

_SQRT2, _SQRT_2PI = math.sqrt(2), math.sqrt(2 * math.pi)


def normal_cells(x: Array, mean: float, z: float) -> Array:
    """N(mean, z^2) masses of the intervals between increasing ``x``, [m - 1].

    Narrow intervals by Taylor's series about their middle, whose width is exact; wide ones in a
    tail by Mills' ratio. Relative error below 4e-13 within 40 z of the mean.
    """
    t = (x - mean) / z
    with np.errstate(invalid="ignore", over="ignore"):
        width = (x[1:] - x[:-1]) / z
        middle = 0.5 * (t[1:] + t[:-1])
        narrow = width * (1 + np.abs(middle)) < 0.05
    m, w = np.where(narrow, middle, 0.0), np.where(narrow, width, 0.0)
    # Integrals of the Hermite polynomials of orders 2, 4 and 6.
    m2, w2 = m * m, w * w
    he2, he4, he6 = m2 - 1, (m2 - 6) * m2 + 3, ((m2 - 15) * m2 + 45) * m2 - 15
    series = 1 + w2 * (he2 / 24 + w2 * (he4 / 1920 + w2 * he6 / 322_560))
    out: Array = np.exp(-0.5 * m2) / _SQRT_2PI * w * series
    rest = np.flatnonzero(~narrow)
    with np.errstate(over="ignore", invalid="ignore"):
        out[rest] = _wide_cells(t[rest], t[rest + 1], width[rest])
    return out


def _wide_cells(left: Array, right: Array, width: Array) -> Array:
    """Standard normal masses of [left, right], of a width that is known better than the ends."""
    out = special.ndtr(right) - special.ndtr(left)
    tail = np.flatnonzero((np.sign(left) == np.sign(right)) & np.isfinite(left + right))
    near = np.minimum(np.abs(left[tail]), np.abs(right[tail]))
    far = np.maximum(np.abs(left[tail]), np.abs(right[tail]))
    fall = np.exp(-0.5 * width[tail] * (far + near))
    rest = special.erfcx(near / _SQRT2) - fall * special.erfcx(far / _SQRT2)
    out[tail] = 0.5 * np.exp(-0.5 * near * near) * rest
    beyond = np.flatnonzero((left > 0) & (right == np.inf))
    out[beyond] = special.ndtr(-left[beyond])
    return np.asarray(out)
