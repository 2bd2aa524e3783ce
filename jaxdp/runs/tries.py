"""The tries of a tuning, in a folder that tells nobody how many there are.

Outside ``secret/`` nothing is written between the charge and the release, and what is written then
bears the time of the charge.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import numpy as np

from jaxdp import accounting as acc
from jaxdp._durable import StorageError, write_atomically, write_bytes_atomically
from jaxdp.accounting.tuned import Tries
from jaxdp.ledger import Ledger
from jaxdp.runs import space as spaces
from jaxdp.runs.silence import silent
from jaxdp.runs.tune_directory import PARAMS, SearchState, TuneDirectory
from jaxdp.seeds import Secret
from jaxdp.types import PyTree

UNSEEN = (
    "the number of tries stays secret: that nobody saw how long the search took, and that no "
    "interruption of it depended on what a try drew, was not verified"
)
# A try that fails is an answer too: that there was none, or which one was best of the others.
FAILURES = (
    "a try that fails counts as the worst: that none fails by what a record holds (one that cannot "
    "be read, a loss that raises) was not verified"
)
SCORED = "the score that chooses reads public data only: this was not verified"
CHARGED_SCORE = "the noisy score that chooses releases what its event says: this was not verified"


class Chosen(NamedTuple):
    """The best try of a tuning: all that may be released.

    Attributes:
        candidate: its hyper-parameters; None if no try gave a score.
        params: its parameters; None likewise.
        score: its score; None likewise.
        bound: epsilon of the whole tuning, at its delta.
    """

    candidate: spaces.Candidate | None
    params: PyTree
    score: float | None
    bound: acc.Bound


@dataclasses.dataclass(frozen=True)
class Search:
    """A description of a tuning, public but for the function.

    Attributes:
        event: what one try releases, whatever its candidate.
        tries: law of the number of tries.
        space: law of the candidates.
        delta: of the guarantee.
        relation: of the guarantee.
        trial: from a private folder and a candidate to (parameters, score, assumptions of the
            guarantee in words); it continues what the folder holds.
        fingerprint: keyed hash of the records.
        like: parameters of the structure that a try returns.
        about: further public words, kept with the result.
        trusted: sentences on what the guarantee takes on trust, for the ledger.
    """

    event: acc.Event
    tries: Tries
    space: Mapping[str, spaces.Law]
    delta: float
    relation: acc.Relation
    trial: Callable[[Path, spaces.Candidate], tuple[PyTree, float, list[str]]]
    fingerprint: Callable[[Secret], str]
    like: PyTree
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trusted: tuple[str, ...] = ()

    @property
    def tuned(self) -> acc.Tuned:
        """The event that is charged."""
        return acc.Tuned(self.event, self.tries)

    def text(self) -> str:
        """All public numbers and names: what a search that goes on must keep."""
        laws = {name: repr(law) for name, law in sorted(self.space.items())}
        return f"{self.tuned!r} {laws} {self.delta!r} {self.relation.value}"


def searched(directory: TuneDirectory, search: Search) -> Chosen:
    """Charges, runs the tries that are left and releases the best one.

    Raises:
        ValueError: no bound is proven for the event; the folder holds another tuning or one on
            other data, or is in use.
    """
    bound = acc.epsilon(search.tuned, search.delta, search.relation)
    if not math.isfinite(bound.upper):
        raise ValueError(
            "event must have a finite epsilon to be tuned, got one without: "
            f"{type(search.event).__name__}"
        )
    with contextlib.closing(directory.take()):
        state = _kept(directory, search)
        state = _charged(directory, search, state)
        state = _all_tried(directory, search, state)
        return _released(directory, search, state, bound)


def _all_tried(directory: TuneDirectory, search: Search, state: SearchState) -> SearchState:
    """The state after the tries that are left.

    Failures of the machine are raised anew, without the try they came from: its number is in the
    names of files, and what it was doing in the traceback.
    """
    try:
        while state.left is not None and state.done < state.left:
            state = _one_more(directory, search, state)
        return state
    except (StorageError, OSError, MemoryError) as error:
        failed = _anonymous(directory, error)
    raise failed  # here: within ``except`` the first one would come along


def _anonymous(directory: TuneDirectory, error: Exception) -> Exception:
    """An error of the same kind that says nothing of what was done."""
    goes_on = "the same call continues the tuning"
    if isinstance(error, MemoryError):
        return MemoryError(f"out of memory; {goes_on}")
    if not isinstance(error, OSError):
        return StorageError(f"{directory.secret} cannot be written or read; {goes_on}")
    why = os.strerror(error.errno) if error.errno else "it cannot be written or read"
    return OSError(error.errno or errno.EIO, why, str(directory.secret))


def _kept(directory: TuneDirectory, search: Search) -> SearchState:
    """The state of the search; a new one, with K drawn, where there is none."""
    if not directory.exists():
        secret = Secret.new()
        # The one draw of K, from the operating system; it is written down before the charge.
        state = SearchState(
            f"{secret.entropy:032x}",
            search.text(),
            search.fingerprint(secret),
            search.tries.sample(np.random.default_rng()),
        )
        directory.save(state)
        return state
    state = directory.load()
    if state.search != search.text():
        raise ValueError(
            f"a tuning that goes on must keep its laws, event and delta, those of {directory.path} "
            f"are {state.search}, got {search.text()}"
        )
    if state.data != search.fingerprint(state.secret):
        raise ValueError(
            f"source must hold the records that the tuning in {directory.path} was begun with, got "
            "others"
        )
    return state


def _charged(directory: TuneDirectory, search: Search, state: SearchState) -> SearchState:
    """The state with the time of the charge, which is made before the first try, or looked up."""
    _charge(directory, search, state)
    if state.left is not None and state.charged_at is None:
        directory.reserve()
        state = dataclasses.replace(state, charged_at=directory.ledger.stat().st_mtime_ns)
        directory.save(state)
    return state


def _charge(directory: TuneDirectory, search: Search, state: SearchState) -> None:
    """Charges the whole tuning, once, before its first try; a later call checks that it is there.

    All lines are written at once: one that came later would tell of an interruption, and the more
    tries, the likelier is one.
    """
    began = state.left is None or state.done > 0 or state.candidate is not None
    name, key = state.secret.stream("tuning").hex(), state.secret.stream("ledger")
    ledger = Ledger(directory.ledger, key=key)
    try:
        if any(e.stream == name and e.event == search.tuned for e in ledger.entries):
            return
        if began:
            raise ValueError(
                f"{directory.ledger} must hold the charge of the tuning, but it is missing: what "
                "was released can no longer be accounted for"
            )
        for said in (UNSEEN, FAILURES, *search.trusted):
            ledger.trust(said)
        ledger.charge(search.tuned, stream=name, source="mechanism", replay=True)
    finally:
        ledger.close()


def _one_more(directory: TuneDirectory, search: Search, state: SearchState) -> SearchState:
    """The state after the next try, which begins, or goes on where a crash left it."""
    if state.candidate is None:
        fresh = spaces.drawn(search.space, np.random.default_rng())
        state = dataclasses.replace(state, candidate=fresh)
        directory.save(state)
    assert state.candidate is not None
    folder = directory.work / f"try-{state.done}"
    params, score, trusted = _tried(search, folder, state.candidate)
    won = score > (-math.inf if state.best_score is None else state.best_score)
    if won:
        write_bytes_atomically(folder / PARAMS, flax.serialization.to_bytes(params), mode=0o600)
        state = dataclasses.replace(
            state,
            best=state.done,
            best_candidate=state.candidate,
            best_score=score,
            best_trusted=tuple(trusted),
        )
    state = dataclasses.replace(state, done=state.done + 1, candidate=None)
    directory.save(state)
    # Two at most stay: the disk that is used must not grow with K either.
    _remove_all_but(directory.work, state.best)
    return state


def _tried(
    search: Search, folder: Path, candidate: spaces.Candidate
) -> tuple[PyTree, float, list[str]]:
    """Parameters, score and assumptions of one try; -inf for one that fails, which is the worst.

    What it says would tell how many there are: it goes nowhere.
    """
    with silent():
        try:
            params, score, trusted = search.trial(folder, candidate)
            score = float(score)
        except (StorageError, OSError, MemoryError):
            raise  # of the machine: the try goes on with the search
        except Exception:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder.parent / "failed.txt", traceback.format_exc(), mode=0o600)
            return None, -math.inf, []
    return params, score if math.isfinite(score) else -math.inf, trusted


def _remove_all_but(work: Path, best: int | None) -> None:
    for folder in work.glob("try-*"):
        if folder.name != f"try-{best}":
            shutil.rmtree(folder)


def _say_what_is_trusted(directory: TuneDirectory, state: SearchState) -> None:
    """Adds to the ledger what the guarantee of the chosen try rests on, which is part of it."""
    ledger = Ledger(directory.ledger, key=state.secret.stream("ledger"))
    try:
        for said in state.best_trusted:
            ledger.trust(said)
    finally:
        ledger.close()


def _released(
    directory: TuneDirectory, search: Search, state: SearchState, bound: acc.Bound
) -> Chosen:
    """Writes the best try outside ``secret/``, forgets K and all tries, and returns it."""
    if state.left is not None:
        content = b""
        if state.best is not None:
            content = (directory.work / f"try-{state.best}" / PARAMS).read_bytes()
        directory.release(directory.params, content)
        row = {
            "candidate": state.best_candidate,
            "score": state.best_score,
            "epsilon": bound.upper,
            "delta": search.delta,
            "relation": search.relation.value,
            "event": repr(search.tuned),
            "space": {name: repr(law) for name, law in search.space.items()},
            "about": dict(search.about),
        }
        directory.release(directory.result, json.dumps(row, indent=1).encode())
        _say_what_is_trusted(directory, state)
        directory.hide_times(state.charged_at)
        directory.save(dataclasses.replace(state, left=None, done=0, best=None, charged_at=None))
    _remove_all_but(directory.work, None)  # also what a crash after the release left
    (directory.work / "failed.txt").unlink(missing_ok=True)
    row = json.loads(directory.result.read_text(encoding="utf-8"))
    content = directory.params.read_bytes()
    params = flax.serialization.from_bytes(search.like, content) if content else None
    return Chosen(row["candidate"], params, row["score"], bound)
