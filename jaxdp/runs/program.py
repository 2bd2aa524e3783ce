"""The program of a run: its optimizer, loss and first parameters, compared when it goes on.

Two processes that run the same program trace the same operations, but variables, addresses, names
and source lines in JAX's text are each one's own. Here a trace is written without them, and arrays
by a hash under the run's secret. What follows JAX, optax or the machine is written beside it: under
others, another trace says nothing against the program.
"""

import contextlib
import dataclasses
import enum
import hashlib
import importlib
import itertools
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.extend import core

from jaxdp import __version__
from jaxdp.clipping import ClippedGrad, losses
from jaxdp.devices import processes
from jaxdp.ledger.durable import write_atomically
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.files import reading, writing
from jaxdp.runs.written import Written
from jaxdp.training.step import PrivateStep
from jaxdp.types import PyTree

UNCOMPARED = (
    "the run was begun by a version of jaxdp that kept no form of its program: that it went on "
    "with the same optimizer, loss and first parameters was not verified"
)
SAME_PROGRAM = (
    "the run went on with a program that is not the one that it was begun with, because its owner "
    "said same_program=True: "
)
ELSEWHERE = (
    "the run went on with other versions, or on another machine, where its program cannot be "
    "compared with the one that it was begun with: that optimizer, loss and first parameters are "
    "the same was not verified ({})"
)
UNTRACED = (
    "the optimizer could not be traced on shapes alone: that it is the one that the run was begun "
    "with was not verified"
)
WAYS_OUT = (
    "Read the run: jaxdp.Run.open({0!r}). Train it further: run.fit(steps, beyond=True), or with "
    "other numbers Run({0!r}, ..., extend='a name'). Or begin in a new folder, where ledger= or "
    "after= counts both"
)
_FILE = "program.json"
_MOST = 8  # forms that are kept, of all machines and versions
_SHOWN = 3  # differences that are told
_VERSIONS = ("jax", "jaxlib", "optax", "numpy")
_IF_IMPORTED = ("flax", "equinox", "haiku", "einops", "transformers")
# Operations that say where an array lies, which is no other program.
_PLACED = ("sharding_constraint", "mesh_cast", "reshard")
# Parameters of operations that are names, places, or say how, not what, is computed.
_LEFT_OUT = re.compile(
    "^name|src_info|sharding|layout|mesh|debug|donated|keep_unused|inline|compiler|resource|effects|tree"
)
_NUMBER = re.compile(r"(\w+=)?-?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)", re.IGNORECASE)
Hash = Callable[[PyTree], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramForm(Written):
    """The form of a program. **Secret**: kept for the run's owner.

    Attributes:
        environment: versions and machine, by name.
        optimizer: operations of the update after the noise, and of its first state.
        loss: operations of the loss of one example, with its gradient where that has rules of its
            own.
        params: type, shape and hash of each first parameter, by its path.
    """

    LEFT_OUT: ClassVar = ()

    environment: dict[str, str]
    optimizer: tuple[str, ...]
    loss: tuple[str, ...]
    params: dict[str, str]

    @property
    def text(self) -> str:
        """The form without the environment, as one text."""
        return json.dumps([self.optimizer, self.loss, self.params])


def program_of(
    step: PrivateStep, params: PyTree, example: PyTree, key: bytes, numbers: bool = True
) -> ProgramForm:
    """The form of a program; nothing is computed, and the loss is traced once.

    Args:
        step: of the run.
        params: NumPy arrays, before the first step.
        example: pytree of shapes and types of one record.
        key: of the hashes; secret.
        numbers: False leaves out those of the parameters.
    """

    def hashed(array: PyTree) -> str:
        if not losses.is_readable(array):
            return "on devices of other processes"
        is_key = isinstance(array, jax.Array) and losses.is_key(array)
        found = np.ascontiguousarray(jax.random.key_data(array) if is_key else array)
        content = found.reshape(-1).view(np.uint8).data
        return hashlib.blake2b(content, digest_size=16, key=key).hexdigest()

    # The optimizer after the noise: its first state, where a rate may stand, and its update.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    trained, optimizer = step.grad_fn.trained(shapes), list[str]()
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            whole = jax.eval_shape(step.init, shapes)
            optimizer += _lines(jax.make_jaxpr(step.after.init)(trained), hashed)
            update = jax.make_jaxpr(step.after.update)(trained, whole[1], trained)
            optimizer += _lines(update, hashed)
            if step.context is not None:
                optimizer += _lines(jax.make_jaxpr(step.context)(whole), hashed)
    except Exception:  # a link may raise anything, and the trainer says it, of the run's program
        optimizer = [UNTRACED]

    # The loss, as the trainer traces it before its first step.
    loss: list[str] = []
    if isinstance(step.grad_fn, ClippedGrad):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), example)
        look = losses.inspecting(lambda traced, *_: loss.extend(_lines(traced, hashed)))
        with look, contextlib.suppress(ValueError):  # the trainer raises it, of the run's program
            step.grad_fn.plan(params, one)

    paths = jax.tree_util.tree_leaves_with_path(params)
    first = {
        jax.tree_util.keystr(path): f"{_kind(leaf)} #{hashed(leaf) if numbers else ''}"
        for path, leaf in paths
    }
    return ProgramForm(
        environment=environment(), optimizer=tuple(optimizer), loss=tuple(loss), params=first
    )


def environment() -> dict[str, str]:
    """Versions, devices and machine under which the same program may have another trace."""
    names = (*_VERSIONS, *(name for name in _IF_IMPORTED if name in sys.modules))
    found = {name: str(getattr(importlib.import_module(name), "__version__", "")) for name in names}
    # An array that a program computes has other last digits where a processor can do more.
    able = np.show_config(mode="dicts").get("SIMD Extensions")
    machine = f"{platform.machine()} {os.cpu_count()} {able} {os.environ.get('XLA_FLAGS')}"
    device = jax.devices()[0]
    devices = f"{jax.device_count()} {device.platform} {device.device_kind}"
    return {"jaxdp": __version__, **found, "devices": devices, "machine": machine}


def require_same(directory: RunDirectory, now: ProgramForm, same_program: bool) -> tuple[str, ...]:
    """Compares a program with the one that a run was begun with; nothing is written.

    Args:
        directory: of the run.
        now: the program.
        same_program: its owner says that it is the same all the same.

    Returns:
        Sentences for ``unverified``, where it goes on although it could not be compared.

    Raises:
        ValueError: it is another one, with the differences in words.
    """
    kept = _kept(directory)
    if not kept:
        return (UNCOMPARED,)
    here = [before for before in kept if before.environment == now.environment]
    # With any of those that it went on with, its owner's consent included; the last is told of.
    for before in here or kept:
        found = differences(before, now)
        if not found:
            return (UNTRACED,) if UNTRACED in now.optimizer else ()
    if not directory.is_charged():  # a start that ended before its first step has trained nothing
        return ()
    words = "; ".join(found)
    if not here:
        moved = [
            f"{name} {before.environment.get(name)} then, {now.environment.get(name)} now"
            for name in {**before.environment, **now.environment}
            if before.environment.get(name) != now.environment.get(name) and name != "machine"
        ]
        said = ELSEWHERE.format("; ".join(moved) or "another processor")
        warnings.warn(f"{said}. What differs: {words}", stacklevel=2)
        return (said,)
    if same_program:
        return (f"{SAME_PROGRAM}{words}",)
    raise ValueError(
        f"folder must be continued by the program that it was begun with, got {directory.path} and "
        f"another one: {words}. {WAYS_OUT.format(str(directory.path))}. Where the change is meant, "
        "Run(..., same_program=True) goes on, and the page says so"
    )


def keep(directory: RunDirectory, now: ProgramForm | None) -> None:
    """Keeps the form durably, beside those that the run went on with before."""
    if now is None or processes.index() or now in (kept := _kept(directory)):
        return
    text = json.dumps([each.to_dict() for each in [*kept, now][-_MOST:]])
    with writing(directory.secret / _FILE):
        write_atomically(directory.secret / _FILE, text, mode=0o600)


def _kept(directory: RunDirectory) -> list[ProgramForm]:
    """The forms that were kept, the newest last; [] without any, or where they are damaged."""
    path = directory.secret / _FILE
    with reading(path):
        try:
            return [ProgramForm.from_dict(each) for each in json.loads(path.read_bytes().decode())]
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return []


def differences(before: ProgramForm, now: ProgramForm) -> list[str]:
    """The differences between two programs in words, with numbers before and after."""
    found = [
        words
        for name, old, new in (
            ("the optimizer", before.optimizer, now.optimizer),
            ("the loss", before.loss, now.loss),
        )
        if (words := _difference(name, old, new))
    ]
    paths = [
        p for p in {**before.params, **now.params} if before.params.get(p) != now.params.get(p)
    ]
    kinds = [[each.params.get(p, "none").split(" #")[0] for p in paths] for each in (before, now)]
    shaped = [f"{p} {a} then, {b} now" for p, a, b in zip(paths, *kinds, strict=True) if a != b]
    if shaped:
        found.append(f"the parameters: {_listed(shaped)}")
    elif paths:
        names = _listed([path for path in paths if path])
        found.append(
            f"the initial parameters{names and ' '}{names} have other numbers (which nothing would "
            "use: the run has its own. Give them as they were, by the same seed)"
        )
    return found


def changed_values(before: str, now: str) -> str:
    """The named values of two texts, such as of a mechanism, that are not the same in both."""
    old, new = (re.findall(r"(\w+)=([^=()]+?)(?=[,()]|$)", text) for text in (before, now))
    if [name for name, _ in old] != [name for name, _ in new]:
        return f"{before} then, {now} now"
    pairs = zip(old, new, strict=True)
    changed = [f"{n} ({a} then, {b} now)" for (n, a), (_, b) in pairs if a != b]
    if not changed:  # the words behind the values, of audit canaries; or the kinds of the parts
        ends = [text.rpartition(")")[2].strip() or "no canaries" for text in (before, now)]
        same = ends[0] == ends[1]
        changed = [f"{before if same else ends[0]} then, {now if same else ends[1]} now"]
    return ", ".join(changed)


def _difference(name: str, old: Sequence[str], new: Sequence[str]) -> str:
    """The difference between two lists of operations; "" for none."""
    pairs = list(zip(old, new, strict=False))
    changed = [(a.split(), b.split()) for a, b in pairs if a != b]
    if not changed and len(old) == len(new):
        return ""
    words: dict[str, None] = {}
    if len(old) == len(new) and all(len(a) == len(b) for a, b in changed):
        parts = [(x, y) for a, b in changed for x, y in zip(a, b, strict=True) if x != y]
        for x, y in parts:
            if _NUMBER.fullmatch(x) and _NUMBER.fullmatch(y):
                both = x.startswith("-") and y.startswith("-")  # optax descends by minus the rate
                words[f"number {x[both:]} is now {y[both:]}"] = None
            elif x.startswith("#") and y.startswith("#"):
                words["captured array has other numbers"] = None
            else:
                break
        else:
            return f"{name}'s {_listed(list(words))}"
    counts = [sum(" = " in line for line in lines) for lines in (old, new)]
    differ = (n for n, (a, b) in enumerate(pairs) if a != b and " = " in a + b)
    at = next(differ, len(pairs))
    first = [f"`{lines[at].strip()[:100]}`" if at < len(lines) else "none" for lines in (old, new)]
    return (
        f"{name}: {counts[0]} operations then, {counts[1]} now; first difference: {first[0]} then, "
        f"{first[1]} now"
    )


def _listed(words: Sequence[str]) -> str:
    rest = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _lines(traced: core.ClosedJaxpr, hashed: Hash) -> list[str]:
    """The operations of a traced function, one a line; variables are numbered as they occur."""
    lines: list[str] = []

    def value(array: Any) -> str:
        """A number as it is; an array by its type, shape and hash."""
        array = array if hasattr(array, "dtype") else np.asarray(array)
        if np.shape(array) == () and not losses.is_key(array):
            return f"{np.asarray(array)[()]!s} {array.dtype}"
        return f"{_kind(array)} #{hashed(array)}"

    def parameter(given: Any) -> str:
        """A parameter of an operation; an object that has no text of its own is its type."""
        if given is None or isinstance(given, bool | int | float | complex | str | bytes):
            return repr(given).replace(" ", "")
        if isinstance(given, enum.Enum | np.dtype | type):
            return str(given).replace(" ", "")
        if isinstance(given, np.ndarray | np.generic | jax.Array):
            return value(given).replace(" ", "")
        if isinstance(given, dict):
            return parameter(sorted((str(name), part) for name, part in given.items()))
        if isinstance(given, set | frozenset):
            return f"{{{','.join(sorted(map(parameter, given)))}}}"
        if hasattr(given, "_asdict"):
            return parameter(given._asdict())
        if isinstance(given, tuple | list):
            return f"({','.join(map(parameter, given))})"
        if dataclasses.is_dataclass(given):
            return parameter({f.name: getattr(given, f.name) for f in dataclasses.fields(given)})
        return _kind(given) if hasattr(given, "dtype") else type(given).__name__

    def function(given: Any, depth: int) -> None:
        # Numbered anew: which functions share one trace depends on what was traced before.
        names: dict[Any, str] = {}
        numbers = itertools.count()

        def atom(var: Any) -> str:
            if isinstance(var, core.Literal):
                return value(var.val)
            if var not in names:
                names[var] = f"%{next(numbers)}"
            return names[var]

        def write(line: str) -> None:
            lines.append(" " * depth + line)

        jaxpr = getattr(given, "jaxpr", given)
        for var, array in zip(jaxpr.constvars, getattr(given, "consts", ()), strict=False):
            write(f"{atom(var)} = {value(array)}")
        write("given " + " ".join(f"{atom(var)}:{_kind(var.aval)}" for var in jaxpr.invars))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _PLACED:
                names[eqn.outvars[0]] = atom(eqn.invars[0])
                continue
            bodies, words = [], []
            for name, part in sorted(eqn.params.items()):
                each = part if isinstance(part, tuple | list) else [part]
                if inner := [one for one in each if hasattr(getattr(one, "jaxpr", one), "eqns")]:
                    bodies += inner
                elif not _LEFT_OUT.search(name) and not callable(part):
                    words.append(f"{name}={parameter(part)}")
            outs = " ".join(f"{atom(var)}:{_kind(var.aval)}" for var in eqn.outvars)
            write(" ".join([outs, "=", eqn.primitive.name, *map(atom, eqn.invars), *words]))
            for body in bodies:
                function(body, depth + 1)
        write("returns " + " ".join(map(atom, jaxpr.outvars)))

    function(traced, 0)
    return lines


def _kind(array: Any) -> str:
    """Type and shape, without a space; without where it lies."""
    shape = ",".join(map(str, np.shape(array) if hasattr(array, "__array__") else array.shape))
    return f"{array.dtype}[{shape}]"
