"""``jaxdp.Run``: an own model on own data, from Python."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.runs.test_resume import Stop, crash_at

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(200, 3)).astype(np.float32), RNG.normal(size=200).astype(np.float32)
MECHANISM = jaxdp.dp_sgd(
    epsilon=3.0, delta=1e-3, steps=12, l2_clip_norm=1.0, batch_size=40, dataset_size=200
)


def loss_fn(params, x, y):
    return jnp.square(jnp.vdot(params["w"], x) - y)


def run(folder, data=(X, Y), mechanism=MECHANISM, **options):
    params = {"w": jnp.zeros(3)}
    return jaxdp.Run(
        folder, loss_fn, mechanism, optax.sgd(0.1), data, params=params, every=3, **options
    )


def test_a_run_from_python_goes_on_and_costs_what_was_asked_for(tmp_path):
    seen = []

    def evaluate(params):
        seen.append(jax.tree.map(np.asarray, params))
        return {"length": np.linalg.norm(params["w"])}

    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(8), evaluate=evaluate).fit()
    shown = json.loads((tmp_path / "r/history.json").read_text())
    again = run(tmp_path / "r", evaluate=evaluate)
    params = again.fit()
    assert [row["step"] for row in again.history] == [3, 6, 9, 12]
    assert again.history[: len(shown)] == shown
    np.testing.assert_allclose(again.history[-1]["length"], np.linalg.norm(params["w"]), rtol=1e-6)
    assert again.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper <= 3.0
    again.export(tmp_path / "params.msgpack")
    assert (tmp_path / "params.msgpack").stat().st_size > 10
    finished = run(tmp_path / "r").fit()
    np.testing.assert_array_equal(finished["w"], params["w"])


def test_what_was_evaluated_was_durable(tmp_path):
    def evaluate(params):
        step = sorted((tmp_path / "r/secret/checkpoints").iterdir(), key=lambda p: p.name.zfill(9))[
            -1
        ]
        assert step.name == str(len(steps) * 3 + 3)
        steps.append(step)
        return {}

    steps = []
    run(tmp_path / "r", evaluate=evaluate).fit()
    assert len(steps) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": (X[:-1], Y[:-1])}, "source must hold the records that the run"),
        ({"mechanism": jaxdp.dp_sgd(2.0, 1.0, 40, 200)}, "mechanism must stay that of the run"),
    ],
)
def test_another_run_is_refused(tmp_path, change, words):
    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(4)).fit()
    steps = 12 if "mechanism" in change else None
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "r", **change).fit(steps)


def test_steps_beyond_the_budget_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="steps must be at most 12, which the noise was calibrated"
    ):
        run(tmp_path / "r").fit(13)
    assert not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="steps must be given"):
        run(tmp_path / "r", mechanism=jaxdp.dp_sgd(2.0, 1.0, 40, 200)).fit()
    with pytest.raises(ValueError, match="folder must name a folder"):
        run("")
