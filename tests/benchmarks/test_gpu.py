"""The figures of an accelerator, computed on this machine."""

import pytest

from benchmarks import gpu


@pytest.mark.slow  # six networks are compiled
def test_no_record_adds_more_than_it_may_and_the_noise_is_the_same_everywhere():
    found = gpu.bound()
    assert found["held"]
    assert min(found["norm over l2"].values()) > 0.9
    drawn = gpu.noise()
    assert abs(drawn["deviation"] - 1) < 0.01
    assert drawn["largest difference, float32 steps"] <= 4
