"""Charges of a ledger: what adds up, what counts once, and what is noted, covered or given back."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import _entries
from jaxdp import accounting as acc
from tests.ledger.small import OTHER, STEP, charged, refuses

MECH, SEED = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Secret.from_seed(1)


def test_charges_without_a_stream_and_of_several_always_add_up():
    ledger = jaxdp.Ledger()
    for event, steps in ((STEP, 1), (STEP, 4), (OTHER, 2), (STEP, 1)):
        ledger.charge(event, steps)
    assert ledger.steps == 8
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 6), acc.Repeated(OTHER, 2)))
    assert ledger.unverified() == [
        "charged by hand: that records were drawn, clipped and noised as the event says could not "
        "be verified"
    ]
    for stream in ("a", "b", None, None):
        ledger.charge(STEP, 10, stream=stream)
    assert ledger.steps == 48
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 46), acc.Repeated(OTHER, 2)))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=30))
def test_replays_cost_nothing_and_nothing_is_lost(charges):
    ledger, steps = jaxdp.Ledger(), set()
    for first, count in charges:
        ledger.charge(STEP, count, stream="a", first_step=first, replay=True)
        steps |= set(range(first, first + count))
        assert ledger.steps == len(steps)
    covered = [s for e in ledger.entries for s in range(e.first_step, e.end)]
    assert sorted(covered) == sorted(steps)


def test_a_step_cannot_become_another_event():
    ledger = charged(steps=10)
    at = {"stream": "a", "first_step": 5}
    with pytest.raises(ValueError, match="event for step 5 must be PoissonSampled"):
        ledger.charge(OTHER, 10, source="mechanism", replay=True, **at)
    with pytest.raises(ValueError, match="event for step 5 must be"):
        ledger.charge(STEP, 10, source="by hand", replay=True, **at)
    with pytest.raises(ValueError, match="was not charged for, got 5"):
        ledger.charge(STEP, 10, source="mechanism", **at)
    assert ledger.steps == 10


def test_covering_is_step_by_step():
    whole, part, other = jaxdp.Ledger(), jaxdp.Ledger(), jaxdp.Ledger()
    whole.charge(STEP, 10, stream="a")
    part.charge(STEP, 4, stream="a", first_step=3)
    other.charge(OTHER, 4, stream="a", first_step=3)
    assert whole.covers(part)
    assert not part.covers(whole)
    assert not whole.covers(other)
    assert not jaxdp.Ledger().covers(part)


events = st.one_of(
    st.builds(acc.Gaussian, st.floats(0.1, 100)),
    st.builds(acc.PoissonSampled, st.builds(acc.Gaussian, st.floats(0.1, 9)), st.floats(0, 1)),
    st.builds(acc.NonPrivate, st.just("raw moments")),
)


@given(st.lists(st.tuples(events, st.integers(1, 1000), st.sampled_from([None, "a", "b"]))))
def test_json_round_trip(charges):
    ledger = jaxdp.Ledger()
    for i, (event, steps, stream) in enumerate(charges):
        ledger.charge(event, steps, stream=stream, first_step=1000 * i)
    copy = jaxdp.Ledger.from_json(ledger.to_json())
    assert copy.entries == ledger.entries
    assert json.loads(ledger.to_json())["format"] == 2


def test_what_cannot_be_charged_or_assumed_is_refused_and_not_written(tmp_path, subtests):
    """Before: names that a line could not give back were written, and the file was dead."""
    ledger = charged(tmp_path / "ledger.jsonl")
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    for arguments, words in (
        ({"event": "gaussian"}, "event must be an accounting event"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"first_step": -1}, "first_step must be"),
        ({"source": "trust me"}, "source must be one of"),
        ({"note": 3}, "note must be a string, got 3"),
    ):
        with subtests.test(words), pytest.raises(ValueError, match=words):
            ledger.charge(**{"event": STEP, "stream": "c", **arguments})
    for what in ("", 3, None, "two\nlines"):
        words = "what must be one line of words, got"
        with subtests.test(what=what), pytest.raises(ValueError, match=words):
            ledger.assume(what)
    for name in (("a", 1), frozenset("a"), 3):
        calls = (
            lambda name=name: ledger.charge(STEP, stream=name),
            lambda name=name: ledger.new_stream(name),
            lambda name=name: ledger.show(name, 3),
        )
        refuses(subtests, [(call, "stream must be a string") for call in calls])
    assert (tmp_path / "ledger.jsonl").read_bytes() == whole
    ledger.charge(STEP, np.int64(2), stream="a", first_step=np.int64(4))
    ledger.close()
    assert jaxdp.Ledger(tmp_path / "ledger.jsonl").steps == 6


def test_notes_are_kept_and_change_no_charge(tmp_path):
    ledger = jaxdp.Ledger(tmp_path / "l.jsonl")
    ledger.charge(STEP, 3, stream="a", note="two canaries")
    ledger.charge(STEP, 5, stream="a", replay=True, note="two canaries")
    ledger.charge(STEP, 2, stream="b")
    assert ledger.notes() == ["two canaries"]
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 7),))
    again = jaxdp.Ledger(tmp_path / "l.jsonl")
    assert again.entries == ledger.entries
    assert jaxdp.Ledger.from_json(ledger.to_json()).notes() == ["two canaries"]
    assert "note" not in json.loads((tmp_path / "l.jsonl").read_text().splitlines()[-1])
    memory = jaxdp.Ledger()
    memory.charge(STEP, stream="a", note="x")
    memory.charge(STEP, stream="a", first_step=1)
    assert [entry.note for entry in memory.entries] == ["x", ""]


def test_that_a_seed_was_chosen_is_said_also_beside_another_note(tmp_path):
    ledger = jaxdp.Ledger(tmp_path / "l")
    ledger.charge(STEP, stream="a", source="mechanism", note=f"{_entries.SEEDED}; with canaries")
    ledger.charge(STEP, stream="b", source="mechanism")
    for found in (ledger, jaxdp.Ledger(tmp_path / "l")):
        assert found.unverified() == [_entries.SEEDED]
        assert found.notes() == ["with canaries"]


def test_an_empty_ledger_has_no_epsilon(tmp_path):
    for path in (None, tmp_path / "ledger.jsonl"):
        ledger = jaxdp.Ledger(path)
        for _ in range(2):
            with pytest.raises(ValueError, match="ledger must hold a charge to have an epsilon"):
                ledger.epsilon(1e-5)
            ledger.new_stream()  # begun, and nothing charged
        ledger.charge(STEP, 2, stream="a")
        assert ledger.epsilon(1e-5).upper > 0
        ledger.give_back("a", 0, 2)
        with pytest.raises(ValueError, match="ledger must hold a charge"):
            ledger.epsilon(1e-5)


def test_unrelated_runs_do_not_cover_each_other():
    """Streams were names of a secret once: any two runs of one event covered each other."""
    one, two = jaxdp.Ledger(), jaxdp.Ledger()
    for ledger in (one, two):
        sampler = MECH.sampler(50, ledger=ledger, secret=SEED)
        for _ in range(3):
            sampler.draw()
    assert one.covers(jaxdp.Ledger.from_json(one.to_json()))
    assert not one.covers(two)
    assert not two.covers(one)


def test_only_the_last_steps_of_a_stream_are_given_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path, 10)
    ledger.charge(OTHER, 5, stream="a", first_step=10)
    ledger.charge(STEP, 3, stream="gap", first_step=5)
    ledger.charge(STEP, 2, stream="gap")
    before = ledger.to_json()
    for stream, first, end in [
        *(("a", *steps) for steps in [(3, 5), (3, 14), (12, 16), (15, 15), (16, 15)]),
        ("b", 0, 1),
        ("gap", 1, 8),  # some of these were never charged
        ("gap", 4, 8),
    ]:
        with pytest.raises(ValueError, match=f"must be the last steps charged to stream '{stream}"):
            ledger.give_back(stream, first, end)
        assert ledger.to_json() == before, (stream, first, end)
    assert ledger.steps == 20
    ledger.give_back("gap", 6, 8)
    assert ledger.steps == 18
    ledger.give_back("a", 7, 15)
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 10),))
    ledger.close()
    again = jaxdp.Ledger(path)
    assert again.entries == ledger.entries
    again.charge(OTHER, 1, stream="a", first_step=7)
    assert again.steps == 11
    again.close()


def test_a_charge_looks_at_no_earlier_entry(monkeypatch):
    ledger, looked = jaxdp.Ledger(), []
    for n in range(300):  # two kinds in turn: nothing merges
        ledger.charge((STEP, OTHER)[n % 2], stream="a", first_step=n)
    assert len(ledger.entries) == 300
    continues = _entries.Entry.continues
    monkeypatch.setattr(
        _entries.Entry, "continues", lambda *two: looked.append(1) or continues(*two)
    )
    monkeypatch.setattr(_entries.Streams, "missing", None)
    ledger.charge(STEP, stream="a", first_step=300)
    assert len(looked) == 1


@pytest.mark.parametrize("kept", ["json", "file"])
def test_a_seed_gives_no_stream_twice_after_a_ledger_is_read_again(tmp_path, kept):
    ledger = jaxdp.Ledger(tmp_path / "l" if kept == "file" else None)
    one = MECH.sampler(50, ledger=ledger, secret=SEED).draw()
    ledger.close()
    copy = jaxdp.Ledger(tmp_path / "l")
    if kept == "json":
        copy = jaxdp.Ledger.from_json(ledger.to_json())
    two = MECH.sampler(50, ledger=copy, secret=SEED).draw()
    copy.close()
    assert copy.steps == 2
    assert not np.array_equal(one.key().words, two.key().words)


def test_only_the_stream_that_was_charged_ahead_counts_for_less():
    ledger = jaxdp.Ledger()
    for stream in ("a", "b"):
        ledger.charge(STEP, 500, stream=stream)
    found = ledger.epsilon(1e-5, without=("a", 300))
    assert found == acc.epsilon(acc.Repeated(STEP, 800), 1e-5)
    assert ledger.epsilon(1e-5, without=("c", 0)) == ledger.epsilon(1e-5)


def test_a_charge_beyond_the_budget_is_refused_at_once():
    ledger = jaxdp.Ledger(budget=acc.RenyiFilter(1.0, 1e-5))
    ledger.charge(acc.Gaussian(20.0))
    with pytest.raises(acc.BudgetExceededError):
        ledger.charge(acc.Gaussian(0.5))
    assert ledger.steps == 1
