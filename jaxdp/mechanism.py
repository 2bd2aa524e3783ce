"""One object that makes the sampler, the clipped sum, the noise and the ledger event together."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import ClippedGrad, Rule, clip_and_sum, clipped_grad, rounding
from jaxdp.clipping.rules import rule_of
from jaxdp.ledger import links
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import NoiseKey, issuer_of, simulated_key
from jaxdp.noise import (
    IndependentNoise,
    IntegerMatrixNoise,
    IntegerNoise,
    MatrixNoise,
    Noise,
    Strategy,
    grid,
    privatize,
)
from jaxdp.noise.correlated import check_stable
from jaxdp.noise.sensitivity import participation, sensitivity
from jaxdp.sampling import (
    EpochSampling,
    FixedOrder,
    FixedSize,
    FullBatch,
    RunSampling,
    Sampler,
    Sampling,
    Shuffled,
    Source,
    StepSampling,
    by_name,
    steps_of_a_block,
)
from jaxdp.sampling.rules import (
    Identities,
    expected_size,
    name_of,
    rate,
    relations,
    whole_epochs,
)
from jaxdp.schedules import NoiseSchedule, split_noise
from jaxdp.types import LossFn, PyTree, Summed

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


# ``Mechanism.noise``: float32 Gaussians, or integers from a cryptographic generator.
NOISES = ("gaussian", "grid")


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A private training step: how records are drawn, clipped and noised, and what that costs.

    Formal guarantee: a step that draws with ``sampler``, sums with ``clipped_grad`` (or any
    sum that carries its own sensitivity) and passes through ``privatize`` satisfies what
    ``event_at`` says of that step, under the relations that the event supports.

    Attributes:
        rule: the clipping rule.
        noise_multiplier: standard deviation of the noise over one record's largest contribution; a
            ``NoiseSchedule`` gives every step its own.
        sampling: how each step's records are drawn.
        batch_size: the expected batch size, the public divisor.
        dataset_size: the declared public number of records; never computed from private data.
        leak: what a step reveals beyond its noisy sum, in words: an algorithm as published that
            reads un-noised statistics. Where it is not empty, every step is a ``NonPrivate`` event.
        count_noise_multiplier: where a count of the clipped records is released from the same draw
            (quantile clipping), the standard deviation of its noise over ½; ``noise_multiplier`` is
            then that of gradient and count together.
        steps: how many steps the noise was calibrated for, or the strategy made for; else None.
        delta: that it was calibrated for; None likewise.
        records_per_user: where the privacy unit is a user (``jaxdp.sampling.users``), the most
            records of one user that enter a step; None where it is a record.
        strategy: how the noise is correlated over the steps (``jaxdp.dp_mf``); None where every
            step has noise of its own. The whole run is then one event, and ``noise_multiplier`` is
            relative to the largest norm by which one record moves all of it.
        noise: "gaussian" (float32), or "grid" (integers from a cryptographic generator,
            docs/grid_noise.md: rounding and generator are then within the guarantee).
        relation: the neighbouring relation of the budget; None takes the sampling's, see
            ``neighbours``. It changes neither draws nor noise.

    Raises:
        ValueError: an argument is out of its range, named with its value.
    """

    rule: Rule
    noise_multiplier: float | NoiseSchedule
    sampling: Sampling
    batch_size: int
    dataset_size: int
    leak: str = ""
    count_noise_multiplier: float | None = None
    steps: int | None = None
    delta: float | None = None
    records_per_user: int | None = None
    strategy: Strategy | None = None
    noise: str = "gaussian"
    # Not in the text: that goes into keys and names a run, and is the same under every relation.
    relation: acc.Relation | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        rule, sampling, noise = self.rule, self.sampling, self.noise_multiplier
        strategy, gridded = self.strategy, self.noise == "grid"
        if self.relation is not None:
            object.__setattr__(self, "relation", acc.Relation(self.relation))

        # The kinds of the parts; a class in the place of its object is one of another kind, and so
        # is what has a method's name for something that cannot be called.
        def made(part: object, kind: type) -> bool:
            named = (n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n)))
            is_one = isinstance(part, kind) and not isinstance(part, type)
            return is_one and all(callable(getattr(part, name)) for name in named)

        if not made(rule, Rule):
            raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
        if not any(made(sampling, kind) for kind in (StepSampling, EpochSampling, RunSampling)):
            raise ValueError(
                f"sampling must be such as jaxdp.sampling.Poisson(0.01), got {sampling!r}"
            )
        if not isinstance(self.leak, str):
            raise ValueError(f"leak must be a string, got {self.leak!r}")

        # The numbers. NumPy's arrays of no axes count as such, and can be changed after a charge.
        for name, value in {**getattr(sampling, "__dict__", {}), **vars(self)}.items():
            changes = isinstance(value, np.ndarray) and not value.ndim
            if changes or (name == "noise_multiplier" and isinstance(value, jax.Array)):
                raise ValueError(
                    f"{name} must be a Python number, public and fixed, got an array {value}"
                )
        if not isinstance(noise, NoiseSchedule):
            arguments.non_negative("noise_multiplier", noise)
        elif self.count_noise_multiplier is not None:
            raise ValueError(
                "noise_multiplier must be one number with count_noise_multiplier, got a schedule"
            )
        for name in ("records_per_user", "steps"):
            if (value := getattr(self, name)) is not None:
                arguments.integer(name, value, least=1)
        if self.delta is not None:
            arguments.fraction("delta", self.delta)

        # Sampling, divisor and data set size. A divisor that is not the expected batch size would
        # still be public, and epsilon right. But a sum of more records than ``most_records`` is
        # refused at random, and the learning rate is another than it says, so it is taken for the
        # mistake that it nearly always is. Poisson rates may differ by the rounding of the expected
        # batch size to a whole number.
        size = arguments.integer("dataset_size", self.dataset_size, least=1)
        batch = arguments.integer("batch_size", self.batch_size, least=1)
        if batch > size:
            raise ValueError(f"batch_size must be at most dataset_size ({size}), got {batch}")
        expected = rate(sampling, batch, size) * size
        if abs(expected - batch) >= 1:
            of = "sampling_prob" if hasattr(sampling, "sampling_prob") else "share of the steps"
            raise ValueError(
                f"batch_size must be {of} * dataset_size = {expected:g}, rounded, got {batch}"
            )
        if isinstance(sampling, FixedSize | FixedOrder | Shuffled) and sampling.batch_size != batch:
            raise ValueError(
                f"batch_size must be that of the sampling ({sampling.batch_size}), got {batch}"
            )
        if isinstance(sampling, FullBatch) and batch != size:
            raise ValueError(
                f"batch_size must be dataset_size ({size}) for full_batch, got {batch}"
            )
        cap = getattr(sampling, "cap", None)
        if cap is not None and cap > self.most_records:
            raise ValueError(f"cap must be at most {self.most_records}, got {cap}")

        # An epoch that is one event has one noise.
        for multiplier, steps in noise.levels[:-1] if isinstance(noise, NoiseSchedule) else ():
            if steps % (block := steps_of_a_block(sampling, size)):
                raise ValueError(
                    f"noise_multiplier must stay the same within an epoch of {block} steps, got a "
                    f"schedule that keeps {multiplier:g} for {steps}"
                )

        # Correlated noise, and the sampling of a whole run that it is proven for.
        if (strategy is not None) != isinstance(sampling, RunSampling):
            raise ValueError(
                "strategy must be given with CyclicPoisson or FixedOrder sampling, and with no "
                "other: correlated noise is proven for a record that takes part at known times, "
                f"got {strategy!r} with {sampling}"
            )
        if strategy is not None:
            if strategy.steps != (block := steps_of_a_block(sampling, size)):
                raise ValueError(
                    f"steps must be those of the sampling ({block}) for the strategy, got "
                    f"{strategy.steps}"
                )
            for name in ("count_noise_multiplier", "records_per_user"):
                if (found := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name} must be None with correlated noise, got {found}: no proof"
                    )
            if isinstance(noise, NoiseSchedule):
                raise ValueError(
                    "noise_multiplier must be one number with a strategy, got a schedule"
                )

        # Noise on a grid, which all of the release must have.
        arguments.one_of("noise", self.noise, NOISES)
        if gridded and self.count_noise_multiplier is not None:
            raise ValueError(
                "noise must be 'gaussian' with count_noise_multiplier: the count that quantile "
                "clipping releases is not on the integer grid yet, and part of the release would "
                "have ordinary noise; got 'grid'"
            )
        if gridded and not isinstance(noise, NoiseSchedule):
            arguments.positive("noise_multiplier", noise)
        if gridded and strategy is not None:
            grid.check_dyadic(strategy)
        if strategy is not None:
            check_stable(strategy)
            _ = self.fresh  # refuses what has no sensitivity, such as bands beyond the groups
            if self.steps is None:
                object.__setattr__(self, "steps", strategy.steps)
        if self.count_noise_multiplier is not None:
            split_noise(noise, self.count_noise_multiplier)

    def check_source(self, source: Source) -> None:
        """Raises ValueError for a source that is drawn from otherwise, or has another privacy unit.

        Args:
            source: of the records or users.

        Raises:
            ValueError: it is one of these.
        """
        found = getattr(source, "records_per_user", None)
        if found != self.records_per_user:
            raise ValueError(
                "records_per_user must be that of the source, jaxdp.sampling.users, or None for a "
                f"source of records: expected {found}, got {self.records_per_user}"
            )
        self.check_unit(source)
        self.sampling.check(len(source), self.dataset_size)

    def check_unit(self, source: Source) -> None:
        """Raises ValueError for an empty source, and for one whose every index is a batch.

        A batched one is told by the declared size: as many times larger than the source as every
        leaf's first axis is long. Groups that are records are as many as was declared.

        Args:
            source: of the records or users.

        Raises:
            ValueError: it is one of these. No message tells the number of records.
        """
        size, declared = len(source), self.dataset_size
        if size == 0:
            raise ValueError("source must hold records to draw from, got an empty one")
        leading = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(source.example)}
        count = leading.pop() if len(leading) == 1 else 1
        if self.records_per_user is not None or size == declared or count < 2:
            return
        if size in (declared // count, -(-declared // count)):
            raise ValueError(
                "source must give one record for each index, got leaves that all begin with an "
                f"axis of {count}, and a dataset_size that is {count} times the number of indices, "
                f"which looks like records batched by {count}: epsilon would hold for a batch as a "
                "whole. Give the data as they were before they were batched; if such a group is "
                "one record, dataset_size must be the number of groups"
            )

    @property
    def neighbours(self) -> acc.Relation:
        """The neighbouring relation of ``epsilon``, here and in trainers and runs.

        It is that of the budget; else add_or_remove_one, or where that is not proven for the
        sampling the strictest that is: replace_one for ``FixedSize``.
        """
        if self.relation is not None:
            return self.relation
        event, covered = self.event_at(0), relations(name_of(self.sampling))
        return next((each for each in covered if acc.supports(event, each)), covered[0])

    @property
    def event(self) -> acc.Event:
        """The accounting event of one step, the same for all; or of an epoch that is one event.

        Raises:
            ValueError: the noise follows a schedule; see ``event_at`` and ``total``.
        """
        if isinstance(self.noise_multiplier, NoiseSchedule):
            raise ValueError(
                "noise_multiplier must be one number for all steps to be one event, got a "
                "NoiseSchedule: ask event_at(step) or total(steps)"
            )
        return self.event_at(0)

    def event_at(self, step: int) -> acc.Event:
        """The accounting event of step ``step``, counted from 0."""
        ((event, _, _),) = self.events(step, 1)
        return event

    def events(
        self, first_step: int, steps: int, noise: float | NoiseSchedule | None = None
    ) -> list[tuple[acc.Event, int, int]]:
        """The steps as (event, first_step, steps), one triple for each stretch of equal steps.

        Where steps are drawn together the event is that of a whole epoch, of ``event.block`` steps.

        Args:
            first_step: the first of them.
            steps: how many.
            noise: another noise multiplier than the mechanism's, for calibration.

        Raises:
            ValueError: a noise schedule, or the strategy of correlated noise, ends before these
                steps do.
        """
        if self.strategy is not None and first_step + steps > self.strategy.steps:
            raise ValueError(
                f"steps must be within the {self.strategy.steps} of the strategy, which nothing is "
                f"proven beyond, got {first_step + steps}"
            )
        noise = self.noise_multiplier if noise is None else noise
        levels: Iterable[tuple[float, int, int]]
        if isinstance(noise, NoiseSchedule):
            levels = noise.levels_between(first_step, steps)
        else:
            levels = [(noise, first_step, steps)]
        found = []
        for multiplier, first, count in levels:
            if self.leak:
                event: acc.Event = acc.NonPrivate(self.leak)
            else:
                event = self.sampling.event(acc.Gaussian(multiplier), self.dataset_size)
                if self.records_per_user is not None:
                    event = acc.PerUser(event, self.records_per_user)
                if self.noise == "grid":  # and the distance of the integers from the theorem's
                    event = acc.GridNoise(event, event.block * grid.DISTANCE)
            found.append((event, first, count))
        return found

    def stretch(self, step: int) -> tuple[acc.Event, dict[str, float], int]:
        """(event, multipliers, end) of a step; they are those of all steps before the end.

        Raises:
            ValueError: a noise schedule, or the strategy of correlated noise, ends before the step.
        """
        event, _, _ = self.events(step, 1)[0]
        end, noise = 10**18, self.noise_multiplier
        if self.strategy is not None:
            end = self.strategy.steps
        elif isinstance(noise, NoiseSchedule):
            _, _, alike = next(noise.levels_between(step, noise.steps - step))
            end = step + alike
        return event, self.multipliers(step), end

    def multipliers(self, step: int) -> dict[str, float]:
        """The noise multiplier of each part ("gradient", "votes") of step ``step``."""
        found = {self._noise.part: self._noise.multiplier(step)}
        if self.count_noise_multiplier is not None:
            found["votes"] = self.count_noise_multiplier
        return found

    def simulated_key(self, key: jax.Array, step: int | jax.Array = 0) -> NoiseKey:
        """A noise key for simulations and tests: **nothing is charged**, so nothing is private.

        Args:
            key: a threefry key, another one for every run and step.
            step: may be a tracer.
        """
        parts = {self._noise.part: self._noise.multiplier_at(step)}
        if self.count_noise_multiplier is not None:
            parts["votes"] = self.count_noise_multiplier
        return simulated_key(key, parts, step)

    def total(self, steps: int, noise: float | NoiseSchedule | None = None) -> acc.Event:
        """The composition of the first ``steps`` steps, as one event; epochs count whole.

        Args:
            steps: how many.
            noise: as for ``events``.
        """
        rows = self.events(0, arguments.integer("steps", steps, least=0), noise)
        # Levels of a schedule begin where epochs do.
        each = (acc.Repeated(event, -(-count // event.block)) for event, _, count in rows)
        return acc.Composed(tuple(each))

    def noise_std(self, params: PyTree, step: int | jax.Array = 0) -> float | jax.Array:
        """Standard deviation of the noise in each coordinate of the noisy mean, before unscaling.

        It is public: an optimizer may use it, as DP-AdamBC's correction does.

        Args:
            params: pytree of the parameters' shapes.
            step: the step, counted from 0; an int32 scalar inside ``jit``.
        """
        return self._noise.std(params, self.l2(params), step) / self.batch_size

    @functools.cached_property
    def _noise(self) -> Noise:
        """The noise of the gradient: less than the whole step's, where a count is released too."""
        gridded = self.noise == "grid"
        if self.strategy is not None:
            correlated = IntegerMatrixNoise if gridded else MatrixNoise
            return correlated(self.fresh, self.strategy)
        if self.count_noise_multiplier is not None:
            return IndependentNoise(split_noise(self.noise_multiplier, self.count_noise_multiplier))
        return (IntegerNoise if gridded else IndependentNoise)(self.noise_multiplier)

    def grid_in_words(self, parameters: int) -> str:
        """A sentence on the integer grid for so many parameters; "" where noise is on none."""
        return self._noise.in_words(parameters) if isinstance(self._noise, IntegerNoise) else ""

    @functools.cached_property
    def fresh(self) -> float:
        """Standard deviation of the normals that correlated noise is made of, over ``l2``."""
        assert self.strategy is not None
        assert not isinstance(self.noise_multiplier, NoiseSchedule)
        each = participation(self.sampling, self.dataset_size)
        # A factor for what float32 takes off a row: the products of the deviation, a reciprocal.
        moved = sensitivity(self.strategy, each) * (1 + 2.0**-21)
        exact = float(self.noise_multiplier) * moved  # a float16 would round it down
        rounded = np.float32(exact)  # as the noise has it, never less
        up = np.nextafter(rounded, np.float32(np.inf))
        return float(rounded if float(rounded) >= exact else up)

    def l2(self, params: PyTree) -> float:
        """The sensitivity: the largest norm by which one record changes the clipped sum.

        The rule's bound and a share of it for rounding (docs/clip_bound.md); the unit of the noise.
        """
        return self.rule.l2(params) * (1.0 + rounding.error_of_sum(self.most_records))

    @property
    def most_records(self) -> int:
        """A public number of records that no draw exceeds."""
        return rounding.most_records(self.batch_size)

    def leaking(self, reason: str) -> "Mechanism":
        """A copy that reveals more than its noisy sum: every step is a ``NonPrivate`` event."""
        return dataclasses.replace(self, leak=reason)

    def clipped_grad(self, loss_fn: LossFn, **options: Any) -> ClippedGrad:
        """The clipped gradient of a loss; rule and ``most_records`` are the mechanism's.

        Args:
            loss_fn: as for ``jaxdp.clipped_grad``.
            options: further arguments of ``jaxdp.clipped_grad``.
        """
        return clipped_grad(loss_fn, self.rule, **{"most_records": self.most_records, **options})

    def clip_and_sum(self) -> optax.GradientTransformationExtraArgs:
        """The clipped sum of per-example gradients of your own, to be put first in an optax chain.

        As ``jaxdp.clip_and_sum``, with the mechanism's rule and ``most_records``.
        """
        return clip_and_sum(self.rule, self.most_records)

    def privatize(self, **options: Any) -> optax.GradientTransformationExtraArgs:
        """The noise, to be put first in an optax chain; options as for ``jaxdp.privatize``."""
        inner = privatize(self._noise, self.batch_size, **options)

        def update(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: PyTree
        ) -> tuple[PyTree, PyTree]:
            # A sum whose number of records nobody declared takes the mechanism's: ``noise_std``,
            # which optimizers subtract, is then the noise that is added.
            found = updates.undeclared if isinstance(updates, Summed) else None
            if found is not None and found[1] <= self.most_records:
                l2 = found[0] * (1.0 + rounding.error_of_sum(self.most_records))
                updates = dataclasses.replace(updates, l2=l2)
            return inner.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(inner.init, links.trusted_link(update))

    def sampler(
        self,
        num_records: int,
        *,
        ledger: "Ledger | None" = None,
        secret: Secret | None = None,
        physical_batch_size: int | None = None,
        first_step: int = 0,
        reserve: int = 1,
        identities: Identities | None = None,
    ) -> Sampler:
        """A sampler that charges every step to a ledger before it draws the step's records.

        Args:
            num_records: the number of records to draw from. Under Poisson sampling it is private
                and need equal ``dataset_size`` only to a factor of 2.
            ledger: where every draw is charged; None makes one in memory, ``sampler.ledger``.
            secret: the randomness; None takes it from the operating system.
            physical_batch_size: rows of one physical batch; None chooses for the device.
            first_step: the first step of the noise schedule; draws and noise are new in any case.
            reserve: steps charged at a time; see ``jaxdp.ledger.tickets.Issuer``.
            identities: an integer, string or bytes for each record, that stays its own whatever the
                other records are; for cyclic Poisson sampling.

        Raises:
            ValueError: the records cannot be drawn from like this.
        """
        self.sampling.check(num_records, self.dataset_size)
        if self.strategy is not None and first_step:
            raise ValueError(
                "first_step must be 0 with correlated noise, whose run is one event on one "
                f"arrangement of the records, got {first_step}: jaxdp.Run goes on after an "
                "interruption"
            )
        if physical_batch_size is None:
            usual = default_physical_batch_size(self.batch_size)
            physical_batch_size = getattr(self.sampling, "cap", usual)
        issuer = issuer_of(self, ledger, secret, first_step=first_step, reserve=reserve)
        known = None if identities is None else lambda: identities
        return Sampler(self.sampling, num_records, physical_batch_size, issuer, known)

    def epsilon(
        self,
        steps: int,
        delta: float,
        relation: acc.Relation | None = None,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps at ``delta``; None takes ``neighbours``."""
        return acc.epsilon(self.total(steps), delta, relation or self.neighbours)


def dp_sgd(
    noise_multiplier: float | NoiseSchedule | None = None,
    l2_clip_norm: float | None = None,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    sampling: str | Sampling = "poisson",
    *,
    records_per_user: int | None = None,
    rule: Rule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    steps: int | None = None,
    schedule: NoiseSchedule | None = None,
    relation: acc.Relation | str | None = None,
    noise: str = "gaussian",
) -> Mechanism:
    """The mechanism of DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, Algorithm 1).

    Give the noise, or a budget of ``epsilon``, ``delta`` and ``steps``: the noise is then the least
    (within 1e-4) whose proven epsilon is at most the one asked for.

    Args:
        noise_multiplier: noise standard deviation over ``l2_clip_norm``, on the sum; a number, or a
            ``NoiseSchedule`` with one for every step.
        l2_clip_norm: the norm to which every per-example gradient is clipped.
        batch_size: the expected number of records of a step.
        dataset_size: the number of records, a declared public constant.
        sampling: "poisson" (each record with probability batch_size / dataset_size), "fixed_size"
            (exactly batch_size, without replacement), "full_batch" (needs batch_size =
            dataset_size), "allocation" (each record in one random step of every epoch; the number
            of steps is whole, and batch_size becomes what that makes it), "shuffle" (no
            amplification: to compare with), "truncated_poisson" (one shape for all draws); or a
            rule of ``jaxdp.sampling``.
        records_per_user: for a source of users; as for ``Mechanism``.
        rule: another clipping rule, in place of ``l2_clip_norm``.
        epsilon: the budget of all steps.
        delta: of the budget.
        steps: how many steps the budget is for; rounded up to the epochs that are charged whole.
        schedule: the shape of the noise over the steps, to be scaled to the budget.
        relation: the neighbouring relation of the budget, kept for every epsilon that is asked of
            the mechanism, its trainers and its runs; None takes ``Mechanism.neighbours``:
            add_or_remove_one, or replace_one for "fixed_size", whose neighbours are of equal size.
        noise: as for ``Mechanism``.

    Returns:
        The mechanism, for ``jaxdp.Trainer`` or a loop of your own.

    Raises:
        ValueError: an argument is missing or out of its range; noise and budget were both given;
            the budget cannot be met.

    Example:
        >>> mechanism = jaxdp.dp_sgd(
        ...     epsilon=3.0, delta=1e-5, steps=1_000,
        ...     l2_clip_norm=1.0, batch_size=256, dataset_size=60_000,
        ... )
        >>> mechanism.epsilon(1_000, delta=1e-5).upper <= 3.0
        True
    """
    rule = rule_of(l2_clip_norm, rule)
    budget = {"epsilon": epsilon, "delta": delta, "steps": steps}
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError(
            "give noise_multiplier, or a budget of epsilon, delta and steps, got "
            f"noise_multiplier={noise_multiplier!r} and {budget}"
        )

    # The mechanism with the noise that was given, or with any.
    first = 1.0 if noise_multiplier is None else noise_multiplier
    batch_size = arguments.integer("batch_size", batch_size, least=1)
    dataset_size = arguments.integer("dataset_size", dataset_size, least=1)
    if isinstance(sampling, str):
        sampling = by_name(sampling, batch_size, dataset_size)
        batch_size = expected_size(sampling, batch_size, dataset_size)
    made = Mechanism(
        rule,
        first,
        sampling,
        batch_size,
        dataset_size,
        records_per_user=records_per_user,
        noise=noise,
        relation=None if relation is None else acc.Relation(relation),
    )
    if epsilon is None:
        if delta is not None or steps is not None or schedule is not None:
            raise ValueError(
                "delta, steps and schedule belong to a budget (epsilon=), which must not be given "
                f"with noise_multiplier, got {budget}"
            )
        return made

    # The least noise that keeps to the budget.
    if delta is None or steps is None:
        missing = "delta" if delta is None else "steps"
        raise ValueError(f"{missing} must be given with epsilon={epsilon!r}, got None")
    length = arguments.integer("steps", steps, least=1)
    if schedule is None:
        length = whole_epochs(length, made.event_at(0).block, stacklevel=3)
    elif schedule.steps < length:
        raise ValueError(f"schedule must cover the {length} steps, got one of {schedule.steps}")
    scaled = (lambda noise: noise) if schedule is None else schedule.times
    found = acc.calibrate(
        lambda noise: made.total(length, scaled(noise)), epsilon, delta, made.neighbours
    )
    return dataclasses.replace(
        made, noise_multiplier=scaled(found), steps=length, delta=float(delta)
    )


def with_rule(
    rule: Rule,
    noise_multiplier: float | NoiseSchedule,
    batch_size: int | None,
    dataset_size: int | None,
    sampling: str | Sampling = "poisson",
    leak: str = "",
) -> Mechanism:
    """A mechanism with any clipping rule, and a leak; otherwise as ``dp_sgd``."""
    made = dp_sgd(noise_multiplier, None, batch_size, dataset_size, sampling, rule=rule)
    return made.leaking(leak) if leak else made


def default_physical_batch_size(batch_size: int) -> int:
    """Rows of one physical batch: 64 on a CPU (fastest as measured), 1,024 on an accelerator."""
    return min(batch_size, 64 if jax.default_backend() == "cpu" else 1024)
