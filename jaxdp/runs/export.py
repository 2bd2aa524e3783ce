"""Exporting the released parameters of a run."""

from pathlib import Path

import flax.serialization

from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.ledger import Shown
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.directory import RunDirectory
from jaxdp.types import PyTree


def export_params(directory: RunDirectory, target: Path) -> int:
    """Writes the parameters of the last checkpoint that was shown; returns their step.

    The parameters are a release that the ledger covers; nothing else of the checkpoint is written.
    A checkpoint that is not shown yet may still be lost, and its steps done again within their
    charge: nobody may see it.

    Nothing of the run's folder is changed, and no older checkpoint stands in for one that is
    damaged, missing or cannot be read.

    Raises:
        ValueError: there is no run or no checkpoint, or the last one cannot be read; the target
            cannot be written.
    """
    step, params = shown_params(directory.latest)
    try:
        target.write_bytes(flax.serialization.to_bytes(params))
    except OSError as error:
        raise ValueError(f"--to must be a file to write, got {target}: {error}") from error
    return step


def shown_params(directory: RunDirectory, again: bool = True) -> tuple[int, PyTree]:
    """Step and parameters of the last checkpoint that was shown; nothing is written.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    shown = directory.last_shown()
    if directory.stage and (shown is None or not shown.step):  # it begins with those before it
        stages = [each.stage for each in directory.stages()]
        return shown_params(directory.stages()[stages.index(directory.stage) - 1])
    before = directory.load_state().before or 0
    if not directory.checkpoints.is_dir():  # a reader makes no folder
        raise _missing(directory, shown, None)
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        found = checkpoints.params(0 if shown is None else shown.step)
        # The step alone may be that of another state, which nobody has seen. Lines of format 2 name
        # no more.
        if found and shown and found[0] == shown.step and shown.past in (None, found[1]):
            return before + found[0], found[2]
        if not again:
            raise _missing(directory, shown, found)
    except StorageError:
        # A run that goes on meanwhile may just have replaced the one that was read.
        if not again:
            raise
    finally:
        checkpoints.close()
    return shown_params(directory, again=False)


def _missing(
    directory: RunDirectory, shown: Shown | None, found: tuple[int, bytes, PyTree] | None
) -> ValueError:
    if shown is None or not shown.step:
        return ValueError(
            f"run must have a checkpoint that was shown to export, got {directory.path}, which has "
            "none yet; after a crash --resume shows it"
        )
    before = "none before it" if found is None else f"the one of step {found[0]}"
    if found is not None and found[0] == shown.step:
        before = "one of this step that its ledger does not name as shown (--resume shows it)"
    return ValueError(
        f"run must have the checkpoint of step {shown.step}, the last that was shown, to export, "
        f"got {directory.path} with {before}: put back a copy, or continue the run, which charges "
        "what is lost again"
    )
