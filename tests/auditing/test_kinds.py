"""Grids, users and correlated noise in two worlds: never above the proven, and faults are found."""

import dataclasses

import numpy as np
import pytest

from benchmarks.kinds_audit import Grid, OfUsers, UsersAsRecords, found
from benchmarks.kinds_correlated import Correlated
from jaxdp.accounting import Relation
from jaxdp.sampling import CyclicPoisson, FixedOrder, Poisson

SMALL = {"records": 20, "rows": 20, "threshold": 1.0}
ORDERED = {**SMALL, "relation": Relation.REPLACE_SPECIAL}
CYCLIC, PASSES = CyclicPoisson(0.4, 2, 6), FixedOrder(10, 6)
RIGHT = {
    "grid": Grid(Poisson(0.2), 0.5, 5, 0.01, 150, **SMALL),
    "users": OfUsers(Poisson(0.2), 0.5, 5, 0.01, 150, **SMALL),
    "cyclic": Correlated(CYCLIC, 0.6, 6, 0.01, 150, **SMALL),
    "fixed order, on a grid": Correlated(PASSES, 0.6, 6, 0.01, 150, **ORDERED, law="grid"),
}
FAULTS = {
    "grid": Grid(Poisson(0.5), 2.0, 8, 0.01, 150, **{**SMALL, "threshold": None}, share=0.25),
    "users": UsersAsRecords(
        Poisson(0.5), 2.0, 8, 0.01, 150, **{**SMALL, "records": 30, "rows": 30, "threshold": None}
    ),
    "cyclic": Correlated(CYCLIC, 1.0, 6, 0.01, 150, **{**SMALL, "threshold": None}, share=0.25),
    "fixed order": Correlated(
        PASSES, 1.0, 6, 0.01, 150, **{**ORDERED, "threshold": None}, share=0.3
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_no_audit_exceeds_what_is_proven(name):
    """Nor does it find nothing, which no guarantee could fail."""
    case = RIGHT[name]
    bound, p_value = found(case)
    assert 0.3 < bound <= case.mechanism().epsilon(case.steps, case.delta, case.relation).upper
    assert p_value > 1e-3


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    bound, p_value = found(FAULTS[name])
    assert p_value < 1e-6
    assert bound > 0.3


def test_a_grid_of_half_the_noise_has_half_of_it():
    """The fault is what it says: the noise alone, where nobody contributes."""
    case = dataclasses.replace(RIGHT["grid"], threshold=None)
    for share in (1.0, 0.5):
        sums = dataclasses.replace(case, share=share).sums(False)
        assert np.std(sums) == pytest.approx(share * case.noise, rel=0.1)
