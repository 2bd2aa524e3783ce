"""A training run in a folder: durable ledger, checkpoints, and a crash that costs nothing.

Nothing of a step is shown (rows, evaluations, files outside ``secret/``) before the checkpoint that
holds it is durable. Steps that a crash takes were then never seen: they are done again, on other
draws and with other noise, within the charge that they had.
"""

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.accounting import Bound, Relation
from jaxdp.devices import processes, shards
from jaxdp.devices.placement import placement, resolve_placement
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import SEEDED
from jaxdp.ledger.seeds import AT_ONCE, Secret
from jaxdp.ledger.tickets import Chargeable, Issuer
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.runs import descent
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.descent import Going, past_of
from jaxdp.runs.directory import RunDirectory, name_of, number_of, streams_of
from jaxdp.runs.state import RunState
from jaxdp.sampling import Sampler, Source
from jaxdp.training.step import PrivateStep
from jaxdp.training.trainer import Trainer, TrainState
from jaxdp.types import ClipInfo, LossFn, PyTree, StepInfo

# Called with the number of steps taken, and with the row of a block once that is durable, or None.
Progress = Callable[[int, dict[str, Any] | None], None]
Row = dict[str, Any]
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
Energy = PublicEnergy | PrivateEnergy | None


class Stepper(Protocol):
    """A ``Trainer``, or what takes the steps of a run in its place."""

    def batches(self, steps: int) -> Iterator[PyTree]:
        """The next batches, as many as steps; no step beyond them is charged."""

    def step_with_info(
        self, state: TrainState, batch: PyTree, return_info: bool = False
    ) -> tuple[TrainState, StepInfo, list[ClipInfo]]:
        """One step, and its clipping information where ``return_info``."""

    def released(self, state: TrainState) -> PyTree:
        """The parameters to evaluate and publish."""

    def epsilon(self, delta: float, relation: Relation) -> Bound:
        """Bounds on epsilon for everything charged and handed out so far."""


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A run that was trained.

    Attributes:
        params: the released parameters.
        ledger: what was charged.
        history: the rows that were shown, one a block.
        reproducible: whether a person chose the seed.
        seconds: wall time of this process's part of the run, data loading excluded. Depends on the
            private data through the sizes of the draws: not to be published.
        steps_run: how many steps this process took.
    """

    params: PyTree
    ledger: Ledger
    history: list[Row]
    reproducible: bool
    seconds: float
    steps_run: int


@dataclasses.dataclass(frozen=True, eq=False)
class RunPlan:
    """A description of what a run trains and what it shows.

    Attributes:
        loss_fn: of one example.
        algorithm: mechanism and optimizer.
        source: the records.
        params: from a secret to the parameters before the first step.
        steps: how many.
        every: steps of a block: at its end the model is evaluated and checkpointed.
        row: from (state, trainer) at the end of a block to what is shown of it, once it is durable;
            computed from releases and public data.
        seen: from the state after each step to what is kept of it for ``block``; None for nothing.
        block: from (first step, what ``seen`` kept, clip infos) to more of the row; what it writes
            it writes under ``secret/``.
        evaluate: from parameters that are durable to more of the row: a user's function, which may
            show what it sees.
        durable: called with the row of a step whose checkpoint is durable, and at the start with
            that of the state that the run goes on from: what may be seen from now on.
        energy: from a function that makes samplers on the run's ledger to what judges candidates.
        enough: from the public part of a durable block's row to whether the run ends there. Then
            all ``steps`` are charged before the first: how many are taken is itself a release.
        told: whether ``block`` is handed clipping information.
        note: what the ledger says of every charge.
        physical_batch_size: records of one compiled microbatch; None for that of least work, "auto"
            for as many as fit, which is written down at the first start.
        mesh: whose devices share the rows of a step; None for one device, or as parameters lie.
        data_axes: as for ``jaxdp.Trainer``.
        trainer: from (run, this plan, state) to what takes the steps in place of a ``Trainer``,
            with tickets of ``run.issuer``; None makes a ``Trainer``.
        traceable: whether parameters on one device and ``init`` can be made by one compilation.
        set_aside_unreadable: as for ``jaxdp.Run``.
    """

    loss_fn: LossFn
    algorithm: Algorithm
    source: Source
    params: Callable[[Secret], PyTree]
    steps: int
    every: int
    row: Callable[[TrainState, Stepper], Row]
    seen: Callable[[TrainState], jax.Array] | None = None
    block: Callable[[int, list[jax.Array], list[ClipInfo]], Row] | None = None
    evaluate: Callable[[PyTree], Row] | None = None
    durable: Callable[[Row], None] | None = None
    energy: Callable[[Callable[..., Sampler]], Energy] | None = None
    enough: Callable[[Row], bool] | None = None
    told: bool = False
    note: str = ""
    physical_batch_size: int | Literal["auto"] | None = None
    mesh: jax.sharding.Mesh | None = None
    data_axes: Sequence[str] | None = None
    trainer: Callable[["Started", "RunPlan", TrainState], Stepper] | None = None
    traceable: bool = False
    set_aside_unreadable: bool = False


@dataclasses.dataclass(eq=False)
class Started:
    """The secret state of a run in this process.

    Attributes:
        directory: where it lies.
        state: as it is kept there.
        secret: of its randomness.
        incarnation: of this start; goes into every key.
        ledger: open.
        issuers: of the gradient, and of a private energy.
    """

    directory: RunDirectory
    state: RunState
    secret: Secret
    incarnation: str
    ledger: Ledger
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

    def shows(self, step: int, past: bytes = b"") -> None:
        """Writes down that a state may be seen from now on.

        Args:
            step: of the state.
            past: of the state; b"" for a checkpoint that nobody could read.
        """
        self.ledger.show(self.stream, step, past)
        self._keep_head(step)

    def shows_release(self, stream: str, digest: bytes) -> None:
        """Writes down what was released before the first step, by its hash; it names no state."""
        self.ledger.show(stream, 1, digest)
        self._keep_head(self.state.shown)

    def _keep_head(self, shown: int) -> None:
        head = self.ledger.head.hex()
        if (shown, head) != (self.state.shown, self.state.head):
            self.state = dataclasses.replace(self.state, shown=shown, head=head)
            self.directory.save_state(self.state)

    def issuer(self, mechanism: Chargeable, step: int, plan: RunPlan, part: str = "") -> Issuer:
        """The issuer of a mechanism of the run from ``step`` on; it reserves its steps anew."""
        secret = self.secret.child(part) if part else self.secret
        is_one = getattr(mechanism, "strategy", None) is not None
        said = [plan.note] + [SEEDED] * secret.reproducible
        stream = f"{self.stream}/{part}" if part else self.stream
        made = Issuer(
            mechanism,
            self.ledger,
            secret,
            stream,
            incarnation=self.incarnation,
            first_step=step,
            reserve=plan.every,
            source="mechanism",
            resumed=True,
            # Steps of an epoch, or a run, that is one event are done again on its one draw.
            draws=self.name if is_one else stream,
            note="; ".join(filter(None, said)),
        )
        self.issuers.append(made)
        if plan.enough is not None or self.state.until_enough or self.ledger.whole(stream):
            made.reserve(plan.steps, whole=True)
        return made


@contextlib.contextmanager
def started(
    directory: RunDirectory, state: RunState, configuration: Callable[[], str]
) -> Iterator[Started]:
    """Writes down a new start of a run, before anything is drawn.

    Args:
        directory: locked by the caller.
        state: its secret state before this start.
        configuration: gives all public numbers and names of the run as a text. Where a person chose
            the seed it goes into the randomness, so that another run with that seed has another.
    """
    secret = state.secret.restored()
    if not directory.exists():  # a ledger whose secret a crash has lost could not be read
        directory.save_state(state)
    ledger = Ledger(directory.ledger, key=secret.stream("ledger"))
    try:
        yield _begun(directory, state, configuration, secret, ledger)
    finally:
        ledger.close()


def _begun(
    directory: RunDirectory,
    state: RunState,
    configuration: Callable[[], str],
    secret: Secret,
    ledger: Ledger,
) -> Started:
    ledger.join()
    # Before a checkpoint is set aside, which alone may know what the ledger has lost.
    directory.check_shown(ledger, state)
    head = ledger.head
    # Of its own: what two copies of a folder take and write after their start can be told apart.
    _, place = ledger.new_stream(f"start {processes.from_process_0(lambda: secrets.token_hex(16))}")
    fresh = processes.from_process_0(lambda: secrets.token_hex(16))
    if secret.reproducible:
        # A seed that a person chose gives the same to every such run that was never interrupted;
        # copies that went on apart have other ledgers.
        named = f"{configuration()}|{place}|{head.hex()}".encode()
        fresh = hashlib.blake2b(named, digest_size=16).hexdigest()
    lies = processes.from_process_0(directory.place)
    if state.place not in (None, lies):  # runs of older versions did not write it down
        ledger.trust(MOVED)
    state = dataclasses.replace(state, starts=(*(state.starts or ()), fresh), place=lies)
    directory.save_state(state)
    return Started(directory, state, secret, fresh, ledger)


def public(row: Row) -> Row:
    """A row without its un-noised statistics, which no guarantee covers, and without a hash."""
    return {name: value for name, value in row.items() if name not in ("sensitive", "canaries")}


def trained(
    run: Started, plan: RunPlan, progress: Progress
) -> tuple[PyTree, list[Row], int, float]:
    """Trains the steps that are left; returns (released, all rows, steps taken now, seconds)."""
    checkpoints = Checkpoints(run.directory.checkpoints)
    try:
        state, rows = _restored(checkpoints, run, plan)
        run.shows(state.step, past_of(state))
        trainer = (plan.trainer or _trainer)(run, plan, state)
        if rows and descent.began_since(run, state):  # the row is older, and knows less of the cost
            rows[-1] |= plan.row(state, trainer)
        if rows and plan.durable is not None:
            plan.durable(rows[-1])
        if rows and plan.evaluate is not None:  # a crash may have come before it
            rows[-1] |= plan.evaluate(trainer.released(state))
        progress(state.step, public(rows[-1]) if rows else None)
        first, began = state.step, time.perf_counter()
        state = _blocks(run, trainer, state, rows, plan, checkpoints, progress)
        return trainer.released(state), rows, state.step - first, time.perf_counter() - began
    finally:
        checkpoints.close()


def _trainer(run: Started, plan: RunPlan, state: TrainState) -> Trainer:
    def sampler(mechanism: Mechanism, num_records: int, rows: int) -> Sampler:
        issuer = run.issuer(mechanism, state.step, plan, "energy")
        return Sampler(mechanism.sampling, num_records, rows, issuer)

    rows = plan.physical_batch_size
    if rows == "auto":
        rows = run.state.physical_batch_size or rows
    trainer = Trainer(
        plan.loss_fn,
        plan.algorithm,
        source=plan.source,
        ledger=run.ledger,
        energy=None if plan.energy is None else plan.energy(sampler),
        physical_batch_size=rows,
        mesh=plan.mesh,
        data_axes=plan.data_axes,
        issuer=run.issuer(plan.algorithm.mechanism, state.step, plan),
    )
    if rows == "auto":  # written down: on a device with other memory the run goes on as it began
        trainer.choose_physical_batch_size(state.params)
        run.state = dataclasses.replace(run.state, physical_batch_size=trainer.physical_batch_size)
        run.directory.save_state(run.state)
    trainer.resume(state)
    return trainer


def _blocks(
    run: Started,
    trainer: Stepper,
    state: TrainState,
    rows: list[Row],
    plan: RunPlan,
    checkpoints: Checkpoints,
    progress: Progress,
) -> TrainState:
    saved = _Pending(run, checkpoints, plan, progress)
    began, norms = state.step, []
    seen: list[jax.Array] = []
    infos: list[ClipInfo] = []
    for batch in _block_by_block(run, trainer, state.step, plan, rows):
        state, info, clipped = trainer.step_with_info(state, batch, return_info=plan.told)
        if state.step == began + 1:
            checkpoints.prepare()  # while the device works, and not after a whole block
        norms.append(info.update_norm)
        seen += [] if plan.seen is None else [plan.seen(state)]
        infos += clipped
        progress(state.step, None)
        saved.show_if_durable()
        if state.step % plan.every and state.step < plan.steps:
            continue
        first = state.step - len(norms)
        row = {"step": state.step, "update_norm": float(np.mean(jax.device_get(norms)))}
        row |= plan.row(state, trainer)
        row |= {} if plan.block is None else plan.block(first, seen, infos)
        rows.append(row)
        saved.show()
        checkpoints.save(state, rows)
        saved.row, saved.past = row, past_of(state)
        if plan.evaluate is not None:
            checkpoints.wait()
            run.shows(state.step, saved.past)
            row |= plan.evaluate(trainer.released(state))
        if plan.enough is not None:  # it may show what it sees
            saved.show()
        norms, seen, infos = [], [], []
    saved.show()
    return state


def _block_by_block(
    run: Started, trainer: Stepper, step: int, plan: RunPlan, rows: list[Row]
) -> Iterator[PyTree]:
    """The batches that are left. Each block is reserved whole before its first step.

    So the order of the ledger's lines does not tell how long steps took, which is private.
    """
    while step < plan.steps and not (rows and plan.enough and plan.enough(public(rows[-1]))):
        end = min(plan.steps, (step // plan.every + 1) * plan.every)
        for issuer in run.issuers:
            issuer.reserve(end)
        yield from trainer.batches(end - step)
        step = end


@dataclasses.dataclass(eq=False)
class _Pending:
    """A row that is shown once the checkpoint that holds it is durable."""

    run: Started
    checkpoints: Checkpoints
    plan: RunPlan
    progress: Progress
    row: Row | None = None
    past: bytes = b""

    def show_if_durable(self) -> None:
        # Several processes write it down together, at the end of a block.
        if self.row is not None and processes.count() == 1 and not self.checkpoints.is_saving:
            self.show()

    def show(self) -> None:
        if self.row is None:
            return
        self.checkpoints.wait()
        self.run.shows(self.row["step"], self.past)
        if self.plan.durable is not None:
            self.plan.durable(self.row)
        self.progress(self.row["step"], public(self.row))
        self.row = None


def _restored(
    checkpoints: Checkpoints, run: Started, plan: RunPlan
) -> tuple[TrainState, list[Row]]:
    fresh = TrainState(*_initial(run, plan), 0, np.frombuffer(run.ledger.head, np.uint32))
    mechanism = plan.algorithm.mechanism

    def usable(state: TrainState, given_up: bool) -> bool:
        return descent.agreed(run, state, mechanism, given_up) is not Going.NOT

    # Written down first, by its step alone: nothing goes on from what somebody may have read.
    give_up = run.shows if plan.set_aside_unreadable else None
    state, rows = checkpoints.restore(fresh, give_up, usable) or (fresh, [])
    if not run.streams or descent.agreed(run, state, mechanism) is Going.ANEW:
        run.begin_stream(state)
    elif any(e.stream == run.stream and e.end > state.step for e in run.ledger.entries):
        run.ledger.trust(INTERRUPTED)
    return state, rows


def _initial(run: Started, plan: RunPlan) -> tuple[PyTree, PyTree]:
    """The parameters and the optimizer's state before the first step."""
    init = PrivateStep.of(plan.algorithm, plan.loss_fn).init

    def both(params: PyTree) -> tuple[PyTree, PyTree]:
        # Copied: parts that share a buffer could not all be donated.
        first, state = jax.tree.map(jnp.array, (params, init(params)))
        return first, state

    made = jax.jit(both, compiler_options=AT_ONCE) if plan.traceable else both
    params, opt_state = made(plan.params(run.secret))
    place = resolve_placement(
        None if plan.mesh is None else placement(plan.mesh, plan.data_axes), params
    )
    if place is None:
        return params, opt_state
    params = place.put(params)
    held = PrivateStep.of(plan.algorithm, plan.loss_fn).sharded_as(params, place).shardings
    return tuple(shards.put((params, opt_state), held))
