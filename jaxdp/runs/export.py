"""Exporting the released parameters of a run."""

from pathlib import Path

import flax.serialization
import jax

from jaxdp.runs.assemble import first_state
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory, secret_from_dict


def export_params(directory: RunDirectory, target: Path) -> int:
    """Writes the parameters of the last checkpoint to ``target``; returns their step.

    The parameters are a release that the ledger covers; nothing else of the checkpoint is written.

    Raises:
        ValueError: there is no run or no checkpoint, or the target cannot be written.
    """
    state = directory.load_state()
    config = RunConfig(**state["config"])
    secret = secret_from_dict(state["secret"])
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        found = checkpoints.restore(first_state(config, secret))
    finally:
        checkpoints.close()
    if found is None:
        raise ValueError(f"run must have a checkpoint to export, got {directory.path}")
    try:
        target.write_bytes(flax.serialization.msgpack_serialize(jax.device_get(found[0].params)))
    except OSError as error:
        raise ValueError(f"--to must be a file to write, got {target}: {error}") from error
    return found[0].step
