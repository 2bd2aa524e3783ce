"""The lowest of several local minima, by L-BFGS."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# In the units of a logarithm of a loss: far beyond any, and yet finite for the line search.
INFEASIBLE = 1e4


def lowest(
    loss: Loss,
    starts: Iterable[np.ndarray],
    name: str,
    steepest: float = 1e-4,
    **options: Any,
) -> np.ndarray:
    """The lowest of the local minima found from each start, float64 like the starts.

    A RuntimeWarning says when the best of them is no minimum, its gradient above ``steepest``.

    Args:
        loss: gives the logarithm of a loss and its gradient; ``INFEASIBLE`` and zeros where it has
            none.
        starts: float64 [p] each.
        name: of the thing optimised, for the warning.
        steepest: the largest slope that passes for none.
        **options: of L-BFGS-B in scipy.
    """
    from scipy import optimize  # slow to import

    limits = {"maxiter": 5_000, "maxfun": 20_000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7}
    runs = [
        optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=limits | options)
        for start in starts
    ]
    best = min(runs, key=lambda run: float(run.fun))
    slope = float(np.abs(best.jac).max())
    if not slope <= steepest:
        warn(
            f"{name}: no optimum was reached in {best.nit} iterations; the best has a gradient of "
            f"{slope:.2g} in the logarithm of its loss, {best.message}"
        )
    return np.asarray(best.x)


def warn(message: str, callers: int = 3) -> None:
    """Warns, where the optimiser was called, that its result is not the optimum."""
    warnings.warn(message, RuntimeWarning, stacklevel=callers + 1)
