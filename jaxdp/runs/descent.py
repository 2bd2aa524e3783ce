"""The checkpoint that a run goes on from, and its stream; docs/releases.md, "Runs"."""

import enum
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.devices import processes
from jaxdp.mechanism import Mechanism
from jaxdp.runs.directory import number_of
from jaxdp.training.trainer import TrainState

if TYPE_CHECKING:
    from jaxdp.runs.run import Started


class Going(enum.Enum):
    """The uses that a run has for a state."""

    ON = "goes on in its stream, within what it holds"
    ANEW = "begins a new stream, in which every further step is charged anew"
    NOT = "holds steps that were done again since"


def past_of(state: TrainState) -> bytes:
    """The head of the ledger that holds the releases behind a state."""
    return np.asarray(state.past, np.uint32).tobytes()


def agreed(
    run: "Started", state: TrainState, mechanism: Mechanism, given_up: bool = False
) -> Going:
    """``going``, as process 0 sees it."""
    return Going[processes.from_process_0(lambda: going(run, state, mechanism, given_up).name)]


def going(run: "Started", state: TrainState, mechanism: Mechanism, given_up: bool = False) -> Going:
    """The use that the run has for the state of a checkpoint, or for that before the first step.

    It goes on only from a state that descends from the one that was shown last, so that of each
    step of a stream one version at most is ever visible; a new stream begins only at a state that
    was shown itself.

    Args:
        run: the run.
        state: the state.
        mechanism: of the run.
        given_up: True if its owner sets a later state aside, which nobody could read.

    Raises:
        ValueError: the ledger lacks charges behind the state, or the steps behind it cannot be
            charged once more.
    """
    past, ledger, streams = past_of(state), run.ledger, run.streams
    if not ledger.holds(past) or (given_up and not streams):
        raise ValueError(
            f"{run.directory.ledger} must hold every charge of the last checkpoint, but some are "
            "missing: what was released can no longer be accounted for"
        )
    if not given_up and _descends(run, state, mechanism):
        return Going.ON
    of_before = ledger.renewed and not ledger.holds(past, since=ledger.renewed)
    shown = any(ledger.was_shown(stream, state.step, past) for stream in streams)
    if state.step and not of_before and not shown:
        return Going.NOT
    _check_tail(mechanism, state.step, str(run.directory.path))
    return Going.ANEW


def _descends(run: "Started", state: TrainState, mechanism: Mechanism) -> bool:
    """True if a state is the one that was shown last, or was made from it."""
    if not run.streams:
        return True
    past, last = past_of(state), run.ledger.shown(run.stream)
    if last is not None and last.past is not None:
        made = state.step >= last.step and run.ledger.holds(past, since=last.start)
        return made or (state.step, past) == (last.step, last.past)
    # Of format 2, whose lines name no states.
    if state.step < max(run.state.shown, last.step if last else 0):
        return False
    number = number_of(run.name, run.stream)
    if mechanism.strategy is None or not number:
        return True
    if run.state.branch is None or run.state.lost < number:  # older than the ledger
        return False
    start, since = map(bytes.fromhex, run.state.branch)
    return past == start or run.ledger.holds(past, since)


def began_since(run: "Started", state: TrainState) -> bool:
    """True if the run's stream began after a state was made, of steps that others had shown."""
    first = run.ledger.first_shown(run.stream)
    return (
        bool(number_of(run.name, run.stream))
        and first is not None
        and not run.ledger.holds(past_of(state), since=first.start)
    )


def _check_tail(mechanism: Mechanism, step: int, folder: str) -> None:
    """Raises ValueError if the steps from ``step`` on cannot be charged once more."""
    if mechanism.strategy is not None and not getattr(mechanism.sampling, "tail_again", False):
        raise ValueError(
            f"the checkpoint must hold all steps that were shown, got one after {step}: steps with "
            "correlated noise that is amplified by sampling cannot be repeated, for no bound is "
            f"proven. Put back the last checkpoint of {folder}, or begin another run, whose cost "
            "adds to this one's"
        )
