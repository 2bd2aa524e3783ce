"""Public noise schedules: the noise multiplier of every step, fixed before the run."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

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
        # Checked, and as a tuple, which nobody changes after a charge.
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
        # Past its end a schedule says nothing of what a step costs.
        end = first_step + steps
        if end > self.steps:
            raise ValueError(
                f"noise schedule must cover the {end} steps of the run, got one of {self.steps}"
            )
        # The overlap of every level with [first_step, end).
        position = 0
        for multiplier, count in self.levels:
            start, stop = max(first_step, position), min(end, position + count)
            if start < stop:
                yield multiplier, start, stop - start
            position += count

    def table(self) -> np.ndarray:
        """float32 [steps]: the multiplier of each step."""
        # On the device a step takes its multiplier from here, see ``Noise.multiplier_at``.
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


KINDS = ("exponential", "time", "step", "linear")


def decaying(kind: str, initial: float, number: float, every: int, steps: int) -> NoiseSchedule:
    """The schedule σ_0, σ_1, ... of epochs of ``every`` steps each, that falls as its kind says.

    "exponential" is σ_t = σ_0 e^(-k t), "time" σ_0 / (1 + k t), "step" σ_0 k^t (Yu et al. 2019,
    "Differentially private model publishing for deep learning", arXiv:1904.02200, pre-defined
    schedules; the first is the baseline EXP); "linear" falls evenly to σ_0 k in the last epoch.

    Args:
        kind: one of these.
        initial: σ_0.
        number: k, at least 0; for "step" and "linear" above 0, and for "step" at most 1.
        every: steps that share a level, such as those of an epoch.
        steps: the length of the run.

    Raises:
        ValueError: a value out of its range, or a multiplier that underflows to 0.
    """
    arguments.one_of("kind", kind, KINDS)
    initial = arguments.positive("initial", initial)
    every = arguments.integer("every", every, least=1)
    steps = arguments.integer("steps", steps, least=1)
    # The share of σ_0 that every epoch t has.
    epochs = -(-steps // every)
    if kind == "step":
        k = arguments.probability("number", number)
        shares = [k**t for t in range(epochs)]
    elif kind == "linear":
        fall = initial * arguments.positive("number", number) / initial - 1
        shares = [1 + fall * t / max(1, epochs - 1) for t in range(epochs)]
    else:
        k = arguments.non_negative("number", number)
        exponential = kind == "exponential"
        shares = [math.exp(-k * t) if exponential else 1 / (1 + k * t) for t in range(epochs)]
    # One level an epoch, the last as long as the run is. A multiplier that underflows to 0 would
    # add no noise.
    levels = []
    for t, share in enumerate(shares):
        name = f"the noise multiplier of step {every * t}"
        count = min(every, steps - every * t)
        levels.append((arguments.positive(name, initial * share), count))
    return NoiseSchedule(tuple(levels))


def parse(text: str, initial: float, steps: int) -> NoiseSchedule:
    """The schedule that a text such as "exponential:0.01:117" (kind:number:every) describes.

    Args:
        text: kind, number and ``every`` as for ``decaying``.
        initial: the first multiplier.
        steps: the length of the run.

    Raises:
        ValueError: a text of another form, or a value out of its range.
    """
    parts = text.split(":")
    try:
        kind, number, every = parts[0], float(parts[1]), int(parts[2])
        if len(parts) != 3 or kind not in KINDS:
            raise ValueError("another form")
    except (IndexError, ValueError) as error:
        raise ValueError(
            "noise_schedule must be kind:number:every with a kind among "
            f"{', '.join(KINDS)}, such as exponential:0.01:117; got {text!r}"
        ) from error
    return decaying(kind, initial, number, every, steps)
