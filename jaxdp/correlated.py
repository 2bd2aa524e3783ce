"""DP-SGD with correlated noise (DP-MF): the mechanism of a whole run, and its best strategy."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import Rule
from jaxdp.clipping.rules import rule_of
from jaxdp.mechanism import NOISES, Mechanism
from jaxdp.noise import dyadic, optimal_banded, optimal_buffered, optimal_dense
from jaxdp.noise.errors import Workload, max_error, rms_error
from jaxdp.noise.sensitivity import participation, sensitivity
from jaxdp.noise.strategies import (
    Strategy,
    banded_inverse_square_root,
    identity,
    square_root,
)
from jaxdp.sampling import CyclicPoisson, FixedOrder

SAMPLINGS = ("cyclic_poisson", "fixed_order")
STRATEGIES = ("banded", "buffered", "banded_inverse", "square_root", "dense", "identity")
BANDED = ("banded", "identity")  # what cyclic Poisson sampling amplifies
ON_GRID = ("banded", "square_root", "identity")  # what noise on an integer grid takes
ERRORS = {"rms": rms_error, "max": max_error}
# More bands help little, and each is another copy of the parameters.
_MOST_BANDS = 64
_BUFFERS = 4
_PREFIX = Workload()


def dp_mf(
    noise_multiplier: float | None = None,
    l2_clip_norm: float | None = None,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    sampling: str = "cyclic_poisson",
    *,
    steps: int,
    strategy: str | Strategy | None = None,
    bands: int | None = None,
    workload: Workload = _PREFIX,
    error: str = "rms",
    rule: Rule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    relation: acc.Relation | str | None = None,
    noise: str = "gaussian",
) -> Mechanism:
    """The mechanism of DP-SGD with noise that is correlated over the steps (DP-MF, DP-FTRL).

    Each step's noise takes back part of that of the steps before, so that the sum of all has less
    (Denisov et al. 2022, arXiv:2202.08312; Choquette-Choo et al. 2023, arXiv:2306.08153v2). It is
    used as every mechanism, for exactly ``steps`` steps: they are one event, charged whole at the
    first. Its noise needs memory, ``bands`` - 1 copies of the parameters (or one a buffer).

    Formal guarantee: docs/correlated_noise.md, for clipping by a public bound. Clip norms that
    follow noisy releases, and steps that are rejected, are refused.

    Args:
        noise_multiplier: standard deviation of the noise over the largest norm by which one record
            moves all that the strategy makes of its gradients; or give a budget.
        l2_clip_norm: as for ``jaxdp.dp_sgd``.
        batch_size: the expected number of records of a step.
        dataset_size: the number of records, a declared public constant.
        sampling: "cyclic_poisson" (records in groups by a hash of their identity, used in turn, and
            sampled: amplified, banded strategies only) or "fixed_order" (every pass takes the
            records in one order; relation replace_special or replace_one).
        steps: n, of the whole run.
        strategy: "banded" (optimal banded Toeplitz), "buffered" (BLT), "banded_inverse" (BISR),
            "square_root", "dense" (small n), "identity", or one of ``jaxdp.noise``. None takes
            "banded" with cyclic Poisson sampling or noise on a grid, else "buffered".
        bands: of a banded strategy (of "banded_inverse": of the inverse); buffers of a buffered
            one. None takes the number with the least error; with ``noise_multiplier`` and cyclic
            Poisson sampling it must be given.
        workload: the sums of gradients whose error the strategy makes least.
        error: of their errors, "rms" or "max".
        rule: as for ``jaxdp.dp_sgd``.
        epsilon: the budget of all steps.
        delta: of the budget.
        relation: of the budget; None takes add_or_remove_one, or replace_special in fixed order.
        noise: as for ``jaxdp.Mechanism``; "grid" takes "banded", "square_root" and "identity", each
            with its coefficients rounded by ``jaxdp.noise.dyadic``.

    Returns:
        The mechanism, for ``jaxdp.Trainer``, ``jaxdp.Run`` or a loop of your own.

    Raises:
        ValueError: an argument is missing or out of its range; the strategy does not fit the
            sampling; the budget cannot be met.

    Example:
        >>> mechanism = jaxdp.dp_mf(
        ...     epsilon=2.0, delta=1e-5, steps=200, bands=4,
        ...     l2_clip_norm=1.0, batch_size=50, dataset_size=5_000,
        ... )
        >>> mechanism.epsilon(200, delta=1e-5).upper <= 2.0
        True
    """
    return _Asked(
        rule_of(l2_clip_norm, rule),
        arguments.integer("steps", steps, least=1),
        arguments.integer("batch_size", batch_size, least=1),
        arguments.integer("dataset_size", dataset_size, least=1),
        arguments.one_of("sampling", sampling, SAMPLINGS),
        workload,
        arguments.one_of("error", error, tuple(ERRORS)),
        *_noise_or_budget(noise_multiplier, epsilon, delta),
        acc.Relation(relation or _usual_relation(sampling)),
        arguments.one_of("noise", noise, NOISES),
    ).made(strategy, bands)


def _noise_or_budget(
    noise_multiplier: float | None, epsilon: float | None, delta: float | None
) -> tuple[float | None, float | None, float | None]:
    """The three as given: a multiplier, or a budget."""
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError(
            "give noise_multiplier, or a budget of epsilon and delta, got "
            f"noise_multiplier={noise_multiplier!r} and epsilon={epsilon!r}, delta={delta!r}"
        )
    if (delta is None) != (epsilon is None):
        raise ValueError(f"delta must be given with epsilon, got {delta!r} and {epsilon!r}")
    if noise_multiplier is not None:
        noise_multiplier = arguments.positive("noise_multiplier", noise_multiplier)
    return noise_multiplier, epsilon, delta


def _usual_relation(sampling: str) -> acc.Relation:
    amplified = sampling == "cyclic_poisson"
    return acc.Relation.ADD_OR_REMOVE_ONE if amplified else acc.Relation.REPLACE_SPECIAL


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The public numbers of a mechanism whose strategy is to be chosen."""

    rule: Rule
    steps: int
    batch_size: int
    dataset_size: int
    sampling: str
    workload: Workload
    error: str
    noise_multiplier: float | None
    epsilon: float | None
    delta: float | None
    relation: acc.Relation
    noise: str

    def made(self, strategy: str | Strategy | None, bands: int | None) -> Mechanism:
        """The mechanism with a strategy, or with the best of a kind."""
        if isinstance(strategy, Strategy):
            if bands is not None:
                raise ValueError(f"bands must be None for a strategy of its own, got {bands}")
            return self.with_strategy(strategy)
        kind = self._kind(strategy)
        if bands is not None:
            return self.with_strategy(
                self.strategy(kind, arguments.integer("bands", bands, least=1))
            )
        if kind == "banded":
            if self.noise_multiplier is not None and self.sampling == "cyclic_poisson":
                raise ValueError(
                    "bands must be given with noise_multiplier: which number is best depends on "
                    "the budget, for more bands are amplified less; got None"
                )
            return min(self.by_bands(), key=self.expected_error)
        usual = {"banded_inverse": min(self.steps, 16), "buffered": _BUFFERS}
        return self.with_strategy(self.strategy(kind, usual.get(kind, self.steps)))

    def _kind(self, strategy: Any) -> str:
        """The name of a strategy that the sampling has a proof for."""
        amplified = self.sampling == "cyclic_poisson"
        gridded = self.noise == "grid"
        if strategy is None:
            return "banded" if amplified or gridded else "buffered"
        if not isinstance(strategy, str):
            raise ValueError(
                "strategy must be a name, or a strategy such as jaxdp.noise.Dense.of(matrix), got "
                f"{arguments.described(strategy)}"
            )
        hint = "; strategies without bands need sampling='fixed_order'" if amplified else ""
        known = [each for each in STRATEGIES if not gridded or each in ON_GRID]
        known = [each for each in known if not amplified or each in BANDED]
        if gridded and strategy in STRATEGIES and strategy not in ON_GRID:
            hint = " with noise='grid', which takes coefficients of a few binary digits alone"
        return arguments.one_of("strategy", strategy, tuple(known), hint)

    def by_bands(self) -> Iterator[Mechanism]:
        """Mechanisms with optimal banded strategies of more and more bands, while these help."""
        least, most, bands, worse = float("inf"), self.most_bands(), 1, 0
        while bands <= most and worse < 2:
            found = self.with_strategy(self.strategy("banded", bands))
            error = self.expected_error(found)
            worse = 0 if error < least else worse + 1
            least = min(least, error)
            yield found
            bands = bands * 2

    def most_bands(self) -> int:
        """The most bands that the sampling leaves room for."""
        room = self.dataset_size // self.batch_size
        if self.sampling == "fixed_order":
            room = -(-self.dataset_size // self.batch_size)
        return max(1, min(room, self.steps, _MOST_BANDS))

    def strategy(self, kind: str, bands: int) -> Strategy:
        """The strategy of a kind, as the noise takes it; ValueError for too many bands."""
        exact = self._exact_strategy(kind, bands)
        return dyadic(exact) if self.noise == "grid" else exact

    def _exact_strategy(self, kind: str, bands: int) -> Strategy:
        if kind == "buffered":
            once = participation(self._rule(1), self.dataset_size)
            return optimal_buffered(self.steps, bands, once, self.workload, self.error)
        if kind == "dense":
            once = participation(self._rule(1), self.dataset_size)
            return optimal_dense(self.steps, once, self.workload)
        if bands > self.steps:
            raise ValueError(f"bands must be at most steps ({self.steps}), got {bands}")
        make: dict[str, Callable[[], Any]] = {
            "banded": lambda: optimal_banded(self.steps, bands, self.workload, self.error),
            "banded_inverse": lambda: banded_inverse_square_root(self.steps, bands),
            "square_root": lambda: square_root(self.steps),
            "identity": lambda: identity(self.steps),
        }
        found: Strategy = make[kind]()
        return found

    def with_strategy(self, strategy: Strategy) -> Mechanism:
        """The mechanism with this strategy and the noise that was asked for."""
        rule = self._rule(strategy.bands)
        start = Mechanism(
            self.rule,
            1.0,
            rule,
            self.batch_size,
            self.dataset_size,
            strategy=strategy,
            noise=self.noise,
            relation=self.relation,
        )
        if self.noise_multiplier is not None:
            return dataclasses.replace(start, noise_multiplier=self.noise_multiplier)
        assert self.epsilon is not None
        assert self.delta is not None
        found = acc.calibrate(
            lambda noise: dataclasses.replace(start, noise_multiplier=noise).event,
            self.epsilon,
            self.delta,
            self.relation,
        )
        return dataclasses.replace(
            start, noise_multiplier=found, steps=self.steps, delta=float(self.delta)
        )

    def expected_error(self, mechanism: Mechanism) -> float:
        """The error of the workload's sums, in clip norms."""
        return expected_error(mechanism, self.workload, self.error)

    def _rule(self, bands: int) -> CyclicPoisson | FixedOrder:
        if self.sampling == "fixed_order":
            return FixedOrder(self.batch_size, self.steps)
        share = bands * self.batch_size / self.dataset_size
        if share > 1:
            raise ValueError(
                f"bands must be at most dataset_size / batch_size = "
                f"{self.dataset_size // self.batch_size} with cyclic Poisson sampling, where each "
                f"of as many groups makes a batch, got {bands}: take sampling='fixed_order' for a "
                "strategy without bands"
            )
        return CyclicPoisson(share, bands, self.steps)


def expected_error(mechanism: Mechanism, workload: Workload = _PREFIX, error: str = "rms") -> float:
    """The standard deviation of the noise in a workload's sums of clipped gradients, in clip norms.

    Args:
        mechanism: with a strategy.
        workload: prefix sums by default.
        error: "rms" over the steps, or "max".

    Raises:
        ValueError: a mechanism without a strategy.
    """
    if mechanism.strategy is None:
        raise ValueError("mechanism must have a strategy, as jaxdp.dp_mf makes it, got none")
    each = participation(mechanism.sampling, mechanism.dataset_size)
    sens = sensitivity(mechanism.strategy, each).value
    assert isinstance(mechanism.noise_multiplier, float)
    return mechanism.noise_multiplier * sens * ERRORS[error](mechanism.strategy, workload)
