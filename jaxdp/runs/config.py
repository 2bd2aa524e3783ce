"""Configurations of runs: their values, checked, and what follows from a budget."""

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
from jaxdp.recipes import encoders
from jaxdp.runs import strategies
from jaxdp.sampling import Sampling
from jaxdp.schedules import NoiseSchedule, parse

CANARY_KINDS = ("gradient", "noise", "pixel", "mislabelled")
OPTIMIZERS = ("sgd", "adam")

_MOST_LEARNING_RATE = 1e6  # beyond, float32 overflows in a step or two
# With probability delta nothing is promised: more is no guarantee. Accountants take minutes at
# either end.
_DELTAS = (1e-30, 0.1)
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
        sampling: one of ``jaxdp.sampling.names()``; with a strategy, cyclic_poisson or fixed_order.
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
        canary_kind: one of ``CANARY_KINDS``.
        participations: steps of an epoch that a record is in, under random allocation.
        cap: the largest batch of truncated Poisson sampling; None takes the default.
        own: None for a built-in data set; else the example_shape, num_classes and test_size of a
            file's.
        strategy: of noise that is correlated over the steps, a key of
            ``jaxdp.runs.strategies.SAMPLINGS``; None for independent noise.
        bands: of the strategy, as for ``jaxdp.dp_mf``; filled in by ``resolve``.
        features: None, or one of ``jaxdp.features.NAMES``: fixed features of each record, which the
            model sees in its place, at no cost; or "package.module:function", "file.py:function":
            an encoder of one's own, which is taken as public (``jaxdp.encoders``).
        encoder: of such an encoder words, its features' shape and numbers of public probes, as
            ``jaxdp.encoders.probed`` has them: filled in by ``resolve``.
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
    encoder: dict[str, Any] | None = None
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
            return encoders.shape_of(self.features, self.spec.example_shape, self.encoder)
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
        return audit_canaries.dirac_canaries(self.canaries, shapes)

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
    # Whole steps of an allocation's epoch make the batch size.
    if config.sampling == "allocation" and config.strategy is None:
        arguments.integer("participations", config.participations, least=1)
        rule = config.sampling_rule()
        batch_size = rule.expected_size(config.batch_size, config.dataset_size)
        config = dataclasses.replace(config, batch_size=batch_size)
    check_values(config)
    given = (config.epsilon, config.noise_multiplier, config.steps)
    if all(value is not None for value in given):
        raise ValueError(
            "two of epsilon, noise_multiplier and steps must be given, got all three: "
            f"{config.epsilon}, {config.noise_multiplier}, {config.steps}"
        )
    config = strategies.resolved(config)
    known = None  # of a configuration that was resolved before, others' may be left
    if config.features is not None and ":" in config.features:
        known = encoders.probed(config.features, config.spec.example_shape)
    config = dataclasses.replace(config, encoder=known)
    _check_parts(config)
    config = _with_noise_and_steps(config)
    assert config.steps is not None
    # Refused here, with the event's name, before anything is charged.
    acc.epsilon(config.total(config.steps), config.delta, acc.Relation(config.relation))
    block = config.eval_every or -(-config.steps // 20)
    rows = config.physical_batch_size or rows_of_pass(config)
    return dataclasses.replace(config, eval_every=block, physical_batch_size=rows)


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
        block = config.sampling_rule().block(config.dataset_size)
        if config.noise_schedule is None:
            steps = sampling.rules.whole_epochs(config.steps, block)
            config = dataclasses.replace(config, steps=steps)
        noise = _calibrated_noise(config, relation)
        return dataclasses.replace(config, noise_multiplier=noise)
    if config.noise_schedule is not None:
        raise ValueError("steps must be given with a noise_schedule, got None")
    steps = _calibrated_steps(config, relation)
    if steps < 1:
        raise ValueError(
            f"epsilon must allow at least one step at noise_multiplier {config.noise_multiplier}, "
            f"got {config.epsilon}"
        )
    return dataclasses.replace(config, steps=steps)


def _calibrated_noise(config: RunConfig, relation: acc.Relation) -> float:
    """The least noise (within 1e-4) whose proven epsilon is at most the one asked for."""
    assert config.steps is not None
    assert config.epsilon is not None
    if _plain(config):
        return float(
            acc.calibrate_noise_multiplier(
                epsilon=config.epsilon,
                delta=config.delta,
                steps=config.steps,
                relation=relation,
                sampling_prob=config.batch_size / config.dataset_size,
            )
        )
    if (
        acc.epsilon(_total(config, noise_multiplier=1e9), config.delta, relation).upper
        > config.epsilon
    ):
        raise ValueError(
            f"epsilon must be within reach of {config.algorithm} at any noise_multiplier, got "
            f"{config.epsilon}"
        )
    return acc.calibrate(
        lambda noise: _total(config, noise_multiplier=noise), config.epsilon, config.delta, relation
    )


def _calibrated_steps(config: RunConfig, relation: acc.Relation) -> int:
    """The greatest number of steps whose proven epsilon is at most the one asked for; 0 if none."""
    assert config.noise_multiplier is not None
    assert config.epsilon is not None
    if _plain(config):
        return int(
            acc.calibrate_steps(
                epsilon=config.epsilon,
                delta=config.delta,
                relation=relation,
                sampling_prob=config.batch_size / config.dataset_size,
                noise_multiplier=config.noise_multiplier,
            )
        )
    return acc.queries.calibrate_count(
        lambda steps: _total(config, steps=steps), config.epsilon, config.delta, relation
    )


def _plain(config: RunConfig) -> bool:
    """True if a run is one event repeated, which the accountant calibrates by itself."""
    if config.strategy or config.noise_schedule is not None or config.once():
        return False
    tried = {"noise_multiplier": 1.0, "steps": 1, "learning_rate_schedule": None}
    made = dataclasses.replace(config, **tried).private_algorithm()  # type: ignore[arg-type]
    rate, released = config.batch_size / config.dataset_size, acc.Gaussian(1.0)
    # A registered algorithm may release something else than the noise it is given.
    plain = released if rate == 1 else acc.PoissonSampled(released, rate)
    return made.energy is None and made.mechanism.with_leak("").event == plain


def _total(config: RunConfig, **tried: Any) -> acc.Event:
    """The event of everything released; of an algorithm as published, without its leak."""
    config = dataclasses.replace(config, **tried)
    algorithm = config.private_algorithm()
    algorithm = dataclasses.replace(
        algorithm, mechanism=algorithm.mechanism.with_leak(""), raw=None
    )
    assert config.steps is not None
    return acc.Composed((*config.once(), algorithm.total(config.steps)))


def check_values(config: RunConfig) -> None:
    """Raises ValueError for a value of a wrong kind or out of its range; builds nothing."""
    registry.entry_of(config.algorithm)
    arguments.one_of("optimizer", config.optimizer, OPTIMIZERS)
    arguments.one_of("relation", config.relation, tuple(r.value for r in acc.Relation))
    strategies.check(config)
    if config.strategy is None:
        arguments.one_of("sampling", config.sampling, sampling.names())
    covered = [r.value for r in sampling.relations(config.sampling)]
    arguments.one_of("relation", config.relation, covered, f" with sampling {config.sampling}")
    arguments.integer("participations", config.participations, least=1)
    if config.cap is not None:
        arguments.integer("cap", config.cap, least=1)
    if arguments.positive("learning_rate", config.learning_rate) > _MOST_LEARNING_RATE:
        raise ValueError(
            f"learning_rate must be at most {_MOST_LEARNING_RATE:g}, got {config.learning_rate!r}"
        )
    if not 0 <= arguments.non_negative("momentum", config.momentum) < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {config.momentum!r}")
    if not arguments.positive("delta", config.delta) < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {config.delta!r}")
    if not _DELTAS[0] <= config.delta <= _DELTAS[1]:
        raise ValueError(
            f"delta must be at least {_DELTAS[0]:g} and at most {_DELTAS[1]:g}, well below 1 over "
            f"the number of records ({config.dataset_size}), got {config.delta!r}"
        )
    if config.epsilon is not None:
        arguments.positive("epsilon", config.epsilon)
    if config.noise_multiplier is not None:
        arguments.positive("noise_multiplier", config.noise_multiplier)
    rows = None if config.physical_batch_size == "auto" else config.physical_batch_size
    for name, value in (
        ("steps", config.steps),
        ("eval_every", config.eval_every),
        ("physical_batch_size", rows),
    ):
        if value is not None:
            arguments.integer(name, value, least=1)
    for name in ("noise_schedule", "learning_rate_schedule"):
        if getattr(config, name) is not None and config.steps is None:
            raise ValueError(f"steps must be given with a {name}, got None")
    if config.average is not None:
        arguments.fraction("average", config.average)


def _check_parts(config: RunConfig) -> None:
    """Raises ValueError if mechanism and model, built once for their own checks, refuse theirs."""
    noise_multiplier = config.noise_multiplier or 1.0
    algorithm = dataclasses.replace(config, noise_multiplier=noise_multiplier).private_algorithm()
    judge = registry.ALGORITHMS[config.algorithm].energy
    if judge in ("public", "test") and not config.spec.test_size:
        raise ValueError(
            f"algorithm {config.algorithm} must come with test records, which judge its "
            "candidates, got a file without"
        )

    # Features, and a projection or whitening, which are released before the first step.
    whitening, dimensions = config.whiten_noise_multiplier, config.pca_dimensions
    if whitening is not None:
        arguments.positive("whiten_noise_multiplier", whitening)
        if config.features is None:
            raise ValueError(
                "whiten_noise_multiplier must be None without features, which it whitens; got "
                f"{whitening}"
            )
        if config.features.startswith("two_layers"):
            raise ValueError(
                f"whiten_noise_multiplier must be None with features {config.features}, which are "
                f"whitened by public numbers; got {whitening}"
            )
    if config.features is not None:
        shape = encoders.shape_of(config.features, config.spec.example_shape, config.encoder)
        if dimensions is not None:
            raise ValueError(
                f"pca_dimensions must be None with features, of which a record has "
                f"{math.prod(shape)}: the noise of so large a matrix leaves nothing; got "
                f"{dimensions} with features {config.features}"
            )
    if (dimensions is None) != (config.pca_noise_multiplier is None):
        raise ValueError(
            "pca_dimensions and pca_noise_multiplier must be given together, got "
            f"{dimensions} and {config.pca_noise_multiplier}"
        )
    if dimensions is not None:
        arguments.positive("pca_noise_multiplier", config.pca_noise_multiplier)
        most = math.prod(config.spec.example_shape)
        if arguments.integer("pca_dimensions", dimensions, least=1) > most:
            raise ValueError(
                f"pca_dimensions must be at most the {most} of an example, got {dimensions}"
            )
    for name in ("pca_dimensions", "whiten_noise_multiplier") if config.secure_noise else ():
        if (found := getattr(config, name)) is not None:
            raise ValueError(
                f"{name} must be None with secure_noise, got {found!r}: its noise is in floating "
                "point, and the guarantee would not be that of noise on an integer grid"
            )

    # Candidates of an audit.
    kind = arguments.one_of("canary_kind", config.canary_kind, CANARY_KINDS)
    count, tests = arguments.integer("canaries", config.canaries, least=0), config.spec.test_size
    if kind != "gradient" and not count:
        raise ValueError(f"canaries must be at least 1 with canary_kind {kind}, got 0")
    if kind != "gradient" and dimensions is not None:
        raise ValueError(
            "canary_kind must be gradient with pca_dimensions, whose projection would read them "
            f"without a charge, got {kind}"
        )
    if kind == "mislabelled" and not count <= (tests or 0) // 2:
        raise ValueError(
            f"canaries must be at most half of the {tests or 0} test records, which they are taken "
            f"out of, got {count} mislabelled ones"
        )
    if count:
        if config.relation != acc.Relation.ADD_OR_REMOVE_ONE.value:
            raise ValueError(
                "canaries must be 0 but under add_or_remove_one, for each is a record more or not; "
                f"got {count} under {config.relation}"
            )
        if config.sensitive:
            raise ValueError(
                "sensitive must be False with canaries, whose losses would drown the others', "
                f"got both, {count} canaries"
            )
        audit_canaries.require_auditable(algorithm, records=kind != "gradient")
        config.candidates()

    models.build(
        config.model,
        num_classes=config.spec.num_classes,
        example_shape=config.example_shape(),
        activation=config.activation,
        hidden=(arguments.integer("hidden", config.hidden, least=1),),
    )
