"""Tuning: what is charged, and that nothing outside ``secret/`` tells of K or of the other tries."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger import Ledger
from jaxdp.runs import space as spaces
from jaxdp.runs import tries as engine
from jaxdp.runs.tuning import LogUniform, Uniform, tune

LAW = acc.Geometric(0.3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)).astype(np.float32)
DATA = (X, X.sum(axis=1))


def loss_fn(w, x, y):
    return (jnp.vdot(x, w) - y) ** 2


def make(candidate, noise=2.0):
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=noise, l2_clip_norm=1.0, batch_size=20, dataset_size=60
    )
    return mechanism, optax.sgd(candidate["rate"])


def search(folder, score=lambda w: 0.5, data=DATA, **changed):
    given = {
        "params": np.zeros(2, np.float32),
        "space": {"rate": [0.1]},
        "tries": LAW,
        "delta": 1e-5,
        "steps": 2,
        **changed,
    }
    return tune(folder, loss_fn, given.pop("make", make), data, score=score, **given)


def draws(monkeypatch, count):
    monkeypatch.setattr(acc.Geometric, "sample", lambda self, rng: count)


def seen(folder):
    """All that a look at the folder from outside tells: names, sizes, times, links, contents."""
    paths = [folder, folder / "secret", *(p for p in folder.iterdir() if p.name != "secret")]
    return {
        path.name: (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            path.stat().st_nlink,
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in paths
    }


class Watching:
    """A score that looks at the folder from outside, once a try."""

    def __init__(self, folder, values=(), stop_at=None, error=KeyboardInterrupt):
        self.folder, self.values, self.calls = folder, list(values), 0
        self.seen, self.params = [], []
        self.stop_at, self.error = stop_at, error

    def __call__(self, params):
        if not np.any(params):  # the rehearsal, before the charge
            return 0.0
        self.seen.append(seen(self.folder))
        self.params.append(params)
        self.calls += 1
        print("a score was computed")
        warnings.warn("a try was scored", stacklevel=1)
        if self.calls == self.stop_at:
            raise self.error
        return self.values[self.calls - 1] if self.values else 0.5


def test_nothing_outside_the_secret_folder_moves_while_tries_run(tmp_path, monkeypatch, capsys):
    draws(monkeypatch, 3)
    score = Watching(tmp_path / "t", [0.1, 0.7, 0.3])
    chosen = search(tmp_path / "t", score)
    assert score.calls == 3
    assert score.seen[0] == score.seen[1] == score.seen[2]
    assert set(score.seen[0]) == {"t", "secret", "ledger.jsonl"}
    np.testing.assert_array_equal(chosen.params, score.params[1])
    assert chosen.score == 0.7
    said = capsys.readouterr()
    assert said.out + said.err == ""
    after = seen(tmp_path / "t")
    assert {facts[1] for facts in after.values()} == {score.seen[0]["ledger.jsonl"][1]}
    assert after["ledger.jsonl"] == score.seen[0]["ledger.jsonl"]


def test_folders_of_one_try_and_of_four_look_alike(tmp_path, monkeypatch):
    looks, ledgers, states = [], [], []
    for count in (1, 4):
        draws(monkeypatch, count)
        folder = tmp_path / str(count)
        search(folder)
        sizes = {n: f[:1] + f[2:4] for n, f in seen(folder).items() if n != str(count)}
        looks.append(sizes)
        lines = (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
        ledgers.append([sorted(json.loads(line)) for line in lines])
        inside = sorted(str(p.relative_to(folder)) for p in (folder / "secret").rglob("*"))
        state = json.loads((folder / "secret" / "tuning" / "state.json").read_text("utf-8"))
        states.append((inside, {k: v for k, v in state.items() if k not in ("entropy", "data")}))
    assert looks[0] == looks[1]
    assert ledgers[0] == ledgers[1]
    assert states[0] == states[1]  # K is forgotten, even there
    assert states[0][1]["left"] is None


def test_at_most_two_tries_lie_on_the_disk(tmp_path, monkeypatch):
    draws(monkeypatch, 4)
    found = []

    def score(params):
        found.append(len(list((tmp_path / "t" / "secret").glob("tuning/try-*"))))
        return float(len(found))

    search(tmp_path / "t", score)
    assert max(found) == 2


def test_the_whole_tuning_is_charged_once_and_first(tmp_path, monkeypatch):
    draws(monkeypatch, 2)
    events = []

    def score(params):
        if (tmp_path / "t").exists():
            events.append(Ledger(tmp_path / "t" / "ledger.jsonl", key=b"").event)
        return 0.0

    key = engine.Secret.stream
    monkeypatch.setattr(
        engine.Secret, "stream", lambda s, name: b"" if name == "ledger" else key(s, name)
    )
    chosen = search(tmp_path / "t", score)
    one = jaxdp.Algorithm(*make({"rate": 0.1})).total(2)
    expected = acc.Tuned(one, LAW)
    assert len(events) == 2
    for event in events:
        assert acc.epsilon(event, 1e-5).upper == pytest.approx(chosen.bound.upper, rel=1e-9)
    assert chosen.bound.upper == acc.epsilon(expected, 1e-5).upper
    assert chosen.bound.upper > acc.epsilon(one, 1e-5).upper


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "no space left")])
def test_a_search_that_is_stopped_keeps_its_number_and_its_tries(tmp_path, monkeypatch, error):
    draws(monkeypatch, 3)
    folder = tmp_path / "t"
    stopped = Watching(folder, [0.9, 0.1, 0.2], stop_at=2, error=error)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OSError):
        search(folder, stopped)
    before = seen(folder)
    assert before == stopped.seen[0]
    draws(monkeypatch, 6)  # drawn again, it would be this
    going_on = Watching(folder, [0.1, 0.2])
    chosen = search(folder, going_on)
    assert going_on.calls == 2  # the second try and the third
    assert chosen.score == 0.9
    np.testing.assert_array_equal(chosen.params, stopped.params[0])
    assert seen(folder)["ledger.jsonl"] == before["ledger.jsonl"]
    assert all(look == before for look in going_on.seen)
    again = search(folder, Watching(folder, stop_at=1))  # nothing is trained any more
    assert again.score == 0.9


PROGRAM = """
import os, sys
from pathlib import Path
from jaxdp import accounting as acc
from tests.runs import test_tune as t
acc.Geometric.sample = lambda self, rng: 2
folder, calls = Path(sys.argv[1]), []
def score(params):
    calls.append(folder.exists())
    if sum(calls) == 2:
        os._exit(9)
    return 0.25
t.search(folder, score)
"""


def test_a_search_that_was_killed_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "t"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        check=False,
        timeout=100,
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 9
    assert set(seen(folder)) == {"t", "secret", "ledger.jsonl"}
    draws(monkeypatch, 5)
    score = Watching(folder, [0.5])
    assert search(folder, score).score == 0.5
    assert score.calls == 1


def test_a_law_of_ones_own_is_refused_and_there_is_no_cap(tmp_path):
    class Capped(acc.Geometric):
        def sample(self, rng):
            return min(super().sample(rng), 5)

    with pytest.raises(ValueError, match="tries must be one of"):
        search(tmp_path / "t", tries=Capped(0.3))
    for cap in ("max_tries", "max_trials", "timeout", "seconds"):
        with pytest.raises(TypeError, match=cap):
            search(tmp_path / "t", **{cap: 5})
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"make": lambda c: make(c, noise=1 + c["rate"])}, "the same noise, sampling and steps"),
        ({"space": {}}, "space must name"),
        ({"space": {"rate": 0.1}}, "space must give rate"),
        ({"make": lambda c: 3}, "make must return"),
        ({"delta": 0.0}, "delta"),
        ({"score": lambda w: w}, "score must return one number"),
        ({"make": lambda c: make(c, noise=0.0)}, "finite epsilon|NonPrivate|no noise|without"),
    ],
)
def test_bad_input_is_refused_before_anything_is_charged(tmp_path, changed, words):
    given = {"space": {"rate": LogUniform(0.1, 1.0)}, **changed}
    with pytest.raises(ValueError, match=words):
        search(tmp_path / "t", **given)
    assert not (tmp_path / "t").exists()


def test_a_search_that_goes_on_must_be_the_same(tmp_path, monkeypatch):
    draws(monkeypatch, 2)
    folder = tmp_path / "t"
    with pytest.raises(KeyboardInterrupt):
        search(folder, Watching(folder, stop_at=1))
    with pytest.raises(ValueError, match="must keep its laws"):
        search(folder, tries=acc.Geometric(0.2))
    with pytest.raises(ValueError, match="must keep its laws"):
        search(folder, space={"rate": [0.1, 0.2]})
    with pytest.raises(ValueError, match="source must hold the records"):
        search(folder, data=(X + 1, DATA[1]))
    ledger = folder / "ledger.jsonl"
    text = ledger.read_text(encoding="utf-8")
    ledger.write_text(text.replace('"gamma": 0.3', '"gamma": 0.9'), encoding="utf-8")
    with pytest.raises(ValueError, match="ledger"):
        search(folder)
    ledger.unlink()
    with pytest.raises(ValueError, match="must hold the charge"):
        search(folder)


def test_a_try_that_fails_is_the_worst(tmp_path, monkeypatch):
    draws(monkeypatch, 3)
    folder = tmp_path / "t"
    error = RuntimeError("the second try fails")
    chosen = search(folder, Watching(folder, [float("nan"), 0.0, -5.0], stop_at=2, error=error))
    assert chosen.score == -5.0
    draws(monkeypatch, 1)
    chosen = search(tmp_path / "u", lambda w: float("nan"))
    assert (chosen.candidate, chosen.params, chosen.score) == (None, None, None)
    assert (tmp_path / "u" / "params.msgpack").read_bytes() == b""


def test_no_try_at_all_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(acc.PoissonTries, "sample", lambda self, rng: 0)
    chosen = search(tmp_path / "t", tries=acc.PoissonTries(1.0))
    assert chosen.candidate is None
    assert chosen.bound.upper > 0


def test_a_noisy_score_on_private_records_is_part_of_the_event(tmp_path, monkeypatch):
    draws(monkeypatch, 1)

    def score(params, rng):
        return float(np.sum(np.abs(X @ params - DATA[1]) < 1) + 4.0 * rng.normal())

    plain = search(tmp_path / "t")
    noisy = search(tmp_path / "u", score, score_event=acc.Gaussian(4.0))
    one = jaxdp.Algorithm(*make({"rate": 0.1})).total(2)
    whole = acc.Tuned(acc.Composed((one, acc.Gaussian(4.0))), LAW)
    assert noisy.bound.upper == acc.epsilon(whole, 1e-5).upper > plain.bound.upper


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="holds something else"):
        search(tmp_path)


def test_candidates_are_drawn_from_their_laws():
    laws = spaces.checked({"a": LogUniform(0.01, 100.0), "b": Uniform(2.0, 3.0), "c": [1, "x"]})
    rng = np.random.default_rng(1)
    found = [spaces.drawn(laws, rng) for _ in range(4_000)]
    logs = np.log10([c["a"] for c in found])
    assert -2 <= logs.min() < -1.95 < 1.95 < logs.max() <= 2
    assert abs(logs.mean()) < 0.08
    assert abs(np.mean([c["b"] for c in found]) - 2.5) < 0.03
    assert 0.46 < np.mean([c["c"] == 1 for c in found]) < 0.54
    ends = list(spaces.corners(laws))
    assert {"a": 0.01, "b": 3.0, "c": "x"} in ends


@pytest.mark.parametrize("text", ["rate", "rate=", "=1", "rate=3:1", "rate=0:1", "rate=1:2:3"])
def test_a_law_in_other_words_is_refused(text):
    with pytest.raises(ValueError, match="--search must be NAME=LOW:HIGH"):
        spaces.parsed(text)


def test_a_law_in_words():
    assert spaces.parsed("rate=0.1:10") == ("rate", LogUniform(0.1, 10.0))
    assert spaces.parsed("optimizer=sgd,adam") == ("optimizer", ("sgd", "adam"))
    assert spaces.parsed("m=0,0.9") == ("m", (0, 0.9))
