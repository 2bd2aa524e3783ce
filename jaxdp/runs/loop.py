"""The run of a configuration, as the command line has it: built-in data, methods by name."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import data
from jaxdp._durable import save_array, write_atomically
from jaxdp.ledger import Ledger
from jaxdp.runs import assemble, canaries
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import SENSITIVE_NOTE, RunDirectory, secret_from_dict
from jaxdp.runs.run import Plan, Progress, Row, Started, new_state, public, started, trained
from jaxdp.seeds import Secret
from jaxdp.trainer import Trainer, TrainState
from jaxdp.types import ClipInfo, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run.

    Attributes:
        config: its configuration.
        params: the released parameters.
        ledger: what was released.
        history: one row a block: step, epsilon, test_accuracy, update_norm; with an annealer its
            counters proposals, accepted and forced.
        reproducible: whether a person chose the seed.
        seconds: wall time of this process's part of the run, data loading excluded. Depends on the
            private data through the sizes of the draws: not to be published.
        steps_run: how many steps this process took.
    """

    config: RunConfig
    params: PyTree
    ledger: Ledger
    history: list[Row]
    reproducible: bool
    seconds: float
    steps_run: int


def start(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, secret: Secret,
    progress: Progress,
) -> RunResult:
    """Starts a run in a new directory; the configuration must be resolved.

    Raises:
        ValueError: the directory holds a run already, or is in use.
    """
    directory.create()
    directory.lock()
    try:
        if directory.exists() or directory.ledger.exists():
            raise ValueError(f"out must be a new folder, got {directory.path}: a run began there")
        kept = canaries.tossed(config, directory, secret)
        dataset = canaries.entered(config, directory, dataset, kept)
        state = new_state(
            secret, config=config.to_dict(), canaries=kept, data=_fingerprint(dataset, secret)
        )
        return _run(config, directory, dataset, state, progress)
    finally:
        directory.unlock()


def resume(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, progress: Progress
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

    Raises:
        ValueError: the data or the configuration differ.
    """
    directory.load_state()
    directory.lock()
    try:
        state = directory.load_state()
        if "starts" not in state:
            raise ValueError(
                f"out must hold a run of this version to resume, got {directory.path}, which an "
                "older one began: its noise could be used again. Start a new run"
            )
        _require_equal_config(RunConfig(**state["config"]), config)
        dataset = canaries.entered(config, directory, dataset, state.get("canaries"))
        if _fingerprint(dataset, secret_from_dict(state["secret"])) != state["data"]:
            raise ValueError(
                "a resumed run needs the data that it was started with, but the training data "
                "changed: what was released of the old ones would be charged to the new. Start a "
                "new run, in another folder"
            )
        return _run(config, directory, dataset, state, progress)
    finally:
        directory.unlock()


def _fingerprint(dataset: data.Dataset, secret: Secret) -> str:
    """A hash of the training data under the run's secret. **Secret**."""
    return dataset.fingerprint(secret.stream("data hash"))


def _run(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, kept: Row,
    progress: Progress,
) -> RunResult:
    with started(directory, kept, json.dumps(config.to_dict(), sort_keys=True)) as run:
        dataset = _projected(config, dataset, run)
        state, rows, steps, seconds = trained(run, _plan(config, dataset, run), progress)
        result = RunResult(
            config, state.params, run.ledger, [public(row) for row in rows],
            run.secret.reproducible, seconds, steps,
        )
    if config.sensitive:
        _write_sensitive(directory, rows)
    return result


def _plan(config: RunConfig, dataset: data.Dataset, run: Started) -> Plan:
    assert config.steps is not None
    assert config.eval_every is not None
    directory, note = run.directory, canaries.note(config)
    train = jax.device_put((dataset.train_x, dataset.train_y))
    method = assemble.method_of(config, run.secret)
    loss_fn = assemble.loss_of(config)
    accuracy = assemble.evaluator(
        assemble.model_of(config), *assemble.test_split(config, dataset)[1]
    )

    def row(state: TrainState, trainer: Trainer) -> Row:
        bound = trainer.epsilon(config.delta, acc.Relation(config.relation))
        return {
            **method.counts_of(state.opt_state), "test_accuracy": accuracy(state.params),
            "epsilon": bound.upper,
        }

    def block(first: int, seen: list[Any], infos: list[ClipInfo]) -> Row:
        if config.canaries:
            canaries.keep(directory, first, seen)
        return {"sensitive": _summary(infos)} if config.sensitive else {}

    return Plan(
        loss_fn, method, train, lambda secret: assemble.fresh_params(config, secret),
        config.steps, config.eval_every, row,
        seen=(lambda state: canaries.seen(state.opt_state)) if config.canaries else None,
        block=block,
        durable=(lambda step: canaries.publish(directory, step)) if config.canaries else None,
        energy=lambda sampler: assemble.energy_of(config, dataset, loss_fn, train, sampler),
        told=config.sensitive, note=note, physical_batch_size=config.physical_batch_size,
    )


def _projected(config: RunConfig, dataset: data.Dataset, run: Started) -> data.Dataset:
    """The projected data; the components are charged, released and kept in that order."""
    directory, stream = run.directory, f"{run.name}/pca"
    kept = directory.secret / directory.components.name
    if directory.components.exists() and not kept.exists():
        kept = directory.components  # the release itself
    released = np.load(kept) if kept.exists() else None
    charged = any(entry.stream == stream for entry in run.ledger.entries)
    if released is not None and not charged:
        raise ValueError(
            f"{directory.ledger} must hold the charge of {directory.components}, but it is "
            "missing: what was released can no longer be accounted for"
        )
    if released is None and run.ledger.shown(stream):
        raise ValueError(
            f"{directory.components} must be there to go on with this run, or its copy {kept}, but "
            "both are missing: the components were shown, and others are another release, which "
            "the budget does not hold. Put one of them back, or start a new run in another folder"
        )
    for event in () if charged else config.once():
        # Once: nobody sees the components before they are kept, and until then they are made anew.
        run.ledger.charge(event, stream=stream, source="mechanism")
    secret = run.secret.child(f"pca {run.incarnation}")
    dataset, components = assemble.projected(config, dataset, secret, released)
    if components is not None:
        save_array(directory.secret / directory.components.name, components, mode=0o600)
        run.ledger.show(stream, 1)
        save_array(directory.components, components)
    return dataset


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


def _write_sensitive(directory: RunDirectory, history: list[Row]) -> None:
    rows = [{"step": row["step"], **row["sensitive"]} for row in history if "sensitive" in row]
    text = json.dumps({"warning": SENSITIVE_NOTE, "history": rows}, indent=1)
    write_atomically(directory.sensitive, text, mode=0o600)


def _require_equal_config(old: RunConfig, new: RunConfig) -> None:
    before, after = old.to_dict(), new.to_dict()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        parts = [f"{name} ({before[name]!r} then, {after[name]!r} now)" for name in changed]
        raise ValueError(f"a resumed run must keep its configuration; changed: {', '.join(parts)}")
