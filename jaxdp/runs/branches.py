"""Branches of a run: a stream of its own wherever steps that were shown are done again."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.mechanism import Mechanism
from jaxdp.runs.state import RunState
from jaxdp.trainer import TrainState

if TYPE_CHECKING:
    from jaxdp.runs.run import Started


def begin(run: "Started", state: TrainState, mechanism: Mechanism) -> None:
    """Charges the steps to come anew where some that were shown are to be done again.

    With correlated noise each state that a run goes back to begins a branch, also one from before
    an earlier branch: its steps go on from the noise of its own past.

    Args:
        run: a ``Started``, whose state is changed and written.
        state: the ``TrainState`` that was restored.
        mechanism: of the gradient.

    Raises:
        ValueError: such steps cannot be charged, for no bound is proven; nothing is written.
    """
    whole, before = mechanism.strategy is not None, run.state
    if whole and (latest := _latest(run)) > run.state.lost:  # an older state was put back
        run.state = dataclasses.replace(run.state, lost=latest)
    while _to_be_left(run, state, before, whole):
        if whole:
            check_tail(mechanism, state.step, run.directory.path)
        run.state = dataclasses.replace(run.state, lost=run.state.lost + 1, shown=state.step)
    if run.state is before:
        return
    if whole:
        branch = (_past(state).hex(), run.ledger.head.hex())
        run.state = dataclasses.replace(run.state, branch=branch)
    run.directory.save_state(run.state)


def _latest(run: "Started") -> int:
    """The number of the last branch that the ledger holds a charge of; 0 for none."""
    streams = {entry.stream for entry in run.ledger.entries}
    numbers = (str(stream).removeprefix(f"{run.name}/") for stream in streams)
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _to_be_left(run: "Started", state: TrainState, before: RunState, whole: bool) -> bool:
    """True if the run's stream holds steps that the state has not behind it."""
    if state.step < max(run.state.shown, run.ledger.shown(run.stream)):
        return True
    if not whole or not run.state.lost:
        return False
    if run.state is not before:  # a new branch has a stream of its own
        return any(entry.stream == run.stream for entry in run.ledger.entries)
    if run.state.branch is None:
        return True
    start, since = map(bytes.fromhex, run.state.branch)
    return _past(state) != start and not run.ledger.holds(_past(state), since)


def _past(state: TrainState) -> bytes:
    return np.asarray(state.past, np.uint32).tobytes()


def check_given_up(mechanism: Mechanism) -> None:
    """Raises ValueError if steps cannot be charged once more, before a checkpoint is given up."""
    if mechanism.strategy is not None and not getattr(mechanism.sampling, "tail_again", False):
        raise ValueError(
            "set_aside_unreadable must be False with correlated noise that is amplified by "
            "sampling, got True: its steps cannot be repeated, for no bound is proven. Put back a "
            "checkpoint that can be read, or begin another run, whose cost adds to this one's"
        )


def check_tail(mechanism: Mechanism, step: int, path: Path) -> None:
    """Raises ValueError if steps that were shown, from ``step`` on, cannot be charged once more."""
    if not getattr(mechanism.sampling, "tail_again", False):
        raise ValueError(
            f"the checkpoint must hold all steps that were shown, got one after {step}: steps with "
            "correlated noise that is amplified by sampling cannot be repeated, for no bound is "
            f"proven. Put back the last checkpoint of {path}, or begin another run, whose cost "
            "adds to this one's"
        )
