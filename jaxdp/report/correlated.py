"""Noise that is correlated over the steps, in words."""

from jaxdp.mechanism import Mechanism
from jaxdp.noise import BandedInverse, Buffered, Strategy, Toeplitz, sensitivity
from jaxdp.noise.sensitivity import Cyclic, participation

Rows = list[tuple[str, str]]


def rows(mechanism: Mechanism) -> Rows:
    """The facts of a mechanism's correlated noise: multiplier, strategy, sensitivity and charge.

    Args:
        mechanism: with a strategy.
    """
    assert mechanism.strategy is not None
    assert isinstance(mechanism.noise_multiplier, float)
    each = participation(mechanism.sampling, mechanism.dataset_size)
    moved = sensitivity(mechanism.strategy, each).value
    once = isinstance(each, Cyclic)
    of = "one draw of a record" if once else "one record, in all of its steps together,"
    return [
        (
            "Noise multiplier",
            f"{mechanism.noise_multiplier:.4g}: the standard deviation of the fresh noise of every "
            f"step over the most by which {of} can move what the strategy makes of the run's sums. "
            "It is no noise multiplier of a single step, and is not to be compared with one",
        ),
        ("Correlated noise", f"{kind(mechanism.strategy)}: {_CANCELS}"),
        (
            "Sensitivity",
            f"{moved:.4g} clip norms is the most by which {of} can move what the strategy makes of "
            f"the sums; so the fresh noise has {moved * mechanism.noise_multiplier:.4g} clip norms",
        ),
        ("Charge", _charge(mechanism, once)),
    ]


_CANCELS = (
    "the noise of a step takes back part of that of the steps before, so that the sum of all steps "
    "has less"
)


def _charge(mechanism: Mechanism, amplified: bool) -> str:
    assert mechanism.strategy is not None
    drawn = " Every step draws from one group of records; groups take turns." if amplified else ""
    return (
        f"the whole run of {mechanism.strategy.steps:,} steps is one event, charged whole with its "
        f"first step: fewer steps cost as much.{drawn}"
    )


def kind(strategy: Strategy) -> str:
    """A strategy in words, with its number of bands or buffers."""
    if isinstance(strategy, Buffered):
        return f"a buffered Toeplitz strategy (BLT) of {len(strategy.decays):,} buffers"
    if isinstance(strategy, BandedInverse):
        return f"a Toeplitz strategy whose inverse has {len(strategy.coefficients):,} bands"
    if strategy.bands == 1:
        return "the identity strategy (no correlation)"
    toeplitz = "Toeplitz " if isinstance(strategy, Toeplitz) else ""
    if strategy.bands == strategy.steps:
        return f"a full {toeplitz}strategy"
    return f"a banded {toeplitz}strategy of {strategy.bands:,} bands"
