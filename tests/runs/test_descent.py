"""The checkpoint that a run goes on from: each step of a stream is seen in one version at most."""

import random
import shutil

import pytest

from jaxdp.ledger.seeds import Secret
from tests.refusing import refused
from tests.runs.histories import CYCLIC, EPOCHS, IN_ORDER, LEVELS, POISSON, STEPS, World

KINDS = {"poisson": POISSON, "epochs": EPOCHS, "in order": IN_ORDER}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "r")


def streams(world):
    """The number of the run's streams that are charged."""
    return len({number for number, *_ in world.charged()})


def test_a_start_writes_its_lines_in_one_order(world):
    """The state that is shown comes before anything is seen, whatever there is to do first."""
    world.start(steps=8)
    first = ["begun", "stream at 0", "0-4", "shown 4", "4-8", "shown 8"]
    assert world.lines() == first
    world.start()
    later = ["trusted", "begun", "8-12", "shown 12"]  # more steps, after others were seen
    assert world.lines() == [*first, *later]
    world.take_away(12)
    world.start()
    assert world.lines()[len(first) + len(later) :] == ["begun", "stream at 8", "8-12", "shown 12"]
    first_seen = next(n for n, each in enumerate(world.effects) if each.startswith("seen"))
    assert world.effects.index("stream at 8") < first_seen
    world.take_away()
    world.start()
    assert world.charged() == [(0, 0, 12), (1, 8, 12), (2, 0, 12)]


@pytest.mark.parametrize("mechanism", KINDS.values(), ids=KINDS)
def test_a_checkpoint_that_was_not_shown_before_others_of_its_steps_were_is_set_aside(
    tmp_path, mechanism
):
    for then in (8, 12):  # was shown when it is put back
        world = World(tmp_path / str(then), mechanism)
        world.start(steps=4)
        assert world.start("checkpoint 8", every=8 if then == 12 else 4)
        world.take_away(8)
        world.start(steps=then)
        if then == 12:
            world.take_away(12)
            world.take_away(8)
        world.put(1)
        if then == 12:
            refused("holds steps that were done again since.*move it away", world.start)
            assert (world.steps(), world.set_aside()) == ([8], [])
            world.put(0)
        world.start()
        assert world.set_aside() == [8]
        world.check()
        # What is charged is what was seen: the lost steps anew, in a stream of their own.
        assert world.charged() == [(0, 0, then), (1, 4, 12)]


@pytest.mark.parametrize("unshown", [True, False])
def test_one_past_stands_for_one_state_alone(world, unshown):
    """Two checkpoints of one start share a past where everything was reserved at once."""
    world.start("0-12", enough=lambda row: False)
    world.start("checkpoint 8", told=False, slow=True)
    assert world.lines()[-2:] == ["0-12", "shown 4"]
    world.take_away(8)
    world.start("seen 8", enough=lambda row: False)
    assert "shown 8" in world.lines()
    world.take_away(8)
    world.start("stream", enough=lambda row: False)
    world.put(1)
    if unshown:
        world.take_away(4)
        refused("holds steps that were done again since", world.start)
        world.put(0)
    world.start()
    world.check()
    assert world.set_aside() == [8]
    assert world.charged() == [(0, 0, 12), (1, 4, 12)]


def test_where_releases_decide_the_number_of_steps_all_count_at_every_later_start(world):
    world.start("seen 4", enough=lambda row: False)
    assert world.charged() == [(0, 0, 12)]
    world.states.clear()
    world.start("seen 8")  # told of no ``enough``
    assert world.lines().count("0-12") == 1
    assert world.lines().count("4-12") == 1
    world.take_away(8)
    world.start("seen 8", enough=lambda row: True)
    assert world.charged() == [(0, 0, 12), (1, 4, 12)]


def test_crashes_alone_cost_nothing_wherever_they_are(tmp_path):
    """One stream, nothing set aside, and no charge beyond that of a run without any."""
    whole = World(tmp_path / "whole")
    whole.start(every=5, steps=10, told=False)
    for again in (1, 2, 3):
        for effect in range(1, len(whole.effects) + 1):
            world = World(tmp_path / f"{again} {effect}")
            for _ in range(again):
                assert world.start(effect, every=5, steps=10, told=False) or again > 1
            world.start(every=5, steps=10, told=False)
            assert world.charged() == [(0, 0, 10)], (again, effect)
            assert world.set_aside() == []
            assert len(world.visible) == 10
            world.check()


def test_one_new_stream_begins_wherever_the_start_that_began_it_was_killed(tmp_path):
    for name, mechanism in KINDS.items():
        for effect in range(1, 9):
            world = World(tmp_path / f"{name} {effect}", mechanism)
            world.start(steps=8)
            world.damage(8)
            assert world.start(effect, steps=8)
            world.start(steps=8)
            assert world.charged() == [(0, 0, 8), (1, 4, 8)], effect
            assert world.set_aside() == [8]
            assert "shown 8 unread" not in world.lines()
            world.check()


def test_a_checkpoint_of_an_older_stream_permits_nothing(world):
    """Also behind what the newer stream has shown; and no older ``run.json`` does."""
    world.start(steps=8, every=2)
    world.take_away(8)
    world.put(0)
    world.take_away(6)
    world.start(steps=4, every=2)  # from 2, which was shown
    assert world.charged() == [(0, 0, 8), (1, 2, 4)]
    world.put(3)
    world.start(steps=8, every=2)  # 8 of the first stream, which was shown: all steps are there
    assert world.charged() == [(0, 0, 8), (1, 2, 4)]
    world.directory.state_file.write_bytes(world.states[2])
    world.start(steps=10, every=2)
    assert world.charged() == [(0, 0, 8), (1, 2, 4), (2, 8, 10)]
    world.check()


def test_every_start_reserves_its_steps_by_lines_of_its_own(world):
    world.start("0-8", every=8, steps=8)
    for _ in range(2):
        world.start("4-8")
    world.start()
    assert [line for line in world.lines() if "-" in line] == [
        *("0-8", "0-4", "4-8", "4-8", "4-8", "8-12")
    ]
    assert world.charged() == [(0, 0, 12)]


def test_what_the_ledger_lacks_is_refused_and_nothing_is_moved(world):
    world.start(steps=8, every=2)
    world.take_away(8)
    whole = world.directory.ledger.read_text().splitlines(keepends=True)
    world.start(steps=8, every=2)  # stream 1 from 6
    lines = world.directory.ledger.read_text().splitlines(keepends=True)
    for state, cut, words in (
        (-1, len(lines) - 1, "must hold the 8 steps that were shown"),
        (-1, len(whole), "must hold the 8 steps that were shown"),
        (3, len(whole), "must hold every charge of the last checkpoint"),  # run.json is older too
    ):
        world.directory.state_file.write_bytes(world.states[state])
        world.directory.ledger.write_text("".join(lines[:cut]))
        for give_up in (False, True):
            refused(words, lambda give_up=give_up: world.start(every=2, give_up=give_up))
        assert world.steps() == [6, 8]
        assert world.set_aside() == []


def test_what_cannot_be_read_is_written_down_as_shown_before_it_is_set_aside(tmp_path):
    for mechanism in KINDS.values():
        world = World(tmp_path / f"{mechanism.sampling!r}", mechanism)
        world.start(steps=4)
        world.start("checkpoint 8")  # not shown
        world.unreadable = (8,)
        refused("set_aside_unreadable=True", world.start)
        assert world.set_aside() == []
        assert world.start("shown 8 unread", give_up=True)
        assert world.set_aside() == []  # the line comes first
        world.unreadable = ()
        world.take_away(8)
        world.start()
        assert world.charged() == [(0, 0, 8), (1, 4, 12)]
        world.put(1)  # 8, which can be read again
        world.take_away(12)
        refused("holds steps that were done again since", world.start)
        world.check()
    # All of them, then from the beginning.
    world = World(tmp_path / "all")
    world.start(steps=8)
    world.unreadable = (4, 8)
    world.start(give_up=True)
    assert world.charged() == [(0, 0, 8), (1, 0, 12)]
    world.check()


def test_a_tail_without_a_bound_is_refused_before_anything_is_moved(tmp_path):
    world = World(tmp_path / "r", CYCLIC)
    world.start(steps=8)
    lines = [line for line in world.lines() if line != "begun"]
    for change in (lambda: world.damage(8), lambda: world.take_away(8), lambda: world.take_away(4)):
        change()
        before = world.steps()
        refused("cannot be repeated", world.start)
        assert (world.steps(), world.set_aside()) == (before, [])
        assert [line for line in world.lines() if line != "begun"] == lines
    world.put(1)
    world.put(0)
    for world.unreadable in ((8,), (4, 8)):
        refused("cannot be repeated", lambda: world.start(give_up=True))
        assert world.set_aside() == []
    world.unreadable = ()
    world.start("checkpoint 12")  # not shown
    world.unreadable = (12,)
    refused("cannot be repeated", lambda: world.start(give_up=True))
    assert world.set_aside() == []
    world.unreadable = ()
    world.start()
    assert world.charged() == [(0, 0, 12)]


# Of a run that format 2 left: its mechanism, kill, what its run.json says, and what is charged once
# it went on. In stream 0 steps 0-8 were taken, and 4-8 again in stream 1 where it was begun.
FORMAT_2 = {
    "killed": (POISSON, False, {"shown": 4}, [(0, 0, 12)]),
    "gone back": (POISSON, True, {"shown": 8, "lost": 1}, [(0, 0, 8), (1, 4, 12)]),
    "older run.json": (POISSON, True, {"shown": 4}, [(0, 0, 8), (1, 4, 12)]),
    "lost more": (POISSON, True, {"lost": 3}, [(0, 0, 8), (1, 4, 8), (3, 8, 12)]),
    "in order": (IN_ORDER, False, {"shown": 4}, [(0, 0, 12)]),
    "branch": (IN_ORDER, True, {"lost": 1, "past": 4}, [(0, 0, 8), (1, 4, 12)]),
    "branch of an older run.json": (
        *(IN_ORDER, True, {"shown": 4}),
        [(0, 0, 8), (1, 4, 8), (2, 8, 12)],
    ),
}


@pytest.mark.parametrize("name", FORMAT_2)
def test_a_run_of_format_2_goes_on_as_its_version_would_have(tmp_path, name):
    mechanism, back, state, charged = FORMAT_2[name]
    world = World(tmp_path / "r", mechanism)
    world.start(steps=4)
    world.start("checkpoint 8")
    if back:
        world.start("seen 8")
        world.take_away(8)
        world.start("seen 8")
    world.as_format_2(**state)
    world.start()
    assert world.charged() == charged
    assert world.lines().count("format") == 1
    world.check()
    # From now on its rules are those of every run: what is older counts as shown, but is no more.
    last = max(number for number, *_ in charged)
    shutil.rmtree(world.checkpoints / "12")
    world.start()
    assert world.charged() == [*charged, (last + 1, 8, 12)]


def test_the_order_of_the_lines_tells_no_time(tmp_path):
    """All lines of a block, its energy's too, stand before its first step, and what is shown of it
    before the lines of the next block but one; here the noise changes within a block."""
    lines = []
    for slow in (True, False):
        world = World(tmp_path / str(slow), LEVELS, energy=True)
        world.start(told=False, slow=slow)
        lines.append([line for line in world.lines() if "shown" in line or "-" in line])
    blocks = [["0-4"], ["4-6", "6-8"], ["8-12"]]
    one, two, three = ([*block, *(f"energy {each}" for each in block)] for block in blocks)
    expected = [*one, *two, "shown 4", *three, "shown 8", "shown 12"]
    assert lines == [expected, expected]


def test_two_copies_of_a_folder_take_nothing_of_each_other(tmp_path):
    for secret in (None, Secret.from_seed(3)):
        first = World(tmp_path / f"{secret is None}" / "z", secret=secret)
        first.start(steps=4)
        two = []
        for name in ("x", "y"):
            shutil.copytree(first.directory.path, first.directory.path.with_name(name))
            copy = World.__new__(World)
            vars(copy).update(vars(first), vault=[], tickets={}, visible={}, states=[])
            copy.directory = type(first.directory)(first.directory.path.with_name(name))
            copy.checkpoints, copy.kept = copy.directory.checkpoints, tmp_path / f"{secret}{name}"
            copy.start(steps=8)
            two.append(copy)
        x, y = two
        assert x.directory.ledger.read_bytes() != y.directory.ledger.read_bytes()
        x.vault += y.vault
        x.put(-1)
        refused("must hold every charge of the last checkpoint", x.start)


def test_a_start_of_a_chosen_seed_can_be_made_again(tmp_path):
    def labels(name, *kills):
        world = World(tmp_path / name, secret=Secret.from_seed(3))
        for kill in kills:
            world.start(kill, steps=8)
        return [label for label, step in world.tickets if step == 7]

    one, two = labels("one", None), labels("two", None)
    assert one == two
    again = labels("three", "checkpoint 8", None), labels("four", "seen 4", None)
    assert again[0] == one
    assert again[1] != one


def life(world, rng, kills_only=False):
    """One start of a random history: what was refused, in words."""
    world.unreadable = ()
    for _ in range(0 if kills_only else rng.choice([0, 1, 1, 2])):
        deed, there = rng.randrange(9), world.steps()
        if deed == 0 and there:
            world.damage(rng.choice(there))
        elif deed == 1 and there:
            world.unreadable = (rng.choice(there),)
        elif deed == 2 and world.states:
            world.directory.state_file.write_bytes(rng.choice(world.states))
        elif deed < 6 and there:  # the last is lost
            world.take_away(there[-1])
        elif world.vault:  # one of any start is put back, and is the last
            number = rng.choice([*range(len(world.vault)), *world.unseen() * 4])
            later = [step for step in there if step > world.vault[number][0]]
            if later:
                world.take_away(*later)
            world.put(number)
    kill = rng.choice([rng.randint(1, 20), "checkpoint", "shown"])
    enough = rng.choice([None, None, lambda row: False, lambda row: row["step"] >= 6])
    every, steps = rng.choice([2, 3, 4]), rng.choice([6, STEPS])
    options = {name: rng.random() < 0.5 for name in ("give_up", "told", "slow")}
    try:
        world.start(kill, every=every, steps=steps, enough=enough, **options)
    except ValueError as error:
        return str(error)
    return ""


def history(folder, seed, kills_only=False):
    """A random history of a run: kills, losses, older files, copies put back."""
    rng = random.Random(seed)
    world = World(folder, [*KINDS.values(), *KINDS.values(), CYCLIC][seed % 7])
    said = []
    for _ in range(rng.randint(6, 10)):
        said.append(life(world, rng, kills_only))
        world.check()
    return world, [words for words in said if words]


# Of any kind, and kills alone.
HISTORIES = [
    (range(20), range(6)),
    pytest.param(range(20, 60), range(6, 20), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seeds", "kills"), HISTORIES)
def test_random_histories_show_no_step_of_a_stream_twice(tmp_path, seeds, kills):
    refusals = 0
    for seed in seeds:
        world, said = history(tmp_path / f"any {seed}" / "r", seed)
        refusals += len(said)
        assert all("must hold" in words or "cannot be read" in words for words in said), said
    assert refusals > 1
    for seed in kills:
        world, said = history(tmp_path / f"kills {seed}" / "r", seed, kills_only=True)
        assert said == []
        assert world.set_aside() == []
        assert world.vault == [] or streams(world) == 1
