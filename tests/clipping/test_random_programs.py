"""A few of the random programs that `python -m benchmarks.random_programs` judges by thousands."""

import jax
import pytest

from jaxdp.clipping.ghost.parts import Part
from tests.clipping.judged import judged


@pytest.mark.parametrize("seed", [3043, 3766])
def test_random_programs_are_clipped_as_by_float64(seed):
    """Layers, repeats and a cell over time, joined gates, a tied table; partly in bfloat16."""
    text, wrong, counts = judged(seed)
    assert not wrong, text
    assert counts["ghost"] > 0


def test_a_wrong_share_of_joined_weights_is_noticed(monkeypatch):
    def first(part, whole):
        return jax.lax.slice_in_dim(whole, 0, part.size, axis=part.axis + 1)

    monkeypatch.setattr(Part, "_share", first)
    text, wrong, _ = judged(5001)
    assert "joined" in text
    assert any("the norm of record" in words for words in wrong)
