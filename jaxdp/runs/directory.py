"""The folder of a run: public files, secret ones, and the secret state that is kept there."""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar, TextIO

from jaxdp import arguments
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import open_locked, sync, sync_directory, write_atomically
from jaxdp.ledger.ledger import Shown
from jaxdp.ledger.seeds import Secret
from jaxdp.runs.files import make_private, reading, writing
from jaxdp.runs.written import Written

SECRET_NOTE = """This folder is SECRET.

It holds the secret of a private training run's draws and noise, and checkpoints not shown yet.
Whoever reads it can subtract the noise, and the guarantee is void. Of models publish only what
the run returned, or `jaxdp export` writes. Delete this folder once the run is finished and needs
no resuming.
Where canaries.json is here, it holds which audit canaries took part: `jaxdp audit` needs it.
"""
SENSITIVE_NOTE = (
    "SENSITIVE: computed from un-noised training data. These numbers are covered by no guarantee; "
    "do not publish them."
)


Row = dict[str, Any]  # of the history: the numbers of a block by name


@dataclasses.dataclass(frozen=True)
class KeptSecret(Written):
    """A run's secret as text. **Secret**.

    Attributes:
        entropy: 128 bits, hexadecimal.
        reproducible: whether a person chose it.
    """

    entropy: str
    reproducible: bool

    @classmethod
    def of(cls, secret: Secret) -> "KeptSecret":
        """The text of a secret."""
        return cls(f"{secret.entropy:032x}", secret.reproducible)

    def restored(self) -> Secret:
        """The secret itself."""
        return Secret(int(self.entropy, 16), reproducible=self.reproducible)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState(Written):
    """The state of a run beside its checkpoints. **Secret**.

    Attributes:
        secret: of draws and noise.
        starts: randomness of each start of a process; None in runs of older versions.
        lost: of format 2: how often steps that were shown had to be done again.
        shown: number of steps that may have been seen.
        data: keyed hash of the records.
        mechanism: of the run, as text; None in runs of older versions.
        canaries: hash of the auditor's coins.
        delta: of the guarantee; None without one.
        relation: of the guarantee; None in runs of older versions.
        physical_batch_size: that the device's memory chose; None where it did not.
        config: of a run of ``jaxdp train``: its ``RunConfig``.
        data_file: of a run on a file: its path.
        data_dir: where prepared data sets lie, if it was given.
        branch: of format 2, of a run with correlated noise that had to go back: the ledger's heads
            at the state that it went back to, and then, hexadecimal.
        place: of the folder at its last start, see ``RunDirectory.place``; None in runs of older
            versions.
        until_enough: of format 2: True where releases decide the number of steps.
        frozen: what is not trained, in words, and a hash of its paths and numbers; None for a run
            that trains everything.
        head: of the ledger after the last line that says what was shown, hexadecimal.
        steps: that the last start was asked for.
        planned: the most steps that were asked for, or calibrated, before any was shown.
        before: steps of the stages before this one; None in the first.
        ledger: path of a ledger that others charge, too; None for the folder's own.
        ledger_key: of that ledger, hexadecimal; None where it has none.
        after: the heads of other runs' ledgers as they were taken over, hexadecimal.
    """

    LEFT_OUT: ClassVar = (
        "starts",
        "physical_batch_size",
        "config",
        "data_file",
        "data_dir",
        "branch",
        "place",
        "until_enough",
        "frozen",
        "head",
        "steps",
        "planned",
        "before",
        "ledger",
        "ledger_key",
        "after",
    )

    secret: KeptSecret
    starts: tuple[str, ...] | None = None
    lost: int = 0
    shown: int = 0
    data: str = ""
    mechanism: str | None = None
    canaries: str | None = None
    delta: float | None = None
    relation: str | None = None
    physical_batch_size: int | None = None
    config: dict[str, Any] | None = None
    data_file: str | None = None
    data_dir: str | None = None
    branch: tuple[str, ...] | None = None
    place: str | None = None
    until_enough: bool | None = None
    frozen: tuple[str, str] | None = None
    head: str | None = None
    steps: int | None = None
    planned: int | None = None
    before: int | None = None
    ledger: str | None = None
    ledger_key: str | None = None
    after: tuple[str, ...] | None = None


class RunDirectory:
    """The layout of ``runs/x/``.

    ``report.json``, ``report.md``, ``*.png`` and ``ledger.jsonl`` are computed from noisy releases
    and public data. ``secret/`` holds the key, the state and the checkpoints. ``SENSITIVE.json`` is
    there only on request. With audit canaries, ``canary_gradients.npy`` is a part of the noisy
    gradients, a release, and ``secret/canaries.json`` holds the auditor's coins.

    In several processes, which must all see the folder, process 0 alone writes it.

    A further stage has its secret state and its checkpoints in ``secret/stages/NAME/``; all else is
    the folder's.

    Args:
        path: the folder; created by ``create``.
        stage: the name of a further stage; "" for the first.

    Attributes:
        remembered: options that a resumed run need not repeat; kept with the secret state, which
            wins over it.

    Raises:
        ValueError: no path, or an empty one, which would scatter a run over the working directory.
    """

    def __init__(self, path: str | os.PathLike[str], stage: str = ""):
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"folder must be a path, got {arguments.described(path)}")
        if not os.fspath(path):
            raise ValueError("out must name a folder, got ''")
        if stage and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,63}", stage):
            raise ValueError(
                f"extend must name a stage by letters, digits, '_', '.', ' ' and '-', got {stage!r}"
            )
        self.path, self.stage = Path(path), stage
        self.remembered: dict[str, str] = {}
        self.secret = self.path / "secret"
        if stage:
            self.secret = self.secret / "stages" / stage
        self.state_file = self.secret / "run.json"
        self.checkpoints = self.secret / "checkpoints"
        self.ledger = self.path / "ledger.jsonl"
        self.history = self.path / "history.json"
        self.sensitive = self.path / "SENSITIVE.json"
        self.components = self.path / "components.npy"
        self.canary_gradients = self.path / "canary_gradients.npy"
        self.coins = self.secret / "canaries.json"
        self._lock: TextIO | None = None

    @property
    def first(self) -> "RunDirectory":
        """The directory of the run's first stage, whose secret is the ledger's key."""
        return RunDirectory(self.path) if self.stage else self

    def stages(self) -> list["RunDirectory"]:
        """The directories of all stages that have begun, in their order.

        A further one of which no step was charged, for its start failed before, is none.
        """
        first = self.first
        if not first.exists():
            return []
        with reading(first.secret):
            names = [path.parent.name for path in first.secret.glob("stages/*/run.json")]
        later = [each for name in names if (each := RunDirectory(self.path, name)).is_charged()]
        return [first, *sorted(later, key=lambda each: each.load_state().before or 0)]

    @property
    def latest(self) -> "RunDirectory":
        """The directory of the stage that began last."""
        return (self.stages() or [self])[-1]

    @property
    def later(self) -> list["RunDirectory"]:
        """The directories of the stages after this one."""
        found = self.stages()
        names = [each.stage for each in found]
        return found[names.index(self.stage) + 1 :] if self.stage in names else []

    def open_ledger(self, state: RunState, given: Ledger | None = None) -> Ledger:
        """The ledger that the run is charged to.

        Args:
            state: the secret state of this stage.
            given: the object of a ledger that others charge, too; None opens the file.
        """
        first = self.first.load_state() if self.stage else state
        if first.ledger is None:
            return Ledger(self.ledger, key=first.secret.restored().stream("ledger"))
        self.ledger = Path(first.ledger)
        key = None if first.ledger_key is None else bytes.fromhex(first.ledger_key)
        return given or Ledger(self.ledger, key=key)

    def exists(self) -> bool:
        """True if a run was started here."""
        with reading(self.state_file):
            return self.state_file.exists()

    def is_charged(self) -> bool:
        """True if anything was charged for a step of this stage, or shown or kept of it."""
        if not self.exists():
            return False
        state = self.load_state()
        kept = any(path.name.isdecimal() for path in self.checkpoints.glob("*"))
        return bool(state.shown) or kept or is_charged(self.open_ledger(state), state)

    def place(self) -> str:
        """A hash of the folder's place, another one once it was moved or copied.

        Of its path, of its number on the file system, and of when its first file was written there,
        for a number is used again once a folder was removed. The device is left out: it may be
        another one at each mount.
        """
        note = self.first.secret / "README.txt"  # written by ``create``, and never again
        with reading(self.path):
            written = note.stat().st_ctime_ns if note.exists() else 0
            text = f"{self.path.resolve()} {self.path.stat().st_ino} {written}"
        return hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()

    def create(self) -> None:
        """Makes the folders; the secret one is readable by its owner alone.

        Raises:
            ValueError: the path is a file, or holds a run or what is left of one.
        """
        if self.exists():
            raise ValueError(
                f"out must be a new folder, got {self.path}, which holds a run: pass --resume to "
                "continue it"
            )
        if (not self.stage and self.ledger.exists()) or self.checkpoints.exists():
            raise ValueError(
                f"out must be a new folder, got {self.path}, which holds a ledger or checkpoints "
                "but not the secret state of their run"
            )
        if self.coins.exists() or self.canary_gradients.exists():
            raise ValueError(
                f"out must be a new folder, got {self.path}, which holds what is left of an audit: "
                "the coins of its canaries are not tossed again"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.secret.parent, self.secret) if self.stage else (self.secret,):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise ValueError(f"out must be a folder to write to, got {error}") from error
        if self.stage:
            return
        with writing(self.secret / "README.txt"):
            (self.secret / "README.txt").write_text(SECRET_NOTE, encoding="utf-8")

    def lock(self) -> None:
        """Takes the run for this process, until it ends (however it ends).

        Everything in ``secret/`` by then, also from older versions, is closed to others.

        Raises:
            ValueError: another process is training here, or ``secret/`` belongs to somebody else.
            StorageError: the folder cannot be written.
        """
        busy = f"out is in use by another process: {self.path}"
        secret = self.first.secret  # one process for all stages
        with writing(secret / "lock"):
            self._lock = open_locked(secret / "lock", "w", busy)
        try:
            make_private(secret)
        except OSError as error:
            self.unlock()
            raise ValueError(
                f"out must be a run whose secret folder can be closed to others, got {error}"
            ) from error

    def unlock(self) -> None:
        """Gives the run back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def save_state(self, state: RunState) -> None:
        """Writes the secret state of the run, durably and all at once."""
        if processes.index():
            return
        text = json.dumps({**self.remembered, **state.to_dict()}, indent=1)
        with writing(self.state_file):
            write_atomically(self.state_file, text, mode=0o600)

    def load_state(self) -> RunState:
        """The secret state of the run; ValueError if there is none, or it is damaged."""
        if not self.exists():
            raise ValueError(f"folder must hold a run that has begun, got {self.path}")
        with reading(self.state_file):
            content = self.state_file.read_bytes()
        try:
            return RunState.from_dict(json.loads(content.decode()))
        except (ValueError, RecursionError):
            # Without the reason, which may hold a secret.
            raise ValueError(
                f"{self.state_file} must hold the state of a run, but it is damaged or of another "
                "version: put back a copy, or start a new run in another folder"
            ) from None

    def pass_over(self, stream: str, step: int) -> None:
        """Writes durably that a step's batch could not be made, so that nobody is drawn there.

        An empty file for each, which any process may write, and several at once.
        """
        path = self.secret / f"{self._passed(stream)}{step}"
        with writing(path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                sync(handle)
            finally:
                os.close(handle)
            sync_directory(path.parent)

    def passed_over(self, stream: str) -> frozenset[int]:
        """The steps of a stream that were passed over."""

        def found() -> str:
            with reading(self.secret):
                ends = [path.suffix[1:] for path in self.secret.glob(f"{self._passed(stream)}*")]
            return " ".join(filter(str.isdecimal, ends))

        return frozenset(map(int, processes.from_process_0(found).split()))

    def _passed(self, stream: str) -> str:
        return f"passed over {stream.replace('/', '_')}."

    def save_history(self, rows: list[Row]) -> None:
        """Writes the rows that were shown to history.json."""
        if processes.index() == 0:
            with writing(self.history):
                write_atomically(self.history, json.dumps(rows, indent=1))

    def load_history(self) -> list[Row]:
        """The rows of history.json; [] without it, or a damaged one: checkpoints hold them too."""
        with reading(self.history):
            try:
                rows = json.loads(self.history.read_bytes().decode())
            except (FileNotFoundError, ValueError, RecursionError):
                return []
        is_whole = isinstance(rows, list) and all(
            isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows
        )
        return rows if is_whole else []

    def checked_ledger(self) -> Ledger:
        """The ledger of the run, every line of which was checked with the run's secret.

        Raises:
            ValueError: a line was edited, inserted or removed, or some that were shown are missing.
        """
        # The states first: another process may train here. A stage knows of lines after another's.
        state, *later = [each.load_state() for each in (self, *self.later)]
        ledger = self.open_ledger(state)
        for each in (state, *later):
            self.check_shown(ledger, each)
        return ledger

    def last_shown(self) -> Shown | None:
        """The state that was shown last, as the ledger names it; None before the first."""
        ledger = self.checked_ledger()
        streams = streams_of(ledger, self.load_state())
        return ledger.shown(streams[-1]) if streams else None

    def check_shown(self, ledger: Ledger, state: RunState) -> None:
        """Raises ValueError where the ledger lacks lines that say what was shown.

        Args:
            ledger: the run's.
            state: its secret state.
        """
        if state.head is not None:
            whole = ledger.holds(bytes.fromhex(state.head))
        else:  # of format 2
            found = [ledger.shown(stream) for stream in streams_of(ledger, state)]
            whole = max((each.step for each in found if each), default=0) >= state.shown
        if not whole:
            what = f"{state.shown} steps that were shown" if state.shown else "start of the run"
            raise ValueError(
                f"{self.ledger} must hold the {what}, but lines are missing: what was released "
                "can no longer be accounted for"
            )


def name_of(state: RunState) -> str:
    """The name of a run in its ledger, which is that of its first stream of steps."""
    return state.secret.restored().stream("run").hex()


def is_charged(ledger: Ledger, state: RunState) -> bool:
    """True if a ledger holds a charge of this run, or of this stage of one."""
    name = name_of(state)
    return any(str(entry.stream).partition("/")[0] == name for entry in ledger.reserved)


def streams_of(ledger: Ledger, state: RunState) -> list[str]:
    """The run's streams of steps in its ledger, in the order in which they began."""
    name = name_of(state)
    found = {*ledger.begun, *(str(entry.stream) for entry in ledger.reserved)}
    if state.lost:  # of format 2, whose ledger may not know it yet
        found.add(f"{name}/{state.lost}")
    numbers = {stream: number_of(name, stream) for stream in found}
    return sorted((s for s in found if numbers[s] is not None), key=lambda s: numbers[s] or 0)


def number_of(name: str, stream: str) -> int | None:
    """The number of a stream among those of a run; None for another's, or that of a part."""
    if stream == name:
        return 0
    number = stream.removeprefix(f"{name}/")
    return int(number) if number.isdecimal() and number != stream else None
