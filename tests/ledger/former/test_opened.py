"""Files of format 2, made before tickets were taken at hand-out: opened as then, never counted less.

``make.py`` made them, once; ``expected.json`` tells what the code of the time answered.
"""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import pytest

import jaxdp
from jaxdp.runs import RunDirectory
from jaxdp.runs.export import export_params
from tests.ledger.former import make

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def test_every_ledger_of_before_is_opened_as_then_and_goes_on(tmp_path):
    for name, (_, *args) in make.LEDGERS.items():
        path = Path(shutil.copy(HERE / f"{name}.jsonl", tmp_path))
        expected, key = EXPECTED[path.name], make.KEY if make.KEY in args else None
        ledger = jaxdp.Ledger(path, key=key)
        found = make.answers(ledger)
        assert found.pop("epsilon") == pytest.approx(expected.pop("epsilon"), rel=1e-6), name
        assert found == expected, name
        # One more charge is added to what there is, on a stream of its own.
        ledger.charge(make.STEP)
        ledger.close()
        assert jaxdp.Ledger(path, key=key).steps == expected["steps"] + 1, name


RUNS = [
    pytest.param(name, marks=[] if name == "epochs_killed" else pytest.mark.slow)
    for name in make.RUNS
]


# What the accountant of the time calibrated; another one may end on another last digit.
CALIBRATED = {"poisson": 1.962513908854594, "grid": 1.9625139088545938}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_before_goes_on_at_the_epsilon_that_it_had(tmp_path, monkeypatch, name):
    for kind, noise in CALIBRATED.items():
        changed = dataclasses.replace(make.MECHANISMS[kind], noise_multiplier=noise)
        monkeypatch.setitem(make.MECHANISMS, kind, changed)
    expected = EXPECTED[f"{name}.zip"]
    with zipfile.ZipFile(HERE / f"{name}.zip") as packed:
        packed.extractall(tmp_path / "r")
    # Its lines name no states: the checkpoint of the step that was shown, as then.
    assert export_params(RunDirectory(tmp_path / "r"), tmp_path / "params") in (6, 12)
    found = make.went_on(tmp_path / "r", make.RUNS[name][1])
    for told in ("epsilon before", "epsilon"):
        assert found.pop(told) == pytest.approx(expected.pop(told), rel=1e-6)
    moved = [line for line in found["unverified"] if line not in expected["unverified"]]
    assert all("the folder was" in line or "copied" in line for line in moved), moved
    assert set(expected.pop("unverified")) <= set(found.pop("unverified"))
    assert found == expected
