"""The ledger: charges durably, hands out each ticket once, derives its keys."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.ledger.ledger import Ledger

__all__ = ["Ledger"]


def __getattr__(name: str) -> Any:
    """The class, imported when asked for: the command line needs this room's errors alone."""
    if name != "Ledger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxdp.ledger.ledger import Ledger

    return Ledger
