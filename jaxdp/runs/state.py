"""The secret state of a run, as ``secret/run.json`` keeps it."""

import dataclasses
from typing import Any, ClassVar

from jaxdp.ledger.seeds import Secret
from jaxdp.runs.written import Written


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
        head: of the ledger after the last line that says what was shown, hexadecimal.
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
        "head",
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
    head: str | None = None
