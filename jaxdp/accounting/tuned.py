"""Tuning: a run is repeated a secret, random number of times and only the best one is released.

docs/proofs/accounting.md ("Tuning") holds the argument of every bound here.
"""

import abc
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting import rdp
from jaxdp.accounting.events import Array, Event, Relation, UnsupportedEventError, require_event
from jaxdp.accounting.flat import flatten_exactly
from jaxdp.accounting.pairs import Pair, PairedEvent, symmetric_pair
from jaxdp.accounting.queries import delta

_MARGIN = 1 + 1e-12  # of rounding, on everything that must not come out too small
_POINTS = 32
_LEAST_MASS = 1e-250


class Tries(abc.ABC):
    """Base class of the laws of the number of tries K.

    Attributes:
        types: every law by its name.
    """

    types: ClassVar[dict[str, type["Tries"]]] = {}

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            Tries.types[cls.__name__] = cls

    @abc.abstractmethod
    def expected(self) -> float:
        """E[K]."""

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator) -> int:
        """A number of tries K; it must stay secret, so must the generator's seed."""

    @abc.abstractmethod
    def renyi(self, curve: Array, orders: Array) -> Array:
        """Renyi divergences of the best of K runs, [k], from those of one run, [k]."""

    @abc.abstractmethod
    def shift(self, epsilons: Array, deltas: Array) -> float:
        """c such that the chance of being chosen grows by e^c at most, from a run's profile."""


class _Truncated(Tries):
    """A negative binomial law without 0, of shape ``eta`` and success probability ``gamma``.

    That of Papernot and Steinke 2022, arXiv:2110.03620v2, Theorem 2.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        check.fields(self, gamma=check.error_probability)
        if not check.real("eta", self.eta) > -1 or not math.isfinite(self.eta):
            raise ValueError(f"eta={self.eta!r}: expected a finite number > -1")
        if not math.isfinite(self.expected()):
            raise ValueError(f"gamma={self.gamma!r}: expected more, the mean is not finite")

    def expected(self) -> float:
        # eta (1 - gamma) / (gamma (1 - gamma^eta)), or its limit.
        log = math.log(self.gamma)
        ratio = -self.eta / math.expm1(self.eta * log) if self.eta else -1 / log
        return (1 - self.gamma) / self.gamma * ratio

    def sample(self, rng: np.random.Generator) -> int:
        # P(k + 1) = P(k) (1 - gamma) (k + eta) / (k + 1).
        left, k, mass = rng.random(), 1, self.expected() * self.gamma ** (1 + self.eta)
        if mass < _LEAST_MASS:  # too small to sum from; 0 is then as good as impossible too
            return max(1, int(rng.negative_binomial(self.eta, self.gamma)))
        while left > mass and mass > 0:
            left -= mass
            mass *= (1 - self.gamma) * (k + self.eta) / (k + 1)
            k += 1
        return k

    def renyi(self, curve: Array, orders: Array) -> Array:
        # Papernot and Steinke 2022, arXiv:2110.03620v2, Theorem 2.
        inner = (1 - 1 / orders) * curve - math.log(self.gamma) / orders
        return curve + (1 + self.eta) * np.min(inner) + math.log(self.expected()) / (orders - 1)

    def shift(self, epsilons: Array, deltas: Array) -> float:
        # (1 + eta) e0, with delta(e0) <= (e^e0 - 1) gamma / (1 - gamma). The profile lies below its
        # chords in e^epsilon; the line from (1, 0) meets one of them.
        alpha, line = np.exp(epsilons), self.gamma / (1 - self.gamma)
        meets = np.flatnonzero(deltas <= line * (alpha - 1))
        if not meets.size:
            return math.inf
        i = int(meets[0])
        if i == 0:
            return 0.0
        fall = (deltas[i - 1] - deltas[i]) / (alpha[i] - alpha[i - 1])
        at = (deltas[i - 1] + fall * alpha[i - 1] + line) / (line + fall)
        return (1 + self.eta) * min(math.log(at) * _MARGIN + 1e-12, float(epsilons[i]))


@dataclass(frozen=True)
class NegativeBinomial(_Truncated):
    """P(K = k) in proportion to (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1), k >= 1.

    Attributes:
        eta: shape > -1; the larger, the more K is concentrated and the more privacy it costs.
        gamma: in (0, 1); the smaller, the more tries.
    """

    eta: float
    gamma: float


@dataclass(frozen=True)
class Geometric(_Truncated):
    """P(K = k) = gamma (1 - gamma)^(k - 1), k >= 1; ``NegativeBinomial`` of eta = 1.

    Attributes:
        gamma: in (0, 1), one over the mean.
    """

    gamma: float
    eta: ClassVar[float] = 1.0  # type: ignore[misc]


@dataclass(frozen=True)
class Logarithmic(_Truncated):
    """P(K = k) = (1 - gamma)^k / (k log(1/gamma)), k >= 1; ``NegativeBinomial`` of eta = 0.

    Attributes:
        gamma: in (0, 1).
    """

    gamma: float
    eta: ClassVar[float] = 0.0  # type: ignore[misc]


@dataclass(frozen=True)
class PoissonTries(Tries):
    """P(K = k) = e^-m m^k / k!, k >= 0; of no try at all nothing but that is released.

    Attributes:
        mean: m > 0.
    """

    mean: float

    def __post_init__(self) -> None:
        check.fields(self, mean=check.positive)

    def expected(self) -> float:
        return self.mean

    def sample(self, rng: np.random.Generator) -> int:
        return int(rng.poisson(self.mean))

    def renyi(self, curve: Array, orders: Array) -> Array:
        # arXiv:2110.03620v2, Theorem 6, and the term of no try.
        # Total variation by the smallest divergence: Pinsker; Bretagnolle and Huber.
        least = max(float(np.min(curve)), 0.0)
        variation = min(math.sqrt(least / 2), math.sqrt(-math.expm1(-least)))
        plain = tuple(orders.tolist())
        known = [rdp.rdp_to_delta(curve, math.log1p(1 / (a - 1)), plain) for a in plain]
        deltas = np.minimum(known, variation)
        log_moment = (orders - 1) * (curve + self.mean * deltas) + math.log(self.mean)
        return np.logaddexp(-self.mean, log_moment) / (orders - 1)

    def shift(self, epsilons: Array, deltas: Array) -> float:
        # m times the total variation of one run.
        return self.mean * float(deltas[0])


@dataclass(frozen=True)
class Tuned(PairedEvent):
    """The best of K runs, each with the same ``event`` and fresh randomness; nothing else of them.

    Every try draws its candidate (hyper-parameters) afresh from one law that was fixed without the
    data, trains with it and is scored. All that depends on the data, the score too, is in
    ``event``; the order of the scores is fixed. The candidate, output and score of the best try are
    released. K, the other tries and how long all took are not.

    Attributes:
        event: what ONE try releases; for candidates that differ, the least private.
        distribution: of K: ``Geometric``, ``Logarithmic``, ``NegativeBinomial``, ``PoissonTries``.
    """

    event: Event
    distribution: Tries

    def __post_init__(self) -> None:
        check.fields(self, event=require_event)
        law = self.distribution
        if isinstance(law, Mapping) and law.get("type") in Tries.types:
            fields = {k: v for k, v in law.items() if k != "type"}
            object.__setattr__(self, "distribution", Tries.types[law["type"]](**fields))
        elif not isinstance(law, Tries):
            raise ValueError(f"distribution={law!r}: expected one of {sorted(Tries.types)}")

    def refuses(self, relation: Relation) -> str:
        try:
            run = flatten_exactly(self.event, relation)
        except UnsupportedEventError as error:
            return str(error)
        if run.infinite or np.isfinite(run.renyi(relation)).any():
            return ""
        names = ", ".join(part.type_name for part, _ in run.parts)
        return f"its run has no Renyi curve ({names})"

    def infinite(self) -> str:
        # Under any relation that the event allows: noise that is missing is missing under all.
        for relation in Relation:
            try:
                return flatten_exactly(self.event, relation).infinite
            except UnsupportedEventError:
                continue
        return ""

    def contained(self) -> Event | None:
        # Where all scores are equal the best of at least one try is one try.
        return self.event if isinstance(self.distribution, _Truncated) else None

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        # delta(e) <= E[K] delta_run(e - c), c = ``Tries.shift``; Koskela, Redberg and Wang 2024,
        # arXiv:2402.06701, have such a bound. The lower end is that of ``contained``.
        epsilons, deltas = _profile(self.event, relation)
        c = self.distribution.shift(epsilons, deltas) * _MARGIN
        if not upper or not epsilons[-1] + c < 600:
            return ()
        deltas = np.minimum(self.distribution.expected() * deltas * _MARGIN, 1)
        return (symmetric_pair(epsilons + c, deltas),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        curve = flatten_exactly(self.event, relation).renyi(relation, tuple(orders.tolist()))
        bounds = self.distribution.renyi(curve, orders) * _MARGIN
        # A divergence grows with its order: a larger order's bound holds for a smaller one.
        return np.minimum.accumulate(np.where(np.isfinite(bounds), bounds, np.inf)[::-1])[::-1]


@functools.lru_cache(maxsize=64)
def _profile(event: Event, relation: Relation) -> tuple[Array, Array]:
    """Epsilons from 0 to where delta is about 1e-25, [k], and upper ends of delta, [k], falling."""
    run = flatten_exactly(event, relation)
    curve = run.renyi(relation)
    epsilons = rdp.rdp_to_epsilon(curve, 1e-25)[0] * np.linspace(0, 1, _POINTS) ** 1.5
    asked = epsilons.tolist()
    known = [delta(event, e, relation, tolerance=1e-2).upper for e in asked]
    deltas = np.minimum(known, [rdp.rdp_to_delta(curve, e) for e in asked])
    return epsilons, np.asarray(np.minimum.accumulate(deltas))
