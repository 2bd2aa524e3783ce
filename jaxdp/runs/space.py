"""Spaces of hyper-parameters: laws, fixed without the data, that candidates are drawn from."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxdp import arguments
from jaxdp.optimizers.registry import Setting

Candidate = dict[str, Setting]
_CORNERS = 256


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A number drawn evenly between two.

    Attributes:
        low: the least.
        high: the greatest, above ``low``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def draw(self, rng: np.random.Generator) -> float:
        """One number."""
        return float(rng.uniform(self.low, self.high))


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """A number whose logarithm is drawn evenly, as is usual for learning rates.

    Attributes:
        low: the least, above 0.
        high: the greatest, above ``low``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        arguments.positive("low", self.low)

    def draw(self, rng: np.random.Generator) -> float:
        """One number."""
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)


Law = Uniform | LogUniform | tuple[Setting, ...]


def _check_range(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low and high must be finite and low below high, got {low!r}, {high!r}")


def checked(space: Mapping[str, Law | Sequence[Setting]]) -> dict[str, Law]:
    """The space with choices as tuples.

    Raises:
        ValueError: no hyper-parameter, one without a law, or a choice that is no number or word.
    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(
            "space must name at least one hyper-parameter, such as "
            f"{{'learning_rate': LogUniform(0.1, 10)}}, got {space!r}"
        )
    found: dict[str, Law] = {}
    for name, law in space.items():
        if not isinstance(law, Uniform | LogUniform):
            law = tuple(law) if isinstance(law, list | tuple) else ()
            if not law or not all(isinstance(v, bool | int | float | str) for v in law):
                raise ValueError(
                    f"space must give {name} a LogUniform, a Uniform or a list of numbers or words,"
                    f" got {space[name]!r}"
                )
        found[str(name)] = law
    return found


def drawn(space: Mapping[str, Law], rng: np.random.Generator) -> Candidate:
    """One candidate: every hyper-parameter from its own law, with replacement."""
    return {
        name: law[int(rng.integers(len(law)))] if isinstance(law, tuple) else law.draw(rng)
        for name, law in space.items()
    }


def corners(space: Mapping[str, Law]) -> Iterator[Candidate]:
    """Every combination of choices and ends of ranges; the first 256 and 64 draws, where more."""
    ends = [law if isinstance(law, tuple) else (law.low, law.high) for law in space.values()]
    for values in itertools.islice(itertools.product(*ends), _CORNERS):
        yield dict(zip(space, values, strict=True))
    # A public generator: what it draws is looked at, never trained.
    rng = np.random.default_rng(0)
    for _ in range(64):
        yield drawn(space, rng)


def parsed(text: str) -> tuple[str, Law]:
    """Name and law of "learning_rate=0.1:10" (a log-uniform range) or "momentum=0,0.9".

    Raises:
        ValueError: a text of another form.
    """
    name, sign, law = text.partition("=")
    try:
        if not (sign and name and law):
            raise ValueError
        if ":" in law:
            low, high = law.split(":")
            return name, LogUniform(float(low), float(high))
        return name, tuple(_value(part) for part in law.split(","))
    except ValueError as error:
        raise ValueError(
            "--search must be NAME=LOW:HIGH with 0 < LOW < HIGH (drawn log-uniformly) or "
            f"NAME=VALUE,VALUE,..., got {text!r}"
        ) from error


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if not text:
        raise ValueError("an empty value")
    return text
