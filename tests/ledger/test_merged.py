"""Merged ledgers add up; what copies have in common counts once, if it was over by then."""

import shutil

import pytest

import jaxdp
from jaxdp import Ledger
from jaxdp import accounting as acc
from tests.ledger.small import KEY, OTHER, STEP, ended, issuer, trained, trainer
from tests.refusing import refused

EPOCH = acc.RandomlyAllocated(acc.Gaussian(2.0), 5)
PASS = acc.ShuffledEpoch(acc.Gaussian(2.0), 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def went_on(path, common, *apart, key=None):
    """Ledgers of copies: what is done to the first one, then to each copy of its file."""
    ledger = Ledger(path, key=key)
    common(ledger)
    ledger.close()
    found = []
    for number, deed in enumerate(apart):
        copy = path.with_name(f"copy {number}")
        if path.exists():
            shutil.copy(path, copy)
        ledger = Ledger(copy, key=key)
        if deed is not nothing:
            ledger.new_stream()  # as every start of a run and every trainer does
        deed(ledger)
        ledger.close()
        found.append(Ledger(copy, key=key))
    return found


def charge(steps, first=0, stream="s", event=STEP):
    return lambda ledger: ledger.charge(
        event, steps, stream=stream, first_step=first, again=True, source="mechanism"
    )


def by_hand(steps):
    return lambda ledger: ledger.charge(STEP, steps, stream="s")


def shown(step, stream="s"):
    return lambda ledger: ledger.show(stream, step)


def end(step, stream="s"):
    return lambda ledger: ended(ledger, stream, step)


def both(*deeds):
    return lambda ledger: [deed(ledger) for deed in deeds]


def nothing(ledger):
    pass


# (what is common, what each did apart, how many steps, or blocks, there are in all).
CASES = {
    "all of 3 ended": (both(charge(3), end(3)), [charge(3, 3, "a"), charge(3, 3, "b")], 9),
    "the same stream goes on": (both(charge(3), end(3)), [charge(3, 3), charge(3, 3)], 9),
    "6 reserved, 3 shown": (both(charge(6), shown(3)), [charge(3, 3), charge(3, 3)], 9),
    "6 reserved, none written anew": (both(charge(6), shown(3)), [nothing, nothing], 9),
    "6 reserved, 3 ended": (both(charge(6), end(3)), [charge(3, 3), charge(3, 3)], 9),
    "6 reserved, nothing said": (charge(6), [charge(3, 3), nothing], 12),
    "reserved, and ended apart": (charge(6), [end(3), end(4)], 7),
    "shown, then more": (both(charge(6), shown(2), shown(5)), [charge(2, 6), charge(1, 6)], 10),
    "another stream is shown": (both(charge(6), shown(3, "t")), [nothing, nothing], 12),
    "by hand": (lambda ledger: ledger.charge(STEP, 3), [nothing, charge(1)], 7),
    "by hand, and shown": (both(by_hand(3), shown(3)), [nothing, charge(1, 0, "a")], 7),
    "nothing common": (nothing, [charge(2), charge(2)], 4),
    "a block is whole": (
        both(charge(5, 0, event=PASS), shown(4)),
        [nothing, nothing],
        2,
    ),
    "a block that was shown": (
        both(charge(10, 0, event=PASS), shown(5)),
        [charge(3, 7, event=PASS), nothing],
        3,
    ),
    "three copies": (
        both(charge(6), shown(3)),
        [charge(3, 3), charge(3, 3, "b"), nothing],
        3 + 3 + (3 + 3) + 3,
    ),
}


@pytest.mark.parametrize(("common", "apart", "count"), CASES.values(), ids=CASES)
def test_copies_that_went_on_apart_count_once_only_what_was_over(path, common, apart, count):
    found = went_on(path, common, *apart)
    merged = Ledger.merged(*found)
    assert sum(n for _, n in counts(merged)) == count
    assert sum(n for _, n in counts(Ledger.merged(*found[::-1]))) == count
    # A copy by itself, also given twice, is what it is; by its text it is another.
    for one in found:
        assert counts(Ledger.merged(one)) == counts(Ledger.merged(one, one)) == counts(one)
        text = Ledger.from_json(one.to_json())
        assert sum(n for _, n in counts(Ledger.merged(one, text))) == 2 * sum(
            n for _, n in counts(one)
        )


def counts(ledger):
    return [(part.event, part.count) for part in ledger.event.events]


def test_a_copy_of_a_copy_has_more_in_common_with_it(path):
    first, second = went_on(path, both(charge(3), end(3)), nothing, charge(3, 3, "a"))
    second._rows.path.rename(path.with_name("second"))
    later = went_on(path.with_name("second"), end(6, "a"), charge(1, 6, "b"), charge(2, 6, "c"))
    assert Ledger.merged(first, *later).steps == 3 + 3 + 1 + 2
    assert Ledger.merged(*later).steps == Ledger.merged(later[0], later[1], first).steps


def test_trainers_on_copies_of_a_ledger_count_what_they_shared_once(path):
    """By the doors: 3 steps, closed; a copy; 3 more on each, whoever draws them."""
    with_ledger = trainer(ledger=path)
    trained(with_ledger, 3)
    with_ledger.close()
    shutil.copy(path, copy := path.with_name("copy"))
    for each in (path, copy):
        made = issuer(trainer().mechanism, ledger=Ledger(each), stream=each.name, source="sampler")
        for _ in range(3):
            made.take().spend("a test", verified=True)
        made.close()
        made.ledger.assume(f"what {each.name} took on trust")
        made.ledger.close()
    merged = Ledger.merged(Ledger(path), Ledger(copy))
    assert (merged.steps, Ledger(path).steps) == (9, 6)
    assert merged.epsilon(1e-5).upper > Ledger(path).epsilon(1e-5).upper
    assert [said for said in merged.unverified() if "steps" in said] == []
    assert len([said for said in merged.unverified() if "on trust" in said]) == 2
    # It is read, not charged, nor written.
    before = path.read_bytes(), copy.read_bytes()
    refused("ledger must be open to charge", merged.charge, STEP)
    assert (path.read_bytes(), copy.read_bytes()) == before


def test_a_ledger_in_memory_adds_with_its_notes_and_what_is_reserved_counts(path):
    one, made = Ledger(), issuer(reserve=10)
    one.charge(STEP, 3, stream="a")
    one.charge(STEP, 2)
    one.trust("A sentence.")
    for _ in range(2):
        made.take()
    merged = Ledger.merged(one, made.ledger, Ledger(path))
    assert (merged.steps, Ledger.merged(one, one).steps) == (15, 5)
    assert "A sentence." in merged.unverified()
    made.close()
    assert Ledger.merged(one, made.ledger).steps == 7
    assert Ledger.merged().entries == ()
    refused(r"ledgers\[1\] must be a jaxdp.Ledger", Ledger.merged, one, str(path))


def test_blocks_that_copies_went_on_with_were_drawn_alike(path):
    """Two releases of one draw cost more than two draws: adding would be too low."""
    words = "copies that went on within one draw of records, got block"
    for number, (common, *apart) in enumerate([
        (charge(3, event=EPOCH), charge(2, 3, event=EPOCH), nothing),
        (charge(3, event=EPOCH), nothing, charge(2, 3, event=EPOCH)),
        (both(charge(5, event=EPOCH), shown(5)), *[charge(2, 5, event=EPOCH)] * 2),
        (charge(3, event=acc.PerUser(EPOCH, 2)), charge(1, 3, event=acc.PerUser(EPOCH, 2)), nothing),
    ]):  # fmt: skip
        place = path.with_name(f"{number}")
        place.mkdir()
        refused(words, Ledger.merged, *went_on(place / "a", common, *apart))
    for number, (common, *apart, count) in enumerate([
        (charge(3, event=EPOCH), nothing, charge(5, 0, "b", EPOCH), 3),  # open in both
        (both(charge(5, event=EPOCH), shown(5)), charge(2, 5, event=EPOCH), nothing, 2),
        (charge(3, event=PASS), *[charge(2, 3, event=PASS)] * 2, 2),  # without amplification
    ]):  # fmt: skip
        place = path.with_name(f"fine {number}")
        place.mkdir()
        merged = Ledger.merged(*went_on(place / "a", common, *apart))
        assert sum(n for _, n in counts(merged)) == count


def test_keys_edits_and_cuts_are_seen(path):
    deeds = both(charge(3), end(3)), charge(3, 3, "a"), charge(3, 3, "b")
    one, other = went_on(path, *deeds, key=KEY)
    assert Ledger.merged(one, other).steps == 9
    refused("opened with the key", Ledger.merged, one, Ledger(other._rows.path))
    # An edited copy; one that lost its last line, which nobody can see in a file that was not read.
    text = other._rows.path.read_text()
    other._rows.path.write_text(text.replace('"first_step": 3', '"first_step": 4'))
    refused("must follow from the lines before it", Ledger.merged, one, other)
    other._rows.path.write_text("".join(text.splitlines(keepends=True)[:-1]))
    refused("must hold what was read from it", Ledger.merged, one, other)
    cut = Ledger(other._rows.path, key=KEY)
    assert (cut.steps, Ledger.merged(one, cut).steps) == (3, 6)
    assert Ledger.merged(charged_alone(OTHER), cut).steps == 4


def charged_alone(event):
    ledger = jaxdp.Ledger()
    ledger.charge(event)
    return ledger
