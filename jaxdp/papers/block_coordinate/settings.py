"""The public configuration of a run of block coordinate descent, and what follows from it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments, data
from jaxdp.data.specs import DatasetSpec, spec
from jaxdp.optimizers.registry import Setting
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks
from jaxdp.papers.block_coordinate.network import SOFTMAX_RESIDUAL, Network, Patches
from jaxdp.papers.block_coordinate.proximal import Proximal
from jaxdp.papers.block_coordinate.released import ReleasedBlocks
from jaxdp.runs.recipes import own_constants

Blocks = ReleasedBlocks | HiddenBlocks
ALGORITHMS = ("sbcd", "sbcd-hidden", "sbcd-one-layer")
ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE.value, acc.Relation.REPLACE_ONE.value
# Chosen by looking at test accuracy on MNIST, which is public here; docs/block_coordinate.md.
RECIPES: dict[str, dict[str, Any]] = {
    "sbcd": {"batch_size": 512, "learning_rate": 8.0, "l2_clip_norm": 0.05, "hidden": 128},
    "sbcd-hidden": {"batch_size": 600, "learning_rate": 0.5, "l2_clip_norm": 0.05, "hidden": 64},
    "sbcd-one-layer": {"batch_size": 600, "learning_rate": 1.0, "l2_clip_norm": 1.0, "hidden": 1},
}
_EPOCHS = 10
# A few units above sqrt(2), so that no softmax gradient is ever clipped.
_ABOVE = 1 + 2.0**-20
_MOST_LAYERS, _MOST_WEIGHTS = 1_000, 2**28
_MOST_LEARNING_RATE = 1e6  # beyond, float32 overflows in a step or two


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of ``--set NAME=VALUE``.

    Attributes:
        layers: hidden layers of ``hidden`` units; with ``channels`` those after the convolution.
        bound: B, the length that every layer's input is shortened to.
        scale: public factor on the inputs; 0 for 3 over the square root of their number.
        softmax: 1 for a softmax block at the end, 0 for the squared loss.
        channels: of a convolution as the first block; 0 for none.
        kernel: the side of its patches.
        stride: their distance.
        epochs: passes over the data for every block of a hidden run.
        sweeps: how often a hidden run trains every block.
        weight_decay: of the proximal step.
        radius: of the ball that singular values are clipped to; 0 for none.
    """

    layers: int = 1
    bound: float = 1.5
    scale: float = 0.0
    softmax: int = 1
    channels: int = 0
    kernel: int = 5
    stride: int = 2
    epochs: int = 20
    sweeps: int = 1
    weight_decay: float = 0.0
    radius: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("layers", 0), ("channels", 0), ("epochs", 1), ("sweeps", 1)):
            arguments.integer(name, getattr(self, name), least=least)
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"layers must be at most {_MOST_LAYERS:,}, got {self.layers:,}")
        arguments.one_of("softmax", self.softmax, (0, 1))
        arguments.positive("bound", self.bound)
        for name in ("scale", "weight_decay", "radius"):
            arguments.non_negative(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The public configuration of a run; nothing in it is computed from private data.

    Attributes:
        dataset: name of the data set.
        algorithm: "sbcd" (R1), "sbcd-hidden" (R2) or "sbcd-one-layer" (R3).
        batch_size: expected, of R1; of every fixed batch, of the others.
        dataset_size: declared number of training records.
        learning_rate: the step size of a block.
        l2_clip_norm: of one record's gradient in a block; a hidden softmax block has its own.
        relation: of the guarantee; replace_one for the hidden ones.
        delta: of the guarantee.
        epsilon: the budget, where one was given.
        noise_multiplier: of a whole sweep, for R1; of a batch's sum, for the others.
        steps: sweeps of R1, each over one draw; 1 for a hidden run, which is one release.
        hidden: units of a hidden layer.
        eval_every: sweeps between evaluations of R1.
        own: None for a built-in data set; else example_shape, num_classes and test_size.
        settings: see ``Settings``.
    """

    dataset: str
    algorithm: str
    batch_size: int
    dataset_size: int
    learning_rate: float
    l2_clip_norm: float
    relation: str
    delta: float
    epsilon: float | None
    noise_multiplier: float | None
    steps: int
    hidden: int
    eval_every: int
    own: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_hidden(self) -> bool:
        """True if only the last state is released."""
        return self.algorithm != "sbcd"

    @property
    def chosen(self) -> Settings:
        """The settings, checked."""
        return settings_of(self.algorithm, self.settings)

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that mean nothing with the algorithm and its settings."""
        if self.algorithm != "sbcd-one-layer":
            return ()
        return ("hidden", "l2_clip_norm") if self.chosen.softmax else ("hidden",)

    @property
    def spec(self) -> DatasetSpec:
        """The public constants of the data set."""
        if self.own is None:
            return spec(self.dataset)
        shape, own = tuple(self.own["example_shape"]), self.own
        return DatasetSpec(
            self.dataset, self.dataset, "", shape, own["num_classes"], self.dataset_size,
            own["test_size"],
        )  # fmt: skip

    @property
    def network(self) -> Network:
        """The network."""
        chosen, patches = self.chosen, None
        inputs = math.prod(self.spec.example_shape)
        widths = [inputs + 1]
        if chosen.channels:
            patches = _patches(self.spec.example_shape, chosen)
            widths = [inputs, patches.outputs]
        widths += [self.hidden] * (0 if self.algorithm == "sbcd-one-layer" else chosen.layers)
        loss = "softmax" if chosen.softmax else "squared"
        return Network((*widths, self.spec.num_classes), chosen.bound, loss=loss, patches=patches)

    def blocks(self, noise_multiplier: float | None = None) -> Blocks:
        """The algorithm; ValueError names a value that is out of range.

        Args:
            noise_multiplier: another than the configuration's.
        """
        z = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if z is None:
            raise ValueError("noise_multiplier must be a number once resolved, got None")
        network, chosen = self.network, self.chosen
        proximal = Proximal(chosen.weight_decay, spectral_radius=chosen.radius or None)
        norms = (self.l2_clip_norm,) * network.blocks
        if not self.is_hidden:
            each = z * math.sqrt(network.blocks)
            return ReleasedBlocks(
                network, (each,) * network.blocks, norms, self.learning_rate, self.batch_size,
                self.dataset_size, proximal,
            )  # fmt: skip
        if chosen.softmax:
            norms = (*norms[1:], SOFTMAX_RESIDUAL * chosen.bound * _ABOVE)
        return HiddenBlocks(
            network, z, norms, self.learning_rate, self.batch_size, self.dataset_size,
            chosen.epochs, chosen.sweeps, proximal,
            average=self.dataset_size % self.batch_size == 0,
            direct=self.algorithm == "sbcd-one-layer",
        )  # fmt: skip

    def total(self, noise_multiplier: float | None = None) -> acc.Event:
        """Everything that the run releases."""
        made = self.blocks(noise_multiplier)
        return made.event() if isinstance(made, HiddenBlocks) else made.events(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON; ``from_dict`` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "BlockConfig":
        """The configuration that ``to_dict`` wrote; ValueError for other fields."""
        try:
            return cls(**row)
        except TypeError as error:
            raise ValueError(
                f"config must have the fields of BlockConfig, got another version's: {error}"
            ) from error


def settings_of(algorithm: str, given: Mapping[str, Setting]) -> Settings:
    """The settings of an algorithm; ValueError for one that it does not have."""
    names = setting_names(algorithm)
    for name in given:
        if name not in names:
            raise ValueError(
                f"settings of {algorithm} must be among {', '.join(names)}; got {name!r}"
            )
    return Settings(**given)  # type: ignore[arg-type]


def setting_names(algorithm: str) -> tuple[str, ...]:
    """The names of an algorithm's settings."""
    without = {
        "sbcd": ("epochs", "sweeps"),
        "sbcd-hidden": (),
        "sbcd-one-layer": ("layers", "sweeps", "channels", "kernel", "stride"),
    }[algorithm]
    return tuple(f.name for f in dataclasses.fields(Settings) if f.name not in without)


def configured(algorithm: str, dataset: str | DatasetSpec, given: Mapping[str, Any]) -> BlockConfig:
    """The resolved configuration: the given values, and the recipe's for the others.

    Args:
        algorithm: a name of ``ALGORITHMS``.
        dataset: the name of a built-in one, or the constants of a file's.
        given: fields of ``BlockConfig``; None leaves one to the recipe.
    """
    own = isinstance(dataset, DatasetSpec)
    chosen = dataset if isinstance(dataset, DatasetSpec) else spec(dataset)
    hidden = algorithm != "sbcd"
    values: dict[str, Any] = {
        **RECIPES[algorithm],
        "dataset_size": chosen.dataset_size,
        "relation": REPLACE if hidden else ADD,
        "delta": 1e-5,
        "epsilon": None,
        "noise_multiplier": None,
        "settings": {},
    }
    values |= {name: value for name, value in given.items() if value is not None}
    _check_convolution(values["settings"])
    size = values["dataset_size"]
    if given.get("batch_size") is None:
        values["batch_size"] = _batch_size(values["batch_size"], size, hidden)
    if values["epsilon"] is None and values["noise_multiplier"] is None:
        values["epsilon"] = 3.0
    values.setdefault("steps", 1 if hidden else round(_EPOCHS * size / values["batch_size"]))
    values.setdefault("eval_every", -(-values["steps"] // 10))
    constants = own_constants(chosen) if own else None
    return resolved(BlockConfig(chosen.name, algorithm, own=constants, **values))


def _check_convolution(settings: Mapping[str, Setting]) -> None:
    for name in ("kernel", "stride"):
        if name in settings and not settings.get("channels"):
            raise ValueError(
                f"{name} must not be set without channels: there is no convolution; got "
                f"{settings[name]!r}"
            )


def _batch_size(wanted: int, size: int, hidden: bool) -> int:
    """The recipe's batch, smaller for few records; of a hidden run one that divides them."""
    most = max(1, min(wanted, size // 8))
    if not hidden:
        return most
    return next((b for b in range(most, max(1, most // 2), -1) if size % b == 0), most)


def _patches(shape: tuple[int, ...], chosen: Settings) -> Patches:
    if len(shape) != 3:
        raise ValueError(
            f"channels must be 0 for examples of shape {shape}, which are no images; got "
            f"{chosen.channels}"
        )
    height, width, depth = shape
    return Patches((height, width, depth), chosen.kernel, chosen.stride, chosen.channels)


def resolved(config: BlockConfig) -> BlockConfig:
    """Checks every value, and fills in the noise that a budget of epsilon asks for.

    Raises:
        ValueError: a value is out of range, or the budget cannot be met; the message names it.
    """
    arguments.one_of("algorithm", config.algorithm, ALGORITHMS)
    arguments.fraction("delta", config.delta)
    if arguments.positive("learning_rate", config.learning_rate) > _MOST_LEARNING_RATE:
        raise ValueError(
            f"learning_rate must be at most {_MOST_LEARNING_RATE:g}, got {config.learning_rate!r}"
        )
    arguments.positive("l2_clip_norm", config.l2_clip_norm)
    if config.noise_multiplier is not None:
        arguments.positive("noise_multiplier", config.noise_multiplier)
    for name in ("steps", "eval_every", "hidden", "batch_size", "dataset_size"):
        arguments.integer(name, getattr(config, name), least=1)
    if config.is_hidden and config.steps != 1:
        raise ValueError(f"steps of a hidden run must be 1, its one release; got {config.steps}")
    covered = (REPLACE,) if config.is_hidden else (ADD, REPLACE)
    arguments.one_of("relation", config.relation, covered, f" with algorithm {config.algorithm}")
    if (config.epsilon is None) == (config.noise_multiplier is None):
        raise ValueError(
            "epsilon or noise_multiplier must be given, and not both, got "
            f"{config.epsilon} and {config.noise_multiplier}"
        )
    relation = acc.Relation(config.relation)
    _check_weights(config)
    config.blocks(config.noise_multiplier or 1.0)
    if config.noise_multiplier is None:
        assert config.epsilon is not None
        budget = arguments.positive("epsilon", config.epsilon)
        noise = acc.calibrate(config.total, budget, config.delta, relation)
        config = dataclasses.replace(config, noise_multiplier=float(noise))
    acc.epsilon(config.total(), config.delta, relation)
    return config


def _check_weights(config: BlockConfig) -> None:
    network = config.network
    count = sum(math.prod(network.shape(block)) for block in range(network.blocks))
    if count > _MOST_WEIGHTS:
        raise ValueError(
            f"hidden, layers and channels must make at most {_MOST_WEIGHTS:,} weights (1 GiB), got "
            f"{count:,}, of hidden {config.hidden:,}, layers {config.chosen.layers:,} and channels "
            f"{config.chosen.channels:,}"
        )


def prepared(config: BlockConfig, x: np.ndarray) -> np.ndarray:
    """Examples as the network sees them, float32 [n, d_0]: scaled, and a constant where it fits."""
    flat = np.asarray(x, np.float32).reshape(len(x), -1)
    flat = flat * np.float32(config.chosen.scale or 3 / math.sqrt(flat.shape[1]))
    if config.network.patches is not None:
        return flat
    return np.concatenate([flat, np.full((len(x), 1), 0.5, np.float32)], axis=1)


def check_labels(config: BlockConfig, dataset: data.Dataset) -> None:
    """Raises ValueError for labels of the training records that are no classes; names none."""
    labels, count = np.asarray(dataset.train_y), config.spec.num_classes
    whole = labels.dtype.kind in "iu" and labels.ndim == 1 and len(labels) == len(dataset.train_x)
    if not whole:
        raise ValueError(
            f"train_y must be whole numbers, one for each of the {len(dataset.train_x)} training "
            f"records, got {labels.dtype} of shape {labels.shape}"
        )
    if labels.size and not (labels.min() >= 0 and labels.max() < count):
        # Without the label: it is private.
        raise ValueError(
            f"train_y must be at least 0 and below {count}, the number of classes, got a label "
            "outside"
        )


def records(config: BlockConfig, dataset: data.Dataset) -> tuple[jnp.ndarray, jnp.ndarray]:
    """(x [N, d_0], y [N, classes]) of the training records; sensitive.

    Raises:
        ValueError: a label that is no class; the message does not hold it.
    """
    check_labels(config, dataset)
    wanted = np.eye(config.spec.num_classes, dtype=np.float32)[np.asarray(dataset.train_y)]
    return jnp.asarray(prepared(config, dataset.train_x)), jnp.asarray(wanted)
