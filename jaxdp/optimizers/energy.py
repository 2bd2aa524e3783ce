"""Energies that judge candidates: a loss on public examples, or a noisy one that is charged."""

import dataclasses
import functools
from typing import ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxdp.clipping import losses, rounding
from jaxdp.ledger import Ledger
from jaxdp.ledger.tickets import Ticket
from jaxdp.mechanism import Mechanism, dp_sgd
from jaxdp.noise.normals import add_normals
from jaxdp.optimizers.algorithm import StepHook
from jaxdp.sampling import Sampler
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import (
    ExtraArgument,
    LossFn,
    OfTicket,
    PyTree,
    count_rows,
    frozen,
    require_gatherable,
)

_JUDGED = "_judged"  # set on what was used
_ROWS = 500  # of one forward pass: the fastest of those tried on a CPU


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["examples"], meta_fields=["loss_fn"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class PublicEnergy(ExtraArgument, StepHook):
    """The mean loss on examples that are **assumed public**: free of charge.

    Formal guarantee: none is needed as long as the examples, and what the loss captures, are public
    and no record of the private data is among them: the ledger notes that as assumed. They must
    not be the examples on which accuracy is reported: every step is chosen by looking at them.

    Attributes:
        loss_fn: ``(params, example) -> scalar`` for one example.
        examples: pytree of arrays [m, ...].
    """

    ASSUMED: ClassVar = "the examples of a PublicEnergy, which judge every candidate, and its loss"

    loss_fn: LossFn
    examples: PyTree

    def prepare(self) -> "PublicEnergy":
        """Returns itself, to be given to one update."""
        return self

    def prepare_step(self) -> dict[str, PyTree]:
        """The energy of the next step, free of charge."""
        return {"energy": self}

    def note(self, ticket: Ticket) -> None:
        """Tells the ledger that the examples are assumed public."""
        ticket.note("assumed", self.ASSUMED)

    def rise(
        self, candidate: PyTree, current: PyTree, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(candidate's energy - ``last``, candidate's energy), float32 scalars.

        Where ``last`` is infinite, as at first, ``current``'s energy takes its place.
        """
        rows = jax.tree.leaves(self.examples)[0].shape[0]

        def mean(params: PyTree) -> jax.Array:
            one = functools.partial(self.loss_fn, params)
            losses = jax.lax.map(one, self.examples, batch_size=min(rows, _ROWS))
            return jnp.mean(losses, dtype=jnp.float32)

        def started() -> jax.Array:
            # Against a start without an energy every candidate would be judged NaN, for ever.
            energy = mean(current)
            return jnp.where(jnp.isnan(energy), jnp.inf, energy)

        last = jax.lax.cond(jnp.isposinf(last), started, lambda: last)
        energy = mean(candidate)
        return energy - last, energy


@dataclasses.dataclass(eq=False)
class PrivateEnergy(StepHook):
    """A noisy mean loss difference, on an independent draw of the private records.

    Formal guarantee: each judged candidate releases the sum over one Poisson draw, independent of
    the gradient's, of per-record loss differences clipped to ±c, plus N(0, (z c)²): the event of
    ``mechanism``, charged for every candidate, accepted or not. One record moves the sum by c when
    added or removed (2c when replaced; the accountant applies the relation).

    Attributes:
        loss_fn: ``(params, example) -> scalar`` for one record.
        data: pytree of arrays [n, ...], all private records, on the device.
        mechanism: made by ``energy_mechanism``; its rule's norm is c.
        sampler: draws of this mechanism alone, never the gradient's.
    """

    loss_fn: LossFn
    data: PyTree
    mechanism: Mechanism
    sampler: Sampler

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise ValueError(
                "mechanism must be a Mechanism from energy_mechanism, whose event is charged, got "
                f"{self.mechanism!r}"
            )
        if self.mechanism.strategy is not None:
            raise ValueError(
                "mechanism of an energy must have independent noise, got one of correlated noise: "
                "an energy's is drawn anew at every step, and its event would be far too cheap"
            )
        if isinstance(self.mechanism.noise_multiplier, NoiseSchedule):
            raise ValueError("noise_multiplier of an energy must be one number, got a schedule")
        drawn = getattr(self.sampler, "sampling", None)
        if not isinstance(self.sampler, Sampler) or drawn != self.mechanism.sampling:
            raise ValueError(
                "sampler must be mechanism.sampler(...) of the energy's own mechanism, got "
                f"{self.sampler!r}"
            )
        charged = self.sampler.issuer.mechanism
        if charged != self.mechanism:
            raise ValueError(
                "sampler must be mechanism.sampler(...) of the energy's own mechanism "
                f"{self.mechanism}, got one that charges {charged}"
            )
        rows = count_rows("data", self.data)
        # A gather beyond the end would count the last record again and again.
        if rows != self.sampler.num_records:
            # Without the numbers: they are private.
            raise ValueError(
                "data must hold the records that the sampler draws from, got another number"
            )
        require_gatherable(rows)

    @property
    def charges(self) -> Mechanism:
        """The mechanism of the noisy difference."""
        return self.mechanism

    @property
    def streams(self) -> tuple[str, ...]:  # type: ignore[override]
        """The stream of its draws."""
        return (self.sampler.issuer.stream,)

    def check_ledger(self, ledger: Ledger) -> None:
        """Raises ValueError if its draws are charged to another ledger than the trainer's."""
        if self.sampler.ledger is not ledger:
            raise ValueError(
                "energy must be drawn by a sampler with the trainer's ledger: make it by "
                "mechanism.sampler(..., ledger=ledger) and give the same ledger to the trainer"
            )

    def prepare_step(self) -> dict[str, PyTree]:
        """The energy of the next step, charged and drawn."""
        return {"energy": self.prepare()}

    def close(self) -> None:
        """Ends its stream where the last energy was drawn."""
        self.sampler.close()

    def prepare(self) -> "DrawnEnergy":
        """Charges and draws the records of one update."""
        draw = self.sampler.draw()
        passes, rows = draw.indices.shape
        # Shapes in powers of two, so that little recompiles; the loop stops at the real number.
        held = 1 << (passes - 1).bit_length()
        indices, mask = np.zeros((held, rows), np.int32), np.zeros((held, rows), bool)
        indices[:passes], mask[:passes] = draw.indices, draw.mask
        frozen((indices, mask))
        noise, bound = self.mechanism.noise_multiplier, self.mechanism.rule.l2(None)
        assert not isinstance(noise, NoiseSchedule)
        public = bound, self.mechanism.l2(None), noise, self.mechanism.batch_size
        drawn = DrawnEnergy(self.data, indices, mask, np.int32(passes), None, self.loss_fn, *public)
        return drawn.carrying(draw.ticket)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "indices", "mask", "passes", "words", "tag"],
    meta_fields=["loss_fn", "bound", "l2", "noise_multiplier", "batch_size"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class DrawnEnergy(OfTicket, ExtraArgument):
    """One draw of a ``PrivateEnergy``, for one update. **Secret**: it holds records, and its key.

    In ``jit`` it judges once it is ``spent``, which ``jaxdp.compile_update`` does itself.
    """

    data: PyTree = dataclasses.field(repr=False)  # all records
    indices: ArrayLike = dataclasses.field(repr=False)  # int32 [passes, m]
    mask: ArrayLike = dataclasses.field(repr=False)  # bool [passes, m]
    passes: ArrayLike = dataclasses.field(repr=False)  # int32; how many of these rows are used
    # uint32 [2], the noise key; None until it is spent.
    words: ArrayLike | None = dataclasses.field(repr=False)
    loss_fn: LossFn  # ``(params, example) -> scalar`` for one record
    bound: float  # c, to which each difference is clipped
    l2: float  # the most by which one record changes the sum, its rounding included
    noise_multiplier: float  # z
    batch_size: int  # the public divisor
    tag: ArrayLike | None = None  # uint32 [2]; a name of the key that does not reveal it

    def spent(self, *, verified: bool = False) -> "DrawnEnergy":
        """The draw with its noise key, for one update that the caller compiles.

        Args:
            verified: True if jaxdp itself passes it to the one update.

        Raises:
            ValueError: it was spent before; inside ``jit``, where its draw and its noise would be
                compiled in.
        """
        if isinstance(jnp.zeros([]), jax.core.Tracer):
            raise ValueError(_AS_DRAWN)
        if self.ticket is None:
            raise ValueError(
                "energy must be as it was drawn to be spent, got one that is spent or was changed"
            )
        key = self.ticket.spend("the judging of a candidate", verified=verified)
        return dataclasses.replace(self, words=key.words[0], tag=key.tag)

    def check(self, ticket: Ticket) -> None:
        """Raises ValueError if another ledger than that of the sum was charged for it."""
        if self.ticket is not None and self.ticket.issuer.ledger is not ticket.issuer.ledger:
            raise ValueError(
                "energy must be charged to the ledger of the sum, got one with a ledger of its "
                "own, whose cost would be missing in the sum's epsilon: make both samplers with "
                "one ledger, mechanism.sampler(..., ledger=ledger)"
            )

    def take(self) -> "DrawnEnergy":
        """The draw with its noise key, which is spent here unless the caller has spent it."""
        if self.ticket is None:
            self.once()
            return self
        return self.spent(verified=True)

    def blank(self) -> "DrawnEnergy":
        """The draw with a key of zeros, to trace an update with; nothing is spent."""
        if self.ticket is None:
            self.check_spent()
            self._require_unused()
        else:
            self.ticket.check()
        zeros = np.zeros(2, np.uint32)
        return dataclasses.replace(self, words=zeros, tag=zeros)

    def check_spent(self) -> None:
        """Raises ValueError if it has no key: inside ``jit`` as it was drawn, or changed."""
        if self.words is None:
            raise ValueError(_AS_DRAWN)

    def rise(
        self, candidate: PyTree, current: PyTree, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The noisy mean of clipped loss differences, twice; float32 scalars.

        Raises:
            ValueError: it judged a candidate before.
        """
        del last
        self.check_spent()
        self.once()
        std = self.noise_multiplier * self.l2
        words = jnp.asarray(self.words)
        noisy = add_normals(self.clipped_sum(candidate, current), std, words)
        rise = noisy / self.batch_size
        return rise, rise

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "energy must not be copied, pickled or sent to another process: both would judge with "
            "one noise, and their difference has none. Take another for every candidate, "
            "energy.prepare().spent()"
        )

    __copy__ = __reduce__

    def __deepcopy__(self, memo: dict[int, PyTree]) -> NoReturn:
        self.__reduce__()

    def once(self) -> None:
        """Raises ValueError at a second use of this object: two noises of one key subtract away."""
        self._require_unused()
        object.__setattr__(self, _JUDGED, True)

    def _require_unused(self) -> None:
        if hasattr(self, _JUDGED):
            raise ValueError(
                "energy must judge one candidate, got one that judged another: both would have one "
                "noise, and their difference none. Take another for every candidate, "
                "energy.prepare().spent()"
            )

    def clipped_sum(self, candidate: PyTree, current: PyTree) -> jax.Array:
        """The **un-noised** sum of clipped differences; float32 scalar. Sensitive.

        Raises:
            ValueError: the loss could reach other examples, as for ``clipped_grad``.
        """

        def difference(example: PyTree) -> jax.Array:
            change = self.loss_fn(candidate, example) - self.loss_fn(current, example)
            return jnp.clip(change.astype(jnp.float32), -self.bound, self.bound)

        indices, mask = jnp.asarray(self.indices), jnp.asarray(self.mask)
        losses.check_loss(self.loss_fn, candidate, self.data)

        def add(i: jax.Array, totals: tuple[jax.Array, jax.Array]) -> PyTree:
            batch = jax.tree.map(lambda leaf: leaf[indices[i]], self.data)
            changes = jax.vmap(difference)(batch)
            counted = jnp.where(mask[i] & jnp.isfinite(changes), changes, 0.0)
            return rounding.add_compensated(*totals, rounding.pairwise_sum(counted))

        zero = jnp.zeros([], jnp.float32)
        return rounding.compensated(*jax.lax.fori_loop(0, self.passes, add, (zero, zero)))


_AS_DRAWN = (
    "energy must not be used inside jit as it is drawn, nor with other fields "
    "(dataclasses.replace): every call would judge by one draw and one noise, or by records that "
    "nobody drew. Pass drawn.spent() in as an argument, another for every call"
)
# An energy that may judge an update.
Judge = PublicEnergy | DrawnEnergy


def energy_mechanism(
    noise_multiplier: float, bound: float, batch_size: int, dataset_size: int
) -> Mechanism:
    """The mechanism of a private energy: Poisson draws, differences clipped to ±``bound``.

    Args:
        noise_multiplier: noise standard deviation over ``bound``, on the sum.
        bound: c, the largest loss difference of one record that counts.
        batch_size: the expected number of records of a draw.
        dataset_size: the declared number of records.
    """
    return dp_sgd(
        noise_multiplier=noise_multiplier,
        l2_clip_norm=bound,
        batch_size=batch_size,
        dataset_size=dataset_size,
    )
