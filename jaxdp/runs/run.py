"""``jaxdp.Run``: a model trained in a folder, with a durable ledger, which survives a crash.

Nothing of a step is shown (rows, evaluations, files outside ``secret/``) before the checkpoint that
holds it is durable. Steps that a crash takes were then never seen: they are done again, on other
draws and with other noise, within the charge that they had. docs/proofs/releases.md proves it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.events import of_users
from jaxdp.accounting.flat import require_bound
from jaxdp.clipping import losses, options
from jaxdp.clipping.options import (
    SPLIT_NNX,
    ClippingOptions,
    check_arrays,
    check_option_names,
)
from jaxdp.devices import processes, shards
from jaxdp.devices.placement import placement, resolve_placement
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.merged import blocks_drawn
from jaxdp.ledger.seeds import AT_ONCE, Secret
from jaxdp.mechanism import Mechanism
from jaxdp.noise import MadeAgain
from jaxdp.optimizers.algorithm import Algorithm, as_algorithm
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.recipes import encoders
from jaxdp.runs import bar, program, reporting
from jaxdp.runs import canaries as canary
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.directory import SENSITIVE_NOTE, KeptSecret, Row, RunDirectory, RunState
from jaxdp.runs.export import Only, export_params, in_structure_of, lacks_frozen, shown_params
from jaxdp.runs.failures import in_words
from jaxdp.runs.files import writing
from jaxdp.runs.opened import OpenedRun
from jaxdp.runs.starts import INTERRUPTED, Continuation, Start, begin, origin_of, past_of
from jaxdp.sampling import Sampler, Source, as_source, fingerprint
from jaxdp.sampling.hashes import check_repeatable
from jaxdp.training.batches import placed
from jaxdp.training.step import PrivateStep
from jaxdp.training.trainer import Trainer, TrainState, look_through
from jaxdp.types import ClipInfo, LossFn, PyTree, StepInfo

if TYPE_CHECKING:
    from jaxdp.audit.algorithms import EpsilonAudit
    from jaxdp.audit.diagnosis import Diagnosis

# Called with the number of steps taken, and with the row of a block once that is durable, or None.
Progress = Callable[[int, Row | None], None]
Evaluate = Callable[[PyTree], Mapping[str, float]]
Energy = PublicEnergy | PrivateEnergy | None


class Stepper(Protocol):
    """A ``Trainer``, or what takes the steps of a run in its place."""

    def batches(self, steps: int) -> Iterator[PyTree]:
        """Iterates over the next batches; no step beyond them is charged."""

    def step_with_info(
        self, state: TrainState, batch: PyTree, return_info: bool = False
    ) -> tuple[TrainState, StepInfo, list[ClipInfo]]:
        """Takes one step; where ``return_info``, returns its clipping information too."""

    def released(self, state: TrainState) -> PyTree:
        """The parameters to evaluate and publish."""

    def epsilon(self, delta: float, relation: acc.Relation) -> acc.Bound:
        """Bounds on epsilon for everything charged and handed out so far."""


class Config(Protocol):
    """The public values of a run, a dataclass that is kept in ``secret/run.json``."""

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The configuration that ``to_dict`` wrote, also in an older version."""


class Prepared(NamedTuple):
    """The parts of a run that are known once all is released that comes before its first step.

    Attributes:
        source: the records.
        canaries: candidates of an audit.
        test: from released parameters to more of a row; it shows nothing itself.
        energy: from (loss, source, factory of samplers on the run's ledger) to what judges
            candidates.
    """

    source: Source
    canaries: canary.Canaries | None = None
    test: Callable[[PyTree], Row] | None = None
    energy: Callable[[LossFn, Source, Callable[..., Sampler]], Energy] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Parts:
    """The parts of a run that ``jaxdp train`` and the papers give beyond a user's own.

    Attributes:
        config: kept with the run, which must have the same when it goes on.
        is_new: True where the folder must be new, False where it must hold a run; None for either.
        fingerprint: from a secret to a keyed hash of the records as they were loaded.
        prepare: from a start and the canaries to the parts that must be released first (such as
            whitened records); it charges for them.
        enough: from the public part of a durable row to True where the run ends there. Then all
            steps are charged before the first: how many are taken is itself a release.
        sensitive: whether un-noised statistics are written to a file of their own.
        stepper: from a start and the state it goes on from to what takes the steps, with tickets of
            ``start.issuer``; None makes a ``Trainer``.
        looked_through: True where the records were looked through before, or never are.
    """

    config: Config | None = None
    is_new: bool | None = None
    fingerprint: Callable[[Secret], str] | None = None
    prepare: Callable[[Start, canary.Canaries | None], Prepared] | None = None
    enough: Callable[[Row], bool] | None = None
    sensitive: bool = False
    stepper: Callable[[Start, TrainState], Stepper] | None = None
    looked_through: bool = False


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


# A run whose releases count before those of another one.
Earlier: TypeAlias = "Run | OpenedRun | str | os.PathLike[str]"


class Run:
    """A training run of your own model on your own data, in a folder.

    The folder holds the durable ledger (``ledger.jsonl``), the curves (``history.json``), a page to
    sign (``report.html``) and, for its owner alone, checkpoints and secrets (``secret/``). A run
    that was interrupted goes on with another ``Run(...).fit()`` on the same folder: nothing is
    charged twice, no noise is used twice, and nothing was shown of the steps that are done again.

    Formal guarantee: everything in the folder outside ``secret/``, the rows handed to ``progress``
    and the parameters that ``fit`` returns satisfy ``epsilon(delta)``, as for
    ``jaxdp.Trainer``, provided that ``evaluate`` looks at public data only.

    Args:
        folder: of the run; made if it is not there.
        loss_fn: the loss of one example, as for ``jaxdp.Trainer``.
        mechanism: from ``jaxdp.dp_sgd``, or a ``jaxdp.Algorithm``.
        optimizer: any optax optimizer; None for a ``Algorithm``.
        source: the records, as for ``jaxdp.Trainer``; each reads the same every time, for a run
            that is taken up again knows its records by what it reads. Augment by
            ``jaxdp.augmented``, not in the source.
        params: the parameters before the first step, computed from no record.
        trainable: what to train, as for ``jaxdp.Trainer``. The folder holds what is trained,
            and of what is frozen the hash: a run that goes on must be given the same numbers.
        constants: as for ``jaxdp.Trainer``: arrays that are declared public.
        evaluate: from the parameters to numbers by name, such as the accuracy on a validation set.
            The set must be **public**: what it returns is shown, beside a row's own ``step``,
            ``epsilon`` and ``update_norm``; the first heads the report.
        every: steps between checkpoints and evaluations; None takes a twentieth of the run.
        progress: called with the number of steps taken, and with a row that is durable or None;
            None shows a bar in a terminal and in a notebook.
        log: called with every row once it is durable and the ledger says that it was shown: a dict
            of ``step``, ``epsilon``, ``update_norm`` and the numbers of ``evaluate``. In several
            processes process 0 calls it. A run that goes on hands over no row again but one that
            was being handed over when it ended. docs/howto/watch_a_run.md has TensorBoard and
            others.
        secret: of a new run; None takes one from the operating system.
        physical_batch_size: records of one compiled microbatch; None takes that of least work,
            "auto" as many as the device's memory holds, written down when the run begins.
        mesh: whose devices share the rows of a step, as for ``jaxdp.Trainer``; a run may go on with
            another number of devices. In several processes it holds devices of all, and the folder
            is on storage that all of them see.
        data_axes: as for ``jaxdp.Trainer``.
        delta: of the guarantee; None takes the one that the noise was calibrated for. Without
            either, rows have no epsilon and there is no report.
        relation: which data sets are neighbours; None takes that of the mechanism's budget
            (``Mechanism.neighbours``). Like ``delta`` it is fixed when the run begins: where none
            is given, a run that goes on keeps its own.
        canaries: candidates of an audit, each put in by its own coin; ``audit`` reads what the run
            released of them. A number of gradients in one coordinate, or arrays [m, ...] of
            records like the source's: **public**, and none in the source.
        canary_scores: of canaries that are records. "trajectory" compares each one's own gradient
            with the noisy one at every step, which costs a gradient of every candidate in every
            step; "last" compares its losses before the first step and after the last alone.
        about: words for the report by name, such as {"Title": "Loans", "Model": "ResNet-18"};
            public.
        features: the ``jaxdp.encoders.Encoder`` that made the records' numbers (the run makes
            none), or public words for one. The page names it, and ``unverified`` that it was taken
            as public.
        average: decay of an average of the iterates, released in their place; None for none.
        report: False leaves out the page, which takes about a second; ``report`` writes it.
        same_program: True goes on although optimizer, loss or first parameters are not those that
            the run was begun with, which ``unverified`` and the page then say; from then on it goes
            on with both. False refuses them, and names what changed. Under other versions, or on
            another machine, where they cannot be compared, a run goes on with a warning.
        set_aside_unreadable: True moves checkpoints out of the way that cannot be read, for
            whatever reason, and goes on from one before them or from the beginning; the steps up to
            them are **charged anew**. For one start, once nothing else helps: False raises what the
            reason is, and changes nothing.
        ledger: that other runs and trainers charge, too, a path or a ``jaxdp.Ledger`` with one:
            ``epsilon``, rows and report count all that it holds. A key that it has is kept in
            ``secret/``. None takes ``ledger.jsonl`` of the folder.
        after: runs, or their folders, on the same people's records: what their ledgers hold is
            charged to this run's before its first step, so that its epsilon covers both. Once, as
            they are by then; steps that are reserved count.
        extend: the name of a further stage of the run in the folder, which must be finished: from
            its released parameters it trains with what is given here. ``params`` gives their
            structure, and what no stage has trained. Steps, rows and the ledger go on, the
            optimizer's state begins anew. A stage of this name that has begun goes on.
        missing_values: True if the loss expects NaN in records, for values that are missing. False
            refuses records in memory or a memory map with NaN, before the first step of the run;
            infinite numbers are refused either way.
        look_through: True reads records of other sources too, one by one, before the first step:
            numbers that are not finite, and records that cannot be read, are then found at no cost.
        clipping: ``engine``, ``microbatch_size``, ``rng_name``, as for ``jaxdp.Trainer``.

    Raises:
        ValueError: an argument is not what it should be; at ``fit``, the folder holds another
            run, or one of other data, or another process trains there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | RunDirectory,
        loss_fn: LossFn,
        mechanism: Mechanism | Algorithm,
        optimizer: optax.GradientTransformation | None = None,
        source: PyTree = None,
        *,
        params: PyTree,
        trainable: PyTree | Callable[[str], bool] | None = None,
        constants: PyTree = None,
        evaluate: Evaluate | None = None,
        every: int | None = None,
        progress: Progress | None = None,
        log: Callable[[Row], None] | None = None,
        secret: Secret | None = None,
        physical_batch_size: int | Literal["auto"] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        data_axes: Sequence[str] | None = None,
        delta: float | None = None,
        relation: acc.Relation | None = None,
        canaries: int | PyTree = 0,
        canary_scores: Literal["trajectory", "last"] = "trajectory",
        about: Mapping[str, str] | None = None,
        features: encoders.Encoder | str | None = None,
        average: float | None = None,
        report: bool = True,
        same_program: bool = False,
        set_aside_unreadable: bool = False,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        after: "Earlier | Sequence[Earlier]" = (),
        extend: str | None = None,
        missing_values: bool = False,
        look_through: bool = False,
        _parts: Parts | None = None,
        **clipping: Unpack[ClippingOptions],
    ):
        check_option_names("jaxdp.Run", clipping)
        if not str(folder):
            raise ValueError(f"folder must name a folder, got {folder!r}")
        if extend is not None:
            if not isinstance(extend, str) or not extend or after:
                raise ValueError(
                    "extend must name a stage, without after=, which a run is given when it "
                    f"begins; got {extend!r}"
                )
            place = folder.path if isinstance(folder, RunDirectory) else folder
            folder = RunDirectory(place, extend)
        self.directory = folder if isinstance(folder, RunDirectory) else RunDirectory(folder)
        # Of a path no object is kept, which would hold the file.
        self._shared = ledger if isinstance(ledger, Ledger) else None
        file = ledger.path if isinstance(ledger, Ledger) else ledger
        if ledger is not None and file is None:
            raise ValueError(
                "ledger must be a file for a Run, a path or Ledger(path), got Ledger()"
            )
        self._ledger = None if file is None else Path(file)
        after = (after,) if isinstance(after, str | os.PathLike | Run | OpenedRun) else after
        self._after = [
            each.directory if isinstance(each, Run | OpenedRun) else RunDirectory(each).latest
            for each in after
        ]
        for each in self._after:
            if each.path.resolve() == self.path.resolve():
                raise ValueError(
                    f"after must be other runs, got {each.path}, the folder of this one: it counts "
                    "what it has released itself"
                )
        algorithm = as_algorithm(mechanism, optimizer, average)
        self.source: Source = as_source(source)
        self.algorithm = algorithm.on(self.source)
        self.algorithm.mechanism.check_source(self.source)
        if not getattr(self.algorithm.mechanism.part, "kept", True):
            raise ValueError(
                "source must be of a partition with a name, for a run that may be taken up again, "
                "jaxdp.sampling.parts(..., partition='regions'); got one that only this process has"
            )
        check_arrays(params)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
                raise ValueError(
                    f"params must hold numbers, got a key at {jax.tree_util.keystr(keys)}. "
                    + SPLIT_NNX
                )
        self._params = jax.tree.map(np.asarray, params)
        # On a mesh they stay sharded as they are.
        self._given = self._params if resolve_placement(None, params) is None else params
        self._mesh, self._data_axes = mesh, data_axes
        if "rng_name" in clipping:  # from here on the loss says by itself where its key goes
            loss_fn = losses.named_key(loss_fn, clipping.pop("rng_name"))
        if constants is not None:
            declared = losses.declared_constants(constants, loss_fn).arrays
            loss_fn = losses.with_constants(functools.partial(loss_fn), declared)
        self._loss_fn = loss_fn
        self._gradient: dict[str, Any] = {"trainable": trainable, **clipping}
        grad_fn = PrivateStep.of(self.algorithm, loss_fn, **self._gradient).grad_fn
        self._trained_of: Callable[[PyTree], PyTree] = grad_fn.trained
        # A further stage has the numbers that were released, and takes only shapes from these.
        trained = grad_fn.trained(self._params)
        self._frozen = frozen_of(self._params, trained, numbers=not self.directory.stage)
        rows = "of (steps taken, row or None); log= hands rows to tqdm, TensorBoard or wandb"
        for name, function, what in (
            ("evaluate", evaluate, "from the parameters to numbers by name"),
            ("progress", progress, rows),
            ("log", log, "of a row, such as print"),
        ):
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function {what}; got {function!r}")
        self._evaluate, self._secret = evaluate, secret
        self._progress, self._log = progress, log
        self._every = None if every is None else arguments.integer("every", every, least=1)
        self._physical_batch_size, self._reports = physical_batch_size, report
        self._set_aside_unreadable, self._same_program = set_aside_unreadable, same_program
        self._missing_values = arguments.boolean("missing_values", missing_values)
        self._look_through = arguments.boolean("look_through", look_through)
        self._traced: program.ProgramForm | None = None
        self._delta = self.algorithm.mechanism.delta if delta is None else delta
        if delta is not None:
            arguments.fraction("delta", delta)
        elif self._delta is None and extend is not None:
            with contextlib.suppress(ValueError, OSError):
                self._delta = self.directory.first.load_state().delta
        if relation is None:  # of the run that the folder holds; fit says what is wrong with it
            with contextlib.suppress(ValueError, OSError):
                relation = acc.Relation(self.directory.first.load_state().relation)
        self._relation = acc.Relation(relation or self.algorithm.mechanism.neighbours)
        if self._delta is not None:
            # Raises where a step has no bound under the relation, before any is charged.
            require_bound(self.algorithm.total(1), self._relation)
        self._about = {str(name): str(words) for name, words in (about or {}).items()}
        encoders.require_used(features)
        self._features = None if features is None else encoders.public(features)
        if features is not None:
            self._about = {"Features": encoders.in_words(features), **self._about}
        self._canaries: canary.Canaries | None = None
        if canary.asked(canaries):
            if extend is not None or self._ledger is not None or self._after:
                raise ValueError(
                    "canaries must be 0 with extend=, ledger= or after=: an audit is of one run of "
                    "one mechanism, whose ledger holds nothing else"
                )
            records = (self._params, self.source, physical_batch_size)
            self._canaries = canary.found(
                canaries, self._relation, self.algorithm, loss_fn, grad_fn, *records, canary_scores
            )
        self._parts = _parts or Parts()
        # Asked now, for how long steps take is private.
        self._date = reporting.today()
        self.history: list[Row] = []
        self.params: PyTree = None
        self.result: Result | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> OpenedRun:
        """Returns what a run's folder tells, finished or not: ``params``, ``history``, ``epsilon``.

        No model and no records are needed, nothing is written, and a process that trains there is
        not disturbed.

        Args:
            folder: of a run of ``jaxdp.Run`` or ``jaxdp train``.

        Raises:
            ValueError: the folder holds no run.
        """
        return OpenedRun(folder)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.directory.path

    def fit(self, steps: int | None = None, *, beyond: bool = False) -> PyTree:
        """Trains from the last checkpoint on, until ``steps`` steps were taken in all.

        Of a run that has taken them it returns what is there, and changes nothing of what the
        folder shows.

        Args:
            steps: of the whole run; None takes those that the noise was calibrated for, or what
                was taken beyond them.
            beyond: True lets them be more than that; epsilon grows, and counts everything.

        Returns:
            The parameters after the last step, or their average.

        Raises:
            ValueError: more steps than the noise was calibrated for, or fewer than were taken; see
                the class.
            BudgetExceededError: the ledger's budget does not admit them all; nothing was charged.
        """
        mechanism, asked = self.algorithm.mechanism, steps is not None
        steps = steps_within(mechanism.steps, steps, beyond)
        mechanism.total(steps)  # raises where a schedule, or a strategy, ends before
        self.result = in_words(self.path, functools.partial(self._train, steps, asked))
        self.params = self.result.params
        if self._reports and self._delta is not None and processes.index() == 0:
            step = self.history[-1]["step"]
            if not self.directory.later and (
                self.result.steps_run or not reporting.is_written(self.directory, step)
            ):
                self._write_report()
        return self.params

    def epsilon(
        self, delta: float | None = None, relation: acc.Relation | None = None
    ) -> acc.Bound:
        """Bounds on epsilon for everything that the folder's ledger was charged for.

        Args:
            delta: None takes the run's.
            relation: the neighbouring relation; None takes the run's.
        """
        delta = self._delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be given: the noise was not calibrated for one; got None")
        if not self.directory.exists():
            raise ValueError(f"run must have begun to have an epsilon, got {self.path}: call fit()")
        return self.directory.checked_ledger().epsilon(delta, relation or self._relation)

    def unverified(self) -> list[str]:
        """The assumptions of the guarantee, in words."""
        return self.directory.checked_ledger().unverified()

    def report(self) -> Path:
        """Writes report.html, .md, .json and plots; returns the path of report.html.

        A page that is there is rendered anew, with this program's ``about``, and says so.

        Raises:
            ValueError: no step was shown yet, or the run has no delta.
        """
        if self.directory.exists():  # a page of another mechanism or program would not be its own
            kept = self._kept_state()
            said = self._require_same_program(kept)
            return self._write_report(anew=True, said=said)
        return self._write_report(anew=True)

    def _write_report(self, anew: bool = False, said: Sequence[str] = ()) -> Path:
        """Writes the page; one that takes another's place on purpose says so.

        Args:
            anew: on purpose.
            said: what of this program was not verified.
        """
        if self._delta is None:
            raise ValueError("delta must be given for a report: Run(..., delta=1e-5); got None")
        self.history = self.directory.load_history() or self.history
        if not self.history:
            raise ValueError(f"run must have shown a row to report, got {self.path}: call fit()")
        kept, last = self.directory.load_state(), self.directory.last_shown()
        self._check_guarantee(kept)
        if self.directory.later:
            raise ValueError(
                f"extend must name the last stage of the run in {self.path}, "
                f"{self.directory.latest.stage!r}, to report all, got {self.directory.stage!r}"
            )
        shown = (kept.before or 0) + (0 if last is None else last.step)
        if self.history[-1]["step"] != shown:
            raise ValueError(
                f"history.json must tell of the {shown} steps that were shown in {self.path}, got "
                f"{self.history[-1]['step']}: call fit(), which writes it anew"
            )
        return reporting.write_own(
            self.directory,
            self.algorithm,
            self.history,
            self._delta,
            self._relation,
            trained=self._trained_of(self._params),
            frozen="" if self._frozen is None else self._frozen[0],
            date=self._date,
            about=self._about,
            anew=anew,
            said=said,
        )

    def diagnose(
        self,
        *,
        look: bool = False,
        epsilon: float | None = None,
        params: PyTree = None,
        **options: Any,
    ) -> "Diagnosis":
        """Finds what keeps the model from learning; ``jaxdp.diagnose`` of the run's own parts.

        Without ``public``, ``epsilon`` or ``look`` it tells mistakes and no numbers. Before the
        first step the run may be changed by what it tells (mechanism, model, rate): the folder's
        ledger goes on counting, and saying, what was charged and looked at.

        Args:
            look: True computes numbers from the private records without noise, which the ledger and
                the page then say for good, also of a run that is finished.
            epsilon: charges the run's ledger so much for one noisy release of numbers.
            params: None takes those that the run begins with.
            options: ``public``, ``group``, ``groups``, ``same``, ``records``, as for
                ``jaxdp.diagnose``.

        Raises:
            ValueError: an argument is not what it should be, or the folder holds another run;
                nothing is charged then.
            BudgetExceededError: the ledger's budget has no room; nothing was charged.
        """
        from jaxdp.audit.diagnosis import diagnose

        own = {"loss_fn", "data", "mechanism", "optimizer", "ledger"}
        if given := sorted(own & set(options)):
            raise ValueError(
                f"{given[0]} must be left to the run, got "
                f"{arguments.described(options[given[0]])}: a run is diagnosed as it is, on its "
                "own ledger (epsilon= or look=True)"
            )
        if epsilon is not None:
            options |= {"epsilon": epsilon}
        mechanism = self.algorithm.mechanism
        if mechanism.delta is None and self._delta is not None:
            mechanism = dataclasses.replace(mechanism, delta=self._delta)
        mechanism = dataclasses.replace(mechanism, relation=self._relation)
        return diagnose(
            self._loss_fn,
            self._params if params is None else params,
            self.source,
            dataclasses.replace(self.algorithm, mechanism=mechanism),
            ledger=self if look or epsilon is not None else None,
            look=look,
            **{"trainable": self._gradient["trainable"], **options},
        )

    @contextlib.contextmanager
    def opened_ledger(self, charges: bool) -> Iterator[Ledger]:
        """The run's ledger, for ``jaxdp.diagnose``; behind it the page says what the ledger does.

        The folder is this process's as long, and keeps what was written: a ledger that is cut off
        before it is refused.

        Args:
            charges: True if it is to be charged.

        Raises:
            ValueError: the folder holds another run or a later stage, or another process trains
                there.
        """
        if charges and self._canaries is not None:
            raise ValueError(
                "canaries must be 0 to charge a diagnosis to the run: an audit is of one run of "
                "one mechanism, whose ledger holds nothing else. Diagnose another run, or public "
                "records (public=)"
            )
        self._take_folder()
        try:
            # Only the last stage that has begun can render the page anew.
            if self.directory.later or (self.directory.stage and not self.directory.exists()):
                raise ValueError(
                    f"extend must be {self.directory.latest.stage or None!r}, the last part of the "
                    f"run in {self.path} that has begun, for its page to say what a diagnosis costs"
                    f", got {self.directory.stage or None!r}. To diagnose what comes next hand that"
                    " run over: jaxdp.diagnose(..., ledger=run)"
                )
            # Read while nobody else may begin or go on here. Of a run that has not begun the secret
            # is kept, which is the ledger's key.
            kept = self._kept_state()
            said = self._require_same_program(kept)
            directory = self.directory
            directory.save_state(kept)
            open_one = self._shared is not None and not self._shared.closed
            ledger = directory.open_ledger(kept, self._shared if open_one else None)
            directory.check_shown(ledger, kept)
            try:
                yield ledger
            finally:
                ledger._write_seen()  # one that stays open is read from its file all the same
                directory.save_state(dataclasses.replace(kept, head=ledger.head.hex()))
                if ledger is not self._shared:
                    ledger.close()
        finally:
            self.directory.unlock()
        if (self.path / "report.json").exists():
            self._write_report(anew=True, said=said)

    def audit(self, delta: float | None = None, confidence: float = 0.95) -> "EpsilonAudit":
        """A lower bound on epsilon (empirical epsilon) from what the run released of its canaries.

        The result goes into the folder (``audit.json``, ``roc.png``) and its report.

        Formal guarantee: see ``jaxdp.audit.one_run.audit_canaries``.

        Args:
            delta: None takes the run's.
            confidence: of the bound.

        Raises:
            ValueError: a run without canaries, or one that is not finished.
        """
        from jaxdp.runs import audit  # scipy.stats is slow

        delta = self._delta if delta is None else delta
        if self._canaries is None or delta is None:
            what = "canaries" if self._canaries is None else "delta"
            raise ValueError(f"{what} must be given for an audit: Run(..., {what}=...); got none")
        if self.directory.exists():
            self._kept_state()
            self.directory.checked_ledger()
        count, ends = self._canaries.count, None
        if self._canaries.last:
            after = self._like_released(self.directory.latest, self._params)[1]
            ends = np.stack([self._canaries.losses(each) for each in (self._params, after)])
        found = audit.audit_rows_of(self.directory, self.algorithm, count, delta, confidence, ends)
        row = audit.row_of(self.path.name, found)
        audit.save_audit(self.path, row, found)
        audit.into_report(self.directory, row)
        return found

    def export(self, path: str | os.PathLike[str], *, only: Only | None = None) -> None:
        """Writes the parameters that ``fit`` returned, or else those that were shown last.

        Nothing else of the run is written. ``jaxdp.load`` brings them back.

        Args:
            path: a file that ends in ``.msgpack`` or ``.safetensors``, which is replaced all at
                once; or a new folder of Orbax, without an ending or with ``.orbax``.
            only: "trained" leaves out what ``trainable=`` froze; None writes all.

        Raises:
            ValueError: another ending, or a path in ``secret/``; nothing was shown yet.
        """
        params = self.params
        if params is None and only is None and self._frozen is not None:
            params = self._like_released(self.directory.latest, self._params)[1]
        if params is not None and only == "trained":  # by any stage, which the folder tells
            params = None if self.directory.stage else self._trained_of(params)
        export_params(self.directory, path, params, only)

    def _train(self, steps: int, asked: bool) -> Result:
        """Trains the steps that are left; nothing of a step is shown before it is durable."""
        parts, evaluate, mechanism = self._parts, self._evaluate, self.algorithm.mechanism
        check_repeatable(self.source)
        if self.directory.stage:
            processes.require_single_process("extend=")

        processes.from_process_0(self._take_folder)  # process 0 alone; an error stops all
        try:
            # A start of this stage that failed before its first step leaves nothing to go on with.
            if self.directory.stage and not self.directory.is_charged():
                shutil.rmtree(self.directory.secret, ignore_errors=True)
            kept = self._agreed_state()
            self._keep_moved_ledger(kept)
            before = kept.before or 0  # steps of the stages before this one
            earlier = self._begin_with_released(before) if before else []
            unsure = self._require_same_program(kept)
            if (found := self._finished(kept, steps, asked)) is not None:
                return found
            if self.directory.later:
                raise ValueError(
                    f"extend must name the last stage of the run in {self.path}, "
                    f"{self.directory.latest.stage!r}, to go on, got {self.directory.stage!r}"
                )
            # Before the first start, and never after it: once a step was charged nothing may follow
            # from the numbers of a record.
            if not (kept.starts or self.directory.stage or parts.looked_through):
                look_through(self.source, self._missing_values, self._look_through)
            if not self._has_begun():
                if self.directory.stage:
                    self.directory.create()
                program.keep(self.directory, self._traced)  # before the state of a run
            count = 0 if self._canaries is None else self._canaries.count
            every = self._every or max(1, -(-steps // 20))
            with (
                begin(
                    self.directory,
                    kept,
                    lambda: self._configuration(kept.secret.restored()),
                    steps=steps,
                    every=every,
                    planned=mechanism.steps,
                    shared=self._shared,
                    after=self._after,
                    whole=parts.enough is not None,
                    note=canary.note(count),
                ) as start,
                self._bar(before + steps) as progress,
            ):
                # The coins of the canaries are on disk before anything is charged. Records may have
                # to be projected by a release, which is charged here, and shown, once and for all.
                if count and not start.ledger.entries:
                    canary.write_coins(self.directory, canary.tossed(count, start.secret))
                prepared = Prepared(self.source, self._canaries)
                if parts.prepare is not None:
                    prepared = parts.prepare(start, self._canaries)
                source, loss_fn, algorithm = prepared.source, self._loss_fn, self.algorithm
                canaries = prepared.canaries
                if canaries is not None:
                    coins = canary.kept_coins(count, self.directory, kept.canaries)
                    source = canaries.entered(placed(source), coins)
                    loss_fn, algorithm = canaries.loss(loss_fn), canaries.watched(algorithm)
                # Of those whose end alone is scored no step keeps or shows anything.
                watches = canaries is not None and not canaries.last

                def describe(state: TrainState) -> Row:
                    """The part of a row that a state gives: releases and public data alone."""
                    row: Row = algorithm.counts_of(state.opt_state)
                    if self._delta is not None:
                        row["epsilon"] = trainer.epsilon(self._delta, self._relation).upper
                    if prepared.test is not None:
                        row |= prepared.test(trainer.released(state))
                    return row

                def evaluated(state: TrainState) -> Row:
                    """The numbers of the user's function, which may show what it sees."""
                    assert evaluate is not None
                    return reporting.numbers(evaluate(shards.on_host(trainer.released(state))))

                def show(step: int, row: Row | None) -> None:
                    if row is not None:
                        row = public(row)
                        self._hand_to_log(row)
                        rows_before = [r for r in self.history if r["step"] < row["step"]]
                        self.history = [*rows_before, row]
                        self.directory.save_history(self.history)
                    progress(before + step, row)

                self.history = self.directory.load_history()
                with contextlib.closing(
                    Checkpoints(self.directory.checkpoints, self._trained_of)
                ) as checkpoints:
                    # Restore: the last checkpoint that may be gone on from, or the beginning. One
                    # that nobody can read is given up, if its owner says so: first written down as
                    # shown, by its step alone, for somebody may have read it.
                    first = self._first(algorithm, loss_fn)
                    state = TrainState(*first, 0, np.frombuffer(start.ledger.head, np.uint32))
                    use = functools.partial(start.use_of, mechanism=mechanism)
                    state, rows = checkpoints.restore(
                        state,
                        start.show if self._set_aside_unreadable else None,
                        lambda state, given_up: (
                            use(state, given_up=given_up) is not Continuation.NONE
                        ),
                    ) or (state, earlier)
                    if not start.streams or use(state) is Continuation.NEW_STREAM:
                        start.begin_stream(state)
                    elif any(
                        entry.stream == start.stream and entry.end > state.step
                        for entry in start.ledger.entries
                    ):  # steps behind it were charged: they are done again within their charge
                        start.ledger.trust(INTERRUPTED)

                    # Show: a crash may have come between the checkpoint and what shows it.
                    start.show(state.step, past_of(state))
                    trainer = (
                        self._trainer(start, state, source, loss_fn, algorithm, prepared)
                        if parts.stepper is None
                        else parts.stepper(start, state)
                    )
                    start.check_room(state.step)
                    if isinstance(trainer, Trainer) and state.step < steps:
                        # Whatever reads all records may fail: before a block is charged.
                        trainer._sampler.prepare()
                    # Now that nothing is refused any more, the program is the run's. What could not
                    # be compared is written down before.
                    for sentence in (*unsure, *filter(None, [self._features])):
                        start.ledger.trust(sentence)
                    program.keep(self.directory, self._traced)
                    # Its row knows less of the cost.
                    if state.step and start.restarted_since(state):
                        rows[-1] |= describe(state)
                    if state.step and watches:
                        canary.publish(self.directory, rows[-1])
                    if state.step and evaluate is not None:
                        rows[-1] |= evaluated(state)
                    show(state.step, rows[-1] if state.step else None)

                    # Steps beyond those calibrated were asked for: ``fit`` refuses them else.
                    batches = trainer.batches
                    if isinstance(trainer, Trainer):
                        batches = functools.partial(trainer.batches, beyond=True)
                    taken, began = state.step, time.perf_counter()
                    pending: tuple[Row, int, bytes] | None = None

                    def show_pending() -> None:
                        """Shows the block before, once the checkpoint that holds it is durable."""
                        nonlocal pending
                        if pending is None:
                            return
                        row, shown, past = pending
                        checkpoints.wait()
                        start.show(shown, past)
                        if watches:
                            canary.publish(self.directory, row)
                        show(shown, row)
                        pending = None

                    step = state.step
                    while step < steps and not (
                        rows and parts.enough is not None and parts.enough(public(rows[-1]))
                    ):
                        # Train a block. It is reserved whole before its first step, its energy's
                        # draws too: so the order of the ledger's lines does not tell how long steps
                        # took, which is private.
                        first_step, step = step, min(steps, (step // every + 1) * every)
                        for issuer in start.issuers:
                            issuer.reserve(step)
                        norms: list[jax.Array] = []
                        seen: list[jax.Array] = []
                        infos: list[ClipInfo] = []
                        for batch in batches(step - first_step):
                            state, info, clipped = trainer.step_with_info(
                                state, batch, return_info=parts.sensitive
                            )
                            if state.step == taken + 1:
                                checkpoints.prepare()  # while the device works
                            norms.append(info.update_norm)
                            if watches:
                                seen.append(canary.seen(state.opt_state))
                            infos += clipped
                            progress(before + state.step, None)
                            # Several processes write it down together, at the end of a block.
                            alone = pending is not None and processes.count() == 1
                            if alone and not checkpoints.is_saving:
                                show_pending()

                        row: Row = {"step": before + state.step}
                        row["update_norm"] = float(np.mean(jax.device_get(norms)))
                        row |= describe(state)
                        if watches:
                            row[canary.HASH] = canary.keep(self.directory, first_step, seen)
                        if parts.sensitive:
                            row["sensitive"] = _clip_statistics(infos)
                        rows.append(row)

                        # Checkpoint, which is written while the next block is trained; then show.
                        # What a user's function or a decision to end sees counts as shown: both
                        # wait until the checkpoint is durable.
                        show_pending()
                        checkpoints.save(state, rows)
                        pending = row, state.step, past_of(state)
                        if evaluate is not None:
                            checkpoints.wait()
                            start.show(state.step, past_of(state))
                            row |= evaluated(state)
                        if parts.enough is not None:
                            show_pending()
                    show_pending()
                    released, seconds = trainer.released(state), time.perf_counter() - began

                if parts.sensitive and processes.index() == 0:
                    text = [{"step": r["step"], **r["sensitive"]} for r in rows if "sensitive" in r]
                    file = self.directory.sensitive
                    with writing(file):
                        content = json.dumps({"warning": SENSITIVE_NOTE, "history": text}, indent=1)
                        write_atomically(file, content, mode=0o600)
                self.history = [public(row) for row in rows]
                self.directory.save_history(self.history)
                seeded, count = start.secret.reproducible, state.step - taken
                return Result(released, start.ledger, self.history, seeded, seconds, count)
        finally:
            self.directory.unlock()

    def _finished(self, kept: RunState, steps: int, asked: bool) -> Result | None:
        """The result of a run that has taken its steps, as it was shown; None where some are left.

        Nothing is written, not even the start. A run whose history or last checkpoint is not that
        of the state shown last goes on by the way of all others, which mends what it can.

        Raises:
            ValueError: it has taken more steps than were ``asked`` for.
        """
        parts, canaries, before = self._parts, self._canaries, kept.before or 0

        def last_shown() -> str:
            if not self.directory.exists():
                return ""
            shown, rows = self.directory.last_shown(), self._own_history()
            if (
                shown is None
                or not shown.past
                or not rows
                or rows[-1]["step"] != before + shown.step
            ):
                return ""
            ends = parts.enough is not None and parts.enough(rows[-1])
            return f"{shown.step} {shown.past.hex()}" if ends or shown.step >= steps else ""

        # Process 0 says whether it is finished, and each reads its own shards.
        step, _, past = processes.from_process_0(last_shown).partition(" ")
        if not step or self._set_aside_unreadable:
            return None
        algorithm = self.algorithm if canaries is None else canaries.watched(self.algorithm)
        like = TrainState(*self._first(algorithm, self._loss_fn), 0, np.zeros(4, np.uint32))
        folder = Checkpoints(self.directory.checkpoints, self._trained_of)
        with contextlib.closing(folder) as checkpoints:
            state = checkpoints.state(int(step), like)
        if state is None or past_of(state).hex() != past:
            return None
        if asked and state.step > steps:
            planned = self.algorithm.mechanism.steps
            raise ValueError(
                f"steps must be at least the {state.step} that the run in {self.path} has taken"
                f"{', with which it is finished' if state.step == planned else ''}, got {steps}: "
                f"fit() returns what it trained, and Run.open({str(self.path)!r}) reads it"
            )
        self.history, ledger = self._own_history(), self.directory.checked_ledger()
        with self._bar(before + max(steps, state.step)) as progress:
            progress(before + state.step, self.history[-1])
        released = algorithm.released(state.params, state.opt_state)
        seeded = kept.secret.reproducible
        return Result(released, ledger, self.history, seeded, 0.0, 0)

    def _like_released(self, directory: RunDirectory, like: PyTree) -> tuple[int, PyTree]:
        """Step and parameters that a stage showed last, in the structure of those that were given.

        What no stage has trained is not in the folder: it is as it was given, if its hash is that
        with which the run began.
        """
        first = self.directory.first
        lacks, (step, found) = lacks_frozen(directory), shown_params(directory)
        whence = f"the finished run in {self.path}"
        try:
            made = in_structure_of(like, found, whence, partial=lacks)
            if lacks:
                of_first = shown_params(first, "trained")[1]
                trained = in_structure_of(like, of_first, whence, partial=True)
        except ValueError as error:
            raise ValueError(f"params must be like those released: {error}") from error
        if lacks:
            kept = jax.tree.map(lambda new, old: None if new is old else new, trained, like)
            self._check_frozen(first.load_state().frozen, frozen_of(like, kept))
        return step, made

    def _own_history(self) -> list[Row]:
        """The rows that were shown of this stage and those before it."""
        rows, later = self.directory.load_history(), self.directory.later
        end = later[0].load_state().before if later else None
        return [row for row in rows if end is None or row["step"] <= end]

    def _begin_with_released(self, before: int) -> list[Row]:
        """Takes the parameters that the stage before has released; returns the rows up to there.

        A stage that has checkpoints has them there, but for what is frozen.

        Args:
            before: steps of the stages before this one.
        """
        saved = any(path.name.isdecimal() for path in self.directory.checkpoints.glob("*"))
        if saved and self._frozen is None and not self._set_aside_unreadable:
            return []
        stages = self.directory.stages()
        names = [each.stage for each in stages]
        here = names.index(self.directory.stage) if self.directory.stage in names else len(names)
        step, given = self._like_released(stages[here - 1], self._given)
        rows = [row for row in self.directory.load_history() if row["step"] <= before]
        if step != before or not rows or rows[-1]["step"] != before:
            raise ValueError(
                f"history.json and the checkpoints in {self.path} must tell of the {before} steps "
                f"before stage {self.directory.stage!r}, got {step} steps and "
                f"{rows[-1]['step'] if rows else 'no rows'}: put back what the run left"
            )
        self._given = given
        return rows

    def _first(self, algorithm: Algorithm, loss_fn: LossFn) -> tuple[PyTree, PyTree]:
        """The parameters and the optimizer's state before the first step, on their devices."""
        step = PrivateStep.of(algorithm, loss_fn, **self._gradient)

        def both(params: PyTree) -> tuple[PyTree, PyTree]:
            # Copied: parts that share a buffer could not all be donated.
            first, state = jax.tree.map(jnp.array, (params, step.init(params)))
            return first, state

        # A model of ours is made by one compilation.
        at_once = self._parts.config is not None and self._mesh is None
        made = jax.jit(both, compiler_options=AT_ONCE) if at_once else both
        params, opt_state = made(self._given)
        place = None if self._mesh is None else placement(self._mesh, self._data_axes)
        place = resolve_placement(place, params)
        if place is None:
            return params, opt_state
        params = place.put(params)
        return tuple(shards.put((params, opt_state), step.sharded_as(params, place).shardings))

    def _trainer(
        self,
        start: Start,
        state: TrainState,
        source: Source,
        loss_fn: LossFn,
        algorithm: Algorithm,
        prepared: Prepared,
    ) -> Trainer:
        """A trainer whose steps, and whose private energy's, are charged to this start."""

        def sampler(mechanism: Mechanism, num_records: int, rows: int) -> Sampler:
            issuer = start.issuer(mechanism, state.step, "energy")
            return Sampler(mechanism.sampling, num_records, rows, issuer)

        # What memory chose is written down: on a device with other memory the run goes on alike.
        rows = self._physical_batch_size
        if rows == "auto":
            rows = start.state.physical_batch_size or rows
        energy = prepared.energy and prepared.energy(loss_fn, source, sampler)
        issuer = start.issuer(algorithm.mechanism, state.step)
        if isinstance(algorithm.mechanism.strategy, MadeAgain) and state.step:
            issuer.go_on_from(state.opt_state[0].last, start.state.starts or ())
        trainer = Trainer(
            loss_fn,
            algorithm,
            source=source,
            ledger=start.ledger,
            energy=energy,
            physical_batch_size=rows,
            mesh=self._mesh,
            data_axes=self._data_axes,
            issuer=issuer,
            **self._gradient,
        )
        if rows == "auto":
            trainer.choose_physical_batch_size(state.params)
            start.save_state(physical_batch_size=trainer.physical_batch_size)
        trainer.resume(state)
        return trainer

    def _agreed_state(self) -> RunState:
        """The secret state of the run; in several processes that of process 0, where all agree.

        Raises:
            ValueError: processes disagree; nothing was charged.
        """
        if processes.count() == 1:
            return self._kept_state()
        given = None if self._secret is None else self._secret.stream("agreement").hex()
        versions = processes.versions()
        processes.agree(**versions, mechanism=self._mechanism(), secret=given)
        text = processes.from_process_0(lambda: json.dumps(self._kept_state().to_dict()))
        found = RunState.from_dict(json.loads(text))
        processes.agree(
            options=(self._every, self._physical_batch_size, self._delta, self._relation),
            source=self._fingerprint(found.secret.restored()),
            params=shards.hashed(self._params),
            program=self._configuration(found.secret.restored()),
        )
        return found

    def _kept_state(self) -> RunState:
        """The secret state of the run in the folder, or a new one where there is none.

        Raises:
            ValueError: the folder holds another run, or one of other data.
        """
        config, exists = self._parts.config, self.directory.exists()
        if self._parts.is_new and (exists or self.directory.ledger.exists()):
            raise ValueError(f"out must be a new folder, got {self.path}: a run began there")
        if self._parts.is_new or (self._parts.is_new is None and not self._has_begun()):
            path, key = self._ledger_given()
            secret, before, place = self._secret or Secret.new(), None, None
            # A diagnosis before the first start has left secret and ledger, and may change all
            # else: what the ledger holds by then counts, and is said.
            found = self.directory.load_state() if exists else None
            if found is not None:
                self._check_ledger()
                secret, path, key = found.secret.restored(), found.ledger, found.ledger_key
                words = f"a diagnosis before the run must be one {{}}, got that in {self.path}"
                self._check_events(self.directory.checked_ledger(), words)
            self._check_after(secret)
            self._check_others()
            if self.directory.stage:
                secret, before, place = self._finished_before()
            count = 0 if self._canaries is None else self._canaries.count
            return RunState(
                secret=KeptSecret.of(secret),
                starts=(),
                data=self._fingerprint(secret),
                mechanism=self._mechanism(),
                canaries=canary.digest(canary.tossed(count, secret)),
                delta=self._delta,
                relation=self._relation.value,
                config=None if config is None else config.to_dict(),
                before=before,
                place=place,
                ledger=path,
                ledger_key=key,
                frozen=self._frozen,
                head=None if found is None else found.head,
            )

        # What is charged to the ledger of a run must be this run: its configuration, or where a
        # program has the model its mechanism; its delta and relation; and its records.
        kept = self.directory.load_state()
        if config is not None and (kept.starts is None or kept.config is None):
            raise ValueError(
                f"out must hold a run of this version to resume, got {self.path}, which an older "
                "one began: its noise could be used again. Start a new run"
            )
        if kept.starts is None or kept.mechanism is None:
            raise ValueError(f"folder must hold a run of jaxdp.Run, got {self.path}")
        if config is not None:
            require_equal_config(type(config).from_dict(kept.config or {}), config)
        # A strategy is calculated from the configuration, perhaps to other digits elsewhere.
        is_calculated = config is None or getattr(config, "strategy", None) is not None
        if is_calculated and kept.mechanism != self._mechanism():
            changed = program.changed_values(kept.mechanism, self._mechanism())
            raise ValueError(
                f"mechanism must stay that of the run in {self.path}; changed: {changed}. "
                f"{program.WAYS_OUT.format(str(self.path))}. Where another version or machine "
                "calculated it to other digits, give the run's: dataclasses.replace(mechanism, "
                "noise_multiplier=...)"
            )
        self._check_guarantee(kept)
        self._check_frozen(kept.frozen, self._frozen)
        if kept.data != self._fingerprint(kept.secret.restored()):
            raise ValueError(
                f"source must hold the records that the run in {self.path} was begun with, got "
                "others (the training data changed): what was released of the old ones would be "
                "charged to the new. Start a new run, in another folder, with after= this one's if "
                "anybody's records are in both"
            )
        # The same ledger and, where others' were taken over, as many: what was shown counts them.
        if not kept.starts:  # nothing was drawn yet
            self._check_after(kept.secret.restored())
        elif len(self._after) not in (0, len(kept.after or ())):
            raise ValueError(
                f"after must be given when a run begins, got {len(self._after)} runs for "
                f"{self.path}, whose rows count {len(kept.after or ())}: begin another run, in "
                "another folder"
            )
        if self._ledger is not None and kept.ledger and not self.directory.stage:
            path, key = self._ledger_given()  # it may have been moved
            return dataclasses.replace(kept, ledger=path, ledger_key=key)
        self._check_ledger()
        return kept

    def _has_begun(self) -> bool:
        """True where the folder holds a run that was started, and not only diagnosed."""
        return self.directory.exists() and self.directory.load_state().starts != ()

    def _take_folder(self) -> str:
        """Takes the folder for this process, and makes it where there is none; returns ""."""
        if self.directory.stage and not self.directory.first.exists():
            raise ValueError(f"extend must be given for a run that is there, got {self.path}")
        if not self.directory.stage and not self.directory.exists():
            self.directory.create()
        self.directory.lock()
        return ""

    def _ledger_given(self) -> tuple[str | None, str | None]:
        """Path and key, hexadecimal, of a ledger of several runs; None where there is none."""
        key = None if self._shared is None else self._shared.key
        path = None if self._ledger is None else str(self._ledger.resolve())
        return path, key.hex() if key else None

    def _keep_moved_ledger(self, kept: RunState) -> None:
        """Keeps where the ledger of several runs is now, if it holds what the run has written."""

        def once() -> str:
            own = self.directory.exists() and self.directory.load_state()
            if own and (own.ledger, own.ledger_key) != (kept.ledger, kept.ledger_key):
                ledger = self.directory.open_ledger(kept, self._shared)
                for each in (kept, *(stage.load_state() for stage in self.directory.later)):
                    self.directory.check_shown(ledger, each)
                self.directory.save_state(kept)
            return ""

        processes.from_process_0(once)

    def _check_ledger(self) -> None:
        """Raises ValueError for a ledger that is not the one that the run was begun with."""
        own = self.directory.first.load_state().ledger
        if self._ledger is not None and self._ledger_given()[0] != own:
            raise ValueError(
                f"ledger must stay that of the run in {self.path}, {own or self.directory.ledger}, "
                f"got {self._ledger}"
            )

    def _check_after(self, secret: Secret) -> None:
        """Raises ValueError for a run that this one cannot be begun after, before any charge.

        Args:
            secret: of this run.
        """
        own, drawn = secret.stream("run").hex(), set[tuple[str, int]]()
        for each in self._after:
            if not each.exists():
                raise ValueError(
                    f"after must be a run, with its secret/, got {each.path}, where there is none"
                )
            found = each.checked_ledger()
            if not found.reserved:
                raise ValueError(
                    f"after must be a run that has released something, got {each.path}"
                )
            if self._ledger is not None and each.ledger.resolve() == self._ledger.resolve():
                raise ValueError(
                    f"after must be a run on another ledger than this one's, got {each.path}: its "
                    "releases are in it"
                )
            # Draws of a block follow from secret, stream and block; two releases of one draw cost
            # more than those of two.
            blocks = {
                (origin_of(str(stream)), block)
                for entry in found.reserved
                for stream, block in blocks_drawn(entry)
            }
            if blocks & drawn or any(stream.split("/")[0] == own for stream, _ in blocks):
                raise ValueError(
                    "after must be runs of other secrets than each other's and this one's, where "
                    f"the records of an epoch, or a run, are drawn at once, got {each.path}: its "
                    "records were drawn alike, and two releases of one draw cost more than two "
                    "draws. Give another secret=; of copies, or of a run that another one was "
                    "begun after, give one"
                )
            drawn |= blocks
            self._check_events(found, f"after must be a run {{}}, got {each.path}")

    def _check_others(self) -> None:
        """Raises ValueError for a ledger with releases that this run cannot be charged beside."""
        if self._ledger is not None and not self.directory.stage:
            given = Ledger(self._ledger, key=None if self._shared is None else self._shared.key)
            self._check_events(given, f"ledger must be one {{}}, got {self._ledger}")

    def _check_events(self, found: Ledger, words: str) -> None:
        """Raises ValueError for events whose privacy unit or relation cannot be this run's."""
        for event in {entry.event for entry in found.reserved}:
            require_bound(event, self._relation)
            if self.algorithm.mechanism.records_per_user and not of_users(event):
                raise ValueError(
                    f"{words.format('whose privacy unit is a user, as here')}, which holds "
                    f"{event.describe()} of records: what that says of a user is not known"
                )

    def _finished_before(self) -> tuple[Secret, int, str | None]:
        """The secret of a new stage, the steps before it, and where the folder was by then.

        Raises:
            ValueError: the run is not finished, or is none that can be extended.
        """
        last = self.directory.latest
        kept, shown = last.load_state(), last.last_shown()
        first = self.directory.first.load_state()
        if first.config is not None or first.mechanism is None or last.first.coins.exists():
            raise ValueError(
                f"extend must be given for a run of jaxdp.Run without canaries, got {self.path}: "
                "begin another one in a new folder, with after="
            )
        if shown is None or not shown.step or shown.step < (kept.steps or 0):
            raise ValueError(
                f"extend must be given for a run that is finished, got {self.path}, where "
                f"{0 if shown is None else shown.step} of {kept.steps} steps were shown: start the "
                "program again that trains it"
            )
        self._check_guarantee(first)
        self._check_ledger()
        if first.data != self._fingerprint(first.secret.restored()):
            raise ValueError(
                f"source must hold the records that the run in {self.path} was trained on, got "
                "others: begin another run in a new folder, with after="
            )
        self._like_released(last, self._params)  # before anything is written
        secret = first.secret.restored().child(f"stage {self.directory.stage}")
        return secret, (kept.before or 0) + shown.step, kept.place

    def _check_guarantee(self, kept: RunState) -> None:
        """Raises ValueError for another delta or relation than that of the rows' epsilons."""
        for name, given in (("delta", self._delta), ("relation", self._relation.value)):
            if kept.relation is not None and getattr(kept, name) != given:
                raise ValueError(
                    f"{name} must stay that of the run in {self.path}, {getattr(kept, name)}, got "
                    f"{given}: its rows have epsilons of that one; run.epsilon() tells those of "
                    "others"
                )

    def _check_frozen(self, kept: tuple[str, str] | None, given: tuple[str, str] | None) -> None:
        """Raises ValueError where other parameters are frozen, or the same with other numbers."""
        if kept == given:
            return
        none = "nothing (all is trained)", ""
        (before, _), (now, _) = kept or none, given or none
        if before != now:
            raise ValueError(
                f"trainable must freeze what it froze when the run in {self.path} began: {before}; "
                f"got {now}. Give the run's trainable=, or begin another run"
            )
        raise ValueError(
            f"params must have, where they are frozen, the paths and numbers with which the run in "
            f"{self.path} was begun, got others: {now}. What was trained so far was trained for "
            "those. Hand over the same again, or begin another run"
        )

    def _mechanism(self) -> str:
        """A text of what is charged, kept with the run."""
        described = repr((self.algorithm.mechanism, self.algorithm.energy))
        return described + (f" {canary.describe(self._canaries)}" if self._canaries else "")

    def _fingerprint(self, secret: Secret) -> str:
        """A keyed hash of the records as they were given."""
        return (self._parts.fingerprint or functools.partial(fingerprint, self.source))(secret)

    def _configuration(self, secret: Secret) -> str:
        """A text of all that makes this run: its configuration, or the program and the folder."""
        if self._parts.config is not None:
            return json.dumps(self._parts.config.to_dict(), sort_keys=True)
        return f"{self._mechanism()} {self.path.resolve()} {self._program(secret).text}"

    def _program(self, secret: Secret) -> program.ProgramForm:
        """The form of this program, traced once."""
        if self._traced is None:
            step = PrivateStep.of(self.algorithm, self._loss_fn, **self._gradient)
            given = self._params, self.source.example, secret.key("program")
            # A further stage takes its parameters from the one before, and only shapes from these.
            self._traced = program.program_of(step, *given, numbers=not self.directory.stage)
        return self._traced

    def _require_same_program(self, kept: RunState) -> list[str]:
        """Sentences for ``unverified`` on a program that could not be compared; see ``program``."""
        if self._parts.config is not None:  # which was compared
            return []
        traced = self._program(kept.secret.restored())

        def once() -> str:
            if not self._has_begun():
                return "[]"
            return json.dumps(program.require_same(self.directory, traced, self._same_program))

        found: list[str] = json.loads(processes.from_process_0(once))
        return found

    def _hand_to_log(self, row: Row) -> None:
        """Calls the user's ``log`` in process 0; all processes end where it raises.

        Before the row is written to history.json: what that holds was logged, and is not again.
        """

        def call() -> str:
            try:
                if self._log is not None and row["step"] not in [r["step"] for r in self.history]:
                    self._log(dict(row))
            except Exception as error:
                raise ValueError(
                    f"log must take every row, got {type(error).__name__}: {error} at the row of "
                    f"step {row['step']}. Nothing is lost: its checkpoint and the ledger are whole."
                    " Mend log, and start the same program again: it begins with this row"
                ) from error
            return ""

        processes.from_process_0(call)

    def _bar(self, steps: int) -> contextlib.AbstractContextManager[Progress]:
        """The user's progress function, or a bar; in process 0 alone."""
        if processes.index():
            return contextlib.nullcontext(lambda step, row: None)
        if self._progress is not None:
            return contextlib.nullcontext(self._progress)
        return bar.row_bar(self.path.name, steps)


def public(row: Row) -> Row:
    """A row without its un-noised statistics, which no guarantee covers, and without a hash."""
    return {name: value for name, value in row.items() if name not in ("sensitive", canary.HASH)}


def frozen_of(params: PyTree, trained: PyTree, numbers: bool = True) -> tuple[str, str] | None:
    """Words for what is not trained, and a hash of its paths, types and numbers; None for nothing.

    Args:
        params: the parameters.
        trained: the same, with None where they are frozen.
        numbers: False leaves the numbers out.
    """
    structure: Any = jax.tree.structure(params)
    flags = [leaf is not None for leaf in structure.flatten_up_to(trained)]
    if all(flags):
        return None
    words = "; ".join(filter(None, dict.fromkeys(options.describe_frozen(params, flags))))
    found = hashlib.blake2b(digest_size=16)
    for path, leaf, flag in zip(options.paths(params), jax.tree.leaves(params), flags, strict=True):
        if not flag:
            content = shards.hashed(leaf) if numbers else ""
            found.update(f"{path} {leaf.dtype} {leaf.shape} {content}|".encode())
    return words, found.hexdigest()


def steps_within(planned: int | None, steps: int | None, beyond: bool = False) -> int:
    """The steps to train: those asked for, or else those that the noise was calibrated for.

    Args:
        planned: that the noise was calibrated for; None for none.
        steps: that were asked for.
        beyond: True where they may be more.

    Raises:
        ValueError: there are neither, or more were asked for than calibrated.
    """
    if beyond and steps is None:
        raise ValueError("steps must be given with beyond=True, those of the whole run; got None")
    steps = planned if steps is None else arguments.integer("steps", steps, least=1)
    if steps is None:
        raise ValueError("steps must be given: the noise was not calibrated for any; got None")
    if planned is not None and steps > planned and not beyond:
        raise ValueError(
            f"steps must be at most {planned}, which the noise was calibrated for, got {steps}; "
            f"fit({steps}, beyond=True) takes more, and epsilon grows"
        )
    return steps


def require_equal_config(old: Config, new: Config) -> None:
    """Raises ValueError, with the names of the values that changed, unless two are equal."""
    before, after = (json.loads(json.dumps(config.to_dict())) for config in (old, new))
    changed = [name for name in after if before[name] != after[name]]
    if changed:
        parts = [f"{name} ({before[name]!r} then, {after[name]!r} now)" for name in changed]
        raise ValueError(f"a resumed run must keep its configuration; changed: {', '.join(parts)}")


def _clip_statistics(infos: list[ClipInfo]) -> dict[str, float]:
    """Means over the records of a block, un-noised. **Sensitive**: no guarantee covers them."""
    infos = jax.device_get(infos)
    mask = np.concatenate([info.mask for info in infos])
    columns = {
        "training_loss": np.concatenate([info.losses for info in infos]),
        "gradient_norm": np.concatenate([info.norms for info in infos]),
        "clipped_fraction": np.concatenate([info.clipped for info in infos]),
    }
    count = max(1, int(mask.sum()))
    return {name: float(values[mask].sum() / count) for name, values in columns.items()}
