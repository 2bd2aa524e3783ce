"""Private centring and whitening of features: one release of a mean and of channels' covariance."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp._images import mapped
from jaxdp._issuer import released_once
from jaxdp.ledger import Ledger
from jaxdp.seeds import Secret

_ROWS = 256
# Of R: a square of it is a float64 with all its digits.
_NORMS = (1e-100, 1e100)
# Of the mean variance, added to every variance: the noise of a usual release is of that size.
_FLOOR = 1.0
# Between 0, which leaves the channels as they are, and 1/2, which makes all variances equal.
_POWER = 0.25


class Whitening(NamedTuple):
    """The release of ``dp_whitening``.

    Attributes:
        mean: float32 [places, c], of the records, by place.
        matrix: float32 [c, c], symmetric: by which the centred channels are multiplied.
    """

    mean: np.ndarray
    matrix: np.ndarray


def dp_whitening(
    x: np.ndarray,
    noise_multiplier: float,
    secret: Secret | None = None,
    *,
    size: int,
    row_norm: float | None = None,
    power: float = _POWER,
    ledger: Ledger | None = None,
) -> Whitening:
    """The private mean of the records, and a matrix that evens out their channels' variances.

    Few directions hold most of what features vary in, and a clipped gradient spends its norm on
    them. With Σ the channels' covariance over records and places, the matrix is (Σ + τ I)^-p,
    τ the mean variance, scaled to a mean square of 1 by what the noise leaves of Σ (Coates, Lee and
    Ng 2011, "An analysis of single-layer networks in unsupervised feature learning", whiten with
    p = 1/2; a smaller p asks less of a noisy covariance).

    Formal guarantee: a record x = (x_1, .., x_P) of P places is shortened to norm R. Added to the
    sums are x / R, of norm at most 1, and the upper triangle of S = Σ_p x_p x_pᵀ / R², of norm at
    most ‖x‖² / R² <= 1: together at most √2. Both sums get independent N(0, 2 z²). That is one
    full-batch ``Gaussian(noise_multiplier)`` under every relation (replaced records are the
    accountant's doubling). ``size`` is a public constant, not a count; all that follows is
    post-processing of the noisy sums. Sums are float64, as of ``jaxdp.preprocess.dp_pca``.

    Args:
        x: [n, ..., c] private records, channels last; a row that is not finite adds 0.
        noise_multiplier: z.
        secret: the randomness; None takes it from the operating system.
        size: the declared number of records, by which sums are divided.
        row_norm: R, public, from 1e-100 to 1e100; None for the square root of a record's numbers,
            which features of ``jaxdp.features.group_normalised`` exceed by rounding alone.
        power: p, from 0 to 1/2.
        ledger: where the release is charged before it is made.

    Returns:
        The mean and the matrix, for ``whitened``.

    Raises:
        ValueError: an argument is out of its range.
    """
    if getattr(x, "ndim", 0) < 2 or not all(x.shape[1:]):
        raise ValueError(f"x must be an array [n, ..., channels], got shape {np.shape(x)}")
    # Of masked arrays, and other kinds with an arithmetic of their own, the numbers as they are.
    x = np.asarray(x)
    places = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
    arguments.integer("size", size, least=1)
    if not 0 <= arguments.non_negative("power", power) <= 0.5:
        raise ValueError(f"power must be from 0 to 1/2, got {power}")
    numbers = places.shape[1] * places.shape[2]
    row_norm = arguments.positive("row_norm", numbers**0.5 if row_norm is None else row_norm)
    if not _NORMS[0] <= row_norm <= _NORMS[1]:
        raise ValueError(f"row_norm must be from 1e-100 to 1e100, got {row_norm}")
    # As a float: a number of 16 bits would round the deviation, and away from what is charged.
    noise_multiplier = arguments.non_negative("noise_multiplier", noise_multiplier)
    event = acc.Gaussian(noise_multiplier)
    secret = released_once(event, f"whitening {places.shape[1:]} {row_norm}", ledger, secret)
    rng = secret.philox("whitening", 0)
    first, second = sums(places, row_norm)
    deviation = 2**0.5 * noise_multiplier * (1 + _rounded(size, places.shape[1]))
    first += deviation * rng.normal(size=first.shape)
    second = np.triu(second + deviation * rng.normal(size=second.shape))
    second += np.triu(second, 1).T
    mean = first * (row_norm / size)
    covariance = second * (row_norm**2 / (size * len(mean))) - mean.T @ mean / len(mean)
    return Whitening(mean.astype(np.float32), _matrix(covariance, power).astype(np.float32))


def whitened(x: np.ndarray, whitening: Whitening) -> np.ndarray:
    """Each record centred and its channels multiplied by the matrix.

    Privacy: a function of each record alone and of what was released; records are computed one
    after the other, so that none rounds another.

    Args:
        x: [n, ..., c], channels last.
        whitening: of ``dp_whitening``, on records of the same shape.

    Returns:
        float32, of the shape of ``x``, on the host.

    Raises:
        ValueError: records of another shape.
    """
    places, channels = whitening.mean.shape
    if getattr(x, "ndim", 0) < 2 or x.shape[-1] != channels or x[0:1].size != places * channels:
        raise ValueError(
            f"x must be records of {places} places and {channels} channels, got {np.shape(x)}"
        )
    return mapped(functools.partial(_applied, *map(jnp.asarray, whitening)), x, _ROWS)


def sums(places: np.ndarray, row_norm: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 [P, c] and [c, c]: **un-noised** sums over records of x / R and of S. Sensitive."""
    first = np.zeros(places.shape[1:])
    second = np.zeros((places.shape[2], places.shape[2]))
    for start in range(0, len(places), _ROWS):
        with np.errstate(all="ignore"):  # a warning would tell of a record
            part = places[start : start + _ROWS].astype(np.float64) / row_norm
        part[~np.isfinite(part).all(axis=(1, 2))] = 0.0
        with np.errstate(over="ignore"):
            norms = np.sqrt(np.square(part).sum(axis=(1, 2), keepdims=True))
        part[~np.isfinite(norms[:, 0, 0])] = 0.0
        part /= np.maximum(1.0, norms)
        first += part.sum(0)
        flat = part.reshape(-1, part.shape[2])
        second += flat.T @ flat
    return first, second


def _rounded(size: int, places: int) -> float:
    """At least the share of √2 by which rounding moves two neighbours' sums further apart.

    With u = 2^-53 and n <= 2 ``size`` records: a block of 256 rounds each of its 256 P terms at
    most that often, in any order, and n / 256 blocks are added one by one. So either sum is off by
    at most n (256 P + n / 256 + 2) u, as records add up to a norm of n at most; twice, for two
    worlds. Another factor of 2 is far more than what rounding leaves of a record above norm 1.
    """
    records = 2 * size
    return records * (_ROWS * places + records / _ROWS + 2) * 2.0**-51


def _matrix(covariance: np.ndarray, power: float) -> np.ndarray:
    """(Σ + τ I)^-p, scaled to whitened variances of mean 1; the identity of nothing."""
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 0.0)
    mean = values.mean()
    if not mean > 0:
        return np.eye(len(values))
    scales = (values + _FLOOR * mean) ** -power
    scales /= np.sqrt(np.mean(values * scales**2))
    return np.asarray((vectors * scales) @ vectors.T)


@jax.jit
def _applied(mean: jax.Array, matrix: jax.Array, x: jax.Array) -> jax.Array:
    def one(record: jax.Array) -> jax.Array:
        centred = record.reshape(mean.shape) - mean
        exact = jax.lax.Precision.HIGHEST
        return jnp.matmul(centred, matrix, precision=exact).reshape(record.shape)

    return jax.lax.map(one, x)
