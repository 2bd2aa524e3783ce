"""Ctrl-C, SIGTERM and a full disk in a program: one line, a short traceback, and nothing lost."""

import errno
import signal
import traceback

import pytest

from jaxdp.ledger import interrupts
from jaxdp.ledger.durable import StorageError
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.failures import in_words
from tests.runs.own import run


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C interrupts also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def struck(number):
    return lambda: signal.raise_signal(number)


def at(step, call):
    """A progress function, or one that evaluates at the step before."""
    return lambda now, row: call() if (now, row) == (step, None) else None


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


INTERRUPTED = (
    "interrupted: the ledger and the checkpoint of step {} in {} are safe; the same program"
)
ROWS = {
    "ctrl-c-in-progress": (at(8, struck(signal.SIGINT)), None, 6, KeyboardInterrupt),
    "ctrl-c-in-evaluate": (None, (3, struck(signal.SIGINT)), 9, KeyboardInterrupt),
    "sigterm": (at(8, struck(signal.SIGTERM)), None, 6, SystemExit),
    "ctrl-c-before-the-first-checkpoint": (
        at(2, struck(signal.SIGINT)),
        None,
        0,
        KeyboardInterrupt,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_stops_a_run_says_what_is_safe_and_how_to_go_on(tmp_path, capsys, name):
    """Before: a traceback of 30 frames; SIGTERM ended the process without a word."""
    progress, evaluation, step, kind = ROWS[name]
    calls = []

    def evaluate(params):
        calls.append(None)
        if evaluation and len(calls) == evaluation[0]:
            evaluation[1]()
        return {"numbers": 1.0}

    options = {"evaluate": evaluate, **({"progress": progress} if progress else {})}
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(kind) as caught:
        run(tmp_path / "r", **options).fit()
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    said = capsys.readouterr().err if kind is SystemExit else str(caught.value)
    words = INTERRUPTED.format(step, tmp_path / "r")
    if kind is SystemExit:
        assert caught.value.code == 143
        words = "jaxdp: " + words.replace("interrupted", "terminated")
    if not step:
        words = words.replace("the checkpoint of step 0", "its start (no checkpoint yet)")
    assert said.startswith(words)
    shown = traceback.format_exception(caught.value)
    assert len(shown) <= 6
    assert not any("During handling" in part for part in shown)
    assert run(tmp_path / "r").fit()["w"].shape == (20, 3)


def test_a_full_disk_keeps_its_kind_and_its_cause_and_has_no_frames_of_others(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_mine", lambda self, pattern: full())
        with pytest.raises(
            StorageError, match=r"a full disk .* Make room, and start the same"
        ) as error:
            run(tmp_path / "r").fit()
    assert len(traceback.format_exception(error.value)) <= 6
    assert error.value.__context__.errno == errno.ENOSPC
    assert run(tmp_path / "r").fit()["w"].shape == (20, 3)


def test_a_second_signal_is_raised_at_once_and_handlers_of_others_stay(tmp_path, capsys):
    """A notebook's process goes on; a program of the command line ends."""
    written = []

    def signalled(number, times):
        with interrupts.guarded():
            with interrupts.deferred():
                for time in range(times):
                    signal.raise_signal(number)
                    written.append((number, time))
            written.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        signalled(signal.SIGINT, 2)
    with pytest.raises(interrupts.Terminated):
        signalled(signal.SIGTERM, 1)
    assert written == [(signal.SIGINT, 0), (signal.SIGTERM, 0)]
    # Of a try nothing is told, but by the search around it.
    with pytest.raises(SystemExit):
        in_words(tmp_path / "t", lambda: in_words(tmp_path / "try-1", struck(signal.SIGTERM)))
    said = capsys.readouterr().err
    assert (
        said
        == f"jaxdp: terminated: no run had begun in {tmp_path / 't'}, and nothing was charged\n"
    )
    own, taken = (lambda number, frame: written.append(number)), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, own)
        with interrupts.guarded():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, taken)
