"""A mechanism built directly: its parts must be what they should be, and agree."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, FullBatch, Poisson

GOOD = {
    "rule": jaxdp.clip(0.1),
    "noise_multiplier": 1.0,
    "sampling": Poisson(0.25),
    "batch_size": 2,
    "dataset_size": 8,
}
NAN, INF = float("nan"), float("inf")

BAD = [
    ({"rule": 0.1}, "rule must be a clipping rule"),
    ({"rule": jaxdp.clip}, "rule must be a clipping rule"),
    ({"rule": type(jaxdp.clip(0.1))}, "rule must be a clipping rule"),
    ({"rule": None}, "rule must be a clipping rule"),
    ({"noise_multiplier": NAN}, "noise_multiplier must be a finite number"),
    ({"noise_multiplier": INF}, "noise_multiplier must be a finite number"),
    ({"noise_multiplier": -1.0}, "noise_multiplier must be a finite number"),
    ({"noise_multiplier": "1"}, "noise_multiplier must be a number"),
    ({"noise_multiplier": None}, "noise_multiplier must be a number"),
    ({"noise_multiplier": True}, "noise_multiplier must be a number"),
    ({"noise_multiplier": np.ones(2)}, "noise_multiplier must be a single number"),
    ({"noise_multiplier": jnp.float32(1.0)}, "noise_multiplier must be a Python number"),
    ({"sampling": "poisson"}, "sampling must be such as"),
    ({"sampling": Poisson}, "sampling must be such as"),
    ({"sampling": 0.25}, "sampling must be such as"),
    ({"batch_size": 0}, "batch_size must be a whole number"),
    ({"batch_size": 2.0}, "batch_size must be a whole number"),
    ({"batch_size": True}, "batch_size must be a whole number"),
    ({"batch_size": 9}, "batch_size must be at most dataset_size"),
    ({"dataset_size": NAN}, "dataset_size must be a whole number"),
    ({"dataset_size": None}, "dataset_size must be a whole number"),
    ({"leak": None}, "leak must be a string"),
    ({"count_noise_multiplier": NAN}, "count_noise_multiplier must be"),
    ({"count_noise_multiplier": 0.5}, "count_noise_multiplier must be above"),
    ({"steps": 0}, "steps must be a whole number"),
    ({"steps": 1.5}, "steps must be a whole number"),
    ({"delta": 0.0}, "delta must be"),
    ({"delta": 1.0}, "delta must be"),
    ({"delta": NAN}, "delta must be"),
    ({"batch_size": 4}, r"sampling_prob \* dataset_size = 2, rounded, got 4"),
    ({"sampling": Poisson(0.5)}, r"sampling_prob \* dataset_size = 4, rounded, got 2"),
    ({"sampling": FixedSize(3)}, r"batch_size must be that of the sampling \(3\), got 2"),
    ({"sampling": FullBatch()}, r"batch_size must be dataset_size \(8\) for full_batch, got 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_parts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Mechanism(**{**GOOD, **change})
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Mechanism(**GOOD), **change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": np.float64(1.0)},
        {"noise_multiplier": 1},
        {"sampling": FixedSize(2)},
        {"sampling": FullBatch(), "batch_size": 8},
        {"batch_size": np.int64(2)},
        {"steps": 3, "delta": 1e-5},
        # 2.4 records expected: no whole number says so exactly
        {"sampling": Poisson(0.3)},
        {"sampling": Poisson(0.01), "batch_size": 1},
        {"count_noise_multiplier": 2.0},
    ],
)
def test_good_parts_are_taken(change):
    assert Mechanism(**{**GOOD, **change}).event is not None


def test_a_schedule_is_taken_but_not_with_a_count():
    schedule = jaxdp.schedules.from_multipliers([1.0, 2.0])
    Mechanism(**{**GOOD, "noise_multiplier": schedule})
    with pytest.raises(ValueError, match="one number with count_noise_multiplier"):
        Mechanism(**{**GOOD, "noise_multiplier": schedule, "count_noise_multiplier": 2.0})
