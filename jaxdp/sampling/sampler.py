"""The sampler: draws each step's records, after the step was charged."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from jaxdp import _rows, arguments
from jaxdp._issuer import Issuer
from jaxdp.sampling.rules import (
    EpochSampling,
    Identities,
    RunSampling,
    Sampling,
    StepSampling,
    steps_of_a_block,
)
from jaxdp.types import Draw

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


class Sampler:
    """Draws the records of one step after the other, each charged before it is drawn.

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
    """

    def __init__(
        self,
        sampling: Sampling,
        num_records: int,
        physical_batch_size: int,
        issuer: Issuer,
        identities: Callable[[], Identities] | None = None,
    ):
        arguments.integer("num_records", num_records, least=0)
        if num_records > _rows.MOST_RECORDS:
            raise ValueError("num_records must be at most 2**53, got more")
        self.cut_into(physical_batch_size)
        charged = getattr(issuer.mechanism, "sampling", sampling)
        if charged != sampling:
            raise ValueError(
                f"sampling must be the one that the issuer charges, {charged}, got {sampling}: "
                "take mechanism.sampler(...) of the mechanism"
            )
        declared = getattr(issuer.mechanism, "dataset_size", num_records)
        if steps_of_a_block(sampling, num_records) != steps_of_a_block(sampling, declared):
            raise ValueError(
                f"num_records must be the declared dataset_size ({declared}), got {num_records}"
            )
        # Asked once: Python takes as long to compare a rule with a protocol as to make a draw.
        self._by_step = isinstance(sampling, StepSampling)
        self._by_run = isinstance(sampling, RunSampling)
        if self._by_run:
            sampling.check(num_records, declared)
        self._sampling, self._num_records, self._issuer = sampling, num_records, issuer
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

    def cut_into(self, physical_batch_size: int | str) -> None:
        """Cuts the draws to come into physical batches of so many rows; the draws stay the same."""
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
        ledger: Ledger = self._issuer.ledger
        return ledger

    @property
    def step(self) -> int:
        """The next step to be drawn."""
        return self._issuer.step

    def draw(self, until: int | None = None) -> Draw:
        """Charges the next step, draws its records, and advances.

        Args:
            until: steps from this one on are not charged ahead.

        Raises:
            ValueError: the step cannot be charged, or, of a run with correlated noise, records not
                be told apart; nothing is charged then.
        """
        rule, arranged = self._sampling, None
        if self._by_run:  # before anything is charged: it may be refused
            # The arrangement of the records is one for the whole run: that of the first sampler.
            whole = cast(RunSampling, rule)
            if self._issuer.arranged is None:
                known = None if self._identities is None else self._identities()
                rng = self._issuer.generator(whole.block(self._num_records))
                self._issuer.arranged = self, whole.arrange(rng, self._num_records, known)
            owner, arranged = self._issuer.arranged
            if owner is not self:
                raise ValueError(
                    "sampler must be the only one of a run with correlated noise, got a second one "
                    "of its issuer: its records could be in other groups"
                )
        ticket = self._issuer.issue(until)
        if until is None:
            self._issuer.handed_out(ticket.step)

        if self._by_step:
            step = cast(StepSampling, rule)
            chosen = step.choose(ticket.generator(), self._num_records)
        elif arranged is not None:
            whole = cast(RunSampling, rule)
            chosen = whole.of_step(arranged, ticket.step, ticket.generator())
        else:
            epochs = cast(EpochSampling, rule)
            size = epochs.block(self._num_records)
            number, place = divmod(ticket.step, size)
            known_number, batches = self._epoch  # at once: threads may draw
            if known_number != number:
                # From the epoch's own randomness: its first steps may have been drawn elsewhere.
                batches = epochs.epoch(ticket.generator(size), self._num_records)
                self._epoch = number, batches
            chosen = batches[place]

        least = getattr(rule, "cap", 0)
        padded = pad(chosen, self._physical_batch_size, ticket.step, self._num_records, least)
        return padded.drawn_by(ticket)

    def close(self, unused: int = 0) -> None:
        """Gives back to the ledger what was charged ahead, and the last ``unused`` draws.

        Args:
            unused: the number of draws, the last ones made, that nobody saw.
        """
        self._issuer.close(unused)

    def __repr__(self) -> str:
        return f"Sampler({self._sampling!r}, step={self.step})"


def pad(
    chosen: np.ndarray, physical_batch_size: int, step: int, num_records: int, least: int = 0
) -> Draw:
    """The positions [k] as a draw of as many physical batches as they need, at least one.

    Args:
        chosen: the positions.
        physical_batch_size: rows of each.
        step: of the draw.
        num_records: the number of records drawn from.
        least: rows that every draw has, however few it needs.
    """
    passes = max(1, -(-max(len(chosen), least) // physical_batch_size))
    indices = np.zeros(passes * physical_batch_size, _rows.position_dtype(num_records))
    indices[: len(chosen)] = chosen
    mask = np.zeros(len(indices), bool)
    mask[: len(chosen)] = True
    shape = (passes, physical_batch_size)
    return Draw(indices.reshape(shape), mask.reshape(shape), step, num_records)
