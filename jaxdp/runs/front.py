"""``jaxdp.Run``: an own model on own data, in a folder that survives a crash."""

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import flax.serialization
import jax
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.flat import flatten
from jaxdp.clipping import ClippedGrad, losses
from jaxdp.devices import processes
from jaxdp.devices.placement import resolve_placement
from jaxdp.devices.shards import hashed, on_host
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm, as_algorithm
from jaxdp.runs import bar, budget, reporting, stored
from jaxdp.runs import canaries as canary
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.run import (
    Progress,
    Result,
    Row,
    RunPlan,
    Started,
    Stepper,
    public,
    started,
    trained,
)
from jaxdp.runs.state import KeptSecret, RunState
from jaxdp.sampling import Source, as_source, fingerprint
from jaxdp.sampling.hashes import check_repeatable
from jaxdp.training.batches import placed
from jaxdp.training.step import PrivateStep
from jaxdp.training.trainer import TrainState
from jaxdp.types import ClipInfo, LossFn, PyTree

if TYPE_CHECKING:
    from jaxdp.audit.algorithms import EpsilonAudit

Evaluate = Callable[[PyTree], Mapping[str, float]]


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
        constants: as for ``jaxdp.Trainer``: arrays that are declared public.
        evaluate: from the parameters to numbers by name, such as the accuracy on a validation set.
            The set must be **public**: what it returns is shown, beside a row's own ``step``,
            ``epsilon`` and ``update_norm``; the first heads the report.
        every: steps between checkpoints and evaluations; None takes a twentieth of the run.
        progress: called with the number of steps taken, and with a row that is durable or None;
            None shows a bar in a terminal and in a notebook.
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
        about: words for the report by name, such as {"Title": "Loans", "Model": "ResNet-18"};
            public.
        average: decay of an average of the iterates, released in their place; None for none.
        report: False leaves out the page, which takes about a second; ``report`` writes it.
        set_aside_unreadable: True moves checkpoints out of the way that cannot be read, for
            whatever reason, and goes on from one before them or from the beginning; the steps up to
            them are **charged anew**. For one start, once nothing else helps: False raises what the
            reason is, and changes nothing.

    Raises:
        ValueError: an argument is not what it should be; at ``fit``, the folder holds another
            run, or one of other data, or another process trains there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loss_fn: LossFn,
        mechanism: Mechanism | Algorithm,
        optimizer: optax.GradientTransformation | None = None,
        source: PyTree = None,
        *,
        params: PyTree,
        constants: PyTree = None,
        evaluate: Evaluate | None = None,
        every: int | None = None,
        progress: Progress | None = None,
        secret: Secret | None = None,
        physical_batch_size: int | Literal["auto"] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        data_axes: Sequence[str] | None = None,
        delta: float | None = None,
        relation: acc.Relation | None = None,
        canaries: int | PyTree = 0,
        about: Mapping[str, str] | None = None,
        average: float | None = None,
        report: bool = True,
        set_aside_unreadable: bool = False,
    ):
        if not str(folder):
            raise ValueError(f"folder must name a folder, got {folder!r}")
        self.directory = RunDirectory(folder)
        self.algorithm = as_algorithm(mechanism, optimizer, average)
        self.source: Source = as_source(source)
        self.algorithm.mechanism.check_source(self.source)
        self._params = jax.tree.map(np.asarray, params)
        # Where they lie on a mesh they stay cut as they are.
        self._given = self._params if resolve_placement(None, params) is None else params
        self._mesh, self._data_axes = mesh, data_axes
        if constants is not None:
            declared = losses.declared_constants(constants, loss_fn).arrays
            loss_fn = losses.with_constants(functools.partial(loss_fn), declared)
        self._plain_loss = self._loss_fn = loss_fn
        self._trained = self.algorithm
        self._evaluate, self._secret, self._progress = evaluate, secret, progress
        self._every = None if every is None else arguments.integer("every", every, least=1)
        self._rows, self._reports = physical_batch_size, report
        self._gives_up = set_aside_unreadable
        self._delta = self.algorithm.mechanism.delta if delta is None else delta
        if delta is not None:
            arguments.fraction("delta", delta)
        self._relation = acc.Relation(relation or self._usual_relation())
        if self._delta is not None:
            # Raises where a step has no bound under the relation, before any is charged.
            flatten(self.algorithm.total(1), self._relation)
        self._about = {str(name): str(words) for name, words in (about or {}).items()}
        self._canaries: canary.Canaries | None = None
        if canary.asked(canaries):
            records = (self._params, self.source, physical_batch_size)
            found = canary.found(canaries, self._relation, self.algorithm, loss_fn, *records)
            self._canaries, self._loss_fn = found, found.loss(loss_fn)
            self._trained = found.watched(self.algorithm)
        self._date = reporting.today()
        self.history: list[Row] = []
        self.params: PyTree = None

    def _usual_relation(self) -> str | acc.Relation:
        """The relation of the run that the folder holds; of a new one that of its mechanism."""
        kept = None
        with contextlib.suppress(ValueError, OSError):  # fit says what is wrong with the folder
            kept = self.directory.load_state().relation
        return kept or self.algorithm.mechanism.neighbours

    @property
    def path(self) -> Path:
        """The folder."""
        return self.directory.path

    def fit(self, steps: int | None = None) -> PyTree:
        """Trains from the last checkpoint on, until ``steps`` steps were taken in all.

        Args:
            steps: of the whole run; None takes those that the noise was calibrated for.

        Returns:
            The parameters after the last step, or their average.

        Raises:
            ValueError: more steps than the noise was calibrated for; see the class.
        """
        result = self._fitted(budget.steps_within(self.algorithm.mechanism.steps, steps))
        self.params = result.params
        if self._reports and self._delta is not None and processes.index() == 0:
            self.report()
        return result.params

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

        Raises:
            ValueError: no step was shown yet, or the run has no delta.
        """
        if self._delta is None:
            raise ValueError("delta must be given for a report: Run(..., delta=1e-5); got None")
        self.history = self.directory.load_history() or self.history
        if not self.history:
            raise ValueError(f"run must have shown a row to report, got {self.path}: call fit()")
        self._check_guarantee(self.directory.load_state())
        last = self.directory.last_shown()
        shown = 0 if last is None else last.step
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
            params=self._params,
            date=self._date,
            about=self._about,
        )

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
            self.directory.checked_ledger()
        count = self._canaries.count
        found = audit.audit_rows_of(self.directory, self.algorithm, count, delta, confidence)
        row = audit.row_of(self.path.name, found)
        audit.save_audit(self.path, row, found)
        audit.into_report(self.directory, row)
        return found

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters that ``fit`` returned, as Flax's msgpack."""
        if self.params is None:
            raise ValueError("params must be trained to be exported: call fit() first")
        with stored.writing(Path(path)):
            Path(path).write_bytes(flax.serialization.to_bytes(jax.device_get(self.params)))

    def _fitted(self, steps: int) -> Result:
        check_repeatable(self.source)
        self._take()
        try:
            kept = self._agreed()
            with (
                started(self.directory, kept, self._configuration) as run,
                self._bar(steps) as progress,
            ):
                plan, self.history = self._plan(run, steps, kept), self.directory.load_history()
                params, rows, taken, seconds = trained(run, plan, self._shown(progress))
                self._finished(rows)
                self.history = [public(row) for row in rows]
                self.directory.save_history(self.history)
                seeded = run.secret.reproducible
                return Result(params, run.ledger, self.history, seeded, seconds, taken)
        finally:
            self.directory.unlock()

    def _take(self) -> None:
        """Takes the run's folder, in process 0 alone; what that refuses stops all."""

        def once() -> str:
            if not self.directory.exists():
                self.directory.create()
            self.directory.lock()
            return ""

        processes.from_process_0(once)

    def _agreed(self) -> RunState:
        """The secret state of the run; in several processes that of process 0, where all agree.

        Raises:
            ValueError: processes disagree; nothing was charged.
        """
        if processes.count() == 1:
            return self._kept()
        given = None if self._secret is None else self._secret.stream("agreement").hex()
        versions = processes.versions()
        processes.agree(**versions, mechanism=self._mechanism(), secret=given)
        text = processes.from_process_0(lambda: json.dumps(self._kept().to_dict()))
        found = RunState.from_dict(json.loads(text))
        secret = found.secret.restored()
        processes.agree(
            options=(self._every, self._rows, self._delta, self._relation),
            source=self._fingerprint(secret),
            params=hashed(self._params),
            program=self._configuration(),
        )
        return found

    def _check_guarantee(self, kept: RunState) -> None:
        """Refuses another delta or relation than the epsilons of the run's rows have."""
        for name, given in (("delta", self._delta), ("relation", self._relation.value)):
            if kept.relation is not None and getattr(kept, name) != given:
                raise ValueError(
                    f"{name} must stay that of the run in {self.path}, {getattr(kept, name)}, got "
                    f"{given}: its rows have epsilons of that one; run.epsilon() tells those of "
                    "others"
                )

    def _kept(self) -> RunState:
        """The secret state of the run; a new one where there is none."""
        if not self.directory.exists():
            return self._new(self._secret or Secret.new())
        kept = self.directory.load_state()
        if kept.mechanism is None or kept.starts is None:
            raise ValueError(f"folder must hold a run of jaxdp.Run, got {self.path}")
        if kept.mechanism != self._mechanism():
            raise ValueError(
                f"mechanism must stay that of the run in {self.path}, {kept.mechanism}, got "
                f"{self._mechanism()}. Where another version calibrated the noise to other digits, "
                "give the run's: dataclasses.replace(mechanism, noise_multiplier=...)"
            )
        self._check_guarantee(kept)
        if kept.data != self._fingerprint(kept.secret.restored()):
            raise ValueError(
                f"source must hold the records that the run in {self.path} was begun with, got "
                "others: what was released of the old ones would be charged to the new"
            )
        return kept

    def _new(self, secret: Secret) -> RunState:
        return RunState(
            secret=KeptSecret.of(secret),
            starts=(),
            data=self._fingerprint(secret),
            mechanism=self._mechanism(),
            canaries=canary.digest(canary.tossed(self._count_of_canaries, secret)),
            delta=self._delta,
            relation=self._relation.value,
        )

    @property
    def _count_of_canaries(self) -> int:
        return self._canaries.count if self._canaries else 0

    def _mechanism(self) -> str:
        described = repr((self.algorithm.mechanism, self.algorithm.energy))
        return described + (f" {self._canaries.name}" if self._canaries else "")

    def _configuration(self) -> str:
        """A text of all that makes this run: mechanism, folder and traced programs of a step."""
        traced = _programs(self.algorithm, self._plain_loss, self._params, self.source.example)
        return f"{self._mechanism()} {self.path.resolve()} {traced}"

    def _fingerprint(self, secret: Secret) -> str:
        return fingerprint(self.source, secret)

    def _bar(self, steps: int) -> contextlib.AbstractContextManager[Progress]:
        if processes.index():
            return contextlib.nullcontext(lambda step, row: None)
        if self._progress is not None:
            return contextlib.nullcontext(self._progress)
        return bar.shown(self.path.name, steps)

    def _plan(self, run: Started, steps: int, kept: RunState) -> RunPlan:
        count = self._count_of_canaries
        if count and not run.ledger.entries:  # before a projection of the records is charged
            canary.placed(self.directory, canary.tossed(count, run.secret))
        source = self._records(run)
        if self._canaries is not None:
            coins = canary.kept_coins(count, self.directory, kept.canaries)
            source = self._canaries.entered(placed(source), coins)
        watched = self._canaries is not None
        return RunPlan(
            self._loss_fn,
            self._trained,
            source,
            lambda _: self._given,
            steps,
            self._every or max(1, -(-steps // 20)),
            self._row,
            seen=(lambda state: canary.seen(state.opt_state)) if watched else None,
            block=self._block,
            durable=(lambda row: canary.publish(self.directory, row)) if watched else None,
            evaluate=self._evaluate and self._evaluated,
            note=canary.note(self._count_of_canaries),
            physical_batch_size=self._rows,
            mesh=self._mesh,
            data_axes=self._data_axes,
            set_aside_unreadable=self._gives_up,
        )

    def _records(self, run: Started) -> Source:
        return self.source

    def _row(self, state: TrainState, trainer: Stepper) -> Row:
        row: Row = self._trained.counts_of(state.opt_state)
        if self._delta is not None:
            row["epsilon"] = trainer.epsilon(self._delta, self._relation).upper
        return row

    def _block(self, first: int, seen: list[jax.Array], infos: list[ClipInfo]) -> Row:
        if self._canaries is None:
            return {}
        return {canary.HASH: canary.keep(self.directory, first, seen)}

    def _finished(self, rows: list[Row]) -> None:
        """Called with all rows, once the last is durable."""

    def _evaluated(self, params: PyTree) -> Row:
        return reporting.numbers({} if self._evaluate is None else self._evaluate(on_host(params)))

    def _shown(self, progress: Progress) -> Progress:
        def shown(step: int, row: Row | None) -> None:
            if row is not None:
                self.history = [r for r in self.history if r["step"] < row["step"]] + [row]
                self.directory.save_history(self.history)
            progress(step, row)

        return shown


def _programs(algorithm: Algorithm, loss_fn: LossFn, params: PyTree, example: PyTree) -> str:
    """The programs of a step as text: of the gradients and of what comes after the noise.

    With a hash of the numbers that they begin with, where a learning rate may stand, and of the
    arrays that they captured.
    """
    links = PrivateStep.of(algorithm, loss_fn)
    _, after = links.init(params)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), example)
    key = (
        jax.random.key(0, impl="threefry2x32")
        if getattr(links.grad_fn, "takes_rng", False)
        else None
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        update = jax.make_jaxpr(links.after.update)(params, after, params)
    loss, numbers = "", [params, after, update.consts]
    if isinstance(links.grad_fn, ClippedGrad):
        norms = lambda p, b: links.grad_fn.with_info(p, b, "all", key)[1].norms  # noqa: E731
        traced = jax.make_jaxpr(norms)(params, batch)
        loss, numbers = str(traced), [*numbers, traced.consts]
    text = re.sub(r"0x[0-9a-f]+", "", f"{update} {loss}")  # addresses differ in every process
    return f"{text} {hashed(numbers)}"
