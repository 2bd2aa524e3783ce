"""One object that makes the sampler, the clipped sum, the noise and the ledger event together."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp.clipping import ClippedGrad, Rule, clip, clipped_grad
from jaxdp.noise import privatize
from jaxdp.sampling import FixedSize, FullBatch, Poisson, Sampler, Sampling
from jaxdp.schedules import NoiseSchedule
from jaxdp.seeds import Secret
from jaxdp.types import PyTree

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A private training step: how records are drawn, clipped and noised, and what that costs.

    Formal guarantee: a step that draws with :meth:`sampler`, sums with :meth:`clipped_grad` (or any
    sum that carries its own sensitivity) and passes through :meth:`privatize` satisfies what
    :meth:`event_at` says of that step, under the relations that the event supports.

    Attributes:
        rule: the clipping rule.
        noise_multiplier: standard deviation of the noise over one record's largest contribution; a
            ``NoiseSchedule`` gives every step its own.
        sampling: how each step's records are drawn.
        batch_size: the expected batch size, the public divisor.
        dataset_size: the declared public number of records; never computed from private data.
        leak: what a step reveals beyond its noisy sum, in words: an algorithm as published that
            reads un-noised statistics. Where it is not empty, every step is a ``NonPrivate`` event.
    """

    rule: Rule
    noise_multiplier: float | NoiseSchedule
    sampling: Sampling
    batch_size: int
    dataset_size: int
    leak: str = ""

    @property
    def event(self) -> acc.Event:
        """The accounting event of one step, the same for all.

        Raises:
            ValueError: the noise follows a schedule; see :meth:`event_at` and :meth:`total`.
        """
        if isinstance(self.noise_multiplier, NoiseSchedule):
            raise ValueError(
                "noise_multiplier must be one number for all steps to be one event, got a "
                "NoiseSchedule: ask event_at(step) or total(steps)"
            )
        return self._event(self.noise_multiplier)

    def event_at(self, step: int) -> acc.Event:
        """The accounting event of step ``step``, counted from 0."""
        ((event, _, _),) = self.events(step, 1)
        return event

    def events(self, first_step: int, steps: int) -> list[tuple[acc.Event, int, int]]:
        """(event, first_step, steps) for every stretch of equal steps: what a ledger is charged.

        Raises:
            ValueError: a noise schedule ends before these steps do.
        """
        if isinstance(self.noise_multiplier, NoiseSchedule):
            levels = self.noise_multiplier.levels_between(first_step, steps)
            return [(self._event(z), first, count) for z, first, count in levels]
        return [(self._event(self.noise_multiplier), first_step, steps)]

    def total(self, steps: int) -> acc.Event:
        """All of the first ``steps`` steps as one event."""
        rows = self.events(0, _validate.integer("steps", steps, least=0))
        return acc.Composed(tuple(acc.Repeated(event, count) for event, _, count in rows))

    def noise_std(self, params: PyTree, step: int | jax.Array = 0) -> float | jax.Array:
        """Standard deviation of the noise in each coordinate of the noisy mean, before unscaling.

        Public: what remains after the noise may use it, as DP-Adam's correction does.

        Args:
            params: pytree of the parameters' shapes.
            step: the step, counted from 0; an int32 scalar inside ``jit``.
        """
        each = self.l2(params) / self.batch_size
        if not isinstance(self.noise_multiplier, NoiseSchedule):
            return self.noise_multiplier * each
        table = self.noise_multiplier.table()
        return each * jnp.take(table, jnp.asarray(step), mode="fill", fill_value=jnp.nan)

    def l2(self, params: PyTree) -> float:
        """The largest norm of one record's clipped contribution."""
        return self.rule.l2(params)

    def leaking(self, reason: str) -> "Mechanism":
        """The same mechanism, for an algorithm that reveals more: ``NonPrivate`` in the ledger."""
        return dataclasses.replace(self, leak=reason)

    def _event(self, noise_multiplier: float) -> acc.Event:
        if self.leak:
            return acc.NonPrivate(self.leak)
        return self.sampling.event(acc.Gaussian(noise_multiplier), self.dataset_size)

    def clipped_grad(self, loss_fn: Callable[..., Any], **options: Any) -> ClippedGrad:
        """``jaxdp.clipped_grad(loss_fn, self.rule, **options)``."""
        return clipped_grad(loss_fn, self.rule, **options)

    def privatize(self, key: jax.Array | None = None) -> optax.GradientTransformation:
        """The noise, to be put first in an optax chain; see :func:`jaxdp.privatize`."""
        return privatize(self.noise_multiplier, self.batch_size, key)

    def sampler(
        self,
        num_records: int,
        *,
        ledger: "Ledger | None" = None,
        secret: Secret | None = None,
        physical_batch_size: int | None = None,
    ) -> Sampler:
        """Draws for every step; with a ledger, each draw is charged before it is made.

        Args:
            num_records: how many records are at hand (under Poisson sampling it need not equal
                ``dataset_size``, and is itself private).
            ledger: where every draw is charged.
            secret: the randomness; None takes it from the operating system.
            physical_batch_size: rows of one compiled pass; None chooses for the device.

        Raises:
            ValueError: the records cannot be drawn from like this; at a draw, the ledger already
                holds that step of the same secret (to go on after a crash, take a new secret).
        """
        self.sampling.check(num_records, self.dataset_size)
        secret = secret or Secret.new()
        charge = None if ledger is None else Charge(self, ledger, secret.identifier())
        if physical_batch_size is None:
            physical_batch_size = default_physical_batch_size(self.batch_size)
        return Sampler(self.sampling, num_records, physical_batch_size, secret, 0, charge)

    def epsilon(
        self,
        steps: int,
        delta: float,
        relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps at ``delta``."""
        return acc.epsilon(self.total(steps), delta, relation=relation)


@dataclasses.dataclass(frozen=True, eq=False)
class Charge:
    """What a mechanism's sampler does before each draw: it charges the step.

    Attributes:
        mechanism: whose event is charged.
        ledger: where.
        stream: names the sampler's randomness there.
    """

    mechanism: Mechanism
    ledger: "Ledger"
    stream: str

    def __call__(self, step: int) -> None:
        """Charges one step."""
        event = self.mechanism.event_at(step)
        self.ledger.charge(event, stream=self.stream, first_step=step, source="sampler")


def dp_sgd(
    noise_multiplier: float | NoiseSchedule,
    l2_clip_norm: float,
    batch_size: int,
    dataset_size: int,
    sampling: str = "poisson",
) -> Mechanism:
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, Algorithm 1): flat clipping, Gaussian noise.

    Args:
        noise_multiplier: noise standard deviation over ``l2_clip_norm``, on the sum; a number, or a
            ``NoiseSchedule`` with one for every step.
        l2_clip_norm: the norm to which every per-example gradient is clipped.
        batch_size: the expected number of records of a step.
        dataset_size: the number of records, a declared public constant.
        sampling: "poisson" (each record with probability batch_size / dataset_size), "fixed_size"
            (exactly batch_size, without replacement) or "full_batch" (needs batch_size =
            dataset_size).

    Raises:
        ValueError: an argument is out of its range, named with its value.
    """
    return with_rule(clip(l2_clip_norm), noise_multiplier, batch_size, dataset_size, sampling)


def with_rule(
    rule: Rule,
    noise_multiplier: float | NoiseSchedule,
    batch_size: int,
    dataset_size: int,
    sampling: str = "poisson",
    leak: str = "",
) -> Mechanism:
    """A mechanism with any clipping rule; otherwise as :func:`dp_sgd`."""
    if not isinstance(noise_multiplier, NoiseSchedule):
        _validate.non_negative("noise_multiplier", noise_multiplier)
    batch_size = _validate.integer("batch_size", batch_size, least=1)
    dataset_size = _validate.integer("dataset_size", dataset_size, least=1)
    if batch_size > dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({dataset_size}), got {batch_size}"
        )
    _validate.one_of("sampling", sampling, ("poisson", "fixed_size", "full_batch"))
    if sampling == "full_batch" and batch_size != dataset_size:
        raise ValueError(
            f"batch_size must be dataset_size ({dataset_size}) for full_batch, got {batch_size}"
        )
    draws: dict[str, Sampling] = {
        "poisson": Poisson(batch_size / dataset_size),
        "fixed_size": FixedSize(batch_size),
        "full_batch": FullBatch(),
    }
    return Mechanism(rule, noise_multiplier, draws[sampling], batch_size, dataset_size, leak)


def default_physical_batch_size(batch_size: int) -> int:
    """Rows of one compiled pass: 64 on a CPU (fastest as measured), 1,024 on an accelerator."""
    return min(batch_size, 64 if jax.default_backend() == "cpu" else 1024)
