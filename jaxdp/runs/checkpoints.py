"""Checkpoints by orbax: parameters, optimizer state with the noise key, curves and ledger."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxdp.ledger import Ledger
from jaxdp.train import TrainState

logging.getLogger("absl").addFilter(lambda record: record.levelno >= logging.ERROR)


class Checkpoints:
    """The checkpoints of one run; **secret**, for they hold the noise key.

    Saving is synchronous: the next block is charged only once the last one is safe, so that a
    replayed run writes the same ledger in the same order.

    Args:
        folder: where they lie; the two latest are kept.
    """

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: TrainState, history: list[dict[str, Any]], ledger: Ledger) -> None:
        """Saves the state under its step, with the curves and the ledger that covers it."""
        arrays = {"params": state.params, "opt_state": state.opt_state}
        self._manager.save(
            state.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                history=ocp.args.JsonSave(history),
                ledger=ocp.args.JsonSave(json.loads(ledger.to_json())),
            ),
        )

    def restore(
        self, like: TrainState
    ) -> tuple[TrainState, list[dict[str, Any]], Ledger] | None:
        """The latest state, its curves and its ledger, or None before the first checkpoint.

        Args:
            like: a state of the same structure, such as a fresh one.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, {"params": like.params, "opt_state": like.opt_state}
        )
        loaded = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                history=ocp.args.JsonRestore(),
                ledger=ocp.args.JsonRestore(),
            ),
        )
        arrays = loaded["state"]
        state = TrainState(arrays["params"], arrays["opt_state"], step)
        return state, loaded["history"], Ledger.from_json(json.dumps(loaded["ledger"]))

    def close(self) -> None:
        """Releases the manager's threads."""
        self._manager.close()
