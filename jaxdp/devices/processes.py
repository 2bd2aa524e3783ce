"""Messages and agreement between the processes of ``jax.distributed``; process 0 decides.

Texts travel through the key-value store of JAX's own coordination service, which is not encrypted
(docs/threat_model.md). Every process runs the same program, so that the n-th call of a function
here means the same in all of them.
"""

import functools
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from jaxdp._version import __version__

# How long a process waits for another one, in seconds; whatever it waits for, it ends in words.
PATIENCE = 3600.0
_SILENT = 60.0  # after how many it says that it waits
_asked = itertools.count()


def _state() -> Any:
    """The state of ``jax.distributed``."""
    return sys.modules["jax._src.distributed"].global_state


def count() -> int:
    """The number of processes that ``jax.distributed.initialize`` has joined; 1 without it."""
    # JAX need not be imported. Its public face does not tell without starting a backend.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return 1 if state is None or state.client is None else int(state.num_processes)


def index() -> int:
    """This process's number, from 0."""
    return 0 if count() == 1 else int(_state().process_id)


def require_single_process(name: str) -> None:
    """Raises ValueError if more than one process runs: the computation is not distributed."""
    if count() > 1:
        raise ValueError(
            f"{name} must be computed in one process, got {count()}: each would release its own "
            "numbers with the noise of all, which would subtract away. Compute it in a program of "
            "its own, or before jax.distributed.initialize()"
        )


class LostError(ValueError):
    """Another process said nothing for too long, or has ended."""


def send(key: str, text: str) -> None:
    """Sends a text to all processes under a name; sending it again after an interrupt is fine."""
    _state().client.key_value_set(f"jaxdp/{key}", text, True)


def receive(key: str, patience: float | None = None) -> str:
    """Returns the text that was sent under this name; waits for it.

    Args:
        key: the name.
        patience: in seconds; None is ``PATIENCE``.

    Raises:
        LostError: nothing was sent by then; the sending process has ended.
    """
    began, said = time.monotonic(), False
    patience = PATIENCE if patience is None else patience
    wait = max(1, int(1_000 * min(patience, 5.0)))
    while True:
        try:
            found: str = _state().client.blocking_key_value_get(f"jaxdp/{key}", wait)
            return found
        except Exception as error:  # of XLA, whose types are not public
            waited = time.monotonic() - began
            if "DEADLINE_EXCEEDED" not in str(error) or waited >= patience:
                why = str(error).splitlines()[0]
                raise LostError(_LOST.format(index(), waited, key, why)) from error
        if waited > _SILENT and not said:
            said = True
            print(f"jaxdp: process {index()} waits for another one ({key})", file=sys.stderr)


_LOST = (
    "every process must run the same program with the same trainers, samplers and ledgers in the "
    "same order, but process {} waited {:.0f} s for another one in vain ({}: {}). Nothing was "
    "released that is not charged: see what the others said, and start all of them again"
)


def from_process_0(make: Callable[[], str]) -> str:
    """Runs ``make`` in process 0 and returns its text in every process; an error is raised in all.

    Args:
        make: called in process 0 alone; the others wait at most ``PATIENCE`` seconds for it.

    Raises:
        ValueError: ``make`` raised, or took longer.
    """
    if count() == 1:
        return make()
    key = f"from process 0/{next(_asked)}"
    if index() == 0:
        try:
            found = make()
        except BaseException as error:  # an interrupt too: the others would wait for nothing
            send(key, json.dumps({"failed": str(error) or type(error).__name__}))
            raise
        send(key, json.dumps({"said": found}))
        return found
    heard = json.loads(receive(key))
    if "failed" in heard:
        raise ValueError(f"process 0 cannot go on: {heard['failed']}")
    return str(heard["said"])


def first_said(ask: Callable[[], str]) -> str:
    """Asks every process for a text, and returns the first one that is not empty, in all of them.

    Args:
        ask: called in each; what it raises is raised there, and ends the others in words.

    Raises:
        ValueError: another process raised.
    """
    if count() == 1:
        return ask()
    key, mine = f"first said/{next(_asked)}", {"said": "", "failed": ""}
    try:
        mine["said"] = ask()
    except BaseException as error:
        mine["failed"] = f"process {index()} cannot go on: {type(error).__name__}"  # no more of it
        raise
    finally:  # an interrupt too: the others would wait for nothing
        send(f"{key}/{index()}", json.dumps(mine))
    heard = [json.loads(receive(f"{key}/{other}")) for other in range(count())]
    if failed := next(filter(None, (each["failed"] for each in heard)), ""):
        raise ValueError(failed)
    return next(filter(None, (str(each["said"]) for each in heard)), "")


def agree(**facts: Any) -> None:
    """Raises ValueError in every process if a fact is not the same in all of them.

    Args:
        facts: by the name that the message gives them, or functions that make them; compared as
            text, and sent as hashes alone.

    Raises:
        ValueError: a fact is not the same in all processes.
    """
    if count() == 1:
        return
    # Hashes alone are sent: the service is not encrypted, and a secret is among the facts.
    facts = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
    key = f"agree/{next(_asked)}"
    mine = {name: hashed(str(value)) for name, value in facts.items()}
    if index():
        send(f"{key}/{index()}", json.dumps(mine))
    else:
        send(f"{key}/verdict", _verdict(key, mine))
    if verdict := receive(f"{key}/verdict"):
        raise ValueError(f"{verdict}; here it is {_in_words(facts)}")


@functools.cache
def versions() -> dict[str, str]:
    """The versions that draws and noise depend on, by name."""
    return {"jaxdp": __version__, **{name: metadata.version(name) for name in ("jax", "numpy")}}


def _verdict(key: str, mine: dict[str, str]) -> str:
    """The error message of a disagreement with process 0; "" without one."""
    for other in range(1, count()):
        found = json.loads(receive(f"{key}/{other}"))
        wrong = [name for name in {**mine, **found} if mine.get(name) != found.get(name)]
        if wrong:
            return (
                f"{', '.join(wrong)} must be the same in every process, got another in process "
                f"{other} than in process 0: nothing was charged"
            )
    return ""


def _in_words(facts: dict[str, Any]) -> str:
    """The facts for an error message, without those that are secret or long."""
    texts = {name: str(value) for name, value in facts.items() if name not in _HIDDEN}
    return ", ".join(f"{name} = {text[:200]}" for name, text in texts.items()) or "not told"


_HIDDEN = ("secret", "source", "params", "probabilities")


def hashed(text: str) -> str:
    """A hash of a text, by which processes compare it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
