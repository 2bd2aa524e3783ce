"""Checkpoints by orbax: parameters, optimizer state and history."""

import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxdp.devices import processes
from jaxdp.ledger.durable import StorageError, sync_directory
from jaxdp.ledger.interrupts import deferred
from jaxdp.runs.directory import Row
from jaxdp.runs.files import AGAIN, broken_seal, first_line, make_private, private, remedy, seal
from jaxdp.training.trainer import TrainState
from jaxdp.types import PyTree, filled

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

logging.getLogger("absl").addFilter(lambda record: record.levelno >= logging.CRITICAL)

_SEAL = "digests.json"
_COMMITTED = "commit_success.txt"
# What orbax writes after the seal: the time of the commit, and that it was one.
_CHANGING = ("_CHECKPOINT_METADATA", _COMMITTED)
_UNFINISHED = "*.orbax-checkpoint-tmp*"

Restored = tuple[TrainState, list[Row]]
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

    Parameters that are not trained are in none: whoever goes on hands them over again, and the
    run's state knows their hash. (Older folders hold them, beside the checkpoints.)

    Args:
        folder: where they lie; the two latest are kept.
        trained: from the parameters to the same with None where they are not trained.
    """

    def __init__(self, folder: Path, trained: Callable[[PyTree], PyTree] = lambda params: params):
        self._folder, self._trained = folder.absolute(), trained
        self._frozen = self._folder.with_name("frozen")
        with private(), self._in_words():
            self._folder.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Imports and starts orbax, which the first ``save`` or ``restore`` would do."""
        with deferred(), self._in_words():
            _ = self._manager

    @functools.cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        """Orbax's manager, made at its first use."""
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

    def save(self, state: TrainState, history: list[Row]) -> None:
        """Begins to save the state under its step, with the history.

        Raises:
            StorageError: this or the checkpoint before it cannot be written.
        """
        self.wait()
        import orbax.checkpoint as ocp

        arrays = jax.tree.map(_copied, _stored(self._saved(state)))
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

    def restore(
        self,
        like: TrainState,
        give_up: Callable[[int], None] | None = None,
        usable: Callable[[TrainState, bool], bool] = lambda state, given_up: True,
    ) -> Restored | None:
        """The latest state that can be used and its history, or None before the first checkpoint.

        A checkpoint that its seal says is damaged, or that is not usable, is moved out of the way
        for one before it, with a line on stderr: the steps between them are then to be done again.
        Any other error (storage that is away, too many open files, no memory left on the host or
        the device) says nothing against a checkpoint: it is raised in words, and nothing is moved.

        Nothing is moved, nor given up, before the state is known that the run goes on from.

        Only for the writer, who holds the run's lock.

        Args:
            like: the state before the first step, which the run begins with where there is none.
            give_up: called with the last step of the checkpoints that cannot be read, before they
                are moved out of the way for one before them or for the beginning; None raises.
            usable: from a state, and whether one after it is given up, to whether it may be gone
                on from; raises where nothing may be.

        Raises:
            StorageError: a checkpoint cannot be read; it is of other parameters or another
                optimizer; there are checkpoints and none of them can be used.
        """
        if processes.count() > 1:
            _ = self._manager  # made by all together: process 0 needs it to move what is damaged

        # From the last checkpoint on to the first that is whole, can be read, and may be gone on
        # from. Process 0 looks for a whole one, and all read it: each takes its own shards.
        bad: list[_Bad] = []
        while True:
            step = self._latest_whole(give_up is not None, bad)
            if step is None:
                found = None
                break
            try:
                found = self._read(step, like)
            except Exception as error:  # tensorstore, zstd and orbax each have their own
                # In several processes one alone may have failed.
                if give_up is None or _is_unlike(error) or processes.count() > 1:
                    raise self._unread(step, error) from error
                bad.append(_Bad(step, _UNREAD, first_line(error)))
                continue
            if usable(found[0], any(each.what == _UNREAD for each in bad)):
                break
            bad.append(_Bad(step, _AGAIN, "its charge is another one's"))

        # Where no checkpoint can be used, the run begins anew only if its owner sets aside what
        # cannot be read; never where one holds steps that were done again since.
        lost = [each.step for each in bad if each.what == _UNREAD]
        if found is None:
            if bad and (give_up is None or any(each.what == _AGAIN for each in bad)):
                raise _none_is_usable(self._folder, bad)
            usable(like, bool(lost))

        # Only now, when it is known what the run goes on from, is anything written or moved.
        if lost and give_up is not None:
            give_up(max(lost))
        then = "from the beginning" if found is None else f"from the one of step {found[0].step}"
        self._put_aside(bad, then)
        return found

    def state(self, step: int, like: TrainState) -> TrainState | None:
        """The state of one step, shaped like another; None without a whole checkpoint of it.

        Nothing is moved, and no other checkpoint stands in for it.

        Raises:
            StorageError: it cannot be read, or is of other parameters or another optimizer.
        """
        if processes.count() > 1:
            _ = self._manager  # made by all together
        whole = processes.from_process_0(
            lambda: str(step in self._steps() and not self._damage(step))
        )
        if whole == "False":
            return None
        try:
            return self._read(step, like)[0]
        except Exception as error:
            raise self._unread(step, error) from error

    def params(self, last: int, trained: bool = False) -> tuple[int, bytes, PyTree] | None:
        """The latest step up to ``last`` that has a checkpoint, its past, its parameters as dicts.

        Of a run that averages its parameters, the average; with None in the place of those that
        are not trained, unless they lie beside it and ``trained`` is False. For readers: nothing is
        moved, and no older checkpoint stands in for one that cannot be read.

        Raises:
            StorageError: the checkpoint is damaged, or cannot be read.
        """
        step = max((s for s in self._steps() if s <= last), default=None)
        if step is None:
            return None
        if damage := self._damage(step):
            raise StorageError(
                f"the checkpoint of step {step} in {self._folder} must be whole to be read, got a "
                f"damaged one ({damage}). Put back a copy, or continue the run: it goes on from "
                "the checkpoint before, and charges the steps behind that one again"
            )
        try:
            return self._read_params(step, trained)
        except Exception as error:
            raise self._unread(step, error) from error

    def _latest_whole(self, passes: bool, bad: "list[_Bad]") -> int | None:
        """The latest step whose seal holds, as process 0 sees it; None without one.

        Args:
            passes: True counts a checkpoint that cannot be read among the bad ones.
            bad: those that are known to be; more are added.
        """

        def once() -> str:
            found: list[_Bad] = []
            for step in sorted(set(self._steps()) - {each.step for each in bad}, reverse=True):
                try:
                    damage, what = self._damage(step), _DAMAGED
                except StorageError as error:
                    if not passes:
                        raise
                    damage, what = first_line(error.__cause__ or error), _UNREAD
                if not damage:
                    return json.dumps([step, found])
                found.append(_Bad(step, what, damage))
            return json.dumps([None, found])

        step, found = json.loads(processes.from_process_0(once))
        bad += [_Bad(*each) for each in found]
        return None if step is None else int(step)

    def close(self) -> None:
        """Waits for what is being written, and releases the manager's threads."""
        with deferred():
            try:
                if self._in_use:  # a reader changes nothing
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
        return [] if processes.index() else list(self._folder.glob(pattern))

    def _steps(self) -> list[int]:
        try:
            return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except OSError as error:
            raise StorageError(
                f"{self._folder} must be a folder that can be listed, got {first_line(error)}. "
                f"Nothing was changed. {remedy(error)}, and start the same program again"
            ) from error

    def _damage(self, step: int) -> str:
        """A damaged file of a checkpoint, by its seal; "" if it is whole, or has no seal.

        Raises:
            StorageError: its files cannot be read, which is no damage.
        """
        folder = self._folder / str(step)
        try:
            file = broken_seal(folder, _SEAL, _CHANGING)
            if file and file != _SEAL and _has_digest(folder, file):
                raise OSError(f"{folder} could not be listed")  # some Pythons leave out what fails
        except (TypeError, RecursionError):  # JSON, but no digests
            file = _SEAL
        except (OSError, MemoryError) as error:
            raise self._unread(step, error) from error
        return file

    def _unread(self, step: int, error: BaseException) -> StorageError:
        """The error, in words, of a checkpoint that cannot be read and is not known as damaged."""
        if _is_unlike(error):
            return StorageError(
                f"{self._folder} must hold checkpoints of these parameters and this optimizer, got "
                "whole ones of others: go on with those that the run was begun with, or start a "
                "new run in another folder, and count what ledger.jsonl holds as spent"
            )
        return StorageError(
            f"the checkpoint of step {step} in {self._folder} cannot be read here: "
            f"{first_line(error)}. Nothing says that it is damaged: it was left as it is, and "
            f"nothing was charged. {remedy(error)}, and start the same program again. If it stays "
            "unreadable, Run(..., set_aside_unreadable=True) or `jaxdp train --resume "
            "--set-aside-unreadable` moves it out of the way and charges its steps anew"
        )

    def _read_params(self, step: int, trained: bool) -> tuple[int, bytes, PyTree]:
        kept = arrays_on_host(self._folder / str(step) / "state")
        if fills := not trained and self._frozen.exists():
            if file := broken_seal(self._frozen, _SEAL, _CHANGING):
                raise OSError(f"{self._frozen} is damaged ({file})")
            frozen = arrays_on_host(self._frozen)["params"]
        average = _named("average_of_params", kept["opt_state"])
        params = kept["params"] if average is None else average
        if fills:
            params = with_missing(params, frozen)
        return step, np.asarray(kept["past"], np.uint32).tobytes(), params

    def _read(self, step: int, like: TrainState) -> Restored:
        import orbax.checkpoint as ocp

        saved = self._saved(like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _stored(saved))
        with ocp.StandardCheckpointer() as reader:
            described = reader.metadata(self._folder / str(step) / "state").item_metadata
        if described is None:
            raise OSError("its description is missing or cannot be read")
        kept = described.tree
        # Before orbax reads: where one of its readers fails, the others are not ended in order.
        if _kinds(kept) != _kinds(abstract):
            raise ValueError("shapes and types do not match")
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),
            history=ocp.args.JsonRestore(),
        )
        loaded = self._manager.restore(step, args=args)
        arrays = jax.tree.map(_or_empty, _arrays(saved), loaded["state"])
        params = filled(arrays["params"], like.params)
        state = TrainState(params, arrays["opt_state"], step, np.asarray(arrays["past"]))
        return state, loaded["history"]

    def _saved(self, state: TrainState) -> TrainState:
        """The state that a checkpoint holds, without what is not trained."""
        return state._replace(params=self._trained(state.params))

    def _put_aside(self, bad: "list[_Bad]", then: str) -> None:
        """Moves checkpoints out of the way, in process 0; all others go on when it has.

        Args:
            bad: the checkpoints.
            then: how the run goes on, in words.
        """
        if not bad:
            return

        def once() -> str:
            for step, what, reason in bad:
                target = _free(self._folder.with_name(f"damaged-checkpoint-{step}"))
                (self._folder / str(step)).rename(target)
                print(
                    f"jaxdp: the checkpoint of step {step} {what} ({reason}; now {target}): going "
                    f"on {then}",
                    file=sys.stderr,
                )
            return ""

        with self._in_words():
            processes.from_process_0(once)
            self._manager.reload()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            safe = "those that were written are whole"
            with suppress(StorageError):
                last = max(self._steps(), default=None)
                safe = "none was written yet" if last is None else f"that of step {last} is whole"
            raise StorageError(
                f"{self._folder} must be a folder that checkpoints can be written to, got "
                f"{first_line(error)}. Of the checkpoints {safe}, and the ledger holds every "
                f"charge. {remedy(error)}, and {AGAIN}"
            ) from error


def with_missing(params: PyTree, others: PyTree) -> PyTree:
    """The parameters, with those of ``others`` where they are None."""
    return jax.tree.map(
        lambda own, other: other if own is None else own,
        params,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


def arrays_on_host(folder: Path) -> PyTree:
    """Reads what orbax wrote to a folder, on any devices: dicts and lists of NumPy arrays."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        described = reader.metadata(folder).item_metadata
        if described is None:
            raise OSError("its description is missing or cannot be read")
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described.tree)
        return reader.restore(folder, restore_args=as_numpy)


class _Bad(NamedTuple):
    """A checkpoint that cannot be gone on from: its step, and why, in words."""

    step: int
    what: str
    reason: str


_DAMAGED, _UNREAD = "is damaged", "cannot be read"
_AGAIN = "holds steps that were done again since"


def _is_unlike(error: BaseException) -> bool:
    """True where a whole checkpoint is of another model or optimizer."""
    return any(words in str(error) for words in _UNLIKE)


def _none_is_usable(folder: Path, bad: list[_Bad]) -> StorageError:
    reasons = "; ".join(f"step {step}: {what}, {reason}" for step, what, reason in bad)
    remedy = (
        "otherwise begin again in this folder with Run(..., set_aside_unreadable=True) or `jaxdp "
        "train --resume --set-aside-unreadable`"
    )
    if any(each.what == _AGAIN for each in bad):
        remedy = "otherwise move it away, and the run begins again, with every step charged anew"
    return StorageError(
        f"{folder} must hold a checkpoint that the run can go on from, but none is whole and "
        f"usable ({reasons}). Put back the checkpoints that the run left, or a copy of them; "
        f"{remedy}, or begin another run, and count what ledger.jsonl holds as spent"
    )


def _has_digest(folder: Path, file: str) -> bool:
    """True if the file is there, as it was when it was sealed.

    Raises:
        OSError: it is there and cannot be read.
    """
    kept = json.loads((folder / _SEAL).read_text(encoding="utf-8"))[file]
    try:
        with (folder / file).open("rb") as content:
            digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return bool(digest.hexdigest() == kept)


def _free(path: Path) -> Path:
    """The path, with a number behind it where that is taken: nothing put aside is overwritten."""
    tries = (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 1_000)))
    return next(each for each in tries if not each.exists())


def _arrays(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "past": np.asarray(state.past)}


def _stored(state: TrainState) -> dict[str, Any]:
    """The arrays as orbax takes them: one number stands for each array without any.

    Such as the buffers of noise that looks back at no step.
    """
    return jax.tree.map(
        lambda leaf: leaf if np.size(leaf) else np.zeros(1, leaf.dtype), _arrays(state)
    )


def _named(name: str, tree: PyTree) -> Any:
    """The first part of that name in a tree of dicts and lists; None without one."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        tree = list(tree.values())
    found = (_named(name, part) for part in tree) if isinstance(tree, list | tuple) else ()
    return next((part for part in found if part is not None), None)


def _or_empty(like: ArrayLike, loaded: ArrayLike) -> Any:
    return loaded if np.size(like) else like


def _copied(leaf: np.ndarray | jax.Array) -> Any:
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
