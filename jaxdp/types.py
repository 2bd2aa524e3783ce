"""The values that cross the borders between jaxdp's parts."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import _validate

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """The sum of one draw's clipped per-example gradients, with its own sensitivity.

    Formal guarantee: adding one record to the draw, or removing one, changes ``value`` by at most
    ``l2`` in the Euclidean norm over all leaves together. Replacing a record changes it by a pair
    of such contributions; the accountant, not this class, applies the relation. (Up to the rounding
    of a float32 sum, see docs/threat_model.md.)

    Deliberately **not** a pytree. Only :func:`jaxdp.privatize`, first in a chain, opens it, so that
    ``optax.scale`` or ``optax.clip`` before the noise raise instead of changing the value behind
    the sensitivity's back.

    Attributes:
        value: pytree shaped like the parameters, float32: the **un-noised** sum. Sensitive.
        l2: scalar; the largest norm that one record can add to ``value``.
        unscale: pytree shaped like the parameters, or None: the public diagonal by which the
            gradients were divided before clipping, multiplied back after the noise.
        votes: scalar, or None: a sum of ½ for every record whose gradient is within ``l2`` and -½
            for every other, **un-noised**. One record adds at most ½ in absolute value.
    """

    value: PyTree
    l2: float | jax.Array
    unscale: PyTree | None = None
    votes: jax.Array | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.l2, jax.Array):
            _validate.positive("l2", self.l2)

    def __repr__(self) -> str:
        # The value is un-noised: a stray print or log line must not release it.
        return f"Summed(value=<sensitive>, l2={self.l2!r}, unscale={self.unscale is not None})"


@dataclasses.dataclass(frozen=True)
class Draw:
    """The records of one step, cut into physical batches of one fixed shape.

    Attributes:
        indices: int32 [passes, physical_batch_size]; padding points at record 0.
        mask: bool [passes, physical_batch_size]; False marks padding.
        step: the step that this draw belongs to; a draw is a pure function of (secret, step).
        num_records: how many records it was drawn from. Sensitive under add-or-remove-one.
    """

    indices: np.ndarray = dataclasses.field(repr=False)
    mask: np.ndarray = dataclasses.field(repr=False)
    step: int
    num_records: int = dataclasses.field(repr=False)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["norms", "losses", "clipped", "mask", "aux"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class ClipInfo:
    """What clipping saw. **Sensitive**: computed from un-noised data, never part of a release.

    Attributes:
        norms: float32 [physical_batch_size]; per-example gradient norms before clipping.
        losses: [physical_batch_size]; per-example losses.
        clipped: bool [physical_batch_size]; whether clipping shortened the gradient.
        mask: bool [physical_batch_size]; which rows hold an example.
        aux: what the loss returned besides, a pytree of [physical_batch_size, ...], or None.
        plan: how each parameter's gradient was handled; the one attribute that is public.
    """

    norms: jax.Array = dataclasses.field(repr=False)
    losses: jax.Array = dataclasses.field(repr=False)
    clipped: jax.Array = dataclasses.field(repr=False)
    mask: jax.Array = dataclasses.field(repr=False)
    aux: PyTree = dataclasses.field(default=None, repr=False)
    plan: tuple[Any, ...] = ()


class StepInfo(NamedTuple):
    """What a step reports. Computed from noisy releases only, so free to log.

    Attributes:
        update_norm: float32 scalar; norm of the change that the step made to the parameters.
    """

    update_norm: jax.Array
