"""Noise schedules: public factors, one a stage, that multiply a noise multiplier."""

import dataclasses

from jaxdp import arguments


@dataclasses.dataclass(frozen=True)
class SweepSchedule:
    """A factor for every stage, fixed before training. After the last stage its factor stays.

    Attributes:
        factors: one positive number a stage.
        steps_each: steps of a stage; 1 where a stage is an epoch of a hidden block.
    """

    factors: tuple[float, ...]
    steps_each: int = 1

    def __post_init__(self) -> None:
        factors = tuple(arguments.positive("factors", factor) for factor in self.factors)
        if not factors:
            raise ValueError("factors must hold at least one number, got none")
        object.__setattr__(self, "factors", factors)
        arguments.integer("steps_each", self.steps_each, least=1)

    def at(self, step: int) -> float:
        """The factor of a step."""
        return self.factors[min(step // self.steps_each, len(self.factors) - 1)]

    def end(self, step: int) -> int:
        """The first step after the stage that a step is in; the last stage has no end."""
        stage = step // self.steps_each + 1
        return stage * self.steps_each if stage < len(self.factors) else 10**18

    def stages(self, steps: int) -> list[tuple[int, int]]:
        """(first step, number of steps) of every stage that the first ``steps`` reach."""
        found, first = [], 0
        for stage in range(len(self.factors)):
            last = stage == len(self.factors) - 1
            number = steps - first if last else min(self.steps_each, steps - first)
            if number:
                found.append((first, number))
            first += number
        return found

    def over(self, steps: int) -> tuple[float, ...]:
        """The factors of the first ``steps`` steps."""
        return tuple(self.at(step) for step in range(steps))


CONSTANT = SweepSchedule((1.0,))


def constant() -> SweepSchedule:
    """The same noise throughout."""
    return CONSTANT


def linear(first: float, last: float, stages: int, steps_each: int = 1) -> SweepSchedule:
    """From ``first`` to ``last`` in equal steps over ``stages`` stages."""
    stages = arguments.integer("stages", stages, least=2)
    gap = (last - first) / (stages - 1)
    return SweepSchedule(tuple(first + gap * i for i in range(stages)), steps_each)


def step(
    first: float, factor: float, every: int, stages: int, steps_each: int = 1
) -> SweepSchedule:
    """``first``, multiplied by ``factor`` after every ``every`` stages."""
    every = arguments.integer("every", every, least=1)
    stages = arguments.integer("stages", stages, least=1)
    return SweepSchedule(tuple(first * factor ** (i // every) for i in range(stages)), steps_each)
