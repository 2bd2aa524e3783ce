"""Lines of the user's code: of an error, an operation, a function."""

import functools
import inspect
import re
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax._src import source_info_util  # its public face has no frames

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = (
    _PACKAGE,
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["platlib"],
    "<frozen",
)


def is_users(file: str) -> bool:
    """True for a file that is neither jaxdp's nor an installed library's."""
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def of_error(error: BaseException) -> str:
    """The deepest line of the user's code in an error's traceback; "" if there is none."""
    found = ""
    seen: BaseException | None = error
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if is_users(frame.filename):
                found = f"{_short(frame.filename)}:{frame.lineno}"
        seen = seen.__cause__ or seen.__context__
    return found


def of_operation(eqn: Any) -> str:
    """The line of the user's code that an operation of a jaxpr comes from; "" if unknown."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if is_users(frame.file_name):
            return f"{_short(frame.file_name)}:{frame.start_line}"
    return ""


def of_function(function: Any, pattern: str = "") -> str:
    """The first line in a function, or in what it calls in its module, that matches a pattern.

    Without a match: the line where the function begins. Text alone is looked at, so it is a hint.
    """
    places = [_source(code) for code in _codes(function)]
    if pattern:
        for file, first, lines in places:
            for at, line in enumerate(lines):
                if re.search(pattern, line.partition("#")[0]):
                    return f"{file}:{first + at}"
    return f"{places[0][0]}:{places[0][1]}" if places else ""


def _codes(function: Any) -> Iterator[types.CodeType]:
    """The code of a function, of what it closes over, and of functions of its module it names."""
    seen: set[types.CodeType] = set()
    waiting = [function]
    while waiting and len(seen) < 100:
        each = waiting.pop(0)
        each = each.func if isinstance(each, functools.partial) else each
        each = inspect.unwrap(each) if callable(each) else each
        each = getattr(each, "__func__", each)
        if not isinstance(each, types.FunctionType):
            each = vars(type(each)).get("__call__")
        if not isinstance(each, types.FunctionType) or each.__code__ in seen:
            continue
        if not is_users(each.__code__.co_filename):
            continue
        seen.add(each.__code__)
        yield each.__code__
        cells = (cell.cell_contents for cell in each.__closure__ or () if _filled(cell))
        named = (each.__globals__.get(name) for name in _names(each.__code__))
        waiting += [v for v in (*cells, *named) if callable(v) and not isinstance(v, type)]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _source(code: types.CodeType) -> tuple[str, int, list[str]]:
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):  # code that was typed in, or compiled from a string
        lines, first = [], code.co_firstlineno
    return _short(code.co_filename), first, lines


def _short(file: str) -> str:
    """The file's last two parts: enough to find it, and nothing of the machine."""
    return "/".join(Path(file).parts[-2:])
