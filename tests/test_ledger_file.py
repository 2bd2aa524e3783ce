"""The file of a ledger: durable, chained, of one writer, and read again as it was left."""

import json
import os

import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from tests.test_ledger import OTHER, STEP, charged


def test_a_charge_is_on_disk_before_it_returns(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "ledger.jsonl", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.read_bytes()), fsync(file)))
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3, stream="a", source="mechanism")
    assert (
        len(synced[-1].splitlines()) == 2
    )  # with the header: the file as it was when the last fsync was asked
    again = jaxdp.Ledger(path)
    assert again.entries == ledger.entries
    ledger.close()
    again.charge(OTHER, 2)
    assert len(synced[-1].splitlines()) == 3
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
        # All but the newline: the line is whole, and counts.
        assert jaxdp.Ledger(torn).steps == (9 if cut == len(path.read_bytes()) - 1 else 4)


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


def test_what_is_assumed_is_kept_once_and_said_after_reopening(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    ledger.assume("the frozen parameter ['b']")
    ledger.charge(STEP, stream="a", source="mechanism")
    for _ in range(3):
        ledger.assume("the frozen parameter ['a']")
        ledger.assume("the frozen parameter ['b']")
    ledger.charge(STEP, stream="a", first_step=1, source="mechanism")
    said = [
        f"assumed to be public, computed from no record: the frozen parameter ['{name}']"
        for name in "ab"
    ]
    assert ledger.unverified() == said
    assert len(path.read_bytes().splitlines()) == 5
    ledger.close()
    again = jaxdp.Ledger(path)
    again.charge(STEP, stream="a", first_step=2, source="mechanism")
    again.assume("the frozen parameter ['b']")
    assert again.steps == 3
    assert again.unverified() == said
    assert len(path.read_bytes().splitlines()) == 6
    assert jaxdp.Ledger.from_json(again.to_json()).unverified() == said
    assert again.covers(jaxdp.Ledger.from_json(again.to_json()))


def test_ledgers_of_before_read_as_they_did_and_go_on(tmp_path):
    """Format 1 had neither header nor chain."""
    old = json.loads(jaxdp.Ledger().to_json())
    del old["assumed"], old["seen"]
    assert jaxdp.Ledger.from_json(json.dumps({**old, "format": 1})).unverified() == []
    with pytest.raises(ValueError, match="ledger format must be 2, got 3"):
        jaxdp.Ledger.from_json(json.dumps({**old, "format": 3}))
    path, entry = tmp_path / "ledger.jsonl", charged().entries[0].to_dict()
    rows = [{"assumed": "a table"}, {"assumed": "a table"}, entry, {**entry, "first_step": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = jaxdp.Ledger(path)
    assert ledger.steps == 8
    ledger.charge(OTHER)
    ledger.close()
    again = jaxdp.Ledger(path)
    assert [entry.steps for entry in again.entries] == [8, 1]
    assert sum("assumed" in line for line in again.unverified()) == 1


def damaged(path, change):
    """The file with its lines changed."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k[1:],  # the header
        lambda k: [k[0], *k[2:]],
        lambda k: [*k[:2], *k[3:]],
        lambda k: [*k[:2], k[3], k[2], *k[4:]],
        lambda k: [*k[:3], k[2], *k[3:]],
        lambda k: [*k[:2], k[2].replace(b'"steps": 2', b'"steps": 1'), *k[3:]],
        lambda k: [
            *k[:2],
            k[2].replace(b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0'),
            *k[3:],
        ],
        lambda k: [*k[:2], b'{"assumed": "nothing"}\n', *k[2:]],
        lambda k: [*k, k[0]],
    ],
)
def test_an_edited_removed_or_inserted_line_is_found(tmp_path, change):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path, 3)
    ledger.charge(STEP, 2, stream="b")
    ledger.charge(STEP, 4, stream="c")
    ledger.close()
    before = path.read_bytes()
    damaged(path, change)
    assert path.read_bytes() != before
    with pytest.raises(ValueError, match=r"line \d, must (follow|not begin)"):
        jaxdp.Ledger(path)


def test_lines_cut_off_at_the_end_are_found_by_whoever_kept_the_head(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path)
    early = ledger.head
    ledger.charge(STEP, 2, stream="b")
    late = ledger.head
    ledger.close()
    whole = jaxdp.Ledger(path)
    assert whole.holds(early)
    assert whole.holds(late)
    damaged(path, lambda lines: lines[:-1])
    cut = jaxdp.Ledger(path)  # by itself it is a ledger of before
    assert cut.holds(early)
    assert not cut.holds(late)
    assert not charged().holds(early)


def test_a_ledger_with_a_key_is_continued_and_checked_with_it_alone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    charged(path, key=b"k" * 32).close()
    reader = jaxdp.Ledger(path)
    assert reader.steps == 4
    with pytest.raises(ValueError, match="must be continued with the key"):
        reader.charge(STEP)
    with pytest.raises(ValueError, match="line 1, must follow"):
        jaxdp.Ledger(path, key=b"x" * 32)
    right = jaxdp.Ledger(path, key=b"k" * 32)
    right.charge(STEP, stream="b")
    assert right.steps == 5
    right.close()


@pytest.mark.parametrize("gone", ["moved", "deleted", "replaced"])
def test_a_ledger_that_is_moved_away_charges_nothing_more(tmp_path, gone):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path)
    if gone == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "elsewhere.jsonl")
    if gone == "replaced":
        path.write_bytes((tmp_path / "elsewhere.jsonl").read_bytes())
    with pytest.raises(ValueError, match="must stay where it is"):
        ledger.charge(STEP, stream="b")
    assert ledger.steps == 4
    sampler = jaxdp.dp_sgd(1.0, 0.1, 5, 50)
    with pytest.raises(ValueError, match="must stay where it is"):
        sampler.sampler(50, ledger=ledger)


@pytest.mark.parametrize("how", ["gone", "cut", "replaced"])
def test_a_file_that_changes_between_reading_and_the_first_charge_is_missed(tmp_path, how):
    path = tmp_path / "ledger.jsonl"
    charged(path).close()
    late = jaxdp.Ledger(path)
    if how == "gone":
        path.unlink()
    elif how == "cut":
        damaged(path, lambda lines: lines[:-1])
    else:
        charged(tmp_path / "other.jsonl").close()
        (tmp_path / "other.jsonl").replace(path)
    before = path.read_bytes() if path.exists() else None
    for _ in range(2):
        with pytest.raises(ValueError, match="must stay where it is"):
            late.charge(STEP, stream="b")
    assert late.steps == 4
    assert (path.read_bytes() if path.exists() else None) == before


def test_the_cost_of_a_step_does_not_grow(tmp_path, monkeypatch):
    """100,000 steps: one entry in memory, one line and one sync a reserved block."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "ledger.jsonl"
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger(path)
    issuer = mech.sampler(50, ledger=ledger, reserve=100).issuer
    before = len(synced)
    for _ in range(100_000):
        issuer.issue()
    assert len(synced) - before == 1_000
    assert len(ledger.entries) == 1
    assert ledger.steps == 100_000
    ledger.close()
    again = jaxdp.Ledger(path)
    assert len(again.entries) == 1
    assert again.steps == 100_000


def test_what_was_seen_is_said_after_reopening(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 10, stream="a", source="sampler")
    for step in range(3):
        ledger.verified("a", step)
    for step in range(3, 7):
        ledger.opened("a", step)
    said = ledger.unverified()
    assert [line.split(":")[0] for line in said] == ["4 of 10 steps", "3 of 10 steps"]
    ledger.close()
    assert jaxdp.Ledger(path).unverified() == said
    assert jaxdp.Ledger.from_json(ledger.to_json()).unverified() == said


def test_a_seed_gives_no_stream_twice_after_reopening_the_file(tmp_path):
    mech, secret = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Secret.from_seed(1)
    words = []
    for _ in range(2):
        ledger = jaxdp.Ledger(tmp_path / "l")
        words.append(mech.sampler(50, ledger=ledger, secret=secret).draw().key().words)
        ledger.close()
    assert not np.array_equal(*words)
