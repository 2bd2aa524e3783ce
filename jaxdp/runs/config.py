"""What a run is asked for, and the public numbers that follow from it."""

import dataclasses
from typing import Any

from jaxdp import _validate, models
from jaxdp import accounting as acc
from jaxdp.data.specs import spec
from jaxdp.mechanism import Mechanism, default_physical_batch_size, dp_sgd

METHODS = ("dp-sgd",)
OPTIMIZERS = ("sgd", "adam")

# Tramèr & Boneh 2021 (arXiv:2011.11660v3, Appendix C) for the image sets; ours for the others.
_RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp", "batch_size": 256, "steps": 150, "learning_rate": 0.3, "l2_clip_norm": 0.5,
    },
    "mnist": {
        "model": "mnist-cnn", "batch_size": 512, "steps": 4_700, "learning_rate": 0.5,
        "l2_clip_norm": 0.1,
    },
    "fashion_mnist": {
        "model": "mnist-cnn", "batch_size": 2_048, "steps": 1_172, "learning_rate": 4.0,
        "l2_clip_norm": 0.1,
    },
    "cifar10": {
        "model": "cifar-cnn", "batch_size": 1_024, "steps": 1_465, "learning_rate": 1.0,
        "l2_clip_norm": 0.1,
    },
    "pums": {
        "model": "logistic", "batch_size": 1_024, "steps": 200, "learning_rate": 1.0,
        "l2_clip_norm": 0.5,
    },
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The public configuration of a run; nothing in it is computed from private data.

    ``epsilon``, ``noise_multiplier`` and ``steps``: before :func:`resolve`, two of them are given
    and the third is None; afterwards the last two are numbers.

    Attributes:
        dataset: name of the data set.
        model: name of the model.
        activation: of its hidden layers.
        method: the private method.
        optimizer: what the noisy gradient goes into, "sgd" or "adam".
        learning_rate: its constant rate.
        momentum: of SGD.
        l2_clip_norm: per-example bound.
        batch_size: expected batch size.
        dataset_size: declared number of training records.
        sampling: "poisson", "fixed_size" or "full_batch".
        relation: neighbouring relation of the guarantee.
        epsilon: the budget, where one was given.
        delta: of the guarantee.
        noise_multiplier: noise over one record's largest contribution.
        steps: number of releases.
        eval_every: steps of a block: at its end the model is evaluated and checkpointed.
        physical_batch_size: rows of one compiled pass.
        sensitive: whether un-noised statistics are recorded, in a file of their own.
    """

    dataset: str
    model: str
    activation: str
    method: str
    optimizer: str
    learning_rate: float
    momentum: float
    l2_clip_norm: float
    batch_size: int
    dataset_size: int
    sampling: str
    relation: str
    epsilon: float | None
    delta: float
    noise_multiplier: float | None
    steps: int | None
    eval_every: int | None = None
    physical_batch_size: int | None = None
    sensitive: bool = False

    def mechanism(self) -> Mechanism:
        """The private step; ValueError names an argument that is out of range."""
        if self.noise_multiplier is None:
            raise ValueError("noise_multiplier must be a number once resolved, got None")
        return dp_sgd(
            self.noise_multiplier, self.l2_clip_norm, self.batch_size, self.dataset_size,
            self.sampling,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return dataclasses.asdict(self)


def recipe(dataset: str, **given: Any) -> RunConfig:
    """The configuration for ``dataset``: the given values, and the recipe's for the others.

    With neither ``epsilon`` nor ``noise_multiplier``, the budget is epsilon 3; ``steps`` come from
    the recipe unless they are to follow from the other two.

    Raises:
        ValueError: an unknown data set.
    """
    chosen = spec(dataset)
    defaults = {
        "activation": "tanh", "method": "dp-sgd", "optimizer": "sgd", "momentum": 0.9,
        "dataset_size": chosen.dataset_size, "sampling": "poisson",
        "relation": "add_or_remove_one", "epsilon": None, "noise_multiplier": None, "delta": 1e-5,
        **_RECIPES[dataset],
    }
    given = {name: value for name, value in given.items() if value is not None}
    if "epsilon" not in given and "noise_multiplier" not in given:
        defaults["epsilon"] = 3.0
    if "epsilon" in given and "noise_multiplier" in given:
        defaults["steps"] = None
    return RunConfig(dataset=dataset, **{**defaults, **given})


def resolve(config: RunConfig) -> RunConfig:
    """Checks every value and fills in what follows: noise or steps, block and pass sizes.

    Raises:
        ValueError: a value is out of range, or the budget cannot be met; the message names it.
    """
    _check(config)
    given = (config.epsilon, config.noise_multiplier, config.steps)
    if all(value is not None for value in given):
        raise ValueError(
            "two of epsilon, noise_multiplier and steps must be given, got all three: "
            f"{config.epsilon}, {config.noise_multiplier}, {config.steps}"
        )
    config = _with_noise_and_steps(config)
    assert config.steps is not None
    # Refused here, with the event's name, before anything is charged.
    acc.epsilon(acc.Repeated(config.mechanism().event, config.steps), config.delta,
                relation=acc.Relation(config.relation))
    block = config.eval_every or -(-config.steps // 20)
    rows = config.physical_batch_size or default_physical_batch_size(config.batch_size)
    return dataclasses.replace(config, eval_every=block, physical_batch_size=rows)


def _with_noise_and_steps(config: RunConfig) -> RunConfig:
    relation = acc.Relation(config.relation)
    if config.noise_multiplier is not None and config.steps is not None:
        return config
    if config.epsilon is None:
        raise ValueError("epsilon must be given where noise_multiplier or steps is not, got None")
    if config.sampling == "fixed_size":
        raise ValueError(
            "noise_multiplier and steps must both be given for fixed_size sampling, got "
            f"{config.noise_multiplier} and {config.steps}"
        )
    rate = config.batch_size / config.dataset_size
    if config.noise_multiplier is None:
        if config.steps is None:
            raise ValueError("steps or noise_multiplier must be given beside epsilon, got neither")
        noise = acc.calibrate_noise_multiplier(
            epsilon=config.epsilon, delta=config.delta, sampling_prob=rate, steps=config.steps,
            relation=relation,
        )
        return dataclasses.replace(config, noise_multiplier=float(noise))
    steps = acc.calibrate_steps(
        epsilon=config.epsilon, delta=config.delta, sampling_prob=rate,
        noise_multiplier=config.noise_multiplier, relation=relation,
    )
    if steps < 1:
        raise ValueError(
            f"epsilon must allow at least one step at noise_multiplier {config.noise_multiplier}, "
            f"got {config.epsilon}"
        )
    return dataclasses.replace(config, steps=int(steps))


def _check(config: RunConfig) -> None:
    _validate.one_of("method", config.method, METHODS)
    _validate.one_of("optimizer", config.optimizer, OPTIMIZERS)
    _validate.one_of("relation", config.relation, tuple(r.value for r in acc.Relation))
    _validate.positive("learning_rate", config.learning_rate)
    if not 0 <= _validate.non_negative("momentum", config.momentum) < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {config.momentum!r}")
    if not 0 < _validate.positive("delta", config.delta) < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {config.delta!r}")
    if config.epsilon is not None:
        _validate.positive("epsilon", config.epsilon)
    if config.noise_multiplier is not None:
        _validate.positive("noise_multiplier", config.noise_multiplier)
    for name in ("steps", "eval_every", "physical_batch_size"):
        if getattr(config, name) is not None:
            _validate.integer(name, getattr(config, name), least=1)
    # Builds the mechanism and the model once, for their own checks.
    dataclasses.replace(config, noise_multiplier=config.noise_multiplier or 1.0).mechanism()
    chosen = spec(config.dataset)
    models.build(
        config.model, num_classes=chosen.num_classes, example_shape=chosen.example_shape,
        activation=config.activation,
    )
