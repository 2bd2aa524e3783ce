"""Charges of a ledger, what adds up or is ended; and its durable file of one writer."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger import entries
from tests.ledger.small import KEY, OTHER, STEP, charged, charged_on, ended
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

FORMER = Path(__file__).parent / "former"
MECH, SEED = sgd_of(1.0, 0.1, 5, 50), jaxdp.Secret.from_seed(1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_charges_without_a_stream_and_of_several_always_add_up():
    ledger = jaxdp.Ledger()
    for event, steps in ((STEP, 1), (STEP, 4), (OTHER, 2), (STEP, 1)):
        ledger.charge(event, steps)
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 6), acc.Repeated(OTHER, 2)))
    words = "that records were drawn, clipped and noised as the event says could not be verified"
    assert ledger.unverified() == [f"charged by hand: {words}"]
    for stream in ("a", "b", None, None):
        ledger.charge(STEP, 10, stream=stream)
    assert ledger.steps == 48
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 46), acc.Repeated(OTHER, 2)))
    ledger.charge(STEP, 2, stream="None")
    taken = jaxdp.Ledger()
    for _ in range(2):  # done again, it costs nothing
        taken.take_over(ledger, "before")
        assert taken.event == ledger.event


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=30))
def test_what_is_held_costs_nothing_again_and_nothing_is_lost_nor_becomes_another_event(charges):
    ledger, steps = jaxdp.Ledger(), set()
    for first, count in charges:
        at = {"steps": count, "stream": "a", "first_step": first}
        ledger.charge(STEP, **at, again=True)
        steps |= set(range(first, first + count))
        assert ledger.steps == len(steps)
    covered = [s for e in ledger.entries for s in range(e.first_step, e.end)]
    assert sorted(covered) == sorted(steps)
    refused("event must be one for a step of stream", ledger.charge, OTHER, again=True, **at)
    words = "source must be that of the steps that stream 'a' holds, 'by hand', got 'mechanism'"
    refused(words, ledger.charge, STEP, again=True, source="mechanism", **at)
    refused(f"was not charged for, got {first}", ledger.charge, STEP, **at)
    assert ledger.steps == len(steps)


events = st.one_of(
    st.builds(acc.Gaussian, st.floats(0.1, 100)),
    st.builds(acc.PoissonSampled, st.builds(acc.Gaussian, st.floats(0.1, 9)), st.floats(0, 1)),
    st.builds(acc.NonPrivate, st.just("raw moments")),
    st.just(acc.FixedSizeSampled(acc.Gaussian(1.0), 10**10, 500)),
)


@given(st.lists(st.tuples(events, st.integers(1, 1000), st.sampled_from([None, "a", "b"]))))
def test_json_round_trip(charges):
    ledger = jaxdp.Ledger()
    for i, (event, steps, stream) in enumerate(charges):
        ledger.charge(event, steps, stream=stream, first_step=1000 * i)
    copy = jaxdp.Ledger.from_json(ledger.to_json())
    assert copy.entries == ledger.entries
    assert json.loads(ledger.to_json())["format"] == 3


def test_what_cannot_be_charged_or_assumed_is_refused_and_not_written(path):
    """Before: names that a line could not give back were written, and the file was dead."""
    ledger, whole = charged(path), path.read_bytes()
    for arguments, words in (
        ({"event": "gaussian"}, "event must be an accounting event"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"first_step": -1}, "first_step must be"),
        ({"source": "trust me"}, "source must be one of"),
        ({"note": 3}, "note must be a string, got 3"),
    ):
        refused(words, ledger.charge, **{"event": STEP, "stream": "c", **arguments})
    for what in ("", 3, None, "two\nlines"):
        refused("what must be one line of words, got", ledger.assume, what)
    for name in (("a", 1), frozenset("a"), 3):
        refused("stream must be a string", ledger.charge, STEP, stream=name)
        refused("stream must be a string", ledger.new_stream, name)
        refused("stream must be a string", ledger.show, name, 3)
    assert path.read_bytes() == whole
    ledger.charge(STEP, np.int64(2), stream="a", first_step=np.int64(4))
    ledger.close()
    assert jaxdp.Ledger(path).steps == 6
    # A closed one takes nothing, in a file or in memory.
    (memory := jaxdp.Ledger()).close()
    for closed in (ledger, memory):
        for way, *args in (
            (closed.charge, STEP),
            (closed.assume, "a"),
            (closed.new_stream,),
            (closed.show, "a", 3),
            (closed.join,),
        ):
            refused("ledger must be open to charge, got one that was closed", way, *args)
    assert (jaxdp.Ledger(path).steps, memory.entries) == (6, ())


def test_notes_are_kept_and_change_no_charge_and_that_a_seed_was_chosen_is_said_beside_them(path):
    note, memory = "two canaries", jaxdp.Ledger()
    ledger = jaxdp.Ledger(path)
    ledger.charge(STEP, 3, stream="a", note=note)
    ledger.charge(STEP, 5, stream="a", again=True, note=note)
    ledger.charge(STEP, 2, stream="b")
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 7),))
    assert ledger.notes() == jaxdp.Ledger.from_json(ledger.to_json()).notes() == [note]
    assert jaxdp.Ledger(path).entries == ledger.entries
    assert "note" not in json.loads(path.read_text().splitlines()[-1])
    memory.charge(STEP, stream="a", note="x")
    memory.charge(STEP, stream="a", first_step=1)
    assert [entry.note for entry in memory.entries] == ["x", ""]
    ledger = jaxdp.Ledger(path.with_name("other"))
    ledger.charge(STEP, stream="a", source="mechanism", note=f"{entries.SEEDED}; with canaries")
    ledger.charge(STEP, stream="b", source="mechanism")
    for found in (ledger, jaxdp.Ledger(path.with_name("other"))):
        assert found.unverified() == [entries.SEEDED]
        assert found.notes() == ["with canaries"]


def test_an_empty_ledger_has_no_epsilon(path):
    words = "ledger must hold a charge to have an epsilon"
    for ledger in (jaxdp.Ledger(), jaxdp.Ledger(path)):
        for _ in range(2):
            refused(words, ledger.epsilon, 1e-5)
            ledger.new_stream()  # begun, and nothing charged
        ledger.charge(STEP, 2, stream="a")
        assert ledger.epsilon(1e-5).upper > 0
        refused("must be taken out by close() of their sampler", ledger._end_stream, "a", 0)
        assert ledger.steps == 2
        ended(ledger, "a", 0)
        refused(words, ledger.epsilon, 1e-5)


def test_what_is_ended_are_the_last_steps_of_its_stream_alone(path):
    ledger = charged(path, 10)
    ledger.charge(OTHER, 5, stream="a", first_step=10)
    ledger.charge(STEP, 3, stream="b", first_step=5)
    ledger.charge(STEP, 2)
    written, before = path.read_bytes(), ledger.to_json()
    for stream, step in (("a", 16), ("a", 20), ("b", 9), ("c", 0)):
        ended(ledger, stream, step)  # nothing is there
    assert (path.read_bytes(), ledger.to_json()) == (written, before)
    for stream, step, left in (("b", 7, 19), ("a", 7, 11), ("a", 7, 11), ("b", 0, 9)):
        ended(ledger, stream, step)
        assert ledger.steps == jaxdp.Ledger(path).steps == left
    assert ledger.event == acc.Composed((acc.Repeated(STEP, 9),))
    assert len(path.read_bytes().splitlines()) == len(written.splitlines()) + 3
    # What was ended is charged anew, as whatever it then is.
    ledger.charge(OTHER, 1, stream="a", first_step=7)
    ledger.close()
    for found in (jaxdp.Ledger(path), jaxdp.Ledger.from_json(ledger.to_json())):
        assert found.entries == ledger.entries
        assert found.steps == 10


def test_a_charge_looks_at_few_earlier_entries(monkeypatch):
    ledger = jaxdp.Ledger()
    for n in range(1_000):  # two kinds in turn: nothing merges
        ledger.charge((STEP, OTHER)[n % 2], stream="a", first_step=n)
    assert len(ledger.entries) == 1_000
    looked, end = [], entries.Entry.end
    counted = property(lambda entry: looked.append(entry) or end.fget(entry))
    monkeypatch.setattr(entries.Entry, "end", counted)
    ledger.charge(STEP, stream="a", first_step=1_000)
    assert len(looked) < 100


def test_a_seed_gives_no_stream_twice_after_a_ledger_is_read_again(path):
    for place in (None, path):
        ledger = jaxdp.Ledger(place)
        one = MECH.sampler(50, ledger=ledger, secret=SEED).draw()
        ledger.close()
        copy = jaxdp.Ledger(path) if place else jaxdp.Ledger.from_json(ledger.to_json())
        two = MECH.sampler(50, ledger=copy, secret=SEED).draw()
        copy.close()
        assert copy.steps == 2, place
        assert not np.array_equal(one.key().words, two.key().words), place


def test_a_charge_is_on_disk_before_it_returns_and_its_cost_does_not_grow(path, monkeypatch):
    """One entry in memory, one line and one sync a reserved block."""
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
    issuer, before = MECH.sampler(50, ledger=again, reserve=100).issuer, len(synced)
    for _ in range(10_000):
        issuer.take()
    assert len(synced) - before == 100
    again.close()
    for found in (again, jaxdp.Ledger(path)):
        assert len(found.entries) == 3
        assert found.steps == 10_005


def test_a_reader_changes_nothing_and_a_second_writer_is_refused(path):
    writer = jaxdp.Ledger(path)
    writer.charge(STEP, 3)
    reader = jaxdp.Ledger(path)
    writer.charge(STEP, 1)
    assert reader.steps == 3
    refused("is in use by another writer", reader.charge, STEP, 1)
    assert jaxdp.Ledger(path).steps == 4
    writer.close()
    reader.charge(STEP, 1)  # reads what was written since
    assert reader.steps == jaxdp.Ledger(path).steps == 5
    reader.close()
    refused("ledger must be open to charge", reader.charge, STEP, 1)
    assert reader.steps == 5


def test_a_budget_stops_before_it_is_passed_and_a_file_beyond_it_is_refused_and_left(path):
    def opened(path):
        return jaxdp.Ledger(path, acc.RenyiFilter(epsilon=2.0, delta=1e-5))

    def charged_until_it_stops():
        ledger = opened(path)
        with contextlib.suppress(acc.BudgetExceededError):
            while True:
                ledger.charge(STEP, 10)
        ledger.close()
        return ledger

    late = opened(beyond := path.with_name("beyond.jsonl"))
    for steps in (50_000, 1):  # by somebody without a budget; who was refused holds no lock
        charged_on(beyond, steps=steps)
        refused("", late.charge, STEP, error=acc.BudgetExceededError)
    refused("", opened, beyond, error=acc.BudgetExceededError)
    ledger = charged_until_it_stops()
    assert ledger.steps > 10
    assert ledger.epsilon(1e-5).upper <= 2.0
    assert charged_until_it_stops().steps == ledger.steps  # what is on disk counts
    assert jaxdp.Ledger(path).steps == ledger.steps


# Before: a whole last line without its newline was not counted, and deleted at the next charge.
@pytest.mark.parametrize("key", [None, KEY])
def test_a_torn_line_never_happened_a_whole_one_counts_and_a_damaged_one_is_refused(path, key):
    ledger = jaxdp.Ledger(path, key=key)
    ledger.charge(STEP, 3)
    cut = len(path.read_bytes())
    ledger.charge(OTHER, 5)
    ledger.close()
    whole = path.read_bytes()
    for left in (*(whole[:end] for end in range(cut + 1, len(whole))), whole[:-1] + b"\0" * 7):
        path.write_bytes(left)
        kept, steps = (whole, 8) if left.startswith(whole[:-1]) else (whole[:cut], 3)
        assert jaxdp.Ledger(path).steps == steps, left  # a reader, also without the key
        assert path.read_bytes() == left
        charged_on(path, key=key)
        assert jaxdp.Ledger(path, key=key).steps == steps + 1, left
        assert path.read_bytes().startswith(kept)
    # A damaged one is refused and left alone.
    row = {**charged().entries[0].to_dict(), "steps": -4}
    for line, words in (
        ('{"event": "nonsense"}\n', "line 1, must be a ledger entry"),
        (json.dumps(row) + "\n", "steps must be a whole number"),
    ):
        path.write_text(line)
        refused(words, jaxdp.Ledger, path)
        assert path.read_text() == line


def test_what_is_assumed_or_was_seen_is_kept_once_and_said_after_reopening(path):
    ledger = jaxdp.Ledger(path)
    ledger.assume("the frozen parameter ['b']")
    ledger.charge(STEP, stream="a", source="mechanism")
    for _ in range(3):
        ledger.assume("the frozen parameter ['a']")
        ledger.assume("the frozen parameter ['b']")
    ledger.charge(STEP, stream="a", first_step=1, source="mechanism")
    words = "assumed to be public, or made from what this ledger released: the frozen parameter"
    said = [f"{words} ['{name}']" for name in "ab"]
    assert ledger.unverified() == said
    assert len(path.read_bytes().splitlines()) == 5
    ledger.close()
    again = jaxdp.Ledger(path)
    again.charge(STEP, stream="a", first_step=2, source="mechanism")
    again.assume("the frozen parameter ['b']")
    assert (again.steps, again.unverified()) == (3, said)
    assert len(path.read_bytes().splitlines()) == 6
    copy = jaxdp.Ledger.from_json(again.to_json())
    assert copy.unverified() == said
    # What was seen of steps that a sampler drew.
    again.charge(STEP, 10, stream="b", source="sampler")
    for step in range(7):
        again._count("b", verified=step < 3)
    told = again.unverified()
    seen = [line.split(":")[0] for line in told if line not in said]
    assert seen == ["4 of 10 steps", "3 of 10 steps"]
    again.close()
    for found in (jaxdp.Ledger(path), jaxdp.Ledger.from_json(again.to_json())):
        assert found.unverified() == told


def test_what_is_shown_names_a_state_and_stays_when_a_ledger_is_read_again(path):
    ledger = jaxdp.Ledger(path)
    assert [ledger.new_stream("run"), ledger.new_stream("a start")] == [("run", 0), ("a start", 1)]
    start = past = ledger.head
    for _ in range(2):
        ledger.show("run", 4, past)
    written = len(path.read_bytes().splitlines())
    assert ledger.new_stream("run/1", (4, past)) == ("run/1", 2)
    assert len(path.read_bytes().splitlines()) == written + 1 == 5
    for found in (ledger, jaxdp.Ledger(path), jaxdp.Ledger.from_json(ledger.to_json())):
        assert found.begun == ("run", "a start", "run/1")
        for stream in ("run", "run/1"):
            assert found.shown(stream)[:2] == (4, past)
            assert found.was_shown(stream, 4, past)
            for other in ((5, past), (4, b""), (4, ledger.head)):
                assert not found.was_shown(stream, *other)
        assert found.shown("a start") is None
    again = jaxdp.Ledger(path)
    assert (again.shown("run").start, again.shown("run/1").start) == (start, ledger.head)
    ledger.show("run/1", 6)  # one that nobody could read: nothing goes on from it
    ledger.close()
    assert jaxdp.Ledger(path).shown("run/1")[:2] == (6, b"")


def test_ledgers_of_before_read_as_they_did_and_go_on(path):
    """Format 1 had neither header nor chain."""
    old = json.loads(jaxdp.Ledger().to_json())
    del old["assumed"], old["seen"]
    assert jaxdp.Ledger.from_json(json.dumps({**old, "format": 1})).unverified() == []
    later = json.dumps({**old, "format": 4})
    refused("ledger format must be 3, got 4", jaxdp.Ledger.from_json, later)
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


def test_an_older_version_refuses_what_a_newer_one_wrote_to(path):
    """It knows no line "ended", nor what a state is named by: it takes either file for damaged."""
    shutil.copy(FORMER / "given_back.jsonl", path)
    ledger, before = jaxdp.Ledger(path), path.read_bytes()
    ledger.charge(OTHER, stream="new")
    ledger.charge(OTHER, stream="newer")
    ledger.close()
    assert path.read_bytes().startswith(before)
    first, *charges = map(json.loads, path.read_bytes()[len(before) :].splitlines())
    assert {name: first[name] for name in first.keys() - {"chain"}} == {"format": 3}
    assert [row["stream"] for row in charges] == ["new", "newer"]
    refused("event", entries.Entry.from_dict, first, error=KeyError)  # as that version reads it
    path.unlink()
    charged(path).close()
    assert json.loads(path.read_text().splitlines()[0])["ledger"] == 3
    # And so does this one, of what comes after it.
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0].replace(b'"ledger": 3', b'"ledger": 4'), *lines[1:]]))
    refused("line 1, must not begin a ledger of format 4", jaxdp.Ledger, path)


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


def test_an_edited_removed_or_inserted_line_is_found(path):
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
        all_refused([(words, lambda: jaxdp.Ledger(path), name)])


def test_a_cut_end_is_found_by_whoever_kept_the_head_and_a_key_alone_goes_on_and_checks(path):
    ledger = charged(path)
    early = ledger.head
    ledger.charge(STEP, 2, stream="b")
    late = ledger.head
    ledger.close()
    whole = jaxdp.Ledger(path)
    assert whole.holds(early)
    assert whole.holds(late)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    cut = jaxdp.Ledger(path)  # by itself it is a ledger of before
    assert cut.holds(early)
    assert not cut.holds(late)
    assert not charged().holds(early)
    path.unlink()
    charged(path, key=KEY).close()
    reader = jaxdp.Ledger(path)
    assert reader.steps == 4
    refused("must be continued with the key", reader.charge, STEP)
    refused("line 1, must follow", jaxdp.Ledger, path, key=b"x" * 32)
    charged_on(path, key=KEY)
    assert jaxdp.Ledger(path, key=KEY).steps == 5


# Before: charged on into a file that could no longer be read.
@pytest.mark.parametrize("how", "moved deleted copied replaced cut emptied grew".split())
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
        for _ in range(2):
            refused(words, ledger.charge, STEP, stream="b")
        refused(words, MECH.sampler, 50, ledger=ledger)
        assert ledger.steps == 4
        assert (path.read_bytes() if path.exists() else None) == before
        path.unlink(missing_ok=True)
        if how == "copied":
            return  # who reads it later finds what was written
