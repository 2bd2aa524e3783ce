"""Checkpoints by orbax: parameters, optimizer state and history."""

import functools
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from jaxdp import _processes
from jaxdp._durable import StorageError, broken_seal, make_private, private, seal, sync_directory
from jaxdp._interrupts import deferred
from jaxdp.trainer import TrainState
from jaxdp.types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

logging.getLogger("absl").addFilter(lambda record: record.levelno >= logging.CRITICAL)

_SEAL = "digests.json"
_COMMITTED = "commit_success.txt"
# What orbax writes after the seal: the time of the commit, and that it was one.
_CHANGING = ("_CHECKPOINT_METADATA", _COMMITTED)
_UNFINISHED = "*.orbax-checkpoint-tmp*"

Restored = tuple[TrainState, list[dict[str, Any]]]
Found = TypeVar("Found")
# What orbax says of a whole checkpoint of another model or optimizer.
_UNLIKE = ("do not match", "not compatible with the stored")


class Checkpoints:
    """The checkpoints of one run; **secret**: they hold what nobody may see yet.

    ``save`` returns once the state is copied, and orbax's threads write it. Whoever shows what
    a checkpoint holds calls ``wait`` first. A signal waits for a checkpoint that has begun.

    Files are private without touching the process's umask while threads write: they lie in a folder
    of mode 0700 that was there before them, and have their own mode (0600), are on disk and have
    their digests written down before orbax gives the checkpoint its final name. Only the empty sign
    of that name's commit is orbax's own, until ``wait``.

    Args:
        folder: where they lie; the two latest are kept.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        with private():
            self._folder.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Imports and starts orbax, which the first ``save`` or ``restore`` would do."""
        with deferred(), self._in_words():
            _ = self._manager

    @functools.cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        # Imported here: a run that begins need not wait for it before its first step.
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            create=True,
            file_options=ocp.options.FileOptions(path_permission_mode=0o700),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._seal, create_directories_asynchronously=False
            ),
        )
        with private():
            return ocp.CheckpointManager(self._folder, options=options)

    @property
    def _in_use(self) -> bool:
        return "_manager" in self.__dict__

    def save(self, state: TrainState, history: list[dict[str, Any]]) -> None:
        """Begins to save the state under its step, with the history.

        Raises:
            StorageError: this or the checkpoint before it cannot be written.
        """
        self.wait()
        import orbax.checkpoint as ocp

        arrays = jax.tree.map(_copied, _stored(state))
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            history=ocp.args.JsonSave([dict(row) for row in history]),
        )
        with deferred(), self._in_words():
            for left in self._mine(_UNFINISHED):  # by a crash, or a disk that was full
                shutil.rmtree(left)
            with private():
                self._manager.save(state.step, args=args)

    def wait(self) -> None:
        """Returns once what was saved is durable.

        Raises:
            StorageError: it cannot be written; the checkpoints before it are whole.
        """
        if not self._in_use:
            return
        with deferred(), self._in_words():
            self._manager.wait_until_finished()
            for mark in self._mine(f"*/{_COMMITTED}"):  # which says no more than its name
                mark.chmod(0o600)
            sync_directory(self._folder)

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._in_use and bool(self._manager.is_saving_in_progress())

    def durable_step(self) -> int | None:
        """The latest step whose checkpoint is whole and on disk; None before the first."""
        sync_directory(self._folder)
        return max(self._steps(), default=None)

    def restore(self, like: TrainState) -> Restored | None:
        """The latest undamaged state and its history, or None before the first checkpoint.

        A damaged checkpoint is moved out of the way, with a line on stderr, if one before it is
        whole: the steps between them are then to be done again.

        Args:
            like: a state of the same structure, such as a fresh one.

        Raises:
            StorageError: there are checkpoints and none of them is whole.
        """
        return self._latest(lambda step: self._read(step, like))

    def params(self, last: int) -> tuple[int, PyTree] | None:
        """The latest whole step up to ``last`` and its parameters as dicts; see ``restore``.

        Of a run that averages its parameters, the average.
        """
        return self._latest(self._read_params, last)

    def _latest(self, read: Callable[[int], Found], last: int | None = None) -> Found | None:
        if _processes.count() == 1:
            return self._latest_of_one(read, last)
        _ = self._manager  # made by all together: process 0 needs it to put aside what is damaged
        # The checkpoint that process 0 finds whole, read by all: each takes its own shards.
        found = _processes.first(lambda: str(self._latest_of_one(lambda step: step, last) or ""))
        if _processes.index():
            self._manager.reload()  # what process 0 put aside is to be saved again, by all
        return read(int(found)) if found else None

    def _latest_of_one(self, read: Callable[[int], Found], last: int | None = None) -> Found | None:
        steps = sorted((s for s in self._steps() if last is None or s <= last), reverse=True)
        damaged: list[tuple[int, str]] = []
        for step in steps:
            try:
                self._require_whole(step)
                found = read(step)
            except Exception as error:  # tensorstore, zstd and orbax each have their own
                damaged.append((step, _first_line(error)))
                continue
            self._put_aside([number for number, _ in damaged], step)
            return found
        if not damaged:
            return None
        if any(words in reason for _, reason in damaged for words in _UNLIKE):
            raise StorageError(
                f"{self._folder} must hold checkpoints of these parameters and this optimizer, got "
                "whole ones of others: go on with those that the run was begun with, or start a "
                "new run in another folder, and count what ledger.jsonl holds as spent"
            )
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged)
        raise StorageError(
            f"{self._folder} must hold a checkpoint that can be read, but none is whole ({reasons})"
            ". Put back a copy of the folder if there is one; otherwise start a new run in another "
            "folder, and count what ledger.jsonl holds as spent"
        )

    def close(self) -> None:
        """Waits for what is being written, and releases the manager's threads."""
        with deferred():
            try:
                if self._in_use:
                    self._manager.close()
                make_private(self._folder)
            except Exception:
                # `wait` raised it before, or what ended the run is of more interest.
                logging.getLogger(__name__).debug("closing", exc_info=True)

    def _seal(self) -> None:
        """Called by orbax's thread before the checkpoint gets its final name."""
        for folder in self._folder.glob(_UNFINISHED):
            seal(folder, _SEAL, _CHANGING)

    def _mine(self, pattern: str) -> list[Path]:
        """Files that this process has to tend: process 0 those of all."""
        return [] if _processes.index() else list(self._folder.glob(pattern))

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    def _require_whole(self, step: int) -> None:
        if file := broken_seal(self._folder / str(step), _SEAL, _CHANGING):
            raise ValueError(f"{file} is damaged")

    def _read_params(self, step: int) -> tuple[int, PyTree]:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as reader:
            kept = reader.restore(self._folder / str(step) / "state")
        average = _named("average_of_params", kept["opt_state"])
        return step, kept["params"] if average is None else average

    def _read(self, step: int, like: TrainState) -> Restored:
        import orbax.checkpoint as ocp

        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _stored(like))
        with ocp.StandardCheckpointer() as reader:
            kept = reader.metadata(self._folder / str(step) / "state").item_metadata.tree
        # Before orbax reads: where one of its readers fails, the others are not ended in order.
        if _kinds(kept) != _kinds(abstract):
            raise ValueError("shapes and types do not match")
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),
            history=ocp.args.JsonRestore(),
        )
        loaded = self._manager.restore(step, args=args)
        arrays = jax.tree.map(_or_empty, _arrays(like), loaded["state"])
        state = TrainState(arrays["params"], arrays["opt_state"], step, np.asarray(arrays["past"]))
        return state, loaded["history"]

    def _put_aside(self, steps: list[int], whole: int) -> None:
        for step in steps:
            target = self._folder.with_name(f"damaged-checkpoint-{step}")
            shutil.rmtree(target, ignore_errors=True)
            (self._folder / str(step)).rename(target)
            print(
                f"jaxdp: the checkpoint of step {step} is damaged (now {target}): going on from "
                f"the one of step {whole}, which is whole",
                file=sys.stderr,
            )
        if steps:
            self._manager.reload()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            last = max(self._steps(), default=None)
            safe = "none was written yet" if last is None else f"that of step {last} is whole"
            raise StorageError(
                f"{self._folder} must be a folder that checkpoints can be written to, got "
                f"{_first_line(error)}. Of the checkpoints {safe}, and the ledger holds every "
                "charge: make room and continue with --resume"
            ) from error


def _arrays(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "past": np.asarray(state.past)}


def _stored(state: TrainState) -> dict[str, Any]:
    """The arrays as orbax takes them: one number stands for each array without any.

    Such as the buffers of noise that looks back at no step.
    """
    return jax.tree.map(
        lambda leaf: leaf if np.size(leaf) else np.zeros(1, leaf.dtype), _arrays(state)
    )


def _named(name: str, tree: Any) -> Any:
    """The first part of that name in a tree of dicts and lists; None without one."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        tree = list(tree.values())
    found = (_named(name, part) for part in tree) if isinstance(tree, list | tuple) else ()
    return next((part for part in found if part is not None), None)


def _or_empty(like: Any, loaded: Any) -> Any:
    return loaded if np.size(like) else like


def _copied(leaf: Any) -> Any:
    """The array, copied where its memory is the host's.

    Orbax would write it from where it lies, and the next step, which reuses that memory, would wait
    until it is written.
    """
    if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return leaf
    devices: Any = leaf.sharding.device_set
    on_host = all(device.platform == "cpu" for device in devices)
    return jax.device_put(leaf, leaf.sharding, may_alias=False) if on_host else leaf


def _kinds(arrays: PyTree) -> list[str]:
    """Shape and type of every array, sorted."""
    return sorted(f"{leaf.shape} {np.dtype(leaf.dtype)}" for leaf in jax.tree.leaves(arrays))


def _first_line(error: BaseException) -> str:
    """The first line of what went wrong, without the sources of the library that found it."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    if "No space left" in str(error):
        return "a full disk (No space left on device)"
    return line.split(" [source locations=")[0][:200]
