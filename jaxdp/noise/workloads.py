"""Workloads: matrices A of how the parameters after each step depend on the gradients."""

import dataclasses

import numpy as np

from jaxdp import arguments
from jaxdp.noise import _series


@dataclasses.dataclass(frozen=True)
class Workload:
    """The matrix A [n, n] whose row i says how the parameters after step i depend on the gradients.

    m_i = momentum m_(i-1) + g_i, and the parameters move by the sum over t <= i of
    learning_rates[t] m_t: heavy-ball momentum with a schedule. As it is, A is the matrix of prefix
    sums: plain SGD of learning rate 1. Signs do not matter, and nor does a common factor when
    strategies are compared.

    Attributes:
        momentum: beta in [0, 1).
        learning_rates: n numbers of at least 0, at least one above 0 (any sequence is accepted and
            made a tuple); None for a constant 1.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        momentum = arguments.non_negative("momentum", self.momentum)
        if momentum >= 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum!r}")
        object.__setattr__(self, "momentum", momentum)
        if self.learning_rates is not None:
            rates = [arguments.non_negative("learning_rates", rate) for rate in self.learning_rates]
            if not any(rates):
                raise ValueError("learning_rates must have a number above 0, got none")
            object.__setattr__(self, "learning_rates", tuple(rates))

    @property
    def constant(self) -> bool:
        """True where the learning rate is constant, so that A is Toeplitz."""
        return self.learning_rates is None or len(set(self.learning_rates)) == 1

    @property
    def learning_rate(self) -> float:
        """The constant learning rate.

        Raises:
            ValueError: when it is not constant.
        """
        if not self.constant:
            raise ValueError("learning_rates must be constant here, got a schedule")
        return 1.0 if self.learning_rates is None else self.learning_rates[0]

    def applied(self, series: np.ndarray) -> np.ndarray:
        """float64 [n, ...]: A times ``series``, along the first axis.

        Args:
            series: float64 [n, ...].
        """
        self.check(len(series))
        if self.momentum:
            series = _series.filtered([1.0], [1.0, -self.momentum], series)
        if self.learning_rates is not None:
            series = (np.asarray(self.learning_rates) * series.T).T
        return np.asarray(np.cumsum(series, axis=0))

    def toeplitz(self, steps: int) -> np.ndarray:
        """float64 [n]: the coefficients of A, where it is Toeplitz.

        Raises:
            ValueError: when the learning rate is not constant.
        """
        self.learning_rate  # noqa: B018  (refuses a schedule)
        return self.applied(_series.impulse(arguments.integer("steps", steps, least=1)))

    def matrix(self, steps: int) -> np.ndarray:
        """float64 [n, n]: A."""
        return self.applied(np.eye(arguments.integer("steps", steps, least=1)))

    def check(self, steps: int) -> None:
        """Refuses a schedule for another number of steps; ValueError."""
        if self.learning_rates is not None and len(self.learning_rates) != steps:
            raise ValueError(
                f"learning_rates must be as many as there are steps ({steps}), got "
                f"{len(self.learning_rates)}"
            )


PREFIX_SUMS = Workload()
