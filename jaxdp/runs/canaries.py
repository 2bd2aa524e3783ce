"""The audit canaries of a run: their coins, and the noisy gradients released of them."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.accounting import Relation
from jaxdp.audit.canaries import Canaries, dirac_canaries, loss_value, require_auditable
from jaxdp.clipping import ClippedGrad
from jaxdp.devices import processes
from jaxdp.devices.shards import hashed
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs.directory import Row, RunDirectory
from jaxdp.runs.files import reading, save_array, writing
from jaxdp.sampling import Source, as_source
from jaxdp.training.physical_batch import default_rows
from jaxdp.training.start import inspect_loss
from jaxdp.types import LossFn, PyTree, filled

NOTE = (
    "SECRET of the auditor: which canaries took part. Whoever scores the canaries must not know it."
)

HASH = "canaries"  # of a row that is in a checkpoint: what its gradients must be


def asked(given: int | PyTree) -> bool:
    """True if canaries were asked for: a number above 0, or records.

    Raises:
        ValueError: a number that is no count.
    """
    if isinstance(given, bool | int | float | np.number):
        return bool(arguments.integer("canaries", given, least=0))
    return given is not None


def describe(candidates: Canaries) -> str:
    """A text that changes with the candidates."""
    kind = f" of records {hashed(candidates.rows)}" if candidates.leaf is None else ""
    return f"{candidates.count} canaries{kind}{' scored at the end' if candidates.last else ''}"


def found(
    given: int | PyTree,
    relation: Relation,
    algorithm: Algorithm,
    loss_fn: LossFn,
    grad_fn: Any,
    params: PyTree,
    source: Source,
    rows: int | Literal["auto"] | None,
    scores: Literal["trajectory", "last"] = "trajectory",
) -> Canaries:
    """The candidates of a run's audit.

    Args:
        given: their number, at least 1, or records.
        relation: of the run's guarantee.
        algorithm: of the run.
        loss_fn: of one example.
        grad_fn: its clipped gradient, which knows what is trained.
        params: before the first step.
        source: the records.
        rows: the physical batch size, as the run was given it.
        scores: "last" scores records by their losses before the first step and after the last.

    Raises:
        ValueError: they cannot be distinguished from the records of this run, or the loss captured
            records or a statistic of them, which canaries would change; or records of another kind.
    """
    counted = isinstance(given, int | np.integer)
    last = arguments.one_of("canary_scores", scores, ("trajectory", "last")) == "last"
    if last and counted:
        raise ValueError(
            'canary_scores must be "trajectory" for canaries that are gradients, got "last" with '
            f"canaries={given}: a loss has only a record"
        )
    shown = str(given) if counted else "records"
    if relation is not Relation.ADD_OR_REMOVE_ONE:
        raise ValueError(
            "canaries must be 0 but under add_or_remove_one, for each is a record more or not; "
            f"got {shown} under {relation.value}"
        )
    if processes.count() > 1:
        raise ValueError(f"canaries must be 0 in several processes, got {shown}")
    if not last and algorithm.is_of_own_sum and algorithm.direction is None:
        raise ValueError(
            'canaries must be records scored at the end (canaries=records, canary_scores="last") '
            "for an algorithm that reads each record itself (dp_adafest), for a gradient has none, "
            f"and not all of a noisy sum is released; got {shown}"
        )
    require_auditable(algorithm, records=not (counted or last))
    if isinstance(grad_fn, ClippedGrad):
        size = None if rows == "auto" else rows
        size = size or default_rows(algorithm.mechanism, source)
        inspect_loss(grad_fn, params, source, size, first=True)
    if not counted:
        own = as_source(given)
        if own.example != source.example:
            raise ValueError(f"canaries must be records like {source.example}, got {own.example}")
        gathered = own.gather(np.arange(len(own)), np.ones(len(own), bool))
        rows = jax.tree.map(np.asarray, gathered)
        return Canaries(rows, loss_fn=loss_fn, params=params, last=last)

    # Of a gradient that is not finite a canary would be left out, and the audit would find nothing.
    trained = grad_fn.trained(params)
    made = dirac_canaries(given, trained)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), source.example)
    value = loss_value(made.loss(loss_fn))
    slopes = jax.jit(jax.grad(lambda own, params, row: value(filled(own, params), row)))
    gradient = jax.tree.leaves(slopes(trained, params, (zeros, jnp.zeros((), jnp.int32))))
    floats = [leaf for leaf in gradient if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in floats):
        raise ValueError(
            "canaries must be 0 for a loss whose gradient at a record of zeros is not finite, got "
            f"{given}: let the loss be finite there"
        )
    return made


def tossed(count: int, secret: Secret) -> str:
    """The coins of a new run's candidates as the text of their file; the same for one secret."""
    coins = secret.philox("canary coins", 0).integers(0, 2, count)
    return json.dumps({"note": NOTE, "included": coins.tolist()})


def digest(text: str) -> str:
    """A hash of the coins' file, checked when a run is resumed."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_coins(directory: RunDirectory, text: str) -> None:
    """Writes the coins of a run that charged nothing yet, readable by their owner alone."""
    if not directory.coins.exists():  # a start before this one may have been killed
        with writing(directory.coins):
            write_atomically(directory.coins, text, mode=0o600)


def coins_of(directory: RunDirectory, count: int) -> np.ndarray:
    """bool [count], which canaries took part; the auditor's secret.

    Raises:
        ValueError: the file is missing or is not that of ``count`` canaries.
    """
    if not directory.coins.exists():
        raise ValueError(f"run must hold its canaries' coins, but {directory.coins} is missing")
    with reading(directory.coins):
        content = directory.coins.read_bytes()
    try:
        found = np.asarray(json.loads(content.decode())["included"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{directory.coins} must hold coins: {error}") from error
    if found.shape != (count,) or not np.isin(found, (0, 1)).all():
        raise ValueError(f"{directory.coins} must hold {count} coins of 0 or 1")
    return found.astype(bool)


def kept_coins(count: int, directory: RunDirectory, kept: str | None) -> np.ndarray:
    """bool [count], the coins that the run was started with.

    Raises:
        ValueError: the coins are not those that were ``kept`` when the run began.
    """
    coins = coins_of(directory, count)
    if digest(directory.coins.read_text(encoding="utf-8")) != kept:
        raise ValueError(
            f"{directory.coins} must be what the run was started with, but it was changed: the "
            "canaries of a run cannot be tossed again"
        )
    return coins


def note(count: int) -> str:
    """The note on canaries for the ledger and the report; "" without any."""
    if not count:
        return ""
    return f"{count:,} audit canaries, of which a random half took part"


def seen(opt_state: PyTree) -> jax.Array:
    """A copy of the last step's noisy gradient at the candidates' coordinates."""
    return jnp.copy(opt_state[1].seen)


def keep(directory: RunDirectory, first_step: int, rows: list[jax.Array]) -> str:
    """Appends the gradients [m] of steps from ``first_step`` on to the file in ``secret/``.

    Those of later steps, which a crash left, are replaced.

    Returns:
        A hash of all, for the row of their checkpoint.
    """
    new = np.stack(jax.device_get(rows))
    old = _loaded(_kept(directory))[:first_step] if first_step else new[:0]
    gradients = np.concatenate([old, new])
    with writing(_kept(directory)):
        save_array(_kept(directory), gradients, mode=0o600)
    return hashed(gradients)


def publish(directory: RunDirectory, row: Row) -> None:
    """Publishes the gradients up to the step of a row, whose checkpoint is durable.

    Raises:
        ValueError: they are not those that the checkpoint was made with.
    """
    step, gradients = row["step"], _loaded(_kept(directory))[: row["step"]]
    if len(gradients) != step or hashed(gradients) != row.get(HASH):
        raise ValueError(
            f"{_kept(directory)} must hold the canaries' gradients of the {step} steps that the "
            "checkpoint holds, got others: they are another release, which the ledger does not "
            "hold. Put back the file that the run left, or start a new run in another folder"
        )
    with writing(directory.canary_gradients):
        save_array(directory.canary_gradients, gradients)


def released(directory: RunDirectory) -> np.ndarray:
    """float32 [steps, m], the noisy gradients at the canaries' coordinates, a release.

    Of canaries that are records [steps, 3 m]: ``jaxdp.audit.canaries.split_parts``.

    Raises:
        ValueError: the file is missing or damaged.
    """
    return _loaded(directory.canary_gradients)


def _kept(directory: RunDirectory) -> Path:
    return directory.secret / directory.canary_gradients.name


def _loaded(path: Path) -> np.ndarray:
    try:
        found: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"run must hold {path}, which cannot be read: {error}") from error
    if found.ndim != 2:
        raise ValueError(f"{path} must hold an array [steps, canaries], got shape {found.shape}")
    return found
