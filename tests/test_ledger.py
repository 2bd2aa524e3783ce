import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc

STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
OTHER = acc.PoissonSampled(acc.Gaussian(2.0), 0.01)


def test_charges_without_a_stream_always_add_up():
    ledger = jaxdp.Ledger()
    ledger.charge(STEP)
    ledger.charge(STEP, 4)
    ledger.charge(OTHER, 2)
    ledger.charge(STEP, 1)
    assert ledger.steps == 8
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 6), acc.Repeated(OTHER, 2)))
    assert ledger.unverified() == [
        "charged by hand: that records were drawn, clipped and noised as the event says could not "
        "be verified"
    ]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=30))
def test_replays_cost_nothing_and_nothing_is_lost(charges):
    ledger, steps = jaxdp.Ledger(), set()
    for first, count in charges:
        ledger.charge(STEP, count, stream="a", first_step=first, replay=True)
        steps |= set(range(first, first + count))
        assert ledger.steps == len(steps)
    covered = [s for e in ledger.entries for s in range(e.first_step, e.end)]
    assert sorted(covered) == sorted(steps)


def test_streams_are_charged_apart():
    ledger = jaxdp.Ledger()
    for stream in ("a", "b", None, None):
        ledger.charge(STEP, 10, stream=stream)
    assert ledger.steps == 40


def test_a_step_cannot_become_another_event():
    ledger = jaxdp.Ledger()
    ledger.charge(STEP, 10, stream="a", source="mechanism")
    with pytest.raises(ValueError, match="event for step 5 must be PoissonSampled"):
        ledger.charge(OTHER, 10, stream="a", first_step=5, source="mechanism", replay=True)
    with pytest.raises(ValueError, match="event for step 5 must be"):
        ledger.charge(STEP, 10, stream="a", first_step=5, source="by hand", replay=True)
    with pytest.raises(ValueError, match="was not charged for, got 5"):
        ledger.charge(STEP, 10, stream="a", first_step=5, source="mechanism")
    assert ledger.steps == 10


def test_a_charge_is_on_disk_before_it_returns(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "ledger.jsonl", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.read_bytes()), fsync(file)))
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3, stream="a", source="mechanism")
    assert len(synced[-1].splitlines()) == 1  # the file as it was when the last fsync was asked
    again = jaxdp.Ledger(path)
    assert again.entries == ledger.entries
    ledger.close()
    again.charge(OTHER, 2)
    assert len(synced[-1].splitlines()) == 2
    assert jaxdp.Ledger(path).steps == 5
    again.close()


def test_a_reader_changes_nothing_and_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    writer = jaxdp.Ledger(path)
    writer.charge(STEP, 3)
    reader = jaxdp.Ledger(path)
    writer.charge(STEP, 1)
    assert reader.steps == 3
    with pytest.raises(ValueError, match="is in use by another writer"):
        reader.charge(STEP, 1)
    assert jaxdp.Ledger(path).steps == 4
    writer.close()
    reader.charge(STEP, 1)  # reads what was written since
    assert reader.steps == jaxdp.Ledger(path).steps == 5
    reader.close()


def test_a_file_beyond_the_budget_is_refused_and_left_to_others(tmp_path):
    path = tmp_path / "ledger.jsonl"
    late = jaxdp.Ledger(path, acc.RenyiFilter(epsilon=0.5, delta=1e-5))
    first = jaxdp.Ledger(path)
    first.charge(STEP, 50_000)
    first.close()
    with pytest.raises(acc.BudgetExceededError):
        late.charge(STEP)
    other = jaxdp.Ledger(path)
    other.charge(STEP)  # the refused one holds no lock
    other.close()
    with pytest.raises(acc.BudgetExceededError):
        jaxdp.Ledger(path, acc.RenyiFilter(epsilon=0.5, delta=1e-5))


def test_a_closed_ledger_charges_nothing(tmp_path):
    ledger = jaxdp.Ledger(tmp_path / "ledger.jsonl")
    ledger.charge(STEP, 3)
    ledger.close()
    with pytest.raises(ValueError, match="ledger must be open to charge"):
        ledger.charge(STEP, 1)
    assert ledger.steps == 3


def test_covering_is_step_by_step():
    whole, part, other = jaxdp.Ledger(), jaxdp.Ledger(), jaxdp.Ledger()
    whole.charge(STEP, 10, stream="a")
    part.charge(STEP, 4, stream="a", first_step=3)
    other.charge(OTHER, 4, stream="a", first_step=3)
    assert whole.covers(part)
    assert not part.covers(whole)
    assert not whole.covers(other)
    assert not jaxdp.Ledger().covers(part)


def test_a_torn_line_is_a_release_that_never_happened(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3)
    whole = path.read_bytes()
    ledger.charge(OTHER, 5)
    ledger.close()
    for cut in range(len(whole) + 1, len(path.read_bytes())):
        torn = tmp_path / f"torn{cut}.jsonl"
        torn.write_bytes(path.read_bytes()[:cut])
        reopened = jaxdp.Ledger(torn)
        reopened.charge(STEP, 1)
        reopened.close()
        assert jaxdp.Ledger(torn).steps == 4


def test_a_damaged_ledger_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "nonsense"}\n')
    with pytest.raises(ValueError, match="line 1, must be a ledger entry"):
        jaxdp.Ledger(path)
    assert path.read_text() == '{"event": "nonsense"}\n'
    ledger = jaxdp.Ledger()
    ledger.charge(STEP, 4)
    row = {**ledger.entries[0].to_dict(), "steps": -4}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="steps must be a whole number"):
        jaxdp.Ledger(path)


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
    assert json.loads(ledger.to_json())["format"] == 1


def test_a_budget_stops_before_it_is_passed(tmp_path):
    path = tmp_path / "ledger.jsonl"

    def budget():
        return acc.RenyiFilter(epsilon=2.0, delta=1e-5)

    ledger = jaxdp.Ledger(path, budget())
    while budget_left(ledger):
        pass
    steps = ledger.steps
    assert steps > 10
    assert ledger.epsilon(1e-5).upper <= 2.0
    assert jaxdp.Ledger(path).steps == steps
    ledger.close()
    again = jaxdp.Ledger(path, budget())  # what is on disk counts
    assert not budget_left(again)
    again.close()


def budget_left(ledger):
    try:
        ledger.charge(STEP, 10)
    except acc.BudgetExceededError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"event": "gaussian"}, "event must be an accounting event"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"first_step": -1}, "first_step must be"),
        ({"source": "trust me"}, "source must be one of"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxdp.Ledger().charge(**{"event": STEP, **arguments})


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
    with pytest.raises(ValueError, match="note must be a string, got 3"):
        ledger.charge(STEP, stream="c", note=3)
    memory = jaxdp.Ledger()
    memory.charge(STEP, stream="a", note="x")
    memory.charge(STEP, stream="a", first_step=1)
    assert [entry.note for entry in memory.entries] == ["x", ""]
