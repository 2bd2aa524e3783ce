"""One start of a run: its ledger, its streams, and the checkpoint that it goes on from.

docs/proofs/releases.md, "Runs", proves what is done here.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import SEEDED
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import Chargeable, Issuer
from jaxdp.mechanism import Mechanism
from jaxdp.runs.directory import (
    RunDirectory,
    RunState,
    is_charged,
    name_of,
    number_of,
    streams_of,
)
from jaxdp.training.trainer import TrainState

# Steps that are done again until they are kept would be selected by what ended them.
INTERRUPTED = (
    "the run was interrupted and steps were done again: that no interruption depended on the draws "
    "and the noise of the steps that it took (as running out of memory could) was not verified"
)
# Each copy of a folder that goes on tells what it charged itself, and nothing of the other.
MOVED = (
    "the run's folder may have been moved or copied since the start before (or its storage was "
    "mounted anew): that no other copy of it was continued, whose cost would add to this one's, "
    "was not verified"
)

# The accountant composes what was fixed beforehand; docs/proofs/accounting.md, "Adaptive runs".
EXTENDED = (
    "the run was extended after results were seen (more steps, a further stage, or a run after "
    "another one): epsilon is as if the number of steps and the noise had been fixed before the "
    "first release; a budget that holds without that is Ledger(budget=acc.RenyiFilter(...))"
)
# A ledger that took over another one's charges knows it as it was then.
WENT_ON = (
    "a run that this one was begun after has gone on since: what it has released since then is not "
    "counted here"
)


AFTER = "after "  # and the run's name: its ledger's streams for the charges of other runs


def origin_of(stream: str) -> str:
    """The name that a stream had in its own run's ledger, whoever has taken it over since."""
    return re.sub(rf"^({AFTER}\w+ \d+/)+", "", stream)


class Continuation(enum.Enum):
    """The uses that a run has for the state of a checkpoint."""

    CONTINUE = "goes on in its stream, within what it holds"
    NEW_STREAM = "begins a new stream, in which every further step is charged anew"
    NONE = "holds steps that were done again since"


@dataclasses.dataclass(eq=False)
class Start:
    """A start of a run in this process. **Secret**.

    Attributes:
        directory: of the run.
        state: the secret state, as it is kept there.
        secret: of the run's randomness.
        incarnation: randomness of this start; part of every key.
        ledger: of the run, open.
        steps: of the whole run.
        every: steps of a block, which are reserved together.
        whole: True where releases decide the number of steps: all are charged before the first.
        note: on every charge.
        issuers: of the gradient, and of a private energy.
    """

    directory: RunDirectory
    state: RunState
    secret: Secret
    incarnation: str
    ledger: Ledger
    steps: int
    every: int
    whole: bool
    note: str
    issuers: list[Issuer] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name in the ledger."""
        return name_of(self.state)

    @property
    def streams(self) -> list[str]:
        """The run's streams of steps in the ledger, in the order in which they began."""
        return streams_of(self.ledger, self.state)

    @property
    def stream(self) -> str:
        """The name of the stream that the run's releases are charged to."""
        return self.streams[-1]

    def begin_stream(self, state: TrainState) -> None:
        """Begins a stream: the first, or another where steps that were shown are done again."""
        name, known = self.name, self.streams
        if known:
            name = f"{name}/{(number_of(name, known[-1]) or 0) + 1}"
        self.ledger.new_stream(name, (state.step, past_of(state)))

    def show(self, step: int, past: bytes = b"") -> None:
        """Records durably that a state may be seen from now on.

        Args:
            step: of the state.
            past: of the state; b"" for a checkpoint that nobody could read.
        """
        self.ledger.show(self.stream, step, past)
        self._keep_head(step)

    def show_release(self, stream: str, digest: bytes) -> None:
        """Records what was released before the first step, by its hash; it names no state."""
        self.ledger.show(stream, 1, digest)
        self._keep_head(self.state.shown)

    def _keep_head(self, shown: int) -> None:
        """Keeps the ledger's head, so that a ledger cut off behind it is refused later."""
        head = self.ledger.head.hex()
        if (shown, head) != (self.state.shown, self.state.head):
            self.save_state(shown=shown, head=head)

    def save_state(self, **changes: int | str) -> None:
        """Changes fields of the secret state and writes it durably."""
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]
        self.directory.save_state(self.state)

    def issuer(self, mechanism: Chargeable, step: int, part: str = "") -> Issuer:
        """Returns an issuer of the run's steps from ``step`` on, which reserves them anew.

        Args:
            mechanism: whose events are charged.
            step: of the state that the run goes on from.
            part: a second release of each step, such as "energy"; it has a stream of its own.
        """
        secret = self.secret.child(part) if part else self.secret
        is_one = getattr(mechanism, "strategy", None) is not None
        notes = [self.note] + [SEEDED] * secret.reproducible
        stream = f"{self.stream}/{part}" if part else self.stream
        issuer = Issuer(
            mechanism,
            self.ledger,
            secret,
            stream,
            incarnation=self.incarnation,
            first_step=step,
            reserve=self.every,
            source="mechanism",
            resumed=True,
            # Steps of an epoch, or a run, that is one event are done again on its one draw.
            draws=self.name if is_one else stream,
            note="; ".join(filter(None, notes)),
            passed_over=self.directory.passed_over(stream),
            pass_over=functools.partial(self.directory.pass_over, stream),
        )
        self.issuers.append(issuer)
        if self.whole or self.state.until_enough or self.ledger.counts_whole(stream):
            issuer.reserve(self.steps, whole=True)
        return issuer

    def check_room(self, step: int) -> None:
        """Raises BudgetExceededError where a budget does not admit all steps from one on.

        Before any of them is charged: a block that ends in its middle would be shown by nobody.
        """
        if self.ledger._budget is None:
            return
        most = step + min((issuer.room() or 0 for issuer in self.issuers), default=self.steps)
        if most < self.steps:
            self.save_state(steps=most)  # with which the run is finished, and may be extended
            remedy = f"fit({most}) trains as many" if most > step else "it is spent"
            raise acc.BudgetExceededError(
                f"steps must be at most {most}, which the ledger's budget admits, got {self.steps}:"
                f" {remedy}. Nothing was charged"
            )

    def use_of(
        self, state: TrainState, mechanism: Mechanism, given_up: bool = False
    ) -> Continuation:
        """Returns the use of a checkpoint's state, or of that before the first step.

        The run continues only from a state that descends from the one shown last, so that of each
        step of a stream one version at most is ever visible; a new stream begins only at a state
        that was shown itself. In several processes process 0 decides.

        Args:
            state: the state.
            mechanism: of the run.
            given_up: True if the owner sets a later state aside, which nobody could read.

        Raises:
            ValueError: the ledger lacks charges behind the state, or the steps behind it cannot be
                charged once more.
        """
        return Continuation[
            processes.from_process_0(lambda: self._use_of(state, mechanism, given_up).name)
        ]

    def _use_of(self, state: TrainState, mechanism: Mechanism, given_up: bool) -> Continuation:
        past, ledger, streams = past_of(state), self.ledger, self.streams
        if not ledger.holds(past) or (given_up and not streams):
            raise ValueError(
                f"{self.directory.ledger} must hold every charge of the last checkpoint, but some "
                "are missing: what was released can no longer be accounted for"
            )
        if not given_up and self._descends(state, mechanism):
            return Continuation.CONTINUE

        # It holds other versions of steps that were shown since: only if it was shown itself may it
        # be seen again, with everything behind it charged anew.
        of_before = ledger.renewed and not ledger.holds(past, since=ledger.renewed)
        shown = any(ledger.was_shown(stream, state.step, past) for stream in streams)
        if state.step and not of_before and not shown:
            return Continuation.NONE
        if mechanism.strategy is not None and not getattr(mechanism.sampling, "tail_again", False):
            raise ValueError(
                f"the checkpoint must hold all steps that were shown, got one after {state.step}: "
                "steps with correlated noise that is amplified by sampling cannot be repeated, for "
                f"no bound is proven. Put back the last checkpoint of {self.directory.path}, or "
                "begin another run, whose cost adds to this one's"
            )
        return Continuation.NEW_STREAM

    def _descends(self, state: TrainState, mechanism: Mechanism) -> bool:
        """True if a state is the one that was shown last, or was made from it."""
        if not self.streams:
            return True
        past, last = past_of(state), self.ledger.shown(self.stream)
        if last is not None and last.past is not None:
            made = state.step >= last.step and self.ledger.holds(past, since=last.start)
            return made or (state.step, past) == (last.step, last.past)
        # Of format 2, whose lines name no states.
        if state.step < max(self.state.shown, last.step if last else 0):
            return False
        number = number_of(self.name, self.stream)
        if mechanism.strategy is None or not number:
            return True
        if self.state.branch is None or self.state.lost < number:  # older than the ledger
            return False
        start, since = map(bytes.fromhex, self.state.branch)
        return past == start or self.ledger.holds(past, since)

    def restarted_since(self, state: TrainState) -> bool:
        """True if the stream began after a state was made, for steps that others had shown."""
        first = self.ledger.first_shown(self.stream)
        return (
            bool(number_of(self.name, self.stream))
            and first is not None
            and not self.ledger.holds(past_of(state), since=first.start)
        )


def _went_on(after: Sequence[RunDirectory], taken: Sequence[str]) -> bool:
    """True where a run whose charges were taken over has been charged since.

    Raises:
        ValueError: it is another run.
    """
    found = [each.checked_ledger() if each.exists() else None for each in after]
    for each, ledger, head in zip(after, found, taken, strict=True):
        if ledger is not None and not ledger.holds(bytes.fromhex(head)):
            raise ValueError(
                "after must be the runs that this one was begun after, in their order, or left out "
                f"where it goes on, got {each.path}: what that one has released is not counted here"
            )
    return any(
        ledger is not None and ledger.head.hex() != head
        for ledger, head in zip(found, taken, strict=True)
    )


def past_of(state: TrainState) -> bytes:
    """The head of the ledger that holds the releases behind a state."""
    return np.asarray(state.past, np.uint32).tobytes()


def _let_go(ledger: Ledger, error: type[BaseException] | None, *_: object) -> None:
    """Lets others write to a ledger's file after an error; the ledger itself may go on."""
    if error is not None and processes.count() == 1:
        ledger._rows.close()


@contextlib.contextmanager
def begin(
    directory: RunDirectory,
    state: RunState,
    configuration: Callable[[], str],
    *,
    steps: int,
    every: int,
    planned: int | None = None,
    whole: bool = False,
    note: str = "",
    shared: Ledger | None = None,
    after: Sequence[RunDirectory] = (),
) -> Iterator[Start]:
    """Records a new start of a run durably, before anything is drawn; yields it, its ledger open.

    Args:
        directory: locked by the caller.
        state: its secret state before this start.
        configuration: gives all public numbers and names of the run as a text. Where a person chose
            the seed it goes into the randomness, so that another run with that seed has another.
        steps: as for ``Start``.
        every: as for ``Start``.
        planned: that the noise was calibrated for; None for none.
        whole: as for ``Start``.
        note: as for ``Start``.
        shared: the ledger of several runs that this one is charged to, if it was given as an
            object; it stays open, but after an error where it was not before.
        after: other runs, whose charges the ledger takes over before the first step.

    Raises:
        ValueError: the ledger lacks what it must hold, or holds steps of this run already.
    """
    secret = state.secret.restored()
    if not directory.exists():  # a ledger whose secret a crash has lost could not be read
        directory.save_state(state)
    with contextlib.ExitStack() as ends:
        ledger = directory.open_ledger(state, shared)
        if ledger is not shared:
            ends.callback(ledger.close)
        elif not ledger._rows.is_open:
            ends.push(functools.partial(_let_go, ledger))
        ledger.join()
        # Before a checkpoint is set aside, which alone may know what the ledger has lost.
        directory.check_shown(ledger, state)
        # A stage whose start failed before its first charge may have left the name of its stream.
        held = is_charged(ledger, state) if directory.stage else streams_of(ledger, state)
        if held and not state.starts:
            raise ValueError(
                f"ledger must hold no step of a run that begins, but {directory.ledger} does: give "
                "it another secret or stage, or put back the secret folder that it had"
            )

        # What other runs have released counts from the first step on. A crash may have come in
        # between: charged once more it costs nothing.
        taken = state.after
        if not state.starts and after:
            found = [each.checked_ledger() for each in after]
            for number, other in enumerate(found):
                ledger.take_over(other, f"{AFTER}{name_of(state)} {number}")
            taken = tuple(other.head.hex() for other in found)
        elif after and _went_on(after, taken or ()):
            ledger.trust(WENT_ON)

        # What was chosen by looking at releases is written down before it has any of its own.
        fixed = planned if state.planned is None else state.planned
        longer = state.shown and fixed is not None and steps > fixed
        if longer or (not state.starts and ledger.reserved):
            ledger.trust(EXTENDED)
        most = max(each for each in (state.planned, planned, steps) if each is not None)
        state = dataclasses.replace(state, steps=steps, planned=most, after=taken)

        # Each start has a line of its own, so that what two copies of a folder take and write after
        # their start can be distinguished, and fresh randomness for draws and noise.
        before = ledger.head
        _, place = ledger.new_stream(
            f"start {processes.from_process_0(lambda: secrets.token_hex(16))}"
        )
        fresh = processes.from_process_0(lambda: secrets.token_hex(16))
        if secret.reproducible:
            # A seed that a person chose gives the same to every such run that was never
            # interrupted; copies that went on separately have other ledgers.
            named = f"{configuration()}|{place}|{before.hex()}".encode()
            fresh = hashlib.blake2b(named, digest_size=16).hexdigest()

        # A copy of the folder may have gone on elsewhere: that cannot be seen here, so it is said.
        folder = processes.from_process_0(directory.place)
        if state.place not in (None, folder):  # runs of older versions did not write it down
            ledger.trust(MOVED)
        # With the head: a ledger without what was taken over is refused from here on.
        starts, head = (*(state.starts or ()), fresh), ledger.head.hex()
        state = dataclasses.replace(state, starts=starts, place=folder, head=head)
        directory.save_state(state)
        start = Start(directory, state, secret, fresh, ledger, steps, every, whole, note)
        try:
            yield start
        finally:  # a later start may be charged to the same object
            for issuer in start.issuers:
                ledger._retire(issuer)
