"""The lowest of several local minima, by L-BFGS."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# In the units of a logarithm of a loss: far beyond any, and yet finite for the line search.
INFEASIBLE = 1e4
_STEEPEST = 1e-4


def lowest(loss: Loss, starts: Iterable[np.ndarray], name: str, **options: Any) -> np.ndarray:
    """The lowest of the local minima found from each start, float64 like the starts.

    Args:
        loss: gives the logarithm of a loss and its gradient; ``INFEASIBLE`` and zeros where it has
            none.
        starts: float64 [p] each.
        name: of the thing optimised, for the warning.
        **options: of L-BFGS-B in scipy.

    Warns:
        RuntimeWarning: when the best of them is no minimum: its gradient is above 1e-4.
    """
    from scipy import optimize  # slow to import

    limits = {"maxiter": 5_000, "maxfun": 20_000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7}
    runs = [
        optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=limits | options)
        for start in starts
    ]
    best = min(runs, key=lambda run: float(run.fun))
    steepest = float(np.abs(best.jac).max())
    if not steepest <= _STEEPEST:
        warnings.warn(
            f"{name}: no optimum was reached in {best.nit} iterations; the best has a gradient of "
            f"{steepest:.2g} in the logarithm of its loss, {best.message}",
            RuntimeWarning,
            stacklevel=3,
        )
    return np.asarray(best.x)
