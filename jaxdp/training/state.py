"""The state of training, and what a step says to a state that no step returned."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.clipping.options import is_donated
from jaxdp.devices import processes, shards
from jaxdp.devices.placement import Placement
from jaxdp.ledger import Ledger
from jaxdp.ledger.returned import copy_past, find_past
from jaxdp.noise.correlated import check_step_follows
from jaxdp.types import PyTree


class TrainState(NamedTuple):
    """The state of training; as private as the parameters that it holds.

    Attributes:
        params: pytree of parameters: the released model.
        opt_state: state of the optimizer.
        step: how many steps were taken.
        past: uint32 [4]; the head of the ledger that holds these steps. A trainer whose ledger does
            not hold them refuses the state.
    """

    params: PyTree
    opt_state: PyTree
    step: Any
    past: Any

    def __deepcopy__(self, memo: Any) -> "TrainState":
        if is_donated(self):
            raise ValueError(
                "state must be copied before a step reuses its memory, got one that a step has "
                "taken: kept = copy.deepcopy(state) comes before trainer.step(state, batch)"
            )
        copied = TrainState(*copy.deepcopy(tuple(self), memo))
        copy_past((self.params, self.opt_state), (copied.params, copied.opt_state))
        return copied


_BY_THE_CALLER = (
    "{} were replaced between steps by the caller: assumed public, or computed from noisy releases "
    "alone"
)
_RESTORED = (
    "steps went on from a state that no step had returned (restored from a file, copied other than "
    "by copy.deepcopy, or made by hand): that it is one that a step returned, unchanged, was not "
    "verified"
)
STARTED_AGAIN = (
    "parameters were given to init after steps had been taken: assumed public, or computed from "
    "noisy releases alone"
)


def check_state(state: Any, ledger: Ledger, step: int | None = None) -> None:
    """Raises ValueError for a state that a trainer of this ledger cannot go on from.

    Args:
        state: of the caller.
        ledger: must hold the releases that led to it.
        step: drawn, where its noise goes on from that of the step before; else None.

    Raises:
        ValueError: it is no state, one whose memory a step has reused, after another number of
            steps, or trained under another ledger.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            "state must be a TrainState, from trainer.init(params) or the step before, "
            f"state, info = trainer.step(state, batch); got {type(state).__name__}"
        )
    if is_donated(state):
        leaves = jax.tree_util.tree_leaves_with_path(state._replace(step=None, past=None))
        gone = [path for path, leaf in leaves if is_donated(leaf)]
        if len(gone) < len(leaves):
            # A part of a state before in a later one, as of a network that another loss trains.
            name = f"state{jax.tree_util.keystr(gone[0])}"
            raise ValueError(
                f"{name} must be an array that is there, got one whose memory a step has reused, "
                "in a state whose other parts are there: steps reuse the memory of the whole state "
                "that they are given, frozen parameters too. Take what you replace from the state "
                f"that the last step returned, {name}; or keep a copy from before it, jnp.copy(...)"
            )
        raise ValueError(
            "state must be the one that the step before returned, got one whose memory that "
            "step has reused: write state, info = trainer.step(state, batch). To come back to "
            "a state later keep copy.deepcopy(state)"
        )
    if step is not None:
        check_step_follows(step, int(state.step))
    if not ledger.holds(np.asarray(state.past, np.uint32).tobytes()):
        raise ValueError(
            "state must be one whose past the ledger holds, got one that was trained under "
            "another ledger: what was released before would not count. Give the trainer that "
            "ledger, Trainer(..., ledger=path); or start from the parameters alone, "
            "trainer.init(state.params), where their training is accounted for elsewhere"
        )


def unknown_arrays(tree: PyTree, ledger: Ledger, start: bytes) -> list[Any]:
    """The arrays of a tree that are neither a trainer's own start nor releases in its ledger."""
    heads: dict[bytes | None, bool] = {None: False, start: True}
    unknown = []
    for leaf in jax.tree.leaves(tree):
        if (past := find_past(leaf)) not in heads:
            heads[past] = ledger.holds(past or b"")
        if not heads[past]:
            unknown.append(leaf)
    return unknown


def describe_replaced(
    state: TrainState, ledger: Ledger, start: bytes, trained: Callable[[PyTree], PyTree]
) -> list[str]:
    """Sentences on arrays of a state that no step returned; [] if there are none.

    Arrays are told by identity alone: nothing is read, and nothing waits for the device. Frozen
    ones are named by what every sum assumes (``losses.note_assumed``).

    Args:
        state: of the caller.
        ledger: must hold the releases that an array was computed from.
        start: what the trainer's own ``init`` gave its arrays out with.
        trained: from the parameters to the same with None at frozen leaves.
    """
    unknown = unknown_arrays((state.params, state.opt_state), ledger, start)
    if not unknown:
        return []
    leaves = jax.tree.leaves((state.params, state.opt_state))
    if len(unknown) == len(leaves):
        return [_RESTORED]
    missing = {id(leaf) for leaf in unknown}
    known = [id(leaf) not in missing for leaf in leaves]
    structure: Any = jax.tree.structure(state.params)
    is_trained = [kept is not None for kept in structure.flatten_up_to(trained(state.params))]
    found = {
        "trained parameters": (True, False) in zip(is_trained, known, strict=False),
        "arrays of the optimizer's state": not all(known[len(is_trained) :]),
    }
    return [_BY_THE_CALLER.format(what) for what, is_found in found.items() if is_found]


def agree_on_layout(params: PyTree, grad_fn: Any, place: Placement | None, rows: Any) -> None:
    """Compares between processes what decides which rows each works on, and what they exchange.

    Args:
        params: before the first step.
        grad_fn: the clipped gradient, which knows what is trained.
        place: where they lie; None for one device.
        rows: the physical batch size; True where it is still to be chosen.

    Raises:
        ValueError: processes disagree.
    """
    if processes.count() == 1:
        return
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), grad_fn.trained(params))
    processes.agree(
        params=shards.hashed(params),
        trainable=f"{jax.tree.structure(shapes)} {shapes}",
        mesh=None if place is None else shards.described(place.mesh),
        data_axes=place and (place.rows, place.records, place.leaves),
        physical_batch_size=rows,
    )
