"""DP-PCA by Analyze Gauss: a private projection, a release besides those of training."""

import math

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp._issuer import released_once
from jaxdp.ledger import Ledger
from jaxdp.seeds import Secret

_ROWS = 4_096
# Of R: below, float64 would round noise of the size R² to none.
_NORMS = (1e-100, 1e100)


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

    Formal guarantee: rows are shortened to norm R = ``row_norm``, so that one record adds xxᵀ, of
    Frobenius norm at most R², to the sum; its upper triangle, diagonal included, gets independent
    N(0, (z R²)²). That is one full-batch ``Gaussian(noise_multiplier)`` under every relation
    (replaced records are the accountant's doubling). Eigenvectors, and projecting each record by
    them, are post-processing. No mean is subtracted, for that would be another release.

    Args:
        x: [n, ...] private records, each flattened to d numbers; a row that is not finite adds 0.
        dimensions: k, from 1 to d.
        noise_multiplier: z, noise standard deviation over R².
        secret: the randomness; None takes it from the operating system.
        row_norm: R, public, from 1e-100 to 1e100.
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
    rows = x.reshape(len(x), width)
    if arguments.integer("dimensions", dimensions, least=1) > width:
        raise ValueError(f"dimensions must be at most the {width} of a record, got {dimensions}")
    noise_multiplier = arguments.non_negative("noise_multiplier", noise_multiplier)
    row_norm = arguments.positive("row_norm", row_norm)
    if not _NORMS[0] <= row_norm <= _NORMS[1]:
        raise ValueError(f"row_norm must be from 1e-100 to 1e100, got {row_norm}")
    event = acc.Gaussian(noise_multiplier)
    secret = released_once(event, f"pca {dimensions} {row_norm}", ledger, secret)
    noise = secret.philox("pca", 0).normal(size=(width, width))
    upper = np.triu(second_moment(rows, row_norm) + noise_multiplier * row_norm**2 * noise)
    _, vectors = np.linalg.eigh(upper + np.triu(upper, 1).T)
    return np.ascontiguousarray(vectors[:, ::-1][:, :dimensions], dtype=np.float32)


def project(x: np.ndarray, components: np.ndarray) -> np.ndarray:
    """float32 [n, k]: each record in the coordinates of ``components`` [d, k]."""
    return x.reshape(len(x), -1).astype(np.float32) @ components


def second_moment(rows: np.ndarray, row_norm: float) -> np.ndarray:
    """float64 [d, d]: the **un-noised** sum of xxᵀ over shortened rows. Sensitive."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS].astype(np.float64)
        part[~np.isfinite(part).all(axis=1)] = 0.0
        with np.errstate(over="ignore"):
            norms = np.linalg.norm(part, axis=1, keepdims=True)
        part[~np.isfinite(norms[:, 0])] = 0.0
        part *= np.minimum(1.0, row_norm / np.maximum(norms, 1e-300))
        total += part.T @ part
    return total
