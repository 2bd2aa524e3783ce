"""Epsilon where norms are estimated by random sketches: `python -m benchmarks.randomised_norms`.

A record whose squared norm is estimated by a Gaussian sketch with k columns, and which is clipped
by that estimate, adds at most C sqrt(k / X), X of the law chi-squared with k degrees of freedom:
docs/randomised_norms.md. Sensitivities are rounded up, by at most ``RATIO``. jaxdp estimates no
norms: nothing here is part of it.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.events import Array, Relation
from jaxdp.accounting.pairs import (
    BatchGaussian,
    Branches,
    Discrete,
    Pair,
    PairedEvent,
    bracket_decreasing,
)

RESULTS = Path(__file__).parent / "results" / "randomised_norms.json"
COLUMNS = (512, 128, 32, 8)
Z, Q, STEPS, DELTA = 1.0, 0.01, 1_000, 1e-5
RATIO = 1.01
COMMON = 1e-3  # probability of the smallest sensitivities, which are taken together
ROUNDING = 1e-9  # relative, of what the incomplete gamma function says of a cell


def sensitivities(columns: int, tail: float) -> tuple[Array, Array]:
    """(s, probabilities) [m] each, in units of C: never below C / sqrt(R), R = chi-squared_k / k.

    The largest s is exceeded with a probability of ``tail`` at most, which is left out.
    """
    half = columns / 2
    low = math.sqrt(half / float(special.gammainccinv(half, COMMON)))
    top = math.sqrt(half / float(special.gammaincinv(half, tail)))
    s = low * RATIO ** np.arange(math.ceil(math.log(top / low) / math.log(RATIO)) + 1)
    # P(C / sqrt(R) > s) = P(chi-squared_k < k / s^2); an atom takes all mass up to it.
    above = np.append(1.0, special.gammainc(half, half / s**2))
    mass = above[:-1] - above[1:]
    assert (mass > 1e-5 * above[:-1]).all()  # so that differences keep their digits
    return s, mass


class _Shown(Branches):
    """Sensitivities that are public and drawn first; one beyond all of them shows the record."""

    def __init__(self, branches: list[tuple[float, Pair]], infinite: float) -> None:
        super().__init__(branches, ROUNDING)
        self.infinite = infinite


@dataclass(frozen=True)
class ShownSketch(PairedEvent):
    """A Poisson-sampled step with norms of a sketch that all records share and everybody sees."""

    noise_multiplier: float
    sampling_prob: float
    columns: int
    tail: float

    def refuses(self, relation: Relation) -> str:
        return "two records share a sketch" if relation is Relation.REPLACE_ONE else ""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        if not upper:
            return ()
        z, q, tail = self.noise_multiplier, self.sampling_prob, self.tail
        law = [row.tolist() for row in sensitivities(self.columns, tail)]
        rest = math.log1p(-q)
        ends = (
            Discrete(np.asarray([rest]), np.asarray([1 - q]), q, 4e-16, np.ones(1)),
            Discrete(np.asarray([-rest]), np.ones(1), 0.0, 4e-16, np.asarray([1 - q])),
        )
        found = []
        for distances, end in zip(((1, 0, 1), (0, 1, 1)), ends, strict=True):
            branches: list[tuple[float, Pair]] = [
                (p, BatchGaussian(q, z / s, distances)) for s, p in zip(*law, strict=True)
            ]
            found.append(_Shown([*branches, (tail, end)], tail * end.infinite))
        return tuple(found)


def epsilon(step: acc.Event, steps: int = STEPS, delta: float = DELTA) -> float:
    return acc.epsilon(acc.Repeated(step, steps), delta, tolerance=1e-2).upper


def shown(columns: int, z: float = Z, q: float = Q, steps: int = STEPS) -> float:
    """Epsilon where the sketch is public: fresh in every step, one for the batch."""
    return epsilon(ShownSketch(z, q, columns, 1e-3 * DELTA / (q * steps)), steps)


def secret(columns: int, z: float = Z, q: float = Q, steps: int = STEPS) -> float:
    """Epsilon where every record has a fresh sketch of its own in every step, and it stays secret.

    What is left out moves every output's probability by ``lost`` at most, with the record there.
    """
    guess = shown(columns, z, q, steps)
    lost = 1e-3 * DELTA / (1 + math.exp(guess))
    s, p = sensitivities(columns, lost / (q * steps))
    p = p / math.fsum(p)
    event = acc.MixtureOfGaussians(z, (0.0, *s.tolist()), (1 - q, *(q * p).tolist()))
    found = epsilon(event, steps, DELTA * (1 - 2e-3))
    assert found <= guess
    return found


def at_most(columns: int, z: float = Z, q: float = Q, steps: int = STEPS) -> float:
    """Epsilon by one bound for all sensitivities, exceeded with half of delta in the whole run."""
    half = columns / 2
    x = float(special.gammaincinv(half, 0.5 * DELTA / (q * steps)))
    step = acc.PoissonSampled(acc.Gaussian(z * math.sqrt(x / half)), q)
    return epsilon(step, steps, DELTA / 2)


def reused(columns: int, z: float = Z, q: float = Q, steps: int = STEPS) -> float:
    """Epsilon, an estimate, where all steps share a sketch and a record's gradient stays the same.

    It is no bound: a gradient that follows releases may turn to where the sketch sees nothing.
    """
    s, p = sensitivities(columns, 1e-2 * DELTA)
    tens = range(0, p.size, 10)
    s, p = np.add.reduceat(p * s, tens), np.add.reduceat(p, tens)
    runs = [acc.Repeated(acc.PoissonSampled(acc.Gaussian(z / x), q), steps) for x in s / p]

    def excess(at: float) -> float:
        found = [acc.delta(run, at, tolerance=math.inf).estimate or 0.0 for run in runs]
        return float(p @ np.asarray(found)) - DELTA

    return bracket_decreasing(excess, 1e-3, 200.0, rtol=1e-3)[1]


def noise(columns: int, target: float) -> float:
    """The noise multiplier with which a public sketch has the epsilon ``target``."""
    return bracket_decreasing(lambda z: shown(columns, z) - target, Z, 4 * Z, rtol=2e-3)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    exact = epsilon(acc.PoissonSampled(acc.Gaussian(Z), Q))
    rows = []
    for columns in COLUMNS:  # the last takes minutes
        each = {f.__name__: f(columns) for f in (secret, shown, at_most, reused)}
        rows.append({"columns": columns, "exact": exact, **each})
        if columns > min(COLUMNS):
            rows[-1]["noise"] = noise(columns, exact)
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
