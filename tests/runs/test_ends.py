"""Ends of runs that judge their own rows, as an attack broke them; what a search checks first."""

import contextlib
import shutil

import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp._issuer import Issuer
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.tuning import tune
from jaxdp.seeds import Secret
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at


def begin(folder, enough, progress=small.ignore, **changes):
    """A run that ends when it has enough: (its folder, its configuration, its data)."""
    config, data = small.config(steps=12, eval_every=2, **changes), small.dataset()
    directory = runs.RunDirectory(folder)
    with contextlib.suppress(Stop):
        runs.start(config, directory, data, Secret.new(), progress, enough=enough)
    return directory, config, data


def test_a_row_is_durable_before_it_decides(tmp_path, monkeypatch):
    """A decision may be shown; the steps of a row that a crash takes are done again, uncharged."""
    seen, save = [], Checkpoints.save

    def crash(self, state, history):
        if state.step == 4:  # never on disk, as where the power fails while it is written
            monkeypatch.setattr(Checkpoints, "wait", lost)
            return
        save(self, state, history)

    def lost(self):
        raise Stop

    monkeypatch.setattr(Checkpoints, "save", crash)
    directory, config, data = begin(tmp_path / "r", lambda row: bool(seen.append(row)))
    monkeypatch.undo()
    runs.resume(config, directory, data, small.ignore, enough=lambda row: bool(seen.append(row)))
    told = {}
    for row in seen:
        told.setdefault(row["step"], set()).add(row["update_norm"])
    assert set(told) == {2, 4, 6, 8, 10}
    assert all(len(norms) == 1 for norms in told.values())  # one release of each step


def test_a_later_start_that_forgets_to_ask_tells_no_less(tmp_path):
    directory, config, data = begin(tmp_path / "r", lambda row: row["step"] >= 4)
    with pytest.raises(Stop):
        runs.resume(config, directory, data, crash_at(10))
    whole = acc.epsilon(config.total(12), config.delta).upper
    history = directory.load_history()
    assert [row["step"] for row in history][:3] == [2, 4, 6]
    assert {row["epsilon"] for row in history} == {whole}


def test_an_older_copy_of_the_secrets_is_charged_for_all_once_more(tmp_path):
    """Steps that were shown are other releases when they are done again, and so is their number."""
    copied = tmp_path / "older"

    def keep(step, row):
        if row is not None and row["step"] == 2:
            shutil.copytree(tmp_path / "r" / "secret", copied)

    directory, config, data = begin(tmp_path / "r", lambda row: row["step"] >= 6, keep)
    shutil.rmtree(directory.secret)
    shutil.copytree(copied, directory.secret)
    result = runs.resume(config, directory, data, small.ignore, enough=lambda row: row["step"] >= 4)
    assert [row["step"] for row in result.history] == [2, 4]
    assert result.ledger.steps == 12 + 10
    assert result.history[-1]["epsilon"] == result.ledger.epsilon(config.delta).upper


def test_what_releases_decide_about_is_not_given_back():
    ledger = jaxdp.Ledger()
    issuer = Issuer(jaxdp.dp_sgd(1.0, 1.0, 20, 60), ledger, Secret.from_seed(1), "a")
    issuer.charge_until(10)
    issuer.issue()
    issuer.close()
    assert ledger.steps == 10
    issuer.issue()
    assert ledger.steps == 10


def test_a_wrong_relation_is_refused_before_anything_is_called(tmp_path):
    called = []

    def make(candidate):
        called.append("make")
        return jaxdp.dp_sgd(2.0, 1.0, 20, 60), optax.sgd(candidate["rate"])

    def score(params):
        called.append("score")
        return 0.5

    data = np.zeros((60, 2), np.float32), np.zeros(60, np.float32)
    given = {"params": np.zeros(2, np.float32), "space": {"rate": [0.1]}, "steps": 2}
    given |= {"tries": acc.Geometric(0.3), "delta": 1e-5, "score": score}
    with pytest.raises(ValueError, match="Relation"):
        tune(
            tmp_path / "search",
            lambda w, x, y: (w @ x - y) ** 2,
            make,
            data,
            **given,
            relation="none such",
        )
    assert not called
