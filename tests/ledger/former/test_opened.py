"""Files of format 2, made before tickets were taken at hand-out: opened as then, never counted less.

They were made once, by the code of the time when charges were given back, and cannot be made again;
``expected.json`` tells what that code answered about each. A ledger is one file; a run is a zip of its
folder, ``secret/`` too, without pictures and pages. Who was killed died by ``os._exit``.
"""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.clipping.rules import clip
from jaxdp.mechanism import Mechanism
from jaxdp.runs import RunDirectory
from jaxdp.runs.export import export_params
from jaxdp.sampling import RandomAllocation

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
DELTA, STEPS = 1e-5, 12
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
# Whose reservation was ended, or who was killed with steps drawn ahead; within an epoch; in order; of
# one seed twice; by a trainer twice; in two processes.
LEDGERS = """
by_hand keyed given_back killed_ahead epochs epochs_killed correlated_killed seeded trainers
trainer_killed processes
""".split()


def test_every_ledger_of_before_is_opened_as_then_and_goes_on(tmp_path):
    for name in LEDGERS:
        path = Path(shutil.copy(HERE / f"{name}.jsonl", tmp_path))
        expected, key = EXPECTED[path.name], b"k" * 32 if name == "keyed" else None
        ledger = jaxdp.Ledger(path, key=key)
        shown = [ledger.shown(str(entry.stream)) for entry in ledger.entries]
        now = "or made from what this ledger released"
        words = [line.replace("computed from no record", now) for line in expected["unverified"]]
        assert {
            "epsilon": pytest.approx(ledger.epsilon(DELTA).upper, rel=1e-6),
            "steps": ledger.steps,
            "begun": len(ledger.begun),
            "unverified": ledger.unverified(),
            "shown to": max(getattr(each, "step", 0) for each in shown),
        } == {**expected, "unverified": words}, name
        # One more charge is added to what there is, on a stream of its own.
        ledger.charge(STEP)
        ledger.close()
        assert jaxdp.Ledger(path, key=key).steps == expected["steps"] + 1, name


SIZES = {"batch_size": 20, "dataset_size": 60}
# The noise is what the accountant of the time calibrated; another may end on another last digit.
PLANNED = {"l2_clip_norm": 1.0, "epsilon": 3.0, "delta": DELTA, "steps": STEPS, **SIZES}
MECHANISMS = {
    "poisson": (jaxdp.dp_sgd(**PLANNED), 1.962513908854594),
    "epochs": (Mechanism(clip(1.0), 2.0, RandomAllocation(3), **SIZES), 2.0),
    "correlated": (
        jaxdp.dp_mf(noise_multiplier=1.0, l2_clip_norm=1.0, **SIZES, steps=STEPS, bands=2),
        1.0,
    ),
    "grid": (jaxdp.dp_sgd(**PLANNED, noise="grid"), 1.9625139088545938),
}
# Ended; killed once the row of step 6 was shown, with steps begun after it; or so, its last checkpoint
# taken away and gone on, to the end.
RUNS = (
    "poisson poisson_killed epochs_killed correlated_killed grid_killed poisson_set_aside".split()
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n[0] == "e" else pytest.mark.slow) for n in RUNS]
)
def test_a_run_of_before_goes_on_at_the_epsilon_that_it_had(tmp_path, name):
    planned, noise = MECHANISMS[name.partition("_")[0]]
    mechanism = dataclasses.replace(planned, noise_multiplier=noise)
    expected, folder = EXPECTED[f"{name}.zip"], tmp_path / "r"
    with zipfile.ZipFile(HERE / f"{name}.zip") as packed:
        packed.extractall(folder)
    # Its lines name no states: the checkpoint of the step that was shown, as then.
    assert export_params(RunDirectory(folder), tmp_path / "p.msgpack") in (6, 12)
    loss_fn = lambda params, x: jnp.square(jnp.vdot(params["w"], x) - 1.0)  # noqa: E731
    given = {"params": {"w": np.zeros(4, np.float32)}, "every": 3, "report": False}
    run = jaxdp.Run(folder, loss_fn, mechanism, optax.sgd(0.1), X, **given)
    near = {"epsilon before": pytest.approx(run.epsilon(DELTA).upper, rel=1e-6)}
    run.fit(STEPS)
    near |= {"epsilon": pytest.approx(run.epsilon(DELTA).upper, rel=1e-6)}
    said = run.unverified()
    more = [line for line in said if line not in expected["unverified"]]
    words = ("the folder was", "copied", "kept no form of its program")
    assert all(any(each in line for each in words) for line in more), more
    assert set(expected.pop("unverified")) <= set(said)
    assert {**near, "rows": [row["step"] for row in run.history]} == expected
