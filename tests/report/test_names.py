"""A user's numbers may have any name: a report lost those that it uses itself."""

import json

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

NUMBERS = {"numbers": 0.5, "audited": 0.25, "model": 2.0, "dataset": 4.0, "mse": 8.0}


def test_a_report_holds_whatever_name_a_users_number_has(tmp_path):
    run = jaxdp.Run(
        tmp_path / "run",
        lambda w, example: (example["x"] @ w - example["y"]) ** 2,
        jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100),
        optax.sgd(0.1),
        {"x": np.ones((100, 3), np.float32), "y": np.ones(100, np.float32)},
        params=jnp.zeros(3),
        delta=1e-5,
        evaluate=lambda params: NUMBERS,
        every=2,
    )
    run.fit(2)
    for _ in range(2):  # the second reads what the first wrote
        run.report()
    found = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert {name: found["history"][-1][name] for name in NUMBERS} == NUMBERS
