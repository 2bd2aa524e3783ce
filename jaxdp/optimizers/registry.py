"""The registry of algorithms by name, built from the same public numbers."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jaxdp import arguments
from jaxdp import clipping as rules
from jaxdp.clipping.options import check_bound
from jaxdp.mechanism import Mechanism, dp_sgd
from jaxdp.noise import Strategy
from jaxdp.optimizers import adaptive, pigdo, zero_order
from jaxdp.optimizers.adadp import adadp
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import sa_dpsgd
from jaxdp.optimizers.energy import energy_mechanism
from jaxdp.sampling import Sampling
from jaxdp.schedules import NoiseSchedule

# Of an algorithm's own hyper-parameter.
Setting = float | str


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The public numbers that every algorithm is built from."""

    noise_multiplier: float | NoiseSchedule  # the noise multiplier of every step, or a schedule
    l2_clip_norm: float  # C
    batch_size: int  # expected batch size
    dataset_size: int  # declared number of records
    learning_rate: optax.ScalarOrSchedule  # a number, or an optax schedule
    sampling: str | Sampling = "poisson"  # a rule, or its name, as for ``jaxdp.dp_sgd``
    momentum: float = 0.0  # momentum of SGD, where the algorithm is built on it
    key: jax.Array | None = None  # the key of an annealer's acceptance draws
    # Of correlated noise, where ``sampling`` is a rule of a whole run; else None.
    strategy: Strategy | None = None
    noise: str = "gaussian"  # "gaussian", or "grid" as for ``jaxdp.dp_sgd``

    def __post_init__(self) -> None:
        # Rules know it by names of their own.
        check_bound("l2_clip_norm", self.l2_clip_norm)

    def acceptance_key(self) -> jax.Array:
        """The key of an annealer's acceptance draws; ValueError where none was given."""
        if self.key is None:
            raise ValueError("key must be given to an annealed algorithm, got None")
        return self.key

    def mechanism(self, rule: rules.Rule | None = None) -> Mechanism:
        """The mechanism with a clipping rule, flat clipping by default."""
        rule = rule or rules.clip(self.l2_clip_norm)
        sizes = (self.batch_size, self.dataset_size)
        z = self.noise_multiplier
        if self.strategy is None:
            return dp_sgd(
                noise_multiplier=z,
                batch_size=self.batch_size,
                dataset_size=self.dataset_size,
                sampling=self.sampling,
                rule=rule,
                noise=self.noise,
            )
        if isinstance(self.sampling, str):
            raise ValueError(
                "sampling must be a rule of a whole run with a strategy, such as "
                f"jaxdp.sampling.CyclicPoisson, got {self.sampling!r}"
            )
        return Mechanism(rule, z, self.sampling, *sizes, strategy=self.strategy, noise=self.noise)


@dataclasses.dataclass(frozen=True)
class AlgorithmEntry:
    """A registry entry: how to build an algorithm, and its defaults."""

    build: Callable[..., Algorithm]  # from the numbers and keyword settings
    # The data that judge candidates: "public" (part of the test set), "private" (noisy, on the
    # training set), "test" (all of it) and "train" (un-noised), both as published; or "" for none.
    energy: str = ""
    momentum: bool = False  # True if it uses momentum
    # Fields of a run that differ from DP-SGD's where none is given, such as the rate.
    recipe: Mapping[str, float] = dataclasses.field(default_factory=dict)


def build(name: str, numbers: Numbers, settings: Mapping[str, Setting] | None = None) -> Algorithm:
    """The algorithm ``name``, built from public numbers.

    Args:
        name: a key of ``ALGORITHMS``.
        numbers: the public numbers.
        settings: further keyword arguments of the algorithm, such as ``{"temperature": 5.0}``.

    Raises:
        ValueError: an unknown name or setting, or a value out of its range; noise that the
            algorithm would pass over.
    """
    entry = entry_of(name)
    # Settings are the builder's own parameters: no list of them is kept.
    known = settings_of(name)
    among = ", ".join(known) or "none"
    for setting in settings or {}:
        if setting not in known:
            raise ValueError(f"settings of {name} must be among {among}; got {setting!r}")
    made = entry.build(numbers, **(settings or {}))
    # Refused before anything is charged: an algorithm whose claim its entry does not bear out.
    if entry.energy == "train" and not made.mechanism.leak:
        raise ValueError(
            f"mechanism of {name} must name its leak, since un-noised training records judge its "
            "candidates, got an empty one"
        )
    if made.mechanism.noise != numbers.noise:
        raise ValueError(
            f"noise must be {made.mechanism.noise!r} for {name}, which makes its own mechanism, "
            f"got {numbers.noise!r}"
        )
    return made


def entry_of(name: str) -> AlgorithmEntry:
    """The algorithm of that name; ValueError for an unknown one."""
    hint = "; `import jaxdp.papers.algorithms` adds those of the papers"
    return ALGORITHMS[arguments.one_of("algorithm", name, tuple(ALGORITHMS), hint)]


def register(name: str, entry: AlgorithmEntry) -> None:
    """Adds an algorithm to the registry, for runs and the command line.

    Raises:
        ValueError: the name is taken by another, or no ``AlgorithmEntry`` is given.
    """
    if not isinstance(entry, AlgorithmEntry):
        raise ValueError(f"entry must be a registry.AlgorithmEntry, got {entry!r}")
    if ALGORITHMS.setdefault(name, entry) is not entry:
        raise ValueError(f"name must be new, got {name!r}, which is registered")


def settings_of(name: str) -> tuple[str, ...]:
    """The names of an algorithm's own settings."""
    parameters = inspect.signature(ALGORITHMS[name].build).parameters
    return tuple(parameters)[1:]  # the first takes the numbers


# Builders of what is not just ``make(mechanism, learning_rate, settings...)``, see ``built_from``.


def _dp_sgd(n: Numbers) -> Algorithm:
    """DP-SGD with the momentum of the numbers."""
    return adaptive.sgd(n.mechanism(), n.learning_rate, n.momentum)


def _auto_s(n: Numbers, gamma: float = 0.01) -> Algorithm:
    """DP-SGD with AUTO-S clipping (Bu et al. 2022, arXiv:2206.07136)."""
    rule = rules.auto_s(n.l2_clip_norm, arguments.positive("gamma", gamma))
    return adaptive.sgd(n.mechanism(rule), n.learning_rate, n.momentum)


def _normalised(n: Numbers) -> Algorithm:
    """DP-SGD on normalised gradients."""
    rule = rules.normalize(n.l2_clip_norm)
    return adaptive.sgd(n.mechanism(rule), n.learning_rate, n.momentum)


def _dp_adam(n: Numbers, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Algorithm:
    """Adam of optax, of whose arguments three are settings."""
    return adaptive.dp_adam(n.mechanism(), n.learning_rate, b1=b1, b2=b2, eps=eps)


def _sa(n: Numbers, temperature: float = 10.0, max_rejections: int = 10) -> Algorithm:
    """SA-DPSGD, whose candidates are judged on public examples."""
    return _annealed(n, temperature=temperature, max_rejections=max_rejections)


def _sa_private(
    n: Numbers,
    temperature: float = 10.0,
    max_rejections: int = 10,
    energy_noise: float = 10.0,
    energy_bound: float = 0.001,
    energy_batch_size: int | None = None,
) -> Algorithm:
    """SA-DPSGD, whose candidates are judged by a noisy energy with an event of its own."""
    arguments.positive("energy_noise", energy_noise)
    arguments.positive("energy_bound", energy_bound)
    size = n.batch_size if energy_batch_size is None else energy_batch_size
    if arguments.integer("energy_batch_size", size, least=1) > n.dataset_size:
        raise ValueError(
            f"energy_batch_size must be at most dataset_size ({n.dataset_size}), got {size}"
        )
    energy = energy_mechanism(energy_noise, energy_bound, size, n.dataset_size)
    return _annealed(n, temperature=temperature, max_rejections=max_rejections, energy=energy)


def _annealed(n: Numbers, **settings: Any) -> Algorithm:
    key = n.acceptance_key()
    return sa_dpsgd(n.mechanism(), n.learning_rate, key, momentum=n.momentum, **settings)


def _adadp(
    n: Numbers,
    beta: float = 1.2,
    threshold: float = 1e-6,
    floor: float = 0.1,
    cap: float = 1.0,
    rate_decay: float = 0.1,
    moment_decay: float = 0.9,
    eps: float = 1e-8,
) -> Algorithm:
    return adadp(
        n.mechanism(rules.coordinate_box(1.0)),
        n.learning_rate,
        bound=n.l2_clip_norm,
        beta=beta,
        threshold=threshold,
        floor=floor,
        cap=cap,
        rate_decay=rate_decay,
        moment_decay=moment_decay,
        eps=eps,
    )


def built_from(make: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """The builder of an entry from ``make(mechanism, learning_rate, settings...)``."""

    def build(n: Numbers, **settings: Setting) -> Algorithm:
        """The algorithm with flat clipping."""
        return make(n.mechanism(), n.learning_rate, **settings)

    # Its signature is that of ``make``: the settings that the command line offers.
    numbers = inspect.Parameter("n", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    settings = tuple(inspect.signature(make).parameters.values())[2:]
    build.__signature__ = inspect.Signature([numbers, *settings])  # type: ignore[attr-defined]
    return build


_SMALL_RATE = {"learning_rate": 0.002}
_ADAGRAD_RATE = {"learning_rate": 0.02}
# Differences along a direction of many coordinates vary as much as the gradient is long.
_ZERO_ORDER_RECIPE = {"learning_rate": 0.01, "l2_clip_norm": 1.0}
# SA-DPSGD's Algorithm 2 steps by the noisy gradient itself; its authors' later code has 0.9.
ANNEALED_RECIPE = {"momentum": 0.0}
# Of AdaDp's paper.
ADADP_RECIPE = {"learning_rate": 0.002, "l2_clip_norm": 4.0}
ALGORITHMS: dict[str, AlgorithmEntry] = {
    "dp-sgd": AlgorithmEntry(_dp_sgd, momentum=True),
    "auto-s": AlgorithmEntry(_auto_s, momentum=True),
    "normalised-sgd": AlgorithmEntry(_normalised, momentum=True),
    "dp-adam": AlgorithmEntry(_dp_adam, recipe=_SMALL_RATE),
    "dp-adam-bc": AlgorithmEntry(built_from(adaptive.dp_adam_bc), recipe=_SMALL_RATE),
    "dp-rmsprop": AlgorithmEntry(built_from(adaptive.dp_rmsprop), recipe=_SMALL_RATE),
    "dp-adagrad": AlgorithmEntry(built_from(adaptive.dp_adagrad), recipe=_ADAGRAD_RATE),
    "dp-zo": AlgorithmEntry(built_from(zero_order.dp_zo), recipe=_ZERO_ORDER_RECIPE),
    "sa-dpsgd": AlgorithmEntry(_sa, energy="public", momentum=True, recipe=ANNEALED_RECIPE),
    "sa-dpsgd-private": AlgorithmEntry(
        _sa_private, energy="private", momentum=True, recipe=ANNEALED_RECIPE
    ),
    "adadp": AlgorithmEntry(_adadp, recipe=ADADP_RECIPE),
    "piadam": AlgorithmEntry(built_from(pigdo.piadam), recipe=_SMALL_RATE),
    "pirmsprop": AlgorithmEntry(built_from(pigdo.pirmsprop), recipe=_SMALL_RATE),
    "piadagrad": AlgorithmEntry(built_from(pigdo.piadagrad), recipe=_ADAGRAD_RATE),
}
