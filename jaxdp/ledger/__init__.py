"""The ledger: charges durably, hands out each ticket once, derives its keys."""

from jaxdp.ledger.ledger import Ledger

__all__ = ["Ledger"]
