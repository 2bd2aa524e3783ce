"""The folder of a tuning, and the state of the search that it keeps secret.

Inside ``secret/`` everything lies one folder deeper, so that the times and the number of links of
``secret/`` itself stand still while a search runs.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxdp._durable import (
    make_private,
    open_locked,
    rewrite,
    sync_directory,
    write_atomically,
)
from jaxdp.runs import space as spaces
from jaxdp.runs import stored
from jaxdp.seeds import Secret

NOTE = """This folder is SECRET.

While a search runs it holds the number of tries, and all of them. Whoever reads it knows more than
the charge allows for. Publish only what lies outside it.
"""
PARAMS = "params.msgpack"
_AGAIN = "call it again: it goes on where it was"


@dataclasses.dataclass(frozen=True)
class SearchState:
    """The search's state. **Secret**.

    Attributes:
        entropy: of the secret that keys the ledger and the hash of the data, hexadecimal.
        search: ``Search.text``.
        data: keyed hash of the records.
        left: K, the tries that are run; None once the result is released.
        done: tries that ended.
        candidate: of the try under way.
        best: number of the best try so far.
        best_candidate: its candidate.
        best_score: its score.
        best_trusted: what its own ledger says is not verified.
        charged_at: time of the charge, in nanoseconds.
    """

    entropy: str
    search: str
    data: str
    left: int | None
    done: int = 0
    candidate: spaces.Candidate | None = None
    best: int | None = None
    best_candidate: spaces.Candidate | None = None
    best_score: float | None = None
    best_trusted: tuple[str, ...] = ()
    charged_at: int | None = None

    @property
    def secret(self) -> Secret:
        """That of the search."""
        return Secret(int(self.entropy, 16), reproducible=False)


class TuneDirectory:
    """The folder of a tuning.

    Args:
        path: the folder; made by ``searched``.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError("folder must name a folder, got ''")
        self.path = Path(path)
        self.ledger, self.result = self.path / "ledger.jsonl", self.path / "tuned.json"
        self.params = self.path / PARAMS
        self.secret = self.path / "secret"
        self.work = self.secret / "tuning"
        self._state = self.work / "state.json"

    def exists(self) -> bool:
        """True if a tuning was begun here."""
        return self._state.exists()

    def load(self) -> SearchState:
        """The secret state."""
        try:
            return SearchState(**json.loads(self._state.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError):
            # Without the reason, which may hold a secret.
            raise ValueError(
                f"{self._state} must hold the state of a tuning, but it is damaged: put back a "
                "copy, or count what ledger.jsonl holds as spent and begin anew elsewhere"
            ) from None

    def save(self, state: SearchState) -> None:
        """Writes the secret state, durably and all at once."""
        with stored.writing(self.secret, _AGAIN):
            write_atomically(self._state, json.dumps(dataclasses.asdict(state)), mode=0o600)

    def take(self) -> TextIO:
        """Makes what is missing of the folder and takes it for this process."""
        if self.path.exists() and not self.exists() and any(self._public()):
            raise ValueError(
                f"folder must be new or hold a tuning, got {self.path}, which holds something else"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.secret.mkdir(mode=0o700, exist_ok=True)
            self.work.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one to write to, got {error}") from error
        busy = f"folder is in use by another process: {self.path}"
        with stored.writing(self.secret, _AGAIN):
            if not (self.secret / "README.txt").exists():
                (self.secret / "README.txt").write_text(NOTE, encoding="utf-8")
            taken = open_locked(self.work / "lock", "w", busy)
            make_private(self.secret)
        return taken

    def _public(self) -> Iterator[Path]:
        return (path for path in self.path.iterdir() if path.name != "secret")

    def reserve(self) -> None:
        """Makes the files of the release, empty and in ``secret/``.

        File systems number files as they are made: of files made at the end, the number would tell
        how many were made meanwhile.
        """
        with stored.writing(self.secret, _AGAIN):
            for path in (self.params, self.result):
                (self.work / path.name).touch(mode=0o644)

    def release(self, path: Path, content: bytes) -> None:
        """Fills a file of the release and moves it out of ``secret/``, unless that was done."""
        reserved = self.work / path.name
        if not reserved.exists():
            return
        with stored.writing(path, _AGAIN):
            rewrite(reserved, content)
            os.replace(reserved, path)
            sync_directory(path.parent)

    def hide_times(self, at: int | None) -> None:
        """Gives all that lies outside ``secret/`` the time of the charge, in nanoseconds."""
        assert at is not None
        for path in (*self._public(), self.secret, self.path):
            os.utime(path, ns=(at, at))
