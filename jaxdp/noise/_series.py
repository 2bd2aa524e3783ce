"""Power series and float32 numbers, with NumPy and SciPy on the host."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxdp import arguments

_SMALLEST = float(np.finfo(np.float32).tiny)
SHOWN = 8


def float32s(name: str, values: Any) -> tuple[float, ...]:
    """The numbers as a tuple of Python floats, each rounded to float32.

    What float32 holds only as a subnormal becomes 0, for accelerators read it as 0.

    Raises:
        ValueError: when they are not finite real numbers within float32, in a sequence.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of numbers, got {arguments.described(values)}")
    try:
        given = np.asarray(values if isinstance(values, np.ndarray) else tuple(values))
    except ValueError:  # of unlike lengths
        given = np.asarray(None)
    if given.ndim != 1 or given.dtype.kind not in "fiu" or not given.size:
        raise ValueError(f"{name} must be a sequence of numbers, got {_shortened(values)}")
    return tuple(rounded(name, given).astype(np.float64).tolist())


def rounded(name: str, given: np.ndarray) -> np.ndarray:
    """float32: the numbers rounded, subnormal ones to 0; ValueError where one is not finite."""
    with np.errstate(over="ignore"):
        near = given.astype(np.float32)
    if not np.isfinite(near).all():
        wrong = given[~np.isfinite(near)].flat[0]
        raise ValueError(f"{name} must be finite numbers within float32, got {wrong!r} among them")
    return np.where(np.abs(near) < _SMALLEST, np.float32(0), near)


def shown(values: tuple[float, ...]) -> str:
    """The numbers, or where they are many their count and a BLAKE2b digest of their bytes."""
    if len(values) <= SHOWN:
        return repr(values)
    return f"<{len(values)} float32, blake2b {digest(np.asarray(values, '<f4').tobytes())}>"


def digest(data: bytes) -> str:
    """The BLAKE2b digest of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def impulse(length: int) -> np.ndarray:
    """float64 [length]: 1, 0, 0, ..."""
    return np.eye(1, length)[0]


def filtered(top: Any, bottom: Any, series: np.ndarray) -> np.ndarray:
    """``series`` times the power series top / bottom, along the first axis, to as many terms.

    Args:
        top: float [p], the coefficients of the numerator.
        bottom: float [q], those of the denominator; the first is 1.
        series: float64 [n, ...].
    """
    # scipy.signal takes longer to import than all of JAX-DP.
    from scipy import signal

    top, bottom = np.asarray(top)[: len(series)], np.asarray(bottom)[: len(series)]
    return np.asarray(signal.lfilter(top, bottom, series, axis=0))


def _shortened(values: Any) -> str:
    return repr(values)[:80] if isinstance(values, tuple | list) else arguments.described(values)
