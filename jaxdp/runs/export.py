"""Exporting the released parameters of a run, and loading them into a model again.

A file holds arrays by name and nothing else: no key, state, curve, or code. A name is the path of a
leaf in its pytree, joined by dots, such as ``params.Dense_0.kernel``. ``.safetensors`` keeps it so;
Flax's ``.msgpack`` and a folder of Orbax nest dicts by it, lists as {"0": ..., "1": ...}.
"""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp._extras import needed
from jaxdp.devices import processes, shards
from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.ledger import Shown
from jaxdp.runs.checkpoints import Checkpoints, arrays_on_host, with_missing
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.files import first_line, reading, write_bytes_atomically, writing
from jaxdp.types import PyTree

Only = Literal["trained"]

_ORBAX = (".orbax", "")
_ENDINGS = (".msgpack", ".safetensors", *_ORBAX)


def export_params(
    directory: RunDirectory,
    path: str | os.PathLike[str],
    params: PyTree = None,
    only: Only | None = None,
) -> int | None:
    """Writes the parameters of a run that were shown last; returns their step where it reads them.

    The parameters are a release that the ledger covers; nothing else of the checkpoint is written.
    A checkpoint that is not shown yet may still be lost, and its steps done again within their
    charge: nobody may see it.

    Nothing of the run's folder is changed, and no older checkpoint stands in for one that is
    damaged, missing or cannot be read. In several processes process 0 writes.

    Args:
        directory: of the run.
        path: a file that ends in ``.msgpack`` or ``.safetensors``, which is replaced all at once,
            or a new folder of Orbax, without an ending or with ``.orbax``.
        params: what ``fit`` returned, without what is frozen if the rest alone is asked for; None
            reads the last checkpoint that was shown.
        only: "trained" leaves out what ``trainable=`` froze; None writes all.

    Raises:
        ValueError: another ending; a path in ``secret/``; no run, or no checkpoint that was shown.
        StorageError: the path cannot be written, or the checkpoint cannot be read.
        MissingExtra: the package of that ending is not installed.
    """
    # Refused before any work.
    path = Path(path)
    ending = _ending_of(path)
    secret = directory.first.secret  # of all stages
    if secret.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(
            f"path must lie outside {secret}, which is for its owner alone and deleted "
            f"once the run is finished, got {path}"
        )
    if only not in (None, "trained"):
        raise ValueError(f'only must be "trained" or None, got {only!r}')
    if ending in _ORBAX and os.path.lexists(path):
        raise ValueError(f"path must be a new folder, got {path}, which is there already")
    if processes.count() > 1 and (params is None or ending in _ORBAX):
        raise ValueError(
            "path must end in .msgpack or .safetensors, and fit() have returned, to export in "
            f"several processes, got {path}: in one process `jaxdp export` writes every form"
        )

    step = None
    if params is None:
        step, params = shown_params(directory.latest, only)
        if only is None and lacks_frozen(directory):
            raise ValueError(
                f'only must be "trained" to export {directory.path} without its program, got None: '
                "what trainable= froze is not in a run's folder. jaxdp.load(path, like=params, "
                "partial=True) puts what was trained into the model; run.export writes both"
            )
    arrays = _arrays(shards.on_host(params))
    processes.from_process_0(lambda: _write(path, ending, arrays))
    return step


def load(path: str | os.PathLike[str], like: PyTree, *, partial: bool = False) -> PyTree:
    """The parameters that ``Run.export`` or ``jaxdp export`` wrote, in the structure of ``like``.

    Bit for bit, as JAX arrays; sharded where those of ``like`` are. Nothing in a file is executed.

    Args:
        path: as it was exported; its ending says how it is read.
        like: the model's parameters, split as the run trained them: arrays, or
            ``jax.ShapeDtypeStruct``, whose shapes and dtypes are compared. A leaf that is neither,
            such as a function in an Equinox module, stays as it is.
        partial: True where the file holds a part of ``like``, such as adapters; the rest stays.

    Raises:
        ValueError: the file lacks names of ``like``, holds others, or other shapes or dtypes; it is
            damaged or of another kind; another ending.
        StorageError: it is not there, or cannot be read.
        MissingExtra: the package of that ending is not installed.
    """
    return in_structure_of(like, _read(Path(path)), f"{path}", partial)


def in_structure_of(like: PyTree, arrays: PyTree, whence: str, partial: bool = False) -> PyTree:
    """Arrays, as dicts and lists or by joined names, in the structure of ``like``; see ``load``."""
    found = {".".join(name): array for name, array in _arrays(arrays).items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    loaded: list[Any] = []
    wrong: list[str] = []
    for keys, leaf in leaves:
        name, dtype = ".".join(_name(keys)), getattr(leaf, "dtype", None)
        array = found.pop(name, None)
        if array is None:
            if dtype is not None and (not partial or isinstance(leaf, jax.ShapeDtypeStruct)):
                wrong.append(f"{name} is in like alone")
            loaded.append(leaf)
            continue

        # A number of Python's has no dtype of its own.
        dtype = array.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        if (array.shape, array.dtype) != (np.shape(leaf), dtype):
            there = f"{array.dtype}{list(array.shape)}"
            wrong.append(f"{name} is {there}, in like {dtype}{list(np.shape(leaf))}")
        sharding = getattr(leaf, "sharding", None)
        is_sharded = sharding is not None and len(sharding.device_set) > 1
        loaded.append(jax.device_put(array, sharding) if is_sharded else jnp.asarray(array))

    wrong += [f"{name} is in the file alone" for name in found]
    if wrong:
        more = f"; and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise ValueError(
            f"like must have the parameters of {whence}, got others: {'; '.join(wrong[:6])}{more}. "
            "Split the model as for the run (variables or variables['params'], nnx.split, "
            "eqx.partition); partial=True takes a file that holds a part; 64 bits need "
            "jax_enable_x64"
        )
    return jax.tree_util.tree_unflatten(structure, loaded)


def in_msgpack(params: PyTree) -> bytes:
    """The content of a .msgpack file of any pytree of arrays, as ``load`` reads it."""
    nested = flax.traverse_util.unflatten_dict(_arrays(params))
    return bytes(flax.serialization.msgpack_serialize(nested))


def _ending_of(path: Path) -> str:
    """The ending of a path, one of those that are written and read.

    Raises:
        ValueError: another one.
        MissingExtra: the package safetensors is asked for, and not installed.
    """
    if not path.name or path.suffix not in _ENDINGS:
        raise ValueError(
            "path must end in .msgpack, .safetensors, or for a folder of Orbax in .orbax or "
            f"nothing, got {os.fspath(path)!r}"
        )
    if path.suffix == ".safetensors":
        with needed(f"{path}", "safetensors", "safetensors"):
            pass
    return path.suffix


def _name(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """The name of a leaf, from its path in a pytree; that of a bare array is "params"."""
    found = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in keys)
    return tuple(map(str, found)) or ("params",)


def _arrays(params: PyTree) -> dict[tuple[str, ...], np.ndarray]:
    """The arrays on the host by name.

    Raises:
        ValueError: two have one name; some are no numbers, or lie on devices of other processes.
    """
    arrays: dict[tuple[str, ...], np.ndarray] = {}
    joined: set[str] = set()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = _name(keys)
        if not getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"params must be replicated to be exported by several processes, got {name} "
                "sharded over them: in one process `jaxdp export` writes it"
            )
        if jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key):
            raise ValueError(
                f"params must be numbers to be exported, got a random key at {'.'.join(name)}: "
                "keep keys out of what is published"
            )
        if ".".join(name) in joined:
            raise ValueError(f"params must have a name each, got {'.'.join(name)} twice")
        joined.add(".".join(name))
        arrays[name] = np.asarray(leaf)
    return arrays


def _write(path: Path, ending: str, arrays: dict[tuple[str, ...], np.ndarray]) -> str:
    """Writes arrays by the ending of the path, durably: whole, or nothing of them."""
    nested = flax.traverse_util.unflatten_dict(arrays)
    with writing(path, "export again"):
        try:
            if ending in _ORBAX:
                import orbax.checkpoint as ocp

                # Orbax leaves what it had begun, on a full disk. Its database (OCDBT) would tell
                # when that was.
                handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
                with (
                    tempfile.TemporaryDirectory(dir=path.absolute().parent) as place,
                    ocp.Checkpointer(handler) as writer,
                ):
                    writer.save(Path(place, "params"), nested)
                    _without_times(Path(place, "params"))
                    Path(place, "params").rename(path)
            elif ending == ".msgpack":
                write_bytes_atomically(path, in_msgpack(nested))
            else:
                import safetensors.numpy

                named = {".".join(name): array for name, array in arrays.items()}
                write_bytes_atomically(path, safetensors.numpy.save(named))
        except OSError:
            raise
        except Exception as error:  # each library has its own
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device") from error
            raise ValueError(
                f"path must have an ending whose form takes these arrays, got {path}: "
                f"{first_line(error)}"
            ) from error
    return ""


def _without_times(folder: Path) -> None:
    """Takes out of Orbax's files when, and in which folder of this machine, they were written.

    How long training took depends on the sizes of its draws, which are private.
    """
    described = folder / "_CHECKPOINT_METADATA"
    kept = json.loads(described.read_bytes())
    times = {name: None for name in kept if name.endswith("_timestamp_nsecs")}
    described.write_text(json.dumps(kept | times), encoding="utf-8")
    for file in folder.rglob("commit_success.txt"):  # Orbax asks whether it is there
        file.write_bytes(b"")


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name; none of its forms holds code."""
    ending = _ending_of(path)
    with reading(path):
        path.stat()  # that nothing is there is no damage
        content = path.read_bytes() if ending == ".msgpack" else b""
        try:
            if ending in _ORBAX:
                tree = arrays_on_host(path.absolute())
            elif ending == ".msgpack":
                tree = flax.serialization.msgpack_restore(content)
            else:
                import safetensors.flax

                with jax.enable_x64(True):  # NumPy's reader has no bfloat16
                    tree = safetensors.flax.load_file(path)
            found = {".".join(name): array for name, array in _arrays(tree).items()}
        except Exception as error:  # each library has its own
            raise ValueError(
                f"path must be whole and of the form of its ending, got {path}: {first_line(error)}"
            ) from error
    return found


def shown_params(
    directory: RunDirectory, only: Only | None = None, again: bool = True
) -> tuple[int, PyTree]:
    """Step and parameters of the last checkpoint that was shown, as dicts and lists of arrays.

    In the place of what no stage has trained stands None, but in folders that hold it.

    Args:
        directory: of the run; nothing is changed there.
        only: as for ``export_params``; in the place of what is left out stands None.
        again: True reads once more where a run that goes on has just replaced it.

    Raises:
        ValueError: none was shown, or the last is not there.
        StorageError: it is damaged, or cannot be read.
    """
    if not directory.exists():
        raise ValueError(f"folder must hold a run, with its secret/, got {directory.path}")
    shown = directory.last_shown()
    if directory.stage and (shown is None or not shown.step):  # it begins with those before it
        return shown_params(_stage_before(directory), only)
    before = directory.load_state().before or 0
    if not directory.checkpoints.is_dir():  # a reader makes no folder
        raise _missing(directory, shown, None)
    checkpoints = Checkpoints(directory.checkpoints)
    try:
        found = checkpoints.params(0 if shown is None else shown.step, only == "trained")
        # The step alone may be that of another state, which nobody has seen. Lines of format 2 name
        # no more.
        if found and shown and found[0] == shown.step and shown.past in (None, found[1]):
            params = found[2]
            alone = directory.load_state().frozen is not None and not _frozen_of(directory).exists()
            if directory.stage and (alone or only):  # what stages before this one have trained
                params = with_missing(params, shown_params(_stage_before(directory), only)[1])
            return before + found[0], params
        if not again:
            raise _missing(directory, shown, found)
    except StorageError:
        # A run that goes on meanwhile may just have replaced the one that was read.
        if not again:
            raise
    finally:
        checkpoints.close()
    return shown_params(directory, only, again=False)


def lacks_frozen(directory: RunDirectory) -> bool:
    """True where every stage froze some parameters, which are not in the folder."""
    frozen = all(stage.load_state().frozen is not None for stage in directory.stages())
    return frozen and not _frozen_of(directory.first).exists()


def _frozen_of(directory: RunDirectory) -> Path:
    """The folder that older runs have, with the parameters that they did not train."""
    return directory.checkpoints.with_name("frozen")


def _stage_before(directory: RunDirectory) -> RunDirectory:
    stages = directory.stages()
    return stages[[each.stage for each in stages].index(directory.stage) - 1]


def _missing(
    directory: RunDirectory, shown: Shown | None, found: tuple[int, bytes, PyTree] | None
) -> ValueError:
    if shown is None or not shown.step:
        return ValueError(
            f"run must have a checkpoint that was shown to export, got {directory.path}, which has "
            "none yet: fit() shows them, and after a crash the same program or --resume"
        )
    before = "none before it" if found is None else f"the one of step {found[0]}"
    if found is not None and found[0] == shown.step:
        before = "one of this step that its ledger does not name as shown (--resume shows it)"
    return ValueError(
        f"run must have the checkpoint of step {shown.step}, the last that was shown, to export, "
        f"got {directory.path} with {before}: put back a copy, or continue the run, which charges "
        "what is lost again"
    )
