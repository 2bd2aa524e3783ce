"""A mechanism: a private step's sampling, clipping, noise and accounting event, from one object.

``dp_sgd`` makes one whose steps have noise of their own, ``dp_mf`` one whose noise is correlated
over the run.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec

import jax
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import ClippedGrad, Rule, clip_and_sum, clipped_grad, rounding
from jaxdp.clipping.rules import rule_of
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import NoiseKey, issuer_of, simulated_key
from jaxdp.noise import NOISES, Noise, Strategy, dyadic, privatize
from jaxdp.noise.errors import ERRORS, PREFIX_SUMS, Workload
from jaxdp.noise.optimise import BANDED, ON_GRID, STRATEGIES, strategy_by_name
from jaxdp.noise.sensitivity import Cyclic, FixedEpochOrder, Participation, Single, sensitivity
from jaxdp.sampling import (
    CyclicAllocation,
    CyclicPoisson,
    EpochSampling,
    ExampleLevel,
    FixedOrder,
    Part,
    RunSampling,
    Sampler,
    Sampling,
    Source,
    StepSampling,
    WeightedPoisson,
    by_name,
)
from jaxdp.sampling.rules import Identities, whole_epochs
from jaxdp.sampling.users import UserExamples
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import LossFn, PyTree, Summed

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger

# Sampling rules that correlated noise has a proof for: each draws for a whole run at once. The
# command line, and runs from a configuration, have the first two.
CORRELATED_SAMPLINGS = ("cyclic_poisson", "fixed_order")
_CYCLIC = ("cyclic_poisson", "cyclic_allocation")


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A private training step: how records are drawn, clipped and noised, and what that costs.

    A guarantee holds where four things agree. Each is made here, from the same fields:

    - ``sampler`` draws records by ``sampling``, and charges ``events`` before it draws;
    - ``clipped_grad`` clips each record's gradient by ``rule``, so that a record adds at most
      ``l2`` to the sum, and the sum carries that number;
    - ``privatize`` adds noise of standard deviation ``noise_multiplier`` times the sum's own
      ``l2``, then divides by the public ``batch_size``;
    - ``events`` are of a Gaussian of that ``noise_multiplier``, released on draws by that
      ``sampling``.

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
        count_noise_multiplier: where counts of records are released from the same draw, the
            standard deviation of their noise over the most that a record adds: ½ to the one of
            quantile clipping, ``count_clip_norm`` to those of ``jaxdp.optimizers.dp_adafest``;
            ``noise_multiplier`` is then that of gradient and counts together.
        steps: how many steps the noise was calibrated for, or the strategy made for; else None.
        delta: that it was calibrated for; else None.
        records_per_user: where the privacy unit is a user (``jaxdp.sampling.users``), the most
            records of one user that enter a step; None where it is a record. ``ExampleLevel``
            sampling brings its own.
        strategy: how the noise is correlated over the steps (``jaxdp.dp_mf``); None where every
            step has noise of its own. The whole run is then one event, and ``noise_multiplier`` is
            relative to the largest norm by which one record moves all of it.
        noise: "gaussian" (float32), "grid" (integers from a cryptographic generator,
            docs/proofs/grid_noise.md: rounding and generator are then within the guarantee), or of
            a sum of one number (``jaxdp.optimizers.dp_zo``) "laplace", whose scale over ``l2``
            ``noise_multiplier`` then is; a key of ``jaxdp.noise.NOISES``.
        relation: the neighbouring relation of the budget; None takes the sampling's, see
            ``neighbours``. It changes neither draws nor noise.
        models: how many models, of ``steps`` steps each, the noise was calibrated for together.
        part: the part of the records that it draws from (``jaxdp.sampling.parts``), see ``on``;
            None for all of them.

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
    # Not in the text: that goes into keys and names a run, and is the same under every relation,
    # and of however many models.
    relation: acc.Relation | None = dataclasses.field(default=None, repr=False)
    models: int = dataclasses.field(default=1, repr=False)
    part: Part | None = dataclasses.field(default=None, repr=False)

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
        source: Source | None = None,
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
                other records are; for cyclic sampling.
            source: the records, for weighted Poisson sampling, which reads each once.

        Raises:
            ValueError: the records cannot be drawn from like this.
        """
        # Refused before anything is charged; of a part not for its number of records.
        held = num_records if self.part is None else self.dataset_size
        self.sampling.check(held, self.dataset_size)
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
        return Sampler(self.sampling, num_records, physical_batch_size, issuer, known, source)

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
            """``jaxdp.privatize``'s update, of a sum with the mechanism's sensitivity."""
            if isinstance(updates, Summed) and updates.leaked is not None and not self.leak:
                raise ValueError(
                    "mechanism must name its leak to add its noise to a sum that hands on "
                    "un-noised means, as those of jaxdp.papers do, got an empty one"
                )
            # A sum whose number of records nobody declared takes the mechanism's: ``noise_std``,
            # which optimizers subtract, is then the noise that is added.
            found = updates.undeclared if isinstance(updates, Summed) else None
            if found is not None and found[1] <= self.most_records:
                l2 = found[0] * (1.0 + rounding.error_of_sum(self.most_records))
                updates = dataclasses.replace(updates, l2=l2)
            return inner.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(inner.init, update)

    def events(
        self, first_step: int, steps: int, noise_multiplier: float | NoiseSchedule | None = None
    ) -> list[tuple[acc.Event, int, int]]:
        """The steps as (event, first_step, steps), one triple for each stretch of equal steps.

        Where steps are drawn together the event is that of a whole epoch, of ``event.block`` steps.

        Args:
            first_step: the first of them.
            steps: how many.
            noise_multiplier: another than the mechanism's, for calibration.

        Raises:
            ValueError: a noise schedule, or the strategy of correlated noise, ends before these
                steps do.
        """
        if self.strategy is not None and first_step + steps > self.strategy.steps:
            raise ValueError(
                f"steps must be within the {self.strategy.steps} of the strategy, which nothing is "
                f"proven beyond, got {first_step + steps}"
            )
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        levels: Iterable[tuple[float, int, int]]
        if isinstance(noise, NoiseSchedule):
            levels = noise.levels_between(first_step, steps)
        else:
            levels = [(noise, first_step, steps)]
        found: list[tuple[acc.Event, int, int]] = []
        for multiplier, first, count in levels:
            if self.leak:
                found.append((acc.NonPrivate(self.leak), first, count))
                continue
            event = self.sampling.event(NOISES[self.noise].event(multiplier), self.dataset_size)
            # A user is drawn whole, unless the event is of records drawn one by one; integers are a
            # distance from the theorem's.
            if self.records_per_user is not None and not self.by_example:
                event = acc.PerUser(event, self.records_per_user)
            if distance := NOISES[self.noise].distance:
                event = acc.GridNoise(event, event.block * distance)
            if self.part is not None:
                event = self.part.event(event)
            found.append((event, first, count))
        return found

    def l2(self, params: PyTree) -> float:
        """The sensitivity: the largest norm by which one record changes the clipped sum.

        The rule's bound and a share for rounding (docs/proofs/clip_bound.md); the noise's unit.
        """
        return self.rule.l2(params) * (1.0 + rounding.error_of_sum(self.most_records))

    @property
    def most_records(self) -> int:
        """A public number of records that no draw exceeds."""
        return rounding.most_records(self.batch_size)

    @property
    def by_example(self) -> bool:
        """True if the privacy unit is a user whose records are drawn and clipped one by one."""
        return isinstance(self.sampling, ExampleLevel)

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

    def simulated_key(
        self, key: jax.Array, step: int | jax.Array = 0, before: jax.Array | None = None
    ) -> NoiseKey:
        """A noise key for simulations and tests: **nothing is charged**, so nothing is private.

        Args:
            key: a threefry key, another one for every run and step.
            step: may be a tracer.
            before: the key of the step before, which noise that makes that step's again needs.
        """
        parts = {self._noise.part: self._noise.multiplier_at(step)}
        if self.count_noise_multiplier is not None:
            parts["votes"] = self.count_noise_multiplier
        return simulated_key(key, parts, step, before)

    def total(self, steps: int, noise_multiplier: float | NoiseSchedule | None = None) -> acc.Event:
        """The composition of the first ``steps`` steps, as one event; epochs count whole.

        Args:
            steps: how many.
            noise_multiplier: as for ``events``.
        """
        rows = self.events(0, arguments.integer("steps", steps, least=0), noise_multiplier)
        # An epoch that has begun counts whole; levels of a schedule begin where epochs do.
        each = (acc.Repeated(event, -(-count // event.block)) for event, _, count in rows)
        return acc.Composed(tuple(each))

    def epsilon(
        self,
        steps: int,
        delta: float,
        relation: acc.Relation | None = None,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps at ``delta``; None takes ``neighbours``."""
        return acc.epsilon(self.total(steps), delta, self.covered(relation) or self.neighbours)

    def epsilon_by_class(
        self,
        steps: int,
        delta: float,
        probabilities: Mapping[str, float],
        relation: acc.Relation | None = None,
    ) -> dict[str, acc.Bound]:
        """Epsilon of "the run", then what a person of each class has beside it: never the run's.

        That a person of a class is in the data is hidden as a record of its probability is. Which
        class it is, is a replacement: ``epsilon(..., relation=REPLACE_ONE)``, above all of these.

        Args:
            steps: how many.
            delta: of all.
            probabilities: by class, in (0, largest], as ``WeightedPoisson`` has them.
            relation: add_or_remove_one or replace_special; None takes ``neighbours``.

        Raises:
            ValueError: another sampling; a probability above its largest; replace_one.
        """
        rule, relation = self.sampling, self.covered(relation) or self.neighbours
        if not isinstance(rule, WeightedPoisson) or relation is acc.Relation.REPLACE_ONE:
            raise ValueError(
                "an epsilon by class is defined for weighted Poisson sampling, but not under "
                f"replace_one, got {rule} and {relation.value}"
            )
        found = {"the run": self.epsilon(steps, delta, relation)}
        for name, own in probabilities.items():
            if arguments.probability(name, own) > rule.largest or name in found:
                known = f"at most largest ({rule.largest}), each of a class of its own"
                raise ValueError(f"probabilities must be {known}, got {own} for {name!r}")
            one = dataclasses.replace(self, sampling=dataclasses.replace(rule, largest=own))
            found[name] = one.epsilon(steps, delta, relation)
        return found

    def covered(self, relation: acc.Relation | None) -> acc.Relation | None:
        """The relation, unless only the event has a bound under it: the draws' proof must, too.

        Raises:
            UnsupportedEventError: the sampling says that it does not cover it.
        """
        known = self.sampling.relations
        if relation is None or relation in known:
            return relation
        released = NOISES[self.noise].event(1.0)
        if acc.supports(self.sampling.event(released, self.dataset_size), relation):
            raise acc.UnsupportedEventError(
                f"relation must be one that {self.sampling.title} covers, "
                f"{', '.join(each.value for each in known)}; got {relation.value}"
            )
        return relation

    @property
    def neighbours(self) -> acc.Relation:
        """The neighbouring relation of ``epsilon``, here and in trainers and runs.

        It is that of the budget; else add_or_remove_one, or where that is not proven for the
        sampling the strictest that is: replace_one for ``FixedSize``.
        """
        if self.relation is not None:
            return self.relation
        event, covered = self.event_at(0), self.sampling.relations
        return next((each for each in covered if acc.supports(event, each)), covered[0])

    def noise_std(self, params: PyTree, step: int | jax.Array = 0) -> float | jax.Array:
        """Standard deviation of the noise in each coordinate of the noisy mean, before unscaling.

        It is public: an optimizer may use it, as DP-AdamBC's correction does.

        Args:
            params: pytree of the parameters' shapes.
            step: the step, counted from 0; an int32 scalar inside ``jit``.
        """
        return self._noise.std(params, self.l2(params), step) / self.batch_size

    def noise_description(self, parameters: int) -> str:
        """A sentence on the noise of so many parameters, for reports; "" for float32 Gaussians."""
        return self._noise.description(parameters)

    @functools.cached_property
    def _noise(self) -> Noise:
        """The noise of the gradient, of the kind that ``noise`` names."""
        kind, given = NOISES[self.noise], self._part_multiplier
        if self.strategy is None:
            made = kind.independent(given)
        else:
            assert kind.correlated is not None
            assert not isinstance(given, NoiseSchedule)
            made = kind.correlated(given, self.strategy)
        # A kind of the user's own may be made of another's noise, which is then trusted.
        if made.noise_multiplier != given:
            raise ValueError(
                f"noise must be of a kind that makes noise of the multiplier {given} that it is "
                f"given and charged as, got {made}"
            )
        if made.part == "votes" and self.count_noise_multiplier is not None:
            raise ValueError("noise must be of another part than the count's, got 'votes'")
        return made

    @functools.cached_property
    def _part_multiplier(self) -> float | NoiseSchedule:
        """The multiplier that the noise of the gradient is made with."""
        if self.strategy is not None:
            return self.uncorrelated_multiplier
        if self.count_noise_multiplier is None:
            return self.noise_multiplier

        # Gradient z_g and count z_c are computed from one draw, so they are one Gaussian mechanism
        # of (z_g^-2 + z_c^-2)^-1/2, the step's multiplier (Andrew et al. 2021, arXiv:1905.03871v5,
        # Theorem 1); z_g is rounded up, so that the two together never cost more than that.
        whole = arguments.positive("noise_multiplier", self.noise_multiplier)
        count = arguments.positive("count_noise_multiplier", self.count_noise_multiplier)
        if count <= whole:
            raise ValueError(
                f"count_noise_multiplier must be above noise_multiplier ({whole}), got {count}: "
                "the count would use the step's whole budget"
            )
        return (whole**-2 - count**-2) ** -0.5 * (1.0 + 1e-12)

    @functools.cached_property
    def uncorrelated_multiplier(self) -> float:
        """Standard deviation of the normals that correlated noise is made of, over ``l2``.

        ``noise_multiplier`` is that over the strategy's sensitivity: one record moves the run's
        sums, as the strategy combines them, by as many times ``l2``.
        """
        assert self.strategy is not None
        assert not isinstance(self.noise_multiplier, NoiseSchedule)
        each = participation(self.sampling, self.dataset_size)
        # A factor for what float32 takes off a row: the products of the deviation, a reciprocal.
        moved = sensitivity(self.strategy, each) * (1 + 2.0**-21)
        exact = float(self.noise_multiplier) * moved  # a float16 would round it down
        rounded = np.float32(exact)  # as the noise has it, never less
        up = np.nextafter(rounded, np.float32(np.inf))
        return float(rounded if float(rounded) >= exact else up)

    def on(self, source: Source) -> "Mechanism":
        """The mechanism for a source: one that is a part of the records is charged as such.

        Its releases are then ``jaxdp.accounting.Parallel`` events. ``Trainer`` and ``Run`` ask for
        it by themselves; the plan of a budget, or a loop of your own, names it.

        Raises:
            ValueError: a part has no bound under the sampling, or the relation.
        """
        part = getattr(source, "part", None)
        return self if part == self.part else dataclasses.replace(self, part=part)

    def with_leak(self, reason: str) -> "Mechanism":
        """A copy that reveals more than its noisy sum: every step is a ``NonPrivate`` event."""
        return dataclasses.replace(self, leak=reason)

    def __post_init__(self) -> None:
        rule, sampling, noise, strategy = (
            self.rule,
            self.sampling,
            self.noise_multiplier,
            self.strategy,
        )
        if self.relation is not None:
            object.__setattr__(self, "relation", acc.Relation(self.relation))

        # The kinds of the parts; a class in the place of its object is one of another kind, and so
        # is what has a method's name for something that cannot be called.
        def has_kind(part: object, kind: type) -> bool:
            """True for an object of the kind whose methods can be called."""
            named = (n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n)))
            is_one = isinstance(part, kind) and not isinstance(part, type)
            return is_one and all(callable(getattr(part, name)) for name in named)

        if not has_kind(rule, Rule):
            raise ValueError(f"rule must be a clipping rule such as jaxdp.clip(0.1), got {rule!r}")
        kinds = (StepSampling, EpochSampling, RunSampling)
        if not any(has_kind(sampling, kind) for kind in kinds):
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
        if isinstance(sampling, ExampleLevel):
            of_user = sampling.records_per_user
            if self.records_per_user not in (None, of_user):
                raise ValueError(
                    f"records_per_user must be that of the sampling ({of_user}), or None, got "
                    f"{self.records_per_user}"
                )
            object.__setattr__(self, "records_per_user", of_user)
        for name in ("records_per_user", "steps", "models"):
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
        expected = sampling.rate(batch, size) * size
        if abs(expected - batch) >= 1:
            of = "sampling_prob" if hasattr(sampling, "sampling_prob") else "share of the steps"
            raise ValueError(
                f"batch_size must be {of} * dataset_size = {expected:g}, rounded, got {batch}"
            )
        fixed = sampling.fixed_size(size)
        if fixed is not None and fixed != batch:
            raise ValueError(
                f"batch_size must be {fixed} with sampling {sampling.name} of {size} records, "
                f"got {batch}"
            )
        cap = getattr(sampling, "cap", None)
        if cap is not None and cap > self.most_records:
            raise ValueError(f"cap must be at most {self.most_records}, got {cap}")

        # An epoch that is one event has one noise. What is drawn at once must be what is charged
        # at once: the event of more steps would be charged for too few of their draws.
        released = sampling.event(acc.Gaussian(1.0), size)
        if not isinstance(released, acc.Event) or released.block != sampling.block(size):
            raise ValueError(
                f"sampling must have an event of the {sampling.block(size)} steps that are drawn "
                f"at once (its block), got {released!r}"
            )
        self.covered(self.relation)
        if self.part is not None and not (
            acc.Relation.ADD_OR_REMOVE_ONE in sampling.relations
            and acc.supports(released, acc.Relation.ADD_OR_REMOVE_ONE)
            and self.relation is not acc.Relation.REPLACE_ONE
        ):
            raise ValueError(
                "sampling and relation must be such that a part of the records has a bound, got "
                f"{sampling.title} under {self.neighbours.value}: how many records are in a part "
                "follows from what they hold and may not be public, and one that is replaced may "
                "change its part. Take Poisson sampling, full batches or random allocation, and "
                "add_or_remove_one or replace_special"
            )
        for multiplier, steps in noise.levels[:-1] if isinstance(noise, NoiseSchedule) else ():
            if steps % (block := sampling.block(size)):
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
            if strategy.steps != (block := sampling.block(size)):
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

        # The noise, and a strategy that it takes: a calibration tries multipliers that no noise is
        # made of, so that a strategy is tried with another.
        arguments.one_of("noise", self.noise, tuple(NOISES))
        if self.noise == "grid" and not isinstance(noise, NoiseSchedule):
            arguments.positive("noise_multiplier", noise)
        if strategy is not None:
            if (correlated := NOISES[self.noise].correlated) is None:
                raise ValueError(
                    f"noise must be of a kind that can be correlated, with a strategy, got "
                    f"{self.noise!r}"
                )
            correlated(1.0, strategy)
            _ = self.uncorrelated_multiplier  # refuses what has no sensitivity
            if self.steps is None:
                object.__setattr__(self, "steps", strategy.steps)
        if self.count_noise_multiplier is not None:
            if self.noise in ("grid", "laplace"):
                raise ValueError(
                    "noise must be 'gaussian' with count_noise_multiplier: the count that quantile "
                    "clipping releases is not on the integer grid yet, and part of the release "
                    f"would have ordinary noise; got {self.noise!r}"
                )
            _ = self._noise  # refuses a count that alone costs more than the step

    def check_source(self, source: Source) -> None:
        """Raises ValueError for a source that is drawn from otherwise, or has another privacy unit.

        Args:
            source: of the records or users.

        Raises:
            ValueError: it is one of these.
        """
        found = getattr(source, "records_per_user", None)
        if isinstance(source, UserExamples):
            found = source.examples_per_user
        if found != self.records_per_user:
            raise ValueError(
                "records_per_user must be that of the source, jaxdp.sampling.users, or None for a "
                f"source of records: expected {found}, got {self.records_per_user}"
            )
        if self.part not in (None, getattr(source, "part", None)):
            raise ValueError(
                "source must be of the part that the mechanism charges, mechanism.on(source), got "
                f"{getattr(source, 'part', None)} for {self.part}"
            )
        if isinstance(source, UserExamples) != self.by_example:
            raise ValueError(
                "sampling must be jaxdp.sampling.ExampleLevel for jaxdp.sampling.user_examples, "
                "whose indices are records of users, and another for jaxdp.sampling.users: got "
                f"{self.sampling.title} with {type(source).__name__}"
            )
        if getattr(source, "part", None) is None:
            self.check_privacy_unit(source)
            self.sampling.check(len(source), self.dataset_size)
        else:  # whose number of records nothing may follow from, and that may be empty
            self.sampling.check(self.dataset_size, self.dataset_size)

    def check_privacy_unit(self, source: Source) -> None:
        """Raises ValueError for an empty source, and for one whose every index is a batch.

        A batched one has a declared size that is as many times larger than the source as every
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


# Names that other libraries have, by what stands for them here.
_PEERS = {
    "l2_clip_norm": ("max_grad_norm", "l2_norm_clip", "clip_norm", "clipping_norm", "max_norm"),
    "noise_multiplier": ("sigma", "noise_scale"),
    "epsilon": ("target_epsilon", "eps"),
    "delta": ("target_delta",),
    "dataset_size": ("num_examples", "num_samples", "sample_size", "n", "num_records"),
    "batch_size": ("expected_batch_size", "logical_batch_size", "lot_size"),
    "steps": ("num_steps", "iterations", "num_iterations", "max_steps"),
    "jaxdp.Trainer(loss_fn, mechanism, optax.sgd(...), source)": (
        "lr", "learning_rate", "optimizer", "loss_fn", "data_loader", "source",
    ),
    "jaxdp.Trainer(..., physical_batch_size=...)": (
        "physical_batch_size", "max_physical_batch_size", "microbatch_size", "num_microbatches",
    ),
}  # fmt: skip
# And those of other quantities: what has the name, and its value of what was given.
_COMPUTED: dict[str, tuple[str, str, Callable[[Any, Any, Any, Any], float]]] = {
    "epochs": ("steps", "epochs * dataset_size / batch_size", lambda v, n, b, c: v * n / b),
    "noise_std": ("noise_multiplier", "noise_std / l2_clip_norm", lambda v, n, b, c: v / c),
    "sample_rate": ("batch_size", "sample_rate * dataset_size", lambda v, n, b, c: v * n),
}
_COMPUTED |= {"num_epochs": _COMPUTED["epochs"], "sampling_prob": _COMPUTED["sample_rate"]}
_COMPUTED |= {"sampling_rate": _COMPUTED["sample_rate"]}


def _hint(name: str, given: Mapping[str, Any]) -> str:
    """The argument that stands for a name that there is not, in words; "" where none does."""
    if name in _COMPUTED:
        own, formula, value = _COMPUTED[name]
        sizes = (given.get(each) for each in ("dataset_size", "batch_size", "l2_clip_norm"))
        with contextlib.suppress(TypeError, ValueError, ZeroDivisionError, OverflowError):
            found = value(given[name], *sizes)
            shown = f"{found:g}" if own == "noise_multiplier" else max(1, round(found))
            return f"; {own}={shown}, which is {formula}"
        return f"; {own} is {formula}"
    own = next((own for own, names in _PEERS.items() if name in names), "")
    if own:
        return f"; {'it belongs to' if '(' in own else 'here it is'} {own}"
    near = difflib.get_close_matches(name, inspect.signature(dp_sgd).parameters, 1)
    return f"; did you mean {near[0]}" if near else ""


_Arguments = ParamSpec("_Arguments")


def _by_name(make: Callable[_Arguments, Mechanism]) -> Callable[_Arguments, Mechanism]:
    """Refuses in words an argument without a name, one that it has not, and no real budget."""
    known = tuple(inspect.signature(make).parameters)

    @functools.wraps(make)
    def made(*args: _Arguments.args, **given: _Arguments.kwargs) -> Mechanism:
        if args:
            raise TypeError(
                f"{make.__name__} must be given its arguments by name, got "
                f"{', '.join(map(arguments.described, args))}: an epsilon in the place of a noise "
                "multiplier would change the guarantee. Such as "
                f"{make.__name__}(epsilon=3.0, delta=1e-5, steps=1_000, l2_clip_norm=1.0, "
                "batch_size=256, dataset_size=60_000)"
            )
        for name in given:
            if name not in known:
                raise TypeError(
                    f"{make.__name__} has no argument {name}{_hint(name, given)}. It takes "
                    f"{', '.join(known)}"
                )
        if isinstance(given.get("epsilon"), float) and given["epsilon"] == math.inf:
            raise ValueError(
                "epsilon must be finite, got inf. Training without privacy by the same program: "
                "jaxdp.dp_sgd(noise_multiplier=0, ...) without epsilon, delta and steps, and an "
                "l2_clip_norm that no gradient reaches"
            )
        return make(*args, **given)

    return made


@_by_name
def dp_sgd(
    *,
    noise_multiplier: float | NoiseSchedule | None = None,
    l2_clip_norm: float | None = None,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    sampling: str | Sampling = "poisson",
    records_per_user: int | None = None,
    rule: Rule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    steps: int | None = None,
    models: int = 1,
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
        models: how many models the budget is for together, each of ``steps`` steps of its own, by
            trainers on one ledger (``jaxdp.Trainer(..., ledger=ledger, another=True)``).
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
        batch_size = sampling.expected_size(batch_size, dataset_size)
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
        if delta is not None or steps is not None or schedule is not None or models != 1:
            raise ValueError(
                "delta, steps, models and schedule belong to a budget (epsilon=), which must not "
                f"be given with noise_multiplier, got {budget | {'models': models}}"
            )
        return made

    # The least noise that keeps to the budget.
    if delta is None or steps is None:
        missing = "delta" if delta is None else "steps"
        raise ValueError(f"{missing} must be given with epsilon={epsilon!r}, got None")
    length = arguments.integer("steps", steps, least=1)
    models = arguments.integer("models", models, least=1)
    if schedule is None:
        length = whole_epochs(length, made.event_at(0).block, stacklevel=4)
    elif schedule.steps < length:
        raise ValueError(f"schedule must cover the {length} steps, got one of {schedule.steps}")
    scaled = (lambda noise: noise) if schedule is None else schedule.times
    found = acc.calibrate(
        lambda noise: acc.Repeated(made.total(length, scaled(noise)), models),
        epsilon,
        delta,
        made.neighbours,
    )
    return dataclasses.replace(
        made, noise_multiplier=scaled(found), steps=length, delta=float(delta), models=models
    )


@_by_name
def dp_mf(
    *,
    noise_multiplier: float | None = None,
    l2_clip_norm: float | None = None,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    sampling: str = "cyclic_poisson",
    steps: int,
    strategy: str | Strategy | None = None,
    bands: int | None = None,
    workload: Workload = PREFIX_SUMS,
    error: str = "rms",
    rule: Rule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    models: int = 1,
    relation: acc.Relation | str | None = None,
    noise: str = "gaussian",
) -> Mechanism:
    """The mechanism of DP-SGD with noise that is correlated over the steps (DP-MF, DP-FTRL).

    Each step's noise takes back part of that of the steps before, so that the sum of all has less
    (Denisov et al. 2022, arXiv:2202.08312; Choquette-Choo et al. 2023, arXiv:2306.08153v2). It is
    used as every mechanism, for exactly ``steps`` steps: they are one event, charged whole at the
    first. Its noise needs memory, ``bands`` - 1 copies of the parameters (or one a buffer); that of
    "lambda" none, for the normals of the step before are made a second time.

    Formal guarantee: docs/proofs/correlated_noise.md, for clipping by a public bound. Clip norms
    that follow noisy releases, and steps that are rejected, are refused.

    Args:
        noise_multiplier: standard deviation of the noise over the largest norm by which one record
            moves all that the strategy makes of its gradients; or give a budget.
        l2_clip_norm: as for ``jaxdp.dp_sgd``.
        batch_size: the expected number of records of a step.
        dataset_size: the number of records, a declared public constant.
        sampling: "cyclic_poisson" (records in groups by a hash of their identity, used in turn, and
            sampled: amplified, banded strategies only), "cyclic_allocation" (likewise, each record
            once an epoch in a random step of its group: amplified a little more; the expected batch
            is what whole epochs make of ``batch_size``, at most that) or "fixed_order" (every pass
            takes the records in one order; relation replace_special or replace_one).
        steps: n, of the whole run.
        strategy: "banded" (optimal banded Toeplitz), "buffered" (BLT), "lambda" (DP-λCGD, which
            takes no memory), "banded_inverse" (BISR),
            "square_root", "dense" (small n), "identity", or one of ``jaxdp.noise``. None takes
            "banded" with cyclic Poisson sampling or noise on a grid, else "buffered".
        bands: of a banded strategy (of "banded_inverse": of the inverse); buffers of a buffered
            one. None takes the number with the least error; with ``noise_multiplier`` and cyclic
            Poisson sampling it must be given.
        workload: the sums of gradients whose error the strategy makes least.
        error: of their errors, "rms" or "max".
        rule: as for ``jaxdp.dp_sgd``.
        epsilon: the budget of all steps.
        delta: of the budget.
        models: as for ``jaxdp.dp_sgd``.
        relation: of the budget; None takes add_or_remove_one, or replace_special in fixed order.
        noise: as for ``jaxdp.Mechanism``; "grid" takes "banded", "square_root" and "identity", each
            with its coefficients rounded by ``jaxdp.noise.dyadic``.

    Returns:
        The mechanism, for ``jaxdp.Trainer``, ``jaxdp.Run`` or a loop of your own.

    Raises:
        ValueError: an argument is missing or out of its range; the strategy does not fit the
            sampling; the budget cannot be met.

    Example:
        >>> mechanism = jaxdp.dp_mf(
        ...     epsilon=2.0, delta=1e-5, steps=200, bands=4,
        ...     l2_clip_norm=1.0, batch_size=50, dataset_size=5_000,
        ... )
        >>> mechanism.epsilon(200, delta=1e-5).upper <= 2.0
        True
    """
    rule = rule_of(l2_clip_norm, rule)
    steps = arguments.integer("steps", steps, least=1)
    batch_size = arguments.integer("batch_size", batch_size, least=1)
    dataset_size = arguments.integer("dataset_size", dataset_size, least=1)
    arguments.one_of("sampling", sampling, (*CORRELATED_SAMPLINGS, "cyclic_allocation"))
    arguments.one_of("error", error, tuple(ERRORS))
    arguments.one_of("noise", noise, tuple(NOISES))
    if (noise_multiplier is None) == (epsilon is None):
        raise ValueError(
            "give noise_multiplier, or a budget of epsilon and delta, got "
            f"noise_multiplier={noise_multiplier!r} and epsilon={epsilon!r}, delta={delta!r}"
        )
    if (delta is None) != (epsilon is None):
        raise ValueError(f"delta must be given with epsilon, got {delta!r} and {epsilon!r}")
    models = arguments.integer("models", models, least=1)
    if epsilon is None and models != 1:
        raise ValueError(f"models must be given with a budget (epsilon=), got {models} without")
    first = 1.0
    if noise_multiplier is not None:
        first = arguments.positive("noise_multiplier", noise_multiplier)
    amplified, gridded = sampling in _CYCLIC, noise == "grid"
    usual = acc.Relation.ADD_OR_REMOVE_ONE if amplified else acc.Relation.REPLACE_SPECIAL
    covered = acc.Relation(relation or usual)
    in_order = FixedOrder(batch_size, steps)

    def with_strategy(strategy: Strategy) -> Mechanism:
        """The mechanism with this strategy, and the noise that was given or that the budget has."""
        rule_of_draws: CyclicPoisson | CyclicAllocation | FixedOrder = in_order
        batch = batch_size
        if amplified:
            # Records are in as many groups as there are bands, and each step samples from one.
            share = strategy.bands * batch_size / dataset_size
            if share > 1:
                raise ValueError(
                    f"bands must be at most dataset_size / batch_size = "
                    f"{dataset_size // batch_size} with cyclic Poisson sampling, where each of as "
                    f"many groups makes a batch, got {strategy.bands}: take sampling='fixed_order' "
                    "for a strategy without bands"
                )
            rule_of_draws = CyclicPoisson(share, strategy.bands, steps)
            if sampling == "cyclic_allocation":
                slots = -(-dataset_size // (strategy.bands * batch_size))
                rule_of_draws = CyclicAllocation(slots, strategy.bands, steps)
                batch = rule_of_draws.expected_size(batch_size, dataset_size)
        start = Mechanism(
            rule,
            first,
            rule_of_draws,
            batch,
            dataset_size,
            strategy=strategy,
            noise=noise,
            relation=covered,
        )
        if epsilon is None or delta is None:
            return start
        found = acc.calibrate(
            lambda noise: acc.Repeated(start.events(0, steps, noise)[0][0], models),
            epsilon,
            delta,
            covered,
        )
        return dataclasses.replace(start, noise_multiplier=found, delta=float(delta), models=models)

    if isinstance(strategy, Strategy):
        if bands is not None:
            raise ValueError(f"bands must be None for a strategy of its own, got {bands}")
        return with_strategy(strategy)

    # The name of a strategy that the sampling has a proof for: cyclic Poisson sampling amplifies
    # banded ones alone, and noise on a grid takes coefficients of a few binary digits.
    if strategy is None:
        strategy = "banded" if amplified or gridded else "buffered"
    if not isinstance(strategy, str):
        raise ValueError(
            "strategy must be a name, or a strategy such as jaxdp.noise.Dense.of(matrix), got "
            f"{arguments.described(strategy)}"
        )
    hint = "; strategies without bands need sampling='fixed_order'" if amplified else ""
    if gridded and strategy in STRATEGIES and strategy not in ON_GRID:
        hint = " with noise='grid', which takes coefficients of a few binary digits alone"
    known = [each for each in STRATEGIES if each in ON_GRID or not gridded]
    known = [each for each in known if each in BANDED or not amplified]
    kind = arguments.one_of("strategy", strategy, tuple(known), hint)
    once = participation(in_order, dataset_size)

    def with_bands(bands: int) -> Mechanism:
        """The mechanism with the strategy of that name and so many bands."""
        found = strategy_by_name(kind, steps, bands, once, workload, error)
        return with_strategy(dyadic(found) if gridded else found)

    if bands is not None:
        return with_bands(arguments.integer("bands", bands, least=1))
    if kind != "banded":
        return with_bands({"banded_inverse": min(steps, 16), "buffered": 4}.get(kind, steps))

    # Optimal banded strategies of twice as many bands each time, while these help and there is
    # room; beyond 64 more help little, and each is another copy of the parameters.
    if epsilon is None and amplified:
        raise ValueError(
            "bands must be given with noise_multiplier: which number is best depends on the "
            "budget, for more bands are amplified less; got None"
        )
    room = dataset_size // batch_size if amplified else -(-dataset_size // batch_size)
    best, bands, worse = with_bands(1), 2, 0
    least = expected_error(best, workload, error)
    while bands <= min(room, steps, 64) and worse < 2:
        other = with_bands(bands)
        found, worse, bands = expected_error(other, workload, error), worse + 1, 2 * bands
        if found < least:
            best, least, worse = other, found, 0
    return best


def participation(sampling: Sampling, dataset_size: int) -> Participation:
    """The steps in which one record may take part, under a sampling rule of a whole run.

    Args:
        sampling: cyclic Poisson, cyclic allocation, or a fixed order.
        dataset_size: the number of records.

    Raises:
        ValueError: another rule.
    """
    if isinstance(sampling, CyclicPoisson | CyclicAllocation):
        return Cyclic(sampling.bands)
    if isinstance(sampling, FixedOrder):
        epoch = sampling.separation(dataset_size)
        times = -(-sampling.steps // epoch)
        return Single() if times == 1 else FixedEpochOrder(epoch, times)
    raise ValueError(
        f"sampling must be CyclicPoisson or FixedOrder for correlated noise, got {sampling}"
    )


def expected_error(
    mechanism: Mechanism, workload: Workload = PREFIX_SUMS, error: str = "rms"
) -> float:
    """The standard deviation of the noise in a workload's sums of clipped gradients, in clip norms.

    Args:
        mechanism: with a strategy.
        workload: prefix sums by default.
        error: "rms" over the steps, or "max".

    Raises:
        ValueError: a mechanism without a strategy.
    """
    if mechanism.strategy is None:
        raise ValueError("mechanism must have a strategy, as jaxdp.dp_mf makes it, got none")
    each = participation(mechanism.sampling, mechanism.dataset_size)
    sens = sensitivity(mechanism.strategy, each)
    assert isinstance(mechanism.noise_multiplier, float)
    return mechanism.noise_multiplier * sens * ERRORS[error](mechanism.strategy, workload)


def with_rule(
    rule: Rule,
    noise_multiplier: float | NoiseSchedule,
    batch_size: int | None,
    dataset_size: int | None,
    sampling: str | Sampling = "poisson",
    leak: str = "",
) -> Mechanism:
    """A mechanism with any clipping rule, and a leak; otherwise as ``dp_sgd``."""
    made = dp_sgd(
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        dataset_size=dataset_size,
        sampling=sampling,
        rule=rule,
    )
    return made.with_leak(leak) if leak else made


def default_physical_batch_size(batch_size: int) -> int:
    """Rows of one physical batch: 64 on a CPU (fastest as measured), 1,024 on an accelerator."""
    return min(batch_size, 64 if jax.default_backend() == "cpu" else 1024)
