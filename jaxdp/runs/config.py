"""Configurations of runs, and the noise or steps that follow from a budget."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdp import accounting as acc
from jaxdp import arguments, sampling
from jaxdp.audit import canaries as audit_canaries
from jaxdp.data import models
from jaxdp.data.specs import DatasetSpec, spec
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import Mechanism, default_physical_batch_size
from jaxdp.optimizers import hyperparameters, registry
from jaxdp.optimizers.algorithm import Algorithm, averaged
from jaxdp.recipes import features
from jaxdp.runs import budget, checks, strategies
from jaxdp.sampling import Sampling
from jaxdp.schedules import NoiseSchedule, parse

# Models whose per-example gradients are never held, and their physical batch size: on a CPU
# 1.3 to 1.7 times faster than 64 for 784-1000-10 and batches of 600; more gives nothing.
_DENSE = ("mlp", "logistic")
_DENSE_ROWS = 256


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The public configuration of a run; nothing in it is computed from private data.

    ``epsilon``, ``noise_multiplier`` and ``steps``: before ``resolve``, two of them are given
    and the third is None; afterwards the last two are numbers.

    Attributes:
        dataset: name of the data set.
        model: name of the model.
        activation: of its hidden layers.
        algorithm: the private algorithm, a key of ``jaxdp.optimizers.registry.ALGORITHMS``.
        optimizer: what DP-SGD's noisy gradient goes into, "sgd" or "adam".
        learning_rate: its constant rate.
        momentum: of SGD.
        l2_clip_norm: per-example bound.
        batch_size: expected batch size.
        dataset_size: declared number of training records.
        sampling: one of ``jaxdp.sampling.NAMES``; with a strategy, cyclic_poisson or fixed_order.
        relation: neighbouring relation of the guarantee.
        epsilon: the budget, where one was given.
        delta: of the guarantee.
        noise_multiplier: noise over one record's largest contribution; of the first step, where a
            schedule is given.
        steps: number of releases.
        eval_every: steps of a block: at its end the model is evaluated and checkpointed.
        physical_batch_size: records of one compiled microbatch; "auto" for as many as fit.
        sensitive: whether un-noised statistics are recorded, in a file of their own.
        noise_schedule: None, or how the multiplier moves, see ``jaxdp.schedules.parse``.
        settings: further keyword arguments of the algorithm.
        hidden: width of an MLP's hidden layer.
        pca_dimensions: None, or to how many dimensions examples are projected first, privately.
        pca_noise_multiplier: noise of that projection, see ``jaxdp.preprocess.dp_pca``.
        whiten_noise_multiplier: None, or the noise of centring and whitening the features, see
            ``jaxdp.preprocess.dp_whitening``.
        canaries: candidates of a one-run audit, each a record more with probability one half. They
            change no public number: ``dataset_size``, and with it the sampling rate and the
            divisor, stay as declared, whatever the coins say.
        canary_kind: one of ``jaxdp.runs.canary_inputs.KINDS``.
        participations: steps of an epoch that a record is in, under random allocation.
        cap: the largest batch of truncated Poisson sampling; None takes the default.
        own: None for a built-in data set; else the example_shape, num_classes and test_size of a
            file's.
        strategy: of noise that is correlated over the steps, a key of
            ``jaxdp.runs.strategies.SAMPLINGS``; None for independent noise.
        bands: of the strategy, as for ``jaxdp.dp_mf``; filled in by ``resolve``.
        features: None, or one of ``jaxdp.features.NAMES``: fixed features of each record, which the
            model sees in its place, at no cost.
        average: None, or the decay of an average of the parameters, which is evaluated and released
            in their place.
        learning_rate_schedule: None, or how the rate moves: ``optimizers.hyperparameters``.
        strategy_numbers: those of a strategy that was optimised, as ``Strategy.to_dict`` has them:
            filled in by ``resolve``, so that a run goes on with the very same on another machine.
        secure_noise: whether the noise is on an integer grid, from a cryptographic generator
            (``jaxdp.dp_sgd(noise="grid")``).
    """

    dataset: str
    model: str
    activation: str
    algorithm: str
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
    physical_batch_size: int | Literal["auto"] | None = None
    sensitive: bool = False
    noise_schedule: str | None = None
    settings: dict[str, registry.Setting] = dataclasses.field(default_factory=dict)
    hidden: int = 64
    pca_dimensions: int | None = None
    pca_noise_multiplier: float | None = None
    whiten_noise_multiplier: float | None = None
    canaries: int = 0
    participations: int = 1
    cap: int | None = None
    own: dict[str, Any] | None = None
    strategy: str | None = None
    bands: int | None = None
    strategy_numbers: dict[str, Any] | None = None
    features: str | None = None
    average: float | None = None
    learning_rate_schedule: str | None = None
    secure_noise: bool = False
    canary_kind: str = "gradient"

    @property
    def spec(self) -> DatasetSpec:
        """The public constants of the data set."""
        if self.own is None:
            return spec(self.dataset)
        return DatasetSpec(
            self.dataset,
            self.dataset,
            "",
            tuple(self.own["example_shape"]),
            self.own["num_classes"],
            self.dataset_size,
            self.own["test_size"],
        )

    def private_algorithm(self, secret: Secret | None = None) -> Algorithm:
        """The algorithm; ValueError names an argument that is out of range.

        Args:
            secret: of the run; None only to look at events and numbers.
        """
        numbers = registry.Numbers(
            self.noise(),
            self.l2_clip_norm,
            self.batch_size,
            self.dataset_size,
            self.rate(),
            self.sampling_rule(),
            self.momentum,
            (secret or Secret(0, reproducible=True)).jax_key("judge"),
            None if self.strategy is None else strategies.of(self),
            "grid" if self.secure_noise else "gaussian",
        )
        name = self.algorithm
        if name == "dp-sgd" and self.optimizer == "adam":
            name = "dp-adam"
        made = registry.build(name, numbers, self.settings)
        return made if self.average is None else averaged(made, self.average)

    def rate(self) -> Any:
        """The learning rate: a number, or an optax schedule."""
        if self.learning_rate_schedule is None:
            return self.learning_rate
        if self.steps is None:
            raise ValueError("steps must be given with a learning_rate_schedule, got None")
        return hyperparameters.schedule(self.learning_rate_schedule, self.learning_rate, self.steps)

    def sampling_rule(self) -> Sampling:
        """The sampling rule; ValueError for numbers that it does not have."""
        if self.strategy is not None:
            return strategies.rule(self)
        return sampling.by_name(
            self.sampling, self.batch_size, self.dataset_size, self.participations, self.cap
        )

    def noise(self) -> float | NoiseSchedule:
        """The noise multiplier of every step."""
        if self.noise_multiplier is None:
            raise ValueError("noise_multiplier must be a number once resolved, got None")
        if self.noise_schedule is None:
            return self.noise_multiplier
        if self.steps is None:
            raise ValueError("steps must be given with a noise_schedule, got None")
        return parse(self.noise_schedule, self.noise_multiplier, self.steps)

    def total(self, steps: int) -> acc.Event:
        """Everything that a run of ``steps`` steps releases, preprocessing included."""
        return acc.Composed((*self.once(), self.private_algorithm().total(steps)))

    def once(self) -> tuple[acc.Event, ...]:
        """The events before the first step."""
        before = (self.pca_noise_multiplier, self.whiten_noise_multiplier)
        return tuple(acc.Gaussian(noise) for noise in before if noise is not None)

    def example_shape(self) -> tuple[int, ...]:
        """The shape of one example as the model sees it."""
        if self.pca_dimensions is not None:
            return (self.pca_dimensions,)
        if self.features is not None:
            return features.shape_of(self.features, self.spec.example_shape)
        return self.spec.example_shape

    def candidates(self) -> audit_canaries.Canaries | None:
        """The candidates of the one-run audit that are gradients; None without such.

        Raises:
            ValueError: more of them than the model has room for.
        """
        if not self.canaries or self.canary_kind != "gradient":
            return None
        model = models.build(
            self.model,
            num_classes=self.spec.num_classes,
            example_shape=self.example_shape(),
            activation=self.activation,
            hidden=(self.hidden,),
        )
        example = jnp.zeros((1, *self.example_shape()), jnp.float32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), example)
        return audit_canaries.candidates(self.canaries, shapes)

    def mechanism(self) -> Mechanism:
        """The mechanism of the gradient."""
        return self.private_algorithm().mechanism

    def warnings(self) -> list[str]:
        """Warnings about values that are allowed but probably a mistake."""
        if self.delta * self.dataset_size < 1:
            return []
        return [
            f"delta {self.delta:g} is at least 1/{self.dataset_size}, one over the number of "
            "records: publishing a record at random would meet it too; choose a smaller one"
        ]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON; ``from_dict`` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "RunConfig":
        """The configuration that ``to_dict`` wrote, also in an older version.

        Raises:
            ValueError: it has other fields.
        """
        if "method" in row:
            from jaxdp.runs.report.schema import former_algorithm

            row = former_algorithm(row)
        try:
            return cls(**row)
        except TypeError as error:
            raise ValueError(
                f"config must have the fields of RunConfig, got another version's: {error}"
            ) from error


def resolve(config: RunConfig) -> RunConfig:
    """Checks every value and fills in what follows: noise or steps, bands, block, physical batch.

    Raises:
        ValueError: a value is out of range, or the budget cannot be met; the message names it.
    """
    config = _with_whole_steps(config)
    checks.values(config)
    given = (config.epsilon, config.noise_multiplier, config.steps)
    if all(value is not None for value in given):
        raise ValueError(
            "two of epsilon, noise_multiplier and steps must be given, got all three: "
            f"{config.epsilon}, {config.noise_multiplier}, {config.steps}"
        )
    config = strategies.resolved(config)
    checks.parts(config)
    config = _with_noise_and_steps(config)
    assert config.steps is not None
    # Refused here, with the event's name, before anything is charged.
    acc.epsilon(config.total(config.steps), config.delta, acc.Relation(config.relation))
    block = config.eval_every or -(-config.steps // 20)
    rows = config.physical_batch_size or rows_of_pass(config)
    return dataclasses.replace(config, eval_every=block, physical_batch_size=rows)


def _with_whole_steps(config: RunConfig) -> RunConfig:
    """The configuration with the batch size that whole steps of an allocation's epoch make."""
    if config.sampling != "allocation" or config.strategy is not None:
        return config
    arguments.integer("participations", config.participations, least=1)
    batch_size = sampling.rules.expected_size(
        config.sampling_rule(), config.batch_size, config.dataset_size
    )
    return dataclasses.replace(config, batch_size=batch_size)


def rows_of_pass(config: RunConfig) -> int:
    """The usual physical batch size; larger for dense layers, whose gradients are never held."""
    if isinstance(rule := config.sampling_rule(), sampling.TruncatedPoisson):
        return rule.cap
    rows = default_physical_batch_size(config.batch_size)
    held = config.model not in _DENSE or config.private_algorithm().raw is not None
    if held:
        return rows
    # One physical batch holds nearly every draw of up to 256; larger ones take several.
    whole = config.batch_size + 6 * math.isqrt(config.batch_size) + 6
    return max(rows, -(-whole // 8) * 8 if config.batch_size <= _DENSE_ROWS else _DENSE_ROWS)


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
    if config.noise_multiplier is None:
        if config.steps is None:
            raise ValueError("steps or noise_multiplier must be given beside epsilon, got neither")
        block = sampling.steps_of_a_block(config.sampling_rule(), config.dataset_size)
        if config.noise_schedule is None:
            steps = sampling.rules.whole_epochs(config.steps, block)
            config = dataclasses.replace(config, steps=steps)
        noise = budget.calibrated_noise(config, relation)
        return dataclasses.replace(config, noise_multiplier=noise)
    if config.noise_schedule is not None:
        raise ValueError("steps must be given with a noise_schedule, got None")
    steps = budget.calibrated_steps(config, relation)
    if steps < 1:
        raise ValueError(
            f"epsilon must allow at least one step at noise_multiplier {config.noise_multiplier}, "
            f"got {config.epsilon}"
        )
    return dataclasses.replace(config, steps=steps)
