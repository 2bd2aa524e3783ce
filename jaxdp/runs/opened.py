"""A run's folder, read: nothing in it is written, and who trains there is not disturbed."""

import json
import os
from pathlib import Path
from typing import Any

from jaxdp import accounting as acc
from jaxdp.ledger import Ledger
from jaxdp.runs.directory import Row, RunDirectory
from jaxdp.runs.export import Only, export_params, shown_params
from jaxdp.runs.files import reading
from jaxdp.types import PyTree

_PUBLIC_ALONE = (
    "secret/ is not there: that the ledger is the one that the run wrote, with nothing cut off or "
    "changed, was not verified"
)


class OpenedRun:
    """A run's folder for reading, from ``Run.open``: no model, no records, no lock.

    It reads anew at each question, also while another process trains there: then it tells of the
    steps that were shown so far. A folder whose ``secret/`` was removed has no ``params``.

    Formal guarantee: all that it returns is a release of the run or computed from one.

    Args:
        folder: of the run, finished or not.

    Raises:
        ValueError: the folder holds no run.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.directory = RunDirectory(folder).latest
        public = (self.directory.ledger, self.directory.history)
        with reading(self.path):
            found = self.directory.exists() or all(path.exists() for path in public)
        if not found:
            raise ValueError(
                f"folder must hold a run of jaxdp.Run or `jaxdp train`, got {self.path}, where "
                "there is neither secret/run.json nor a ledger.jsonl with a history.json"
            )

    @property
    def path(self) -> Path:
        """The folder."""
        return self.directory.path

    @property
    def params(self) -> PyTree:
        """The released parameters that were shown last, as dicts and lists of arrays.

        None where ``trainable=`` froze them: what is frozen is not in the folder, but its hash is.

        Raises:
            ValueError: none were shown yet, or their checkpoint is gone or damaged.
        """
        return shown_params(self.directory)[1]

    def export(self, path: str | os.PathLike[str], *, only: Only | None = None) -> None:
        """Writes ``params`` to a file or folder, as ``Run.export``."""
        export_params(self.directory, path, only=only)

    @property
    def history(self) -> list[Row]:
        """The rows that were shown, one a block; [] before the first."""
        return self.directory.load_history()

    @property
    def report(self) -> dict[str, Any] | None:
        """The content of report.json as it was written; None before."""
        return self._json("report.json")

    @property
    def audit(self) -> dict[str, Any] | None:
        """The audit that ``run.audit()`` or ``jaxdp audit`` left in audit.json; None before."""
        return self._json("audit.json")

    @property
    def ledger(self) -> Ledger:
        """All that was charged, steps that are reserved at this moment included."""
        if self.directory.exists():
            return self.directory.checked_ledger()
        return Ledger(self.directory.ledger)

    def epsilon(
        self, delta: float | None = None, relation: acc.Relation | None = None
    ) -> acc.Bound:
        """Bounds on epsilon for everything that the folder's ledger was charged for.

        Args:
            delta: None takes the run's.
            relation: the neighbouring relation; None takes the run's.

        Raises:
            ValueError: nothing was charged yet, or the run has no delta.
        """
        if self.directory.exists():
            state = self.directory.load_state()
            own_delta, own_relation = state.delta, state.relation
        else:
            guarantee = (self.report or {}).get("guarantee", {})
            own_delta, own_relation = guarantee.get("delta"), guarantee.get("relation")
        delta = own_delta if delta is None else delta
        relation = acc.Relation(own_relation) if relation is None and own_relation else relation
        if delta is None or relation is None:
            name = "delta" if delta is None else "relation"
            raise ValueError(f"{name} must be given: the run in {self.path} has none; got None")
        return self.ledger.epsilon(delta, relation)

    def unverified(self) -> list[str]:
        """The assumptions of the guarantee, in words."""
        return self.ledger.unverified() + [_PUBLIC_ALONE] * (not self.directory.exists())

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        with reading(path):
            try:
                found: dict[str, Any] = json.loads(path.read_bytes().decode())
            except FileNotFoundError:
                return None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} must be JSON that jaxdp wrote, got {error}") from None
        return found
