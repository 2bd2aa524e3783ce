"""``jaxdp.Run``: an own model on own data, in a folder that survives a crash."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp._durable import write_atomically
from jaxdp.clipping import ClippedGrad
from jaxdp.ledger import Ledger
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.method import Method, as_method
from jaxdp.runs import bar
from jaxdp.runs.directory import RunDirectory, secret_from_dict
from jaxdp.runs.run import Plan, Progress, Row, new_state, started, trained
from jaxdp.seeds import Secret
from jaxdp.sources import Source, as_source
from jaxdp.trainer import Trainer, TrainState
from jaxdp.types import PyTree

Evaluate = Callable[[PyTree], Mapping[str, float]]
_SAMPLED = 256  # records whose hash tells whether the data are the same


class Run:
    """A training run of your own model on your own data, in a folder.

    The folder holds the durable ledger (``ledger.jsonl``), the curves (``history.json``) and, for
    its owner alone, checkpoints and secrets (``secret/``). A run that was interrupted goes on with
    another ``Run(...).fit()`` on the same folder: nothing is charged twice, no noise is used twice,
    and nothing was shown of the steps that are done again.

    Formal guarantee: everything in the folder outside ``secret/``, the rows handed to ``progress``
    and the parameters that :meth:`fit` returns satisfy ``epsilon(delta)``, as for
    ``jaxdp.Trainer``, provided that ``evaluate`` looks at public data only.

    Args:
        folder: of the run; made if it is not there.
        loss_fn: the loss of one example, as for ``jaxdp.Trainer``.
        mechanism: from ``jaxdp.dp_sgd``, or a ``jaxdp.Method``.
        optimizer: any optax optimizer; None for a ``Method``.
        source: the records, as for ``jaxdp.Trainer``.
        params: the parameters before the first step, computed from no record.
        evaluate: from the parameters to numbers by name, such as the accuracy on a validation set.
            The set must be **public**: what it returns is shown.
        every: steps between checkpoints, which are also those between evaluations; None takes a
            twentieth of the run.
        progress: called with the number of steps taken, and with a row that is durable or None;
            None shows a bar in a terminal and in a notebook.
        secret: of a new run; None takes one from the operating system.
        physical_batch_size: rows of one compiled pass; None chooses.

    Raises:
        ValueError: an argument is not what it should be; at :meth:`fit`, the folder holds another
            run, or one of other data, or another process trains there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loss_fn: Callable[..., Any],
        mechanism: Mechanism | Method,
        optimizer: optax.GradientTransformation | None = None,
        source: Any = None,
        *,
        params: PyTree,
        evaluate: Evaluate | None = None,
        every: int | None = None,
        progress: Progress | None = None,
        secret: Secret | None = None,
        physical_batch_size: int | None = None,
    ):
        if not str(folder):
            raise ValueError(f"folder must name a folder, got {folder!r}")
        self.directory = RunDirectory(folder)
        self.method = as_method(mechanism, optimizer)
        self.source: Source = as_source(source)
        self._loss_fn, self._evaluate, self._secret = loss_fn, evaluate, secret
        self._params = jax.tree.map(np.asarray, params)
        self._every = None if every is None else _validate.integer("every", every, least=1)
        self._progress = progress
        self._rows = physical_batch_size
        self.history: list[Row] = []
        self.params: PyTree = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self.directory.path

    def fit(self, steps: int | None = None) -> PyTree:
        """Trains until ``steps`` steps were taken in all, from where the folder stands.

        Args:
            steps: of the whole run; None takes those that the noise was calibrated for.

        Returns:
            The parameters after the last step.

        Raises:
            ValueError: more steps than the noise was calibrated for; see the class.
        """
        steps = self._count(steps)
        if not self.directory.exists():
            self.directory.create()
        self.directory.lock()
        try:
            with (
                started(self.directory, self._kept(), self._configuration()) as run,
                self._bar(steps) as progress,
            ):
                state, self.history, _, _ = trained(run, self._plan(steps), self._shown(progress))
        finally:
            self.directory.unlock()
        self.params = state.params
        return state.params

    def epsilon(
        self, delta: float | None = None,
        relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
    ) -> acc.Bound:
        """Bounds on epsilon for everything that the folder's ledger was charged for.

        Args:
            delta: None takes the one that the noise was calibrated for.
            relation: the neighbouring relation.
        """
        delta = self.method.mechanism.delta if delta is None else delta
        if delta is None:
            raise ValueError("delta must be given: the noise was not calibrated for one; got None")
        if not self.directory.exists():
            raise ValueError(f"run must have begun to have an epsilon, got {self.path}: call fit()")
        return Ledger(self.directory.ledger).epsilon(delta, relation)

    def unverified(self) -> list[str]:
        """The assumptions of the guarantee, in words."""
        return Ledger(self.directory.ledger).unverified()

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters that :meth:`fit` returned, as Flax's msgpack."""
        if self.params is None:
            raise ValueError("params must be trained to be exported: call fit() first")
        Path(path).write_bytes(flax.serialization.msgpack_serialize(jax.device_get(self.params)))

    def _count(self, steps: int | None) -> int:
        planned = self.method.mechanism.steps
        steps = planned if steps is None else _validate.integer("steps", steps, least=1)
        if steps is None:
            raise ValueError("steps must be given: the noise was not calibrated for any; got None")
        if planned is not None and steps > planned:
            raise ValueError(
                f"steps must be at most {planned}, which the noise was calibrated for, got {steps}"
            )
        return steps

    def _kept(self) -> Row:
        """The secret state of the run; a new one where there is none."""
        if not self.directory.exists():
            secret = self._secret or Secret.new()
            return new_state(secret, data=self._fingerprint(secret), mechanism=self._mechanism())
        kept = self.directory.load_state()
        if "mechanism" not in kept or "starts" not in kept:
            raise ValueError(f"folder must hold a run of jaxdp.Run, got {self.path}")
        if kept["mechanism"] != self._mechanism():
            raise ValueError(
                f"mechanism must stay that of the run in {self.path}, {kept['mechanism']}, got "
                f"{self._mechanism()}"
            )
        if kept["data"] != self._fingerprint(secret_from_dict(kept["secret"])):
            raise ValueError(
                f"source must hold the records that the run in {self.path} was begun with, got "
                "others: what was released of the old ones would be charged to the new"
            )
        return kept

    def _mechanism(self) -> str:
        return repr((self.method.mechanism, self.method.energy))

    def _configuration(self) -> str:
        """A text that tells this run from others with its seed: the programs of a step, traced."""
        links = self.method.step(self._loss_fn)
        params, (_, after) = self._params, links.init(self._params)
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), self.source.example
        )
        key = jax.random.key(0) if getattr(links.grad_fn, "takes_rng", False) else None
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            update = jax.make_jaxpr(links.after.update)(params, after, params)
        loss = ""
        if isinstance(links.grad_fn, ClippedGrad):
            norms = lambda p, b: links.grad_fn(p, b, "all", key)[1].norms  # noqa: E731
            loss = str(jax.make_jaxpr(norms)(params, batch))
        text = f"{self._mechanism()} {self.path.resolve()} {update} {loss}"
        return re.sub(r"0x[0-9a-f]+", "", text)

    def _fingerprint(self, secret: Secret) -> str:
        """A keyed hash of the number of records and of some of them. **Secret**."""
        found = hashlib.blake2b(key=secret.stream("data hash"), digest_size=16)
        count = len(self.source)
        found.update(str(count).encode())
        some = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(np.int64))
        for leaf in jax.tree.leaves(self.source.gather(some, np.ones(len(some), bool))):
            found.update(np.ascontiguousarray(leaf).tobytes())
        return found.hexdigest()

    def _bar(self, steps: int) -> contextlib.AbstractContextManager[Progress]:
        if self._progress is not None:
            return contextlib.nullcontext(self._progress)
        return bar.shown(self.path.name, steps)

    def _plan(self, steps: int) -> Plan:
        every = self._every or max(1, -(-steps // 20))
        return Plan(
            self._loss_fn, self.method, self.source, lambda _: self._params, steps, every,
            self._row, evaluate=self._evaluate and self._evaluated, physical_batch_size=self._rows,
        )

    def _row(self, state: TrainState, trainer: Trainer) -> Row:
        row: Row = self.method.counts_of(state.opt_state)
        if (delta := self.method.mechanism.delta) is not None:
            row["epsilon"] = trainer.epsilon(delta).upper
        return row

    def _evaluated(self, params: PyTree) -> Row:
        found = {} if self._evaluate is None else self._evaluate(params)
        if not isinstance(found, Mapping) or any(np.size(v) != 1 for v in found.values()):
            raise ValueError(
                "evaluate must return numbers by name, such as {'accuracy': 0.9}, got "
                f"{_validate.described(found)}"
            )
        return {name: float(np.asarray(value).item()) for name, value in found.items()}

    def _shown(self, progress: Progress) -> Progress:
        def shown(step: int, row: Row | None) -> None:
            if row is not None:
                self.history = [r for r in self.history if r["step"] < row["step"]] + [row]
                write_atomically(self.path / "history.json", json.dumps(self.history, indent=1))
            progress(step, row)

        return shown

