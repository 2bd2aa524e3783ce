"""An algorithm: a private mechanism, the optax chain after its noise, and averages of iterates."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import ClippedGrad
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.mechanism import Mechanism
from jaxdp.types import LossFn, PyTree, filled


class StepHook:
    """Prepares on the host, for each step of a trainer, extra arguments of its optax chain.

    This one prepares none; ``Trainer(..., energy=)`` takes others.
    """

    streams: tuple[str, ...] = ()  # of the ledger, that it charges

    @property
    def charges(self) -> Mechanism | None:
        """The mechanism of what each step releases besides the noisy gradient; None for nothing."""
        return None

    def check_ledger(self, ledger: Ledger) -> None:
        """Raises ValueError if it charges another ledger than the trainer's."""

    def prepare_step(self) -> dict[str, PyTree]:
        """Charges the next step's further release; returns the extra arguments of its update."""
        return {}

    def close(self) -> None:
        """Ends its streams where the last step was prepared."""


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """A private optimizer: a mechanism, and the optax chain that its noisy gradient goes into.

    Formal guarantee: the parameters are post-processing of what ``events`` charges, since
    ``after_noise`` and ``scale`` see noisy releases and public constants only. An algorithm that
    sees more says so in ``mechanism.leak`` and is charged as ``NonPrivate``.

    Attributes:
        mechanism: sampling, clipping and noise.
        after_noise: the optax chain after the noise, learning rate included.
        scale: from the state of ``after_noise`` to the public positive diagonal by which the next
            per-example gradients are divided before clipping; None divides by nothing.
        energy: the mechanism of the noisy energy that judges each candidate, where there is one.
        counts: from the state of ``after_noise`` to scalars for the report, such as how many
            candidates were accepted; computed from noisy releases.
        claim: (sampling_prob, noise_multiplier, steps, delta) -> the paper's claim.
        gradient: makes the clipped sum of a loss; None is ``mechanism.clipped_grad``.
        noise: the link that takes the ``Summed``; None is ``mechanism.privatize()``.
        bound: from the state of ``noise`` to the clip norm of the next gradient, computed from
            noisy releases; None where the rule's own norm stays.
        raw: from the state of ``after_noise`` to the un-noised statistics that an algorithm as
            published clips by; ``mechanism.leak`` must then say so.
        average: from the state of ``after_noise`` to an average of the parameters, see
            ``jaxdp.optimizers.averaged``; None where the last ones are released.
        direction: from the state of ``noise`` to the public direction along which ``gradient``
            takes its next differences, see ``jaxdp.optimizers.dp_zo``; None where it takes none.

    Raises:
        ValueError: ``raw`` without a leak.
    """

    mechanism: Mechanism
    after_noise: optax.GradientTransformation
    scale: Callable[[PyTree], PyTree] | None = None
    energy: Mechanism | None = None
    counts: Callable[[PyTree], dict[str, jax.Array]] | None = None
    claim: Callable[[float, float, int, float], acc.Claim] | None = None
    gradient: Callable[..., Any] | None = None
    raw: Callable[[PyTree], PyTree] | None = None
    noise: optax.GradientTransformation | None = None
    bound: Callable[[PyTree], jax.Array] | None = None
    average: Callable[[PyTree], PyTree] | None = None
    direction: Callable[[PyTree], jax.Array] | None = None

    def __post_init__(self) -> None:
        if self.raw is not None and not self.mechanism.leak:
            raise ValueError(
                "mechanism must name its leak for an algorithm that clips by un-noised statistics, "
                "got an empty one"
            )
        if self.energy is not None and self.mechanism.by_example:
            raise ValueError(
                "energy must be None with example-level sampling: its draws are charged for one "
                "record, and the privacy unit is a user with several; got an algorithm that has one"
            )
        # With correlated noise nothing follows earlier releases before the noise.
        if self.mechanism.strategy is not None:
            for name in ("scale", "raw", "bound", "noise", "energy", "gradient"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} must be None with correlated noise: clip norms and scales that "
                        "follow noisy releases, steps that are rejected and gradients of an "
                        "algorithm's own are not covered by its proof; got an algorithm that has "
                        "one. Take SGD, momentum or Adam"
                    )
        # With noise on a grid no release has ordinary noise.
        if self.mechanism.noise == "grid":
            for name, what in (
                ("noise", "a noise link of an algorithm's own"),
                ("energy", "the private energy that judges candidates"),
            ):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} must be None with noise on an integer grid: {what} adds ordinary "
                        "float32 noise, and the guarantee would not be that of the grid; got an "
                        "algorithm that has one. Take SGD, momentum or Adam"
                    )

    @property
    def is_of_own_sum(self) -> bool:
        """True where what is clipped and summed is no gradient, but what ``noise`` alone opens."""
        return self.gradient is not None and self.noise is not None

    def on(self, source: PyTree) -> "Algorithm":
        """The algorithm for a source, which may be a part of the records; see ``Mechanism.on``."""
        made = self.mechanism.on(source)
        return self if made is self.mechanism else dataclasses.replace(self, mechanism=made)

    def on_trust(self) -> list[str]:
        """Sentences on functions of the caller's that set what the next gradient is clipped by."""
        given = {"scale": self.scale, "bound": self.bound}
        return [
            f"the {name} of each step comes from a function of the caller's (Algorithm.{name}): "
            "that it reads noisy releases and public constants alone was not verified"
            for name, read in given.items()
            if read is not None and not str(read.__module__).startswith("jaxdp.")
        ]

    def hook(self, energy: StepHook | None, ledger: Ledger) -> StepHook:
        """The hook of a trainer's steps: the energy that was given, or one that prepares nothing.

        Raises:
            ValueError: it is no energy, or not what the algorithm charges, to this ledger.
        """
        if energy is None and self.energy is None:
            return StepHook()
        found = StepHook() if energy is None else energy
        if not isinstance(found, StepHook):
            raise ValueError(
                "energy must be a PublicEnergy or a PrivateEnergy, got "
                f"{arguments.described(energy)}"
            )
        if energy is not None:
            processes.require_single_process("energy")
        if found.charges != self.energy:
            raise ValueError(
                "energy must be the one that the algorithm charges, whose mechanism is "
                f"{self.energy}; got one with {found.charges}"
            )
        found.check_ledger(ledger)
        return found

    def noise_link(self) -> optax.GradientTransformation:
        """The first link of the chain, which takes the ``Summed`` and adds the noise."""
        return self.mechanism.privatize() if self.noise is None else self.noise

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole optax chain, noise first."""
        return optax.chain(self.noise_link(), self.after_noise)

    def clipped_grad(self, loss_fn: LossFn, **options: Any) -> ClippedGrad:
        """The clipped per-example gradients of ``loss_fn``; options as for ``clipped_grad``.

        Raises:
            ValueError: options for an algorithm that makes the gradient itself.
        """
        if self.gradient is None:
            return self.mechanism.clipped_grad(loss_fn, **options)
        given = {name: value for name, value in options.items() if value is not None}
        taken = inspect.signature(self.gradient).parameters.values()
        if given and not any(each.kind is each.VAR_KEYWORD for each in taken):
            name = min(given)
            raise ValueError(f"{name} must be None for an algorithm with a gradient of its own")
        return self.gradient(loss_fn, **given)

    def context(self, opt_state: PyTree) -> dict[str, PyTree]:
        """The keyword arguments of the next clipped gradient, from the state of ``chain``."""
        found = {"scale": self.scale, "raw": self.raw}
        context = {name: read(opt_state[1]) for name, read in found.items() if read is not None}
        of_noise = {"bound": self.bound, "direction": self.direction}
        return context | {n: read(opt_state[0]) for n, read in of_noise.items() if read is not None}

    def released(self, params: PyTree, opt_state: PyTree) -> PyTree:
        """The parameters to evaluate and export: their average, where there is one."""
        if self.average is None:
            return params
        return filled(self.average(opt_state[1]), params)

    def counts_of(self, opt_state: PyTree) -> dict[str, int]:
        """The algorithm's counters, from the state of ``chain``."""
        found = {} if self.counts is None else self.counts(opt_state[1])
        return {name: int(value) for name, value in found.items()}

    def events(self, first_step: int, steps: int) -> dict[str, list[tuple[acc.Event, int, int]]]:
        """Events of these steps by stream, as (event, first_step, steps) for equal steps in a row.

        The stream "" is the gradient's, "energy" that of the energy's own draws.
        """
        rows = {"": self.mechanism.events(first_step, steps)}
        if self.energy is not None:
            rows["energy"] = self.energy.events(first_step, steps)
        return rows

    def total(self, steps: int) -> acc.Event:
        """The composition of the first ``steps`` steps, as one event."""
        parts = (self.mechanism, self.energy)
        return acc.Composed(tuple(part.total(steps) for part in parts if part is not None))

    def epsilon(
        self,
        steps: int,
        delta: float,
        relation: acc.Relation | None = None,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps, rejected candidates included.

        ``relation`` None takes the mechanism's.
        """
        relation = self.mechanism.covered(relation) or self.mechanism.neighbours
        return acc.epsilon(self.total(steps), delta, relation)


def as_algorithm(
    mechanism: Mechanism | Algorithm,
    optimizer: optax.GradientTransformation | None,
    average: float | None = None,
) -> Algorithm:
    """An ``Algorithm``: the one given, or a mechanism with its optimizer; averaged if asked for."""
    if average is not None:
        return averaged(as_algorithm(mechanism, optimizer), average)
    if isinstance(mechanism, Algorithm):
        if optimizer is not None:
            raise ValueError("optimizer must be None for an Algorithm, which has its own; got one")
        return mechanism
    if not isinstance(mechanism, Mechanism):
        raise ValueError(
            "mechanism must be a Mechanism, such as jaxdp.dp_sgd(...), or an Algorithm, got "
            f"{type(mechanism).__name__}"
        )
    if not callable(getattr(optimizer, "update", None)):
        raise ValueError(
            "optimizer must be an optax optimizer such as optax.adam(1e-3), got "
            f"{arguments.described(optimizer)}"
        )
    return Algorithm(mechanism, optimizer)


class AveragedState(NamedTuple):
    """State of ``averaged``.

    Attributes:
        inner: state of the algorithm's own ``after_noise``.
        ema: ``optax.EmaState`` of the parameters after each update.
        average_of_params: the debiased average, shaped like the parameters; before the first update
            the parameters themselves.
    """

    inner: PyTree
    ema: Any
    average_of_params: PyTree


def averaged(algorithm: Algorithm, decay: float) -> Algorithm:
    """The same algorithm, which also keeps an exponential moving average of its parameters.

    Noise moves the last iterate about; an average over the last 1/(1 - decay) steps or so moves
    less. The average is ``optax.ema`` (debiased) of the parameters after each update.

    Formal guarantee: the average is computed from the parameters after each step, all of which the
    events charge. So it is post-processing: the events are those of ``algorithm``. A rejected
    candidate counts as one more step at the parameters that stay.

    Args:
        algorithm: any; steps, noise and parameters are unchanged.
        decay: weight of the past, above 0 and below 1, such as 0.99.

    Returns:
        The algorithm, whose ``average`` reads the average.

    Raises:
        ValueError: a decay that is out of its range, or an algorithm that is averaged already.
    """
    if not 0 < arguments.fraction("decay", decay) < 1:
        raise ValueError(f"decay must be above 0 and below 1, got {decay!r}")
    if algorithm.average is not None:
        raise ValueError("algorithm must not be averaged twice, got one with an average")
    inner = optax.with_extra_args_support(algorithm.after_noise)
    mean = optax.ema(decay, debias=True)

    def init(params: PyTree) -> AveragedState:
        return AveragedState(inner.init(params), mean.init(params), jax.tree.map(jnp.array, params))

    def update(
        updates: PyTree, state: AveragedState, params: PyTree | None = None, **extra: PyTree
    ) -> tuple[PyTree, AveragedState]:
        if params is None:
            raise ValueError("params must be given to average them, got None")
        moved, after = inner.update(updates, state.inner, params, **extra)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its counter with the decay
            average, ema = mean.update(optax.apply_updates(params, moved), state.ema)
        return moved, AveragedState(after, ema, average)

    return dataclasses.replace(
        algorithm,
        after_noise=optax.GradientTransformationExtraArgs(init, update),
        scale=_through(algorithm.scale),
        raw=_through(algorithm.raw),
        counts=_through(algorithm.counts),
        average=lambda state: state.average_of_params,
    )


def _through(read: Callable[[PyTree], PyTree] | None) -> Callable[[PyTree], Any] | None:
    if read is None:
        return None
    # Wrapped, to be told as whose function it is.
    return functools.wraps(read)(lambda state: read(state.inner))
