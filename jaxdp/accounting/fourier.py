"""Fourier sums over scattered points at equally spaced frequencies (a nonuniform FFT)."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.loss import Array

Complex = NDArray[np.complex128]

_WIDTH = 15  # grid cells under the spreading kernel
_BETA = 2.30 * _WIDTH
_NEAR = 1.0  # phases up to this radius are summed by their Taylor series
_TERMS = 20  # 1/20! < 1e-18


def fourier_excess(weights: Array, points: Array, spacing: float, count: int) -> Complex:
    """sum_j w_j (exp(i k spacing p_j) - 1) for k = 0..count-1.

    Points whose phase stays small enter by their moments, exactly in relative terms; only the
    others meet the rounding of a transform. So the result is precise relative to itself even when
    nearly all weight lies close to p = 0.

    Args:
        weights: [m] non-negative.
        points: [m].
        spacing: distance of the frequencies.
        count: number of frequencies.

    Returns:
        [count] complex sums; the first is 0.
    """
    frequencies: Array = spacing * np.arange(count, dtype=np.float64)
    near = np.abs(points) * frequencies[-1] <= _NEAR
    out = _by_moments(weights[near], points[near], frequencies)
    far_w, far_p = weights[~near], points[~near]
    if far_w.size == 0:
        return out
    if far_w.size * count <= 15_000:
        return out + np.exp(1j * np.outer(frequencies, far_p)) @ far_w - far_w.sum()
    return out + _nonuniform_fft(far_w, far_p * spacing, count) - far_w.sum()


def _by_moments(weights: Array, points: Array, frequencies: Array) -> Complex:
    """The same sum by Taylor series: sum_n (i y)^n/n! sum_j w_j p_j^n, n >= 1."""
    scale = float(np.abs(points).max(initial=0.0))
    out = np.zeros(frequencies.size, dtype=complex)
    if scale == 0:
        return out
    unit = points / scale
    power = weights.copy()
    moments = []
    for n in range(1, _TERMS + 1):
        power *= unit
        moments.append(power.sum() / math.factorial(n))
    z = 1j * (frequencies * scale)
    for moment in reversed(moments):
        out = (out + moment) * z
    return out


def _nonuniform_fft(weights: Array, angles: Array, count: int) -> Complex:
    """sum_j w_j exp(i k theta_j), k = 0..count-1, to about 1e-14 of sum |w|.

    Spreading with the kernel exp(beta (sqrt(1-u^2) - 1)) on a twice oversampled grid (Barnett,
    Magland and af Klinteberg 2019, arXiv:1808.06736v2, Section 3).
    """
    size = 4 * max(_WIDTH, 1 << (count - 1).bit_length())
    position = np.mod(angles, 2 * math.pi) * (size / (2 * math.pi))
    first = np.ceil(position - _WIDTH / 2)
    start = first.astype(np.int64)
    offset = (first - position) / (_WIDTH / 2)
    grid = np.zeros(size)
    for i in range(_WIDTH):
        u = offset + i * (2 / _WIDTH)
        value = weights * np.exp(_BETA * (np.sqrt(np.maximum(1 - u * u, 0.0)) - 1))
        grid += np.bincount((start + i) % size, weights=value, minlength=size)
    spectrum: Complex = np.conj(np.fft.rfft(grid))[:count]
    return spectrum / _kernel_transform(size, count)


def _kernel_transform(size: int, count: int) -> Array:
    """Fourier transform of the kernel at k/size, k < count <= size/4, in grid cells."""
    position = np.arange(count) * (8.0 / size) - 1
    return np.asarray(np.exp(np.polynomial.chebyshev.chebval(position, _log_transform())))


@functools.cache
def _log_transform() -> Array:
    """Chebyshev coefficients of the log of that transform on frequencies [0, 1/4]."""
    u, w = np.polynomial.legendre.leggauss(80)
    kernel = w * np.exp(_BETA * (np.sqrt(1 - u * u) - 1)) * (_WIDTH / 2)
    nodes = np.cos(np.pi * (np.arange(48) + 0.5) / 48)
    frequency = (nodes + 1) / 8 * (2 * math.pi) * (_WIDTH / 2)
    values = np.log(np.cos(np.outer(frequency, u)) @ kernel)
    return np.asarray(np.polynomial.chebyshev.chebfit(nodes, values, 36))
