"""Findings of a check, in words, and the lines of the user's code that they name."""

import dataclasses
import functools
import inspect
import re
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jax._src import source_info_util  # its public face has no frames
from jax.extend.core import JaxprEqn

from jaxdp.types import PyTree

_LIBRARIES = (
    str(Path(__file__).parent.parent),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that breaks the guarantee, or may break it.

    Attributes:
        kind: a short name: "company", "state", "captured", "refused", "preprocess", "public",
            "source", "collate", "sampling", "sensitivity", "noise", "shared", "divisor", "steps",
            "repeat".
        what: what was seen, with numbers.
        why: why the guarantee does not hold then.
        where: ``file:line`` of the user's code; "" where it is not known.
        remedy: what to write instead.
        certain: False where it is only a suspicion: a correct program may look like this.
    """

    kind: str
    what: str
    why: str
    where: str
    remedy: str
    certain: bool = True

    def __str__(self) -> str:
        head = "BROKEN" if self.certain else "suspicion"
        at = f" ({self.where})" if self.where else ""
        return f"{head}, {self.kind}{at}: {self.what}\n  why: {self.why}\n  do: {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The answer of ``jaxdp.check`` and ``jaxdp.check_loop``; ``str`` gives it in words.

    No epsilon covers it: what it says was seen in the records themselves. It refutes; an empty
    answer proves nothing beyond the tests that it names.

    Attributes:
        findings: what breaks the guarantee, then suspicions.
        tested: the tests that ran, one sentence each.
        assumed: what cannot be seen and is taken to be public.
        seconds: the time that it took.
        untested: the tests that could not run, one sentence each.
    """

    findings: tuple[Finding, ...]
    tested: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0
    untested: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found that breaks the guarantee; suspicions do not count."""
        return not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that break the guarantee."""
        return tuple(f for f in self.findings if f.certain)

    @property
    def suspicions(self) -> tuple[Finding, ...]:
        """The findings that a correct program may show, too."""
        return tuple(f for f in self.findings if not f.certain)

    def raise_if_broken(self) -> None:
        """Raises ValueError with all findings in words, unless ``ok``."""
        if not self.ok:
            raise ValueError(str(self))

    def __str__(self) -> str:
        count = len(self.broken)
        head = f"{count} broken, {len(self.suspicions)} suspicious" if count else "nothing broken"
        if not count and self.suspicions:
            head += f", {len(self.suspicions)} suspicious"
        lines = [f"{head} ({self.seconds:.1f} s)", *map(str, self.findings)]
        lines += [f"tested: {name}" for name in self.tested]
        lines += [f"not tested: {name}" for name in self.untested]
        lines += [f"assumed to be public: {name}" for name in self.assumed]
        return "\n".join(lines)


def in_order(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """The findings without None and repetitions, those that are certain first."""
    kept = dict.fromkeys(finding for finding in findings if finding)
    return tuple(sorted(kept, key=lambda finding: not finding.certain))


def line_of_error(error: BaseException) -> str:
    """The deepest line of the user's code in an error's traceback; "" if there is none."""
    found = ""
    seen: BaseException | None = error
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if _is_users(frame.filename):
                found = f"{_short(frame.filename)}:{frame.lineno}"
        seen = seen.__cause__ or seen.__context__
    return found


def line_of_operation(eqn: JaxprEqn) -> str:
    """The line of the user's code that an operation of a jaxpr comes from; "" if unknown."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if _is_users(frame.file_name):
            return f"{_short(frame.file_name)}:{frame.start_line}"
    return ""


def line_in(function: Callable[..., PyTree], pattern: str = "") -> str:
    """The first line in a function, or in what it calls in its module, that matches a pattern.

    Without a match: the line where the function begins. Text alone is looked at, so it is a hint.
    """
    begins = ""
    for code in codes(function):
        try:
            lines, first = inspect.getsourcelines(code)
        except (OSError, TypeError):  # code that was typed in, or compiled from a string
            lines, first = [], code.co_firstlineno
        begins = begins or f"{_short(code.co_filename)}:{first}"
        for at, line in enumerate(lines if pattern else ()):
            if re.search(pattern, line.partition("#")[0]):
                return f"{_short(code.co_filename)}:{first + at}"
    return begins


def codes(function: Callable[..., PyTree]) -> Iterator[types.CodeType]:
    """The user's code of a function, of what it closes over, of what it names in its module."""
    seen: set[types.CodeType] = set()
    waiting = [function]
    for each in waiting:  # which grows
        each = each.func if isinstance(each, functools.partial) else each
        each = getattr(inspect.unwrap(each), "__func__", inspect.unwrap(each))
        if not isinstance(each, types.FunctionType):
            each = vars(type(each)).get("__call__")
        if not isinstance(each, types.FunctionType) or each.__code__ in seen or len(seen) >= 100:
            continue
        if not _is_users(each.__code__.co_filename):
            continue
        seen.add(each.__code__)
        yield each.__code__
        try:
            named = inspect.getclosurevars(each)
        except ValueError:  # a variable that has no value yet
            continue
        others = (*named.nonlocals.values(), *named.globals.values())
        waiting += [v for v in others if callable(v) and not isinstance(v, type)]


def _is_users(file: str) -> bool:
    """True for a file that is neither jaxdp's nor an installed library's."""
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def _short(file: str) -> str:
    """The file's last two parts: enough to find it, and nothing of the machine."""
    return "/".join(Path(file).parts[-2:])
