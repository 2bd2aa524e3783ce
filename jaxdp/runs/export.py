"""Exporting the released parameters of a run."""

from pathlib import Path

import flax.serialization

from jaxdp._durable import StorageError
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.directory import RunDirectory
from jaxdp.types import PyTree


def export_params(directory: RunDirectory, target: Path) -> int:
    """Writes the parameters of the last checkpoint that was shown; returns their step.

    The parameters are a release that the ledger covers; nothing else of the checkpoint is written.
    A checkpoint that is not shown yet may still be lost, and its steps done again within their
    charge: nobody may see it.

    Raises:
        ValueError: there is no run or no checkpoint, or the target cannot be written.
    """
    shown = directory.load_state().shown
    found = _found(directory, shown)
    if found is None:
        raise ValueError(
            f"run must have a checkpoint that was shown to export, got {directory.path}, which has "
            "none yet; after a crash --resume shows it"
        )
    step, params = found
    try:
        target.write_bytes(flax.serialization.to_bytes(params))
    except OSError as error:
        raise ValueError(f"--to must be a file to write, got {target}: {error}") from error
    return step


def _found(directory: RunDirectory, shown: int, again: bool = True) -> tuple[int, PyTree] | None:
    """Step and parameters of the last checkpoint up to ``shown``, or None."""
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        return checkpoints.params(shown)
    except StorageError:
        # A run that goes on meanwhile may just have replaced the one that was read.
        if not again:
            raise
    finally:
        checkpoints.close()
    return _found(directory, directory.load_state().shown, again=False)
