"""Strategies beside jax_privacy's: finds one, in a process of its own, and prints it as JSON.

python -m benchmarks.correlated_strategies WHO KIND STEPS SIZE ERROR

WHO is jaxdp or jax_privacy, KIND banded, buffered or dense, ERROR rms or max. Seconds are of two
calls in one process, imports left out. The errors of both are taken by ``errors``, in float64.
"""

import json
import sys
import time

import numpy as np
from scipy import linalg, signal


def ours(kind, steps, size, error):
    """What finds jaxdp's strategy: a function without arguments."""
    from jaxdp.noise import Single, optimise

    if kind == "banded":
        return lambda: optimise.optimal_banded(steps, size, error=error)
    if kind == "buffered":
        return lambda: optimise.optimal_buffered(steps, size, error=error)
    return lambda: optimise.optimal_dense(steps, Single())


def peers(kind, steps, size, error):
    """What finds jax_privacy's strategy: a function without arguments."""
    import jax
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense, toeplitz

    if kind == "banded":
        reduction = jnp.mean if error == "rms" else jnp.max
        return lambda: jax.block_until_ready(
            toeplitz.optimize_banded_toeplitz(steps, size, reduction_fn=reduction)
        )
    if kind == "buffered":
        name = {"rms": "mean", "max": "max"}[error]
        return lambda: buffered_toeplitz.optimize(
            n=steps, min_buffers=size, max_buffers=size, error=name
        )
    return lambda: jax.block_until_ready(dense.optimize(steps))


def numbers(found):
    """The strategy's own numbers, of either library."""
    if hasattr(found, "coefficients"):
        return {"column": found.coefficients}
    if hasattr(found, "decays"):
        return {"scales": found.scales, "decays": found.decays}
    if hasattr(found, "buf_decay"):
        return {"scales": found.output_scale, "decays": found.buf_decay}
    if hasattr(found, "matrix"):
        return {"matrix": found.matrix()}
    found = np.asarray(found)
    return {"matrix" if found.ndim == 2 else "column": found}


def errors(steps, column=None, scales=None, decays=None, matrix=None):
    """(RMS error, max error) of prefix sums times the sensitivity of one participation.

    From matrices up to 1,000 steps. Beyond, a Toeplitz C is a ratio of polynomials, and its inverse
    and the sums are recurrences.
    """
    if matrix is not None:
        return _of_matrix(np.asarray(matrix, np.float64))
    if column is not None:
        top, bottom = np.asarray(column, np.float64), np.ones(1)
    else:
        top, bottom = _ratio(np.asarray(scales, np.float64), np.asarray(decays, np.float64))
    impulse = np.eye(1, steps)[0]
    first = signal.lfilter(top, bottom, impulse)
    if steps <= 1_000:
        return _of_matrix(linalg.toeplitz(first, np.zeros(steps)))
    sums = np.cumsum(signal.lfilter(bottom / top[0], top / top[0], impulse))
    return _rms_and_max(np.cumsum(sums**2), np.linalg.norm(first))


def _ratio(scales, decays):
    """Polynomials P, Q with P / Q = 1 + x sum_k scales[k] / (1 - decays[k] x)."""
    bottom = np.poly(decays)
    top = bottom.copy()
    for k, scale in enumerate(scales):
        top[1:] += scale * np.poly(np.delete(decays, k))
    return top, bottom


def _of_matrix(matrix):
    rows = linalg.solve_triangular(matrix, np.eye(len(matrix)), lower=True)
    squares = np.square(np.tri(len(matrix)) @ rows).sum(axis=1)
    return _rms_and_max(squares, np.sqrt(np.square(matrix).sum(axis=0).max()))


def _rms_and_max(squares, sensitivity):
    found = np.sqrt(squares.mean()) * sensitivity, np.sqrt(squares.max()) * sensitivity
    return tuple(float(each) for each in found)


def main(who, kind, steps, size, error):
    """Prints seconds of the first and the second call, and the errors of the strategy."""
    steps, size = int(steps), int(size)
    find = {"jaxdp": ours, "jax_privacy": peers}[who](kind, steps, size, error)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        found = find()
        seconds.append(round(time.perf_counter() - began, 3))
        row = {"first": seconds[0]}
        rms, largest = errors(steps, **numbers(found))
        row |= {"again": seconds[-1]} if len(seconds) == 2 else {}
        print(json.dumps(row | {"rms": rms, "max": largest}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
