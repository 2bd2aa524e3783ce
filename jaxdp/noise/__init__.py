"""Noise: independent or correlated, of float32 or on an integer grid; ``privatize`` adds it.

Correlated noise is described on the host: a strategy C, a workload A, the errors of the two, and
the sensitivity under a participation; optimised strategies have the least of their product.
"""

from collections.abc import Callable

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
from jaxdp.noise.grid import IntegerMatrixNoise, IntegerNoise, dyadic, grid_range
from jaxdp.noise.optimise import optimal_banded, optimal_buffered, optimal_dense
from jaxdp.noise.sensitivity import (
    Cyclic,
    FixedEpochOrder,
    Participation,
    Single,
    sensitivity,
)
from jaxdp.noise.strategies import (
    BandedInverse,
    Buffered,
    Dense,
    Strategy,
    Toeplitz,
    ToeplitzStrategy,
    banded_inverse_square_root,
    from_dict,
    identity,
    square_root,
)

# The kinds of noise by name, as ``jaxdp.Mechanism`` takes them: the class whose steps have noise of
# their own, from (noise_multiplier), and the one of a strategy, from (noise_multiplier, strategy).
NOISES: dict[str, tuple[Callable[..., Noise], Callable[..., Noise]]] = {
    "gaussian": (IndependentNoise, MatrixNoise),
    "grid": (IntegerNoise, IntegerMatrixNoise),
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
    "MatrixNoise",
    "Noise",
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
    "privatize",
    "rms_error",
    "sensitivity",
    "square_root",
    "step_errors",
]
