"""The sampler: draws each step's records, after the step was charged."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.ledger.tickets import Issuer
from jaxdp.sampling.rules import (
    PROVEN,
    EpochSampling,
    Identities,
    RunSampling,
    Sampling,
    StepSampling,
    WeightedPoisson,
)
from jaxdp.types import MOST_ON_DEVICE, MOST_RECORDS, Draw

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger
    from jaxdp.sampling.source import Source


class Sampler:
    """Draws the records of one step after the other; each step is charged first.

    A sampler never draws a step twice, and two samplers never share a draw or a noise, also where
    they were made from one secret of the operating system: two releases from one draw are not two
    independently sampled events, and would cost more than two. (A seed that a person chose repeats
    both in another ledger; such a run is labelled.)

    Args:
        sampling: the sampling rule.
        num_records: the number of records. Sensitive under add-or-remove-one.
        physical_batch_size: rows of one physical batch; a larger draw takes several, none is ever
            truncated.
        issuer: charges and issues the tickets.
        identities: makes what identifies each record, [num_records], for a rule that needs it;
            called once, before the first draw. None where there is nothing.
        source: the records, for a rule that reads each of them (``WeightedPoisson``).
    """

    def __init__(
        self,
        sampling: Sampling,
        num_records: int,
        physical_batch_size: int,
        issuer: Issuer,
        identities: Callable[[], Identities] | None = None,
        source: "Source | None" = None,
    ):
        arguments.integer("num_records", num_records, least=0)
        if num_records > MOST_RECORDS:
            raise ValueError("num_records must be at most 2**53, got more")
        self.set_physical_batch_size(physical_batch_size)
        # What is drawn must be what the mechanism's event says.
        charged = getattr(issuer.mechanism, "sampling", sampling)
        if charged != sampling:
            raise ValueError(
                f"sampling must be the one that the issuer charges, {charged}, got {sampling}: "
                "take mechanism.sampler(...) of the mechanism"
            )
        declared = getattr(issuer.mechanism, "dataset_size", num_records)
        if sampling.block(num_records) != sampling.block(declared):
            raise ValueError(
                f"num_records must be the declared dataset_size ({declared}), got {num_records}"
            )
        if isinstance(sampling, RunSampling):
            part = getattr(issuer.mechanism, "part", None)  # whose number of records is nobody's
            sampling.check(num_records if part is None else declared, declared)
        if type(sampling) not in PROVEN:
            issuer.ledger.trust(
                f"the sampling rule {type(sampling).__name__} is not one of jaxdp's: that its "
                "draws have the law of the event that it is charged as was not verified"
            )
        if isinstance(sampling, WeightedPoisson):
            if source is None or len(source) != num_records:
                raise ValueError(
                    "source must be the records that weighted Poisson sampling draws from, "
                    "mechanism.sampler(len(source), source=source), got none or another number"
                )
            issuer.ledger.trust(
                f"the probability of a record, {sampling.label}, is the caller's function: that it "
                "follows from the record alone, and stays the same, was not verified"
            )
        self._sampling, self._num_records, self._issuer = sampling, num_records, issuer
        self._source = source
        self._shares: np.ndarray | None = None  # of ``WeightedPoisson.read``. Sensitive
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])  # the one drawn last, its batches
        self._identities = identities

    @property
    def sampling(self) -> Sampling:
        """The sampling rule."""
        return self._sampling

    @property
    def num_records(self) -> int:
        """The number of records drawn from. Sensitive under add-or-remove-one."""
        return self._num_records

    @property
    def physical_batch_size(self) -> int:
        """Rows of one physical batch."""
        return self._physical_batch_size

    def set_physical_batch_size(self, physical_batch_size: int | str) -> None:
        """Sets the rows of a physical batch for the draws to come; who is drawn stays the same."""
        if physical_batch_size == "auto":
            raise ValueError(
                "physical_batch_size must be a number for a sampler, which knows no model, got "
                '"auto": jaxdp.Trainer and jaxdp.Run choose it, trainer.physical_batch_size'
            )
        self._physical_batch_size = arguments.integer(
            "physical_batch_size", physical_batch_size, least=1
        )

    @property
    def issuer(self) -> Issuer:
        """The issuer that charges and makes the tickets."""
        return self._issuer

    @property
    def ledger(self) -> "Ledger":
        """The ledger that every draw is charged to."""
        return self._issuer.ledger

    @property
    def step(self) -> int:
        """The next step to be drawn."""
        return self._issuer.next

    def draw(self) -> Draw:
        """Charges the next step and returns its draw.

        Raises:
            ValueError: the step cannot be charged, or a run with correlated noise lacks the
                records' identities; nothing is charged then.
        """
        self.prepare()  # may fail, which costs nothing here
        ticket = self._issuer.take()
        assert ticket is not None  # of the next step, whichever it is
        return self.drawn(ticket.step).carrying(ticket)

    def drawn(self, step: int) -> Draw:
        """The records of a step, from its key alone: without a ticket, and nothing is charged."""
        issuer, rule = self._issuer, self._sampling
        if step in issuer.passed_over:
            chosen = np.zeros(0, np.int64)
        elif isinstance(rule, WeightedPoisson):
            chosen = rule.choose(issuer.generator(step), self._num_records, self.prepare())
        elif isinstance(rule, StepSampling):
            chosen = rule.choose(issuer.generator(step), self._num_records)
        elif isinstance(rule, RunSampling):
            chosen = rule.of_step(self.prepare(), step, issuer.generator(step))
        else:
            assert isinstance(rule, EpochSampling)
            size = rule.block(self._num_records)
            number, place = divmod(step, size)
            known_number, batches = self._epoch  # at once: threads may draw
            if known_number != number:
                # From the epoch's own randomness: its first steps may have been drawn elsewhere.
                batches = rule.epoch(issuer.generator(step, size), self._num_records)
                if len(batches) != size:
                    raise ValueError(
                        f"sampling must draw {size} batches, as its block says, got {len(batches)}"
                    )
                self._epoch = number, batches
            chosen = batches[place]
        if type(rule) not in PROVEN:  # of these it is proven, and looking would take time
            check_positions(chosen, self._num_records)
        least = getattr(rule, "cap", 0)
        return pad(chosen, self._physical_batch_size, step, self._num_records, least)

    def prepare(self) -> Any:
        """The order of the records of a run with correlated noise, made once; None for others.

        Of ``WeightedPoisson`` what it has read of each.

        Raises:
            ValueError: identities are missing; another sampler of the issuer has made an order.
        """
        rule = self._sampling
        if isinstance(rule, WeightedPoisson):
            if self._shares is None:
                assert self._source is not None
                found = rule.read(self._source, getattr(self._issuer.mechanism, "batch_size", None))
                # Where processes drew apart a record could be summed twice.
                processes.agree(probabilities=lambda: hashlib.blake2b(found.tobytes()).hexdigest())
                self._shares = found
            return self._shares
        if not isinstance(rule, RunSampling):
            return None
        if self._issuer.run_order is None:
            known = None if self._identities is None else self._identities()
            rng = self._issuer.generator(0, rule.block(self._num_records))
            self._issuer.run_order = self, rule.prepare(rng, self._num_records, known)
        owner, prepared = self._issuer.run_order
        if owner is not self:
            raise ValueError(
                "sampler must be the only one of a run with correlated noise, got a second one "
                "of its issuer: its records could be in other groups"
            )
        return prepared

    def close(self) -> None:
        """Releases the steps that were reserved in the ledger and not drawn."""
        self._issuer.close()

    def __repr__(self) -> str:
        return f"Sampler({self._sampling!r}, step={self.step})"


def check_positions(chosen: np.ndarray, num_records: int) -> None:
    """Raises ValueError for a draw from which a record would be summed twice, or another one.

    Args:
        chosen: the positions that a rule of the user's own drew.
        num_records: the number of records drawn from; no message tells it.

    Raises:
        ValueError: they are no integers [k], a position is not one of a record, or it stands there
            twice.
    """
    found = np.asarray(chosen)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(
            "sampling must draw positions as integers [k], got an array of "
            f"{found.dtype} with {found.ndim} axes"
        )
    if found.size and not (found.min() >= 0 and found.max() < num_records):
        raise ValueError("sampling must draw positions of records, from 0 on, got another one")
    if np.unique(found).size != found.size:
        raise ValueError(
            "sampling must draw a record at most once a step, got one that was drawn again: it "
            "would add more to the sum than its clip norm"
        )


def pad(
    chosen: np.ndarray, physical_batch_size: int, step: int, num_records: int, least: int = 0
) -> Draw:
    """The positions [k] as a read-only draw of as many physical batches as needed, at least one.

    Args:
        chosen: the positions.
        physical_batch_size: rows of each.
        step: of the draw.
        num_records: the number of records drawn from.
        least: rows that every draw has, however few it needs.
    """
    # Padding points at record 0 and is masked. A draw of nobody is one batch of padding.
    passes = max(1, -(-max(len(chosen), least) // physical_batch_size))
    dtype = np.int32 if num_records <= MOST_ON_DEVICE else np.int64
    indices = np.zeros(passes * physical_batch_size, dtype)
    indices[: len(chosen)] = chosen
    mask = np.arange(len(indices)) < len(chosen)
    indices.flags.writeable = mask.flags.writeable = False
    return Draw(indices.reshape(passes, -1), mask.reshape(passes, -1), step, num_records)
