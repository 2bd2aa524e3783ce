"""The checkpoint that a run goes on from, and its stream; docs/releases.md, "Runs"."""

import enum
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.devices import processes
from jaxdp.mechanism import Mechanism
from jaxdp.trainer import TrainState

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


def going(run: "Started", state: TrainState) -> Going:
    """The use that the run has for the state of a checkpoint.

    It goes on only from a state that descends from the one that was shown last, so that of each
    step of a stream one version at most is ever visible; a new stream begins only at a state that
    was shown itself.

    Raises:
        ValueError: the ledger lacks charges behind the state.
    """
    past, ledger, streams = past_of(state), run.ledger, run.streams
    if not ledger.holds(past):
        raise ValueError(
            f"{run.directory.ledger} must hold every charge of the last checkpoint, but some are "
            "missing: what was released can no longer be accounted for"
        )
    last = ledger.shown(streams[-1]) if streams else None
    if last is None or last.past is None:  # a new run, or one of format 2
        return Going.ON if _as_before(run, state) else Going.ANEW
    if (state.step, past) == (last.step, last.past):
        return Going.ON
    if state.step >= last.step and ledger.holds(past, since=last.start):
        return Going.ON
    of_before = ledger.renewed and not ledger.holds(past, since=ledger.renewed)
    if of_before or any(ledger.was_shown(stream, state.step, past) for stream in streams):
        return Going.ANEW
    return Going.NOT


def _as_before(run: "Started", state: TrainState) -> bool:
    """True if a run of format 2 goes on in its stream from a state: its lines name no states."""
    if not run.streams:
        return True
    last = run.ledger.shown(run.streams[-1])
    if state.step < max(run.state.shown, last.step if last else 0):
        return False
    if run.state.branch is None:
        return True
    start, since = map(bytes.fromhex, run.state.branch)
    return past_of(state) == start or run.ledger.holds(past_of(state), since)


def agreed(run: "Started", state: TrainState) -> Going:
    """``going``, as process 0 sees it."""
    return Going[processes.first(lambda: going(run, state).name)]


def check_tail(mechanism: Mechanism, step: int, folder: str) -> None:
    """Raises ValueError if the steps from ``step`` on cannot be charged once more."""
    if mechanism.strategy is not None and not getattr(mechanism.sampling, "tail_again", False):
        raise ValueError(
            f"the checkpoint must hold all steps that were shown, got one after {step}: steps with "
            "correlated noise that is amplified by sampling cannot be repeated, for no bound is "
            f"proven. Put back the last checkpoint of {folder}, or begin another run, whose cost "
            "adds to this one's"
        )
