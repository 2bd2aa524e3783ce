"""The audit of low-order bits: ordinary noise is refuted, the grid is not."""

import numpy as np
import pytest

from benchmarks import grid_bits


def test_representability_refutes_ordinary_noise():
    found = grid_bits.audited("gaussian", 2_000)
    assert found["refuted"]["representable"]
    assert found["empirical"]["representable"] > 3 * found["proven"]
    assert min(found["decided_by_representability"]) > 0.6


@pytest.mark.parametrize("kind", ["grid", "correlated on a grid"])
def test_nothing_of_the_bits_refutes_the_grid(kind):
    found = grid_bits.audited(kind, 2_000)
    assert set(found["refuted"]) == {"representable", "low bits", "last digits"}
    assert not any(found["refuted"].values())
    assert max(found["empirical"].values()) <= found["proven"]
    # Every release is an integer of the grid, and every such integer is one of both worlds.
    assert found["decided_by_representability"] == [0.0, 0.0]


def test_what_is_learned_tells_labels_apart_that_differ():
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, top, (4_000, 1)).astype(np.float32) for top in (6, 12))
    score = grid_bits.learned(one, other, lambda released: released.astype(int))
    assert score(other[:50]).min() < -3 < 0.5 < score(one[:50]).min()
    assert score(np.full((2, 1), 99.0)).tolist() == [0.0, 0.0]
