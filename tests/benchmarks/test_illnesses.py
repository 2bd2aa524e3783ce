"""Of the planted illnesses some that are quick: the ill are named, the healthy are not."""

import jax
import pytest

import jaxdp
from benchmarks.illnesses import known

QUICK = {
    "table-logistic": "",
    "regression": "",
    "a batch of one": "zero",
    "softmax twice": "softmax",
}
CASES = {case.name: case for case in known.CASES}


@pytest.mark.parametrize(("name", "kind"), QUICK.items())
def test_a_mistake_is_named_and_a_healthy_program_is_left_alone(name, kind):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        parts = CASES[name].make()
        found = jaxdp.diagnose(
            parts.loss_fn, parts.params, parts.data, parts.mechanism, parts.optimizer,
            **parts.options,
        )  # fmt: skip
    assert [finding.kind for finding in found.findings[:1]] == [kind][: bool(kind)]
    assert bool(kind) == bool(CASES[name].illness)
