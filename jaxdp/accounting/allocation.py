"""Placeholder: to be written on its own branch."""

from typing import Any


def refuses(*args: Any) -> str:
    """Refuses."""
    return "not written yet"


def pairs(*args: Any) -> Any:
    """None."""
    return ()


def renyi(*args: Any) -> Any:
    """None."""
    raise NotImplementedError
