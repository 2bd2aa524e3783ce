"""An issuer reserves each step before it hands it out, once, and takes out what nobody was handed."""

import contextlib

import optax
import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp.schedules import NoiseSchedule
from tests.ledger.small import OF_FIFTY, N, X, ended, issuer, lines, loss_fn, reserved
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import refused


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_step_is_reserved_before_its_ticket_and_the_rest_counts_for_all_others_alone(path):
    made = issuer(ledger=Ledger(path), reserve=10)
    for n in range(13):
        assert made.take(n).step == n == made.next - 1
        assert made.ledger.steps == n + 1
        assert made.ledger.event == acc.Composed((acc.Repeated(OF_FIFTY.event, n + 1),))
        # On disk, in another ledger of this process and in its text all that is reserved.
        for other in (Ledger(path), reserved(made.ledger)):
            assert other.steps == 10 * (1 + n // 10)
    assert lines(path) == [(0, 10), (10, 20)]
    made.close()
    assert lines(path)[2:] == [("ended", 13)]
    for found in (made.ledger, Ledger(path), reserved(made.ledger)):
        assert found.steps == 13
    # Closed once more it writes nothing; whoever draws afterwards reserves anew.
    made.close()
    assert made.take().step == 13
    assert lines(path)[3:] == [(13, 23)]
    made.ledger.charge(OF_FIFTY.event, 30, stream="b")  # whose steps 14 to 22 are its own
    assert made.ledger.steps == 14 + 30
    # No step from ``until`` on is reserved; beyond it what is asked for.
    made = issuer(reserve=10)
    for n, held in enumerate((4, 4, 4, 4, 5)):
        assert made.take(until=4).step == n
        assert reserved(made.ledger).steps == held


def test_nothing_is_handed_out_but_the_next_step_and_of_a_closed_ledger_nothing(path):
    made = issuer(ledger=Ledger(path), reserve=3)
    for step, found in ((1, None), (0, 0), (0, None), (2, None), (1, 1)):
        ticket = made.take(step)
        assert (ticket if ticket is None else ticket.step) == found
    assert lines(path) == [(0, 3)]
    made.ledger.close()
    refused("ledger must be open", made.take)  # also a step that it had reserved
    made.close()  # nothing to say: the reservation stays
    assert lines(path) == [(0, 3)]
    assert Ledger(path).steps == 3
    trainer = jaxdp.Trainer(loss_fn, mechanism(), optax.sgd(0.1), X, ledger=path.with_name("b"))
    next(trainer.batches(3))
    trainer.ledger.close()
    trainer.close()


def test_every_reservation_is_a_whole_line_of_its_own_whatever_its_stream_holds(path):
    """A line of before may never have reached the disk, or the stream have a gap."""
    first = issuer(ledger=Ledger(path), reserve=10, resumed=True)
    first.take()
    first.close()  # of a run, whose later starts do steps again
    first.ledger.close()
    assert lines(path) == [(0, 10)]
    again = issuer(ledger=Ledger(path), step=2, reserve=4, resumed=True)
    tickets = [again.take() for _ in range(9)]
    assert lines(path)[1:] == [(2, 6), (6, 10), (10, 14)]
    assert [ticket.step for ticket in tickets] == [*range(2, 11)]
    assert Ledger(path).steps == 14
    gap = Ledger()
    for at in (2, 8):
        gap.charge(OF_FIFTY.event, 2, stream="a", first_step=at, source="sampler")
    across = issuer(ledger=gap, step=4, reserve=5, resumed=True)
    for _ in range(5):
        across.take()
        assert reserved(gap).steps == 2 + 5 + 1


def test_nobody_charges_a_stream_by_hand_whose_steps_an_issuer_hands_out():
    """It would count as what the issuer has reserved, and be left out with it."""
    made = issuer(reserve=10)
    made.take()
    for options in ({"first_step": 50}, {"first_step": 50, "again": True}, {"again": True}):
        words = "stream must be one that no sampler or trainer charges, got 'a'"
        refused(words, made.ledger.charge, OF_FIFTY.event, stream="a", **options)
    refused(words, issuer, ledger=made.ledger)  # nor does another issuer
    assert reserved(made.ledger).steps == 10
    made = issuer(reserve=10, stream="None")  # a name like another; charges by hand have none
    made.ledger.charge(OF_FIFTY.event, 10)
    made.take()
    assert made.ledger.steps == 11


def mechanism(**options):
    return sgd_of(1.0, 1.0, 20, N, **options)


def test_a_schedule_and_a_strategy_reserve_to_their_end_a_line_for_each_event(path):
    schedule = sgd_of(NoiseSchedule([(2.0, 4), (1.0, 3), (0.5, 1)]), 1.0, 20, N)
    in_order = mf_of(1.0, 1.0, 20, N, "fixed_order", steps=6, strategy="identity")
    for name, made, steps, found in (
        ("each", schedule, 8, [(n, n + 1) for n in range(8)]),
        ("three", schedule, 8, [(0, 3), (3, 4), (4, 6), (6, 7), (7, 8)]),
        ("all", schedule, 8, [(0, 4), (4, 7), (7, 8)]),
        ("strategy", in_order, 6, [(0, 6)]),
    ):
        path = path.with_name(name)
        reserve = {"each": 1, "three": 3}.get(name, 64)
        sampler = made.sampler(N, ledger=Ledger(path), reserve=reserve)
        for step in range(steps):
            assert sampler.draw().step == step
            (held,) = [e for e in Ledger(path).entries if e.first_step <= step < e.end]
            assert [(held.event, step, 1)] == made.events(step, 1), name
        assert lines(path) == found, name
        refused("must cover the 9 steps|must be within the 6", sampler.draw)
        sampler.close()
        assert lines(path) == [*found, ("ended", steps)], name


def test_what_releases_decide_about_is_not_taken_out(path):
    """Also of steps that the stream held before, none of which the line adds."""
    begun = issuer(ledger=Ledger(path), reserve=20)
    begun.take()
    begun.ledger.close()
    made = issuer(ledger=Ledger(path), step=1)
    made.reserve(20, whole=True)
    for _ in range(3):
        made.take()
        for found in (made.ledger, Ledger(path), reserved(made.ledger)):
            assert found.steps == 20  # counted whole, live too
    made.close()
    made.ledger.close()
    later = issuer(ledger=Ledger(path), step=4, reserve=4)  # that nobody told
    later.take()
    later.close()
    assert lines(path) == [(0, 20), (1, 20), (4, 8)]
    ended(later.ledger, "a", 5)
    assert later.ledger.steps == Ledger(path).steps == 20


def budgeted(path=None, **given):
    """A ledger of a budget."""
    return Ledger(path, budget=acc.RenyiFilter(**given))


def test_a_budget_admits_as_many_steps_however_many_are_reserved_and_pays_once(path):
    budget, most = {"epsilon": 12.0, "delta": 1e-5}, []
    for reserve in (1, 7, 10_000):
        made = issuer(ledger=budgeted(path.with_name(f"{reserve}"), **budget), reserve=reserve)
        with contextlib.suppress(acc.BudgetExceededError):
            while True:
                made.take()
        most.append(made.next)
        held = Ledger(path.with_name(f"{reserve}"), budget=acc.RenyiFilter(**budget))
        assert held.steps == made.ledger.steps == made.next
    assert 0 < most[0] < 10_000
    assert most == most[:1] * 3
    # What is admitted of a schedule is reserved by one line, and what of it is not used left out.
    schedule = sgd_of(NoiseSchedule([(2.0, 4), (0.01, 3)]), 1.0, 20, N)
    made = issuer(schedule, ledger=budgeted(path.with_name("levels"), **budget), reserve=64)
    for steps in range(1, 5):
        made.take()
        assert (lines(path.with_name("levels")), made.ledger.steps) == ([(0, 4)], steps)
    refused("", made.take, error=acc.BudgetExceededError)
    # All of a number that releases decide, or nothing.
    made = issuer(ledger=budgeted(path, **budget))
    refused("", made.reserve, most[0] + 1, whole=True, error=acc.BudgetExceededError)
    assert (made.ledger.steps, made.next) == (0, 0)
    # A step that is held costs nothing; what was ended is paid back, also when read again.
    made = issuer(ledger=budgeted(path.with_name("paid"), **budget), reserve=3)
    held = acc.RenyiFilter(**budget)
    held.charge(acc.Repeated(OF_FIFTY.event, 3))
    for _ in range(2):
        made.take()
    made.reserve(3)
    paid = made.ledger._budget
    assert paid.spent() == held.spent()
    made.close()
    made.take()
    held.give_back(acc.Repeated(OF_FIFTY.event, 1))
    held.charge(acc.Repeated(OF_FIFTY.event, 3))
    again = acc.RenyiFilter(**budget)
    Ledger(path.with_name("paid"), budget=again)
    assert paid.spent() == held.spent() == again.spent()


def test_in_several_processes_all_that_is_reserved_counts(monkeypatch):
    """Another one may have handed out more of it."""
    made = issuer(reserve=8)
    made.take()
    assert made.ledger.steps == 1
    monkeypatch.setattr(made.ledger._rows, "several", True)
    assert made.ledger.steps == 8
