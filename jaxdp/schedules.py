"""Public noise schedules: the noise multiplier of every step, fixed before the run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxdp import arguments


@dataclasses.dataclass(frozen=True)
class NoiseSchedule:
    """The noise multiplier of each step, as public levels with a number of steps each.

    Formal guarantee: the multipliers are constants of the run, so that its cost is the composition
    of unlike Gaussian steps, charged level by level (``levels_between``). A multiplier chosen
    by looking at the data, or at earlier releases, is another matter: that takes a privacy filter.

    Attributes:
        levels: (noise_multiplier, steps) pairs, in order.

    Raises:
        ValueError: there is no level, a multiplier is negative or a count is below 1.
    """

    levels: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        rows = []
        for position, (multiplier, steps) in enumerate(self.levels):
            name = f"levels[{position}]"
            rows.append(
                (arguments.non_negative(name, multiplier), arguments.integer(name, steps, least=1))
            )
        if not rows:
            raise ValueError("levels must hold at least one (noise_multiplier, steps), got none")
        object.__setattr__(self, "levels", tuple(rows))

    @property
    def steps(self) -> int:
        """The number of steps of the schedule."""
        return sum(steps for _, steps in self.levels)

    def __call__(self, step: int) -> float:
        """The multiplier of one step, counted from 0."""
        step = arguments.integer("step", step, least=0)
        return next(self.levels_between(step, 1))[0]

    def levels_between(self, first_step: int, steps: int) -> Iterator[tuple[float, int, int]]:
        """(noise_multiplier, first_step, steps) for each level within these steps.

        Yields:
            A triple for each level, in order.

        Raises:
            ValueError: the schedule is shorter than that.
        """
        end = first_step + steps
        if end > self.steps:
            raise ValueError(
                f"noise schedule must cover the {end} steps of the run, got one of {self.steps}"
            )
        position = 0
        for multiplier, count in self.levels:
            start, stop = max(first_step, position), min(end, position + count)
            if start < stop:
                yield multiplier, start, stop - start
            position += count

    def table(self) -> np.ndarray:
        """float32 [steps]: the multiplier of each step."""
        values, counts = zip(*self.levels, strict=True)
        return np.repeat(np.asarray(values, np.float32), counts)

    def times(self, factor: float) -> "NoiseSchedule":
        """A copy with every multiplier times ``factor``; calibration searches over it."""
        factor = arguments.positive("factor", factor)
        return NoiseSchedule(tuple((factor * value, count) for value, count in self.levels))


def from_multipliers(multipliers: Iterable[float]) -> NoiseSchedule:
    """A schedule from one multiplier for each step; equal neighbours share a level."""
    groups = itertools.groupby(float(value) for value in multipliers)
    return NoiseSchedule(tuple((value, len(list(group))) for value, group in groups))


def exponential_decay(initial: float, rate: float, every: int, steps: int) -> NoiseSchedule:
    """The schedule σ_t = σ_0 e^(-k t), with t counting epochs of ``every`` steps.

    Yu et al. 2019, "Differentially private model publishing for deep learning"
    (arXiv:1904.02200), pre-defined schedules: the baseline EXP.

    Args:
        initial: σ_0.
        rate: k >= 0.
        every: steps that share a level, such as those of an epoch.
        steps: the length of the run.
    """
    rate = arguments.non_negative("rate", rate)
    return _by_epoch(initial, every, steps, lambda t: math.exp(-rate * t))


def time_decay(initial: float, rate: float, every: int, steps: int) -> NoiseSchedule:
    """The schedule σ_t = σ_0 / (1 + k t); otherwise as ``exponential_decay``."""
    rate = arguments.non_negative("rate", rate)
    return _by_epoch(initial, every, steps, lambda t: 1 / (1 + rate * t))


def step_decay(initial: float, factor: float, every: int, steps: int) -> NoiseSchedule:
    """The schedule σ_t = σ_0 k^t, 0 < k <= 1; otherwise as ``exponential_decay``."""
    factor = arguments.probability("factor", factor)
    return _by_epoch(initial, every, steps, lambda t: factor**t)


def linear_decay(initial: float, final: float, every: int, steps: int) -> NoiseSchedule:
    """The schedule that falls evenly from ``initial`` to ``final``, every ``every`` steps."""
    initial = arguments.positive("initial", initial)
    final = arguments.positive("final", final)
    every = arguments.integer("every", every, least=1)
    last = max(1, -(-arguments.integer("steps", steps, least=1) // every) - 1)
    return _by_epoch(initial, every, steps, lambda t: 1 + (final / initial - 1) * t / last)


_SHAPES = {
    "exponential": exponential_decay,
    "time": time_decay,
    "step": step_decay,
    "linear": lambda initial, ratio, every, steps: linear_decay(
        initial, initial * arguments.positive("ratio", ratio), every, steps
    ),
}


def parse(text: str, initial: float, steps: int) -> NoiseSchedule:
    """The schedule that a text such as "exponential:0.01:117" (kind:number:every) describes.

    Args:
        text: kind is exponential, time (both with their rate), step (its factor) or linear (the
            last multiplier over the first); ``every`` is how many steps share a level.
        initial: the first multiplier.
        steps: the length of the run.

    Raises:
        ValueError: a text of another form, or a value out of its range.
    """
    parts = text.split(":")
    try:
        make, number, every = _SHAPES[parts[0]], float(parts[1]), int(parts[2])
        if len(parts) != 3:
            raise ValueError("too many parts")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            "noise_schedule must be kind:number:every with a kind among "
            f"{', '.join(_SHAPES)}, such as exponential:0.01:117; got {text!r}"
        ) from error
    return make(initial, number, every, steps)


def _by_epoch(
    initial: float, every: int, steps: int, shape: Callable[[int], float]
) -> NoiseSchedule:
    initial = arguments.positive("initial", initial)
    every = arguments.integer("every", every, least=1)
    steps = arguments.integer("steps", steps, least=1)
    epochs = -(-steps // every)
    counts = [min(every, steps - every * t) for t in range(epochs)]
    levels = []
    for t, count in enumerate(counts):
        name = f"the noise multiplier of step {every * t}"
        levels.append((arguments.positive(name, initial * shape(t)), count))
    return NoiseSchedule(tuple(levels))


def split_noise(noise_multiplier: "float | NoiseSchedule", count_noise_multiplier: float) -> float:
    """The gradient's multiplier z_g with (z_g⁻² + z_c⁻²)^-½ = ``noise_multiplier``.

    Gradient and count are computed from one draw, so they are one Gaussian mechanism (Andrew et al.
    2021, arXiv:1905.03871v5, theorem 1).

    Raises:
        ValueError: the count alone would cost more than the whole step may.
    """
    whole = arguments.positive("noise_multiplier", noise_multiplier)
    count = arguments.positive("count_noise_multiplier", count_noise_multiplier)
    if count <= whole:
        raise ValueError(
            f"count_noise_multiplier must be above noise_multiplier ({whole}), got {count}: the "
            "count would use the step's whole budget"
        )
    # Rounded up, so that the two together are never more than the event says.
    return (whole**-2 - count**-2) ** -0.5 * (1.0 + 1e-12)
