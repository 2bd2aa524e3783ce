"""Samplings attacked in two worlds, by draws of the sampler itself: never above what is proven."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from benchmarks import sampling_audit
from benchmarks.sampling_audit import Case, IgnoresCap, SameBins, audited
from jaxdp import Secret
from jaxdp import accounting as acc
from jaxdp.sampling import FixedSize, Poisson, RandomAllocation, Shuffled, TruncatedPoisson

ZEROED, OTHER = acc.Relation.REPLACE_SPECIAL, acc.Relation.REPLACE_ONE
# Thresholds were fixed beforehand: no run is set aside.
SMALL = {"records": 20, "rows": 20, "threshold": 1.0}
CASES = {
    "poisson": Case(Poisson(0.2), 0.5, 5, 0.01, 150, **SMALL),
    "allocation": Case(RandomAllocation(5), 0.4, 5, 0.01, 150, **SMALL),
    "shuffle": Case(Shuffled(4), 0.4, 5, 0.01, 150, ZEROED, -1, **SMALL),
    "truncated_poisson": Case(TruncatedPoisson(0.2, 6), 0.5, 5, 0.01, 150, ZEROED, **SMALL),
    "fixed_size": Case(FixedSize(4), 1.0, 5, 0.01, 150, OTHER, -1, **SMALL),
}
QUICK = ("allocation",)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def proven(case):
    return case.mechanism().epsilon(case.steps, case.delta, relation=case.relation).upper


@pytest.mark.parametrize("name", NAMES)
def test_no_audit_exceeds_what_is_proven(name):
    """Nor does it find nothing, which no guarantee could fail."""
    assert 0.3 < audited(CASES[name]) <= proven(CASES[name])


@pytest.mark.slow
def test_a_shuffled_run_charged_as_poisson_is_caught():
    case = Case(Shuffled(2), 0.7, 40, 0.05, 200, OTHER, -1, records=40, rows=2, threshold=3.0)
    claimed = acc.epsilon(case.poisson(), case.delta, case.relation).upper
    assert claimed < audited(case) <= proven(case)


NO_CAP = Case(IgnoresCap(0.5, 1), 2.0, 20, 0.01, 80, ZEROED, records=16, rows=16, threshold=1.0)
SAME_BINS = Case(SameBins(20), 0.8, 160, 0.1, 80, records=20, rows=20, threshold=1.5)
FAULTS = [
    (NO_CAP, TruncatedPoisson(0.5, 1)),
    pytest.param(SAME_BINS, RandomAllocation(20), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("faulty", "right"), FAULTS, ids=["no cap", "same bins in every epoch"])
def test_a_planted_fault_is_caught_and_its_absence_not_accused(faulty, right):
    honest = dataclasses.replace(faulty, sampling=right, runs=30)
    charged = proven(honest)
    assert faulty.mechanism().total(faulty.steps) == honest.mechanism().total(faulty.steps)
    assert audited(honest) <= charged < audited(faulty)


@pytest.mark.parametrize("name", ["shuffle", "truncated_poisson"])
def test_a_trainer_releases_what_is_audited(name):
    """One run, by the trainer and by the audit's own blocks, from one secret."""
    case = dataclasses.replace(CASES[name], runs=1)
    data, seed = jnp.asarray(case.data(True)), Secret.from_seed(1)
    given = (sampling_audit.loss_fn, case.mechanism(), optax.sgd(1.0), data)
    trainer = jaxdp.Trainer(*given, secret=seed)
    state, moves = trainer.init(jnp.zeros(2)), []
    for batch in trainer.batches(case.steps):
        before = np.asarray(state.params)
        state, _ = trainer.step(state, batch)
        moves.append(before - np.asarray(state.params))
    sums = np.stack(moves) @ sampling_audit.DIRECTION * case.mechanism().batch_size
    np.testing.assert_allclose(sampling_audit.released(case, True)[0], sums, atol=1e-5)
