"""Strategies of correlated noise by name, for configurations of runs."""

import dataclasses
from typing import TYPE_CHECKING

from jaxdp import arguments, sampling
from jaxdp.mechanism import CORRELATED_SAMPLINGS, dp_mf
from jaxdp.noise import (
    Strategy,
    Workload,
    banded_inverse_square_root,
    dyadic,
    from_dict,
    identity,
    square_root,
)
from jaxdp.noise.optimise import ON_GRID
from jaxdp.optimizers import registry

if TYPE_CHECKING:
    from jaxdp.runs.config import RunConfig

# The strategies of `jaxdp train`, and how records are drawn where nothing else was asked for.
SAMPLINGS = {
    "banded": "cyclic_poisson",
    "buffered": "fixed_order",
    "lambda": "fixed_order",
    "banded_inverse": "fixed_order",
    "square_root": "fixed_order",
    "identity": "cyclic_poisson",
}
_WITHOUT_NUMBER = ("lambda", "square_root", "identity")


def usual_relation(sampling_name: str) -> str:
    """The neighbouring relation where none was asked for: the strictest that is covered."""
    return "replace_special" if sampling_name == "fixed_order" else "add_or_remove_one"


def check(config: "RunConfig") -> None:
    """Raises ValueError if strategy, bands and sampling do not belong together."""
    if config.strategy is None:
        if config.bands is not None:
            raise ValueError(f"bands must be given with a strategy only, got {config.bands}")
        if config.sampling in CORRELATED_SAMPLINGS:
            raise ValueError(
                f"strategy must be given with sampling {config.sampling}, one of "
                f"{', '.join(SAMPLINGS)}: it is for correlated noise; got None"
            )
        return

    # Which sampling the strategy's sensitivity is proven for, and over how many steps.
    name = arguments.one_of("strategy", config.strategy, tuple(SAMPLINGS))
    hint = f" with strategy {name}"
    arguments.one_of("sampling", config.sampling, CORRELATED_SAMPLINGS, hint)
    if config.sampling != SAMPLINGS[name] == "fixed_order":
        raise ValueError(
            f"sampling must be fixed_order with strategy {name}, got {config.sampling}: cyclic "
            "Poisson sampling amplifies banded strategies alone"
        )
    if config.steps is None:
        raise ValueError(f"steps must be given with strategy {name}, made for so many; got None")
    if config.batch_size > config.dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({config.dataset_size}), got "
            f"{config.batch_size}"
        )
    if config.secure_noise and name not in ON_GRID:
        raise ValueError(
            f"strategy must be one of {', '.join(ON_GRID)} with secure_noise, got "
            f"{name}: noise on an integer grid takes coefficients of a few binary digits alone"
        )

    # Its number.
    if config.bands is not None:
        arguments.integer("bands", config.bands, least=1)
        if name in _WITHOUT_NUMBER:
            raise ValueError(f"bands must be None with strategy {name}, got {config.bands}")
    elif name == "banded" and config.epsilon is None and config.sampling == "cyclic_poisson":
        raise ValueError(
            "bands must be given with noise_multiplier: which number is best depends on the budget "
            f"(epsilon); got None with noise_multiplier={config.noise_multiplier}"
        )

    # What nothing is proven of with correlated noise.
    for option in ("noise_schedule", "cap"):
        if (found := getattr(config, option)) is not None:
            raise ValueError(f"{option} must be None with a strategy, got {found!r}")
    if config.participations != 1:
        raise ValueError(f"participations must be 1 with a strategy, got {config.participations}")
    if config.canaries:
        raise ValueError(
            "canaries must be 0 with a strategy: the audit scores every step by itself, as if its "
            f"noise were independent; got {config.canaries}"
        )
    if config.pca_dimensions is not None and config.sampling == "cyclic_poisson":
        raise ValueError(
            "pca_dimensions must be None with sampling cyclic_poisson, where a record's group is a "
            "hash of its content: the last digits of a projected one may depend on how many "
            f"records there are; got {config.pca_dimensions}"
        )


def resolved(config: "RunConfig") -> "RunConfig":
    """The configuration with the number of bands, and the numbers of what is optimised.

    Raises:
        ValueError: the strategy does not fit steps or sampling, or the budget cannot be met.
    """
    if config.strategy is None:
        return config
    assert config.steps is not None
    # Only the best number of bands depends on the noise.
    budget = config.bands is None and config.epsilon is not None
    mechanism = dp_mf(
        noise_multiplier=None if budget else 1.0,
        l2_clip_norm=config.l2_clip_norm,
        batch_size=config.batch_size,
        dataset_size=config.dataset_size,
        sampling=config.sampling,
        steps=config.steps,
        strategy=config.strategy,
        bands=config.bands,
        workload=workload(config),
        epsilon=config.epsilon if budget else None,
        delta=config.delta if budget else None,
        relation=config.relation,
        noise="grid" if config.secure_noise else "gaussian",
    )
    strategy = mechanism.strategy
    assert strategy is not None
    made = strategy.to_dict()
    sizes = {"banded": "coefficients", "buffered": "decays", "banded_inverse": "coefficients"}
    bands = len(made[sizes[config.strategy]]) if config.strategy in sizes else None
    optimised = config.strategy in ("banded", "buffered", "lambda")
    return dataclasses.replace(config, bands=bands, strategy_numbers=made if optimised else None)


def workload(config: "RunConfig") -> Workload:
    """The sums of gradients that the parameters consist of: with SGD, those of its momentum."""
    used = registry.ALGORITHMS[config.algorithm].momentum and config.optimizer == "sgd"
    return Workload(config.momentum if used else 0.0)


def of(config: "RunConfig") -> Strategy:
    """The strategy of a resolved configuration."""
    assert config.steps is not None
    if config.strategy == "identity":
        return identity(config.steps)
    if config.strategy == "square_root":
        whole = square_root(config.steps)
        return dyadic(whole) if config.secure_noise else whole
    if config.strategy == "banded_inverse":
        assert config.bands is not None
        return banded_inverse_square_root(config.steps, config.bands)
    if config.strategy_numbers is None:
        raise ValueError(
            f"strategy_numbers must be there for strategy {config.strategy}, got None: resolve the "
            "configuration first"
        )
    return from_dict(config.strategy_numbers)


def rule(config: "RunConfig") -> sampling.CyclicPoisson | sampling.FixedOrder:
    """The sampling rule of a resolved configuration."""
    assert config.steps is not None
    if config.sampling == "fixed_order":
        return sampling.FixedOrder(config.batch_size, config.steps)
    groups = config.bands or 1
    share = groups * config.batch_size / config.dataset_size
    return sampling.CyclicPoisson(share, groups, config.steps)
