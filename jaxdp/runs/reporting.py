"""Writes the report of a run; the packages that draw and render it are imported only then."""

import dataclasses
import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.entries import Entry, event_counts
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs.directory import RunDirectory, name_of
from jaxdp.runs.files import reading, writing
from jaxdp.runs.starts import AFTER, EXTENDED
from jaxdp.types import PyTree

if TYPE_CHECKING:
    from jaxdp.runs.report.schema import ChargedPart, Metric, Report

AS_IF = "as if the number of steps and the noise had been fixed before the first release"
_NO_SCRIPT = "a program or notebook with jaxdp.Run"
_REAL = (np.bool_, np.integer, np.floating)
# The keys of a history row that are no evaluated number.
OF_EVERY_ROW = (
    "step",
    "update_norm",
    "epsilon",
    "proposals",
    "accepted",
    "forced",
    "sensitive",
    "canaries",
)


def today() -> str:
    """Today's date in UTC; ask before the first step, for how long steps take is private."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write(report: "Report", directory: RunDirectory) -> Path:
    """Writes report.json, .md, .html and the plots; returns the path of the page.

    The audit in a report that is there already stays in it.
    """
    from jaxdp.runs.report import save_plots, to_html, to_markdown
    from jaxdp.runs.report.schema import load

    path, page = directory.path / "report.json", directory.path / "report.html"
    if report.audited is None and path.exists():
        with reading(path):
            report = dataclasses.replace(report, audited=load(path).audited)
    with writing(directory.path / "report.*"):
        write_atomically(directory.path / "report.md", to_markdown(report))
        save_plots(report, directory.path)
        write_atomically(page, to_html(report, directory.path))
        # Last: by its rows ``is_written`` knows that the others are of the same steps.
        write_atomically(path, json.dumps(report.to_dict(), indent=1))
    return page


def is_written(directory: RunDirectory, step: int) -> bool:
    """True if the folder has a page of exactly this many steps."""
    path = directory.path / "report.json"
    with reading(path):
        try:
            rows = json.loads(path.read_bytes().decode())["history"]
            return bool(rows[-1]["step"] == step)
        except (FileNotFoundError, ValueError, KeyError, IndexError, TypeError, RecursionError):
            return False


def write_own(
    directory: RunDirectory,
    algorithm: Algorithm,
    history: Sequence[Mapping[str, float]],
    delta: float,
    relation: acc.Relation,
    *,
    trained: PyTree,
    frozen: str,
    date: str,
    about: dict[str, str],
    anew: bool = False,
    said: Sequence[str] = (),
) -> Path:
    """Writes the report of a ``jaxdp.Run``; returns the path of the page.

    Args:
        directory: of the run.
        algorithm: mechanism and optimizer.
        history: the rows that were shown.
        delta: of the guarantee.
        relation: of the guarantee.
        trained: pytree like the trained parameters, for their number.
        frozen: what is not trained, in words; "" for nothing.
        date: on which training began or was resumed.
        about: further facts by name, in the caller's words.
        anew: the owner asked for another page in the place of one that is there; it keeps the date
            of that one, and says so.
        said: what was not verified of the program that asks for it.
    """
    from jaxdp.runs.report import build
    from jaxdp.runs.report.schema import load
    from jaxdp.runs.report.subject import Subject, own_training

    steps, kept, ledger = (
        int(history[-1]["step"]),
        directory.load_state(),
        directory.checked_ledger(),
    )
    more = {k: v for k, v in about.items() if k != "Title"}
    training = own_training(algorithm, steps, more, kept.before or 0)
    if frozen:
        training.append(("Not trained", frozen))
    last = [
        f"{name} {value:.4g}" for name, value in history[-1].items() if name not in OF_EVERY_ROW
    ]
    if last:
        training.append(("Evaluated last", ", ".join(last)))
    if anew and (directory.path / "report.json").exists():
        words = "; ".join([f"{date}, by run.report(), from the same releases", *said])
        training.append(("Rendered anew", words))
        date = load(directory.path / "report.json").date or date
    program = os.path.basename((sys.argv or [""])[0])  # no folder of this machine
    # More steps were asked for once, and nothing says that they were not left out after a look.
    most = kept.planned if algorithm.mechanism.steps is None else None
    ended = most is not None and steps - (kept.before or 0) < most
    subject = Subject(
        about.get("Title", f"Run {directory.path.name}"),
        algorithm,
        steps,
        delta,
        relation,
        training,
        f"python {program}" if program.endswith(".py") else _NO_SCRIPT,
        _measured(history),
        parts=charged_parts(directory, ledger, history, delta, relation),
        provided=AS_IF if EXTENDED in ledger.unverified() or ended else None,
        ledger=_ledger_in_words(directory),
    )
    report = build(
        subject,
        history=history,
        params=trained,
        ledger=ledger,
        reproducible=kept.secret.reproducible,
        ledger_file=directory.ledger,
        date=date,
    )
    return write(report, directory)


def charged_parts(
    directory: RunDirectory,
    ledger: Ledger,
    history: Sequence[Mapping[str, float]],
    delta: float,
    relation: acc.Relation,
) -> "tuple[ChargedPart, ...] | None":
    """The parts of what was charged: stages, runs before, others; None for one stage alone.

    Args:
        directory: of the last stage.
        ledger: of the run.
        history: the rows that were shown.
        delta: of the guarantee.
        relation: of the guarantee.
    """
    from jaxdp.runs.report.schema import ChargedPart

    # Whose a stream is, its name tells: a run's begin with its name, and what it took over with it.
    states = [(each.stage, each.load_state()) for each in directory.stages()]
    owners = {
        name_of(state): f"stage {stage!r}" if stage else "the first stage"
        for stage, state in states
    }
    if len(states) == 1:
        owners = dict.fromkeys(owners, "this run")
    taken = f"{AFTER}{name_of(states[0][1])} "
    found: dict[str, list[Entry]] = {name: [] for name in owners.values()}
    for entry in ledger.entries:
        stream = str(entry.stream)
        name = owners.get(stream.partition("/")[0], "others on this ledger")
        if stream.startswith(taken):
            number = int(stream.removeprefix(taken).partition("/")[0])
            name = f"run {number + 1} before this one, as it was when this one began"
        found.setdefault(name, []).append(entry)
    if len(found) == 1:
        return None

    ends = [state.before for _, state in states[1:]] + [int(history[-1]["step"])]
    after = dict(zip(owners.values(), ends, strict=True))
    parts = []
    for name, entries in found.items():
        if not entries:
            continue
        counts = event_counts(entries)
        event = acc.Composed(tuple(acc.Repeated(each, n) for each, n in counts.items()))
        proven = acc.supports(event, relation)
        epsilon = acc.epsilon(event, delta, relation).upper if proven else math.inf
        end = after.get(name)
        row = next((row for row in history if row["step"] == end), {})
        told, releases = row.get("epsilon"), sum(entry.steps for entry in entries)
        parts.append(ChargedPart(name, releases, event.describe(), epsilon, told, end))
    return tuple(parts)


def _ledger_in_words(directory: RunDirectory) -> str:
    """Whose the ledger is, where others charge it too; "" for the folder's own."""
    first = directory.first.load_state()
    if first.ledger is None:
        return ""
    key = (
        "a key of its own: whoever has it can make lines that fit"
        if first.ledger_key
        else "no key: whoever may write to it can make lines that fit"
    )
    return (
        f"{Path(first.ledger).name}, which other runs and trainers may charge: epsilon is of all "
        f"that it holds. Its lines are chained with {key}"
    )


def numbers(found: Mapping[str, float]) -> dict[str, float]:
    """The evaluated numbers by name.

    Raises:
        ValueError: anything else, named with its type and shape, or a row's own names.
    """
    wanted = "evaluate must return numbers by name, such as {'accuracy': 0.9}, got "
    if not isinstance(found, Mapping):
        raise ValueError(f"{wanted}{_kind(found)}")
    arrays = {name: np.asarray(value) for name, value in found.items()}
    for name, array in arrays.items():
        if array.size != 1 or not any(jnp.issubdtype(array.dtype, kind) for kind in _REAL):
            raise ValueError(
                f"{wanted}{_kind(found[name])} as {str(name)!r}: return one number of it, such "
                "as its mean, or each under its own name. No step is lost: the same program goes on"
            )
    if taken := sorted(set(found) & set(OF_EVERY_ROW)):
        raise ValueError(f"evaluate must name no number {taken[0]!r}: a row has its own")
    return {str(name): float(array.item()) for name, array in arrays.items()}


def _kind(value: object) -> str:
    """Words for a returned value: of an array its type and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype} {list(value.shape)}"
    return arguments.described(value)


def _measured(history: Sequence[Mapping[str, float]]) -> "Metric | None":
    """The first number that was evaluated, if every row has it."""
    from jaxdp.runs.report.schema import Metric

    for column in history[-1]:
        if column not in OF_EVERY_ROW and all(column in row for row in history):
            share = "accuracy" in column.lower() and all(0 <= row[column] <= 1 for row in history)
            name = column.replace("_", " ")
            return Metric(column, name[:1].upper() + name[1:], share)
    return None
