"""The arithmetic that every bound on a sum counts on: float32, rounded to nearest."""

import os
import pathlib
import re

_FAST = re.compile(r"--xla_cpu_enable_fast_math\b(\S*)")
_OFF = ("false", "0")


def check_arithmetic() -> None:
    """Raises ValueError where XLA is told to compute with other roundings than float32's.

    One flag that switches it on is enough: which of several XLA follows is not looked at.

    Raises:
        ValueError: it is.
    """
    found = [value.strip("=\"'").lower() for value in _FAST.findall(_flags())]
    if any(value not in _OFF for value in found):
        raise ValueError(
            "XLA_FLAGS must not have xla_cpu_enable_fast_math: float32 then has other roundings "
            "than what one record adds is bounded with (sums on a grid were 63 cells from where "
            "they should be, in place of 1/2); got it switched on"
        )


def _flags() -> str:
    """XLA's flags: those of the environment, or of the file that it names in their place."""
    given = os.environ.get("XLA_FLAGS", "")
    if not given.strip() or given.lstrip().startswith("-"):
        return given
    try:
        return pathlib.Path(given).read_text(encoding="utf-8", errors="replace")
    except OSError:  # XLA has none of it, either
        return ""
