"""Writes the report of a run; the packages that draw and render it are imported only then."""

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.ledger.durable import write_atomically
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.files import reading, writing
from jaxdp.types import PyTree

if TYPE_CHECKING:
    from jaxdp.runs.report.schema import Metric, Report

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
    """
    from jaxdp.runs.report import build
    from jaxdp.runs.report.schema import load
    from jaxdp.runs.report.subject import Subject, own_training

    steps = int(history[-1]["step"])
    training = own_training(algorithm, steps, {k: v for k, v in about.items() if k != "Title"})
    if frozen:
        training.append(("Not trained", frozen))
    last = [
        f"{name} {value:.4g}" for name, value in history[-1].items() if name not in OF_EVERY_ROW
    ]
    if last:
        training.append(("Evaluated last", ", ".join(last)))
    if anew and (directory.path / "report.json").exists():
        training.append(("Rendered anew", f"{date}, by run.report(), from the same releases"))
        date = load(directory.path / "report.json").date or date
    program = os.path.basename((sys.argv or [""])[0])  # no folder of this machine
    subject = Subject(
        about.get("Title", f"Run {directory.path.name}"),
        algorithm,
        steps,
        delta,
        relation,
        training,
        f"python {program}" if program.endswith(".py") else _NO_SCRIPT,
        _measured(history),
    )
    reproducible = directory.load_state().secret.reproducible
    report = build(
        subject,
        history=history,
        params=trained,
        ledger=directory.checked_ledger(),
        reproducible=reproducible,
        ledger_file=directory.ledger,
        date=date,
    )
    return write(report, directory)


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
