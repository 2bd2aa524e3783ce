"""Default configurations by data set."""

import dataclasses
import math
from typing import Any

from jaxdp import arguments
from jaxdp.data.specs import DatasetSpec, spec
from jaxdp.optimizers import registry
from jaxdp.optimizers.registry import Setting
from jaxdp.recipes import linear
from jaxdp.runs import strategies
from jaxdp.runs.config import RunConfig, resolve

# Tramèr & Boneh 2021 (arXiv:2011.11660v3, Appendix C) for the image sets; ours for the others.
_RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp",
        "batch_size": 256,
        "steps": 150,
        "learning_rate": 0.3,
        "l2_clip_norm": 0.5,
    },
    "mnist": {
        "model": "mnist-cnn",
        "batch_size": 512,
        "steps": 4_700,
        "learning_rate": 0.5,
        "l2_clip_norm": 0.1,
    },
    "fashion_mnist": {
        "model": "mnist-cnn",
        "batch_size": 2_048,
        "steps": 1_172,
        "learning_rate": 4.0,
        "l2_clip_norm": 0.1,
    },
    "cifar10": {
        "model": "cifar-cnn",
        "batch_size": 1_024,
        "steps": 1_465,
        "learning_rate": 1.0,
        "l2_clip_norm": 0.1,
    },
    "pums": {
        "model": "logistic",
        "batch_size": 1_024,
        "steps": 200,
        "learning_rate": 1.0,
        "l2_clip_norm": 0.5,
    },
}
_RECIPES["madelon"] = _RECIPES["pums"] | {"batch_size": 250}  # an eighth, as of data of one's own


# The same paper's for a linear model on scattering features: batch 8,192 and rate 16 are those of
# Fashion-MNIST, and for MNIST those of batch 4,096 and rate 8, doubled; 40 epochs, 60 for CIFAR-10.
# Of whitened features the rate follows from noise, steps and numbers alone.
_ON_FEATURES: dict[str, dict[str, Any]] = {
    "digits": {},
    "mnist": {"batch_size": 8_192, "steps": 293, "learning_rate": 16.0},
    "fashion_mnist": {"batch_size": 8_192, "steps": 293, "learning_rate": 16.0},
    "cifar10": {"batch_size": 8_192, "steps": 366, "learning_rate": 4.0},
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a recipe, and what its epsilon leaves out.

    Attributes:
        source: where its numbers come from.
        tuned: whether they were chosen by results on this very data set, and what of that is
            counted.
    """

    source: str
    tuned: str

    def lines(self) -> list[str]:
        """Two lines for a person."""
        return [f"recipe: {self.source}", f"tuned on this data set: {self.tuned}"]


_BY_AUTHORS = (
    "yes, by its authors, who chose among accuracies of this data set at no charge; epsilon covers "
    "the run, not that choice. Epsilon for such a choice on data of your own: jaxdp tune"
)
_SEEN = (
    "yes: batch and clipping norm by their authors on this data set, and the filters, their cells "
    "and the rate's one constant on held-out training records of it, all at no charge; epsilon "
    "covers the run, not that choice. Epsilon for such a choice on data of your own: jaxdp tune"
)
_NOT = "no; epsilon leaves out only what you choose yourself by looking at results"
_IN_PART = (
    "take it so: nothing records what was looked at when these numbers were chosen, and no epsilon "
    "is counted for it"
)
_BY_NUMBERS = (
    "batch and clipping norm of Tramer and Boneh 2021 (arXiv:2011.11660v3, Appendix C); the rate "
    "follows from noise, steps and numbers (jaxdp.linear.rate)"
)
_SCATTERED = Origin(
    "a linear model on scattering features, whitened, by Tramer and Boneh's design; " + _BY_NUMBERS,
    _BY_AUTHORS,
)
_SCENES = Origin(
    "a linear model on two layers of filters made from a random process, of nobody's data "
    "(jaxdp.features.two_layers); " + _BY_NUMBERS,
    _SEEN,
)
# The best recipe of each data set that runs on two cores in minutes, and its origin.
_BEST: dict[str, tuple[dict[str, Any], Origin]] = {
    "digits": ({}, Origin("jaxdp's own small network", _IN_PART)),
    "mnist": ({"features": "scattering", "whiten_noise_multiplier": 16.0}, _SCATTERED),
    "fashion_mnist": ({"features": "two_layers"}, _SCENES),
    "cifar10": ({"features": "two_layers_mirrored"}, _SCENES),
    "pums": ({}, Origin("jaxdp's own logistic regression", _IN_PART)),
    "madelon": ({}, Origin("jaxdp's own logistic regression, with the numbers of pums", _NOT)),
}
_OWN = Origin("jaxdp's usual numbers for data of your own: ten epochs of a small network", _NOT)


def best(dataset: str | DatasetSpec) -> tuple[dict[str, Any], Origin]:
    """The fields of the best recipe for a data set, to be given to ``recipe``, and its origin.

    Args:
        dataset: the name of a built-in one, or the constants of a file's.

    Raises:
        ValueError: an unknown data set.
    """
    if isinstance(dataset, DatasetSpec):
        return {}, _OWN
    fields, origin = _BEST[spec(dataset).name]
    return dict(fields), origin


# SA-DPSGD, Table 2, where it differs from the algorithm's own default of 10.
_MAX_REJECTIONS = {"cifar10": 5}


def _recipe_of_own(constants: DatasetSpec) -> dict[str, Any]:
    """The defaults for a data set of the caller's own: ten epochs of a small network."""
    batch = max(1, min(256, constants.dataset_size // 8))
    return {
        "model": "mlp",
        "batch_size": batch,
        "learning_rate": 0.3,
        "l2_clip_norm": 0.5,
        "steps": max(1, 10 * constants.dataset_size // batch),
    }


def own_constants(constants: DatasetSpec) -> dict[str, Any]:
    """The public constants of a file's data set as a configuration keeps them."""
    return {
        "example_shape": list(constants.example_shape),
        "num_classes": constants.num_classes,
        "test_size": constants.test_size,
    }


def recipe(dataset: str | DatasetSpec, **given: Any) -> RunConfig:
    """The configuration for ``dataset``: the given values, and the recipe's for the others.

    Args:
        dataset: the name of a built-in one, or the constants of a file's.
        given: fields of ``RunConfig``; None leaves one to the recipe.

    With neither ``epsilon`` nor ``noise_multiplier``, the budget is epsilon 3; ``steps`` come from
    the recipe unless they are to follow from the other two. A strategy of correlated noise brings
    its own sampling, and that its relation.

    Raises:
        ValueError: an unknown data set, or a value that the algorithm does not use.
    """
    own = isinstance(dataset, DatasetSpec)
    chosen = dataset if isinstance(dataset, DatasetSpec) else spec(dataset)
    defaults = {
        "activation": "tanh",
        "algorithm": "dp-sgd",
        "optimizer": "sgd",
        "momentum": 0.9,
        "dataset_size": chosen.dataset_size,
        "sampling": strategies.SAMPLINGS.get(given.get("strategy") or "", "poisson"),
        "epsilon": None,
        "noise_multiplier": None,
        "delta": 1e-5,
        **(_recipe_of_own(chosen) if own else _RECIPES[chosen.name]),
        "own": own_constants(chosen) if own else None,
    }
    if given.get("features") is not None:
        if not isinstance(given["features"], str):
            raise ValueError(
                "features must be a name, of a function or an Encoder package.module:function or "
                f"file.py:function, got {arguments.described(given['features'])}"
            )
        defaults |= {"model": "logistic", **({} if own else _ON_FEATURES.get(chosen.name, {}))}
        whitened = given.get("whiten_noise_multiplier") is not None
        plain = given.get("optimizer") in (None, "sgd") and given.get("algorithm") in (
            None,
            "dp-sgd",
        )
        if plain and (whitened or given["features"].startswith("two_layers")):
            defaults["learning_rate"] = None
    if named := registry.ALGORITHMS.get(given.get("algorithm") or ""):
        defaults.update(named.recipe)
        if not own:
            given["settings"] = _settings(chosen.name, given["algorithm"], given.get("settings"))
    given = {name: value for name, value in given.items() if value is not None}
    drawn = given.get("sampling", defaults["sampling"])
    defaults["relation"] = strategies.usual_relation(drawn)
    _check_used({**defaults, **given}, given)
    if "epsilon" not in given and "noise_multiplier" not in given:
        defaults["epsilon"] = 3.0
    if "epsilon" in given and "noise_multiplier" in given:
        defaults["steps"] = None
    merged = {**defaults, **given}
    if merged["learning_rate"] is not None:
        return RunConfig(dataset=chosen.name, **merged)
    # Of the noise and the steps that the budget will have.
    config = RunConfig(dataset=chosen.name, **(merged | {"learning_rate": 1.0}))
    return dataclasses.replace(config, learning_rate=_rate(resolve(config)))


def _rate(config: RunConfig) -> float:
    """``jaxdp.linear.rate`` of a resolved configuration, in three digits."""
    assert config.steps is not None
    assert config.noise_multiplier is not None
    found = linear.rate(
        config.noise_multiplier,
        l2_clip_norm=config.l2_clip_norm,
        batch_size=config.batch_size,
        steps=config.steps,
        numbers=math.prod(config.example_shape()),
        momentum=config.momentum,
    )
    return float(f"{found:.3g}")


def _settings(dataset: str, algorithm: str, given: dict[str, Setting] | None) -> dict[str, Any]:
    """The algorithm's settings: those given, and the data set's for the others."""
    rejections = _MAX_REJECTIONS.get(dataset)
    if rejections is None or "max_rejections" not in registry.settings_of(algorithm):
        return given or {}
    return {"max_rejections": rejections, **(given or {})}


def _check_used(merged: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises ValueError for options that the algorithm would ignore."""
    algorithm, optimizer = merged["algorithm"], merged["optimizer"]
    if algorithm not in registry.ALGORITHMS:
        return
    if optimizer != "sgd" and algorithm != "dp-sgd":
        raise ValueError(
            f"optimizer must be sgd for algorithm {algorithm}, which brings its own; got "
            f"{optimizer!r}"
        )
    if "momentum" in given and not (registry.ALGORITHMS[algorithm].momentum and optimizer == "sgd"):
        name = algorithm if optimizer == "sgd" else f"{algorithm} with optimizer {optimizer}"
        raise ValueError(
            f"momentum must not be given for algorithm {name}, which has none of SGD's; "
            f"got {given['momentum']!r}"
        )
