"""The run itself: charge a block of steps, take them, evaluate, checkpoint, and so on."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import data
from jaxdp._durable import write_atomically
from jaxdp.ledger import Ledger
from jaxdp.optimizers.method import Method
from jaxdp.runs import assemble, canaries
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import (
    SENSITIVE_NOTE,
    RunDirectory,
    secret_from_dict,
    secret_to_dict,
)
from jaxdp.runs.fingerprint import differences, fingerprint
from jaxdp.seeds import Secret
from jaxdp.train import Trainer, TrainState
from jaxdp.types import ClipInfo, PyTree

Progress = Callable[[int, dict[str, Any] | None], None]


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
        seconds: wall time of this process's part of the run, data loading excluded.
        steps_run: how many steps this process took.
    """

    config: RunConfig
    params: PyTree
    ledger: Ledger
    history: list[dict[str, Any]]
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
        stream = {"secret": secret_to_dict(secret), "fingerprint": fingerprint(dataset, secret)}
        state = {"config": config.to_dict(), "streams": [stream], "canaries": kept}
        directory.save_state(state)
        return _run(config, directory, dataset, [secret], progress)
    finally:
        directory.unlock()


def resume(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, progress: Progress,
    fork: bool = False,
) -> RunResult:
    """Continues a run from its last checkpoint: the same releases as if it had never stopped.

    Args:
        config: must equal the configuration that the run was started with.
        directory: of the run.
        dataset: must be the same data, unless ``fork``.
        progress: called after every step.
        fork: where data, versions or device changed, go on with fresh randomness: the steps since
            the checkpoint are then other releases, and are charged in addition.

    Raises:
        ValueError: something changed and ``fork`` is not given, or the configuration differs.
    """
    directory.load_state()
    directory.lock()
    try:
        state = directory.load_state()
        _require_equal_config(RunConfig(**state["config"]), config)
        dataset = canaries.entered(config, directory, dataset, state.get("canaries"))
        stream = state["streams"][-1]
        secret = secret_from_dict(stream["secret"])
        changed = differences(stream["fingerprint"], fingerprint(dataset, secret))
        if changed and not fork:
            raise ValueError(
                f"resuming needs what the run was started with, but these changed: "
                f"{', '.join(changed)}. With --fork the run goes on with fresh noise, and the "
                "steps since its last checkpoint are charged a second time"
            )
        if changed:
            secret = Secret.new()
            stream = {"secret": secret_to_dict(secret), "fingerprint": fingerprint(dataset, secret)}
            state = {**state, "streams": [*state["streams"], stream]}
            directory.save_state(state)
        secrets = [secret_from_dict(row["secret"]) for row in state["streams"]]
        return _run(config, directory, dataset, secrets, progress)
    finally:
        directory.unlock()


def _run(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, secrets: list[Secret],
    progress: Progress,
) -> RunResult:
    """Trains with the last of the secrets; the others are those of the run before it was forked."""
    secret, stream = secrets[-1], f"run-{len(secrets) - 1}"
    assert config.steps is not None
    assert config.eval_every is not None
    method, note = assemble.method_of(config, secret), canaries.note(config)
    ledger, checkpoints = Ledger(directory.ledger), Checkpoints(directory.checkpoints)
    try:
        dataset = _projected(config, directory, dataset, secret, ledger, stream)
        train = jax.device_put((dataset.train_x, dataset.train_y))
        trainer = assemble.trainer_of(config, dataset, secret, train)
        fresh = assemble.fresh_state(trainer, config, secret)
        state, history = _restored(checkpoints, ledger, fresh, directory)
        # After a fork, also one that crashed since: the checkpoint may hold the old key.
        state = state._replace(opt_state=assemble.with_keys(state.opt_state, secret))
        trainer.seek(state.step)
        _, unseen = assemble.test_split(config, dataset)
        accuracy = assemble.evaluator(assemble.model_of(config), *unseen)
        first_step, began = state.step, time.perf_counter()
        progress(state.step, _public(history[-1]) if history else None)
        while state.step < config.steps:
            end = min(config.steps, (state.step // config.eval_every + 1) * config.eval_every)
            _charge(ledger, method, stream, state.step, end - state.step, note)
            seen: list[jax.Array] | None = [] if config.canaries else None
            begin = state.step
            state, row, sensitive = _block(
                trainer, state, train, end, progress, config.sensitive, seen
            )
            if seen is not None:
                canaries.keep(directory, begin, seen)
            row.update(method.counts_of(state.opt_state))
            row["test_accuracy"] = accuracy(state.params)
            row["epsilon"] = ledger.epsilon(config.delta, acc.Relation(config.relation)).upper
            history.append({**row, **sensitive})
            checkpoints.save(state, history, ledger)
            progress(state.step, row)
        seconds = time.perf_counter() - began
    finally:
        checkpoints.close()
        ledger.close()
    if config.sensitive:
        _write_sensitive(directory, history)
    return RunResult(
        config, state.params, ledger, [_public(row) for row in history],
        any(s.reproducible for s in secrets), seconds, state.step - first_step,
    )


def _projected(
    config: RunConfig, directory: RunDirectory, dataset: data.Dataset, secret: Secret,
    ledger: Ledger, stream: str,
) -> data.Dataset:
    """The projected data; the components are charged, released and kept in that order."""
    released = np.load(directory.components) if directory.components.exists() else None
    streams = {entry.stream for entry in ledger.entries}
    if released is not None and not any(str(name).endswith("/pca") for name in streams):
        raise ValueError(
            f"{directory.ledger} must hold the charge of {directory.components}, but it is "
            "missing: what was released can no longer be accounted for"
        )
    if released is None:
        for event in config.once():
            ledger.charge(event, stream=f"{stream}/pca", source="mechanism", replay=True)
    dataset, components = assemble.projected(config, dataset, secret, released)
    if released is None and components is not None:
        unfinished = directory.components.with_suffix(".tmp.npy")
        np.save(unfinished, components)
        unfinished.replace(directory.components)
    return dataset


def _charge(
    ledger: Ledger, method: Method, stream: str, first_step: int, steps: int, note: str
) -> None:
    for part, rows in method.events(first_step, steps).items():
        for event, first, count in rows:
            ledger.charge(
                event, count, stream=f"{stream}/{part}" if part else stream, first_step=first,
                source="mechanism", replay=True, note=note,
            )


def _restored(
    checkpoints: Checkpoints, ledger: Ledger, fresh: TrainState, directory: RunDirectory
) -> tuple[TrainState, list[dict[str, Any]]]:
    state, history, charged = checkpoints.restore(fresh) or (fresh, [], Ledger())
    if not ledger.covers(charged):
        raise ValueError(
            f"{directory.ledger} must hold every charge of the last checkpoint, but some are "
            "missing: what was released can no longer be accounted for"
        )
    return state, history


def _block(
    trainer: Trainer, state: TrainState, train: PyTree, end: int, progress: Progress,
    sensitive: bool, seen: list[jax.Array] | None,
) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
    norms, infos = [], []
    while state.step < end:
        state, info, clip_infos = trainer.step(state, train)
        norms.append(info.update_norm)
        if seen is not None:
            seen.append(canaries.seen(state.opt_state))
        if sensitive:
            infos.extend(clip_infos)
        progress(state.step, None)
    row = {"step": state.step, "update_norm": float(np.mean(jax.device_get(norms)))}
    return state, row, {"sensitive": _summary(infos)} if sensitive else {}


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


def _public(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "sensitive"}


def _write_sensitive(directory: RunDirectory, history: list[dict[str, Any]]) -> None:
    rows = [{"step": row["step"], **row["sensitive"]} for row in history if "sensitive" in row]
    text = json.dumps({"warning": SENSITIVE_NOTE, "history": rows}, indent=1)
    write_atomically(directory.sensitive, text, mode=0o600)


def _require_equal_config(old: RunConfig, new: RunConfig) -> None:
    before, after = old.to_dict(), new.to_dict()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        parts = [f"{name} ({before[name]!r} then, {after[name]!r} now)" for name in changed]
        raise ValueError(f"a resumed run must keep its configuration; changed: {', '.join(parts)}")
