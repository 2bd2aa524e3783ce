"""Private projection and whitening: one release of second moments each, besides those of training.

``dp_pca`` projects records on the directions in which they vary most; ``dp_whitening`` centres
features of images and evens out the variances of their channels. Both take a record as places of
channels (the records of a projection have one place), shorten it, and add it to ``sums``.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import released_once
from jaxdp.recipes.features import mapped

_ROWS = 256
_U = 2.0**-53
# Squares of norms, and of these squares, are far from the ends of float64 between these.
_BOUNDS = 1e-60, 1e60


def dp_pca(
    x: np.ndarray,
    dimensions: int,
    noise_multiplier: float,
    secret: Secret | None = None,
    *,
    row_norm: float = 1.0,
    ledger: Ledger | None = None,
) -> np.ndarray:
    """The top eigenvectors of the noisy second-moment matrix (DP-PCA).

    Dwork, Talwar, Thakurta and Zhang 2014, "Analyze Gauss: optimal bounds for privacy-preserving
    principal component analysis", Algorithm 1.

    Formal guarantee: rows are shortened to norm R = ``row_norm``, so that one record adds xxᵀ / R²,
    of Frobenius norm at most 1, to the sum; its upper triangle, diagonal included, gets independent
    N(0, z²). That is one full-batch ``Gaussian(noise_multiplier)`` under every relation (replaced
    records are the accountant's doubling). Eigenvectors, and projecting each record by them, are
    post-processing. No mean is subtracted, for that would be another release.

    Args:
        x: [n, ...] private records, each flattened to d numbers; a row that is not finite adds 0.
        dimensions: k, from 1 to d.
        noise_multiplier: z, noise standard deviation over R².
        secret: the randomness; None takes it from the operating system.
        row_norm: R, public, from 1e-60 to 1e60.
        ledger: where the release is charged before it is made.

    Returns:
        float32 [d, k], orthonormal columns, that of the greatest eigenvalue first. NumPy's arrays
        are not known as releases: a loss that captures them, or parameters that hold them, declare
        them, ``constants=``, where little noise leaves them what the records' own would be.

    Raises:
        ValueError: an argument is out of its range.
    """
    if getattr(x, "ndim", 0) < 2:
        raise ValueError(f"x must be an array [n, ...] of records, got shape {np.shape(x)}")
    # Of masked arrays, and other kinds with an arithmetic of their own, the numbers as they are.
    x = np.asarray(x)
    width = math.prod(x.shape[1:])
    if arguments.integer("dimensions", dimensions, least=1) > width:
        raise ValueError(f"dimensions must be at most the {width} of a record, got {dimensions}")
    noise_multiplier = arguments.non_negative("noise_multiplier", noise_multiplier)
    row_norm = bound("row_norm", row_norm)
    event = acc.Gaussian(noise_multiplier)
    secret = released_once(event, f"pca {dimensions} {row_norm}", ledger, secret)
    _, second = sums(x.reshape(len(x), 1, width), row_norm)
    noise = secret.philox("pca", 0).normal(size=second.shape)
    upper = np.triu(second + noise_multiplier * noise)
    _, vectors = np.linalg.eigh(upper + np.triu(upper, 1).T)
    return np.ascontiguousarray(vectors[:, ::-1][:, :dimensions], dtype=np.float32)


def project(x: np.ndarray, components: np.ndarray) -> np.ndarray:
    """float32 [n, k]: each record in the coordinates of ``components`` [d, k]."""
    return x.reshape(len(x), -1).astype(np.float32) @ components


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
    ledger: Ledger | None = None,
) -> Whitening:
    """The private mean of the records, and a matrix that evens out their channels' variances.

    Few directions hold most of what features vary in, and a clipped gradient spends its norm on
    them. With Σ the channels' covariance over records and places, the matrix is (Σ + τ I)^-1/4,
    τ the mean variance (the noise of a usual release is of that size), scaled to a mean square of 1
    by what the noise leaves of Σ. Coates, Lee and Ng 2011, "An analysis of single-layer networks in
    unsupervised feature learning", whiten with power 1/2, which makes all variances equal; a
    smaller one asks less of a noisy covariance.

    Formal guarantee: a record x = (x_1, .., x_P) of P places is shortened to norm R. Added to the
    sums are x / R, of norm at most 1, and the upper triangle of S = Σ_p x_p x_pᵀ / R², of norm at
    most ‖x‖² / R² <= 1: together at most √2. Both sums get independent N(0, 2 z²). That is one
    full-batch ``Gaussian(noise_multiplier)`` under every relation (replaced records are the
    accountant's doubling). ``size`` is a public constant, not a count; all that follows is
    post-processing of the noisy sums. Sums are float64, as of ``dp_pca``.

    Args:
        x: [n, ..., c] private records, channels last; a row that is not finite adds 0.
        noise_multiplier: z.
        secret: the randomness; None takes it from the operating system.
        size: the declared number of records, by which sums are divided.
        row_norm: R, public, from 1e-60 to 1e60; None for the square root of a record's numbers,
            which features of ``jaxdp.features.group_normalised`` exceed by rounding alone.
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
    row_norm = bound("row_norm", math.prod(x.shape[1:]) ** 0.5 if row_norm is None else row_norm)
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

    # (Σ + τ I)^-1/4, scaled to whitened variances of mean 1; the identity of nothing.
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 0.0)
    matrix = np.eye(len(values))
    if values.mean() > 0:
        scales = (values + values.mean()) ** -0.25
        scales /= np.sqrt(np.mean(values * scales**2))
        matrix = (vectors * scales) @ vectors.T
    return Whitening(mean.astype(np.float32), matrix.astype(np.float32))


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


@jax.jit
def _applied(mean: jax.Array, matrix: jax.Array, x: jax.Array) -> jax.Array:
    def one(record: jax.Array) -> jax.Array:
        centred = record.reshape(mean.shape) - mean
        exact = jax.lax.Precision.HIGHEST
        return jnp.matmul(centred, matrix, precision=exact).reshape(record.shape)

    return jax.lax.map(one, x)


def bound(name: str, value: float) -> float:
    """A public bound whose fourth power float64 holds: one that rounds to 0 would bound nothing."""
    number = arguments.positive(name, value)
    least, most = _BOUNDS
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value!r}")
    return number


def shortened(x: np.ndarray, row_norm: float) -> np.ndarray:
    """float64 rows [n, d] of norm ``row_norm`` at most; zeros for one that is not finite."""
    with np.errstate(all="ignore"):  # a warning would reveal a record
        rows = np.array(x, np.float64)
        norms = np.linalg.norm(rows, axis=1)
    rows[~np.isfinite(norms)], norms[~np.isfinite(norms)] = 0.0, 0.0
    # Of the norm and the product d + 3 roundings.
    longest = row_norm * (1 - 2 * _U * (rows.shape[1] + 8))
    rows *= (longest / np.maximum(norms, longest))[:, None]
    return rows


def sums(places: np.ndarray, row_norm: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 [P, c] and [c, c]: **un-noised** sums over records of x / R and of S. Sensitive."""
    first = np.zeros(places.shape[1:])
    second = np.zeros((places.shape[2], places.shape[2]))
    for start in range(0, len(places), _ROWS):
        part = places[start : start + _ROWS]
        part = shortened(part.reshape(len(part), first.size), row_norm) / row_norm
        first += part.sum(0).reshape(first.shape)
        flat = part.reshape(-1, len(second))
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
