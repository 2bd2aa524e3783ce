"""Noise: independent or correlated, of float32 or on an integer grid; ``privatize`` adds it.

Correlated noise is described on the host: a strategy C, a workload A, the errors of the two, and
the sensitivity under a participation; optimised strategies have the least of their product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp import accounting as acc
from jaxdp.noise.correlated import CorrelatedState, MatrixNoise
from jaxdp.noise.errors import Workload, max_error, rms_error, step_errors
from jaxdp.noise.gaussian import (
    Axes,
    IndependentNoise,
    Noise,
    NoiseRequest,
    PrivatizeState,
    privatize,
)
from jaxdp.noise.grid import DISTANCE, IntegerMatrixNoise, IntegerNoise, dyadic, grid_range
from jaxdp.noise.laplace import LaplaceNoise, laplace_event
from jaxdp.noise.optimise import (
    optimal_banded,
    optimal_buffered,
    optimal_dense,
    optimal_lambda,
)
from jaxdp.noise.sensitivity import Cyclic, FixedEpochOrder, Participation, Single, sensitivity
from jaxdp.noise.strategies import (
    BandedInverse,
    Buffered,
    Dense,
    MadeAgain,
    Strategy,
    Toeplitz,
    ToeplitzStrategy,
    banded_inverse_square_root,
    from_dict,
    identity,
    square_root,
)
from jaxdp.schedules import NoiseSchedule


class NoiseKind(NamedTuple):
    """A kind of noise that ``jaxdp.Mechanism`` takes by name.

    Attributes:
        independent: from the noise multiplier, the noise whose steps are independent.
        correlated: from the noise multiplier and a strategy, noise correlated over the steps; None
            where the kind has none.
        event: from the noise multiplier, the event of a step on all records.
        distance: a proven bound on the total variation between a step's noisy sum and the Gaussian
            mechanism that it is charged as; the event of a step has it added.
    """

    independent: Callable[[float | NoiseSchedule], Noise]
    correlated: Callable[[float, Strategy], Noise] | None = None
    distance: float = 0.0
    event: Callable[[float], Any] = acc.Gaussian


NOISES = {
    "gaussian": NoiseKind(IndependentNoise, MatrixNoise),
    "grid": NoiseKind(IntegerNoise, IntegerMatrixNoise, DISTANCE),
    "laplace": NoiseKind(LaplaceNoise, event=laplace_event),
}

__all__ = [
    "NOISES",
    "Axes",
    "BandedInverse",
    "Buffered",
    "CorrelatedState",
    "Cyclic",
    "Dense",
    "FixedEpochOrder",
    "IndependentNoise",
    "IntegerMatrixNoise",
    "IntegerNoise",
    "LaplaceNoise",
    "MadeAgain",
    "MatrixNoise",
    "Noise",
    "NoiseKind",
    "NoiseRequest",
    "Participation",
    "PrivatizeState",
    "Single",
    "Strategy",
    "Toeplitz",
    "ToeplitzStrategy",
    "Workload",
    "banded_inverse_square_root",
    "dyadic",
    "from_dict",
    "grid_range",
    "identity",
    "max_error",
    "optimal_banded",
    "optimal_buffered",
    "optimal_dense",
    "optimal_lambda",
    "privatize",
    "rms_error",
    "sensitivity",
    "square_root",
    "step_errors",
]
