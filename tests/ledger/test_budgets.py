"""A ledger keeps to its budget: as many steps as fit are reserved, handed out, and told."""

import contextlib
import itertools
import shutil

import jax.numpy as jnp
import optax
import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp.schedules import NoiseSchedule
from tests.ledger.small import X, ended, issuer, lines, reserved
from tests.mechanisms import sgd_of
from tests.refusing import refused

N = len(X)
MADE = sgd_of(1.0, 1.0, 3, N)  # of which 68 steps fit (3, 1e-5)
STEP = MADE.event


def plan():
    return acc.Budget(3.0, 1e-5, plan=MADE)


def a_filter():
    return acc.RenyiFilter(3.0, 1e-5, plan=MADE)  # 41 steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def a_trainer(ledger, mechanism=MADE, **options):
    loss = lambda w, x: jnp.vdot(w, x)  # noqa: E731
    return jaxdp.Trainer(loss, mechanism, optax.sgd(0.1), X, ledger=ledger, **options)


def taken(train, *steps, most=10**6):
    """How many batches a loop is handed, and what it is refused with."""
    found: list[object] = []
    try:
        found.extend(itertools.islice(train.batches(*steps), most))
    except acc.BudgetExceededError as error:
        return len(found), str(error)
    return len(found), ""


@pytest.mark.parametrize(("budget", "fit"), [(plan, 68), (a_filter, 41)])
def test_a_trainer_takes_as_many_steps_as_fit_and_says_how_many(path, budget, fit):
    for reserve in (None, 1, 7):
        train = a_trainer(ledger := Ledger(budget=budget()), reserve=reserve)
        rule = ledger.left().rule
        assert ledger.left(STEP)[:3] == (rule, fit, 0.0)
        assert taken(train, most=5) == (5, "")
        assert (ledger.left(STEP).steps, len(train.batches())) == (fit - 5, fit - 5)
        count, said = taken(train, 200)
        assert count == fit - 5
        assert f"{fit} of 205 steps fit the budget, and no further one: event=" in said
        assert (ledger.steps, ledger.left(STEP).steps) == (fit, 0)
        assert ledger.epsilon(1e-5).upper <= 3.0
        with pytest.warns(UserWarning, match="budget admits no further one"):
            assert taken(train) == (0, "")
    # What a trainer reserved and did not hand out is left, to it alone until it is closed.
    ledger = Ledger(path, budget=budget())
    first, second = (a_trainer(ledger, reserve=fit - 2) for _ in range(2))
    assert taken(first, 100, most=3)[0] == 3
    assert ledger.left(STEP).steps == fit - 3
    left = ledger._budget.fits(STEP, fit)
    assert left == 2
    sampler = MADE.sampler(N, ledger=ledger, reserve=fit)
    for _ in range(2):
        sampler.draw()
    words = "2 steps fit the budget, and no further one: event=PoissonSampled.*0 of 1 fit"
    refused(words, sampler.draw, error=acc.BudgetExceededError)
    first._sampler.close()
    for _ in range(fit - 5):
        sampler.draw()
    refused(words.replace("2", f"{fit - 3}"), sampler.draw, error=acc.BudgetExceededError)
    assert ledger.left(STEP).steps == 0
    # The file counts alike: what was ended was given back.
    ledger.close()
    again = Ledger(path, budget=budget())
    assert (again.steps, again.left(STEP).steps, again.left(STEP).rule) == (fit, 0, rule)
    del second


def test_of_a_reservation_that_shrank_a_crash_costs_no_more_than_the_budget(path):
    made = issuer(MADE, ledger=Ledger(path, budget=plan()), reserve=50)
    for _ in range(51):
        made.take()
    assert lines(path) == [(0, 50), (50, 68)]
    made.ledger._rows.close()  # the process dies
    again = Ledger(path, budget=plan())
    assert (again.steps, again.left()[:2]) == (68, ("plan", 0))
    refused("0 of 1 fit the plan", again.charge, STEP, error=acc.BudgetExceededError)
    refused("0 steps fit the budget", issuer(MADE, ledger=again, stream="b").take)
    assert reserved(again).steps == 68


def test_blocks_schedules_and_whole_numbers_are_admitted_as_they_are_planned():
    # Blocks of three steps, whole.
    block = acc.CorrelatedNoise(acc.Gaussian(4.0), 3)

    class Blocks:
        def stretch(self, step):
            return block, {"gradient": 4.0}, 10**18

    budget = acc.Budget(3.0, 1e-5, plan=Blocks(), relation=acc.Relation.REPLACE_SPECIAL)
    assert budget.admitted == {block: 8}
    made = issuer(Blocks(), ledger=(ledger := Ledger(budget=budget)), reserve=5)
    for step in range(24):
        assert made.take().step == step
    refused("24 steps fit", made.take, error=acc.BudgetExceededError)
    assert ledger.left()[:2] == ("plan", 0)
    # A schedule, of which the last level fits in part; all of a number that releases decide.
    schedule = sgd_of(NoiseSchedule([(2.0, 40), (1.0, 400)]), 1.0, 3, N)
    made = issuer(schedule, ledger=Ledger(budget=acc.Budget(3.0, 1e-5, plan=schedule)), reserve=64)
    assert made.room() == 103
    refused("all 104 steps must fit .* but 103 do", made.reserve, 104, whole=True)
    made.reserve(103, whole=True)
    assert (made.room(), made.ledger.steps) == (103, 103)
    with contextlib.suppress(acc.BudgetExceededError):
        while True:
            made.take()
    assert made.next == 103
    # Another mechanism, or noise that was chosen on the way.
    other = issuer(ledger=Ledger(budget=plan()))
    refused("fit the plan .* goes through acc.RenyiFilter", other.take)
    train = a_trainer(Ledger(budget=plan()), sgd_of(2.0, 1.0, 3, N))
    count, said = taken(train, 5)
    assert count == 0
    assert "0 of 5 steps fit the budget" in said


def test_a_plan_is_fixed_before_the_first_charge_and_opened_with_the_same(path):
    ledger = Ledger(path, budget=plan())
    ledger.charge(STEP, 5, stream="a")
    ledger.charge(acc.Repeated(STEP, 2))
    refused("3 of 1000 fit|61 of 1000 fit", ledger.charge, STEP, 1_000)
    # Several events in one release, as a recipe's: on disk only what the budget takes in.
    pair = acc.Repeated(acc.Composed([STEP, acc.Repeated(STEP, 2)]), 3)
    refused("6 of 7 fit", ledger.charge, pair, 7)
    ledger.charge(pair, 1, stream="b")
    ended(ledger, "b", 0)
    ledger.close()
    assert Ledger(path, budget=plan()).left()[1] == 61
    reader = Ledger(path)
    assert reader.steps == 6
    refused("budget must be given to have something left", reader.left)
    assert Ledger.from_json(reader.to_json()).steps == 6
    # Whoever forgets the budget reads, and charges nothing.
    refused("budget must be given again .*Budget", reader.charge, STEP)
    reader.close()
    train = a_trainer(path, another=True)
    assert "budget must be given again" in taken(train, 5)[1]
    train.close()
    words = "budget must be the one that this ledger was begun with, Budget"
    for other in (
        acc.Budget(3.0, 1e-5, plan=[MADE.total(5), sgd_of(2.0, 1.0, 3, N)]),
        acc.Budget(4.0, 1e-5, plan=MADE),
        acc.Budget(3.0, 1e-6, plan=MADE),
        acc.RenyiFilter(3.0, 1e-5),
    ):
        refused(words, Ledger, path, other, error=acc.BudgetExceededError)
    # One that was charged without it; a filter may be put on it, its orders once.
    bare, usual = path.with_name("bare"), acc.RenyiFilter
    for budget in (None, usual(3.0, 1e-5)):
        ledger = Ledger(bare, budget=budget)
        ledger.charge(STEP, 2)
        assert ("the budget was put on" in str(ledger.unverified())) == (budget is not None)
        ledger.close()
        refused("was begun with", Ledger, bare, plan(), error=acc.BudgetExceededError)
    assert Ledger(bare, budget=usual(3.0, 1e-5)).left(STEP).steps == 15
    refused("was begun with, RenyiFilter", Ledger, bare, a_filter())
    # A copy is another ledger, and has what was fixed.
    shutil.copy(path, path.with_name("copy"))
    assert Ledger(path.with_name("copy"), budget=plan()).left()[1] == 61
    ledger = Ledger(budget=a_filter())
    assert ledger.left()[:2] == ("filter", None)
    ledger.charge(STEP, 10, stream="a")
    before = ledger.left(STEP)
    ended(ledger, "a", 4)
    after = ledger.left(STEP)
    assert (before.steps, after.steps, after.epsilon, after.delta) == (31, 37, 3.0, 1e-5)
    assert before.spent > after.spent > 0
    refused("event must be an accounting event", ledger.left, MADE)
