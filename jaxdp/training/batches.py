"""Charged batches for a training loop, drawn and gathered ahead of time in a thread."""

import dataclasses
import warnings
from collections.abc import Container, Iterator
from typing import Any

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.devices import shards
from jaxdp.devices.placement import Placement
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import Entry, event_counts
from jaxdp.ledger.ledger import ProcessLock, alone
from jaxdp.ledger.tickets import Issuer, Ticket
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import Sampler, Source
from jaxdp.sampling.prefetching import prefetch
from jaxdp.sampling.source import ArraySource
from jaxdp.sampling.text import BucketedText
from jaxdp.types import Draw, OfTicket, PyTree, frozen

# (step, its batch or what making it failed with; None behind the last).
_Made = tuple[int, "ChargedBatch | BaseException | None"]
# NumPy arrays up to this size are put on the device whole.
_SMALL_BYTES = 256 * 2**20
# Draws made ahead: of positions only, so many positions in all, and of batches whose rows are in
# memory.
_DRAWS_AHEAD, _POSITIONS_AHEAD, _GATHERED_AHEAD = 24, 2**24, 2


@dataclasses.dataclass(frozen=True, eq=False)
class ChargedBatch(OfTicket):
    """The batch of one step, already charged; ``Trainer.step`` takes it once. **Sensitive**.

    Attributes:
        draw: which records.
        rows: for every physical batch what was gathered on the host; None where the data are on the
        device.
    """

    draw: Draw = dataclasses.field(repr=False)
    rows: tuple[PyTree, ...] | None = dataclasses.field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The step that was charged."""
        return self.draw.step


def check_batch(batch: Any, issuer: Issuer) -> Ticket:
    """The ticket of a batch, which an issuer has handed out and which can still be spent.

    Raises:
        ValueError: it is no batch, one of other rows, another trainer's, or one that was used.
    """
    if not isinstance(batch, ChargedBatch):
        raise ValueError(
            "batch must be one that trainer.batches() hands out, charged and drawn, got "
            f"{type(batch).__name__}"
        )
    ticket = batch.ticket
    if ticket is None or batch.draw.ticket is not ticket:
        raise ValueError(
            "batch must be as trainer.batches() handed it out, got one with other records or "
            "rows: what they were computed from, nobody has seen. Augment inside the loss, "
            "which sees one example"
        )
    if not ticket.usable:
        why = "that a step used before" if ticket.spent else "of the process that was forked"
        raise ValueError(
            "batch must be one that trainer.batches() just handed out, for one step: the noise of "
            f"a batch is released once. Got one {why}. Take one batch for every step: "
            "for batch in trainer.batches(): state, info = trainer.step(state, batch)"
        )
    if ticket.issuer is not issuer:
        raise ValueError("batch must be of this trainer, got one of another trainer")
    return ticket


class Batches(Iterator[ChargedBatch]):
    """An iterator over charged batches, drawn and gathered ahead of time.

    ``Trainer.batches`` returns it. It hands out each step from the issuer's next one to the last
    that no other iterator, and no other thread, has handed out. A batch is charged when it is
    handed out; what was drawn ahead and never is costs nothing. A batch that cannot be made counts
    as handed out; the error is raised at its turn, and nowhere else.

    Args:
        sampler: draws the records.
        source: the records to draw from.
        end: the step after the last.
        place: the devices that share the rows of a batch; None for one.
    """

    def __init__(self, sampler: Sampler, source: Source, end: int, place: Placement | None = None):
        self.guard, self._issuer, self._end = ProcessLock(), sampler.issuer, end
        sampler.prepare()  # it may read all records, which must not fail in the middle
        # Draws that are made ahead: fewer where each is large.
        size = _GATHERED_AHEAD
        if isinstance(source, ArraySource) and source.on_device:
            each = getattr(self._issuer.mechanism, "batch_size", 1)
            size = min(_DRAWS_AHEAD, max(size, _POSITIONS_AHEAD // each))
        # Not of this object, which a thread that makes batches must not keep alive.
        self._from = lambda first: prefetch(_produced(sampler, source, place, first, end), size)
        self._made = self._from(self._issuer.next)
        self._held: _Made | None = None  # the first one made, until the issuer has answered

    @alone
    def __next__(self) -> ChargedBatch:
        while (step := self._issuer.next) < self._end:
            self._held = self._held or next(self._made, (self._end, None))
            at, made = self._held
            failed = not isinstance(made, ChargedBatch)
            if at > step:  # an interrupt has lost what was made of this one
                self._made.close()
                self._made, self._held = self._from(step), None
            elif at < step or (ticket := self._issuer.take(step, self._end, failed)) is None:
                self._held = None  # another has handed it out
            elif isinstance(made, ChargedBatch):
                self._held = None
                frozen((made.draw.indices, made.draw.mask, made.rows))
                return ChargedBatch(made.draw.carrying(ticket), made.rows).carrying(ticket)
            else:
                # That it failed may depend on its draw: it is not drawn again, here or at a later
                # start of a run, and counts.
                ticket.spend("a batch that could not be made", verified=True)
                self._held = None
                assert made is not None
                made.add_note(
                    "The step that this batch was for is charged, and passed over for good"
                )
                raise made
        self._made.close()
        raise StopIteration

    def __len__(self) -> int:
        """The number of batches still to come; a progress bar takes its total from it."""
        return max(0, self._end - self._issuer.next)

    @alone
    def close(self) -> None:
        """Ends the iterator, and the thread that draws ahead."""
        self._end = 0
        self._made.close()


def _produced(
    sampler: Sampler, source: Source, place: Placement | None, first: int, end: int
) -> Iterator[_Made]:
    """The batches of the steps [first, end), or what each failed with, as nobody has them yet."""
    step, issuer = first, sampler.issuer
    while (step := max(step, issuer.next)) < end:  # others may be far ahead
        found: ChargedBatch | BaseException
        try:
            found = _gathered(sampler.drawn(step), source, place)
        except StopIteration:
            found = RuntimeError("a record, or a draw, must not end in StopIteration, got one")
        except BaseException as error:  # told at its turn, whatever it is
            found = error
        yield step, found
        del found
        step += 1


def _gathered(draw: Draw, source: Source, place: Placement | None) -> ChargedBatch:
    """The draw with the rows of every physical batch; without them for data on the device."""
    if isinstance(source, ArraySource) and source.on_device:
        return ChargedBatch(draw)
    if isinstance(source, BucketedText):
        return _in_buckets(draw, source, place)
    passes = zip(draw.indices, draw.mask, strict=True)
    if place is None:
        return ChargedBatch(draw, tuple(source.gather(*each) for each in passes))
    rows = (shards.gather_sharded(source.gather, *each, place.row_sharding) for each in passes)
    return ChargedBatch(draw, tuple(rows))


def _in_buckets(draw: Draw, source: BucketedText, place: Placement | None) -> ChargedBatch:
    """The same records in physical batches of one length each."""
    size = draw.indices.shape[1]
    indices, mask, rows = source.passes(draw.indices[draw.mask], size)
    if place is not None:
        # Few records of a length would be on one device alone: how a sum is rounded is bounded
        # for devices that share a batch evenly, or one after another in full batches.
        order = place.interleaved(size)
        indices, mask = indices[:, order], mask[:, order]
        rows = [place.put_rows(jax.tree.map(lambda leaf: leaf[order], each)) for each in rows]
    parted = Draw(indices, mask, draw.step, draw.num_records)
    return ChargedBatch(parted, tuple(rows))


def placed(source: Source, place: Placement | None = None) -> Source:
    """The source, with small arrays in memory moved to the device, or to all of a mesh, once."""
    if not isinstance(source, ArraySource):
        return source
    if source.on_device:
        if place is None:
            return source
        return dataclasses.replace(source, arrays=place.put(source.arrays))
    leaves = jax.tree.leaves(source.arrays)
    plain = all(type(leaf) is np.ndarray for leaf in leaves)
    if not plain or sum(leaf.nbytes for leaf in leaves) > _SMALL_BYTES:
        return source
    put = jax.device_put if place is None else place.replicate
    return ArraySource.of(put(source.arrays))


def steps_left(
    mechanism: Mechanism,
    taken: int,
    steps: int | None,
    epochs: float | None,
    beyond: bool,
    room: int | None = None,
) -> int:
    """The number of steps of a loop: those asked for, or what is left of the budget.

    Args:
        mechanism: names how many steps its noise was calibrated for.
        taken: how many the ledger holds already.
        steps: asked for; None asks for ``epochs``, or for all that are left.
        epochs: of expected batches.
        beyond: allow more than the noise was calibrated for.
        room: how many the ledger's budget admits; None without one.

    Raises:
        ValueError: both are given, or neither and there is no budget, or they go beyond.
    """
    planned = mechanism.steps
    if steps is not None and epochs is not None:
        raise ValueError(f"give one of steps and epochs, got {steps!r} and {epochs!r}")
    if epochs is not None:
        each = mechanism.dataset_size / mechanism.batch_size
        steps = max(1, round(arguments.positive("epochs", epochs) * each))
    if steps is None:
        if room == 0:
            warnings.warn(
                "no step is left: the ledger's budget admits no further one, and the loop is empty",
                stacklevel=3,
            )
        if planned is None:
            if room is None:
                raise ValueError(
                    "steps or epochs must be given: the noise was not calibrated for a number of "
                    "steps, and the ledger has no budget; got None"
                )
            return room
        if taken >= planned:
            warnings.warn(
                f"no step is left: the ledger holds all {planned} that the noise was "
                "calibrated for, and the loop is empty. To train on, and be charged for that too: "
                f"batches({planned}, beyond=True). A new model, which costs as much again: "
                "jaxdp.Trainer(..., ledger=trainer.ledger, another=True)",
                stacklevel=3,
            )
        left = max(0, planned - taken)
        return left if room is None else min(left, room)
    steps = arguments.integer("steps", steps, least=0)
    if planned is not None and taken + steps > planned and not beyond:
        raise ValueError(
            f"steps must be at most {max(0, planned - taken)}, what is left of the {planned} "
            f"that the noise was calibrated for, got {steps}. With beyond=True training goes "
            "on, and epsilon grows past the budget"
        )
    return steps


def charged(
    ledger: Ledger, events: set[acc.Event], besides: Container[str | None] = ()
) -> dict[str, int]:
    """The number of steps of these events that a ledger holds, reserved ones and epochs whole.

    By model: a trainer and those that went on with its state have one.

    A new stream begins with an epoch of its own: what is left of the last one is lost.

    Args:
        ledger: the ledger.
        events: of a mechanism.
        besides: streams that are left out.
    """
    models: dict[str, list[Entry]] = {}
    for entry in ledger.reserved:
        if entry.event in events and entry.stream not in besides:
            models.setdefault(ledger.model_of(entry.stream), []).append(entry)
    return {
        model: sum(n * e.block for e, n in event_counts(entries).items())
        for model, entries in models.items()
    }
