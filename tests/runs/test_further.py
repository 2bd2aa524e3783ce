"""A run that is trained further: more steps, a further stage, a run after another, one ledger."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import Issuer
from jaxdp.runs import RunDirectory, export, reporting
from jaxdp.runs.reporting import AS_IF
from jaxdp.runs.starts import EXTENDED, MOVED, WENT_ON
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.runs.histories import EPOCHS, IN_ORDER, LEVELS, POISSON, STEPS, N, World
from tests.runs.own import MECHANISM, SIZES, X, Y, again, loss_fn, run
from tests.runs.small import Stop, crash_at, undrawn

OTHER = jaxdp.dp_sgd(noise_multiplier=4.0, **SIZES)
FURTHER = {"mechanism": OTHER, "optimizer": optax.sgd(0.0, 0.9), "extend": "more", "every": 2}


def epsilon(*counts, delta=1e-3):
    """Of steps of mechanisms, each charged once."""
    event = acc.Composed(tuple(mechanism.total(steps) for mechanism, steps in counts))
    return pytest.approx(acc.epsilon(event, delta).upper, rel=1e-9)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twelve") / "r"
    run(folder, average=0.5).fit()
    return folder


@pytest.fixture
def finished(twelve, tmp_path):
    return shutil.copytree(twelve, tmp_path / "r")


def test_a_finished_run_goes_on_in_a_stage_and_its_page_has_both(finished):
    """From its released parameters, which are the average; killed on the way, at no cost."""
    before = (finished / "history.json").read_text()
    first = run(finished, average=0.5)
    released = first.fit()["w"]
    further = lambda **options: run(finished, **{**FURTHER, **options})  # noqa: E731
    with pytest.raises(Stop):
        further(progress=crash_at(13)).fit(4)
    assert (finished / "history.json").read_text() == before
    np.testing.assert_array_equal(jaxdp.Run.open(finished).params["w"], released)
    with pytest.raises(Stop):
        further(progress=crash_at(15)).fit(4)
    one = further(report=True, evaluate=lambda params: {"length": 1.0})
    with undrawn():
        params = one.fit(4)
    np.testing.assert_array_equal(params["w"], released)  # its rate is 0
    assert one.history[:4] == json.loads(before)
    assert [row["step"] for row in one.history] == [3, 6, 9, 12, 14, 16]
    assert one.epsilon().upper == epsilon((MECHANISM, 12), (OTHER, 4))
    assert one.history[-1]["epsilon"] == one.epsilon().upper
    # The program of the first stage says what it said; its page and rows stay those of both.
    shown = (finished / "report.json").read_bytes(), (finished / "history.json").read_bytes()
    again = run(finished, average=0.5, report=True)
    np.testing.assert_array_equal(again.fit()["w"], released)
    assert [row["step"] for row in again.history] == [3, 6, 9, 12]
    assert shown == (
        (finished / "report.json").read_bytes(),
        (finished / "history.json").read_bytes(),
    )
    refused("extend must name the last stage .* 'more', to report all", again.report)
    refused("extend must name the last stage .* 'more', to go on", again.fit, 13, beyond=True)
    opened, target = jaxdp.Run.open(finished), finished.with_name("p")
    np.testing.assert_array_equal(opened.params["w"], params["w"])
    assert export.export_params(RunDirectory(finished), target) == 16

    report = json.loads((finished / "report.json").read_text())
    stages = [(p["name"], p["steps"], p["releases"], p["epsilon_after"]) for p in report["parts"]]
    ends = [row["epsilon"] for row in one.history if row["step"] in (12, 16)]
    assert stages == [("the first stage", 12, 12, ends[0]), ("stage 'more'", 16, 4, ends[1])]
    assert report["guarantee"]["provided"] == AS_IF
    for page in ("report.md", "report.html"):
        assert AS_IF in (finished / page).read_text()
        assert "What epsilon counts" in (finished / page).read_text()
    assert {EXTENDED, MOVED} <= set(one.unverified())  # a copy, which others may go on from


def test_what_cannot_be_a_further_stage_is_refused_before_anything_is_written(finished, tmp_path):
    lines = (finished / "ledger.jsonl").read_text()
    bad = {"w": jnp.zeros((20, 2))}
    flat = lambda params, x, y: jnp.sum(params["w"])  # noqa: E731
    for words, options in (
        ("source must hold the records that the run in", {"data": (X[:-1], Y[:-1])}),
        ("delta must stay that of the run", {"delta": 1e-4}),
        ("relation must stay that of the run", {"relation": "replace_one"}),
        ("params must be like those released", {"params": bad, "loss": flat}),
        ("ledger must stay that of the run", {"ledger": tmp_path / "other.jsonl"}),
        ("extend must name a stage by letters", {"extend": "../more"}),
        ("extend must name a stage, without after", {"after": finished}),
        ("canaries must be 0 with extend=, ledger= or after=", {"canaries": 3}),
    ):
        refused(words, lambda o=options: run(finished, **{**FURTHER, **o}).fit(4))
    refused("run that is there", run(tmp_path / "new", **FURTHER).fit, 4)
    run(tmp_path / "half").fit(3)
    with pytest.raises(Stop):
        run(tmp_path / "half", progress=crash_at(5)).fit()
    refused("finished, got .*3 of 12 steps were shown", run(tmp_path / "half", **FURTHER).fit, 4)
    again(tmp_path / "audited").fit(3)
    refused("without canaries", run(tmp_path / "audited", **FURTHER).fit, 4)
    assert (finished / "ledger.jsonl").read_text() == lines
    assert not (finished / "secret/stages").exists()
    # Another mechanism in the same folder: what changed, and the ways on.
    refused(
        r"changed: noise_multiplier \(1\.06.* then, 4\.0 now\).*extend=.*after=",
        run(finished, mechanism=OTHER, delta=1e-3, average=0.5).fit,
        12,
    )


@pytest.mark.parametrize(("mechanism", "seed"), [(EPOCHS, None), (IN_ORDER, 5)])
def test_a_crash_in_a_stage_costs_nothing_wherever_it_is(tmp_path, mechanism, seed):
    """And no draw or noise of it is one of the stage before, which has the same mechanism."""
    ends = False
    for effect in range(1, 30, 2):
        world = World(tmp_path / str(effect), mechanism, Secret.from_seed(seed) if seed else None)
        world.start()
        drawn = {draw for _, draw in world.tickets.values()}
        world.extend("more", mechanism)
        ends = not world.start(effect)
        world.start()
        assert world.charged() == [(0, 0, STEPS)], effect
        assert world.set_aside() == []
        later = dict(list(world.tickets.items())[STEPS:])
        assert not drawn & {draw for _, draw in later.values()}
        assert world.directory.checked_ledger().steps == 2 * STEPS
        if ends:
            break
    assert ends


def test_a_stage_whose_checkpoints_are_lost_begins_again_and_is_charged_anew(tmp_path):
    world = World(tmp_path / "r")
    world.start()
    world.extend("more", POISSON)
    world.start(steps=8)
    world.take_away()
    world.start(steps=8)
    assert world.charged() == [(0, 0, 8), (1, 0, 8)]
    world.check()
    shutil.rmtree(world.directory.secret)
    refused("ledger must hold no step of a run that begins", world.start)


def test_more_steps_than_calibrated_count_and_say_what_was_fixed(finished, tmp_path):
    refused(r"fit\(14, beyond=True\) takes more", run(finished, average=0.5).fit, 14)
    refused("steps must be given with beyond=True", run(finished).fit, beyond=True)
    one = run(finished, average=0.5, report=True)
    with undrawn():
        one.fit(14, beyond=True)
    assert one.epsilon().upper == epsilon((MECHANISM, 14)) == one.history[-1]["epsilon"]
    assert one.unverified()[:1] == [EXTENDED]  # and that the folder was copied
    again = run(finished, average=0.5)  # without a number: what is there
    np.testing.assert_array_equal(again.fit()["w"], one.params["w"])
    refused("steps must be at least the 14", again.fit, 12)
    page = (finished / "report.md").read_text()
    assert f"**, {AS_IF}." in page
    assert "the noise was calibrated for 12" in page
    # Fixed before anything was seen, it is said nowhere.
    planned = World(tmp_path / "planned", dataclasses.replace(POISSON, steps=4))
    planned.start(steps=4)
    assert planned.directory.checked_ledger().unverified() == []
    refused(
        "within the 12 of the strategy",
        run(tmp_path / "b", (X[:N], Y[:N]), IN_ORDER).fit,
        13,
        beyond=True,
    )


def begun_after(folder, *others):
    world = World(folder)
    world.options = {"after": others}
    return world


def test_a_run_after_another_counts_both_once(tmp_path):
    """Wherever it is killed, from its first row on; two copies of one run count as two."""
    first = World(tmp_path / "first", LEVELS)
    first.start()
    folder = first.directory.path
    for effect in range(1, 60, 2):
        world = begun_after(tmp_path / str(effect), folder)
        ends = not world.start(effect)
        world.start()
        both = world.directory.checked_ledger()
        assert both.steps == STEPS + STEPS
        assert both.epsilon(1e-5).upper == epsilon((LEVELS, 12), (POISSON, 12), delta=1e-5)
        assert EXTENDED in both.unverified()
        if ends:
            break
    assert ends
    # Two copies of one run each count, for they may have gone on; of one that has, it says so.
    copy = shutil.copytree(folder, tmp_path / "copy")
    two = begun_after(tmp_path / "two", folder, copy)
    two.start(steps=4)
    assert two.directory.checked_ledger().steps == 2 * STEPS + 4
    two.start(steps=8)
    assert WENT_ON not in two.directory.checked_ledger().unverified()
    first.extend("more", POISSON)
    first.start(steps=4)
    two.start(steps=10)
    assert WENT_ON in two.directory.checked_ledger().unverified()
    given, two.options = two.options, {}  # to go on it need not be given
    two.start(steps=11)
    two.options = given
    shutil.rmtree(folder)  # it was counted
    two.start()
    assert two.directory.checked_ledger().steps == 3 * STEPS
    relation = acc.Relation.ADD_OR_REMOVE_ONE
    ledger, rows = two.directory.checked_ledger(), [{"step": STEPS, "epsilon": 9.0}]
    parts = reporting.charged_parts(two.directory, ledger, rows, 1e-5, relation)
    assert {part.name.partition(",")[0]: part.releases for part in parts} == {
        "this run": STEPS,
        "run 1 before this one": STEPS,
        "run 2 before this one": STEPS,
    }


def test_runs_whose_blocks_were_drawn_alike_are_not_counted_as_two_draws(tmp_path):
    """They cost 1.96 and not 1.71 (two of these epochs, each released twice)."""
    same = Secret.new()
    first, alone = World(tmp_path / "1", EPOCHS, same), World(tmp_path / "2", EPOCHS, same)
    first.start(steps=3)
    alone.start(steps=3)
    one, other = first.directory.path, alone.directory.path
    words = "after must be runs of other secrets"
    for secret, runs in ((same, (one,)), (Secret.new(), (one, other))):
        world = World(tmp_path / f"{len(runs)} before", EPOCHS, secret)
        world.options = {"after": runs}
        refused(words, world.start)
    second = begun_after(tmp_path / "3", one)
    second.start(steps=4)
    third = World(tmp_path / "4", EPOCHS, same)
    third.options = {"after": second.directory.path}
    refused(words, third.start)


def test_what_cannot_be_counted_before_a_run_is_refused(finished, tmp_path):
    new, by_user = tmp_path / "new", sgd_of(2.0, 1.0, 20, 100, records_per_user=2)
    users = jaxdp.sampling.users((X, Y), np.arange(200) // 2, 2)
    loss = jaxdp.clipping.user_loss(loss_fn)
    for words, options in (
        ("must hold a run that has begun", {"after": tmp_path / "nowhere"}),
        ("whose privacy unit is a user", {"mechanism": by_user, "data": users, "loss": loss}),
        ("canaries must be 0", {"canaries": 3}),
    ):
        given = {"after": finished, "delta": 1e-3, **options}
        refused(words, lambda o=given: run(new, **o).fit(3))
    begun = World(tmp_path / "begun")
    begun.start(steps=4)
    begun.options["after"] = (finished,)
    refused("after must be given when a run begins", begun.start)
    empty = World(tmp_path / "empty")
    empty.start("begun")
    refused("released something", begun_after(tmp_path / "more", empty.directory.path).start)


def test_runs_and_trainers_charge_one_ledger_in_turn(tmp_path):
    """Each says the whole; a line that is cut off is missed, whoever wrote it."""
    for name, key in (("open", None), ("keyed", b"sixteen bytes...")):
        path = tmp_path / f"{name}.jsonl"
        ledger = jaxdp.Ledger(path, key=key)
        one, two = (World(tmp_path / f"{name} {number}") for number in "12")
        one.options = two.options = {"ledger": ledger}
        one.start(steps=4)
        two.start(8)  # killed on the way
        one.start()
        two.start()
        one.check()
        assert ledger.steps == one.directory.checked_ledger().steps == 2 * STEPS
        assert (one.charged(), two.charged()) == ([(0, 0, STEPS)], [(0, 0, STEPS)])
        assert not one.directory.path.joinpath("ledger.jsonl").exists()
        assert two.directory.checked_ledger().epsilon(1e-5).upper == ledger.epsilon(1e-5).upper
        third = World(tmp_path / f"{name} 3")
        third.options = {"ledger": jaxdp.Ledger(path, key=key)}
        refused("in use by another writer", third.start)
        ledger.close()
        third.options["ledger"] = jaxdp.Ledger(path, key=key)
        third.start(steps=4)
        third.options["ledger"].close()
        assert ("no key" in reporting._ledger_in_words(third.directory)) == (key is None)
        # What a run has shown is behind its anchor, and its own lines are too.
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))
        refused("must hold the 4 steps that were shown", third.directory.checked_ledger)
        assert one.directory.checked_ledger().steps == 2 * STEPS + 4
        path.write_text("".join(lines[:8]))
        refused("must hold the 12 steps that were shown", one.directory.checked_ledger)
    # A trainer in between.
    path = tmp_path / "both.jsonl"
    run(tmp_path / "a", ledger=path).fit(3)
    trainer = jaxdp.Trainer(loss_fn, OTHER, optax.sgd(0.1), (X, Y), ledger=path)
    state = trainer.init({"w": jnp.zeros((20, 3))})
    for batch in trainer.batches(2):
        state, _ = trainer.step(state, batch)
    refused("in use by another writer", run(tmp_path / "a", ledger=path).fit, 6)
    trainer.close()
    last = run(tmp_path / "a", ledger=path, report=True)
    with undrawn():
        last.fit(6)
    assert last.epsilon().upper == epsilon((MECHANISM, 6), (OTHER, 2))
    page = (tmp_path / "a/report.md").read_text()
    assert "Others on this ledger" in page
    assert "both.jsonl, which other runs and trainers may charge" in page


def test_a_ledger_of_several_runs_is_refused_where_it_cannot_be_one(finished, tmp_path):
    refused("ledger must be a file for a Run", run, tmp_path / "r", ledger=jaxdp.Ledger())
    path = tmp_path / "shared.jsonl"
    refused("ledger must stay", run(finished, ledger=path, average=0.5).fit, 14, beyond=True)
    refused(
        "must be continued with the key", run(tmp_path / "n", ledger=finished / "ledger.jsonl").fit
    )
    seed = Secret.from_seed(1)
    worlds = [World(tmp_path / f"seed {number}", secret=seed) for number in "12"]
    for world in worlds:
        world.options = {"ledger": path}
    worlds[0].start()
    refused("ledger must hold no step of a run that begins", worlds[1].start)
    world = World(tmp_path / "third")
    world.options = {"ledger": path, "after": (worlds[0].directory.path,)}
    refused("after must be a run on another ledger than this one's", world.start)


def test_an_issuer_of_a_run_that_ended_hands_out_nothing(tmp_path):
    """Its steps are done again by the next start on the same ledger, within one charge."""
    ledger, world = jaxdp.Ledger(tmp_path / "shared.jsonl"), World(tmp_path / "r")
    world.options, issuers = {"ledger": ledger}, []
    made = Issuer.__init__

    def kept(self, *args, **options):
        made(self, *args, **options)
        issuers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Issuer, "__init__", kept)
        world.start("checkpoint 4")
        assert ledger.steps == 4  # what is reserved counts
        refused("must be handed out by a start of the run that goes on", issuers[0].take)
        world.start()
    assert ledger.steps == STEPS
