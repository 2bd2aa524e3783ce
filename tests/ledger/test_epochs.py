"""An epoch is one event, charged whole at its first step: in ledgers, trainers and runs."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from jaxdp.ledger.entries import event_counts
from jaxdp.ledger.tickets import Ticket
from jaxdp.runs.directory import RunDirectory
from jaxdp.sampling import RandomAllocation, Shuffled
from jaxdp.schedules import NoiseSchedule
from tests.ledger.small import ended, issuer, reserved
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.runs.small import kept

EPOCH = acc.RandomAllocation(acc.Gaussian(2.0), 5)
OTHER = acc.RandomAllocation(acc.Gaussian(1.0), 5)
STEP = acc.PoissonSampled(acc.Gaussian(2.0), 0.1)
N = 50
DATA = {"x": jnp.ones((N, 3)), "y": jnp.ones(N)}


def counts(ledger):
    """Epochs (or steps) by event."""
    return event_counts(ledger.entries)


def test_an_epoch_counts_once_and_whole_of_every_stream_and_every_charge_by_hand(tmp_path):
    ledger = Ledger()
    for first, steps, epochs in ((8, 4, 2), (0, 1, 3), (2, 1, 3), (19, 2, 5), (21, 3, 5)):
        ledger.charge(EPOCH, steps, stream="s", first_step=first, note=str(first))
        assert counts(ledger) == {EPOCH: epochs}, first
    assert ledger.event == acc.Composed((acc.Repeated(EPOCH, epochs),))
    assert counts(Ledger.from_json(ledger.to_json())) == {EPOCH: epochs}
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for steps, stream in ((3, "a"), (3, "b"), (2, None), (3, None), (7, None), (4, None)):
        ledger.charge(EPOCH, steps, stream=stream)
    ledger.charge(STEP, 3)  # beside an epoch that was begun: a draw of its own
    ledger.charge(EPOCH)
    ledger.close()
    assert counts(ledger) == {EPOCH: 2 + 1 + 1 + 2 + 1 + 1, STEP: 3}
    assert counts(Ledger(tmp_path / "ledger.jsonl")) == counts(ledger)
    # Of what is reserved those that were begun count, and stay when it is ended.
    made = issuer(mechanism(), reserve=20)
    for epochs in (1, 1, 1, 1, 1, 2, 2):
        made.take()
        assert counts(made.ledger) == {EPOCH: epochs}, made.next
        assert counts(reserved(made.ledger)) == {EPOCH: 4}
    made.close()
    for _ in range(3):
        assert counts(made.ledger) == counts(reserved(made.ledger)) == {EPOCH: 2}
        made.take(until=10)


def test_a_first_step_within_an_epoch_costs_the_whole_and_has_a_draw_of_its_own():
    ledger, drawn = Ledger(), []
    for closes, epochs in ((True, 1), (False, 3)):
        sampler = mechanism().sampler(N, ledger=ledger, first_step=7, reserve=8)
        draws = [sampler.draw() for _ in range(2)]
        assert [draw.step for draw in draws] == [7, 8]
        drawn.append(np.concatenate([draw.indices[draw.mask] for draw in draws]))
        if closes:
            sampler.close()
        assert counts(reserved(ledger)) == {EPOCH: epochs}
    assert counts(ledger) == {EPOCH: 2}
    assert not np.array_equal(*drawn)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 9)), max_size=12))
def test_epochs_are_those_that_a_charged_step_is_in(moves):
    ledger, held = Ledger(), set()
    for back, first, steps in moves:
        if back:
            ended(ledger, "s", first)
            held = {step for step in held if step < first}
        else:
            ledger.charge(EPOCH, steps, stream="s", first_step=first, again=True)
            held |= set(range(first, first + steps))
    assert counts(ledger) == ({EPOCH: len({s // 5 for s in held})} if held else {})


class Budget(list):
    """Stands for a budget; holds what it was charged."""

    charge = list.append
    give_back = list.remove
    fits = staticmethod(lambda event, most: most)
    __repr__ = staticmethod(lambda: "Budget()")


def test_two_events_of_one_epoch_are_refused_and_a_budget_pays_for_epochs(tmp_path):
    for other in (OTHER, STEP, acc.PerUser(EPOCH, 2)):
        ledger, words = Ledger(), "event must be one for all steps of a block of 5 of stream"
        ledger.charge(EPOCH, 3, stream="s")
        refused(words, ledger.charge, other, stream="s", first_step=4)
        ledger.charge(other, stream="s", first_step=5)
        refused("two events need two draws", ledger.charge, EPOCH, stream="s", first_step=9)
        ledger.charge(STEP)  # by hand: another draw
        ledger.charge(EPOCH)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, budget=(budget := Budget()))
    for first in (0, 2, 4, 7, 13, 10):
        ledger.charge(EPOCH, 2, stream="s", first_step=first)
    ledger.close()
    assert budget == [acc.Repeated(EPOCH, 1)] * 3
    Ledger(path, budget=(again := Budget()))
    assert again == budget


def mechanism(sampling="allocation"):
    return sgd_of(2.0, 1.0, 10, N, sampling)


def loss_fn(w, example):
    return (example["x"] @ w - example["y"]) ** 2


def trainer(sampling="allocation", **options):
    return jaxdp.Trainer(loss_fn, mechanism(sampling), optax.sgd(0.1), DATA, **options)


def trained(one, steps, leave_after=None):
    state = one.init(jnp.zeros(3))
    drawn = []
    for batch in itertools.islice(one.batches(steps), leave_after):
        drawn.append(batch.draw.indices[batch.draw.mask])
        state, _ = one.step(state, batch)
    return drawn


@pytest.mark.parametrize(
    ("sampling", "reserve"),
    [("allocation", 1), ("allocation", 4), ("allocation", 16), ("shuffle", 4)],
)
def test_a_loop_that_is_left_goes_on_with_its_epoch(sampling, reserve):
    one = trainer(sampling, reserve=reserve)
    first = trained(one, 12, leave_after=3)
    (event,) = counts(one.ledger)
    assert counts(one.ledger) == {event: 1}
    drawn = first + trained(one, 2)
    assert counts(one.ledger) == {event: 1}
    assert sorted(np.concatenate(drawn).tolist()) == list(range(N))
    trained(one, 1)
    assert counts(one.ledger) == {event: 2}


def test_noise_must_stay_the_same_within_an_epoch():
    def made(*levels):
        return sgd_of(NoiseSchedule(levels), 1.0, 10, N, "allocation")

    rows = made((2.0, 10), (1.0, 7)).events(0, 17)
    assert rows == [(EPOCH, 0, 10), (OTHER, 10, 7)]
    refused("same within an epoch of 5 steps, got a schedule tha", made, (2.0, 9), (1.0, 7))
    # A mechanism charges whole epochs, and a sampler has those that are charged.
    assert mechanism().total(5) == acc.Composed((acc.Repeated(EPOCH, 1),))
    assert mechanism().total(11) == acc.Composed((acc.Repeated(EPOCH, 3),))
    assert mechanism().events(3, 4) == [(EPOCH, 3, 4)]
    assert mechanism("shuffle").event == acc.ShuffledEpoch(acc.Gaussian(2.0), 5)
    issuer = mechanism("shuffle").sampler(N).issuer
    words = "num_records must be the declared dataset_size"
    refused(words, jaxdp.sampling.Sampler, Shuffled(10), 61, 8, issuer)


@pytest.fixture
def seen(monkeypatch):
    """(step, draw, noise key) of every ticket that is spent."""
    seen, spend, step_with_info = [], Ticket.spend, jaxdp.Trainer.step_with_info

    def spending(self, by, **options):
        key = spend(self, by, **options)
        seen[-1] = (*seen[-1], np.asarray(key.words).tobytes())
        return key

    def stepping(self, state, batch, return_info=True):
        seen.append((batch.step, np.sort(batch.draw.indices[batch.draw.mask])))
        return step_with_info(self, state, batch, return_info)

    monkeypatch.setattr(Ticket, "spend", spending)
    monkeypatch.setattr(jaxdp.Trainer, "step_with_info", stepping)
    return seen


def run(folder, sampling, crash=None, steps=13):
    """A run without delta asks no accountant."""

    def progress(step, row):
        if step == crash:
            raise InterruptedError  # as the end of a process

    given = (folder, loss_fn, mechanism(sampling), optax.sgd(0.1), DATA)
    options = {"every": 4, "progress": progress, "report": False}
    options["relation"] = acc.Relation.REPLACE_SPECIAL
    return jaxdp.Run(*given, params=jnp.zeros(3), **options).fit(steps)


def counts_in(folder):
    return counts(Ledger.from_json(RunDirectory(folder).checked_ledger().to_json()))


@pytest.mark.parametrize(
    ("sampling", "crash"),
    [("allocation", 2), ("allocation", 7), ("shuffle", 7), (RandomAllocation(10, 2), 9)],
)
def test_a_run_that_was_interrupted_within_an_epoch_keeps_its_draw(tmp_path, seen, sampling, crash):
    path = tmp_path / "run"
    refused("", run, path, sampling, crash, error=InterruptedError)
    before = len(seen)
    run(path, sampling)
    again = {step for step, _, _ in seen[:before]} & {step for step, _, _ in seen[before:]}
    assert again
    assert len({key for _, _, key in seen}) == len(seen)  # no noise twice
    first = {step: draw for step, draw, _ in seen[:before]}
    last = {step: draw for step, draw, _ in seen}
    for step in again:
        np.testing.assert_array_equal(first[step], last[step])
    block = mechanism(sampling).event.block
    assert counts_in(path) == {mechanism(sampling).event: -(-13 // block)}
    often = np.bincount(np.concatenate([last[step] for step in range(10)]), minlength=N)
    assert np.all(often == 2)


def test_steps_of_an_epoch_that_were_shown_and_lost_are_charged_with_a_new_draw(tmp_path, seen):
    path = tmp_path / "run"
    run(path, "allocation", steps=4)  # shown up to step 4, within the first epoch
    put_back = kept(path / "secret/checkpoints")
    run(path, "allocation", steps=8)
    put_back()
    before = len(seen)
    run(path, "allocation", steps=8)
    assert [step for step, _, _ in seen[before:]] == [4, 5, 6, 7]
    first = {step: draw for step, draw, _ in seen[:before]}
    assert not any(np.array_equal(first[step], draw) for step, draw, _ in seen[before:])
    # Two epochs of the first stream, and the two that steps 4 to 7 of the second one are in.
    assert counts_in(path) == {EPOCH: 4}
