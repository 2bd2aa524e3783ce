"""A method: a private mechanism, and the optax chain that its noisy gradient goes into."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxdp import accounting as acc
from jaxdp.clipping import ClippedGrad
from jaxdp.mechanism import Mechanism
from jaxdp.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A private optimizer: what a step releases, and what becomes of the release.

    Formal guarantee: the parameters are post-processing of what :meth:`events` charges, since
    ``after_noise`` and ``scale`` see noisy releases and public constants only. A method that sees
    more says so in ``mechanism.leak`` and is charged as ``NonPrivate``.

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
        raw: from the state of ``after_noise`` to the un-noised statistics that an algorithm as
            published clips by; ``mechanism.leak`` must then say so.

    Raises:
        ValueError: ``raw`` without a leak.
    """

    mechanism: Mechanism
    after_noise: optax.GradientTransformation
    scale: Callable[[PyTree], PyTree] | None = None
    energy: Mechanism | None = None
    counts: Callable[[PyTree], dict[str, jax.Array]] | None = None
    claim: Callable[[float, float, int, float], acc.claims.Claim] | None = None
    gradient: Callable[..., Any] | None = None
    raw: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        if self.raw is not None and not self.mechanism.leak:
            raise ValueError(
                "mechanism must name its leak for a method that clips by un-noised statistics, got "
                "an empty one"
            )

    def chain(self, key: jax.Array | None = None) -> optax.GradientTransformationExtraArgs:
        """The whole optax chain, noise first; ``key`` as in :func:`jaxdp.privatize`."""
        return optax.chain(self.mechanism.privatize(key), self.after_noise)

    def clipped_grad(self, loss_fn: Callable[..., jax.Array]) -> ClippedGrad:
        """The clipped per-example gradients of ``loss_fn``."""
        if self.gradient is not None:
            return self.gradient(loss_fn)
        return self.mechanism.clipped_grad(loss_fn)

    def context(self, opt_state: PyTree) -> dict[str, PyTree]:
        """What the next gradient is clipped by, from the state of :meth:`chain`: its arguments."""
        found = {"scale": self.scale, "raw": self.raw}
        return {name: read(opt_state[1]) for name, read in found.items() if read is not None}

    def counts_of(self, opt_state: PyTree) -> dict[str, int]:
        """The method's counters, from the state of :meth:`chain`."""
        found = {} if self.counts is None else self.counts(opt_state[1])
        return {name: int(value) for name, value in found.items()}

    def events(self, first_step: int, steps: int) -> dict[str, list[tuple[acc.Event, int, int]]]:
        """What these steps cost, by stream: (event, first_step, steps) for stretches of equal ones.

        The stream "" is the gradient's, "energy" that of the energy's own draws.
        """
        rows = {"": self.mechanism.events(first_step, steps)}
        if self.energy is not None:
            rows["energy"] = self.energy.events(first_step, steps)
        return rows

    def total(self, steps: int) -> acc.Event:
        """All of the first ``steps`` steps as one event."""
        parts = (self.mechanism, self.energy)
        return acc.Composed(tuple(part.total(steps) for part in parts if part is not None))

    def epsilon(
        self, steps: int, delta: float,
        relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
    ) -> acc.Bound:
        """Bounds on epsilon after ``steps`` steps, rejected candidates included."""
        return acc.epsilon(self.total(steps), delta, relation=relation)
