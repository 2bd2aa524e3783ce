"""The average of iterates: the numbers, every door, and that it costs and changes nothing else."""

from functools import partial

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import optimizers, runs
from jaxdp.cli import main
from jaxdp.optimizers import hyperparameters
from jaxdp.runs.export import export_params
from jaxdp.training.step import PrivateStep
from tests.refusing import all_refused
from tests.runs.small import config, dataset, go

X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
DATA = (X, X.sum(axis=1))
NOISE = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 50}


def loss_fn(w, x, y):
    return (jnp.vdot(x, w) - y) ** 2


def iterates(decay):
    given = (loss_fn, jaxdp.dp_sgd(**NOISE), optax.sgd(0.1), DATA)
    trainer = jaxdp.Trainer(*given, secret=jaxdp.Secret.from_seed(3), average=decay)
    state, found = trainer.init(jnp.arange(3.0)), []
    np.testing.assert_array_equal(trainer.released(state), [0.0, 1.0, 2.0])  # before any step
    for batch in trainer.batches(5):
        state, _ = trainer.step(state, batch)
        found.append(np.asarray(state.params, np.float64))
    return found, np.asarray(trainer.released(state)), trainer.epsilon(1e-5).upper


def test_the_average_is_of_the_iterates_and_moves_none_of_them():
    plain, last, epsilon = iterates(None)
    found, average, spent = iterates(0.8)
    np.testing.assert_array_equal(plain, found)
    np.testing.assert_array_equal(last, plain[-1].astype(np.float32))
    weights = 0.2 * 0.8 ** np.arange(4, -1, -1)
    expected = weights @ np.asarray(plain) / weights.sum()
    np.testing.assert_allclose(average, expected, rtol=1e-5)
    assert spent == epsilon
    # Algorithms that read their state still do.
    plain = optimizers.adadp(jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 1.0, 10, 50), 0.1)
    made = optimizers.averaged(plain, 0.9)
    before, after = (PrivateStep.of(each, loss_fn).init(jnp.zeros(3)) for each in (plain, made))
    jax.tree.map(np.testing.assert_array_equal, made.context(after), plain.context(before))
    assert made.total(7) == plain.total(7)
    judged = optimizers.sa_dpsgd(jaxdp.dp_sgd(**NOISE), 0.1, jax.random.key(0))
    kept = optimizers.averaged(judged, 0.9)
    assert kept.counts_of(PrivateStep.of(kept, loss_fn).init(jnp.zeros(3)))["proposals"] == 0


def test_a_run_shows_returns_and_exports_the_average_and_the_front_door_evaluates_it(tmp_path):
    rows = dataset()
    plain = go(tmp_path / "a", config())
    found = go(tmp_path / "b", config(average=0.9))
    target = tmp_path / "params.msgpack"
    export_params(runs.RunDirectory(tmp_path / "b"), target)
    exported = flax.serialization.msgpack_restore(target.read_bytes())
    jax.tree.map(np.testing.assert_array_equal, dict(found.params), exported)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), plain.params, found.params)
    assert max(jax.tree.leaves(apart)) > 1e-3
    assert [r["epsilon"] for r in plain.history] == [r["epsilon"] for r in found.history]
    model = runs.assemble.model_of(config())
    told = runs.assemble.evaluator(model, rows.test_x, rows.test_y)(found.params)
    assert found.history[-1]["test_loss"] == pytest.approx(told["test_loss"], rel=1e-6)
    seen, options = [], {"params": jnp.zeros(3), "average": 0.5, "report": False, "every": 2}
    options["evaluate"] = lambda w: seen.append(w) or {"size": float(np.abs(w).sum())}
    run = jaxdp.Run(tmp_path / "r", loss_fn, jaxdp.dp_sgd(**NOISE), optax.sgd(0.1), DATA, **options)
    np.testing.assert_array_equal(run.fit(4), seen[-1])


RATES = {
    "constant": [2, 2, 2, 2, 2, 2, 2, 2],
    "linear": [2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25],
    "linear:4": [0.5, 1, 1.5, 2, 2, 1.5, 1, 0.5],
    "constant:2": [1, 2, 2, 2, 2, 2, 2, 2],
    "constant:1": [2, 2, 2, 2, 2, 2, 2, 2],
    "to:0.52:4": [2, 1.76, 1.52, 1.28, 1.04, 1.04, 1.04, 1.04],
    "cosine": [1 + np.cos(np.pi * t / 8) for t in range(8)],
}
OTHER_WORDS = ["", "steps", "cosine:", "cosine:-1", "linear:8", "linear:x"]
OTHER_WORDS += ["to:2:4", "to:0.0:4", "to:0.5", "to:0.5:0"]


def test_rates_by_name_and_what_is_no_rate_and_no_decay_is_refused():
    for text, expected in RATES.items():
        found = jax.vmap(hyperparameters.schedule(text, 2.0, 8))(jnp.arange(8))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=text)
    algorithm = optimizers.sgd(jaxdp.dp_sgd(**NOISE), 0.1)
    decays, twice = (0.0, 1.0, -0.1, 2, "0.9", float("nan")), optimizers.averaged(algorithm, 0.9)
    rows = [("decay", partial(optimizers.averaged, algorithm, decay), decay) for decay in decays]
    rows += [("averaged twice", partial(optimizers.averaged, twice, 0.9))]
    words = "learning_rate_schedule"
    all_refused(
        [*rows, *((words, partial(hyperparameters.schedule, t, 2.0, 8), t) for t in OTHER_WORDS)]
    )


def test_both_options_of_the_command_line(tmp_path):
    out = tmp_path / "r"
    args = ["--model", "logistic", "--steps", "4", "--learning-rate-schedule", "cosine:1"]
    main(["train", *args, "--average", "0.9", "--out", str(out)])
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "(cosine:1)" in text
    assert "average of the parameters with decay 0.9" in text
    assert "--average 0.9" in text
