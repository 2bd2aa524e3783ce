"""Lines of the user's code: of an error, an operation of a traced program, a function."""

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from jax._src import source_info_util  # its public face has no frames
from jax.extend import core

from jaxdp.types import PyTree

_LIBRARIES = (
    str(Path(__file__).parent.parent),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)


def line_of_error(error: BaseException) -> str:
    """The deepest line of the user's code in an error's traceback; "" if there is none."""
    found = ""
    seen: BaseException | None = error
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            found = _line(frame.filename, frame.lineno) or found
        seen = seen.__cause__ or seen.__context__
    return found


def line_of_operation(eqn: core.JaxprEqn) -> str:
    """The line of an operation of a traced program; "" if unknown."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    lines = (_line(frame.file_name, frame.start_line) for frame in frames)
    return next(filter(None, lines), "")


def line_of_use(jaxpr: core.Jaxpr, at: core.JaxprEqn | core.Var) -> str:
    """The line of an operation, or of the first operation that takes a variable; "" if unknown."""
    if isinstance(at, core.JaxprEqn):
        return line_of_operation(at)
    takers = (eqn for eqn in jaxpr.eqns if any(atom is at for atom in eqn.invars))
    return next(map(line_of_operation, takers), "")


def line_of_function(function: Callable[..., PyTree] | None) -> str:
    """The line where a function of the user's begins; "" of what has no code of the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if function else None
    code = getattr(function, "__code__", None)
    if code is None and callable(function) and not isinstance(function, type):
        code = getattr(type(function).__call__, "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if code else ""


def _line(file: str, line: int | None) -> str:
    """The file's last two parts and the line: nothing of the machine; "" in a library's file."""
    if file.startswith(_LIBRARIES) or "site-packages" in file:
        return ""
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"
