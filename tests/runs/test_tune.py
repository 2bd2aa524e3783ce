"""Tuning: what is charged, and that nothing outside ``secret/`` tells of K or of the other tries."""

import json
import logging
import os
import shutil
import traceback
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger import Ledger
from jaxdp.runs import space as spaces
from jaxdp.runs import tries as engine
from jaxdp.runs.tuning import LogUniform, Uniform, tune
from tests.mechanisms import sgd_of
from tests.refusing import refused

LAW = acc.Geometric(0.3)
X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
DATA = (X, X.sum(axis=1))
RELEASED = ("params.msgpack", "tuned.json")


def loss_fn(w, x, y):
    return (jnp.vdot(x, w) - y) ** 2


def make(candidate, noise=2.0):
    return sgd_of(noise, 1.0, 20, 60), optax.sgd(candidate["rate"])


ALONE = jaxdp.Algorithm(*make({"rate": 0.1})).total(2)  # the event of one try


def search(folder, score=lambda w: 0.5, data=DATA, loss=loss_fn, **changed):
    given = {"params": np.zeros(2, np.float32), "space": {"rate": [0.1]}, "tries": LAW}
    given |= {"delta": 1e-5, "steps": 2, **changed}
    return tune(folder, loss, given.pop("make", make), data, score=score, **given)


def draws(monkeypatch, count):
    monkeypatch.setattr(acc.Geometric, "sample", lambda self, rng: count)


def unverified(folder):
    return Ledger(folder / "ledger.jsonl").unverified()


def seen(folder):
    """All that a look at the folder from outside tells: names, sizes, times, links, contents."""
    paths = [folder, folder / "secret", *(p for p in folder.iterdir() if p.name != "secret")]
    found = {}
    for path in paths:
        stat, content = path.stat(), path.read_bytes() if path.is_file() else b""
        found[path.name] = stat.st_size, stat.st_mtime_ns, stat.st_nlink, stat.st_mode, content
    return found


def charges(looked, shown=0):
    """The lines of the ledger, as ``seen`` found it, without what was shown at the end."""
    lines = looked["ledger.jsonl"][-1].splitlines()
    assert sum(b"shown" in line for line in lines) >= shown
    return [line for line in lines if b"shown" not in line]


class Watching:
    """A score that looks at the folder, once a try; ``left`` is what a kill in one would leave."""

    def __init__(self, folder, values=(), stop_at=None, error=KeyboardInterrupt):
        self.folder, self.values, self.calls = folder, list(values), 0
        self.seen, self.params, self.inside = [], [], []
        self.stop_at, self.error = stop_at, error

    def __call__(self, params):
        if not np.any(params):  # the rehearsal, before the charge
            return 0.0
        self.seen.append(seen(self.folder))
        self.params.append(params)
        self.calls += 1
        tries = list((self.folder / "secret").glob("tuning/try-*"))
        made = [next(self.folder.rglob(name)) for name in RELEASED]
        assert all("secret" in path.parts[-4:] for path in made)
        numbers = [path.stat().st_ino for path in made]
        event = Ledger(self.folder / "ledger.jsonl").event
        self.inside.append(SimpleNamespace(tries=len(tries), numbers=numbers, event=event))
        if self.calls == self.stop_at:
            self.left = shutil.copytree(self.folder, self.folder.parent / "killed" / "t")
            raise self.error
        return self.values[self.calls - 1] if self.values else 0.5


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A search of four tries that was watched."""
    folder = tmp_path_factory.mktemp("four") / "t"
    score = Watching(folder, [0.1, 0.2, 0.7, 0.3])
    with pytest.MonkeyPatch.context() as patched:
        draws(patched, 4)
        return search(folder, score), score, folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A search of one try."""
    folder = tmp_path_factory.mktemp("one") / "t"
    with pytest.MonkeyPatch.context() as patched:
        draws(patched, 1)
        return search(folder, lambda w: 0.7), folder


# What tells K.
def test_nothing_outside_the_secret_folder_moves_while_tries_run_and_all_is_charged_first(four):
    chosen, score, folder = four
    assert score.calls == 4
    assert all(look == score.seen[0] for look in score.seen)
    assert set(score.seen[0]) == {"t", "secret", "ledger.jsonl"}
    np.testing.assert_array_equal(chosen.params, score.params[2])
    assert chosen.score == 0.7
    after = seen(folder)
    assert {facts[1] for facts in after.values()} == {score.seen[0]["ledger.jsonl"][1]}
    assert charges(after) == charges(score.seen[0]) == charges(after, 1)
    # Where files are numbered in turn, as on tmpfs, the numbers of the release counted the tries.
    numbers = [(folder / name).stat().st_ino for name in RELEASED]
    assert all(found.numbers == numbers for found in score.inside)
    assert max(found.tries for found in score.inside) == 2
    # The whole tuning is charged once and first.
    for found in score.inside:
        assert acc.epsilon(found.event, 1e-5).upper == pytest.approx(chosen.bound.upper, rel=1e-9)
    assert chosen.bound.upper == acc.epsilon(acc.Tuned(ALONE, LAW), 1e-5).upper
    assert chosen.bound.upper > acc.epsilon(ALONE, 1e-5).upper


def test_folders_of_one_try_and_of_four_look_alike(one, four):
    looks = []
    for folder in (one[-1], four[-1]):
        sizes = {n: f[:1] + f[2:4] for n, f in seen(folder).items()}
        lines = (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
        inside = sorted(str(p.relative_to(folder)) for p in (folder / "secret").rglob("*"))
        state = json.loads((folder / "secret" / "tuning" / "state.json").read_text("utf-8"))
        kept = {k: v for k, v in state.items() if k not in ("entropy", "data")}
        looks.append((sizes, [sorted(json.loads(line)) for line in lines], inside, kept))
    assert looks[0] == looks[1]  # K is forgotten, even in the state
    assert looks[0][3]["left"] is None


def test_no_log_record_and_no_write_to_a_descriptor_tells_of_a_try(tmp_path, monkeypatch, capfd):
    draws(monkeypatch, 2)
    log, mine = tmp_path / "log.txt", logging.getLogger("mine")
    handler = logging.FileHandler(log)  # it holds its own file: redirecting stderr is no help
    logging.getLogger().addHandler(handler)

    def score(params):
        if np.any(params):
            mine.critical("a try was scored")
            os.write(1, b"from C\n")
            os.write(2, b"from C\n")
            print("a score was computed")
            warnings.warn("a try was scored", stacklevel=1)
        return 0.5

    try:
        search(tmp_path / "t", score)
        mine.critical("said after the search")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert log.read_text(encoding="utf-8") == "said after the search\n"
    assert capfd.readouterr() == ("", "")
    os.write(2, b"from C\n")
    assert capfd.readouterr().err == "from C\n"  # the descriptors are given back


def test_the_cache_of_compiled_programs_does_not_grow_with_the_tries(tmp_path, monkeypatch):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    found, cache = [], tmp_path / "cache"
    cache.mkdir()
    draws(monkeypatch, 2)
    score = lambda w: found.append(sorted(os.listdir(cache))) or 0.5  # noqa: E731
    try:
        for name, value in zip(names, (str(cache), 0.0), strict=True):
            jax.config.update(name, value)
        # Each rate is a constant of another program.
        search(tmp_path / "t", score, space={"rate": LogUniform(0.1, 1.0)})
        assert getattr(jax.config, names[1]) == 0.0
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert found[0] == found[1] == found[2] == sorted(os.listdir(cache))


def test_a_failing_machine_does_not_name_the_try(tmp_path, monkeypatch):
    draws(monkeypatch, 3)
    calls = []
    for kind in (OSError, engine.StorageError, MemoryError, TimeoutError):

        def score(params, kind=kind):
            if not np.any(params):
                return 0.0
            calls.append(params)
            if len(calls) == 1:
                return 1.0
            where = next(tmp_path.rglob("try-1"))
            words = f"{where} after {len(calls)} tries, score {params}"
            raise OSError(28, "no space", str(where)) if kind is OSError else kind(words)

        with pytest.raises((OSError, ValueError, MemoryError)) as caught:
            search(tmp_path / "t", score)
        error = caught.value
        shown = "".join(traceback.format_exception(error)) + str(vars(error))
        assert [word for word in ("try-", f"{len(calls)} tries") if word in shown] == []
        assert "score " not in str(error)
        # A context manager may leave its bare end behind, which says nothing of a try.
        assert error.__cause__ is None
        assert repr(error.__context__) in ("None", "StopIteration()")
    assert len(calls) == 5
    # A crash between release and cleaning leaves no try.
    draws(monkeypatch, 1)
    cleans = engine._remove_all_but

    def dies(work, best):
        if best is None:
            raise KeyboardInterrupt
        cleans(work, best)

    monkeypatch.setattr(engine, "_remove_all_but", dies)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "u")
    monkeypatch.setattr(engine, "_remove_all_but", cleans)
    search(tmp_path / "u")
    assert list((tmp_path / "u" / "secret").rglob("try-*")) == []


# Searches that are stopped.
@pytest.mark.parametrize("end", ["interrupt", "full disk", "kill"])
def test_a_search_that_is_stopped_keeps_its_number_and_its_tries(tmp_path, monkeypatch, end):
    draws(monkeypatch, 3)
    folder, error = tmp_path / "t", OSError(28, "none") if end == "full disk" else KeyboardInterrupt
    stopped = Watching(folder, [0.9, 0.1, 0.2], stop_at=2, error=error)
    with pytest.raises((KeyboardInterrupt, OSError)) as caught:
        search(folder, stopped)
    said = f"interrupted: what was done in {folder} is safe; the same program continues the tuning"
    assert end == "full disk" or str(caught.value) == said
    if end == "kill":
        folder = stopped.left
    before = seen(folder)
    assert before == stopped.seen[0]
    draws(monkeypatch, 6)  # drawn again, it would be this
    going_on = Watching(folder, [0.1, 0.2])
    chosen = search(folder, going_on)
    assert going_on.calls == 2  # the second try and the third
    assert chosen.score == 0.9
    np.testing.assert_array_equal(chosen.params, stopped.params[0])
    assert charges(seen(folder), 1) == charges(before)
    assert all(look == before for look in going_on.seen)
    again = search(folder, Watching(folder, stop_at=1))  # nothing is trained any more
    assert again.score == 0.9


def test_a_result_is_released_once_whatever_is_put_back(tmp_path, monkeypatch):
    draws(monkeypatch, 2)
    folder, kept = tmp_path / "t", tmp_path / "kept"
    secret, released = folder / "secret", [folder / name for name in RELEASED]
    values = lambda: Watching(folder, [0.9, 0.9])  # noqa: E731

    def dies(*args):
        raise KeyboardInterrupt

    def put_back(copy=kept):
        shutil.rmtree(secret)
        shutil.copytree(copy, secret)

    # Killed once the charge is on disk: a later call has a line of its own, for one that was read
    # may never have reached it. It costs nothing.
    with monkeypatch.context() as patch:
        patch.setattr(engine.TuneDirectory, "reserve", dies)
        with pytest.raises(KeyboardInterrupt):
            search(folder, values())
    with pytest.raises(KeyboardInterrupt):
        search(folder, Watching(folder, stop_at=2))
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    assert sum('"first_step"' in line for line in lines) == 2
    shutil.copytree(secret, kept)
    put_back()  # of which nothing tells: it would say that the best try was interrupted
    # Killed between the line that says what is shown and the release: the same is released.
    with monkeypatch.context() as patch:
        patch.setattr(engine.TuneDirectory, "release", dies)
        with pytest.raises(KeyboardInterrupt):
            search(folder, values())
    assert not any(path.exists() for path in released)
    newest = shutil.copytree(secret, tmp_path / "newest")
    put_back()
    refused("got an older copy", search, folder, Watching(folder, stop_at=1))
    put_back(newest)
    assert search(folder, Watching(folder, stop_at=1)).score == 0.9
    before = [path.read_bytes() for path in released]
    put_back()
    refused("got an older copy", search, folder, Watching(folder, stop_at=1))
    assert [path.read_bytes() for path in released] == before
    assert Ledger(folder / "ledger.jsonl").steps == 1
    assert {engine.UNSEEN, engine.FAILURES, engine.SCORED} == set(unverified(folder))


def test_a_search_that_goes_on_must_be_the_same(tmp_path, monkeypatch):
    draws(monkeypatch, 2)
    folder = tmp_path / "t"
    with pytest.raises(KeyboardInterrupt):
        search(folder, Watching(folder, stop_at=1))
    refused("must keep its laws", search, folder, tries=acc.Geometric(0.2))
    refused("must keep its laws", search, folder, space={"rate": [0.1, 0.2]})
    refused("source must hold the records", search, folder, data=(X + 1, DATA[1]))
    ledger = folder / "ledger.jsonl"
    text = ledger.read_text(encoding="utf-8")
    ledger.write_text(text.replace('"gamma": 0.3', '"gamma": 0.9'), encoding="utf-8")
    refused("ledger", search, folder)
    ledger.unlink()
    refused("must hold the charge", search, folder)


def test_a_try_that_fails_is_the_worst_and_none_at_all_is_a_result(tmp_path, monkeypatch):
    draws(monkeypatch, 3)
    error = RuntimeError("the second try fails")
    score = Watching(tmp_path / "t", [float("nan"), 0.0, -5.0], stop_at=2, error=error)
    assert search(tmp_path / "t", score).score == -5.0
    draws(monkeypatch, 1)
    chosen = search(tmp_path / "u", lambda w: float("nan"))
    assert (chosen.candidate, chosen.params, chosen.score) == (None, None, None)
    assert (tmp_path / "u" / "params.msgpack").read_bytes() == b""
    monkeypatch.setattr(acc.PoissonTries, "sample", lambda self, rng: 0)
    chosen = search(tmp_path / "v", tries=acc.PoissonTries(1.0))
    assert chosen.candidate is None
    assert chosen.bound.upper > 0


# What is refused.
def test_bad_input_is_refused_before_anything_is_charged_and_there_is_no_cap(tmp_path):
    class Capped(acc.Geometric):
        """A law of one's own, which would stop after five."""

    called = []
    unseen = {"make": called.append, "score": called.append}
    for changed, words in (
        ({"relation": "none such", **unseen}, "Relation"),
        ({"tries": Capped(0.3), **unseen}, "tries must be one of"),
        ({"make": lambda c: make(c, noise=1 + c["rate"])}, "the same noise, sampling and steps"),
        ({"space": {}}, "space must name"),
        ({"space": {"rate": 0.1}}, "space must give rate"),
        ({"make": lambda c: 3}, "make must return"),
        ({"delta": 0.0}, "delta"),
        ({"score": lambda w: w}, "score must return one number"),
        ({"make": lambda c: make(c, noise=0.0)}, "finite epsilon|NonPrivate|no noise|without"),
        ({"about": {"x": np.ones(2)}}, "about must be"),
    ):
        given = {"space": {"rate": LogUniform(0.1, 1.0)}, **changed}
        refused(words, search, tmp_path / "t", **given)
        assert not (tmp_path / "t").exists(), words
    assert not called
    for cap in ("max_tries", "max_trials", "timeout", "seconds"):
        refused(cap, search, tmp_path / "t", error=TypeError, **{cap: 5})
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    refused("holds something else", search, tmp_path)


def test_a_candidate_that_turns_out_with_less_noise_is_not_trained(tmp_path, monkeypatch):
    draws(monkeypatch, 3)
    made, scored, charged, charges = [], [], [], Ledger.charge

    def other(candidate):
        made.append(candidate)
        right = not charged or len(made) == charged[0] + 1
        return make({"rate": 0.1}, noise=2.0 if right else 0.01)

    def charge(self, event, *args, **kwargs):
        if isinstance(event, acc.Tuned):
            charged.append(len(made))  # from now on make is called for tries
        return charges(self, event, *args, **kwargs)

    monkeypatch.setattr(Ledger, "charge", charge)
    chosen = search(tmp_path / "t", lambda w: scored.append(w) or 0.5, make=other)
    assert chosen.score == 0.5
    assert len(made) == charged[0] + 3
    assert len(scored) == 2  # the rehearsal, and the one try that released what was charged


# What the ledger holds.
def test_what_a_try_assumes_is_in_the_ledger_of_the_search(tmp_path, monkeypatch):
    draws(monkeypatch, 2)
    captured, folder, charged = jnp.asarray([1.0, 2.0]), tmp_path / "t", []
    ledger = folder / "ledger.jsonl"

    def score(params):
        if np.any(params):
            charged.append(ledger.stat().st_mtime_ns)
        return 0.5

    search(folder, score, loss=lambda w, x, y: loss_fn(w, x, y) + jnp.vdot(captured, x) * w[0])
    assert any("captured array float32 [2]" in line for line in unverified(folder))
    # Written at the end, with the time of the charge.
    assert {facts[1] for facts in seen(folder).values()} == set(charged)
    before = ledger.read_bytes()
    search(folder, loss=lambda w, x, y: 0.0 * w[0])
    assert ledger.read_bytes() == before


def test_a_noisy_score_on_private_records_is_part_of_the_event(tmp_path, monkeypatch, one):
    """And the ledger says that score and failures are trusted."""
    draws(monkeypatch, 1)

    def score(params, rng):
        return float(np.sum(np.abs(X @ params - DATA[1]) < 1) + 4.0 * rng.normal())

    plain, folder = one
    noisy = search(tmp_path / "u", score, score_event=acc.Gaussian(4.0))
    whole = acc.Tuned(acc.Composed((ALONE, acc.Gaussian(4.0))), LAW)
    assert noisy.bound.upper == acc.epsilon(whole, 1e-5).upper > plain.bound.upper
    assert {engine.UNSEEN, engine.FAILURES, engine.SCORED} == set(unverified(folder))
    assert {engine.UNSEEN, engine.FAILURES, engine.CHARGED_SCORE} == set(unverified(tmp_path / "u"))


# The law of K, and those of the candidates.
def test_the_number_of_tries_keeps_its_law_where_its_first_mass_underflows():
    """Summed from a mass that is 0 the number would be 1; from one with two digits, anything."""
    for eta in (615.0, 1000.0):
        law, rng = acc.NegativeBinomial(eta, 0.3), np.random.default_rng(3)
        found = np.asarray([law.sample(rng) for _ in range(300)])
        deviation = np.sqrt(eta * 0.7) / 0.3
        assert abs(found.mean() - law.expected()) < 5 * deviation / np.sqrt(300), eta
        assert found.std() == pytest.approx(deviation, rel=0.2)
    # Candidates are drawn from their laws.
    laws = spaces.checked({"a": LogUniform(0.01, 100.0), "b": Uniform(2.0, 3.0), "c": [1, "x"]})
    rng = np.random.default_rng(1)
    found = [spaces.drawn(laws, rng) for _ in range(4_000)]
    logs = np.log10([c["a"] for c in found])
    assert -2 <= logs.min() < -1.95 < 1.95 < logs.max() <= 2
    assert abs(logs.mean()) < 0.08
    assert abs(np.mean([c["b"] for c in found]) - 2.5) < 0.03
    assert 0.46 < np.mean([c["c"] == 1 for c in found]) < 0.54
    assert {"a": 0.01, "b": 3.0, "c": "x"} in list(spaces.corners(laws))
    assert spaces.parsed("rate=0.1:10") == ("rate", LogUniform(0.1, 10.0))
    for text in ("rate", "rate=", "=1", "rate=3:1", "rate=0:1", "rate=1:2:3"):
        refused("--search must be NAME=LOW:HIGH", spaces.parsed, text)
    # Values of a law are numbers or words.
    assert spaces.parsed("optimizer=sgd,adam") == ("optimizer", ("sgd", "adam"))
    assert spaces.parsed("rate=1,0.5,word") == ("rate", (1, 0.5, "word"))


def test_a_search_returns_the_parameters_of_any_framework(tmp_path, monkeypatch):
    """Before: those of nnx and Equinox could not be written, once the tries were done."""
    draws(monkeypatch, 1)
    graph, params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Param)
    loss = lambda p, x, y: (nnx.merge(graph, p, copy=True)(x)[0] - y) ** 2  # noqa: E731
    found = search(tmp_path / "s", loss=loss, params=params, score=lambda p: 0.5)
    assert nnx.merge(graph, found.params)(X[0]).shape == (1,)
