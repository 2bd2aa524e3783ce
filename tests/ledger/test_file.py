"""The file of a ledger: durable, chained, of one writer, and read again as it was left."""

import contextlib
import json
import os

import pytest

import jaxdp
from jaxdp import accounting as acc
from tests.ledger.small import KEY, OTHER, STEP, charged


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_charge_is_on_disk_before_it_returns(path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.read_bytes()), fsync(file)))
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3, stream="a", source="mechanism")
    # With the header: the file as it was when the last fsync was asked.
    assert len(synced[-1].splitlines()) == 2
    again = jaxdp.Ledger(path)
    assert again.entries == ledger.entries
    ledger.close()
    again.charge(OTHER, 2)
    assert len(synced[-1].splitlines()) == 3
    assert jaxdp.Ledger(path).steps == 5
    again.close()


def test_a_reader_changes_nothing_and_a_second_writer_is_refused(path):
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
    with pytest.raises(ValueError, match="ledger must be open to charge"):
        reader.charge(STEP, 1)
    assert reader.steps == 5


def test_a_file_beyond_the_budget_is_refused_and_left_to_others(path):
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


def test_a_budget_stops_before_it_is_passed(path):
    def charged_until_it_stops():
        ledger = jaxdp.Ledger(path, acc.RenyiFilter(epsilon=2.0, delta=1e-5))
        with contextlib.suppress(acc.BudgetExceededError):
            while True:
                ledger.charge(STEP, 10)
        ledger.close()
        return ledger

    ledger = charged_until_it_stops()
    assert ledger.steps > 10
    assert ledger.epsilon(1e-5).upper <= 2.0
    assert charged_until_it_stops().steps == ledger.steps  # what is on disk counts
    assert jaxdp.Ledger(path).steps == ledger.steps


def test_a_torn_line_is_a_release_that_never_happened(path, tmp_path):
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3)
    cut = len(path.read_bytes())
    ledger.charge(OTHER, 5)
    ledger.close()
    whole = path.read_bytes()
    for end in range(cut + 1, len(whole)):
        torn = tmp_path / f"torn{end}.jsonl"
        torn.write_bytes(whole[:end])
        reopened = jaxdp.Ledger(torn)
        reopened.charge(STEP, 1)
        reopened.close()
        # All but the newline: the line is whole, and counts.
        assert jaxdp.Ledger(torn).steps == (9 if end == len(whole) - 1 else 4), end


def test_a_damaged_ledger_is_refused_and_left_alone(path):
    row = {**charged().entries[0].to_dict(), "steps": -4}
    for line, words in (
        ('{"event": "nonsense"}\n', "line 1, must be a ledger entry"),
        (json.dumps(row) + "\n", "steps must be a whole number"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=words):
            jaxdp.Ledger(path)
        assert path.read_text() == line


def test_what_is_assumed_is_kept_once_and_said_after_reopening(path):
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
    copy = jaxdp.Ledger.from_json(again.to_json())
    assert copy.unverified() == said
    assert again.covers(copy)


def test_ledgers_of_before_read_as_they_did_and_go_on(path):
    """Format 1 had neither header nor chain."""
    old = json.loads(jaxdp.Ledger().to_json())
    del old["assumed"], old["seen"]
    assert jaxdp.Ledger.from_json(json.dumps({**old, "format": 1})).unverified() == []
    with pytest.raises(ValueError, match="ledger format must be 2, got 3"):
        jaxdp.Ledger.from_json(json.dumps({**old, "format": 3}))
    entry = charged().entries[0].to_dict()
    rows = [{"assumed": "a table"}, {"assumed": "a table"}, entry, {**entry, "first_step": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = jaxdp.Ledger(path)
    assert ledger.steps == 8
    ledger.charge(OTHER)
    ledger.close()
    again = jaxdp.Ledger(path)
    assert [entry.steps for entry in again.entries] == [8, 1]
    assert sum("assumed" in line for line in again.unverified()) == 1


NOISE = b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0'
EDITS = {
    "header gone": lambda k: k[1:],
    "first line gone": lambda k: [k[0], *k[2:]],
    "a line gone": lambda k: [*k[:2], *k[3:]],
    "two lines exchanged": lambda k: [*k[:2], k[3], k[2], *k[4:]],
    "a line twice": lambda k: [*k[:3], k[2], *k[3:]],
    "fewer steps": lambda k: [*k[:2], k[2].replace(b'"steps": 2', b'"steps": 1'), *k[3:]],
    "more noise": lambda k: [*k[:2], k[2].replace(*NOISE), *k[3:]],
    "inserted": lambda k: [*k[:2], b'{"assumed": "nothing"}\n', *k[2:]],
    "header again": lambda k: [*k, k[0]],
}


def test_an_edited_removed_or_inserted_line_is_found(path, subtests):
    ledger = charged(path, 3)
    ledger.charge(STEP, 2, stream="b")
    ledger.charge(STEP, 4, stream="c")
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for name, edit in EDITS.items():
        edited = b"".join(edit(lines))
        assert edited != b"".join(lines), name
        path.write_bytes(edited)
        words = r"line \d, must (follow|not begin)"
        with subtests.test(name), pytest.raises(ValueError, match=words):
            jaxdp.Ledger(path)


def without_its_last_line(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_lines_cut_off_at_the_end_are_found_by_whoever_kept_the_head(path):
    ledger = charged(path)
    early = ledger.head
    ledger.charge(STEP, 2, stream="b")
    late = ledger.head
    ledger.close()
    whole = jaxdp.Ledger(path)
    assert whole.holds(early)
    assert whole.holds(late)
    without_its_last_line(path)
    cut = jaxdp.Ledger(path)  # by itself it is a ledger of before
    assert cut.holds(early)
    assert not cut.holds(late)
    assert not charged().holds(early)


def test_a_ledger_with_a_key_is_continued_and_checked_with_it_alone(path):
    charged(path, key=KEY).close()
    reader = jaxdp.Ledger(path)
    assert reader.steps == 4
    with pytest.raises(ValueError, match="must be continued with the key"):
        reader.charge(STEP)
    with pytest.raises(ValueError, match="line 1, must follow"):
        jaxdp.Ledger(path, key=b"x" * 32)
    right = jaxdp.Ledger(path, key=KEY)
    right.charge(STEP, stream="b")
    assert right.steps == 5
    right.close()


# Before: charged on into a file that could no longer be read.
@pytest.mark.parametrize(
    "how", ["moved", "deleted", "copied", "replaced", "cut", "emptied", "grew"]
)
def test_a_file_that_is_moved_or_changed_is_missed(tmp_path, path, how):
    """Between two charges, or between reading and the first one."""
    for late in (False, True):
        ledger = charged(path)
        if late:
            ledger.close()
            ledger = jaxdp.Ledger(path)
        whole, lines = path.read_bytes(), path.read_bytes().splitlines(keepends=True)
        content = {"copied": whole, "cut": b"".join(lines[:-1]), "emptied": b"", "grew": 2 * whole}
        if how in ("moved", "copied"):
            path.rename(tmp_path / "elsewhere.jsonl")
        elif how == "deleted":
            path.unlink()
        elif how == "replaced":
            charged(tmp_path / "other.jsonl").close()
            (tmp_path / "other.jsonl").replace(path)
        if how in content:
            path.write_bytes(content[how])
        before = path.read_bytes() if path.exists() else None
        words = "must not begin" if late and how == "grew" else "must stay where it is"
        for charge in (
            lambda ledger=ledger: ledger.charge(STEP, stream="b"),
            lambda ledger=ledger: ledger.charge(STEP, stream="b"),
            lambda ledger=ledger: jaxdp.dp_sgd(1.0, 0.1, 5, 50).sampler(50, ledger=ledger),
        ):
            with pytest.raises(ValueError, match=words):
                charge()
        assert ledger.steps == 4
        assert (path.read_bytes() if path.exists() else None) == before
        path.unlink(missing_ok=True)
        if how == "copied":
            return  # who reads it later finds what was written


def test_the_cost_of_a_step_does_not_grow(path, monkeypatch):
    """One entry in memory, one line and one sync a reserved block."""
    synced, ledger = [], jaxdp.Ledger(path)
    monkeypatch.setattr(os, "fsync", synced.append)
    issuer = jaxdp.dp_sgd(1.0, 0.1, 5, 50).sampler(50, ledger=ledger, reserve=100).issuer
    before = len(synced)
    for _ in range(10_000):
        issuer.issue()
    assert len(synced) - before == 100
    ledger.close()
    for found in (ledger, jaxdp.Ledger(path)):
        assert len(found.entries) == 1
        assert found.steps == 10_000


def test_what_was_seen_is_said_after_reopening(path):
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
