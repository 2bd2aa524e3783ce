"""The tries of a tuning, in a folder that tells nobody how many there are.

Outside ``secret/`` nothing is written between the charge and the release, and what is written then
bears the time of the charge. Inside, everything lies one folder deeper, so that the times and the
number of links of ``secret/`` itself stand still while a search runs.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp.accounting.tuned import Tries
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import StorageError, open_locked, sync_directory, write_atomically
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import space as spaces
from jaxdp.runs.export import in_msgpack, load
from jaxdp.runs.files import make_private, rewrite, write_bytes_atomically, writing
from jaxdp.types import PyTree

NOTE = """This folder is SECRET.

While a search runs it holds the number of tries, and all of them. Whoever reads it knows more than
the charge allows for. Publish only what lies outside it.
"""
PARAMS = "params.msgpack"
_AGAIN = "call it again: it goes on where it was"
_NEVER = 1e9  # seconds that a compilation would have to take to be kept
UNSEEN = (
    "the number of tries stays secret: that nobody saw how long the search took, that no "
    "interruption of it depended on what a try drew, and that no copy of its folder was continued "
    "was not verified"
)
# A try that fails is an answer too: that there was none, or which one was best of the others.
FAILURES = (
    "a try that fails counts as the worst: that none fails by what a record holds (one that cannot "
    "be read, a loss that raises) was not verified"
)
SCORED = "the score that chooses reads public data only: this was not verified"
CHARGED_SCORE = "the noisy score that chooses releases what its event says: this was not verified"


@dataclasses.dataclass(frozen=True)
class SearchState:
    """The search's state. **Secret**.

    Attributes:
        entropy: of the secret that keys the ledger and the hash of the data, hexadecimal.
        search: ``Search.text``.
        data: keyed hash of the records.
        left: K, the tries that are run; None once the result is released.
        done: tries that ended.
        candidate: of the try under way.
        best: number of the best try so far.
        best_candidate: its candidate.
        best_score: its score.
        best_trusted: what its own ledger says is not verified.
        charged_at: time of the charge, in nanoseconds.
    """

    entropy: str
    search: str
    data: str
    left: int | None
    done: int = 0
    candidate: spaces.Candidate | None = None
    best: int | None = None
    best_candidate: spaces.Candidate | None = None
    best_score: float | None = None
    best_trusted: tuple[str, ...] = ()
    charged_at: int | None = None

    @property
    def secret(self) -> Secret:
        """That of the search."""
        return Secret(int(self.entropy, 16), reproducible=False)


class TuneDirectory:
    """The folder of a tuning.

    Args:
        path: the folder; made by ``searched``.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError("folder must name a folder, got ''")
        self.path = Path(path)
        self.ledger, self.result = self.path / "ledger.jsonl", self.path / "tuned.json"
        self.params = self.path / PARAMS
        self.secret = self.path / "secret"
        self.work = self.secret / "tuning"
        self._state = self.work / "state.json"

    def exists(self) -> bool:
        """True if a tuning was begun here."""
        return self._state.exists()

    def load(self) -> SearchState:
        """The secret state."""
        try:
            return SearchState(**json.loads(self._state.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError):
            # Without the reason, which may hold a secret.
            raise ValueError(
                f"{self._state} must hold the state of a tuning, but it is damaged: put back a "
                "copy, or count what ledger.jsonl holds as spent and begin anew elsewhere"
            ) from None

    def save(self, state: SearchState) -> None:
        """Writes the secret state, durably and all at once."""
        with writing(self.secret, _AGAIN):
            write_atomically(self._state, json.dumps(dataclasses.asdict(state)), mode=0o600)

    def stream(self, state: SearchState) -> str:
        """The name of the search in the ledger."""
        return state.secret.stream("tuning").hex()

    def opened(self, state: SearchState) -> Ledger:
        """The ledger, every line of which was checked with the search's secret."""
        return Ledger(self.ledger, key=state.secret.stream("ledger"))

    def was_shown(self, state: SearchState) -> bool:
        """True if the ledger says that a result was released."""
        return self.opened(state).shown(self.stream(state)) is not None

    def take(self) -> TextIO:
        """Makes what is missing of the folder and takes it for this process."""
        if self.path.exists() and not self.exists() and any(self._public()):
            raise ValueError(
                f"folder must be new or hold a tuning, got {self.path}, which holds something else"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.secret.mkdir(mode=0o700, exist_ok=True)
            self.work.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one to write to, got {error}") from error
        busy = f"folder is in use by another process: {self.path}"
        with writing(self.secret, _AGAIN):
            if not (self.secret / "README.txt").exists():
                (self.secret / "README.txt").write_text(NOTE, encoding="utf-8")
            taken = open_locked(self.work / "lock", "w", busy)
            make_private(self.secret)
        return taken

    def _public(self) -> Iterator[Path]:
        return (path for path in self.path.iterdir() if path.name != "secret")

    def reserve(self) -> None:
        """Makes the files of the release, empty and in ``secret/``.

        File systems number files as they are made: of files made at the end, the number would tell
        how many were made meanwhile.
        """
        with writing(self.secret, _AGAIN):
            for path in (self.params, self.result):
                (self.work / path.name).touch(mode=0o644)

    def release(self, path: Path, content: bytes) -> None:
        """Fills a file of the release and moves it out of ``secret/``, unless that was done."""
        reserved = self.work / path.name
        if not reserved.exists():
            return
        with writing(path, _AGAIN):
            rewrite(reserved, content)
            os.replace(reserved, path)
            sync_directory(path.parent)

    def hide_times(self, at: int | None) -> None:
        """Gives all that lies outside ``secret/`` the time of the charge, in nanoseconds."""
        assert at is not None
        for path in (*self._public(), self.secret, self.path):
            os.utime(path, ns=(at, at))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Shows and keeps nothing of what runs inside, in this process.

    Prints, warnings and log records go nowhere, whatever file a handler writes to; neither does
    what libraries in other languages write to the descriptors of stdout and stderr. Nothing is
    added to JAX's cache of compiled programs on disk, which else grows by one file or more for
    every program with other constants. All of it belongs to the whole process: other threads are
    silent too.
    """
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(_descriptors(nowhere.fileno()))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(sys.maxsize)
        name = "jax_persistent_cache_min_compile_time_secs"
        stack.callback(jax.config.update, name, getattr(jax.config, name))
        jax.config.update(name, _NEVER)
        yield


@contextlib.contextmanager
def _descriptors(nowhere: int) -> Iterator[None]:
    """Points the descriptors of stdout and stderr elsewhere; one that is closed stays so."""
    kept: list[tuple[int, int]] = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    try:
        for number in (1, 2):
            with contextlib.suppress(OSError):
                kept.append((number, os.dup(number)))
                os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


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
        if not directory.was_shown(state):
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
    """The state with the time of the charge, which is made before the first try, or looked up.

    All lines are written at once: one that came later would tell of an interruption, and the more
    tries, the likelier is one.
    """
    with contextlib.closing(directory.opened(state)) as ledger:
        if state.left is not None and state.charged_at is None:
            # A line of this call's own: one that was read may never have reached the disk.
            for said in (UNSEEN, FAILURES, *search.trusted):
                ledger.trust(said)
            name = directory.stream(state)
            ledger.charge(search.tuned, stream=name, source="mechanism", again=True)
            directory.reserve()
            state = dataclasses.replace(state, charged_at=directory.ledger.stat().st_mtime_ns)
            directory.save(state)
        elif not any(entry.event == search.tuned for entry in ledger.entries):
            raise ValueError(
                f"{directory.ledger} must hold the charge of the tuning, but it is missing: what "
                "was released can no longer be accounted for"
            )
    return state


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
        write_bytes_atomically(folder / PARAMS, in_msgpack(params), mode=0o600)
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


def _show(directory: TuneDirectory, state: SearchState, content: bytes) -> None:
    """Writes down what is released, by its hash, and what the guarantee of it rests on.

    Args:
        directory: of the search.
        state: after the last try.
        content: the parameters.

    Raises:
        ValueError: something else was released before.
    """
    named = json.dumps([state.best_candidate, state.best_score]).encode()
    digest = hashlib.blake2b(named + content, digest_size=16).digest()
    with contextlib.closing(directory.opened(state)) as ledger:
        shown = ledger.shown(directory.stream(state))
        if shown is not None and shown.past != digest:
            raise ValueError(
                f"{directory.secret} must be what the tuning left, got an older copy: what it "
                "leads to is another release than that of the ledger, and was not charged. The "
                f"result is {directory.result} and {directory.params}"
            )
        for said in state.best_trusted:
            ledger.trust(said)
        ledger.show(directory.stream(state), 1, digest)


def _released(
    directory: TuneDirectory, search: Search, state: SearchState, bound: acc.Bound
) -> Chosen:
    """Writes the best try outside ``secret/``, forgets K and all tries, and returns it."""
    if state.left is not None:
        content = b""
        if state.best is not None:
            content = (directory.work / f"try-{state.best}" / PARAMS).read_bytes()
        _show(directory, state, content)
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
        directory.hide_times(state.charged_at)
        directory.save(dataclasses.replace(state, left=None, done=0, best=None, charged_at=None))
    _remove_all_but(directory.work, None)  # also what a crash after the release left
    (directory.work / "failed.txt").unlink(missing_ok=True)
    row = json.loads(directory.result.read_text(encoding="utf-8"))
    found = directory.params.stat().st_size > 0
    params = load(directory.params, search.like) if found else None
    return Chosen(row["candidate"], params, row["score"], bound)
