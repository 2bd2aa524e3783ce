"""Runs of a configuration: built-in data and models, algorithms by name."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import data
from jaxdp.devices import processes
from jaxdp.devices.shards import hashed, on_host
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.entries import SEEDED
from jaxdp.ledger.ledger import Shown
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers import registry
from jaxdp.runs import assemble, canary_inputs, stored
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import SENSITIVE_NOTE, RunDirectory
from jaxdp.runs.files import save_array
from jaxdp.runs.front import Run
from jaxdp.runs.run import INTERRUPTED, Progress, Result, Row, RunPlan, Started, Stepper
from jaxdp.runs.state import RunState
from jaxdp.sampling.hashes import identities
from jaxdp.sampling.source import ArraySource, Source, as_source
from jaxdp.training.trainer import TrainState
from jaxdp.types import ClipInfo

Enough = Callable[[Row], bool]
_NO_COMPONENTS = (FileNotFoundError, ValueError, TypeError, EOFError)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunResult(Result):
    """A finished run of a configuration.

    Attributes:
        config: the configuration.
    """

    config: RunConfig


def start(
    config: RunConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    secret: Secret,
    progress: Progress,
    mesh: jax.sharding.Mesh | None = None,
    enough: Enough | None = None,
) -> RunResult:
    """Starts a run in a new directory; the configuration must be resolved.

    Args:
        config: what is trained.
        directory: of the run.
        dataset: the data.
        secret: the randomness.
        progress: called after every step.
        mesh: whose devices share the records of every step; None for one device.
        enough: ends the run early, see ``RunPlan``; the configuration's steps are charged all the
            same, at the start.

    Raises:
        ValueError: the directory holds a run already, or is in use.
    """

    def once() -> str:
        directory.create()
        return ""

    processes.from_process_0(once)
    return ConfiguredRun(config, directory, dataset, secret, progress, mesh, True, enough).result()


def resume(
    config: RunConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    progress: Progress,
    mesh: jax.sharding.Mesh | None = None,
    enough: Enough | None = None,
    set_aside_unreadable: bool = False,
) -> RunResult:
    """Continues a run from its last checkpoint.

    Steps since then, of which nobody saw anything, are done again on other draws and with other
    noise, within the charge that they had: a crash costs nothing and re-uses nothing, whatever
    version, flags or machine it is continued with.

    Args:
        config: must equal the configuration that the run was started with.
        directory: of the run.
        dataset: must be the same data.
        progress: called after every step.
        mesh: as for ``start``; it may be another one than before.
        enough: as for ``start``, and the same as there; without one the run takes all its steps,
            and its rows go on to tell the epsilon of all.
        set_aside_unreadable: as for ``jaxdp.Run``.

    Raises:
        ValueError: the data or the configuration differ.
    """
    state = directory.load_state()
    if state.config is not None:  # before what was changed is built, and refused in other words
        _require_equal_config(RunConfig.from_dict(state.config), config)
    secret = state.secret.restored()
    run = ConfiguredRun(
        config, directory, dataset, secret, progress, mesh, False, enough, set_aside_unreadable
    )
    return run.result()


class ConfiguredRun(Run):
    """The run of a configuration; arguments as for ``start``.

    Args:
        new: False for a run that began before.
        enough: as for ``start``.
        set_aside_unreadable: as for ``Run``.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        dataset: data.Dataset,
        secret: Secret,
        progress: Progress,
        mesh: jax.sharding.Mesh | None = None,
        new: bool = True,
        enough: Enough | None = None,
        set_aside_unreadable: bool = False,
    ):
        _check_several(config)
        self.config, self.dataset, self._is_new = config, dataset, new
        self._enough = enough
        super().__init__(
            directory.path,
            assemble.loss_of(config),
            config.private_algorithm(secret),
            source=(assemble.stand_in(config, dataset), dataset.train_y),
            params=assemble.fresh_params(config, secret),
            every=config.eval_every,
            progress=progress,
            secret=secret,
            delta=config.delta,
            physical_batch_size=config.physical_batch_size,
            relation=acc.Relation(config.relation),
            canaries=canary_inputs.asked_for(config, dataset),
            mesh=mesh,
            set_aside_unreadable=set_aside_unreadable,
        )
        self.directory = directory

    def result(self) -> RunResult:
        """Trains what is left."""
        assert self.config.steps is not None
        found = self._fitted(self.config.steps)
        return RunResult(**vars(found), config=self.config)

    def _kept(self) -> RunState:
        if self._is_new:
            assert self._secret is not None
            if self.directory.exists() or self.directory.ledger.exists():
                raise ValueError(f"out must be a new folder, got {self.path}: a run began there")
            kept = dataclasses.replace(self._new(self._secret), config=self.config.to_dict())
            return kept
        state = self.directory.load_state()
        if state.starts is None or state.config is None:
            raise ValueError(
                f"out must hold a run of this version to resume, got {self.path}, which an older "
                "one began: its noise could be used again. Start a new run"
            )
        _require_equal_config(RunConfig.from_dict(state.config), self.config)
        if self.config.strategy is not None and state.mechanism != self._mechanism():
            raise ValueError(
                f"strategy must stay that of the run in {self.path}, {state.mechanism}, got "
                f"{self._mechanism()}, which this machine makes of the same configuration"
            )
        if self._fingerprint(state.secret.restored()) != state.data:
            raise ValueError(
                "a resumed run needs the data that it was started with, but the training data "
                "changed: what was released of the old ones would be charged to the new. Start a "
                "new run, in another folder"
            )
        return state

    def _configuration(self) -> str:
        return json.dumps(self.config.to_dict(), sort_keys=True)

    def _fingerprint(self, secret: Secret) -> str:
        return self.dataset.fingerprint(secret.stream("data hash"))

    def _records(self, run: Started) -> Source:
        raw = (self.dataset.train_x, self.dataset.train_y)
        self.dataset = _projected(self.config, assemble.featured(self.config, self.dataset), run)
        self._whiten_canaries(run)
        source = ArraySource.of(jax.device_put((self.dataset.train_x, self.dataset.train_y)))
        if self.config.features is None or self.config.sampling != "cyclic_poisson":
            return source
        # Groups by the record as it was loaded: the last digits of its features are another
        # machine's own, and a run that goes on there must keep its groups.
        known = identities(as_source(raw))
        return dataclasses.replace(source, identities=known)

    def _whiten_canaries(self, run: Started) -> None:
        """Whitens candidate records as the others: by a release, so that they stay public.

        They are not among the records that it was released of, which no coin touches.
        """
        found = self._canaries
        if self.config.whiten_noise_multiplier is None or found is None or found.leaf is not None:
            return
        x, y = found.rows
        released = np.load(run.directory.secret / run.directory.components.name)
        made = (assemble.whitened_by(released, x), y)
        self._canaries = whitened = dataclasses.replace(found, rows=made)
        self._trained = whitened.watched(self.algorithm)

    def _plan(self, run: Started, steps: int, kept: RunState) -> RunPlan:
        plan = super()._plan(run, steps, kept)
        config, (seen, told) = self.config, assemble.test_split(self.config, self.dataset)
        arrays = getattr(plan.source, "arrays", None)  # on the device
        self._tested = assemble.evaluator(assemble.model_of(config), *told)
        return dataclasses.replace(
            plan,
            told=config.sensitive,
            block=self._block,
            traceable=plan.mesh is None,
            enough=self._enough,
            energy=lambda sampler: assemble.energy_of(
                config, (self._plain_loss, seen), (plan.loss_fn, arrays), sampler
            ),
        )

    def _row(self, state: TrainState, trainer: Stepper) -> Row:
        row = super()._row(state, trainer)
        if self.config.spec.test_size:
            row |= self._tested(on_host(trainer.released(state)))
        return row

    def _block(self, first: int, seen: list[jax.Array], infos: list[ClipInfo]) -> Row:
        row = super()._block(first, seen, infos)
        return {**row, "sensitive": _summary(infos)} if self.config.sensitive else row

    def _finished(self, rows: list[Row]) -> None:
        if self.config.sensitive and processes.index() == 0:
            kept = [{"step": row["step"], **row["sensitive"]} for row in rows if "sensitive" in row]
            text = json.dumps({"warning": SENSITIVE_NOTE, "history": kept}, indent=1)
            with stored.writing(self.directory.sensitive):
                write_atomically(self.directory.sensitive, text, mode=0o600)


def _check_several(config: RunConfig) -> None:
    """Refuses what several processes would each do for themselves."""
    if processes.count() == 1:
        return
    if registry.ALGORITHMS[config.algorithm].energy:
        raise ValueError(
            f"algorithm must judge no candidates in several processes, got {config.algorithm}"
        )
    for name in ("features", "pca_dimensions", "whiten_noise_multiplier", "sensitive"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name} must be left out in several processes, got {getattr(config, name)}"
            )


def _projected(config: RunConfig, dataset: data.Dataset, run: Started) -> data.Dataset:
    """The projected data; the components are charged, kept, written down and published in turn."""
    directory, events = run.directory, config.once()
    if not events:
        return dataset
    kind = "pca" if config.whiten_noise_multiplier is None else "whitening"
    stream, kept = f"{run.name}/{kind}", directory.secret / directory.components.name
    shown = run.ledger.shown(stream)
    if shown is not None:
        found = _as_shown(shown, (directory.components, kept))
        dataset, components = assemble.projected(config, dataset, run.secret, found)
    elif directory.components.exists():  # published once the line was on disk
        raise ValueError(
            f"{directory.ledger} must hold the release of {directory.components}, but it is "
            "missing: what was released can no longer be accounted for"
        )
    else:
        # Nobody saw what a start before made: it is made again, within its charge. The line is this
        # start's own: one that was read may never have reached the disk.
        if any(entry.stream == stream for entry in run.ledger.entries):
            run.ledger.trust(INTERRUPTED)
        note = SEEDED if run.secret.reproducible else ""
        for event in events:
            run.ledger.charge(event, stream=stream, source="mechanism", again=True, note=note)
        secret = run.secret.child(f"{stream} {run.incarnation}")
        dataset, components = assemble.projected(config, dataset, secret, None)
    with stored.writing(kept):
        save_array(kept, components, mode=0o600)
    run.shows_release(stream, bytes.fromhex(hashed(components)))
    with stored.writing(directory.components):
        save_array(directory.components, components)
    return dataset


def _as_shown(shown: Shown, places: Sequence[Path]) -> np.ndarray:
    """The components that were shown, from the first place that holds them and no others."""
    for path in places:
        with stored.reading(path), contextlib.suppress(*_NO_COMPONENTS):
            found: np.ndarray = np.load(path)
            if shown.past in (None, bytes.fromhex(hashed(found))):  # format 2 has no hash
                return found
    raise ValueError(
        f"{places[0]}, or its copy {places[1]}, must hold the components that were shown to go on "
        "with this run, but neither does: others are another release, which the budget does not "
        "hold. Put one of them back, or start a new run in another folder"
    )


def _summary(infos: list[ClipInfo]) -> dict[str, float]:
    infos = jax.device_get(infos)
    mask = np.concatenate([info.mask for info in infos])
    columns = {
        "training_loss": np.concatenate([info.losses for info in infos]),
        "gradient_norm": np.concatenate([info.norms for info in infos]),
        "clipped_fraction": np.concatenate([info.clipped for info in infos]),
    }
    count = max(1, int(mask.sum()))
    return {name: float(values[mask].sum() / count) for name, values in columns.items()}


def _require_equal_config(old: RunConfig, new: RunConfig) -> None:
    before, after = old.to_dict(), new.to_dict()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        parts = [f"{name} ({before[name]!r} then, {after[name]!r} now)" for name in changed]
        raise ValueError(f"a resumed run must keep its configuration; changed: {', '.join(parts)}")
