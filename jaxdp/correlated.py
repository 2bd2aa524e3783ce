"""DP-SGD with correlated noise (DP-MF): the mechanism of a whole run, and its best strategy."""

import dataclasses

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import Rule
from jaxdp.clipping.rules import rule_of
from jaxdp.mechanism import NOISES, Mechanism
from jaxdp.noise import dyadic, optimal_banded, optimal_buffered, optimal_dense
from jaxdp.noise.errors import ERRORS, PREFIX_SUMS, Workload
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
# More bands help little, and each is another copy of the parameters.
_MOST_BANDS = 64
_BUFFERS = 4


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
    workload: Workload = PREFIX_SUMS,
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
    rule = rule_of(l2_clip_norm, rule)
    steps = arguments.integer("steps", steps, least=1)
    batch_size = arguments.integer("batch_size", batch_size, least=1)
    dataset_size = arguments.integer("dataset_size", dataset_size, least=1)
    arguments.one_of("sampling", sampling, SAMPLINGS)
    arguments.one_of("error", error, tuple(ERRORS))
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError(
            "give noise_multiplier, or a budget of epsilon and delta, got "
            f"noise_multiplier={noise_multiplier!r} and epsilon={epsilon!r}, delta={delta!r}"
        )
    if (delta is None) != (epsilon is None):
        raise ValueError(f"delta must be given with epsilon, got {delta!r} and {epsilon!r}")
    first = 1.0
    if noise_multiplier is not None:
        first = arguments.positive("noise_multiplier", noise_multiplier)
    amplified, gridded = sampling == "cyclic_poisson", noise == "grid"
    usual = acc.Relation.ADD_OR_REMOVE_ONE if amplified else acc.Relation.REPLACE_SPECIAL
    covered = acc.Relation(relation or usual)
    arguments.one_of("noise", noise, NOISES)
    in_order = FixedOrder(batch_size, steps)

    def with_strategy(strategy: Strategy) -> Mechanism:
        """The mechanism with this strategy, and the noise that was given or that the budget has."""
        rule_of_draws: CyclicPoisson | FixedOrder = in_order
        if amplified:
            # Records are in as many groups as there are bands, and each step samples from one.
            share = strategy.bands * batch_size / dataset_size
            if share > 1:
                raise ValueError(
                    f"bands must be at most dataset_size / batch_size = "
                    f"{dataset_size // batch_size} with cyclic Poisson sampling, where each of as "
                    f"many groups makes a batch, got {strategy.bands}: take sampling='fixed_order' "
                    "for a strategy without bands"
                )
            rule_of_draws = CyclicPoisson(share, strategy.bands, steps)
        start = Mechanism(
            rule,
            first,
            rule_of_draws,
            batch_size,
            dataset_size,
            strategy=strategy,
            noise=noise,
            relation=covered,
        )
        if epsilon is None or delta is None:
            return start
        found = acc.calibrate(
            lambda noise: start.events(0, steps, noise)[0][0], epsilon, delta, covered
        )
        return dataclasses.replace(start, noise_multiplier=found, delta=float(delta))

    if isinstance(strategy, Strategy):
        if bands is not None:
            raise ValueError(f"bands must be None for a strategy of its own, got {bands}")
        return with_strategy(strategy)

    # The name of a strategy that the sampling has a proof for.
    if strategy is None:
        strategy = "banded" if amplified or gridded else "buffered"
    if not isinstance(strategy, str):
        raise ValueError(
            "strategy must be a name, or a strategy such as jaxdp.noise.Dense.of(matrix), got "
            f"{arguments.described(strategy)}"
        )
    hint = "; strategies without bands need sampling='fixed_order'" if amplified else ""
    if gridded and strategy in STRATEGIES and strategy not in ON_GRID:
        hint = " with noise='grid', which takes coefficients of a few binary digits alone"
    known = [each for each in STRATEGIES if each in ON_GRID or not gridded]
    known = [each for each in known if each in BANDED or not amplified]
    kind = arguments.one_of("strategy", strategy, tuple(known), hint)

    def best_of(bands: int) -> Strategy:
        """The strategy of that name and so many bands, as the noise takes it."""
        once = participation(in_order, dataset_size)
        if kind == "buffered":
            return optimal_buffered(steps, bands, once, workload, error)
        if kind == "dense":
            return optimal_dense(steps, once, workload)
        if bands > steps:
            raise ValueError(f"bands must be at most steps ({steps}), got {bands}")
        if kind == "banded_inverse":
            return banded_inverse_square_root(steps, bands)
        if kind == "banded":
            found = optimal_banded(steps, bands, workload, error)
        else:
            found = square_root(steps) if kind == "square_root" else identity(steps)
        return dyadic(found) if gridded else found

    if bands is not None:
        return with_strategy(best_of(arguments.integer("bands", bands, least=1)))
    if kind != "banded":
        usual_bands = {"banded_inverse": min(steps, 16), "buffered": _BUFFERS}
        return with_strategy(best_of(usual_bands.get(kind, steps)))

    # Optimal banded strategies of more and more bands, while these help and there is room.
    if epsilon is None and amplified:
        raise ValueError(
            "bands must be given with noise_multiplier: which number is best depends on the "
            "budget, for more bands are amplified less; got None"
        )
    room = dataset_size // batch_size if amplified else -(-dataset_size // batch_size)
    most = min(room, steps, _MOST_BANDS)
    made, bands, worse = with_strategy(best_of(1)), 2, 0
    least = expected_error(made, workload, error)
    while bands <= most and worse < 2:
        other = with_strategy(best_of(bands))
        found, worse, bands = expected_error(other, workload, error), worse + 1, 2 * bands
        if found < least:
            made, least, worse = other, found, 0
    return made


def expected_error(
    mechanism: Mechanism, workload: Workload = PREFIX_SUMS, error: str = "rms"
) -> float:
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
    sens = sensitivity(mechanism.strategy, each)
    assert isinstance(mechanism.noise_multiplier, float)
    return mechanism.noise_multiplier * sens * ERRORS[error](mechanism.strategy, workload)
