"""A budget admits the first steps of one plan, as many as the exact accountant has room for."""

import copy
import math

import numpy as np
import pytest
from scipy.special import ndtr

import jaxdp
from jaxdp import accounting as acc
from jaxdp.schedules import NoiseSchedule
from tests.refusing import refused

STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.05)
OTHER = acc.PoissonSampled(acc.Gaussian(2.0), 0.05)
REPLACE = acc.Relation.REPLACE_ONE
N = 1_000


GIVEN = {"l2_clip_norm": 1.0, "batch_size": 50, "dataset_size": N}


def mechanism(noise=1.0, **options):
    return jaxdp.dp_sgd(noise_multiplier=noise, **{**GIVEN, **options})


# Plans: (plan, how many of each event are within (3, 1e-5)).
SCHEDULE = mechanism(NoiseSchedule([(2.0, 40), (1.0, 400)]))
PLANS = {
    "event": (acc.Repeated(STEP, 200), {STEP: 68}),
    "mechanism": (mechanism(), {STEP: 68}),
    "all": ([acc.Repeated(STEP, 20), OTHER, STEP], {STEP: 21, OTHER: 1}),
    "one": (acc.Gaussian(0.01), {}),
    "schedule": (SCHEDULE, {OTHER: 40, STEP: 63}),
    "in order": ([mechanism().total(30), mechanism(2.0)], {STEP: 30, OTHER: 366}),
    "rounds": (acc.Repeated(acc.Composed([STEP, STEP]), 99), {STEP: 68}),
    "nested": (acc.Composed([acc.Repeated(acc.Repeated(STEP, 5), 50)]), {STEP: 68}),
}


@pytest.mark.parametrize(("plan", "admitted"), PLANS.values(), ids=PLANS)
def test_as_many_of_the_first_steps_of_a_plan_are_admitted_as_the_exact_accountant_proves(
    plan, admitted
):
    budget = acc.Budget(3.0, 1e-5, plan=plan)
    assert budget.admitted == admitted

    def cost(more=0):
        """Of what is admitted, and more of what the plan has last."""
        last = [acc.Repeated(list(admitted)[-1], more)] if more else []
        held = [acc.Repeated(event, n) for event, n in admitted.items()]
        return acc.epsilon(acc.Composed([*held, *last]), 1e-5).upper

    assert cost() <= 3.0
    if admitted and sum(admitted.values()) > 22:
        assert cost(more=1) > 3.0


def test_a_calibrated_mechanism_has_all_its_steps_and_its_models_and_relation():
    made = jaxdp.dp_sgd(epsilon=2.0, delta=1e-5, steps=30, relation="replace_one", **GIVEN)
    budget = acc.Budget(2.0, 1e-5, plan=made)
    assert (budget.admitted, budget.relation) == ({made.event: 30}, REPLACE)
    for plan in ([made], [[made], STEP], iter([iter([made])])):
        assert acc.Budget(2.0, 1e-5, plan=plan).admitted == {made.event: 30}
    # A relation that a part's proof does not cover.
    fixed = mechanism(sampling="fixed_size")
    refused("add_or_remove_one", acc.Budget, 3.0, 1e-5, fixed, acc.Relation.ADD_OR_REMOVE_ONE)
    for kind in (acc.Budget, acc.RenyiFilter):
        for plan in (fixed, made, [STEP, [made]]):
            assert kind(3.0, 1e-5, plan=plan).relation is REPLACE
    # Where they differ, the order decides nothing.
    for plan in (
        [made, mechanism(2.0)],
        [made.total(3), mechanism(2.0).total(3), mechanism(), made],
    ):
        for order in (plan, plan[::-1]):
            refused("relation must be given where .*unlike", acc.RenyiFilter, 3.0, 1e-5, plan=order)
    assert acc.Budget(3.0, 1e-5, [made, mechanism(2.0)], REPLACE).relation is REPLACE


def test_what_is_admitted_is_charged_in_any_order_until_it_is_used_and_nothing_else():
    budget = acc.Budget(3.0, 1e-5, plan=[acc.Repeated(OTHER, 40), acc.Repeated(STEP, 400)])
    start = copy.copy(budget)
    budget.charge(acc.Repeated(STEP, 60))
    assert (budget.fits(STEP, 20), budget.fits(OTHER, 20), start.fits(STEP, 70)) == (3, 20, 63)
    refused("4 of 9 fit the plan|0 of 1 fit", budget.charge, acc.Repeated(STEP, 4))
    budget.charge(acc.Composed([acc.Repeated(STEP, 3), OTHER]))
    for event in (STEP, acc.Gaussian(50.0), acc.PoissonSampled(acc.Gaussian(3.0), 0.05)):
        words = "0 of 1 fit the plan .* of which 103 of 440 .* goes through acc.RenyiFilter"
        refused(words, budget.charge, event, error=acc.BudgetExceededError)
    assert budget.fits(OTHER, 100) == 39
    budget.give_back(STEP)
    budget.charge(STEP)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("plan must be a mechanism", (3.0, 1e-5, 20)),
        ("plan must be a mechanism", (3.0, 1e-5, "dp_sgd")),
        ("plan must hold a step", (3.0, 1e-5, [])),
        ("plan must hold a step", (3.0, 1e-5, acc.Repeated(STEP, 0))),
        (r"plan\[0\] must name its number", (3.0, 1e-5, [mechanism(), mechanism(2.0)])),
        ("epsilon must be", (0.0, 1e-5, STEP)),
        ("delta must be", (1.0, 0.0, STEP)),
        ("relation='replace'", (3.0, 1e-5, STEP, "replace")),
        ("ShuffledEpoch under add_or_remove", (3.0, 1e-5, acc.ShuffledEpoch(acc.Gaussian(1.0), 5))),
    ],
)
def test_what_is_no_plan_is_refused(words, given):
    refused(words, acc.Budget, *given)


# How many steps fit: a filter of the orders that suit all runs, one of the plan, the plan itself.
@pytest.mark.parametrize(
    ("epsilon", "orders", "planned", "exact"),
    [(2.0, 0, 6, 20), (3.0, 19, 41, 68), (4.0, 44, 97, 136), (8.0, 360, 463, 561)],
)
def test_a_filter_of_the_order_that_suits_its_plan_has_room_for_twice_as_many_steps(
    epsilon, orders, planned, exact
):
    usual, filter_ = acc.RenyiFilter(epsilon, 1e-5), acc.RenyiFilter(epsilon, 1e-5, plan=STEP)
    plan = acc.Budget(epsilon, 1e-5, plan=acc.Repeated(STEP, 1_000))
    found = [each.fits(STEP, 1_000) for each in (usual, filter_, plan)]
    assert found == [orders, planned, exact]
    assert filter_.fits(STEP, planned - 1) == planned - 1
    filter_.charge(acc.Repeated(STEP, planned))
    assert acc.epsilon(acc.Repeated(STEP, planned), 1e-5, accountant="rdp").upper <= epsilon
    refused("0 of 1 fit what is left of", filter_.charge, STEP, error=acc.BudgetExceededError)
    assert acc.RenyiFilter(epsilon, 1e-5, plan=mechanism()).orders == filter_.orders
    refused("give one of orders and plan", acc.RenyiFilter, 1.0, 1e-5, orders=(2.0,), plan=STEP)


def test_the_exact_accountant_is_no_filter_where_the_next_event_is_chosen_after_a_look():
    """docs/proofs/accounting.md, "Adaptive runs": one of three events, by what the first one showed."""
    first, epsilon, relation = acc.Gaussian(2.0), 1.0, acc.Relation.REPLACE_SPECIAL
    a, d = 0.552703, 0.0329957
    others = {  # the event, and its delta at a negative epsilon too
        acc.Gaussian(2.0): lambda e: ndtr(0.25 - 2 * e) - np.exp(e) * ndtr(-0.25 - 2 * e),
        acc.RandomizedResponse(2 / (1 + math.exp(a)), 2): lambda e: sum(
            np.maximum(0, 1 - np.exp(e - loss)) / (1 + math.exp(-loss)) for loss in (a, -a)
        ),
        acc.EpsilonDelta(0.0, d, relation=relation): lambda e: (
            d + (1 - d) * np.maximum(0, 1 - np.exp(e))
        ),
    }
    x = np.linspace(-10, 10, 20_001)  # what the first one shows, over its noise
    weights = np.exp(-((x - 0.5) ** 2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    left = epsilon - (x / 2 - 1 / 8)
    deltas = np.array([profile(left) for profile in others.values()])
    for event, alone in zip(others, deltas @ weights, strict=True):
        both = acc.Composed([first, event])
        assert acc.delta(both, epsilon, relation).upper == pytest.approx(0.0396, rel=2e-3)
        assert alone == pytest.approx(0.0396, rel=2e-3)
    assert deltas.max(0) @ weights == pytest.approx(1.66 * 0.0396, rel=3e-3)
    # A budget of one plan admits none of the others.
    budget = acc.Budget(epsilon, 0.03965, acc.Repeated(first, 2), relation)
    budget.charge(first)
    assert [budget.fits(event) for event in others] == [1, 0, 0]
